"""Whole models on the CPU executor against what others computed: how far rounding takes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.drawn_families import CASES, DRAWN, in_its_context, write_drawn
from tests.executors.cpu.bitnet import EmulatedBitNet
from tests.executors.cpu.blocks import UNITS, nmse
from tests.executors.cpu.running import opened
from tests.executors.reference.plans import logits, row, run
from tests.fixture_files import FIXTURES, TINY_BITNET_FILES, TINY_FILES, fixture_file

from quire.core.errors import UnsupportedModelError
from quire.executors.base import Executor
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.reference import ReferenceExecutor
from quire.model.features import LOWERED, Feature
from quire.model.loading import Model, load_model

FAMILIES = sorted(folder.name for folder in (FIXTURES / "families").iterdir())
# Some token's best experts are so near each other that keys and values in half precision change
# its choice: compared with the reference whose cache has halves.
OTHER_EXPERTS = {"gpt-oss"}
TABLE = (9, 2, 14)
CHATS: list[dict[str, Any]] = json.loads((FIXTURES / "smollm2" / "golden.json").read_text())[
    "chats"
]
LARGEST_MEAN_KL = 3.5e-3  # llama.cpp, with bytes as activations too: 3.2e-3
LARGEST_MEAN_KL_WITH_BYTES = 5e-3  # for keys and values as well


@pytest.mark.parametrize("name", [*TINY_FILES, *TINY_BITNET_FILES])
def test_logits_of_every_format_are_as_near_as_llama_cpps(name: str) -> None:
    golden = np.load(fixture_file(f"{Path(name).parent}/golden.npz"))
    exact, peer = (golden[f"{Path(name).stem}.{kind}"] for kind in ("exact", "peer"))
    with opened(fixture_file(name), per_token_scale=False) as executor:
        found = logits(executor, row(golden["tokens"].tolist(), TABLE))
    assert nmse(found, exact) <= 1.1 * nmse(peer, exact) + 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_transformers(family: str) -> None:
    golden = np.load(FIXTURES / "families" / family / "golden.npz")
    with opened(FIXTURES / "families" / family) as executor:
        found = logits(executor, row(golden["tokens"].tolist(), TABLE))
    assert nmse(found, golden["logits"]) <= 1e-6  # keys and values in half precision


@pytest.mark.parametrize("case", CASES)
def test_a_family_is_run_as_transformers_does(case: str, tmp_path: Path) -> None:
    golden = np.load(DRAWN / case / "golden.npz")
    with load_model(write_drawn(case, tmp_path)) as model:
        model = in_its_context(case, model)
        plan = row(golden["tokens"].tolist(), TABLE)
        executor = CpuExecutor(model, num_blocks=16, threads=Threads(1, may_spin=False))
        found = logits(executor, plan)
        executor.close()
        exact = golden["logits"]
        if case in OTHER_EXPERTS:
            assert nmse(found, exact) > 1e-5
            halves = ReferenceExecutor(model, num_blocks=16, kv_precision="float16")
            exact = logits(halves, plan)
            halves.close()
    assert nmse(found, exact) <= 1e-5  # keys and values in half precision


@pytest.mark.parametrize("case", CASES)
def test_batches_and_chunks_change_no_bit_of_a_family(case: str, tmp_path: Path) -> None:
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:30]
    generator = np.random.default_rng(3)
    with load_model(write_drawn(case, tmp_path)) as model:
        executor = CpuExecutor(
            in_its_context(case, model), num_blocks=16, threads=Threads(2, may_spin=False)
        )
    alone = logits(executor, row(tokens, (0, 1)))
    found, start = [], 0
    while start < len(tokens):  # each step: a chunk of it, and two others before and after
        stop = min(len(tokens), start + int(generator.integers(1, 12)))
        others = [generator.permutation(tokens)[: 5 * n].tolist() for n in (1, 3)]
        results = run(
            executor,
            row(others[0], (4, 5), sequence_id=1),
            row(tokens[start:stop], (9, 7), start=start, sequence_id=2),
            row(others[1], (12, 13), sequence_id=3),
        )
        found.append(results[1].logits)
        start = stop
    executor.close()
    assert np.concatenate(found).tobytes() == alone.tobytes()


def test_what_is_not_lowered_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = {**LOWERED, "cpu": LOWERED["cpu"] - {Feature.EXPERTS}}
    monkeypatch.setattr("quire.model.features.LOWERED", lowered)
    with (
        load_model(write_drawn("mixtral", tmp_path)) as model,
        pytest.raises(UnsupportedModelError, match="has a mixture of experts in layer 0"),
    ):
        CpuExecutor(model, num_blocks=16, threads=Threads(1, may_spin=False))


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("unit", UNITS)
def test_bitnet_with_a_scale_a_token_is_its_emulation_bit_for_bit(name: str, unit: str) -> None:
    path = fixture_file(f"tiny-bitnet/{name}.gguf")
    tokens = np.load(fixture_file("tiny-bitnet/golden.npz"))["tokens"].tolist()[:12]
    with load_model(path) as model, opened(path, unit=unit) as executor:
        found = logits(executor, row(tokens, TABLE))
        emulated = EmulatedBitNet(model, unit, len(tokens))
        for position, token in enumerate(tokens):
            expected = emulated.logits(token, position)
            assert found[position].tobytes() == expected.tobytes(), position


# ---- SmolLM2


def log_probabilities(executor: Executor, tokens: list[int]) -> npt.NDArray[np.float64]:
    found = logits(executor, row(tokens, range(-(-len(tokens) // 16)))).astype(np.float64)
    found -= found.max(axis=1, keepdims=True)
    return np.asarray(found - np.log(np.exp(found).sum(axis=1, keepdims=True)))


def divergence(model: Model, chats: list[dict[str, Any]], cache_types: list[bool]) -> list[float]:
    """The mean KL(reference || cpu) over the completions' positions, given the reference's tokens;
    for halves or bytes as keys and values."""
    reference = ReferenceExecutor(model, num_blocks=32)
    others = [
        CpuExecutor(model, num_blocks=32, threads=Threads(2, may_spin=False), kv_int8=is_int8)
        for is_int8 in cache_types
    ]
    found: list[list[float]] = [[] for _ in others]
    for chat in chats:
        tokens = chat["prompt_tokens"] + chat["greedy_f32"]
        expected = log_probabilities(reference, tokens)
        for other, values in zip(others, found, strict=True):
            ratio = expected - log_probabilities(other, tokens)
            of_each = (np.exp(expected) * ratio).sum(axis=1)
            values += of_each[len(chat["prompt_tokens"]) - 1 : -1].tolist()
    for executor in (reference, *others):
        executor.close()
    return [float(np.mean(values)) for values in found]


def test_smollm2_follows_the_reference_along_a_chat(smollm2_path: Path) -> None:
    chat = {**CHATS[0], "greedy_f32": CHATS[0]["greedy_f32"][:12]}  # the reference is slow
    with load_model(smollm2_path) as model:
        halves, in_bytes = divergence(model, [chat], [False, True])
    assert 0 < halves <= LARGEST_MEAN_KL
    assert 0 < in_bytes <= LARGEST_MEAN_KL_WITH_BYTES


@pytest.mark.long
def test_smollm2_follows_the_reference_along_every_chat(smollm2_path: Path) -> None:
    with load_model(smollm2_path) as model:
        halves, in_bytes = divergence(model, CHATS, [False, True])
    print(f"mean KL: {halves:.3e} with halves, {in_bytes:.3e} with bytes as keys and values")
    assert 0 < halves <= LARGEST_MEAN_KL
    assert 0 < in_bytes <= LARGEST_MEAN_KL_WITH_BYTES
