// Chooses the unit: the best that runs on this processor, or the one named.
#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace quire {

const Kernels* kernels_named(const char* name) {
  for (const Kernels* kernels :
       {amx_kernels(), avx512_kernels(), avx2_kernels(), &portable_kernels()})
    if (kernels && (name[0] == '\0' || std::strcmp(name, kernels->name) == 0)) return kernels;
  return nullptr;
}

}  // namespace quire
