// Products with AMX of the formats in blocks of 256, whose scales are multiples of one float.
//
// A weight's code times its multiple has sixteen bits at most. Its two bytes are two operands, a
// low one without sign and a high one with it; the tiles sum each over the whole block, and
//     low + 256 * high
// is the exact sum of accumulate.h. So a block leaves the tiles once instead of once a sub-block.

constexpr int tiles_a_block = block_group / 64;  // 64 k each

// More columns at once make the planes less often, while their activations fit the second cache.
constexpr int max_block_columns = 256;
inline int most_block_columns(int64_t in_size) {
  return in_size <= 2048 ? max_block_columns : max_tile_columns;
}

enum BlockTileNumber : int {  // sums: low and high of the one row group, then of the other
  tile_of_block_activations = 2 * tile_groups,
  tile_of_plane
};

struct alignas(64) BlockPlanes {
  uint8_t bytes[tile_groups][2][tiles_a_block][16][64];
};
struct alignas(64) BlockScales {
  int32_t pairs[slab][tile_groups][row_group];
  float units[tile_groups][row_group], negative_minimum_units[tile_groups][row_group];
};
struct alignas(64) BlockSums {
  int32_t sums[tile_groups][2][tile_sums];
};

// Codes of even k and of odd k as words, times a word of their row, as their low and high bytes.
template <int zero>
INLINE void store_planes(Codes codes, Ints words, uint8_t* low, uint8_t* high) {
  const __m512i bytes = _mm512_set1_epi16(0xff), taken = _mm512_set1_epi16(zero);
  __m512i even = _mm512_and_si512(codes.v, bytes), odd = _mm512_srli_epi16(codes.v, 8);
  if (zero != 0) even = _mm512_sub_epi16(even, taken), odd = _mm512_sub_epi16(odd, taken);
  even = _mm512_mullo_epi16(even, words.v);
  odd = _mm512_mullo_epi16(odd, words.v);
  // Bits of the second where the first is set, of the third elsewhere.
  constexpr int by_first = 0xca;
  _mm512_store_si512(low,
                     _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi16(odd, 8), by_first));
  _mm512_store_si512(high,
                     _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(even, 8), odd, by_first));
}

// The planes of one sub-block of one row group.
template <class T>
INLINE void fill_planes(const Direct<T, tile_groups>& source, int first, int s, int g,
                        BlockPlanes& to) {
  constexpr int halves = halves_of<T>, vectors = 8 / halves;
  uint8_t (*low)[64] = to.bytes[g][0][s / 2] + s % 2 * 8;
  uint8_t (*high)[64] = to.bytes[g][1][s / 2] + s % 2 * 8;
  UNROLL(2)
  for (int h = 0; h < halves; h++) {
    const Ints multiple = source.multiple(first, g, s * halves + h);
    const Ints words = paired(multiple, multiple);
    UNROLL(8)
    for (int j = h * vectors; j < (h + 1) * vectors; j++)
      store_planes<T::zero>(source.codes(first + s, g, j), words, low[j], high[j]);
  }
}

template <class T>
INLINE void fill_scales(const Direct<T, tile_groups>& source, int first, BlockScales& to) {
  for (int g = 0; g < tile_groups; g++) {
    store(to.units[g], source.unit(first, g));
    if constexpr (T::has_minimum) {
      store(to.negative_minimum_units[g], source.negative_minimum_unit(first, g));
      for (int i = 0; i < num_pairs<T>; i++) store(to.pairs[i][g], source.pairs(first, g, i));
    }
  }
}

// One block of columns, or of their residuals, times one block of k.
struct BlockPiece {
  const ActivationBlock* activations;
  const BlockScales* scales;
  float* sums;    // [column][group][16]
  int next_slab;  // where it is the last piece of its block of k: the sub-block after it; else 0
};

