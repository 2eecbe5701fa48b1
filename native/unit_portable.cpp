// The kernels in plain C++, for any processor.
#include "unit.h"
const Kernels& portable_kernels() { return kernels_of_unit; }
}  // namespace quire
