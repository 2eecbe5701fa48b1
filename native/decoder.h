// Decoder: a model compiled to a flat list of stages, and the step that runs them over a batch.
//
// A row is one token at one position. Each stage is a set of independent tasks that the pool hands
// out; a barrier stands between stages. What is computed for a row depends on that row and on its
// sequence's keys and values alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "sizes.h"
#include "prefault.h"

namespace quire {

// What a matrix is multiplied with.
enum class Form { groups, blocks, row, floats };
Form form_of(Format format);  // but for those that take whole rows where asked

struct Matrix {
  Format format;
  Form form;
  int64_t num_rows, in_size, group_bytes;
  bool is_refined;  // multiplied with what rounding left of the activations, too
  float scale;      // of every product
  int bias;         // index of a vector, or -1
  const uint8_t* data;
  int64_t num_bytes;
};

enum class Place { state, mixed, gated };  // what a stage reads

struct Stage {
  enum Kind { prepare, project, add, gate, turn, attend } kind;
  Place input = Place::state;
  int norm = -1;                  // prepare: index of a vector, or -1
  std::vector<int> matrices;      // project: side by side; add: one; gate: the gate's and the up's
  Form quantised = Form::floats;  // gate: groups or blocks, straight for the next product
  int layer = 0;
  int query_norm = -1, key_norm = -1;  // turn
};

struct DecoderShape {
  int64_t hidden_size, ffn_size, vocabulary_size;
  int num_layers, num_heads, num_kv_heads, head_dim;
  int rope_dims;
  bool rope_interleaved;
  float norm_epsilon;
  int gate;                                  // Gate
  float attention_soft_cap, logit_soft_cap;  // 0: none
  std::vector<int> windows;                  // per layer; 0: all
};

// The same shape; std::invalid_argument where a size is out of bounds or does not fit the others.
const DecoderShape& checked(const DecoderShape& shape);

// The rows of a step. A sequence's rows follow each other and share one block table.
struct StepInput {
  std::vector<int32_t> tokens;
  std::vector<RowPlace> places;
  std::vector<int> wanted;  // rows whose final state is asked for, ascending
  std::vector<std::pair<int32_t, int32_t>> copies;  // blocks: source, target
};

struct Counters {  // since the decoder was made
  int64_t steps = 0, rows = 0, multiplications = 0, weight_bytes = 0, cache_bytes = 0;
  double seconds = 0;  // of all, and of these parts:
  double prepare_seconds = 0, product_seconds = 0, turn_seconds = 0, attention_seconds = 0;
  double head_seconds = 0, use_seconds = 0;  // logits, and what is made of them
};

class Cancelled {};

// Adds the time it lives to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, const Kernels& kernels, int num_threads, bool may_spin);

  // ---- made once; what does not fit the shape or what was given before throws
  // std::invalid_argument, what cannot be held std::length_error or std::bad_alloc
  int add_matrix(const char* format, const uint8_t* blocks, int64_t num_rows, int64_t in_size,
                 bool whole_rows, bool refined, float scale, int bias);
  int add_vector(const float* values, int64_t size);
  void add_stage(Stage stage);
  void set_ends(int embedding, int output_norm, int head);
  // touched_ahead: bytes of it that the system gives before they are used; gives_way: to
  // whatever else there is to do.
  void allocate_cache(int64_t num_blocks, bool is_int8, int64_t touched_ahead, bool gives_way);
  // Tables of `size` numbers each, [num_positions][rope_dims / 2].
  void set_rope(const float* cosines, const float* sines, int64_t size, int64_t num_positions);

  // ---- each step
  // Takes all rows to the keys and values of the last layer, and those that are wanted through it.
  // Throws Cancelled.
  // Tokens, positions and blocks are the caller's to check: see num_positions and num_blocks.
  void run(const StepInput& input);
  // Whether a row's state is finite, after run: the final one, or the one before the last layer.
  bool is_finite(int row) const;
  // The final norm of one wanted row, after run.
  void final_state(int row, float* out) const;
  // Logits of wanted rows, after run: calls use(i, logits of rows[i], thread) for each; in
  // parallel.
  template <class Use>
  void logits(const std::vector<int>& rows, Use&& use) {
    for (size_t begin = 0; begin < rows.size(); begin += max_head_rows) {
      const size_t end = std::min(rows.size(), begin + max_head_rows);
      compute_logits(rows.data() + begin, static_cast<int>(end - begin));
      Stopwatch watch(counters_.use_seconds);
      pool_.run(static_cast<int>(end - begin), 1, [&](int first, int last, int thread) {
        for (int i = first; i < last; i++)
          use(static_cast<int>(begin) + i, logits_.as<float>() + i * logits_stride_, thread);
      });
    }
  }
  // From any thread: the step that runs, or the next one, stops at its next layer.
  void set_cancelled(bool is_cancelled) { is_cancelled_ = is_cancelled; }

