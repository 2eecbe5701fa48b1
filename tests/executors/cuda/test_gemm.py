"""The plain kernels over planes, in the interpreter: GEMM, gating and the embedding's rows."""

from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401

torch = pytest.importorskip("torch")

from tests.executors.cuda.emulation import decoded  # noqa: E402

from quire.core.errors import ConfigError  # noqa: E402
from quire.executors import reference  # noqa: E402
from quire.executors.cuda.gemm import (  # noqa: E402
    HopperGemm,
    PortableGemm,
    factors,
    gemm_for,
    plane_pointers,
)
from quire.executors.cuda.kernels import gemm as kernels  # noqa: E402
from quire.executors.cuda.kernels.activations import XieluNumbers  # noqa: E402
from quire.executors.cuda.planes import (  # noqa: E402
    GATED_DIVISOR,
    PLANE_FORMATS,
    Planes,
    reorder,
    to_natural_order,
    to_operand_order,
)
from quire.executors.cuda.weights import Linear, Segment, num_splits  # noqa: E402
from quire.model.dummy import random_blocks  # noqa: E402
from quire.model.spec import Activation  # noqa: E402
from quire.quant.formats import format_named  # noqa: E402

FORMATS = (*PLANE_FORMATS, "BF16", "F16")
ROWS, COLUMNS, TOKENS = 32, 512, 3


def made(format_name: str, rows: int = ROWS) -> Planes:
    block_format = format_named(format_name, "test")
    raw = random_blocks(block_format, rows * COLUMNS, 0.05, np.random.default_rng(7))
    return reorder(format_name, torch.from_numpy(raw), rows, COLUMNS)


def tokens() -> Any:
    return torch.randn((TOKENS, COLUMNS), generator=torch.Generator().manual_seed(3)).half()


