"""A model on two devices. PlacedExecutor: its first layers on the CPU, the rest of them and the
head on a GPU. FeedForwardExecutor: attention on the CPU, feed-forwards and the head on a GPU.

A step is computed in pieces of some tokens each. While the GPU has one, the CPU computes the next:
only the hidden states between the two parts cross over. Rows are independent and chunks may be cut
anywhere, so how a step is cut changes no bits. Each part has the KV cache of its own layers; a
block's number means the same tokens in both.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from quire.core.clock import Clock
from quire.core.errors import ConfigError, RowFaultError
from quire.core.plan import BlockCopy, Capacity, SequencePlan, SequenceResult, StepPlan, Want
from quire.executors.base import BLOCK_SIZE, model_capacity
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.cpu.native import native
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.graphs import Exchange
from quire.executors.cuda.tickets import CudaTicket
from quire.executors.worker import CancelFlag, RowResults, StepTicket, ThreadedExecutor
from quire.model.kv_layout import grouped
from quire.model.loading import Model
from quire.model.parts import (
    feed_forwards,
    first_layers,
    last_layers,
    layout_of,
    without_feed_forwards,
    without_slots,
)
from quire.model.spec import ModelSpec
from quire.quant.formats import Floats

E = TypeVar("E")
MAX_STEP_TOKENS = 1 << 20  # a step is computed in pieces: any size will do
# The GPU executor uses the marks of a step again after thirty others.
_MOST_UNDER_WAY = 16
_MOST_INTERLEAVED = 4  # pieces that are taken through the layers in turn
# Tokens: with fewer the CPU's GEMMs wait for weights, which each piece reads.
_LEAST_PIECE = 64


class Side(NamedTuple, Generic[E]):
    """One of the two executors, and which groups of the whole model's layers are in its part."""

    executor: E
    groups: tuple[int, ...]

    def plan(self, step: StepPlan) -> StepPlan:
        """The same with the block tables of the part's own groups."""
        rows = []
        for row in step.sequences:
            tables = (row.block_table, *row.other_tables)
            own, *others = (tables[group] for group in self.groups)
            rows.append(row._replace(block_table=own, other_tables=tuple(others)))
        return step._replace(sequences=tuple(rows))


class _Part(NamedTuple):
    """The tokens of a row that one piece holds."""

    at: int  # the row's index in the plan
    row: SequencePlan


class _Submitted(NamedTuple):
    """A piece that the GPU computes."""

    parts: list[_Part]
    ticket: CudaTicket


class _Piece(NamedTuple):
    """Tokens that are taken through the layers together."""

    step_id: int
    parts: list[_Part]
    rows: "native.StepRows"
    exchange: Exchange
    num_tokens: int

    def plan(self) -> StepPlan:
        return StepPlan(self.step_id, tuple(part.row for part in self.parts))

    def states(self, hidden_size: int) -> list[Floats]:
        """Of each row [new tokens, hidden]."""
        found, first = [], 0
        for _, row in self.parts:
            last = first + len(row.tokens)
            found.append(self.exchange.states[first:last, :hidden_size])
            first = last
        return found


