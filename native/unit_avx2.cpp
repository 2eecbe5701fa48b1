// The kernels for AVX2 with FMA and F16C.
#include "kernels.h"
#if defined(__x86_64__)
#define QUIRE_UNIT_AVX2
#include "unit.h"
const Kernels* avx2_kernels() {
  static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return can ? &kernels_of_unit : nullptr;
}
}  // namespace quire
#else
namespace quire {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace quire
#endif
