// Buffer: aligned memory, mapped lazily, in large pages where possible.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sizes.h"

namespace quire {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size);  // zeros; throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer old(static_cast<Buffer&&>(*this));
    data_ = other.data_;
    size_ = other.size_;
    other.data_ = nullptr;
    other.size_ = 0;
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // At least so large; the contents may be lost.
  void grow(size_t size) {
    if (size > size_) *this = Buffer(size);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Small allocations out of large buffers, so that they too are in large pages. They live as long as
// the arena; pages that are never written take no memory.
class Arena {
 public:
  uint8_t* allocate(size_t size);  // aligned to a cache line

 private:
  static constexpr size_t chunk_size = size_t{32} << 20;
  std::vector<Buffer> chunks_;
  size_t used_ = 0;  // of the last chunk
};

}  // namespace quire
