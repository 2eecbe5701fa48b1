// Decoder: its construction, the course of a step, row memory, norms and quantisation.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>

#include "pack.h"
#include "sampler_passes.h"

namespace quire {
namespace {

enum WantedFormats {
  wants_groups = 1,
  wants_per_token = 2,
  wants_floats = 4,
  wants_residuals = 8,
  wants_blocks = 16,
  wants_block_residuals = 32
};

// The rounding error of a quantised row, for the residual pass.
template <class Record>
const float* residual_of(const float* x, int size, const Record* records) {
  thread_local std::vector<float> residual;
  constexpr int count = sizeof records->codes;
  residual.resize(static_cast<size_t>(size));
  for (int i = 0; i < size; i++) {
    const Record& record = records[i / count];
    residual[static_cast<size_t>(i)] = x[i] - record.scale * record.codes[i % count];
  }
  return residual.data();
}

void scale(float* x, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i++) x[i] *= factor;
}

}  // namespace

ActivationFormat activation_format_of(Format format) {
  if (format_infos[format].bits == 0) return ActivationFormat::floats;
  return takes_blocks(format) ? ActivationFormat::blocks : ActivationFormat::groups;
}

Decoder::Decoder(const DecoderShape& shape, const Kernels& kernels, int num_threads, bool may_spin)
    : shape_(checked(shape)), kernels_(kernels), pool_(num_threads, may_spin) {
  RowBuffer& hidden = rows_[static_cast<size_t>(RowKind::hidden)];
  hidden.width = hidden.written = shape.hidden_size;
}

// ---- construction

int Decoder::add_matrix(const char* format, const uint8_t* blocks, int64_t out_size,
                        int64_t in_size, bool per_token_scale, bool residual_pass, float scale,
                        int bias) {
  const SourceFormat& source = source_named(format);
  const int64_t num_bytes = packed_size(source, out_size, in_size);
  if (bias >= 0) expect_vector("a bias", bias, out_size);
  auto matrix = std::make_unique<Matrix>();
  matrix->format = source.packed;
  matrix->out_size = out_size;
  matrix->in_size = in_size;
  matrix->panel_bytes = panel_bytes_of(source.packed, in_size);
  matrix->scale = scale;
  matrix->bias = bias;
  matrix->activations = activation_format_of(source.packed);
  const bool is_per_token = per_token_scale && source.packed == TERNARY;
  if (is_per_token) matrix->activations = ActivationFormat::per_token;
  matrix->has_residual_pass = residual_pass && (matrix->activations == ActivationFormat::groups ||
                                                matrix->activations == ActivationFormat::blocks);
  // With one scale for all its blocks a row's sum is an integer, in floats exact below 2^24.
  float common = 1.0f;
  const bool is_common =
      is_per_token && 127 * in_size < int64_t{1} << 24 &&
      common_ternary_scale(source, blocks, out_size * in_size / source.block_size, &common);
  matrix->has_unit_scales = is_common;
  if (is_common) matrix->scale = scale * common;
  const int num_panels = static_cast<int>((out_size + panel_rows - 1) / panel_rows);
  matrix->num_bytes = num_bytes;
  reserved_rows_ = 0;  // the reserved rows may be too narrow for this matrix
  uint8_t* packed = weights_.allocate(static_cast<size_t>(matrix->num_bytes));
  matrix->data = packed;
  Pool::Session session(pool_);
  pool_.run(num_panels, 1, [&](int begin, int end, int) {
    for (int panel = begin; panel < end; panel++) {
      uint8_t* to = packed + panel * matrix->panel_bytes;
      pack_panel(source, blocks, in_size, out_size, int64_t{panel} * panel_rows, to);
      if (is_common) set_ternary_scale(to, in_size, 1.0f);
    }
  });
  matrices_.push_back(std::move(matrix));
  return static_cast<int>(matrices_.size()) - 1;
}

int Decoder::add_vector(const float* values, int64_t size) {
  expect_within("the size of a vector", size, 1, max_vocabulary);
  vectors_.emplace_back(values, values + size);
  return static_cast<int>(vectors_.size()) - 1;
}

