// A row's way through the samplers: what one leaves out scores minus infinity.
#include "sampler_chain.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementary.h"
#include "sampler_cut.h"
#include "sampler_passes.h"

namespace quire {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
constexpr uint32_t xtc_draw = 1;  // the purpose of XTC's own draw

// ---- history

// Calls visit(token) for the last `count` tokens of prompt and completion, the last one first; -1:
// for all.
template <class Visit>
void each_of_last(const SampleRequest& request, int64_t count, Visit visit) {
  int64_t left = count < 0 ? std::numeric_limits<int64_t>::max() : count;
  for (const Tokens& tokens : {request.completion, request.prompt}) {
    for (int64_t i = tokens.size; i > 0 && left > 0; i--, left--) visit(tokens.data[i - 1]);
  }
}

void count_token(int64_t token, SampleScratch& scratch) {
  if (scratch.counts[token]++ == 0) scratch.counted.push_back(token);
}

// Calls apply(token, count) for each counted token, and clears the counts.
template <class Apply>
void take_counts(SampleScratch& scratch, Apply apply) {
  for (int64_t token : scratch.counted) {
    apply(token, scratch.counts[token]);
    scratch.counts[token] = 0;
  }
  scratch.counted.clear();
}

// ---- DRY

// By squaring, the lowest bit of the exponent first.
double integer_power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

bool is_breaker(const DrySettings& dry, int64_t token) {
  return std::binary_search(dry.breaker_tokens.begin(), dry.breaker_tokens.end(), token);
}

// How many tokens stand after the last sequence breaker. `recent`: the last token first.
int64_t repeat_limit(const DrySettings& dry, const std::vector<int64_t>& recent) {
  const int64_t count = static_cast<int64_t>(recent.size());
  const auto& sequences = dry.breaker_sequences;
  for (int64_t after = 0; after < count; after++) {
    int64_t longest = is_breaker(dry, recent[after]) ? 0 : -1;
    const std::vector<int64_t> head = {recent[after]};
    auto own = std::lower_bound(sequences.begin(), sequences.end(), head);
    for (; own != sequences.end() && own->front() == head[0]; ++own) {
      const int64_t length = static_cast<int64_t>(own->size()) - 1;  // of the tail
      if (length > after) continue;
      bool matches = true;
      for (int64_t i = 1; i <= length; i++) matches &= (*own)[i] == recent[after - i];
      if (matches) longest = std::max(longest, length);
    }
    if (longest >= 0) return after - longest;
  }
  return count;
}

// At each place, how many tokens from there on equal the first ones: the Z-algorithm.
void find_repeat_lengths(const std::vector<int64_t>& tokens, std::vector<int64_t>& lengths) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  lengths.assign(tokens.size(), 0);
  int64_t left = 0, right = 0;  // tokens from left up to right equal the first ones
  for (int64_t place = 1; place < count; place++) {
    int64_t length = place < right ? std::min(lengths[place - left], right - place) : 0;
    if (place + length >= right) {
      while (place + length < count && tokens[length] == tokens[place + length]) length++;
      left = place;
      right = place + length;
    }
    lengths[place] = length;
  }
}

// ---- the chain

class Chain {
 public:
  Chain(float* scores, int64_t size, const SampleRequest& request, SampleScratch& scratch)
      : scores_(scores),
        size_(size),
        request_(request),
        settings_(*request.settings),
        chain_(*request.settings->chain),
        scratch_(scratch) {}

  SampleFault run() {
    bool is_checked = false;
    SampleFault fault = SampleFault::none;
    for (char letter : chain_.order) {
      const bool adjusts = letter == 'e' || letter == 'd';
      if (!adjusts && !is_checked) fault = check();
      if (fault == SampleFault::none) fault = apply(letter);
      if (fault != SampleFault::none) return fault;
      is_checked = !adjusts;
    }
    return is_checked ? SampleFault::none : check();
  }

  int64_t draw() {
    weigh();
    const uint64_t bits = draw_bits(settings_.seed, settings_.index, request_.position);
    uint64_t offset = high_product(bits, total_weight());
    for (int64_t token = 0; token < size_; token++) {
      const uint64_t weight = weight_of(token);
      if (offset < weight) return token;
      offset -= weight;
    }
    return size_ - 1;  // not reached: the offset is below the total
  }

