// GEMM of packed weights and quantised activations: the loops over panels and tokens.
//
// With few tokens (GEMV) codes are unpacked in registers, for four tokens at a time. With more
// tokens a slab is unpacked once into a tile that all tokens read. gemm_accumulate.h defines the
// order of the sums.

INLINE void store_rows(float* out, Floats x, int count) {
  if (count >= panel_rows) return store(out, x);
  float values[panel_rows];
  store(values, x);
  for (int i = 0; i < count; i++) out[i] = values[i];
}

// Few tokens: no tile, sums stay in registers.
template <class T, int panels, int tokens>
void gemm_direct(const Gemm& p, const PackedSource<T, panels>& source, int first_row, int token) {
  using A = Activation<T>;
  const A* of[2][tokens];
  for (int t = 0; t < tokens; t++) {
    const int64_t at = (token + t) * p.activation_stride;
    of[0][t] = static_cast<const A*>(p.activations) + at;
    of[1][t] = p.residuals ? static_cast<const A*>(p.residuals) + at : nullptr;
  }
  Floats acc[panels][tokens];
  for (auto& panel : acc)
    for (auto& x : panel) x = broadcast(0.0f);
  const int sub_blocks = static_cast<int>(p.in_size / 32);
  const int step =
      p.residuals ? slab : sub_blocks;  // the residual pass alternates by slab, as with tiles
  for (int first = 0; first < sub_blocks; first += step) {
    const int count = sub_blocks - first < step ? sub_blocks - first : step;
    for (int pass = 0; pass <= (p.residuals != nullptr); pass++)
      accumulate<PackedSource<T, panels>, panels, tokens>(source, first, count, of[pass], acc);
  }
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < tokens; t++)
      store_rows(p.out + (token + t) * p.out_stride + first_row + g * panel_rows, acc[g][t],
                 p.num_rows - first_row - g * panel_rows);
}

// Up to four tokens.
template <class T, int panels>
void gemm_tokens(const Gemm& p, const PackedSource<T, panels>& source, int row, int token,
                 int tokens) {
  switch (tokens) {
    case 1: return gemm_direct<T, panels, 1>(p, source, row, token);
    case 2: return gemm_direct<T, panels, 2>(p, source, row, token);
    case 3: return gemm_direct<T, panels, 3>(p, source, row, token);
    default: return gemm_direct<T, panels, 4>(p, source, row, token);
  }
}

template <class F, int panels, int tokens>
void unpacked_tokens(const UnpackedTile<F, panels>& tile, int count, const Activation<F>* from,
                     int64_t stride, float* sums) {
  const Activation<F>* of[tokens];
  for (int t = 0; t < tokens; t++) of[t] = from + t * stride;
  Floats acc[panels][tokens];
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < tokens; t++) acc[g][t] = load(sums + (t * panels + g) * panel_rows);
  accumulate<UnpackedTile<F, panels>, panels, tokens>(tile, 0, count, of, acc);
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < tokens; t++) store(sums + (t * panels + g) * panel_rows, acc[g][t]);
}

// Up to four tokens.
template <class F, int panels>
void unpacked_some_tokens(const UnpackedTile<F, panels>& tile, int count, const Activation<F>* from,
                          int64_t stride, int tokens, float* sums) {
  switch (tokens) {
    case 1: return unpacked_tokens<F, panels, 1>(tile, count, from, stride, sums);
    case 2: return unpacked_tokens<F, panels, 2>(tile, count, from, stride, sums);
    case 3: return unpacked_tokens<F, panels, 3>(tile, count, from, stride, sums);
    default: return unpacked_tokens<F, panels, 4>(tile, count, from, stride, sums);
  }
}

template <class T, int panels>
void gemm_unpacked(const Gemm& p, const PackedSource<T, panels>& source, int first_row, int token,
                   int num_tokens) {
  using F = UnpackedFormatOf<T>;
  UnpackedTileData<F::in_blocks, panels> tile;
  alignas(64) float sums[max_tile_tokens * panels * panel_rows];
  for (int i = 0; i < num_tokens * panels * panel_rows; i++) sums[i] = 0.0f;
  const auto* activations = static_cast<const Activation<F>*>(p.activations);
  const auto* residuals = static_cast<const Activation<F>*>(p.residuals);
  const int sub_blocks = static_cast<int>(p.in_size / 32);
  for (int first = 0; first < sub_blocks; first += slab) {
    const int count = sub_blocks - first < slab ? sub_blocks - first : slab;
    unpack_slab(source, first, count, tile);
    SlabPrefetch next(source, first + slab, sub_blocks, (num_tokens + 3) / 4 * count);
    const UnpackedTile<F, panels> codes{tile, next};
    for (int t = 0; t < num_tokens; t += 4) {
      const int64_t at = (token + t) * p.activation_stride + first / activation_span<F>;
      float* some = sums + t * panels * panel_rows;
      const int some_tokens = num_tokens - t;
      unpacked_some_tokens<F>(codes, count, activations + at, p.activation_stride, some_tokens,
                              some);
      if (residuals)
        unpacked_some_tokens<F>(codes, count, residuals + at, p.activation_stride, some_tokens,
                                some);
    }
  }
  for (int t = 0; t < num_tokens; t++)
    for (int g = 0; g < panels; g++)
      store_rows(p.out + (token + t) * p.out_stride + first_row + g * panel_rows,
                 load(sums + (t * panels + g) * panel_rows),
                 p.num_rows - first_row - g * panel_rows);
}

