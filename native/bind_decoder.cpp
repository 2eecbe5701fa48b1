// Bindings of the decoder: how Python builds one and runs its steps.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "bind_sampler.h"
#include "pack.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class Value>
using Array = nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The fields of quire.core.plan.SequencePlan, by whose places read_job finds them.
const char* const plan_fields[] = {"sequence_id", "start",   "tokens",        "follows",
                                   "block_table", "want",    "sampling",      "completion_position",
                                   "history",     "allowed", "prompt_targets"};

const int num_plan_fields = sizeof plan_fields / sizeof plan_fields[0];

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

// What of a plan is not of its type, so that read_job could not look at it; nullptr: nothing.
const char* misfit_of(const nb::tuple& fields) {
  for (const int field : {2, 4, 10})
    if (!nb::isinstance<nb::tuple>(fields[static_cast<size_t>(field)])) return plan_fields[field];
  int64_t start;
  int want;
  if (!nb::try_cast<int64_t>(fields[1], start)) return plan_fields[1];
  if (!nb::try_cast<int>(fields[5], want) || want < 0 || want > static_cast<int>(Want::pooled))
    return plan_fields[5];
  return nullptr;
}

// `request`: the HeldRequest of a sequence that samples; the caller's list keeps it alive.
SequenceJob read_job(nb::handle plan, nb::handle request, nb::handle num_target_logprobs) {
  SequenceJob job;
  if (!nb::isinstance<nb::tuple>(plan) || nb::len(plan) != num_plan_fields)
    throw nb::type_error("a sequence's plan must be a SequencePlan");
  const nb::tuple fields = nb::borrow<nb::tuple>(plan);
  if (const char* misfit = misfit_of(fields)) {
    job.fault = std::string("the plan's ") + misfit + " is not of its type";
    return job;
  }
  job.start = nb::cast<int64_t>(fields[1]);
  job.tokens = integers<int32_t>(fields[2]);
  job.block_table = integers<int32_t>(fields[4]);
  job.want = static_cast<Want>(nb::cast<int>(fields[5]));
  if (!request.is_none()) job.request = nb::cast<const HeldRequest&>(request).view();
  if (job.want == Want::sample && !job.request.settings)
    job.fault = "a sample was wanted without saying how";
  job.targets = integers<int64_t>(fields[10]);
  job.num_target_logprobs = nb::cast<int>(num_target_logprobs);
  return job;
}

std::pair<int32_t, int32_t> read_copy(nb::handle copy) {
  int32_t source, target;
  if (!nb::isinstance<nb::tuple>(copy) || nb::len(copy) != 2 ||
      !nb::try_cast<int32_t>(copy[0], source) || !nb::try_cast<int32_t>(copy[1], target))
    throw nb::value_error("a block copy must be a source and a target");
  return {source, target};
}

nb::object array_of(std::vector<float>&& values, size_t columns) {
  auto* kept = new std::vector<float>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
      kept->data(), {kept->size() / columns, columns}, owner));
}

// (fault or None, token or None, score or None, target scores, values or None)
nb::tuple outcome_tuple(SequenceOutcome& outcome, const SequenceJob& job, size_t columns) {
  if (!outcome.fault.empty())
    return nb::make_tuple(outcome.fault, nb::none(), nb::none(), nb::tuple(), nb::none());
  nb::list targets;
  for (const TokenScore& score : outcome.target_scores) targets.append(score_to_python(score));
  const nb::object token =
      job.want == Want::sample ? nb::object(nb::int_(outcome.token)) : nb::object(nb::none());
  const nb::object score =
      outcome.has_score ? nb::object(score_to_python(outcome.score)) : nb::none();
  const nb::object values =
      outcome.values.empty() ? nb::none() : array_of(std::move(outcome.values), columns);
  return nb::make_tuple(nb::none(), token, score, nb::tuple(targets), values);
}

// A decoder together with what its steps keep between them.
class Runner {
 public:
  Runner(const DecoderShape& shape, const Kernels& kernels, int num_threads, bool may_spin)
      : decoder(shape, kernels, num_threads, may_spin) {}