def relative(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("format_name", FORMATS)
def test_splits_of_a_gemm_add_up_to_weights_times_tokens(format_name: str) -> None:
    planes, x = made(format_name), tokens()
    bias = torch.arange(ROWS, dtype=torch.float32)
    linear = Linear((Segment(planes, 0, bias),), ROWS, 2, scale=4.0)
    sums = torch.full((2, TOKENS, ROWS), float("nan"))
    PortableGemm(exact=True).multiply(linear, to_operand_order(x / 4), sums, TOKENS)
    wanted = x.double() @ decoded(planes).T + bias
    assert relative(sums[0] + sums[1], wanted) < 1e-5


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_matrix_may_have_any_number_of_rows(format_name: str) -> None:
    planes, x = made(format_name, 27), tokens()
    sums = torch.full((1, TOKENS, 27), float("nan"))
    linear = Linear((Segment(planes, 0, None),), 27, 1)
    PortableGemm(exact=True).multiply(linear, to_operand_order(x), sums, TOKENS)
    assert relative(sums[0], x.double() @ decoded(planes).T) < 1e-5


def test_segments_lie_side_by_side() -> None:
    first, second, x = made("Q4_K"), made("Q6_K"), tokens()
    linear = Linear((Segment(first, 0, None), Segment(second, ROWS, None)), 2 * ROWS, 1)
    sums = torch.full((1, TOKENS, 2 * ROWS), float("nan"))
    PortableGemm(exact=True).multiply(linear, to_operand_order(x), sums, TOKENS)
    wanted = x.double() @ torch.cat([decoded(first), decoded(second)]).T
    assert relative(sums[0], wanted) < 1e-5


@pytest.mark.parametrize("interleaved", [True, False])
def test_gates_open_what_stands_beside_them(interleaved: bool) -> None:
    planes, x = made("Q4_0"), tokens()
    linear = Linear((Segment(planes, 0, None),), ROWS, 1, is_gated=interleaved)
    sums = torch.zeros((1, TOKENS, ROWS))
    out = torch.zeros((TOKENS, ROWS // 2), dtype=torch.float16)
    PortableGemm(exact=True).multiply_gated(linear, to_operand_order(x), sums, out, TOKENS)
    rows = x.double() @ decoded(planes).T
    if interleaved:
        turns = rows.view(TOKENS, -1, 2, 8)
        gates, values = turns[:, :, 0].flatten(1), turns[:, :, 1].flatten(1)
    else:
        gates, values = rows.split(ROWS // 2, dim=1)
    wanted = torch.nn.functional.silu(gates) * values
    assert relative(out.float() * GATED_DIVISOR, wanted) < 1e-3


@pytest.mark.parametrize(
    "activation", [kind for kind in Activation if kind is not Activation.XIELU]
)
def test_every_activation_is_the_references(activation: Activation) -> None:
    gates, values = (torch.linspace(-12, 12, 512).roll(shift) for shift in (0, 100))
    out = torch.zeros((1, 512), dtype=torch.float16)
    sums = torch.cat([gates, values])[None]
    constants = {"ACTIVATION": activation.value, "INTERLEAVED": False, "BLOCK": 1024}
    kernels.gate[(1, 1)](sums, out, 512, 1024, 512, 0.25, None, GATED=True, **constants)
    wanted = torch.from_numpy(reference.gated(activation, gates.numpy(), values.numpy()))
    assert relative(out[0].float(), wanted.double() / 4) < 3e-4
    if activation is not Activation.CLAMPED_SWIGLU:
        kernels.gate[(1, 1)](sums, out, 512, 1024, 512, 0.25, None, GATED=False, **constants)
        wanted = torch.from_numpy(reference._ACTIVATIONS[activation](gates.numpy()))
        assert relative(out[0].float(), wanted.double() / 4) < 3e-4


def test_xielu_is_the_references_in_every_layers_numbers() -> None:
    values = torch.cat([torch.linspace(-12, 12, 384), torch.linspace(-0.05, 0.05, 128)])
    for numbers in ((0.7, 1.3, 0.5, -1e-6), (2.0, 0.4, 1.5, -0.5)):
        out = torch.zeros((1, 512), dtype=torch.float16)
        constants = {"ACTIVATION": "xielu", "GATED": False, "INTERLEAVED": False, "BLOCK": 1024}
        given = XieluNumbers(*numbers)
        kernels.gate[(1, 1)](values[None], out, 512, 512, 512, 0.25, given, **constants)
        of_layer = np.array(numbers, np.float32)
        wanted = torch.from_numpy(reference.xielu(values.numpy(), of_layer)).double() / 4
        for part in (slice(384), slice(384, 512)):
            assert relative(out[0, part].float(), wanted[part]) < 3e-4


@pytest.mark.parametrize("format_name", FORMATS)
def test_tokens_are_their_rows_of_the_embedding_given_or_sampled(format_name: str) -> None:
    planes = made(format_name)
    given = torch.tensor([5, 0], dtype=torch.int32)
    sources = torch.tensor([-1, 1], dtype=torch.int32)
    samples = torch.tensor([3, 9], dtype=torch.int32)
    out = torch.full((2, COLUMNS), float("nan"))
    kernels.embed[(2, planes.num_blocks)](
        given,
        sources,
        samples,
        out,
        plane_pointers(planes),
        ROWS,
        planes.num_blocks,
        factors(planes),
        None,
        FORMAT=planes.layout,
        PDL=False,
    )
    assert relative(to_natural_order(out), decoded(planes)[[5, 9]]) < 1e-4


def test_the_number_of_splits_depends_on_the_matrix_alone() -> None:
    shapes = {(6144, 16): 2, (4096, 16): 2, (4096, 56): 4, (28672, 16): 1, (128256, 16): 1}
    shapes |= {(5120, 12): 2, (3072, 12): 2, (2048, 8): 1}  # too few tiles by themselves, or blocks
    assert {shape: num_splits(*shape) for shape in shapes} == shapes


def test_a_hopper_gpu_runs_plain_kernels_where_the_environment_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(gemm_for("cuda"), HopperGemm)
    monkeypatch.setenv("QUIRE_CUDA_KERNELS", "plain")
    plain = gemm_for("cuda")
    assert isinstance(plain, PortableGemm)
    assert plain.fallback is not None and "QUIRE_CUDA_KERNELS" in plain.fallback
    monkeypatch.setenv("QUIRE_CUDA_KERNELS", "fancy")
    with pytest.raises(ConfigError, match="no kernels called 'fancy'"):
        gemm_for("cuda")
