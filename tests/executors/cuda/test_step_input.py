"""What the kernels read about a step: every token's place, padding that touches nothing."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.executors.reference.plans import row  # noqa: E402

from quire.core.plan import NO_BLOCK  # noqa: E402
from quire.core.windows import Window, Windows  # noqa: E402
from quire.executors.cuda.graphs import sizes_up_to  # noqa: E402
from quire.executors.cuda.step_input import (  # noqa: E402
    Layout,
    PackedRow,
    TableArrays,
    pack_body,
)


def test_a_chunk_is_cut_into_tiles_of_its_sequence() -> None:
    plan = row(range(10, 17), (5, 9), start=12)  # positions 12 to 18
    packed = pack_body([PackedRow(plan, 0, 6)], num_tokens=8, tile_tokens=4)
    fields, tables = packed[:72].reshape(9, 8), packed[72:]
    assert fields[0, :7].tolist() == list(range(10, 17))
    assert fields[2, :7].tolist() == list(range(12, 19))
    assert fields[3].tolist() == [92, 93, 94, 95, 144, 145, 146, -1]  # block 5, then block 9
    assert fields[4:, :3].tolist() == [[0, 4, 0], [4, 3, 0], [12, 16, 0], [0] * 3, [12, 12, 0]]
    assert tables.tolist() == [5, 9]


def test_padding_is_written_nowhere_and_attends_to_nothing() -> None:
    packed = pack_body([], num_tokens=4, tile_tokens=4)
    fields = packed.reshape(9, 4)
    assert (fields[1] == -1).all() and (fields[3] == -1).all() and not fields[5].any()


@pytest.mark.parametrize("windows", [(None,), (None, Window(9), Window(9)), (Window(9),)])
def test_one_token_each_packs_as_the_general_way_does(windows: Windows) -> None:
    others = len(windows) - 1
    plans = [
        row((), (3, 1), start=16, follows=1, other_tables=((8, 9), (8, 7))[:others]),
        row((8,), (2,), start=15, other_tables=((7,), (1,))[:others]),
        row((9,), (6, 4, 5), start=33, other_tables=((NO_BLOCK, 11, 13), (-1, 2, 3))[:others]),
    ]
    rows = [PackedRow(plan, at, at, None if at else 7) for at, plan in enumerate(plans)]
    longer = row((1, 2), (0,), other_tables=((5,), (6,))[:others])
    general = pack_body([*rows, PackedRow(longer, 3, 4)], 5, 1, windows)
    single = pack_body(rows, 5, 1, windows)
    found, expected = (packed_groups(packed, 5, windows) for packed in (single, general))
    for own, other in zip(found, expected, strict=True):
        assert own[:3] == other[:3]
        assert len(own) == 3 and len(other) == 5


def packed_groups(packed: Any, num_tokens: int, windows: Windows) -> list[list[tuple[Any, ...]]]:
    """Of each group, of each tile: fields without the groups', slot, and what it sees."""
    size = (7 + 2 * len(windows)) * num_tokens
    fields, tables = packed[:size].reshape(-1, num_tokens), packed[size:]
    shared = [0, 1, 2, 4, 5, 6, 8]
    groups: list[list[tuple[Any, ...]]] = []
    for group, window in enumerate(windows):
        slots, starts = fields[[3, 7]] if not group else fields[[7 + 2 * group, 8 + 2 * group]]
        groups.append([])
        for tile in range(int((fields[5] > 0).sum())):
            position = int(fields[6, tile])
            first = 0 if window is None else window.first_seen(position) // 16
            seen = [int(tables[starts[tile] + n]) for n in range(first, position // 16 + 1)]
            groups[-1].append((fields[shared, tile].tolist(), int(slots[tile]), seen))
    return groups


def test_of_a_windowed_group_only_what_a_row_sees_is_sent() -> None:
    plan = row((7, 8), (0, 1, 2), start=40, other_tables=((NO_BLOCK, NO_BLOCK, 5),))
    windows = (None, Window(9))  # position 40 sees 32 to 40
    packed = pack_body([PackedRow(plan, 0, 1)], 2, 1, windows)
    fields, tables = packed[:22].reshape(11, 2), packed[22:]
    assert tables.tolist() == [0, 1, 2, 5]
    assert fields[[3, 7]].tolist() == [[40, 41], [0, 0]]
    assert fields[9:].tolist() == [[88, 89], [1, 1]]  # block 5; entry 2 of its table is at 3


def test_a_layout_gives_back_what_was_packed() -> None:
    layout = Layout(max_rows=2)
    packed = pack_body([PackedRow(row((8,), (2,), start=15), 0, 0)], 1, 1)
    buffer = torch.from_numpy(np.concatenate([[0, 0], [4, -1], packed]).astype(np.int32))
    assert len(buffer) == layout.size(1, 1)
    given = layout.body(buffer, 1)
    assert given.fields[:4, 0].tolist() == [8, -1, 15, 47]  # token, source, position, slot
    assert given.tables.tolist() == [2]
    assert layout.head(buffer)[1].tolist() == [4, -1]


@pytest.mark.parametrize("largest", [1, 3, 64, 256, 2048, 5000])
def test_no_size_is_much_larger_than_the_one_before(largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    for smaller, larger in pairwise(sizes):
        assert larger <= max(2 * smaller, smaller + 64) or larger <= 1.6 * smaller


def test_chunks_and_single_tokens_pack_together_as_each_does_alone() -> None:
    plans = [
        row((4,), (3, 1), start=17),
        row(range(20), (6, 4, 5), start=10),
        row((), (2,), start=9, follows=1),
        row(range(30, 39), (7, 8), start=8, follows=1),
        row(range(5), (9,)),
    ]
    counts = [plan.num_new_tokens for plan in plans]
    firsts = [sum(counts[:at]) for at in range(len(plans))]
    sources = [None if plan.follows is None else 40 + at for at, plan in enumerate(plans)]
    rows = [
        PackedRow(plan, first, first + count - 1, source)
        for plan, first, count, source in zip(plans, firsts, counts, sources, strict=True)
    ]
    size, tile_tokens = sum(counts) + 3, 4
    packed = pack_body(rows, size, tile_tokens)
    fields, tables = packed[: 9 * size].reshape(9, size), packed[9 * size :].tolist()
    tile = entries = 0
    for plan, first, count, source in zip(plans, firsts, counts, sources, strict=True):
        alone = pack_body([PackedRow(plan, 0, count - 1, source)], count, tile_tokens)
        own, table = alone[: 9 * count].reshape(9, count), alone[9 * count :].tolist()
        assert (fields[:4, first : first + count] == own[:4]).all()
        num_tiles = -(-count // tile_tokens)
        found = fields[4:, tile : tile + num_tiles] - [[first], [0], [0], [entries], [0]]
        assert (found == own[4:, :num_tiles]).all()
        assert tables[entries : entries + len(table)] == table
        tile += num_tiles
        entries += len(table)
    assert not fields[5, tile:].any(), "tiles beyond are of no token"
    assert (fields[3, sum(counts) :] == -1).all(), "padding is written nowhere"


@pytest.mark.parametrize("seed", range(5))
def test_tables_that_are_kept_from_step_to_step_are_those_of_a_step_alone(seed: int) -> None:
    rng = random.Random(seed)
    kept = TableArrays(64, 12)
    tables: dict[int, tuple[int, ...]] = {name: (name, name + 8) for name in range(8)}
    ids = tuple(tables)
    for _ in range(40):
        if rng.random() < 0.2:
            ids = tuple(rng.sample(sorted(tables), rng.randint(1, 8)))
        if rng.random() < 0.5:
            name = rng.choice(ids)
            tables[name] = (*tables[name][-3:], rng.randrange(65))  # 64 is no block
        firsts = np.array([rng.random() < 0.1 for _ in ids], np.int32)
        given = ids, tuple([tables[name] for name in ids]), firsts
        found, alone = kept.of(*given), TableArrays(64, 12).of(*given)
        assert (found is None) == (alone is None)
        if found is not None and alone is not None:
            assert [table.tolist() for table in found.tables] == [t.tolist() for t in alone.tables]
            assert found.lengths.tolist() == alone.lengths.tolist() == list(map(len, alone.tables))
