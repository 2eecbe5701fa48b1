// exp and log in double precision by plain IEEE operations, the same as quire.executors.elementary.
//
// A compiler may neither fuse nor reorder these steps (-ffp-contract=off, no -ffast-math): the
// sampler's tokens and log-probabilities are those of the Python reference, bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace quire {

constexpr double lowest_exponent = -708.0;  // below it exp is 0, so that no result is subnormal

namespace elementary {
constexpr double log2_e = 0x1.71547652b82fep+0;
constexpr double ln2_high = 0x1.62e42fefa3800p-1;  // 42 bits: its product with a power is exact
constexpr double ln2_low = 0x1.ef35793c76730p-45;
constexpr double to_integer = 0x1.8p+52;  // added, it leaves the nearest integer in the low bits
constexpr double root_of_half = 0x1.6a09e667f3bcdp-1;
}  // namespace elementary

// e to the value, for values of at most 0.
inline double exp_of(double value) {
  using namespace elementary;
  const double bounded = value < lowest_exponent ? lowest_exponent : value;
  const double shifted = bounded * log2_e + to_integer;
  const double power = shifted - to_integer;
  const double rest = (bounded - power * ln2_high) - power * ln2_low;
  double result = 0x1.af38a9b0ec855p-26;
  result = result * rest + 0x1.289185613a3d6p-22;
  result = result * rest + 0x1.71de0dae63bb3p-19;
  result = result * rest + 0x1.a019b90d2ae7ap-16;
  result = result * rest + 0x1.a01a01a7c41d5p-13;
  result = result * rest + 0x1.6c16c1788bd90p-10;
  result = result * rest + 0x1.11111111109b3p-7;
  result = result * rest + 0x1.5555555553d63p-5;
  result = result * rest + 0x1.5555555555556p-3;
  result = result * rest + 0x1.0000000000001p-1;
  result = (result * rest * rest + rest) + 1.0;
  uint64_t result_bits, shifted_bits;
  std::memcpy(&result_bits, &result, 8);
  std::memcpy(&shifted_bits, &shifted, 8);
  result_bits += shifted_bits << 52;  // times 2 ** power
  std::memcpy(&result, &result_bits, 8);
  return value < lowest_exponent ? 0.0 : result;
}

// The natural logarithm of a finite number of at least 1.
inline double log_of(double value) {
  using namespace elementary;
  int power;
  double mantissa = std::frexp(value, &power);  // exact
  if (mantissa < root_of_half) {
    mantissa *= 2.0;
    power -= 1;
  }
  const double fraction = mantissa - 1.0;
  const double ratio = fraction / (2.0 + fraction);
  const double square = ratio * ratio;
  double series = 2.0 / 23.0;
  for (int odd = 21; odd >= 3; odd -= 2) series = series * square + 2.0 / odd;
  const double near = fraction - ratio * (fraction - series * square);
  return power * ln2_high + (power * ln2_low + near);
}

// A number from 0 to 1 to a power of at least 0.
inline double power_of(double base, double exponent) {
  constexpr double least_base = 0x1p-1000;  // what is below is taken for 0
  if (exponent == 1.0) return base;
  if (base < least_base) return exponent > 0.0 ? 0.0 : 1.0;
  return exp_of(-exponent * log_of(1.0 / base));
}

// The sum in a fixed order: the upper half, from the greatest power of two on, is added to the
// lower one until one number is left. Overwrites the values.
inline double halving_sum(double* values, int64_t size) {
  while (size > 1) {
    int64_t half = 1;
    while (half * 2 < size) half *= 2;
    for (int64_t i = 0; i < size - half; i++) values[i] += values[i + half];
    size = half;
  }
  return values[0];
}

}  // namespace quire
