"""GraphRunner: captures the decoder's body and head as CUDA graphs, one a size, and replays them.

Steps are padded to the next size. Where splits of the context have programs of their own (few
tokens), there is a graph for each of a few context lengths too. On a CPU the kernels just run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from quire.core.progress import GRAPHS, KERNELS, report, reported
from quire.core.windows import Windows, peak_blocks
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.attention import SPLIT_SIZE
from quire.executors.cuda.compiling import compiled_together
from quire.executors.cuda.decoder import BodyShape, Decoder, KVBlocks, Limits
from quire.executors.cuda.planes import Array
from quire.executors.cuda.step_input import BodyRows, Integers, Layout, pack_body, pack_rows
from quire.quant.formats import Floats

_HOST_BUFFERS = 4  # copies that may be under way at once
_MARKS = 64  # two a step; far fewer steps are in flight
_SPLIT_COUNTS = (0, 4, 16, 64)  # splits of the context that graphs are captured for

# Sizes that steps are padded to: none much larger than the step.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_SIZES_BEYOND = 1.25


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """The sizes to capture for steps of up to so many."""
    sizes = [size for size in _SIZES if size < largest]
    while sizes and sizes[-1] >= _SIZES[-1] and sizes[-1] * _SIZES_BEYOND < largest:
        sizes.append(int(sizes[-1] * _SIZES_BEYOND) // 64 * 64)
    return (*sizes, largest)


def powers_up_to(largest: int) -> tuple[int, ...]:
    """The same, few of them: for graphs of each layer."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return (*(size for size in powers if size < largest), largest)


class Exchange:
    """Hidden states of some tokens on the host, which a layer's feed-forward overwrites."""

    def __init__(self, num_tokens: int, width: int, is_gpu: bool) -> None:
        self.array = torch.zeros((num_tokens, width), dtype=torch.float32, pin_memory=is_gpu)
        self.states: Floats = self.array.numpy()  # [tokens, padded hidden]
        self.done: Array | None = torch.cuda.Event() if is_gpu else None

    def wait(self) -> None:
        """Until the states are those after the feed-forward that was submitted last."""
        if self.done is not None:
            self.done.synchronize()


class PackedStep(NamedTuple):
    """What a step sends."""

    shape: BodyShape
    integers: Integers
    num_tokens: int  # without padding
    num_head_rows: int

    @property
    def num_padding(self) -> int:
        return self.shape.num_tokens - self.num_tokens


