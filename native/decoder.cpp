// What a decoder is made of, the course of a step, and what comes before and after its products.
#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "pack.h"
#include "sampler_passes.h"

namespace quire {
namespace {

enum Forms {
  wants_groups = 1,
  wants_row = 2,
  wants_floats = 4,
  wants_residuals = 8,
  wants_blocks = 16,
  wants_block_residuals = 32
};

// What rounding to codes left of a row.
template <class Rounded>
const float* left_of(const float* x, int size, const Rounded* rounded) {
  thread_local std::vector<float> left;
  constexpr int count = sizeof rounded->codes;
  left.resize(static_cast<size_t>(size));
  for (int i = 0; i < size; i++) {
    const Rounded& part = rounded[i / count];
    left[static_cast<size_t>(i)] = x[i] - part.scale * part.codes[i % count];
  }
  return left.data();
}

}  // namespace

Form form_of(Format format) {
  if (format_infos[format].bits == 0) return Form::floats;
  return takes_blocks(format) ? Form::blocks : Form::groups;
}

Decoder::Decoder(const DecoderShape& shape, const Kernels& kernels, int num_threads, bool may_spin)
    : shape_(checked(shape)),
      kernels_(kernels),
      pool_(num_threads, may_spin),
      attention_scratch_(
          bytes_of(num_threads * attention_workspace(shape.head_dim), sizeof(float))) {}

// ---- made once

int Decoder::add_matrix(const char* format, const uint8_t* blocks, int64_t num_rows,
                        int64_t in_size, bool whole_rows, bool refined, float scale, int bias) {
  const SourceFormat& source = source_named(format);
  const int64_t num_bytes = packed_size(source, num_rows, in_size);
  if (bias >= 0) expect_vector("a bias", bias, num_rows);
  auto matrix = std::make_unique<Matrix>();
  matrix->format = source.packed;
  matrix->num_rows = num_rows;
  matrix->in_size = in_size;
  matrix->group_bytes = group_bytes_of(source.packed, in_size);
  matrix->scale = scale;
  matrix->bias = bias;
  matrix->form = form_of(source.packed);
  const bool is_whole = whole_rows && source.packed == TERNARY;
  if (is_whole) matrix->form = Form::row;
  matrix->is_refined = refined && (matrix->form == Form::groups || matrix->form == Form::blocks);
  // With one scale for all its blocks a row's sum is a sum of integers to the end, and exact.
  float common = 1.0f;
  const bool is_common =
      is_whole &&
      common_ternary_scale(source, blocks, num_rows * in_size / source.block_size, &common);
  if (is_common) matrix->scale = scale * common;
  const int num_groups = static_cast<int>((num_rows + row_group - 1) / row_group);
  matrix->num_bytes = num_bytes;
  room_ = 0;  // what there is may not hold what this matrix is multiplied with
  uint8_t* packed = weights_.allocate(static_cast<size_t>(matrix->num_bytes));
  matrix->data = packed;
  Pool::Session awake(pool_);
  pool_.run(num_groups, 1, [&](int begin, int end, int) {
    for (int group = begin; group < end; group++) {
      uint8_t* to = packed + group * matrix->group_bytes;
      pack_group(source, blocks, in_size, num_rows, int64_t{group} * row_group, to);
      if (is_common) set_ternary_scale(to, in_size, 1.0f);
    }
  });
  matrices_.push_back(std::move(matrix));
  return static_cast<int>(matrices_.size()) - 1;
}

int Decoder::add_vector(const float* values, int64_t size) {
  expect_within("the size of a vector", size, 1, most_vocabulary);
  vectors_.emplace_back(values, values + size);
  return static_cast<int>(vectors_.size()) - 1;
}

void Decoder::add_stage(Stage stage) {
  check_stage(stage);
  stages_.push_back(std::move(stage));
}

void Decoder::set_ends(int embedding, int output_norm, int head) {
  check_ends(embedding, output_norm, head);
  embedding_ = embedding;
  output_norm_ = output_norm;
  head_ = head;
}

void Decoder::allocate_cache(int64_t num_blocks, bool is_int8, int64_t touched_ahead,
                             bool gives_way) {
  expect_within("the blocks of a cache", num_blocks, 1, most_blocks);
  expect_within("touched_ahead", touched_ahead, 0, INT64_MAX);
  const int64_t layers = shape_.num_layers, heads = shape_.num_kv_heads;
  const int64_t elements = checked_product(heads, shape_.head_dim, block_size);
  const int64_t block_bytes = checked_product(2, elements, is_int8 ? 1 : 2);
  const int64_t cache = checked_product(num_blocks, layers, block_bytes);
  const int64_t scales =
      is_int8 ? checked_product(2, num_blocks, layers, heads, block_size, sizeof(float)) : 0;
  touching_ = TouchAhead();
  num_blocks_ = 0;    // until all of it is there
  cache_ = Buffer();  // the old one goes before the new one comes
  cache_scales_ = Buffer();
  cache_ = Buffer(static_cast<size_t>(cache));
  cache_scales_ = Buffer(static_cast<size_t>(scales));
  num_blocks_ = num_blocks;
  is_int8_ = is_int8;
  block_bytes_ = block_bytes;
  if (touched_ahead > 0)
    touching_ = TouchAhead(cache_.data(), bytes_of(num_blocks, static_cast<size_t>(block_bytes_)),
                           shape_.num_layers, static_cast<size_t>(touched_ahead), gives_way);
}

void Decoder::set_rope(const float* cosines, const float* sines, int64_t size,
                       int64_t num_positions) {
  expect_within("the positions of rope tables", num_positions, 1, most_positions);
  const int64_t needed = checked_product(num_positions, shape_.rope_dims / 2);
  expect_within("the size of rope tables", size, needed, needed);
  num_positions_ = 0;  // until both are there
  cosines_.assign(cosines, cosines + size);
  sines_.assign(sines, sines + size);
  num_positions_ = num_positions;
}

int64_t Decoder::weight_bytes() const {
  int64_t total = 0;
  for (const auto& matrix : matrices_) total += matrix->num_bytes;
  for (const auto& vector : vectors_) total += static_cast<int64_t>(vector.size() * sizeof(float));
  return total;
}

int64_t Decoder::cache_bytes() const {
  return static_cast<int64_t>(cache_.size() + cache_scales_.size());
}

int64_t Decoder::workspace_bytes() const {
  size_t total = state_.size() + projected_.size() + mixed_.size() + gated_.size() +
                 logits_.size() + scratch_.size() + attention_scratch_.size();
  for (const Activations& a : activations_)
    for (const Buffer* buffer :
         {&a.groups, &a.blocks, &a.residuals, &a.block_residuals, &a.scales, &a.floats})
      total += buffer->size();
  return static_cast<int64_t>(total + 4 * (cosines_.size() + sines_.size()));
}

void Decoder::read_row(int matrix, int64_t row, float* out) const {
  const Matrix& from = *matrices_[static_cast<size_t>(matrix)];
  unpack_row(from.format, from.data + row / row_group * from.group_bytes, from.in_size,
             static_cast<int>(row % row_group), out);
}

uint8_t* Decoder::cache_block(int layer, int64_t block) const {
  return cache_.data() + (layer * num_blocks_ + block) * block_bytes_;
}

// ---- each step

void Decoder::run(const StepInput& input) {
  check_ready(static_cast<int64_t>(input.tokens.size()));
  Stopwatch watch(counters_.seconds);
  Pool::Session awake(pool_);
  num_rows_ = static_cast<int>(input.tokens.size());
  copy_blocks(input);
  if (num_rows_ == 0) return;
  // A row's logits may be asked for twice: for a target's score, and for what the row is wanted
  // for.
  make_room(std::max(num_rows_, std::min(2 * num_rows_, static_cast<int>(max_head_rows))));
  places_ = input.places;
  touch_ahead();
  kept_at_.resize(places_.size());
  std::iota(kept_at_.begin(), kept_at_.end(), 0);
  plan_attention();
  embed(input);
  for (const Stage& stage : stages_) {
    if (is_cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
    if (stage.kind == Stage::attend && stage.layer == shape_.num_layers - 1)
      keep_wanted(input.wanted);
    if (num_rows_ == 0) break;
    compute(stage);
  }
  counters_.steps++;
  counters_.rows += static_cast<int64_t>(input.tokens.size());
}

void Decoder::touch_ahead() {
  int64_t last = 0;
  for (const RowPlace& place : places_)
    last = std::max<int64_t>(last, place.block_table[place.position / block_size]);
  touching_.reach(bytes_of(last + 1, static_cast<size_t>(block_bytes_)));
}

// Once the last layer's keys and values are stored, only rows whose final state somebody asked for
// are of use: the others, most of a prompt, are left out of what remains.
void Decoder::keep_wanted(const std::vector<int>& wanted) {
  if (static_cast<int>(wanted.size()) == num_rows_) return;
  was_finite_.resize(static_cast<size_t>(num_rows_));
  pool_.run(num_rows_, 16, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) was_finite_[static_cast<size_t>(row)] = is_finite(row);
  });
  std::fill(kept_at_.begin(), kept_at_.end(), -1);
  const auto move = [](float* rows, int64_t stride, int from, int to) {
    std::memmove(rows + to * stride, rows + from * stride, bytes_of(stride, sizeof(float)));
  };
  num_rows_ = 0;
  for (const int row : wanted) {
    if (row != num_rows_) {
      move(state_.as<float>(), shape_.hidden_size, row, num_rows_);
      move(projected_.as<float>(), projected_stride_, row, num_rows_);
      places_[static_cast<size_t>(num_rows_)] = places_[static_cast<size_t>(row)];
    }
    kept_at_[static_cast<size_t>(row)] = num_rows_++;
  }
  places_.resize(static_cast<size_t>(num_rows_));
  plan_attention();
}

