// The sums of products: where codes and scales come from, and the loops over them.
//
// For a row and a column the sum runs over the sub-blocks in order of k: the integer sum of a
// sub-block is exact, then
//     acc = fma(sum - zero * sum_of_codes, weight_scale * activation_scale, acc)
//     acc = fma(weight_minimum, scaled_sum_of_codes, acc)              where there are minimums
// Where weights and activations share scales in blocks of 256, sums are exact to the end of a
// block:
// (sub-blocks are halves of 16 where scales are per half)
//     whole  = sum over its sub-blocks of multiple * (sum - zero * sum_of_codes)
//     lowest = sum over its sub-blocks of minimum_multiple * sum_of_codes
//     acc = fma(activation_scale, fma(-minimum_unit, lowest, unit * whole), acc)
// This holds for any number of columns and wherever the codes come from: straight from the packed
// matrix, or from a tile into which they were unpacked.

// ---- where codes and scales come from

constexpr int slab = 8;  // sub-blocks unpacked at once: 256 k
constexpr int max_tile_columns = 128;
constexpr int max_direct_columns = 12;  // beyond, unpacking once for all columns costs less

template <bool in_blocks>
struct ActivationKind {
  using Type = ActivationGroup;
  static constexpr int span = 1;  // sub-blocks
};
template <>
struct ActivationKind<true> {
  using Type = ActivationBlock;
  static constexpr int span = slab;
};
template <class F>
using Activation = typename ActivationKind<F::in_blocks>::Type;
template <class F>
constexpr int activation_span = ActivationKind<F::in_blocks>::span;

// Straight from the packed matrix.
template <class T, int groups>
struct Direct {
  using Format = T;
  const uint8_t* codes_of[groups];
  const uint8_t* scales_of[groups];
  int64_t further;              // bytes to the row groups after these
  int turn = 0, num_turns = 1;  // this is one of so many passes over these row groups
  INLINE_METHOD Codes codes(int s, int g, int j) const {
    return T::codes(codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes, j);
  }
  INLINE_METHOD const uint8_t* record(int s, int g) const {
    return scales_of[g] + static_cast<int64_t>(s / T::info.scale_span) * T::info.scale_bytes;
  }
  INLINE_METHOD Floats scale(int s, int g) const { return T::scale(record(s, g)); }
  INLINE_METHOD Floats minimum(int s, int g) const { return T::minimum(record(s, g)); }
  // Of the block that begins with sub-block s.
  INLINE_METHOD Floats unit(int s, int g) const { return T::unit(record(s, g)); }
  INLINE_METHOD Floats negative_minimum_unit(int s, int g) const {
    return broadcast(0.0f) - T::minimum_unit(record(s, g));
  }
  INLINE_METHOD Ints multiple(int s, int g, int i) const { return T::multiple(record(s, g), i); }
  INLINE_METHOD Ints pairs(int s, int g, int i) const {  // what sums of codes are multiplied by
    const uint8_t* r = record(s, g);
    if constexpr (T::has_minimum)
      return paired(T::minimum_multiple(r, 2 * i), T::minimum_multiple(r, 2 * i + 1));
    else
      return paired(T::multiple(r, 2 * i), T::multiple(r, 2 * i + 1));
  }
  // The same sub-block of the row groups after these comes from memory while this one's is
  // multiplied: the processor's own fetching begins anew with each row group. Passes share it.
  INLINE_METHOD void fetch_further(int s) const {
    if (num_turns > 1 && s % num_turns != turn) return;
    UNROLL(2)
    for (int g = 0; g < groups; g++) {
      const uint8_t* codes = codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes + further;
      UNROLL(8)
      for (int i = 0; i < T::info.code_bytes; i += 64) __builtin_prefetch(codes + i, 0, 2);
      if (s % T::info.scale_span == 0)
        for (int i = 0; i < T::info.scale_bytes; i += 64)
          __builtin_prefetch(record(s, g) + further + i, 0, 2);
    }
  }
};

// One slab, unpacked.
template <int bits_, int zero_, bool per_half_, bool has_minimum_, bool is_signed_, bool in_blocks_>
struct TileFormat {
  static constexpr int bits = bits_, zero = zero_;
  static constexpr bool per_half = per_half_, has_minimum = has_minimum_, is_signed = is_signed_;
  static constexpr bool in_blocks = in_blocks_;
};
template <class T>
using TileFormatOf = TileFormat<T::bits <= 4 ? 4 : T::bits, T::zero, T::per_half, T::has_minimum,
                                T::is_signed, T::in_blocks>;

template <class F>
constexpr int halves_of = F::per_half ? 2 : 1;
template <class F>
constexpr int num_pairs = halves_of<F> * slab / 2;
template <class F>  // whether sums of codes are needed
constexpr bool has_offsets = F::has_minimum || F::zero != 0;

