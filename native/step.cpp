// One step: checks plans, makes rows of them, runs the decoder, samples and scores.
#include "step.h"

#include <algorithm>
#include <stdexcept>

#include "sampler_passes.h"

namespace quire {
namespace {

// Whether a block table holds positions [first, end).
std::string fault_of_table(const std::vector<int32_t>& table, int64_t first, int64_t end,
                           const Limits& limits) {
  const int64_t needed = (end + block_size - 1) / block_size;
  if (static_cast<int64_t>(table.size()) < needed)
    return std::to_string(table.size()) + " blocks do not hold " + std::to_string(end) +
           " positions";
  for (int64_t i = first / block_size; i < needed; i++) {
    const int32_t block = table[static_cast<size_t>(i)];
    if (block < 0 || block >= limits.num_blocks)
      return "block " + std::to_string(block) + " of the block table is not one of the " +
             std::to_string(limits.num_blocks) + " blocks";
  }
  return "";
}

// Whether the slots of a sequence's state are slots, and two.
std::string fault_of_states(const SequencePlan& plan, const Decoder& decoder) {
  if (!decoder.keeps_states() && plan.states.empty()) return "";
  const size_t needed = decoder.keeps_states() ? 2 : 0;
  if (plan.states.size() != needed)
    return "the row has " + std::to_string(plan.states.size()) + " slots of states, and needs " +
           std::to_string(needed);
  const int64_t source = plan.states[0], target = plan.states[1], count = decoder.num_states();
  const bool is_first = plan.start == 0;
  if ((is_first ? source != -1 : source < 0) || source >= count || target < 0 || target >= count ||
      source == target)
    return "slots " + std::to_string(source) + " and " + std::to_string(target) +
           " cannot have the states before and after: there are " + std::to_string(count);
  return "";
}

std::string fault_of(const SequencePlan& plan, const Limits& limits, const Decoder& decoder) {
  const int64_t vocabulary = decoder.shape().vocabulary_size;
  const auto outside = [&](int64_t token) { return token < 0 || token >= vocabulary; };
  const auto message = [&](int64_t token) {
    return "token " + std::to_string(token) + " is outside the vocabulary of " +
           std::to_string(vocabulary);
  };
  if (!plan.fault.empty()) return plan.fault;
  for (const int64_t token : plan.tokens)
    if (outside(token)) return message(token);
  for (const int64_t token : plan.targets)
    if (outside(token)) return message(token);
  // Both terms are clamped, so that their sum does not overflow.
  const int64_t count = std::min<int64_t>(static_cast<int64_t>(plan.tokens.size()), max_positions);
  const int64_t start = std::clamp<int64_t>(plan.start, -1, max_positions), end = start + count;
  if (count == 0 || start < 0 || end > limits.max_context)
    return "positions " + std::to_string(plan.start) + " to " + std::to_string(end) +
           " are not within the context of " + std::to_string(limits.max_context);
  if (end > decoder.num_positions())
    return "positions " + std::to_string(start) + " to " + std::to_string(end) +
           " are beyond the rope tables of " + std::to_string(decoder.num_positions());
  if (plan.block_tables.size() != static_cast<size_t>(decoder.num_groups()))
    return "the row has " + std::to_string(plan.block_tables.size()) + " block tables for " +
           std::to_string(decoder.num_groups()) + " groups";
  for (int group = 0; group < decoder.num_groups(); group++) {
    const std::string fault = fault_of_table(plan.block_tables[static_cast<size_t>(group)],
                                             decoder.first_seen(group, start), end, limits);
    if (!fault.empty()) return fault;
  }
  return fault_of_states(plan, decoder);
}

void check_copies(const std::vector<std::pair<int32_t, int32_t>>& copies, int64_t num_blocks) {
  for (const auto& [source, target] : copies)
    if (source < 0 || source >= num_blocks || target < 0 || target >= num_blocks)
      throw std::invalid_argument("block " + std::to_string(source) + " cannot be copied to " +
                                  std::to_string(target) + ": there are " +
                                  std::to_string(num_blocks) + " blocks");
}

void add_rows(const SequencePlan& plan, StepInput& input) {
  const size_t num_rows = plan.tokens.size();
  if (!plan.states.empty())
    input.states.push_back({static_cast<int>(input.tokens.size()), static_cast<int>(num_rows),
                            plan.states[0], plan.states[1]});
  for (size_t i = 0; i < num_rows; i++) {
    const bool is_last = i + 1 == num_rows;
    if (i < plan.targets.size() || plan.want == Want::logits || plan.want == Want::hidden ||
        (is_last && plan.want != Want::nothing))
      input.output_rows.push_back(static_cast<int>(input.tokens.size()));
    input.tokens.push_back(plan.tokens[i]);
    const auto position = static_cast<int32_t>(plan.start + static_cast<int64_t>(i));
    for (size_t group = 0; group < plan.block_tables.size(); group++)
      input.positions[group].push_back({position, plan.block_tables[group].data()});
  }
}

// One use of a row's logits.
struct LogitsUse {
  size_t plan;
  int row_of_plan;
  bool is_target;  // scores a prompt target; else the plan's own want
};

class Step {
 public:
  Step(Decoder& decoder, const std::vector<SequencePlan>& plans,
       std::vector<SampleScratch>& scratch)
      : decoder_(decoder), plans_(plans), scratch_(scratch), results_(plans.size()) {}

