// One step: jobs to rows, rows through the decoder, and what each sequence wanted out of them.
#include "step.h"

#include <algorithm>
#include <stdexcept>

#include "sampler_passes.h"

namespace quire {
namespace {

std::string fault_of(const SequenceJob& job, const Limits& limits, const Decoder& decoder) {
  const int64_t vocabulary = decoder.shape().vocabulary_size;
  const auto outside = [&](int64_t token) { return token < 0 || token >= vocabulary; };
  const auto message = [&](int64_t token) {
    return "token " + std::to_string(token) + " is outside the vocabulary of " +
           std::to_string(vocabulary);
  };
  if (!job.fault.empty()) return job.fault;
  for (const int64_t token : job.tokens)
    if (outside(token)) return message(token);
  for (const int64_t token : job.targets)
    if (outside(token)) return message(token);
  // Neither term is larger than a context: their sum is no larger than two.
  const int64_t count = std::min<int64_t>(static_cast<int64_t>(job.tokens.size()), most_positions);
  const int64_t start = std::clamp<int64_t>(job.start, -1, most_positions), end = start + count;
  if (count == 0 || start < 0 || end > limits.max_context)
    return "positions " + std::to_string(job.start) + " to " + std::to_string(end) +
           " are not within the context of " + std::to_string(limits.max_context);
  if (end > decoder.num_positions())
    return "positions " + std::to_string(start) + " to " + std::to_string(end) +
           " are beyond the rope tables of " + std::to_string(decoder.num_positions());
  const int64_t needed = (end + block_size - 1) / block_size;
  if (static_cast<int64_t>(job.block_table.size()) < needed)
    return std::to_string(job.block_table.size()) + " blocks do not hold " + std::to_string(end) +
           " positions";
  for (int64_t i = 0; i < needed; i++) {
    const int32_t block = job.block_table[static_cast<size_t>(i)];
    if (block < 0 || block >= limits.num_blocks)
      return "block " + std::to_string(block) + " of the block table is not one of the " +
             std::to_string(limits.num_blocks) + " blocks";
  }
  return "";
}

void check_copies(const std::vector<std::pair<int32_t, int32_t>>& copies, int64_t num_blocks) {
  for (const auto& [source, target] : copies)
    if (source < 0 || source >= num_blocks || target < 0 || target >= num_blocks)
      throw std::invalid_argument("block " + std::to_string(source) + " cannot be copied to " +
                                  std::to_string(target) + ": there are " +
                                  std::to_string(num_blocks) + " blocks");
}

// What is wanted of one row's logits.
struct HeadUse {
  size_t job;
  int row_of_job;
  bool is_target;  // else the job's own want
};

class Step {
 public:
  Step(Decoder& decoder, const std::vector<SequenceJob>& jobs, std::vector<SampleScratch>& scratch)
      : decoder_(decoder), jobs_(jobs), scratch_(scratch), outcomes_(jobs.size()) {}

  std::vector<SequenceOutcome> run(const std::vector<std::pair<int32_t, int32_t>>& copies,
                                   const Limits& limits) {
    check_copies(copies, limits.num_blocks);
    StepInput input;
    input.copies = copies;
    for (size_t i = 0; i < jobs_.size(); i++) {
      outcomes_[i].fault = fault_of(jobs_[i], limits, decoder_);
      first_rows_.push_back(static_cast<int>(input.tokens.size()));
      if (outcomes_[i].fault.empty()) add_rows(jobs_[i], input);
    }
    decoder_.run(input);
    Pool::Session awake(decoder_.pool());
    for (size_t i = 0; i < jobs_.size(); i++)
      if (outcomes_[i].fault.empty()) look_at(i);
    use_logits();
    return std::move(outcomes_);
  }

 private:
  static void add_rows(const SequenceJob& job, StepInput& input) {
    const size_t num_rows = job.tokens.size();
    for (size_t i = 0; i < num_rows; i++) {
      const bool is_last = i + 1 == num_rows;
      if (i < job.targets.size() || job.want == Want::logits ||
          (is_last && job.want != Want::nothing))
        input.wanted.push_back(static_cast<int>(input.tokens.size()));
      input.tokens.push_back(job.tokens[i]);
      input.places.push_back(
          {static_cast<int32_t>(job.start + static_cast<int64_t>(i)), job.block_table.data()});
    }
  }