int Decoder::add_rope(int dims, bool interleaved) {
  expect_within("rope_dims", dims, 2, max_head_dim);
  expect(dims % 2 == 0, "rope_dims must be even");
  expect_within("the ropes of a decoder", static_cast<int64_t>(ropes_.size()), 0, max_layers - 1);
  ropes_.push_back({dims, interleaved, {}, {}});
  return static_cast<int>(ropes_.size()) - 1;
}

int Decoder::add_layer(const LayerAttention& layer, std::vector<float> slopes) {
  check_layer(layer);
  expect(slopes.empty() || static_cast<int>(slopes.size()) == layer.shape.num_heads,
         "a layer has a slope for each head, or none");
  expect(num_blocks_ == 0, "the cache was allocated: a layer must be added before");
  layers_.push_back(layer);
  first_stages_.push_back(stages_.size());
  if (layer.kv_layer >= 0) {
    const LayerAttention& read = layers_[static_cast<size_t>(layer.kv_layer)];
    layers_.back().group = read.group;
    layers_.back().slot = read.slot;
  }
  num_groups_ = std::max(num_groups_, layers_.back().group + 1);
  AttentionShape& shape = layers_.back().shape;
  if (layer.sinks >= 0) shape.sinks = vectors_[static_cast<size_t>(layer.sinks)].data();
  if (!slopes.empty()) shape.slopes = slopes_.emplace_back(std::move(slopes)).data();
  attention_floats_ =
      std::max(attention_floats_,
               attention_workspace(shape.head_dim, shape.value_dim, shape.has_values_in_keys));
  attention_scratch_.grow(bytes_of(pool_.size() * attention_floats_, sizeof(float)));
  const auto is_alike = [&](const AttendPlan& plan) {
    return plan.shape.num_heads == shape.num_heads &&
           plan.shape.num_kv_heads == shape.num_kv_heads &&
           plan.shape.value_dim == shape.value_dim &&
           (plan.shape.window == 0) == (shape.window == 0);
  };
  const auto plan = std::find_if(attend_plans_.begin(), attend_plans_.end(), is_alike);
  plan_of_layer_.push_back(static_cast<size_t>(plan - attend_plans_.begin()));
  if (plan == attend_plans_.end()) attend_plans_.push_back({shape, {}, {}});
  return num_layers() - 1;
}

void Decoder::add_stage(Stage stage) {
  if (stage.kind == Stage::latent_rope_and_store) stage.input = RowKind::gated;
  stage.input_size = buffer(stage.input).written;
  stage.latent_size = buffer(RowKind::latent).written;
  stage.gate_size = buffer(RowKind::attention_output).written;
  check_stage(stage);
  set_written(stage);
  if (stage.kind == Stage::attend) drop_at_ = stages_.size();
  if (stage.kind == Stage::convolve || stage.kind == Stage::recur) drop_at_ = stages_.size() + 1;
  stages_.push_back(std::move(stage));
}

// How many floats of its output rows a stage writes.
int64_t Decoder::output_size(const Stage& stage) const {
  int64_t size = 0;
  switch (stage.kind) {
    case Stage::project:
      if (stage.is_by_head)
        return checked_product(static_cast<int64_t>(stage.matrices.size()), stage.output_stride);
      for (const int index : stage.matrices) size += rows_of(index);
      return size;
    case Stage::gate_and_up:
      return stage.quantised == ActivationFormat::floats ? rows_of(stage.matrices[0]) : 0;
    case Stage::attend: {
      const AttentionShape& shape = attention_shape(stage.layer);
      return int64_t{shape.num_heads} * shape.value_dim;
    }
    case Stage::expert_down: return rows_of(experts_[static_cast<size_t>(stage.experts)].down);
    case Stage::convolve:
    case Stage::recur: return state_of(stage).output_size();
    default: return 0;
  }
}