void Decoder::compute(const Stage& stage) {
  switch (stage.kind) {
    case Stage::prepare: return prepare(stage);
    case Stage::project:
    case Stage::add: return project(stage);
    case Stage::gate: return gate(stage);
    case Stage::turn: return turn(stage);
    case Stage::attend: return attend(stage);
  }
}

void Decoder::make_room(int num_rows) {
  if (num_rows <= room_) return;
  int64_t widest = shape_.hidden_size;
  int forms = 0;
  for (size_t i = 0; i < matrices_.size(); i++) {
    widest = std::max(widest, matrices_[i]->in_size);
    forms |= forms_of({static_cast<int>(i)});
  }
  projected_stride_ = ((projected_size() + row_group - 1) / row_group | 1) * row_group;
  const auto floats = [](int64_t rows, int64_t size) {
    return bytes_of(checked_product(rows, size), sizeof(float));
  };
  state_.grow(floats(num_rows, shape_.hidden_size));
  projected_.grow(floats(num_rows, projected_stride_));
  mixed_.grow(floats(num_rows, projected_stride_));
  gated_.grow(floats(num_rows, shape_.ffn_size));
  for (Activations& a : activations_) {
    // Odd numbers of lines: columns must not share cache sets.
    a.group_stride = (widest / group_size) | 1;
    a.block_stride = (widest / block_group) | 1;
    a.float_stride = (widest + 15) / 16 * 16 + 16;
    const auto grow = [&](Buffer& buffer, int form, int64_t stride, size_t size) {
      if (forms & form) buffer.grow(bytes_of(checked_product(num_rows, stride), size));
    };
    grow(a.groups, wants_groups | wants_row, a.group_stride, sizeof(ActivationGroup));
    grow(a.residuals, wants_residuals, a.group_stride, sizeof(ActivationGroup));
    grow(a.blocks, wants_blocks, a.block_stride, sizeof(ActivationBlock));
    grow(a.block_residuals, wants_block_residuals, a.block_stride, sizeof(ActivationBlock));
    grow(a.scales, wants_row, 1, sizeof(float));
    grow(a.floats, wants_floats, a.float_stride, sizeof(float));
  }
  scratch_.grow(floats(pool_.size(), scratch_size()));
  room_ = num_rows;
}