  std::vector<SequenceResult> run(const std::vector<std::pair<int32_t, int32_t>>& copies,
                                  const Limits& limits,
                                  const std::function<void()>& before_sampling) {
    check_copies(copies, limits.num_blocks);
    StepInput input;
    input.copies = copies;
    input.positions.resize(static_cast<size_t>(decoder_.num_groups()));
    for (size_t i = 0; i < plans_.size(); i++) {
      results_[i].fault = fault_of(plans_[i], limits, decoder_);
      first_rows_.push_back(static_cast<int>(input.tokens.size()));
      if (results_[i].fault.empty()) add_rows(plans_[i], input);
    }
    decoder_.run(input);
    before_sampling();
    Pool::Session session(decoder_.pool());
    for (size_t i = 0; i < plans_.size(); i++)
      if (results_[i].fault.empty()) request_outputs(i);
    use_logits();
    return std::move(results_);
  }

 private:
  // Lists the logits that a plan needs, or sets its fault where a hidden state is not finite.
  void request_outputs(size_t i) {
    const SequencePlan& plan = plans_[i];
    SequenceResult& result = results_[i];
    const int rows = static_cast<int>(plan.tokens.size()), first = first_rows_[i];
    for (int row = 0; row < rows; row++)
      if (!decoder_.is_finite(first + row)) {
        result.fault = "the hidden state is not finite";
        return;
      }
    const int targets = std::min(rows, static_cast<int>(plan.targets.size()));
    result.target_logprobs.resize(static_cast<size_t>(targets));
    for (int row = 0; row < targets; row++) want_logits(i, row, true);
    const int64_t vocabulary = decoder_.shape().vocabulary_size;
    switch (plan.want) {
      case Want::nothing: return;
      case Want::sample: return want_logits(i, rows - 1, false);
      case Want::logits:
        result.values.resize(static_cast<size_t>(checked_product(rows, vocabulary)));
        for (int row = 0; row < rows; row++) want_logits(i, row, false);
        return;
      case Want::pooled:
        result.values.resize(static_cast<size_t>(decoder_.shape().hidden_size));
        decoder_.final_state(first + rows - 1, result.values.data());
        return;
      case Want::hidden: {
        const int64_t size = decoder_.shape().hidden_size;
        result.values.resize(static_cast<size_t>(checked_product(rows, size)));
        for (int row = 0; row < rows; row++)
          std::copy_n(decoder_.hidden_state(first + row), size, result.values.data() + row * size);
        return;
      }
    }
  }

  void want_logits(size_t plan, int row, bool is_target) {
    uses_.push_back({plan, row, is_target});
    head_rows_.push_back(first_rows_[plan] + row);
  }

