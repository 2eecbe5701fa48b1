// The thread that touches memory, and how it is told and stopped.
#include "prefault.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
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

// A large page: the longest wait before stopping, where the thread has a core to run on.
constexpr size_t at_once = size_t{2} << 20;

// After the last use: a host that looks for memory stops a core whatever runs on it.
constexpr std::chrono::milliseconds quiet_time{500};

int64_t milliseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

#if defined(__linux__)

// The calling thread alone: its share of a busy core is a hundredth. Not SCHED_IDLE's, a fifth of
// that, for whoever stops it waits until it has had its turn.
void give_way() {
  constexpr int least = 19;
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), least);
}

// As if each page were written what it holds. False where the system cannot do that.
bool populate(uint8_t* data, size_t size) {
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, of Linux 5.14
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + size;
  return madvise(reinterpret_cast<void*>(begin), end - begin, populate_write) == 0;
}

long process() { return getpid(); }

#else

void give_way() {}
bool populate(uint8_t*, size_t) { return false; }
long process() { return 0; }

#endif

}  // namespace

struct TouchAhead::Work {
  uint8_t* data;
  size_t region_size;
  int count;
  size_t margin;  // of each region
  bool gives_way;
  long made_by = process();

  std::atomic<size_t> touched{0};
  std::mutex mutex{};
  std::condition_variable changed{};
  std::atomic<size_t> wanted{0};
  std::atomic<int64_t> last_use{0};  // in milliseconds; 0: none yet
  std::atomic<bool> is_stopping{false};
  std::once_flag joined{};
  std::thread thread{};

  bool is_here() const { return made_by == process(); }

  void want(size_t used) {
    const size_t all = std::min(region_size, used + margin);
    if (all <= wanted.load()) return;  // nearly always: then nobody waits for a thread that idles
    {
      std::lock_guard<std::mutex> lock(mutex);
      wanted.store(all);
    }
    changed.notify_one();
  }

  bool await_more() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_stopping.load() || touched.load() < wanted.load(); });
    return !is_stopping.load();
  }

  // False when it is to stop.
  bool await_quiet() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!is_stopping.load() && milliseconds_now() - last_use.load() < quiet_time.count())
      changed.wait_for(lock, quiet_time);
    return !is_stopping.load();
  }

  void serve() {
    if (gives_way) give_way();
    while (await_more()) {
      const size_t from = touched.load(), size = std::min(at_once, region_size - from);
      for (int i = 0; i < count; i++) {
        if (!await_quiet()) return;
        if (!populate(data + static_cast<size_t>(i) * region_size + from, size)) return;
      }
      touched.store(from + size);
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

TouchAhead::TouchAhead() = default;
TouchAhead::TouchAhead(TouchAhead&& other) noexcept = default;

TouchAhead& TouchAhead::operator=(TouchAhead&& other) noexcept {
  TouchAhead old(static_cast<TouchAhead&&>(*this));
  work_ = std::move(other.work_);
  return *this;
}

TouchAhead::TouchAhead(uint8_t* data, size_t region_size, int count, size_t margin, bool gives_way)
    : work_(new Work{data, region_size, count, margin / static_cast<size_t>(count), gives_way}) {
  work_->want(0);
  try {
    work_->thread = std::thread([work = work_.get()] { work->serve(); });
  } catch (const std::system_error&) {
    work_.reset();  // no thread to be had: memory then comes when it is written
  }
}

TouchAhead::~TouchAhead() {
  if (work_ && !work_->is_here())
    static_cast<void>(work_.release());  // after fork() the thread is not here to be joined
  stop();
}

void TouchAhead::stop() {
  if (work_ && work_->is_here()) work_->stop();
}

void TouchAhead::reach(size_t used) {
  if (!work_ || !work_->is_here()) return;
  work_->last_use.store(milliseconds_now());
  work_->want(used);
}

size_t TouchAhead::touched() const { return work_ ? work_->touched.load() : 0; }

}  // namespace quire