float* Decoder::place(Place which) const {
  if (which == Place::state) return state_.as<float>();
  return which == Place::mixed ? mixed_.as<float>() : gated_.as<float>();
}

int64_t Decoder::size_of(Place which) const {
  if (which == Place::state) return shape_.hidden_size;
  return which == Place::mixed ? int64_t{shape_.num_heads} * shape_.head_dim : shape_.ffn_size;
}

int Decoder::forms_of(const std::vector<int>& matrices) const {
  int forms = 0;
  for (const int index : matrices) {
    const Matrix& matrix = *matrices_[static_cast<size_t>(index)];
    switch (matrix.form) {
      case Form::groups: forms |= wants_groups | (matrix.is_refined ? wants_residuals : 0); break;
      case Form::blocks:
        forms |= wants_blocks | (matrix.is_refined ? wants_block_residuals : 0);
        break;
      case Form::row: forms |= wants_row; break;
      case Form::floats: forms |= wants_floats; break;
    }
  }
  return forms;
}

void Decoder::copy_blocks(const StepInput& input) {
  for (const auto& [source, target] : input.copies) {
    if (source == target) continue;
    for (int layer = 0; layer < shape_.num_layers; layer++) {
      std::memcpy(cache_block(layer, target), cache_block(layer, source),
                  static_cast<size_t>(block_bytes_));
      if (!is_int8_) continue;
      const LayerCache cache = layer_cache(layer);
      const int64_t size = int64_t{shape_.num_kv_heads} * block_size;
      for (float* scales : {cache.key_scales, cache.value_scales})
        std::memcpy(scales + target * size, scales + source * size, bytes_of(size, sizeof(float)));
    }
  }
}

