// Sampling of one row; the vectorised passes over whole rows are in sampler_passes.cpp.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "elementary.h"
#include "sampler_chain.h"
#include "sampler_cut.h"
#include "sampler_passes.h"

namespace quire {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

bool is_within(const int64_t* tokens, size_t count, int64_t vocabulary) {
  return std::all_of(tokens, tokens + count,
                     [=](int64_t token) { return 0 <= token && token < vocabulary; });
}

bool is_within(Tokens tokens, int64_t vocabulary) {
  return is_within(tokens.data, static_cast<size_t>(tokens.size), vocabulary);
}

// ---- mask, bans, bias

// Whether the scores equal the logits.
bool scores_are_logits(const SampleRequest& request) {
  const SampleSettings& settings = *request.settings;
  return request.allowed == nullptr && settings.bias_tokens.empty() && !request.has_history &&
         !settings.chain &&
         (request.position >= settings.min_tokens || settings.end_tokens.empty());
}

// Whether every token id that adjust() uses is in the vocabulary.
bool has_known_tokens(int64_t vocabulary, const SampleRequest& request) {
  const SampleSettings& settings = *request.settings;
  if (!is_within(settings.bias_tokens.data(), settings.bias_tokens.size(), vocabulary)) {
    return false;
  }
  if (request.position < settings.min_tokens &&
      !is_within(settings.end_tokens.data(), settings.end_tokens.size(), vocabulary)) {
    return false;
  }
  if (!request.has_history) return true;
  return is_within(request.prompt, vocabulary) && is_within(request.completion, vocabulary);
}

// Bans and bias, after the mask.
void adjust(float* scores, const SampleRequest& request) {
  const SampleSettings& settings = *request.settings;
  if (request.position < settings.min_tokens) {
    for (int64_t token : settings.end_tokens) scores[token] = minus_infinity;
  }
  for (size_t i = 0; i < settings.bias_tokens.size(); i++) {
    scores[settings.bias_tokens[i]] += settings.biases[i];
  }
}

// ---- choosing a token

int64_t argmax(const ScannedRow& scores) {
  const float* last_block = scores.block_best + num_pass_blocks(scores.size);
  const int64_t block = std::find(scores.block_best, last_block, scores.best) - scores.block_best;
  const float* end = scores.values + scores.size;
  return std::find(scores.values + block * pass_block, end, scores.best) - scores.values;
}

int64_t draw(const ScannedRow& scores, const SampleRequest& request, SampleScratch& scratch) {
  const SampleSettings& settings = *request.settings;
  const Cut cut = weigh_and_cut(scores, settings, scratch);
  const uint64_t bits = draw_bits(settings.seed, settings.index, request.position);
  return token_at(high_product(bits, cut.mass), cut, num_pass_blocks(scores.size), scratch);
}

SampleResult failed(SampleFault fault) {
  SampleResult result;
  result.fault = fault;
  return result;
}

SampleResult choose(const ScannedRow& scores, const SampleRequest& request,
                    SampleScratch& scratch) {
  SampleResult result;
  result.token =
      request.settings->temperature == 0.0 ? argmax(scores) : draw(scores, request, scratch);
  return result;
}

SampleResult choose_adjusted(const ScannedRow& logits, const SampleRequest& request,
                             SampleScratch& scratch) {
  float* scores = scratch.scores.data();
  if (request.allowed != nullptr) {
    copy_allowed(logits.values, logits.size, request.allowed, request.num_allowed_bytes, scores);
  } else {
    std::copy(logits.values, logits.values + logits.size, scores);
  }
  adjust(scores, request);
  const SampleSettings& settings = *request.settings;
  if (settings.chain) return choose_by_chain(scores, logits.size, request, scratch);
  if (request.has_history) {
    apply_penalties(scores, request, scratch);
    if (settings.dry) apply_dry(scores, request, scratch);
  }
  const RowScan found = scan_row(scores, logits.size, scratch.block_best.data());
  if (!found.has_nan && found.best == minus_infinity) return failed(SampleFault::all_forbidden);
  if (found.has_nan || !std::isfinite(found.best)) {
    return failed(SampleFault::not_finite_after_penalties);
  }
  return choose({scores, logits.size, scratch.block_best.data(), found.best}, request, scratch);
}

// ---- log-probabilities

// Inserts into a list in descending order, after equal ones; drops the last beyond `length`.
void insert(std::vector<TopLogprob>& top, size_t length, TopLogprob one) {
  const auto comes_first = [](const TopLogprob& other, double own) { return other.logprob >= own; };
  top.insert(std::lower_bound(top.begin(), top.end(), one.logprob, comes_first), one);
  if (top.size() > length) top.pop_back();
}

// Log-probabilities are monotonic in the logits, so a block's greatest logit bounds the block.
class Scorer {
 public:
  explicit Scorer(const ScannedRow& logits)
      : logits_(logits),
        log_sum_(log_of(sum_of_exponentials(logits.values, logits.size, logits.best))) {}

  double logprob(float logit) const {
    return (static_cast<double>(logit) - static_cast<double>(logits_.best)) - log_sum_;
  }

