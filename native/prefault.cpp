// The prefault thread: its priority, its pauses, how it stops.
#include "prefault.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

// A large page: bounds how long stop() waits.
constexpr size_t step_bytes = size_t{2} << 20;

// Pause after the last use: while a host looks for memory it stops a core, whatever runs on it.
constexpr std::chrono::milliseconds quiet_time{500};

int64_t milliseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

#if defined(__linux__)

// Of the calling thread alone: about 1% of a busy core. Not SCHED_IDLE, a fifth of that: stop()
// waits until the thread was scheduled.
void lower_priority() {
  constexpr int least = 19;
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), least);
}

// Faults in pages for writing without changing them. False where the system cannot do that.
bool populate(uint8_t* data, size_t size) {
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, of Linux 5.14
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + size;
  return madvise(reinterpret_cast<void*>(begin), end - begin, populate_write) == 0;
}

long process() { return getpid(); }

#else

void lower_priority() {}
bool populate(uint8_t*, size_t) { return false; }
long process() { return 0; }

#endif

}  // namespace

struct Prefault::Work {
  uint8_t* data;
  std::vector<size_t> region_sizes;
  size_t region_size;  // of the largest: what follows counts its bytes, and a share of the others
  size_t margin;
  bool low_priority;
  long made_by = process();

  std::atomic<size_t> prefaulted{0};
  std::mutex mutex{};
  std::condition_variable changed{};
  std::atomic<size_t> wanted{0};
  std::atomic<int64_t> last_use{0};  // in milliseconds; 0: none yet
  std::atomic<bool> is_stopping{false};
  std::once_flag joined{};
  std::thread thread{};

  bool is_own_process() const { return made_by == process(); }

  // As many bytes of a region as those of the largest.
  size_t share_of(size_t size, size_t bytes) const {
    if (size == region_size) return bytes;
    return static_cast<size_t>(static_cast<double>(bytes) / static_cast<double>(region_size) *
                               static_cast<double>(size));
  }

  void want(size_t used) {
    const size_t all = std::min(region_size, used + margin);
    if (all <= wanted.load()) return;  // nearly always; takes no lock then
    {
      std::lock_guard<std::mutex> lock(mutex);
      wanted.store(all);
    }
    changed.notify_one();
  }

  bool wait_for_work() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_stopping.load() || prefaulted.load() < wanted.load(); });
    return !is_stopping.load();
  }

  // Until no step ran for quiet_time; false when the thread is to stop.
  bool wait_for_pause() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!is_stopping.load() && milliseconds_now() - last_use.load() < quiet_time.count())
      changed.wait_for(lock, quiet_time);
    return !is_stopping.load();
  }

  void run() {
    if (low_priority) lower_priority();
    while (wait_for_work()) {
      const size_t from = prefaulted.load(), size = std::min(step_bytes, region_size - from);
      uint8_t* region = data;
      for (const size_t own : region_sizes) {
        if (!wait_for_pause()) return;
        const size_t begin = share_of(own, from), end = share_of(own, from + size);
        if (!populate(region + begin, end - begin)) return;
        region += own;
      }
      prefaulted.store(from + size);
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      is_stopping.store(true);
    }
    changed.notify_one();
    std::call_once(joined, [this] { thread.join(); });
  }
};

Prefault::Prefault() = default;
Prefault::Prefault(Prefault&& other) noexcept = default;

Prefault& Prefault::operator=(Prefault&& other) noexcept {
  Prefault old(static_cast<Prefault&&>(*this));
  work_ = std::move(other.work_);
  return *this;
}

Prefault::Prefault(uint8_t* data, std::vector<size_t> region_sizes, size_t margin,
                   bool low_priority) {
  const size_t largest = *std::max_element(region_sizes.begin(), region_sizes.end());
  const size_t all = std::accumulate(region_sizes.begin(), region_sizes.end(), size_t{0});
  const double share = static_cast<double>(largest) / static_cast<double>(all);
  const auto own = static_cast<size_t>(static_cast<double>(margin) * share);
  work_.reset(new Work{data, std::move(region_sizes), largest, own, low_priority});
  work_->want(0);
  try {
    work_->thread = std::thread([work = work_.get()] { work->run(); });
  } catch (const std::system_error&) {
    work_.reset();  // no thread available: pages are faulted in when they are written
  }
}

Prefault::~Prefault() {
  if (work_ && !work_->is_own_process())
    static_cast<void>(work_.release());  // after fork() the thread does not exist in the child
  stop();
}

void Prefault::stop() {
  if (work_ && work_->is_own_process()) work_->stop();
}

void Prefault::set_used(double share) {
  if (!work_ || !work_->is_own_process()) return;
  work_->last_use.store(milliseconds_now());
  work_->want(static_cast<size_t>(share * static_cast<double>(work_->region_size) + 0.5));
}

size_t Prefault::prefaulted() const {
  size_t total = 0;
  if (work_)
    for (const size_t size : work_->region_sizes)
      total += work_->share_of(size, work_->prefaulted.load());
  return total;
}

}  // namespace quire
