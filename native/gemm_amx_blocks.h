// GEMM with AMX of the formats in super-blocks of 256.
//
// A weight's code times its sub-block scale has sixteen bits at most. Its two bytes are two
// operands (planes), an unsigned low one and a signed high one. The tiles sum each over the whole
// super-block, and
//     low + 256 * high
// is the exact sum of gemm_accumulate.h. So sums leave the tiles once per super-block, not once per
// sub-block.

constexpr int tiles_per_block = activation_block_size / 64;  // 64 k each

// With more tokens at once planes are made less often, while the activations fit the L2 cache.
constexpr int max_block_tokens = 256;
inline int block_tokens_limit(int64_t in_size) {
  return in_size <= 2048 ? max_block_tokens : max_tile_tokens;
}

enum BlockTileNumber : int {  // sums: low and high of one panel, then of the other
  tile_of_block_activations = 2 * tile_panels,
  tile_of_plane
};

struct alignas(64) BlockPlanes {
  uint8_t bytes[tile_panels][2][tiles_per_block][16][64];
};
struct alignas(64) BlockScales {
  int32_t pairs[slab][tile_panels][panel_rows];
  float super_scales[tile_panels][panel_rows], negative_super_minimums[tile_panels][panel_rows];
};
struct alignas(64) BlockSums {
  int32_t sums[tile_panels][2][tile_sums];
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

// The planes of one sub-block of one panel.
template <class T>
INLINE void fill_planes(const PackedSource<T, tile_panels>& source, int first, int s, int g,
                        BlockPlanes& to) {
  constexpr int halves = halves_of<T>, vectors = 8 / halves, some = T::vectors_at_once;
  uint8_t (*low)[64] = to.bytes[g][0][s / 2] + s % 2 * 8;
  uint8_t (*high)[64] = to.bytes[g][1][s / 2] + s % 2 * 8;
  typename T::Prepared prepared;
  source.prepare(first + s, g, prepared);
  UNROLL(2)
  for (int h = 0; h < halves; h++) {
    const Ints sub_scale = source.sub_scale(first, g, s * halves + h);
    const Ints words = paired(sub_scale, sub_scale);
    UNROLL(8)
    for (int j = h * vectors; j < (h + 1) * vectors; j += some) {
      Codes codes[some];
      source.some_codes(first + s, g, j, prepared, codes);
      for (int i = 0; i < some; i++)
        store_planes<T::zero>(codes[i], words, low[j + i], high[j + i]);
    }
  }
}

template <class T>
INLINE void fill_scales(const PackedSource<T, tile_panels>& source, int first, BlockScales& to) {
  for (int g = 0; g < tile_panels; g++) {
    store(to.super_scales[g], source.super_scale(first, g));
    if constexpr (T::has_minimum) {
      store(to.negative_super_minimums[g], source.negative_super_minimum(first, g));
      for (int i = 0; i < num_pairs<T>; i++) store(to.pairs[i][g], source.pairs(first, g, i));
    }
  }
}

// One block of tokens, or of their residuals, times one block of k.
struct BlockPiece {
  const ActivationBlock* activations;
  const BlockScales* scales;
  float* sums;    // [token][panel][16]
  int next_slab;  // of the last piece of its block of k: the sub-block after it; else 0
};

// One of the four tile products of a quarter of the block: `sums` is 2 * panel, plus 1 for the high
// plane.
template <int sums>
INLINE void multiply_plane(const BlockPiece& piece, const BlockPlanes& planes, int quarter,
                           int64_t stride) {
  constexpr int plane = tile_of_plane + sums % 3;
  if (quarter == 0) clear_tile<sums>();
  if (sums == 0)
    load_tile<tile_of_block_activations>(piece.activations->codes + 64 * quarter, stride);
  load_tile<plane>(planes.bytes[sums / 2][sums % 2][quarter][0], 64);
  if (sums % 2 == 0)
    multiply_tiles_unsigned<sums, tile_of_block_activations, plane>();
  else
    multiply_tiles<sums, tile_of_block_activations, plane>();
}
template <int sums>
INLINE void store_sums(BlockSums& to) {
  store_tile<sums>(to.sums[sums / 2][sums % 2], 64);
}

// The float sums of a piece's tokens, as in gemm_accumulate.h's `accumulate_block`.
template <class T>
class BlockFloats {
 public:
  INLINE_METHOD BlockFloats(const BlockPiece& piece, int64_t stride, const BlockSums& products)
      : activations_(piece.activations), stride_(stride), products_(products), sums_(piece.sums) {
    const BlockScales& scales = *piece.scales;
    UNROLL(2)
    for (int g = 0; g < tile_panels; g++) {
      super_scale_[g] = load(scales.super_scales[g]);
      if constexpr (T::has_minimum) {
        super_minimum_[g] = load(scales.negative_super_minimums[g]);
        UNROLL(8)
        for (int i = 0; i < num_pairs<T>; i++) pairs_[g][i] = load(scales.pairs[i][g]);
      }
    }
  }