// One of the four products of a part: `sums` is 2 * row group, and 1 more for the high plane.
template <int sums>
INLINE void multiply_plane(const BlockPiece& piece, const BlockPlanes& planes, int part,
                           int64_t stride) {
  constexpr int plane = tile_of_plane + sums % 3;
  if (part == 0) clear_tile<sums>();
  if (sums == 0) load_tile<tile_of_block_activations>(piece.activations->codes + 64 * part, stride);
  load_tile<plane>(planes.bytes[sums / 2][sums % 2][part][0], 64);
  if (sums % 2 == 0)
    multiply_tiles_unsigned<sums, tile_of_block_activations, plane>();
  else
    multiply_tiles<sums, tile_of_block_activations, plane>();
}
template <int sums>
INLINE void store_sums(BlockSums& to) {
  store_tile<sums>(to.sums[sums / 2][sums % 2], 64);
}

// The floats of a piece's columns, as in accumulate.h's `accumulate_block`.
template <class T>
class BlockFloats {
 public:
  INLINE_METHOD BlockFloats(const BlockPiece& piece, int64_t stride, const BlockSums& products)
      : activations_(piece.activations), stride_(stride), products_(products), sums_(piece.sums) {
    const BlockScales& scales = *piece.scales;
    UNROLL(2)
    for (int g = 0; g < tile_groups; g++) {
      unit_[g] = load(scales.units[g]);
      if constexpr (T::has_minimum) {
        minimum_[g] = load(scales.negative_minimum_units[g]);
        UNROLL(8)
        for (int i = 0; i < num_pairs<T>; i++) pairs_[g][i] = load(scales.pairs[i][g]);
      }
    }
  }

  INLINE_METHOD void add(int column) const {
    const ActivationBlock& a = activations_[column * stride_];
    const Floats scale = broadcast(a.scale);
    Ints offsets[tile_groups] = {broadcast_int(0), broadcast_int(0)};
    if constexpr (T::has_minimum) {
      UNROLL(8)
      for (int i = 0; i < num_pairs<T>; i++) {
        const int32_t sums = sums_of_codes<T>(a, i);
        UNROLL(2)
        for (int g = 0; g < tile_groups; g++)
          offsets[g] = add_pairs(offsets[g], pairs_[g][i], sums);
      }
    }
    UNROLL(2)
    for (int g = 0; g < tile_groups; g++) {
      const Ints low = load(products_.sums[g][0] + column * row_group);
      const Ints high = load(products_.sums[g][1] + column * row_group);
      float* sum = sums_ + (column * tile_groups + g) * row_group;
      Floats value = unit_[g] * to_floats(low + Ints{_mm512_slli_epi32(high.v, 8)});
      if constexpr (T::has_minimum) value = fma(minimum_[g], to_floats(offsets[g]), value);
      store(sum, fma(scale, value, load(sum)));
    }
  }

 private:
  const ActivationBlock* activations_;
  int64_t stride_;
  const BlockSums& products_;
  float* sums_;
  Floats unit_[tile_groups], minimum_[tile_groups];
  Ints pairs_[tile_groups][num_pairs<T>];
};

template <class T>
class BlockTileProduct {
 public:
  BlockTileProduct(const Product& p, int group, int column, int num_columns)
      : p_(p),
        source_(direct_source<T, tile_groups>(p, group)),
        group_(group),
        column_(column),
        blocks_(num_columns),
        sub_blocks_(static_cast<int>(p.in_size / group_size)),
        passes_(p.residuals ? 2 : 1),
        pieces_a_slab_(blocks_.count * passes_),
        num_pieces_(sub_blocks_ / slab * pieces_a_slab_),
        stride_(p.column_stride * static_cast<int64_t>(sizeof(ActivationBlock))) {}

  void run() {
    for (int i = 0; i < blocks_.count * blocks_.columns * tile_groups * row_group; i++)
      sums_[i] = 0.0f;
    shape_block_tiles(blocks_.columns);
    fill_scales(source_, 0, scales_[0]);
    for (int s = 0; s < slab; s++)
      for (int g = 0; g < tile_groups; g++) fill_planes(source_, 0, s, g, planes_);
    multiply(piece_at(0), products_[0], [](int) {});
    NextSlab next = slab_after(0);
    for (int n = 0; n < num_pieces_; n++) {
      if (n % pieces_a_slab_ == 0) next = slab_after(n);
      add(n, next);
    }
    release_tiles();
    write();
  }

