// What a step is asked for and what it gives, sequence by sequence: native forms of
// quire.core.plan.
#pragma once
#include <string>
#include <vector>

#include "decoder.h"
#include "sampler.h"

namespace quire {

enum class Want : int { nothing = 0, sample = 1, logits = 2, pooled = 3 };

struct SequenceJob {
  std::string fault;  // of what was asked; empty: none
  std::vector<int32_t> tokens;
  int64_t start = 0;
  std::vector<int32_t> block_table;
  Want want = Want::nothing;
  SampleRequest request;         // where a sample is wanted
  std::vector<int64_t> targets;  // score these after each new position
  int num_target_logprobs = 0;
};

struct SequenceOutcome {
  std::string fault;  // empty: none
  int64_t token = -1;
  bool has_score = false;
  TokenScore score;
  std::vector<TokenScore> target_scores;
  std::vector<float> values;  // logits [new tokens, vocabulary], or the pooled state
};

// How far positions and blocks may reach; never beyond the decoder's rope tables and cache.
struct Limits {
  int64_t max_context, num_blocks;
};

// Computes all jobs in one pass over the model; a job's fault is in its outcome alone.
// Throws Cancelled, or for the whole step std::bad_alloc, or std::invalid_argument where it copies
// blocks that do not exist or the decoder is not complete.
std::vector<SequenceOutcome> run_step(Decoder& decoder, const std::vector<SequenceJob>& jobs,
                                      const std::vector<std::pair<int32_t, int32_t>>& copies,
                                      const Limits& limits, std::vector<SampleScratch>& scratch);

}  // namespace quire
