// Prefault: faults in the pages of the KV cache ahead of their first write.
//
// The first write to a page waits until the kernel has found and zeroed it: a few milliseconds for
// a large page, many more where a virtual machine's host has to find it too. A thread of the lowest
// priority, which pauses while steps run, takes these faults ahead of use.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace quire {

class Prefault {
 public:
  Prefault();
  // For regions that follow each other, each used from its beginning: keeps about `margin` bytes,
  // of all regions together, faulted in ahead of set_used(). Nothing waits for the thread but
  // changes of the process's memory map, for as long as one large page takes.
  Prefault(uint8_t* data, std::vector<size_t> region_sizes, size_t margin, bool low_priority);
  ~Prefault();  // before the memory is freed
  Prefault(Prefault&& other) noexcept;
  Prefault& operator=(Prefault&& other) noexcept;

  // Such a share of each region is in use now.
  void set_used(double share);
  void stop();  // for good; pages not faulted in yet are when they are written
  // So many bytes of all regions are faulted in; 0 where the system cannot do that.
  size_t prefaulted() const;

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace quire
