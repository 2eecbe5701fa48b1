// Layers that keep a state: their construction and their stages. A state is carried from row to row
// in the order of positions, one token at a time: chunks change no bit of it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "decoder.h"
#include "elementary.h"

namespace quire {
namespace {

constexpr int max_kernel = 64;
constexpr int64_t max_state_floats = int64_t{1} << 29;  // of one layer, padding included
constexpr int channels_of_task = StateMixer::channels_of_task;
constexpr float unit_epsilon = 1e-6f;

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

double sigmoid(double x) {
  if (std::isnan(x)) return x;
  const double e = exp_of(-std::fabs(x));
  return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

double softplus(double x) {
  if (!std::isfinite(x)) return not_a_number;
  return std::max(x, 0.0) + log_of(1.0 + exp_of(-std::fabs(x)));
}

}  // namespace

// ---- construction

void Decoder::check_state(const StateMixer& mixer) const {
  const bool has_heads = mixer.kind != StateMixer::convolution;
  expect_within("a state's kernel", mixer.kernel, 2, max_kernel);
  expect_within("a state's heads", mixer.num_heads, 1, has_heads ? max_heads : 1);
  expect_within("a state's groups", mixer.num_groups, 1, mixer.num_heads);
  expect(mixer.num_heads % mixer.num_groups == 0, "a state's groups must divide its heads");
  expect_within("a state's key_dim", mixer.key_dim, has_heads ? 1 : 0,
                has_heads ? max_head_dim : 0);
  expect_within("a state's value_dim", mixer.value_dim, 1, has_heads ? max_head_dim : max_row_size);
  expect_within("a state's channels", mixer.channels(), 1, max_row_size);
  expect_within("a state's numbers",
                checked_sum(checked_product(mixer.kernel, mixer.channels()),
                            checked_product(mixer.num_heads, mixer.key_dim, mixer.value_stride())),
                1, max_state_floats);
  expect_vector("a state's taps", mixer.taps, mixer.kernel * mixer.channels());
  if (mixer.bias >= 0) expect_vector("a state's bias", mixer.bias, mixer.channels());
  if (!has_heads) return;
  if (mixer.kind == StateMixer::mamba_1) return check_values(mixer);
  expect_vector("a state's a", mixer.a, mixer.num_heads);
  expect_vector("a state's dt", mixer.dt, mixer.num_heads);
  if (mixer.d >= 0) expect_vector("a state's d", mixer.d, mixer.num_heads);
  for (const float a : vectors_[static_cast<size_t>(mixer.a)])
    expect(a <= 0.0f, "a state must decay: its a must not be above 0");
}

void Decoder::check_values(const StateMixer& mixer) const {
  expect_within("a state's heads", mixer.num_heads, 1, 1);
  expect_within("a state's step_rank", mixer.step_rank, 1, max_head_dim);
  expect_vector("a state's a", mixer.a, int64_t{mixer.key_dim} * mixer.value_dim);
  expect_vector("a state's d", mixer.d, mixer.value_dim);
  for (const float a : vectors_[static_cast<size_t>(mixer.a)])
    expect(a <= 0.0f, "a state must decay: its a must not be above 0");
}

int Decoder::add_state(const StateMixer& mixer) {
  check_state(mixer);
  expect(num_states_ == 0, "states were allocated: a state must be added before");
  expect_within("the states of a decoder", static_cast<int64_t>(states_.size()), 0, max_layers - 1);
  states_.push_back(mixer);
  states_.back().offset = state_floats_;
  state_floats_ = checked_sum(state_floats_, mixer.floats());
  return static_cast<int>(states_.size()) - 1;
}

void Decoder::allocate_states(int64_t num_states) {
  expect_within("the slots of states", num_states, 1, max_blocks);
  expect(keeps_states(), "the decoder keeps no states");
  num_states_ = 0;  // until they are allocated
  state_slots_ = Buffer();
  state_slots_ = Buffer(bytes_of(checked_product(num_states, state_floats_), sizeof(float)));
  num_states_ = num_states;
}

int64_t Decoder::state_bytes() const { return state_floats_ * static_cast<int64_t>(sizeof(float)); }

const StateMixer& Decoder::state_of(const Stage& stage) const {
  expect_within("a state", stage.state, 0, static_cast<int64_t>(states_.size()) - 1);
  return states_[static_cast<size_t>(stage.state)];
}

void Decoder::check_recur(const Stage& stage) const {
  const StateMixer& mixer = state_of(stage);
  expect_written("what a state is made of", RowKind::projected, mixer.projected_size());
  const bool has_heads = mixer.kind != StateMixer::convolution;
  expect(stage.kind == Stage::convolve || has_heads, "a convolution alone has no heads");
  const auto is_same = [&](const Stage& other) {
    return other.kind == stage.kind && other.state == stage.state;
  };
  expect(std::none_of(stages_.begin(), stages_.end(), is_same), "a state is carried on once");
  if (mixer.kind != StateMixer::mamba_1 || stage.kind != Stage::recur) return;
  expect_written("time steps", RowKind::branch, mixer.value_dim);
  expect_written("keys and queries", RowKind::latent, mixer.step_rank + 2 * int64_t{mixer.key_dim});
  expect_norm("a norm of keys", stage.key_norm, mixer.key_dim);
  expect_norm("a norm of queries", stage.query_norm, mixer.key_dim);
}

void Decoder::check_gate_output(const Stage& stage) const {
  const int64_t size = buffer(RowKind::attention_output).written;
  expect_within("what is gated", size, 1, 3 * max_row_size);
  expect_written("the gate of what attention leaves", RowKind::gated, size);
  if (stage.norm.kind == Norm::none) return;
  expect_within("the size of a norm", stage.norm_size, 1, size);
  expect(size % stage.norm_size == 0, "norms must divide what they norm");
  expect_norm("a norm of what is gated", stage.norm,
              stage.norms_before_gate ? stage.norm_size : size);
}

// ---- each step

void Decoder::convolve(const Stage& stage) {
  Stopwatch watch(counters_.attention_seconds);
  const StateMixer& mixer = state_of(stage);
  const int64_t channels = mixer.channels();
  const int parts = static_cast<int>(mixer.num_convolve_tasks());
  const int count = static_cast<int>(row_states_.size()) * parts;
  pool_.run(count, 1, [&](int begin, int end, int) {
    for (int task = begin; task < end; task++) {
      const int64_t first = int64_t{task % parts} * channels_of_task;
      const auto size = static_cast<int>(std::min<int64_t>(channels_of_task, channels - first));
      convolve_rows(mixer, row_states_[static_cast<size_t>(task / parts)], first, size);
    }
  });
}

// Some channels of one sequence's rows, the last row first: each is overwritten only when no other
// still needs it.
void Decoder::convolve_rows(const StateMixer& mixer, const StepInput::State& of, int64_t first,
                            int size) {
  const int64_t channels = mixer.channels();
  const int past = mixer.kernel - 1;
  const bool is_alone = mixer.kind == StateMixer::convolution;
  const auto input = [&](int row) {
    return row_of(RowKind::projected, of.first_row + row) + first;
  };
  if (is_alone)
    for (int row = 0; row < of.num_rows; row++) {
      float* before = input(row);
      for (int i = 0; i < size; i++) before[i] *= before[2 * channels + i];
    }
  static const std::vector<float> zeros(channels_of_task);
  // The inputs of a token, of the sequence's rows or before them.
  const auto token = [&](int row) -> const float* {
    if (row >= 0) return input(row);
    if (of.source < 0) return zeros.data();
    return state_slot(mixer, of.source) + (past + row) * channels + first;
  };
  float* kept = state_slot(mixer, of.target) + first;
  for (int i = 0; i < past; i++)
    std::copy_n(token(of.num_rows - past + i), size, kept + i * channels);
  const float* taps = vectors_[static_cast<size_t>(mixer.taps)].data() + first;
  const float* bias =
      mixer.bias < 0 ? nullptr : vectors_[static_cast<size_t>(mixer.bias)].data() + first;
  const float* inputs[max_kernel];
  for (int row = of.num_rows - 1; row >= 0; row--) {
    for (int i = 0; i <= past; i++) inputs[i] = token(row - past + i);
    float* out = input(row);
    if (is_alone) out = row_of(RowKind::attention_output, of.first_row + row) + first;
    kernels_.convolve(inputs, taps, channels, mixer.kernel, bias, !is_alone, size, out);
    if (!is_alone) continue;
    const float* after = input(row) + channels;
    for (int i = 0; i < size; i++) out[i] *= after[i];
  }
}

void Decoder::recur(const Stage& stage) {
  Stopwatch watch(counters_.attention_seconds);
  const StateMixer& mixer = state_of(stage);
  if (mixer.kind == StateMixer::mamba_1) {
    const auto parts = static_cast<int>(mixer.num_convolve_tasks());
    return pool_.run(static_cast<int>(row_states_.size()) * parts, 1, [&](int task, int end, int) {
      for (; task < end; task++) {
        const int64_t first = int64_t{task % parts} * channels_of_task;
        const int64_t size = std::min<int64_t>(channels_of_task, mixer.value_dim - first);
        recur_values(stage, row_states_[static_cast<size_t>(task / parts)], first,
                     static_cast<int>(size));
      }
    });
  }
  const int count = static_cast<int>(row_states_.size()) * mixer.num_heads;
  pool_.run(count, 1, [&](int begin, int end, int) {
    for (int task = begin; task < end; task++)
      recur_rows(mixer, row_states_[static_cast<size_t>(task / mixer.num_heads)],
                 task % mixer.num_heads);
  });
}

// One head of one sequence's rows, in their order.
void Decoder::recur_rows(const StateMixer& mixer, const StepInput::State& of, int head) {
  thread_local std::vector<float> floats;
  const int64_t keys = mixer.key_dim, stride = mixer.value_stride();
  floats.assign(static_cast<size_t>(2 * keys + 2 * stride), 0.0f);
  float *key = floats.data(), *query = key + keys, *value = query + keys, *out = value + stride;
  const int64_t groups = mixer.group_size(), values = mixer.output_size();
  const bool is_delta = mixer.kind == StateMixer::delta_net;
  const int64_t query_at = is_delta ? 0 : values + groups, key_at = is_delta ? groups : values,
                value_at = is_delta ? 2 * groups : 0;
  const int64_t group = mixer.group_of(head) * keys, own = int64_t{head} * mixer.value_dim;
  const auto number = [&](int vector) {
    return vectors_[static_cast<size_t>(vector)][static_cast<size_t>(head)];
  };
  const int64_t at = mixer.convolved_floats() + head * mixer.head_floats();
  float* matrix = state_slot(mixer, of.target) + at;
  const float* from = matrix;
  if (of.source >= 0)
    from = state_slot(mixer, of.source) + at;
  else
    std::fill_n(matrix, mixer.head_floats(), 0.0f);
  // What one token leaves is read by a later step, after the states of all other layers.
  const bool streams = of.num_rows == 1 && of.source >= 0;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(keys)));
  for (int i = 0; i < of.num_rows; i++) {
    const float* row = row_of(RowKind::projected, of.first_row + i);
    const float* scores = row + mixer.channels();
    const double step = softplus(double{scores[head]} + number(mixer.dt));
    const double beta = is_delta ? sigmoid(scores[mixer.num_heads + head]) : step;
    const double decay = std::isnan(step) ? step : exp_of(number(mixer.a) * step);
    const float *own_key = row + key_at + group, *own_query = row + query_at + group;
    if (is_delta) {
      const auto size = static_cast<int>(keys);
      kernels_.make_unit(own_key, size, unit_epsilon, 1.0f, key);
      kernels_.make_unit(own_query, size, unit_epsilon, scale, query);
      own_key = key;
      own_query = query;
    }
    std::copy_n(row + value_at + own, mixer.value_dim, value);
    kernels_.recur({mixer.key_dim, stride, static_cast<float>(decay), static_cast<float>(beta),
                    is_delta, streams, own_key, own_query, value, from, matrix, out});
    from = matrix;
    if (mixer.d >= 0)
      for (int j = 0; j < mixer.value_dim; j++) out[j] += number(mixer.d) * value[j];
    std::copy_n(out, mixer.value_dim, row_of(RowKind::attention_output, of.first_row + i) + own);
  }
}

