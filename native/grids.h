// The formats whose weights are points of a grid, eight or four at once: IQ1, IQ2 and IQ3.
//
// A panel keeps the numbers of points; GEMM looks points up. A sub-block of sixteen rows is
//
//   numbers  of the first four or eight points of each row, their low eight bits: [point][row]
//   signs    IQ2, IQ3: one bit a weight, in the order of a plane of one bit (formats.h)
//   more     upper bits of the numbers, by row, the first point's lowest:
//            IQ2_S: two bits a point (16 bytes); IQ3_S: one (16); IQ2_XS: one (8, nibbles);
//            IQ1: two bits a point (16), then one (8, nibbles)
//   up       IQ1_M: whether points are moved up or down, a bit each (8, nibbles)
//
// Nibbles of sixteen rows are eight bytes: rows 0 to 7 low, rows 8 to 15 high. A scale record has a
// half d of each row, then nibbles for each sub-block, or half of one: s. A weight is
//
//   IQ2      d / 8 * (2 s + 1) * point * sign
//   IQ3_XXS  d / 4 * (2 s + 1) * point * sign
//   IQ3_S    d * (2 s + 1) * point * sign
//   IQ1      d / 8 * (2 s + 1) * (8 * (point - 1) + 1 or - 1), with points of 0, 1 and 2; IQ1_S has
//            that sign in the highest bit of the nibble, of a whole sub-block: set is down
#pragma once
#include <cstdint>

#include "formats.h"

namespace quire {

struct SourceFormat;

// Points as bytes, the first weight's the lowest.
struct alignas(64) Grids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024], iq1[2048];
  uint32_t iq3_xxs[256], iq3_s[512];
};
extern const Grids grids;

// Where the parts of a sub-block begin.
constexpr int grid_signs(int format) { return format >= IQ3_XXS ? 128 : 64; }
constexpr int grid_more(int format) { return format <= IQ1_M ? 64 : grid_signs(format) + 64; }
constexpr int iq1_third_bit = 80, iq1_m_up = 88;

// As pack_panel and unpack_row of pack.h, for these formats.
void pack_grid_panel(const SourceFormat&, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
                     int64_t first_row, uint8_t* panel);
void unpack_grid_row(Format, const uint8_t* panel, int64_t in_size, int row, float* out);

}  // namespace quire
