"""Every family of the loader, with its biases, norms, windows and ropes, beside the reference."""

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.reference.plans import row
from tests.fixture_files import FIXTURES

from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import ReferenceExecutor

FAMILIES = ("llama-linear-biased-tied", "mistral", "qwen2", "qwen2-yarn", "qwen3")
PROMPT = (3, 1, 4, 1, 5, 9)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_references(name: str) -> None:
    with load_in_bfloat(FIXTURES / "families" / name) as model:
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    plan = StepPlan(0, (row(PROMPT, (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4
