"""PlacedExecutor: a model's first layers on the CPU, the rest of them and the head on a GPU.

A step is computed in pieces of some tokens each. While the GPU has one, the CPU computes the next:
only the hidden states between the two parts cross over. Rows are independent and chunks may be cut
anywhere, so how a step is cut changes no bits. Each part has the KV cache of its own layers; a
block's number means the same tokens in both.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from quire.core.clock import Clock
from quire.core.errors import ConfigError, RowFaultError
from quire.core.plan import Capacity, SequencePlan, SequenceResult, StepPlan, Want
from quire.executors.base import BLOCK_SIZE, model_capacity
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.tickets import CudaTicket
from quire.executors.worker import CancelFlag, RowResults, StepTicket, ThreadedExecutor
from quire.model.kv_layout import grouped
from quire.model.loading import Model
from quire.model.parts import first_layers, last_layers, layout_of

E = TypeVar("E")
MAX_STEP_TOKENS = 1 << 20  # a step is computed in pieces: any size will do
# The GPU executor uses the marks of a step again after thirty others.
_MOST_UNDER_WAY = 16


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
        copies = plan.copies
        results: dict[int, list[SequenceResult]] = {}
        under_way: deque[_Submitted] = deque()
        for piece in _pieces(sound, self._piece_tokens, self.capacity.max_batch_size):
            parts = [part for part in piece if part.at not in faults]
            step = StepPlan(plan.step_id, tuple(part.row for part in parts), copies)
            if len(under_way) == _MOST_UNDER_WAY:
                self._collect_piece(under_way.popleft(), results)
            under_way.append(self._submit_piece(parts, step, faults, flag))
            copies = ()
        for submitted in under_way:
            self._collect_piece(submitted, results)
        for index, fault in faults.items():
            results[index] = [fault]
        return RowResults(tuple(_joined(results[i]) for i in range(len(plan.sequences))))

    def _collect_piece(
        self, submitted: _Submitted, results: dict[int, list[SequenceResult]]
    ) -> None:
        collected = self._last.executor.collect(submitted.ticket)
        for part, result in zip(submitted.parts, collected.sequences, strict=True):
            results.setdefault(part.at, []).append(result)

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
