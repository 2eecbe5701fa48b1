// The stages of a step that have to do with keys and values, as tasks for the pool.
#include <algorithm>
#include <cmath>

#include "decoder.h"

namespace quire {
namespace {

constexpr int attend_rows = 16;                         // of one sequence, attended to together
constexpr int64_t most_part_floats = int64_t{1} << 26;  // of rows that are taken apart

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

// Norms and turns queries and keys, and stores keys and values.
void Decoder::turn(const Stage& stage) {
  Stopwatch watch(counters_.turn_seconds);
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
      const RowPlace& place = places_[static_cast<size_t>(row)];
      norm_heads(query, shape_.num_heads, stage.query_norm);
      norm_heads(key, shape_.num_kv_heads, stage.key_norm);
      kernels_.turn(query, shape_.num_heads, shape_.head_dim, rope, place.position);
      kernels_.turn(key, shape_.num_kv_heads, shape_.head_dim, rope, place.position);
      kernels_.store_key_value(cache, shape, place, key, value);
    }
  });
}

// The same tasks serve every layer, in the order of the rows, so that they stay where they are.
// Rows that follow each other in one sequence are attended to together.
void Decoder::plan_attention() {
  attend_tasks_.clear();
  merge_tasks_.clear();
  const auto follows = [&](int row) {
    const RowPlace &place = places_[static_cast<size_t>(row)],
                   &before = places_[static_cast<size_t>(row) - 1];
    return place.block_table == before.block_table && place.position == before.position + 1;
  };
  for (int first = 0, count; first < num_rows_; first += count) {
    for (count = 1; count < attend_rows && first + count < num_rows_ && follows(first + count);)
      count++;
    const int64_t seen = places_[static_cast<size_t>(first)].position + count;
    for (int head = 0; head < shape_.num_kv_heads; head++)
      attend_tasks_.push_back({first, count, head, seen * count, 0, 0, 0});
  }
  if (pool_.size() > 1) split_long_rows();
}

// Single rows that would keep one thread busy while others wait are taken apart by tiles of their
// context. Their bits are those of the whole, so how they are taken apart may depend on threads.
void Decoder::split_long_rows() {
  const bool has_windows =
      std::any_of(shape_.windows.begin(), shape_.windows.end(), [](int w) { return w != 0; });
  if (has_windows) return;  // layers see different tiles; the window bounds the cost anyway
  int64_t total = 0;
  for (const AttendTask& task : attend_tasks_) total += task.cost;
  const int64_t share = total / (pool_.size() * 4) + 1;  // what a part may cost
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int64_t a_tile = int64_t{group} * (shape_.head_dim + 2);
  std::vector<AttendTask> split;
  int64_t floats = 0;
  for (const AttendTask& task : attend_tasks_) {
    const int tiles = places_[static_cast<size_t>(task.first_row)].position / tile_size + 1;
    const bool fits = floats + tiles * a_tile <= most_part_floats;
    if (task.num_rows > 1 || tiles < 2 || task.cost <= share || !fits) {
      split.push_back(task);
      continue;
    }
    const int step = static_cast<int>(std::max<int64_t>(1, share / tile_size));
    merge_tasks_.push_back({task.first_row, task.kv_head, tiles, floats});
    for (int tile = 0; tile < tiles; tile += step) {
      const int count = std::min(step, tiles - tile);
      split.push_back({task.first_row, 1, task.kv_head, int64_t{count} * tile_size, tile, count,
                       floats + tile * a_tile});
    }
    floats += tiles * a_tile;
  }
  attend_tasks_ = std::move(split);
  if (static_cast<int64_t>(attend_parts_.size()) < floats)
    attend_parts_.resize(static_cast<size_t>(floats));
}

void Decoder::attend(const Stage& stage) {
  Stopwatch watch(counters_.attention_seconds);
  const AttentionShape shape = attention_shape(stage.layer);
  const LayerCache cache = layer_cache(stage.layer);
  const float* queries = projected_.as<float>();
  float* mixed = mixed_.as<float>();
  const int64_t stride = projected_stride_;
  pool_.run(static_cast<int>(attend_tasks_.size()), 1, [&](int begin, int end, int thread) {
    float* workspace =
        attention_scratch_.as<float>() + thread * attention_workspace(shape_.head_dim);
    for (int i = begin; i < end; i++) {
      const AttendTask& task = attend_tasks_[static_cast<size_t>(i)];
      const RowPlace* places = &places_[static_cast<size_t>(task.first_row)];
      const int64_t at = task.first_row * stride;
      if (task.num_tiles == 0)
        kernels_.attend(cache, shape, task.kv_head, places, task.num_rows, queries + at, mixed + at,
                        stride, workspace);
      else
        kernels_.attend_tiles(cache, shape, task.kv_head, *places, task.first_tile, task.num_tiles,
                              queries + at, attend_parts_.data() + task.part, workspace);
    }
  });
  pool_.run(static_cast<int>(merge_tasks_.size()), 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const MergeTask& task = merge_tasks_[static_cast<size_t>(i)];
      kernels_.merge_tiles(shape, task.kv_head, task.num_tiles, attend_parts_.data() + task.part,
                           mixed + task.row * stride);
    }
  });
}

}  // namespace quire
