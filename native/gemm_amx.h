// GEMM of many tokens with AMX: tiles of signed bytes, multiplied to exact int32 sums.
//
// One operand is the codes of a sub-block, sixteen rows times 32 k, as packed, minus their zero
// point; the other is the activations of up to sixteen tokens. The sums leave the tile registers
// through memory. The float sums follow the order of gemm_accumulate.h, so the bits are those of
// the other units.
//
// While tile instructions run, one of the two ports for 512-bit vectors neither multiplies nor
// converts (measured on Emerald Rapids: beside a single tile load such a loop ran at half its
// rate), and the second hardware thread may compete for the core. So the number of other
// instructions is kept small: the float sums of sixteen rows times sixteen tokens stay in
// registers, and the fields of an activation are memory operands.

// ---- the instructions

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

enum TileNumber : int { tile_of_sums, tile_of_activations, tile_of_codes };

INLINE void set_tile_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int tile>
INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int sums, int activations, int codes>
INLINE void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(activations), "i"(codes));
}

template <int sums, int activations, int codes>  // whose codes have no sign
INLINE void multiply_tiles_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(activations), "i"(codes));
}

INLINE const ActivationGroup* offset_by(const ActivationGroup* group, int64_t bytes) {
  return reinterpret_cast<const ActivationGroup*>(reinterpret_cast<const char*>(group) + bytes);
}

// ---- some sub-blocks of two panels

constexpr int tile_panels = panels_at_once;
constexpr int max_tile_rows = 16;
constexpr int tile_sums = max_tile_rows * panel_rows;
constexpr int max_unpacked_sub_blocks = 3 * slab;  // unpacked at once: they fit the L1 cache
constexpr int fetch_span = 4;                      // sub-blocks per call of SlabPrefetch::fetch

struct alignas(64) TileWeights {
  uint8_t codes[tile_panels][max_unpacked_sub_blocks][8][64];
  float scales[tile_panels][max_unpacked_sub_blocks][panel_rows];
  float minimums[tile_panels][max_unpacked_sub_blocks][panel_rows];
};

template <int zero>
INLINE Codes less_zero(Codes x) {
  if (zero == 0) return x;
  if (zero == 128) return flip_sign(x);
  return {_mm512_sub_epi8(x.v, _mm512_set1_epi8(static_cast<char>(zero)))};
}

// Codes that are packed as signed bytes are multiplied in place.
template <class T>
constexpr bool are_packed_as_bytes = T::info.code_bytes == 512;

template <class T>
void fill_weights(const PackedSource<T, tile_panels>& from, int first, int count, TileWeights& to) {
  const PackedSource<T, tile_panels> source = from;  // a local copy: stores to `to` do not alias it
  for (int s = 0; s < count; s++) {
    UNROLL(2)
    for (int g = 0; g < tile_panels; g++) {
      if (!are_packed_as_bytes<T>) {
        UNROLL(8)
        for (int j = 0; j < 8; j++)
          store_codes(to.codes[g][s][j], less_zero<T::zero>(source.codes(first + s, g, j)));
      }
      store(to.scales[g][s], source.scale(first + s, g, 0));
      if constexpr (T::has_minimum) store(to.minimums[g][s], source.minimum(first + s, g));
    }
  }
}

// Tokens in blocks of one size, so that the tile shapes stay; the last block overlaps the one
// before it to end with the last token.
struct TokenBlocks {
  int num_tokens, count, tokens;
  explicit TokenBlocks(int num_tokens)
      : num_tokens(num_tokens),
        count((num_tokens + max_tile_rows - 1) / max_tile_rows),
        tokens((num_tokens + count - 1) / count) {}
  int first(int block) const {
    const int last = num_tokens - tokens;
    return block * tokens < last ? block * tokens : last;
  }
};

struct alignas(64) TileSums {
  int32_t of[max_tile_rows][panel_rows];  // [token]
};

// One sub-block of a panel times a block of tokens.
INLINE void multiply(const ActivationGroup* group, int64_t stride, const uint8_t* codes,
                     TileSums& to) {
  load_tile<tile_of_activations>(group->codes, stride);
  load_tile<tile_of_codes>(codes, 64);
  clear_tile<tile_of_sums>();
  multiply_tiles<tile_of_sums, tile_of_activations, tile_of_codes>();
  store_tile<tile_of_sums>(&to, 64);
}

// A panel times a block of tokens or of their residuals, over some sub-blocks.
struct TilePiece {
  const ActivationGroup* activations;
  const uint8_t* codes;
  const float* scales;  // and minimums, as they lie in TileWeights
  float* sums;          // [token][16]: of the sub-blocks before, and with these
  float* out;           // where the sums go if these sub-blocks are the last, else null
  int num_rows;         // of the panel that exist
  bool is_first;        // sums start at 0
};

