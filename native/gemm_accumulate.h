// The inner loops of GEMM: sources of codes and scales, and the sums over them.
//
// For a row and a token the sum runs over the sub-blocks in order of k. The integer sum of a
// sub-block is exact, then
//     acc = fma(sum - zero * sum_of_codes, weight_scale * activation_scale, acc)
//     acc = fma(weight_minimum, scaled_sum_of_codes, acc)              where there are minimums
// The same for each half of a sub-block where scales are per half.
// Where weights have super-blocks and activations are ActivationBlocks, the integer sum is exact to
// the end of a super-block (sub-blocks are halves of 16 where scales are per half):
//     whole  = sum over its sub-blocks of sub_scale * (sum - zero * sum_of_codes)
//     lowest = sum over its sub-blocks of sub_minimum * sum_of_codes
//     acc = fma(activation_scale, fma(-super_minimum, lowest, super_scale * whole), acc)
// The order is the same for any number of tokens and for both sources of codes: the packed matrix,
// or a tile that a slab of it was unpacked into.

// ---- sources of codes and scales

constexpr int slab = 8;  // sub-blocks unpacked at once: 256 k
constexpr int max_tile_tokens = 128;
// Beyond, unpacking once for all tokens costs less. Points of a grid are looked up once for each
// four tokens.
template <class T>
constexpr int max_direct_tokens = has_grid(T::format) ? 4 : 12;

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

// Codes and scales read from the packed matrix.
template <class T, int panels>
struct PackedSource {
  using Format = T;
  const uint8_t* codes_of[panels];
  const uint8_t* scales_of[panels];
  int64_t to_next;               // bytes to the panels after these
  int pass = 0, num_passes = 1;  // which pass over these panels, of how many
  INLINE_METHOD Codes codes(int s, int g, int j) const {
    return T::codes(codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes, j);
  }
  static constexpr int vectors_at_once = T::vectors_at_once;
  using Prepared = typename T::Prepared;
  INLINE_METHOD void prepare(int s, int g, Prepared& prepared) const {
    T::prepare(codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes, prepared);
  }
  INLINE_METHOD void some_codes(int s, int g, int j, const Prepared& prepared, Codes* some) const {
    const uint8_t* p = codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes;
    if constexpr (vectors_at_once == 1)
      some[0] = T::codes(p, j);
    else
      T::two_codes(p, prepared, j / 2, some);
  }
  INLINE_METHOD const uint8_t* record(int s, int g) const {
    return scales_of[g] + static_cast<int64_t>(s / T::info.scale_span) * T::info.scale_bytes;
  }
  INLINE_METHOD Floats scale(int s, int g, int half) const {
    if constexpr (T::per_half)
      return T::half_scale(record(s, g), s % T::info.scale_span * 2 + half);
    else
      return T::scale(record(s, g));
  }
  INLINE_METHOD Floats minimum(int s, int g) const { return T::minimum(record(s, g)); }
  // Of the super-block that begins with sub-block s.
  INLINE_METHOD Floats super_scale(int s, int g) const { return T::super_scale(record(s, g)); }
  INLINE_METHOD Floats negative_super_minimum(int s, int g) const {
    return broadcast(0.0f) - T::super_minimum(record(s, g));
  }
  INLINE_METHOD Ints sub_scale(int s, int g, int i) const { return T::sub_scale(record(s, g), i); }
  INLINE_METHOD Ints pairs(int s, int g, int i) const {  // factors of the sums of codes
    const uint8_t* r = record(s, g);
    if constexpr (T::has_minimum)
      return paired(T::sub_minimum(r, 2 * i), T::sub_minimum(r, 2 * i + 1));
    else
      return paired(T::sub_scale(r, 2 * i), T::sub_scale(r, 2 * i + 1));
  }
  // Prefetches the same sub-block of the panels after these: the hardware prefetcher restarts at
  // each panel. The passes share the lines.
  INLINE_METHOD void prefetch_next(int s) const {
    if (num_passes > 1 && s % num_passes != pass) return;
    UNROLL(2)
    for (int g = 0; g < panels; g++) {
      const uint8_t* codes = codes_of[g] + static_cast<int64_t>(s) * T::info.code_bytes + to_next;
      UNROLL(8)
      for (int i = 0; i < T::info.code_bytes; i += 64) __builtin_prefetch(codes + i, 0, 2);
      if (s % T::info.scale_span == 0)
        for (int i = 0; i < T::info.scale_bytes; i += 64)
          __builtin_prefetch(record(s, g) + to_next + i, 0, 2);
    }
  }
};