void Decoder::set_written(const Stage& stage) {
  RowKind output = stage.output;
  if (stage.kind == Stage::norm_and_quantise && stage.is_by_head)
    widest_input_ = std::max(widest_input_, static_cast<int64_t>(stage.matrices.size()) *
                                                matrix(stage.matrices[0]).in_size);
  reserved_rows_ = 0;  // the reserved rows may be too narrow for this stage
  if (stage.kind == Stage::gate_and_up)
    output = RowKind::gated;
  else if (stage.kind == Stage::attend || stage.kind == Stage::recur ||
           (stage.kind == Stage::convolve && state_of(stage).kind == StateMixer::convolution))
    output = RowKind::attention_output;
  else if (stage.kind == Stage::expert_down)
    output = RowKind::branch;
  else if (stage.kind != Stage::project)
    return;
  RowBuffer& rows = rows_[static_cast<size_t>(output)];
  rows.written = output_size(stage);
  rows.width = std::max(rows.width, rows.written);
}

void Decoder::set_embedding_and_head(int embedding, const Norm& output_norm, int head,
                                     int positions, const Norm& embedding_norm) {
  expect_matrix("the embedding", embedding, shape_.vocabulary_size, shape_.hidden_size);
  expect_matrix("the head", head, shape_.vocabulary_size, shape_.hidden_size);
  expect_norm("the output norm", output_norm, shape_.hidden_size);
  if (embedding_norm.kind != Norm::none)
    expect_norm("the embedding's norm", embedding_norm, shape_.hidden_size);
  embedding_norm_ = embedding_norm;
  if (positions != -1)
    expect_matrix("positions", positions, rows_of(positions), shape_.hidden_size);
  positions_ = positions;
  embedding_ = embedding;
  output_norm_ = output_norm;
  head_ = head;
}

void Decoder::allocate_cache(int64_t num_blocks, bool is_int8, int64_t prefault_bytes,
                             bool low_priority) {
  expect_within("the blocks of a cache", num_blocks, 1, max_blocks);
  expect_within("prefault_bytes", prefault_bytes, 0, INT64_MAX);
  expect_within("the layers of a decoder", num_layers(), keeps_states() ? 0 : 1, max_layers);
  prefault_ = Prefault();
  num_blocks_ = 0;    // until the cache is allocated
  cache_ = Buffer();  // free the old cache first
  cache_scales_ = Buffer();
  is_int8_ = is_int8;
  lay_out_cache_slots();
  std::vector<size_t> sizes;
  int64_t cache = 0;
  for (CacheSlot& slot : cache_slots_) {
    expect(slot.block_bytes > 0, "a slot of the cache has no layer");
    slot.offset = cache;
    sizes.push_back(bytes_of(num_blocks, static_cast<size_t>(slot.block_bytes)));
    cache = checked_sum(cache, static_cast<int64_t>(sizes.back()));
  }
  cache_ = Buffer(static_cast<size_t>(cache));
  cache_scales_ = Buffer(bytes_of(is_int8 ? lay_out_scales(num_blocks) : 0, sizeof(float)));
  num_blocks_ = num_blocks;
  if (prefault_bytes > 0 && cache > 0)
    prefault_ = Prefault(cache_.data(), std::move(sizes), static_cast<size_t>(prefault_bytes),
                         low_priority);
}

// The sizes of slots: each holds the largest of its layers.
void Decoder::lay_out_cache_slots() {
  cache_slots_.assign(static_cast<size_t>(num_cache_slots()), {});
  for (int layer = 0; layer < num_layers(); layer++) {
    CacheSlot& slot = cache_slots_[static_cast<size_t>(layers_[static_cast<size_t>(layer)].slot)];
    slot.block_bytes = std::max(slot.block_bytes, block_bytes(layer));
  }
}