 private:
  SampleFault apply(char letter) {
    switch (letter) {
      case 'e': fix_temperature(), apply_penalties(scores_, request_, scratch_); break;
      case 'd': fix_temperature(), apply_dry(scores_, request_, scratch_); break;
      case 't': return apply_temperature();
      case 's': cut_by_sigma(); break;
      case 'm': cut_by_min_p(); break;
      case 'k': cut_by_count(); break;
      case 'y': cut_by_typicality(); break;
      case 'p': cut_by_mass(); break;
      case 'x': cut_by_chance(); break;
      default: break;
    }
    return SampleFault::none;
  }

  // Finds the best score, which must be finite.
  SampleFault check() {
    const RowScan found = scan_row(scores_, size_, scratch_.block_best.data());
    best_ = found.best;
    is_weighed_ = false;
    if (!found.has_nan && found.best == minus_infinity) return SampleFault::all_forbidden;
    if (found.has_nan || !std::isfinite(found.best)) return SampleFault::not_finite_after_penalties;
    return SampleFault::none;
  }

  // ---- likelihoods and weights

  bool is_left(int64_t token) const { return scores_[token] != minus_infinity; }
  void drop(int64_t token) {
    scores_[token] = minus_infinity;
    scratch_.weights[token] = 0.0;
  }
  double exponent(int64_t token) const {
    return (static_cast<double>(scores_[token]) - static_cast<double>(best_)) / temperature_;
  }

  // Writes the likelihoods to the scratch's weights, unless they are there.
  void weigh() {
    if (is_weighed_) return;
    find_likelihoods(scores_, size_, best_, temperature_, scratch_.weights.data());
    is_weighed_ = true;
  }
  uint64_t weight_of(int64_t token) const {
    return static_cast<uint64_t>(static_cast<int64_t>(scratch_.weights[token] * 0x1p32));
  }
  uint64_t total_weight() const {
    uint64_t total = 0;
    for (int64_t token = 0; token < size_; token++) total += weight_of(token);
    return total;
  }

  int64_t count_left() const {
    int64_t count = 0;
    for (int64_t token = 0; token < size_; token++) count += is_left(token);
    return count;
  }

  struct SoftmaxMean {
    double total;  // of the likelihoods
    double mean;   // of the exponents, weighted by them
  };
  SoftmaxMean softmax_mean() {
    weigh();
    double* terms = scratch_.candidates.data();
    std::copy_n(scratch_.weights.begin(), size_, terms);
    const double total = halving_sum(terms, size_);
    for (int64_t token = 0; token < size_; token++) {
      const double likelihood = scratch_.weights[token];
      terms[token] = likelihood > 0.0 ? likelihood * exponent(token) : 0.0;
    }
    return {total, halving_sum(terms, size_) / total};
  }

  // ---- temperature

  // Divides the scores themselves, for what comes after a temperature and changes them.
  void fix_temperature() {
    if (temperature_ == 1.0) return;
    for (int64_t token = 0; token < size_; token++) {
      scores_[token] = static_cast<float>(static_cast<double>(scores_[token]) / temperature_);
    }
    temperature_ = 1.0;
  }

  SampleFault apply_temperature() {
    fix_temperature();
    const SampleFault fault = check();
    if (fault != SampleFault::none) return fault;
    double temperature = settings_.temperature;
    if (chain_.dynatemp_range > 0.0) {
      const int64_t count = count_left();
      if (count < 2) return fault;
      temperature = dynamic_temperature(count);
    }
    is_weighed_ = false;
    if (temperature > 0.0) {
      temperature_ = temperature;
    } else {
      const int64_t first = std::find(scores_, scores_ + size_, best_) - scores_;
      for (int64_t token = 0; token < size_; token++)
        if (token != first) scores_[token] = minus_infinity;
    }
    return fault;
  }

  double dynamic_temperature(int64_t count) {
    const double low = std::max(0.0, settings_.temperature - chain_.dynatemp_range);
    const double high = settings_.temperature + chain_.dynatemp_range;
    const SoftmaxMean found = softmax_mean();
    const double entropy = log_of(found.total) - found.mean;
    const double share = std::min(1.0, std::max(0.0, entropy / log_of(static_cast<double>(count))));
    return low + (high - low) * power_of(share, chain_.dynatemp_exponent);
  }

