// Integer weights of a row's tokens, top-k and top-p over them, and the token at an offset into
// the remaining mass.
#pragma once
#include <cstdint>

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

// Writes the weights to the scratch for token_at. Blocks that cannot hold a kept token are marked
// as empty and skipped.
Cut weigh_and_cut(const ScannedRow& scores, const SampleSettings& settings, SampleScratch& scratch);

// The token at an offset below cut.mass, over the kept weights in order of token id.
int64_t token_at(uint64_t offset, const Cut& cut, int64_t num_blocks, const SampleScratch& scratch);

}  // namespace quire
