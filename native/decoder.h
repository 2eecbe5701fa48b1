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
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "prefault.h"
#include "routing.h"
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
  int num_stacked = 1;      // matrices of this size one after another: experts
  int64_t bias_offset = 0;  // of this matrix's bias in its vector
};

// A routed feed-forward: each row uses a few experts.
struct Experts {
  Routing routing;
  int router;          // float matrix: a row for each expert, then one for the shared expert's gate
  int gate, up, down;  // stacked matrices; gate: -1 where experts have none
  Gate activation;
  bool weighs_input;                   // an expert's weight multiplies its input, not its output
  bool has_shared_gate;                // the shared expert's output is multiplied by a sigmoid
  int choice_bias = -1, factors = -1;  // vectors, or -1: see choose_experts
};

// The rows of floats that stages read and write: one for each token of the step.
enum class RowKind {
  hidden,
  projected,  // queries, keys and values
  attention_output,
  gated,         // what the feed-forward's gate leaves; heads of latent attention
  branch,        // what a half of a layer makes, before it is added to the hidden state
  latent,        // what latent attention's queries, keys and values are made of
  layer_inputs,  // the vectors of all layers' own embeddings
};
constexpr int num_row_kinds = 7;

struct Norm {
  enum Kind { none, rms, layer } kind = none;
  int weight = -1, bias = -1;  // indices of vectors, or -1
  float epsilon = 0.0f;
};

enum class NormSpan { head, each_head, projection };  // as quire.model.spec.NormSpan

// Queries are multiplied by 1 + factor * ln(1 + floor((position + offset) / length)).
struct PositionScale {
  double factor = 0.0;
  int64_t length = 0, offset = 0;  // a length of 0: none
};

// What a layer's rope_and_store and attend stages compute with.
struct LayerAttention {
  AttentionShape shape;  // of what the cache keeps; its sinks and slopes are set by add_layer
  int rope;              // index, or -1
  int sinks;             // index of a vector, or -1
  int kv_layer;          // whose keys and values it reads: a layer before it; -1: its own
  bool has_key_values;   // its values are what its keys are before norm and rope
  int group;             // whose block table it reads: all layers of a group see the same positions
  int slot;              // its place in a block, among the layers of its group; both are kv_layer's
};

// A layer's half that keeps a state of its sequence, as quire.model.states.StateMixer. A state is
// the convolution's inputs of the kernel - 1 tokens before, the oldest first; then for each head a
// matrix [key_dim][value_stride()].
struct StateMixer {
  static constexpr int channels_of_task = 512;
  // mamba_1: one head, whose values have decays of their own for each key.
  enum Kind { delta_net, mamba, convolution, mamba_1 } kind;
  int kernel, num_heads, num_groups;
  int key_dim;  // of a convolution alone 0
  int value_dim;
  bool is_tiled;  // head h uses group h % num_groups; else groups' heads follow each other
  int taps;       // a vector, [kernel][channels()]
  int bias;       // of the convolution: a vector, or -1
  // Vectors of a number for each head; -1: none. Of mamba_1: [key_dim][value_dim], -1, a number for
  // each value.
  int a, dt, d;
  int step_rank;       // of mamba_1: before keys and queries come so many numbers
  int64_t offset = 0;  // set by add_state: floats of a slot before this layer's

  int64_t group_size() const { return int64_t{num_groups} * key_dim; }
  int64_t output_size() const { return int64_t{num_heads} * value_dim; }
  int64_t channels() const {
    return kind == mamba_1 ? output_size() : 2 * group_size() + output_size();
  }
  int64_t value_stride() const { return (int64_t{value_dim} + 15) / 16 * 16; }
  int64_t convolved_floats() const { return ((kernel - 1) * channels() + 15) / 16 * 16; }
  int64_t head_floats() const { return key_dim * value_stride(); }
  int64_t floats() const { return convolved_floats() + num_heads * head_floats(); }
  // Of rows as they are projected: the convolution's inputs, then alpha and beta of each head; of a
  // convolution alone what multiplies its input, what multiplies its output, and its input.
  int64_t projected_size() const {
    if (kind == convolution) return 3 * channels();
    if (kind == mamba_1) return channels();
    return channels() + (kind == delta_net ? 2 : 1) * num_heads;
  }
  int64_t num_convolve_tasks() const {  // of the rows of one sequence
    return (channels() + channels_of_task - 1) / channels_of_task;
  }
  int group_of(int head) const {
    return is_tiled ? head % num_groups : head / (num_heads / num_groups);
  }
};

