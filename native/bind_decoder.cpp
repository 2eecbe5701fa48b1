// Bindings of the decoder: how Python builds one and runs its steps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <memory>
#include <string>

#include "bindings.h"
#include "pack.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class Value>
using Array = nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// ---- quire.core.plan: the fields of a row

// Where the fields that native code reads are in a SequencePlan, which is a named tuple.
struct PlanLayout {
  PyObject* type = nullptr;  // SequencePlan; never freed
  size_t start = 0, tokens = 0, block_table = 0, other_tables = 0, states = 0, want = 0,
         prompt_targets = 0;
};

struct PlanField {
  const char* name;
  size_t PlanLayout::* index;  // null: read in Python alone
};

// Every field of SequencePlan is listed here, in any order: bind_plan_types refuses others.
constexpr PlanField plan_fields[] = {
    {"start", &PlanLayout::start},
    {"tokens", &PlanLayout::tokens},
    {"block_table", &PlanLayout::block_table},
    {"other_tables", &PlanLayout::other_tables},
    {"states", &PlanLayout::states},
    {"want", &PlanLayout::want},
    {"prompt_targets", &PlanLayout::prompt_targets},
    {"sequence_id", nullptr},
    {"follows", nullptr},  // resolved before the step
    {"sampling", nullptr},
    {"completion_position", nullptr},
    {"history", nullptr},
    {"allowed", nullptr},
};
const char* const want_names[] = {"NOTHING", "SAMPLE", "LOGITS", "POOLED"};  // as Want
const char* const logprob_fields[] = {"token", "logprob", "rank", "top"};    // as logprob_to_python

PlanLayout layout;

const char* const how_to_go_on =
    ": change native/bind_decoder.cpp with quire/core/plan.py, and run `make native`";

[[noreturn]] void refuse(const std::string& what) {
  throw nb::type_error((what + how_to_go_on).c_str());
}

PlanLayout layout_of(nb::handle type) {
  PlanLayout found;
  size_t count = 0;
  for (const nb::handle item : nb::cast<nb::tuple>(type.attr("_fields"))) {
    const std::string name = nb::cast<std::string>(item);
    const PlanField* known = nullptr;
    for (const PlanField& field : plan_fields)
      if (name == field.name) known = &field;
    if (!known) refuse("native code does not know the field \"" + name + "\" of a row");
    if (known->index) found.*(known->index) = count;
    count++;
  }
  if (count != std::size(plan_fields))
    refuse("native code knows " + std::to_string(std::size(plan_fields)) +
           " fields of a row, but it has " + std::to_string(count));
  found.type = type.ptr();
  return found;
}

// Learns the layout of rows by name. Throws TypeError where the two sides do not match.
void bind_plan_types(nb::handle sequence_plan, nb::handle want, nb::handle token_logprob) {
  const PlanLayout found = layout_of(sequence_plan);
  if (nb::len(want) != std::size(want_names)) refuse("native code knows another Want");
  for (size_t i = 0; i < std::size(want_names); i++)
    if (!nb::hasattr(want, want_names[i]) || nb::cast<size_t>(want.attr(want_names[i])) != i)
      refuse(std::string("native code knows another Want.") + want_names[i]);
  const nb::tuple fields = nb::cast<nb::tuple>(token_logprob.attr("_fields"));
  bool is_known = fields.size() == std::size(logprob_fields);
  for (size_t i = 0; is_known && i < fields.size(); i++)
    is_known = nb::cast<std::string>(fields[i]) == logprob_fields[i];
  if (!is_known) refuse("native code knows other fields of TokenLogprob");
  Py_INCREF(found.type);
  layout = found;
}

// ---- rows from Python

// What does not fit becomes -1, which is no token and no block: a fault of that sequence alone.
template <class Value>
std::vector<Value> integers(nb::handle sequence) {
  const nb::tuple items = nb::borrow<nb::tuple>(sequence);
  std::vector<Value> values;
  values.reserve(items.size());
  for (const nb::handle item : items) {
    Value value;
    values.push_back(nb::try_cast<Value>(item, value) ? value : Value{-1});
  }
  return values;
}