class PlacedExecutor(ThreadedExecutor):
    """`first` computes the embedding and the first layers, `last` the others from hidden states;
    both are made for the blocks of `capacity`, that of the whole model."""

    def __init__(
        self,
        capacity: Capacity,
        first: Side[CpuExecutor],
        last: Side[CudaExecutor],
        clock: Clock | None = None,
    ) -> None:
        self._first = first
        self._last = last
        on_cpu, on_gpu = first.executor, last.executor
        for part in (on_cpu.capacity, on_gpu.capacity):
            if part.num_blocks != capacity.num_blocks:
                raise ConfigError("both parts of a placed model need the blocks of the whole")
        self._piece_tokens = on_gpu.capacity.max_step_tokens
        super().__init__(
            capacity,
            "quire-placed",
            kernels=[*on_cpu.kernels, *on_gpu.kernels],
            fallback=on_cpu.fallback or on_gpu.fallback,
            clock=clock,
        )
        self.is_warm = on_gpu.is_warm

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        on_gpu = self._last.executor.memory_bytes
        return {
            **self._first.executor.memory_bytes,
            **{f"gpu_{kind}": size for kind, size in on_gpu.items()},
        }

    def warm_up(self) -> None:
        self._last.executor.warm_up()
        self.fallback = self.fallback or self._last.executor.fallback
        super().warm_up()

    def cancel(self, ticket: StepTicket) -> None:
        super().cancel(ticket)
        self._first.executor.cancel_run(ticket.flag)

    def close(self) -> None:
        super().close()
        self._first.executor.close()
        self._last.executor.close()

    # ---- a step

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        faults = self._faults(plan)
        sound = [_Part(i, row) for i, row in enumerate(plan.sequences) if i not in faults]
        results: dict[int, list[SequenceResult]] = {}
        for parts, ticket in self._submitted(sound, plan, faults, flag):
            collected = self._last.executor.collect(ticket)
            for part, result in zip(parts, collected.sequences, strict=True):
                results.setdefault(part.at, []).append(result)
        for index, fault in faults.items():
            results[index] = [fault]
        return RowResults(tuple(_joined(results[i]) for i in range(len(plan.sequences))))

    def _submitted(
        self,
        rows: Sequence[_Part],
        plan: StepPlan,
        faults: dict[int, SequenceResult],
        flag: CancelFlag,
    ) -> Iterator[_Submitted]:
        """Compute what the CPU has, and have the GPU begin with the rest; pieces in order, each
        when it should be collected."""
        copies = plan.copies
        under_way: deque[_Submitted] = deque()
        for piece in _pieces(rows, self._piece_tokens, self.capacity.max_batch_size):
            parts = [part for part in piece if part.at not in faults]
            step = StepPlan(plan.step_id, tuple(part.row for part in parts), copies)
            if len(under_way) == _MOST_UNDER_WAY:
                yield under_way.popleft()
            under_way.append(self._submit_piece(parts, step, faults, flag))
            copies = ()
        yield from under_way

    def _faults(self, plan: StepPlan) -> dict[int, SequenceResult]:
        """Of rows that no part can compute, by index."""
        faults = {}
        for index, row in enumerate(plan.sequences):
            try:
                self._check_row(row, row.end)
            except RowFaultError as error:
                faults[index] = SequenceResult(row.sequence_id, fault=str(error))
        return faults

    def _submit_piece(
        self,
        parts: Sequence[_Part],
        step: StepPlan,
        faults: dict[int, SequenceResult],
        flag: CancelFlag,
    ) -> _Submitted:
        """Compute a piece's first layers, and have the GPU begin with the others."""
        outputs = self._first.executor.run_layers(self._first.plan(step), flag)
        kept, hidden = [], []
        for part, output in zip(parts, outputs, strict=True):
            if output.hidden is None:
                faults[part.at] = SequenceResult(part.row.sequence_id, fault=output.fault)
            else:
                kept.append(part)
                hidden.append(output.hidden)
        step = step._replace(sequences=tuple(part.row for part in kept))
        return _Submitted(kept, self._last.executor.submit_hidden(self._last.plan(step), hidden))


