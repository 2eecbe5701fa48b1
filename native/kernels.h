// The table of kernels that each instruction-set unit provides. All units give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int group_size = 32;     // activations of an ActivationGroup; weights of a sub-block
constexpr int panel_rows = 16;     // rows of a weight matrix packed side by side, one per lane
constexpr int block_size = 16;     // tokens of a KV cache block
constexpr int kv_tile_size = 128;  // positions of an attention tile; tiles start at multiples of it

// 32 activations of one token: value = scale * code. `sum` is the sum of the codes, `second_sum`
// that of the last sixteen, `scaled_sum` is scale * sum: minimums and zero points of weights are
// multiplied by these.
struct alignas(64) ActivationGroup {
  int8_t codes[group_size];
  float scale, sum, scaled_sum;
  float row_sum;  // of the codes of a whole row: in the first group of one with a per-token scale
  float second_sum;
  float unused[3];
};
static_assert(sizeof(ActivationGroup) == 64, "one cache line");

constexpr int activation_block_size = 256;  // for weights with super-blocks of the same size

// 256 activations of one token: value = scale * code; sums of codes by 32 and by 16.
struct alignas(64) ActivationBlock {
  int8_t codes[activation_block_size];
  int16_t sums[activation_block_size / 32], half_sums[activation_block_size / 16];
  float scale;
  float unused[3];
};
static_assert(sizeof(ActivationBlock) == 320, "five cache lines");

// out = W x^T for some panels of a packed matrix W and all tokens of x.
struct Gemm {
  int format;              // index into the formats of formats.h
  bool has_unit_scales;    // ternary weights and activations with scales of 1 alone
  const uint8_t* weights;  // of the whole matrix
  int64_t panel_bytes;
  int64_t in_size;  // K
  int first_panel, num_panels;
  int num_rows;               // of W, from the first panel on; the last panel is padded
  const void* activations;    // ActivationGroup, ActivationBlock or float, by format
  int64_t activation_stride;  // in these
  const void* residuals;  // null, or the quantised rounding errors of `activations`: a second pass
  int num_tokens;
  float* out;  // [token][row - first row]
  int64_t out_stride;
  const uint8_t* next;  // panels that are read after these, to prefetch; null: those that follow
};

// The KV cache of one layer. A block holds, for each kv head, its keys [head_dim][block_size] and
// its values [block_size][value_dim].
//   half: uint16 halves. int8: bytes, with one float scale for each (token, kv head) of the keys in
//   key_scales [block][kv head][block_size], of the values in value_scales likewise.
struct LayerCache {
  uint8_t* data;
  int64_t block_bytes;
  float* key_scales;  // null where the cache is in halves
  float* value_scales;
  bool is_int8;
};

// The position of one row (token) and the block table of its sequence.
struct RowPosition {
  int32_t position;
  const int32_t* block_table;
};

struct Rope {
  int dims;              // rotated dimensions of each head; the others stay as they are
  bool interleaved;      // pairs are neighbours, not halves
  const float* cosines;  // [position][dims / 2]
  const float* sines;
};

struct AttentionShape {
  int num_heads, num_kv_heads;
  int head_dim;   // of queries and keys
  int value_dim;  // of values and of the output
  // Positions a token attends to, or the size of the chunk of which it attends to the part up to
  // itself; 0: all.
  int window;
  bool is_chunked;
  float scale;         // of the scores
  float soft_cap;      // 0: none; else scores become cap * tanh(score / cap)
  const float* sinks;  // of each head: a score that only takes weight away; null: none
  // Latent attention: the values are the first value_dim numbers of the keys, and no others are
  // kept.
  bool has_values_in_keys;
  // ALiBi, of each head: a score gets the slope times the position of the key less the query's
  // added; null: none.
  const float* slopes;
};

// Queries of one kv head that are packed for one walk over its tiles, and those of them that are
// computed at once, at most. Larger groups of query heads are split.
constexpr int max_packed_queries = 128;
constexpr int max_queries_at_once = 8;

// Floats of a thread's attention workspace: packed queries, their output of one tile, and the
// tile's values where they are in the keys. Whole cache lines.
constexpr int64_t attention_workspace(int64_t head_dim, int64_t value_dim,
                                      bool has_values_in_keys) {
  const int64_t values = (value_dim + 15) / 16 * 16;
  return max_packed_queries * ((head_dim + 15) / 16 * 16) + max_queries_at_once * values +
         (has_values_in_keys ? kv_tile_size / 2 * values : 0);  // two bytes each
}

// Floats from one row (token) to the next.
struct RowStrides {
  int64_t queries, out;
};

