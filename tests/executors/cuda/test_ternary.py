"""BitNet on the GPU's kernels: every published form, int8 activations, two-bit weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
import torch
from tests.executors.cuda.emulation import decoded_ternary
from tests.executors.cuda.half_reference import cache_in_halves
from tests.executors.reference.plans import row
from tests.fixture_files import FIXTURES, fixture_file
from tests.model.bitnet_forms import CASES, FORMS, as_llama, golden, published

from quire.core.errors import ModelFileError
from quire.core.plan import SequencePlan, StepPlan, Want
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.gemm import PortableGemm
from quire.executors.cuda.kernels import ternary as kernels
from quire.executors.cuda.planes import to_operand_order
from quire.executors.cuda.ternary import TernaryMatrix, pack, planes_of
from quire.executors.cuda.weights import Linear, Segment
from quire.executors.reference import ReferenceExecutor, quantised_by_token
from quire.loader.tensor import Tensor
from quire.model.loading import Model, load_model
from quire.quant.formats import format_named
from quire.quant.ternary import i2s_tail, pack_i2s

Floats = npt.NDArray[np.float32]
CONFIG = CudaConfig(max_batch_size=8, max_step_tokens=32, num_blocks=16, device="cpu")
TABLE = (9, 2, 5)
# So few tokens of the golden ones that no activation of any form rounds to another code: one that
# does makes an error of 1e-4 and more.
NUM_TOKENS = 6


def executor_of(model: Model) -> CudaExecutor:
    found = CudaExecutor(model, CONFIG)
    found.warm_up()
    return found


def opened(path: Path, packing: str | None = None) -> CudaExecutor:
    with load_model(path, i2s_packing=packing) as model:
        return executor_of(model)


def run(executor: Any, *rows: SequencePlan) -> list[Floats]:
    results = executor.collect(executor.submit(StepPlan(0, rows)), 600).sequences
    assert all(result.fault is None for result in results)
    return [np.asarray(result.logits) for result in results]


def error(found: Floats, expected: Floats) -> float:
    return float(np.square(found - expected).sum() / np.square(expected).sum())


# ---- whole models


@pytest.mark.parametrize(("model", "form"), CASES, ids=lambda part: str(part))
def test_a_published_form_gives_the_logits_of_its_tool_and_of_the_reference(
    model: str, form: str
) -> None:
    path, packing = published(model, form), "arm" if "arm" in form else None
    tokens, expected = golden(model, FORMS[form][0])
    plan = row(tokens[:NUM_TOKENS], TABLE, want=Want.LOGITS)
    with load_model(path, i2s_packing=packing) as loaded:
        [found] = run(executor_of(loaded), plan)
        with cache_in_halves():
            [exact] = run(ReferenceExecutor(loaded, num_blocks=16), plan)
    assert error(found, expected[:NUM_TOKENS]) <= 1e-3
    assert error(found, exact) <= 1e-6  # 1e-4 with one code that differs


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_blocks_with_scales_of_their_own_give_the_logits_of_the_reference(name: str) -> None:
    path = fixture_file(f"tiny-bitnet/{name}.gguf")
    plan = row((3, 1, 4, 1, 5, 9), TABLE, want=Want.LOGITS)
    with load_model(path) as model:
        executor = executor_of(model)
        with cache_in_halves():
            [exact] = run(ReferenceExecutor(model, num_blocks=16), plan)
    assert not executor._weights.layers[0].dense.down.sums_integers
    assert error(run(executor, plan)[0], exact) <= 1e-6


@pytest.mark.parametrize("name", ["tiny-bitnet/TQ2_0.gguf", "bitnet-published/c/i2s.gguf"])
def test_any_chunking_and_any_batch_gives_the_same_bits(name: str) -> None:
    path = FIXTURES / name if "published" in name else fixture_file(name)
    executor, tokens = opened(path), (3, 1, 4, 1, 5)
    [whole] = run(executor, row(tokens, (2, 0), want=Want.LOGITS))
    others = [row((7, at, 7), (3 + at,), sequence_id=at, want=Want.LOGITS) for at in range(1, 6)]
    found = run(executor, *others[:3], row(tokens, (10, 11), want=Want.LOGITS), *others[3:])
    np.testing.assert_array_equal(found[3], whole)
    one_by_one = [
        run(executor, row(tokens[at : at + 1], (12,), start=at, want=Want.LOGITS))[0]
        for at in range(len(tokens))
    ]
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)


def test_i2_s_runs_under_the_architecture_llama(tmp_path: Path) -> None:
    """Interleaved rope, SiLU, and activations that are quantised without a norm."""
    plan = row((3, 1, 4, 1, 5), TABLE, want=Want.LOGITS)
    with load_model(as_llama(published("c", "i2s.gguf"), tmp_path / "llama.gguf")) as model:
        [found] = run(executor_of(model), plan)
        with cache_in_halves():
            [exact] = run(ReferenceExecutor(model, num_blocks=16), plan)
    assert error(found, exact) <= 1e-6


def test_forms_of_the_same_integers_and_scales_give_the_same_bits() -> None:
    plan = row((3, 1, 4, 1), TABLE, want=Want.LOGITS)
    first, second = (opened(fixture_file(f"tiny-bitnet/{x}.gguf")) for x in ("TQ1_0", "TQ2_0"))
    np.testing.assert_array_equal(run(first, plan)[0], run(second, plan)[0])


def test_a_row_that_is_not_finite_fails_alone() -> None:
    """A norm's weight that is not a number reaches codes, which cannot say so."""
    with load_model(FIXTURES / "bitnet-published" / "c" / "i2s.gguf") as model:
        executor = executor_of(model)
    weights = executor._weights.layers[0].dense.sub_norm
    assert weights is not None
    weights[0] = float("nan")
    plan = StepPlan(0, (row((1, 2), TABLE, want=Want.LOGITS),))
    [result] = executor.collect(executor.submit(plan), 600).sequences
    assert result.fault is not None and "not finite" in result.fault


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_float16_has_no_room_for_fails_its_row(part: int) -> None:
    """Queries, keys or values of 1e6 and more."""
    with load_model(FIXTURES / "bitnet-published" / "c" / "i2s.gguf") as model:
        executor = executor_of(model)
    layer = executor._weights.layers[0]
    assert layer.qkv is not None
    scales = list(layer.qkv.scales)
    scales[part] *= 1e8
    large = replace(layer, qkv=replace(layer.qkv, scales=tuple(scales)))
    decoder = executor._decoder
    first = decoder._layers[0]
    assert first.attention is not None
    changed = replace(first, attention=replace(first.attention, weights=large))
    decoder._layers = (changed, *decoder._layers[1:])
    plan = StepPlan(0, (row((1, 2), TABLE, want=Want.LOGITS),))
    [result] = executor.collect(executor.submit(plan), 600).sequences
    assert result.fault is not None and "not finite" in result.fault
    # A key of infinity may score minus infinity, which would only leave its position out.
    blocks = executor._blocks
    kept = torch.cat([x[:, TABLE[0], :, :2].flatten() for x in (blocks.keys, blocks.values)])
    assert not kept.isinf().any() and kept.isnan().any() == (part > 0)


