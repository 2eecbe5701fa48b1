"""Short ways to write plans and to have an executor compute them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from quire.core.plan import (
    NO_STATE,
    BlockCopy,
    Sampling,
    SequencePlan,
    SequenceResult,
    StepPlan,
    Want,
)
from quire.core.sampling import SamplingParams
from quire.executors.base import Executor
from quire.executors.reference import KVPrecision, ReferenceExecutor
from quire.model.loading import load_model

GREEDY = Sampling(SamplingParams(temperature=0.0), seed=0, index=0)


def row(
    tokens: Sequence[int],
    table: Sequence[int],
    *,
    start: int = 0,
    sequence_id: int = 0,
    want: Want = Want.LOGITS,
    follows: int | None = None,
    **extras: Any,
) -> SequencePlan:
    if want is Want.SAMPLE:
        extras.setdefault("sampling", GREEDY)
    return SequencePlan(sequence_id, start, tuple(tokens), follows, tuple(table), want, **extras)


def run(
    executor: Executor,
    *rows: SequencePlan,
    step_id: int = 0,
    copies: Sequence[BlockCopy] = (),
) -> tuple[SequenceResult, ...]:
    if executor.capacity.num_states:
        rows = tuple(with_states(executor, plan) for plan in rows)
    ticket = executor.submit(StepPlan(step_id, rows, tuple(copies)))
    return executor.collect(ticket, timeout_s=60).sequences


_last_states: WeakKeyDictionary[Executor, dict[int, int]] = WeakKeyDictionary()


def with_states(executor: Executor, plan: SequencePlan) -> SequencePlan:
    """The row with slots of its sequence's state, which has two and uses them in turns."""
    if plan.states:
        return plan
    last = _last_states.setdefault(executor, {})
    pair = 2 * plan.sequence_id
    source = last[plan.sequence_id] if plan.start else NO_STATE
    target = last[plan.sequence_id] = pair + 1 if source == pair else pair
    return plan._replace(states=(source, target))


def logits(executor: Executor, plan: SequencePlan) -> npt.NDArray[np.float32]:
    [result] = run(executor, plan)
    assert result.fault is None
    return np.asarray(result.logits)


@contextmanager
def opened(
    path: Path, num_blocks: int = 16, block_size: int = 16, kv_precision: KVPrecision = "float32"
) -> Iterator[ReferenceExecutor]:
    with load_model(path) as model:
        executor = ReferenceExecutor(
            model, num_blocks=num_blocks, block_size=block_size, kv_precision=kv_precision
        )
        try:
            yield executor
        finally:
            executor.close()
