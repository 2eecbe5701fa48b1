// How sample requests come from Python and scores go back, for every binding that samples.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "sampler.h"

namespace quire {

// A sequence's settings; requests share them, whichever lives longer.
struct HeldSettings {
  std::shared_ptr<const SampleSettings> settings;
};

// A request that owns what it points to, so that it can be used without Python's lock.
struct HeldRequest {
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

// (token, logprob, rank, ((token, logprob), ...)), the fields of quire.core.plan.TokenLogprob.
nanobind::tuple score_to_python(const TokenScore& score);

void bind_sampler(nanobind::module_& m);

}  // namespace quire
