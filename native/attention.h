// The KV cache in blocks, and paged attention over it.
//
// Positions are walked in tiles of kv_tile_size that begin at multiples of it. A tile gives a row
// (max score, sum of weights, weighted values); tiles are merged in ascending order. Within a tile
// a query's sums run in one order (scores over dimensions, values over tokens) however many queries
// are computed at once: a row's bits do not depend on the batch.
//
// Scores are in units of log 2: the factor is in the query, and weights are powers of 2. Tokens
// outside a row's span are skipped or replaced, never multiplied by 0: stale slots may hold NaN.

#define NOINLINE static __attribute__((noinline))
// Loops over sums that must stay in registers.
#define UNROLLED _Pragma("GCC unroll 32") for

constexpr int tile_blocks = kv_tile_size / block_size;

#if defined(QUIRE_UNIT_AVX512)
constexpr int max_queries = 8;
// Vectors computed at once for each of so many queries: enough sums in flight, all in registers.
constexpr int vectors_per_query(int num_queries) {
  return num_queries == 1 ? 8 : num_queries <= 6 ? 4 : 2;
}
#elif defined(QUIRE_UNIT_AVX2)
constexpr int max_queries = 6;
constexpr int vectors_per_query(int num_queries) {
  return num_queries == 1 ? 4 : num_queries <= 3 ? 2 : 1;
}
#else
constexpr int max_queries = 4;
constexpr int vectors_per_query(int) { return 1; }
#endif
static_assert(max_queries <= max_queries_at_once, "or the workspace would be too small");

INLINE Floats load_stored(const uint16_t* p) { return load_half(p); }
INLINE Floats load_stored(const int8_t* p) { return to_floats(load_signed_bytes(p)); }

template <class Element>
INLINE Floats load_stored_first(const Element* p, int count) {
  Element padded[16] = {};
  for (int i = 0; i < count; i++) padded[i] = p[i];
  return load_stored(padded);
}

// ---- addresses

// The keys and values of one kv head, by block.
template <class Element>
struct HeadCache {
  const LayerCache& layer;
  int64_t num_kv_heads, kv_head, head_dim, value_dim;
  int64_t stored;  // numbers of a token

  HeadCache(const LayerCache& of, const AttentionShape& shape, int head)
      : layer(of),
        num_kv_heads(shape.num_kv_heads),
        kv_head(head),
        head_dim(shape.head_dim),
        value_dim(shape.value_dim),
        stored(shape.head_dim + (shape.has_values_in_keys ? 0 : shape.value_dim)) {}

  INLINE_METHOD Element* keys(int32_t block) const {
    Element* data = reinterpret_cast<Element*>(layer.data + block * layer.block_bytes);
    return data + kv_head * stored * block_size;
  }
  INLINE_METHOD Element* values(int32_t block) const { return keys(block) + head_dim * block_size; }
  INLINE_METHOD float* scales(float* all, int32_t block) const {
    return all + (block * num_kv_heads + kv_head) * block_size;
  }
};

// Tokens [begin, end), of a sequence or counted from a tile's first.
struct Span {
  int begin, end;
};

INLINE bool is_empty(Span span) { return span.begin >= span.end; }
INLINE int first_block(Span span) { return span.begin / block_size; }
INLINE int end_block(Span span) { return (span.end + block_size - 1) / block_size; }

INLINE Span attended_by(const AttentionShape& shape, int position) {
  if (shape.window == 0) return {0, position + 1};
  const int begin =
      shape.is_chunked ? position / shape.window * shape.window : position - shape.window + 1;
  return {begin > 0 ? begin : 0, position + 1};
}

INLINE Span within_tile(Span span, int tile) {
  const int begin = span.begin - tile * kv_tile_size, end = span.end - tile * kv_tile_size;
  return {begin > 0 ? begin : 0, end < kv_tile_size ? end : kv_tile_size};
}