  void use_logits() {
    std::vector<SampleFault> faults(uses_.size(), SampleFault::none);
    decoder_.logits(head_rows_, [&](int i, const float* logits, int thread) {
      const size_t at = static_cast<size_t>(i);
      faults[at] = use(uses_[at], logits, scratch_[static_cast<size_t>(thread)]);
    });
    for (size_t i = 0; i < uses_.size(); i++) {
      SequenceResult& result = results_[uses_[i].plan];
      if (faults[i] != SampleFault::none && result.fault.empty())
        result.fault = fault_message(faults[i], decoder_.shape().vocabulary_size);
    }
  }

  // On any thread: writes only what belongs to this use.
  SampleFault use(const LogitsUse& use, const float* logits, SampleScratch& scratch) {
    const SequencePlan& plan = plans_[use.plan];
    SequenceResult& result = results_[use.plan];
    const int64_t vocabulary = decoder_.shape().vocabulary_size;
    if (!is_finite(logits, vocabulary)) return SampleFault::not_finite;
    const size_t row = static_cast<size_t>(use.row_of_plan);
    if (use.is_target) {
      result.target_logprobs[row] =
          token_logprob(logits, vocabulary, plan.targets[row], plan.num_target_logprobs, scratch);
      return SampleFault::none;
    }
    if (plan.want == Want::logits) {
      std::copy(logits, logits + vocabulary,
                result.values.begin() + static_cast<int64_t>(row) * vocabulary);
      return SampleFault::none;
    }
    SampleResult sampled = sample(logits, vocabulary, plan.request, scratch);
    result.token = sampled.token;
    result.has_logprob = plan.request.settings->num_logprobs >= 0;
    result.logprob = std::move(sampled.logprob);
    return sampled.fault;
  }

  Decoder& decoder_;
  const std::vector<SequencePlan>& plans_;
  std::vector<SampleScratch>& scratch_;
  std::vector<SequenceResult> results_;
  std::vector<int> first_rows_;  // of each plan
  std::vector<LogitsUse> uses_;
  std::vector<int> head_rows_;
};

// Publishes the decoder's counters at the end of a step, also of one that throws.
class PublishAtEnd {
 public:
  explicit PublishAtEnd(Decoder& decoder) : decoder_(decoder) {}
  ~PublishAtEnd() { decoder_.publish(); }
  PublishAtEnd(const PublishAtEnd&) = delete;
  PublishAtEnd& operator=(const PublishAtEnd&) = delete;

 private:
  Decoder& decoder_;
};

}  // namespace

std::unique_ptr<StepRows> step_rows(const Decoder& decoder, std::vector<SequencePlan> plans,
                                    std::vector<std::pair<int32_t, int32_t>> copies,
                                    const Limits& limits) {
  const Limits own{limits.max_context, std::min(limits.num_blocks, decoder.num_blocks())};
  check_copies(copies, own.num_blocks);
  auto rows = std::make_unique<StepRows>();
  rows->decoder = &decoder;
  rows->plans = std::move(plans);
  rows->input.copies = std::move(copies);
  rows->input.positions.resize(static_cast<size_t>(decoder.num_groups()));
  for (const SequencePlan& plan : rows->plans) {
    rows->faults.push_back(fault_of(plan, own, decoder));
    if (rows->faults.back().empty()) add_rows(plan, rows->input);
  }
  return rows;
}

std::vector<SequenceResult> run_step(Decoder& decoder, const std::vector<SequencePlan>& plans,
                                     const std::vector<std::pair<int32_t, int32_t>>& copies,
                                     const Limits& limits, std::vector<SampleScratch>& scratch,
                                     const std::function<void()>& before_sampling) {
  scratch.resize(static_cast<size_t>(decoder.pool().size()));
  const int64_t num_blocks = std::min(limits.num_blocks, decoder.num_blocks());
  const PublishAtEnd publish(decoder);
  return Step(decoder, plans, scratch)
      .run(copies, {limits.max_context, num_blocks}, before_sampling);
}

}  // namespace quire
