// The Python module quire._native.
#include <nanobind/nanobind.h>

#include "bind_pool.h"
#include "bind_sampler.h"

namespace nb = nanobind;

namespace quire {
void bind_kernels(nb::module_& m);
void bind_weights(nb::module_& m);
void bind_decoder(nb::module_& m);
}  // namespace quire

NB_MODULE(_native, m) {
  m.doc() = "quire's CPU kernels; use quire.executors.cpu";
  quire::bind_kernels(m);
  quire::bind_weights(m);
  quire::bind_sampler(m);
  quire::bind_pool(m);
  quire::bind_decoder(m);
}