// The part of a block that one layer of each group has, as large as the largest of them.
struct CacheSlot {
  int64_t block_bytes = 0;
  int64_t offset = 0;  // of the first block: bytes of the cache
};

struct Stage {
  enum Kind {
    norm_and_quantise,  // rows of `input` for the next GEMM
    project,            // one or more matrices side by side into `output`
    rope_and_store,     // rotates queries and keys, stores keys and values in the KV cache
    attend,
    project_and_add,      // one matrix, times `scale`, added to `output`; of experts: shared
    gate_and_up,          // the feed-forward's gate and values, or its values alone
    add_branch,           // the branch after `norm`, times `scale`, added to the hidden state
    norm_branch,          // the branch after `norm`
    add_to_branch,        // `input` after `norm`, added to the branch
    scale_hidden,         // the hidden state times `scale`
    add_layer_embedding,  // norms layer_inputs by layer, adds rows of the second embedding
    latent_rope_and_store,
    route,               // chooses the experts of each row, and orders slots
    expert_gate_and_up,  // of the chosen experts
    expert_down,         // their sum: `branch` rows, which are added to `output` rows if others
    convolve,            // a state's convolution of `projected`; alone it makes attention_output
    recur,               // a state's heads: `projected` to attention_output
    gate_output          // attention_output times a function of `gated`, normed before or after
  } kind;
  RowKind input = RowKind::hidden, output = RowKind::projected;
  Norm norm;                  // norm_and_quantise, add_branch, add_layer_embedding
  std::vector<int> matrices;  // gate_and_up: gate and up, or up
  float scale = 1.0f;
  // norm_and_quantise, project: a matrix for each head. Of the input's heads, which divide it
  // evenly, each takes the first numbers; a head's output begins at a multiple of output_stride.
  bool is_by_head = false;
  int64_t output_stride = 0;
  // Set by add_stage: how many floats of the rows that it reads were written before it; of `latent`
  // where it is latent_rope_and_store.
  int64_t input_size = 0, latent_size = 0;
  int64_t gate_size = 0;  // gate_output, likewise: of attention_output
  // gate_and_up: groups or blocks where it quantises its result for the next GEMM itself
  ActivationFormat quantised = ActivationFormat::floats;
  Gate gate = Gate::silu;
  int gate_numbers = -1;  // gate_and_up: index of a vector, with xielu
  int layer_input = -1;   // gate_and_up: the layer whose input takes the place of up(x)
  int layer = 0;          // rope_and_store, attend
  Norm query_norm, key_norm, value_norm;  // rope_and_store
  NormSpan norm_span = NormSpan::head;    // of queries and keys
  bool norms_after_rope = false;
  PositionScale position_scale;
  int state = -1;                  // convolve, recur: index of a StateMixer
  int64_t norm_size = 0;           // gate_output: numbers that are normed together
  bool norms_before_gate = false;  // with one weight vector for all; else each has its own
  bool has_sigmoid = false;        // gate_output: else silu
  // Index of an Experts. project_and_add: rows are multiplied by the weights of its shared expert.
  int experts = -1;
};

struct DecoderShape {
  int64_t hidden_size, vocabulary_size;
  float embedding_scale;
  float logit_soft_cap;      // 0: none
  int64_t layer_input_size;  // of layers' own embeddings; 0: none
};

// The same shape; throws std::invalid_argument where a size is out of bounds.
const DecoderShape& checked(const DecoderShape& shape);

