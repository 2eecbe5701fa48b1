"""A plan's rows packed into the integers that the kernels read, in one buffer.

    head rows [rows] | head slots [rows]
    BodyInput.fields [fields, tokens]; those of states last
    block tables of the first group, one after the other | of the second | ...

Of a windowed group's table only what the row sees is sent; TILE_TABLE is where the whole table
would begin, which may be before the buffer.

A graph is captured for a number of tokens, which fixes the offset of everything after the head.
The buffer is sent with one copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.plan import History, Sampling, SequencePlan, Want, check_fields
from quire.core.windows import NO_WINDOWS, Window, Windows
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.decoder import (
    BodyField,
    BodyInput,
    StateField,
    group_field,
    num_fields,
)
from quire.executors.cuda.planes import Array

Integers = npt.NDArray[np.int32]
_NO_TABLE: Integers = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the buffer."""

    max_rows: int
    num_groups: int = 1
    has_states: bool = False

    @property
    def num_fields(self) -> int:
        return num_fields(self.num_groups, has_states=self.has_states)

    def size(self, num_tokens: int, table_entries: int) -> int:
        return 2 * self.max_rows + self.num_fields * num_tokens + table_entries

    def head(self, buffer: Array) -> tuple[Array, Array]:
        """Rows and slots."""
        return buffer[: self.max_rows], buffer[self.max_rows : 2 * self.max_rows]

    def body(self, buffer: Array, num_tokens: int) -> BodyInput:
        start, end = 2 * self.max_rows, self.size(num_tokens, 0)
        return BodyInput(buffer[start:end].view(self.num_fields, num_tokens), buffer[end:])


class PlanColumns(NamedTuple):
    """Rows of a plan, by column: of each field of SequencePlan the values of all rows."""

    sequence_id: tuple[int, ...]
    start: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    follows: tuple[int | None, ...]
    block_table: tuple[tuple[int, ...], ...]
    want: tuple[Want, ...]
    sampling: tuple[Sampling | None, ...]
    completion_position: tuple[int, ...]
    history: tuple[History | None, ...]
    allowed: tuple[Any, ...]
    prompt_targets: tuple[tuple[int, ...], ...]
    other_tables: tuple[tuple[tuple[int, ...], ...], ...]
    states: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plans: Sequence[SequencePlan]) -> "PlanColumns":
        """Of one row at least."""
        return cls._make(zip(*plans, strict=True))


check_fields(SequencePlan, PlanColumns._fields)


class PackedRow(NamedTuple):
    """A sequence's tokens in the step: rows `first` to `last` of the body."""

    plan: SequencePlan
    first: int
    last: int
    source: int | None = None  # the slot among the samples of its pending token


