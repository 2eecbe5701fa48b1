// Packing and unpacking of weights; see formats.h for the layouts.
#include "pack.h"

#include <cstring>

#include "grids.h"
#include "kernels.h"
#include "scalar.h"
#include "sizes.h"

namespace quire {
namespace {

constexpr int i2_s_block_size = 128;

// ---- the codes of one GGUF block, in order of k

// Fields of `bits` bits: a run of bytes holds the first `run` codes in its lowest bits, the next
// `run` in its next, and so on.
void spread(const uint8_t* packed, int num_bytes, int bits, int run, uint8_t* codes, int shift) {
  const int fields = 8 / bits, mask = (1 << bits) - 1;
  for (int start = 0; start < num_bytes; start += run)
    for (int field = 0; field < fields; field++)
      for (int i = 0; i < run; i++)
        *codes++ |= static_cast<uint8_t>((packed[start + i] >> (field * bits) & mask) << shift);
}

void spread_trits(const uint8_t* packed, int num_bytes, int run, int digits, uint8_t* codes) {
  for (int start = 0; start < num_bytes; start += run) {
    uint8_t power = 1;
    for (int digit = 0; digit < digits; digit++, power = static_cast<uint8_t>(power * 3))
      for (int i = 0; i < run; i++) {
        const uint8_t fraction = static_cast<uint8_t>(packed[start + i] * power);
        *codes++ = static_cast<uint8_t>(fraction * 3 >> 8);
      }
  }
}

// I2_S: the first 32 codes lie in the highest bits.
void spread_i2_s(const uint8_t* packed, uint8_t* codes) {
  for (int quarter = 0; quarter < 4; quarter++)
    for (int i = 0; i < 32; i++) *codes++ = packed[i] >> (6 - 2 * quarter) & 3;
}

void read_codes(const SourceFormat& from, const uint8_t* block, uint8_t* codes) {
  std::memset(codes, 0, static_cast<size_t>(from.block_size));
  switch (from.packed) {
    case Q8_0: std::memcpy(codes, block + 2, 32); return;
    case Q4_0:
    case IQ4_NL: spread(block + 2, 16, 4, 16, codes, 0); return;
    case Q4_1: spread(block + 4, 16, 4, 16, codes, 0); return;
    case Q5_0:
      spread(block + 6, 16, 4, 16, codes, 0);
      spread(block + 2, 4, 1, 1, codes, 4);
      return;
    case Q5_1:
      spread(block + 8, 16, 4, 16, codes, 0);
      spread(block + 4, 4, 1, 1, codes, 4);
      return;
    case Q2_K: spread(block + 16, 64, 2, 32, codes, 0); return;
    case Q3_K:
      spread(block + 32, 64, 2, 32, codes, 0);
      spread(block, 32, 1, 32, codes, 2);
      return;
    case Q4_K: spread(block + 16, 128, 4, 32, codes, 0); return;
    case Q5_K:
      spread(block + 48, 128, 4, 32, codes, 0);
      spread(block + 16, 32, 1, 32, codes, 4);
      return;
    case Q6_K:
      spread(block, 128, 4, 64, codes, 0);
      spread(block + 128, 64, 2, 32, codes, 4);
      return;
    case IQ4_XS: spread(block + 8, 128, 4, 16, codes, 0); return;
    case MXFP4: spread(block + 1, 16, 4, 16, codes, 0); return;
    case NVFP4: spread(block + 4, 32, 4, 8, codes, 0); return;
    case NVFP4_128: spread(block + 12, 64, 4, 8, codes, 0); return;
    case Q1_0: spread(block + 2, 16, 1, 1, codes, 0); return;
    case Q2_0: spread(block + 2, 16, 2, 1, codes, 0); return;
    case U4_128: spread(block + 8, 64, 4, 16, codes, 0); return;
    case I8_128: std::memcpy(codes, block + 4, 128); return;
    case TERNARY:
      if (from.block_size == i2_s_block_size) return spread_i2_s(block, codes);
      if (from.block_bytes == 66) return spread(block, 64, 2, 32, codes, 0);
      spread_trits(block, 32, 32, 5, codes);
      spread_trits(block + 32, 16, 16, 5, codes + 160);
      spread_trits(block + 48, 4, 4, 4, codes + 240);
      return;
    default: return;
  }
}

// ---- the scales of one GGUF block, into a row's fields of a scale record

void put_half(uint8_t* record, int field, int row, const uint8_t* half) {
  std::memcpy(record + 2 * (panel_rows * field + row), half, 2);
}

void put_float(uint8_t* record, int field, int row, const uint8_t* single) {
  std::memcpy(record + 4 * (panel_rows * field + row), single, 4);
}

// A scale and a minimum that lie side by side.
void put_two_halves(uint8_t* record, int row, const uint8_t* halves) {
  put_half(record, 0, row, halves);
  put_half(record, 1, row, halves + 2);
}

// The eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K.
void put_six_bits(uint8_t* scales, uint8_t* minimums, int row, const uint8_t* packed) {
  for (int i = 0; i < 4; i++) {
    const uint8_t first = packed[i], second = packed[4 + i], low = packed[8 + i];
    scales[panel_rows * i + row] = first & 63;
    minimums[panel_rows * i + row] = second & 63;
    scales[panel_rows * (4 + i) + row] = static_cast<uint8_t>((low & 15) | first >> 6 << 4);
    minimums[panel_rows * (4 + i) + row] = static_cast<uint8_t>(low >> 4 | second >> 6 << 4);
  }
}

// A signed 6-bit scale from its low nibble and its two high bits.
void put_signed_scale(uint8_t* scales, int i, int row, int low, int high) {
  scales[panel_rows * i + row] = static_cast<uint8_t>(((low & 15) | (high & 3) << 4) - 32);
}

// The scale of a ternary block, as a half; I2_S has one for the whole matrix, elsewhere.
uint16_t ternary_scale(const SourceFormat& from, const uint8_t* block) {
  if (from.block_size == i2_s_block_size) return half_of_float(1.0f);
  uint16_t half;
  std::memcpy(&half, block + from.block_bytes - 2, 2);
  return half;
}

void put_nvfp4_scales(uint8_t* scales, int count, int row, const uint8_t* bytes) {
  for (int i = 0; i < count; i++) scales[panel_rows * i + row] = packed_nvfp4_scale(bytes[i]);
}

void put_scales(const SourceFormat& from, const uint8_t* block, int row, uint8_t* record) {
  switch (from.packed) {
    case Q8_0:
    case Q4_0:
    case Q5_0:
    case Q1_0:
    case Q2_0:
    case IQ4_NL: put_half(record, 0, row, block); return;
    case Q4_1:
    case Q5_1: put_two_halves(record, row, block); return;
    case Q2_K:
      put_two_halves(record, row, block + 80);
      for (int i = 0; i < 16; i++) record[64 + panel_rows * i + row] = block[i];
      return;
    case Q3_K:
      put_half(record, 0, row, block + 108);
      for (int i = 0; i < 16; i++)
        put_signed_scale(record + 32, i, row, block[96 + i % 8] >> (i / 8 * 4),
                         block[104 + i % 4] >> (i / 4 * 2));
      return;
    case Q4_K:
    case Q5_K:
      put_two_halves(record, row, block);
      put_six_bits(record + 64, record + 192, row, block + 4);
      return;
    case Q6_K:
      put_half(record, 0, row, block + 208);
      for (int i = 0; i < 16; i++) record[32 + panel_rows * i + row] = block[192 + i];
      return;
    case IQ4_XS:
      put_half(record, 0, row, block);
      for (int i = 0; i < 8; i++)
        put_signed_scale(record + 32, i, row, block[4 + i / 2] >> (i % 2 * 4),
                         block[2 + i / 4] >> (i % 4 * 2));
      return;
    case MXFP4: record[row] = block[0]; return;
    case NVFP4: put_nvfp4_scales(record, 4, row, block); return;  // two records
    case NVFP4_128:
      put_float(record, 0, row, block);
      put_nvfp4_scales(record + 64, 8, row, block + 4);
      return;
    case U4_128: put_float(record, 1, row, block + 4); [[fallthrough]];
    case I8_128: put_float(record, 0, row, block); return;
    case TERNARY: {
      const uint16_t half = ternary_scale(from, block);
      put_half(record, 0, row, reinterpret_cast<const uint8_t*>(&half));
      return;
    }
    default: return;
  }
}

// ---- codes of a sub-block, sixteen rows, to and from bit planes

using SubBlock = uint8_t[panel_rows][32];

void put_planes(int bits, const SubBlock& codes, uint8_t* to) {
  std::memset(to, 0, static_cast<size_t>(64 * bits));
  uint8_t* high = to + (bits == 3 ? 128 : 256);
  for (int row = 0; row < panel_rows; row++)
    for (int j = 0; j < 8; j++)
      for (int i = 0; i < 4; i++) {
        const int code = codes[row][4 * j + i], at = 4 * row + i;
        const auto put = [&](uint8_t* plane, int value) {
          plane[at] |= static_cast<uint8_t>(value);
        };
        if (bits == 8) put(to + 64 * j, code);
        if (bits >= 4 && bits <= 6) put(to + 64 * (j & 3), (code & 15) << (j < 4 ? 0 : 4));
        if (bits == 1) put(to, code << j);
        if (bits == 2 || bits == 3) put(to + 64 * (j & 1), (code & 3) << (2 * (j >> 1)));
        if (bits == 3) put(high, (code >> 2) << j);
        if (bits == 5) put(high, (code >> 4) << j);
        if (bits == 6) put(high + 64 * (j & 1), (code >> 4) << (2 * (j >> 1)));
      }
}

int code_at(int bits, const uint8_t* from, int row, int k) {
  const int j = k / 4, at = 4 * row + k % 4;
  const uint8_t* high = from + (bits == 3 ? 128 : 256);
  const int two = 2 * (j >> 1);
  const auto nibble = [&] { return from[64 * (j & 3) + at] >> (j < 4 ? 0 : 4) & 15; };
  switch (bits) {  // fewer bits have fewer planes: reads only those that exist
    case 8: return from[64 * j + at];
    case 4: return nibble();
    case 5: return nibble() | (high[at] >> j & 1) << 4;
    case 6: return nibble() | (high[64 * (j & 1) + at] >> two & 3) << 4;
    case 3: return (from[64 * (j & 1) + at] >> two & 3) | (high[at] >> j & 1) << 2;
    case 1: return from[at] >> j & 1;
    default: return from[64 * (j & 1) + at] >> two & 3;
  }
}

float half_at(const uint8_t* record, int field, int row) {
  uint16_t half;
  std::memcpy(&half, record + 2 * (panel_rows * field + row), 2);
  return float_of_half(half);
}

float float_at(const uint8_t* record, int field, int row) {
  float x;
  std::memcpy(&x, record + 4 * (panel_rows * field + row), 4);
  return x;
}

// MXFP4's scale: a power of two, subnormal for the two lowest exponents.
float power_of_two(int exponent) {
  const int bits = exponent < 2 ? 1 << (21 + exponent) : (exponent - 1) << 23;
  return float_of_bits(static_cast<uint32_t>(bits));
}

// NVFP4's scale, as it is packed: half of an E4M3 float.
float nvfp4_scale(uint8_t packed) { return nvfp4_factor * float_of_half(half_of_e4m3(packed)); }

// A code's weight, in the order of operations of GGUF's own decoders.
float weight_of(Format format, int code, const uint8_t* record, int s, int half, int row) {
  const auto value = [](int x) { return static_cast<float>(x); };
  switch (format) {  // records that hold no half
    case MXFP4: return power_of_two(record[row]) * value(mxfp4_codes[code] - mxfp4_zero);
    case NVFP4:
      return nvfp4_scale(record[panel_rows * half + row]) * value(mxfp4_codes[code] - mxfp4_zero);
    case NVFP4_128: {
      const float scale = nvfp4_scale(record[64 + panel_rows * (2 * s + half) + row]);
      return float_at(record, 0, row) * (scale * value(mxfp4_codes[code] - mxfp4_zero));
    }
    case U4_128: return float_at(record, 0, row) * (value(code) - float_at(record, 1, row));
    case I8_128: return float_at(record, 0, row) * value(static_cast<int8_t>(code));
    default: break;
  }
  const float d = half_at(record, 0, row);
  const auto field = [&](int base, int i) { return record[base + panel_rows * i + row]; };
  const auto signed_field = [&](int i) { return value(static_cast<int8_t>(field(32, i))); };
  switch (format) {
    case Q8_0: return d * value(static_cast<int8_t>(code));
    case Q4_0: return d * value(code - 8);
    case Q5_0: return d * value(code - 16);
    case Q4_1:
    case Q5_1: return d * value(code) + half_at(record, 1, row);
    case Q2_K: {
      const int both = field(64, 2 * s + half);
      return d * value(both & 15) * value(code) - half_at(record, 1, row) * value(both >> 4);
    }
    case Q3_K: return d * signed_field(2 * s + half) * value(code - 4);
    case Q4_K:
    case Q5_K:
      return d * value(field(64, s)) * value(code) - half_at(record, 1, row) * value(field(192, s));
    case Q6_K: return d * signed_field(2 * s + half) * value(code - 32);
    case IQ4_NL: return d * value(iq4_values[code]);
    case IQ4_XS: return d * signed_field(s) * value(iq4_values[code]);
    case Q1_0: return d * value(2 * code - 1);
    case Q2_0:
    case TERNARY: return d * value(code - 1);
    default: return 0.0f;
  }
}

int float_bytes(Format format) { return format == F32 ? 4 : 2; }

// ---- floats of a byte with a scale for each block: see formats.h

void pack_e4m3(const SourceFormat& from, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
               int64_t first_row, uint8_t* panel) {
  const int64_t blocks_a_row = in_size / e4m3_block_size;
  uint8_t* scales = panel + code_area(E4M3_128, in_size);
  std::memset(panel, 0, static_cast<size_t>(panel_bytes_of(E4M3_128, in_size)));
  for (int row = 0; row < panel_rows && first_row + row < num_rows; row++)
    for (int64_t b = 0; b < blocks_a_row; b++) {
      const uint8_t* block = blocks + ((first_row + row) * blocks_a_row + b) * from.block_bytes;
      put_float(scales, static_cast<int>(b), row, block);
      for (int k = 0; k < e4m3_block_size; k++)
        panel[(b * e4m3_block_size + k) * panel_rows + row] = block[4 + k];
    }
}

void unpack_e4m3(const uint8_t* panel, int64_t in_size, int row, float* out) {
  const uint8_t* scales = panel + code_area(E4M3_128, in_size);
  for (int64_t k = 0; k < in_size; k++) {
    const float scale = float_at(scales, static_cast<int>(k / e4m3_block_size), row);
    out[k] = scale * (e4m3_factor * float_of_half(half_of_e4m3(panel[k * panel_rows + row])));
  }
}

void pack_floats(const SourceFormat& from, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
                 int64_t first_row, uint8_t* panel) {
  const int size = float_bytes(from.packed);
  for (int row = 0; row < panel_rows; row++) {
    const bool exists = first_row + row < num_rows;
    const uint8_t* source = blocks + (first_row + row) * in_size * size;
    for (int64_t k = 0; k < in_size; k++) {
      uint8_t* to = panel + (k * panel_rows + row) * size;
      if (exists)
        std::memcpy(to, source + k * size, static_cast<size_t>(size));
      else
        std::memset(to, 0, static_cast<size_t>(size));
    }
  }
}

}  // namespace

const SourceFormat* source_format(const char* name) {
  static const SourceFormat known[] = {
      {"F32", F32, 1, 4},
      {"F16", F16, 1, 2},
      {"BF16", BF16, 1, 2},
      {"Q8_0", Q8_0, 32, 34},
      {"Q4_0", Q4_0, 32, 18},
      {"Q4_1", Q4_1, 32, 20},
      {"Q5_0", Q5_0, 32, 22},
      {"Q5_1", Q5_1, 32, 24},
      {"Q2_K", Q2_K, 256, 84},
      {"Q3_K", Q3_K, 256, 110},
      {"Q4_K", Q4_K, 256, 144},
      {"Q5_K", Q5_K, 256, 176},
      {"Q6_K", Q6_K, 256, 210},
      {"IQ4_NL", IQ4_NL, 32, 18},
      {"IQ4_XS", IQ4_XS, 256, 136},
      {"MXFP4", MXFP4, 32, 17},
      {"NVFP4", NVFP4, 64, 36},
      {"Q1_0", Q1_0, 128, 18},
      {"Q2_0", Q2_0, 64, 18},
      {"IQ1_S", IQ1_S, 256, 50},
      {"IQ1_M", IQ1_M, 256, 56},
      {"IQ2_XXS", IQ2_XXS, 256, 66},
      {"IQ2_XS", IQ2_XS, 256, 74},
      {"IQ2_S", IQ2_S, 256, 82},
      {"IQ3_XXS", IQ3_XXS, 256, 98},
      {"IQ3_S", IQ3_S, 256, 110},
      {"U4_128", U4_128, 128, 72},
      {"I8_128", I8_128, 128, 132},
      {"E4M3_128", E4M3_128, e4m3_block_size, 4 + e4m3_block_size},
      {"NVFP4_128", NVFP4_128, 128, 76},
      {"TQ1_0", TERNARY, 256, 54},
      {"TQ2_0", TERNARY, 256, 66},
      {"I2_S", TERNARY, 128, 32},
  };
  for (const SourceFormat& format : known)
    if (std::strcmp(format.name, name) == 0) return &format;
  return nullptr;
}

const SourceFormat& source_named(const std::string& name) {
  if (const SourceFormat* found = source_format(name.c_str())) return *found;
  throw std::invalid_argument("no kernel for the format " + name);
}

static void expect_matrix_size(const SourceFormat& from, int64_t num_rows, int64_t in_size) {
  expect_within("the rows of a matrix", num_rows, 1, max_vocabulary);
  expect_within("the columns of a matrix", in_size, 1, max_row_size);
  expect(in_size % from.block_size == 0, "a row does not hold whole blocks");
}

int64_t packed_size(const SourceFormat& from, int64_t num_rows, int64_t in_size) {
  expect_matrix_size(from, num_rows, in_size);
  return checked_product((num_rows + panel_rows - 1) / panel_rows,
                         panel_bytes_of(from.packed, in_size));
}

void expect_blocks(const SourceFormat& from, int64_t num_rows, int64_t in_size, size_t num_bytes) {
  expect_matrix_size(from, num_rows, in_size);
  const int64_t needed = checked_product(num_rows, in_size / from.block_size, from.block_bytes);
  expect(static_cast<int64_t>(num_bytes) == needed, "the blocks do not make these rows");
}

void pack_panel(const SourceFormat& from, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
                int64_t first_row, uint8_t* panel) {
  const FormatInfo& info = format_infos[from.packed];
  if (from.packed == E4M3_128) return pack_e4m3(from, blocks, in_size, num_rows, first_row, panel);
  if (info.bits == 0) return pack_floats(from, blocks, in_size, num_rows, first_row, panel);
  if (has_grid(from.packed))
    return pack_grid_panel(from, blocks, in_size, num_rows, first_row, panel);
  const int64_t blocks_a_row = in_size / from.block_size;
  const int sub_blocks = from.block_size / 32;
  uint8_t* scales = panel + code_area(from.packed, in_size);
  std::memset(scales, 0,
              static_cast<size_t>(panel_bytes_of(from.packed, in_size)) -
                  static_cast<size_t>(scales - panel));
  uint8_t codes[256];
  SubBlock spans[8];
  std::memset(spans, 0, sizeof spans);
  for (int64_t b = 0; b < blocks_a_row; b++) {
    for (int row = 0; row < panel_rows && first_row + row < num_rows; row++) {
      const uint8_t* block = blocks + ((first_row + row) * blocks_a_row + b) * from.block_bytes;
      read_codes(from, block, codes);
      put_scales(from, block, row, scales + b * sub_blocks / info.scale_span * info.scale_bytes);
      for (int s = 0; s < sub_blocks; s++) std::memcpy(spans[s][row], codes + 32 * s, 32);
    }
    for (int s = 0; s < sub_blocks; s++)
      put_planes(info.bits, spans[s], panel + (b * sub_blocks + s) * info.code_bytes);
  }
}

void unpack_row(Format format, const uint8_t* panel, int64_t in_size, int row, float* out) {
  const FormatInfo& info = format_infos[format];
  if (format == E4M3_128) return unpack_e4m3(panel, in_size, row, out);
  if (info.bits == 0) {
    for (int64_t k = 0; k < in_size; k++) {
      const uint8_t* from = panel + (k * panel_rows + row) * float_bytes(format);
      uint16_t bits;
      if (format == F32)
        std::memcpy(out + k, from, 4);
      else
        std::memcpy(&bits, from, 2);
      if (format == F16) out[k] = float_of_half(bits);
      if (format == BF16) out[k] = float_of_bits(static_cast<uint32_t>(bits) << 16);
    }
    return;
  }
  if (has_grid(format)) return unpack_grid_row(format, panel, in_size, row, out);
  const uint8_t* scales = panel + code_area(format, in_size);
  for (int64_t s = 0; s < in_size / 32; s++) {
    const uint8_t* codes = panel + s * info.code_bytes;
    const uint8_t* record = scales + s / info.scale_span * info.scale_bytes;
    const int in_span = static_cast<int>(s % info.scale_span);
    for (int k = 0; k < 32; k++)
      out[32 * s + k] =
          weight_of(format, code_at(info.bits, codes, row, k), record, in_span, k / 16, row);
  }
}

bool common_ternary_scale(const SourceFormat& from, const uint8_t* blocks, int64_t num_blocks,
                          float* scale) {
  bool found = false;
  uint8_t codes[256];
  for (int64_t b = 0; b < num_blocks; b++) {
    const uint8_t* block = blocks + b * from.block_bytes;
    const float own = float_of_half(ternary_scale(from, block));
    if (found && own == *scale) continue;
    read_codes(from, block, codes);
    bool is_zero = true;
    for (int i = 0; i < from.block_size; i++) is_zero = is_zero && codes[i] == 1;
    if (is_zero) continue;
    if (found) return false;
    found = true;
    *scale = own;
  }
  if (!found) *scale = 1.0f;
  return true;
}

void set_ternary_scale(uint8_t* panel, int64_t in_size, float scale) {
  const uint16_t half = half_of_float(scale);
  uint8_t* scales = panel + code_area(TERNARY, in_size);
  for (int64_t i = 0; i < num_scale_records(TERNARY, in_size) * panel_rows; i++)
    std::memcpy(scales + 2 * i, &half, 2);
}

}  // namespace quire