// Where each layer's scales begin, and how many there are of all. Layers of one slot share them
// where they have as many: else a block's would be in the same place as another block's.
int64_t Decoder::lay_out_scales(int64_t num_blocks) {
  std::map<std::pair<int, int64_t>, int64_t> offsets;  // of (slot, scales of a block)
  scale_offsets_.clear();
  int64_t total = 0;
  for (int layer = 0; layer < num_layers(); layer++) {
    const int64_t each = attention_shape(layer).has_values_in_keys ? 1 : 2;
    const int64_t count = each * num_scales(layer);
    const auto [found, is_new] =
        offsets.try_emplace({layers_[static_cast<size_t>(layer)].slot, count}, total);
    if (is_new) total = checked_sum(total, checked_product(num_blocks, count));
    scale_offsets_.push_back(found->second);
  }
  return total;
}

int Decoder::num_cache_slots() const {
  int count = 0;
  for (const LayerAttention& layer : layers_) count = std::max(count, layer.slot + 1);
  return count;
}

int64_t Decoder::num_scales(int layer) const {
  return owns_cache(layer) ? int64_t{attention_shape(layer).num_kv_heads} * block_size : 0;
}

int64_t Decoder::block_bytes(int layer) const {
  const AttentionShape& shape = attention_shape(layer);
  if (!owns_cache(layer)) return 0;
  const int64_t elements = checked_product(
      shape.num_kv_heads, shape.head_dim + (shape.has_values_in_keys ? 0 : shape.value_dim),
      block_size);
  return is_int8_ ? elements : 2 * elements;
}

void Decoder::set_rope(int rope, const float* cosines, const float* sines, int64_t size,
                       int64_t num_positions) {
  expect_within("a rope", rope, 0, static_cast<int64_t>(ropes_.size()) - 1);
  expect_within("the positions of rope tables", num_positions, 1, max_positions);
  RopeTables& tables = ropes_[static_cast<size_t>(rope)];
  const int64_t needed = checked_product(num_positions, tables.dims / 2);
  expect_within("the size of rope tables", size, needed, needed);
  tables.num_positions = 0;  // until both are set
  tables.cosines.assign(cosines, cosines + size);
  tables.sines.assign(sines, sines + size);
  tables.num_positions = num_positions;
  publish();
}

int64_t Decoder::num_positions() const {
  int64_t all = max_positions;
  for (const RopeTables& tables : ropes_) all = std::min(all, tables.num_positions);
  return positions_ == -1 ? all : std::min(all, matrix(positions_).out_size);
}

int64_t Decoder::weight_bytes() const {
  int64_t total = 0;
  for (const auto& matrix : matrices_) total += matrix->num_bytes;
  for (const auto& vector : vectors_) total += static_cast<int64_t>(vector.size() * sizeof(float));
  return total;
}

int64_t Decoder::cache_bytes() const {
  return static_cast<int64_t>(cache_.size() + cache_scales_.size() + state_slots_.size());
}

void Decoder::publish() {
  size_t total =
      logits_.size() + scratch_.size() + attention_scratch_.size() + router_scores_.size();
  for (const RowBuffer& rows : rows_) total += rows.data.size();
  for (const Activations* a : {activations_, activations_ + 1, slots_, slots_ + 1})
    for (const Buffer* buffer :
         {&a->groups, &a->blocks, &a->residuals, &a->block_residuals, &a->scales, &a->floats})
      total += buffer->size();
  for (const RopeTables& tables : ropes_)
    total += sizeof(float) * (tables.cosines.size() + tables.sines.size());
  const std::lock_guard<std::mutex> guard(published_mutex_);
  published_counters_ = counters_;
  published_workspace_bytes_ = static_cast<int64_t>(total);
}

Counters Decoder::counters() const {
  const std::lock_guard<std::mutex> guard(published_mutex_);
  return published_counters_;
}

int64_t Decoder::workspace_bytes() const {
  const std::lock_guard<std::mutex> guard(published_mutex_);
  return published_workspace_bytes_;
}

void Decoder::read_row(int matrix, int64_t row, float* out) const {
  const Matrix& from = *matrices_[static_cast<size_t>(matrix)];
  unpack_row(from.format, from.data + row / panel_rows * from.panel_bytes, from.in_size,
             static_cast<int>(row % panel_rows), out);
}

