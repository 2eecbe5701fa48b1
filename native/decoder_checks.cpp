// What a decoder is checked for while it is made: whoever gives its sizes, indices and stages, no
// step reads or writes outside of what was made for it.
#include <algorithm>

#include "decoder.h"

namespace quire {
namespace {

void expect_number(const char* name, float value, float high) {
  if (!(value >= 0.0f && value <= high))
    throw std::invalid_argument(std::string(name) + " must be a number from 0 to " +
                                std::to_string(high) + ", got " + std::to_string(value));
}

constexpr float most_cap = 3e38f;  // a finite number

}  // namespace

const DecoderShape& checked(const DecoderShape& shape) {
  expect_within("hidden_size", shape.hidden_size, 1, most_hidden);
  expect_within("ffn_size", shape.ffn_size, 1, most_wide);
  expect_within("vocabulary_size", shape.vocabulary_size, 1, most_vocabulary);
  expect_within("num_layers", shape.num_layers, 1, most_layers);
  expect_within("num_heads", shape.num_heads, 1, most_heads);
  expect_within("num_kv_heads", shape.num_kv_heads, 1, most_heads);
  expect_within("head_dim", shape.head_dim, 1, most_head_dim);
  expect_within("num_heads * head_dim", int64_t{shape.num_heads} * shape.head_dim, 1, most_wide);
  expect(shape.num_heads % shape.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  expect_within("rope_dims", shape.rope_dims, 2, shape.head_dim);
  expect(shape.rope_dims % 2 == 0, "rope_dims must be even");
  expect_within("gate", shape.gate, 0, static_cast<int>(Gate::relu2));
  expect_number("norm_epsilon", shape.norm_epsilon, 1.0f);
  expect_number("attention_soft_cap", shape.attention_soft_cap, most_cap);
  expect_number("logit_soft_cap", shape.logit_soft_cap, most_cap);
  expect(static_cast<int64_t>(shape.windows.size()) == shape.num_layers,
         "windows must have one number for each layer");
  for (const int window : shape.windows) expect_within("a window", window, 0, most_positions);
  return shape;
}

void Decoder::expect_vector(const char* what, int index, int64_t size) const {
  expect_within(what, index, 0, static_cast<int64_t>(vectors_.size()) - 1);
  const auto found = static_cast<int64_t>(vectors_[static_cast<size_t>(index)].size());
  expect_within((std::string("the size of ") + what).c_str(), found, size, size);
}

const Matrix& Decoder::expect_matrix(const char* what, int index, int64_t num_rows,
                                     int64_t in_size) const {
  expect_within(what, index, 0, static_cast<int64_t>(matrices_.size()) - 1);
  const Matrix& found = *matrices_[static_cast<size_t>(index)];
  expect_within((std::string("the rows of ") + what).c_str(), found.num_rows, num_rows, num_rows);
  expect_within((std::string("the columns of ") + what).c_str(), found.in_size, in_size, in_size);
  return found;
}

void Decoder::check_ends(int embedding, int output_norm, int head) const {
  expect_matrix("the embedding", embedding, shape_.vocabulary_size, shape_.hidden_size);
  expect_matrix("the head", head, shape_.vocabulary_size, shape_.hidden_size);
  expect_vector("the output norm", output_norm, shape_.hidden_size);
}

// A stage multiplies what the last `prepare` or quantising gate left; stages of another order would
// read activations of another size, though never outside of their buffers.
void Decoder::check_stage(const Stage& stage) const {
  const int64_t hidden = shape_.hidden_size, ffn = shape_.ffn_size;
  const auto any_rows = [&](int index) {
    expect_within("a matrix", index, 0, static_cast<int64_t>(matrices_.size()) - 1);
    return matrices_[static_cast<size_t>(index)]->num_rows;
  };
  switch (stage.kind) {
    case Stage::prepare:
      expect(!stage.matrices.empty(), "a stage prepares rows for at least one matrix");
      for (const int index : stage.matrices)
        expect_matrix("a matrix", index, any_rows(index), size_of(stage.input));
      if (stage.norm >= 0) expect_vector("a norm", stage.norm, size_of(stage.input));
      return;
    case Stage::project: {
      expect(!stage.matrices.empty(), "a stage projects with at least one matrix");
      int64_t projected = 0;
      for (const int index : stage.matrices) {
        expect_matrix("a projection", index, any_rows(index), hidden);
        projected += any_rows(index);
      }
      expect_within("all rows of a projection", projected, projected_size(), projected_size());
      return;
    }
    case Stage::add: {
      expect(stage.matrices.size() == 1, "a stage adds the product of one matrix");
      const int index = stage.matrices[0];
      any_rows(index);
      expect_matrix("an output", index, hidden, matrices_[static_cast<size_t>(index)]->in_size);
      return;
    }
    case Stage::gate: {
      expect(stage.matrices.size() == 2, "a gate has two matrices");
      expect_matrix("a gate", stage.matrices[0], ffn, hidden);
      expect_matrix("an up projection", stage.matrices[1], ffn, hidden);
      expect(stage.quantised != Form::row, "a gate does not see whole rows");
      if (stage.quantised == Form::floats) return;
      // Which is what makes room for what the gate writes.
      const bool is_read = std::any_of(matrices_.begin(), matrices_.end(), [&](const auto& m) {
        return m->in_size == ffn && m->form == stage.quantised;
      });
      expect(is_read, "no matrix takes what a gate is to write");
      return;
    }
    case Stage::turn:
      expect_within("a layer", stage.layer, 0, shape_.num_layers - 1);
      if (stage.query_norm >= 0) expect_vector("a query norm", stage.query_norm, shape_.head_dim);
      if (stage.key_norm >= 0) expect_vector("a key norm", stage.key_norm, shape_.head_dim);
      return;
    case Stage::attend:
      expect_within("a layer", stage.layer, 0, shape_.num_layers - 1);
      for (const Stage& other : stages_)  // after the last layer's, rows have left the step
        expect(other.kind != Stage::attend || other.layer < stage.layer,
               "layers attend once each, in ascending order");
      return;
  }
}

void Decoder::check_ready(int64_t num_rows) const {
  expect(head_ >= 0, "the decoder has no head yet");
  expect(num_blocks_ > 0, "the decoder has no cache yet");
  expect_within("the rows of a step", num_rows, 0, most_step_rows);
  expect_within("the rows of a step times kv heads", num_rows * shape_.num_kv_heads, 0, INT32_MAX);
}

}  // namespace quire
