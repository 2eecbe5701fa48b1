"""Every family of the loader, with its biases, norms, windows and ropes, beside the reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.drawn_families import CASES, DRAWN, in_its_context, write_drawn
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.reference.plans import row
from tests.fixture_files import FIXTURES

from quire.core.errors import UnsupportedModelError
from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import load_model
from quire.model.spec import unsupported

FAMILIES = ("llama-linear-biased-tied", "mistral", "qwen2", "qwen2-yarn", "qwen3")
# Of the drawn families.
ON_CUDA = {
    "phi3",
    "phi3-long",
    "phi3-short",
    "ministral",
    "seed_oss",
    "mixtral",
    "qwen3moe",
}
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


@pytest.mark.parametrize("case", CASES)
def test_a_drawn_family_is_run_as_the_reference_does_or_refused_by_name(
    case: str, tmp_path: Path
) -> None:
    config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=8, device="cpu")
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        model = in_its_context(case, model)
        lacking = unsupported(model.spec, "cuda")
        assert bool(lacking) == (case not in ON_CUDA)
        if lacking:
            with pytest.raises(UnsupportedModelError) as caught:
                CudaExecutor(model, config)
            assert all(what in str(caught.value) for what in lacking)
            return
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=8)
    executor.warm_up()
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:12]
    plan = StepPlan(0, (row(tokens, (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    # Keys and values rounded to bfloat16 alone change phi3's logits by 1e-4; the interpreter cuts
    # them off instead.
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 5e-4


def test_a_product_may_mix_formats() -> None:
    """As files do: values of more bits than keys, and here gates of fewer than what they gate."""
    names = ("blk.0.ffn_up.weight", "blk.1.attn_k.weight", "blk.1.ffn_down.weight")
    with load_model("dummy:tiny:Q4_K_M") as model, load_model("dummy:tiny:Q8_0") as other:
        mixed = {name: other.tensors[name] for name in names}
        model = replace(model, tensors={**model.tensors, **mixed})
        config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
        executor = CudaExecutor(model, config)
        reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    segments = [segment.planes.format for segment in executor._weights.layers[1].qkv.segments]
    assert segments == ["Q4_K", "Q8_0", "Q4_K"] or segments == ["Q4_K", "Q8_0", "Q6_K"]
    assert not executor._weights.layers[0].dense.gate_up.is_gated
    plan = StepPlan(0, (row(PROMPT[:3], (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4
