// Checks of a decoder's construction: whatever sizes, indices and stages it is given, no step reads
// or writes outside its buffers.
#include <algorithm>

#include "decoder.h"

namespace quire {
namespace {

void check_position_scale(const PositionScale& scale) {
  expect_within("the length of a position scale", scale.length, 0, max_positions);
  expect_within("the offset of a position scale", scale.offset, 0, max_positions);
}

void expect_number(const char* name, float value, float high) {
  if (!(value >= 0.0f && value <= high))
    throw std::invalid_argument(std::string(name) + " must be a number from 0 to " +
                                std::to_string(high) + ", got " + std::to_string(value));
}

constexpr float max_number = 3e38f;  // a finite one

}  // namespace

const DecoderShape& checked(const DecoderShape& shape) {
  expect_within("hidden_size", shape.hidden_size, 1, max_hidden_size);
  expect_within("vocabulary_size", shape.vocabulary_size, 1, max_vocabulary);
  expect_number("embedding_scale", shape.embedding_scale, max_number);
  expect_number("logit_soft_cap", shape.logit_soft_cap, max_number);
  expect_within("layer_input_size", shape.layer_input_size, 0, max_hidden_size);
  return shape;
}

void Decoder::check_layer(const LayerAttention& layer) const {
  const AttentionShape& shape = layer.shape;
  expect_within("the layers of a decoder", num_layers(), 0, max_layers - 1);
  expect_within("num_heads", shape.num_heads, 1, max_heads);
  expect_within("num_kv_heads", shape.num_kv_heads, 1, max_heads);
  expect_within("head_dim", shape.head_dim, 1, max_head_dim);
  expect_within("value_dim", shape.value_dim, 1, max_head_dim);
  const int64_t widest = std::max(shape.head_dim, shape.value_dim);
  expect_within("num_heads * head_dim", shape.num_heads * widest, 1, max_row_size);
  expect(shape.num_heads % shape.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  expect_within("a window", shape.window, 0, max_positions);
  expect_number("attention_scale", shape.scale, max_number);
  expect_number("attention_soft_cap", shape.soft_cap, max_number);
  expect_within("a group", layer.group, 0, max_layers - 1);
  expect_within("a slot", layer.slot, 0, max_layers - 1);
  expect_within("a rope", layer.rope, -1, static_cast<int64_t>(ropes_.size()) - 1);
  if (layer.rope >= 0)
    expect_within("rope_dims", ropes_[static_cast<size_t>(layer.rope)].dims, 2,
                  shape.has_values_in_keys ? shape.head_dim - shape.value_dim : shape.head_dim);
  if (layer.sinks >= 0) expect_vector("sinks", layer.sinks, shape.num_heads);
  if (layer.has_key_values)
    expect_within("the size of values that are keys", shape.value_dim, shape.head_dim,
                  shape.head_dim);
  if (shape.has_values_in_keys) {
    expect_within("the kv heads of latent attention", shape.num_kv_heads, 1, 1);
    expect_within("the size of values in keys", shape.value_dim, 1, shape.head_dim - 1);
  }
  expect_within("a layer whose keys are read", layer.kv_layer, -1, num_layers() - 1);
  if (layer.kv_layer < 0) return;
  const AttentionShape& read = attention_shape(layer.kv_layer);
  expect(owns_cache(layer.kv_layer), "a layer whose keys are read must have its own");
  expect(read.num_kv_heads == shape.num_kv_heads && read.head_dim == shape.head_dim &&
             read.value_dim == shape.value_dim &&
             read.has_values_in_keys == shape.has_values_in_keys,
         "layers that share keys and values must have heads of one size");
}

void Decoder::expect_vector(const char* what, int index, int64_t size) const {
  expect_within(what, index, 0, static_cast<int64_t>(vectors_.size()) - 1);
  const auto found = static_cast<int64_t>(vectors_[static_cast<size_t>(index)].size());
  expect_within((std::string("the size of ") + what).c_str(), found, size, size);
}

const Matrix& Decoder::expect_matrix(const char* what, int index, int64_t out_size,
                                     int64_t in_size) const {
  expect_within(what, index, 0, static_cast<int64_t>(matrices_.size()) - 1);
  const Matrix& found = *matrices_[static_cast<size_t>(index)];
  expect_within((std::string("the rows of ") + what).c_str(), found.out_size, out_size, out_size);
  expect_within((std::string("the columns of ") + what).c_str(), found.in_size, in_size, in_size);
  return found;
}

void Decoder::expect_norm(const char* what, const Norm& norm, int64_t size) const {
  if (norm.kind == Norm::none) return;
  expect_number("norm_epsilon", norm.epsilon, 1.0f);
  if (norm.weight != -1) expect_vector(what, norm.weight, size);
  if (norm.bias != -1) expect_vector(what, norm.bias, size);
}

void Decoder::expect_written(const char* what, RowKind rows, int64_t size) const {
  const int64_t written = buffer(rows).written;
  expect_within(what, size, written, written);
}

void Decoder::expect_added_to(RowKind rows) const {
  expect(rows == RowKind::hidden || rows == RowKind::branch,
         "a product must be added to the hidden state or the branch");
  expect_written("the rows that a product is added to", rows, shape_.hidden_size);
}

int64_t Decoder::rows_of(int matrix) const {
  expect_within("a matrix", matrix, 0, static_cast<int64_t>(matrices_.size()) - 1);
  return matrices_[static_cast<size_t>(matrix)]->out_size;
}

// A GEMM reads what the last norm_and_quantise or quantising gate wrote. Stages in another order
// would read activations of another size, though never outside their buffers.
void Decoder::check_stage(const Stage& stage) const {
  switch (stage.kind) {
    case Stage::norm_and_quantise: return check_quantise(stage);
    case Stage::project: return check_project(stage);
    case Stage::rope_and_store: return check_rope_and_store(stage);
    case Stage::attend: return check_attend(stage);
    case Stage::project_and_add: {
      expect(stage.matrices.size() == 1, "a stage adds the product of one matrix");
      const int index = stage.matrices[0];
      rows_of(index);
      expect_matrix("an output", index, shape_.hidden_size,
                    matrices_[static_cast<size_t>(index)]->in_size);
      expect_added_to(stage.output);
      if (stage.experts >= 0) check_shared(stage);
      return;
    }
    case Stage::gate_and_up: return check_gate(stage);
    case Stage::route:
    case Stage::expert_gate_and_up:
    case Stage::expert_down: return check_routed(stage);
    case Stage::add_branch:
      expect_written("the branch", RowKind::branch, shape_.hidden_size);
      return expect_norm("a norm", stage.norm, shape_.hidden_size);
    case Stage::norm_branch:
    case Stage::add_to_branch:
      expect_written("the branch", RowKind::branch, shape_.hidden_size);
      if (stage.kind == Stage::add_to_branch) {
        expect(stage.input == RowKind::projected, "a branch must be joined by projected rows");
        expect_written("what joins a branch", stage.input, shape_.hidden_size);
      }
      return expect_norm("a norm", stage.norm, shape_.hidden_size);
    case Stage::scale_hidden: return;
    case Stage::add_layer_embedding: return check_layer_embedding(stage);
    case Stage::latent_rope_and_store: return check_latent(stage);
    case Stage::convolve:
    case Stage::recur: return check_recur(stage);
    case Stage::gate_output: return check_gate_output(stage);
  }
}

// The router gave each row a weight for the shared expert.
void Decoder::check_shared(const Stage& stage) const {
  expect_within("experts", stage.experts, 0, static_cast<int64_t>(experts_.size()) - 1);
  const auto is_routed = [](const Stage& other) { return other.experts >= 0; };
  const auto last = std::find_if(stages_.rbegin(), stages_.rend(), is_routed);
  expect(
      last != stages_.rend() && last->kind == Stage::expert_down && last->experts == stage.experts,
      "a shared expert must come after the sum over its layer's experts");
}

// Each reads what the one before it left.
void Decoder::check_routed(const Stage& stage) const {
  expect_within("experts", stage.experts, 0, static_cast<int64_t>(experts_.size()) - 1);
  if (stage.kind == Stage::route) return;
  const auto is_routed = [](const Stage& other) { return other.experts >= 0; };
  const auto last = std::find_if(stages_.rbegin(), stages_.rend(), is_routed);
  const Stage::Kind before =
      stage.kind == Stage::expert_down ? Stage::expert_gate_and_up : Stage::route;
  expect(last != stages_.rend() && last->kind == before && last->experts == stage.experts,
         "a routed feed-forward is route, expert_gate_and_up and expert_down, in this order");
  if (stage.kind != Stage::expert_down) return;
  const bool is_hidden =
      rows_of(experts_[static_cast<size_t>(stage.experts)].down) == shape_.hidden_size;
  expect(stage.output == RowKind::branch || (stage.output == RowKind::hidden && is_hidden),
         "the sum over experts must be of hidden states, or the branch");
}

void Decoder::check_stack(const char* what, int index, int count, int64_t out_size,
                          int64_t in_size) const {
  const Matrix& stack = expect_matrix(what, index, out_size, in_size);
  expect_within((std::string("the matrices of ") + what).c_str(), stack.num_stacked, count, count);
}

void Decoder::check_experts(const Experts& experts) const {
  const Routing& routing = checked(experts.routing);
  const Matrix& router =
      expect_matrix("a router", experts.router, routing.count + (experts.has_shared_gate ? 1 : 0),
                    shape_.hidden_size);
  expect(router.activations == ActivationFormat::floats, "a router's weights must be floats");
  expect_within("experts' gates", experts.gate, -1, INT32_MAX);
  // Experts take hidden states, or a projection of them.
  const int64_t size = rows_of(experts.up), width = matrix(experts.up).in_size;
  if (experts.gate >= 0) check_stack("experts' gates", experts.gate, routing.count, size, width);
  expect(experts.gate >= 0 || experts.activation != Gate::clamped_swiglu,
         "clamped_swiglu must have a gate");
  check_stack("experts' up projections", experts.up, routing.count, size, width);
  check_stack("experts' down projections", experts.down, routing.count, width, size);
  if (experts.choice_bias >= 0)
    expect_vector("a bias of the choice", experts.choice_bias, routing.count);
  if (experts.factors >= 0) expect_vector("experts' factors", experts.factors, routing.count);
  expect(experts.activation != Gate::xielu, "experts have no xielu");
}

void Decoder::check_quantise(const Stage& stage) const {
  expect(!stage.matrices.empty(), "a stage quantises rows for at least one matrix");
  const int64_t written = buffer(stage.input).written;
  rows_of(stage.matrices[0]);
  const int64_t size = matrix(stage.matrices[0]).in_size;
  if (stage.is_by_head) {
    const auto num_heads = static_cast<int64_t>(stage.matrices.size());
    check_by_head(stage, size);
    expect(written % num_heads == 0, "the heads of a row must divide it");
    expect_within("the columns of a head's matrix", size, 1, written / num_heads);
    expect(stage.norm.kind == Norm::none, "heads must be normed where they are made");
    return;
  }
  // Of what latent attention is made of, a stage takes the first part.
  expect_within("the columns of a matrix", size,
                stage.input == RowKind::latent ? std::min<int64_t>(1, written) : written, written);
  for (const int index : stage.matrices) expect_matrix("a matrix", index, rows_of(index), size);
  expect_norm("a norm", stage.norm, size);
}

// A matrix for each head, all of one size, whose activations lie side by side in a row.
void Decoder::check_by_head(const Stage& stage, int64_t in_size) const {
  for (const int index : stage.matrices) {
    const Matrix& found = expect_matrix("a head's matrix", index, rows_of(index), in_size);
    expect(found.activations == matrix(stage.matrices[0]).activations,
           "the matrices of heads must have one format");
    expect(found.activations != ActivationFormat::per_token,
           "heads must not share a scale of their activations");
    expect(found.has_residual_pass == matrix(stage.matrices[0]).has_residual_pass,
           "the matrices of heads must all have a residual pass, or none");
  }
}

void Decoder::check_project(const Stage& stage) const {
  expect(!stage.matrices.empty(), "a stage projects with at least one matrix");
  expect(stage.output != RowKind::hidden && stage.output != RowKind::attention_output,
         "a projection must not replace rows that others read");
  rows_of(stage.matrices[0]);
  const Matrix& first = matrix(stage.matrices[0]);
  for (const int index : stage.matrices)
    expect_matrix("a projection", index, rows_of(index), first.in_size);
  if (stage.is_by_head) {
    check_by_head(stage, first.in_size);
    expect_within("the rows of a head's matrix", first.out_size, 1, stage.output_stride);
    for (const int index : stage.matrices)
      expect_matrix("a head's matrix", index, first.out_size, first.in_size);
  }
  expect_within("the rows of a projection", output_size(stage), 1, 3 * max_row_size);
}

void Decoder::check_rope_and_store(const Stage& stage) const {
  expect_within("a layer", stage.layer, 0, num_layers() - 1);
  const AttentionShape& shape = attention_shape(stage.layer);
  expect(!shape.has_values_in_keys, "a layer of latent attention has a stage of its own");
  const bool has_values = !layers_[static_cast<size_t>(stage.layer)].has_key_values;
  int64_t size = int64_t{shape.num_heads} * shape.head_dim;
  if (owns_cache(stage.layer))
    size += int64_t{shape.num_kv_heads} * (shape.head_dim + (has_values ? shape.value_dim : 0));
  expect_written("queries, keys and values", RowKind::projected, size);
  const auto norm_size = [&](int num_heads) {
    return stage.norm_span == NormSpan::head ? int64_t{shape.head_dim}
                                             : int64_t{num_heads} * shape.head_dim;
  };
  expect_norm("a query norm", stage.query_norm, norm_size(shape.num_heads));
  expect_norm("a key norm", stage.key_norm, norm_size(shape.num_kv_heads));
  expect_norm("a value norm", stage.value_norm, shape.value_dim);
  check_position_scale(stage.position_scale);
}

void Decoder::check_latent(const Stage& stage) const {
  expect_within("a layer", stage.layer, 0, num_layers() - 1);
  const AttentionShape& shape = attention_shape(stage.layer);
  expect(shape.has_values_in_keys && owns_cache(stage.layer),
         "a layer must have a latent vector of its own");
  const int64_t heads = buffer(RowKind::gated).written;
  expect(heads % shape.num_heads == 0, "the heads of a row must divide it");
  expect_within("the rotated numbers of a head", shape.head_dim - shape.value_dim, 1,
                heads / shape.num_heads);
  expect_written("the queries of latent attention", RowKind::projected,
                 int64_t{shape.num_heads} * shape.head_dim);
  expect_within("the latent vector", shape.head_dim, 1, buffer(RowKind::latent).written);
  expect_norm("a key norm", stage.key_norm, shape.value_dim);
  check_position_scale(stage.position_scale);
}

void Decoder::check_attend(const Stage& stage) const {
  expect_within("a layer", stage.layer, 0, num_layers() - 1);
  const AttentionShape& shape = attention_shape(stage.layer);
  expect_within("the queries of a layer", int64_t{shape.num_heads} * shape.head_dim, 1,
                buffer(RowKind::projected).written);
  for (const Stage& other : stages_)  // the last layer's attend drops rows
    expect(other.kind != Stage::attend || other.layer < stage.layer,
           "layers attend once each, in ascending order");
}

void Decoder::check_gate(const Stage& stage) const {
  expect(stage.matrices.size() == 1 || stage.matrices.size() == 2, "a gate has two matrices");
  const int64_t size = rows_of(stage.matrices[0]);
  expect_within("ffn_size", size, 1, max_row_size);
  for (const int index : stage.matrices) expect_matrix("a gate", index, size, shape_.hidden_size);
  const bool has_values = stage.matrices.size() == 2 || stage.layer_input >= 0;
  expect(has_values || stage.gate != Gate::clamped_swiglu, "clamped_swiglu must have a gate");
  if (stage.gate == Gate::xielu) {
    expect(!has_values, "xielu has no gate");
    expect_vector("xielu's numbers", stage.gate_numbers, num_xielu_numbers);
  }
  if (stage.layer_input >= 0) {
    expect(stage.matrices.size() == 1, "a gate of a layer's input has one matrix");
    expect_within("the rows of a gate of a layer's input", size, shape_.layer_input_size,
                  shape_.layer_input_size);
    expect_within("a layer's input", stage.layer_input, 0,
                  buffer(RowKind::layer_inputs).written / shape_.layer_input_size - 1);
  }
  expect(stage.quantised != ActivationFormat::per_token,
         "a gate's task sees part of a row: it cannot make a per-token scale");
  if (stage.quantised == ActivationFormat::floats) return;
  // Such a matrix makes reserve_rows allocate the records that the gate writes.
  const bool is_read = std::any_of(matrices_.begin(), matrices_.end(), [&](const auto& m) {
    return m->in_size == size && m->activations == stage.quantised;
  });
  expect(is_read, "no matrix takes what the gate is to write");
}

void Decoder::check_layer_embedding(const Stage& stage) const {
  expect(stage.matrices.size() == 1, "a stage adds rows of one matrix");
  expect_within("layer_input_size", shape_.layer_input_size, 1, max_hidden_size);
  const int64_t all = buffer(RowKind::layer_inputs).written;
  expect(all % shape_.layer_input_size == 0, "the inputs of layers must have one size");
  expect_matrix("the layers' embedding", stage.matrices[0], shape_.vocabulary_size, all);
  expect_norm("a norm", stage.norm, shape_.layer_input_size);
}

void Decoder::check_ready(int64_t num_rows) const {
  expect(head_ >= 0, "the decoder has no head yet");
  expect(num_blocks_ > 0, "the decoder has no cache yet");
  expect(!keeps_states() || num_states_ > 0, "the decoder has no slots for states yet");
  expect_within("the rows of a step", num_rows, 0, max_step_rows);
  for (const AttendPlan& plan : attend_plans_)
    expect_within("the rows of a step times kv heads", num_rows * plan.shape.num_kv_heads, 0,
                  INT32_MAX);
  for (const StateMixer& mixer : states_)
    expect_within("the rows of a step times a state's tasks",
                  num_rows * std::max<int64_t>(mixer.num_heads, mixer.num_convolve_tasks()), 0,
                  INT32_MAX);
}

}  // namespace quire
