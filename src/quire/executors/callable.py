"""CallableExecutor: runs plans through a forward function that the user brings.

The function keeps no state: it sees whole sequences, padded on the left to one length. The tokens
stand in block slots, so that the engine above need not know that this is no model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.clock import Clock
from quire.core.errors import ExecutorError, RowFaultError
from quire.core.plan import Capacity, SequencePlan, SequenceResult, StepPlan, Want
from quire.executors.base import TokenStore
from quire.executors.sampler import Logits, sample
from quire.executors.worker import CancelFlag, RowResults, ThreadedExecutor

# forward(tokens [B, T], mask [B, T]) -> logits [B, V], those after each row's last token
Forward = Callable[[NDArray[np.int64], NDArray[np.bool_]], Any]


class CallableExecutor(ThreadedExecutor):
    """Steps run one after another on a thread of their own."""

    def __init__(
        self,
        forward: Forward,
        capacity: Capacity,
        *,
        pad_token: int = 0,
        checks_vocabulary: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._forward = forward
        self._pad_token = pad_token
        self._checks_vocabulary = checks_vocabulary
        self._store = TokenStore(capacity.num_blocks, capacity.block_size)
        super().__init__(capacity, "quire-forward", clock=clock)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"kv": self._store.num_bytes}

    def _step_errors(self, _step_id: int, /) -> AbstractContextManager[None]:
        """What the function raises reaches the engine as it is."""
        return nullcontext()

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        for copy in plan.copies:
            self._store.copy(copy.source, copy.target)
        rows = plan.sequences
        for row in rows:
            self._store.write(row.block_table, row.start, row.tokens)
        wanted = [row for row in rows if row.want is not Want.NOTHING]
        results = {row.sequence_id: SequenceResult(row.sequence_id) for row in rows}
        padding = 0
        if wanted:
            tokens, mask = self._padded(wanted)
            padding = int(mask.size - mask.sum())
            flag.check()
            logits = self._checked(self._forward(tokens, mask), len(wanted))
            for row, row_logits in zip(wanted, logits, strict=True):
                results[row.sequence_id] = _choose(row, row_logits)
        return RowResults(tuple(results.values()), padding)

    def _padded(self, rows: Sequence[SequencePlan]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows' whole sequences, aligned on the right; the mask is true on real tokens."""
        length = max(row.end for row in rows)
        tokens = np.full((len(rows), length), self._pad_token, np.int64)
        mask = np.zeros((len(rows), length), np.bool_)
        for index, row in enumerate(rows):
            tokens[index, length - row.end :] = self._store.read(row.block_table, row.end)
            mask[index, length - row.end :] = True
        return tokens, mask

    def _checked(self, returned: Any, num_rows: int) -> NDArray[np.float32]:
        logits = np.asarray(returned)
        vocabulary = str(self.capacity.vocabulary_size) if self._checks_vocabulary else "V"
        fits = logits.ndim == 2 and logits.shape[0] == num_rows and logits.shape[1] > 0
        if self._checks_vocabulary:
            fits = fits and logits.shape[1] == self.capacity.vocabulary_size
        if not fits:
            raise ExecutorError(
                f"forward returned logits of shape {logits.shape}, expected "
                f"({num_rows}, {vocabulary}): one row for each sequence, at its last token"
            )
        if not np.issubdtype(logits.dtype, np.number) or np.iscomplexobj(logits):
            raise ExecutorError(f"forward returned {logits.dtype}, expected real numbers")
        return logits.astype(np.float32)


def _choose(row: SequencePlan, logits: Logits) -> SequenceResult:
    if row.want is not Want.SAMPLE or row.prompt_targets or row.sampling is None:
        fault = "a forward function gives the logits after the last token, nothing else"
        return SequenceResult(row.sequence_id, fault=fault)
    try:
        choice = sample(logits, row.sampling, row.completion_position, row.history, row.allowed)
    except RowFaultError as error:
        return SequenceResult(row.sequence_id, fault=str(error))
    return SequenceResult(row.sequence_id, choice.token, choice.logprob)