// Some sub-blocks, to be multiplied with all tokens, piece by piece.
struct TileRun {
  const TokenBlocks& blocks;
  const ActivationGroup *activations, *residuals;  // at the first sub-block; the latter may be null
  int64_t stride;                                  // of the activations of a token, in bytes
  const uint8_t* codes[tile_panels];
  const TileWeights& weights;
  float* sums;  // [block][panel][token][16]
  float* out;   // of the first row and token
  int64_t out_stride;
  int num_rows;  // from the first row on
  int count;     // sub-blocks
  bool is_first, is_last;

  int pieces_per_block() const { return residuals ? 2 * tile_panels : tile_panels; }
  int num_pieces() const { return blocks.count * pieces_per_block(); }
  TilePiece piece(int n) const {
    const int block = n / pieces_per_block(), g = n % tile_panels;
    const int first = blocks.first(block), row = g * panel_rows;
    const bool is_first_pass = n % pieces_per_block() < tile_panels;
    return {offset_by(is_first_pass ? activations : residuals, first * stride),
            codes[g],
            weights.scales[g][0],
            sums + (block * tile_panels + g) * tile_sums,
            is_last && !(is_first_pass && residuals) ? out + first * out_stride + row : nullptr,
            num_rows - row,
            is_first && is_first_pass};
  }
};

// Hides a pointer's origin from GCC, which would otherwise keep one register for each token.
template <class P>
INLINE void hide_origin(P& pointer) {
  asm("" : "+r"(pointer));
}

// One sub-block's float sums, as in gemm_accumulate.h's `accumulate`.
template <bool has_minimum, int tokens>
INLINE void add_floats(const ActivationGroup* group, int64_t stride, const float* scales,
                       const TileSums& products, Floats* acc) {
  constexpr int64_t to_minimums = tile_panels * max_unpacked_sub_blocks * panel_rows;
  static_assert(offsetof(TileWeights, minimums) - offsetof(TileWeights, scales) ==
                to_minimums * sizeof(float));
  const int64_t stride3 = 3 * stride;
  const Floats scale = load(scales), minimum = load(scales + to_minimums);
  UNROLL(16)
  for (int t = 0; t < tokens; t++) {
    const ActivationGroup& a = *offset_by(group, t % 4 == 3 ? stride3 : t % 4 * stride);
    const Floats sum = to_floats(load(products.of[t]));
    acc[t] = fma(sum, scale * broadcast(a.scale), acc[t]);
    if (has_minimum) acc[t] = fma(minimum, broadcast(a.scaled_sum), acc[t]);
    if (t % 4 == 3) {
      group = offset_by(group, 4 * stride);
      hide_origin(group);
    }
  }
}

// The float sums of all pieces; the tile products run some sub-blocks ahead of them.
template <bool has_minimum, int tokens>
void add_run(const TileRun& run, SlabPrefetch& next) {
  constexpr int max_lead = 2, ring = 4;
  TileSums products[ring];
  const int64_t stride = run.stride;
  const int count = run.count, lead = count < max_lead ? count : max_lead;
  const int num_pieces = run.num_pieces();
  unsigned at = 0;
  TilePiece piece = run.piece(0), following = {};
  for (int s = 0; s < lead; s++)
    multiply(piece.activations + s, stride, piece.codes + 512 * s, products[s]);
  for (int n = 0; n < num_pieces; n++, piece = following) {
    following = n + 1 < num_pieces ? run.piece(n + 1) : TilePiece{};
    const ActivationGroup *group = piece.activations, *ahead = group + lead;
    const uint8_t* codes = piece.codes + 512 * lead;
    const float* scales = piece.scales;
    Floats acc[tokens];
    UNROLL(16)
    for (int t = 0; t < tokens; t++)
      acc[t] = piece.is_first ? broadcast(0.0f) : load(piece.sums + t * panel_rows);
    for (int s = 0; s < count; s++) {
      if (s % fetch_span == 0) next.fetch();
      if (s == count - lead) ahead = following.activations, codes = following.codes;
      if (ahead) {
        multiply(ahead, stride, codes, products[(at + lead) % ring]);
        ahead++;
        codes += 512;
      }
      const TileSums* sums = &products[at++ % ring];
      hide_origin(sums);
      add_floats<has_minimum, tokens>(group, stride, scales, *sums, acc);
      group++;
      scales += panel_rows;
    }
    UNROLL(16)
    for (int t = 0; t < tokens; t++)
      if (piece.out)
        store_rows(piece.out + t * run.out_stride, acc[t], piece.num_rows);
      else
        store(piece.sums + t * panel_rows, acc[t]);
  }
}

