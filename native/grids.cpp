// Tables of points, and packing and unpacking of the formats that have them; see grids.h.
#include "grids.h"

#include <cstring>

#include "grid_bits.h"  // made of quant/grids.bin by CMake
#include "kernels.h"
#include "pack.h"
#include "scalar.h"

namespace quire {
namespace {

// ---- the tables: a set bit for each point, read as a number whose lowest digit is the first

constexpr int three_to_the_eighth = 6561, eight_to_the_fourth = 4096;

template <class Point, int size>
constexpr void fill(Point (&points)[size], const uint8_t*& bits, const uint8_t* values, int base,
                    int num_numbers) {
  int found = 0;
  for (int number = 0; number < num_numbers; number++) {
    if (!(bits[number / 8] >> (number % 8) & 1)) continue;
    Point point = 0;
    int rest = number;
    for (size_t i = 0; i < sizeof(Point); i++, rest /= base)
      point |= static_cast<Point>(values[rest % base]) << (8 * i);
    points[found++] = point;
  }
  bits += (num_numbers + 7) / 8;
}

constexpr Grids make_grids() {
  constexpr uint8_t iq2[] = {8, 25, 43}, iq1[] = {0, 1, 2};
  constexpr uint8_t iq3_xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
  constexpr uint8_t iq3_s[] = {1, 3, 5, 7, 9, 11, 13, 15};
  Grids made = {};
  const uint8_t* bits = grid_bits;
  fill(made.iq2_xxs, bits, iq2, 3, three_to_the_eighth);
  fill(made.iq2_xs, bits, iq2, 3, three_to_the_eighth);
  fill(made.iq2_s, bits, iq2, 3, three_to_the_eighth);
  fill(made.iq1, bits, iq1, 3, three_to_the_eighth);
  fill(made.iq3_xxs, bits, iq3_xxs, 8, eight_to_the_fourth);
  fill(made.iq3_s, bits, iq3_s, 8, eight_to_the_fourth);
  return made;
}

// ---- one row of one sub-block, as a GGUF block has it

struct GridRow {
  int numbers[8];    // of its points
  uint8_t signs[4];  // of eight weights each; a set bit is a minus
  int up;            // IQ1_M: a bit a point
  int scales[2];     // of its halves; IQ1_S: with its sign
};

int word_at(const uint8_t* p, int i) { return p[2 * i] | p[2 * i + 1] << 8; }
int nibble_at(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }

// The eighth sign makes the number of minuses even.
uint8_t eight_signs(uint32_t seven) {
  seven &= 127;
  return static_cast<uint8_t>(seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7);
}

// Four times seven signs and a scale.
void read_signs_and_scale(const uint8_t* p, GridRow& to) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  for (int i = 0; i < 4; i++) to.signs[i] = eight_signs(word >> (7 * i));
  to.scales[0] = static_cast<int>(word >> 28);
}

void read_iq1(Format format, const uint8_t* block, int s, GridRow& to) {
  const bool is_s = format == IQ1_S;
  for (int i = 0; i < 4; i++) {
    const int nibble = nibble_at(block + 32, 4 * s + i);  // IQ1_M
    const int more = is_s ? word_at(block + 34, s) >> (3 * i) & 7 : nibble & 7;
    to.numbers[i] = block[(is_s ? 2 : 0) + 4 * s + i] | more << 8;
    to.up |= (~nibble >> 3 & 1) << i;
  }
  if (is_s) to.scales[0] = word_at(block + 34, s) >> 12;
  for (int half = 0; half < 2 && !is_s; half++) {
    const int i = 2 * s + half;
    to.scales[half] = word_at(block + 48, i / 4) >> (3 * (i % 4)) & 7;
  }
}

GridRow read_sub_block(Format format, const uint8_t* block, int s) {
  GridRow to = {};
  const auto two_scales = [&](int at) {
    for (int half = 0; half < 2; half++) to.scales[half] = nibble_at(block + at + s, half);
  };
  switch (format) {
    case IQ2_XXS:
      for (int i = 0; i < 4; i++) to.numbers[i] = block[2 + 8 * s + i];
      read_signs_and_scale(block + 6 + 8 * s, to);
      break;
    case IQ2_XS:
      for (int i = 0; i < 4; i++) {
        const int word = word_at(block + 2, 4 * s + i);
        to.numbers[i] = word & 511;
        to.signs[i] = eight_signs(static_cast<uint32_t>(word) >> 9);
      }
      two_scales(66);
      break;
    case IQ2_S:
      for (int i = 0; i < 4; i++)
        to.numbers[i] = block[2 + 4 * s + i] | (block[66 + s] >> (2 * i) & 3) << 8;
      std::memcpy(to.signs, block + 34 + 4 * s, 4);
      two_scales(74);
      break;
    case IQ3_XXS:
      for (int i = 0; i < 8; i++) to.numbers[i] = block[2 + 8 * s + i];
      read_signs_and_scale(block + 66 + 4 * s, to);
      break;
    case IQ3_S:
      for (int i = 0; i < 8; i++)
        to.numbers[i] = block[2 + 8 * s + i] | (block[66 + s] >> i & 1) << 8;
      std::memcpy(to.signs, block + 74 + 4 * s, 4);
      to.scales[0] = nibble_at(block + 106, s);
      break;
    default: read_iq1(format, block, s, to);
  }
  return to;
}

// IQ1_M has a nibble of it above the scales in each of four words.
uint16_t common_scale(Format format, const uint8_t* block) {
  int half = word_at(block, 0);
  if (format == IQ1_M) {
    half = 0;
    for (int i = 0; i < 4; i++) half |= word_at(block + 48, i) >> 12 << (4 * i);
  }
  return static_cast<uint16_t>(half);
}

// ---- to and from a panel

constexpr int num_points(Format format) { return format >= IQ3_XXS ? 8 : 4; }
constexpr bool has_signs(Format format) { return format > IQ1_M; }
constexpr bool has_scales_of_halves(Format format) {
  return format == IQ1_M || format == IQ2_XS || format == IQ2_S;
}

void put_nibble(uint8_t* nibbles, int row, int value) {
  nibbles[row % 8] |= static_cast<uint8_t>(value << (row / 8 * 4));
}
int nibble_of(const uint8_t* nibbles, int row) { return nibbles[row % 8] >> (row / 8 * 4) & 15; }

// Sets bits of zeros.
void put_sub_block(Format format, const GridRow& from, int row, uint8_t* to) {
  uint8_t* more = to + grid_more(format);
  for (int i = 0; i < num_points(format); i++) {
    const int number = from.numbers[i], upper = number >> 8;
    to[panel_rows * i + row] = static_cast<uint8_t>(number);
    if (format == IQ2_XS) put_nibble(more, row, upper << i);
    if (format == IQ3_S) more[row] |= static_cast<uint8_t>(upper << i);
    if (format == IQ2_S || format <= IQ1_M)
      more[row] |= static_cast<uint8_t>((upper & 3) << (2 * i));
    if (format <= IQ1_M) put_nibble(to + iq1_third_bit, row, upper >> 2 << i);
  }
  if (format == IQ1_M) put_nibble(to + iq1_m_up, row, from.up);
  for (int k = 0; k < 32 && has_signs(format); k++)
    to[grid_signs(format) + 4 * row + k % 4] |=
        static_cast<uint8_t>((from.signs[k / 8] >> (k % 8) & 1) << (k / 4));
}

int number_at(Format format, const uint8_t* from, int row, int i) {
  const uint8_t* more = from + grid_more(format);
  const int low = from[panel_rows * i + row];
  switch (format) {
    case IQ2_XS: return low | (nibble_of(more, row) >> i & 1) << 8;
    case IQ3_S: return low | (more[row] >> i & 1) << 8;
    case IQ2_S: return low | (more[row] >> (2 * i) & 3) << 8;
    case IQ1_S:
    case IQ1_M:
      return low | (more[row] >> (2 * i) & 3) << 8 |
             (nibble_of(from + iq1_third_bit, row) >> i & 1) << 10;
    default: return low;
  }
}

int byte_of(uint64_t point, int i) { return static_cast<int>(point >> (8 * i) & 255); }

int coordinate(Format format, int number, int i) {
  switch (format) {
    case IQ2_XXS: return byte_of(grids.iq2_xxs[number], i);
    case IQ2_XS: return byte_of(grids.iq2_xs[number], i);
    case IQ2_S: return byte_of(grids.iq2_s[number], i);
    case IQ3_XXS: return byte_of(grids.iq3_xxs[number], i);
    case IQ3_S: return byte_of(grids.iq3_s[number], i);
    default: return byte_of(grids.iq1[number], i) - 1;
  }
}

// A weight in units of d, times eight. Its product with d / 8 is exact, as GGUF's decoders' are.
int eight_times(Format format, const uint8_t* codes, int scale, int row, int k) {
  const int size = 32 / num_points(format), i = k / size;
  const int point = coordinate(format, number_at(format, codes, row, i), k % size);
  if (format == IQ1_S) return (2 * (scale & 7) + 1) * (8 * point + (scale >> 3 ? -1 : 1));
  if (format == IQ1_M) {
    const int up = nibble_of(codes + iq1_m_up, row) >> i & 1;
    return (2 * scale + 1) * (8 * point + (up ? 1 : -1));
  }
  const int is_minus = codes[grid_signs(format) + 4 * row + k % 4] >> (k / 4) & 1;
  const int factor = format == IQ3_XXS ? 2 : format == IQ3_S ? 8 : 1;
  return factor * (2 * scale + 1) * (is_minus ? -point : point);
}

}  // namespace

