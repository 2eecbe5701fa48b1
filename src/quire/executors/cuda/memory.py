"""GPU memory, measured: what a step can take is set aside, the KV cache gets the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quire.core.errors import ConfigError
from quire.executors.base import BLOCK_SIZE, context_in
from quire.executors.cuda.decoder import KVBlocks, kv_block_bytes
from quire.model.kv_layout import KVLayout
from quire.model.spec import ModelSpec

_KEPT_FREE = 1 << 30  # for graphs, kernels' code and other users of the GPU
_SAMPLING_BYTES_LIMIT = 1 << 30  # rows that torch samples are so in groups that need no more
_SAMPLING_SHARE = 32  # and no more than the device's memory divided by this
_SAMPLING_BYTES_PER_LOGIT = (
    96  # a logit, while its row is sampled with every option: 84 were measured
)
_FRAGMENTATION = 1.25  # times what was measured: torch's allocator leaves gaps
_MAX_BLOCKS = (1 << 31) // BLOCK_SIZE - 1  # kernels count slots in 32 bits
_MOST_BARE_BLOCKS = 1 << 20  # of a model without attention: they take nothing, but are listed
_REORDER_BYTES = 1 << 30  # while a matrix is reordered
_REORDER_SHARE = 4  # and no more than a fourth of what is free
_REORDER_COPIES = 8  # of a matrix, of which two may be joined: as they come, joined, chosen, made
_SHRINK = 0.9
_MIN_BLOCKS = 1


def gibibytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def limit_memory(num_bytes: int, device: str) -> None:
    """Let this process's arrays take no more of the device; what is free is counted within it."""
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


def allowed_bytes(device: str) -> int:
    """What this process's arrays may take, by limit_memory."""
    share = torch.cuda.get_per_process_memory_fraction()  # of the current device: there is one
    return int(share * torch.cuda.mem_get_info(device)[1])


def free_bytes(device: str) -> int:
    """What a new allocation can get: what the driver has, and what torch has reserved unused."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = int(torch.cuda.memory_reserved(device))
    unused = reserved - int(torch.cuda.memory_allocated(device))
    return min(int(free), allowed_bytes(device) - reserved) + unused


def check_weights(packed_bytes: int, largest: int, device: str) -> None:
    """Say before loading that weights cannot fit, with the figures. `largest`: the bytes of the
    largest matrix of a layer; those that are no layer's are loaded first."""
    free = free_bytes(device)
    reordering = min(_REORDER_COPIES * largest, _reorder_bytes(free))
    if packed_bytes + reordering > free:
        raise _too_large(packed_bytes, reordering, free)


def _reorder_bytes(free: int) -> int:
    """Where little may be used, matrices are few and small."""
    return min(_REORDER_BYTES, free // _REORDER_SHARE)


def _too_large(packed_bytes: int, reordering: int, free: int) -> ConfigError:
    return ConfigError(
        f"the model's weights take {gibibytes(packed_bytes)} on the GPU and "
        f"{gibibytes(reordering)} more while they are loaded, but {gibibytes(free)} are "
        "free: use a file of fewer bits, a larger GPU, gpu_layers='auto', or device='cpu'"
    )


@contextmanager
def weights_memory(device: str, packed_bytes: int) -> Iterator[None]:
    """Turn running out of memory while loading into an error that says what was needed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = free_bytes(device)
        raise _too_large(packed_bytes, _reorder_bytes(free), free) from error
    if device != "cpu":
        torch.cuda.empty_cache()  # reordering left large pieces behind


@contextmanager
def buffers_memory(device: str) -> Iterator[None]:
    """The same for the buffers of a step."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the buffers of a step do not fit beside the weights: {gibibytes(free_bytes(device))} "
            "are free: lower max_batch_size or max_step_tokens, or use a smaller model"
        ) from error


def rows_sampled_at_once(vocabulary_size: int, max_rows: int, device: str) -> int:
    """How many rows the sampler takes at once, so that its arrays stay within their limit."""
    limit = _SAMPLING_BYTES_LIMIT
    if device != "cpu":
        limit = min(limit, allowed_bytes(device) // _SAMPLING_SHARE)
    return int(max(1, min(max_rows, limit // (_SAMPLING_BYTES_PER_LOGIT * vocabulary_size))))


@contextmanager
def memory_set_aside(work: Callable[[], None], device: str, stream: Any) -> Iterator[None]:
    """Do `work` once on the stream, and reserve as much memory as it took while the body allocates
    what stays. Afterwards torch has it for the stream's next arrays."""
    if device == "cpu":
        yield
        return
    with buffers_memory(device), torch.cuda.stream(stream):
        reserved = torch.empty(_peak_bytes(work, device), dtype=torch.uint8, device=device)
    yield
    del reserved


def _peak_bytes(work: Callable[[], None], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(taken * _FRAGMENTATION)


def max_context(
    spec: ModelSpec,
    layout: KVLayout,
    num_blocks: int | None,
    kv_bytes: int | None,
    device: str,
    *,
    is_8bit: bool = False,
) -> int:
    """The longest context there could be room for: no table is made for a longer one."""
    if num_blocks is None:
        if kv_bytes is None:
            kv_bytes = free_bytes(device) if device != "cpu" else 0
        num_blocks = kv_bytes // kv_block_bytes(spec, layout, is_8bit=is_8bit)
    return max(1, context_in(layout.windows, num_blocks, spec.context_length))


def allocate_blocks(
    spec: ModelSpec,
    layout: KVLayout,
    num_blocks: int | None,
    kv_bytes: int | None,
    device: str,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> KVBlocks:
    """The cache: as many blocks as asked for, or as fit into what is left, fewer if they do not."""
    block_bytes = kv_block_bytes(spec, layout, is_8bit=kv_dtype.itemsize == 1)
    if num_blocks is None:
        if kv_bytes is None:
            if device == "cpu":
                raise ConfigError("on a CPU the number of blocks must be given")
            kv_bytes = free_bytes(device) - _KEPT_FREE
        most = _MAX_BLOCKS if spec.attentions else _MOST_BARE_BLOCKS
        num_blocks = min(kv_bytes // block_bytes, most)
    if num_blocks > _MAX_BLOCKS:
        raise ConfigError(f"num_blocks is {num_blocks}; the limit is {_MAX_BLOCKS}")
    wanted = num_blocks
    while num_blocks >= _MIN_BLOCKS:
        try:
            return KVBlocks(spec, layout, num_blocks, device, kv_dtype)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            num_blocks = int(num_blocks * _SHRINK)
    free = f" of which {gibibytes(free_bytes(device))} are free" if device != "cpu" else ""
    raise ConfigError(
        f"the KV cache of {wanted} blocks of {block_bytes} bytes does not fit the device's "
        f"memory{free}: lower kv_memory, or use a smaller model"
    )
