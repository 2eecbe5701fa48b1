// The body of a unit: included by each unit_*.cpp after its QUIRE_UNIT_* macro, it makes that
// unit's table of kernels. Everything but the table is in an anonymous namespace, so that no
// function of one instruction set can stand in for another's when the units are linked.

#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)
#include <immintrin.h>
#endif
#include "formats.h"
#include "kernels.h"
#include "scalar.h"

// Loops over registers are written out; without registers to keep things in that only takes time.
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
#include "gemm_accumulate.h"
#include "gemm.h"
#include "rows.h"
#include "attention.h"

constexpr Kernels kernels_of_unit = {
    unit_name,       product,      peak_dots,    rms_norm,    quantise_groups,
    quantise_blocks, quantise_row, apply_gate,   add_rows,    turn,
    store_key_value, attend,       attend_tiles, merge_tiles, soft_cap,
};

#if defined(QUIRE_HAS_AMX)
#include "gemm_amx.h"

// The same unit but for its products.
constexpr Kernels with_tiles() {
  Kernels kernels = kernels_of_unit;
  kernels.name = "amx-int8";
  kernels.product = tile_product;
  kernels.peak_dots = peak_tiles;
  return kernels;
}
constexpr Kernels kernels_with_tiles = with_tiles();
#endif

}  // namespace
