"""The kernels, one module a kind; each launches on whatever stream is current."""