// The name of a field that is not of its type; nullptr: none.
const char* mistyped_field(const nb::tuple& fields) {
  for (const PlanField& field : plan_fields) {
    if (!field.index) continue;
    const nb::object value = fields[layout.*(field.index)];
    bool fits;
    int64_t start;
    int want;
    if (field.index == &PlanLayout::start)
      fits = nb::try_cast<int64_t>(value, start);
    else if (field.index == &PlanLayout::want)
      fits = nb::try_cast<int>(value, want) && want >= 0 && want <= static_cast<int>(Want::pooled);
    else
      fits = nb::isinstance<nb::tuple>(value);
    if (fits && field.index == &PlanLayout::other_tables)
      for (const nb::handle table : nb::borrow<nb::tuple>(value))
        fits = fits && nb::isinstance<nb::tuple>(table);
    if (!fits) return field.name;
  }
  return nullptr;
}

// `request`: the OwnedRequest of a sequence that samples; the caller's list keeps it alive.
SequencePlan read_plan(nb::handle row, nb::handle request, nb::handle num_target_logprobs) {
  SequencePlan plan;
  if (!layout.type || !row.type().is(layout.type))
    throw nb::type_error("a row must be a SequencePlan, of the type given to bind_plan_types");
  const nb::tuple fields = nb::borrow<nb::tuple>(row);
  if (const char* name = mistyped_field(fields)) {
    plan.fault = std::string("the plan's ") + name + " is not of its type";
    return plan;
  }
  plan.start = nb::cast<int64_t>(fields[layout.start]);
  plan.tokens = integers<int32_t>(fields[layout.tokens]);
  plan.block_tables.push_back(integers<int32_t>(fields[layout.block_table]));
  for (const nb::handle table : nb::borrow<nb::tuple>(fields[layout.other_tables]))
    plan.block_tables.push_back(integers<int32_t>(table));
  plan.states = integers<int32_t>(fields[layout.states]);
  plan.want = static_cast<Want>(nb::cast<int>(fields[layout.want]));
  if (!request.is_none()) plan.request = nb::cast<const OwnedRequest&>(request).view();
  plan.targets = integers<int64_t>(fields[layout.prompt_targets]);
  plan.num_target_logprobs = nb::cast<int>(num_target_logprobs);
  return plan;
}

std::pair<int32_t, int32_t> read_copy(nb::handle copy) {
  int32_t source, target;
  if (!nb::isinstance<nb::tuple>(copy) || nb::len(copy) != 2 ||
      !nb::try_cast<int32_t>(copy[0], source) || !nb::try_cast<int32_t>(copy[1], target))
    throw nb::value_error("a block copy must be a source and a target");
  return {source, target};
}

std::vector<std::pair<int32_t, int32_t>> read_copies(const nb::tuple& copies) {
  std::vector<std::pair<int32_t, int32_t>> found;
  for (const nb::handle copy : copies) found.push_back(read_copy(copy));
  return found;
}

// Plans whose rows all get hidden states, whatever they want.
std::vector<SequencePlan> plans_for_hidden(const nb::tuple& rows) {
  std::vector<SequencePlan> plans;
  plans.reserve(rows.size());
  for (const nb::handle row : rows) {
    plans.push_back(read_plan(row, nb::none(), nb::int_(0)));
    plans.back().want = Want::hidden;
    plans.back().targets.clear();
  }
  return plans;
}

// Points the requests to their masks. `masks`, called with the GIL, gives one or None for each row;
// the list that it gives keeps them alive.
nb::list read_masks(nb::handle masks, std::vector<SequencePlan>& plans) {
  const nb::list found = nb::cast<nb::list>(masks());
  if (found.size() != plans.size()) throw nb::value_error("every plan needs a mask or None");
  for (size_t i = 0; i < plans.size(); i++) {
    const nb::handle mask = found[i];
    if (mask.is_none()) continue;
    const nb::bytes bits = nb::cast<nb::bytes>(mask);
    plans[i].request.allowed = static_cast<const uint8_t*>(bits.data());
    plans[i].request.num_allowed_bytes = static_cast<int64_t>(bits.size());
  }
  return found;
}

// ---- results to Python

nb::object array_of(std::vector<float>&& values, size_t width) {
  auto* kept = new std::vector<float>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(kept->data(),
                                                             {kept->size() / width, width}, owner));
}

// (fault or None, token or None, logprob or None, target logprobs, values or None)
#define QUIRE_RESULT_TYPE                                                              \
  "tuple[str | None, int | None, " QUIRE_SCORE_TYPE " | None, tuple[" QUIRE_SCORE_TYPE \
  ", ...], numpy.typing.NDArray[numpy.float32] | None]"