// The rows of a step. A sequence's rows follow each other and share its block tables.
struct StepInput {
  std::vector<int32_t> tokens;
  std::vector<std::vector<RowPosition>> positions;  // [group][row]
  std::vector<int> output_rows;  // rows whose final hidden state is wanted, ascending
  std::vector<std::pair<int32_t, int32_t>> copies;  // blocks: source, target
  // Rows of one sequence, and the slots of its state before and after them; a source of -1: zeros.
  struct State {
    int first_row, num_rows;
    int32_t source, target;
  };
  std::vector<State> states;  // in the order of the rows; empty where the model keeps none
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
  // Matrices of one size, one after another: experts. They are zeros until they are packed; a bias
  // has a part for each.
  int add_stack(const char* format, int num_stacked, int64_t out_size, int64_t in_size, float scale,
                int bias);
  // Packs `count` matrices of a stack from `first` on; `blocks` has the format of the stack.
  void pack_stacked(int matrix, const char* format, const uint8_t* blocks, int first, int count);
  int add_experts(const Experts& experts);
  int add_vector(const float* values, int64_t size);
  int add_rope(int dims, bool interleaved);
  // `slopes`: ALiBi's of each head; or empty.
  int add_layer(const LayerAttention& layer, std::vector<float> slopes);
  int add_state(const StateMixer& mixer);
  void add_stage(Stage stage);
  // `positions`: index of a matrix with a row for each position, which is added to a token's; or
  // -1.
  // `embedding_norm`: of a token's row; or none.
  void set_embedding_and_head(int embedding, const Norm& output_norm, int head, int positions,
                              const Norm& embedding_norm);
  // prefault_bytes: bytes of the cache that are faulted in ahead of use; low_priority: by a thread
  // of the lowest priority.
  void allocate_cache(int64_t num_blocks, bool is_int8, int64_t prefault_bytes, bool low_priority);
  void allocate_states(int64_t num_states);
  // A rope's tables of `size` numbers each, [num_positions][dims / 2].
  void set_rope(int rope, const float* cosines, const float* sines, int64_t size,
                int64_t num_positions);

  // ---- each step
  // Computes all rows up to the last layer's keys and values, and output rows to the end. Throws
  // Cancelled. The caller checks tokens, positions and blocks: see num_positions and num_blocks.
  void run(const StepInput& input);
  // Computes one layer alone of rows whose hidden states are given, [row][stride], and overwrites
  // them. The first layer takes the embedding instead, and copies blocks. Throws Cancelled.
  void run_layer(const StepInput& input, int layer, float* hidden, int64_t stride);
  // Whether a row's hidden state is finite, after run: the final one of an output row, else the one
  // before the last layer's attention.
  bool is_finite(int row) const;
  // The hidden state of one output row, after run.
  const float* hidden_state(int row) const {
    return row_of(RowKind::hidden, kept_index_[static_cast<size_t>(row)]);
  }
  // The same after the final norm.
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
  int64_t prefaulted_bytes() const { return static_cast<int64_t>(prefault_.prefaulted()); }
  int64_t cache_bytes() const;
  void read_row(int matrix, int64_t row, float* out) const;
  const Matrix& matrix(int index) const { return *matrices_.at(static_cast<size_t>(index)); }
  uint8_t* cache_block(int layer, int64_t block) const;
  static int64_t scratch_size();  // floats of a thread's GEMM results
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int64_t block_bytes(int layer) const;  // of one layer's keys and values
  int num_groups() const { return num_groups_; }
  int num_cache_slots() const;
  // No layer of the group sees earlier positions from this position on.
  int64_t first_seen(int group, int64_t position) const;
  int64_t num_blocks() const { return num_blocks_; }
  bool keeps_states() const { return !states_.empty(); }
  int64_t num_states() const { return num_states_; }
  int64_t state_bytes() const;    // of a slot
  int64_t num_positions() const;  // that all rope tables hold

 private:
  static constexpr size_t max_head_rows = 64;  // whose logits are in memory at once

  // Activations of all rows in the formats that the next GEMM takes.
  struct Activations {
    Buffer groups, blocks, residuals, block_residuals, scales, floats;
    int64_t group_stride = 0, block_stride = 0, float_stride = 0;
  };

  // Rows of floats, at most `width` of them each. `written`: how many the last stage that was added
  // writes there; 0: none.
  struct RowBuffer {
    Buffer data;
    int64_t width = 0, stride = 0, written = 0;
  };

  struct RopeTables {
    int dims;
    bool interleaved;
    std::vector<float> cosines, sines;
    int64_t num_positions = 0;
  };

  // The slots of one expert: [first, first + count).
  struct ExpertSlots {
    int expert, first, count;
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

  // The tasks of a step for all layers whose heads are alike.
  struct AttendPlan {
    AttentionShape shape;  // of the first of these layers
    std::vector<AttendTask> tasks;
    std::vector<MergeTask> merges;
  };

