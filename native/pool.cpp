// The thread pool's machinery: claiming chunks, waiting with and without spinning, failures.
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
constexpr int pauses_per_look_at_the_clock = 16;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

// How many forks lie between the first pool and this process: in a child of fork() the workers of
// the pools made before it do not exist, and waiting for them would last forever.
std::atomic<uint32_t> num_forks{0};

uint32_t count_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1); });
  if (registered != 0) throw std::runtime_error("no memory to watch for fork()");
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

// A range of chunks in one word, so that both its ends change together.
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
      born_after_forks_(count_forks()),
      shares_(new Share[static_cast<size_t>(num_threads)]) {
  workers_.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; thread++) {
      workers_.emplace_back([this, thread, pin] {
        if (pin) pin_to_core(thread);
        serve(thread);
      });
    }
  } catch (...) {
    stop();
    throw;
  }
}

template <class Waiting>
BasicPool<Waiting>::~BasicPool() {
  if (num_forks.load() == born_after_forks_) {
    stop();
  } else {
    // The threads these handles name were left behind by fork(): they can be neither joined nor
    // detached, so the handles are leaked.
    new std::vector<std::thread>(std::move(workers_));
    for_call_.abandon();
    for_finish_.abandon();
  }
}

template <class Waiting>
void BasicPool<Waiting>::stop() {
  is_stopping_.store(true);
  call_.fetch_add(1);
  for_call_.wake(call_, INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

template <class Waiting>
void BasicPool<Waiting>::begin() {
  if (num_threads_ == 1 || !may_spin_) return;
  is_awake_.store(true);
  wake_sleepers(INT_MAX);
}

template <class Waiting>
void BasicPool<Waiting>::end() {
  is_awake_.store(false, std::memory_order_relaxed);
}

// ---- one stage, seen by its caller

template <class Waiting>
void BasicPool<Waiting>::run_stage(Stage stage) {
  if (stage.num_tasks < 0 || stage.chunk < 1) {
    throw std::invalid_argument("a stage needs tasks >= 0 and a chunk >= 1, got " +
                                std::to_string(stage.num_tasks) + " and " +
                                std::to_string(stage.chunk));
  }
  stage.num_chunks = stage.num_tasks / stage.chunk + (stage.num_tasks % stage.chunk != 0);
  if (num_forks.load(std::memory_order_relaxed) != born_after_forks_ && num_threads_ > 1) {
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
    take_part(0);
    await_finish();
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
    // Whoever claims one of these has seen the stage and how much of it is unfinished.
    shares_[static_cast<size_t>(thread)].unclaimed.store(
        range_of(first_of(thread), first_of(thread + 1)), std::memory_order_release);
  }
  // In one total order with the sleepers' own look at it: either they see the stage, or they are
  // counted below.
  num_stages_.fetch_add(1);
  wake_sleepers(stage.num_chunks - 1);
}

template <class Waiting>
void BasicPool<Waiting>::wake_sleepers(int count) {
  const int num_sleepers = num_sleepers_.load();
  if (num_sleepers == 0) return;
  call_.fetch_add(1);
  for_call_.wake(call_, std::min(count, num_sleepers));
}

template <class Waiting>
void BasicPool<Waiting>::await_finish() {
  const auto is_finished = [this] { return unfinished_.load() == 0; };
  if (is_finished() || (may_spin_ && spin_until(is_finished))) return;
  caller_sleeps_.store(true);
  for (uint32_t left = unfinished_.load(); left != 0; left = unfinished_.load()) {
    for_finish_.wait(unfinished_, left);
  }
  caller_sleeps_.store(false);
}

template <class Waiting>
std::exception_ptr BasicPool<Waiting>::take_failure() {
  if (failed_chunk_.load(std::memory_order_relaxed) == INT_MAX) return nullptr;
  failed_chunk_.store(INT_MAX, std::memory_order_relaxed);
  return std::exchange(exception_, nullptr);  // all threads are done: nobody else looks at it
}

// ---- one stage, seen by every thread

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
void BasicPool<Waiting>::take_part(int thread) {
  int chunk = claim(thread);
  if (chunk == none) return;
  const Stage stage = stage_;
  uint32_t num_done = 0;
  for (; chunk != none; chunk = claim(thread)) {
    run_chunk(stage, chunk, thread);
    num_done++;
  }
  if (unfinished_.fetch_sub(num_done) == num_done && caller_sleeps_.load()) {
    for_finish_.wake(unfinished_, 1);
  }
}

// A chunk after one that threw is left out; one before it runs, so that the exception that is kept
// is the same whatever the threads did.
template <class Waiting>
void BasicPool<Waiting>::run_chunk(const Stage& stage, int index, int thread) {
  if (index > failed_chunk_.load(std::memory_order_relaxed)) return;
  const int begin = index * stage.chunk;
  const int end = begin + std::min(stage.chunk, stage.num_tasks - begin);
  try {
    stage.call(stage.context, begin, end, thread);
  } catch (...) {
    remember(index, std::current_exception());
  }
}

template <class Waiting>
void BasicPool<Waiting>::remember(int index, std::exception_ptr exception) {
  std::lock_guard<std::mutex> lock(exception_mutex_);
  if (index > failed_chunk_.load()) return;
  failed_chunk_.store(index);
  exception_ = std::move(exception);
}

// ---- a worker

template <class Waiting>
void BasicPool<Waiting>::serve(int thread) {
  uint32_t seen = 0;
  while (await_stage(seen)) take_part(thread);
}

// Whether there is a stage the worker has not seen; false when the pool ends.
template <class Waiting>
bool BasicPool<Waiting>::await_stage(uint32_t& seen) {
  const auto is_new = [&] { return num_stages_.load(std::memory_order_relaxed) != seen; };
  const auto is_answered = [&] { return is_new() || !is_awake_.load(std::memory_order_relaxed); };
  for (;;) {
    if (is_new()) {
      seen = num_stages_.load();
      return true;
    }
    if (is_stopping_.load()) return false;
    const bool spins = is_awake_.load(std::memory_order_relaxed);
    if (!(spins && spin_until(is_answered))) sleep(seen);
  }
}

template <class Waiting>
void BasicPool<Waiting>::sleep(uint32_t seen_stage) {
  const uint32_t seen = call_.load();
  num_sleepers_.fetch_add(1);
  if (num_stages_.load() == seen_stage && !is_stopping_.load()) for_call_.wait(call_, seen);
  num_sleepers_.fetch_sub(1);
}

// Whether the condition came true before the time for spinning was over.
template <class Waiting>
template <class Condition>
bool BasicPool<Waiting>::spin_until(Condition is_met) const {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < pauses_per_look_at_the_clock; i++) {
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
