"""From files to tensors: GGUF, safetensors folders, their names, and the default models."""
