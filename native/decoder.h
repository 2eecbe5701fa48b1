// Decoder: a model lowered to a flat list of stages, and the step that runs them over a batch.
//
// A row is one token at one position. Each stage is a set of independent tasks that the pool
// distributes; there is a barrier between stages. A row's values depend on that row and on its
// sequence's KV cache alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "prefault.h"
#include "sizes.h"

namespace quire {

// How the activations of a GEMM are stored. per_token: ActivationGroups with one scale per token.
enum class ActivationFormat { groups, blocks, per_token, floats };
ActivationFormat activation_format_of(Format format);  // per_token is the caller's choice

struct Matrix {
  Format format;
  ActivationFormat activations;
  int64_t out_size, in_size, panel_bytes;
  bool has_residual_pass;  // a second GEMM with the rounding errors of the activations
  bool has_unit_scales;    // ternary: all scales but `scale` are 1, sums are exact integers
  float scale;             // of every result
  int bias;                // index of a vector, or -1
  const uint8_t* data;
  int64_t num_bytes;
};

enum class StageInput { hidden, attention_output, gated };  // the rows that a stage quantises

struct Stage {
  enum Kind {
    norm_and_quantise,  // rows of `input` for the next GEMM
    project_qkv,        // queries, keys and values
    rope_and_store,     // rotates queries and keys, stores keys and values in the KV cache
    attend,
    project_and_add,  // attention output or feed-forward down, added to the hidden state
    gate_and_up       // the gated feed-forward
  } kind;
  StageInput input = StageInput::hidden;
  int norm = -1;              // norm_and_quantise: index of a vector, or -1
  std::vector<int> matrices;  // project_qkv: three, side by side; gate_and_up: gate, up; else one
  // gate_and_up: groups or blocks where it quantises its result for the next GEMM itself
  ActivationFormat quantised = ActivationFormat::floats;
  int layer = 0;
  int query_norm = -1, key_norm = -1;  // rope_and_store
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

// The same shape; throws std::invalid_argument where a size is out of bounds or inconsistent.
const DecoderShape& checked(const DecoderShape& shape);

// The rows of a step. A sequence's rows follow each other and share one block table.
struct StepInput {
  std::vector<int32_t> tokens;
  std::vector<RowPosition> positions;
  std::vector<int> output_rows;  // rows whose final hidden state is wanted, ascending
  std::vector<std::pair<int32_t, int32_t>> copies;  // blocks: source, target
};

struct Counters {  // since the decoder was made
  int64_t steps = 0, rows = 0, multiplications = 0, weight_bytes = 0;
  double seconds = 0;  // in total; the stages of it:
  double norm_and_quantise_seconds = 0, gemm_seconds = 0, rope_and_store_seconds = 0,
         attention_seconds = 0;
  double head_seconds = 0, sampling_seconds = 0;  // logits; sampling and scoring
};

class Cancelled {};

// Adds the time of its scope to a total.
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

  // ---- construction; throws std::invalid_argument where an argument does not fit the shape or
  // earlier arguments, std::length_error or std::bad_alloc where memory does not suffice
  int add_matrix(const char* format, const uint8_t* blocks, int64_t out_size, int64_t in_size,
                 bool per_token_scale, bool residual_pass, float scale, int bias);
  int add_vector(const float* values, int64_t size);
  void add_stage(Stage stage);
  void set_embedding_and_head(int embedding, int output_norm, int head);
  // prefault_bytes: bytes of the cache that are faulted in ahead of use; low_priority: by a thread
  // of the lowest priority.
  void allocate_cache(int64_t num_blocks, bool is_int8, int64_t prefault_bytes, bool low_priority);
  // Tables of `size` numbers each, [num_positions][rope_dims / 2].
  void set_rope(const float* cosines, const float* sines, int64_t size, int64_t num_positions);

  // ---- each step
  // Computes all rows up to the last layer's keys and values, and output rows to the end. Throws
  // Cancelled. The caller checks tokens, positions and blocks: see num_positions and num_blocks.
  void run(const StepInput& input);
  // Whether a row's hidden state is finite, after run: the final one of an output row, else the one
  // before the last layer's attention.
  bool is_finite(int row) const;
  // The hidden state of one output row after the final norm, after run.
  void final_state(int row, float* out) const;
  // Logits of output rows, after run: calls use(i, logits of rows[i], thread) for each, in
  // parallel.
  template <class Use>
  void logits(const std::vector<int>& rows, Use&& use) {
    for (size_t begin = 0; begin < rows.size(); begin += max_head_rows) {
      const size_t end = std::min(rows.size(), begin + max_head_rows);
      compute_logits(rows.data() + begin, static_cast<int>(end - begin));
      Stopwatch watch(counters_.sampling_seconds);
      pool_.run(static_cast<int>(end - begin), 1, [&](int first, int last, int thread) {
        for (int i = first; i < last; i++)
          use(static_cast<int>(begin) + i, logits_.as<float>() + i * logits_stride_, thread);
      });
    }
  }
  // From any thread: the step that runs, or the next one, throws Cancelled before its next stage.
  void set_cancelled(bool is_cancelled) { is_cancelled_ = is_cancelled; }

