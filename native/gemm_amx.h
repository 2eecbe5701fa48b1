// Products of many columns with AMX: tiles of signed bytes, multiplied to exact int32 sums.
//
// The codes of a sub-block, sixteen rows times 32 k, are one operand just as they lie, less their
// zero; the activations of up to sixteen columns are the other. The sums leave the tile registers
// through memory, and the floats keep to the order of accumulate.h: the bits are every other
// unit's.
//
// While tiles are at work one of the two ports for 512-bit vectors neither multiplies nor converts
// (measured on Emerald Rapids: beside a single tile load such a loop ran at half its rate), and a
// core may have another guest on its second thread. So what counts is how few instructions there
// are besides: the float sums of sixteen rows times sixteen columns stay in registers, and each
// number of an activation is an operand in memory.

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

INLINE const ActivationGroup* further(const ActivationGroup* group, int64_t bytes) {
  return reinterpret_cast<const ActivationGroup*>(reinterpret_cast<const char*>(group) + bytes);
}

// ---- some sub-blocks of two row groups

constexpr int tile_groups = groups_at_once;
constexpr int most_tile_rows = 16;
constexpr int tile_sums = most_tile_rows * row_group;
constexpr int most_sub_blocks = 3 * slab;  // unpacked at once: they stay in the first cache
constexpr int fetch_span = 4;              // sub-blocks for each time that lines are fetched

struct alignas(64) TileWeights {
  uint8_t codes[tile_groups][most_sub_blocks][8][64];
  float scales[tile_groups][most_sub_blocks][row_group];
  float minimums[tile_groups][most_sub_blocks][row_group];
};

template <int zero>
INLINE Codes less_zero(Codes x) {
  if (zero == 0) return x;
  if (zero == 128) return flip_sign(x);
  return {_mm512_sub_epi8(x.v, _mm512_set1_epi8(static_cast<char>(zero)))};
}

// Codes that are signed bytes in the packed matrix are multiplied from there.
template <class T>
constexpr bool are_packed_as_bytes = T::info.code_bytes == 512;

template <class T>
void fill_weights(const Direct<T, tile_groups>& from, int first, int count, TileWeights& to) {
  const Direct<T, tile_groups> source = from;  // a copy that no store can change
  for (int s = 0; s < count; s++) {
    UNROLL(2)
    for (int g = 0; g < tile_groups; g++) {
      if (!are_packed_as_bytes<T>) {
        UNROLL(8)
        for (int j = 0; j < 8; j++)
          store_codes(to.codes[g][s][j], less_zero<T::zero>(source.codes(first + s, g, j)));
      }
      store(to.scales[g][s], source.scale(first + s, g));
      if constexpr (T::has_minimum) store(to.minimums[g][s], source.minimum(first + s, g));
    }
  }
}

// Columns in blocks of one size, so that the tiles keep their shapes; the last block begins early
// enough to end with the last column, and does some of those before it again.
struct Blocks {
  int num_columns, count, columns;
  explicit Blocks(int num_columns)
      : num_columns(num_columns),
        count((num_columns + most_tile_rows - 1) / most_tile_rows),
        columns((num_columns + count - 1) / count) {}
  int first(int block) const {
    const int last = num_columns - columns;
    return block * columns < last ? block * columns : last;
  }
};

struct alignas(64) TileSums {
  int32_t of[most_tile_rows][row_group];  // [column]
};

// One sub-block of a row group times a block of columns.
INLINE void multiply(const ActivationGroup* group, int64_t stride, const uint8_t* codes,
                     TileSums& to) {
  load_tile<tile_of_activations>(group->codes, stride);
  load_tile<tile_of_codes>(codes, 64);
  clear_tile<tile_of_sums>();
  multiply_tiles<tile_of_sums, tile_of_activations, tile_of_codes>();
  store_tile<tile_of_sums>(&to, 64);
}

// A row group times a block of columns or of their residuals, over some sub-blocks.
struct TilePiece {
  const ActivationGroup* activations;
  const uint8_t* codes;
  const float* scales;  // and minimums, as they lie in TileWeights
  float* sums;          // [column][16]: of the sub-blocks before, and with these
  float* out;           // where the sums go if these sub-blocks are the last, else null
  int num_rows;         // of the row group that exist
  bool is_first;        // nothing came before
};

// Some sub-blocks, to be multiplied with all columns, piece by piece.
struct TileRun {
  const Blocks& blocks;
  const ActivationGroup *columns, *residuals;  // at the first sub-block; the latter may be null
  int64_t stride;                              // of the columns, in bytes
  const uint8_t* codes[tile_groups];
  const TileWeights& weights;
  float* sums;  // [block][group][column][16]
  float* out;   // of the first row and column
  int64_t out_stride;
  int num_rows;  // from the first row on
  int count;     // sub-blocks
  bool is_first, is_last;