constexpr Grids grids = make_grids();

void pack_grid_panel(const SourceFormat& from, const uint8_t* blocks, int64_t in_size,
                     int64_t num_rows, int64_t first_row, uint8_t* panel) {
  const Format format = from.packed;
  const FormatInfo& info = format_infos[format];
  const int halves = has_scales_of_halves(format) ? 2 : 1;
  const int64_t blocks_a_row = in_size / from.block_size;
  std::memset(panel, 0, static_cast<size_t>(panel_bytes_of(format, in_size)));
  for (int64_t b = 0; b < blocks_a_row; b++)
    for (int row = 0; row < panel_rows && first_row + row < num_rows; row++) {
      const uint8_t* block = blocks + ((first_row + row) * blocks_a_row + b) * from.block_bytes;
      uint8_t* record = panel + code_area(format, in_size) + b * info.scale_bytes;
      const uint16_t common = common_scale(format, block);
      std::memcpy(record + 2 * row, &common, 2);
      for (int s = 0; s < 8; s++) {
        const GridRow found = read_sub_block(format, block, s);
        put_sub_block(format, found, row, panel + (8 * b + s) * info.code_bytes);
        for (int half = 0; half < halves; half++)
          put_nibble(record + 32 + 8 * (halves * s + half), row, found.scales[half]);
      }
    }
}

void unpack_grid_row(Format format, const uint8_t* panel, int64_t in_size, int row, float* out) {
  const FormatInfo& info = format_infos[format];
  const int halves = has_scales_of_halves(format) ? 2 : 1;
  for (int64_t s = 0; s < in_size / 32; s++) {
    const uint8_t* codes = panel + s * info.code_bytes;
    const uint8_t* record = panel + code_area(format, in_size) + s / 8 * info.scale_bytes;
    uint16_t common;
    std::memcpy(&common, record + 2 * row, 2);
    const float eighth = float_of_half(common) * 0.125f;
    for (int k = 0; k < 32; k++) {
      const int i = halves * static_cast<int>(s % 8) + k / 16 * (halves - 1);
      const int scale = nibble_of(record + 32 + 8 * i, row);
      out[32 * s + k] = eighth * static_cast<float>(eight_times(format, codes, scale, row, k));
    }
  }
}

}  // namespace quire