uint8_t* Decoder::cache_block(int layer, int64_t block) const {
  const CacheSlot& slot = cache_slot(layer);
  return cache_.data() + slot.offset + block * slot.block_bytes;
}

// ---- each step

void Decoder::run(const StepInput& input) {
  check_ready(static_cast<int64_t>(input.tokens.size()));
  Stopwatch watch(counters_.seconds);
  Pool::Session session(pool_);
  copy_blocks(input);
  begin(input);
  if (num_rows_ == 0) return;
  embed(input);
  for (size_t i = 0; i < stages_.size(); i++) {
    if (is_cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    if (i == drop_at_) keep_output_rows(input.output_rows);
    if (num_rows_ == 0) break;
    compute(stages_[i]);
  }
  counters_.steps++;
  counters_.rows += static_cast<int64_t>(input.tokens.size());
}

// Makes the input's rows those that stages compute.
void Decoder::begin(const StepInput& input) {
  num_rows_ = static_cast<int>(input.tokens.size());
  if (num_rows_ == 0) return;
  // A row's logits may be computed twice: for a prompt target's score, and for the row's own want.
  reserve_rows(std::max(num_rows_, std::min(2 * num_rows_, static_cast<int>(max_head_rows))));
  row_positions_ = input.positions;
  row_states_ = input.states;
  tokens_ = input.tokens.data();
  advance_prefault();
  kept_index_.resize(input.tokens.size());
  std::iota(kept_index_.begin(), kept_index_.end(), 0);
  plan_attention();
}

void Decoder::run_layer(const StepInput& input, int layer, float* hidden, int64_t stride) {
  check_ready(static_cast<int64_t>(input.tokens.size()));
  expect_within("a layer", layer, 0, num_layers() - 1);
  expect(!keeps_states(), "a layer of a model that keeps states does not run alone");
  Stopwatch watch(counters_.seconds);
  Pool::Session session(pool_);
  if (layer == 0) copy_blocks(input);
  begin(input);
  if (num_rows_ == 0) return;
  const size_t size = bytes_of(shape_.hidden_size, sizeof(float));
  if (layer == 0) embed(input);
  for (int row = 0; layer > 0 && row < num_rows_; row++)
    std::memcpy(row_of(RowKind::hidden, row), hidden + row * stride, size);
  const auto at = static_cast<size_t>(layer);
  const bool is_last = layer + 1 == num_layers();
  const size_t end = is_last ? stages_.size() : first_stages_[at + 1];
  for (size_t i = layer == 0 ? 0 : first_stages_[at]; i < end; i++) {
    if (is_cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    compute(stages_[i]);
  }
  for (int row = 0; row < num_rows_; row++)
    std::memcpy(hidden + row * stride, row_of(RowKind::hidden, row), size);
  counters_.steps += is_last;
  counters_.rows += is_last ? num_rows_ : 0;
}

void Decoder::advance_prefault() {
  int64_t last = 0;
  for (const auto& rows : row_positions_)
    for (const RowPosition& row : rows)
      last = std::max<int64_t>(last, row.block_table[row.position / block_size]);
  prefault_.set_used(static_cast<double>(last + 1) / static_cast<double>(num_blocks_));
}

// Once the last layer's keys and values are stored, or its state carried on, only the output rows
// are needed: the others, most of a prompt, are dropped.
void Decoder::keep_output_rows(const std::vector<int>& output_rows) {
  if (static_cast<int>(output_rows.size()) == num_rows_) return;
  was_finite_.resize(static_cast<size_t>(num_rows_));
  pool_.run(num_rows_, 16, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) was_finite_[static_cast<size_t>(row)] = is_finite(row);
  });
  std::fill(kept_index_.begin(), kept_index_.end(), -1);
  const auto move = [&](RowKind rows, int from, int to) {
    if (buffer(rows).width > 0)
      std::memmove(row_of(rows, to), row_of(rows, from),
                   bytes_of(buffer(rows).stride, sizeof(float)));
  };
  num_rows_ = 0;
  for (const int row : output_rows) {
    if (row != num_rows_) {
      move(RowKind::hidden, row, num_rows_);
      move(RowKind::projected, row, num_rows_);
      move(RowKind::attention_output, row, num_rows_);
      move(RowKind::gated, row, num_rows_);
      move(RowKind::branch, row, num_rows_);
      move(RowKind::layer_inputs, row, num_rows_);
      for (auto& rows : row_positions_)
        rows[static_cast<size_t>(num_rows_)] = rows[static_cast<size_t>(row)];
    }
    kept_index_[static_cast<size_t>(row)] = num_rows_++;
  }
  for (auto& rows : row_positions_) rows.resize(static_cast<size_t>(num_rows_));
  plan_attention();
}

