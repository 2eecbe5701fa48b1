// What module.cpp binds, and the conversions that the bindings share.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "routing.h"
#include "sampler.h"

namespace quire {

void bind_kernels(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);

// The kernels of a unit; throws ValueError where it does not run on this processor. "": the best.
inline const Kernels& unit_named(const std::string& name) {
  if (const Kernels* kernels = kernels_named(name.c_str())) return *kernels;
  throw nanobind::value_error(("no unit \"" + name + "\" runs on this processor").c_str());
}

// A scoring by the name that quire.model.spec.Scoring has for it.
inline Scoring scoring_named(const std::string& name) {
  const char* const names[] = {"softmax", "sigmoid", "sparse_mixer"};  // as Scoring
  static_assert(sizeof names / sizeof *names == num_scorings, "a name for each scoring");
  for (int i = 0; i < num_scorings; i++)
    if (name == names[i]) return static_cast<Scoring>(i);
  throw nanobind::value_error(("no such word for a scoring: " + name).c_str());
}

// A gate by the name that quire.model.spec.Activation has for it.
inline Gate gate_named(const std::string& name) {
  const char* const names[] = {"silu",  "gelu",           "gelu_tanh",
                               "relu2", "clamped_swiglu", "xielu"};  // as Gate
  static_assert(sizeof names / sizeof *names == num_gates, "a name for each gate");
  for (int i = 0; i < num_gates; i++)
    if (name == names[i]) return static_cast<Gate>(i);
  throw nanobind::value_error(("no such word for a gate: " + name).c_str());
}

// A sequence's settings, shared with its requests.
struct SharedSettings {
  std::shared_ptr<const SampleSettings> settings;
};

// A request that owns what it points to, so that it can be used without the GIL.
struct OwnedRequest {
  std::shared_ptr<const SampleSettings> settings;
  int64_t position = 0;
  bool has_history = false;
  std::vector<int64_t> prompt, completion;
  bool has_allowed = false;
  std::string allowed;

  SampleRequest view() const {
    SampleRequest request;
    request.settings = settings.get();
    request.position = position;
    request.has_history = has_history;
    request.prompt = {prompt.data(), static_cast<int64_t>(prompt.size())};
    request.completion = {completion.data(), static_cast<int64_t>(completion.size())};
    if (has_allowed) request.allowed = reinterpret_cast<const uint8_t*>(allowed.data());
    request.num_allowed_bytes = static_cast<int64_t>(allowed.size());
    return request;
  }
};

// The fields of quire.core.plan.TokenLogprob: (token, logprob, rank, ((token, logprob), ...)).
#define QUIRE_SCORE_TYPE "tuple[int, float, int, tuple[tuple[int, float], ...]]"
nanobind::tuple logprob_to_python(const TokenLogprob& logprob);

}  // namespace quire