// The hull and the intersection of some spans; empty ones do not count.
INLINE Span hull(const Span* spans, int count) {
  Span all{kv_tile_size, 0};
  for (int i = 0; i < count; i++) {
    if (is_empty(spans[i])) continue;
    if (spans[i].begin < all.begin) all.begin = spans[i].begin;
    if (spans[i].end > all.end) all.end = spans[i].end;
  }
  return all;
}

INLINE Span overlap(const Span* spans, int count) {
  Span common{0, kv_tile_size};
  for (int i = 0; i < count; i++) {
    if (is_empty(spans[i])) continue;
    if (spans[i].begin > common.begin) common.begin = spans[i].begin;
    if (spans[i].end < common.end) common.end = spans[i].end;
  }
  return common;
}

// ---- storing keys and values

INLINE void store_halves(const float* x, int size, uint16_t* out, int stride) {
  uint16_t halves[16];
  for (int i = 0; i < size; i += 16) {
    const int count = lanes_left(size, i);
    store_half(halves, count == 16 ? load(x + i) : load_first(x + i, count));
    for (int k = 0; k < count; k++) out[(i + k) * stride] = halves[k];
  }
}

INLINE float store_codes_of(const float* x, int size, int8_t* out, int stride) {
  const ByteScale bytes = byte_scale(largest_magnitude(x, size));
  int8_t codes[16];
  for (int i = 0; i < size; i += 16) {
    const int count = lanes_left(size, i);
    const Floats values = count == 16 ? load(x + i) : load_first(x + i, count);
    store_bytes(codes, byte_codes(values, bytes.inverse));
    for (int k = 0; k < count; k++) out[(i + k) * stride] = codes[k];
  }
  return bytes.scale;
}

void store_key_value(const LayerCache& cache, const AttentionShape& shape, const RowPosition& row,
                     const float* key, const float* value) {
  const int32_t block = row.block_table[row.position / block_size];
  const int slot = row.position % block_size;
  const int head_dim = shape.head_dim, value_dim = shape.value_dim;
  for (int head = 0; head < shape.num_kv_heads; head++, key += head_dim, value += value_dim) {
    if (cache.is_int8) {
      const HeadCache<int8_t> blocks(cache, shape, head);
      int8_t* values = blocks.values(block) + slot * value_dim;
      blocks.scales(cache.key_scales, block)[slot] =
          store_codes_of(key, head_dim, blocks.keys(block) + slot, block_size);
      if (shape.has_values_in_keys) continue;
      blocks.scales(cache.value_scales, block)[slot] = store_codes_of(value, value_dim, values, 1);
    } else {
      const HeadCache<uint16_t> blocks(cache, shape, head);
      store_halves(key, head_dim, blocks.keys(block) + slot, block_size);
      if (shape.has_values_in_keys) continue;
      store_halves(value, value_dim, blocks.values(block) + slot * value_dim, 1);
    }
  }
}

// ---- scores

// Pointers to the blocks of one tile; those of the span are set.
template <class Element>
struct CacheTile {
  const Element* keys[tile_blocks];
  const Element* values[tile_blocks];
  const float* key_scales[tile_blocks];
  const float* value_scales[tile_blocks];
  // Prefetched while these values are read: the keys of the next tile, whose blocks may be anywhere
  // in memory. While keys are read, these values are prefetched.
  const Element* to_prefetch[tile_blocks];
};

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class Element>
INLINE void find_tile(const HeadCache<Element>& cache, const int32_t* block_table, Span span,
                      CacheTile<Element>& tile) {
  for (int i = first_block(span); i < end_block(span); i++) {
    tile.keys[i] = cache.keys(block_table[i]);
    tile.values[i] = tile.to_prefetch[i] = cache.values(block_table[i]);
    if (sizeof(Element) == 1) {
      tile.key_scales[i] = cache.scales(cache.layer.key_scales, block_table[i]);
      tile.value_scales[i] = cache.scales(cache.layer.value_scales, block_table[i]);
      prefetch(tile.key_scales[i]);
      prefetch(tile.value_scales[i]);
    }
  }
}

