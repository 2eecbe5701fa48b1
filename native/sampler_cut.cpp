// How the weights are cut: by selection among the few that matter, never by sorting the row.
#include "sampler_cut.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "sampler_passes.h"

namespace quire {
namespace {

// Below this exponent a weight is 0: exp(-22.25) * 2**32 is 0.93.
constexpr double weightless_exponent = -22.25;
constexpr double lightest = 1.0;  // of the weights that are not 0

uint64_t whole(double weight) { return static_cast<uint64_t>(weight); }

uint64_t mass_of(const double* begin, const double* end) {
  return std::accumulate(begin, end, uint64_t{0},
                         [](uint64_t sum, double weight) { return sum + whole(weight); });
}

// ---- weights, where they can matter

// A weight that at least `top_k` tokens reach: the top_k-th among the blocks' best tokens.
double reached_by(int64_t top_k, const SurveyedRow& scores, const Softening& how,
                  SampleScratch& scratch) {
  const int64_t num_blocks = num_pass_blocks(scores.size);
  if (top_k > num_blocks) return lightest;
  std::vector<double>& estimates = scratch.block_estimate;
  for (int64_t first = 0; first < num_blocks; first += pass_block) {
    const int count = static_cast<int>(std::min<int64_t>(pass_block, num_blocks - first));
    weigh_block(scores.block_best + first, count, how, estimates.data() + first);
  }
  std::vector<double>& falling = scratch.candidates;
  std::copy_n(estimates.begin(), num_blocks, falling.begin());
  std::nth_element(falling.begin(), falling.begin() + (top_k - 1), falling.begin() + num_blocks,
                   std::greater<double>());
  return std::max(lightest, falling[top_k - 1]);
}

// Whether a block may hold a weight of `floor` or more. A token that scores less than the block's
// best may weigh one more than it, for exp is not known to be monotonous to the last bit.
bool may_reach(double floor, double estimate) { return estimate + 1.0 >= floor; }

// Weighs the blocks that may reach `floor`; returns the sum of their weights.
uint64_t weigh_blocks(const SurveyedRow& scores, const Softening& how, double floor,
                      SampleScratch& scratch) {
  uint64_t mass = 0;
  const int64_t num_blocks = num_pass_blocks(scores.size);
  for (int64_t block = 0; block < num_blocks; block++) {
    BlockWeight weight = {0.0, 0.0};
    const double exponent = (scores.block_best[block] - how.best) / how.temperature;
    if (exponent > weightless_exponent &&
        (floor == lightest || may_reach(floor, scratch.block_estimate[block]))) {
      const int64_t first = block * pass_block;
      const int count = static_cast<int>(std::min<int64_t>(pass_block, scores.size - first));
      weigh_block(scores.values + first, count, how, scratch.weights.data() + first);
      weight = add_block(scratch.weights.data() + first);
    }
    scratch.block_mass[block] = weight.mass;
    scratch.block_heaviest[block] = weight.heaviest;
    mass += whole(weight.mass);
  }
  return mass;
}

// ---- cutting

// What is left is the shortest run of the heaviest weights that meets this: so many of them, or a
// sum of at least so much.
struct Quota {
  int64_t count;
  double mass;
  bool is_met(int64_t other_count, uint64_t other_mass) const {
    return other_count >= count || static_cast<double>(other_mass) >= mass;
  }
};

// A weight between two others, nearer to the middle of their logarithms than of themselves.
double between(double low, double high) {
  uint64_t low_bits, high_bits;
  std::memcpy(&low_bits, &low, 8);
  std::memcpy(&high_bits, &high, 8);
  const uint64_t bits = low_bits + (high_bits - low_bits) / 2;
  double result;
  std::memcpy(&result, &bits, 8);
  return result;
}

// The cut that the quota asks for, which all the candidates together meet and none of them does
// not. Halves the range of weights until one weight is left; reorders the candidates.
Cut select(double* begin, double* end, const Quota& quota) {
  int64_t count = 0;  // of what is heavier than the range
  uint64_t mass = 0;
  for (;;) {
    const auto range = std::minmax_element(begin, end);
    const double low = *range.first, high = *range.second;
    if (low == high) break;
    const double pivot = between(low, high);
    double* middle = std::partition(begin, end, [=](double weight) { return weight > pivot; });
    const int64_t with_count = count + (middle - begin);
    const uint64_t with_mass = mass + mass_of(begin, middle);
    if (quota.is_met(with_count, with_mass)) {
      end = middle;
    } else {
      begin = middle;
      count = with_count;
      mass = with_mass;
    }
  }
  const uint64_t weight = whole(*begin);
  int64_t too_few = 0, enough = end - begin;  // of equals
  while (enough - too_few > 1) {
    const int64_t half = too_few + (enough - too_few) / 2;
    (quota.is_met(count + half, mass + half * weight) ? enough : too_few) = half;
  }
  return {*begin, enough, mass + enough * weight};
}

// Gathers the weights of at least `floor`; returns how many there are.
int64_t gather(double floor, int64_t num_blocks, SampleScratch& scratch) {
  double* next = scratch.candidates.data();
  for (int64_t block = 0; block < num_blocks; block++) {
    if (scratch.block_heaviest[block] < floor) continue;
    const double* weights = scratch.weights.data() + block * pass_block;
    for (int i = 0; i < pass_block; i++) {
      *next = weights[i];
      next += weights[i] >= floor;
    }
  }
  return next - scratch.candidates.data();
}

}  // namespace

Cut weigh_and_cut(const SurveyedRow& scores, const SampleSettings& settings,
                  SampleScratch& scratch) {
  const Softening how = {scores.best, settings.temperature, settings.min_p};
  const int64_t num_blocks = num_pass_blocks(scores.size);
  const bool has_top_k = settings.top_k > 0, has_top_p = settings.top_p < 1.0;
  double floor = has_top_k ? reached_by(settings.top_k, scores, how, scratch) : lightest;
  Cut cut;
  cut.mass = weigh_blocks(scores, how, floor, scratch);
  if (!has_top_k && !has_top_p) return cut;
  if (!has_top_k) {
    // All weights below this together are less than what top-p leaves out.
    const double left_out = (1.0 - settings.top_p) * static_cast<double>(cut.mass);
    floor = std::max(lightest, 0.99 * left_out / static_cast<double>(scores.size));
  }
  const int64_t count = gather(floor, num_blocks, scratch);
  double* const begin = scratch.candidates.data();
  constexpr double endless_mass = std::numeric_limits<double>::infinity();
  if (has_top_k && count >= settings.top_k) {
    cut = select(begin, begin + count, {settings.top_k, endless_mass});
  }
  if (has_top_p) {
    const double enough = settings.top_p * static_cast<double>(cut.mass);
    cut = select(begin, begin + count, {count + 1, enough});
  }
  return cut;
}

int64_t token_at(uint64_t place, const Cut& cut, int64_t num_blocks, const SampleScratch& scratch) {
  int64_t num_ties = cut.num_ties;
  for (int64_t block = 0; block < num_blocks; block++) {
    const uint64_t mass = whole(scratch.block_mass[block]);
    if (cut.weight == 0.0 && place >= mass) {
      place -= mass;
      continue;
    }
    if (scratch.block_heaviest[block] < cut.weight) continue;
    const int64_t first = block * pass_block;
    for (int64_t token = first; token < first + pass_block; token++) {
      const double weight = scratch.weights[token];
      if (weight < cut.weight || (weight == cut.weight && num_ties-- <= 0)) continue;
      if (place < whole(weight)) return token;
      place -= whole(weight);
    }
  }
  throw std::logic_error("a place beyond the weights was drawn");
}

}  // namespace quire
