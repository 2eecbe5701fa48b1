"""Experts on the CPU: what the router chooses, what experts compute, and which weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executors.cpu.blocks import UNITS, nmse, normal
from tests.executors.reference.plans import logits, row, run
from tests.extreme_models import random_model, small_spec

from quire.core.errors import UnsupportedModelError
from quire.core.plan import SequencePlan, Want
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads, weight_bytes, workspace_bytes
from quire.executors.cpu.native import native
from quire.executors.reference import ReferenceExecutor, route
from quire.loader.tensor import Tensor
from quire.model.loading import Model, load_model
from quire.model.spec import Activation, Dense, Experts, Norm, Router, Scoring
from quire.quant.formats import format_named

Floats = npt.NDArray[np.float32]
NO_NUMBERS = np.zeros(0, np.float32)
TOKENS = tuple((37 * n + n * n) % 500 for n in range(41))
TABLE = (7, 3, 11)


# ---- the router


@st.composite
def routers(draw: st.DrawFn) -> tuple[Experts, int]:
    """Experts, and the seed of their scores."""
    num_groups = draw(st.sampled_from([1, 1, 2, 4]))
    per_group = draw(st.integers(1, 9))
    num_used_groups = draw(st.integers(1, num_groups))
    router = Router(
        scoring=draw(st.sampled_from([Scoring.SOFTMAX, Scoring.SIGMOID])),
        normalises=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        has_choice_bias=draw(st.booleans()),
        num_groups=num_groups,
        num_used_groups=num_used_groups,
        num_group_best=draw(st.integers(1, min(2, per_group))),
    )
    num_used = draw(st.integers(1, num_used_groups * per_group))
    count = num_groups * per_group
    part = Experts(
        count=count, num_used=num_used, size=1, activation=Activation.SILU, router=router
    )
    return part, draw(st.integers(0, 1 << 20))


def native_choice(
    part: Experts, scores: Floats, choice_bias: Floats | None, factors: Floats = NO_NUMBERS
) -> tuple[list[int], list[float]]:
    router = part.router
    return native.choose_experts(
        logits=scores,
        choice_bias=NO_NUMBERS if choice_bias is None else choice_bias,
        factors=factors,
        num_used=part.num_used,
        scoring=router.scoring,
        normalises=router.normalises,
        scale=router.scale,
        num_groups=router.num_groups,
        num_used_groups=router.num_used_groups,
        num_group_best=router.num_group_best,
    )


@given(case=routers())
@settings(max_examples=300, deadline=None)
def test_the_router_chooses_as_the_reference_does(case: tuple[Experts, int]) -> None:
    part, seed = case
    generator = np.random.default_rng(seed)
    # Few values: many experts are equally good, and those that are not differ by far.
    scores = generator.integers(-3, 4, part.count).astype(np.float32)
    bias = None
    if part.router.has_choice_bias:
        bias = generator.integers(-1, 2, part.count).astype(np.float32)
    chosen, shares = route(part, scores, bias)
    found, weights = native_choice(part, scores, bias)
    assert found == chosen.tolist()
    np.testing.assert_allclose(weights, shares, rtol=1e-6)


@given(scores=st.lists(st.integers(-130, 130), min_size=2, max_size=9), scale=st.integers(1, 2))
@settings(max_examples=300, deadline=None)
def test_the_sparse_mixer_chooses_as_the_reference_does(scores: list[int], scale: int) -> None:
    """Scores of a few hundredths: many are near the best."""
    router = Router(scoring=Scoring.SPARSE_MIXER, scale=scale)
    activation = Activation.SILU
    part = Experts(count=len(scores), num_used=2, size=1, activation=activation, router=router)
    logits = np.array(scores, np.float32) / np.float32(101.0)
    chosen, shares = route(part, logits)
    found, weights = native_choice(part, logits, None)
    assert found == chosen.tolist()
    np.testing.assert_allclose(weights, shares, rtol=1e-6)


@pytest.mark.parametrize("scoring", Scoring)
def test_scores_that_are_no_numbers_choose_experts_that_exist(scoring: Scoring) -> None:
    router = Router(scoring=scoring)
    part = Experts(count=4, num_used=2, size=1, activation=Activation.SILU, router=router)
    for value in (np.nan, np.inf, -np.inf):
        for scores in (np.full(4, value, np.float32), np.array([0, value, 1, 2], np.float32)):
            chosen, _ = native_choice(part, scores, None)
            assert len(set(chosen)) == 2
            assert all(0 <= expert < 4 for expert in chosen)
    assert np.isnan(native_choice(part, np.full(4, np.nan, np.float32), None)[1]).all()


def test_factors_multiply_the_weights() -> None:
    part = Experts(count=3, num_used=2, size=1, activation=Activation.SILU, router=Router())
    scores, factors = np.array([1, 3, 2], np.float32), np.array([5, 0.5, 4], np.float32)
    chosen, plain = native_choice(part, scores, None)
    assert chosen == [1, 2]
    weights = native_choice(part, scores, None, factors)[1]
    np.testing.assert_allclose(weights, np.array(plain) * factors[1:], rtol=1e-6)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("size", [1, 15, 16, 33])
def test_a_scaled_row_is_added_with_its_product_rounded(unit: str, size: int) -> None:
    x, y = normal(size), normal(size, seed=1)
    expected = x + y * np.float32(0.37)
    native.add_scaled(unit, x, y, 0.37)
    assert x.tobytes() == expected.tobytes()


# ---- a layer


def one_layer(model: Model, experts_of: Model, **changes: Any) -> Model:
    """The first layer alone, with the other model's experts; `changes` are those of the experts.

    What the router sees is then exact: no rounding decides which experts are chosen.
    """
    layer = model.spec.layers[0]
    assert isinstance(layer.feed_forward, Experts)
    layer = replace(layer, feed_forward=replace(layer.feed_forward, **changes))
    tensors = {
        name: experts_of.tensors[name] if "_exps" in name else tensor
        for name, tensor in model.tensors.items()
        if name.startswith("blk.0.") or not name.startswith("blk.")
    }
    spec = replace(model.spec, layers=(layer,), vocabulary_size=model.spec.vocabulary_size)
    return replace(model, spec=spec, tensors=tensors)


@contextmanager
def on_cpu(model: Model, threads: int = 1, **options: Any) -> Iterator[CpuExecutor]:
    executor = CpuExecutor(
        model, num_blocks=24, threads=Threads(threads, may_spin=False), **options
    )
    try:
        yield executor
    finally:
        executor.close()


def exact_logits(model: Model, plan: SequencePlan) -> Floats:
    """With keys and values in half precision, as the CPU executor keeps them."""
    reference = ReferenceExecutor(model, num_blocks=24, kv_precision="float16")
    try:
        return logits(reference, plan)
    finally:
        reference.close()


# As far as rounded activations take a feed-forward of these formats.
ROUNDING = dict.fromkeys(("Q8_0", "Q4_0", "MXFP4"), 2.5e-4)
ROUNDING |= dict.fromkeys(("Q4_K_M", "Q2_K", "IQ2_M", "IQ3_XXS", "IQ1_M"), 4e-4)
ROUNDING |= {"F32": 1e-6, "BF16": 1e-6}


@pytest.mark.parametrize("mix", ROUNDING)
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_of_every_kind_of_format_compute_what_the_reference_does(
    mix: str, weighs_input: bool
) -> None:
    with load_model("dummy:tiny-moe:F32") as model, load_model(f"dummy:tiny-moe:{mix}") as packed:
        layer = model.spec.layers[0].feed_forward
        assert isinstance(layer, Experts)
        router = replace(layer.router, weighs_input=weighs_input)
        layered = one_layer(model, packed, router=router)
        exact = exact_logits(layered, row(TOKENS, TABLE))
        with on_cpu(layered) as executor:
            found = logits(executor, row(TOKENS, TABLE))
    assert nmse(found, exact) <= ROUNDING[mix]


def test_experts_in_mxfp4_compute_what_they_do_dequantised_to_float32() -> None:
    def dequantised(tensor: Tensor) -> Tensor:
        weights = tensor.to_float32().ravel().view(np.uint8)
        return Tensor(tensor.name, tensor.shape, format_named("F32", tensor.name), weights)

    with load_model("dummy:tiny-moe:F32") as model, load_model("dummy:tiny-moe:MXFP4") as packed:
        layered = one_layer(model, packed)
    assert layered.tensors["blk.0.ffn_up_exps.weight"].format.name == "MXFP4"
    tensors = {n: dequantised(t) if "_exps" in n else t for n, t in layered.tensors.items()}
    found = []
    for one in (layered, replace(layered, tensors=tensors)):
        with on_cpu(one) as executor:
            found.append(logits(executor, row(TOKENS, TABLE)))
    assert 0 < nmse(*found) <= ROUNDING["MXFP4"]  # activations are rounded, weights are not


@pytest.mark.parametrize("mix", ["F16", "Q4_K_M", "Q5_0", "MXFP4", "IQ2_M"])
def test_every_unit_and_number_of_threads_give_the_same_bits(mix: str) -> None:
    found = set()
    with load_model(f"dummy:tiny-moe:{mix}") as model:
        for unit in UNITS:
            for threads in (1, 2, 3):
                with on_cpu(model, threads, unit=unit) as executor:
                    found.add(logits(executor, row(TOKENS, TABLE)).tobytes())
    assert len(found) == 1


ODD: dict[str, dict[str, Any]] = {
    "one expert of size 1": {"count": 1, "num_used": 1, "size": 1},
    "all of 37 experts": {"count": 37, "num_used": 37, "size": 17},
    "3 of 300": {"count": 300, "num_used": 3, "size": 5},
    "biases, clamped": {"has_bias": True, "activation": Activation.CLAMPED_SWIGLU},
    "weighed input with biases": {"has_bias": True, "router": Router(weighs_input=True)},
    "a sigmoid, scaled": {"router": Router(scoring=Scoring.SIGMOID, scale=2.5, normalises=True)},
    "biases of scores and choice": {"router": Router(has_bias=True, has_choice_bias=True)},
    "groups": {
        "count": 12,
        "num_used": 4,
        "router": Router(num_groups=4, num_used_groups=2, num_group_best=2),
    },
    "a shared expert": {"shared": Dense(size=9, activation=Activation.SILU)},
    "a shared expert with a gate, and biases": {
        "shared": Dense(size=40, activation=Activation.SILU, has_bias=True),
        "has_shared_gate": True,
        "router": Router(has_bias=True),
    },
    "beside a dense feed-forward": {
        "activation": Activation.GELU_TANH,
        "beside": Dense(size=31, activation=Activation.GELU_TANH),
        "beside_norm": Norm(epsilon=1e-5),
        "router": Router(input_norm=Norm(epsilon=1e-6, has_weight=False)),
    },
}


def routed_model(hidden_size: int, **changes: Any) -> Model:
    spec = small_spec(hidden_size=hidden_size, vocabulary_size=64)
    sizes = {"count": 6, "num_used": 2, "size": 20, "activation": Activation.SILU}
    part = Experts(**{**sizes, "router": Router(), **changes})
    return random_model(replace(spec, layers=(replace(spec.layers[0], feed_forward=part),)))


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("hidden_size", [16, 33])
def test_experts_of_any_shape_are_the_reference_s_with_the_same_bits(
    hidden_size: int, changes: dict[str, Any]
) -> None:
    model = routed_model(hidden_size, **changes)
    plan = row([token % 64 for token in TOKENS], TABLE)
    exact = exact_logits(model, plan)
    found = set()
    for unit in UNITS:
        for threads in (1, 3):
            with on_cpu(model, threads, unit=unit) as executor:
                given = logits(executor, plan)
            found.add(given.tobytes())
            assert nmse(given, exact) <= 1e-6
    assert len(found) == 1


def test_experts_side_by_side_with_attention_are_refused() -> None:
    model = routed_model(16)
    parallel = replace(model.spec.layers[0], is_parallel=True)
    with pytest.raises(UnsupportedModelError, match="experts side by side with attention"):
        CpuExecutor(
            replace(model, spec=replace(model.spec, layers=(parallel,))),
            num_blocks=4,
            threads=Threads(1, may_spin=False),
        )


def test_a_row_that_is_not_finite_fails_alone() -> None:
    model = routed_model(16)
    weights = model.tensors["token_embd.weight"]
    broken = weights.to_float32()
    broken[3] = np.nan
    nan = replace(weights, source=broken.reshape(-1).view(np.uint8))
    with on_cpu(replace(model, tensors={**model.tensors, weights.name: nan})) as executor:
        alone = logits(executor, row((7, 8), (1,)))
        bad, good = run(executor, row((3, 4), (0,)), row((7, 8), (1,), sequence_id=1))
    assert bad.fault is not None
    assert good.logits.tobytes() == alone.tobytes()


# ---- what the native code checks once more

SOUND: dict[str, Any] = {
    "count": 4,
    "num_used": 2,
    "scoring": "softmax",
    "normalises": False,
    "scale": 1.0,
    "num_groups": 2,
    "num_used_groups": 1,
    "num_group_best": 1,
    "weighs_input": False,
    "has_shared_gate": False,
    "choice_bias": -1,
    "factors": -1,
    "activation": "silu",
}


def with_stacks() -> tuple[Any, dict[str, int]]:
    """A decoder of 16 hidden numbers with stacks of four experts of 8, and what it is made of."""
    decoder = native.make_decoder(
        hidden_size=16,
        vocabulary_size=20,
        logit_soft_cap=0.0,
        unit="",
        num_threads=1,
        may_spin=False,
    )
    zeros = np.zeros(4 * 16 * 16, np.uint8)
    matrices = {"router": decoder.add_matrix("F32", zeros[: 4 * 4 * 16], 4, 16)}
    matrices["square"] = decoder.add_matrix("F32", zeros, 16, 16)
    for name, shape in {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}.items():
        matrices[name] = decoder.add_stack("F32", 4, *shape)
    matrices["few"] = decoder.add_stack("F32", 3, 8, 16)
    matrices["narrow"] = decoder.add_stack("F32", 4, 8, 12)
    matrices["narrow_down"] = decoder.add_stack("F32", 4, 12, 8)
    matrices["vector"] = decoder.add_vector(np.ones(3, np.float32))
    return decoder, matrices


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in ("count", "num_used") for value in (0, -1, 5, 2**31 - 1)),
        *({name: value} for name in ("num_groups", "num_used_groups") for value in (0, -1, 3)),
        {"num_group_best": 0},
        {"num_used": 3},  # of one group of two
        {"router": "gate"},
        {"router": 99},
        {"router": -1},
        {"gate": "few"},
        {"gate": -2},
        {"gate": -1, "activation": "clamped_swiglu"},
        {"up": "narrow"},  # of another width than what comes down
        {"up": "down"},
        {"down": "router"},
        {"down": 2**31 - 1},
        {"has_shared_gate": True},
        {"choice_bias": "vector"},
        {"factors": 7},
        {"activation": "softplus"},
    ],
    ids=str,
)
def test_experts_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    decoder, matrices = with_stacks()
    sound = {**SOUND, **{name: matrices[name] for name in ("router", "gate", "up", "down")}}
    decoder.add_experts(**sound)
    with pytest.raises(ValueError, match=r"must|word"):
        decoder.add_experts(
            **{**sound, **{name: matrices.get(value, value) for name, value in changes.items()}}
        )


def test_stacks_are_packed_within_their_bounds() -> None:
    decoder, matrices = with_stacks()
    for arguments in (
        ("F32", 0, 16, 8),
        ("F32", 2**14 + 1, 16, 8),
        ("F32", 4, 0, 8),
    ):
        with pytest.raises(ValueError, match="must be from 1 to"):
            decoder.add_stack(*arguments)
    with pytest.raises(MemoryError):
        decoder.add_stack("F32", 2**14, 2**22, 2**22)
    with pytest.raises(ValueError, match="must be from 0 to"):
        decoder.add_stack("F32", 4, 16, 8, bias=9)
    with pytest.raises(ValueError, match="the size of the biases of a stack must be"):
        decoder.add_stack("F32", 4, 16, 8, bias=matrices["vector"])
    blocks = np.zeros(2 * 8 * 16 * 4, np.uint8)
    decoder.pack_stacked(matrices["gate"], "F32", blocks, 2, 2)
    for first, count in ((3, 2), (-1, 2), (0, 0), (0, 5)):
        with pytest.raises(ValueError, match=r"must be|do not make"):
            decoder.pack_stacked(matrices["gate"], "F32", blocks, first, count)
    with pytest.raises(ValueError, match="do not make these rows"):
        decoder.pack_stacked(matrices["gate"], "F32", blocks, 0, 1)
    with pytest.raises(ValueError, match="must have the format of their stack"):
        decoder.pack_stacked(matrices["gate"], "F16", blocks[: len(blocks) // 2], 2, 2)


def test_the_sum_over_experts_of_a_projection_is_no_hidden_state() -> None:
    decoder, matrices = with_stacks()
    own = {"router": matrices["router"], "up": matrices["narrow"], "gate": -1}
    experts = decoder.add_experts(**{**SOUND, **own, "down": matrices["narrow_down"]})
    decoder.add_stage("route", experts=experts)
    decoder.add_stage("expert_gate_and_up", experts=experts)
    with pytest.raises(ValueError, match="must be of hidden states, or the branch"):
        decoder.add_stage("expert_down", experts=experts, output="hidden")
    decoder.add_stage("expert_down", experts=experts, output="branch")
    with pytest.raises(ValueError, match="the branch must be from 12 to 12, got 16"):
        decoder.add_stage("add_branch")


def test_stages_of_experts_come_in_their_order() -> None:
    decoder, matrices = with_stacks()
    sound = {**SOUND, **{name: matrices[name] for name in ("router", "gate", "up", "down")}}
    first, second = decoder.add_experts(**sound), decoder.add_experts(**sound)
    for stage in ("expert_gate_and_up", "expert_down"):
        with pytest.raises(ValueError, match="in this order"):
            decoder.add_stage(stage, experts=first, output="hidden")
    with pytest.raises(ValueError, match="experts must be from 0 to 1"):
        decoder.add_stage("route", experts=2)
    decoder.add_stage("route", experts=first)
    with pytest.raises(ValueError, match="in this order"):
        decoder.add_stage("expert_gate_and_up", experts=second)
    decoder.add_stage("expert_gate_and_up", experts=first)
    with pytest.raises(ValueError, match="must be of hidden states"):
        decoder.add_stage("expert_down", experts=first, output="gated")
    with pytest.raises(ValueError, match="the rows that a product is added to must be"):
        decoder.add_stage("project_and_add", matrices=[matrices["square"]], output="branch")
    for stage in ("norm_branch", "add_to_branch"):
        with pytest.raises(ValueError, match="the branch must be"):
            decoder.add_stage(stage, input="projected")
    decoder.add_stage("expert_down", experts=first, output="branch")
    shared: dict[str, Any] = {"matrices": [matrices["square"]], "output": "branch"}
    for other in (second, 2):
        with pytest.raises(ValueError, match=r"must come after|must be from 0 to 1"):
            decoder.add_stage("project_and_add", **shared, experts=other)
    decoder.add_stage("project_and_add", **shared, experts=first)
    for rows in ("hidden", "branch", "projected"):
        with pytest.raises(ValueError, match=r"must be joined by|what joins a branch must"):
            decoder.add_stage("add_to_branch", input=rows)
    with pytest.raises(ValueError, match="the size of a norm must be"):
        decoder.add_stage("norm_branch", norm=native.Norm(1e-5, matrices["vector"]))


# ---- what is read, and what is held


@pytest.fixture(scope="module")
def moe() -> Iterator[Model]:
    with load_model("dummy:tiny-moe:Q4_K_M") as model:
        yield model


def read_bytes(executor: CpuExecutor, *tables: tuple[int, ...]) -> float:
    """The weights' bytes that a step reads: one token of each sequence, all the same."""
    before = executor.counters["weight_bytes"]
    rows = [row((5,), table, sequence_id=n, want=Want.SAMPLE) for n, table in enumerate(tables)]
    run(executor, *rows)
    return executor.counters["weight_bytes"] - before


