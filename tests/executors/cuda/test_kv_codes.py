"""Keys and values in bytes on CUDA: what is stored, what attention makes of it, and whole steps."""

from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401

torch = pytest.importorskip("torch")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from tests.executors.cuda import test_attention as halves  # noqa: E402
from tests.executors.reference.plans import opened, row, run  # noqa: E402
from tests.fixture_files import fixture_file  # noqa: E402

from quire.core.config import EngineConfig  # noqa: E402
from quire.core.plan import BlockCopy, SequencePlan, StepPlan, Want  # noqa: E402
from quire.core.request import Ended  # noqa: E402
from quire.core.sampling import SamplingParams  # noqa: E402
from quire.engine.engine import Engine  # noqa: E402
from quire.executors.cuda import CudaConfig, CudaExecutor  # noqa: E402
from quire.executors.cuda.kernels.kv_codes import decoded, quantized  # noqa: E402
from quire.executors.cuda.planes import to_natural_order  # noqa: E402
from quire.executors.reference import _ROUNDING  # noqa: E402
from quire.model.kv_layout import kv_bytes_in_block, one_group  # noqa: E402
from quire.model.loading import load_model  # noqa: E402

DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
FLOAT8 = torch.float8_e4m3fn


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    numbers,
    codes,
    scales,
    back,
    ROWS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
):
    row = tl.arange(0, ROWS)[:, None]
    index = row * 2 * PAIRS + tl.arange(0, PAIRS)[None, :]
    x = tl.load(numbers + index)
    y = tl.load(numbers + index + PAIRS)
    code_x, code_y, scale = quantized(x, y, codes.dtype.element_ty)
    tl.store(codes + index, code_x)
    tl.store(codes + index + PAIRS, code_y)
    tl.store(scales + row, scale)
    tl.store(back + index, decoded(code_x))
    tl.store(back + index + PAIRS, decoded(code_y))