nb::tuple result_to_python(SequenceResult& result, const SequencePlan& plan, size_t width) {
  if (!result.fault.empty())
    return nb::make_tuple(result.fault, nb::none(), nb::none(), nb::tuple(), nb::none());
  nb::list targets;
  for (const TokenLogprob& logprob : result.target_logprobs)
    targets.append(logprob_to_python(logprob));
  const nb::object token =
      plan.want == Want::sample ? nb::object(nb::int_(result.token)) : nb::object(nb::none());
  const nb::object logprob =
      result.has_logprob ? nb::object(logprob_to_python(result.logprob)) : nb::none();
  const nb::object values =
      result.values.empty() ? nb::none() : array_of(std::move(result.values), width);
  return nb::make_tuple(nb::none(), token, logprob, nb::tuple(targets), values);
}

// ---- the decoder

// A decoder and the sampler's scratch.
class BoundDecoder {
 public:
  BoundDecoder(const DecoderShape& shape, const Kernels& kernels, int num_threads, bool may_spin)
      : decoder(shape, kernels, num_threads, may_spin) {}

  // None where the step was cancelled.
  nb::object step(nb::tuple rows, nb::list requests, nb::list target_logprobs, nb::tuple copies,
                  int64_t max_context, int64_t num_blocks, nb::object masks) {
    if (requests.size() != rows.size() || target_logprobs.size() != rows.size())
      throw nb::value_error("every plan needs a request and a number of target logprobs");
    std::vector<SequencePlan> plans;
    plans.reserve(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
      plans.push_back(read_plan(rows[i], requests[i], target_logprobs[i]));
      if (plans[i].want == Want::sample && !plans[i].request.settings)
        plans[i].fault = "a sample is wanted, but the row has no sampling parameters";
    }
    return run(plans, copies, max_context, num_blocks, masks);
  }

  // What rows want is for whoever computes the layers after these: they all get hidden states.
  nb::object run_layers(nb::tuple rows, nb::tuple copies, int64_t max_context, int64_t num_blocks) {
    std::vector<SequencePlan> plans = plans_for_hidden(rows);
    return run(plans, copies, max_context, num_blocks, nb::none());
  }

  // The same rows, for run_layer.
  std::unique_ptr<StepRows> rows(nb::tuple rows, nb::tuple copies, int64_t max_context,
                                 int64_t num_blocks) {
    return step_rows(decoder, plans_for_hidden(rows), read_copies(copies),
                     {max_context, num_blocks});
  }

  // False where it was cancelled.
  bool run_layer(const StepRows& rows, int layer,
                 nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> hidden) {
    expect(rows.decoder == &decoder, "rows must be of the decoder that they were made by");
    expect_within("the rows of hidden states", static_cast<int64_t>(hidden.shape(0)),
                  static_cast<int64_t>(rows.input.tokens.size()), max_step_rows);
    expect_within("the columns of hidden states", static_cast<int64_t>(hidden.shape(1)),
                  decoder.shape().hidden_size, max_row_size);
    const nb::gil_scoped_release released;
    try {
      decoder.run_layer(rows.input, layer, hidden.data(), static_cast<int64_t>(hidden.shape(1)));
    } catch (const Cancelled&) {
      return false;
    }
    decoder.publish();
    return true;
  }

  Decoder decoder;

 private:
  nb::object run(std::vector<SequencePlan>& plans, const nb::tuple& copies, int64_t max_context,
                 int64_t num_blocks, const nb::object& masks) {
    expect_within("num_blocks", num_blocks, 0, decoder.num_blocks());
    const auto block_copies = read_copies(copies);
    std::vector<SequenceResult> results;
    bool is_cancelled = false;
    nb::list kept;  // what the plans' masks point into
    const auto before_sampling = [&] {
      if (masks.is_none()) return;
      nb::gil_scoped_acquire acquired;
      kept = read_masks(masks, plans);
    };
    {
      nb::gil_scoped_release released;
      try {
        results = run_step(decoder, plans, block_copies, {max_context, num_blocks}, scratch_,
                           before_sampling);
      } catch (const Cancelled&) {
        is_cancelled = true;
      }
    }
    if (is_cancelled) return nb::none();
    return to_python(results, plans);
  }