template <class T, int panels>
PackedSource<T, panels> packed_source(const Gemm& p, int panel) {
  PackedSource<T, panels> source;
  for (int g = 0; g < panels; g++) {
    source.codes_of[g] = p.weights + (p.first_panel + panel + g) * p.panel_bytes;
    source.scales_of[g] = source.codes_of[g] + p.in_size / 32 * T::info.code_bytes;
  }
  const bool is_last = panel + panels >= p.num_panels;
  source.to_next = p.next && is_last ? p.next - source.codes_of[0] : panels * p.panel_bytes;
  return source;
}

template <class T, int panels>
void gemm_panels(const Gemm& p, int panel) {
  PackedSource<T, panels> source = packed_source<T, panels>(p, panel);
  const int row = panel * panel_rows;
  if (p.num_tokens <= max_direct_tokens<T>) {
    source.num_passes = (p.num_tokens + 3) / 4;
    for (int t = 0; t < p.num_tokens; t += 4, source.pass++)
      gemm_tokens(p, source, row, t, p.num_tokens - t);
    return;
  }
  for (int t = 0; t < p.num_tokens; t += max_tile_tokens) {
    const int left = p.num_tokens - t;
    gemm_unpacked(p, source, row, t, left < max_tile_tokens ? left : max_tile_tokens);
  }
}

template <class T>
void gemm_quantised(const Gemm& p) {
  int panel = 0;
  if constexpr (panels_at_once > 1)
    for (; panel + panels_at_once <= p.num_panels; panel += panels_at_once)
      gemm_panels<T, panels_at_once>(p, panel);
  for (; panel < p.num_panels; panel++) gemm_panels<T, 1>(p, panel);
}

#include "gemm_ternary.h"

// ---- float weights: sums in order of k, one fma each; of E4M3 those of a block, times its scale

INLINE Floats float_weights(int format, const uint8_t* p) {
  if (format == F32) return load(reinterpret_cast<const float*>(p));
  if (format == F16) return load_half(reinterpret_cast<const uint16_t*>(p));
  if (format == E4M3_128) return load_e4m3(p);
  return load_bfloat(reinterpret_cast<const uint16_t*>(p));
}

template <int format, int tokens>
INLINE void add_float_products(const uint8_t* weights, const float* from, int64_t stride,
                               int64_t count, Floats* acc) {
  for (int64_t k = 0; k < count; k++) {
    const Floats w = float_weights(format, weights + k * format_infos[format].code_bytes);
    UNROLL(8)
    for (int t = 0; t < tokens; t++) acc[t] = fma(w, broadcast(from[t * stride + k]), acc[t]);
  }
}

template <int tokens>
INLINE void add_e4m3_blocks(const uint8_t* weights, const float* from, int64_t stride,
                            int64_t in_size, Floats* acc) {
  const auto* scales = reinterpret_cast<const float*>(weights + code_area(E4M3_128, in_size));
  for (int64_t k = 0; k < in_size; k += e4m3_block_size, scales += panel_rows) {
    Floats sums[tokens];
    for (auto& x : sums) x = broadcast(0.0f);
    add_float_products<E4M3_128, tokens>(weights + k * panel_rows, from + k, stride,
                                         e4m3_block_size, sums);
    const Floats scale = load(scales);
    for (int t = 0; t < tokens; t++) acc[t] = fma(sums[t] * broadcast(e4m3_factor), scale, acc[t]);
  }
}

template <int format, int tokens>
void float_panel_tokens(const Gemm& p, int panel, int token) {
  const uint8_t* weights = p.weights + (p.first_panel + panel) * p.panel_bytes;
  const float* from = static_cast<const float*>(p.activations) + token * p.activation_stride;
  Floats acc[tokens];
  for (auto& x : acc) x = broadcast(0.0f);
  if constexpr (format == E4M3_128)
    add_e4m3_blocks<tokens>(weights, from, p.activation_stride, p.in_size, acc);
  else
    add_float_products<format, tokens>(weights, from, p.activation_stride, p.in_size, acc);
  for (int t = 0; t < tokens; t++)
    store_rows(p.out + (token + t) * p.out_stride + panel * panel_rows, acc[t],
               p.num_rows - panel * panel_rows);
}

