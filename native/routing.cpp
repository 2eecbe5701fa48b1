// Routing: scores, groups and the choice of experts, in plain arithmetic compiled once for all
// units.
#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "elementary.h"
#include "sizes.h"

namespace quire {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

void softmax_of(const float* logits, int count, float* out) {
  double highest = lowest;
  for (int i = 0; i < count; i++) highest = std::max<double>(highest, logits[i]);
  double total = 0.0;
  bool is_finite = std::isfinite(highest);
  for (int i = 0; i < count; i++) {
    is_finite = is_finite && !std::isnan(logits[i]);
    total += exp_of(std::isnan(logits[i]) ? 0.0 : logits[i] - highest);
  }
  for (int i = 0; i < count; i++)
    out[i] = is_finite ? static_cast<float>(exp_of(logits[i] - highest) / total)
                       : std::numeric_limits<float>::quiet_NaN();
}

// The first `count` of `order` become the indices of the largest values, best first; of equal
// values the first.
void take_best(const float* values, int size, int count, std::vector<int>& order) {
  order.resize(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int i) { return std::isnan(values[i]) ? lowest : values[i]; };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int a, int b) {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  });
}

// The share of one expert in a softmax over the experts whose scores are near its own: within two
// hundredths of the larger of its score and their size. `left_out`: an expert that has no share.
float share_among_near(const float* logits, int count, int expert, int left_out) {
  const float highest = logits[expert];
  if (!std::isfinite(highest)) return std::numeric_limits<float>::quiet_NaN();
  double total = 0.0;
  for (int i = 0; i < count; i++) {
    if (std::isnan(logits[i])) return logits[i];
    const float size = std::max(std::fabs(logits[i]), highest);
    const bool is_far = (highest - logits[i]) / size > 0.02f;
    if (i != left_out && !is_far) total += exp_of(static_cast<double>(logits[i]) - highest);
  }
  return static_cast<float>(1.0 / total);
}

// The two best experts; the second has its share among all but the first.
void mix_sparsely(const float* logits, int count, RoutingScratch& scratch) {
  take_best(logits, count, 2, scratch.order);
  const int first = scratch.order[0], second = scratch.order[1];
  scratch.scores[static_cast<size_t>(first)] = share_among_near(logits, count, first, -1);
  scratch.scores[static_cast<size_t>(second)] = share_among_near(logits, count, second, first);
}

// Minus infinity for the experts of all but the best groups.
void keep_best_groups(const Routing& routing, RoutingScratch& scratch) {
  const int size = routing.count / routing.num_groups;
  float* choice = scratch.choice.data();
  scratch.quality.resize(static_cast<size_t>(routing.num_groups));
  for (int group = 0; group < routing.num_groups; group++) {
    const float* values = choice + group * size;
    const int best = std::min(routing.num_group_best, size);
    take_best(values, size, best, scratch.order);
    float quality = 0.0f;
    for (int i = best - 1; i >= 0; i--) quality += values[scratch.order[static_cast<size_t>(i)]];
    scratch.quality[static_cast<size_t>(group)] = quality;
  }
  take_best(scratch.quality.data(), routing.num_groups, routing.num_used_groups, scratch.groups);
  const auto end = scratch.groups.begin() + routing.num_used_groups;
  for (int group = 0; group < routing.num_groups; group++)
    if (std::find(scratch.groups.begin(), end, group) == end)
      std::fill(choice + group * size, choice + (group + 1) * size, lowest);
}

}  // namespace

const Routing& checked(const Routing& routing) {
  expect(routing.scoring != Scoring::sparse_mixer ||
             (routing.num_used == 2 && routing.num_groups == 1),
         "sparse_mixer uses two experts of one group");
  expect_within("the number of experts", routing.count, 1, max_experts);
  expect_within("the experts that a token uses", routing.num_used, 1, routing.count);
  expect_within("groups of experts", routing.num_groups, 1, routing.count);
  expect(routing.count % routing.num_groups == 0, "groups of experts must have equal sizes");
  expect_within("used groups of experts", routing.num_used_groups, 1, routing.num_groups);
  expect_within("the best experts of a group", routing.num_group_best, 1, max_experts);
  expect_within("the experts that a token uses", routing.num_used, 1,
                int64_t{routing.num_used_groups} * (routing.count / routing.num_groups));
  return routing;
}

float sigmoid_of(float x) {
  const double power = exp_of(-std::fabs(static_cast<double>(x)));
  if (std::isnan(x)) return x;
  return static_cast<float>((x < 0.0f ? power : 1.0) / (1.0 + power));
}

void choose_experts(const Routing& routing, const float* logits, const float* choice_bias,
                    const float* factors, RoutingScratch& scratch, int* chosen, float* weights) {
  const int count = routing.count, num_used = routing.num_used;
  scratch.scores.resize(static_cast<size_t>(count));
  float* scores = scratch.scores.data();
  if (routing.scoring == Scoring::sparse_mixer) {
    mix_sparsely(logits, count, scratch);
  } else {
    if (routing.scoring == Scoring::sigmoid)
      std::transform(logits, logits + count, scores, sigmoid_of);
    else
      softmax_of(logits, count, scores);
    scratch.choice = scratch.scores;
    if (choice_bias)
      for (int i = 0; i < count; i++) scratch.choice[static_cast<size_t>(i)] += choice_bias[i];
    if (routing.num_groups > 1) keep_best_groups(routing, scratch);
    take_best(scratch.choice.data(), count, num_used, scratch.order);
  }
  std::copy_n(scratch.order.begin(), num_used, chosen);
  std::sort(chosen, chosen + num_used);
  float total = 0.0f;
  for (int i = 0; i < num_used; i++) total += scores[chosen[i]];
  for (int i = 0; i < num_used; i++) {
    weights[i] = scores[chosen[i]];
    if (routing.normalises) weights[i] /= total;
    weights[i] *= routing.scale;
    if (factors) weights[i] *= factors[chosen[i]];
  }
}

}  // namespace quire