  nb::list to_python(std::vector<SequenceResult>& results, const std::vector<SequencePlan>& plans) {
    const DecoderShape& shape = decoder.shape();
    nb::list items;
    for (size_t i = 0; i < plans.size(); i++) {
      const int64_t width =
          plans[i].want == Want::logits ? shape.vocabulary_size : shape.hidden_size;
      items.append(result_to_python(results[i], plans[i], static_cast<size_t>(width)));
    }
    return items;
  }

  std::vector<SampleScratch> scratch_;
};

std::unique_ptr<BoundDecoder> make_decoder(int64_t hidden_size, int64_t vocabulary_size,
                                           float embedding_scale, float logit_soft_cap,
                                           int64_t layer_input_size, const std::string& unit,
                                           int num_threads, bool may_spin) {
  DecoderShape shape{};
  shape.hidden_size = hidden_size;
  shape.vocabulary_size = vocabulary_size;
  shape.embedding_scale = embedding_scale;
  shape.logit_soft_cap = logit_soft_cap;
  shape.layer_input_size = layer_input_size;
  return std::make_unique<BoundDecoder>(shape, unit_named(unit), num_threads, may_spin);
}

int add_layer(BoundDecoder& self, int num_heads, int num_kv_heads, int head_dim, int value_dim,
              int rope, int window, bool is_chunked, float scale, float soft_cap, int sinks,
              std::vector<float> slopes, int kv_layer, bool has_key_values, bool has_values_in_keys,
              int group, std::optional<int> slot) {
  LayerAttention layer{};
  layer.group = group;
  layer.slot = slot.value_or(self.decoder.num_cache_slots());
  layer.shape.num_heads = num_heads;
  layer.shape.num_kv_heads = num_kv_heads;
  layer.shape.head_dim = head_dim;
  layer.shape.value_dim = value_dim;
  layer.shape.window = window;
  layer.shape.is_chunked = is_chunked;
  layer.shape.scale = scale;
  layer.shape.soft_cap = soft_cap;
  layer.shape.has_values_in_keys = has_values_in_keys;
  layer.rope = rope;
  layer.sinks = sinks;
  layer.kv_layer = kv_layer;
  layer.has_key_values = has_key_values;
  return self.decoder.add_layer(layer, std::move(slopes));
}

int add_matrix(BoundDecoder& self, const std::string& format, Array<const uint8_t> blocks,
               int64_t out_size, int64_t in_size, bool per_token_scale, bool residual_pass,
               float scale, int bias) {
  expect_blocks(source_named(format), out_size, in_size, blocks.size());
  const uint8_t* data = blocks.data();
  nb::gil_scoped_release released;
  return self.decoder.add_matrix(format.c_str(), data, out_size, in_size, per_token_scale,
                                 residual_pass, scale, bias);
}

void pack_stacked(BoundDecoder& self, int matrix, const std::string& format,
                  Array<const uint8_t> blocks, int first, int count) {
  const Matrix& stack = self.decoder.matrix(matrix);
  expect_within("the matrices to pack", count, 1, stack.num_stacked);
  expect_blocks(source_named(format), checked_product(stack.out_size, count), stack.in_size,
                blocks.size());
  const uint8_t* data = blocks.data();
  nb::gil_scoped_release released;
  self.decoder.pack_stacked(matrix, format.c_str(), data, first, count);
}

int add_experts(BoundDecoder& self, int router, int gate, int up, int down, int count, int num_used,
                const std::string& scoring, bool normalises, float scale, int num_groups,
                int num_used_groups, int num_group_best, bool weighs_input, bool has_shared_gate,
                int choice_bias, int factors, const std::string& activation) {
  Experts experts{};
  experts.routing = {count, num_used,   scoring_named(scoring), normalises,
                     scale, num_groups, num_used_groups,        num_group_best};
  experts.router = router;
  experts.gate = gate;
  experts.up = up;
  experts.down = down;
  experts.activation = gate_named(activation);
  experts.weighs_input = weighs_input;
  experts.has_shared_gate = has_shared_gate;
  experts.choice_bias = choice_bias;
  experts.factors = factors;
  return self.decoder.add_experts(experts);
}