// scores[query][token of the tile], for some blocks at once. queries: [dimension][query].
template <class Element, int num_queries, int num_blocks>
NOINLINE void score_blocks(const float* queries, int head_dim, const CacheTile<Element>& tile,
                           int block, float* scores) {
  Floats sums[num_queries][num_blocks];
  UNROLLED(int q = 0; q < num_queries; q++)
  UNROLLED(int b = 0; b < num_blocks; b++) sums[q][b] = broadcast(0.0f);
  constexpr int rows_in_line = 64 / (block_size * sizeof(Element));
  for (int d = 0; d < head_dim; d++, queries += num_queries) {
    Floats key[num_blocks];
    UNROLLED(int b = 0; b < num_blocks; b++)
    key[b] = load_stored(tile.keys[block + b] + d * block_size);
    if (d % rows_in_line == 0)
      UNROLLED(int b = 0; b < num_blocks; b++) prefetch(tile.values[block + b] + d * block_size);
    UNROLLED(int q = 0; q < num_queries; q++) {
      const Floats query = broadcast(queries[q]);
      UNROLLED(int b = 0; b < num_blocks; b++) sums[q][b] = fma(query, key[b], sums[q][b]);
    }
  }
  UNROLLED(int q = 0; q < num_queries; q++)
  UNROLLED(int b = 0; b < num_blocks; b++)
  store(scores + q * kv_tile_size + (block + b) * block_size, sums[q][b]);
}

// Blocks [block, end), as many at once as are left.
template <class Element, int num_queries, int num_blocks>
INLINE void score_tile(const float* queries, int head_dim, const CacheTile<Element>& tile,
                       int block, int end, float* scores) {
  for (; block + num_blocks <= end; block += num_blocks)
    score_blocks<Element, num_queries, num_blocks>(queries, head_dim, tile, block, scores);
  if constexpr (num_blocks > 1)
    score_tile<Element, num_queries, num_blocks / 2>(queries, head_dim, tile, block, end, scores);
}

// ---- softmax

// 2^x for x <= 0 to 2 ulp. x below -126 counts as -126; NaN stays NaN. Adding `shift` leaves
// n + 127 in the lowest bits, where n is x rounded.
INLINE Floats power_of_two(Floats x) {
  const Floats shift = broadcast(12582912.0f + 127.0f);
  x = max(broadcast(-126.0f), x);
  const Floats shifted = x + shift;
  const Floats r = x - (shifted - shift);
  Floats p = broadcast(1.32647273e-3f);
  p = fma(p, r, broadcast(9.67151299e-3f));
  p = fma(p, r, broadcast(5.55073358e-2f));
  p = fma(p, r, broadcast(2.40222424e-1f));
  p = fma(p, r, broadcast(6.93147004e-1f));
  p = fma(p, r, broadcast(1.0f));
  return p * bits_as_floats(shift_left_23(bits_as_ints(shifted)));
}

// Lanes whose token (that of lane 0 is `first`) is outside the span are replaced.
INLINE Floats inside(Floats x, Span span, int first, Floats replacement) {
  if (span.begin > first) x = first_lanes(replacement, x, span.begin - first);
  if (span.end < first + block_size) x = first_lanes(x, replacement, span.end - first);
  return x;
}

// The running softmax of one query: its weights are 2^(score - max_score), `sum` is their sum.
struct SoftmaxState {
  float max_score, sum;
};

// What ALiBi adds to a query's scores: the slope times the distance to a key, which to the first of
// a tile is `distance`. A slope of 0: nothing.
struct Alibi {
  float slope = 0.0f;
  int distance = 0;
};

INLINE Floats distances(int first) {
  alignas(64) static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return broadcast(static_cast<float>(first)) + load(lanes);
}

