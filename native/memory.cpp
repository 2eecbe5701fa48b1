// Allocates buffers: mmap with large pages on Linux, calloc elsewhere.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

// The address sanitizer checks single allocations of the C library.
#if defined(__SANITIZE_ADDRESS__)
#define QUIRE_SEPARATE_ALLOCATIONS
#elif defined(__linux__)
#define QUIRE_MAPS_MEMORY
#include <sys/mman.h>
#endif

namespace quire {
namespace {

constexpr size_t alignment = 64;
[[maybe_unused]] constexpr size_t large_page = size_t{2} << 20;

size_t rounded_up(size_t size, size_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

}  // namespace

#if defined(QUIRE_MAPS_MEMORY)

namespace {

uint8_t* mapped(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<uint8_t*>(memory);
}

// Aligned to a large page, so that all of it can be in large pages.
uint8_t* mapped_in_large_pages(size_t size) {
  uint8_t* all = mapped(size + large_page);
  const size_t before =
      rounded_up(reinterpret_cast<uintptr_t>(all), large_page) - reinterpret_cast<uintptr_t>(all);
  if (before > 0) munmap(all, before);
  if (before < large_page) munmap(all + before + size, large_page - before);
  madvise(all + before, size, MADV_HUGEPAGE);  // a hint
  return all + before;
}

// Bytes mapped for a buffer: whole large pages, if it has any.
size_t mapped_size(size_t size) { return rounded_up(size, size >= large_page ? large_page : 4096); }

}  // namespace

Buffer::Buffer(size_t size) : size_(size) {
  if (size == 0) return;
  const size_t all = mapped_size(size);
  data_ = size >= large_page ? mapped_in_large_pages(all) : mapped(all);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, mapped_size(size_));
}

#else

Buffer::Buffer(size_t size) : size_(size) {
  if (size == 0) return;
  // Over-allocated, with the original pointer just before the aligned data: works everywhere.
  void* memory = std::calloc(1, size + alignment + sizeof(void*));
  if (!memory) throw std::bad_alloc();
  const auto first = reinterpret_cast<uintptr_t>(memory) + sizeof(void*);
  data_ = reinterpret_cast<uint8_t*>(rounded_up(first, alignment));
  std::memcpy(data_ - sizeof(void*), &memory, sizeof(void*));
}

Buffer::~Buffer() {
  if (!data_) return;
  void* memory;
  std::memcpy(&memory, data_ - sizeof(void*), sizeof(void*));
  std::free(memory);
}

#endif

uint8_t* Arena::allocate(size_t size) {
#if defined(QUIRE_SEPARATE_ALLOCATIONS)
  chunks_.emplace_back(size);
  return chunks_.back().data();
#endif
  size = rounded_up(size, alignment);
  if (chunks_.empty() || chunks_.back().size() - used_ < size) {
    chunks_.emplace_back(size > chunk_size ? size : chunk_size);
    used_ = 0;
  }
  uint8_t* memory = chunks_.back().data() + used_;
  used_ += size;
  return memory;
}

}  // namespace quire
