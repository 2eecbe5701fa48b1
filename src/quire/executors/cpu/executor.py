"""CpuExecutor: one native call a step, over weights in their packed form."""

import threading
from collections.abc import Callable, Mapping

from quire.core.clock import Clock, RealClock
from quire.core.errors import ConfigError, RowFaultError, StepCancelledError
from quire.core.plan import (
    Capacity,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    Want,
)
from quire.executors.cpu.lowering import Threads, lower, rope_tables
from quire.executors.cpu.native import SampleRequests, check_unit, units
from quire.executors.plan_checks import check_copies
from quire.executors.samples import StepSamples
from quire.executors.worker import CancelFlag, StepTicket, StepWorker, step_errors
from quire.model.loading import Model

BLOCK_SIZE = 16  # tokens; the kernels know no other

_TOUCHED_AHEAD = 256 << 20  # bytes of the cache that the system gives before they are used
_FIRST_POSITIONS = 4096  # of the rope tables, which grow when needed


class CpuExecutor(StepWorker):
    """Weights stay in their blocks; a row's bits depend on that row alone, on any number of
    threads and in every instruction set."""

    fallback: str | None = None

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        threads: Threads,
        kv_int8: bool = False,
        unit: str = "",
        per_token_scale: bool = True,
        touched_ahead: int = _TOUCHED_AHEAD,
        max_batch_size: int = 256,
        max_step_tokens: int = 512,
        clock: Clock | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
        spec = model.spec
        self._spec = spec
        self._clock = clock or RealClock()
        best = units()[-1]
        self._decoder = lower(
            spec,
            model.tensors,
            threads,
            unit=check_unit(unit) if unit else best,
            per_token_scale=per_token_scale,
            on_progress=on_progress,
        )
        self._decoder.allocate_cache(num_blocks, kv_int8, touched_ahead)
        self._capacity = Capacity(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_context=min(spec.context_length, num_blocks * BLOCK_SIZE),
            vocabulary_size=spec.vocabulary_size,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
        )
        self._running: CancelFlag | None = None  # of the step that computes
        self._running_lock = threading.Lock()
        self._num_positions = 0
        self._reach(min(_FIRST_POSITIONS, self._capacity.max_context))
        self._requests = SampleRequests()
        self._samples = StepSamples()
        formats = {tensor.format.name for tensor in model.tensors.values()}
        self.kernels = [f"cpu/{self._decoder.unit}/{name}" for name in sorted(formats)]
        if best == "portable" and not unit:
            self.fallback = "this CPU has no AVX2: the portable kernels run, slowly"
        super().__init__(self._compute, "quire-cpu")

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def unit(self) -> str:
        """The instruction set whose kernels run."""
        unit: str = self._decoder.unit
        return unit

    @property
    def is_warm(self) -> bool:
        return True

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {
            "weights": self._decoder.weight_bytes,
            "kv": self._decoder.cache_bytes,
            "workspace": self._decoder.workspace_bytes,
        }

    @property
    def counters(self) -> Mapping[str, float]:
        """What the kernels did since the executor was made: rows, products, bytes, seconds."""
        counters: Mapping[str, float] = self._decoder.counters
        return counters

    @property
    def touched_bytes(self) -> int:
        """Of the cache, what the system was asked to give ahead of use; 0 where it cannot."""
        touched: int = self._decoder.touched_bytes
        return touched

    def warm_up(self) -> None:
        """The first step waits for nothing: weights are packed when the executor is made."""

    def close(self) -> None:
        super().close()
        self._decoder.stop_touching()

    def cancel(self, ticket: StepTicket) -> None:
        super().cancel(ticket)
        with self._running_lock:  # so that no other step can have taken its place
            if self._running is ticket.flag:
                self._decoder.set_cancelled(True)

    def cache_block(self, layer: int, block: int) -> bytes:
        """The bytes of one layer's keys and values in one block."""
        stored: bytes = self._decoder.cache_block(layer, block)
        return stored

    # ---- a step

    def _compute(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        with step_errors(plan.step_id):
            return self._computed(plan, flag)

    def _computed(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        started_at = self._clock.now()
        check_copies(plan, self._capacity.num_blocks)
        faults: dict[int, SequenceResult] = {}  # by place in the plan
        sequences = []
        for place, sequence in enumerate(plan.sequences):
            try:
                sequences.append(self._samples.resolved(sequence))
            except RowFaultError as error:
                faults[place] = SequenceResult(sequence.sequence_id, fault=str(error))
        results = self._run_sound(plan, tuple(sequences), flag)
        if faults:
            others = iter(results)
            places = range(len(plan.sequences))
            results = tuple(faults.get(place) or next(others) for place in places)
        self._samples.remember(plan.step_id, results)
        return StepResult(plan.step_id, started_at, self._clock.now() - started_at, results)

    def _run_sound(
        self, plan: StepPlan, sequences: tuple[SequencePlan, ...], flag: CancelFlag
    ) -> tuple[SequenceResult, ...]:
        ends = [sequence.end for sequence in sequences]
        self._reach(min(max(ends, default=0), self._capacity.max_context))
        self._set_running(flag)
        try:
            flag.check()  # it may have been raised before the step could be stopped
            return self._run_native(plan, sequences)
        finally:
            self._set_running(None)

    def _set_running(self, flag: CancelFlag | None) -> None:
        with self._running_lock:
            self._running = flag
            self._decoder.set_cancelled(False)

    def _run_native(
        self, plan: StepPlan, sequences: tuple[SequencePlan, ...]
    ) -> tuple[SequenceResult, ...]:
        outcomes = self._decoder.step(
            sequences,
            [self._request(sequence) for sequence in sequences],
            [_num_target_logprobs(sequence) for sequence in sequences],
            plan.copies,
            self._capacity.max_context,
            self._capacity.num_blocks,
        )
        if outcomes is None:
            raise StepCancelledError(f"step {plan.step_id} was cancelled")
        return tuple(
            _result(sequence, *outcome)
            for sequence, outcome in zip(sequences, outcomes, strict=True)
        )

    def _request(self, plan: SequencePlan) -> object:
        samples = plan.want == Want.SAMPLE and plan.sampling is not None
        return self._requests.request(plan) if samples else None

    def _reach(self, num_positions: int) -> None:
        """Have the rope tables hold so many positions."""
        if num_positions <= self._num_positions:
            return
        wanted = max(num_positions, 2 * self._num_positions)
        self._num_positions = min(wanted, self._capacity.max_context)
        tables = rope_tables(self._spec, self._num_positions)
        self._decoder.set_rope(*tables, self._num_positions)


def _num_target_logprobs(plan: SequencePlan) -> int:
    return (plan.sampling.params.prompt_logprobs or 0) if plan.sampling is not None else 0


def _result(
    plan: SequencePlan,
    fault: str | None,
    token: int | None,
    score: tuple[object, ...] | None,
    target_scores: tuple[tuple[object, ...], ...],
    values: object,
) -> SequenceResult:
    if fault is not None:
        return SequenceResult(plan.sequence_id, fault=fault)
    return SequenceResult(
        plan.sequence_id,
        token=token,
        logprob=None if score is None else TokenLogprob(*score),  # type: ignore[arg-type]
        prompt_logprobs=tuple(TokenLogprob(*one) for one in target_scores),  # type: ignore[arg-type]
        logits=values if plan.want == Want.LOGITS else None,
        pooled=values[0] if plan.want == Want.POOLED else None,  # type: ignore[index]
    )