// Replaces one query's scores by its weights. Weights of int8 values include the values' scale.
template <class Element>
INLINE SoftmaxState softmax_weights(const CacheTile<Element>& tile, Span span, float cap,
                                    Alibi alibi, float* scores) {
  constexpr bool is_int8 = sizeof(Element) == 1;
  const bool has_slope = alibi.slope != 0.0f;
  Floats max_score = broadcast(-__builtin_inff());
  for (int b = first_block(span); b < end_block(span); b++) {
    float* of_block = scores + b * block_size;
    Floats x = load(of_block);
    if (is_int8) x = x * load(tile.key_scales[b]);
    if (cap > 0.0f) x = broadcast(cap) * hyperbolic_tangent(x);
    if (has_slope) x = x + broadcast(alibi.slope) * distances(alibi.distance + b * block_size);
    if (is_int8 || cap > 0.0f || has_slope) store(of_block, x);
    max_score = max(max_score, inside(x, span, b * block_size, broadcast(-__builtin_inff())));
  }
  SoftmaxState state;
  state.max_score = max_of_lanes(max_score);
  const Floats top = broadcast(state.max_score);
  Floats sum = broadcast(0.0f);
  for (int b = first_block(span); b < end_block(span); b++) {
    float* of_block = scores + b * block_size;
    const Floats weight = power_of_two(load(of_block) - top);
    sum = sum + inside(weight, span, b * block_size, broadcast(0.0f));
    store(of_block, is_int8 ? weight * load(tile.value_scales[b]) : weight);
  }
  state.sum = sum_of_lanes(sum);
  return state;
}

// ---- weighted sums of values

// sums[query][dimension] += weight * value over the span, for vectors of dimensions from `first`.
template <class Element, int num_queries, int num_vectors, bool is_partial>
NOINLINE void add_value_vectors(const float* weights, const CacheTile<Element>& tile, int value_dim,
                                Span span, float* sums, int64_t sums_stride, int first) {
  Floats output[num_queries][num_vectors];
  sums += first;
  UNROLLED(int q = 0; q < num_queries; q++)
  UNROLLED(int v = 0; v < num_vectors; v++)
  output[q][v] = load(sums + q * sums_stride + 16 * v);
  for (int token = span.begin; token < span.end;) {
    const int block = token / block_size;
    const int end = (block + 1) * block_size < span.end ? (block + 1) * block_size : span.end;
    const int64_t offset = (token % block_size) * value_dim + first;
    const Element* row = tile.values[block] + offset;
    const Element* to_prefetch = tile.to_prefetch[block] + offset;
    for (; token < end; token++, row += value_dim, to_prefetch += value_dim) {
      Floats value[num_vectors];
      UNROLLED(int v = 0; v < num_vectors; v++) {
        value[v] =
            is_partial ? load_stored_first(row, value_dim - first) : load_stored(row + 16 * v);
        if (v * 16 * sizeof(Element) % 64 == 0) prefetch(to_prefetch + 16 * v);
      }
      UNROLLED(int q = 0; q < num_queries; q++) {
        const Floats weight = broadcast(weights[q * kv_tile_size + token]);
        UNROLLED(int v = 0; v < num_vectors; v++)
        output[q][v] = fma(weight, value[v], output[q][v]);
      }
    }
  }
  UNROLLED(int q = 0; q < num_queries; q++)
  UNROLLED(int v = 0; v < num_vectors; v++)
  store(sums + q * sums_stride + 16 * v, output[q][v]);
}

// Dimensions from `first` on, as many vectors at once as are left.
template <class Element, int num_queries, int num_vectors>
INLINE void add_value_dimensions(const float* weights, const CacheTile<Element>& tile,
                                 int value_dim, Span span, float* sums, int64_t sums_stride,
                                 int first) {
  for (; first + 16 * num_vectors <= value_dim; first += 16 * num_vectors)
    add_value_vectors<Element, num_queries, num_vectors, false>(weights, tile, value_dim, span,
                                                                sums, sums_stride, first);
  if constexpr (num_vectors > 1)
    add_value_dimensions<Element, num_queries, num_vectors / 2>(weights, tile, value_dim, span,
                                                                sums, sums_stride, first);
  else if (first < value_dim)
    add_value_vectors<Element, num_queries, 1, true>(weights, tile, value_dim, span, sums,
                                                     sums_stride, first);
}