  // Finds what a job's rows are needed for, or that they are not finite.
  void look_at(size_t i) {
    const SequenceJob& job = jobs_[i];
    SequenceOutcome& outcome = outcomes_[i];
    const int rows = static_cast<int>(job.tokens.size()), first = first_rows_[i];
    for (int row = 0; row < rows; row++)
      if (!decoder_.is_finite(first + row)) {
        outcome.fault = "the hidden state is not finite";
        return;
      }
    const int targets = std::min(rows, static_cast<int>(job.targets.size()));
    outcome.target_scores.resize(static_cast<size_t>(targets));
    for (int row = 0; row < targets; row++) want_logits(i, row, true);
    const int64_t vocabulary = decoder_.shape().vocabulary_size;
    switch (job.want) {
      case Want::nothing: return;
      case Want::sample: return want_logits(i, rows - 1, false);
      case Want::logits:
        outcome.values.resize(static_cast<size_t>(checked_product(rows, vocabulary)));
        for (int row = 0; row < rows; row++) want_logits(i, row, false);
        return;
      case Want::pooled:
        outcome.values.resize(static_cast<size_t>(decoder_.shape().hidden_size));
        decoder_.final_state(first + rows - 1, outcome.values.data());
        return;
    }
  }

  void want_logits(size_t job, int row, bool is_target) {
    uses_.push_back({job, row, is_target});
    head_rows_.push_back(first_rows_[job] + row);
  }

  void use_logits() {
    std::vector<SampleFault> faults(uses_.size(), SampleFault::none);
    decoder_.logits(head_rows_, [&](int i, const float* logits, int thread) {
      const size_t at = static_cast<size_t>(i);
      faults[at] = use(uses_[at], logits, scratch_[static_cast<size_t>(thread)]);
    });
    for (size_t i = 0; i < uses_.size(); i++) {
      SequenceOutcome& outcome = outcomes_[uses_[i].job];
      if (faults[i] != SampleFault::none && outcome.fault.empty())
        outcome.fault = fault_message(faults[i], decoder_.shape().vocabulary_size);
    }
  }

  // Runs in any thread: writes only what belongs to this use.
  SampleFault use(const HeadUse& use, const float* logits, SampleScratch& scratch) {
    const SequenceJob& job = jobs_[use.job];
    SequenceOutcome& outcome = outcomes_[use.job];
    const int64_t vocabulary = decoder_.shape().vocabulary_size;
    if (!is_finite(logits, vocabulary)) return SampleFault::not_finite;
    const size_t row = static_cast<size_t>(use.row_of_job);
    if (use.is_target) {
      outcome.target_scores[row] =
          score(logits, vocabulary, job.targets[row], job.num_target_logprobs, scratch);
      return SampleFault::none;
    }
    if (job.want == Want::logits) {
      std::copy(logits, logits + vocabulary,
                outcome.values.begin() + static_cast<int64_t>(row) * vocabulary);
      return SampleFault::none;
    }
    SampleResult result = sample(logits, vocabulary, job.request, scratch);
    outcome.token = result.token;
    outcome.has_score = job.request.settings->num_logprobs >= 0;
    outcome.score = std::move(result.score);
    return result.fault;
  }

  Decoder& decoder_;
  const std::vector<SequenceJob>& jobs_;
  std::vector<SampleScratch>& scratch_;
  std::vector<SequenceOutcome> outcomes_;
  std::vector<int> first_rows_;  // of each job
  std::vector<HeadUse> uses_;
  std::vector<int> head_rows_;
};

}  // namespace

std::vector<SequenceOutcome> run_step(Decoder& decoder, const std::vector<SequenceJob>& jobs,
                                      const std::vector<std::pair<int32_t, int32_t>>& copies,
                                      const Limits& limits, std::vector<SampleScratch>& scratch) {
  scratch.resize(static_cast<size_t>(decoder.pool().size()));
  const int64_t num_blocks = std::min(limits.num_blocks, decoder.num_blocks());
  return Step(decoder, jobs, scratch).run(copies, {limits.max_context, num_blocks});
}

}  // namespace quire