  // ---- from any thread: as of the last publish(), never of a step that runs
  void publish();  // at the end of a step, and after construction
  Counters counters() const;
  int64_t workspace_bytes() const;

  Pool& pool() { return pool_; }
  const DecoderShape& shape() const { return shape_; }
  const Kernels& kernels() const { return kernels_; }
  int64_t weight_bytes() const;
  void stop_prefault() { prefault_.stop(); }
  int64_t prefaulted_bytes() const {
    return static_cast<int64_t>(prefault_.prefaulted()) * shape_.num_layers;
  }
  int64_t cache_bytes() const;
  void read_row(int matrix, int64_t row, float* out) const;
  const Matrix& matrix(int index) const { return *matrices_.at(static_cast<size_t>(index)); }
  uint8_t* cache_block(int layer, int64_t block) const;
  static int64_t scratch_size();  // floats of a thread's GEMM results
  int64_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_positions() const { return num_positions_; }  // that the rope tables hold

 private:
  static constexpr size_t max_head_rows = 64;  // whose logits are in memory at once

  // Activations of all rows in the formats that the next GEMM takes.
  struct Activations {
    Buffer groups, blocks, residuals, block_residuals, scales, floats;
    int64_t group_stride = 0, block_stride = 0, float_stride = 0;
  };

  // Rows of one sequence that are attended together; or, where num_tiles is not 0, a split of one
  // row's context, whose result goes to `partial` of split_partials_.
  struct AttendTask {
    int first_row, num_rows, kv_head;
    int64_t cost;
    int first_tile, num_tiles;
    int64_t partial;  // offset in floats
  };

  // A row and kv head whose splits are merged.
  struct MergeTask {
    int row, kv_head, num_tiles;
    int64_t partial;
  };

  void expect_vector(const char* what, int index, int64_t size) const;
  const Matrix& expect_matrix(const char* what, int index, int64_t out_size, int64_t in_size) const;
  int64_t rows_of(int matrix) const;
  void check_stage(const Stage& stage) const;
  void check_quantise(const Stage& stage) const;
  void check_qkv(const Stage& stage) const;
  void check_gate(const Stage& stage) const;
  void check_embedding_and_head(int embedding, int output_norm, int head) const;
  void check_ready(int64_t num_rows) const;
  void compute(const Stage& stage);
  void embed(const StepInput& input);
  void copy_blocks(const StepInput& input);
  void plan_attention();
  void split_long_rows();
  void advance_prefault();
  void keep_output_rows(const std::vector<int>& output_rows);
  void norm_and_quantise(const Stage& stage);
  void norm_and_quantise_row(const float* x, int64_t size, int norm, int formats, Activations& to,
                             int row);
  void project(const Stage& stage);
  void gemm_and_add(const Matrix& matrix, int first_panel, int num_panels, float* results);
  void gate_and_up(const Stage& stage);
  void gate_outputs(const Matrix& gate, const Matrix& up, int64_t output, int size, int first,
                    int count, float* out, int stride, float* ups) const;
  void store_gated(const Stage& stage, const float* x, int64_t output, int size, int token);
  void rope_and_store(const Stage& stage);
  void attend(const Stage& stage);
  void compute_logits(const int* rows, int count);
  // Panels [first_panel, +num_panels) of a matrix times rows [first, +count) into
  // out [count][stride].
  void gemm(const Matrix& matrix, const Activations& from, int first_panel, int num_panels,
            int first, int count, float* out, int64_t out_stride) const;
  void scale_and_add_bias(const Matrix& matrix, const Gemm& args, const float* token_scales) const;
  void reserve_rows(int num_rows);
  int formats_for(const std::vector<int>& matrices) const;
  float* input_rows(StageInput which) const;
  int64_t input_size(StageInput which) const;
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
  Prefault prefault_;  // of cache_
  int64_t num_blocks_ = 0, block_bytes_ = 0;
  bool is_int8_ = false;
  std::vector<float> cosines_, sines_;
  int64_t num_positions_ = 0;

  int num_rows_ = 0, reserved_rows_ = 0;
  Buffer hidden_, projected_, attention_output_, gated_, logits_, scratch_;
  const Buffer attention_scratch_;  // [thread][attention_workspace]
  Activations activations_[2];
  int current_ = 0;  // what the next GEMM reads; a gate reads it, writes the other, then swaps
  int64_t projected_stride_ = 0, logits_stride_ = 0;
  std::vector<RowPosition> row_positions_;
  std::vector<int> kept_index_;   // of each row of the step among those kept; -1: dropped
  std::vector<char> was_finite_;  // of dropped rows, when they were dropped
  std::vector<AttendTask> attend_tasks_;
  std::vector<MergeTask> merge_tasks_;
  std::vector<float> split_partials_;
  std::atomic<bool> is_cancelled_{false};
  Counters counters_;  // written by the thread that runs steps

  mutable std::mutex published_mutex_;  // guards the two below
  Counters published_counters_;
  int64_t published_workspace_bytes_ = 0;
};

}  // namespace quire
