"""Routing, grouping and grouped GEMMs of a mixture of experts, in the interpreter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401

torch = pytest.importorskip("torch")

from quire.core.errors import UnsupportedModelError  # noqa: E402
from quire.executors.cuda.expert_weights import (  # noqa: E402
    ExpertLoader,
    RouterWeights,
    check_experts,
)
from quire.executors.cuda.experts import (  # noqa: E402
    DIRECT_TOKENS,
    ExpertRunner,
    HopperExperts,
    max_tiles,
    router_shape,
)
from quire.executors.cuda.gemm import PortableGemm  # noqa: E402
from quire.executors.cuda.kernels import experts as kernels  # noqa: E402
from quire.executors.cuda.planes import (  # noqa: E402
    PLANE_FORMATS,
    padded,
    to_natural_order,
    to_operand_order,
)
from quire.executors.reference import gated, route  # noqa: E402
from quire.loader.tensor import Tensor  # noqa: E402
from quire.model.dummy import random_blocks  # noqa: E402
from quire.model.spec import Activation, Experts, Norm, Router, Scoring  # noqa: E402
from quire.quant.formats import format_named  # noqa: E402

HIDDEN, SIZE = 256, 96
SCALED = ("ffn_gate_inp", "ffn_down_exps")
PREFIX = "blk.0."
SOFTMAX = Experts(
    count=6, num_used=2, size=SIZE, activation=Activation.SILU, router=Router(normalises=True)
)
GPT_OSS = replace(
    SOFTMAX,
    num_used=3,
    activation=Activation.CLAMPED_SWIGLU,
    router=Router(normalises=True, has_bias=True),
    has_bias=True,
)
SIGMOID = replace(SOFTMAX, router=Router(scoring=Scoring.SIGMOID, has_choice_bias=True, scale=2.5))
WEIGHED_INPUT = replace(
    SOFTMAX, router=Router(scoring=Scoring.SIGMOID, weighs_input=True), activation=Activation.SILU
)
GEMMA4 = replace(
    SOFTMAX,
    activation=Activation.GELU_TANH,
    router=Router(normalises=True, input_norm=Norm(epsilon=1e-6)),
)
UNGATED = replace(SOFTMAX, is_gated=False, activation=Activation.RELU2)
PARTS = {
    "softmax": SOFTMAX,
    "gpt-oss": GPT_OSS,
    "sigmoid": SIGMOID,
    "weighed input": WEIGHED_INPUT,
    "gemma4": GEMMA4,
    "without gates": UNGATED,
}
ROUTERS = {
    "groups by their best": Router(num_groups=5, num_used_groups=2, scale=2.0),
    "groups by their best two": Router(
        scoring=Scoring.SIGMOID,
        normalises=True,
        has_choice_bias=True,
        num_groups=10,
        num_used_groups=4,
        num_group_best=2,
    ),
    "a SparseMixer": Router(scoring=Scoring.SPARSE_MIXER, normalises=True),  # which it never does
}


def tensor(name: str, shape: tuple[int, ...], format_name: str, size: float = 0.1) -> Tensor:
    block_format = format_named(format_name, name)
    if shape[-1] % block_format.block_size:
        block_format = format_named("Q8_0", name)
    rng = np.random.default_rng(len(name) + shape[0])
    data = random_blocks(block_format, int(np.prod(shape)), size, rng)
    return Tensor(name, shape, block_format, data)


def tensors_of(part: Experts, format_name: str) -> dict[str, Tensor]:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "ffn_gate_inp.weight": ((part.count, HIDDEN), "F32"),
        "ffn_gate_exps.weight": ((part.count, SIZE, HIDDEN), format_name),
        "ffn_up_exps.weight": ((part.count, SIZE, HIDDEN), format_name),
        "ffn_down_exps.weight": ((part.count, HIDDEN, SIZE), format_name),
    }
    if part.has_bias:
        shapes |= {
            "ffn_gate_exps.bias": ((part.count, SIZE), "F32"),
            "ffn_up_exps.bias": ((part.count, SIZE), "F32"),
            "ffn_down_exps.bias": ((part.count, HIDDEN), "F32"),
        }
    if part.router.has_bias:
        shapes["ffn_gate_inp.bias"] = ((part.count,), "F32")
    if part.router.has_choice_bias:
        shapes["exp_probs_b.bias"] = ((part.count,), "F32")
    if part.router.input_norm is not None:
        shapes["ffn_gate_inp.scale"] = ((HIDDEN,), "F32")
        shapes["ffn_down_exps.scale"] = ((part.count,), "F32")
    return {
        f"{PREFIX}{name}": tensor(f"{PREFIX}{name}", shape, kind)
        for name, (shape, kind) in shapes.items()
        if part.is_gated or "gate_exps" not in name
    }


class Case:
    """A layer of experts on the device's kernels, and what the reference makes of it."""

    def __init__(self, part: Experts, format_name: str, max_tokens: int = 80) -> None:
        self.part = part
        tensors = tensors_of(part, format_name)
        self.weights = ExpertLoader(tensors, "cpu").load(part, PREFIX)
        options = {"PDL": False}
        self.max_tokens = max_tokens
        self.runner = ExpertRunner(
            [part], HIDDEN, max_tokens, PortableGemm(exact=True), options, "cpu"
        )
        self._floats = {name: x.to_float32() for name, x in tensors.items()}

    def run(self, tokens: Any) -> Any:
        """Natural [slot, token, hidden]."""
        count = len(tokens)
        sums = torch.full((self.part.num_used, self.max_tokens, HIDDEN), float("nan"))
        self.runner.run(self.weights, to_operand_order(tokens), sums, count)
        return to_natural_order(sums[:, :count])

    def exact(self, token: Any) -> Any:
        """What each of the token's experts adds, [slot, hidden]."""
        x, part = token.float().numpy(), self.part
        scales = [self._floats.get(f"{PREFIX}{name}.scale") for name in SCALED]
        seen = x if scales[0] is None else x * scales[0] * HIDDEN**-0.5
        logits = self._linear("ffn_gate_inp", None, seen)
        chosen, weights = route(part, logits, self._floats.get(f"{PREFIX}exp_probs_b.bias"))
        if scales[1] is not None:
            weights = weights * scales[1][chosen]
        rows = []
        for expert, weight in zip(chosen, weights, strict=True):
            own, after = (x * weight, 1.0) if part.router.weighs_input else (x, weight)
            product = self._linear("ffn_up_exps", expert, own)
            if part.is_gated:
                gate = self._linear("ffn_gate_exps", expert, own)
                product = gated(part.activation, gate, product)
            else:
                product = np.square(np.maximum(product, 0))
            rows.append(self._linear("ffn_down_exps", expert, product) * after)
        return torch.from_numpy(np.stack(rows))

    def _linear(self, name: str, expert: int | None, x: Any) -> Any:
        weight = self._floats[f"{PREFIX}{name}.weight"]
        bias = self._floats.get(f"{PREFIX}{name}.bias", np.zeros(weight.shape[:-1], np.float32))
        if expert is not None:
            weight, bias = weight[expert], bias[expert]
        return weight @ x + bias


