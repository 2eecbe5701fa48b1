// The body of an instruction-set unit: included by each unit_*.cpp after its QUIRE_UNIT_* macro, it
// defines that unit's table of kernels. Everything else is in an anonymous namespace, so that the
// linker never merges a function of one instruction set with another's.

#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)
#include <immintrin.h>
#endif
#include "formats.h"
#include "grids.h"
#include "kernels.h"
#include "scalar.h"

// Loops over registers are unrolled. The portable unit has no registers to gain from it.
#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(times) PRAGMA(GCC unroll times)
#else
#define UNROLL(times)
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))
#define INLINE_STATIC static inline __attribute__((always_inline))

namespace quire {
namespace {

#include "lanes.h"
#include "codes.h"
#include "grid_codes.h"
#include "gemm_accumulate.h"
#include "gemm.h"
#include "rows.h"
#include "attention.h"
#include "recurrence.h"

constexpr Kernels kernels_of_unit = {
    unit_name,
    gemm,
    peak_dots,
    rms_norm,
    layer_norm,
    quantise_groups,
    quantise_blocks,
    quantise_per_token,
    apply_gate,
    add_rows,
    add_scaled_rows,
    apply_rope,
    store_key_value,
    attend,
    attend_split,
    merge_splits,
    soft_cap,
    convolve,
    multiply_sigmoid,
    make_unit,
    recur,
    recur_each,
};

#if defined(QUIRE_HAS_AMX)
#include "gemm_amx.h"

// The AVX-512 unit with AMX's GEMM.
constexpr Kernels with_amx() {
  Kernels kernels = kernels_of_unit;
  kernels.name = "amx-int8";
  kernels.gemm = amx_gemm;
  kernels.peak_dots = peak_tiles;
  return kernels;
}
constexpr Kernels kernels_with_amx = with_amx();
#endif

}  // namespace
