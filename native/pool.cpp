// The thread pool: claiming and stealing chunks, the barrier, spinning and sleeping, failures.
#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr std::chrono::microseconds spin_time{50};
constexpr int pauses_per_clock_read = 16;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

// Forks since the first pool was made: in a child of fork() the workers of earlier pools do not
// exist, and waiting for them would never end.
std::atomic<uint32_t> num_forks{0};

uint32_t count_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1); });
  if (registered != 0) throw std::runtime_error("pthread_atfork failed: no memory");
#endif
  return num_forks.load();
}

// Binds the calling thread to the index-th of the cores the process may use, if there are so many.
void pin_to_core(int index) {
#if defined(__linux__)
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &usable) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
#else
  (void)index;
#endif
}

int checked(int num_threads) {
  if (num_threads >= 1) return num_threads;
  throw std::invalid_argument("a pool needs at least 1 thread, got " + std::to_string(num_threads));
}

// A range of chunks in one word, so that both ends change atomically.
uint64_t range_of(int begin, int end) {
  return static_cast<uint64_t>(static_cast<uint32_t>(begin)) << 32 | static_cast<uint32_t>(end);
}
int begin_of(uint64_t range) { return static_cast<int>(range >> 32); }
int end_of(uint64_t range) { return static_cast<int>(range & 0xffffffffu); }

constexpr int none = -1;

}  // namespace

template <class Waiting>
BasicPool<Waiting>::BasicPool(int num_threads, bool may_spin, bool pin)
    : num_threads_(checked(num_threads)),
      may_spin_(may_spin),
      forks_at_start_(count_forks()),
      shares_(new Share[static_cast<size_t>(num_threads)]) {
  workers_.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; thread++) {
      workers_.emplace_back([this, thread, pin] {
        if (pin) pin_to_core(thread);
        work(thread);
      });
    }
  } catch (...) {
    stop();
    throw;
  }
}

template <class Waiting>
BasicPool<Waiting>::~BasicPool() {
  if (num_forks.load() == forks_at_start_) {
    stop();
  } else {
    // These threads exist in the parent of fork() only: they can be neither joined nor detached, so
    // the handles are leaked.
    new std::vector<std::thread>(std::move(workers_));
    wake_waiting_.leak();
    finish_waiting_.leak();
  }
}

