"""ReferenceExecutor: takes a plan apart into rows and answers for each sequence alone."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from quire.core.clock import Clock, RealClock
from quire.core.errors import ConfigError, RowFaultError
from quire.core.plan import (
    Capacity,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    Want,
)
from quire.executors.plan_checks import check_copies
from quire.executors.reference.decoder import Decoder, Floats, KVBlocks, Row
from quire.executors.sampler import sample, score
from quire.executors.samples import StepSamples
from quire.executors.worker import CancelFlag, StepWorker, step_errors
from quire.model.loading import Model


class _Chunk(NamedTuple):
    """A sequence's new tokens on their way, with nothing left to come from another step."""

    plan: SequencePlan
    rows: tuple[Row, ...]


class ReferenceExecutor(StepWorker):
    """Slow, plain and right. Weights are unpacked to float32 on construction."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_batch_size: int = 64,
        max_step_tokens: int = 512,
        clock: Clock | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        spec = model.spec
        self._clock = clock or RealClock()
        self._decoder = Decoder(spec, model.tensors)
        self._blocks = KVBlocks(spec, num_blocks, block_size)
        self._capacity = Capacity(
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=min(spec.context_length, num_blocks * block_size),
            vocabulary_size=spec.vocabulary_size,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens,
        )
        self._samples = StepSamples()
        super().__init__(self._compute, "quire-reference")

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def is_warm(self) -> bool:
        return True

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": self._decoder.weight_bytes, "kv": self._blocks.num_bytes}

    def warm_up(self) -> None:
        """The first step waits for nothing: there is nothing to compile."""

    def _compute(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        # What is not finite is found in its row.
        with step_errors(plan.step_id), np.errstate(all="ignore"):
            return self._steps(plan, flag)

    def _steps(self, plan: StepPlan, flag: CancelFlag) -> StepResult:
        started_at = self._clock.now()
        self._copy_blocks(plan)
        chunks = [self._chunk(sequence) for sequence in plan.sequences]
        rows = [row for chunk in chunks if isinstance(chunk, _Chunk) for row in chunk.rows]
        self._decoder.run(rows, self._blocks, flag.check)
        results = tuple(self._result(chunk) for chunk in chunks)
        self._samples.remember(plan.step_id, results)
        return StepResult(plan.step_id, started_at, self._clock.now() - started_at, results)

    def _copy_blocks(self, plan: StepPlan) -> None:
        check_copies(plan, self._capacity.num_blocks)
        for copy in plan.copies:
            self._blocks.copy(copy.source, copy.target)

    # ---- one sequence

    def _chunk(self, plan: SequencePlan) -> _Chunk | SequenceResult:
        """The sequence's rows, or its fault."""
        try:
            plan = self._samples.resolved(plan)
            self._check(plan)
        except RowFaultError as error:
            return SequenceResult(plan.sequence_id, fault=str(error))
        slots = self._blocks.slots(plan.block_table, plan.end)
        places = enumerate(plan.tokens, plan.start)
        return _Chunk(plan, tuple(self._decoder.row(t, slots[: p + 1]) for p, t in places))

    def _check(self, plan: SequencePlan) -> None:
        capacity = self._capacity
        for token in (*plan.tokens, *plan.prompt_targets):
            if not 0 <= token < capacity.vocabulary_size:
                raise RowFaultError(
                    f"token {token} is outside the vocabulary of {capacity.vocabulary_size}"
                )
        if not plan.tokens or plan.start < 0 or plan.end > capacity.max_context:
            raise RowFaultError(
                f"positions {plan.start} to {plan.end} are not within the context of "
                f"{capacity.max_context}"
            )
        blocks = plan.block_table[: -(-plan.end // capacity.block_size)]
        if len(blocks) * capacity.block_size < plan.end:
            raise RowFaultError(f"{len(blocks)} blocks do not hold {plan.end} positions")
        if not all(0 <= block < capacity.num_blocks for block in blocks):
            raise RowFaultError(f"the block table {blocks} leaves the {capacity.num_blocks} blocks")

    def _result(self, chunk: _Chunk | SequenceResult) -> SequenceResult:
        if isinstance(chunk, SequenceResult):
            return chunk
        try:
            return self._computed(chunk)
        except RowFaultError as error:
            return SequenceResult(chunk.plan.sequence_id, fault=str(error))

    def _computed(self, chunk: _Chunk) -> SequenceResult:
        plan, rows = chunk
        if not all(np.isfinite(row.state).all() for row in rows):
            raise RowFaultError("the hidden state is not finite")
        result = SequenceResult(plan.sequence_id, prompt_logprobs=self._prompt_scores(chunk))
        match plan.want:
            case Want.NOTHING:
                return result
            case Want.SAMPLE:
                if plan.sampling is None:
                    raise RowFaultError("a sample was wanted without saying how")
                extras = plan.completion_position, plan.history, plan.allowed
                choice = sample(self._logits(rows[-1]), plan.sampling, *extras)
                return result._replace(token=choice.token, logprob=choice.logprob)
            case Want.LOGITS:
                return result._replace(logits=np.stack([self._logits(row) for row in rows]))
            case Want.POOLED:
                return result._replace(pooled=self._decoder.final_state(rows[-1]))
            case other:
                raise RowFaultError(f"there is no such want as {other!r}")

    def _prompt_scores(self, chunk: _Chunk) -> tuple[TokenLogprob, ...]:
        plan = chunk.plan
        num_top = (plan.sampling.params.prompt_logprobs or 0) if plan.sampling is not None else 0
        return tuple(
            score(self._logits(row), target, num_top)
            for row, target in zip(chunk.rows, plan.prompt_targets, strict=False)
        )  # a prompt's last token has no target

    def _logits(self, row: Row) -> Floats:
        logits = self._decoder.logits(row)
        if not np.isfinite(logits).all():
            raise RowFaultError("the logits are not finite")
        return logits
