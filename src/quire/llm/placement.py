"""Placement: which layers of a model a GPU gets, or which half of each, and what both sides then
need, known before anything is loaded."""

import math
from dataclasses import dataclass, replace

from quire.core.errors import ConfigError, UnsupportedModelError
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu.lowering import weight_bytes, workspace_bytes
from quire.llm.machine import DEFAULT_KV_BYTES, MemoryPlan, format_bytes
from quire.model.features import Feature
from quire.model.kv_layout import KVLayout, grouped, kv_bytes_in_block, kv_bytes_per_token
from quire.model.loading import Model
from quire.model.parts import (
    feed_forwards,
    first_layers,
    largest_of_layers,
    last_layers,
    layout_of,
    why_not_cut,
    without_feed_forwards,
)

FFN_GPU = "ffn-gpu"
PIECE_TOKENS = 256  # that the GPU computes at once; beyond it the CPU's GEMMs gain little
# Of the GPU's memory: the context of the process, the code of kernels, and graphs.
GPU_OVERHEAD = 768 << 20
_SAMPLING_SHARE = 24  # the sampler gets about this part of it
_LEAST_CONTEXT = 4096
# Of a matrix while it is reordered; of layers' two may be joined, and planes may be a little larger
# than what the file has.
_FIRST_COPIES = 3
_REORDER_COPIES = 12


@dataclass(frozen=True, slots=True)
class PlacementSizes:
    """How a placed model is to be run."""

    max_batch_size: int
    chunk: int  # tokens of a sequence that must fit into steps not collected
    kv_bytes: int | None  # of both sides together; None: what suits them
    max_context: int | None
    threads: int
    is_8bit: bool = False  # keys and values, on both sides


@dataclass(frozen=True, slots=True)
class Placement:
    """The first layers on the CPU, the last `gpu_layers` on the GPU, `num_blocks` on both. Where
    `gpu_layers` is None the GPU has the feed-forwards of all layers, and no blocks."""

    gpu_layers: int | None
    num_blocks: int
    cpu: MemoryPlan
    gpu: MemoryPlan

    @property
    def whole(self) -> MemoryPlan:
        """Of both sides together."""
        return replace(
            self.cpu,
            weights=self.cpu.weights + self.gpu.weights,
            kv_per_token=self.cpu.kv_per_token + self.gpu.kv_per_token,
            group_bytes=(self.cpu.group_bytes or 0) + (self.gpu.group_bytes or 0),
            available=None,
        )

    @property
    def gpu_bytes(self) -> int:
        return self.gpu.weights + self.gpu.workspace + self.num_blocks * self.gpu.block_bytes

    @property
    def cpu_bytes(self) -> int:
        return self.cpu.weights + self.cpu.workspace + self.num_blocks * self.cpu.block_bytes


def place(
    model: Model,
    sizes: PlacementSizes,
    gpu_layers: int | None,
    gpu_memory: int,
    cpu_memory: int | None,
) -> Placement | None:
    """Put so many layers on a GPU of so much memory; None: as many as fit there. The result is None
    where that is all of them. A ConfigError has the figures where they do not fit."""
    total = model.spec.num_layers
    if gpu_layers is not None and gpu_layers >= total:
        return None
    if gpu_layers is None:
        if _all_on_gpu(model, sizes, gpu_memory) <= gpu_memory:
            return None
        every = range(total - 1, 0, -1)
        counts = [x for x in every if why_not_cut(model.spec, total - x) is None] or [1]
    else:
        counts = [gpu_layers]
    _check_states(model)
    for count in counts:
        found = _placement(model, sizes, count, gpu_memory, cpu_memory)
        if _fits(found, last_layers(model, total - count), gpu_memory):
            found.whole.num_blocks(found.num_blocks * found.whole.block_bytes, sizes.max_context)
            return found
    raise _too_large(_placement(model, sizes, counts[-1], gpu_memory, cpu_memory), gpu_memory)


def place_feed_forwards(
    model: Model, sizes: PlacementSizes, gpu_memory: int, cpu_memory: int | None
) -> Placement:
    """Put every feed-forward and the head on a GPU of so much memory, attention on the CPU. A
    ConfigError has the figures where they do not fit."""
    _check_states(model)
    if any(layer.is_parallel for layer in model.spec.layers):
        raise UnsupportedModelError(
            f"the {model.spec.family} model has {Feature.PARALLEL_HALVES}, which "
            f"placement='{FFN_GPU}' cannot take apart: use gpu_layers"
        )
    layout = grouped(model.spec, BLOCK_SIZE)
    cpu = _cpu_plan(without_feed_forwards(model), layout, sizes, cpu_memory)
    cpu = replace(cpu, windows=layout.windows)
    part = feed_forwards(model)
    gpu = MemoryPlan(
        sum(tensor.nbytes for tensor in part.tensors.values()),
        0,
        gpu_memory,
        _gpu_workspace(model, sizes.max_batch_size, gpu_memory),
        windows=layout.windows,
        group_bytes=0,
        chunk=sizes.chunk,
    )
    num_blocks = cpu.num_blocks(cpu.pool_bytes(sizes.kv_bytes), sizes.max_context)
    found = Placement(None, num_blocks, cpu, gpu)
    if not _fits(found, part, gpu_memory):
        raise _too_large(found, gpu_memory)
    return found