template <bool in_blocks, int groups>
struct alignas(64) TileData {
  uint8_t codes[slab][8][groups][64];
  float scales[slab][groups][16];
  float minimums[slab][groups][16];
};
template <int groups>
struct alignas(64) TileData<true, groups> {
  uint8_t codes[slab][8][groups][64];
  int32_t multiples[2 * slab][groups][16];
  int32_t pairs[slab][groups][16];
  float units[groups][16], negative_minimum_units[groups][16];
};

// The weights of the next slab, or of more sub-blocks, which come from memory while others are
// multiplied, some lines at a time: without that a batch waits for memory first and computes
// afterwards.
class NextSlab {
 public:
  template <class T, int groups>
  NextSlab(const Direct<T, groups>& source, int next, int sub_blocks, int num_turns,
           int length = slab) {
    const bool is_past = next >= sub_blocks;  // then the row groups after these are next
    int s = is_past ? (next - sub_blocks) / slab * slab : next;
    if (s >= sub_blocks) s = 0;
    const int64_t further = is_past ? source.further : 0;
    for (int g = 0; g < groups; g++) {
      add(source.codes_of[g] + further + int64_t{s} * T::info.code_bytes,
          length * T::info.code_bytes);
      const int records = (length + T::info.scale_span - 1) / T::info.scale_span;
      add(source.record(s, g) + further, records * T::info.scale_bytes);
    }
    lines_a_turn_ = (num_lines_ + num_turns - 1) / num_turns;
  }

  INLINE_METHOD void fetch() {
    for (int i = 0; i < lines_a_turn_ && area_ < num_areas_; i++) {
      __builtin_prefetch(next_, 0, 2);
      next_ += 64;
      if (next_ >= areas_[area_].end) next_ = areas_[++area_].begin;
    }
  }

 private:
  struct Area {
    const uint8_t *begin, *end;
  };

  void add(const uint8_t* begin, int size) {
    if (num_areas_ == 0) next_ = begin;
    areas_[num_areas_++] = {begin, begin + size};
    num_lines_ += size / 64 + 1;
  }

  Area areas_[5] = {};
  const uint8_t* next_ = nullptr;
  int num_areas_ = 0, area_ = 0, num_lines_ = 0, lines_a_turn_ = 0;
};

template <class F, int groups>
struct Tile {
  using Format = F;
  const TileData<F::in_blocks, groups>& data;
  NextSlab& next;
  INLINE_METHOD Codes codes(int s, int g, int j) const { return load_codes(data.codes[s][j][g]); }
  INLINE_METHOD Floats scale(int s, int g) const { return load(data.scales[s][g]); }
  INLINE_METHOD Floats minimum(int s, int g) const { return load(data.minimums[s][g]); }
  INLINE_METHOD Floats unit(int, int g) const { return load(data.units[g]); }
  INLINE_METHOD Floats negative_minimum_unit(int, int g) const {
    return load(data.negative_minimum_units[g]);
  }
  INLINE_METHOD Ints multiple(int, int g, int i) const { return load(data.multiples[i][g]); }
  INLINE_METHOD Ints pairs(int, int g, int i) const { return load(data.pairs[i][g]); }
  INLINE_METHOD void fetch_further(int) const { next.fetch(); }
};

template <class T, int groups>
void fill_tile(const Direct<T, groups>& from, int first, int count, TileData<false, groups>& to) {
  for (int s = 0; s < count; s++)
    for (int g = 0; g < groups; g++) {
      for (int j = 0; j < 8; j++) store_codes(to.codes[s][j][g], from.codes(first + s, g, j));
      store(to.scales[s][g], from.scale(first + s, g));
      if constexpr (T::has_minimum) store(to.minimums[s][g], from.minimum(first + s, g));
    }
}

template <class T, int groups>
void fill_tile(const Direct<T, groups>& from, int first, int, TileData<true, groups>& to) {
  for (int s = 0; s < slab; s++)
    for (int g = 0; g < groups; g++)
      for (int j = 0; j < 8; j++) store_codes(to.codes[s][j][g], from.codes(first + s, g, j));
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < halves_of<T> * slab; i++)
      store(to.multiples[i][g], from.multiple(first, g, i));
    if constexpr (has_offsets<T>)
      for (int i = 0; i < num_pairs<T>; i++) store(to.pairs[i][g], from.pairs(first, g, i));
    store(to.units[g], from.unit(first, g));
    if constexpr (T::has_minimum)
      store(to.negative_minimum_units[g], from.negative_minimum_unit(first, g));
  }
}

// ---- the micro-kernel: `groups` row groups times `columns` columns over `count` sub-blocks

