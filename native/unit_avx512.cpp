// The kernels for AVX-512 with VNNI, and the same with AMX's GEMM.
#include "kernels.h"
#if defined(__x86_64__) && !defined(QUIRE_FEW_UNITS)
#define QUIRE_UNIT_AVX512
#if defined(__linux__) && __has_include(<amxint8intrin.h>)
#define QUIRE_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "unit.h"

const Kernels* avx512_kernels() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  return can ? &kernels_of_unit : nullptr;
}

#if defined(QUIRE_HAS_AMX)
// Linux grants the tile registers to a process on request; threads and children inherit that.
static bool request_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

const Kernels* amx_kernels() {
  static const bool can = [] {
    constexpr unsigned tile_and_int8 = 3u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return avx512_kernels() && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & tile_and_int8) == tile_and_int8 && request_tiles();
  }();
  return can ? &kernels_with_amx : nullptr;
}
#else
const Kernels* amx_kernels() { return nullptr; }
#endif
}  // namespace quire
#else
namespace quire {
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* amx_kernels() { return nullptr; }
}  // namespace quire
#endif