  INLINE_METHOD void add(int token) const {
    const ActivationBlock& a = activations_[token * stride_];
    const Floats scale = broadcast(a.scale);
    Ints code_sums[tile_panels] = {broadcast_int(0), broadcast_int(0)};
    if constexpr (T::has_minimum) {
      UNROLL(8)
      for (int i = 0; i < num_pairs<T>; i++) {
        const int32_t sums = sums_of_codes<T>(a, i);
        UNROLL(2)
        for (int g = 0; g < tile_panels; g++)
          code_sums[g] = add_pairs(code_sums[g], pairs_[g][i], sums);
      }
    }
    UNROLL(2)
    for (int g = 0; g < tile_panels; g++) {
      const Ints low = load(products_.sums[g][0] + token * panel_rows);
      const Ints high = load(products_.sums[g][1] + token * panel_rows);
      float* sum = sums_ + (token * tile_panels + g) * panel_rows;
      Floats value = super_scale_[g] * to_floats(low + Ints{_mm512_slli_epi32(high.v, 8)});
      if constexpr (T::has_minimum) value = fma(super_minimum_[g], to_floats(code_sums[g]), value);
      store(sum, fma(scale, value, load(sum)));
    }
  }

 private:
  const ActivationBlock* activations_;
  int64_t stride_;
  const BlockSums& products_;
  float* sums_;
  Floats super_scale_[tile_panels], super_minimum_[tile_panels];
  Ints pairs_[tile_panels][num_pairs<T>];
};

template <class T>
class AmxBlockGemm {
 public:
  AmxBlockGemm(const Gemm& p, int panel, int token, int num_tokens)
      : p_(p),
        source_(packed_source<T, tile_panels>(p, panel)),
        panel_(panel),
        token_(token),
        blocks_(num_tokens),
        sub_blocks_(static_cast<int>(p.in_size / group_size)),
        passes_(p.residuals ? 2 : 1),
        pieces_per_slab_(blocks_.count * passes_),
        num_pieces_(sub_blocks_ / slab * pieces_per_slab_),
        stride_(p.activation_stride * static_cast<int64_t>(sizeof(ActivationBlock))) {}

  void run() {
    for (int i = 0; i < blocks_.count * blocks_.tokens * tile_panels * panel_rows; i++)
      sums_[i] = 0.0f;
    shape_block_tiles(blocks_.tokens);
    fill_scales(source_, 0, scales_[0]);
    for (int s = 0; s < slab; s++)
      for (int g = 0; g < tile_panels; g++) fill_planes(source_, 0, s, g, planes_);
    multiply(piece_at(0), products_[0], [](int) {});
    SlabPrefetch next = slab_after(0);
    for (int n = 0; n < num_pieces_; n++) {
      if (n % pieces_per_slab_ == 0) next = slab_after(n);
      add(n, next);
    }
    release_tiles();
    write();
  }

