// Products of many columns with AMX: tiles of signed bytes, multiplied to exact int32 sums.
//
// The codes of a sub-block, sixteen rows times 32 k, are one operand just as they lie, less their
// zero; the activations of up to sixteen columns are the other. The sums leave the tile registers
// through memory, and the floats keep to the order of accumulate.h: the bits are every other
// unit's.
//
// While tiles are at work one of the two ports for 512-bit vectors neither multiplies nor converts
// (measured on Emerald Rapids: beside a single tile load such a loop ran at half its rate). So work
// alternates: the products of some sub-blocks come together with the floats of the first columns of
// those before, then the floats of the other columns run with no tiles beside them.

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

// ---- some sub-blocks of two row groups

constexpr int tile_groups = groups_at_once;
constexpr int most_tile_rows = 16;
constexpr int tile_sums = most_tile_rows * row_group;
// Sub-blocks multiplied before their floats follow: the sums must not push all else out of the
// first cache (with eight this ran at two thirds of its rate).
constexpr int span = 4;

struct alignas(64) SpanWeights {
  uint8_t codes[tile_groups][span][8][64];
  float scales[span][tile_groups][row_group];
  float minimums[span][tile_groups][row_group];
};
struct alignas(64) SpanSums {
  int32_t sums[span][tile_groups][tile_sums];
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
void fill_span(const Direct<T, tile_groups>& from, int first, int count, SpanWeights& to) {
  const Direct<T, tile_groups> source = from;  // a copy that no store can change
  for (int s = 0; s < count; s++) {
    UNROLL(2)
    for (int g = 0; g < tile_groups; g++) {
      if (!are_packed_as_bytes<T>) {
        UNROLL(8)
        for (int j = 0; j < 8; j++)
          store_codes(to.codes[g][s][j], less_zero<T::zero>(source.codes(first + s, g, j)));
      }
      store(to.scales[s][g], source.scale(first + s, g));
      if constexpr (T::has_minimum) store(to.minimums[s][g], source.minimum(first + s, g));
    }
  }
}

// One block of columns over one span.
struct Piece {
  const ActivationGroup* activations;
  const SpanWeights* weights;
  const uint8_t* codes[tile_groups];
  float* sums;  // [group][column][16]
  int count;    // sub-blocks; 0: nothing
};

INLINE void multiply(const Piece& piece, int s, int64_t stride, SpanSums& to) {
  load_tile<tile_of_activations>(piece.activations[s].codes, stride);
  UNROLL(2)
  for (int g = 0; g < tile_groups; g++) {
    load_tile<tile_of_codes>(piece.codes[g] + 512 * s, 64);
    clear_tile<tile_of_sums>();
    multiply_tiles<tile_of_sums, tile_of_activations, tile_of_codes>();
    store_tile<tile_of_sums>(to.sums[s][g], 64);
  }
}

INLINE const ActivationGroup* further(const ActivationGroup* group, int64_t bytes) {
  return reinterpret_cast<const ActivationGroup*>(reinterpret_cast<const char*>(group) + bytes);
}

// One sub-block's floats, as in accumulate.h's `accumulate`.
template <bool has_minimum, int columns>
INLINE void add_floats(const ActivationGroup* group, int64_t stride, int64_t stride3,
                       const SpanWeights& weights, int s, const int32_t* products,
                       Floats (*acc)[columns]) {
  UNROLL(8)
  for (int c = 0; c < columns; c++) {
    const ActivationGroup& a = *further(group, c % 4 == 3 ? stride3 : c % 4 * stride);
    const Floats scale = broadcast(a.scale), codes = broadcast(a.scaled_sum);
    UNROLL(2)
    for (int g = 0; g < tile_groups; g++) {
      const Floats sum = to_floats(load(products + g * tile_sums + c * row_group));
      acc[g][c] = fma(sum, load(weights.scales[s][g]) * scale, acc[g][c]);
      if (has_minimum) acc[g][c] = fma(load(weights.minimums[s][g]), codes, acc[g][c]);
    }
    if (c % 4 == 3) {
      group = further(group, 4 * stride);
      // GCC would keep a pointer for each column; having too few registers it would keep them in
      // those for vectors, and wait for the busy port that moves them back.
      asm("" : "+r"(group));
    }
  }
}

// The floats of some columns; beside them the products of the piece that follows, if there is one,
// and some lines of the next slab.
template <bool has_minimum, int columns>
void add_columns(const Piece& piece, int column, const SpanSums& products, int64_t stride,
                 const Piece& following, SpanSums& next_products, NextSlab& next) {
  const int64_t stride3 = 3 * stride;
  float* sums = piece.sums + column * row_group;
  Floats acc[tile_groups][columns];
  UNROLL(2)
  for (int g = 0; g < tile_groups; g++) {
    UNROLL(8)
    for (int c = 0; c < columns; c++) acc[g][c] = load(sums + g * tile_sums + c * row_group);
  }
  const ActivationGroup* group = further(piece.activations, column * stride);
  const auto add = [&](int s) __attribute__((always_inline)) {
    next.fetch();
    add_floats<has_minimum, columns>(group + s, stride, stride3, *piece.weights, s,
                                     products.sums[s][0] + column * row_group, acc);
  };
  const int both = piece.count < following.count ? piece.count : following.count;
  for (int s = 0; s < both; s++) {
    multiply(following, s, stride, next_products);
    add(s);
  }
  for (int s = both; s < piece.count; s++) add(s);
  for (int s = both; s < following.count; s++) multiply(following, s, stride, next_products);
  UNROLL(2)
  for (int g = 0; g < tile_groups; g++) {
    UNROLL(8)
    for (int c = 0; c < columns; c++) store(sums + g * tile_sums + c * row_group, acc[g][c]);
  }
}

// Four columns at least.
template <bool has_minimum>
void add_some(int columns, const Piece& piece, int first, const SpanSums& products, int64_t stride,
              const Piece& following, SpanSums& next_products, NextSlab& next) {
  const auto run = [&](auto function) {
    function(piece, first, products, stride, following, next_products, next);
  };
  switch (columns) {
    case 4: return run(add_columns<has_minimum, 4>);
    case 5: return run(add_columns<has_minimum, 5>);
    case 6: return run(add_columns<has_minimum, 6>);
    case 7: return run(add_columns<has_minimum, 7>);
    default: return run(add_columns<has_minimum, 8>);
  }
}

// ---- all of two row groups

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
        sub_blocks_(static_cast<int>(p.in_size / 32)),
        stride_(p.column_stride * static_cast<int64_t>(sizeof(ActivationGroup))) {}