// What a feed-forward applies to its gate, as quire.model.spec.Activation.
enum class Gate : int { silu, gelu, gelu_tanh, relu2, clamped_swiglu, xielu };
constexpr int num_gates = 6;
// Of xielu: alpha of positive and of other values, beta, epsilon.
constexpr int num_xielu_numbers = 4;

// One token of one head that keeps a matrix S [key_dim][stride]:
//   S = decay * S;  u = step * (value - key S) where is_delta, else step * value;
//   S += key u;     out = query S
// stride: a multiple of 16; value and out have as many numbers. `to` may be `from`.
struct Recurrence {
  int key_dim;
  int64_t stride;
  float decay, step;
  bool is_delta;
  bool streams;  // `to`, at whole cache lines, is written past the caches: nobody reads it soon
  const float *key, *query, *value;
  const float* from;
  float *to, *out;
};

// Values of a sequence's state that have decays of their own for each key, [key_dim][stride]: see
// recur_each. `a` is [key_dim][a_stride].
struct EachRecurrence {
  int key_dim, size;
  int64_t stride, a_stride;
  const float *a, *d, *steps, *key, *query, *value;
  const float* from;
  float *to, *out;
};

struct Kernels {
  const char* name;
  // ---- GEMM; with few tokens it is a GEMV
  void (*gemm)(const Gemm&);
  // Integer multiply-adds at this unit's peak rate: rounds * 4096 of them.
  int64_t (*peak_dots)(int64_t rounds);
  // ---- one row (token) at a time; sizes need not be multiples of anything unless said
  // weight and bias may be null; `out` may be x
  void (*rms_norm)(const float* x, const float* weight, int size, float epsilon, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int size,
                     float epsilon, float* out);
  void (*quantise_groups)(const float* x, int size, ActivationGroup* out);  // size % 32 == 0
  void (*quantise_blocks)(const float* x, int size, ActivationBlock* out);  // size % 256 == 0
  // One scale per token, returned; the groups' own scales are 1.
  float (*quantise_per_token)(const float* x, int size, ActivationGroup* out);
  // up may be null: a feed-forward without a gate, as it always is with xielu, which alone takes
  // numbers
  void (*gate)(Gate kind, const float* numbers, const float* gate, const float* up, int size,
               float* out);
  void (*add)(float* x, const float* y, int size);
  void (*add_scaled)(float* x, const float* y, float factor, int size);  // the product is rounded
  void (*rope)(float* heads, int num_heads, int head_dim, const Rope&, int position);
  void (*store_key_value)(const LayerCache&, const AttentionShape&, const RowPosition&,
                          const float* key, const float* value);
  // Attention of the query heads of one kv head for `num_rows` tokens of ONE sequence at ascending,
  // consecutive positions (one block table). queries and out: [row][stride], all heads of a row.
  // workspace: attention_workspace() floats at a cache line, of the calling thread alone.
  void (*attend)(const LayerCache&, const AttentionShape&, int kv_head, const RowPosition* rows,
                 int num_rows, const float* queries, float* out, RowStrides strides,
                 float* workspace);
  // The same attention of one row split by tiles, with the same bits: for few rows and long
  // contexts. partials: [tile - first_tile][query head of the kv head][value_dim + 2]. Tiles are
  // those from the one in which the row's window begins to the one that holds its position.
  // merge_splits takes all of them and writes the kv head's query heads of `out`, a row of all
  // heads.
  void (*attend_split)(const LayerCache&, const AttentionShape&, int kv_head,
                       const RowPosition& row, int first_tile, int num_tiles, const float* queries,
                       float* partials, float* workspace);
  void (*merge_splits)(const AttentionShape&, int kv_head, int num_tiles, const float* partials,
                       float* out);
  void (*soft_cap)(float* x, int64_t size, float cap);
  // ---- layers that keep a state: see recurrence.h
  void (*convolve)(const float* const* inputs, const float* taps, int64_t tap_stride, int kernel,
                   const float* bias, bool has_silu, int size, float* out);
  void (*multiply_sigmoid)(float* x, const float* gate, int size);
  void (*make_unit)(const float* x, int size, float epsilon, float factor, float* out);
  void (*recur)(const Recurrence&);
  void (*recur_each)(const EachRecurrence&);
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();  // null where the compiler or the processor lacks it
const Kernels* avx512_kernels();
const Kernels* amx_kernels();  // null also where the system grants no tile registers
const Kernels* kernels_named(const char* name);  // "": the best; null where no such unit runs here

}  // namespace quire
