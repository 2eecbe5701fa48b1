// The sampler's passes over whole rows, a block of tokens at a time, in vector code.
#pragma once
#include <cstdint>

namespace quire {

constexpr int pass_block = 128;  // tokens
constexpr int num_sum_lanes = 16;

inline int64_t num_pass_blocks(int64_t size) { return (size + pass_block - 1) / pass_block; }

struct RowScan {
  float best;
  bool has_nan;  // then `best` is undefined
};

// Finds the greatest value of the row and of each of its blocks.
RowScan scan_row(const float* row, int64_t size, float* block_best);

// Whether all values are finite numbers.
bool is_finite(const float* values, int64_t size);

// The row with minus infinity for each token whose bit in `allowed` is not set or not there.
void copy_allowed(const float* row, int64_t size, const uint8_t* allowed, int64_t num_bytes,
                  float* out);

// What the weights of tokens depend on beside their scores.
struct SoftmaxParams {
  double best;  // the greatest score
  double temperature;
  double min_p;
};

// Integer weights exp((score - best) / temperature) * 2**32 of one block, rounded down, 0 where
// the likelihood is below min_p and beyond `count`. They are doubles, which hold them exactly.
void weigh_block(const float* scores, int count, const SoftmaxParams& params, double* weights);

// The likelihoods exp((score - best) / temperature) of a row. Writes whole blocks: 0 beyond `size`.
void find_likelihoods(const float* scores, int64_t size, double best, double temperature,
                      double* likelihoods);

struct BlockWeight {
  double mass;  // the sum, exact
  double heaviest;
};
BlockWeight add_block(const double* weights);

// The sum of exp(value - best) over the row: lane i takes every 16th value from i on, then halves
// of the lanes are added to each other.
double sum_of_exponentials(const float* row, int64_t size, double best);

// How many of a block's log-probabilities (value - best) - log_sum are above `threshold`.
int count_above(const float* values, int count, double best, double log_sum, double threshold);

}  // namespace quire