// ---- one slab, unpacked once for all tokens

template <int bits_, int zero_, bool per_half_, bool has_minimum_, bool is_signed_, bool in_blocks_>
struct UnpackedFormat {
  static constexpr int bits = bits_, zero = zero_;
  static constexpr bool per_half = per_half_, has_minimum = has_minimum_, is_signed = is_signed_;
  static constexpr bool in_blocks = in_blocks_;
};
template <class T>
using UnpackedFormatOf = UnpackedFormat<T::bits <= 4 ? 4 : T::bits, T::zero, T::per_half,
                                        T::has_minimum, T::is_signed, T::in_blocks>;

template <class F>
constexpr int halves_of = F::per_half ? 2 : 1;
template <class F>
constexpr int num_pairs = halves_of<F> * slab / 2;
template <class F>  // whether sums of codes are needed
constexpr bool needs_code_sums = F::has_minimum || F::zero != 0;

template <bool in_blocks, int panels>
struct alignas(64) UnpackedTileData {
  uint8_t codes[slab][8][panels][64];
  float scales[2 * slab][panels][16];
  float minimums[slab][panels][16];
};
template <int panels>
struct alignas(64) UnpackedTileData<true, panels> {
  uint8_t codes[slab][8][panels][64];
  int32_t sub_scales[2 * slab][panels][16];
  int32_t pairs[slab][panels][16];
  float super_scales[panels][16], negative_super_minimums[panels][16];
};

// Prefetches the weights of the next slab, or of more sub-blocks, some lines at each call, while
// this one is multiplied.
class SlabPrefetch {
 public:
  template <class T, int panels>
  SlabPrefetch(const PackedSource<T, panels>& source, int next, int sub_blocks, int num_calls,
               int length = slab) {
    const bool is_past = next >= sub_blocks;  // then the panels after these are next
    int s = is_past ? (next - sub_blocks) / slab * slab : next;
    if (s >= sub_blocks) s = 0;
    const int64_t to_next = is_past ? source.to_next : 0;
    for (int g = 0; g < panels; g++) {
      add(source.codes_of[g] + to_next + int64_t{s} * T::info.code_bytes,
          length * T::info.code_bytes);
      const int records = (length + T::info.scale_span - 1) / T::info.scale_span;
      add(source.record(s, g) + to_next, records * T::info.scale_bytes);
    }
    lines_per_call_ = (num_lines_ + num_calls - 1) / num_calls;
  }

  INLINE_METHOD void fetch() {
    for (int i = 0; i < lines_per_call_ && range_ < num_ranges_; i++) {
      __builtin_prefetch(next_, 0, 2);
      next_ += 64;
      if (next_ >= ranges_[range_].end) next_ = ranges_[++range_].begin;
    }
  }

 private:
  struct Range {
    const uint8_t *begin, *end;
  };

  void add(const uint8_t* begin, int size) {
    if (num_ranges_ == 0) next_ = begin;
    ranges_[num_ranges_++] = {begin, begin + size};
    num_lines_ += size / 64 + 1;
  }

  Range ranges_[5] = {};
  const uint8_t* next_ = nullptr;
  int num_ranges_ = 0, range_ = 0, num_lines_ = 0, lines_per_call_ = 0;
};

template <class F, int panels>
struct UnpackedTile {
  using Format = F;
  const UnpackedTileData<F::in_blocks, panels>& data;
  SlabPrefetch& next;
  static constexpr int vectors_at_once = 1;
  using Prepared = Nothing;
  INLINE_METHOD void prepare(int, int, Prepared&) const {}
  INLINE_METHOD Codes codes(int s, int g, int j) const { return load_codes(data.codes[s][j][g]); }
  INLINE_METHOD void some_codes(int s, int g, int j, const Prepared&, Codes* some) const {
    some[0] = codes(s, g, j);
  }
  INLINE_METHOD Floats scale(int s, int g, int half) const {
    return load(data.scales[halves_of<F> * s + half][g]);
  }
  INLINE_METHOD Floats minimum(int s, int g) const { return load(data.minimums[s][g]); }
  INLINE_METHOD Floats super_scale(int, int g) const { return load(data.super_scales[g]); }
  INLINE_METHOD Floats negative_super_minimum(int, int g) const {
    return load(data.negative_super_minimums[g]);
  }
  INLINE_METHOD Ints sub_scale(int, int g, int i) const { return load(data.sub_scales[i][g]); }
  INLINE_METHOD Ints pairs(int, int g, int i) const { return load(data.pairs[i][g]); }
  INLINE_METHOD void prefetch_next(int) const { next.fetch(); }
};

