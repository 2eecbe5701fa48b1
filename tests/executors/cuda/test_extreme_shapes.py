"""Shapes from a file: those at the edges run as the reference does, those beyond are refused before
a GPU is touched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.executors.reference.plans import row
from tests.extreme_models import random_model, small_spec

from quire.core.errors import UnsupportedModelError
from quire.core.plan import StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.executor import check_fits
from quire.executors.reference import ReferenceExecutor
from quire.model.rope import Rope
from quire.model.spec import ModelSpec

PROMPT = (3, 1, 4, 1, 5, 9)

EDGES: dict[str, dict[str, Any]] = {
    "128 heads of a kv head": {"num_heads": 128, "head_dim": 4},
    "groups of 5": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 6},
    "heads of 2": {"head_dim": 2},
    "heads of 34, of which 2 turn": {"head_dim": 34, "rope": Rope(1e4, 2, interleaved=True)},
    "heads of 256": {"head_dim": 256},
    "heads of 512": {"head_dim": 512},
    "hidden 1": {"hidden_size": 1},
    "hidden 257, feed-forward 255": {"hidden_size": 257, "ffn_size": 255},
    "feed-forward 1": {"ffn_size": 1},
    "a vocabulary of 10": {"vocabulary_size": 10},
    "40 kv heads": {"num_heads": 40, "num_kv_heads": 40, "head_dim": 2},
    "windows of 1 and 3": {"num_layers": 2, "windows": (1, 3)},
}


@pytest.mark.parametrize("changes", EDGES.values(), ids=EDGES.keys())
def test_edges_run_as_the_reference_does(changes: dict[str, Any]) -> None:
    check_beside_reference(small_spec(**changes))


def test_layers_may_have_other_heads() -> None:
    """Heads of which no block of the cache has a whole number, and other tiles of tokens."""
    spec = small_spec(num_layers=2, num_heads=4)
    first, second = spec.layers
    heads: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "value_dim": 10}
    other = replace(second, mixer=replace(second.attention, **heads, scale=0.4))
    check_beside_reference(replace(spec, layers=(first, other)))


def check_beside_reference(spec: ModelSpec) -> None:
    model = random_model(spec, usual_format="BF16")
    config = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=4, device="cpu")
    executor = CudaExecutor(model, config)
    reference = ReferenceExecutor(model, num_blocks=4)
    executor.warm_up()
    plan = StepPlan(0, (row(PROMPT, (2, 0), want=Want.LOGITS),))
    found = np.asarray(executor.collect(executor.submit(plan), 60).sequences[0].logits)
    exact = np.asarray(reference.collect(reference.submit(plan), 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 1e-3


class Unread(dict[str, Any]):
    """Tensors that nobody may look at: a shape is refused before them."""

    def items(self) -> Any:
        raise AssertionError("tensors were read")


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "129 heads of a kv head": ({"num_heads": 129}, r"num_heads over num_kv_heads.* is 129, .* 128"),
    "256 heads of a kv head": ({"num_heads": 256}, r"num_heads over num_kv_heads.* is 256, .* 128"),
    "33 wide heads": (
        {"num_heads": 33, "head_dim": 130},
        r"num_heads over num_kv_heads, for heads of 130 is 33, .* at most 32",
    ),
    "17 heads of 258": (
        {"num_heads": 17, "head_dim": 258},
        r"num_heads over num_kv_heads, for heads of 258 is 17, .* at most 16",
    ),
    "heads of 514": ({"head_dim": 514}, r"head_dim is 514, .* at most 512"),
    "heads of 16384": ({"head_dim": 16384}, r"head_dim is 16384, .* at most 512"),
    "heads of 17": (
        {"head_dim": 17, "rope": Rope(1e4, 16, interleaved=False)},
        r"head_dim is 17, .* even",
    ),
    "a wide state": ({"hidden_size": (1 << 15) + 1}, r"hidden_size.* is 33024, .* 32768"),
    "a large vocabulary": ({"vocabulary_size": 1 << 24}, r"the rows .* is 16777216, .* 4194240"),
    "a wide feed-forward": ({"ffn_size": 1 << 22}, r"the rows .* is 8388608, .* 4194240"),
    "a long context": ({"context_length": 1 << 30}, r"context_length is 1073741824, .* 16777216"),
}


@pytest.mark.parametrize(("changes", "message"), BEYOND.values(), ids=BEYOND.keys())
def test_what_no_launcher_can_launch_is_refused(changes: dict[str, Any], message: str) -> None:
    spec: ModelSpec = small_spec(**changes)
    model = random_model(small_spec(), usual_format="BF16")
    with pytest.raises(UnsupportedModelError, match=message):
        check_fits(replace(model, spec=spec, tensors=Unread()), device="cuda")