// ---- all sub-blocks of two panels

void shape_tiles(int tokens) {
  TileShapes shapes = {};
  shapes.palette = 1;
  shapes.rows[tile_of_sums] = shapes.rows[tile_of_activations] = static_cast<uint8_t>(tokens);
  shapes.rows[tile_of_codes] = 8;
  shapes.row_bytes[tile_of_sums] = shapes.row_bytes[tile_of_codes] = 64;
  shapes.row_bytes[tile_of_activations] = group_size;
  set_tile_shapes(shapes);
}

template <class T>
class AmxGemm {
 public:
  AmxGemm(const Gemm& p, int panel, int token, int num_tokens)
      : p_(p),
        source_(packed_source<T, tile_panels>(p, panel)),
        panel_(panel),
        token_(token),
        blocks_(num_tokens),
        sub_blocks_(static_cast<int>(p.in_size / group_size)) {}

  void run() {
    shape_tiles(blocks_.tokens);
    const int num_runs = (sub_blocks_ + max_unpacked_sub_blocks - 1) / max_unpacked_sub_blocks;
    // The residual pass alternates with the first pass, slab by slab.
    const int step = p_.residuals ? slab : (sub_blocks_ + num_runs - 1) / num_runs;
    for (int first = 0; first < sub_blocks_; first += step) {
      const TileRun run = begin_run(first, sub_blocks_ - first < step ? sub_blocks_ - first : step);
      const int num_calls = run.num_pieces() * ((run.count + fetch_span - 1) / fetch_span);
      SlabPrefetch next(source_, first + run.count, sub_blocks_, num_calls, step);
      add(run, next);
    }
    release_tiles();  // else a waiting thread's tiles are saved at every switch
  }

 private:
  TileRun begin_run(int first, int count) {
    fill_weights(source_, first, count, weights_);
    const int64_t at = token_ * p_.activation_stride + first;
    const auto* activations = static_cast<const ActivationGroup*>(p_.activations) + at;
    const auto* residuals = static_cast<const ActivationGroup*>(p_.residuals);
    const auto codes = [&](int g) {
      return are_packed_as_bytes<T> ? source_.codes_of[g] + int64_t{first} * 512
                                    : weights_.codes[g][0][0];
    };
    return {blocks_,
            activations,
            residuals ? residuals + at : nullptr,
            p_.activation_stride * static_cast<int64_t>(sizeof(ActivationGroup)),
            {codes(0), codes(1)},
            weights_,
            sums_,
            p_.out + token_ * p_.out_stride + panel_ * panel_rows,
            p_.out_stride,
            p_.num_rows - panel_ * panel_rows,
            count,
            first == 0,
            first + count == sub_blocks_};
  }

  static void add(const TileRun& run, SlabPrefetch& next) {
    switch (run.blocks.tokens) {
      case 8: return add_run<T::has_minimum, 8>(run, next);
      case 9: return add_run<T::has_minimum, 9>(run, next);
      case 10: return add_run<T::has_minimum, 10>(run, next);
      case 11: return add_run<T::has_minimum, 11>(run, next);
      case 12: return add_run<T::has_minimum, 12>(run, next);
      case 13: return add_run<T::has_minimum, 13>(run, next);
      case 14: return add_run<T::has_minimum, 14>(run, next);
      case 15: return add_run<T::has_minimum, 15>(run, next);
      default: return add_run<T::has_minimum, 16>(run, next);
    }
  }

  const Gemm& p_;
  const PackedSource<T, tile_panels> source_;
  const int panel_, token_;
  const TokenBlocks blocks_;
  const int sub_blocks_;
  TileWeights weights_;
  alignas(64) float sums_[max_tile_tokens * tile_panels * panel_rows];
};

// Whether tiles are faster than dot products, as measured on Emerald Rapids: configuring the tiles
// costs more than few tokens of few sub-blocks save.
template <class T>
bool suits_tiles(const Gemm& p) {
  const int64_t work = p.num_tokens * (p.in_size / group_size);
  return are_packed_as_bytes<T> ? p.num_tokens >= 8 && work >= 256
                                : p.num_tokens >= 16 && work >= 576;
}

#include "gemm_amx_blocks.h"

constexpr int min_block_tokens = 16;  // with fewer, making the planes costs more than it saves

