// What the units offer: one table of functions for each instruction set, all with the same results.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int group_size = 32;  // activations that share a scale; one sub-block of weights
constexpr int row_group = 16;   // weight rows that are packed side by side, one to a lane
constexpr int block_size = 16;  // tokens in a block of keys and values
constexpr int tile_size = 128;  // positions whose attention is one part, at multiples of it

// Thirty-two activations of one token: value = scale * code. The sum is of codes, the scaled one is
// scale * sum: what weights with an offset are multiplied by.
struct alignas(64) ActivationGroup {
  int8_t codes[group_size];
  float scale, sum, scaled_sum;
  float unused[5];
};
static_assert(sizeof(ActivationGroup) == 64, "one cache line");

constexpr int block_group = 256;  // activations that share a scale where weights do in such blocks

// As many activations of one token: value = scale * code, with the sums of codes by 32 and by 16.
struct alignas(64) ActivationBlock {
  int8_t codes[block_group];
  int16_t sums[block_group / 32], half_sums[block_group / 16];
  float scale;
  float unused[3];
};
static_assert(sizeof(ActivationBlock) == 320, "five cache lines");

// Rows [first_group, first_group + num_groups) * row_group of a packed matrix times every column.
struct Product {
  int format;              // index into the formats of formats.h
  const uint8_t* weights;  // of the whole matrix
  int64_t group_bytes;     // of one row group
  int64_t in_size;         // K
  int first_group, num_groups;
  int num_rows;           // that exist from the first group on; the rest of the last is padding
  const void* columns;    // ActivationGroup, ActivationBlock or float, as the format wants
  int64_t column_stride;  // in these
  const void* residuals;  // null, or what rounding left of the columns, likewise: multiplied too
  int num_columns;
  float* out;  // [column][row - first row]
  int64_t out_stride;
};

// Keys and values of one layer in blocks. A block holds, for each kv head in turn, its keys
// [head_dim][block_size] and its values [block_size][head_dim].
//   half: uint16 halves. int8: bytes, with one float scale for each (token, kv head) of the keys in
//   key_scales [block][kv head][block_size], of the values in value_scales likewise.
struct LayerCache {
  uint8_t* data;
  int64_t block_bytes;
  float* key_scales;  // null where the cache is in halves
  float* value_scales;
  bool is_int8;
};

// Where one new token stands, and where its sequence's blocks are.
struct RowPlace {
  int32_t position;
  const int32_t* block_table;
};

struct Rope {
  int dims;              // of each head that turn; the rest stay
  bool interleaved;      // pairs are neighbours, not halves
  const float* cosines;  // [position][dims / 2]
  const float* sines;
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  int window;      // positions a token sees; 0: all
  float scale;     // of the scores
  float soft_cap;  // 0: none; else scores become cap * tanh(score / cap)
};

// Queries of one kv head that are packed for one walk over its tiles, and those of them that are
// computed side by side, at most. Larger groups of query heads are worked in pieces.
constexpr int most_queries_packed = 128;
constexpr int most_queries_at_once = 8;

// Floats that a thread's attention works in: packed queries, and what they mix of a tile. Whole
// cache lines.
constexpr int64_t attention_workspace(int64_t head_dim) {
  return (most_queries_packed + most_queries_at_once) * ((head_dim + 15) / 16 * 16);
}

enum class Gate : int { silu = 0, relu2 = 1 };

struct Kernels {
  const char* name;
  // ---- products
  void (*product)(const Product&);
  // Integer multiplications and additions at this unit's limit: rounds * 4096 of each.
  int64_t (*peak_dots)(int64_t rounds);
  // ---- one row (token) at a time; sizes need not be multiples of anything unless said
  void (*rms_norm)(const float* x, const float* weight, int size, float epsilon, float* out);
  void (*quantise_groups)(const float* x, int size, ActivationGroup* out);  // size % 32 == 0
  void (*quantise_blocks)(const float* x, int size, ActivationBlock* out);  // size % 256 == 0
  // One scale for the whole row, returned; the groups' own scales are 1.
  float (*quantise_row)(const float* x, int size, ActivationGroup* out);
  void (*gate)(Gate kind, const float* gate, const float* up, int size, float* out);
  void (*add)(float* x, const float* y, int size);
  void (*turn)(float* heads, int num_heads, int head_dim, const Rope&, int position);
  void (*store_key_value)(const LayerCache&, const AttentionShape&, const RowPlace&,
                          const float* key, const float* value);
  // Attention of the query heads of one kv head for `num_rows` tokens of ONE sequence at ascending,
  // consecutive positions (one block table). queries and out: [row][stride], all heads of a row.
  // workspace: attention_workspace(head_dim) floats at a cache line, of the calling thread alone.
  void (*attend)(const LayerCache&, const AttentionShape&, int kv_head, const RowPlace* rows,
                 int num_rows, const float* queries, float* out, int64_t stride, float* workspace);
  // The same attention of one row in parts, with the same bits, for few rows and long contexts.
  // Parts: [tile - first_tile][query head of the kv head][head_dim + 2]. Tiles are those of
  // tile_size positions from the one the row's window begins in to the one it stands in.
  // merge_tiles takes all of them and writes the kv head's heads of `out`, a row of all heads.
  void (*attend_tiles)(const LayerCache&, const AttentionShape&, int kv_head, const RowPlace& row,
                       int first_tile, int num_tiles, const float* queries, float* parts,
                       float* workspace);
  void (*merge_tiles)(const AttentionShape&, int kv_head, int num_tiles, const float* parts,
                      float* out);
  void (*soft_cap)(float* x, int64_t size, float cap);
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();  // null where the compiler or the processor cannot
const Kernels* avx512_kernels();
const Kernels* amx_kernels();  // null too where the system does not lend its registers
const Kernels* kernels_named(const char* name);  // "": the best; null where none such runs here

}  // namespace quire