  // ---- cuts

  void cut_by_sigma() {
    double* terms = scratch_.candidates.data();
    const double best = best_;
    const double count = static_cast<double>(count_left());
    for (int64_t token = 0; token < size_; token++)
      terms[token] = is_left(token) ? best - static_cast<double>(scores_[token]) : 0.0;
    const double mean = halving_sum(terms, size_) / count;
    for (int64_t token = 0; token < size_; token++) {
      const double deviation =
          is_left(token) ? (best - static_cast<double>(scores_[token])) - mean : 0.0;
      terms[token] = deviation * deviation;
    }
    const double limit = chain_.top_n_sigma * std::sqrt(halving_sum(terms, size_) / count);
    for (int64_t token = 0; token < size_; token++)
      if (!(best - static_cast<double>(scores_[token]) <= limit)) drop(token);
  }

  void cut_by_min_p() {
    weigh();
    for (int64_t token = 0; token < size_; token++)
      if (scratch_.weights[token] < settings_.min_p) drop(token);
  }

  // Gathers the weights above 0; returns how many there are.
  int64_t gather_weights() {
    double* next = scratch_.candidates.data();
    for (int64_t token = 0; token < size_; token++) {
      *next = static_cast<double>(weight_of(token));
      next += *next > 0.0;
    }
    return next - scratch_.candidates.data();
  }

  void keep_cut(const Cut& cut) {
    int64_t num_ties = cut.num_ties;
    for (int64_t token = 0; token < size_; token++) {
      const double weight = static_cast<double>(weight_of(token));
      if (weight < cut.weight || (weight == cut.weight && num_ties-- <= 0)) drop(token);
    }
  }

  void cut_by_count() {
    const int64_t top_k = settings_.top_k;
    if (count_left() <= top_k) return;
    weigh();
    const int64_t count = gather_weights();
    double* const candidates = scratch_.candidates.data();
    if (count >= top_k) {
      keep_cut(select(candidates, candidates + count, {top_k, endless_mass}));
    } else {
      keep_best_weightless(top_k - count);
    }
  }

  // Of the tokens of no weight, which a later temperature may give one, keeps so many by score.
  void keep_best_weightless(int64_t count) {
    std::vector<double>& found = scratch_.candidates;
    int64_t num_found = 0;
    for (int64_t token = 0; token < size_; token++)
      if (is_left(token) && weight_of(token) == 0) found[num_found++] = scores_[token];
    std::nth_element(found.begin(), found.begin() + (count - 1), found.begin() + num_found,
                     std::greater<double>());
    const double least = found[count - 1];
    int64_t num_ties = count - std::count_if(found.begin(), found.begin() + num_found,
                                             [=](double score) { return score > least; });
    for (int64_t token = 0; token < size_; token++) {
      if (!is_left(token) || weight_of(token) != 0) continue;
      if (scores_[token] < least || (scores_[token] == least && num_ties-- <= 0)) drop(token);
    }
  }

  void cut_by_mass() {
    weigh();
    const double enough = settings_.top_p * static_cast<double>(total_weight());
    const int64_t count = gather_weights();
    double* const candidates = scratch_.candidates.data();
    keep_cut(select(candidates, candidates + count, {count + 1, enough}));
  }

  // Sorts no more of the tokens than it must: most weight is near the mean.
  void cut_by_typicality() {
    const double mean = softmax_mean().mean;
    auto& ranked = scratch_.ranked;
    ranked.clear();
    for (int64_t token = 0; token < size_; token++)
      if (is_left(token)) ranked.emplace_back(std::fabs(exponent(token) - mean), token);
    const double enough = chain_.typical_p * static_cast<double>(total_weight());
    uint64_t before = 0;
    const size_t count = ranked.size();
    size_t next = 0;
    bool has_enough = false;
    for (size_t chunk = 256; next < count && !has_enough; chunk *= 8) {
      const size_t end = std::min(count, next + chunk);
      std::nth_element(ranked.begin() + next, ranked.begin() + (end - 1), ranked.end());
      std::sort(ranked.begin() + next, ranked.begin() + end);
      for (; next < end; next++) {
        has_enough = static_cast<double>(before) > enough;
        if (has_enough) break;
        before += weight_of(ranked[next].second);
      }
    }
    for (; next < count; next++) drop(ranked[next].second);
    check();  // the best may be gone
  }

