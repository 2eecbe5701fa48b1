"""ModelSpec refuses what cannot be, and check_tensors what does not fit it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.extreme_models import small_spec
from tests.model.flat_spec import flat_spec
from tests.model.tensors import tensor, zeros

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model.rope import Rope
from quire.model.spec import MAX_SIZES, check_tensors, tensor_shapes

SIZES: dict[str, Any] = {
    "family": "llama",
    "hidden_size": 12,
    "ffn_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "vocabulary_size": 32,
    "context_length": 64,
    "rope": Rope(base=10000.0, dims=6, interleaved=False),
}
SPEC = flat_spec(**SIZES)
FLAT_SIZES = sorted(MAX_SIZES.keys() - {"num_experts", "num_layers"})


@pytest.mark.parametrize("name", FLAT_SIZES)
@pytest.mark.parametrize("is_too_large", [False, True])
def test_sizes_are_bounded(name: str, is_too_large: bool) -> None:
    value = MAX_SIZES[name] + 1 if is_too_large else 0
    with pytest.raises(ModelFileError, match=f"{name} must be from 1 to .*, got {value}"):
        flat_spec(**{**SIZES, name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 4}, r"rope dimensions \(6\) exceed head_dim \(4\)"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon must be from 0 to 1"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon must be from 0 to 1"),
        ({"windows": (None, 0)}, "a layer's window must be positive, got 0"),
        ({"windows": ()}, "num_layers must be from 1 to 4096, got 0"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        flat_spec(**{**SIZES, **changes})


def test_cached_numbers_are_counted_over_layers_keys_and_values() -> None:
    assert SPEC.num_kv_elements == 2 * 2 * 2 * 6


def test_optional_parts_ask_for_their_tensors() -> None:
    full = flat_spec(
        **SIZES,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        qk_norm=True,
        sub_norms=True,
        linear_scales=True,
        tied_head=True,
    )
    more = {name: shape for name, shape in tensor_shapes(full).items() if "blk.1." in name}
    plain = tensor_shapes(SPEC)
    added = {name.removeprefix("blk.1."): more[name] for name in more.keys() - plain.keys()}
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert added == {
        "attn_q_norm.weight": (6,),
        "attn_k_norm.weight": (6,),
        "attn_sub_norm.weight": (24,),
        "ffn_sub_norm.weight": (20,),
        "attn_q.bias": (24,),
        "attn_k.bias": (12,),
        "attn_v.bias": (12,),
        "attn_output.bias": (12,),
        "ffn_gate.bias": (20,),
        "ffn_up.bias": (20,),
        "ffn_down.bias": (12,),
        **{f"{name}.scale": (1,) for name in linears},
    }
    assert "output.weight" in plain
    assert "output.weight" not in tensor_shapes(full)


def test_tensors_that_fit_pass() -> None:
    check_tensors(SPEC, zeros(tensor_shapes(SPEC)))


@pytest.mark.parametrize("name", tensor_shapes(SPEC))
def test_a_missing_tensor_is_named_with_its_shape(name: str) -> None:
    tensors = zeros(tensor_shapes(SPEC))
    shape = list(tensors.pop(name).shape)
    with pytest.raises(ModelFileError) as caught:
        check_tensors(SPEC, tensors)
    assert f"tensor {name} {shape} is missing" in str(caught.value)


@pytest.mark.parametrize("name", tensor_shapes(SPEC))
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str) -> None:
    tensors = zeros(tensor_shapes(SPEC))
    shape = tensors[name].shape
    tensors[name] = tensor(name, np.zeros((*shape, 1)))
    with pytest.raises(ModelFileError) as caught:
        check_tensors(SPEC, tensors)
    expected = f"tensor {name} has shape {[*shape, 1]}, expected {list(shape)}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_q.weight", "output.bias"])
def test_a_tensor_without_a_place_is_refused_by_name(name: str) -> None:
    tensors = {**zeros(tensor_shapes(SPEC)), name: tensor(name, np.zeros(24))}
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} \\[24\\] has no place"):
        check_tensors(SPEC, tensors)


def test_frequency_divisors_are_read_into_the_spec_and_may_stay() -> None:
    check_tensors(SPEC, {**zeros(tensor_shapes(SPEC)), **zeros({"rope_freqs.weight": (3,)})})


def test_a_context_beyond_learned_positions_is_refused() -> None:
    spec = small_spec(context_length=64)
    assert replace(spec, num_positions=64).num_positions == 64
    with pytest.raises(ModelFileError, match="a context of 64 exceeds the 63 positions"):
        replace(spec, num_positions=63)