def test_the_cache_is_in_float16_beside_ternary_matrices_alone() -> None:
    ternary = opened(FIXTURES / "bitnet-published" / "c" / "i2s.gguf")
    assert ternary._blocks.keys.dtype == torch.float16
    assert "float16 KV cache" in ternary.kernels
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        other = CudaExecutor(model, CONFIG)
    assert other._blocks.keys.dtype == torch.bfloat16
    assert "bfloat16 KV cache" in other.kernels


# ---- packing


def codes(rows: int, columns: int, seed: int = 5) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 3, (rows, columns), dtype=np.uint8)


def as_i2s(digits: npt.NDArray[np.uint8], scale: float) -> Tensor:
    data = np.concatenate([pack_i2s(digits), i2s_tail(np.float32(scale))])
    return Tensor("made", digits.shape, format_named("I2_S", "made"), data)


def as_tq2(digits: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> Tensor:
    """`scales` [rows, blocks]."""
    runs = digits.reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = (runs << shifts).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    halves = scales.reshape(-1, 1).astype("<f2").view(np.uint8)
    data = np.concatenate([packed, halves], axis=1).ravel()
    return Tensor("made", digits.shape, format_named("TQ2_0", "made"), data)


@pytest.mark.parametrize("columns", [128, 256, 384, 512])
def test_the_kernel_decodes_the_digits_of_the_file(columns: int) -> None:
    digits = codes(24, columns)
    found = decoded_ternary(planes_of([pack(as_i2s(digits, 0.5), "cpu")]))
    wanted = digits.astype(np.int32) - 1
    np.testing.assert_array_equal(found[:, :columns].numpy(), wanted)
    assert not found[:, columns:].any()


def test_blocks_that_share_their_scale_are_one_form() -> None:
    digits = codes(16, 512)
    digits[3, 256:] = 1  # zeros: what scale they have does not matter
    scales = np.full((16, 2), 0.25, np.float16)
    scales[3, 1] = 7.0
    blocks, whole = pack(as_tq2(digits, scales), "cpu"), pack(as_i2s(digits, 0.25), "cpu")
    assert torch.equal(blocks.words, whole.words)
    assert blocks.scale == whole.scale == 0.25 and blocks.block_scales is None


def test_scales_below_zero_turn_their_weights_around() -> None:
    digits = codes(16, 512)
    scales = np.full((16, 2), 0.25, np.float16)
    scales[:, 1] = -0.25
    turned = digits.copy()
    turned[:, 256:] = 2 - turned[:, 256:]
    found, wanted = pack(as_tq2(digits, scales), "cpu"), pack(as_i2s(turned, 0.25), "cpu")
    assert torch.equal(found.words, wanted.words) and found.scale == 0.25


def test_a_digit_that_stands_for_none_is_refused() -> None:
    digits = codes(4, 256)
    digits[2, 100] = 3
    with pytest.raises(ModelFileError, match="tensor made holds a ternary code"):
        pack(as_tq2(digits, np.ones((4, 1), np.float16)), "cpu")


def test_planes_take_two_bits_a_weight() -> None:
    matrix = pack(as_i2s(codes(64, 512), 1.0), "cpu")
    assert planes_of([matrix]).num_bytes == 64 * 512 // 4


# ---- products


def tokens(count: int, columns: int) -> Any:
    made = np.random.default_rng(2).integers(-128, 128, (count, columns))
    return torch.from_numpy(made).to(torch.int8)


def multiplied(matrix: TernaryMatrix, x: Any, splits: int) -> Any:
    planes = planes_of([matrix])
    linear = Linear((Segment(planes, 0, None),), planes.num_rows, splits)
    sums = torch.full((splits, len(x), planes.num_rows), float("nan"))
    PortableGemm(exact=True).multiply(linear, to_operand_order(x), sums, len(x))
    return sums


@pytest.mark.parametrize("splits", [1, 2])
def test_sums_of_integers_are_exact_in_any_splits(splits: int) -> None:
    digits, x = codes(27, 768), tokens(5, 768)
    sums = multiplied(pack(as_i2s(digits, 0.3), "cpu"), x, splits).sum(0)
    wanted = x.long() @ (torch.from_numpy(digits).long() - 1).T
    assert torch.equal(sums, wanted.float())


def test_sums_of_blocks_are_added_in_order() -> None:
    digits, x = codes(27, 768), tokens(5, 768)
    scales = np.random.default_rng(8).uniform(0.1, 1.0, (27, 3)).astype(np.float16)
    [sums] = multiplied(pack(as_tq2(digits, scales), "cpu"), x, 1)
    weights = torch.from_numpy(digits).long() - 1
    wanted = torch.zeros((5, 27), dtype=torch.float64)
    for block in range(3):
        part = slice(256 * block, 256 * block + 256)
        products = (x[:, part].long() @ weights[:, part].T).double()
        scale = torch.from_numpy(scales[:, block].astype(np.float64))
        wanted = (wanted + products * scale).float().double()  # one rounding: fused
    assert torch.equal(sums.double(), wanted)


# ---- activations


@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_activations_round_as_the_reference_rounds_them(size: float) -> None:
    x = np.random.default_rng(4).standard_normal((3, 384)).astype(np.float32) * np.float32(size)
    x[1] = np.arange(384, dtype=np.float32) / 2 - 64  # 127 / 127.5 of it: many are near a half
    x[2, :2] = 127 * np.float32(size), 0.5 * np.float32(size)
    vectors = torch.zeros((3, 512))
    vectors[:, :384] = torch.from_numpy(x)
    found = torch.full((3, 512), -128, dtype=torch.int8)
    units = torch.zeros(3)
    kernels.norm_and_quantize[(3,)](
        kernels.Source(vectors, vectors, 0, 1.0, 1.0),
        units,
        kernels.Target(found, units, vectors, units),
        512,
        384,
        1e-5,
        SOURCE=kernels.VECTORS,
        SPLITS=1,
        SQUARED_RELU=True,
        NORM=False,
        OUTPUT_HALVES=False,
        BLOCK=512,
        PDL=False,
    )
    for at in range(3):
        wanted, per_unit = quantised_by_token(x[at])
        assert units[at] == per_unit
        np.testing.assert_array_equal(found[at, :384].numpy(), wanted)
        assert not found[at, 384:].any()