template <int format>
void gemm_floats(const Gemm& p) {
  for (int panel = 0; panel < p.num_panels; panel++) {
    int t = 0;
    for (; t + 6 <= p.num_tokens; t += 6) float_panel_tokens<format, 6>(p, panel, t);
    for (; t + 2 <= p.num_tokens; t += 2) float_panel_tokens<format, 2>(p, panel, t);
    for (; t < p.num_tokens; t++) float_panel_tokens<format, 1>(p, panel, t);
  }
}

void gemm(const Gemm& p) {
  switch (static_cast<Format>(p.format)) {
    case F32: return gemm_floats<F32>(p);
    case F16: return gemm_floats<F16>(p);
    case BF16: return gemm_floats<BF16>(p);
    case E4M3_128: return gemm_floats<E4M3_128>(p);
    case Q8_0: return gemm_quantised<AsQ8_0>(p);
    case Q4_0: return gemm_quantised<AsQ4_0>(p);
    case Q4_1: return gemm_quantised<AsQ4_1>(p);
    case Q5_0: return gemm_quantised<AsQ5_0>(p);
    case Q5_1: return gemm_quantised<AsQ5_1>(p);
    case Q2_K: return gemm_quantised<AsQ2_K>(p);
    case Q3_K: return gemm_quantised<AsQ3_K>(p);
    case Q4_K: return gemm_quantised<AsQ4_K>(p);
    case Q5_K: return gemm_quantised<AsQ5_K>(p);
    case Q6_K: return gemm_quantised<AsQ6_K>(p);
    case IQ4_NL: return gemm_quantised<AsIQ4_NL>(p);
    case IQ4_XS: return gemm_quantised<AsIQ4_XS>(p);
    case IQ1_S: return gemm_quantised<AsIQ1_S>(p);
    case IQ1_M: return gemm_quantised<AsIQ1_M>(p);
    case IQ2_XXS: return gemm_quantised<AsIQ2_XXS>(p);
    case IQ2_XS: return gemm_quantised<AsIQ2_XS>(p);
    case IQ2_S: return gemm_quantised<AsIQ2_S>(p);
    case IQ3_XXS: return gemm_quantised<AsIQ3_XXS>(p);
    case IQ3_S: return gemm_quantised<AsIQ3_S>(p);
    case MXFP4: return gemm_quantised<AsMXFP4>(p);
    case NVFP4: return gemm_quantised<AsNVFP4>(p);
    case NVFP4_128: return gemm_quantised<AsNVFP4_128>(p);
    case Q1_0: return gemm_quantised<AsQ1_0>(p);
    case Q2_0: return gemm_quantised<AsQ2_0>(p);
    case U4_128: return gemm_quantised<AsU4_128>(p);
    case I8_128: return gemm_quantised<AsI8_128>(p);
    case TERNARY: return p.has_unit_scales ? gemm_ternary(p) : gemm_quantised<AsTernary>(p);
    case num_formats: return;
  }
}

// ---- peak rate: dot products of 4-bit codes from registers

// Does rounds * 4096 multiplications and additions; the result depends on all of them.
int64_t peak_dots(int64_t rounds) {
  constexpr int chains = 8;
  uint8_t bytes[64];
  int8_t activations[64];
  for (int i = 0; i < 64; i++) {
    bytes[i] = static_cast<uint8_t>((i + rounds) & 15);
    activations[i] = static_cast<int8_t>(i + (rounds & 63));
  }
  const Codes w = load_codes(bytes);
  Dot<4, false> dots[chains];
  Ints total = broadcast_int(0);
  for (int i = 0; i < chains; i++) dots[i].add(w, activations, 0, 0);
  for (int64_t r = 0; r < rounds; r++) {
    UNROLL(8)
    for (int j = 0; j < 8; j++) {
      UNROLL(8)
      for (int i = 0; i < chains; i++)
        // A unit that accumulates in 32 bits goes on; the others widen each round.
        dots[i].add(w, activations + 4 * ((r + i) & 7), j, signed_as_unsigned ? -1 : 0);
    }
    if (!signed_as_unsigned) {
      UNROLL(8)
      for (int i = 0; i < chains; i++) total = total + dots[i].total();
    }
  }
  for (int i = 0; i < chains; i++) total = total + dots[i].total();
  int32_t sums[16];
  store(sums, total);
  int64_t sum = 0;
  for (const int32_t x : sums) sum += x;
  return sum;
}
