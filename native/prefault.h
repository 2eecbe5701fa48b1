// TouchAhead: has the system give memory shortly before it is first written.
//
// A page that is written for the first time is found and zeroed while the writer waits: a few
// milliseconds for a large one, many more where a virtual machine's host has to find it too. A
// thread that gives way to all others, and rests while anything is in use, takes that wait, some
// way ahead of use.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace quire {

class TouchAhead {
 public:
  TouchAhead();
  // For memory of `count` regions of equal size, each used from its beginning onwards: keeps about
  // `margin` bytes, of all regions together, ahead of what reach() tells. Only a change of the
  // process's memory map can have to wait for it, for as long as a large page takes. Where not
  // `gives_way`, its thread has a core as any other thread has.
  TouchAhead(uint8_t* data, size_t region_size, int count, size_t margin, bool gives_way);
  ~TouchAhead();  // must go before the memory does
  TouchAhead(TouchAhead&& other) noexcept;
  TouchAhead& operator=(TouchAhead&& other) noexcept;

  // So many bytes of each region are in use now.
  void reach(size_t used);
  void stop();  // for good; what is not touched then comes when it is written
  // So many bytes of each region were asked for; fewer where the system cannot give ahead.
  size_t touched() const;

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace quire