template <class Element, int num_queries>
INLINE void add_values(const float* weights, const CacheTile<Element>& tile, int value_dim,
                       Span span, float* sums, int64_t sums_stride) {
  if (!is_empty(span))
    add_value_dimensions<Element, num_queries, vectors_per_query(num_queries)>(
        weights, tile, value_dim, span, sums, sums_stride, 0);
}

// ---- several queries over one tile

// Queries computed at once, and their result of one tile.
struct QueryGroup {
  int begin, count;         // of the queries of the call
  const float* queries;     // [dimension][query], packed
  Span spans[max_queries];  // of each query, in the tile; empty where it attends to none of it
  Alibi alibi[max_queries];
  SoftmaxState states[max_queries];
  float* output;   // [query][stride]
  int64_t stride;  // value_dim, rounded up to whole vectors
};

// Tokens that all queries attend to are summed for all at once; tokens that only some attend to
// (the causal edge of a chunk, the window's begin) for each query alone. A masked token is skipped,
// never weighted by 0: 0 * NaN is NaN.
template <class Element, int num_queries>
INLINE void add_value_spans(const float* weights, const CacheTile<Element>& tile, int value_dim,
                            QueryGroup& group) {
  const Span common = overlap(group.spans, num_queries);
  const bool none = is_empty(common);
  for (int q = 0; q < num_queries; q++) {
    const Span before{group.spans[q].begin, none ? group.spans[q].end : common.begin};
    add_values<Element, 1>(weights + q * kv_tile_size, tile, value_dim, before,
                           group.output + q * group.stride, group.stride);
  }
  add_values<Element, num_queries>(weights, tile, value_dim, common, group.output, group.stride);
  for (int q = 0; q < num_queries && !none; q++) {
    const Span after{common.end, group.spans[q].end};
    add_values<Element, 1>(weights + q * kv_tile_size, tile, value_dim, after,
                           group.output + q * group.stride, group.stride);
  }
}

template <class Element, int num_queries>
NOINLINE void attend_group(const CacheTile<Element>& tile, const AttentionShape& shape, float cap,
                           QueryGroup& group) {
  alignas(64) float scores[num_queries * kv_tile_size];
  const Span any = hull(group.spans, num_queries);
  score_tile<Element, num_queries, vectors_per_query(num_queries)>(
      group.queries, shape.head_dim, tile, first_block(any), end_block(any), scores);
  for (int q = 0; q < num_queries; q++)
    if (!is_empty(group.spans[q]))
      group.states[q] =
          softmax_weights(tile, group.spans[q], cap, group.alibi[q], scores + q * kv_tile_size);
  for (int64_t i = 0; i < num_queries * group.stride; i++) group.output[i] = 0.0f;
  add_value_spans<Element, num_queries>(scores, tile, shape.value_dim, group);
}

template <class Element, int num_queries = 1>
INLINE void attend_any_group(const CacheTile<Element>& tile, const AttentionShape& shape, float cap,
                             QueryGroup& group) {
  if (group.count == num_queries)
    attend_group<Element, num_queries>(tile, shape, cap, group);
  else if constexpr (num_queries < max_queries)
    attend_any_group<Element, num_queries + 1>(tile, shape, cap, group);
}

// ---- the rows of one sequence

// At most max_packed_queries queries of one kv head: all query heads of some rows, or a
// range of one row's. Query q is head q % group of row q / group, counted from the first.
struct Queries {
  const AttentionShape& shape;
  const RowPosition* rows;
  int count, group;
  const float* data;  // of the first row's first head
  RowStrides strides;
  const float *sinks, *slopes;  // of the first head; or null
  float* workspace;