  // None where the step was cancelled.
  nb::object step(nb::tuple plans, nb::list requests, nb::list target_logprobs, nb::tuple copies,
                  int64_t max_context, int64_t num_blocks) {
    expect_within("num_blocks", num_blocks, 0, decoder.num_blocks());
    if (requests.size() != plans.size() || target_logprobs.size() != plans.size())
      throw nb::value_error("every plan needs a request and a number of target logprobs");
    std::vector<SequenceJob> jobs;
    jobs.reserve(plans.size());
    for (size_t i = 0; i < plans.size(); i++)
      jobs.push_back(read_job(plans[i], requests[i], target_logprobs[i]));
    std::vector<std::pair<int32_t, int32_t>> block_copies;
    for (const nb::handle copy : copies) block_copies.push_back(read_copy(copy));
    std::vector<SequenceOutcome> outcomes;
    bool is_cancelled = false;
    {
      nb::gil_scoped_release released;
      try {
        outcomes = run_step(decoder, jobs, block_copies, {max_context, num_blocks}, scratch_);
      } catch (const Cancelled&) {
        is_cancelled = true;
      }
    }
    if (is_cancelled) return nb::none();
    nb::list results;
    for (size_t i = 0; i < jobs.size(); i++) {
      const DecoderShape& shape = decoder.shape();
      const int64_t columns =
          jobs[i].want == Want::logits ? shape.vocabulary_size : shape.hidden_size;
      results.append(outcome_tuple(outcomes[i], jobs[i], static_cast<size_t>(columns)));
    }
    return results;
  }

  Decoder decoder;

 private:
  std::vector<SampleScratch> scratch_;
};

std::unique_ptr<Runner> make_runner(int64_t hidden_size, int64_t ffn_size, int64_t vocabulary_size,
                                    int num_layers, int num_heads, int num_kv_heads, int head_dim,
                                    int rope_dims, bool rope_interleaved, float norm_epsilon,
                                    int gate, float attention_soft_cap, float logit_soft_cap,
                                    std::vector<int> windows, const std::string& unit,
                                    int num_threads, bool may_spin) {
  DecoderShape shape{};
  shape.hidden_size = hidden_size;
  shape.ffn_size = ffn_size;
  shape.vocabulary_size = vocabulary_size;
  shape.num_layers = num_layers;
  shape.num_heads = num_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.rope_dims = rope_dims;
  shape.rope_interleaved = rope_interleaved;
  shape.norm_epsilon = norm_epsilon;
  shape.gate = gate;
  shape.attention_soft_cap = attention_soft_cap;
  shape.logit_soft_cap = logit_soft_cap;
  shape.windows = std::move(windows);
  const Kernels* kernels = kernels_named(unit.c_str());
  if (!kernels) throw nb::value_error(("no unit \"" + unit + "\" runs on this processor").c_str());
  return std::make_unique<Runner>(shape, *kernels, num_threads, may_spin);
}

int add_matrix(Runner& self, const std::string& format, Array<const uint8_t> blocks,
               int64_t num_rows, int64_t in_size, bool whole_rows, bool refined, float scale,
               int bias) {
  expect_blocks(source_named(format), num_rows, in_size, blocks.size());
  const uint8_t* data = blocks.data();
  nb::gil_scoped_release released;
  return self.decoder.add_matrix(format.c_str(), data, num_rows, in_size, whole_rows, refined,
                                 scale, bias);
}

// What a matrix takes once packed.
int64_t packed_bytes(const std::string& format, int64_t num_rows, int64_t in_size) {
  return packed_size(source_named(format), num_rows, in_size);
}

const char* const form_names[] = {"groups", "blocks", "row", "floats"};  // as Form

const char* form_of_format(const std::string& format) {
  return form_names[static_cast<int>(form_of(source_named(format).packed))];
}

void add_stage(Runner& self, const std::string& kind, const std::string& input, int norm,
               std::vector<int> matrices, const std::string& quantised, int layer, int query_norm,
               int key_norm) {
  const char* const kinds[] = {"prepare", "project", "add", "gate", "turn", "attend"};
  const char* const places[] = {"state", "mixed", "gated"};
  Stage stage;
  const auto index_of = [](const auto& names, const std::string& name) {
    int i = 0;
    for (const char* known : names) {
      if (name == known) return i;
      i++;
    }
    throw nb::value_error(("no such word for a stage: " + name).c_str());
  };
  stage.kind = static_cast<Stage::Kind>(index_of(kinds, kind));
  stage.input = static_cast<Place>(index_of(places, input));
  stage.norm = norm;
  stage.matrices = std::move(matrices);
  stage.quantised = static_cast<Form>(index_of(form_names, quantised));
  stage.layer = layer;
  stage.query_norm = query_norm;
  stage.key_norm = key_norm;
  self.decoder.add_stage(std::move(stage));
}

nb::dict counters(const Runner& self) {
  const Counters& c = self.decoder.counters();
  nb::dict values;
  values["steps"] = c.steps;
  values["rows"] = c.rows;
  values["multiplications"] = c.multiplications;
  values["weight_bytes"] = c.weight_bytes;
  values["seconds"] = c.seconds;
  values["prepare_seconds"] = c.prepare_seconds;
  values["product_seconds"] = c.product_seconds;
  values["turn_seconds"] = c.turn_seconds;
  values["attention_seconds"] = c.attention_seconds;
  values["head_seconds"] = c.head_seconds;
  values["use_seconds"] = c.use_seconds;
  return values;
}

