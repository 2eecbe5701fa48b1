// top-k and top-p by bucket selection among candidate weights; the row is never sorted.
#include "sampler_cut.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include "sampler_passes.h"

namespace quire {
namespace {

// Below this exponent a weight is 0: exp(-22.25) * 2**32 is 0.93.
constexpr double weightless_exponent = -22.25;
constexpr double lightest = 1.0;  // of the weights that are not 0

uint64_t whole(double weight) { return static_cast<uint64_t>(weight); }

// ---- weights of the blocks that can be kept

// A weight that at least `top_k` tokens reach: the top_k-th of the blocks' greatest weights.
double reached_by(int64_t top_k, const ScannedRow& scores, const SoftmaxParams& params,
                  SampleScratch& scratch) {
  const int64_t num_blocks = num_pass_blocks(scores.size);
  if (top_k > num_blocks) return lightest;
  std::vector<double>& estimates = scratch.block_estimate;
  for (int64_t first = 0; first < num_blocks; first += pass_block) {
    const int count = static_cast<int>(std::min<int64_t>(pass_block, num_blocks - first));
    weigh_block(scores.block_best + first, count, params, estimates.data() + first);
  }
  std::vector<double>& falling = scratch.candidates;
  std::copy_n(estimates.begin(), num_blocks, falling.begin());
  std::nth_element(falling.begin(), falling.begin() + (top_k - 1), falling.begin() + num_blocks,
                   std::greater<double>());
  return std::max(lightest, falling[top_k - 1]);
}

// Whether a block may hold a weight of `floor` or more. A token that scores less than the block's
// best may weigh one more than it, as exp is not proven monotonic to the last bit.
bool may_reach(double floor, double estimate) { return estimate + 1.0 >= floor; }

// Weighs the blocks that may reach `floor`; returns the sum of their weights.
uint64_t weigh_blocks(const ScannedRow& scores, const SoftmaxParams& params, double floor,
                      SampleScratch& scratch) {
  uint64_t mass = 0;
  const int64_t num_blocks = num_pass_blocks(scores.size);
  for (int64_t block = 0; block < num_blocks; block++) {
    BlockWeight weight = {0.0, 0.0};
    const double exponent = (scores.block_best[block] - params.best) / params.temperature;
    if (exponent > weightless_exponent &&
        (floor == lightest || may_reach(floor, scratch.block_estimate[block]))) {
      const int64_t first = block * pass_block;
      const int count = static_cast<int>(std::min<int64_t>(pass_block, scores.size - first));
      weigh_block(scores.values + first, count, params, scratch.weights.data() + first);
      weight = add_block(scratch.weights.data() + first);
    }
    scratch.block_mass[block] = weight.mass;
    scratch.block_heaviest[block] = weight.heaviest;
    mass += whole(weight.mass);
  }
  return mass;
}

// ---- selection

// Weights as integers of the same order, evenly spread where the weights' logarithms are.
uint64_t key_of(double weight) {
  uint64_t key;
  std::memcpy(&key, &weight, 8);
  return key;
}

// Buckets of equal width over the range of some weights' keys.
class Buckets {
 public:
  static constexpr int max_buckets = 256;

  Buckets(double lightest_weight, double heaviest_weight) : first_(key_of(lightest_weight)) {
    const uint64_t span = key_of(heaviest_weight) - first_;
    while ((span >> shift_) >= max_buckets) shift_++;
  }
  int of(double weight) const { return static_cast<int>((key_of(weight) - first_) >> shift_); }

 private:
  uint64_t first_;
  int shift_ = 0;
};

struct Bucket {
  int64_t count = 0;
  uint64_t mass = 0;
};

// Adds to `before` the heaviest buckets until the quota would be met; returns the bucket that meets
// it.
int walk_buckets(const Bucket* buckets, const Quota& quota, Bucket& before) {
  int index = Buckets::max_buckets - 1;
  for (; index > 0; index--) {
    const Bucket with = {before.count + buckets[index].count, before.mass + buckets[index].mass};
    if (quota.is_met(with.count, with.mass)) break;
    before = with;
  }
  return index;
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

// Narrows to the bucket that holds the cut until one weight is left.
Cut select(double* begin, double* end, const Quota& quota) {
  Bucket before;  // all that is heavier than the remaining candidates
  for (;;) {
    const auto range = std::minmax_element(begin, end);
    if (*range.first == *range.second) break;
    const Buckets buckets(*range.first, *range.second);
    Bucket totals[Buckets::max_buckets];
    for (const double* one = begin; one != end; one++) {
      Bucket& bucket = totals[buckets.of(*one)];
      bucket.count++;
      bucket.mass += whole(*one);
    }
    const int chosen = walk_buckets(totals, quota, before);
    end = std::copy_if(begin, end, begin, [&](double one) { return buckets.of(one) == chosen; });
  }
  const uint64_t weight = whole(*begin);
  int64_t too_few = 0, enough = end - begin;  // of equals
  while (enough - too_few > 1) {
    const int64_t half = too_few + (enough - too_few) / 2;
    (quota.is_met(before.count + half, before.mass + half * weight) ? enough : too_few) = half;
  }
  return {*begin, enough, before.mass + enough * weight};
}

Cut weigh_and_cut(const ScannedRow& scores, const SampleSettings& settings,
                  SampleScratch& scratch) {
  const SoftmaxParams params = {scores.best, settings.temperature, settings.min_p};
  const int64_t num_blocks = num_pass_blocks(scores.size);
  const int64_t top_k = settings.top_k;
  double floor = top_k > 0 ? reached_by(top_k, scores, params, scratch) : lightest;
  Cut cut;
  cut.mass = weigh_blocks(scores, params, floor, scratch);
  double* const candidates = scratch.candidates.data();
  if (top_k > 0) {
    const int64_t count = gather(floor, num_blocks, scratch);
    if (count >= top_k) {
      cut = select(candidates, candidates + count, {top_k, endless_mass});
      floor = cut.weight;
    }
  }
  if (settings.top_p < 1.0) {
    // All weights below the new floor together are less than the mass that top-p drops.
    const double mass = static_cast<double>(cut.mass), enough = settings.top_p * mass;
    floor = std::max(floor, 0.99 * (mass - enough) / static_cast<double>(scores.size));
    const int64_t count = gather(floor, num_blocks, scratch);
    cut = select(candidates, candidates + count, {count + 1, enough});
  }
  return cut;
}

int64_t token_at(uint64_t offset, const Cut& cut, int64_t num_blocks,
                 const SampleScratch& scratch) {
  int64_t num_ties = cut.num_ties;
  for (int64_t block = 0; block < num_blocks; block++) {
    const uint64_t mass = whole(scratch.block_mass[block]);
    if (cut.weight == 0.0 && offset >= mass) {
      offset -= mass;
      continue;
    }
    if (scratch.block_heaviest[block] < cut.weight) continue;
    const int64_t first = block * pass_block;
    for (int64_t token = first; token < first + pass_block; token++) {
      const double weight = scratch.weights[token];
      if (weight < cut.weight || (weight == cut.weight && num_ties-- <= 0)) continue;
      if (offset < whole(weight)) return token;
      offset -= whole(weight);
    }
  }
  throw std::logic_error("an offset beyond the mass was drawn");
}

}  // namespace quire
