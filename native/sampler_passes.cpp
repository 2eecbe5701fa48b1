// Loops over blocks of tokens, written so that compilers vectorise them.
//
// They are compiled for AVX2 and AVX-512 too; the loader chooses. All versions give the same bits:
// elementwise IEEE operations, integer operations, and sums in a fixed order of lanes.
#include "sampler_passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__GNUC__) && !defined(__clang__)
// The floating-point flags are not used, so both sides of a conditional may be computed: without
// this GCC does not vectorise loops with conditionals. Values do not change.
#pragma GCC optimize("no-trapping-math")
#endif
#include "elementary.h"

// The choice is made before a sanitizer's run-time is ready, so sanitized builds go without it.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define QUIRE_FOR_EACH_SET __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define QUIRE_FOR_EACH_SET
#endif

namespace quire {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
constexpr double weight_one = 0x1p32;
constexpr double to_whole = 0x1p52;  // added to a positive number, it leaves no fraction

// Float bits as integers of the same order, which compilers reduce in vector code. The key of a NaN
// is beyond that of the infinity of its sign.
int32_t key_of_bits(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

constexpr int32_t infinity_key = 0x7f800000;
constexpr int32_t minus_infinity_key = -infinity_key - 1;

float value_of_key(int32_t key) {
  const int32_t bits = key_of_bits(key);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Range {
  int32_t least, greatest;  // keys
};

QUIRE_FOR_EACH_SET
Range range_of_block(const float* values) {
  int32_t bits[pass_block];
  std::memcpy(bits, values, sizeof(bits));
  Range range = {INT32_MAX, INT32_MIN};
  for (int i = 0; i < pass_block; i++) {
    const int32_t key = key_of_bits(bits[i]);
    range.least = std::min(range.least, key);
    range.greatest = std::max(range.greatest, key);
  }
  return range;
}

// The weight of a token whose logit over the temperature is so far from the best one's.
inline double weight_at(double exponent, double min_p) {
  const double likelihood = exp_of(exponent);
  const double exact = likelihood * weight_one;
  const double nearest = (exact + to_whole) - to_whole;
  const double floor = nearest > exact ? nearest - 1.0 : nearest;
  return likelihood < min_p ? 0.0 : floor;
}

QUIRE_FOR_EACH_SET
void weigh_full_block(const float* scores, const SoftmaxParams& params,
                      double* __restrict weights) {
  const double best = params.best, temperature = params.temperature, min_p = params.min_p;
  if (temperature == 1.0) {  // dividing by 1 changes nothing but the time
    for (int i = 0; i < pass_block; i++) {
      weights[i] = weight_at(static_cast<double>(scores[i]) - best, min_p);
    }
  } else {
    for (int i = 0; i < pass_block; i++) {
      weights[i] = weight_at((static_cast<double>(scores[i]) - best) / temperature, min_p);
    }
  }
}

QUIRE_FOR_EACH_SET
void find_block_likelihoods(const float* scores, double best, double temperature,
                            double* __restrict likelihoods) {
  for (int i = 0; i < pass_block; i++) {
    likelihoods[i] = exp_of((static_cast<double>(scores[i]) - best) / temperature);
  }
}

QUIRE_FOR_EACH_SET
void add_exponentials(const float* values, double best, double* lanes) {
  double exponentials[pass_block];
  for (int i = 0; i < pass_block; i++) {
    exponentials[i] = exp_of(static_cast<double>(values[i]) - best);
  }
  for (int i = 0; i < pass_block; i += num_sum_lanes) {
    for (int lane = 0; lane < num_sum_lanes; lane++) lanes[lane] += exponentials[i + lane];
  }
}

// The last block of a row, padded with minus infinity.
struct Padded {
  float values[pass_block];
  Padded(const float* source, int count) {
    std::copy(source, source + count, values);
    std::fill(values + count, values + pass_block, minus_infinity);
  }
};

// Calls visit(values, block) for each block of the row, the last one padded.
template <class Visit>
void each_block(const float* row, int64_t size, Visit visit) {
  const int64_t num_full = size / pass_block;
  for (int64_t block = 0; block < num_full; block++) visit(row + block * pass_block, block);
  if (const int rest = static_cast<int>(size % pass_block)) {
    visit(Padded(row + num_full * pass_block, rest).values, num_full);
  }
}

}  // namespace

RowScan scan_row(const float* row, int64_t size, float* block_best) {
  Range all = {INT32_MAX, INT32_MIN};
  each_block(row, size, [&](const float* values, int64_t block) {
    const Range one = range_of_block(values);
    block_best[block] = value_of_key(one.greatest);
    all.least = std::min(all.least, one.least);
    all.greatest = std::max(all.greatest, one.greatest);
  });
  return {value_of_key(all.greatest),
          all.least < minus_infinity_key || all.greatest > infinity_key};
}

bool is_finite(const float* values, int64_t size) {
  const float* const end = values + size;
  for (; end - values >= pass_block; values += pass_block) {
    const Range range = range_of_block(values);
    if (range.least <= minus_infinity_key || range.greatest >= infinity_key) return false;
  }
  return std::all_of(values, end, [](float value) { return std::isfinite(value); });
}

// Most bytes of a grammar's mask forbid, or allow, all of their eight tokens.
void copy_allowed(const float* row, int64_t size, const uint8_t* allowed, int64_t num_bytes,
                  float* out) {
  const int64_t num_whole = std::min(size / 8, num_bytes);
  for (int64_t byte = 0; byte < num_whole; byte++) {
    const float* source = row + byte * 8;
    float* target = out + byte * 8;
    if (allowed[byte] == 0x00) {
      std::fill_n(target, 8, minus_infinity);
    } else if (allowed[byte] == 0xff) {
      std::memcpy(target, source, 8 * sizeof(float));
    } else {
      const int mask = allowed[byte];
      for (int bit = 0; bit < 8; bit++)
        target[bit] = mask >> bit & 1 ? source[bit] : minus_infinity;
    }
  }
  for (int64_t token = num_whole * 8; token < size; token++) {
    const bool is_allowed = token / 8 < num_bytes && (allowed[token / 8] >> (token % 8) & 1) != 0;
    out[token] = is_allowed ? row[token] : minus_infinity;
  }
}

void weigh_block(const float* scores, int count, const SoftmaxParams& params, double* weights) {
  if (count == pass_block) {
    weigh_full_block(scores, params, weights);
  } else {
    weigh_full_block(Padded(scores, count).values, params, weights);
  }
}

void find_likelihoods(const float* scores, int64_t size, double best, double temperature,
                      double* likelihoods) {
  each_block(scores, size, [&](const float* values, int64_t block) {
    find_block_likelihoods(values, best, temperature, likelihoods + block * pass_block);
  });
}

// By halves: the sums are exact in any order, and each loop is elementwise.
QUIRE_FOR_EACH_SET
BlockWeight add_block(const double* weights) {
  constexpr int half_block = pass_block / 2;
  double masses[half_block], heaviest[half_block];
  for (int i = 0; i < half_block; i++) {
    const double low = weights[i], high = weights[i + half_block];
    masses[i] = low + high;
    heaviest[i] = low > high ? low : high;
  }
  for (int half = half_block / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) {
      masses[i] += masses[i + half];
      heaviest[i] = heaviest[i] > heaviest[i + half] ? heaviest[i] : heaviest[i + half];
    }
  }
  return {masses[0], heaviest[0]};
}

double sum_of_exponentials(const float* row, int64_t size, double best) {
  double lanes[num_sum_lanes] = {};
  each_block(row, size,
             [&](const float* values, int64_t) { add_exponentials(values, best, lanes); });
  for (int half = num_sum_lanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

QUIRE_FOR_EACH_SET
int count_above(const float* values, int count, double best, double log_sum, double threshold) {
  int num_above = 0;
  for (int i = 0; i < count; i++) {
    num_above += (static_cast<double>(values[i]) - best) - log_sum > threshold;
  }
  return num_above;
}

}  // namespace quire
