"""GPU memory: measured, not guessed. What is free decides how large the cache is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.core.errors import ConfigError
from quire.executors.cuda.decoder import KVBlocks, kv_block_bytes
from quire.model.spec import ModelSpec

_KEPT_FREE = 2 << 30  # for graphs, the sampler's temporary arrays and whoever else uses the GPU
_REORDER_ROOM = 1 << 30  # while a matrix is reordered
_SHRINK = 0.9
_SMALLEST_BLOCKS = 1


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def free_bytes(device: str) -> int:
    """What a new allocation can get: what the driver has, and what torch holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(held)


def check_weights(packed_bytes: int, device: str) -> None:
    """Say before loading that weights cannot fit, with the figures."""
    free = free_bytes(device)
    needed = packed_bytes + _REORDER_ROOM
    if needed > free:
        raise _too_large(packed_bytes, free)


def _too_large(packed_bytes: int, free: int) -> ConfigError:
    return ConfigError(
        f"the model's weights take {gibibytes(packed_bytes)} on the GPU and "
        f"{gibibytes(_REORDER_ROOM)} more while they are loaded, but {gibibytes(free)} are free: "
        "use a file of fewer bits, a larger GPU, or device='cpu'"
    )


@contextmanager
def weights_memory(device: str, packed_bytes: int) -> Iterator[None]:
    """Turn running out of memory while loading into an error that says what was needed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_large(packed_bytes, free_bytes(device)) from error
    if device != "cpu":
        torch.cuda.empty_cache()  # reordering left large pieces behind


def allocate_blocks(
    spec: ModelSpec, num_blocks: int | None, kv_bytes: int | None, device: str
) -> KVBlocks:
    """The cache: as many blocks as asked for, or as fit into what is left, fewer if they do not."""
    block_bytes = kv_block_bytes(spec)
    if num_blocks is None:
        if kv_bytes is None:
            if device == "cpu":
                raise ConfigError("on a CPU the number of blocks must be given")
            kv_bytes = free_bytes(device) - _KEPT_FREE
        num_blocks = kv_bytes // block_bytes
    wanted = num_blocks
    while num_blocks >= _SMALLEST_BLOCKS:
        try:
            return KVBlocks(spec, num_blocks, device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            num_blocks = int(num_blocks * _SHRINK)
    free = f" of which {gibibytes(free_bytes(device))} are free" if device != "cpu" else ""
    raise ConfigError(
        f"the KV cache of {wanted} blocks of {block_bytes} bytes does not fit the device's "
        f"memory{free}: lower kv_memory, or use a smaller model"
    )
