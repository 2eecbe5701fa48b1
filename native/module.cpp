// The Python module quire._native; src/quire/_native.pyi is its typed surface.
#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "quire's CPU kernels; use quire.executors.cpu";
  quire::bind_kernels(m);
  quire::bind_weights(m);
  quire::bind_sampler(m);
  quire::bind_pool(m);
  quire::bind_decoder(m);
}
