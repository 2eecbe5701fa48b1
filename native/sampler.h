// From one row of logits to one token, with the results of the Python reference
// (quire.executors.sampler), bit for bit: mask and bans, bias, penalties, temperature, min-p,
// top-k, top-p, a draw that is a pure function of (seed, index, position), and log-probabilities.
// Rows with other samplers, or in another order, take the way of sampler_chain.cpp.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace quire {

struct DrySettings {
  double multiplier = 0.0;
  double base = 1.75;
  int64_t allowed_length = 2;
  int64_t last_n = 64;                                  // -1: all tokens
  std::vector<int64_t> breaker_tokens;                  // in ascending order
  std::vector<std::vector<int64_t>> breaker_sequences;  // likewise
};

// For rows that have llama.cpp's cuts or an order of their own.
struct ChainSettings {
  std::string order;  // llama.cpp's letters of the samplers: see quire.core.samplers
  double typical_p = 1.0;
  double top_n_sigma = 0.0;
  double xtc_probability = 0.0;
  double xtc_threshold = 0.1;
  double dynatemp_range = 0.0;
  double dynatemp_exponent = 1.0;
};

// How one sequence's tokens are sampled; the same in every step.
struct SampleSettings {
  double temperature = 1.0;  // 0: the likeliest token
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  double min_p = 0.0;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  std::vector<int64_t> bias_tokens;
  std::vector<float> biases;        // of bias_tokens
  std::vector<int64_t> end_tokens;  // forbidden before min_tokens
  int64_t min_tokens = 0;
  uint64_t seed = 0;
  uint32_t index = 0;     // of the sequence within its request
  int num_logprobs = -1;  // of the likeliest tokens, beside the sampled one's; -1: none at all
  std::optional<int64_t> repeat_last_n;  // that penalties look at; -1: all
  std::optional<DrySettings> dry;
  std::optional<ChainSettings> chain;
};

struct Tokens {
  const int64_t* data = nullptr;
  int64_t size = 0;
};

// One row's request. The pointers need only be valid until sample() returns.
struct SampleRequest {
  const SampleSettings* settings = nullptr;
  int64_t position = 0;              // among the completion's tokens
  bool has_history = false;          // else there are no penalties
  Tokens prompt, completion;         // for penalties; the prompt only for repetition
  const uint8_t* allowed = nullptr;  // null: all tokens; else bit t of the string allows token t
  int64_t num_allowed_bytes = 0;
};

enum class SampleFault {
  none,
  not_finite,
  not_finite_after_penalties,
  all_forbidden,
  token_out_of_range
};
std::string fault_message(SampleFault fault, int64_t vocabulary);

struct TopLogprob {
  int64_t token;
  double logprob;
};

struct TokenLogprob {
  int64_t token = 0;
  double logprob = 0.0;
  int64_t rank = 0;             // 1 is the likeliest
  std::vector<TopLogprob> top;  // in descending order, of equals the lower id first
};

struct SampleResult {
  SampleFault fault = SampleFault::none;
  int64_t token = 0;
  TokenLogprob logprob;  // where num_logprobs is not negative
};

// Memory of one thread's sampling, kept between rows so that they allocate nothing.
struct SampleScratch {
  std::vector<float> scores;           // [vocabulary], where they differ from the logits
  std::vector<float> block_best;       // [block] of the scores
  std::vector<float> logit_best;       // [block] of the logits
  std::vector<double> weights;         // [vocabulary, up to whole blocks]
  std::vector<double> block_estimate;  // [block] the weight of the block's greatest score
  std::vector<double> block_mass;      // [block] the sum of its weights
  std::vector<double> block_heaviest;  // [block]
  std::vector<double> candidates;      // weights that top-k and top-p select from
  std::vector<uint32_t> counts;        // [vocabulary] all 0 between uses
  std::vector<int64_t> counted;        // tokens whose count is not 0
  std::vector<std::pair<double, int64_t>> ranked;  // tokens by how typical they are
  std::vector<int64_t> recent, repeat_lengths;     // DRY's: tokens, the last one first

  void fit(int64_t vocabulary);
};

// 64 bits from Philox4x32-10, as quire.core.sampling.draw_bits.
uint64_t draw_bits(uint64_t seed, uint32_t index, uint64_t position, uint32_t purpose = 0);

// The greater half of the product of two 64-bit numbers.
uint64_t high_product(uint64_t a, uint64_t b);

SampleResult sample(const float* logits, int64_t vocabulary, const SampleRequest& request,
                    SampleScratch& scratch);

// A token's log-probability with the `num_top` likeliest beside it. The greatest logit must be
// finite and none NaN, and the token within the vocabulary.
TokenLogprob token_logprob(const float* logits, int64_t vocabulary, int64_t token, int num_top,
                           SampleScratch& scratch);

}  // namespace quire