def stored(numbers: Any, kind: str) -> tuple[Any, Any, Any]:
    """Codes, scales, and codes as numbers."""
    codes = torch.zeros(numbers.shape, dtype=DTYPES[kind])
    scales = torch.zeros(len(numbers))
    back = torch.zeros(numbers.shape, dtype=torch.bfloat16)
    rows, columns = numbers.shape
    _quantize[(1,)](numbers, codes, scales, back, ROWS=rows, PAIRS=columns // 2)
    return codes, scales, back


def drawn_vectors() -> Any:
    """Of many sizes; with ties, small numbers beside large ones, and zeros."""
    generator = torch.Generator().manual_seed(4)
    made = torch.randn((16, 32), generator=generator) * 2.0 ** torch.arange(-20, 12, 2)[:, None]
    made[1, 1:] *= 1e-3
    made[2] = torch.arange(32) * 0.5 - 7.0
    made[3] = 2.0 ** -torch.arange(32.0)
    made[4] = 0.0
    return made


@pytest.mark.parametrize("kind", DTYPES)
def test_what_is_stored_is_what_the_reference_keeps(kind: Any) -> None:
    numbers = drawn_vectors()
    codes, scales, back = stored(numbers, kind)
    found = back.float() * scales[:, None]
    assert np.array_equal(found.numpy(), _ROUNDING[kind](numbers.numpy()))
    assert found.abs().amax(1).allclose(numbers.abs().amax(1), rtol=1e-6)
    if kind == "int8":
        assert torch.equal(back.float(), codes.float())
    else:
        assert torch.equal(back.float(), codes.view(FLOAT8).float())
        assert torch.equal(codes.view(FLOAT8).float(), (back.float()).to(FLOAT8).float())


def test_every_e4m3_is_its_own_code() -> None:
    """A vector whose largest is 448 has the scale 1: what is a float8 is stored as it is."""
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(FLOAT8).float()
    numbers[[0x7F, 0xFF]] = 448.0  # NaN
    whole = numbers.view(1, 256)
    codes, scales, back = stored(whole, "fp8")
    assert scales.tolist() == [1.0]
    is_number = (every != 0x7F) & (every != 0xFF)
    assert torch.equal(codes[0][is_number], every[is_number])
    assert torch.equal(back[0].float(), whole[0])
    between = (whole[0, :126] + whole[0, 1:127]) / 2  # exactly half: the even one
    tied = torch.cat([between, -between, torch.tensor([448.0, 448.0, 0.0, 0.0])]).view(1, 256)
    codes, _, back = stored(tied, "fp8")
    assert torch.equal(back[0].float(), tied[0].to(FLOAT8).float())
    assert (codes[0, :126] % 2 == 0).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_what_is_not_finite_makes_its_own_scale_nan_and_zeros_are_zeros(kind: str) -> None:
    numbers = drawn_vectors()
    clean = stored(numbers, kind)
    hostile = numbers.clone()
    hostile[5, 3], hostile[6, 20], hostile[7, 0] = float("nan"), float("inf"), -float("inf")
    hostile[8], hostile[9] = 1e-40, 3e38
    codes, scales, back = stored(hostile, kind)
    assert scales[5:8].isnan().all() and (back[5:8] == 0).all()
    assert (back[8] == 0).all() and scales[8].isfinite()
    assert (back[9].float() * scales[9]).allclose(hostile[9])
    others = [row for row in range(16) if row not in range(5, 10)]
    assert torch.equal(codes[others], clean[0][others])
    assert torch.equal(scales[others], clean[1][others])
    assert (clean[0][4] == 0).all() and clean[1][4] == 0


# ---- attention


def cache_of(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cache in bytes, and the numbers that it stands for. What nobody wrote must not matter."""
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([5, 0, 3, 7, 2, 6], dtype=torch.int32)
    shape = (8, halves.KV_HEADS, halves.BLOCK, halves.DIM)
    queries = torch.randn((halves.CONTEXT, halves.HEADS, halves.DIM), generator=generator)
    made: dict[str, Any] = {"queries": queries.bfloat16(), "table": table}
    numbers, scales = dict(made), torch.empty((*shape[:2], 2, halves.BLOCK))
    for place, name in enumerate(("keys", "values")):
        rows = torch.randn(shape, generator=generator).view(-1, halves.DIM)
        sizes = 2.0 ** torch.randint(-3, 3, (len(rows), 1), generator=generator)
        parts = [stored(part, kind) for part in (rows * sizes).split(256)]
        codes, own, back = (torch.cat(arrays) for arrays in zip(*parts, strict=True))
        numbers[name] = (back.float() * own[:, None]).view(shape)
        made[name], scales[:, :, place] = codes.view(shape), own.view(shape[:3])
        made[name][1] = made[name][6, :, halves.CONTEXT % halves.BLOCK :] = 127  # an e4m3 NaN
    scales[1] = scales[6, :, :, halves.CONTEXT % halves.BLOCK :] = float("nan")
    return {**made, "scales": scales}, numbers


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 20, **halves.SINGULAR["sinks"]}])
def test_attention_over_codes_is_that_over_their_numbers(
    kind: str, options: dict[str, Any]
) -> None:
    cache, numbers = cache_of(kind)
    positions = range(82, 90)
    together = halves.attended(cache, positions, 8, **options)
    found = to_natural_order(together)
    for place, position in enumerate(positions):
        wanted = halves.exact(numbers, position, **options)
        assert (found[place].double() - wanted).norm() / wanted.norm() < 8e-3  # bfloat16 weights
    for tokens, splits in ((1, 0), (3, 0), (1, 4)):
        alone = halves.attended(cache, positions, tokens, splits=splits, **options)
        assert torch.equal(alone, together), (tokens, splits)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_scale_that_is_nan_fails_the_rows_that_see_it_and_no_other(kind: str) -> None:
    cache, _ = cache_of(kind)
    sound = halves.attended(cache, range(60, 68), 8)
    block, slot = int(cache["table"][64 // halves.BLOCK]), 64 % halves.BLOCK
    cache["scales"][block, :, :, slot] = float("nan")
    found = halves.attended(cache, range(60, 68), 8)
    assert torch.equal(found[:4], sound[:4])
    assert found[4:].isnan().all()


# ---- whole steps

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TABLE = (2, 0)


@pytest.fixture(scope="module", params=DTYPES)
def executor(request: pytest.FixtureRequest) -> Any:
    config = CudaConfig(4, 32, num_blocks=8, device="cpu", kv_type=request.param)
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        found = CudaExecutor(model, config)
    found.warm_up()
    yield found
    found.close()


def logits(executor: Any, plan: SequencePlan) -> Any:
    [result] = run(executor, plan)
    assert result.fault is None
    return np.asarray(result.logits)


def test_logits_are_the_references_with_such_a_cache(executor: CudaExecutor) -> None:
    found = logits(executor, row(PROMPT, TABLE))
    errors = {}
    for precision in ("float32", "int8", "fp8"):
        path: Any = fixture_file("tiny/Q4_0.gguf")
        with opened(path, num_blocks=8, kv_precision=precision) as reference:
            exact = logits(reference, row(PROMPT, TABLE))
        errors[precision] = ((found - exact) ** 2).sum() / (exact**2).sum()
    own = errors.pop(executor._config.kv_type)
    assert own < 4e-4  # a code may be the next one
    assert own < min(errors.values())
    limit = {"int8": 5e-4, "fp8": 8e-3}[executor._config.kv_type]
    assert errors["float32"] < limit  # what bytes cost


def test_any_chunking_and_any_batch_gives_the_same_bits(executor: CudaExecutor) -> None:
    whole = logits(executor, row(PROMPT, TABLE))
    run(executor, row(PROMPT[:3], (5, 6), want=Want.NOTHING))
    rest = row(PROMPT[3:-1], (5, 6), start=3, sequence_id=1)
    other = row((7, 7, 7), (3, 4), sequence_id=2)
    _, second = run(executor, other, rest)
    np.testing.assert_array_equal(second.logits, whole[3:-1])
    last = row(PROMPT[-1:], (7,), start=7)
    ticket = executor.submit(StepPlan(3, (last,), (BlockCopy(5, 7),)))
    [result] = executor.collect(ticket, 60).sequences
    np.testing.assert_array_equal(result.logits, whole[-1:])
    blocks = executor._blocks
    assert blocks.scales is not None
    for kept in (blocks.keys, blocks.values, blocks.scales.transpose(-1, -2)):
        first, again = (kept[:, block, :, : len(PROMPT) - 1] for block in (2, 5))
        assert first.equal(again)


def test_the_cache_takes_a_byte_a_number_and_a_scale_a_head(executor: CudaExecutor) -> None:
    per_token = 2 * 2 * 2 * (64 + 4)  # layers, keys and values, kv heads
    assert executor.memory_bytes["kv"] == 8 * 16 * per_token
    spec = executor._spec
    assert kv_bytes_in_block(spec, one_group(spec), is_8bit=True) == per_token
    name = {"int8": "int8 KV cache", "fp8": "float8_e4m3 KV cache"}[executor._config.kv_type]
    assert executor.kernels[-1] == name


def test_what_is_not_finite_in_the_cache_fails_the_row(executor: CudaExecutor) -> None:
    run(executor, row(PROMPT[:-1], (1,), want=Want.NOTHING))
    scales = executor._blocks.scales
    assert scales is not None
    scales[0, 1, 0, 1, 2] = float("nan")
    [result] = run(executor, row(PROMPT[-1:], (1,), start=7))
    assert result.fault == "the hidden state is not finite"


def test_a_sequence_that_lost_its_blocks_goes_on_with_the_same_tokens() -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, ignore_eos=True)
    prompts = [tuple(range(5, 19)), tuple(range(30, 44))]
    found = []
    for num_blocks, prefix_reuse in ((8, True), (3, False)):
        sizes = CudaConfig(4, 32, num_blocks=num_blocks, device="cpu", kv_type="fp8")
        with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
            runs = CudaExecutor(model, sizes)
        runs.warm_up()
        config = EngineConfig(max_batch_size=2, max_step_tokens=32, prefix_reuse=prefix_reuse)
        engine = Engine(runs, config)
        ids = [engine.add_request(prompt, greedy).id for prompt in prompts]
        ended = {e.request_id: e.output for e in engine.run() if isinstance(e, Ended)}
        found.append([(ended[i].token_ids, ended[i].completions[0].logprobs) for i in ids])
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 3)
    assert found[1] == found[0]