void Decoder::compute(const Stage& stage) {
  switch (stage.kind) {
    case Stage::norm_and_quantise: return norm_and_quantise(stage);
    case Stage::project:
    case Stage::project_and_add: return project(stage);
    case Stage::gate_and_up: return gate_and_up(stage);
    case Stage::rope_and_store: return rope_and_store(stage);
    case Stage::attend: return attend(stage);
    case Stage::route: return route(stage);
    case Stage::expert_gate_and_up: return expert_gate_and_up(stage);
    case Stage::expert_down: return expert_down(stage);
    case Stage::add_branch: return add_branch(stage);
    case Stage::norm_branch: return norm_branch(stage);
    case Stage::add_to_branch: return add_to_branch(stage);
    case Stage::scale_hidden: return scale_hidden(stage);
    case Stage::add_layer_embedding: return add_layer_embedding(stage);
    case Stage::latent_rope_and_store: return latent_rope_and_store(stage);
    case Stage::convolve: return convolve(stage);
    case Stage::recur: return recur(stage);
    case Stage::gate_output: return gate_output(stage);
  }
}

void Decoder::reserve_rows(int num_rows) {
  if (num_rows <= reserved_rows_) return;
  int64_t widest = std::max(shape_.hidden_size, widest_input_);
  int formats = 0;
  for (size_t i = 0; i < matrices_.size(); i++) {
    widest = std::max(widest, matrices_[i]->in_size);
    formats |= formats_for({static_cast<int>(i)});
  }
  const auto floats = [](int64_t rows, int64_t size) {
    return bytes_of(checked_product(rows, size), sizeof(float));
  };
  for (RowBuffer& rows : rows_) {
    if (rows.width == 0) continue;
    // An odd number of cache lines, so that tokens do not share cache sets.
    rows.stride = ((rows.width + panel_rows - 1) / panel_rows | 1) * panel_rows;
    rows.data.grow(floats(num_rows, rows.stride));
  }
  for (Activations& a : activations_) reserve_activations(a, num_rows, widest, formats);
  reserve_slots(num_rows);
  scratch_.grow(floats(pool_.size(), scratch_size()));
  reserved_rows_ = num_rows;
}

void Decoder::reserve_activations(Activations& to, int64_t num_rows, int64_t widest, int formats) {
  // Odd numbers of cache lines, so that tokens do not share cache sets.
  to.group_stride = (widest / group_size) | 1;
  to.block_stride = (widest / activation_block_size) | 1;
  to.float_stride = (widest + 15) / 16 * 16 + 16;
  const auto grow = [&](Buffer& buffer, int wanted, int64_t stride, size_t size) {
    if (formats & wanted) buffer.grow(bytes_of(checked_product(num_rows, stride), size));
  };
  grow(to.groups, wants_groups | wants_per_token, to.group_stride, sizeof(ActivationGroup));
  grow(to.residuals, wants_residuals, to.group_stride, sizeof(ActivationGroup));
  grow(to.blocks, wants_blocks, to.block_stride, sizeof(ActivationBlock));
  grow(to.block_residuals, wants_block_residuals, to.block_stride, sizeof(ActivationBlock));
  grow(to.scales, wants_per_token, 1, sizeof(float));
  grow(to.floats, wants_floats, to.float_stride, sizeof(float));
}

