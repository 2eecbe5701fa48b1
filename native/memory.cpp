// Where the native code's large memory comes from.
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {
namespace {

constexpr size_t alignment = 64;
[[maybe_unused]] constexpr size_t large_page = size_t{2} << 20;

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

}  // namespace

#if defined(__linux__)

Buffer::Buffer(size_t size) : size_(size) {
  if (size == 0) return;
  void* memory = mmap(nullptr, rounded(size, alignment), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (size >= large_page) madvise(memory, size, MADV_HUGEPAGE);  // a wish: nothing hangs on it
  data_ = static_cast<uint8_t*>(memory);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, rounded(size_, alignment));
}

#else

Buffer::Buffer(size_t size) : size_(size) {
  if (size == 0) return;
  // Over-allocated, with the original pointer just before the aligned data: works everywhere.
  void* memory = std::calloc(1, size + alignment + sizeof(void*));
  if (!memory) throw std::bad_alloc();
  const auto first = reinterpret_cast<uintptr_t>(memory) + sizeof(void*);
  data_ = reinterpret_cast<uint8_t*>(rounded(first, alignment));
  std::memcpy(data_ - sizeof(void*), &memory, sizeof(void*));
}

Buffer::~Buffer() {
  if (!data_) return;
  void* memory;
  std::memcpy(&memory, data_ - sizeof(void*), sizeof(void*));
  std::free(memory);
}

#endif

}  // namespace quire
