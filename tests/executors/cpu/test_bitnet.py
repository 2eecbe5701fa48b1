"""BitNet models in all their forms on the CPU: near the reference with the same halves in its KV
cache, the same bits in forms of the same integers, and the same bits in any batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.executors.cpu.blocks import UNITS
from tests.executors.cpu.running import stored
from tests.executors.reference.plans import logits, row, run
from tests.model.bitnet_forms import (
    CASES,
    FORMS,
    VOCABULARY,
    Floats,
    TernaryModel,
    as_folder,
    as_gguf,
    error,
    golden,
    packing_of,
    permuted,
    published,
    random_model,
    smallest_margin,
    with_master_scales,
)

from quire.executors.base import Executor
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, load_model

NUM_BLOCKS = 32
TABLE = (5, 2, 9)
MODEL = random_model(7)
WITHOUT_SUB_NORMS = permuted(random_model(8, sub_norms=False))


def gguf_form(model: TernaryModel, architecture: str, block_format: str) -> Callable[[Path], Path]:
    return lambda folder: as_gguf(model, folder / "model.gguf", architecture, block_format)


def folder_form(linear_class: str, mode: str) -> Callable[[Path], Path]:
    return lambda folder: as_folder(MODEL, folder / "model", linear_class=linear_class, mode=mode)


# Forms that are made here, so that they are there without the published ones.
MADE = {
    "i2s": gguf_form(MODEL, "bitnet-b1.58", "I2_S"),
    "tq1": gguf_form(MODEL, "bitnet-b1.58", "TQ1_0"),
    "tq2": gguf_form(MODEL, "bitnet-25", "TQ2_0"),
    "hf-packed": folder_form("autobitlinear", "offline"),
    "hf-packed-bitlinear": folder_form("bitlinear", "offline"),
    "hf-master": folder_form("autobitlinear", "online"),
    "i2s-of-master": gguf_form(with_master_scales(MODEL), "bitnet-b1.58", "I2_S"),
    "i2s-silu": gguf_form(MODEL, "bitnet", "I2_S"),
    "tq2-silu": gguf_form(MODEL, "bitnet", "TQ2_0"),
    "i2s-llama": gguf_form(WITHOUT_SUB_NORMS, "llama", "I2_S"),
}
NAMES = [*MADE, *(f"{model}/{form}" for model, form in CASES)]


@contextmanager
def form(name: str, tmp_path: Path) -> Iterator[Model]:
    """A form that is made here, or one such as c/i2s.gguf."""
    model, _, file = name.partition("/")
    path = published(model, file) if file else MADE[name](tmp_path)
    with load_model(path, i2s_packing=packing_of(name)) as opened:
        yield opened


@contextmanager
def on_cpu(model: Model, unit: str = "", threads: int = 2) -> Iterator[CpuExecutor]:
    executor = CpuExecutor(
        model, num_blocks=NUM_BLOCKS, threads=Threads(threads, may_spin=False), unit=unit
    )
    try:
        yield executor
    finally:
        executor.close()


def random_tokens(seed: int, length: int) -> list[int]:
    """Tokens that every vocabulary has."""
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return found


# ---- near the reference


class Compared(NamedTuple):
    error: float
    margin: float  # of the reference's activations


def compared(
    model: Model, executor: Executor, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> Compared:
    reference = ReferenceExecutor(model, num_blocks=NUM_BLOCKS, kv_precision="float16")
    try:
        with smallest_margin(monkeypatch) as margins:
            expected = logits(reference, row(tokens, TABLE))
    finally:
        reference.close()
    return Compared(error(logits(executor, row(tokens, TABLE)), expected), min(margins))


# Floats of two executors differ by a millionth of a byte or so: of activations that are further
# than this from where the next byte begins none is rounded differently, but for those behind a key
# or a value whose half was.
NO_FLIP = 1e-5
HEADS_IN_BLOCKS = ("a/extra/i2s-embq6k.gguf", "c/i2s.gguf", "c/extra/i2s-arm.gguf")


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references_with_the_same_halves_where_no_byte_is_near_the_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with form(name, tmp_path) as model, on_cpu(model) as executor:
        found = [
            compared(model, executor, random_tokens(seed, 6), monkeypatch) for seed in range(12)
        ]
    clear = [one.error for one in found if one.margin > NO_FLIP]
    assert len(clear) >= 3, "inputs without an activation between two bytes"
    assert max(clear) <= 1e-4
    # Before a head in blocks the CPU rounds activations, which the reference does not.
    assert np.median(clear) <= (1e-4 if name in HEADS_IN_BLOCKS else 1e-11)


@pytest.mark.parametrize(("model", "form_name"), CASES)
def test_logits_are_near_those_of_the_tool_that_made_the_form(
    model: str, form_name: str, tmp_path: Path
) -> None:
    tokens, expected = golden(model, FORMS[form_name][0])
    with form(f"{model}/{form_name}", tmp_path) as opened, on_cpu(opened) as executor:
        assert error(logits(executor, row(tokens, TABLE)), expected) <= 1e-3


# ---- the same bits


def bits(name: str, tmp_path: Path, unit: str, tokens: list[int]) -> bytes:
    folder = tmp_path / name.replace("/", "-")
    folder.mkdir()
    with form(name, folder) as model, on_cpu(model, unit) as executor:
        return logits(executor, row(tokens, TABLE)).tobytes()


@pytest.mark.parametrize(
    "names",
    [
        ("i2s", "tq1", "tq2", "hf-packed", "hf-packed-bitlinear"),
        ("i2s-silu", "tq2-silu"),
        ("i2s-of-master", "hf-master"),
        ("a/i2s-b158.gguf", "a/hf-packed"),
        ("a/tq2.gguf", "a/extra/tq1.gguf"),
        ("a/extra/tq2-silu-upstream.gguf", "a/extra/tq1-silu-upstream.gguf"),
        ("a/i2s.gguf", "a/extra/i2s-arm.gguf"),
        ("c/i2s.gguf", "c/extra/i2s-arm.gguf"),
    ],
    ids=lambda names: "=".join(names),
)
def test_forms_with_the_same_integers_and_scales_give_the_same_bits(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    tokens = random_tokens(3, 24)
    assert len({bits(name, tmp_path, "", tokens) for name in names}) == 1


# ---- in any batch


class Piece(NamedTuple):
    """Some tokens of one sequence."""

    sequence: int
    start: int
    end: int


def random_steps(rng: np.random.Generator, lengths: Sequence[int]) -> list[list[Piece]]:
    """Every sequence in chunks of any size, in steps that any of them take part in."""
    cuts = []
    for length in lengths:
        inner = rng.choice(np.arange(1, length), rng.integers(0, min(6, length)), replace=False)
        cuts.append(list(pairwise([0, *sorted(inner.tolist()), length])))
    steps = []
    while any(cuts):
        ready = [index for index, chunks in enumerate(cuts) if chunks]
        taken = [index for index in ready if rng.random() < 0.7] or ready[:1]
        steps.append([Piece(index, *cuts[index].pop(0)) for index in rng.permutation(taken)])
    return steps


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", NAMES)
def test_batches_and_chunks_change_no_bit(name: str, unit: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(17)
    lengths = (33, 1, 20, 7)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
    with form(name, tmp_path) as model, on_cpu(model, unit) as executor:
        alone = [logits(executor, row(prompt, TABLE)).tobytes() for prompt in prompts]
        for _ in range(4):
            blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
            tables = [tuple(next(blocks) for _ in range(-(-n // 16))) for n in lengths]
            assert joined(executor, prompts, tables, random_steps(rng, lengths)) == alone


def joined(
    executor: CpuExecutor,
    prompts: list[list[int]],
    tables: list[tuple[int, ...]],
    steps: list[list[Piece]],
) -> list[bytes]:
    """The logits of every sequence, computed in these steps."""
    found: list[list[Floats]] = [[] for _ in prompts]
    for step in steps:
        plans = [
            row(prompts[n][start:end], tables[n], start=start, sequence_id=n)
            for n, start, end in step
        ]
        for result in run(executor, *plans):
            assert result.fault is None
            found[result.sequence_id].append(np.asarray(result.logits))
    return [np.concatenate(pieces).tobytes() for pieces in found]


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_and_number_of_threads_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    tokens = random_tokens(5, 24)
    found = set()
    with form(name, tmp_path) as model:
        for unit in UNITS:
            for threads in (1, 2):
                with on_cpu(model, unit, threads) as executor:
                    bits_found = logits(executor, row(tokens, TABLE)).tobytes()
                    found.add((bits_found, stored(executor, TABLE[:2], model.spec.num_layers)))
    assert len(found) == 1