int Decoder::formats_for(const std::vector<int>& matrices) const {
  int formats = 0;
  for (const int index : matrices) {
    const Matrix& matrix = *matrices_[static_cast<size_t>(index)];
    switch (matrix.activations) {
      case ActivationFormat::groups:
        formats |= wants_groups | (matrix.has_residual_pass ? wants_residuals : 0);
        break;
      case ActivationFormat::blocks:
        formats |= wants_blocks | (matrix.has_residual_pass ? wants_block_residuals : 0);
        break;
      case ActivationFormat::per_token: formats |= wants_per_token; break;
      case ActivationFormat::floats: formats |= wants_floats; break;
    }
  }
  return formats;
}

void Decoder::copy_blocks(const StepInput& input) {
  for (const auto& [source, target] : input.copies) {
    if (source == target) continue;
    for (const CacheSlot& slot : cache_slots_) {
      uint8_t* first = cache_.data() + slot.offset;
      std::memcpy(first + target * slot.block_bytes, first + source * slot.block_bytes,
                  static_cast<size_t>(slot.block_bytes));
    }
    for (int layer = 0; layer < num_layers(); layer++) {
      if (!is_int8_ || !owns_cache(layer)) continue;
      const LayerCache cache = layer_cache(layer);
      const int64_t size = num_scales(layer);
      for (float* scales : {cache.key_scales, cache.value_scales})
        std::memcpy(scales + target * size, scales + source * size, bytes_of(size, sizeof(float)));
    }
  }
}

void Decoder::embed(const StepInput& input) {
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* state = row_of(RowKind::hidden, row);
      read_row(embedding_, input.tokens[static_cast<size_t>(row)], state);
      if (shape_.embedding_scale != 1.0f) scale(state, shape_.hidden_size, shape_.embedding_scale);
      if (positions_ != -1) add_position(input.positions[0][static_cast<size_t>(row)], state);
      apply_norm(embedding_norm_, state, shape_.hidden_size, state);
    }
  });
}

void Decoder::add_position(const RowPosition& row, float* state) const {
  thread_local std::vector<float> own;
  own.resize(static_cast<size_t>(shape_.hidden_size));
  read_row(positions_, row.position, own.data());
  kernels_.add(state, own.data(), static_cast<int>(shape_.hidden_size));
}

// The mean of a normed projection of the embedding and of a second embedding's row, times the root
// of two, for each layer. The projection is in the rows already.
void Decoder::add_layer_embedding(const Stage& stage) {
  const int64_t all = matrix(stage.matrices[0]).in_size, size = shape_.layer_input_size;
  const float root = std::sqrt(static_cast<float>(size)), half_root = std::sqrt(0.5f);
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    thread_local std::vector<float> own;
    own.resize(static_cast<size_t>(all));
    for (int row = begin; row < end; row++) {
      float* x = row_of(RowKind::layer_inputs, row);
      read_row(stage.matrices[0], tokens_[row], own.data());
      for (int64_t i = 0; i < all; i += size) apply_norm(stage.norm, x + i, size, x + i);
      scale(own.data(), all, root);
      kernels_.add(x, own.data(), static_cast<int>(all));
      scale(x, all, half_root);
    }
  });
}

void Decoder::add_branch(const Stage& stage) {
  Stopwatch watch(counters_.norm_and_quantise_seconds);
  const int64_t size = shape_.hidden_size;
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* x = row_of(RowKind::branch, row);
      apply_norm(stage.norm, x, size, x);
      if (stage.scale != 1.0f) scale(x, size, stage.scale);
      kernels_.add(row_of(RowKind::hidden, row), x, static_cast<int>(size));
    }
  });
}

void Decoder::norm_branch(const Stage& stage) {
  Stopwatch watch(counters_.norm_and_quantise_seconds);
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* x = row_of(RowKind::branch, row);
      apply_norm(stage.norm, x, shape_.hidden_size, x);
    }
  });
}

