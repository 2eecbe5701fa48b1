"""Quantised checkpoints, and formats that few files have, on the device: weights stay in their
blocks, and logits are the reference's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.cuda.half_reference import operands_in_halves
from tests.executors.reference.plans import row
from tests.model.quantised_files import (
    Quantise,
    fp8,
    mxfp4,
    nvfp4,
    quantised,
    write_checkpoint,
)

from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, load_model

TOKENS = (3, 1, 4)


def logits_of(executor: Any) -> Any:
    plan = StepPlan(0, (row(TOKENS, (2, 0), want=Want.LOGITS),))
    return np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)


FP8 = {"quant_method": "fp8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("model_name", "quantise", "method", "kind"),
    [
        ("ministral3", fp8(None), FP8, "E4M3_128"),
        ("ministral3", fp8((128, 128)), FP8 | {"weight_block_size": [128, 128]}, "E4M3_128"),
        ("qwen3moe", fp8((128, 128)), FP8 | {"weight_block_size": [128, 128]}, "E4M3_128"),
        ("ministral3", nvfp4(), NVFP4, "NVFP4_128"),
        ("qwen3moe", nvfp4(), NVFP4, "NVFP4_128"),
        ("qwen3moe", mxfp4(), {"quant_method": "compressed-tensors"}, "MXFP4"),
    ],
)
def test_a_checkpoint_runs_as_the_reference_does(
    model_name: str, quantise: Quantise, method: dict[str, object], kind: str, tmp_path: Path
) -> None:
    tensors, _ = quantised(model_name, quantise)
    with load_in_bfloat(write_checkpoint(tmp_path, model_name, tensors, method)) as model:
        executor = check(model)
    assert executor._weights.formats == ("BF16", kind)


@pytest.mark.parametrize("mix", ["NVFP4", "Q1_0", "Q2_0"])
def test_a_dummy_runs_as_the_reference_does(mix: str) -> None:
    with load_model(f"dummy:tiny:{mix}") as model:
        executor = check(model)
    assert mix in executor._weights.formats


def check(model: Model) -> CudaExecutor:
    config = CudaConfig(max_batch_size=2, max_step_tokens=8, num_blocks=4, device="cpu")
    executor = CudaExecutor(model, config)
    reference = ReferenceExecutor(model, num_blocks=4)
    rounded = ReferenceExecutor(model, num_blocks=4, kv_precision="bfloat16")
    executor.warm_up()
    found, exact = logits_of(executor), logits_of(reference)
    with operands_in_halves():
        noise = ((logits_of(rounded) - exact) ** 2).sum()
    assert ((found - exact) ** 2).sum() < 4 * noise + 2e-4 * (exact**2).sum()
    return executor
