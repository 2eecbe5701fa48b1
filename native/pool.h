// The thread pool: runs one short stage of tasks after another, with a barrier at the end of each,
// on threads that spin between the stages of a step.
//
//   Pool pool(2, true);
//   Pool::Session step(pool);  // until its end the workers spin between stages
//   pool.run(num_rows, 32, [&](int begin, int end, int thread) { ... });
//
// Each thread has a share of the chunks, the same in every stage of as many tasks, for the sake of
// its core's cache. A thread that is done steals from the ends of the other shares. Which thread
// runs a chunk varies; where chunks begin and end does not. Work that writes only what belongs to
// its tasks therefore gives the same bits with any number of threads.
#pragma once
#include <climits>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "waiting.h"

namespace quire {

constexpr int separation = 128;  // bytes against false sharing; 64-byte lines are fetched in pairs

template <class Waiting>
class BasicPool {
 public:
  // may_spin: whether waiting threads may spin for some tens of microseconds; false where the
  // process has fewer cores than threads. pin: binds each worker to one core; the calling thread
  // is not bound. Throws std::invalid_argument, std::system_error.
  explicit BasicPool(int num_threads, bool may_spin = true, bool pin = false);
  ~BasicPool();
  BasicPool(const BasicPool&) = delete;
  BasicPool& operator=(const BasicPool&) = delete;

  int size() const { return num_threads_; }

  // Calls work(begin, end, thread) for chunks of [0, num_tasks) on all threads, the caller being
  // thread 0, and returns when all of them are done. If work throws, later chunks are skipped and
  // the exception of the earliest failing chunk is thrown here. One stage at a time: a call from
  // within work, or from two threads at once, throws std::logic_error. So does any call in a child
  // of fork(), where the workers do not exist.
  template <class Work>
  void run(int num_tasks, int chunk, Work&& work) {
    using Plain = std::remove_reference_t<Work>;
    run_stage({[](void* context, int begin, int end, int thread) {
                 (*static_cast<Plain*>(context))(begin, end, thread);
               },
               const_cast<void*>(static_cast<const void*>(&work)), num_tasks, chunk, 0});
  }

  // Between begin and end the workers spin between stages instead of sleeping.
  void begin();
  void end();

  class Session {
   public:
    explicit Session(BasicPool& pool) : pool_(pool) { pool_.begin(); }
    ~Session() { pool_.end(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    BasicPool& pool_;
  };

 private:
  struct Stage {
    void (*call)(void* context, int begin, int end, int thread);
    void* context;
    int num_tasks, chunk;
    int num_chunks;
  };

  void run_stage(Stage stage);
  void run_alone(const Stage& stage);
  void publish(const Stage& stage);
  void run_chunks(int thread);
  int claim(int thread);
  static int claim_first(std::atomic<uint64_t>& share);
  static int claim_last(std::atomic<uint64_t>& share);
  void run_chunk(const Stage& stage, int index, int thread);
  void record_failure(int index, std::exception_ptr exception);
  void wait_for_barrier();
  std::exception_ptr take_failure();
  void work(int thread);
  bool wait_for_stage(uint32_t& seen);
  void sleep(uint32_t seen_stage);
  void wake_sleepers(int count);
  template <class Condition>
  bool spin_until(Condition is_met) const;
  void stop();

  const int num_threads_;
  const bool may_spin_;
  const uint32_t forks_at_start_;
  std::vector<std::thread> workers_;

  // The unclaimed chunks of a thread's share: first, and one past the last.
  struct alignas(separation) Share {
    std::atomic<uint64_t> unclaimed{0};
  };
  const std::unique_ptr<Share[]> shares_;

  // Written by the caller for each stage. `stage_` may be read only by a thread that has claimed a
  // chunk and not yet reported it: the next stage cannot begin then.
  alignas(separation) std::atomic<uint32_t> num_stages_{0};  // that were published to the workers
  std::atomic<bool> in_session_{false};                      // between begin and end
  std::atomic<bool> is_stopping_{false};
  Stage stage_{};

  alignas(separation) std::atomic<uint32_t> unfinished_{0};  // chunks
  std::atomic<bool> caller_sleeps_{false};

  alignas(separation) std::atomic<uint32_t> wake_count_{0};  // changes to wake the sleepers
  std::atomic<int> num_sleepers_{0};
  Waiting wake_waiting_, finish_waiting_;

  alignas(separation) std::atomic<int> failed_chunk_{INT_MAX};  // the earliest that threw
  std::exception_ptr exception_;
  std::mutex exception_mutex_;
  std::atomic<bool> is_running_{false};
};

using Pool = BasicPool<Waiting>;

}  // namespace quire