void Decoder::embed(const StepInput& input) {
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++)
      read_row(embedding_, input.tokens[static_cast<size_t>(row)],
               state_.as<float>() + row * shape_.hidden_size);
  });
}

void Decoder::prepare(const Stage& stage) {
  Stopwatch watch(counters_.prepare_seconds);
  const float* from = place(stage.input);
  const int64_t size = size_of(stage.input);
  const int64_t stride = stage.input == Place::mixed ? projected_stride_ : size;
  const int forms = forms_of(stage.matrices);
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++)
      prepare_row(from + row * stride, size, stage.norm, forms, activations_[current_], row);
  });
}

// Norms a row where asked, and writes it in the forms that are wanted.
void Decoder::prepare_row(const float* x, int64_t size, int norm, int forms, Activations& to,
                          int row) {
  thread_local std::vector<float> normed;
  const int count = static_cast<int>(size);
  if (norm >= 0) {
    normed.resize(static_cast<size_t>(size));
    const float* weight = vectors_[static_cast<size_t>(norm)].data();
    kernels_.rms_norm(x, weight, count, shape_.norm_epsilon, normed.data());
    x = normed.data();
  }
  const auto groups = [&](const Buffer& of) {
    return of.as<ActivationGroup>() + row * to.group_stride;
  };
  const auto blocks = [&](const Buffer& of) {
    return of.as<ActivationBlock>() + row * to.block_stride;
  };
  if (forms & wants_groups) kernels_.quantise_groups(x, count, groups(to.groups));
  if (forms & wants_residuals)
    kernels_.quantise_groups(left_of(x, count, groups(to.groups)), count, groups(to.residuals));
  if (forms & wants_blocks) kernels_.quantise_blocks(x, count, blocks(to.blocks));
  if (forms & wants_block_residuals)
    kernels_.quantise_blocks(left_of(x, count, blocks(to.blocks)), count,
                             blocks(to.block_residuals));
  if (forms & wants_row)
    to.scales.as<float>()[row] = kernels_.quantise_row(x, count, groups(to.groups));
  if (forms & wants_floats)
    std::memcpy(to.floats.as<float>() + row * to.float_stride, x, bytes_of(size, sizeof(float)));
}

bool Decoder::is_finite(int row) const {
  const int at = kept_at_[static_cast<size_t>(row)];
  if (at < 0) return was_finite_[static_cast<size_t>(row)];
  return quire::is_finite(state_.as<float>() + at * shape_.hidden_size, shape_.hidden_size);
}

void Decoder::final_state(int row, float* out) const {
  const int at = kept_at_[static_cast<size_t>(row)];
  kernels_.rms_norm(state_.as<float>() + at * shape_.hidden_size,
                    vectors_[static_cast<size_t>(output_norm_)].data(),
                    static_cast<int>(shape_.hidden_size), shape_.norm_epsilon, out);
}

}  // namespace quire
