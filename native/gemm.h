// Products of packed weights with activations: which rows and columns are summed together.
//
// With few columns the codes are unpacked on the way to the multiplier, four columns at a time;
// with more of them once into a tile that all columns read. What is summed, and in which order, is
// accumulate.h's.

INLINE void store_rows(float* out, Floats x, int count) {
  if (count >= row_group) return store(out, x);
  float values[row_group];
  store(values, x);
  for (int i = 0; i < count; i++) out[i] = values[i];
}

// Few columns: no tile, sums in registers from end to end.
template <class T, int groups, int columns>
void product_direct(const Product& p, const Direct<T, groups>& source, int first_row, int column) {
  using A = Activation<T>;
  const A* of[2][columns];
  for (int c = 0; c < columns; c++) {
    const int64_t at = (column + c) * p.column_stride;
    of[0][c] = static_cast<const A*>(p.columns) + at;
    of[1][c] = p.residuals ? static_cast<const A*>(p.residuals) + at : nullptr;
  }
  Floats acc[groups][columns];
  for (auto& group : acc)
    for (auto& x : group) x = broadcast(0.0f);
  const int sub_blocks = static_cast<int>(p.in_size / 32);
  const int step = p.residuals ? slab : sub_blocks;  // residuals take turns, as with tiles
  for (int first = 0; first < sub_blocks; first += step) {
    const int count = sub_blocks - first < step ? sub_blocks - first : step;
    for (int pass = 0; pass <= (p.residuals != nullptr); pass++)
      accumulate<Direct<T, groups>, groups, columns>(source, first, count, of[pass], acc);
  }
  for (int g = 0; g < groups; g++)
    for (int c = 0; c < columns; c++)
      store_rows(p.out + (column + c) * p.out_stride + first_row + g * row_group, acc[g][c],
                 p.num_rows - first_row - g * row_group);
}

// Up to four columns.
template <class T, int groups>
void product_some(const Product& p, const Direct<T, groups>& source, int row, int column,
                  int columns) {
  switch (columns) {
    case 1: return product_direct<T, groups, 1>(p, source, row, column);
    case 2: return product_direct<T, groups, 2>(p, source, row, column);
    case 3: return product_direct<T, groups, 3>(p, source, row, column);
    default: return product_direct<T, groups, 4>(p, source, row, column);
  }
}

template <class F, int groups, int columns>
void tile_columns(const Tile<F, groups>& tile, int count, const Activation<F>* from, int64_t stride,
                  float* sums) {
  const Activation<F>* of[columns];
  for (int c = 0; c < columns; c++) of[c] = from + c * stride;
  Floats acc[groups][columns];
  for (int g = 0; g < groups; g++)
    for (int c = 0; c < columns; c++) acc[g][c] = load(sums + (c * groups + g) * row_group);
  accumulate<Tile<F, groups>, groups, columns>(tile, 0, count, of, acc);
  for (int g = 0; g < groups; g++)
    for (int c = 0; c < columns; c++) store(sums + (c * groups + g) * row_group, acc[g][c]);
}

// Up to four columns.
template <class F, int groups>
void tile_some(const Tile<F, groups>& tile, int count, const Activation<F>* from, int64_t stride,
               int columns, float* sums) {
  switch (columns) {
    case 1: return tile_columns<F, groups, 1>(tile, count, from, stride, sums);
    case 2: return tile_columns<F, groups, 2>(tile, count, from, stride, sums);
    case 3: return tile_columns<F, groups, 3>(tile, count, from, stride, sums);
    default: return tile_columns<F, groups, 4>(tile, count, from, stride, sums);
  }
}

template <class T, int groups>
void product_tiled(const Product& p, const Direct<T, groups>& source, int first_row, int column,
                   int num_columns) {
  using F = TileFormatOf<T>;
  TileData<F::in_blocks, groups> tile;
  alignas(64) float sums[max_tile_columns * groups * row_group];
  for (int i = 0; i < num_columns * groups * row_group; i++) sums[i] = 0.0f;
  const auto* activations = static_cast<const Activation<F>*>(p.columns);
  const auto* residuals = static_cast<const Activation<F>*>(p.residuals);
  const int sub_blocks = static_cast<int>(p.in_size / 32);
  for (int first = 0; first < sub_blocks; first += slab) {
    const int count = sub_blocks - first < slab ? sub_blocks - first : slab;
    fill_tile(source, first, count, tile);
    NextSlab next(source, first + slab, sub_blocks, (num_columns + 3) / 4 * count);
    const Tile<F, groups> codes{tile, next};
    for (int c = 0; c < num_columns; c += 4) {
      const int64_t at = (column + c) * p.column_stride + first / activation_span<F>;
      float* some = sums + c * groups * row_group;
      const int some_columns = num_columns - c;
      tile_some<F>(codes, count, activations + at, p.column_stride, some_columns, some);
      if (residuals)
        tile_some<F>(codes, count, residuals + at, p.column_stride, some_columns, some);
    }
  }
  for (int c = 0; c < num_columns; c++)
    for (int g = 0; g < groups; g++)
      store_rows(p.out + (column + c) * p.out_stride + first_row + g * row_group,
                 load(sums + (c * groups + g) * row_group), p.num_rows - first_row - g * row_group);
}

