// The rows of a step and their results, sequence by sequence: native forms of quire.core.plan's
// SequencePlan and SequenceResult.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "decoder.h"
#include "sampler.h"

namespace quire {

// hidden, which quire.core.plan does not have: every new token's hidden state after the last layer.
enum class Want : int { nothing = 0, sample = 1, logits = 2, pooled = 3, hidden = 4 };

struct SequencePlan {
  std::string fault;  // a field that could not be read; empty: none
  std::vector<int32_t> tokens;
  int64_t start = 0;
  std::vector<std::vector<int32_t>> block_tables;  // one for each group
  std::vector<int32_t> states;  // empty, or the slots of the state before and after the tokens
  Want want = Want::nothing;
  SampleRequest request;         // for Want::sample
  std::vector<int64_t> targets;  // prompt_targets: score these after each new position
  int num_target_logprobs = 0;
};

struct SequenceResult {
  std::string fault;  // empty: none
  int64_t token = -1;
  bool has_logprob = false;
  TokenLogprob logprob;
  std::vector<TokenLogprob> target_logprobs;
  // Logits [new tokens, vocabulary], hidden states [new tokens, hidden], or the pooled one.
  std::vector<float> values;
};

// Bounds of positions and blocks; the decoder's rope tables and KV cache bound them too.
struct Limits {
  int64_t max_context, num_blocks;
};

// Checked rows of a step that is computed layer by layer; not to be moved: the input points into
// the plans' block tables.
struct StepRows {
  const Decoder* decoder;  // whose limits they were checked against
  std::vector<SequencePlan> plans;
  std::vector<std::string> faults;  // of each plan; empty: none
  StepInput input;                  // of the plans that have no fault
};

// Throws std::invalid_argument where it copies blocks that do not exist.
std::unique_ptr<StepRows> step_rows(const Decoder& decoder, std::vector<SequencePlan> plans,
                                    std::vector<std::pair<int32_t, int32_t>> copies,
                                    const Limits& limits);

// Computes all plans in one pass over the model; a plan's fault is in its result alone.
// `before_sampling` is called once the layers are computed: it may still set the plans' masks.
// Throws Cancelled, or for the whole step std::bad_alloc, or std::invalid_argument where it copies
// blocks that do not exist or the decoder is not complete.
std::vector<SequenceResult> run_step(Decoder& decoder, const std::vector<SequencePlan>& plans,
                                     const std::vector<std::pair<int32_t, int32_t>>& copies,
                                     const Limits& limits, std::vector<SampleScratch>& scratch,
                                     const std::function<void()>& before_sampling);

}  // namespace quire
