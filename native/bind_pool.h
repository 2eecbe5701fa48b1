// The thread pool's binding.
#pragma once
#include <nanobind/nanobind.h>

namespace quire {
void bind_pool(nanobind::module_& m);
}
