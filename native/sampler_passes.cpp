// Loops of fixed length over small arrays, written so that compilers turn them into vector code.
//
// They are compiled a second time for AVX2 and chosen when the module is loaded. That changes no
// bit: they hold elementwise IEEE operations, integer ones, and sums whose order the lanes fix.
#include "sampler_passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "elementary.h"

// The choice is made before a sanitizer's run-time is ready, so sanitized builds go without it.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define QUIRE_ALSO_FOR_AVX2 __attribute__((target_clones("default", "avx2")))
#else
#define QUIRE_ALSO_FOR_AVX2
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

QUIRE_ALSO_FOR_AVX2
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

QUIRE_ALSO_FOR_AVX2
void weigh_full_block(const float* scores, const Softening& how, double* weights) {
  const double best = how.best, temperature = how.temperature, min_p = how.min_p;
  double exponents[pass_block], likelihoods[pass_block];
  for (int i = 0; i < pass_block; i++) exponents[i] = static_cast<double>(scores[i]) - best;
  if (temperature != 1.0) {  // dividing by 1 changes nothing but the time
    for (int i = 0; i < pass_block; i++) exponents[i] /= temperature;
  }
  exp_each(exponents, pass_block, likelihoods);
  for (int i = 0; i < pass_block; i++) {
    weights[i] = (likelihoods[i] * weight_one + to_whole) - to_whole;  // to the nearest integer
  }
  double excess[pass_block];  // where that was up
  for (int i = 0; i < pass_block; i++) {
    excess[i] = weights[i] > likelihoods[i] * weight_one ? 1.0 : 0.0;
  }
  for (int i = 0; i < pass_block; i++) weights[i] -= excess[i];
  for (int i = 0; i < pass_block; i++) weights[i] = likelihoods[i] < min_p ? 0.0 : weights[i];
}

QUIRE_ALSO_FOR_AVX2
void add_exponentials(const float* values, double best, double* lanes) {
  double exponents[pass_block], exponentials[pass_block];
  for (int i = 0; i < pass_block; i++) exponents[i] = static_cast<double>(values[i]) - best;
  exp_each(exponents, pass_block, exponentials);
  for (int i = 0; i < pass_block; i += num_sum_lanes) {
    for (int lane = 0; lane < num_sum_lanes; lane++) lanes[lane] += exponentials[i + lane];
  }
}

// Eight tokens for each byte of the mask.
QUIRE_ALSO_FOR_AVX2
void copy_allowed_bytes(const float* row, const uint8_t* allowed, int64_t num_bytes,
                        float* __restrict out) {
  static const int32_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int64_t byte = 0; byte < num_bytes; byte++) {
    const int32_t mask = allowed[byte];
    for (int bit = 0; bit < 8; bit++) {
      const float value = row[byte * 8 + bit];
      out[byte * 8 + bit] = (mask & bits[bit]) != 0 ? value : minus_infinity;
    }
  }
}

// A block that ends the row, filled up with what counts for nothing.
struct Padded {
  float values[pass_block];
  Padded(const float* source, int count) {
    std::copy(source, source + count, values);
    std::fill(values + count, values + pass_block, minus_infinity);
  }
};

// Calls visit(values, block) for each block of the row, the last one filled up.
template <class Visit>
void each_block(const float* row, int64_t size, Visit visit) {
  const int64_t num_full = size / pass_block;
  for (int64_t block = 0; block < num_full; block++) visit(row + block * pass_block, block);
  if (const int rest = static_cast<int>(size % pass_block)) {
    visit(Padded(row + num_full * pass_block, rest).values, num_full);
  }
}

}  // namespace

Survey survey(const float* row, int64_t size, float* block_best) {
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

void copy_allowed(const float* row, int64_t size, const uint8_t* allowed, int64_t num_bytes,
                  float* out) {
  const int64_t num_whole = std::min(size / 8, num_bytes);
  copy_allowed_bytes(row, allowed, num_whole, out);
  for (int64_t token = num_whole * 8; token < size; token++) {
    const bool is_allowed = token / 8 < num_bytes && (allowed[token / 8] >> (token % 8) & 1) != 0;
    out[token] = is_allowed ? row[token] : minus_infinity;
  }
}

void weigh_block(const float* scores, int count, const Softening& how, double* weights) {
  if (count == pass_block) {
    weigh_full_block(scores, how, weights);
  } else {
    weigh_full_block(Padded(scores, count).values, how, weights);
  }
}

QUIRE_ALSO_FOR_AVX2
BlockWeight add_block(const double* weights) {
  double mass[8] = {}, heaviest[8] = {};
  for (int i = 0; i < pass_block; i += 8) {
    for (int lane = 0; lane < 8; lane++) {
      const double weight = weights[i + lane];
      mass[lane] += weight;
      heaviest[lane] = weight > heaviest[lane] ? weight : heaviest[lane];
    }
  }
  for (int lane = 1; lane < 8; lane++) {
    mass[0] += mass[lane];
    heaviest[0] = std::max(heaviest[0], heaviest[lane]);
  }
  return {mass[0], heaviest[0]};
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

QUIRE_ALSO_FOR_AVX2
int count_above(const float* values, int count, double best, double log_sum, double threshold) {
  int num_above = 0;
  for (int i = 0; i < count; i++) {
    num_above += (static_cast<double>(values[i]) - best) - log_sum > threshold;
  }
  return num_above;
}

}  // namespace quire