// The bytes of a matrix once packed.
int64_t packed_bytes(const std::string& format, int64_t out_size, int64_t in_size) {
  return packed_size(source_named(format), out_size, in_size);
}

const char* const activation_format_names[] = {"groups", "blocks", "per_token",
                                               "floats"};  // as ActivationFormat

const char* activation_format(const std::string& format) {
  const ActivationFormat found = activation_format_of(source_named(format).packed);
  return activation_format_names[static_cast<int>(found)];
}

template <size_t count>
int index_of(const char* const (&names)[count], const std::string& name) {
  for (size_t i = 0; i < count; i++)
    if (name == names[i]) return static_cast<int>(i);
  throw nb::value_error(("no such word for a stage: " + name).c_str());
}

// How many activations a record of this format has, and its bytes.
nb::tuple activation_record(const std::string& activations) {
  switch (static_cast<ActivationFormat>(index_of(activation_format_names, activations))) {
    case ActivationFormat::blocks:
      return nb::make_tuple(activation_block_size, sizeof(ActivationBlock));
    case ActivationFormat::floats: return nb::make_tuple(1, sizeof(float));
    default: return nb::make_tuple(group_size, sizeof(ActivationGroup));
  }
}

// Floats that each thread computes in: results of a GEMM, and packed queries of attention; sizes of
// 0 where no layer attends.
int64_t thread_scratch_floats(int64_t head_dim, int64_t value_dim, bool has_values_in_keys) {
  expect_within("head_dim", head_dim, 0, max_head_dim);
  expect_within("value_dim", value_dim, 0, max_head_dim);
  return Decoder::scratch_size() + attention_workspace(head_dim, value_dim, has_values_in_keys);
}

Norm norm_or_none(const std::optional<Norm>& norm) { return norm ? *norm : Norm{}; }

// A stage as Python describes it; names are those of Stage.
struct StageNames {
  std::string kind, input, output, quantised, gate, norm_span;
};

Stage stage_named(const StageNames& names) {
  const char* const kinds[] = {"norm_and_quantise",
                               "project",
                               "rope_and_store",
                               "attend",
                               "project_and_add",
                               "gate_and_up",
                               "add_branch",
                               "norm_branch",
                               "add_to_branch",
                               "scale_hidden",
                               "add_layer_embedding",
                               "latent_rope_and_store",
                               "route",
                               "expert_gate_and_up",
                               "expert_down",
                               "convolve",
                               "recur",
                               "gate_output"};
  const char* const rows[] = {"hidden", "projected", "attention_output", "gated",
                              "branch", "latent",    "layer_inputs"};
  const char* const spans[] = {"head", "each head", "projection"};
  Stage stage;
  stage.kind = static_cast<Stage::Kind>(index_of(kinds, names.kind));
  stage.input = static_cast<RowKind>(index_of(rows, names.input));
  stage.output = static_cast<RowKind>(index_of(rows, names.output));
  stage.quantised =
      static_cast<ActivationFormat>(index_of(activation_format_names, names.quantised));
  stage.gate = gate_named(names.gate);
  stage.norm_span = static_cast<NormSpan>(index_of(spans, names.norm_span));
  return stage;
}

void add_stage(BoundDecoder& self, const std::string& kind, const std::string& input,
               const std::string& output, const std::optional<Norm>& norm,
               std::vector<int> matrices, float scale, int64_t output_stride, bool is_by_head,
               const std::string& quantised, const std::string& gate, int gate_numbers,
               int layer_input, int layer, const std::optional<Norm>& query_norm,
               const std::optional<Norm>& key_norm, const std::optional<Norm>& value_norm,
               const std::string& norm_span, bool norms_after_rope,
               std::tuple<double, int64_t, int64_t> position_scale, int experts, int state,
               int64_t norm_size, bool norms_before_gate, bool has_sigmoid) {
  Stage stage = stage_named({kind, input, output, quantised, gate, norm_span});
  stage.norm = norm_or_none(norm);
  stage.matrices = std::move(matrices);
  stage.scale = scale;
  stage.is_by_head = is_by_head;
  stage.output_stride = output_stride;
  stage.gate_numbers = gate_numbers;
  stage.layer_input = layer_input;
  stage.layer = layer;
  stage.query_norm = norm_or_none(query_norm);
  stage.key_norm = norm_or_none(key_norm);
  stage.experts = experts;
  stage.value_norm = norm_or_none(value_norm);
  stage.norms_after_rope = norms_after_rope;
  const auto& [factor, length, offset] = position_scale;
  stage.position_scale = {factor, length, offset};
  stage.state = state;
  stage.norm_size = norm_size;
  stage.norms_before_gate = norms_before_gate;
  stage.has_sigmoid = has_sigmoid;
  self.decoder.add_stage(std::move(stage));
}

