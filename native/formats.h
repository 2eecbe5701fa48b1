// The packed formats of weight matrices. A panel is sixteen rows side by side.
//
// A panel holds its codes first, sub-block after sub-block of 32 k, then its scales. Within a
// sub-block vector j (64 bytes) is sixteen rows times k = 4j to 4j+3: a dot product leaves one row
// per lane, and nothing is summed across lanes. Codes below eight bits share bytes:
//
//   4 bits: vector j in the low nibbles of stored vector j, j+4 in the high ones     (256 bytes)
//   2 bits: vector j at bit 2 * (j / 2) of stored vector j % 2                       (128 bytes)
//   1 bit:  vector j at bit j of one stored vector                                    (64 bytes)
//   5 = 4 + 1, 6 = 4 + 2 and 3 = 2 + 1: the low bits' vectors, then the high bits'.
//
// A scale record holds a field for all sixteen rows, then the next field; K-quants' packed 6-bit
// scales are spread to a byte each.
//
// Floats, E4M3's among them, are kept by k: sixteen rows' weights, then those of the next k.
#pragma once
#include <cstdint>

namespace quire {

enum Format : int {
  F32,
  F16,
  BF16,
  Q8_0,
  Q4_0,
  Q4_1,
  Q5_0,
  Q5_1,
  Q2_K,
  Q3_K,
  Q4_K,
  Q5_K,
  Q6_K,
  IQ4_NL,
  IQ4_XS,
  IQ1_S,
  IQ1_M,
  IQ2_XXS,
  IQ2_XS,
  IQ2_S,
  IQ3_XXS,
  IQ3_S,
  MXFP4,
  NVFP4,
  Q1_0,
  Q2_0,
  U4_128,
  I8_128,
  E4M3_128,
  NVFP4_128,
  TERNARY,  // TQ1_0, TQ2_0 and I2_S
  num_formats
};

struct FormatInfo {
  int bits;         // of a code; 0: the weights are floats, and so are the activations
  int code_bytes;   // of a sub-block in a panel; of one k for floats
  int scale_bytes;  // of a scale record
  int scale_span;   // sub-blocks that share a scale record
};

constexpr FormatInfo format_infos[num_formats] = {
    {0, 64, 0, 1},     // F32
    {0, 32, 0, 1},     // F16
    {0, 32, 0, 1},     // BF16
    {8, 512, 32, 1},   // Q8_0: d
    {4, 256, 32, 1},   // Q4_0: d
    {4, 256, 64, 1},   // Q4_1: d, m
    {5, 320, 32, 1},   // Q5_0: d
    {5, 320, 64, 1},   // Q5_1: d, m
    {2, 128, 320, 8},  // Q2_K: d, dmin, sixteen of (scale | min << 4)
    {3, 192, 288, 8},  // Q3_K: d, sixteen signed scales
    {4, 256, 320, 8},  // Q4_K: d, dmin, eight scales, eight mins
    {5, 320, 320, 8},  // Q5_K: as Q4_K
    {6, 384, 288, 8},  // Q6_K: d, sixteen signed scales
    {4, 256, 32, 1},   // IQ4_NL: d
    {4, 256, 160, 8},  // IQ4_XS: d, eight signed scales
    {2, 88, 96, 8},    // IQ1_S: see grids.h
    {2, 96, 160, 8},   // IQ1_M
    {2, 128, 96, 8},   // IQ2_XXS
    {2, 136, 160, 8},  // IQ2_XS
    {2, 144, 160, 8},  // IQ2_S
    {3, 192, 96, 8},   // IQ3_XXS
    {3, 208, 96, 8},   // IQ3_S
    {4, 256, 16, 1},   // MXFP4: the exponent of a power of two
    {4, 256, 32, 1},   // NVFP4: two scales in E4M3
    {1, 64, 32, 4},    // Q1_0: d
    {2, 128, 32, 2},   // Q2_0: d
    {4, 256, 128, 4},  // U4_128: float32 d, zero point
    {8, 512, 64, 4},   // I8_128: float32 d
    {0, 16, 64, 4},    // E4M3_128: float32 d
    {4, 256, 192, 4},  // NVFP4_128: float32 d, eight scales in E4M3
    {2, 128, 32, 8},   // ternary: d
};

// Formats whose weights are points of a grid.
constexpr bool has_grid(int format) { return format >= IQ1_S && format <= IQ3_S; }

// Formats with super-blocks of 256, whose sub-block scales are integers times one float. With one
// activation scale for the same 256 (ActivationBlock) the sum over a super-block is an integer.
constexpr bool takes_blocks(int format) {
  return (format >= Q2_K && format <= Q6_K) || format == IQ4_XS || has_grid(format);
}

constexpr int64_t code_area(int format, int64_t in_size) {
  const FormatInfo& info = format_infos[format];
  return info.bits == 0 ? in_size * info.code_bytes : in_size / 32 * info.code_bytes;
}

constexpr int64_t num_scale_records(int format, int64_t in_size) {
  const FormatInfo& info = format_infos[format];
  return info.scale_bytes == 0 ? 0 : (in_size / 32 + info.scale_span - 1) / info.scale_span;
}

constexpr int64_t panel_bytes_of(int format, int64_t in_size) {
  const int64_t scale_bytes = num_scale_records(format, in_size) * format_infos[format].scale_bytes;
  return code_area(format, in_size) + (scale_bytes + 63) / 64 * 64;
}

constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

// MXFP4's values, doubled, plus a zero point that makes them unsigned.
constexpr int mxfp4_zero = 12;  // NVFP4 has the same
constexpr int8_t mxfp4_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// E4M3's weights are floats of a byte: a sign, four bits of exponent, three of fraction. The half
// that has these in its upper bits is the weight over 256. Its codes of NaN do not occur: readers
// refuse them.
constexpr float e4m3_factor = 256.0f;
constexpr int e4m3_block_size = 128;

// NVFP4's scales have no sign, and 0x7f is 0. They are packed without the bit and with 0 for it, as
// E4M3 then, and are halved, as the values are doubled.
constexpr float nvfp4_factor = e4m3_factor / 2.0f;
constexpr uint8_t packed_nvfp4_scale(uint8_t byte) {
  return byte == 0x7f ? uint8_t{0} : static_cast<uint8_t>(byte & 0x7f);
}

}  // namespace quire