def _check_states(model: Model) -> None:
    """A step is computed in pieces, and a state between two of them would need a slot."""
    kinds = dict.fromkeys(part.kind for part in model.spec.states.values())
    if kinds:
        raise UnsupportedModelError(
            f"the {model.spec.family} model has layers of {' and '.join(kinds)}, which run on one "
            "device alone: use device='cuda' without gpu_layers and placement, or device='cpu'"
        )


def _fits(found: Placement, part: Model, gpu_memory: int) -> bool:
    """Matrices are reordered one after another, those that are no layer's first."""
    usable = gpu_memory - GPU_OVERHEAD
    first = max(tensor.nbytes for tensor in part.tensors.values())
    copies = min(_REORDER_COPIES * largest_of_layers(part.tensors), usable // 4)
    return (
        found.gpu_bytes <= gpu_memory
        and found.gpu.weights + copies <= usable
        and _FIRST_COPIES * first <= usable
    )


def _all_on_gpu(model: Model, sizes: PlacementSizes, gpu_memory: int) -> int:
    """What the whole model takes, with the smallest cache that is of use."""
    weights = sum(tensor.nbytes for tensor in model.tensors.values())
    kv = sizes.kv_bytes if sizes.kv_bytes is not None else DEFAULT_KV_BYTES
    return weights + kv + _gpu_workspace(model, sizes.max_batch_size, gpu_memory)


def _placement(
    model: Model, sizes: PlacementSizes, gpu_layers: int, gpu_memory: int, cpu_memory: int | None
) -> Placement:
    spec = model.spec
    cut = spec.num_layers - gpu_layers
    layout = grouped(spec, BLOCK_SIZE)
    cpu = _cpu_plan(first_layers(model, cut), layout_of(layout, 0, cut).layout, sizes, cpu_memory)
    after = layout_of(layout, cut, spec.num_layers).layout
    gpu = _gpu_plan(model, last_layers(model, cut), after, sizes, gpu_memory)
    # Sequences hold blocks in every group of the whole model, on both sides.
    cpu, gpu = (replace(plan, windows=layout.windows) for plan in (cpu, gpu))
    num_blocks = _num_blocks(cpu, gpu, sizes.kv_bytes, spec.context_length)
    return Placement(gpu_layers, num_blocks, cpu, gpu)


def _num_blocks(cpu: MemoryPlan, gpu: MemoryPlan, kv_bytes: int | None, context: int) -> int:
    """As many as asked for; else as suit both sides: half of what the CPU's side leaves, and what
    the GPU's leaves."""
    block_bytes = cpu.block_bytes + gpu.block_bytes
    if kv_bytes is not None:
        cpu.pool_bytes(max(1, kv_bytes // block_bytes * cpu.block_bytes))
        return kv_bytes // block_bytes
    counts = [DEFAULT_KV_BYTES // block_bytes, cpu.pool_bytes(None) // cpu.block_bytes]
    assert gpu.available is not None
    left = gpu.available - gpu.weights - gpu.workspace
    # At least for one whole context of moderate length: with less, fewer layers are better.
    least = min(counts[0], math.ceil(min(context, _LEAST_CONTEXT) / BLOCK_SIZE) * len(cpu.windows))
    return max(least, min(*counts, left // gpu.block_bytes))


def _cpu_plan(
    part: Model, layout: KVLayout, sizes: PlacementSizes, available: int | None
) -> MemoryPlan:
    spec = part.spec
    return MemoryPlan(
        weight_bytes(part.tensors),
        kv_bytes_per_token(spec, is_8bit=sizes.is_8bit),
        available,
        workspace_bytes(spec, part.tensors, PIECE_TOKENS, spec.context_length, sizes.threads),
        group_bytes=kv_bytes_in_block(spec, layout, is_8bit=sizes.is_8bit),
        chunk=sizes.chunk,
    )


def _gpu_plan(
    model: Model, part: Model, layout: KVLayout, sizes: PlacementSizes, available: int
) -> MemoryPlan:
    return MemoryPlan(
        sum(tensor.nbytes for tensor in part.tensors.values()),
        kv_bytes_per_token(part.spec, is_8bit=sizes.is_8bit),
        available,
        _gpu_workspace(model, sizes.max_batch_size, available),
        group_bytes=kv_bytes_in_block(part.spec, layout, is_8bit=sizes.is_8bit),
        chunk=sizes.chunk,
    )


def _gpu_workspace(model: Model, max_batch_size: int, gpu_memory: int) -> int:
    """About what is needed beside weights and cache."""
    spec = model.spec
    heads = max(part.query_size + 2 * part.kv_size for part in spec.attentions.values())
    floats = 4 * heads + 8 * spec.hidden_size + 4 * spec.ffn_size
    logits = max_batch_size * (spec.vocabulary_size + spec.hidden_size)
    step = 4 * (PIECE_TOKENS * floats + logits) + gpu_memory // _SAMPLING_SHARE
    return GPU_OVERHEAD + step


def _too_large(found: Placement, gpu_memory: int) -> ConfigError:
    layers = "1 layer" if found.gpu_layers == 1 else f"{found.gpu_layers} layers"
    lower = "lower gpu_layers, kv_memory or max_batch_size"
    if found.gpu_layers is None:
        layers, lower = "the feed-forwards", "use gpu_layers instead, lower max_batch_size"
    return ConfigError(
        f"{layers}, the head and what steps work in take {format_bytes(found.gpu_bytes)} on the "
        f"GPU, and loading some more, of which {format_bytes(gpu_memory)} may be used: {lower}, "
        "give gpu_memory more, or use device='cpu'"
    )