 private:
  static void shape_block_tiles(int tokens) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      shapes.rows[tile] = tile > tile_of_block_activations ? 16 : static_cast<uint8_t>(tokens);
      shapes.row_bytes[tile] = 64;
    }
    set_tile_shapes(shapes);
  }

  SlabPrefetch slab_after(int n) const {
    return {source_, (n / pieces_per_slab_ + 2) * slab, sub_blocks_,
            pieces_per_slab_ * tiles_per_block};
  }

  // Residuals come after the activations they belong to.
  BlockPiece piece_at(int n) {
    const int block_of_k = n / pieces_per_slab_, i = n % pieces_per_slab_, block = i / passes_;
    const void* activations = i % passes_ == 0 ? p_.activations : p_.residuals;
    return {static_cast<const ActivationBlock*>(activations) +
                (token_ + blocks_.first(block)) * p_.activation_stride + block_of_k,
            &scales_[block_of_k % 3],
            sums_ + int64_t{block} * blocks_.tokens * tile_panels * panel_rows,
            i + 1 == pieces_per_slab_ ? (block_of_k + 1) * slab : 0};
  }

  // The tile products of a piece by quarters, with other work between them: out-of-order execution
  // does not reach work further away while it waits for the tiles.
  template <class Between>
  INLINE_METHOD void multiply(const BlockPiece& piece, BlockSums& to, const Between& between) {
    for (int quarter = 0; quarter < tiles_per_block; quarter++) {
      const bool is_last = quarter + 1 == tiles_per_block;
      multiply_plane<0>(piece, planes_, quarter, stride_);
      multiply_plane<1>(piece, planes_, quarter, stride_);
      if (is_last) store_sums<0>(to);
      multiply_plane<2>(piece, planes_, quarter, stride_);
      if (is_last) store_sums<1>(to);
      multiply_plane<3>(piece, planes_, quarter, stride_);
      if (is_last) store_sums<2>(to), store_sums<3>(to);
      refill(piece, quarter);
      between(quarter);
    }
  }

  // After the last piece that reads the planes, those of the next block of k replace them.
  INLINE_METHOD void refill(const BlockPiece& piece, int quarter) {
    const int next = piece.next_slab;
    if (next == 0 || next >= sub_blocks_) return;
    if (quarter == 0) fill_scales(source_, next, scales_[next / slab % 3]);
    for (int g = 0; g < tile_panels; g++)
      for (int s = 2 * quarter; s < 2 * quarter + 2; s++) fill_planes(source_, next, s, g, planes_);
  }

  // The float sums of a piece, interleaved with the tile products of the next one.
  void add(int n, SlabPrefetch& next) {
    const BlockFloats<T> floats(piece_at(n), p_.activation_stride, products_[n % 2]);
    const int tokens = blocks_.tokens;
    const auto add_tokens = [&](int quarter) __attribute__((always_inline)) {
      next.fetch();
      const int end = (quarter + 1) * tokens / tiles_per_block;
      for (int t = quarter * tokens / tiles_per_block; t < end; t++) floats.add(t);
    };
    if (n + 1 < num_pieces_)
      multiply(piece_at(n + 1), products_[(n + 1) % 2], add_tokens);
    else
      for (int quarter = 0; quarter < tiles_per_block; quarter++) add_tokens(quarter);
  }

  void write() const {
    for (int block = 0; block < blocks_.count; block++)
      for (int t = 0; t < blocks_.tokens; t++)
        for (int g = 0; g < tile_panels; g++) {
          const int row = (panel_ + g) * panel_rows;
          const int64_t token = token_ + blocks_.first(block) + t;
          const float* from = sums_ + ((block * blocks_.tokens + t) * tile_panels + g) * panel_rows;
          store_rows(p_.out + token * p_.out_stride + row, load(from), p_.num_rows - row);
        }
  }

  const Gemm& p_;
  const PackedSource<T, tile_panels> source_;
  const int panel_, token_;
  const TokenBlocks blocks_;
  const int sub_blocks_, passes_, pieces_per_slab_, num_pieces_;
  const int64_t stride_;   // of the activations of a token, in bytes
  BlockPlanes planes_;     // refilled while its last products are in flight
  BlockScales scales_[3];  // of the float sums, of the tile products, and being filled
  BlockSums products_[2];
  alignas(64) float sums_[max_block_tokens * tile_panels * panel_rows];
};
