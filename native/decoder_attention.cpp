// The stages on the KV cache: rope and store, attention and how it is split into tasks.
#include <algorithm>

#include "decoder.h"
#include "elementary.h"

namespace quire {
namespace {

constexpr int attend_rows = 16;                           // of one sequence in one task, at most
constexpr int64_t max_partial_floats = int64_t{1} << 26;  // of split rows

void scale_query(const PositionScale& scale, int64_t position, float* query,
                 const AttentionShape& shape) {
  if (scale.length == 0) return;
  const auto steps = static_cast<double>((position + scale.offset) / scale.length);
  const auto factor = static_cast<float>(1.0 + scale.factor * log_of(1.0 + steps));
  const int64_t size = int64_t{shape.num_heads} * shape.head_dim;
  for (int64_t i = 0; i < size; i++) query[i] *= factor;
}

}  // namespace

LayerCache Decoder::layer_cache(int layer) const {
  LayerCache cache{};
  if (!owns_cache(layer)) return layer_cache(layers_[static_cast<size_t>(layer)].kv_layer);
  cache.data = cache_block(layer, 0);
  const CacheSlot& slot = cache_slot(layer);
  cache.block_bytes = slot.block_bytes;
  cache.is_int8 = is_int8_;
  if (is_int8_) {
    cache.key_scales = cache_scales_.as<float>() + scale_offsets_[static_cast<size_t>(layer)];
    cache.value_scales = cache.key_scales;
    if (!attention_shape(layer).has_values_in_keys)
      cache.value_scales += num_blocks_ * num_scales(layer);
  }
  return cache;
}

int64_t Decoder::first_seen(int group, int64_t position) const {
  int64_t first = position;
  for (const LayerAttention& layer : layers_) {
    if (layer.group != group) continue;
    const AttentionShape& shape = layer.shape;
    int64_t begin = 0;
    if (shape.window > 0)
      begin = shape.is_chunked ? position / shape.window * shape.window
                               : std::max<int64_t>(0, position - shape.window + 1);
    first = std::min(first, begin);
  }
  return first;
}

// Norms queries and keys where the model does, rotates them, and stores keys and values.
void Decoder::rope_and_store(const Stage& stage) {
  Stopwatch watch(counters_.rope_and_store_seconds);
  const AttentionShape& shape = attention_shape(stage.layer);
  const LayerCache cache = layer_cache(stage.layer);
  const std::vector<RowPosition>& positions = positions_of(stage.layer);
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* query = row_of(RowKind::projected, row);
      const RowPosition& at = positions[static_cast<size_t>(row)];
      turn(stage, stage.query_norm, query, shape.num_heads, at.position);
      scale_query(stage.position_scale, at.position, query, shape);
      if (!owns_cache(stage.layer)) continue;
      float* key = query + int64_t{shape.num_heads} * shape.head_dim;
      const float* value = key + int64_t{shape.num_kv_heads} * shape.head_dim;
      value = normed_values(stage, key, value);
      turn(stage, stage.key_norm, key, shape.num_kv_heads, at.position);
      kernels_.store_key_value(cache, shape, at, key, value);
    }
  });
}

// The values of a row, which may be its keys as they are before norm and rope.
const float* Decoder::normed_values(const Stage& stage, const float* key,
                                    const float* value) const {
  const bool are_keys = layers_[static_cast<size_t>(stage.layer)].has_key_values;
  if (!are_keys && stage.value_norm.kind == Norm::none) return value;
  thread_local std::vector<float> values;
  const AttentionShape& shape = attention_shape(stage.layer);
  const float* from = are_keys ? key : value;
  values.assign(from, from + int64_t{shape.num_kv_heads} * shape.value_dim);
  for (float *x = values.data(), *end = x + values.size(); x < end; x += shape.value_dim)
    apply_norm(stage.value_norm, x, shape.value_dim, x);
  return values.data();
}

// Queries or keys by head: norm and rope, in the layer's order.
void Decoder::turn(const Stage& stage, const Norm& norm, float* heads, int count,
                   int position) const {
  if (!stage.norms_after_rope) norm_heads(stage, norm, heads, count);
  apply_rope(stage.layer, heads, count, attention_shape(stage.layer).head_dim, position);
  if (stage.norms_after_rope) norm_heads(stage, norm, heads, count);
}

void Decoder::norm_heads(const Stage& stage, const Norm& norm, float* heads, int count) const {
  if (norm.kind == Norm::none) return;
  const int64_t head = attention_shape(stage.layer).head_dim;
  if (stage.norm_span == NormSpan::projection) return apply_norm(norm, heads, count * head, heads);
  for (int i = 0; i < count; i++)
    apply_norm(norm, heads + i * head, head, heads + i * head,
               stage.norm_span == NormSpan::each_head ? i * head : 0);
}

void Decoder::apply_rope(int layer, float* heads, int count, int64_t stride, int position) const {
  const LayerAttention& attention = layers_[static_cast<size_t>(layer)];
  if (attention.rope < 0) return;
  const RopeTables& tables = ropes_[static_cast<size_t>(attention.rope)];
  const Rope rope{tables.dims, tables.interleaved, tables.cosines.data(), tables.sines.data()};
  kernels_.rope(heads, count, static_cast<int>(stride), rope, position);
}

