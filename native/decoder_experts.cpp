// The stages of a routed feed-forward: router, gate and up of the chosen experts, down.
//
// A slot is one row's use of one expert. Slots are in ascending order of expert, then of row: an
// expert's rows follow each other, its weights are read once a step, and those of experts that no
// row chose never. A row's sum runs over its experts in ascending order, whatever other rows chose.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "gemm_tasks.h"
#include "pack.h"

namespace quire {
namespace {

constexpr int router_rows_per_task = 48;
constexpr int max_down_width = 8 * task_outputs;

// One of the matrices of a stack.
Matrix part_of(const Matrix& stack, int index) {
  Matrix part = stack;
  part.num_stacked = 1;
  part.num_bytes = stack.num_bytes / stack.num_stacked;
  part.data = stack.data + index * part.num_bytes;
  part.bias_offset = index * stack.out_size;
  return part;
}

// Activations times a factor: codes stay, their scales change.
void multiply(ActivationGroup& group, float factor) {
  group.scale *= factor;
  group.scaled_sum = group.scale * group.sum;
}
void multiply(ActivationBlock& block, float factor) { block.scale *= factor; }
void multiply(float& x, float factor) { x *= factor; }

template <class Record>
void copy_records(const Record* from, int64_t count, float factor, Record* to) {
  std::memcpy(to, from, bytes_of(count, sizeof(Record)));
  if (factor != 1.0f)
    for (int64_t i = 0; i < count; i++) multiply(to[i], factor);
}

}  // namespace

// ---- construction and memory

int Decoder::add_stack(const char* format, int num_stacked, int64_t out_size, int64_t in_size,
                       float scale, int bias) {
  expect_within("the matrices of a stack", num_stacked, 1, max_experts);
  const SourceFormat& source = source_named(format);
  const int64_t num_bytes = checked_product(packed_size(source, out_size, in_size), num_stacked);
  if (bias >= 0) expect_vector("the biases of a stack", bias, out_size * num_stacked);
  Matrix stack{};
  stack.format = source.packed;
  stack.activations = activation_format_of(source.packed);
  stack.out_size = out_size;
  stack.in_size = in_size;
  stack.panel_bytes = panel_bytes_of(source.packed, in_size);
  stack.scale = scale;
  stack.bias = bias;
  stack.num_bytes = num_bytes;
  stack.num_stacked = num_stacked;
  reserved_rows_ = 0;  // the reserved rows may be too narrow for this matrix
  stack.data = weights_.allocate(static_cast<size_t>(num_bytes));
  matrices_.push_back(std::make_unique<Matrix>(stack));
  return static_cast<int>(matrices_.size()) - 1;
}

void Decoder::pack_stacked(int matrix, const char* format, const uint8_t* blocks, int first,
                           int count) {
  expect_within("a stack", matrix, 0, static_cast<int64_t>(matrices_.size()) - 1);
  const Matrix& stack = *matrices_[static_cast<size_t>(matrix)];
  const SourceFormat& source = source_named(format);
  expect(source.packed == stack.format, "blocks must have the format of their stack");
  expect_within("the first matrix", first, 0, stack.num_stacked - 1);
  expect_within("the matrices to pack", count, 1, stack.num_stacked - first);
  const int64_t part_bytes = stack.num_bytes / stack.num_stacked;
  const int64_t block_bytes =
      stack.out_size * stack.in_size / source.block_size * source.block_bytes;
  uint8_t* packed = const_cast<uint8_t*>(stack.data) + first * part_bytes;
  const int num_panels = static_cast<int>((stack.out_size + panel_rows - 1) / panel_rows);
  Pool::Session session(pool_);
  pool_.run(static_cast<int>(checked_product(count, num_panels)), 1, [&](int begin, int end, int) {
    for (int task = begin; task < end; task++) {
      const int part = task / num_panels, panel = task % num_panels;
      pack_panel(source, blocks + part * block_bytes, stack.in_size, stack.out_size,
                 int64_t{panel} * panel_rows,
                 packed + part * part_bytes + panel * stack.panel_bytes);
    }
  });
}

int Decoder::add_experts(const Experts& experts) {
  check_experts(experts);
  experts_.push_back(experts);
  reserved_rows_ = 0;  // slots are reserved with rows
  return static_cast<int>(experts_.size()) - 1;
}

void Decoder::reserve_slots(int num_rows) {
  if (experts_.empty()) return;
  int64_t num_slots = 0, num_scores = 0, widest_input = 0, widest_gated = 0;
  int input_formats = 0, gated_formats = 0;
  for (const Experts& experts : experts_) {
    const Matrix& up = *matrices_[static_cast<size_t>(experts.up)];
    num_slots = std::max(num_slots, checked_product(num_rows, experts.routing.num_used));
    num_scores = std::max(num_scores, router_stride(experts));
    widest_input = std::max(widest_input, up.in_size);
    widest_gated = std::max(widest_gated, up.out_size);
    input_formats |= formats_for(first_matrices(experts));
    gated_formats |= formats_for({experts.down});
  }
  expect_within("the rows of a step times the experts of a row", num_slots, 1, INT32_MAX);
  router_scores_.grow(bytes_of(checked_product(num_rows, num_scores), sizeof(float)));
  reserve_activations(slots_[0], num_slots, widest_input, input_formats);
  reserve_activations(slots_[1], num_slots, widest_gated, gated_formats);
  routing_scratch_.resize(static_cast<size_t>(pool_.size()));
}

// Those that experts multiply their input with.
std::vector<int> Decoder::first_matrices(const Experts& experts) {
  if (experts.gate < 0) return {experts.up};
  return {experts.gate, experts.up};
}

int64_t Decoder::router_stride(const Experts& experts) const {
  const int64_t size = matrices_[static_cast<size_t>(experts.router)]->out_size;
  return ((size + panel_rows - 1) / panel_rows | 1) * panel_rows;
}

// ---- the router

void Decoder::route(const Stage& stage) {
  Stopwatch watch(counters_.gemm_seconds);
  const Experts& experts = experts_[static_cast<size_t>(stage.experts)];
  score_experts(experts);
  const int num_used = experts.routing.num_used;
  const size_t num_slots = static_cast<size_t>(num_rows_) * static_cast<size_t>(num_used);
  chosen_.resize(num_slots);
  expert_weights_.resize(num_slots);
  shared_weights_.resize(static_cast<size_t>(num_rows_));
  const auto vector = [&](int index) {
    return index < 0 ? nullptr : vectors_[static_cast<size_t>(index)].data();
  };
  pool_.run(num_rows_, 16, [&](int begin, int end, int thread) {
    for (int row = begin; row < end; row++) {
      const float* scores = router_scores_.as<float>() + row * router_stride(experts);
      choose_experts(experts.routing, scores, vector(experts.choice_bias), vector(experts.factors),
                     routing_scratch_[static_cast<size_t>(thread)],
                     chosen_.data() + int64_t{row} * num_used,
                     expert_weights_.data() + int64_t{row} * num_used);
      shared_weights_[static_cast<size_t>(row)] =
          experts.has_shared_gate ? sigmoid_of(scores[experts.routing.count]) : 1.0f;
    }
  });
  order_slots(experts);
}

void Decoder::score_experts(const Experts& experts) {
  const Matrix& router = *matrices_[static_cast<size_t>(experts.router)];
  counters_.multiplications += router.out_size * router.in_size * num_rows_;
  counters_.weight_bytes += router.num_bytes;
  const int num_panels = static_cast<int>((router.out_size + panel_rows - 1) / panel_rows);
  const int num_parts = (num_rows_ + router_rows_per_task - 1) / router_rows_per_task;
  const int64_t stride = router_stride(experts);
  pool_.run(num_panels * num_parts, 1, [&](int begin, int end, int) {
    for (int task = begin; task < end; task++) {
      const int panel = task / num_parts, first = task % num_parts * router_rows_per_task;
      gemm(router, activations_[current_], panel, 1, first,
           std::min(router_rows_per_task, num_rows_ - first),
           router_scores_.as<float>() + first * stride + panel * panel_rows, stride);
    }
  });
}

// A counting sort by expert: rows of one expert stay in ascending order.
void Decoder::order_slots(const Experts& experts) {
  std::vector<int> starts(static_cast<size_t>(experts.routing.count) + 1, 0);
  for (const int expert : chosen_) starts[static_cast<size_t>(expert) + 1]++;
  expert_slots_.clear();
  for (int expert = 0; expert < experts.routing.count; expert++) {
    const int count = starts[static_cast<size_t>(expert) + 1];
    const int first = starts[static_cast<size_t>(expert)];
    if (count > 0) expert_slots_.push_back({expert, first, count});
    starts[static_cast<size_t>(expert) + 1] += first;
  }
  slot_rows_.resize(chosen_.size());
  slot_weights_.resize(chosen_.size());
  for (size_t i = 0; i < chosen_.size(); i++) {
    const auto slot = static_cast<size_t>(starts[static_cast<size_t>(chosen_[i])]++);
    slot_rows_[slot] = static_cast<int>(i) / experts.routing.num_used;
    slot_weights_[slot] = expert_weights_[i];
  }
}

// ---- gate and up

// Copies each slot's quantised input, so that an expert's rows follow each other.
void Decoder::gather_slots(const Experts& experts) {
  const Activations &from = activations_[current_], &to = slots_[0];
  const std::vector<int> matrices = first_matrices(experts);
  const int64_t in_size = matrix(experts.up).in_size;
  const auto wants = [&](ActivationFormat format) {
    return std::any_of(matrices.begin(), matrices.end(),
                       [&](int index) { return matrix(index).activations == format; });
  };
  pool_.run(static_cast<int>(slot_rows_.size()), 16, [&](int begin, int end, int) {
    for (int slot = begin; slot < end; slot++) {
      const int row = slot_rows_[static_cast<size_t>(slot)];
      const float factor = experts.weighs_input ? slot_weights_[static_cast<size_t>(slot)] : 1.0f;
      if (wants(ActivationFormat::groups))
        copy_records(from.groups.as<ActivationGroup>() + row * from.group_stride,
                     in_size / group_size, factor,
                     to.groups.as<ActivationGroup>() + slot * to.group_stride);
      if (wants(ActivationFormat::blocks))
        copy_records(from.blocks.as<ActivationBlock>() + row * from.block_stride,
                     in_size / activation_block_size, factor,
                     to.blocks.as<ActivationBlock>() + slot * to.block_stride);
      if (wants(ActivationFormat::floats))
        copy_records(from.floats.as<float>() + row * from.float_stride, in_size, factor,
                     to.floats.as<float>() + slot * to.float_stride);
    }
  });
}

// What a gate's task writes for the GEMM with `down`. A task that makes a block has 256 outputs;
// where threads would get too few such tasks it writes floats, which are quantised afterwards to
// the same bits.
ActivationFormat Decoder::gated_format(const Experts& experts) const {
  const Matrix& down = *matrices_[static_cast<size_t>(experts.down)];
  const bool is_enough = static_cast<int64_t>(expert_slots_.size()) * down.in_size >=
                         int64_t{4} * activation_block_size * pool_.size();
  return down.activations == ActivationFormat::blocks && !is_enough ? ActivationFormat::floats
                                                                    : down.activations;
}

void Decoder::expert_gate_and_up(const Stage& stage) {
  Stopwatch watch(counters_.gemm_seconds);
  const Experts& experts = experts_[static_cast<size_t>(stage.experts)];
  const Matrix& down = matrix(experts.down);
  const auto num_slots = static_cast<int64_t>(slot_rows_.size());
  for (const int index : first_matrices(experts)) {
    const Matrix& stack = matrix(index);
    counters_.multiplications += stack.out_size * stack.in_size * num_slots;
    counters_.weight_bytes +=
        stack.num_bytes / stack.num_stacked * static_cast<int64_t>(expert_slots_.size());
  }
  const int64_t size = down.in_size;
  gather_slots(experts);
  const ActivationFormat made_as = gated_format(experts);
  if (made_as == ActivationFormat::floats)
    slots_[1].floats.grow(
        bytes_of(checked_product(num_slots, slots_[1].float_stride), sizeof(float)));
  const int outputs = made_as == ActivationFormat::blocks ? activation_block_size : task_outputs;
  const int per_expert = static_cast<int>((size + outputs - 1) / outputs);
  const int num_tasks =
      static_cast<int>(checked_product(static_cast<int64_t>(expert_slots_.size()), per_expert));
  pool_.run(num_tasks, chunk_size(num_tasks, pool_.size()), [&](int begin, int end, int thread) {
    for (int task = begin; task < end; task++) {
      const int64_t output = int64_t{task % per_expert} * outputs;
      gate_slots(experts, static_cast<size_t>(task / per_expert), output,
                 static_cast<int>(std::min<int64_t>(outputs, size - output)), made_as,
                 scratch_.as<float>() + thread * scratch_size());
    }
  });
  if (made_as != down.activations) quantise_slots(experts);
}

// Some outputs of gate(x) * up(x), or of up(x) alone, for all slots of one expert.
void Decoder::gate_slots(const Experts& experts, size_t which, int64_t output, int size,
                         ActivationFormat made_as, float* scratch) {
  const ExpertSlots& slots = expert_slots_[which];
  const bool is_gated = experts.gate >= 0;
  const Matrix up = part_of(matrix(experts.up), slots.expert);
  const Matrix gate = is_gated ? part_of(matrix(experts.gate), slots.expert) : up;
  const bool is_last = output + size >= up.out_size;  // then the next expert's panels follow
  const int64_t to_next = !is_last || which + 1 == expert_slots_.size()
                              ? 0
                              : expert_slots_[which + 1].expert - slots.expert;
  const auto next_of = [&](const Matrix& part) {
    return to_next == 0 ? nullptr : part.data + to_next * part.num_bytes;
  };
  const int stride = activation_block_size + panel_rows;  // an odd number of cache lines
  float *gated = scratch, *ups = scratch + rows_per_pass * stride;
  for (int first = 0; first < slots.count; first += rows_per_pass) {
    const int count = std::min(rows_per_pass, slots.count - first);
    for (int offset = 0; offset < size; offset += task_outputs) {
      const int part = std::min(task_outputs, size - offset);
      const int panel = static_cast<int>((output + offset) / panel_rows);
      const int num_panels = (part + panel_rows - 1) / panel_rows;
      const bool ends = offset + part >= size;
      gemm(gate, slots_[0], panel, num_panels, slots.first + first, count, gated + offset, stride,
           ends ? next_of(gate) : nullptr);
      if (is_gated)
        gemm(up, slots_[0], panel, num_panels, slots.first + first, count, ups, task_outputs,
             ends ? next_of(up) : nullptr);
      for (int t = 0; t < count; t++) {
        float* x = gated + int64_t{t} * stride + offset;
        const float* own = is_gated ? ups + t * task_outputs : nullptr;
        kernels_.gate(experts.activation, nullptr, x, own, part, x);
      }
    }
    for (int t = 0; t < count; t++)
      store_slot(made_as, gated + int64_t{t} * stride, output, size, slots.first + first + t);
  }
}

void Decoder::store_slot(ActivationFormat made_as, const float* x, int64_t output, int size,
                         int slot) {
  Activations& to = slots_[1];
  if (made_as == ActivationFormat::groups)
    kernels_.quantise_groups(
        x, size, to.groups.as<ActivationGroup>() + slot * to.group_stride + output / group_size);
  else if (made_as == ActivationFormat::blocks)
    kernels_.quantise_blocks(
        x, size,
        to.blocks.as<ActivationBlock>() + slot * to.block_stride + output / activation_block_size);
  else
    std::memcpy(to.floats.as<float>() + slot * to.float_stride + output, x,
                bytes_of(size, sizeof(float)));
}

void Decoder::quantise_slots(const Experts& experts) {
  const int size = static_cast<int>(matrices_[static_cast<size_t>(experts.down)]->in_size);
  Activations& to = slots_[1];
  pool_.run(static_cast<int>(slot_rows_.size()), 1, [&](int begin, int end, int) {
    for (int slot = begin; slot < end; slot++)
      kernels_.quantise_blocks(to.floats.as<float>() + slot * to.float_stride, size,
                               to.blocks.as<ActivationBlock>() + slot * to.block_stride);
  });
}

// ---- down

// A task has some outputs of all experts, one after another: a row's sum is in ascending order of
// its experts.
void Decoder::expert_down(const Stage& stage) {
  Stopwatch watch(counters_.gemm_seconds);
  const Experts& experts = experts_[static_cast<size_t>(stage.experts)];
  const Matrix& down = *matrices_[static_cast<size_t>(experts.down)];
  counters_.multiplications +=
      down.out_size * down.in_size * static_cast<int64_t>(slot_rows_.size());
  counters_.weight_bytes +=
      down.num_bytes / down.num_stacked * static_cast<int64_t>(expert_slots_.size());
  const int per_chunk = chunk_size(tasks_of(down.out_size), pool_.size());
  const int width = std::min(max_down_width, per_chunk * task_outputs);
  const int num_tasks = static_cast<int>((down.out_size + width - 1) / width);
  pool_.run(num_tasks, 1, [&](int task, int end, int thread) {
    for (; task < end; task++) {
      const int64_t first = int64_t{task} * width;
      const int size = static_cast<int>(std::min<int64_t>(width, down.out_size - first));
      for (int row = 0; row < num_rows_; row++)
        std::fill_n(row_of(RowKind::branch, row) + first, size, 0.0f);
      for (size_t which = 0; which < expert_slots_.size(); which++)
        add_expert(experts, which, first, size, scratch_.as<float>() + thread * scratch_size());
      if (stage.output == RowKind::branch) continue;
      for (int row = 0; row < num_rows_; row++)
        kernels_.add(row_of(stage.output, row) + first, row_of(RowKind::branch, row) + first, size);
    }
  });
}

// Adds outputs [first, first + size) of one expert, times its weights, to the sums of its rows.
void Decoder::add_expert(const Experts& experts, size_t which, int64_t first, int size,
                         float* scratch) {
  const ExpertSlots& slots = expert_slots_[which];
  const Matrix& stack = *matrices_[static_cast<size_t>(experts.down)];
  const Matrix down = part_of(stack, slots.expert);
  const bool is_last = which + 1 == expert_slots_.size();
  const ExpertSlots& following = expert_slots_[is_last ? 0 : which + 1];
  const int64_t next_panel = (is_last ? first + size : first) / panel_rows;
  const uint8_t* next = part_of(stack, following.expert).data + next_panel * down.panel_bytes;
  for (int begin = 0; begin < slots.count; begin += rows_per_pass) {
    const int count = std::min(rows_per_pass, slots.count - begin);
    for (int offset = 0; offset < size; offset += task_outputs) {
      const int part = std::min(task_outputs, size - offset);
      gemm(down, slots_[1], static_cast<int>((first + offset) / panel_rows),
           (part + panel_rows - 1) / panel_rows, slots.first + begin, count, scratch, task_outputs,
           offset + part >= size ? next : nullptr);
      for (int t = 0; t < count; t++) {
        const auto slot = static_cast<size_t>(slots.first + begin + t);
        kernels_.add_scaled(row_of(RowKind::branch, slot_rows_[slot]) + first + offset,
                            scratch + t * task_outputs,
                            experts.weighs_input ? 1.0f : slot_weights_[slot], part);
      }
    }
  }
}

}  // namespace quire
