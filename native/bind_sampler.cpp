// The sampler in Python: settings and requests for plans, and its steps for the tests.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
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

DrySettings new_dry(double multiplier, double base, int64_t allowed_length, int64_t last_n,
                    Ids breaker_tokens, std::vector<Ids> breaker_sequences) {
  if (!(multiplier >= 0.0) || !(base >= 1.0) || allowed_length < 0 || last_n < -1) {
    throw std::invalid_argument("DRY needs multiplier >= 0, base >= 1 and lengths");
  }
  std::sort(breaker_tokens.begin(), breaker_tokens.end());
  std::sort(breaker_sequences.begin(), breaker_sequences.end());
  return {multiplier,
          base,
          allowed_length,
          last_n,
          std::move(breaker_tokens),
          std::move(breaker_sequences)};
}

ChainSettings new_chain(std::string order, double typical_p, double top_n_sigma,
                        double xtc_probability, double xtc_threshold, double dynatemp_range,
                        double dynatemp_exponent) {
  if (order.find_first_not_of("edtsmkypx") != std::string::npos) {
    throw std::invalid_argument("no such samplers: " + order);
  }
  for (double number : {typical_p, top_n_sigma, xtc_probability, xtc_threshold, dynatemp_range,
                        dynatemp_exponent}) {
    if (!std::isfinite(number)) throw std::invalid_argument("a sampler's number is not finite");
  }
  return {std::move(order), typical_p,      top_n_sigma,      xtc_probability,
          xtc_threshold,    dynatemp_range, dynatemp_exponent};
}

// What the chain takes for granted.
void check_chain(const SampleSettings& settings) {
  if (settings.repeat_last_n.value_or(-1) < -1) {
    throw std::invalid_argument("repeat_last_n must be at least -1");
  }
  if (!settings.chain) return;
  const std::string& order = settings.chain->order;
  const auto has = [&](char letter) { return order.find(letter) != std::string::npos; };
  if ((has('d') && !settings.dry) || (has('k') && settings.top_k < 1) ||
      (has('p') && !(settings.top_p > 0.0))) {
    throw std::invalid_argument("the samplers " + order + " need dry, top_k > 0 and top_p > 0");
  }
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
  m.def("draw_bits", &draw_bits, "seed"_a, "index"_a, "position"_a, "purpose"_a = 0);
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

// The samplers that only some rows have.
void bind_more_settings(nb::module_& m) {
  nb::class_<DrySettings>(m, "DrySettings")
      .def(
          "__init__",
          [](DrySettings* self, double multiplier, double base, int64_t allowed_length,
             int64_t last_n, Ids breaker_tokens, std::vector<Ids> breaker_sequences) {
            new (self)
                DrySettings(new_dry(multiplier, base, allowed_length, last_n,
                                    std::move(breaker_tokens), std::move(breaker_sequences)));
          },
          nb::kw_only(), "multiplier"_a, "base"_a, "allowed_length"_a, "last_n"_a,
          "breaker_tokens"_a, "breaker_sequences"_a);
  nb::class_<ChainSettings>(m, "ChainSettings")
      .def(
          "__init__",
          [](ChainSettings* self, std::string order, double typical_p, double top_n_sigma,
             double xtc_probability, double xtc_threshold, double dynatemp_range,
             double dynatemp_exponent) {
            new (self)
                ChainSettings(new_chain(std::move(order), typical_p, top_n_sigma, xtc_probability,
                                        xtc_threshold, dynatemp_range, dynatemp_exponent));
          },
          nb::kw_only(), "order"_a, "typical_p"_a, "top_n_sigma"_a, "xtc_probability"_a,
          "xtc_threshold"_a, "dynatemp_range"_a, "dynatemp_exponent"_a);
}

void bind_sampler(nb::module_& m) {
  bind_more_settings(m);
  nb::class_<SharedSettings>(m, "SampleSettings")
      .def(
          "__init__",
          [](SharedSettings* self, double temperature, int64_t top_k, double top_p, double min_p,
             double repetition_penalty, double frequency_penalty, double presence_penalty,
             const std::vector<std::pair<int64_t, double>>& logit_bias, Ids end_tokens,
             int64_t min_tokens, uint64_t seed, uint32_t index, int num_logprobs,
             std::optional<int64_t> repeat_last_n, std::optional<DrySettings> dry,
             std::optional<ChainSettings> chain) {
            SampleSettings settings =
                new_settings(temperature, top_k, top_p, min_p, repetition_penalty,
                             frequency_penalty, presence_penalty, logit_bias, std::move(end_tokens),
                             min_tokens, seed, index, num_logprobs);
            settings.repeat_last_n = repeat_last_n;
            settings.dry = std::move(dry);
            settings.chain = std::move(chain);
            check_chain(settings);
            new (self) SharedSettings{std::make_shared<const SampleSettings>(std::move(settings))};
          },
          nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
          "frequency_penalty"_a, "presence_penalty"_a, "logit_bias"_a, "end_tokens"_a,
          "min_tokens"_a, "seed"_a, "index"_a, "num_logprobs"_a,
          "repeat_last_n"_a.none() = nb::none(), "dry"_a.none() = nb::none(),
          "chain"_a.none() = nb::none());
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
