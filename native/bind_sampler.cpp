// The sampler in Python: settings and requests for plans, and its steps for the tests.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "elementary.h"
#include "sampler_passes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int64_t>;

SampleSettings new_settings(double temperature, int64_t top_k, double top_p, double min_p,
                            double repetition_penalty, double frequency_penalty,
                            double presence_penalty,
                            const std::vector<std::pair<int64_t, double>>& logit_bias,
                            Ids end_tokens, int64_t min_tokens, uint64_t seed, uint32_t index,
                            int num_logprobs) {
  const auto expect_number = [](const char* name, double value, double low, double high) {
    if (!(value >= low && value <= high))
      throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(low) +
                                  " to " + std::to_string(high) + ", got " + std::to_string(value));
  };
  constexpr double max_float = std::numeric_limits<float>::max();
  expect_number("temperature", temperature, 0.0, max_float);
  expect_number("top_p", top_p, 0.0, 1.0);
  expect_number("min_p", min_p, 0.0, 1.0);
  expect_number("repetition_penalty", repetition_penalty, 0.0, max_float);
  expect_number("frequency_penalty", frequency_penalty, -max_float, max_float);
  expect_number("presence_penalty", presence_penalty, -max_float, max_float);
  SampleSettings settings;
  settings.temperature = temperature;
  settings.top_k = top_k;
  settings.top_p = top_p;
  settings.min_p = min_p;
  settings.repetition_penalty = static_cast<float>(repetition_penalty);
  settings.frequency_penalty = static_cast<float>(frequency_penalty);
  settings.presence_penalty = static_cast<float>(presence_penalty);
  for (const auto& [token, bias] : logit_bias) {
    settings.bias_tokens.push_back(token);
    settings.biases.push_back(static_cast<float>(bias));
  }
  settings.end_tokens = std::move(end_tokens);
  settings.min_tokens = min_tokens;
  settings.seed = seed;
  settings.index = index;
  settings.num_logprobs = num_logprobs;
  return settings;
}

OwnedRequest new_request(const SharedSettings& settings, int64_t position,
                         std::optional<std::pair<Ids, Ids>> history,
                         std::optional<nb::bytes> allowed) {
  OwnedRequest request;
  request.settings = settings.settings;
  request.position = position;
  request.has_history = history.has_value();
  if (history) {
    request.prompt = std::move(history->first);
    request.completion = std::move(history->second);
  }
  request.has_allowed = allowed.has_value();
  if (allowed) request.allowed.assign(allowed->c_str(), allowed->size());
  return request;
}

// (fault, token, logprob): a message, or a token with its logprob where one was asked for.
nb::tuple sample_row(Logits logits, const OwnedRequest& owned) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  SampleResult result;
  {
    nb::gil_scoped_release released;
    SampleScratch scratch;
    result = sample(logits.data(), vocabulary, owned.view(), scratch);
  }
  if (result.fault != SampleFault::none) {
    return nb::make_tuple(fault_message(result.fault, vocabulary), nb::none(), nb::none());
  }
  nb::object logprob = nb::none();
  if (owned.settings->num_logprobs >= 0) logprob = logprob_to_python(result.logprob);
  return nb::make_tuple(nb::none(), result.token, logprob);
}

nb::tuple score_row(Logits logits, int64_t token, int num_top) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  if (token < 0 || token >= vocabulary || num_top < 0) {
    throw std::invalid_argument("score needs a token within the logits and num_top >= 0");
  }
  if (!is_finite(logits.data(), vocabulary)) {
    throw std::invalid_argument("score needs finite logits");
  }
  SampleScratch scratch;
  return logprob_to_python(token_logprob(logits.data(), vocabulary, token, num_top, scratch));
}

// Single steps of the sampler.
void bind_steps(nb::module_& m) {
  m.def("draw_bits", &draw_bits, "seed"_a, "index"_a, "position"_a);
  m.def("sampler_log", &log_of, "value"_a);
  m.def("sampler_exp", &exp_of, "value"_a);
  m.def(
      "sum_of_exponentials",
      [](Logits values, double best) {
        return sum_of_exponentials(values.data(), static_cast<int64_t>(values.size()), best);
      },
      "values"_a, "best"_a);
  m.def(
      "is_finite",
      [](Logits values) { return is_finite(values.data(), static_cast<int64_t>(values.size())); },
      "values"_a);
}

}  // namespace

nb::tuple logprob_to_python(const TokenLogprob& logprob) {
  nb::list top;
  for (const TopLogprob& one : logprob.top) top.append(nb::make_tuple(one.token, one.logprob));
  return nb::make_tuple(logprob.token, logprob.logprob, logprob.rank, nb::tuple(top));
}

void bind_sampler(nb::module_& m) {
  nb::class_<SharedSettings>(m, "SampleSettings")
      .def(
          "__init__",
          [](SharedSettings* self, double temperature, int64_t top_k, double top_p, double min_p,
             double repetition_penalty, double frequency_penalty, double presence_penalty,
             const std::vector<std::pair<int64_t, double>>& logit_bias, Ids end_tokens,
             int64_t min_tokens, uint64_t seed, uint32_t index, int num_logprobs) {
            new (self) SharedSettings{std::make_shared<const SampleSettings>(
                new_settings(temperature, top_k, top_p, min_p, repetition_penalty,
                             frequency_penalty, presence_penalty, logit_bias, std::move(end_tokens),
                             min_tokens, seed, index, num_logprobs))};
          },
          nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
          "frequency_penalty"_a, "presence_penalty"_a, "logit_bias"_a, "end_tokens"_a,
          "min_tokens"_a, "seed"_a, "index"_a, "num_logprobs"_a);
  nb::class_<OwnedRequest>(m, "SampleRequest")
      .def(
          "__init__",
          [](OwnedRequest* self, const SharedSettings& settings, int64_t position,
             std::optional<std::pair<Ids, Ids>> history, std::optional<nb::bytes> allowed) {
            new (self) OwnedRequest(new_request(settings, position, std::move(history), allowed));
          },
          "settings"_a, "position"_a, "history"_a.none(), "allowed"_a.none());
  m.def("sample_row", &sample_row, "logits"_a, "request"_a,
        nb::sig("def sample_row(logits: numpy.typing.NDArray[numpy.float32], "
                "request: SampleRequest) "
                "-> tuple[str | None, int | None, " QUIRE_SCORE_TYPE " | None]"));
  m.def("score_row", &score_row, "logits"_a, "token"_a, "num_top"_a,
        nb::sig("def score_row(logits: numpy.typing.NDArray[numpy.float32], token: int, "
                "num_top: int) -> " QUIRE_SCORE_TYPE));
  bind_steps(m);
}

}  // namespace quire
