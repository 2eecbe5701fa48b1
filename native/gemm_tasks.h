// How GEMM stages are divided into tasks of the pool.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace quire {

constexpr int panels_per_task = 2;  // so that a gate's task fills one ActivationGroup
static_assert(panels_per_task * panel_rows == group_size, "a task fills a whole group");
constexpr int task_outputs = panels_per_task * panel_rows;
constexpr int rows_per_pass = 256;  // whose results are in a thread's scratch

inline int tasks_of(int64_t out_size) {
  return static_cast<int>((out_size + task_outputs - 1) / task_outputs);
}

// Tasks of a chunk: long runs for each thread, but eight chunks per thread against imbalance.
inline int chunk_size(int num_tasks, int num_threads) {
  return std::max(1, num_tasks / (num_threads * 8));
}

}  // namespace quire