  // Whether a token is less likely than another: by weight, without one by score.
  bool is_below(int64_t token, int64_t other) const {
    const uint64_t own = weight_of(token), others = weight_of(other);
    return own != others ? own < others : own == 0 && scores_[token] < scores_[other];
  }

  void cut_by_chance() {
    const uint64_t bits = draw_bits(settings_.seed, settings_.index, request_.position, xtc_draw);
    if (!(static_cast<double>(bits >> 11) * 0x1p-53 < chain_.xtc_probability)) return;
    weigh();
    const double limit = chain_.xtc_threshold * static_cast<double>(total_weight());
    int64_t least = -1;
    const auto reaches = [&](int64_t token) {
      return is_left(token) && static_cast<double>(weight_of(token)) >= limit;
    };
    for (int64_t token = 0; token < size_; token++)
      if (reaches(token) && (least < 0 || !is_below(least, token))) least = token;
    for (int64_t token = 0; token < size_; token++)
      if (token != least && reaches(token)) drop(token);
    check();  // the best is gone, unless it was alone
  }

  float* const scores_;
  const int64_t size_;
  const SampleRequest& request_;
  const SampleSettings& settings_;
  const ChainSettings& chain_;
  SampleScratch& scratch_;
  float best_ = 0.0f;
  double temperature_ = 1.0;  // that the next softmax divides by
  bool is_weighed_ = false;
};

}  // namespace

void apply_penalties(float* scores, const SampleRequest& request, SampleScratch& scratch) {
  const SampleSettings& settings = *request.settings;
  const float penalty = settings.repetition_penalty;
  const int64_t num_last = settings.repeat_last_n.value_or(-1);
  const auto count = [&](int64_t token) { count_token(token, scratch); };
  if (penalty != 1.0f) {
    each_of_last(request, num_last, count);
    take_counts(scratch, [&](int64_t token, uint32_t) {
      const float value = scores[token];
      scores[token] = value > 0.0f ? value / penalty : value * penalty;
    });
  }
  each_of_last(request, settings.repeat_last_n ? num_last : request.completion.size, count);
  take_counts(scratch, [&](int64_t token, uint32_t number) {
    scores[token] -= settings.frequency_penalty * static_cast<float>(number);
    scores[token] -= settings.presence_penalty;
  });
}

void apply_dry(float* scores, const SampleRequest& request, SampleScratch& scratch) {
  const DrySettings& dry = *request.settings->dry;
  std::vector<int64_t>& recent = scratch.recent;
  recent.clear();
  each_of_last(request, dry.last_n, [&](int64_t token) { recent.push_back(token); });
  const int64_t allowed = dry.allowed_length;
  if (static_cast<int64_t>(recent.size()) <= allowed) return;
  const int64_t limit = repeat_limit(dry, recent);
  if (limit < allowed) return;
  find_repeat_lengths(recent, scratch.repeat_lengths);
  for (size_t place = 1; place < recent.size(); place++) {
    const int64_t length = std::min(scratch.repeat_lengths[place], limit);
    const int64_t follower = recent[place - 1];
    if (length < allowed || is_breaker(dry, follower)) continue;
    if (scratch.counts[follower] == 0) scratch.counted.push_back(follower);
    scratch.counts[follower] =
        std::max(scratch.counts[follower], static_cast<uint32_t>(length) + 1);
  }
  take_counts(scratch, [&](int64_t token, uint32_t length_and_one) {
    const int64_t beyond = static_cast<int64_t>(length_and_one) - 1 - allowed;
    const double penalty = dry.multiplier * integer_power(dry.base, beyond);
    constexpr double greatest = std::numeric_limits<float>::max();
    scores[token] -= static_cast<float>(std::min(penalty, greatest));
  });
}

SampleResult choose_by_chain(float* scores, int64_t size, const SampleRequest& request,
                             SampleScratch& scratch) {
  Chain chain(scores, size, request, scratch);
  SampleResult result;
  result.fault = chain.run();
  if (result.fault == SampleFault::none) result.token = chain.draw();
  return result;
}

}  // namespace quire