def part_bytes(model: Model, *, is_expert: bool) -> int:
    """Of the tensors that a step multiplies by."""
    return sum(
        weight_bytes({name: tensor})
        for name, tensor in model.tensors.items()
        if len(tensor.shape) > 1 and name != "token_embd.weight"
        if ("_exps" in name) == is_expert
    )


def test_only_the_weights_of_chosen_experts_are_read(moe: Model) -> None:
    layer = moe.spec.layers[0].feed_forward
    assert isinstance(layer, Experts)
    dense, experts = part_bytes(moe, is_expert=False), part_bytes(moe, is_expert=True)
    with on_cpu(moe) as executor:
        alone = read_bytes(executor, (0,))
        assert alone == dense + experts * layer.num_used // layer.count
        # Rows that choose the same experts read them once.
        assert read_bytes(executor, (0,), (1,), (2,)) == alone
        run(executor, row(TOKENS, TABLE, want=Want.NOTHING))
        assert executor.counters["weight_bytes"] <= 2 * alone + dense + experts


def test_memory_is_known_before_anything_is_packed(moe: Model) -> None:
    with on_cpu(moe) as executor:
        assert weight_bytes(moe.tensors) == executor.memory_bytes["weights"]
        run(executor, row(range(256), range(16), want=Want.SAMPLE))
        found = executor.memory_bytes["workspace"]
    assert found == pytest.approx(workspace_bytes(moe.spec, moe.tensors, 256, 384), rel=0.1)
