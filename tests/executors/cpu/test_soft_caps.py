"""Soft caps on scores and logits: the CPU executor does what the reference does."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from tests.fixture_files import fixture_file
from tests.model.flat_spec import with_attention

from quire.core.plan import SequencePlan, StepPlan, Want
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, load_model

TOKENS = tuple(range(3, 35))


def logits_of(executor: CpuExecutor | ReferenceExecutor) -> npt.NDArray[np.float32]:
    plan = SequencePlan(0, 0, TOKENS, None, (0, 1), Want.LOGITS)
    result = executor.collect(executor.submit(StepPlan(0, (plan,)))).sequences[0]
    executor.close()
    assert result.fault is None, result.fault
    logits: npt.NDArray[np.float32] = result.logits
    return logits


def on_cpu(model: Model) -> npt.NDArray[np.float32]:
    return logits_of(CpuExecutor(model, num_blocks=2, threads=Threads(1, may_spin=False)))


def test_capped_scores_and_logits_follow_the_reference() -> None:
    with load_model(fixture_file("tiny/F32.gguf")) as plain:
        spec = with_attention(replace(plain.spec, logit_soft_cap=0.7), soft_cap=0.05)
        capped = replace(plain, spec=spec)
        ours, theirs = on_cpu(capped), logits_of(ReferenceExecutor(capped, num_blocks=2))
        without = on_cpu(plain)
    assert np.abs(ours).max() <= 0.7
    error = np.square(ours - theirs).sum() / np.square(theirs).sum()
    assert error < 2e-6  # what keys and values in half precision cost
    uncapped_scores = 0.7 * np.tanh(without / 0.7)
    assert np.abs(ours - uncapped_scores).max() > 1e-2  # the cap on scores is felt too