  INLINE_METHOD int64_t offset(int query) const {
    return query / group * strides.queries + static_cast<int64_t>(query % group) * shape.head_dim;
  }
  INLINE_METHOD int64_t out_offset(int query) const {
    return query / group * strides.out + static_cast<int64_t>(query % group) * shape.value_dim;
  }
  INLINE_METHOD Span attended(int query) const {
    return attended_by(shape, rows[query / group].position);
  }
  INLINE_METHOD Alibi alibi(int query, int tile) const {
    constexpr float log2_of_e = 1.44269504088896341f;
    if (!slopes) return {};
    return {slopes[query % group] * log2_of_e, tile * kv_tile_size - rows[query / group].position};
  }
  INLINE_METHOD Span attended_by_any() const {
    return {attended(0).begin, attended(count - 1).end};
  }
};

// The first query of group i of so many groups of nearly equal size.
INLINE int group_begin(const Queries& queries, int num_groups, int i) {
  return queries.count * i / num_groups;
}

INLINE void pack_queries(const Queries& queries, float factor, int begin, int count,
                         float* packed) {
  const int head_dim = queries.shape.head_dim;
  for (int q = 0; q < count; q++) {
    const float* query = queries.data + queries.offset(begin + q);
    for (int d = 0; d < head_dim; d++) packed[d * count + q] = query[d] * factor;
  }
}

// Values that are in the keys, as values are kept: [token][dimension].
template <class Element>
NOINLINE void transpose_values(CacheTile<Element>& tile, Span span, int value_dim, Element* out) {
  for (int b = first_block(span); b < end_block(span); b++) {
    Element* block = out + static_cast<int64_t>(b) * block_size * value_dim;
    for (int d = 0; d < value_dim; d++)
      for (int t = 0; t < block_size; t++)
        block[static_cast<int64_t>(t) * value_dim + d] =
            tile.keys[b][static_cast<int64_t>(d) * block_size + t];
    tile.values[b] = block;
    tile.value_scales[b] = tile.key_scales[b];
  }
}

// Walks over tiles and prefetches the next one; after the last tile the first of the next kv head,
// which this thread most likely attends to next.
template <class Element>
struct TileWalk {
  HeadCache<Element> cache;
  const int32_t* block_table;
  Span attended, tiles;
  CacheTile<Element> current, next;

  INLINE_METHOD Span find_next(int tile) {
    const Span span = within_tile(attended, tile);
    find_tile(cache, block_table + tile * tile_blocks, span, next);
    return span;
  }
  INLINE_METHOD void begin() {
    const Span span = find_next(tiles.begin);
    const int64_t size = cache.head_dim * block_size;
    for (int b = first_block(span); b < end_block(span); b++)
      for (int64_t i = 0; i < size; i += 64 / sizeof(Element)) prefetch(next.keys[b] + i);
  }
  INLINE_METHOD void advance(int tile) {
    current = next;
    const bool is_last = tile + 1 == tiles.end;
    if (is_last && ++cache.kv_head == cache.num_kv_heads) return;
    const Span span = find_next(is_last ? tiles.begin : tile + 1);
    for (int b = first_block(span); b < end_block(span); b++) current.to_prefetch[b] = next.keys[b];
  }
};

// Calls emit(query, tile, state, output) for every query and each tile in which its span is not
// empty, tiles ascending.
template <class Element, class Emit>
INLINE void walk_tiles(const HeadCache<Element>& cache, const Queries& queries, Span tiles,
                       Emit emit) {
  const AttentionShape& shape = queries.shape;
  constexpr float log2_of_e = 1.44269504088896341f;
  const float cap = shape.soft_cap * log2_of_e;
  const float factor = cap > 0.0f ? shape.scale / shape.soft_cap : shape.scale * log2_of_e;
  const int num_groups = (queries.count + max_queries - 1) / max_queries;
  QueryGroup group;
  group.stride = (shape.value_dim + 15) / 16 * 16;
  float* const packed = queries.workspace;
  group.output = packed + max_packed_queries * ((shape.head_dim + 15) / 16 * 16);
  TileWalk<Element> walk{cache, queries.rows[0].block_table, queries.attended_by_any(), tiles, {},
                         {}};
  walk.begin();
  auto* const values =
      reinterpret_cast<Element*>(group.output + max_queries_at_once * group.stride);
  for (int tile = tiles.begin; tile < tiles.end; tile++) {
    walk.advance(tile);
    if (shape.has_values_in_keys)
      transpose_values(walk.current, within_tile(walk.attended, tile), shape.value_dim, values);
    for (int g = 0; g < num_groups; g++) {
      group.begin = group_begin(queries, num_groups, g);
      group.count = group_begin(queries, num_groups, g + 1) - group.begin;
      float* own = packed + group.begin * shape.head_dim;
      if (tile == tiles.begin) pack_queries(queries, factor, group.begin, group.count, own);
      group.queries = own;
      for (int q = 0; q < group.count; q++) {
        group.spans[q] = within_tile(queries.attended(group.begin + q), tile);
        group.alibi[q] = queries.alibi(group.begin + q, tile);
      }
      if (is_empty(hull(group.spans, group.count))) continue;
      attend_any_group<Element>(walk.current, shape, cap, group);
      for (int q = 0; q < group.count; q++)
        if (!is_empty(group.spans[q]))
          emit(group.begin + q, tile, group.states[q], group.output + q * group.stride);
    }
  }
}