class GraphRunner:
    """Runs a step's body and head on a stream."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: KVBlocks,
        limits: Limits,
        windows: Windows,
        device: str,
        stream: Array | None,
    ) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._limits = limits
        self._device = device
        self._is_gpu = device != "cpu"
        self._windows = windows
        self._layout = Layout(limits.num_rows, len(windows), limits.num_states > 0)
        entries = peak_blocks(windows, BLOCK_SIZE, limits.max_context, limits.num_tokens)
        entries *= limits.num_rows
        size = self._layout.size(limits.num_tokens, entries)
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [self._host_buffer(size) for _ in range(_HOST_BUFFERS if self._is_gpu else 1)]
        given = decoder.given.numel()
        self._given_hosts = [self._host_buffer(given, torch.float32) for _ in self._hosts]
        self._sent: list[Array | None] = [None] * len(self._hosts)
        self._next = 0
        self._stream: Array = stream  # None on a CPU
        timed = [torch.cuda.Event(enable_timing=True) for _ in range(_MARKS if self._is_gpu else 0)]
        self._marks: list[Array] = timed
        self._num_marks = 0
        sizes = powers_up_to if limits.only_feed_forwards else sizes_up_to
        self._token_sizes = sizes(limits.num_tokens)
        self.row_sizes = sizes_up_to(limits.num_rows)
        self._bodies: dict[BodyShape, Array] = {}
        self._feeds: dict[tuple[int, int], Array] = {}  # by tokens and layer
        self._heads: dict[int, Array] = {}

    def _host_buffer(self, size: int, kind: object = torch.int32) -> Array:
        return torch.zeros(size, dtype=kind, pin_memory=self._is_gpu)

    # ---- the stream

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream) if self._is_gpu else nullcontext():
            yield

    def record(self) -> Array | None:
        """A mark in the stream, with its time; used again after _MARKS others, for steps that were
        collected long before."""
        if not self._is_gpu:
            return None
        event = self._marks[self._num_marks % len(self._marks)]
        self._num_marks += 1
        event.record(self._stream)
        return event

    def close(self) -> None:
        if self._is_gpu:
            self._stream.synchronize()
        self._bodies.clear()
        self._feeds.clear()
        self._heads.clear()

    # ---- capturing

    def warm_up(self, launch_others: Callable[[], None]) -> None:
        """Compile all kernels, with those that are launched behind the head, then run every size
        once with a layer of each kind, and capture it; largest first, so that memory is taken
        once."""
        if not self._is_gpu:
            return
        shapes = tuple(self._shapes())
        report(KERNELS, 0.0)
        with self.stream(), compiled_together():
            for shape in shapes:
                self._run_body(shape, warming=True)
            for count in self.row_sizes:
                self._decoder.run_head(count, *self._layout.head(self._buffer))
            launch_others()
        for shape in reported(GRAPHS, shapes):
            self._capture_body(shape)
            if self._limits.only_feed_forwards:
                self._capture_feeds(shape.num_tokens)
        for count in reversed(self.row_sizes):
            self._capture_head(count)
        torch.cuda.synchronize(self._device)

    def _shapes(self) -> Iterator[BodyShape]:
        for size in reversed(self._token_sizes):
            if size > self._limits.max_split_tokens:
                yield BodyShape(size, 0)
            else:
                for num_splits in self._split_counts():
                    yield BodyShape(size, num_splits)

    def _split_counts(self) -> tuple[int, ...]:
        most = self._limits.max_splits
        return (*(count for count in _SPLIT_COUNTS if count < most), most)

    def _capture_body(self, shape: BodyShape) -> None:
        # Nothing but padding: no key is kept, and nothing attended to.
        has_states = self._layout.has_states
        body = pack_body([], shape.num_tokens, 1, self._windows, has_states=has_states)
        self._send(np.concatenate([*self._head_input([], []), body]))
        self._bodies[shape] = self.captured(
            lambda: self._run_body(shape), lambda: self._run_body(shape, warming=True)
        )

    def _capture_feeds(self, count: int) -> None:
        """Of all layers but the last, which is the body."""
        for layer in range(self._decoder.num_layers - 1):

            def run(layer: int = layer) -> None:
                self._decoder.run_feed_forward(count, layer)

            self._feeds[count, layer] = self.captured(run)

    def _run_body(self, shape: BodyShape, *, warming: bool = False) -> None:
        given = self._layout.body(self._buffer, shape.num_tokens)
        through = self._decoder.layer_kinds if warming else None
        self._decoder.run_body(shape, given, self._blocks, through)

    def _capture_head(self, count: int) -> None:
        rows, slots = self._layout.head(self._buffer)

        def run() -> None:
            self._decoder.run_head(count, rows, slots)

        self._send(np.concatenate(self._head_input([], [])))
        self._heads[count] = self.captured(run)

    def captured(self, run: Callable[[], None], first: Callable[[], None] | None = None) -> Array:
        """A graph of what `run` launches. `first`, or `run` itself, is run before: it loads every
        kernel, and none can be loaded in a capture."""
        with self.stream():
            (first or run)()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                run()
        return graph

    # ---- running

    def pack(self, rows: BodyRows, head_rows: Integers, slots: Sequence[int]) -> "PackedStep":
        """The rows, and the likeliest tokens after `head_rows`, ready to run; nothing is sent."""
        num_tokens = rows.num_tokens
        shape = self._shape_for(rows, num_tokens)
        tile_tokens = self._decoder.tokens_per_tile(shape)
        body = pack_rows(rows, shape.num_tokens, tile_tokens, self._windows)
        integers = np.concatenate([*self._head_input(head_rows, slots), body])
        return PackedStep(shape, integers, num_tokens, len(head_rows))

    def run(self, step: "PackedStep", hidden: Floats | None = None) -> None:
        """`hidden`: of all tokens, where the body begins with these."""
        self._send(step.integers, hidden)
        if self._is_gpu:
            self._bodies[step.shape].replay()
        else:
            self._run_body(step.shape)
        if step.num_head_rows:
            self._run_head(step.num_head_rows)

    def exchange(self) -> Exchange:
        tokens, width = self._decoder.given.shape
        return Exchange(tokens, width, self._is_gpu)

    def run_feed_forward(self, layer: int, exchange: Exchange, count: int) -> None:
        """Begin a layer's feed-forward of so many tokens of the exchange."""
        size = next(size for size in self._token_sizes if size >= count)
        states = exchange.array[:count]
        with self.stream():
            self._decoder.given[:count].copy_(states, non_blocking=True)
            if self._is_gpu:
                self._feeds[size, layer].replay()
            else:
                self._decoder.run_feed_forward(count, layer)
            states.copy_(self._decoder.returned[:count], non_blocking=True)
            if exchange.done is not None:
                exchange.done.record(self._stream)

    def _run_head(self, count: int) -> None:
        if self._is_gpu:
            self._heads[next(size for size in self.row_sizes if size >= count)].replay()
        else:
            self._decoder.run_head(count, *self._layout.head(self._buffer))

    def _shape_for(self, rows: BodyRows, num_tokens: int) -> BodyShape:
        size = num_tokens
        if self._is_gpu:
            size = next(size for size in self._token_sizes if size >= num_tokens)
        if size > self._limits.max_split_tokens:
            return BodyShape(size, 0)
        needed = -(-rows.end // SPLIT_SIZE)
        needed = 0 if needed == 1 else needed
        return BodyShape(size, next(count for count in self._split_counts() if count >= needed))

    def _head_input(
        self, rows: Sequence[int] | Integers, slots: Sequence[int]
    ) -> tuple[Integers, Integers]:
        head_rows = np.zeros(self._limits.num_rows, np.int32)
        head_rows[: len(rows)] = rows
        kept = np.full(self._limits.num_rows, -1, np.int32)
        kept[: len(slots)] = slots
        return head_rows, kept

    def _send(self, packed: Integers, hidden: Floats | None = None) -> None:
        index = self._next
        self._next = (index + 1) % len(self._hosts)
        sent = self._sent[index]
        # Long done: three steps have been sent since. Asking keeps the GIL, waiting gives it away.
        if sent is not None and not sent.query():
            sent.synchronize()
        host = self._hosts[index][: len(packed)]
        host.numpy()[:] = packed
        with self.stream():
            self._buffer[: len(packed)].copy_(host, non_blocking=True)
            if hidden is not None:
                given = self._decoder.given[: len(hidden)]
                host = self._given_hosts[index][: given.numel()].view(given.shape)
                host.numpy()[:, : hidden.shape[1]] = hidden
                given.copy_(host, non_blocking=True)
            if self._is_gpu:
                sent = sent or torch.cuda.Event()
                sent.record(self._stream)
                self._sent[index] = sent

    def logits_of(self, first: int, count: int) -> Array:
        """Logits of consecutive rows of the last body; the next call overwrites them."""
        rows = torch.arange(first, first + count, dtype=torch.int32, device=self._device)
        self._decoder.run_logits(count, rows)
        return self._decoder.logits[:count]

    def fetch(self, num_rows: int, num_tokens: int) -> tuple[Array, Array]:
        """Sampled tokens and finite flags on their way to the host; there once the step is done."""
        most = self._limits.num_rows
        sent = self._decoder.step_results[: 2 * most + num_tokens]
        host = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=self._is_gpu)
        host.copy_(sent, non_blocking=True)
        results = host.numpy()
        return results[: 2 * num_rows].reshape(num_rows, 2), results[2 * most :]
