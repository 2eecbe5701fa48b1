"""A row depends on itself alone: not on the batch, chunks, blocks, threads or instruction set."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executors.cpu.blocks import UNITS
from tests.executors.cpu.running import opened, stored
from tests.executors.reference.plans import logits, row, run
from tests.fixture_files import FIXTURES, fixture_file

from quire.core.config import EngineConfig
from quire.core.plan import BlockCopy, Want
from quire.core.request import Ended, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.cpu.executor import CpuExecutor

NUM_BLOCKS = 24
NUM_LAYERS = 2  # of the tiny models
PROMPT = tuple((37 * n + n * n) % 500 for n in range(41))
TABLE = (7, 3, 11)
BATCHES = (1, 2, 3, 4, 7, 16, 33, 64)
EXPERTS = "dummy:tiny-moe:Q4_K_M"


@pytest.fixture(
    scope="module",
    params=[
        ("tiny/Q4_K_M.gguf", False),
        ("tiny/Q4_K_M.gguf", True),
        ("tiny-bitnet/TQ2_0.gguf", False),
        ("mistral", False),
        (EXPERTS, False),
    ],
    ids=["Q4_K_M", "int8-cache", "bitnet", "sliding-windows", "experts"],
)
def executor(request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    name, is_int8 = request.param
    with opened(path_of(name), NUM_BLOCKS, threads=2, kv_int8=is_int8) as found:
        yield found


def path_of(name: str) -> Path | str:
    if name.startswith("dummy:"):
        return name
    return fixture_file(name) if "/" in name else FIXTURES / "families" / name


def prompt(executor: CpuExecutor, salt: int = 0) -> tuple[int, ...]:
    return tuple((token + salt) % executor.capacity.vocabulary_size for token in PROMPT)


def alone(executor: CpuExecutor) -> tuple[npt.NDArray[np.float32], bytes]:
    """The prompt in one chunk and alone: its logits, and the bytes it leaves."""
    found = logits(executor, row(prompt(executor), TABLE))
    return found, stored(executor, TABLE, executor._spec.num_layers)


@given(cuts=st.sets(st.integers(1, len(PROMPT) - 1)).map(sorted))
@settings(max_examples=15, deadline=None)
def test_chunking_changes_no_bit(executor: CpuExecutor, cuts: list[int]) -> None:
    expected, kept = alone(executor)
    found = [
        logits(executor, row(prompt(executor)[start:end], TABLE, start=start))
        for start, end in pairwise([0, *cuts, len(PROMPT)])
    ]
    assert np.concatenate(found).tobytes() == expected.tobytes()
    assert stored(executor, TABLE, executor._spec.num_layers) == kept


@given(blocks=st.permutations(range(NUM_BLOCKS)), num_others=st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_the_batch_and_blocks_change_no_bit(
    executor: CpuExecutor, blocks: list[int], num_others: int
) -> None:
    expected, _ = alone(executor)
    tables = [tuple(blocks[i * 3 : i * 3 + 3]) for i in range(num_others + 1)]
    plans = [
        row(prompt(executor, salt)[: 5 * salt + 1], tables[salt], sequence_id=salt)
        for salt in range(1, num_others + 1)
    ]
    plans.insert(num_others // 2, row(prompt(executor), tables[0], sequence_id=0))
    results = {result.sequence_id: result for result in run(executor, *plans)}
    assert results[0].logits.tobytes() == expected.tobytes()


def test_keys_and_values_of_decoding_are_those_of_the_whole_prompt(executor: CpuExecutor) -> None:
    expected, kept = alone(executor)
    # Blocks hold what lay in them behind the end: the same on both sides.
    other = (0, 1, 2)
    run(executor, row(prompt(executor), other, want=Want.NOTHING))
    for end in range(1, len(PROMPT) + 1):  # token by token, as a completion was
        found = logits(executor, row(prompt(executor)[end - 1 : end], other, start=end - 1))
        assert found[0].tobytes() == expected[end - 1].tobytes()
    assert stored(executor, other[:2], executor._spec.num_layers) == b"".join(
        executor.cache_block(layer, block)
        for layer in range(executor._spec.num_layers)
        for block in TABLE[:2]
    )
    assert stored(executor, TABLE, executor._spec.num_layers) == kept


def test_a_copied_block_changes_no_bit_and_leaves_the_other_alone(executor: CpuExecutor) -> None:
    expected, kept = alone(executor)
    table = (*TABLE[:2], 20)
    copies = [BlockCopy(TABLE[2], 20)]
    plan = row(prompt(executor)[40:], table, start=40)
    [result] = run(executor, plan, copies=copies)
    assert result.logits.tobytes() == expected[40:].tobytes()
    run(executor, row((0,), table, start=40, sequence_id=1), copies=copies)
    assert stored(executor, TABLE, executor._spec.num_layers) == kept


def test_a_step_run_again_gives_the_same_bits(executor: CpuExecutor) -> None:
    expected, kept = alone(executor)
    assert alone(executor)[0].tobytes() == expected.tobytes()
    assert stored(executor, TABLE, executor._spec.num_layers) == kept


@pytest.mark.parametrize(
    "name",
    ["tiny/Q4_K_M.gguf", "tiny/Q4_1.gguf", "tiny/F16.gguf", "tiny-bitnet/TQ1_0.gguf", EXPERTS],
)
def test_every_unit_and_number_of_threads_give_the_same_bits(name: str) -> None:
    found = set()
    for unit in UNITS:
        for threads in (1, 2, 3):
            with opened(path_of(name), NUM_BLOCKS, threads, unit=unit) as executor:
                bits = logits(executor, row(PROMPT, TABLE)).tobytes()
                found.add((bits, stored(executor, TABLE, NUM_LAYERS)))
    assert len(found) == 1


# ---- under the engine

BASE = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2)
SAMPLED = replace(BASE, temperature=1.5, seed=11, top_p=0.9)
PENALISED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5, seed=12)
SHARED = tuple(range(40, 60))  # a prefix that every other prompt begins with


def request(number: int) -> tuple[tuple[int, ...], SamplingParams]:
    own = tuple((7 * number + 3 * n) % 512 for n in range(10 + number % 5))
    params = (BASE, SAMPLED, PENALISED)[number % 3]
    return ((*SHARED, number) if number % 2 else own), params


REQUESTS = [request(number) for number in range(max(BATCHES))]


def outputs(
    requests: list[tuple[tuple[int, ...], SamplingParams]],
    *,
    name: str = "tiny/Q4_K_M.gguf",
    num_blocks: int = 160,
    threads: int = 1,
    unit: str = "",
    kv_int8: bool = False,
    **config: Any,
) -> list[RequestOutput]:
    """What a fresh engine over a fresh executor makes of the requests."""
    with opened(path_of(name), num_blocks, threads, unit=unit, kv_int8=kv_int8) as executor:
        engine = Engine(executor, EngineConfig(**config))
        ids = [engine.add_request(prompt, params).id for prompt, params in requests]
        ended = {}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Ended):
                    ended[event.request_id] = event.output
            engine.check_integrity()
    return [ended[request_id] for request_id in ids]


def content(output: RequestOutput) -> object:
    assert output.error is None
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.completions]


def in_solo(**model: Any) -> list[object]:
    """Every request by itself: whole prompt at once, nothing reused, blocks in plenty."""
    plain: dict[str, Any] = {"chunking": False, "prefix_reuse": False, "plan_ahead": False}
    runs = [outputs([one], max_batch_size=1, **model, **plain) for one in REQUESTS]
    return [content(output) for [output] in runs]


@pytest.fixture(scope="module")
def solo() -> list[object]:
    return in_solo()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_of_any_size_give_what_requests_give_alone(
    batch: int, threads: int, solo: list[object]
) -> None:
    config: dict[str, Any] = {"max_batch_size": batch, "plan_ahead": threads == 2}
    found = outputs(REQUESTS[:batch], threads=threads, **config)
    assert [content(output) for output in found] == solo[:batch]


@pytest.mark.parametrize("batch", BATCHES)
def test_small_chunks_prefix_hits_and_preemptions_change_nothing(
    batch: int, solo: list[object]
) -> None:
    found = outputs(
        REQUESTS,
        num_blocks=batch + 3,
        threads=2,
        max_batch_size=batch,
        max_step_tokens=max(batch, 9),
    )
    assert [content(output) for output in found] == solo
    assert any(output.metrics.num_cached_tokens for output in found)
    assert any(output.metrics.num_chunks > 1 for output in found)
    if batch >= 4:
        assert any(output.metrics.num_preemptions for output in found)


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_gives_the_same_completions(unit: str, solo: list[object]) -> None:
    found = outputs(REQUESTS[:16], unit=unit, max_batch_size=16)
    assert [content(output) for output in found] == solo[:16]


def test_keys_and_values_in_bytes_keep_the_promise_too() -> None:
    found = outputs(
        REQUESTS, num_blocks=24, threads=2, kv_int8=True, max_batch_size=16, max_step_tokens=16
    )
    assert [content(output) for output in found] == in_solo(kv_int8=True)


@pytest.mark.parametrize("batch", [3, 16, 64])
def test_experts_keep_the_promise_too(batch: int, solo_of_experts: list[object]) -> None:
    """Each step groups its rows by expert in another way."""
    chunks: dict[str, Any] = {"max_batch_size": batch, "max_step_tokens": max(batch, 9)}
    found = outputs(REQUESTS, name=EXPERTS, num_blocks=batch + 3, threads=2, **chunks)
    assert [content(output) for output in found] == solo_of_experts
    assert any(output.metrics.num_chunks > 1 for output in found)
    if batch > 3:
        assert any(output.metrics.num_preemptions for output in found)


@pytest.fixture(scope="module")
def solo_of_experts() -> list[object]:
    return in_solo(name=EXPERTS)


def test_smollm2_answers_the_same_in_a_batch_and_alone(smollm2_path: Path) -> None:
    prompts = [tuple(range(100 + n, 140 + 9 * n)) for n in range(5)]

    def completions(requests: list[tuple[int, ...]], threads: int, **config: Any) -> list[object]:
        with opened(smollm2_path, 64, threads) as executor:
            engine = Engine(executor, EngineConfig(**config))
            ids = [engine.add_request(one, replace(SAMPLED, max_tokens=4)).id for one in requests]
            ended = {}
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, Ended):
                        ended[event.request_id] = event.output
        return [content(ended[request_id]) for request_id in ids]

    alone = completions(prompts, 1, max_batch_size=1, chunking=False, prefix_reuse=False)
    assert completions(prompts, 2, max_batch_size=5, max_step_tokens=48) == alone
