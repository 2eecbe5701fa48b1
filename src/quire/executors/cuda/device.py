"""Whether there is a GPU to run on, asked before anything is loaded."""

import torch

from quire.core.errors import ConfigError


def require_gpu() -> None:
    """Say what is missing, and what to do instead."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch finds no NVIDIA GPU on this machine: use device='cpu', or "
            "look at `quire doctor`"
        )