 private:
  static void shape_block_tiles(int columns) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      shapes.rows[tile] = tile > tile_of_block_activations ? 16 : static_cast<uint8_t>(columns);
      shapes.row_bytes[tile] = 64;
    }
    set_tile_shapes(shapes);
  }

  NextSlab slab_after(int n) const {
    return {source_, (n / pieces_a_slab_ + 2) * slab, sub_blocks_, pieces_a_slab_ * tiles_a_block};
  }

  // Residuals come after the columns they belong to.
  BlockPiece piece_at(int n) {
    const int block_of_k = n / pieces_a_slab_, i = n % pieces_a_slab_, block = i / passes_;
    const void* columns = i % passes_ == 0 ? p_.columns : p_.residuals;
    return {static_cast<const ActivationBlock*>(columns) +
                (column_ + blocks_.first(block)) * p_.column_stride + block_of_k,
            &scales_[block_of_k % 3],
            sums_ + int64_t{block} * blocks_.columns * tile_groups * row_group,
            i + 1 == pieces_a_slab_ ? (block_of_k + 1) * slab : 0};
  }

  // The products of a piece in parts, with something else to do after each: what stands further
  // away the processor would not begin while it waits for the tiles.
  template <class Beside>
  INLINE_METHOD void multiply(const BlockPiece& piece, BlockSums& to, const Beside& beside) {
    for (int part = 0; part < tiles_a_block; part++) {
      const bool is_last = part + 1 == tiles_a_block;
      multiply_plane<0>(piece, planes_, part, stride_);
      multiply_plane<1>(piece, planes_, part, stride_);
      if (is_last) store_sums<0>(to);
      multiply_plane<2>(piece, planes_, part, stride_);
      if (is_last) store_sums<1>(to);
      multiply_plane<3>(piece, planes_, part, stride_);
      if (is_last) store_sums<2>(to), store_sums<3>(to);
      refill(piece, part);
      beside(part);
    }
  }

  // The last piece is the last to need its planes: those of the next block of k take their place.
  INLINE_METHOD void refill(const BlockPiece& piece, int part) {
    const int next = piece.next_slab;
    if (next == 0 || next >= sub_blocks_) return;
    if (part == 0) fill_scales(source_, next, scales_[next / slab % 3]);
    for (int g = 0; g < tile_groups; g++)
      for (int s = 2 * part; s < 2 * part + 2; s++) fill_planes(source_, next, s, g, planes_);
  }

  // The floats of a piece; among them the products of the one after it.
  void add(int n, NextSlab& next) {
    const BlockFloats<T> floats(piece_at(n), p_.column_stride, products_[n % 2]);
    const int columns = blocks_.columns;
    const auto some = [&](int part) __attribute__((always_inline)) {
      next.fetch();
      const int end = (part + 1) * columns / tiles_a_block;
      for (int c = part * columns / tiles_a_block; c < end; c++) floats.add(c);
    };
    if (n + 1 < num_pieces_)
      multiply(piece_at(n + 1), products_[(n + 1) % 2], some);
    else
      for (int part = 0; part < tiles_a_block; part++) some(part);
  }

  void write() const {
    for (int block = 0; block < blocks_.count; block++)
      for (int c = 0; c < blocks_.columns; c++)
        for (int g = 0; g < tile_groups; g++) {
          const int row = (group_ + g) * row_group;
          const int64_t column = column_ + blocks_.first(block) + c;
          const float* from = sums_ + ((block * blocks_.columns + c) * tile_groups + g) * row_group;
          store_rows(p_.out + column * p_.out_stride + row, load(from), p_.num_rows - row);
        }
  }

  const Product& p_;
  const Direct<T, tile_groups> source_;
  const int group_, column_;
  const Blocks blocks_;
  const int sub_blocks_, passes_, pieces_a_slab_, num_pieces_;
  const int64_t stride_;   // of the columns, in bytes
  BlockPlanes planes_;     // whose last products are under way when it is filled anew
  BlockScales scales_[3];  // with few columns: of the floats, of the products, being filled
  BlockSums products_[2];
  alignas(64) float sums_[max_block_columns * tile_groups * row_group];
};