nb::bytes cache_block(const Runner& self, int layer, int64_t block) {
  expect_within("layer", layer, 0, self.decoder.shape().num_layers - 1);
  expect_within("block", block, 0, self.decoder.num_blocks() - 1);
  return nb::bytes(reinterpret_cast<const char*>(self.decoder.cache_block(layer, block)),
                   static_cast<size_t>(self.decoder.block_bytes()));
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::list fields;
  for (const char* field : plan_fields) fields.append(field);
  m.attr("plan_fields") = nb::tuple(fields);
  m.def("form_of", &form_of_format, "format"_a);
  m.def("packed_bytes", &packed_bytes, "format"_a, "num_rows"_a, "in_size"_a);
  nb::class_<Runner>(m, "Decoder")
      .def("add_matrix", &add_matrix, "format"_a, "blocks"_a, "num_rows"_a, "in_size"_a,
           "whole_rows"_a = false, "refined"_a = false, "scale"_a = 1.0f, "bias"_a = -1)
      .def("form_of",
           [](const Runner& self, int matrix) {
             return form_names[static_cast<int>(self.decoder.matrix(matrix).form)];
           })
      .def("add_vector",
           [](Runner& self, Array<const float> values) {
             return self.decoder.add_vector(values.data(), static_cast<int64_t>(values.size()));
           })
      .def("add_stage", &add_stage, "kind"_a, nb::kw_only(), "input"_a = "state", "norm"_a = -1,
           "matrices"_a = std::vector<int>(), "quantised"_a = "floats", "layer"_a = 0,
           "query_norm"_a = -1, "key_norm"_a = -1)
      .def(
          "set_ends",
          [](Runner& self, int embedding, int output_norm, int head) {
            self.decoder.set_ends(embedding, output_norm, head);
          },
          "embedding"_a, "output_norm"_a, "head"_a)
      .def(
          "allocate_cache",
          [](Runner& self, int64_t num_blocks, bool is_int8, int64_t touched_ahead,
             bool gives_way) {
            self.decoder.allocate_cache(num_blocks, is_int8, touched_ahead, gives_way);
          },
          "num_blocks"_a, "is_int8"_a, "touched_ahead"_a, "gives_way"_a = true)
      .def(
          "set_rope",
          [](Runner& self, Array<const float> cosines, Array<const float> sines,
             int64_t positions) {
            expect(cosines.size() == sines.size(), "as many sines as cosines");
            self.decoder.set_rope(cosines.data(), sines.data(),
                                  static_cast<int64_t>(cosines.size()), positions);
          },
          "cosines"_a, "sines"_a, "positions"_a)
      .def("step", &Runner::step, "plans"_a, "requests"_a, "target_logprobs"_a, "copies"_a,
           "max_context"_a, "num_blocks"_a)
      .def("set_cancelled",
           [](Runner& self, bool is_cancelled) { self.decoder.set_cancelled(is_cancelled); })
      .def("cache_block", &cache_block, "layer"_a, "block"_a)
      .def_prop_ro("counters", &counters)
      .def_prop_ro("unit", [](const Runner& self) { return self.decoder.kernels().name; })
      .def_prop_ro("num_threads", [](Runner& self) { return self.decoder.pool().size(); })
      .def_prop_ro("weight_bytes", [](const Runner& self) { return self.decoder.weight_bytes(); })
      .def_prop_ro("cache_address",
                   [](const Runner& self) {
                     return reinterpret_cast<uintptr_t>(self.decoder.cache_block(0, 0));
                   })
      .def_prop_ro("cache_bytes", [](const Runner& self) { return self.decoder.cache_bytes(); })
      .def(
          "stop_touching", [](Runner& self) { self.decoder.stop_touching(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("touched_bytes", [](const Runner& self) { return self.decoder.touched_bytes(); })
      .def_prop_ro("workspace_bytes",
                   [](const Runner& self) { return self.decoder.workspace_bytes(); });
  m.def("make_decoder", &make_runner, nb::kw_only(), "hidden_size"_a, "ffn_size"_a,
        "vocabulary_size"_a, "num_layers"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
        "rope_dims"_a, "rope_interleaved"_a, "norm_epsilon"_a, "gate"_a, "attention_soft_cap"_a,
        "logit_soft_cap"_a, "windows"_a, "unit"_a, "num_threads"_a, "may_spin"_a);
}

}  // namespace quire
