// The stages of a step that multiply, as tasks for the pool: projections, gates and the head.
#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace quire {
namespace {

constexpr int groups_a_task = 2;  // row groups of a matrix; with them a gate fills one group
static_assert(groups_a_task * row_group == group_size, "or groups would be filled in parts");
constexpr int task_rows = groups_a_task * row_group;
constexpr int columns_a_turn = 256;  // whose results wait in a thread's scratch

int tasks_of(int64_t num_rows) { return static_cast<int>((num_rows + task_rows - 1) / task_rows); }

// Long stretches for each thread, but enough of them that none waits long for the last.
int stretch(int num_tasks, int num_threads) { return std::max(1, num_tasks / (num_threads * 8)); }

}  // namespace

int64_t Decoder::scratch_size() {
  return int64_t{columns_a_turn} * (task_rows + block_group + row_group);
}

void Decoder::multiply(const Matrix& matrix, const Activations& from, int first_group,
                       int num_groups, int first, int count, float* out, int64_t out_stride) const {
  Product product{};
  product.format = matrix.format;
  product.weights = matrix.data;
  product.group_bytes = matrix.group_bytes;
  product.in_size = matrix.in_size;
  product.first_group = first_group;
  product.num_groups = num_groups;
  const int64_t left = matrix.num_rows - int64_t{first_group} * row_group;
  product.num_rows = static_cast<int>(std::min<int64_t>(left, num_groups * row_group));
  const auto take = [&](auto* columns, auto* residuals, int64_t stride) {
    product.columns = columns + first * stride;
    product.column_stride = stride;
    if (matrix.is_refined) product.residuals = residuals + first * stride;
  };
  switch (matrix.form) {
    case Form::floats:
      take(from.floats.as<float>(), from.floats.as<float>(), from.float_stride);
      break;
    case Form::blocks:
      take(from.blocks.as<ActivationBlock>(), from.block_residuals.as<ActivationBlock>(),
           from.block_stride);
      break;
    default:
      take(from.groups.as<ActivationGroup>(), from.residuals.as<ActivationGroup>(),
           from.group_stride);
  }
  product.num_columns = count;
  product.out = out;
  product.out_stride = out_stride;
  kernels_.product(product);
  for (int c = 0; c < count; c++) {
    float* x = out + c * out_stride;
    if (matrix.form == Form::row || matrix.scale != 1.0f) {
      const float of_row = matrix.form == Form::row ? from.scales.as<float>()[first + c] : 1.0f;
      const float factor = matrix.scale * of_row;
      for (int i = 0; i < product.num_rows; i++) x[i] *= factor;
    }
    if (matrix.bias >= 0) {
      const float* bias =
          vectors_[static_cast<size_t>(matrix.bias)].data() + int64_t{first_group} * row_group;
      for (int i = 0; i < product.num_rows; i++) x[i] += bias[i];
    }
  }
}

// One or more products of the same activations: side by side into `projected`, or added to `state`.
void Decoder::project(const Stage& stage) {
  Stopwatch watch(counters_.product_seconds);
  const Activations& from = activations_[current_];
  const bool adds = stage.kind == Stage::add;
  std::vector<int> ends;
  for (const int index : stage.matrices) {
    const Matrix& matrix = *matrices_[static_cast<size_t>(index)];
    ends.push_back((ends.empty() ? 0 : ends.back()) + tasks_of(matrix.num_rows));
    counters_.multiplications += matrix.num_rows * matrix.in_size * num_rows_;
    counters_.weight_bytes += matrix.num_bytes;
  }
  pool_.run(ends.back(), stretch(ends.back(), pool_.size()), [&](int begin, int end, int thread) {
    for (int task = begin; task < end; task++) {
      size_t part = 0;
      int64_t column = 0;
      for (; task >= ends[part]; part++)
        column += matrices_[static_cast<size_t>(stage.matrices[part])]->num_rows;
      const Matrix& matrix = *matrices_[static_cast<size_t>(stage.matrices[part])];
      const int first_group = (part == 0 ? task : task - ends[part - 1]) * groups_a_task;
      const int64_t all = (matrix.num_rows + row_group - 1) / row_group;
      const int groups = static_cast<int>(std::min<int64_t>(groups_a_task, all - first_group));
      const int64_t row = int64_t{first_group} * row_group;
      if (!adds) {
        multiply(matrix, from, first_group, groups, 0, num_rows_,
                 projected_.as<float>() + column + row, projected_stride_);
        continue;
      }
      float* results = scratch_.as<float>() + thread * scratch_size();
      const int size = static_cast<int>(std::min<int64_t>(task_rows, matrix.num_rows - row));
      for (int first = 0; first < num_rows_; first += columns_a_turn) {
        const int count = std::min(columns_a_turn, num_rows_ - first);
        multiply(matrix, from, first_group, groups, first, count, results, task_rows);
        for (int c = 0; c < count; c++)
          kernels_.add(state_.as<float>() + (first + c) * shape_.hidden_size + row,
                       results + c * task_rows, size);
      }
    }
  });
}