template <class T, int panels>
void unpack_slab(const PackedSource<T, panels>& from, int first, int count,
                 UnpackedTileData<false, panels>& to) {
  for (int s = 0; s < count; s++)
    for (int g = 0; g < panels; g++) {
      for (int j = 0; j < 8; j++) store_codes(to.codes[s][j][g], from.codes(first + s, g, j));
      for (int h = 0; h < halves_of<T>; h++)
        store(to.scales[halves_of<T> * s + h][g], from.scale(first + s, g, h));
      if constexpr (T::has_minimum) store(to.minimums[s][g], from.minimum(first + s, g));
    }
}

template <class T, int panels>
void unpack_slab(const PackedSource<T, panels>& from, int first, int,
                 UnpackedTileData<true, panels>& to) {
  for (int s = 0; s < slab; s++)
    for (int g = 0; g < panels; g++) {
      typename T::Prepared prepared;
      from.prepare(first + s, g, prepared);
      for (int j = 0; j < 8; j += T::vectors_at_once) {
        Codes codes[T::vectors_at_once];
        from.some_codes(first + s, g, j, prepared, codes);
        for (int i = 0; i < T::vectors_at_once; i++) store_codes(to.codes[s][j + i][g], codes[i]);
      }
    }
  for (int g = 0; g < panels; g++) {
    for (int i = 0; i < halves_of<T> * slab; i++)
      store(to.sub_scales[i][g], from.sub_scale(first, g, i));
    if constexpr (needs_code_sums<T>)
      for (int i = 0; i < num_pairs<T>; i++) store(to.pairs[i][g], from.pairs(first, g, i));
    store(to.super_scales[g], from.super_scale(first, g));
    if constexpr (T::has_minimum)
      store(to.negative_super_minimums[g], from.negative_super_minimum(first, g));
  }
}

// ---- the micro-kernel: `panels` panels times `tokens` tokens over `count` sub-blocks

// Of the codes that have one scale: a sub-block's, or those of one of its halves.
template <class F>
INLINE float sum_of_codes(const ActivationGroup& a, int half) {
  if (!F::per_half) return a.sum;
  return half == 0 ? a.sum - a.second_sum : a.second_sum;
}

template <class Source, int panels, int tokens>
INLINE void accumulate(const Source& source, int first, int count,
                       const ActivationGroup* const* activations, Floats (*acc)[tokens]) {
  using F = typename Source::Format;
  constexpr int halves = halves_of<F>, vectors = 8 / halves;
  for (int s = first; s < first + count; s++) {
    source.prefetch_next(s);
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
      Dot<F::bits, F::is_signed> dots[panels][tokens];
      UNROLL(8)
      for (int j = h * vectors; j < (h + 1) * vectors; j++) {
        UNROLL(2)
        for (int g = 0; g < panels; g++) {
          const Codes w = source.codes(s, g, j);
          UNROLL(4)
          for (int t = 0; t < tokens; t++)
            dots[g][t].add(w, activations[t][s].codes + 4 * j, j, h * vectors);
        }
      }
      UNROLL(2)
      for (int g = 0; g < panels; g++) {
        const Floats scale = source.scale(s, g, h);
        Floats minimum = scale;
        if constexpr (F::has_minimum) minimum = source.minimum(s, g);
        UNROLL(4)
        for (int t = 0; t < tokens; t++) {
          const ActivationGroup& a = activations[t][s];
          Floats sum = to_floats(dots[g][t].total());
          if (F::zero != 0)
            sum =
                fma(broadcast(sum_of_codes<F>(a, h)), broadcast(-static_cast<float>(F::zero)), sum);
          acc[g][t] = fma(sum, scale * broadcast(a.scale), acc[g][t]);
          if (F::has_minimum) acc[g][t] = fma(minimum, broadcast(a.scaled_sum), acc[g][t]);
        }
      }
    }
  }
}