// Some values of one sequence's rows, in their order.
void Decoder::recur_values(const Stage& stage, const StepInput::State& of, int64_t first,
                           int size) {
  const StateMixer& mixer = state_of(stage);
  thread_local std::vector<float> floats;
  floats.assign(static_cast<size_t>(2 * mixer.key_dim + channels_of_task), 0.0f);
  float *key = floats.data(), *query = key + mixer.key_dim, *steps = query + mixer.key_dim;
  const auto vector = [&](int index) {
    return vectors_[static_cast<size_t>(index)].data() + first;
  };
  const int64_t at = mixer.convolved_floats() + first;
  float* matrix = state_slot(mixer, of.target) + at;
  const float* from = of.source >= 0 ? state_slot(mixer, of.source) + at : matrix;
  const int64_t padded = (size + 15) / 16 * 16;
  if (of.source < 0)
    for (int k = 0; k < mixer.key_dim; k++)
      std::fill_n(matrix + k * mixer.value_stride(), padded, 0.0f);
  const auto normed = [&](const Norm& norm, const float* x, float* out) {
    if (norm.kind == Norm::none) std::copy_n(x, mixer.key_dim, out);
    apply_norm(norm, x, mixer.key_dim, out);
  };
  for (int i = of.first_row; i < of.first_row + of.num_rows; i++) {
    const float* made = row_of(RowKind::latent, i) + mixer.step_rank;
    normed(stage.key_norm, made, key);
    normed(stage.query_norm, made + mixer.key_dim, query);
    const float* scores = row_of(RowKind::branch, i) + first;
    for (int j = 0; j < size; j++) steps[j] = static_cast<float>(softplus(scores[j]));
    kernels_.recur_each({mixer.key_dim, size, mixer.value_stride(), mixer.value_dim,
                         vector(mixer.a), vector(mixer.d), steps, key, query,
                         row_of(RowKind::projected, i) + first, from, matrix,
                         row_of(RowKind::attention_output, i) + first});
    from = matrix;
  }
}

void Decoder::gate_output(const Stage& stage) {
  Stopwatch watch(counters_.norm_and_quantise_seconds);
  const auto size = static_cast<int>(stage.gate_size);
  const int64_t each = stage.norm_size;
  pool_.run(num_rows_, 1, [&](int begin, int end, int) {
    for (int row = begin; row < end; row++) {
      float* x = row_of(RowKind::attention_output, row);
      const float* gate = row_of(RowKind::gated, row);
      const auto norm = [&](bool is_shared) {
        if (stage.norm.kind == Norm::none || is_shared != stage.norms_before_gate) return;
        for (int64_t i = 0; i < size; i += each)
          apply_norm(stage.norm, x + i, each, x + i, is_shared ? 0 : i);
      };
      norm(true);
      if (stage.has_sigmoid)
        kernels_.multiply_sigmoid(x, gate, size);
      else
        kernels_.gate(Gate::silu, nullptr, gate, x, size, x);
      norm(false);
    }
  });
}

}  // namespace quire