def drawn(count: int, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, HIDDEN), generator=generator).half()


def relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("count", [1, DIRECT_TOKENS, 66])
@pytest.mark.parametrize("kind", PARTS)
def test_each_expert_of_a_token_adds_what_the_reference_says(kind: str, count: int) -> None:
    case, tokens = Case(PARTS[kind], "BF16"), drawn(count)
    found = case.run(tokens)
    some = range(count) if count < 20 else (0, 1, 33, 63, 64, count - 1)
    for index in some:
        assert relative(found[:, index], case.exact(tokens[index])) < 2e-3


@pytest.mark.parametrize("format_name", [*PLANE_FORMATS, "F16"])
def test_experts_may_have_any_format(format_name: str) -> None:
    case, tokens = Case(SOFTMAX, format_name), drawn(10)
    found = case.run(tokens)
    wanted = torch.stack([case.exact(token) for token in tokens], dim=1)
    assert relative(found, wanted) < 2e-3


@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_are_chosen_and_weighed_as_by_the_reference(kind: str) -> None:
    """Of scores far apart and near each other, negative ones and equal ones."""
    part = replace(SOFTMAX, count=40, num_used=2, router=ROUTERS[kind])
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal((5, 20, 40)).astype(np.float32)
    near, whole = 1.0 + 0.02 * drawn[1], np.rint(2 * drawn[2])
    logits = np.concatenate([drawn[0], near, whole, -np.abs(drawn[3]) - 1, np.sign(drawn[4])])
    bias = rng.standard_normal(40).astype(np.float32) if part.router.has_choice_bias else None
    count = len(logits)
    integers = torch.zeros((10, count * 2), dtype=torch.int32)
    pairs = kernels.Pairs(integers[0], torch.zeros(count * 2), *integers[1:3])
    weights = RouterWeights(
        integers, integers, 0, None, None if bias is None else torch.from_numpy(bias)
    )
    kernels.choose_experts[(count,)](
        torch.from_numpy(logits),
        kernels.RouterPointers(None, None, None, weights.choice_bias, None),
        pairs,
        kernels.Tiles(*integers[3:10]),
        0,
        part.router.scale,
        SHAPE=router_shape(part, weights),
        SPLITS=1,
        DIRECT=True,
        PDL=False,
    )
    for token, scores in enumerate(logits):
        chosen, shares = route(part, scores, bias)
        own = slice(2 * token, 2 * token + 2)
        assert pairs.experts[own].tolist() == chosen.tolist(), token
        assert pairs.weights[own].tolist() == pytest.approx(shares.tolist(), rel=1e-5)


