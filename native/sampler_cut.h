// Integer weights of a row's tokens, top-k and top-p over them, and the token at an offset into
// the remaining mass.
#pragma once
#include <cstdint>
#include <limits>

#include "sampler.h"

namespace quire {

// A row with the greatest value of each of its pass blocks. No value is NaN, `best` is finite.
struct ScannedRow {
  const float* values;
  int64_t size;
  const float* block_best;
  float best;
};

// The tokens that top-k and top-p keep: all weights above `weight`, and the first `num_ties` equal
// to it.
struct Cut {
  double weight = 0.0;
  int64_t num_ties = 0;
  uint64_t mass = 0;  // the sum of the weights that are kept
};

// The kept tokens are the shortest run of the heaviest weights that meets this: so many of them, or
// a sum of at least so much.
struct Quota {
  int64_t count;
  double mass;
  bool is_met(int64_t other_count, uint64_t other_mass) const {
    return other_count >= count || static_cast<double>(other_mass) >= mass;
  }
};
constexpr double endless_mass = std::numeric_limits<double>::infinity();

// The cut that meets the quota, which all candidates together meet and no candidates do not. They
// are positive integers; overwrites them.
Cut select(double* begin, double* end, const Quota& quota);

// Writes the weights to the scratch for token_at. Blocks that cannot hold a kept token are marked
// as empty and skipped.
Cut weigh_and_cut(const ScannedRow& scores, const SampleSettings& settings, SampleScratch& scratch);

// The token at an offset below cut.mass, over the kept weights in order of token id.
int64_t token_at(uint64_t offset, const Cut& cut, int64_t num_blocks, const SampleScratch& scratch);

}  // namespace quire