  void run() {
    for (int i = 0; i < blocks_.count * tile_groups * tile_sums; i++) sums_[i] = 0.0f;
    shape_tiles(blocks_.columns);
    Piece piece = begin_span(0);
    for (int s = 0; s < piece.count; s++) multiply(piece, s, stride_, products_[0]);
    NextSlab next = slab_after(0);
    int turn = 0;
    for (int first = 0; first < sub_blocks_; first += span) {
      if (first % slab == 0) next = slab_after(first);
      for (int block = 0; block < blocks_.count; block++) {
        const bool is_last = block + 1 == blocks_.count;
        const Piece following = is_last ? begin_span(first + span) : piece_at(first, block + 1);
        add(piece, products_[turn], following, products_[1 - turn], next);
        turn = 1 - turn;
        piece = following;
      }
    }
    release_tiles();  // a thread that waits then has no tiles to be saved
    write();
  }

 private:
  int count_at(int first) const { return sub_blocks_ - first < span ? sub_blocks_ - first : span; }

  NextSlab slab_after(int first) const {
    return {source_, first + slab, sub_blocks_, blocks_.count * slab * num_passes()};
  }

  Piece begin_span(int first) {
    if (first >= sub_blocks_) return {};
    fill_span(source_, first, count_at(first), weights_[first / span % 2]);
    return piece_at(first, 0);
  }

  Piece piece_at(int first, int block) {
    Piece piece;
    piece.activations = static_cast<const ActivationGroup*>(p_.columns) +
                        (column_ + blocks_.first(block)) * p_.column_stride + first;
    piece.weights = &weights_[first / span % 2];
    for (int g = 0; g < tile_groups; g++)
      piece.codes[g] = are_packed_as_bytes<T> ? source_.codes_of[g] + int64_t{first} * 512
                                              : piece.weights->codes[g][0][0];
    piece.sums = sums_ + block * tile_groups * tile_sums;
    piece.count = count_at(first);
    return piece;
  }

  // Floats of eight columns at most at a time: for more there is no room in the registers.
  int num_passes() const { return blocks_.columns > 8 ? 2 : 1; }

  void add(const Piece& piece, const SpanSums& products, const Piece& following,
           SpanSums& next_products, NextSlab& next) {
    const int columns = blocks_.columns, some = (columns + num_passes() - 1) / num_passes();
    add_some<T::has_minimum>(some, piece, 0, products, stride_, following, next_products, next);
    if (some < columns)
      add_some<T::has_minimum>(columns - some, piece, some, products, stride_, {}, next_products,
                               next);
  }

  void write() const {
    for (int block = 0; block < blocks_.count; block++)
      for (int g = 0; g < tile_groups; g++)
        for (int c = 0; c < blocks_.columns; c++) {
          const int row = (group_ + g) * row_group;
          const int64_t column = column_ + blocks_.first(block) + c;
          const float* from = sums_ + (block * tile_groups + g) * tile_sums + c * row_group;
          store_rows(p_.out + column * p_.out_stride + row, load(from), p_.num_rows - row);
        }
  }

  const Product& p_;
  const Direct<T, tile_groups> source_;
  const int group_, column_;
  const Blocks blocks_;
  const int sub_blocks_;
  const int64_t stride_;  // of the columns, in bytes
  SpanWeights weights_[2];
  SpanSums products_[2];
  alignas(64) float sums_[max_tile_columns * tile_groups * row_group];
};

// Where tiles are faster than dot products, as measured on Emerald Rapids. To shape the tiles and
// to begin takes time, which few columns of few sub-blocks do not win back.
template <class T>
bool suits_tiles(const Product& p) {
  // Residuals take turns slab by slab, and the first cache has room for half a slab of sums.
  if (p.residuals) return false;
  const int64_t work = p.num_columns * (p.in_size / group_size);
  return are_packed_as_bytes<T> ? p.num_columns >= 8 && work >= 256
                                : p.num_columns >= 16 && work >= 576;
}

#include "amx_blocks.h"

constexpr int min_block_columns = 16;  // with fewer, to make the planes takes longer than it saves

// Runs whole pairs of row groups by `Tiled`, what is left without tiles.
template <class T, template <class> class Tiled>
void tile_groups_of(const Product& p) {
  const int turns = (p.num_columns + max_tile_columns - 1) / max_tile_columns;
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
    tile_groups_of<T, BlockTileProduct>(p);
  } else {
    if (!suits_tiles<T>(p)) return product_of<T>(p);
    tile_groups_of<T, TileProduct>(p);
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