@pytest.mark.parametrize("part", [GPT_OSS, WEIGHED_INPUT], ids=["gpt-oss", "weighed input"])
def test_a_tokens_bits_do_not_depend_on_its_batch(part: Experts) -> None:
    case, tokens = Case(part, "BF16"), drawn(66)
    whole = case.run(tokens)
    assert torch.isfinite(whole).all()
    order = torch.randperm(66, generator=torch.Generator().manual_seed(1))
    assert torch.equal(case.run(tokens[order]), whole[:, order])
    for count in (1, DIRECT_TOKENS, DIRECT_TOKENS + 1):
        assert torch.equal(case.run(tokens[5 : 5 + count]), whole[:, 5 : 5 + count])


def test_all_tokens_may_use_the_same_experts() -> None:
    case = Case(SOFTMAX, "Q8_0")
    tokens = drawn(1).repeat(40, 1)
    found = case.run(tokens)
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert relative(found[:, 0], case.exact(tokens[0])) < 2e-3


def test_a_token_that_is_not_a_number_spoils_its_own_row_alone() -> None:
    case, tokens = Case(SOFTMAX, "Q8_0"), drawn(12)
    whole = case.run(tokens)
    tokens[4] = float("nan")
    found = case.run(tokens)
    others = [index for index in range(12) if index != 4]
    assert torch.equal(found[:, others], whole[:, others])
    assert found[:, 4].isnan().all()


def test_of_experts_that_are_equally_good_the_first_are_used() -> None:
    case = Case(SOFTMAX, "Q8_0")
    case.runner.run(case.weights, torch.zeros((1, HIDDEN)).half(), torch.zeros((2, 80, HIDDEN)), 1)
    assert case.runner._pairs.experts[:2].tolist() == [0, 1]
    assert case.runner._pairs.weights[:2].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("count", [1, DIRECT_TOKENS + 1, 64, 256, 2048])
def test_no_routing_makes_more_tiles_than_are_launched(count: int) -> None:
    part = replace(SOFTMAX, count=128, num_used=8)
    rng = np.random.default_rng(count)
    for spread in (1.0, 30.0):  # even, and with favourites
        size = HopperExperts.tile_tokens(None, part, count)  # type: ignore[arg-type]
        scores = rng.standard_normal((count, 128)) + spread * rng.standard_normal(128)
        chosen = np.argsort(-scores, axis=1)[:, :8]
        rows = np.bincount(chosen.ravel(), minlength=128)
        needed = count * 8 if count <= DIRECT_TOKENS else int(np.ceil(rows / size).sum())
        assert needed <= max_tiles(part, count, size)


def test_a_stack_of_many_experts_is_reordered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece with the stack's own exponent: the pieces' largest weights differ."""
    tensors = tensors_of(SOFTMAX, "Q4_0")
    whole = ExpertLoader(tensors, "cpu").load(SOFTMAX, PREFIX)
    monkeypatch.setattr(
        "quire.executors.cuda.planes._WEIGHTS_AT_ONCE", 4 * padded(SIZE) * padded(HIDDEN)
    )
    pieces = ExpertLoader(tensors, "cpu").load(SOFTMAX, PREFIX)
    for stack, other in ((whole.gate_up, pieces.gate_up), (whole.down, pieces.down)):
        assert torch.equal(stack.planes.codes, other.planes.codes)
        assert torch.equal(stack.planes.scales, other.planes.scales)
        assert stack.planes.exponent == other.planes.exponent


def test_a_half_block_that_is_not_multiplied_is_padding() -> None:
    """Of 96 columns; gpt-oss's have 2880, and end like these."""
    weights = ExpertLoader(tensors_of(SOFTMAX, "MXFP4"), "cpu").load(SOFTMAX, PREFIX)
    assert not weights.gate_up.ends_in_half
    assert weights.down.ends_in_half
    planes = weights.down.planes
    halves = planes.codes.view(2 * planes.num_blocks, -1)
    assert not halves[-1].any()
    assert halves[-2].any()


def test_experts_whose_gates_and_values_differ_in_format_are_refused_by_name() -> None:
    tensors = tensors_of(SOFTMAX, "Q4_0")
    name = f"{PREFIX}ffn_up_exps.weight"
    tensors[name] = tensor(name, tensors[name].shape, "Q8_0")
    with pytest.raises(UnsupportedModelError, match=r"Q4_0 and .*Q8_0"):
        check_experts(SOFTMAX, tensors, PREFIX)


def test_more_experts_or_groups_than_a_program_compares_are_refused() -> None:
    part = replace(SOFTMAX, count=513)
    with pytest.raises(UnsupportedModelError, match="num_experts is 513"):
        check_experts(part, {}, PREFIX)
    part = replace(SOFTMAX, count=64, router=Router(num_groups=32, num_used_groups=4))
    with pytest.raises(UnsupportedModelError, match="groups of experts is 32"):
        check_experts(part, {}, PREFIX)