  void expect_vector(const char* what, int index, int64_t size) const;
  const Matrix& expect_matrix(const char* what, int index, int64_t out_size, int64_t in_size) const;
  void expect_norm(const char* what, const Norm& norm, int64_t size) const;
  void expect_added_to(RowKind rows) const;
  void expect_written(const char* what, RowKind rows, int64_t size) const;
  int64_t rows_of(int matrix) const;
  void check_stage(const Stage& stage) const;
  void check_quantise(const Stage& stage) const;
  void check_project(const Stage& stage) const;
  void check_by_head(const Stage& stage, int64_t in_size) const;
  void check_rope_and_store(const Stage& stage) const;
  void check_latent(const Stage& stage) const;
  void check_attend(const Stage& stage) const;
  void check_gate(const Stage& stage) const;
  void check_layer_embedding(const Stage& stage) const;
  void check_layer(const LayerAttention& layer) const;
  void check_state(const StateMixer& mixer) const;
  const StateMixer& state_of(const Stage& stage) const;
  void check_recur(const Stage& stage) const;
  void check_values(const StateMixer& mixer) const;
  void check_gate_output(const Stage& stage) const;
  void check_experts(const Experts& experts) const;
  void check_stack(const char* what, int index, int count, int64_t out_size, int64_t in_size) const;
  void check_routed(const Stage& stage) const;
  void check_shared(const Stage& stage) const;
  void check_ready(int64_t num_rows) const;
  void begin(const StepInput& input);
  void compute(const Stage& stage);
  void embed(const StepInput& input);
  void add_position(const RowPosition& row, float* state) const;
  void copy_blocks(const StepInput& input);
  void plan_attention();
  void plan_attention(AttendPlan& plan);
  void split_long_rows(AttendPlan& plan);
  void advance_prefault();
  void lay_out_cache_slots();
  int64_t lay_out_scales(int64_t num_blocks);
  const CacheSlot& cache_slot(int layer) const {
    return cache_slots_[static_cast<size_t>(layers_[static_cast<size_t>(layer)].slot)];
  }
  const std::vector<RowPosition>& positions_of(int layer) const {
    return row_positions_[static_cast<size_t>(layers_[static_cast<size_t>(layer)].group)];
  }
  void keep_output_rows(const std::vector<int>& output_rows);
  void norm_and_quantise(const Stage& stage);
  void norm_and_quantise_row(const float* x, int64_t size, const Norm& norm, int formats,
                             Activations& to, int row);
  // `offset`: of the norm's vectors.
  void apply_norm(const Norm& norm, const float* x, int64_t size, float* out,
                  int64_t offset = 0) const;
  void add_branch(const Stage& stage);
  void norm_branch(const Stage& stage);
  void add_to_branch(const Stage& stage);
  void scale_hidden(const Stage& stage);
  void add_layer_embedding(const Stage& stage);
  void project(const Stage& stage);
  void gemm_and_add(const Stage& stage, const Matrix& matrix, int first_panel, int num_panels,
                    float* results);
  void gate_and_up(const Stage& stage);
  void gate_outputs(const Stage& stage, int64_t output, int size, int first, int count, float* out,
                    int stride, float* ups) const;
  void store_gated(const Stage& stage, const float* x, int64_t output, int size, int token);
  void route(const Stage& stage);
  void score_experts(const Experts& experts);
  void order_slots(const Experts& experts);
  void gather_slots(const Experts& experts);
  void expert_gate_and_up(const Stage& stage);
  void gate_slots(const Experts& experts, size_t which, int64_t output, int size,
                  ActivationFormat made_as, float* scratch);
  void store_slot(ActivationFormat made_as, const float* x, int64_t output, int size, int slot);
  void quantise_slots(const Experts& experts);
  void expert_down(const Stage& stage);
  void add_expert(const Experts& experts, size_t which, int64_t first, int size, float* scratch);
  ActivationFormat gated_format(const Experts& experts) const;
  static std::vector<int> first_matrices(const Experts& experts);
  int64_t router_stride(const Experts& experts) const;
  void rope_and_store(const Stage& stage);
  void latent_rope_and_store(const Stage& stage);
  void turn(const Stage& stage, const Norm& norm, float* heads, int count, int position) const;
  void norm_heads(const Stage& stage, const Norm& norm, float* heads, int count) const;
  // `stride`: floats from head to head.
  void apply_rope(int layer, float* heads, int count, int64_t stride, int position) const;
  const float* normed_values(const Stage& stage, const float* key, const float* value) const;
  void attend(const Stage& stage);
  float* state_slot(const StateMixer& mixer, int32_t slot) const {
    return state_slots_.as<float>() + slot * state_floats_ + mixer.offset;
  }
  void convolve(const Stage& stage);
  void convolve_rows(const StateMixer& mixer, const StepInput::State& of, int64_t first, int size);
  void recur(const Stage& stage);
  void recur_rows(const StateMixer& mixer, const StepInput::State& of, int head);
  void recur_values(const Stage& stage, const StepInput::State& of, int64_t first, int size);
  void gate_output(const Stage& stage);
  void compute_logits(const int* rows, int count);
  // Panels [first_panel, +num_panels) of a matrix times rows [first, +count) into
  // out [count][stride]. `column`: of the activations, where the matrix's begin.
  void gemm(const Matrix& matrix, const Activations& from, int first_panel, int num_panels,
            int first, int count, float* out, int64_t out_stride, const uint8_t* next = nullptr,
            int64_t column = 0) const;
  void scale_and_add_bias(const Matrix& matrix, const Gemm& args, const float* token_scales) const;
  void reserve_rows(int num_rows);
  void reserve_slots(int num_rows);
  static void reserve_activations(Activations& to, int64_t num_rows, int64_t widest, int formats);
  int formats_for(const std::vector<int>& matrices) const;
  const RowBuffer& buffer(RowKind which) const { return rows_[static_cast<size_t>(which)]; }
  float* row_of(RowKind which, int64_t row) const {
    return buffer(which).data.as<float>() + row * buffer(which).stride;
  }
  void set_written(const Stage& stage);
  int64_t output_size(const Stage& stage) const;
  const AttentionShape& attention_shape(int layer) const {
    return layers_[static_cast<size_t>(layer)].shape;
  }
  bool owns_cache(int layer) const { return layers_[static_cast<size_t>(layer)].kv_layer < 0; }
  int64_t num_scales(int layer) const;  // of a block of int8 keys or values
  LayerCache layer_cache(int layer) const;

