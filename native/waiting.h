// Puts a thread to sleep until a word changes: on a futex, or on a condition variable where there
// is none. On Linux both are compiled, so that the fallback is tested too.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

// On a condition variable. wake() is called after the word was changed; with the mutex a sleeper is
// then either waiting already or sees the changed word.
class ConditionWaiting {
 public:
  void wait(std::atomic<uint32_t>& word, uint32_t seen) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    while (word.load() == seen) state_->condition.wait(lock);
  }
  void wake(std::atomic<uint32_t>&, int) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    lock.unlock();
    state_->condition.notify_all();
  }
  // Leaks the condition variable: in a child of fork() its destructor would wait for threads that
  // do not exist.
  void leak() { static_cast<void>(state_.release()); }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable condition;
  };
  std::unique_ptr<State> state_ = std::make_unique<State>();
};

#if defined(__linux__)
// The kernel compares the word with `seen` and sleeps atomically.
class FutexWaiting {
 public:
  void wait(std::atomic<uint32_t>& word, uint32_t seen) {
    while (word.load() == seen) {  // a signal, or another word's wake, may end the sleep
      syscall(SYS_futex, address(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
  }
  void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, address(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  }
  void leak() {}

 private:
  static uint32_t* address(std::atomic<uint32_t>& word) {
    static_assert(sizeof(word) == sizeof(uint32_t), "the kernel reads a plain 32-bit word");
    return reinterpret_cast<uint32_t*>(&word);
  }
};
#endif

#if defined(__linux__) && !defined(QUIRE_NO_FUTEX)
using Waiting = FutexWaiting;
#else
using Waiting = ConditionWaiting;
#endif

}  // namespace quire