// Latent attention. A head of a query, in `gated`, is plain numbers, then those that are rotated;
// the stage before made its first part of the plain ones (`projected`). What the token leaves in
// the cache is at the end of its row of `latent`: the vector, then its key that is rotated.
void Decoder::latent_rope_and_store(const Stage& stage) {
  Stopwatch watch(counters_.rope_and_store_seconds);
  const AttentionShape& shape = attention_shape(stage.layer);
  const LayerCache cache = layer_cache(stage.layer);
  const int64_t rotated = shape.head_dim - shape.value_dim;
  const int64_t stride = stage.input_size / shape.num_heads;
  const std::vector<RowPosition>& positions = positions_of(stage.layer);
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      const RowPosition& at = positions[static_cast<size_t>(row)];
      float* heads = row_of(RowKind::gated, row) + stride - rotated;
      float* query = row_of(RowKind::projected, row);
      apply_rope(stage.layer, heads, shape.num_heads, stride, at.position);
      for (int head = 0; head < shape.num_heads; head++)
        std::copy_n(heads + head * stride, rotated,
                    query + int64_t{head} * shape.head_dim + shape.value_dim);
      scale_query(stage.position_scale, at.position, query, shape);
      float* key = row_of(RowKind::latent, row) + stage.latent_size - shape.head_dim;
      apply_norm(stage.key_norm, key, shape.value_dim, key);
      apply_rope(stage.layer, key + shape.value_dim, 1, rotated, at.position);
      kernels_.store_key_value(cache, shape, at, key, nullptr);
    }
  });
}

void Decoder::plan_attention() {
  for (AttendPlan& plan : attend_plans_) plan_attention(plan);
}

// The same tasks serve every layer whose heads are alike, in the order of the rows, so that a
// thread keeps its rows. Rows at consecutive positions of one sequence share a task.
void Decoder::plan_attention(AttendPlan& plan) {
  plan.tasks.clear();
  plan.merges.clear();
  const std::vector<RowPosition>& positions = row_positions_[0];  // any group tells sequences apart
  const auto follows = [&](int row) {
    const RowPosition &at = positions[static_cast<size_t>(row)],
                      &before = positions[static_cast<size_t>(row) - 1];
    return at.block_table == before.block_table && at.position == before.position + 1;
  };
  for (int first = 0, count; first < num_rows_; first += count) {
    for (count = 1; count < attend_rows && first + count < num_rows_ && follows(first + count);)
      count++;
    const int64_t attended = positions[static_cast<size_t>(first)].position + count;
    for (int head = 0; head < plan.shape.num_kv_heads; head++)
      plan.tasks.push_back({first, count, head, attended * count, 0, 0, 0});
  }
  // Of windows the tiles differ, and they bound the cost.
  if (pool_.size() > 1 && plan.shape.window == 0) split_long_rows(plan);
}

// Splits single rows whose context is so long that one thread would compute while others wait, by
// tiles. The merged bits are those of the whole row, so splits may depend on the thread count.
void Decoder::split_long_rows(AttendPlan& plan) {
  int64_t total = 0;
  for (const AttendTask& task : plan.tasks) total += task.cost;
  const int64_t share = total / (pool_.size() * 4) + 1;  // cost of a split, at most
  const int group = plan.shape.num_heads / plan.shape.num_kv_heads;
  const int64_t tile_floats = int64_t{group} * (plan.shape.value_dim + 2);
  std::vector<AttendTask> split;
  int64_t floats = 0;
  for (const AttendTask& task : plan.tasks) {
    const int tiles =
        row_positions_[0][static_cast<size_t>(task.first_row)].position / kv_tile_size + 1;
    const bool fits = floats + tiles * tile_floats <= max_partial_floats;
    if (task.num_rows > 1 || tiles < 2 || task.cost <= share || !fits) {
      split.push_back(task);
      continue;
    }
    const int step = static_cast<int>(std::max<int64_t>(1, share / kv_tile_size));
    plan.merges.push_back({task.first_row, task.kv_head, tiles, floats});
    for (int tile = 0; tile < tiles; tile += step) {
      const int count = std::min(step, tiles - tile);
      split.push_back({task.first_row, 1, task.kv_head, int64_t{count} * kv_tile_size, tile, count,
                       floats + tile * tile_floats});
    }
    floats += tiles * tile_floats;
  }
  plan.tasks = std::move(split);
  if (static_cast<int64_t>(split_partials_.size()) < floats)
    split_partials_.resize(static_cast<size_t>(floats));
}

void Decoder::attend(const Stage& stage) {
  Stopwatch watch(counters_.attention_seconds);
  const AttentionShape& shape = attention_shape(stage.layer);
  const AttendPlan& plan = attend_plans_[plan_of_layer_[static_cast<size_t>(stage.layer)]];
  const LayerCache cache = layer_cache(stage.layer);
  const std::vector<RowPosition>& positions = positions_of(stage.layer);
  const RowStrides strides{buffer(RowKind::projected).stride,
                           buffer(RowKind::attention_output).stride};
  pool_.run(static_cast<int>(plan.tasks.size()), 1, [&](int begin, int end, int thread) {
    float* workspace = attention_scratch_.as<float>() + thread * attention_floats_;
    for (int i = begin; i < end; i++) {
      const AttendTask& task = plan.tasks[static_cast<size_t>(i)];
      const RowPosition* rows = &positions[static_cast<size_t>(task.first_row)];
      const float* queries = row_of(RowKind::projected, task.first_row);
      float* out = row_of(RowKind::attention_output, task.first_row);
      if (task.num_tiles == 0)
        kernels_.attend(cache, shape, task.kv_head, rows, task.num_rows, queries, out, strides,
                        workspace);
      else
        kernels_.attend_split(cache, shape, task.kv_head, *rows, task.first_tile, task.num_tiles,
                              queries, split_partials_.data() + task.partial, workspace);
    }
  });
  pool_.run(static_cast<int>(plan.merges.size()), 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const MergeTask& task = plan.merges[static_cast<size_t>(i)];
      kernels_.merge_splits(shape, task.kv_head, task.num_tiles,
                            split_partials_.data() + task.partial,
                            row_of(RowKind::attention_output, task.row));
    }
  });
}

}  // namespace quire