template <class T, int groups>
Direct<T, groups> direct_source(const Product& p, int group) {
  Direct<T, groups> source;
  for (int g = 0; g < groups; g++) {
    source.codes_of[g] = p.weights + (p.first_group + group + g) * p.group_bytes;
    source.scales_of[g] = source.codes_of[g] + p.in_size / 32 * T::info.code_bytes;
  }
  source.further = groups * p.group_bytes;
  return source;
}

template <class T, int groups>
void product_groups(const Product& p, int group) {
  Direct<T, groups> source = direct_source<T, groups>(p, group);
  const int row = group * row_group;
  if (p.num_columns <= max_direct_columns) {
    source.num_turns = (p.num_columns + 3) / 4;
    for (int c = 0; c < p.num_columns; c += 4, source.turn++)
      product_some(p, source, row, c, p.num_columns - c);
    return;
  }
  for (int c = 0; c < p.num_columns; c += max_tile_columns) {
    const int left = p.num_columns - c;
    product_tiled(p, source, row, c, left < max_tile_columns ? left : max_tile_columns);
  }
}

template <class T>
void product_of(const Product& p) {
  int group = 0;
  if constexpr (groups_at_once > 1)
    for (; group + groups_at_once <= p.num_groups; group += groups_at_once)
      product_groups<T, groups_at_once>(p, group);
  for (; group < p.num_groups; group++) product_groups<T, 1>(p, group);
}

// ---- float weights: sums in order of k, one fma each

INLINE Floats float_weights(int format, const uint8_t* p) {
  if (format == F32) return load(reinterpret_cast<const float*>(p));
  if (format == F16) return load_half(reinterpret_cast<const uint16_t*>(p));
  return load_bfloat(reinterpret_cast<const uint16_t*>(p));
}

template <int format, int columns>
void float_columns(const Product& p, int group, int column) {
  const uint8_t* weights = p.weights + (p.first_group + group) * p.group_bytes;
  const float* from = static_cast<const float*>(p.columns) + column * p.column_stride;
  Floats acc[columns];
  for (auto& x : acc) x = broadcast(0.0f);
  for (int64_t k = 0; k < p.in_size; k++) {
    const Floats w = float_weights(format, weights + k * format_infos[format].code_bytes);
    UNROLL(8)
    for (int c = 0; c < columns; c++)
      acc[c] = fma(w, broadcast(from[c * p.column_stride + k]), acc[c]);
  }
  for (int c = 0; c < columns; c++)
    store_rows(p.out + (column + c) * p.out_stride + group * row_group, acc[c],
               p.num_rows - group * row_group);
}

template <int format>
void product_of_floats(const Product& p) {
  for (int group = 0; group < p.num_groups; group++) {
    int c = 0;
    for (; c + 6 <= p.num_columns; c += 6) float_columns<format, 6>(p, group, c);
    for (; c + 2 <= p.num_columns; c += 2) float_columns<format, 2>(p, group, c);
    for (; c < p.num_columns; c++) float_columns<format, 1>(p, group, c);
  }
}

void product(const Product& p) {
  switch (static_cast<Format>(p.format)) {
    case F32: return product_of_floats<F32>(p);
    case F16: return product_of_floats<F16>(p);
    case BF16: return product_of_floats<BF16>(p);
    case Q8_0: return product_of<AsQ8_0>(p);
    case Q4_0: return product_of<AsQ4_0>(p);
    case Q4_1: return product_of<AsQ4_1>(p);
    case Q5_0: return product_of<AsQ5_0>(p);
    case Q5_1: return product_of<AsQ5_1>(p);
    case Q2_K: return product_of<AsQ2_K>(p);
    case Q3_K: return product_of<AsQ3_K>(p);
    case Q4_K: return product_of<AsQ4_K>(p);
    case Q5_K: return product_of<AsQ5_K>(p);
    case Q6_K: return product_of<AsQ6_K>(p);
    case IQ4_NL: return product_of<AsIQ4_NL>(p);
    case IQ4_XS: return product_of<AsIQ4_XS>(p);
    case TERNARY: return product_of<AsTernary>(p);
    case num_formats: return;
  }
}

// ---- the limit: dot products of 4-bit codes from registers, as fast as this unit multiplies

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
        // A unit that adds in 32 bits need not begin anew; the others widen each round.
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