int add_state(BoundDecoder& self, const std::string& kind, int kernel, int num_heads,
              int num_groups, int key_dim, int value_dim, bool is_tiled, int taps, int bias, int a,
              int dt, int d, int step_rank) {
  const char* const kinds[] = {"gated DeltaNet", "Mamba 2", "short convolutions", "Mamba 1"};
  StateMixer mixer{};
  mixer.kind = static_cast<StateMixer::Kind>(index_of(kinds, kind));
  mixer.kernel = kernel;
  mixer.num_heads = num_heads;
  mixer.num_groups = num_groups;
  mixer.key_dim = key_dim;
  mixer.value_dim = value_dim;
  mixer.is_tiled = is_tiled;
  mixer.taps = taps;
  mixer.bias = bias;
  mixer.a = a;
  mixer.dt = dt;
  mixer.d = d;
  mixer.step_rank = step_rank;
  return self.decoder.add_state(mixer);
}

nb::dict counters(const BoundDecoder& self) {
  const Counters c = self.decoder.counters();
  nb::dict values;
  values["steps"] = c.steps;
  values["rows"] = c.rows;
  values["multiplications"] = c.multiplications;
  values["weight_bytes"] = c.weight_bytes;
  values["seconds"] = c.seconds;
  values["norm_and_quantise_seconds"] = c.norm_and_quantise_seconds;
  values["gemm_seconds"] = c.gemm_seconds;
  values["rope_and_store_seconds"] = c.rope_and_store_seconds;
  values["attention_seconds"] = c.attention_seconds;
  values["head_seconds"] = c.head_seconds;
  values["sampling_seconds"] = c.sampling_seconds;
  return values;
}

nb::bytes cache_block(const BoundDecoder& self, int layer, int64_t block) {
  expect_within("layer", layer, 0, self.decoder.num_layers() - 1);
  expect_within("block", block, 0, self.decoder.num_blocks() - 1);
  return nb::bytes(reinterpret_cast<const char*>(self.decoder.cache_block(layer, block)),
                   static_cast<size_t>(self.decoder.block_bytes(layer)));
}

void set_rope(BoundDecoder& self, int rope, Array<const float> cosines, Array<const float> sines,
              int64_t positions) {
  expect(cosines.size() == sines.size(), "as many sines as cosines");
  self.decoder.set_rope(rope, cosines.data(), sines.data(), static_cast<int64_t>(cosines.size()),
                        positions);
}