class FeedForwardExecutor(PlacedExecutor):
    """`first` computes the embedding and every layer's attention, `last` the feed-forwards and the
    head. Hidden states cross over twice a layer: while the GPU has one piece's, the CPU attends
    with another's."""

    def __init__(
        self,
        capacity: Capacity,
        first: Side[CpuExecutor],
        last: Side[CudaExecutor],
        spec: ModelSpec,
        clock: Clock | None = None,
    ) -> None:
        self._num_layers = spec.num_layers
        self._hidden_size = spec.hidden_size
        self._exchanges = [last.executor.exchange() for _ in range(_MOST_INTERLEAVED)]
        super().__init__(capacity, first, last, clock)

    def _submitted(
        self,
        rows: Sequence[_Part],
        plan: StepPlan,
        faults: dict[int, SequenceResult],
        flag: CancelFlag,
    ) -> Iterator[_Submitted]:
        # Two pieces at least, where each is large enough not to wait for weights alone.
        num_tokens = sum(len(row.tokens) for _, row in rows)
        size = min(self._piece_tokens, max(_LEAST_PIECE, -(-num_tokens // 2)))
        pieces = _pieces(rows, size, self.capacity.max_batch_size)
        copies = plan.copies
        while group := list(islice(pieces, _MOST_INTERLEAVED)):
            begun = []
            for piece, exchange in zip(group, self._exchanges, strict=False):
                begun.append(self._begun(piece, exchange, plan.step_id, copies, faults))
                copies = ()
            yield from self._through_layers(begun, flag)

    def _begun(
        self,
        piece: Sequence[_Part],
        exchange: Exchange,
        step_id: int,
        copies: tuple[BlockCopy, ...],
        faults: dict[int, SequenceResult],
    ) -> _Piece:
        parts = [part for part in piece if part.at not in faults]
        step = StepPlan(step_id, tuple(part.row for part in parts), copies)
        rows = self._first.executor.step_rows(self._first.plan(step))
        kept = []
        for part, fault in zip(parts, rows.faults, strict=True):
            if fault:
                faults[part.at] = SequenceResult(part.row.sequence_id, fault=fault)
            else:
                kept.append(part)
        return _Piece(step_id, kept, rows, exchange, sum(len(part.row.tokens) for part in kept))

    def _through_layers(self, pieces: Sequence[_Piece], flag: CancelFlag) -> Iterator[_Submitted]:
        """Pieces in turn, layer by layer: a piece of a row attends to what those before it kept."""
        on_cpu, on_gpu = self._first.executor, self._last.executor
        for layer in range(self._num_layers - 1):
            for piece in pieces:
                piece.exchange.wait()
                on_cpu.run_layer(piece.rows, layer, piece.exchange.states, flag)
                if piece.num_tokens:
                    on_gpu.run_feed_forward(layer, piece.exchange, piece.num_tokens)
        last = []
        for piece in pieces:
            piece.exchange.wait()
            on_cpu.run_layer(piece.rows, self._num_layers - 1, piece.exchange.states, flag)
            hidden = piece.states(self._hidden_size)
            ticket = on_gpu.submit_hidden(self._last.plan(piece.plan()), hidden)
            last.append(_Submitted(piece.parts, ticket))
        yield from last


def load_placed(
    model: Model,
    *,
    gpu_layers: int,
    num_blocks: int,
    threads: Threads,
    max_batch_size: int,
    piece_tokens: int,
    unit: str = "",
    kv_int8: bool = False,
    invariant: bool = True,
    device: str = "cuda",
) -> PlacedExecutor:
    """Load the last `gpu_layers` onto the GPU, the others into packed weights of the CPU. The cache
    may come to have fewer blocks than asked for, if the GPU has less room."""
    spec = model.spec
    cut = spec.num_layers - gpu_layers
    layout = grouped(spec, BLOCK_SIZE)
    before, after = layout_of(layout, 0, cut), layout_of(layout, cut, spec.num_layers)
    config = CudaConfig(
        max_batch_size=max_batch_size,
        max_step_tokens=piece_tokens,
        num_blocks=num_blocks,
        invariant=invariant,
        device=device,
        takes_hidden=True,
        kv_type="int8" if kv_int8 else "auto",
    )
    on_gpu = CudaExecutor(last_layers(model, cut), config, layout=after.layout)
    num_blocks = on_gpu.capacity.num_blocks
    on_cpu = CpuExecutor(
        first_layers(model, cut),
        num_blocks=num_blocks,
        threads=threads,
        unit=unit,
        kv_int8=kv_int8,
        layout=before.layout,
    )
    capacity = model_capacity(
        spec, num_blocks, max_batch_size, MAX_STEP_TOKENS, windows=layout.windows
    )
    return PlacedExecutor(capacity, Side(on_cpu, before.groups), Side(on_gpu, after.groups))


def load_feed_forward(
    model: Model,
    *,
    num_blocks: int,
    threads: Threads,
    max_batch_size: int,
    piece_tokens: int,
    unit: str = "",
    kv_int8: bool = False,
    invariant: bool = True,
    device: str = "cuda",
) -> FeedForwardExecutor:
    """Load every feed-forward and the head onto the GPU; the CPU has attention and its cache."""
    spec = model.spec
    layout = grouped(spec, BLOCK_SIZE)
    config = CudaConfig(
        max_batch_size=max_batch_size,
        max_step_tokens=piece_tokens,
        num_blocks=num_blocks,
        invariant=invariant,
        device=device,
        takes_hidden=True,
        only_feed_forwards=True,
    )
    on_gpu = CudaExecutor(feed_forwards(model), config, layout=without_slots(layout))
    on_cpu = CpuExecutor(
        without_feed_forwards(model),
        num_blocks=num_blocks,
        threads=threads,
        unit=unit,
        kv_int8=kv_int8,
        layout=layout,
        has_feed_forwards=False,
    )
    groups = tuple(range(len(layout.windows)))
    capacity = model_capacity(
        spec, num_blocks, max_batch_size, MAX_STEP_TOKENS, windows=layout.windows
    )
    return FeedForwardExecutor(capacity, Side(on_cpu, groups), Side(on_gpu, groups), spec)


def _pieces(rows: Sequence[_Part], most_tokens: int, most_rows: int) -> Iterator[list[_Part]]:
    """The rows in order, in pieces of so many tokens at most. There is at least one, for copies of
    blocks alone."""
    piece: list[_Part] = []
    room = most_tokens
    for index, row in rows:
        at = 0
        while at < len(row.tokens):
            if not room or len(piece) == most_rows:
                yield piece
                piece, room = [], most_tokens
            count = min(room, len(row.tokens) - at)
            piece.append(_Part(index, _cut(row, at, at + count)))
            at, room = at + count, room - count
    yield piece


def _cut(row: SequencePlan, start: int, stop: int) -> SequencePlan:
    """The row's new tokens from start to stop. What it wants is its last part's, but for logits,
    which every position has."""
    if (start, stop) == (0, len(row.tokens)):
        return row
    is_last = stop == len(row.tokens)
    return row._replace(
        start=row.start + start,
        tokens=row.tokens[start:stop],
        prompt_targets=row.prompt_targets[start:stop],
        want=row.want if is_last or row.want is Want.LOGITS else Want.NOTHING,
    )


def _joined(results: Sequence[SequenceResult]) -> SequenceResult:
    """One row's result from those of its parts."""
    last = results[-1]
    if len(results) == 1:
        return last
    for result in results:
        if result.fault is not None:
            return result
    logits = last.logits
    if logits is not None:
        logits = np.concatenate([result.logits for result in results])
    return last._replace(
        prompt_logprobs=tuple(score for result in results for score in result.prompt_logprobs),
        logits=logits,
    )
