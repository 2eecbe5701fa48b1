"""What the kernels read about a step: every token's place, padding that touches nothing."""

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.executors.reference.plans import row  # noqa: E402

from quire.executors.cuda.graphs import sizes_up_to  # noqa: E402
from quire.executors.cuda.step_input import (  # noqa: E402
    Layout,
    PackedRow,
    _pack_single,
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


def test_one_token_each_packs_as_the_general_way_does() -> None:
    rows = [
        PackedRow(row((), (3, 1), start=16, follows=1), 0, 0, 7),
        PackedRow(row((8,), (2,), start=15), 1, 1),
        PackedRow(row((9,), (6, 4, 5), start=33), 2, 2),
    ]
    longer = [*rows, PackedRow(row((1, 2), (0,)), 3, 4)]
    general = pack_body(longer, 5, 1)
    single = _pack_single(rows, 5)
    np.testing.assert_array_equal(
        single[:45].reshape(9, 5)[:, :3], general[:45].reshape(9, 5)[:, :3]
    )
    assert single[45:].tolist() == general[45:].tolist()[:-1]


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