template <class Waiting>
void BasicPool<Waiting>::stop() {
  is_stopping_.store(true);
  wake_count_.fetch_add(1);
  wake_waiting_.wake(wake_count_, INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

template <class Waiting>
void BasicPool<Waiting>::begin() {
  if (num_threads_ == 1 || !may_spin_) return;
  in_session_.store(true);
  wake_sleepers(INT_MAX);
}

template <class Waiting>
void BasicPool<Waiting>::end() {
  in_session_.store(false, std::memory_order_relaxed);
}

// ---- one stage, on the calling thread

template <class Waiting>
void BasicPool<Waiting>::run_stage(Stage stage) {
  if (stage.num_tasks < 0 || stage.chunk < 1) {
    throw std::invalid_argument("a stage needs tasks >= 0 and a chunk >= 1, got " +
                                std::to_string(stage.num_tasks) + " and " +
                                std::to_string(stage.chunk));
  }
  stage.num_chunks = stage.num_tasks / stage.chunk + (stage.num_tasks % stage.chunk != 0);
  if (num_forks.load(std::memory_order_relaxed) != forks_at_start_ && num_threads_ > 1) {
    throw std::logic_error(
        "a thread pool does not outlive fork(): make the executor in the process that uses it");
  }
  if (is_running_.exchange(true, std::memory_order_acquire)) {
    throw std::logic_error("the thread pool is running another stage");
  }
  if (num_threads_ == 1 || stage.num_chunks <= 1) {
    run_alone(stage);
  } else {
    publish(stage);
    run_chunks(0);
    wait_for_barrier();
  }
  std::exception_ptr failure = take_failure();
  is_running_.store(false, std::memory_order_release);
  if (failure) std::rethrow_exception(failure);
}

template <class Waiting>
void BasicPool<Waiting>::run_alone(const Stage& stage) {
  for (int index = 0; index < stage.num_chunks; index++) run_chunk(stage, index, 0);
}

template <class Waiting>
void BasicPool<Waiting>::publish(const Stage& stage) {
  stage_ = stage;
  unfinished_.store(stage.num_chunks, std::memory_order_relaxed);
  for (int thread = 0; thread < num_threads_; thread++) {
    const auto first_of = [&](int64_t share) {
      return static_cast<int>(share * stage.num_chunks / num_threads_);
    };
    // Release: a thread that claims a chunk sees stage_ and unfinished_.
    shares_[static_cast<size_t>(thread)].unclaimed.store(
        range_of(first_of(thread), first_of(thread + 1)), std::memory_order_release);
  }
  // Sequentially consistent with sleep(): a sleeper either sees the new stage or is counted below.
  num_stages_.fetch_add(1);
  wake_sleepers(stage.num_chunks - 1);
}

template <class Waiting>
void BasicPool<Waiting>::wake_sleepers(int count) {
  const int num_sleepers = num_sleepers_.load();
  if (num_sleepers == 0) return;
  wake_count_.fetch_add(1);
  wake_waiting_.wake(wake_count_, std::min(count, num_sleepers));
}

template <class Waiting>
void BasicPool<Waiting>::wait_for_barrier() {
  const auto is_finished = [this] { return unfinished_.load() == 0; };
  if (is_finished() || (may_spin_ && spin_until(is_finished))) return;
  caller_sleeps_.store(true);
  for (uint32_t left = unfinished_.load(); left != 0; left = unfinished_.load()) {
    finish_waiting_.wait(unfinished_, left);
  }
  caller_sleeps_.store(false);
}

template <class Waiting>
std::exception_ptr BasicPool<Waiting>::take_failure() {
  if (failed_chunk_.load(std::memory_order_relaxed) == INT_MAX) return nullptr;
  failed_chunk_.store(INT_MAX, std::memory_order_relaxed);
  return std::exchange(exception_, nullptr);  // all threads are done
}

// ---- one stage, on every thread

// The next chunk of the thread's own share, or the last of another's; none when all are claimed.
template <class Waiting>
int BasicPool<Waiting>::claim(int thread) {
  int chunk = claim_first(shares_[static_cast<size_t>(thread)].unclaimed);
  for (int i = 1; chunk == none && i < num_threads_; i++)
    chunk = claim_last(shares_[static_cast<size_t>((thread + i) % num_threads_)].unclaimed);
  return chunk;
}

template <class Waiting>
int BasicPool<Waiting>::claim_first(std::atomic<uint64_t>& share) {
  uint64_t range = share.load(std::memory_order_relaxed);
  while (begin_of(range) < end_of(range)) {
    if (share.compare_exchange_weak(range, range_of(begin_of(range) + 1, end_of(range)),
                                    std::memory_order_acquire, std::memory_order_relaxed))
      return begin_of(range);
  }
  return none;
}

template <class Waiting>
int BasicPool<Waiting>::claim_last(std::atomic<uint64_t>& share) {
  uint64_t range = share.load(std::memory_order_relaxed);
  while (begin_of(range) < end_of(range)) {
    if (share.compare_exchange_weak(range, range_of(begin_of(range), end_of(range) - 1),
                                    std::memory_order_acquire, std::memory_order_relaxed))
      return end_of(range) - 1;
  }
  return none;
}

template <class Waiting>
void BasicPool<Waiting>::run_chunks(int thread) {
  int chunk = claim(thread);
  if (chunk == none) return;
  const Stage stage = stage_;
  uint32_t num_done = 0;
  for (; chunk != none; chunk = claim(thread)) {
    run_chunk(stage, chunk, thread);
    num_done++;
  }
  if (unfinished_.fetch_sub(num_done) == num_done && caller_sleeps_.load()) {
    finish_waiting_.wake(unfinished_, 1);
  }
}

// A chunk after one that threw is skipped; one before it runs: the earliest exception is kept,
// whatever the timing.
template <class Waiting>
void BasicPool<Waiting>::run_chunk(const Stage& stage, int index, int thread) {
  if (index > failed_chunk_.load(std::memory_order_relaxed)) return;
  const int begin = index * stage.chunk;
  const int end = begin + std::min(stage.chunk, stage.num_tasks - begin);
  try {
    stage.call(stage.context, begin, end, thread);
  } catch (...) {
    record_failure(index, std::current_exception());
  }
}

template <class Waiting>
void BasicPool<Waiting>::record_failure(int index, std::exception_ptr exception) {
  std::lock_guard<std::mutex> lock(exception_mutex_);
  if (index > failed_chunk_.load()) return;
  failed_chunk_.store(index);
  exception_ = std::move(exception);
}

// ---- a worker

template <class Waiting>
void BasicPool<Waiting>::work(int thread) {
  uint32_t seen = 0;
  while (wait_for_stage(seen)) run_chunks(thread);
}

// Waits for a stage that the worker has not seen; false when the pool stops.
template <class Waiting>
bool BasicPool<Waiting>::wait_for_stage(uint32_t& seen) {
  const auto is_new = [&] { return num_stages_.load(std::memory_order_relaxed) != seen; };
  const auto may_stop_spinning = [&] {
    return is_new() || !in_session_.load(std::memory_order_relaxed);
  };
  for (;;) {
    if (is_new()) {
      seen = num_stages_.load();
      return true;
    }
    if (is_stopping_.load()) return false;
    const bool spins = in_session_.load(std::memory_order_relaxed);
    if (!(spins && spin_until(may_stop_spinning))) sleep(seen);
  }
}

template <class Waiting>
void BasicPool<Waiting>::sleep(uint32_t seen_stage) {
  const uint32_t seen = wake_count_.load();
  num_sleepers_.fetch_add(1);
  if (num_stages_.load() == seen_stage && !is_stopping_.load())
    wake_waiting_.wait(wake_count_, seen);
  num_sleepers_.fetch_sub(1);
}

// Whether the condition became true within spin_time.
template <class Waiting>
template <class Condition>
bool BasicPool<Waiting>::spin_until(Condition is_met) const {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < pauses_per_clock_read; i++) {
      if (is_met()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() - start < spin_time);
  return false;
}

template class BasicPool<ConditionWaiting>;
#if defined(__linux__)
template class BasicPool<FutexWaiting>;
#endif

}  // namespace quire