  int pieces_a_block() const { return residuals ? 2 * tile_groups : tile_groups; }
  int num_pieces() const { return blocks.count * pieces_a_block(); }
  TilePiece piece(int n) const {
    const int block = n / pieces_a_block(), g = n % tile_groups;
    const int first = blocks.first(block), row = g * row_group;
    const bool are_columns = n % pieces_a_block() < tile_groups;
    return {further(are_columns ? columns : residuals, first * stride),
            codes[g],
            weights.scales[g][0],
            sums + (block * tile_groups + g) * tile_sums,
            is_last && !(are_columns && residuals) ? out + first * out_stride + row : nullptr,
            num_rows - row,
            is_first && are_columns};
  }
};

// Hides from GCC where a pointer comes from: it would keep one for each column, where registers are
// few.
template <class P>
INLINE void keep(P& pointer) {
  asm("" : "+r"(pointer));
}

// One sub-block's floats, as in accumulate.h's `accumulate`.
template <bool has_minimum, int columns>
INLINE void add_floats(const ActivationGroup* group, int64_t stride, const float* scales,
                       const TileSums& products, Floats* acc) {
  constexpr int64_t to_minimums = tile_groups * most_sub_blocks * row_group;
  static_assert(offsetof(TileWeights, minimums) - offsetof(TileWeights, scales) ==
                to_minimums * sizeof(float));
  const int64_t stride3 = 3 * stride;
  const Floats scale = load(scales), minimum = load(scales + to_minimums);
  UNROLL(16)
  for (int c = 0; c < columns; c++) {
    const ActivationGroup& a = *further(group, c % 4 == 3 ? stride3 : c % 4 * stride);
    const Floats sum = to_floats(load(products.of[c]));
    acc[c] = fma(sum, scale * broadcast(a.scale), acc[c]);
    if (has_minimum) acc[c] = fma(minimum, broadcast(a.scaled_sum), acc[c]);
    if (c % 4 == 3) {
      group = further(group, 4 * stride);
      keep(group);
    }
  }
}

// The floats of all pieces; the tiles are some sub-blocks ahead of them.
template <bool has_minimum, int columns>
void add_run(const TileRun& run, NextSlab& next) {
  constexpr int most_lead = 2, ring = 4;
  TileSums products[ring];
  const int64_t stride = run.stride;
  const int count = run.count, lead = count < most_lead ? count : most_lead;
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
    Floats acc[columns];
    UNROLL(16)
    for (int c = 0; c < columns; c++)
      acc[c] = piece.is_first ? broadcast(0.0f) : load(piece.sums + c * row_group);
    for (int s = 0; s < count; s++) {
      if (s % fetch_span == 0) next.fetch();
      if (s == count - lead) ahead = following.activations, codes = following.codes;
      if (ahead) {
        multiply(ahead, stride, codes, products[(at + lead) % ring]);
        ahead++;
        codes += 512;
      }
      const TileSums* sums = &products[at++ % ring];
      keep(sums);
      add_floats<has_minimum, columns>(group, stride, scales, *sums, acc);
      group++;
      scales += row_group;
    }
    UNROLL(16)
    for (int c = 0; c < columns; c++)
      if (piece.out)
        store_rows(piece.out + c * run.out_stride, acc[c], piece.num_rows);
      else
        store(piece.sums + c * row_group, acc[c]);
  }
}

// ---- all of two row groups

void shape_tiles(int columns) {
  TileShapes shapes = {};
  shapes.palette = 1;
  shapes.rows[tile_of_sums] = shapes.rows[tile_of_activations] = static_cast<uint8_t>(columns);
  shapes.rows[tile_of_codes] = 8;
  shapes.row_bytes[tile_of_sums] = shapes.row_bytes[tile_of_codes] = 64;
  shapes.row_bytes[tile_of_activations] = group_size;
  set_tile_shapes(shapes);
}

template <class T>
class TileProduct {
 public:
  TileProduct(const Product& p, int group, int column, int num_columns)
      : p_(p),
        source_(direct_source<T, tile_groups>(p, group)),
        group_(group),
        column_(column),
        blocks_(num_columns),
        sub_blocks_(static_cast<int>(p.in_size / group_size)) {}

  void run() {
    shape_tiles(blocks_.columns);
    const int num_runs = (sub_blocks_ + most_sub_blocks - 1) / most_sub_blocks;
    // Residuals take turns slab by slab.
    const int step = p_.residuals ? slab : (sub_blocks_ + num_runs - 1) / num_runs;
    for (int first = 0; first < sub_blocks_; first += step) {
      const TileRun run = begin_run(first, sub_blocks_ - first < step ? sub_blocks_ - first : step);
      const int turns = run.num_pieces() * ((run.count + fetch_span - 1) / fetch_span);
      NextSlab next(source_, first + run.count, sub_blocks_, turns, step);
      add(run, next);
    }
    release_tiles();  // a thread that waits then has no tiles to be saved
  }