  Pool& pool() { return pool_; }
  const DecoderShape& shape() const { return shape_; }
  const Kernels& kernels() const { return kernels_; }
  const Counters& counters() const { return counters_; }
  int64_t weight_bytes() const;
  void stop_touching() { touching_.stop(); }
  int64_t touched_bytes() const {
    return static_cast<int64_t>(touching_.touched()) * shape_.num_layers;
  }
  int64_t cache_bytes() const;
  int64_t workspace_bytes() const;
  void read_row(int matrix, int64_t row, float* out) const;
  const Matrix& matrix(int index) const { return *matrices_.at(static_cast<size_t>(index)); }
  uint8_t* cache_block(int layer, int64_t block) const;
  int64_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_positions() const { return num_positions_; }  // that rope tables hold

 private:
  static constexpr size_t max_head_rows = 64;  // whose logits are held at once

  // Activations of all rows in the forms that the next product takes.
  struct Activations {
    Buffer groups, blocks, residuals, block_residuals, scales, floats;
    int64_t group_stride = 0, block_stride = 0, float_stride = 0;
  };

  // Rows of one sequence that are attended together; or, where num_tiles is not 0, a part of one
  // row's context, whose result goes to `part` of attend_parts_.
  struct AttendTask {
    int first_row, num_rows, kv_head;
    int64_t cost;
    int first_tile, num_tiles;
    int64_t part;  // in floats
  };

  // A row and kv head whose parts are put together.
  struct MergeTask {
    int row, kv_head, num_tiles;
    int64_t part;
  };

  void expect_vector(const char* what, int index, int64_t size) const;
  const Matrix& expect_matrix(const char* what, int index, int64_t num_rows, int64_t in_size) const;
  void check_stage(const Stage& stage) const;
  void check_ends(int embedding, int output_norm, int head) const;
  void check_ready(int64_t num_rows) const;
  void compute(const Stage& stage);
  void embed(const StepInput& input);
  void copy_blocks(const StepInput& input);
  void plan_attention();
  void split_long_rows();
  void touch_ahead();
  void keep_wanted(const std::vector<int>& wanted);
  void prepare(const Stage& stage);
  void prepare_row(const float* x, int64_t size, int norm, int forms, Activations& to, int row);
  void project(const Stage& stage);
  void gate(const Stage& stage);
  void gate_part(const Matrix& gate, const Matrix& up, int64_t row, int size, int first, int count,
                 float* out, int stride, float* ups) const;
  void put_gated(const Stage& stage, const float* x, int64_t row, int size, int column);
  void turn(const Stage& stage);
  void attend(const Stage& stage);
  void compute_logits(const int* rows, int count);
  // Rows [first_group, +groups) of a matrix times rows [first, +count) into out [count][stride].
  void multiply(const Matrix& matrix, const Activations& from, int first_group, int num_groups,
                int first, int count, float* out, int64_t out_stride) const;
  static int64_t scratch_size();  // floats a thread
  void make_room(int num_rows);
  int forms_of(const std::vector<int>& matrices) const;
  float* place(Place which) const;
  int64_t size_of(Place which) const;
  int64_t projected_size() const {  // queries, keys and values of a row
    return int64_t{shape_.num_heads + 2 * shape_.num_kv_heads} * shape_.head_dim;
  }
  LayerCache layer_cache(int layer) const;
  AttentionShape attention_shape(int layer) const;

  DecoderShape shape_;
  const Kernels& kernels_;
  Pool pool_;
  Arena weights_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Stage> stages_;
  int embedding_ = -1, output_norm_ = -1, head_ = -1;

  Buffer cache_, cache_scales_;
  TouchAhead touching_;  // of the cache
  int64_t num_blocks_ = 0, block_bytes_ = 0;
  bool is_int8_ = false;
  std::vector<float> cosines_, sines_;
  int64_t num_positions_ = 0;

  int num_rows_ = 0, room_ = 0;
  Buffer state_, projected_, mixed_, gated_, logits_, scratch_;
  const Buffer attention_scratch_;  // [thread][attention_workspace]
  Activations activations_[2];
  int current_ = 0;  // of activations_
  int64_t projected_stride_ = 0, logits_stride_ = 0;
  std::vector<RowPlace> places_;
  std::vector<int> kept_at_;      // where each row of the step is now; -1 where it was left out
  std::vector<char> was_finite_;  // of the rows that were left out
  std::vector<AttendTask> attend_tasks_;
  std::vector<MergeTask> merge_tasks_;
  std::vector<float> attend_parts_;
  std::atomic<bool> is_cancelled_{false};
  Counters counters_;
};

}  // namespace quire
