// From GGUF's blocks to packed row groups, and back for single rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats.h"

namespace quire {

// How a GGUF tensor of a format lies in its file.
struct SourceFormat {
  const char* name;
  Format packed;
  int block_size;  // weights
  int block_bytes;
};

const SourceFormat* source_format(const char* name);        // null where there is none
const SourceFormat& source_named(const std::string& name);  // throws std::invalid_argument

// The bytes of a matrix once packed; throws where the sizes make no matrix or its bytes no number.
int64_t packed_size(const SourceFormat&, int64_t num_rows, int64_t in_size);

// Throws std::invalid_argument unless so many bytes are the blocks of such a matrix.
void expect_blocks(const SourceFormat&, int64_t num_rows, int64_t in_size, size_t num_bytes);

// Packs rows [first_row, first_row + 16) into one row group; rows from num_rows on become zeros.
// `blocks` are the whole matrix's.
void pack_group(const SourceFormat&, const uint8_t* blocks, int64_t in_size, int64_t num_rows,
                int64_t first_row, uint8_t* group);

// The weights of one row, as floats; `group` is its row group.
void unpack_row(Format, const uint8_t* group, int64_t in_size, int row_in_group, float* out);

// The one scale that all blocks of a ternary matrix share, where there is one: blocks of zeros
// alone have any scale. Returns false where scales differ.
bool common_ternary_scale(const SourceFormat&, const uint8_t* blocks, int64_t num_blocks,
                          float* scale);

// Sets every scale of a packed ternary row group.
void set_ternary_scale(uint8_t* group, int64_t in_size, float scale);

}  // namespace quire
