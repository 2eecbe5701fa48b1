// The kernels for AVX-512 with VNNI.
#include "kernels.h"
#if defined(__x86_64__)
#define QUIRE_UNIT_AVX512
#include "unit.h"
const Kernels* avx512_kernels() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  return can ? &kernels_of_unit : nullptr;
}
}  // namespace quire
#else
namespace quire {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace quire
#endif
