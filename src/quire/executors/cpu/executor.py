"""CpuExecutor: one native call a step, over weights in their packed form."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.clock import Clock
from quire.core.errors import StepCancelledError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, TokenLogprob, Want
from quire.executors.base import model_capacity
from quire.executors.cpu.lowering import Threads, lower
from quire.executors.cpu.native import SampleRequests, check_unit, native, units
from quire.executors.worker import CancelFlag, RowResults, StepTicket, ThreadedExecutor
from quire.model.kv_layout import KVLayout, one_group
from quire.model.loading import Model

_PREFAULT_BYTES = 256 << 20  # of the KV cache, faulted in ahead of use
_FIRST_POSITIONS = 4096  # of the rope tables, which grow when needed

_Logprob = tuple[int, float, int, tuple[tuple[int, float], ...]]  # the fields of TokenLogprob


class LayerOutput(NamedTuple):
    """What a row's tokens are after the last layer; None beside a fault."""

    fault: str | None
    hidden: npt.NDArray[np.float32] | None  # [new tokens, hidden]


class CpuExecutor(ThreadedExecutor):
    """Weights stay in their blocks; a row's bits depend on that row alone, on any number of
    threads and in every instruction set."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        threads: Threads,
        kv_int8: bool = False,
        unit: str = "",
        per_token_scale: bool = True,
        prefault_bytes: int = _PREFAULT_BYTES,
        max_batch_size: int = 256,
        max_step_tokens: int = 512,
        layout: KVLayout | None = None,
        num_states: int | None = None,
        has_feed_forwards: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._spec = model.spec
        layout = layout or one_group(model.spec)
        num_states = model.spec.num_state_slots(num_states)
        capacity = model_capacity(
            model.spec,
            num_blocks,
            max_batch_size,
            max_step_tokens,
            windows=layout.windows,
            num_states=num_states,
        )
        self._max_context = capacity.max_context
        self._decoder = lower(
            model.spec,
            model.tensors,
            threads,
            unit=check_unit(unit) if unit else units()[-1],
            per_token_scale=per_token_scale,
            layout=layout,
            has_feed_forwards=has_feed_forwards,
        )
        self._decoder.allocate_cache(num_blocks, kv_int8, prefault_bytes)
        if num_states:
            self._decoder.allocate_states(num_states)
        self._running: CancelFlag | None = None  # of the step that computes
        self._running_lock = threading.Lock()
        self._num_positions = 0
        self._extend_rope(min(_FIRST_POSITIONS, self._max_context))
        self._requests = SampleRequests()
        formats = {tensor.format.name for tensor in model.tensors.values()}
        kernels = [f"cpu/{self.unit}/{name}" for name in sorted(formats)]
        fallback = None if unit else _fallback()
        super().__init__(capacity, "quire-cpu", kernels=kernels, fallback=fallback, clock=clock)

    @property
    def unit(self) -> str:
        """The instruction set whose kernels run."""
        return self._decoder.unit

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {
            "weights": self._decoder.weight_bytes,
            "kv": self._decoder.cache_bytes,
            "workspace": self._decoder.workspace_bytes,
        }

    @property
    def counters(self) -> Mapping[str, float]:
        """What the kernels did since the executor was made: rows, multiply-adds, bytes, seconds."""
        return self._decoder.counters

    @property
    def prefaulted_bytes(self) -> int:
        """Bytes of the KV cache that were faulted in ahead of use; 0 where the system cannot."""
        return self._decoder.prefaulted_bytes

    def close(self) -> None:
        super().close()
        self._decoder.stop_prefault()

    def cancel(self, ticket: StepTicket) -> None:
        super().cancel(ticket)
        self.cancel_run(ticket.flag)

    def cancel_run(self, flag: CancelFlag) -> None:
        """Stop what runs with this flag, if it does."""
        with self._running_lock:  # so that the step that runs stays the same meanwhile
            if self._running is flag:
                self._decoder.set_cancelled(True)

    def run_layers(self, plan: StepPlan, flag: CancelFlag) -> list[LayerOutput]:
        """Compute a plan's rows on the caller's thread, not beside a step: the hidden states after
        the last layer of all its tokens, whatever the rows want."""
        rows = plan.sequences
        self._extend_rope_for(rows)
        with self._running_with(flag):
            results = self._decoder.run_layers(
                rows, plan.copies, self._max_context, self.capacity.num_blocks
            )
        if results is None:
            raise StepCancelledError(f"step {plan.step_id} was cancelled")
        return [LayerOutput(fault, values) for fault, _, _, _, values in results]

    def step_rows(self, plan: StepPlan) -> "native.StepRows":
        """A plan's rows, checked, for run_layer; `faults` has a text for each, or ""."""
        rows = plan.sequences
        self._extend_rope_for(rows)
        return self._decoder.rows(rows, plan.copies, self._max_context, self.capacity.num_blocks)

    def run_layer(
        self, rows: "native.StepRows", layer: int, hidden: npt.NDArray[np.float32], flag: CancelFlag
    ) -> None:
        """Compute one layer of the sound rows' tokens on the caller's thread: from hidden states
        [tokens, hidden size or more] to hidden states. The first layer takes the embedding."""
        with self._running_with(flag):
            if not self._decoder.run_layer(rows, layer, hidden):
                raise StepCancelledError("the step was cancelled")

    def cache_block(self, layer: int, block: int) -> bytes:
        """The bytes of one layer's keys and values in one block."""
        return self._decoder.cache_block(layer, block)

    # ---- a step

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        self._extend_rope_for(plan.sequences)
        with self._running_with(flag):
            return self._run_native(plan)

    @contextmanager
    def _running_with(self, flag: CancelFlag) -> Iterator[None]:
        self._set_running(flag)
        try:
            flag.check()  # it may have been raised before the step could be stopped
            yield
        finally:
            self._set_running(None)

    def _set_running(self, flag: CancelFlag | None) -> None:
        with self._running_lock:
            self._running = flag
            self._decoder.set_cancelled(False)

    def _run_native(self, plan: StepPlan) -> RowResults:
        rows = plan.sequences
        results = self._decoder.step(
            rows,
            [self._request(row) for row in rows],
            [row.num_target_logprobs for row in rows],
            plan.copies,
            self._max_context,
            self.capacity.num_blocks,
            _pending_masks(rows),
        )
        if results is None:
            raise StepCancelledError(f"step {plan.step_id} was cancelled")
        return RowResults(
            tuple(_result(row, *result) for row, result in zip(rows, results, strict=True))
        )

    def _request(self, plan: SequencePlan) -> "native.SampleRequest | None":
        samples = plan.want == Want.SAMPLE and plan.sampling is not None
        return self._requests.request(plan) if samples else None

    def _extend_rope_for(self, rows: Sequence[SequencePlan]) -> None:
        longest = max([row.end for row in rows], default=0)
        self._extend_rope(min(longest, self._max_context))

    def _extend_rope(self, num_positions: int) -> None:
        """Make the rope tables at least so many positions long."""
        if num_positions <= self._num_positions:
            return
        wanted = max(num_positions, 2 * self._num_positions)
        self._num_positions = min(wanted, self._max_context)
        for index, rope in enumerate(self._spec.ropes):
            cosines, sines = rope.tables(self._num_positions)
            self._decoder.set_rope(index, cosines.ravel(), sines.ravel(), self._num_positions)


def _pending_masks(rows: Sequence[SequencePlan]) -> Callable[[], list[bytes | None]] | None:
    """What gives every row's mask once the layers are computed; None where none is pending."""
    if all(row.has_mask for row in rows):
        return None
    return lambda: [row.mask() for row in rows]


def _fallback() -> str | None:
    """Why the best kernels that run here are slow ones; None where they are not."""
    if units()[-1] == "portable":
        return "this CPU has no AVX2: the portable kernels run, slowly"
    return None


def _result(
    plan: SequencePlan,
    fault: str | None,
    token: int | None,
    logprob: _Logprob | None,
    target_logprobs: tuple[_Logprob, ...],
    values: npt.NDArray[np.float32] | None,
) -> SequenceResult:
    if fault is not None:
        return SequenceResult(plan.sequence_id, fault=fault)
    return SequenceResult(
        plan.sequence_id,
        token=token,
        logprob=None if logprob is None else TokenLogprob(*logprob),
        prompt_logprobs=tuple(TokenLogprob(*one) for one in target_logprobs),
        logits=values if plan.want == Want.LOGITS else None,
        pooled=values[0] if values is not None and plan.want == Want.POOLED else None,
    )