void bind_construction(nb::class_<BoundDecoder>& decoder) {
  decoder
      .def("add_matrix", &add_matrix, "format"_a, "blocks"_a, "out_size"_a, "in_size"_a,
           "per_token_scale"_a = false, "residual_pass"_a = false, "scale"_a = 1.0f, "bias"_a = -1)
      .def(
          "activation_format",
          [](const BoundDecoder& self, int matrix) {
            return activation_format_names[static_cast<int>(
                self.decoder.matrix(matrix).activations)];
          },
          "matrix"_a)
      .def(
          "add_vector",
          [](BoundDecoder& self, Array<const float> values) {
            return self.decoder.add_vector(values.data(), static_cast<int64_t>(values.size()));
          },
          "values"_a)
      .def(
          "add_rope",
          [](BoundDecoder& self, int dims, bool interleaved) {
            return self.decoder.add_rope(dims, interleaved);
          },
          "dims"_a, "interleaved"_a)
      .def("add_layer", &add_layer, nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
           "value_dim"_a, "rope"_a, "window"_a, "is_chunked"_a, "scale"_a, "soft_cap"_a, "sinks"_a,
           "slopes"_a = std::vector<float>(), "kv_layer"_a, "has_key_values"_a,
           "has_values_in_keys"_a, "group"_a = 0, "slot"_a = nb::none())
      .def("add_stage", &add_stage, "kind"_a, nb::kw_only(), "input"_a = "hidden",
           "output"_a = "projected", "norm"_a = nb::none(), "matrices"_a = std::vector<int>(),
           "scale"_a = 1.0f, "output_stride"_a = 0, "is_by_head"_a = false,
           "quantised"_a = "floats", "gate"_a = "silu", "gate_numbers"_a = -1, "layer_input"_a = -1,
           "layer"_a = 0, "query_norm"_a = nb::none(), "key_norm"_a = nb::none(),
           "value_norm"_a = nb::none(), "norm_span"_a = "head", "norms_after_rope"_a = false,
           "position_scale"_a = std::tuple<double, int64_t, int64_t>{0.0, 0, 0}, "experts"_a = -1,
           "state"_a = -1, "norm_size"_a = 0, "norms_before_gate"_a = false,
           "has_sigmoid"_a = false)
      .def("add_state", &add_state, nb::kw_only(), "kind"_a, "kernel"_a, "num_heads"_a,
           "num_groups"_a, "key_dim"_a, "value_dim"_a, "is_tiled"_a, "taps"_a, "bias"_a = -1,
           "a"_a = -1, "dt"_a = -1, "d"_a = -1, "step_rank"_a = 0)
      .def(
          "allocate_states",
          [](BoundDecoder& self, int64_t num_states) { self.decoder.allocate_states(num_states); },
          "num_states"_a)
      .def(
          "add_stack",
          [](BoundDecoder& self, const std::string& format, int num_stacked, int64_t out_size,
             int64_t in_size, float scale, int bias) {
            return self.decoder.add_stack(format.c_str(), num_stacked, out_size, in_size, scale,
                                          bias);
          },
          "format"_a, "num_stacked"_a, "out_size"_a, "in_size"_a, "scale"_a = 1.0f, "bias"_a = -1)
      .def("pack_stacked", &pack_stacked, "matrix"_a, "format"_a, "blocks"_a, "first"_a, "count"_a)
      .def("add_experts", &add_experts, nb::kw_only(), "router"_a, "gate"_a, "up"_a, "down"_a,
           "count"_a, "num_used"_a, "scoring"_a, "normalises"_a, "scale"_a, "num_groups"_a,
           "num_used_groups"_a, "num_group_best"_a, "weighs_input"_a, "has_shared_gate"_a,
           "choice_bias"_a, "factors"_a, "activation"_a)
      .def(
          "set_embedding_and_head",
          [](BoundDecoder& self, int embedding, const Norm& output_norm, int head, int positions,
             const std::optional<Norm>& embedding_norm) {
            self.decoder.set_embedding_and_head(embedding, output_norm, head, positions,
                                                norm_or_none(embedding_norm));
          },
          "embedding"_a, "output_norm"_a, "head"_a, "positions"_a = -1,
          "embedding_norm"_a = nb::none())
      .def(
          "allocate_cache",
          [](BoundDecoder& self, int64_t num_blocks, bool is_int8, int64_t prefault_bytes,
             bool low_priority) {
            self.decoder.allocate_cache(num_blocks, is_int8, prefault_bytes, low_priority);
          },
          "num_blocks"_a, "is_int8"_a, "prefault_bytes"_a, "low_priority"_a = true)
      .def("set_rope", &set_rope, "rope"_a, "cosines"_a, "sines"_a, "positions"_a);
}

