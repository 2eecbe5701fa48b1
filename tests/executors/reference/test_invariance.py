"""A row depends on itself alone: not on the batch, chunking, blocks, or what lay in them before."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executors.reference.plans import logits, opened, row, run
from tests.fixture_files import FIXTURES, fixture_file

from quire.core.plan import BlockCopy, SequencePlan, Want
from quire.executors.reference import Linear, ReferenceExecutor, _aligned

NUM_BLOCKS = 48
BLOCK_SIZE = 4
PROMPT = (1, 5, 9, 200, 33, 7, 7, 120, 4, 90, 61, 18, 3, 77, 2, 41, 8, 100, 6)
TABLE = (7, 3, 11, 0, 5)


@pytest.fixture(scope="module", params=["tiny/Q4_K_M.gguf", "tiny-bitnet/TQ2_0.gguf", "mistral"])
def executor(request: pytest.FixtureRequest) -> Iterator[ReferenceExecutor]:
    is_family = request.param == "mistral"
    path = FIXTURES / "families" / "mistral" if is_family else fixture_file(request.param)
    with opened(path, NUM_BLOCKS, BLOCK_SIZE) as found:
        yield found


def prompt(executor: ReferenceExecutor, salt: int = 0) -> tuple[int, ...]:
    return tuple((token + salt) % executor.capacity.vocabulary_size for token in PROMPT)


def fill_blocks(executor: ReferenceExecutor, value: float) -> None:
    for array in (*executor._blocks.keys.values(), *executor._blocks.values.values()):
        array[:] = value


def stored(executor: ReferenceExecutor, table: tuple[int, ...], end: int) -> bytes:
    """The bytes of the keys and values that a sequence left."""
    slots = executor._blocks.slots(table, end)
    layers = range(len(executor._blocks.keys))
    return b"".join(x.tobytes() for layer in layers for x in executor._blocks.read(layer, slots))


def alone(executor: ReferenceExecutor) -> tuple[npt.NDArray[np.float32], bytes]:
    """The prompt in one chunk, in an empty cache, alone in its batch."""
    fill_blocks(executor, 0.0)
    found = logits(executor, row(prompt(executor), TABLE))
    return found, stored(executor, TABLE, len(PROMPT))


def in_chunks(
    executor: ReferenceExecutor, cuts: list[int], table: tuple[int, ...]
) -> list[npt.NDArray[np.float32]]:
    edges = [0, *cuts, len(PROMPT)]
    return [
        logits(executor, row(prompt(executor)[start:end], table, start=start))
        for start, end in pairwise(edges)
    ]


@given(cuts=st.sets(st.integers(1, len(PROMPT) - 1)).map(sorted))
@settings(max_examples=20, deadline=None)
def test_chunking_changes_no_bit(executor: ReferenceExecutor, cuts: list[int]) -> None:
    expected, kept = alone(executor)
    fill_blocks(executor, np.nan)
    found = np.concatenate(in_chunks(executor, cuts, TABLE))
    assert found.tobytes() == expected.tobytes()
    assert stored(executor, TABLE, len(PROMPT)) == kept


@given(
    blocks=st.permutations(range(NUM_BLOCKS)), num_others=st.integers(1, 5), index=st.integers(0, 5)
)
@settings(max_examples=20, deadline=None)
def test_batch_and_blocks_change_no_bit(
    executor: ReferenceExecutor, blocks: list[int], num_others: int, index: int
) -> None:
    expected, kept = alone(executor)
    fill_blocks(executor, np.nan)
    tables = [tuple(blocks[i * 8 : i * 8 + 8]) for i in range(num_others + 1)]
    plans = [
        row(prompt(executor, salt)[: 3 * salt + 1], tables[salt], sequence_id=salt)
        for salt in range(1, num_others + 1)
    ]
    plans.insert(min(index, num_others), row(prompt(executor), tables[0], sequence_id=0))
    results = {result.sequence_id: result for result in run(executor, *plans)}
    assert results[0].logits.tobytes() == expected.tobytes()
    assert stored(executor, tables[0], len(PROMPT)) == kept


def test_a_prefix_computed_by_another_sequence_changes_no_bit(executor: ReferenceExecutor) -> None:
    expected, _ = alone(executor)
    fill_blocks(executor, np.nan)
    shared = TABLE[:2]
    run(executor, row(prompt(executor)[:8], shared, sequence_id=1, want=Want.NOTHING))
    table = (*shared, 20, 21, 22)
    found = logits(executor, row(prompt(executor)[8:], table, start=8, sequence_id=2))
    assert found.tobytes() == expected[8:].tobytes()


def test_a_copied_block_changes_no_bit_and_leaves_the_other_alone(
    executor: ReferenceExecutor,
) -> None:
    expected, kept = alone(executor)
    table = (*TABLE[:4], 30)
    copies = [BlockCopy(TABLE[4], 30)]
    plan = row(prompt(executor)[17:18], table, start=17)
    [result] = run(executor, plan, copies=copies)
    assert result.logits.tobytes() == expected[17:18].tobytes()
    run(executor, row((0,), table, start=17, sequence_id=1), copies=copies)
    assert stored(executor, TABLE, len(PROMPT)) == kept


def test_keys_and_values_recomputed_after_preemption_are_byte_equal(
    executor: ReferenceExecutor,
) -> None:
    _, kept = alone(executor)
    other = (40, 41, 42, 43, 44)
    for end in range(1, len(PROMPT) + 1):  # token by token, as a completion was
        run(executor, row(prompt(executor)[end - 1 : end], other, start=end - 1))
    assert stored(executor, other, len(PROMPT)) == kept


def test_a_step_run_again_gives_the_same_bits(executor: ReferenceExecutor) -> None:
    expected, kept = alone(executor)
    assert logits(executor, row(prompt(executor), TABLE)).tobytes() == expected.tobytes()
    assert stored(executor, TABLE, len(PROMPT)) == kept


def test_a_row_that_faults_leaves_the_others_bit_identical(executor: ReferenceExecutor) -> None:
    expected, kept = alone(executor)
    fill_blocks(executor, 0.0)
    poisoned = (40, 41, 42, 43, 44)
    executor._blocks.keys[0][40] = np.nan
    plans: list[SequencePlan] = [
        row(prompt(executor)[4:9], poisoned, start=4, sequence_id=1),
        row((executor.capacity.vocabulary_size,), (30,), sequence_id=2),
        row(prompt(executor), TABLE, sequence_id=3),
        row((-1,), (31,), sequence_id=4),
    ]
    nan, too_high, sound, negative = run(executor, *plans)
    assert nan.fault == "the hidden state is not finite"
    assert too_high.fault is not None and "is outside the vocabulary" in too_high.fault
    assert negative.fault is not None and "token -1 is outside" in negative.fault
    assert sound.fault is None
    assert sound.logits.tobytes() == expected.tobytes()
    assert stored(executor, TABLE, len(PROMPT)) == kept


@pytest.mark.parametrize("shape", [(192, 576), (1536, 576), (576, 1536), (513, 300), (7, 4099)])
def test_a_product_does_not_depend_on_where_its_vector_lies(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(3)
    weight = _aligned(shape)
    weight[...] = generator.standard_normal(shape)
    vector = generator.standard_normal(shape[1]).astype(np.float32)
    linear = Linear(weight)
    expected = linear(vector)
    for offset in range(16):
        elsewhere = np.zeros(shape[1] + 16, np.float32)[offset : offset + shape[1]]
        elsewhere[:] = vector
        assert linear(elsewhere).tobytes() == expected.tobytes()


_HASH_PRODUCTS = """
import hashlib, numpy as np
from quire.executors.reference import Linear
generator, found = np.random.default_rng(3), hashlib.sha256()
for shape in ((77, 9999), (4097, 1031), (1536, 576)):
    weight = generator.standard_normal(shape, np.float32)
    found.update(Linear(weight)(generator.standard_normal(shape[1], np.float32)).tobytes())
print(found.hexdigest())
"""


def test_a_product_does_not_depend_on_the_number_of_blas_threads() -> None:
    found = set()
    for threads in ("1", "2", "5"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", _HASH_PRODUCTS]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert len(found) == 1