// Two sums of codes of an activation block, in the lane layout of `pairs`.
template <class F>
INLINE int32_t sums_of_codes(const ActivationBlock& a, int i) {
  int32_t pair;
  __builtin_memcpy(&pair, (F::per_half ? a.half_sums : a.sums) + 2 * i, sizeof pair);
  return pair;
}

// Sums of sub_scale * code * code over the super-block that begins with sub-block `first`.
template <class Source, int panels, int tokens>
INLINE void add_products(const Source& source, int first, const ActivationBlock* const* activations,
                         Ints (*sums)[tokens]) {
  using F = typename Source::Format;
  constexpr int halves = halves_of<F>, vectors = 8 / halves, some = Source::vectors_at_once;
  for (int s = 0; s < slab; s++) {
    source.prefetch_next(first + s);
    typename Source::Prepared prepared[panels];
    UNROLL(2)
    for (int g = 0; g < panels; g++) source.prepare(first + s, g, prepared[g]);
    UNROLL(2)
    for (int h = 0; h < halves; h++) {
      Dot<F::bits, F::is_signed> dots[panels][tokens];
      UNROLL(8)
      for (int j = h * vectors; j < (h + 1) * vectors; j += some) {
        UNROLL(2)
        for (int g = 0; g < panels; g++) {
          Codes w[some];
          source.some_codes(first + s, g, j, prepared[g], w);
          UNROLL(2)
          for (int i = 0; i < some; i++) {
            const int at = group_size * s + 4 * (j + i);
            UNROLL(4)
            for (int t = 0; t < tokens; t++)
              dots[g][t].add(w[i], activations[t]->codes + at, j + i, h * vectors);
          }
        }
      }
      UNROLL(2)
      for (int g = 0; g < panels; g++) {
        const Ints sub_scale = source.sub_scale(first, g, halves * s + h);
        UNROLL(4)
        for (int t = 0; t < tokens; t++) sums[g][t] = sums[g][t] + sub_scale * dots[g][t].total();
      }
    }
  }
}

template <class Source, int panels, int tokens>
INLINE void accumulate_block(const Source& source, int first,
                             const ActivationBlock* const* activations, Floats (*acc)[tokens]) {
  using F = typename Source::Format;
  Ints sums[panels][tokens], code_sums[tokens];
  for (auto& panel : sums)
    for (auto& x : panel) x = broadcast_int(0);
  add_products<Source, panels, tokens>(source, first, activations, sums);
  UNROLL(2)
  for (int g = 0; g < panels; g++) {
    if constexpr (needs_code_sums<F>) {
      for (auto& x : code_sums) x = broadcast_int(0);
      UNROLL(8)
      for (int i = 0; i < num_pairs<F>; i++) {
        const Ints pairs = source.pairs(first, g, i);
        UNROLL(4)
        for (int t = 0; t < tokens; t++)
          code_sums[t] = add_pairs(code_sums[t], pairs, sums_of_codes<F>(*activations[t], i));
      }
    }
    const Floats super_scale = source.super_scale(first, g);
    UNROLL(4)
    for (int t = 0; t < tokens; t++) {
      Ints whole = sums[g][t];
      if constexpr (F::zero != 0) whole = whole - code_sums[t] * broadcast_int(F::zero);
      Floats value = super_scale * to_floats(whole);
      if constexpr (F::has_minimum)
        value = fma(source.negative_super_minimum(first, g), to_floats(code_sums[t]), value);
      acc[g][t] = fma(broadcast(activations[t]->scale), value, acc[g][t]);
    }
  }
}

template <class Source, int panels, int tokens>
INLINE void accumulate(const Source& source, int first, int count,
                       const ActivationBlock* const* activations, Floats (*acc)[tokens]) {
  const ActivationBlock* of[tokens];
  for (int s = first; s < first + count; s += slab) {
    UNROLL(4)
    for (int t = 0; t < tokens; t++) of[t] = activations[t] + s / slab;
    accumulate_block<Source, panels, tokens>(source, s, of, acc);
  }
}