// ---- merging tiles

// Adds the next tile to a query's softmax; `out` holds the output of the tiles so far, not yet
// divided by the sum.
INLINE void merge(SoftmaxState& total, float* out, SoftmaxState next, const float* output,
                  int value_dim) {
  const float top = total.max_score > next.max_score ? total.max_score : next.max_score;
  const Floats total_factor = power_of_two(broadcast(total.max_score) - broadcast(top));
  const Floats next_factor = power_of_two(broadcast(next.max_score) - broadcast(top));
  total.max_score = top;
  total.sum = first_of(fma(broadcast(total.sum), total_factor, broadcast(next.sum) * next_factor));
  map_rows(out, output, value_dim, out,
           [=](Floats a, Floats b) { return fma(a, total_factor, b * next_factor); });
}

INLINE void copy(const float* from, int size, float* to) {
  map_row(from, size, to, [](Floats x) { return x; });
}

INLINE void divide(float* out, int size, float sum) {
  const Floats inverse = broadcast(1.0f / sum);
  map_row(out, size, out, [=](Floats x) { return x * inverse; });
}

// Divides by the sum of weights, to which a sink adds its own.
INLINE void finish(SoftmaxState total, const float* sink, float* out, int size) {
  if (!sink) return divide(out, size, total.sum);
  constexpr float log2_of_e = 1.44269504088896341f;
  const float score = *sink * log2_of_e;
  const float top = total.max_score > score ? total.max_score : score;
  const Floats factor = power_of_two(broadcast(total.max_score) - broadcast(top));
  const Floats taken = power_of_two(broadcast(score) - broadcast(top));
  const Floats inverse = factor / fma(broadcast(total.sum), factor, taken);
  map_row(out, size, out, [=](Floats x) { return x * inverse; });
}

INLINE Span tiles_of(Span attended) {
  return {attended.begin / kv_tile_size, (attended.end + kv_tile_size - 1) / kv_tile_size};
}

template <class Element>
NOINLINE void attend_rows(const HeadCache<Element>& cache, const Queries& queries, float* out) {
  const int value_dim = queries.shape.value_dim;
  SoftmaxState totals[max_packed_queries];
  const Span tiles = tiles_of(queries.attended_by_any());
  walk_tiles(cache, queries, tiles, [&](int query, int tile, SoftmaxState state, float* output) {
    float* own = out + queries.out_offset(query);
    if (tile == tiles_of(queries.attended(query)).begin) {
      totals[query] = state;
      copy(output, value_dim, own);
    } else {
      merge(totals[query], own, state, output, value_dim);
    }
  });
  for (int q = 0; q < queries.count; q++) {
    const float* sink = queries.sinks ? queries.sinks + q % queries.group : nullptr;
    finish(totals[q], sink, out + queries.out_offset(q), value_dim);
  }
}

