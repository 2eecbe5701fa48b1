// The thread pool in Python, for its tests: stages whose traces show what the pool did.
#include "bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Chunk = std::tuple<int, int, int>;  // begin, end, thread

// The chunks of one stage, in order of their tasks.
template <class Waiting>
std::vector<Chunk> trace(BasicPool<Waiting>& pool, int num_tasks, int chunk) {
  nb::gil_scoped_release released;
  std::vector<Chunk> chunks;
  std::mutex mutex;
  pool.run(num_tasks, chunk, [&](int begin, int end, int thread) {
    std::lock_guard<std::mutex> lock(mutex);
    chunks.emplace_back(begin, end, thread);
  });
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

// Runs stages each of which reads what the one before wrote, in another order: the values are wrong
// without a barrier. Sleeps before each stage, so that workers fall asleep.
template <class Waiting>
std::vector<uint64_t> run_stages(BasicPool<Waiting>& pool, int num_stages, int num_tasks, int chunk,
                                 int rest_microseconds) {
  nb::gil_scoped_release released;
  std::vector<uint64_t> now(num_tasks, 1), next(num_tasks);
  typename BasicPool<Waiting>::Session step(pool);
  for (int stage = 0; stage < num_stages; stage++) {
    std::this_thread::sleep_for(std::chrono::microseconds(rest_microseconds));
    pool.run(num_tasks, chunk, [&](int begin, int end, int) {
      for (int i = begin; i < end; i++) next[i] = 2 * now[i] + now[num_tasks - 1 - i] + i;
    });
    now.swap(next);
  }
  return now;
}

// Throws from every task of `failing`.
template <class Waiting>
void fail(BasicPool<Waiting>& pool, int num_tasks, const std::vector<int>& failing) {
  nb::gil_scoped_release released;
  pool.run(num_tasks, 1, [&](int begin, int, int) {
    if (std::find(failing.begin(), failing.end(), begin) != failing.end()) {
      throw std::runtime_error("task " + std::to_string(begin));
    }
  });
}

// Runs a stage from within a stage.
template <class Waiting>
void run_nested(BasicPool<Waiting>& pool) {
  nb::gil_scoped_release released;
  pool.run(2, 1, [&](int, int, int) { pool.run(2, 1, [](int, int, int) {}); });
}

// Threads that took part in one stage of as many tasks, each waiting for the others for a while.
template <class Waiting>
int count_threads(BasicPool<Waiting>& pool, int wait_milliseconds) {
  nb::gil_scoped_release released;
  std::atomic<int> num_begun{0};
  pool.run(pool.size(), 1, [&](int, int, int) {
    num_begun.fetch_add(1);
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_milliseconds);
    while (num_begun.load() < pool.size() && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
  });
  return num_begun.load();
}

// The tasks that each thread ran, in order. Task 0 waits for all others, and they for its begin, so
// that the other threads must steal.
template <class Waiting>
std::vector<std::vector<int>> trace_stealing(BasicPool<Waiting>& pool, int num_tasks,
                                             int wait_milliseconds) {
  nb::gil_scoped_release released;
  std::vector<std::vector<int>> of_thread(static_cast<size_t>(pool.size()));
  std::atomic<bool> has_begun{false};
  std::atomic<int> num_done{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_milliseconds);
  pool.run(num_tasks, 1, [&](int task, int, int thread) {
    of_thread[static_cast<size_t>(thread)].push_back(task);
    if (task == 0) has_begun.store(true);
    const auto may_go_on = [&] {
      return task == 0 ? num_done.load() >= num_tasks - 1 : has_begun.load();
    };
    while (!may_go_on() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    num_done.fetch_add(1);
  });
  return of_thread;
}

template <class Waiting>
void bind_one(nb::module_& m, const char* name) {
  using Pool = BasicPool<Waiting>;
  nb::class_<Pool>(m, name)
      .def(nb::init<int, bool, bool>(), "num_threads"_a, "may_spin"_a = true, "pin"_a = false)
      .def_prop_ro("size", &Pool::size)
      .def("trace", &trace<Waiting>, "num_tasks"_a, "chunk"_a)
      .def("run_stages", &run_stages<Waiting>, "num_stages"_a, "num_tasks"_a, "chunk"_a,
           "rest_microseconds"_a = 0)
      .def("fail", &fail<Waiting>, "num_tasks"_a, "failing"_a)
      .def("run_nested", &run_nested<Waiting>)
      .def("trace_stealing", &trace_stealing<Waiting>, "num_tasks"_a, "wait_milliseconds"_a)
      .def("count_threads", &count_threads<Waiting>, "wait_milliseconds"_a);
}

}  // namespace

void bind_pool(nb::module_& m) {
  bind_one<ConditionWaiting>(m, "ConditionPool");
#if defined(__linux__)
  bind_one<FutexWaiting>(m, "FutexPool");
#endif
}

}  // namespace quire