  DecoderShape shape_;
  const Kernels& kernels_;
  Pool pool_;
  Arena weights_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<RopeTables> ropes_;
  std::vector<LayerAttention> layers_;
  std::deque<std::vector<float>> slopes_;  // of layers that have them
  std::vector<size_t> plan_of_layer_;      // index into attend_plans_
  std::vector<Experts> experts_;
  std::vector<StateMixer> states_;
  std::vector<Stage> stages_;
  // The stage before which rows that nobody asked for are dropped: the last that looks at other
  // rows' keys and values, or the one after the last that carries a state from row to row.
  size_t drop_at_ = 0;
  std::vector<size_t> first_stages_;  // of each layer
  int embedding_ = -1, head_ = -1, positions_ = -1;
  Norm output_norm_, embedding_norm_;

  Buffer cache_, cache_scales_;
  Prefault prefault_;  // of cache_
  int64_t num_blocks_ = 0;
  std::vector<CacheSlot> cache_slots_;
  std::vector<int64_t> scale_offsets_;  // before a layer's first scale: floats of cache_scales_
  int num_groups_ = 1;
  bool is_int8_ = false;
  Buffer state_slots_;  // [slot][state_floats_]
  int64_t num_states_ = 0, state_floats_ = 0;

  int num_rows_ = 0, reserved_rows_ = 0;
  RowBuffer rows_[num_row_kinds];
  Buffer logits_, scratch_;
  Buffer attention_scratch_;  // [thread][attention_floats_]
  int64_t attention_floats_ = 0;
  Activations activations_[2];
  int current_ = 0;  // what the next GEMM reads; a gate reads it, writes the other, then swaps
  int64_t logits_stride_ = 0;
  int64_t widest_input_ = 0;         // of stages that quantise rows by head
  const int32_t* tokens_ = nullptr;  // of the step's rows, before any are dropped

  Buffer router_scores_;                         // [row][router_stride]
  Activations slots_[2];                         // the experts' inputs, and what their gates give
  std::vector<int> chosen_;                      // experts of each row [row][num_used]
  std::vector<float> expert_weights_;            // of these
  std::vector<ExpertSlots> expert_slots_;        // of each expert that has any, ascending
  std::vector<int> slot_rows_;                   // [slot]
  std::vector<float> slot_weights_;              // [slot]
  std::vector<float> shared_weights_;            // of the shared expert [row]
  std::vector<RoutingScratch> routing_scratch_;  // [thread]
  std::vector<std::vector<RowPosition>> row_positions_;  // [group][row]
  std::vector<StepInput::State> row_states_;
  std::vector<int> kept_index_;   // of each row of the step among those kept; -1: dropped
  std::vector<char> was_finite_;  // of dropped rows, when they were dropped
  std::vector<AttendPlan> attend_plans_;
  std::vector<float> split_partials_;
  std::atomic<bool> is_cancelled_{false};
  Counters counters_;  // written by the thread that runs steps

  mutable std::mutex published_mutex_;  // guards the two below
  Counters published_counters_;
  int64_t published_workspace_bytes_ = 0;
};

}  // namespace quire
