// Packs GGUF blocks into panels, and unpacks single rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats.h"

namespace quire {

// A format's blocks in a GGUF file.
struct SourceFormat {
  const char* name;
  Format packed;
  int block_size;  // weights
  int block_bytes;
};

const SourceFormat* source_format(const char* name);        // null where there is none
const SourceFormat& source_named(const std::string& name);  // throws std::invalid_argument

// The bytes of a packed matrix; throws where a size is out of bounds or the bytes overflow.
int64_t packed_size(const SourceFormat&, int64_t num_rows, int64_t in_size);

// Throws std::invalid_argument unless a matrix of this shape has so many bytes of blocks.
void expect_blocks(const SourceFormat&, int64_t num_rows, int64_t in_size, size_t num_bytes);

// Packs rows [first_row, first_row + 16) into one panel; rows from num_rows on are zeros.
// `blocks` are the whole matrix's.
void pack_panel(const SourceFormat&, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
                int64_t first_row, uint8_t* panel);

// The weights of one row of a panel, as floats.
void unpack_row(Format, const uint8_t* panel, int64_t in_size, int row_in_panel, float* out);

// The scale that all blocks of a ternary matrix share; all-zero blocks match any scale. Returns
// false where scales differ.
bool common_ternary_scale(const SourceFormat&, const uint8_t* blocks, int64_t num_blocks,
                          float* scale);

// Sets every scale of a packed ternary panel.
void set_ternary_scale(uint8_t* panel, int64_t in_size, float scale);

}  // namespace quire