class BodyRows(NamedTuple):
    """The same of all rows, by column: row i's tokens come right after those of row i - 1."""

    starts: Integers  # position of the first new token
    counts: Integers  # new tokens, the pending one included
    tokens: Sequence[tuple[int, ...]]  # known ones; row by row, or all together
    sources: Integers  # slot of the pending token; -1: none
    tables: Sequence["GroupTables"]  # of each group
    states: Integers | None = None  # [rows, (source, target)], where the model keeps any

    @classmethod
    def of(cls, rows: Sequence[PackedRow], windows: Windows) -> "BodyRows":
        plans, firsts, lasts, sources = zip(*rows, strict=True)
        starts = np.array([plan.start for plan in plans], np.int32)
        counts = np.array(lasts, np.int32) - np.array(firsts, np.int32) + 1
        columns = zip(*((plan.block_table, *plan.other_tables) for plan in plans), strict=True)
        ends = (-(-(starts + counts) // BLOCK_SIZE)).tolist()
        groups = []
        for window, tables in zip(windows, columns, strict=True):
            seen = first_blocks(window, starts)
            bounds = zip(tables, seen.tolist(), ends, strict=True)
            arrays = [np.array(table[first:end], np.int32) for table, first, end in bounds]
            lengths = np.fromiter(map(len, arrays), np.int32, len(arrays))
            groups.append(GroupTables(seen, arrays, lengths))
        return cls(
            starts,
            counts,
            [plan.tokens for plan in plans],
            np.array([-1 if source is None else source for source in sources], np.int32),
            groups,
            np.array([plan.states for plan in plans], np.int32) if plans[0].states else None,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def end(self) -> int:
        """One past the last position of any row."""
        return int((self.starts + self.counts).max())


class GroupTables(NamedTuple):
    """The block tables of one group, each from the first block that its row sees."""

    firsts: Integers  # those blocks' places in their tables
    tables: Sequence[Integers]
    lengths: Integers  # of the tables


def first_blocks(window: Window | None, starts: Integers) -> Integers:
    """The place in its table of the first block that a row sees which begins at a position."""
    if window is None:
        return np.zeros(len(starts), np.int32)
    if window.is_chunked:
        seen = starts // window.size * window.size
    else:
        seen = np.maximum(0, starts - window.size + 1)
    places: Integers = (seen // BLOCK_SIZE).astype(np.int32)
    return places


class _LastTables(NamedTuple):
    """The rows of a step, and what became of their tables."""

    sequence_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    firsts: Integers
    arrays: list[Integers]
    lengths: Integers


class TableArrays:
    """A group's block tables as arrays, each kept while its sequence has the same table (the same
    object: who plans a step never changes a table, but makes another) and sees as much of it."""

    def __init__(self, num_blocks: int, most: int) -> None:
        self._num_blocks = num_blocks
        self._most = most
        # By sequence: the table, its first block that is seen, and the blocks from there on.
        self._known: dict[int, tuple[tuple[int, ...], int, Integers]] = {}
        self._last: _LastTables | None = None

    def of(
        self,
        sequence_ids: tuple[int, ...],
        tables: tuple[tuple[int, ...], ...],
        firsts: Integers,
    ) -> GroupTables | None:
        """None: an entry of a table that a row may see is no block. Of the rows of the last step
        those alone are looked at that have another table since, or see less of it."""
        last = self._last
        changed: Sequence[int] = range(len(tables))
        if last is not None and last.sequence_ids == sequence_ids:
            changed = _differing(map(is_not, tables, last.tables), last.firsts != firsts)
            arrays, lengths = last.arrays.copy(), last.lengths.copy()
        else:
            arrays, lengths = [_NO_TABLE] * len(tables), np.empty(len(tables), np.int32)
        for row in changed:
            found = self._array(sequence_ids[row], tables[row], int(firsts[row]))
            if found is None:
                return None
            arrays[row] = found
            lengths[row] = len(found)
        self._last = _LastTables(sequence_ids, tables, firsts, arrays, lengths)
        return GroupTables(firsts, arrays, lengths)

    def _array(self, sequence_id: int, table: tuple[int, ...], first: int) -> Integers | None:
        known = self._known
        kept = known.get(sequence_id)
        if kept is None or kept[0] is not table or kept[1] != first:
            seen = table[first:]
            if not seen or min(seen) < 0 or max(seen) >= self._num_blocks:
                return None
            if len(known) >= self._most:
                known.clear()
            kept = known[sequence_id] = (table, first, np.array(seen, np.int32))
        return kept[2]


def _differing(are_others: Iterable[bool], see_others: npt.NDArray[np.bool_]) -> Sequence[int]:
    """The rows of which either is true."""
    either = np.fromiter(are_others, np.bool_, len(see_others)) | see_others
    found: list[int] = np.flatnonzero(either).tolist()
    return found


def pack_body(
    rows: Sequence[PackedRow],
    num_tokens: int,
    tile_tokens: int,
    windows: Windows = NO_WINDOWS,
    *,
    has_states: bool = False,
) -> Integers:
    """pack_rows() of rows one by one; of none: padding."""
    if not rows:
        return _padding(num_tokens, len(windows), has_states=has_states).ravel()
    return pack_rows(BodyRows.of(rows, windows), num_tokens, tile_tokens, windows)


def pack_rows(
    rows: BodyRows, num_tokens: int, tile_tokens: int, windows: Windows = NO_WINDOWS
) -> Integers:
    """The body's share of the buffer for these rows, padded to so many tokens; `windows` are those
    of the groups."""
    fields = _padding(num_tokens, len(windows), has_states=rows.states is not None)
    spans = _pack_spans(rows, fields, tile_tokens)
    if rows.states is not None:
        _pack_states(rows, rows.states, fields[-len(StateField) :])
    packed = [fields.ravel()]
    offset = 0
    for group, seen in enumerate(rows.tables):
        tables = _pack_tables(seen, spans, _places(fields, group), offset)
        packed.append(tables)
        offset += len(tables)
    return np.concatenate(packed)


def _padding(num_tokens: int, num_groups: int, *, has_states: bool) -> Integers:
    fields = np.zeros((num_fields(num_groups, has_states=has_states), num_tokens), np.int32)
    fields[BodyField.SOURCE] = -1
    if has_states:
        fields[len(fields) - len(StateField) + StateField.SEQUENCE] = -1
    for group in range(num_groups):
        fields[group_field(BodyField.SLOT, group)] = -1
    return fields


class _Spans(NamedTuple):
    """Of each row: the position of its first new token, how many there are, and its tiles."""

    starts: Integers
    counts: Integers
    num_tiles: Integers


def _pack_spans(rows: BodyRows, fields: Integers, tile_tokens: int) -> _Spans:
    """What all groups share, into the fields; without a loop over rows."""
    starts, counts = rows.starts, rows.counts
    ends = np.cumsum(counts, dtype=np.int32)
    firsts, total = ends - counts, int(ends[-1])
    is_pending = rows.sources >= 0
    _pack_tokens(rows.tokens, ends[is_pending] - 1, fields[BodyField.TOKEN, :total])
    fields[BodyField.SOURCE, ends - 1] = rows.sources
    fields[BodyField.POSITION, :total] = np.repeat(starts - firsts, counts) + np.arange(total)
    num_tiles = -(-counts // tile_tokens)
    num_all = int(num_tiles.sum())
    before = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)  # tiles of the rows before
    into = (np.arange(num_all) - before) * tile_tokens  # tokens of the row before the tile
    tile_starts = np.repeat(starts, num_tiles)
    fields[BodyField.TILE_ROW, :num_all] = np.repeat(firsts, num_tiles) + into
    fields[BodyField.TILE_COUNT, :num_all] = np.minimum(
        tile_tokens, np.repeat(counts, num_tiles) - into
    )
    fields[BodyField.TILE_POSITION, :num_all] = tile_starts + into
    fields[BodyField.TILE_START, :num_all] = tile_starts
    return _Spans(starts, counts, num_tiles)


def _pack_states(rows: BodyRows, states: Integers, fields: Integers) -> None:
    counts, num_rows = rows.counts, len(rows.counts)
    fields[StateField.SEQUENCE, : rows.num_tokens] = np.repeat(np.arange(num_rows), counts)
    fields[StateField.ROW, :num_rows] = np.cumsum(counts) - counts
    fields[StateField.COUNT, :num_rows] = counts
    fields[StateField.SOURCE, :num_rows] = states[:, 0]
    fields[StateField.TARGET, :num_rows] = states[:, 1]


def _pack_tokens(tokens: Sequence[tuple[int, ...]], pending: Integers, packed: Integers) -> None:
    """Known tokens, between those that are pending, which stay 0."""
    num_known = len(packed) - len(pending)
    if not num_known:
        return
    is_known = np.ones(len(packed), np.bool_)
    is_known[pending] = False
    packed[is_known] = np.fromiter(chain.from_iterable(tokens), np.int32, num_known)


# ---- the block tables of one group


class _Places(NamedTuple):
    """Rows of the fields: what a group's tables are looked up for, and what becomes of them."""

    positions: Integers
    slots: Integers
    tile_tables: Integers


def _places(fields: Integers, group: int) -> _Places:
    slots, tables = (group_field(x, group) for x in (BodyField.SLOT, BodyField.TILE_TABLE))
    return _Places(fields[BodyField.POSITION], fields[slots], fields[tables])


def _pack_tables(group: GroupTables, spans: _Spans, places: _Places, offset: int) -> Integers:
    """A group's tables, which go to `offset` of the tables; fills its places. Blocks that a row
    does not see are not sent."""
    ends = -(-(spans.starts + spans.counts) // BLOCK_SIZE)
    counts = ends - group.firsts
    used = group.tables
    if (counts != group.lengths).any():
        used = [table[:count] for table, count in zip(used, counts.tolist(), strict=True)]
    stops = np.cumsum(counts, dtype=np.int32)
    flat = np.concatenate(used)
    begins = stops - ends  # where each whole table would begin
    place = places.positions[: int(spans.counts.sum())]
    blocks = flat[np.repeat(begins, spans.counts) + place // BLOCK_SIZE]
    places.slots[: len(place)] = blocks * BLOCK_SIZE + place % BLOCK_SIZE
    places.tile_tables[: int(spans.num_tiles.sum())] = np.repeat(offset + begins, spans.num_tiles)
    return flat