void bind_steps(nb::class_<BoundDecoder>& decoder) {
  decoder
      .def("step", &BoundDecoder::step, "plans"_a, "requests"_a, "target_logprobs"_a, "copies"_a,
           "max_context"_a, "num_blocks"_a, "masks"_a = nb::none(),
           nb::sig("def step(self, plans: tuple[quire.core.plan.SequencePlan, ...], "
                   "requests: list[SampleRequest | None], target_logprobs: list[int], "
                   "copies: tuple[tuple[int, int], ...], max_context: int, num_blocks: int, "
                   "masks: collections.abc.Callable[[], list[bytes | None]] | None = None) "
                   "-> list[" QUIRE_RESULT_TYPE "] | None"))
      .def("run_layers", &BoundDecoder::run_layers, "plans"_a, "copies"_a, "max_context"_a,
           "num_blocks"_a,
           nb::sig("def run_layers(self, plans: tuple[quire.core.plan.SequencePlan, ...], "
                   "copies: tuple[tuple[int, int], ...], max_context: int, num_blocks: int) "
                   "-> list[" QUIRE_RESULT_TYPE "] | None"))
      .def("rows", &BoundDecoder::rows, "plans"_a, "copies"_a, "max_context"_a, "num_blocks"_a,
           nb::keep_alive<0, 1>(),
           nb::sig("def rows(self, plans: tuple[quire.core.plan.SequencePlan, ...], "
                   "copies: tuple[tuple[int, int], ...], max_context: int, num_blocks: int) "
                   "-> StepRows"))
      .def("run_layer", &BoundDecoder::run_layer, "rows"_a, "layer"_a, "hidden"_a.noconvert(),
           nb::sig("def run_layer(self, rows: StepRows, layer: int, "
                   "hidden: numpy.typing.NDArray[numpy.float32]) -> bool"))
      .def(
          "set_cancelled",
          [](BoundDecoder& self, bool is_cancelled) { self.decoder.set_cancelled(is_cancelled); },
          "is_cancelled"_a)
      .def("cache_block", &cache_block, "layer"_a, "block"_a)
      .def_prop_ro("counters", &counters,
                   nb::for_getter(nb::sig("def counters(self) -> dict[str, float]")))
      .def_prop_ro("unit", [](const BoundDecoder& self) { return self.decoder.kernels().name; })
      .def_prop_ro("num_threads", [](BoundDecoder& self) { return self.decoder.pool().size(); })
      .def_prop_ro("weight_bytes",
                   [](const BoundDecoder& self) { return self.decoder.weight_bytes(); })
      .def_prop_ro("cache_address",
                   [](const BoundDecoder& self) {
                     return reinterpret_cast<uintptr_t>(self.decoder.cache_block(0, 0));
                   })
      .def_prop_ro("state_bytes",
                   [](const BoundDecoder& self) { return self.decoder.state_bytes(); })
      .def_prop_ro("cache_bytes",
                   [](const BoundDecoder& self) { return self.decoder.cache_bytes(); })
      .def(
          "stop_prefault", [](BoundDecoder& self) { self.decoder.stop_prefault(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("prefaulted_bytes",
                   [](const BoundDecoder& self) { return self.decoder.prefaulted_bytes(); })
      .def_prop_ro("workspace_bytes",
                   [](const BoundDecoder& self) { return self.decoder.workspace_bytes(); });
}

}  // namespace

void bind_decoder(nb::module_& m) {
  m.attr("block_size") = block_size;  // tokens of a KV cache block
  m.def("bind_plan_types", &bind_plan_types, "sequence_plan"_a, "want"_a, "token_logprob"_a,
        nb::sig("def bind_plan_types(sequence_plan: type[tuple[object, ...]], "
                "want: type[enum.IntEnum], token_logprob: type[tuple[object, ...]]) -> None"));
  m.def("activation_format", &activation_format, "format"_a);
  m.attr("activation_block_size") = activation_block_size;
  m.def("activation_record", &activation_record, "activations"_a,
        nb::sig("def activation_record(activations: str) -> tuple[int, int]"));
  m.def("thread_scratch_floats", &thread_scratch_floats, "head_dim"_a, "value_dim"_a,
        "has_values_in_keys"_a = false);
  m.def("packed_bytes", &packed_bytes, "format"_a, "out_size"_a, "in_size"_a);
  nb::class_<Norm>(m, "Norm").def(
      "__init__",
      [](Norm* self, float epsilon, int weight, int bias, bool is_layer_norm) {
        new (self) Norm{is_layer_norm ? Norm::layer : Norm::rms, weight, bias, epsilon};
      },
      "epsilon"_a, "weight"_a = -1, "bias"_a = -1, "is_layer_norm"_a = false);
  nb::class_<StepRows>(m, "StepRows")
      .def_ro("faults", &StepRows::faults,
              nb::for_getter(nb::sig("def faults(self) -> list[str]")));
  nb::class_<BoundDecoder> decoder(m, "Decoder");
  bind_construction(decoder);
  bind_steps(decoder);
  m.def("make_decoder", &make_decoder, nb::kw_only(), "hidden_size"_a, "vocabulary_size"_a,
        "embedding_scale"_a = 1.0f, "logit_soft_cap"_a = 0.0f, "layer_input_size"_a = 0, "unit"_a,
        "num_threads"_a, "may_spin"_a);
}

}  // namespace quire