void Decoder::add_to_branch(const Stage& stage) {
  Stopwatch watch(counters_.norm_and_quantise_seconds);
  const int64_t size = shape_.hidden_size;
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* x = row_of(stage.input, row);
      apply_norm(stage.norm, x, size, x);
      kernels_.add(row_of(RowKind::branch, row), x, static_cast<int>(size));
    }
  });
}

void Decoder::scale_hidden(const Stage& stage) {
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++)
      scale(row_of(RowKind::hidden, row), shape_.hidden_size, stage.scale);
  });
}

void Decoder::norm_and_quantise(const Stage& stage) {
  Stopwatch watch(counters_.norm_and_quantise_seconds);
  const int64_t size = matrix(stage.matrices[0]).in_size;
  const int formats = formats_for(stage.matrices);
  const auto num_heads = static_cast<int64_t>(stage.matrices.size());
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    thread_local std::vector<float> heads;
    for (int row = begin; row < end; row++) {
      const float* x = row_of(stage.input, row);
      if (!stage.is_by_head) {
        norm_and_quantise_row(x, size, stage.norm, formats, activations_[current_], row);
        continue;
      }
      const int64_t stride = stage.input_size / num_heads;
      heads.resize(static_cast<size_t>(num_heads * size));
      for (int64_t head = 0; head < num_heads; head++)
        std::copy_n(x + head * stride, size, heads.data() + head * size);
      norm_and_quantise_row(heads.data(), num_heads * size, stage.norm, formats,
                            activations_[current_], row);
    }
  });
}

void Decoder::apply_norm(const Norm& norm, const float* x, int64_t size, float* out,
                         int64_t offset) const {
  const auto values = [&](int index) {
    return index < 0 ? nullptr : vectors_[static_cast<size_t>(index)].data() + offset;
  };
  const int count = static_cast<int>(size);
  if (norm.kind == Norm::rms)
    kernels_.rms_norm(x, values(norm.weight), count, norm.epsilon, out);
  else if (norm.kind == Norm::layer)
    kernels_.layer_norm(x, values(norm.weight), values(norm.bias), count, norm.epsilon, out);
}

// Applies the norm if there is one, and quantises the row to all wanted formats.
void Decoder::norm_and_quantise_row(const float* x, int64_t size, const Norm& norm, int formats,
                                    Activations& to, int row) {
  thread_local std::vector<float> normed;
  const int count = static_cast<int>(size);
  if (norm.kind != Norm::none) {
    normed.resize(static_cast<size_t>(size));
    apply_norm(norm, x, size, normed.data());
    x = normed.data();
  }
  const auto groups = [&](const Buffer& of) {
    return of.as<ActivationGroup>() + row * to.group_stride;
  };
  const auto blocks = [&](const Buffer& of) {
    return of.as<ActivationBlock>() + row * to.block_stride;
  };
  if (formats & wants_groups) kernels_.quantise_groups(x, count, groups(to.groups));
  if (formats & wants_residuals)
    kernels_.quantise_groups(residual_of(x, count, groups(to.groups)), count, groups(to.residuals));
  if (formats & wants_blocks) kernels_.quantise_blocks(x, count, blocks(to.blocks));
  if (formats & wants_block_residuals)
    kernels_.quantise_blocks(residual_of(x, count, blocks(to.blocks)), count,
                             blocks(to.block_residuals));
  if (formats & wants_per_token)
    to.scales.as<float>()[row] = kernels_.quantise_per_token(x, count, groups(to.groups));
  if (formats & wants_floats)
    std::memcpy(to.floats.as<float>() + row * to.float_stride, x, bytes_of(size, sizeof(float)));
}

bool Decoder::is_finite(int row) const {
  const int index = kept_index_[static_cast<size_t>(row)];
  if (index < 0) return was_finite_[static_cast<size_t>(row)];
  return quire::is_finite(row_of(RowKind::hidden, index), shape_.hidden_size);
}

void Decoder::final_state(int row, float* out) const {
  const int index = kept_index_[static_cast<size_t>(row)];
  apply_norm(output_norm_, row_of(RowKind::hidden, index), shape_.hidden_size, out);
}

}  // namespace quire
