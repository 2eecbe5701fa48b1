// The GEMM stages as tasks for the pool: projections, gate and up, the head.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "gemm_tasks.h"

namespace quire {

int64_t Decoder::scratch_size() {
  return int64_t{rows_per_pass} * (task_outputs + activation_block_size + panel_rows);
}

void Decoder::gemm(const Matrix& matrix, const Activations& from, int first_panel, int num_panels,
                   int first, int count, float* out, int64_t out_stride, const uint8_t* next,
                   int64_t column) const {
  Gemm args{};
  args.format = matrix.format;
  args.has_unit_scales = matrix.has_unit_scales;
  args.weights = matrix.data;
  args.panel_bytes = matrix.panel_bytes;
  args.in_size = matrix.in_size;
  args.first_panel = first_panel;
  args.num_panels = num_panels;
  const int64_t left = matrix.out_size - int64_t{first_panel} * panel_rows;
  args.num_rows = static_cast<int>(std::min<int64_t>(left, num_panels * panel_rows));
  const auto take = [&](auto* activations, auto* residuals, int64_t stride, int64_t of_record) {
    const int64_t at = first * stride + column / of_record;
    args.activations = activations + at;
    args.activation_stride = stride;
    if (matrix.has_residual_pass) args.residuals = residuals + at;
  };
  switch (matrix.activations) {
    case ActivationFormat::floats:
      take(from.floats.as<float>(), from.floats.as<float>(), from.float_stride, 1);
      break;
    case ActivationFormat::blocks:
      take(from.blocks.as<ActivationBlock>(), from.block_residuals.as<ActivationBlock>(),
           from.block_stride, activation_block_size);
      break;
    default:
      take(from.groups.as<ActivationGroup>(), from.residuals.as<ActivationGroup>(),
           from.group_stride, group_size);
  }
  args.num_tokens = count;
  args.out = out;
  args.out_stride = out_stride;
  args.next = next;
  kernels_.gemm(args);
  const float* token_scales =
      matrix.activations == ActivationFormat::per_token ? from.scales.as<float>() + first : nullptr;
  scale_and_add_bias(matrix, args, token_scales);
}

// `token_scales`: one for each token, or null.
void Decoder::scale_and_add_bias(const Matrix& matrix, const Gemm& args,
                                 const float* token_scales) const {
  for (int t = 0; t < args.num_tokens; t++) {
    float* x = args.out + t * args.out_stride;
    if (token_scales || matrix.scale != 1.0f) {
      const float factor = matrix.scale * (token_scales ? token_scales[t] : 1.0f);
      for (int i = 0; i < args.num_rows; i++) x[i] *= factor;
    }
    if (matrix.bias >= 0) {
      const float* bias = vectors_[static_cast<size_t>(matrix.bias)].data() + matrix.bias_offset +
                          int64_t{args.first_panel} * panel_rows;
      for (int i = 0; i < args.num_rows; i++) x[i] += bias[i];
    }
  }
}

// One or more GEMMs: of the same activations, side by side into rows or added to rows; or each of a
// head's own.
void Decoder::project(const Stage& stage) {
  Stopwatch watch(counters_.gemm_seconds);
  std::vector<int> ends;  // one past the last task of each matrix
  for (const int index : stage.matrices) {
    const Matrix& matrix = *matrices_[static_cast<size_t>(index)];
    ends.push_back((ends.empty() ? 0 : ends.back()) + tasks_of(matrix.out_size));
    counters_.multiplications += matrix.out_size * matrix.in_size * num_rows_;
    counters_.weight_bytes += matrix.num_bytes;
  }
  pool_.run(
      ends.back(), chunk_size(ends.back(), pool_.size()), [&](int begin, int end, int thread) {
        for (int task = begin; task < end; task++) {
          size_t which = 0;
          int64_t output = 0;
          for (; task >= ends[which]; which++)
            output += matrices_[static_cast<size_t>(stage.matrices[which])]->out_size;
          const Matrix& matrix = *matrices_[static_cast<size_t>(stage.matrices[which])];
          const auto head = static_cast<int64_t>(which);
          if (stage.is_by_head) output = head * stage.output_stride;
          const int first_panel = (which == 0 ? task : task - ends[which - 1]) * panels_per_task;
          const int64_t all = (matrix.out_size + panel_rows - 1) / panel_rows;
          const int num_panels =
              static_cast<int>(std::min<int64_t>(panels_per_task, all - first_panel));
          if (stage.kind == Stage::project_and_add)
            gemm_and_add(stage, matrix, first_panel, num_panels,
                         scratch_.as<float>() + thread * scratch_size());
          else
            gemm(matrix, activations_[current_], first_panel, num_panels, 0, num_rows_,
                 row_of(stage.output, 0) + output + int64_t{first_panel} * panel_rows,
                 buffer(stage.output).stride, nullptr,
                 stage.is_by_head ? head * matrix.in_size : 0);
        }
      });
}

// Some panels of a matrix times all rows, added to the stage's output; `results` is a thread's
// scratch.
void Decoder::gemm_and_add(const Stage& stage, const Matrix& matrix, int first_panel,
                           int num_panels, float* results) {
  const int64_t output = int64_t{first_panel} * panel_rows;
  const int size = static_cast<int>(std::min<int64_t>(task_outputs, matrix.out_size - output));
  for (int first = 0; first < num_rows_; first += rows_per_pass) {
    const int count = std::min(rows_per_pass, num_rows_ - first);
    gemm(matrix, activations_[current_], first_panel, num_panels, first, count, results,
         task_outputs);
    for (int t = 0; t < count; t++) {
      float* x = results + t * task_outputs;
      const float weight =
          stage.experts >= 0 ? shared_weights_[static_cast<size_t>(first + t)] : 1.0f;
      const float factor = stage.scale * weight;
      for (int i = 0; factor != 1.0f && i < size; i++) x[i] *= factor;
      kernels_.add(row_of(stage.output, first + t) + output, x, size);
    }
  }
}

// gate(x) * up(x), or up(x) alone after the activation, quantised in the same task where the next
// GEMM takes groups or blocks: a task's outputs are one group or block.
void Decoder::gate_and_up(const Stage& stage) {
  Stopwatch watch(counters_.gemm_seconds);
  const Matrix& gate = *matrices_[static_cast<size_t>(stage.matrices[0])];
  for (const int index : stage.matrices) {
    counters_.multiplications += gate.out_size * gate.in_size * num_rows_;
    counters_.weight_bytes += matrix(index).num_bytes;
  }
  const int outputs =
      stage.quantised == ActivationFormat::blocks ? activation_block_size : task_outputs;
  const int num_tasks = static_cast<int>((gate.out_size + outputs - 1) / outputs);
  pool_.run(num_tasks, chunk_size(num_tasks, pool_.size()), [&](int begin, int end, int thread) {
    const int stride = outputs + panel_rows;  // an odd number of cache lines, as for activations
    float* gated = scratch_.as<float>() + thread * scratch_size();
    float* ups = gated + rows_per_pass * stride;
    for (int task = begin; task < end; task++) {
      const int64_t output = int64_t{task} * outputs;
      const int size = static_cast<int>(std::min<int64_t>(outputs, gate.out_size - output));
      for (int first = 0; first < num_rows_; first += rows_per_pass) {
        const int count = std::min(rows_per_pass, num_rows_ - first);
        for (int offset = 0; offset < size; offset += task_outputs)
          gate_outputs(stage, output + offset, std::min(task_outputs, size - offset), first, count,
                       gated + offset, stride, ups);
        for (int t = 0; t < count; t++)
          store_gated(stage, gated + t * stride, output, size, first + t);
      }
    }
  });
  if (stage.quantised != ActivationFormat::floats) current_ = 1 - current_;
}

// Some outputs of gate(x) * up(x) into out [token][stride]; `ups` is scratch.
void Decoder::gate_outputs(const Stage& stage, int64_t output, int size, int first, int count,
                           float* out, int stride, float* ups) const {
  const Matrix& gate = *matrices_[static_cast<size_t>(stage.matrices[0])];
  const bool has_up = stage.matrices.size() == 2;
  const Activations& from = activations_[current_];
  const int first_panel = static_cast<int>(output / panel_rows);
  const int num_panels = (size + panel_rows - 1) / panel_rows;
  const float* numbers =
      stage.gate_numbers < 0 ? nullptr : vectors_[static_cast<size_t>(stage.gate_numbers)].data();
  gemm(gate, from, first_panel, num_panels, first, count, out, stride);
  if (has_up)
    gemm(matrix(stage.matrices[1]), from, first_panel, num_panels, first, count, ups, task_outputs);
  for (int t = 0; t < count; t++) {
    float* x = out + int64_t{t} * stride;
    const float* up = has_up ? ups + t * task_outputs : nullptr;
    if (stage.layer_input >= 0)
      up = row_of(RowKind::layer_inputs, first + t) + stage.layer_input * shape_.layer_input_size +
           output;
    kernels_.gate(stage.gate, numbers, x, up, size, x);
  }
}

void Decoder::store_gated(const Stage& stage, const float* x, int64_t output, int size, int token) {
  Activations& to = activations_[1 - current_];
  if (stage.quantised == ActivationFormat::groups)
    kernels_.quantise_groups(
        x, size, to.groups.as<ActivationGroup>() + token * to.group_stride + output / group_size);
  else if (stage.quantised == ActivationFormat::blocks)
    kernels_.quantise_blocks(
        x, size,
        to.blocks.as<ActivationBlock>() + token * to.block_stride + output / activation_block_size);
  else
    std::memcpy(row_of(RowKind::gated, token) + output, x, bytes_of(size, sizeof(float)));
}

void Decoder::compute_logits(const int* rows, int count) {
  expect_within("the rows of the head's GEMM", count, 0, reserved_rows_);
  Stopwatch watch(counters_.head_seconds);
  const Matrix& head = *matrices_[static_cast<size_t>(head_)];
  // An odd number of cache lines, so that tokens do not share cache sets.
  logits_stride_ = ((head.out_size + panel_rows - 1) / panel_rows | 1) * panel_rows;
  logits_.grow(bytes_of(count * logits_stride_, sizeof(float)));
  Activations& to = activations_[current_];
  const int formats = formats_for({head_});
  pool_.run(count, 1, [&](int begin, int end, int) {
    for (int i = begin; i < end; i++) {
      const int index = kept_index_[static_cast<size_t>(rows[i])];
      norm_and_quantise_row(row_of(RowKind::hidden, index), shape_.hidden_size, output_norm_,
                            formats, to, i);
    }
  });
  counters_.multiplications += head.out_size * head.in_size * count;
  counters_.weight_bytes += head.num_bytes;
  const int num_tasks = tasks_of(head.out_size);
  pool_.run(num_tasks, chunk_size(num_tasks, pool_.size()), [&](int begin, int end, int) {
    for (int task = begin; task < end; task++) {
      const int64_t output = int64_t{task} * task_outputs;
      const int num_panels = static_cast<int>(
          (std::min<int64_t>(task_outputs, head.out_size - output) + panel_rows - 1) / panel_rows);
      float* out = logits_.as<float>() + output;
      gemm(head, to, task * panels_per_task, num_panels, 0, count, out, logits_stride_);
      if (shape_.logit_soft_cap > 0)
        for (int i = 0; i < count; i++)
          kernels_.soft_cap(out + i * logits_stride_,
                            std::min<int64_t>(task_outputs, head.out_size - output),
                            shape_.logit_soft_cap);
    }
  });
}

}  // namespace quire
