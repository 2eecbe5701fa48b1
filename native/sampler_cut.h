// Integer weights of a row's tokens, what top-k and top-p leave of them, and the token at a place
// among those.
#pragma once
#include <cstdint>

#include "sampler.h"

namespace quire {

// A row with the greatest value of each of its pass_blocks, none of them NaN, the best finite.
struct SurveyedRow {
  const float* values;
  int64_t size;
  const float* block_best;
  float best;
};

// What may be drawn: all weights above `weight`, and of those that equal it the first `num_ties`.
struct Cut {
  double weight = 0.0;
  int64_t num_ties = 0;
  uint64_t mass = 0;  // the sum of all that may be drawn
};

// Leaves the weights in the scratch for token_at. Not every weight is there: blocks that cannot
// reach what is drawn from are marked as empty and left out.
Cut weigh_and_cut(const SurveyedRow& scores, const SampleSettings& settings,
                  SampleScratch& scratch);

// The token at a place below cut.mass, walking the weights in order of token id.
int64_t token_at(uint64_t place, const Cut& cut, int64_t num_blocks, const SampleScratch& scratch);

}  // namespace quire