 private:
  TileRun begin_run(int first, int count) {
    fill_weights(source_, first, count, weights_);
    const int64_t at = column_ * p_.column_stride + first;
    const auto* columns = static_cast<const ActivationGroup*>(p_.columns) + at;
    const auto* residuals = static_cast<const ActivationGroup*>(p_.residuals);
    const auto codes = [&](int g) {
      return are_packed_as_bytes<T> ? source_.codes_of[g] + int64_t{first} * 512
                                    : weights_.codes[g][0][0];
    };
    return {blocks_,
            columns,
            residuals ? residuals + at : nullptr,
            p_.column_stride * static_cast<int64_t>(sizeof(ActivationGroup)),
            {codes(0), codes(1)},
            weights_,
            sums_,
            p_.out + column_ * p_.out_stride + group_ * row_group,
            p_.out_stride,
            p_.num_rows - group_ * row_group,
            count,
            first == 0,
            first + count == sub_blocks_};
  }

  static void add(const TileRun& run, NextSlab& next) {
    switch (run.blocks.columns) {
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

  const Product& p_;
  const Direct<T, tile_groups> source_;
  const int group_, column_;
  const Blocks blocks_;
  const int sub_blocks_;
  TileWeights weights_;
  alignas(64) float sums_[max_tile_columns * tile_groups * row_group];
};

// Where tiles are faster than dot products, as measured on Emerald Rapids. To shape the tiles and
// to begin takes time, which few columns of few sub-blocks do not win back.
template <class T>
bool suits_tiles(const Product& p) {
  const int64_t work = p.num_columns * (p.in_size / group_size);
  return are_packed_as_bytes<T> ? p.num_columns >= 8 && work >= 256
                                : p.num_columns >= 16 && work >= 576;
}

#include "gemm_amx_blocks.h"

constexpr int min_block_columns = 16;  // with fewer, to make the planes takes longer than it saves

// Runs whole pairs of row groups by `Tiled`, what is left without tiles.
template <class T, template <class> class Tiled>
void tile_groups_of(const Product& p, int most_columns) {
  const int turns = (p.num_columns + most_columns - 1) / most_columns;
  int group = 0;
  for (; group + tile_groups <= p.num_groups; group += tile_groups)
    for (int turn = 0; turn < turns; turn++) {
      const int first = turn * p.num_columns / turns, end = (turn + 1) * p.num_columns / turns;
      Tiled<T>(p, group, first, end - first).run();
    }
  for (; group < p.num_groups; group++) product_groups<T, 1>(p, group);
}

template <class T>
void tile_product_of(const Product& p) {
  if constexpr (T::in_blocks) {
    if (p.num_columns < min_block_columns) return product_of<T>(p);
    tile_groups_of<T, BlockTileProduct>(p, most_block_columns(p.in_size));
  } else {
    if (!suits_tiles<T>(p)) return product_of<T>(p);
    tile_groups_of<T, TileProduct>(p, max_tile_columns);
  }
}

void tile_product(const Product& p) {
  switch (static_cast<Format>(p.format)) {
    case Q8_0: return tile_product_of<AsQ8_0>(p);
    case Q4_0: return tile_product_of<AsQ4_0>(p);
    case Q4_1: return tile_product_of<AsQ4_1>(p);
    case Q5_0: return tile_product_of<AsQ5_0>(p);
    case Q5_1: return tile_product_of<AsQ5_1>(p);
    case Q2_K: return tile_product_of<AsQ2_K>(p);
    case Q3_K: return tile_product_of<AsQ3_K>(p);
    case Q4_K: return tile_product_of<AsQ4_K>(p);
    case Q5_K: return tile_product_of<AsQ5_K>(p);
    case Q6_K: return tile_product_of<AsQ6_K>(p);
    case IQ4_NL: return tile_product_of<AsIQ4_NL>(p);
    case IQ4_XS: return tile_product_of<AsIQ4_XS>(p);
    case TERNARY: return tile_product_of<AsTernary>(p);
    default: return product(p);  // floats
  }
}

// ---- the limit: products of whole tiles, from registers

// As peak_dots: rounds * 4096 multiplications and additions, and up to three rounds more.
int64_t peak_tiles(int64_t rounds) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int tile = 0; tile < 4; tile++) {
    shapes.rows[tile] = most_tile_rows;
    shapes.row_bytes[tile] = 64;
  }
  set_tile_shapes(shapes);
  alignas(64) int8_t codes[1024];
  for (int i = 0; i < 1024; i++) codes[i] = static_cast<int8_t>((i + rounds) & 15);
  load_tile<2>(codes, 64);
  load_tile<3>(codes, 64);
  clear_tile<0>();
  clear_tile<1>();
  for (int64_t r = 0; r < rounds; r += 8) {  // a product of tiles does four rounds
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
