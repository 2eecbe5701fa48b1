// The stages on the KV cache: rope and store, attention and how it is split into tasks.
#include <algorithm>
#include <cmath>

#include "decoder.h"

namespace quire {
namespace {

constexpr int attend_rows = 16;                           // of one sequence in one task, at most
constexpr int64_t max_partial_floats = int64_t{1} << 26;  // of split rows

}  // namespace

LayerCache Decoder::layer_cache(int layer) const {
  LayerCache cache{};
  cache.data = cache_block(layer, 0);
  cache.block_bytes = block_bytes_;
  cache.is_int8 = is_int8_;
  if (is_int8_) {
    const int64_t size = num_blocks_ * shape_.num_kv_heads * block_size;
    cache.key_scales = cache_scales_.as<float>() + 2 * layer * size;
    cache.value_scales = cache.key_scales + size;
  }
  return cache;
}

AttentionShape Decoder::attention_shape(int layer) const {
  AttentionShape shape{};
  shape.num_heads = shape_.num_heads;
  shape.num_kv_heads = shape_.num_kv_heads;
  shape.head_dim = shape_.head_dim;
  shape.window = shape_.windows[static_cast<size_t>(layer)];
  shape.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
  shape.soft_cap = shape_.attention_soft_cap;
  return shape;
}

// Norms queries and keys where the model does, rotates them, and stores keys and values.
void Decoder::rope_and_store(const Stage& stage) {
  Stopwatch watch(counters_.rope_and_store_seconds);
  const Rope rope{shape_.rope_dims, shape_.rope_interleaved, cosines_.data(), sines_.data()};
  const AttentionShape shape = attention_shape(stage.layer);
  const LayerCache cache = layer_cache(stage.layer);
  const int64_t head = shape_.head_dim;
  const auto norm_heads = [&](float* heads, int count, int norm) {
    if (norm < 0) return;
    const float* weight = vectors_[static_cast<size_t>(norm)].data();
    for (int i = 0; i < count; i++)
      kernels_.rms_norm(heads + i * head, weight, shape_.head_dim, shape_.norm_epsilon,
                        heads + i * head);
  };
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* query = projected_.as<float>() + row * projected_stride_;
      float* key = query + shape_.num_heads * head;
      const float* value = key + shape_.num_kv_heads * head;
      const RowPosition& at = row_positions_[static_cast<size_t>(row)];
      norm_heads(query, shape_.num_heads, stage.query_norm);
      norm_heads(key, shape_.num_kv_heads, stage.key_norm);
      kernels_.rope(query, shape_.num_heads, shape_.head_dim, rope, at.position);
      kernels_.rope(key, shape_.num_kv_heads, shape_.head_dim, rope, at.position);
      kernels_.store_key_value(cache, shape, at, key, value);
    }
  });
}

// The same tasks serve every layer, in the order of the rows, so that a thread keeps its rows. Rows
// at consecutive positions of one sequence share a task.
void Decoder::plan_attention() {
  attend_tasks_.clear();
  merge_tasks_.clear();
  const auto follows = [&](int row) {
    const RowPosition &at = row_positions_[static_cast<size_t>(row)],
                      &before = row_positions_[static_cast<size_t>(row) - 1];
    return at.block_table == before.block_table && at.position == before.position + 1;
  };
  for (int first = 0, count; first < num_rows_; first += count) {
    for (count = 1; count < attend_rows && first + count < num_rows_ && follows(first + count);)
      count++;
    const int64_t attended = row_positions_[static_cast<size_t>(first)].position + count;
    for (int head = 0; head < shape_.num_kv_heads; head++)
      attend_tasks_.push_back({first, count, head, attended * count, 0, 0, 0});
  }
  if (pool_.size() > 1) split_long_rows();
}

// Splits single rows whose context is so long that one thread would compute while others wait, by
// tiles. The merged bits are those of the whole row, so splits may depend on the thread count.
void Decoder::split_long_rows() {
  const bool has_windows =
      std::any_of(shape_.windows.begin(), shape_.windows.end(), [](int w) { return w != 0; });
  if (has_windows) return;  // layers attend to different tiles; the window bounds the cost
  int64_t total = 0;
  for (const AttendTask& task : attend_tasks_) total += task.cost;
  const int64_t share = total / (pool_.size() * 4) + 1;  // cost of a split, at most
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int64_t tile_floats = int64_t{group} * (shape_.head_dim + 2);
  std::vector<AttendTask> split;
  int64_t floats = 0;
  for (const AttendTask& task : attend_tasks_) {
    const int tiles =
        row_positions_[static_cast<size_t>(task.first_row)].position / kv_tile_size + 1;
    const bool fits = floats + tiles * tile_floats <= max_partial_floats;
    if (task.num_rows > 1 || tiles < 2 || task.cost <= share || !fits) {
      split.push_back(task);
      continue;
    }
    const int step = static_cast<int>(std::max<int64_t>(1, share / kv_tile_size));
    merge_tasks_.push_back({task.first_row, task.kv_head, tiles, floats});
    for (int tile = 0; tile < tiles; tile += step) {
      const int count = std::min(step, tiles - tile);
      split.push_back({task.first_row, 1, task.kv_head, int64_t{count} * kv_tile_size, tile, count,
                       floats + tile * tile_floats});
    }
    floats += tiles * tile_floats;
  }
  attend_tasks_ = std::move(split);
  if (static_cast<int64_t>(split_partials_.size()) < floats)
    split_partials_.resize(static_cast<size_t>(floats));
}

void Decoder::attend(const Stage& stage) {
  Stopwatch watch(counters_.attention_seconds);
  const AttentionShape shape = attention_shape(stage.layer);
  const LayerCache cache = layer_cache(stage.layer);
  const float* queries = projected_.as<float>();
  float* out = attention_output_.as<float>();
  const int64_t stride = projected_stride_;
  pool_.run(static_cast<int>(attend_tasks_.size()), 1, [&](int begin, int end, int thread) {
    float* workspace =
        attention_scratch_.as<float>() + thread * attention_workspace(shape_.head_dim);
    for (int i = begin; i < end; i++) {
      const AttendTask& task = attend_tasks_[static_cast<size_t>(i)];
      const RowPosition* rows = &row_positions_[static_cast<size_t>(task.first_row)];
      const int64_t at = task.first_row * stride;
      if (task.num_tiles == 0)
        kernels_.attend(cache, shape, task.kv_head, rows, task.num_rows, queries + at, out + at,
                        stride, workspace);
      else
        kernels_.attend_split(cache, shape, task.kv_head, *rows, task.first_tile, task.num_tiles,
                              queries + at, split_partials_.data() + task.partial, workspace);
    }
  });
  pool_.run(static_cast<int>(merge_tasks_.size()), 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const MergeTask& task = merge_tasks_[static_cast<size_t>(i)];
      kernels_.merge_splits(shape, task.kv_head, task.num_tiles,
                            split_partials_.data() + task.partial, out + task.row * stride);
    }
  });
}

}  // namespace quire