template <class Source, int groups, int columns>
INLINE void accumulate(const Source& source, int first, int count,
                       const ActivationGroup* const* activations, Floats (*acc)[columns]) {
  using F = typename Source::Format;
  for (int s = first; s < first + count; s++) {
    source.fetch_further(s);
    Dot<F::bits, F::is_signed> dots[groups][columns];
    UNROLL(8)
    for (int j = 0; j < 8; j++) {
      UNROLL(2)
      for (int g = 0; g < groups; g++) {
        const Codes w = source.codes(s, g, j);
        UNROLL(4)
        for (int c = 0; c < columns; c++) dots[g][c].add(w, activations[c][s].codes + 4 * j, j, 0);
      }
    }
    UNROLL(2)
    for (int g = 0; g < groups; g++) {
      const Floats scale = source.scale(s, g);
      Floats minimum = scale;
      if constexpr (F::has_minimum) minimum = source.minimum(s, g);
      UNROLL(4)
      for (int c = 0; c < columns; c++) {
        const ActivationGroup& a = activations[c][s];
        Floats sum = to_floats(dots[g][c].total());
        if (F::zero != 0) sum = fma(broadcast(a.sum), broadcast(-static_cast<float>(F::zero)), sum);
        acc[g][c] = fma(sum, scale * broadcast(a.scale), acc[g][c]);
        if (F::has_minimum) acc[g][c] = fma(minimum, broadcast(a.scaled_sum), acc[g][c]);
      }
    }
  }
}

// The sums of codes of a block, as its pairs take them.
template <class F>
INLINE int32_t sums_of_codes(const ActivationBlock& a, int i) {
  int32_t pair;
  __builtin_memcpy(&pair, (F::per_half ? a.half_sums : a.sums) + 2 * i, sizeof pair);
  return pair;
}

// Sums of multiple * code * code over the block that begins with sub-block `first`.
template <class Source, int groups, int columns>
INLINE void add_products(const Source& source, int first, const ActivationBlock* const* activations,
                         Ints (*sums)[columns]) {
  using F = typename Source::Format;
  constexpr int halves = halves_of<F>, vectors = 8 / halves;
  for (int s = 0; s < slab; s++) {
    source.fetch_further(first + s);
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
      Dot<F::bits, F::is_signed> dots[groups][columns];
      UNROLL(8)
      for (int j = h * vectors; j < (h + 1) * vectors; j++) {
        UNROLL(2)
        for (int g = 0; g < groups; g++) {
          const Codes w = source.codes(first + s, g, j);
          UNROLL(4)
          for (int c = 0; c < columns; c++)
            dots[g][c].add(w, activations[c]->codes + group_size * s + 4 * j, j, h * vectors);
        }
      }
      UNROLL(2)
      for (int g = 0; g < groups; g++) {
        const Ints multiple = source.multiple(first, g, halves * s + h);
        UNROLL(4)
        for (int c = 0; c < columns; c++) sums[g][c] = sums[g][c] + multiple * dots[g][c].total();
      }
    }
  }
}

template <class Source, int groups, int columns>
INLINE void accumulate_block(const Source& source, int first,
                             const ActivationBlock* const* activations, Floats (*acc)[columns]) {
  using F = typename Source::Format;
  Ints sums[groups][columns], offsets[columns];
  for (auto& group : sums)
    for (auto& x : group) x = broadcast_int(0);
  add_products<Source, groups, columns>(source, first, activations, sums);
  UNROLL(2)
  for (int g = 0; g < groups; g++) {
    if constexpr (has_offsets<F>) {
      for (auto& x : offsets) x = broadcast_int(0);
      UNROLL(8)
      for (int i = 0; i < num_pairs<F>; i++) {
        const Ints pairs = source.pairs(first, g, i);
        UNROLL(4)
        for (int c = 0; c < columns; c++)
          offsets[c] = add_pairs(offsets[c], pairs, sums_of_codes<F>(*activations[c], i));
      }
    }
    const Floats unit = source.unit(first, g);
    UNROLL(4)
    for (int c = 0; c < columns; c++) {
      Ints whole = sums[g][c];
      if constexpr (F::zero != 0) whole = whole - offsets[c] * broadcast_int(F::zero);
      Floats value = unit * to_floats(whole);
      if constexpr (F::has_minimum)
        value = fma(source.negative_minimum_unit(first, g), to_floats(offsets[c]), value);
      acc[g][c] = fma(broadcast(activations[c]->scale), value, acc[g][c]);
    }
  }
}

template <class Source, int groups, int columns>
INLINE void accumulate(const Source& source, int first, int count,
                       const ActivationBlock* const* activations, Floats (*acc)[columns]) {
  const ActivationBlock* of[columns];
  for (int s = first; s < first + count; s += slab) {
    UNROLL(4)
    for (int c = 0; c < columns; c++) of[c] = activations[c] + s / slab;
    accumulate_block<Source, groups, columns>(source, s, of, acc);
  }
}