// gate(x) * up(x), quantised on the spot where the next product takes groups or blocks: a task's
// rows are one.
void Decoder::gate(const Stage& stage) {
  Stopwatch watch(counters_.product_seconds);
  const Matrix& gate = *matrices_[static_cast<size_t>(stage.matrices[0])];
  const Matrix& up = *matrices_[static_cast<size_t>(stage.matrices[1])];
  counters_.multiplications += 2 * gate.num_rows * gate.in_size * num_rows_;
  counters_.weight_bytes += gate.num_bytes + up.num_bytes;
  const int rows = stage.quantised == Form::blocks ? block_group : task_rows;
  const int num_tasks = static_cast<int>((gate.num_rows + rows - 1) / rows);
  pool_.run(num_tasks, stretch(num_tasks, pool_.size()), [&](int begin, int end, int thread) {
    const int stride = rows + row_group;  // an odd number of lines, as for activations
    float* gated = scratch_.as<float>() + thread * scratch_size();
    float* ups = gated + columns_a_turn * stride;
    for (int task = begin; task < end; task++) {
      const int64_t row = int64_t{task} * rows;
      const int size = static_cast<int>(std::min<int64_t>(rows, gate.num_rows - row));
      for (int first = 0; first < num_rows_; first += columns_a_turn) {
        const int count = std::min(columns_a_turn, num_rows_ - first);
        for (int part = 0; part < size; part += task_rows)
          gate_part(gate, up, row + part, std::min(task_rows, size - part), first, count,
                    gated + part, stride, ups);
        for (int c = 0; c < count; c++) put_gated(stage, gated + c * stride, row, size, first + c);
      }
    }
  });
  if (stage.quantised != Form::floats) current_ = 1 - current_;
}

// Some rows of the gate and the columns' products with them, gated, into out [column][stride].
void Decoder::gate_part(const Matrix& gate, const Matrix& up, int64_t row, int size, int first,
                        int count, float* out, int stride, float* ups) const {
  const Activations& from = activations_[current_];
  const int first_group = static_cast<int>(row / row_group);
  const int groups = (size + row_group - 1) / row_group;
  multiply(gate, from, first_group, groups, first, count, out, stride);
  multiply(up, from, first_group, groups, first, count, ups, task_rows);
  for (int c = 0; c < count; c++) {
    float* x = out + int64_t{c} * stride;
    kernels_.gate(static_cast<Gate>(shape_.gate), x, ups + c * task_rows, size, x);
  }
}

void Decoder::put_gated(const Stage& stage, const float* x, int64_t row, int size, int column) {
  Activations& to = activations_[1 - current_];
  if (stage.quantised == Form::groups)
    kernels_.quantise_groups(
        x, size, to.groups.as<ActivationGroup>() + column * to.group_stride + row / group_size);
  else if (stage.quantised == Form::blocks)
    kernels_.quantise_blocks(
        x, size, to.blocks.as<ActivationBlock>() + column * to.block_stride + row / block_group);
  else
    std::memcpy(gated_.as<float>() + column * shape_.ffn_size + row, x,
                bytes_of(size, sizeof(float)));
}

void Decoder::compute_logits(const int* rows, int count) {
  expect_within("the rows of a head's product", count, 0, room_);
  Stopwatch watch(counters_.head_seconds);
  const Matrix& head = *matrices_[static_cast<size_t>(head_)];
  // An odd number of cache lines: else the columns of a product share a few sets of the caches.
  logits_stride_ = ((head.num_rows + row_group - 1) / row_group | 1) * row_group;
  logits_.grow(bytes_of(count * logits_stride_, sizeof(float)));
  Activations& to = activations_[current_];
  const int forms = forms_of({head_});
  pool_.run(count, 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const int at = kept_at_[static_cast<size_t>(rows[i])];
      prepare_row(state_.as<float>() + at * shape_.hidden_size, shape_.hidden_size, output_norm_,
                  forms, to, i);
    }
  });
  counters_.multiplications += head.num_rows * head.in_size * count;
  counters_.weight_bytes += head.num_bytes;
  const int num_tasks = tasks_of(head.num_rows);
  pool_.run(num_tasks, stretch(num_tasks, pool_.size()), [&](int begin, int end, int) {
    for (int task = begin; task < end; task++) {
      const int64_t row = int64_t{task} * task_rows;
      const int groups = static_cast<int>(
          (std::min<int64_t>(task_rows, head.num_rows - row) + row_group - 1) / row_group);
      float* out = logits_.as<float>() + row;
      multiply(head, to, task * groups_a_task, groups, 0, count, out, logits_stride_);
      if (shape_.logit_soft_cap > 0)
        for (int i = 0; i < count; i++)
          kernels_.soft_cap(out + i * logits_stride_,
                            std::min<int64_t>(task_rows, head.num_rows - row),
                            shape_.logit_soft_cap);
    }
  });
}

}  // namespace quire
