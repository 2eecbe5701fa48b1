// Drives the thread pool the way a step does, for the sanitizers: many short stages, pauses long
// enough for the workers to fall asleep, failures, and pools that come and go.
//
// Built by `make sanitize`; exits with 1 and says which check failed. With an argument it prints
// what a stage costs instead.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../pool.h"

namespace {

using namespace quire;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "pool_check: %s\n", what);
  std::exit(1);
}

// Each stage reads what the one before it wrote, in another order: a missing barrier shows.
template <class Waiting>
void stages_follow_each_other(int num_threads, bool may_spin, int num_stages) {
  constexpr int num_tasks = 37;
  BasicPool<Waiting> pool(num_threads, may_spin);
  std::vector<int64_t> now(num_tasks, 1), next(num_tasks);
  typename BasicPool<Waiting>::Session step(pool);
  for (int stage = 0; stage < num_stages; stage++) {
    pool.run(num_tasks, 1 + stage % 5, [&](int begin, int end, int thread) {
      expect(thread >= 0 && thread < num_threads, "a thread's number is out of range");
      for (int i = begin; i < end; i++) next[i] = now[num_tasks - 1 - i] + 1;
    });
    now.swap(next);
    if (stage % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(120));
  }
  for (int64_t value : now) expect(value == num_stages + 1, "a stage began before another ended");
}

template <class Waiting>
void the_earliest_failure_is_thrown(int num_threads, bool may_spin) {
  BasicPool<Waiting> pool(num_threads, may_spin);
  for (int round = 0; round < 200; round++) {
    int caught = -1;
    try {
      pool.run(50, 1, [&](int begin, int, int) {
        if (begin == 11 || begin >= 30) throw begin;
      });
    } catch (int task) {
      caught = task;
    }
    expect(caught == 11, "not the earliest failure was thrown");
    pool.run(50, 1, [](int, int, int) {});
  }
}

template <class Waiting>
void pools_come_and_go(bool may_spin) {
  for (int round = 0; round < 50; round++) {
    BasicPool<Waiting> pool(1 + round % 4, may_spin);
    if (round % 2) pool.run(round, 1, [](int, int, int) {});
  }
}

template <class Waiting>
void check() {
  for (bool may_spin : {true, false}) {
    for (int num_threads : {1, 2, 3, 4}) {
      stages_follow_each_other<Waiting>(num_threads, may_spin, 2000);
      the_earliest_failure_is_thrown<Waiting>(num_threads, may_spin);
    }
    pools_come_and_go<Waiting>(may_spin);
  }
}

void burn(std::chrono::nanoseconds time) {
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < time) {
  }
}

// What a stage of two equal tasks takes on two threads beyond one of its tasks: the median.
template <class Waiting>
void print_cost_of_a_stage(bool may_spin) {
  constexpr int num_stages = 20000;
  constexpr std::chrono::nanoseconds task{10000};
  BasicPool<Waiting> pool(2, may_spin);
  typename BasicPool<Waiting>::Session step(pool);
  std::vector<double> costs(num_stages);
  for (double& cost : costs) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(2, 1, [&](int, int, int) { burn(task); });
    cost = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start - task)
               .count();
  }
  std::nth_element(costs.begin(), costs.begin() + num_stages / 2, costs.end());
  const double cost = costs[num_stages / 2];
  std::printf("2 threads, %s: %.0f ns a stage\n", may_spin ? "spinning" : "sleeping", cost);
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) {
    for (bool may_spin : {true, false}) print_cost_of_a_stage<Waiting>(may_spin);
    return 0;
  }
  check<ConditionWaiting>();
#if defined(__linux__)
  check<FutexWaiting>();
#endif
  std::puts("pool_check: all is well");
  return 0;
}