// Calls work(first head, number of heads) for ranges of a kv head's query heads.
template <class Work>
INLINE void each_head_range(int group, Work work) {
  for (int first = 0; first < group; first += max_packed_queries)
    work(first, group - first < max_packed_queries ? group - first : max_packed_queries);
}

void attend(const LayerCache& cache, const AttentionShape& shape, int kv_head,
            const RowPosition* rows, int num_rows, const float* queries, float* out,
            RowStrides strides, float* workspace) {
  const int group = shape.num_heads / shape.num_kv_heads;
  const int at_once = group < max_packed_queries ? max_packed_queries / group : 1;
  for (int row = 0; row < num_rows; row += at_once) {
    const int count = num_rows - row < at_once ? num_rows - row : at_once;
    each_head_range(group, [&](int first, int heads) {
      const int64_t head = static_cast<int64_t>(kv_head) * group + first;
      const float* from = queries + row * strides.queries + head * shape.head_dim;
      float* to = out + row * strides.out + head * shape.value_dim;
      const float* sinks = shape.sinks ? shape.sinks + head : nullptr;
      const float* slopes = shape.slopes ? shape.slopes + head : nullptr;
      const Queries some{shape,   rows + row, count * heads, heads,    from,
                         strides, sinks,      slopes,        workspace};
      if (cache.is_int8)
        attend_rows(HeadCache<int8_t>(cache, shape, kv_head), some, to);
      else
        attend_rows(HeadCache<uint16_t>(cache, shape, kv_head), some, to);
    });
  }
}

// ---- one row split by tiles

template <class Element>
NOINLINE void attend_split_rows(const HeadCache<Element>& cache, const Queries& queries, Span tiles,
                                int group, float* partials) {
  const int value_dim = queries.shape.value_dim;
  walk_tiles(cache, queries, tiles, [&](int query, int tile, SoftmaxState state, float* output) {
    const int64_t index = static_cast<int64_t>(tile - tiles.begin) * group + query;
    float* partial = partials + index * (value_dim + 2);
    partial[0] = state.max_score;
    partial[1] = state.sum;
    copy(output, value_dim, partial + 2);
  });
}

void attend_split(const LayerCache& cache, const AttentionShape& shape, int kv_head,
                  const RowPosition& row, int first_tile, int num_tiles, const float* queries,
                  float* partials, float* workspace) {
  const int group = shape.num_heads / shape.num_kv_heads;
  const Span tiles{first_tile, first_tile + num_tiles};
  each_head_range(group, [&](int first, int heads) {
    const int64_t head = static_cast<int64_t>(kv_head) * group + first;
    const float* from = queries + head * shape.head_dim;
    const float* slopes = shape.slopes ? shape.slopes + head : nullptr;
    const Queries some{shape, &row, heads, heads, from, {0, 0}, nullptr, slopes, workspace};
    float* own = partials + static_cast<int64_t>(first) * (shape.value_dim + 2);
    if (cache.is_int8)
      attend_split_rows(HeadCache<int8_t>(cache, shape, kv_head), some, tiles, group, own);
    else
      attend_split_rows(HeadCache<uint16_t>(cache, shape, kv_head), some, tiles, group, own);
  });
}

void merge_splits(const AttentionShape& shape, int kv_head, int num_tiles, const float* partials,
                  float* out) {
  const int group = shape.num_heads / shape.num_kv_heads, value_dim = shape.value_dim;
  for (int query = 0; query < group; query++) {
    const int64_t head = static_cast<int64_t>(kv_head) * group + query;
    float* own = out + head * value_dim;
    SoftmaxState total{};
    for (int tile = 0; tile < num_tiles; tile++) {
      const float* partial =
          partials + (static_cast<int64_t>(tile) * group + query) * (value_dim + 2);
      if (tile == 0) {
        total = {partial[0], partial[1]};
        copy(partial + 2, value_dim, own);
      } else {
        merge(total, own, {partial[0], partial[1]}, partial + 2, value_dim);
      }
    }
    finish(total, shape.sinks ? shape.sinks + head : nullptr, own, value_dim);
  }
}
