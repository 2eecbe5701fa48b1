"""ReferenceExecutor: takes a plan apart into rows and answers for each sequence alone."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from quire.core.clock import Clock
from quire.core.errors import RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, TokenLogprob, Want
from quire.executors.base import BLOCK_SIZE, model_capacity
from quire.executors.reference.decoder import Decoder, Floats, KVBlocks, Row
from quire.executors.sampler import sample, score
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor
from quire.model.loading import Model


class _Chunk(NamedTuple):
    """A sequence's new tokens, as rows of the decoder."""

    plan: SequencePlan
    rows: tuple[Row, ...]


class ReferenceExecutor(ThreadedExecutor):
    """Slow, plain and right. Weights are unpacked to float32 on construction."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_batch_size: int = 64,
        max_step_tokens: int = 512,
        clock: Clock | None = None,
    ) -> None:
        capacity = model_capacity(
            model.spec, num_blocks, max_batch_size, max_step_tokens, block_size
        )
        self._decoder = Decoder(model.spec, model.tensors)
        self._blocks = KVBlocks(model.spec, num_blocks, block_size)
        super().__init__(
            capacity,
            "quire-reference",
            kernels=["numpy float32, one row at a time"],
            clock=clock,
        )

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": self._decoder.weight_bytes, "kv": self._blocks.num_bytes}

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        with np.errstate(all="ignore"):  # what is not finite is found in its row
            for copy in plan.copies:
                self._blocks.copy(copy.source, copy.target)
            chunks = [self._chunk(sequence) for sequence in plan.sequences]
            rows = [row for chunk in chunks if isinstance(chunk, _Chunk) for row in chunk.rows]
            self._decoder.run(rows, self._blocks, flag.check)
            return RowResults(tuple(self._result(chunk) for chunk in chunks))

    # ---- one sequence

    def _chunk(self, plan: SequencePlan) -> _Chunk | SequenceResult:
        """The sequence's rows, or its fault."""
        try:
            self._check_row(plan, plan.end)
        except RowFaultError as error:
            return SequenceResult(plan.sequence_id, fault=str(error))
        slots = self._blocks.slots(plan.block_table, plan.end)
        positions = enumerate(plan.tokens, plan.start)
        return _Chunk(plan, tuple(self._decoder.row(t, slots[: p + 1]) for p, t in positions))

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
