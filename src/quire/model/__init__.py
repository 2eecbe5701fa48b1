"""Which decoder a model file holds: one description for all families, and its tensors."""
