"""FP8 checkpoints on the device: their weights stay a byte each, and are the reference's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.cuda.half_reference import operands_in_halves
from tests.executors.reference.plans import row
from tests.model.quantised_files import fp8, quantised, write_checkpoint

from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import ReferenceExecutor

TOKENS = (3, 1, 4)


def logits_of(executor: Any) -> Any:
    plan = StepPlan(0, (row(TOKENS, (2, 0), want=Want.LOGITS),))
    return np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)


@pytest.mark.parametrize(
    ("model_name", "block"),
    [("ministral3", None), ("ministral3", (128, 128)), ("qwen3moe", (128, 128))],
)
def test_a_checkpoint_in_fp8_runs_as_the_reference_does(
    model_name: str, block: tuple[int, int] | None, tmp_path: Path
) -> None:
    tensors, _ = quantised(model_name, fp8(block))
    method = {"quant_method": "fp8", "weight_block_size": block and list(block)}
    config = CudaConfig(max_batch_size=2, max_step_tokens=8, num_blocks=4, device="cpu")
    with load_in_bfloat(write_checkpoint(tmp_path, model_name, tensors, method)) as model:
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
        rounded = ReferenceExecutor(model, num_blocks=4, kv_precision="bfloat16")
    assert executor._weights.formats == ("BF16", "E4M3_128")
    executor.warm_up()
    found, exact = logits_of(executor), logits_of(reference)
    with operands_in_halves():
        noise = ((logits_of(rounded) - exact) ** 2).sum()
    assert ((found - exact) ** 2).sum() < 4 * noise + 2e-4 * (exact**2).sum()