  int64_t rank(int64_t token) const {
    const double own = logprob(logits_.values[token]);
    int64_t num_above = 0;
    each_block_above(own, [&](const float* values, int count) {
      num_above += count_above(values, count, logits_.best, log_sum_, own);
      return own;
    });
    return 1 + num_above;
  }

  std::vector<TopLogprob> top_logprobs(size_t length) const {
    std::vector<TopLogprob> top;
    top.reserve(length + 1);
    if (length == 0) return top;
    const auto threshold = [&] { return top.size() < length ? no_threshold : top.back().logprob; };
    each_block_above(no_threshold, [&](const float* values, int count) {
      for (int i = 0; i < count; i++) {
        const double own = logprob(values[i]);
        if (top.size() < length || own > top.back().logprob) {
          insert(top, length, {values - logits_.values + i, own});
        }
      }
      return threshold();
    });
    return top;
  }

 private:
  static constexpr double no_threshold = -std::numeric_limits<double>::infinity();

  // Calls visit(values, count) for each block whose greatest log-probability is above the
  // threshold, or for every one without a threshold; visit returns the threshold for the next.
  template <class Visit>
  void each_block_above(double threshold, Visit visit) const {
    for (int64_t first = 0; first < logits_.size; first += pass_block) {
      if (threshold != no_threshold &&
          !(logprob(logits_.block_best[first / pass_block]) > threshold))
        continue;
      const int count = static_cast<int>(std::min<int64_t>(pass_block, logits_.size - first));
      threshold = visit(logits_.values + first, count);
    }
  }

  const ScannedRow& logits_;
  const double log_sum_;
};

TokenLogprob logprob_scanned(const ScannedRow& logits, int64_t token, int num_top) {
  const Scorer scorer(logits);
  return {token, scorer.logprob(logits.values[token]), scorer.rank(token),
          scorer.top_logprobs(static_cast<size_t>(std::clamp<int64_t>(num_top, 0, logits.size)))};
}

}  // namespace

std::string fault_message(SampleFault fault, int64_t vocabulary) {
  switch (fault) {
    case SampleFault::none: return "";
    case SampleFault::not_finite: return "the logits are not finite";
    case SampleFault::not_finite_after_penalties: return "the penalties make the logits infinite";
    case SampleFault::all_forbidden: return "the mask allows no token";
    case SampleFault::token_out_of_range:
      return "a token id is beyond the " + std::to_string(vocabulary) + " logits";
  }
  return "unknown fault";
}

void SampleScratch::fit(int64_t vocabulary) {
  const int64_t num_blocks = num_pass_blocks(vocabulary);
  if (static_cast<int64_t>(counts.size()) >= vocabulary) return;
  scores.resize(vocabulary);
  weights.resize(num_blocks * pass_block);
  block_best.resize(num_blocks);
  logit_best.resize(num_blocks);
  // Estimates are computed from block_best, a pass block at a time.
  block_estimate.resize(num_pass_blocks(num_blocks) * pass_block);
  block_mass.resize(num_blocks);
  block_heaviest.resize(num_blocks);
  candidates.resize(weights.size() + 1);  // gather() writes one past its result
  counts.resize(vocabulary);              // last: its size says whether the others fit
}

uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#else
  const uint64_t a_low = a & 0xffffffff, a_high = a >> 32;
  const uint64_t b_low = b & 0xffffffff, b_high = b >> 32;
  const uint64_t middle = a_high * b_low + ((a_low * b_low) >> 32);
  const uint64_t other = a_low * b_high + (middle & 0xffffffff);
  return a_high * b_high + (middle >> 32) + (other >> 32);
#endif
}

uint64_t draw_bits(uint64_t seed, uint32_t index, uint64_t position, uint32_t purpose) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                         index, purpose};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(product0);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return uint64_t{counter[1]} << 32 | counter[0];
}

SampleResult sample(const float* logits, int64_t vocabulary, const SampleRequest& request,
                    SampleScratch& scratch) {
  scratch.fit(vocabulary);
  const RowScan found = scan_row(logits, vocabulary, scratch.logit_best.data());
  if (found.has_nan || !std::isfinite(found.best)) return failed(SampleFault::not_finite);
  if (!has_known_tokens(vocabulary, request)) return failed(SampleFault::token_out_of_range);
  const ScannedRow row = {logits, vocabulary, scratch.logit_best.data(), found.best};
  SampleResult result = scores_are_logits(request) ? choose(row, request, scratch)
                                                   : choose_adjusted(row, request, scratch);
  const int num_logprobs = request.settings->num_logprobs;
  if (result.fault == SampleFault::none && num_logprobs >= 0) {
    result.logprob = logprob_scanned(row, result.token, num_logprobs);
  }
  return result;
}

TokenLogprob token_logprob(const float* logits, int64_t vocabulary, int64_t token, int num_top,
                           SampleScratch& scratch) {
  scratch.fit(vocabulary);
  const RowScan found = scan_row(logits, vocabulary, scratch.logit_best.data());
  return logprob_scanned({logits, vocabulary, scratch.logit_best.data(), found.best}, token,
                         num_top);
}

}  // namespace quire
