// Helpers of all native code: half precision and bit casts.
// Static, not only inline: a unit's copy, compiled for its instruction set, must stay in that unit.
#pragma once
#include <cstdint>
#include <cstring>

namespace quire {

static inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity, or NaN, made quiet as the hardware does
    const uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0u;
    return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13 | quiet);
  }
  if (rest >= 0x400u) return float_of_bits(sign | (rest + 0x1c000u) << 13);
  const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
  return float_of_bits(sign | bits_of_float(small));
}

// An E4M3 float over 256, as the half that has the same bits in its upper places.
static inline uint16_t half_of_e4m3(uint8_t code) {
  return static_cast<uint16_t>((code & 0x80u) << 8 | (code & 0x7fu) << 7);
}

// Rounds to nearest, ties to even.
static inline uint16_t half_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to
    const uint32_t rounded = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace quire
