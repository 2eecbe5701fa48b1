// From a token's router scores to its experts and their weights.
#pragma once
#include <cstdint>
#include <vector>

namespace quire {

// As quire.model.spec.Scoring.
enum class Scoring : int { softmax, sigmoid, sparse_mixer };
constexpr int num_scorings = 3;

struct Routing {
  int count, num_used;  // experts, and those that a token uses
  Scoring scoring;
  bool normalises;  // weights are divided by the sum of those chosen
  float scale;      // of the weights
  // Experts are in groups of equal size. Only those of the best groups are chosen; a group is as
  // good as the sum of its num_group_best best experts.
  int num_groups, num_used_groups, num_group_best;
};

// The same routing; throws std::invalid_argument where a number is out of bounds.
const Routing& checked(const Routing& routing);

// Sigmoid in double precision, rounded once.
float sigmoid_of(float x);

// Memory of one thread's choices.
struct RoutingScratch {
  std::vector<float> scores, choice, quality;
  std::vector<int> order, groups;
};

// The experts of one token in ascending order, and their weights: num_used each. Of experts that
// are equally good the first is chosen; NaN is worse than any number. `choice_bias` (or null) is
// added to scores when experts are chosen, `factors` (or null) multiply the weights: one number for
// each expert. A pure function of its arguments.
void choose_experts(const Routing& routing, const float* logits, const float* choice_bias,
                    const float* factors, RoutingScratch& scratch, int* chosen, float* weights);

}  // namespace quire