// Runs pairs of panels with `Tiled`, a single last panel without tiles.
template <class T, template <class> class Tiled>
void amx_panels(const Gemm& p, int tokens_limit) {
  const int passes = (p.num_tokens + tokens_limit - 1) / tokens_limit;
  int panel = 0;
  for (; panel + tile_panels <= p.num_panels; panel += tile_panels)
    for (int pass = 0; pass < passes; pass++) {
      const int first = pass * p.num_tokens / passes, end = (pass + 1) * p.num_tokens / passes;
      Tiled<T>(p, panel, first, end - first).run();
    }
  for (; panel < p.num_panels; panel++) gemm_panels<T, 1>(p, panel);
}

template <class T>
void amx_gemm_quantised(const Gemm& p) {
  if constexpr (T::in_blocks) {
    if (p.num_tokens < min_block_tokens) return gemm_quantised<T>(p);
    amx_panels<T, AmxBlockGemm>(p, block_tokens_limit(p.in_size));
  } else {
    if (!suits_tiles<T>(p)) return gemm_quantised<T>(p);
    amx_panels<T, AmxGemm>(p, max_tile_tokens);
  }
}

void amx_gemm(const Gemm& p) {
  switch (static_cast<Format>(p.format)) {
    case Q8_0: return amx_gemm_quantised<AsQ8_0>(p);
    case Q4_0: return amx_gemm_quantised<AsQ4_0>(p);
    case Q4_1: return amx_gemm_quantised<AsQ4_1>(p);
    case Q5_0: return amx_gemm_quantised<AsQ5_0>(p);
    case Q5_1: return amx_gemm_quantised<AsQ5_1>(p);
    case Q2_K: return amx_gemm_quantised<AsQ2_K>(p);
    case Q3_K: return amx_gemm_quantised<AsQ3_K>(p);
    case Q4_K: return amx_gemm_quantised<AsQ4_K>(p);
    case Q5_K: return amx_gemm_quantised<AsQ5_K>(p);
    case Q6_K: return amx_gemm_quantised<AsQ6_K>(p);
    case IQ4_NL: return amx_gemm_quantised<AsIQ4_NL>(p);
    case IQ4_XS: return amx_gemm_quantised<AsIQ4_XS>(p);
    case IQ1_S: return amx_gemm_quantised<AsIQ1_S>(p);
    case IQ1_M: return amx_gemm_quantised<AsIQ1_M>(p);
    case IQ2_XXS: return amx_gemm_quantised<AsIQ2_XXS>(p);
    case IQ2_XS: return amx_gemm_quantised<AsIQ2_XS>(p);
    case IQ2_S: return amx_gemm_quantised<AsIQ2_S>(p);
    case IQ3_XXS: return amx_gemm_quantised<AsIQ3_XXS>(p);
    case IQ3_S: return amx_gemm_quantised<AsIQ3_S>(p);
    case MXFP4: return amx_gemm_quantised<AsMXFP4>(p);
    case Q1_0: return amx_gemm_quantised<AsQ1_0>(p);
    case Q2_0: return amx_gemm_quantised<AsQ2_0>(p);
    case U4_128: return amx_gemm_quantised<AsU4_128>(p);
    case I8_128: return amx_gemm_quantised<AsI8_128>(p);
    case TERNARY: return suits_tiles<AsTernary>(p) ? amx_gemm_quantised<AsTernary>(p) : gemm(p);
    default: return gemm(p);  // floats, and what has scales for halves of sub-blocks
  }
}

// ---- peak rate: products of whole tiles from registers

// As peak_dots: rounds * 4096 multiplications and additions, and up to three rounds more.
int64_t peak_tiles(int64_t rounds) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int tile = 0; tile < 4; tile++) {
    shapes.rows[tile] = max_tile_rows;
    shapes.row_bytes[tile] = 64;
  }
  set_tile_shapes(shapes);
  alignas(64) int8_t codes[1024];
  for (int i = 0; i < 1024; i++) codes[i] = static_cast<int8_t>((i + rounds) & 15);
  load_tile<2>(codes, 64);
  load_tile<3>(codes, 64);
  clear_tile<0>();
  clear_tile<1>();
  for (int64_t r = 0; r < rounds; r += 8) {  // a gemm of tiles does four rounds
    multiply_tiles<0, 2, 3>();
    if (r + 4 < rounds) multiply_tiles<1, 2, 3>();
  }
  alignas(64) int32_t sums[2][256];
  store_tile<0>(sums[0], 64);
  store_tile<1>(sums[1], 64);
  release_tiles();
  int64_t sum = 0;
  for (const auto& tile : sums)
    for (const int32_t x : tile) sum += x;
  return sum;
}
