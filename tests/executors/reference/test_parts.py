"""Parts of layers that no golden reaches, or that one would hide: activations, values of another
size than keys, routers, sinks, chunks."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.reference.plans import logits, row
from tests.extreme_models import random_model, small_spec
from tests.model.flat_spec import with_attention
from tests.model.tensors import tensor

from quire.executors.reference import (
    _ACTIVATIONS,
    ReferenceExecutor,
    gated,
    position_scale,
    route,
    softmax,
)
from quire.model.loading import Model
from quire.model.spec import Activation, Experts, PositionScale, Router, Scoring

Floats = npt.NDArray[np.float32]
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def computed(model: Model) -> Floats:
    executor = ReferenceExecutor(model, num_blocks=2)
    found = logits(executor, row(TOKENS, (1, 0)))
    executor.close()
    return found


def test_gelu_is_x_times_the_share_of_a_normal_distribution_below_x() -> None:
    x = floats(-3.0, -1.0, 0.0, 0.5, 2.0)
    exact = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    assert np.allclose(_ACTIVATIONS[Activation.GELU](x), exact, atol=1e-6)
    by_tanh = _ACTIVATIONS[Activation.GELU_TANH](x)
    assert np.allclose(by_tanh, exact, atol=1e-3) and not np.allclose(by_tanh, exact, atol=1e-6)


def test_gpt_oss_clamps_gates_above_and_values_on_both_sides() -> None:
    found = gated(Activation.CLAMPED_SWIGLU, floats(9.0, -9.0, 1.0), floats(9.0, -9.0, 0.5))
    slope = 1.702
    exact = [
        (value + 1) * gate / (1 + math.exp(-slope * gate))
        for gate, value in ((7.0, 7.0), (-9.0, -7.0), (1.0, 0.5))
    ]
    assert np.allclose(found, exact, rtol=1e-6)


def test_values_of_another_size_than_keys() -> None:
    """As wide ones of which the last are zero, whatever the output projection makes of these."""
    wide = random_model(with_attention(small_spec(), value_dim=8))
    narrow_spec = with_attention(small_spec(), value_dim=4)
    tensors = dict(wide.tensors)
    values = tensors["blk.0.attn_v.weight"].to_float32()
    output = tensors["blk.0.attn_output.weight"].to_float32()  # [hidden, 2 heads of 8]
    padded = values.copy()
    padded[4:] = 0
    tensors["blk.0.attn_v.weight"] = tensor("v", padded)
    expected = computed(replace(wide, tensors=tensors))
    tensors["blk.0.attn_v.weight"] = tensor("v", values[:4])
    kept = output.reshape(-1, 2, 8)[:, :, :4].reshape(-1, 8)
    tensors["blk.0.attn_output.weight"] = tensor("o", kept)
    found = computed(replace(wide, spec=narrow_spec, tensors=tensors))
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def experts(count: int, num_used: int, router: Router) -> Experts:
    return Experts(
        count=count, num_used=num_used, size=4, activation=Activation.SILU, router=router
    )


def test_experts_come_in_ascending_order_and_the_first_of_equals_is_chosen() -> None:
    chosen, shares = route(experts(4, 2, Router()), floats(1.0, 3.0, 1.0, 2.0))
    assert chosen.tolist() == [1, 3] and shares[0] > shares[1]
    chosen, shares = route(experts(4, 2, Router(normalises=True)), floats(5.0, 2.0, 2.0, 2.0))
    assert chosen.tolist() == [0, 1] and shares.sum() == pytest.approx(1.0)


def test_a_choice_bias_moves_the_choice_and_not_the_weights() -> None:
    router = Router(scoring=Scoring.SIGMOID, has_choice_bias=True, scale=2.0)
    chosen, shares = route(experts(3, 1, router), floats(0.0, 1.0, 2.0), floats(9.0, 0.0, 0.0))
    assert chosen.tolist() == [0] and shares.tolist() == [1.0]  # sigmoid(0), twice


def test_a_sparse_mixer_weighs_experts_among_those_near_them() -> None:
    router = Router(scoring=Scoring.SPARSE_MIXER)
    chosen, shares = route(experts(4, 2, router), floats(2.0, 1.97, -3.0, 1.94))
    assert chosen.tolist() == [0, 1]
    near = 1 / (1 + math.exp(-0.03))  # of two; the third is too far from the first alone
    assert shares.tolist() == pytest.approx([near, near])
    _, shares = route(experts(3, 2, router), floats(-1.0, 0.5, -3.0))
    assert shares.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("num_best", "expected"), [(1, [0]), (2, [2])])
def test_groups_are_as_good_as_their_best(num_best: int, expected: list[int]) -> None:
    router = Router(
        scoring=Scoring.SIGMOID, num_groups=2, num_used_groups=1, num_group_best=num_best
    )
    chosen, _ = route(experts(4, 1, router), floats(3.0, -9.0, 2.0, 2.0))
    assert chosen.tolist() == expected


def test_a_sink_takes_its_share_and_no_value() -> None:
    shares = softmax(floats(1.0, 1.0)[None], floats(1.0)[None])
    assert np.allclose(shares, 1 / 3)
    assert np.allclose(softmax(floats(1.0, 1.0)[None], floats(500.0)[None]), 0.0)


def test_a_chunk_begins_anew_where_a_window_slides() -> None:
    plain = random_model(small_spec())
    chunked = replace(plain, spec=with_attention(plain.spec, window=4, is_chunked=True))
    whole, found = computed(plain), computed(chunked)
    assert found[:4].tobytes() == whole[:4].tobytes()
    executor = ReferenceExecutor(
        replace(plain, spec=with_attention(plain.spec, rope=None)), num_blocks=2
    )
    alone = logits(executor, row(TOKENS[4:], (0,)))  # without rope a chunk does not know its place
    executor.close()
    unplaced = replace(chunked, spec=with_attention(chunked.spec, rope=None))
    assert np.allclose(computed(unplaced)[4:], alone, rtol=1e-5)


def test_queries_grow_with_every_length_of_positions() -> None:
    scale = PositionScale(factor=0.1, length=8, offset=1)
    found = [position_scale(scale, position) for position in (0, 6, 7, 14, 15)]
    assert np.allclose(
        found, [1, 1, 1 + 0.1 * math.log(2)] + [1 + 0.1 * math.log(n) for n in (2, 3)]
    )
