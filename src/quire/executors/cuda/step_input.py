"""A plan's rows packed into the integers that the kernels read, in one buffer.

    head rows [rows] | head slots [rows]
    BodyInput.fields [fields, tokens]
    block tables of the first group, one after the other | of the second | ...

Of a windowed group's table only what the row sees is sent; TILE_TABLE is where the whole table
would begin, which may be before the buffer.

A graph is captured for a number of tokens, which fixes the offset of everything after the head.
The buffer is sent with one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.plan import SequencePlan
from quire.core.windows import NO_WINDOWS, Window, Windows
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.decoder import BodyField, BodyInput, group_field, num_fields
from quire.executors.cuda.planes import Array

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the buffer."""

    max_rows: int
    num_groups: int = 1

    def size(self, num_tokens: int, table_entries: int) -> int:
        return 2 * self.max_rows + num_fields(self.num_groups) * num_tokens + table_entries

    def head(self, buffer: Array) -> tuple[Array, Array]:
        """Rows and slots."""
        return buffer[: self.max_rows], buffer[self.max_rows : 2 * self.max_rows]

    def body(self, buffer: Array, num_tokens: int) -> BodyInput:
        count = num_fields(self.num_groups)
        start, end = 2 * self.max_rows, self.size(num_tokens, 0)
        return BodyInput(buffer[start:end].view(count, num_tokens), buffer[end:])


class PackedRow(NamedTuple):
    """A sequence's tokens in the step: rows `first` to `last` of the body."""

    plan: SequencePlan
    first: int
    last: int
    source: int | None = None  # the slot among the samples of its pending token


def pack_body(
    rows: Sequence[PackedRow], num_tokens: int, tile_tokens: int, windows: Windows = NO_WINDOWS
) -> Integers:
    """The body's share of the buffer for these rows, padded to so many tokens; `windows` are those
    of the groups."""
    fields = _padding(num_tokens, len(windows))
    if not rows:
        return fields.ravel()
    is_single = rows[-1].last == len(rows) - 1  # one new token each
    spans = [] if is_single else _pack_chunks(rows, fields, tile_tokens)
    if is_single:
        _pack_single(rows, fields)
    packed = [fields.ravel()]
    offset = 0
    for group, window in enumerate(windows):
        places = _places(fields, group)
        if is_single:
            tables = _single_tables(_tables(rows, group), places, window, offset)
        else:
            tables = _chunk_tables(rows, _tables(rows, group), spans, places, window, offset)
        packed.append(tables)
        offset += len(tables)
    return np.concatenate(packed)


def _padding(num_tokens: int, num_groups: int) -> Integers:
    fields = np.zeros((num_fields(num_groups), num_tokens), np.int32)
    fields[BodyField.SOURCE] = -1
    for group in range(num_groups):
        fields[group_field(BodyField.SLOT, group)] = -1
    return fields


def _pack_chunks(rows: Sequence[PackedRow], fields: Integers, tile_tokens: int) -> list[slice]:
    """What all groups share, into the fields; the tiles of each row."""
    spans = []
    tile = 0
    for row in rows:
        plan = row.plan
        count = plan.num_new_tokens
        fields[BodyField.TOKEN, row.first : row.first + len(plan.tokens)] = plan.tokens
        if row.source is not None:
            fields[BodyField.SOURCE, row.last] = row.source
        fields[BodyField.POSITION, row.first : row.first + count] = np.arange(plan.start, plan.end)
        starts = np.arange(0, count, tile_tokens, dtype=np.int32)
        tiles = slice(tile, tile + len(starts))
        fields[BodyField.TILE_ROW, tiles] = row.first + starts
        fields[BodyField.TILE_COUNT, tiles] = np.minimum(tile_tokens, count - starts)
        fields[BodyField.TILE_POSITION, tiles] = plan.start + starts
        fields[BodyField.TILE_START, tiles] = plan.start
        spans.append(tiles)
        tile += len(starts)
    return spans


def _pack_single(rows: Sequence[PackedRow], fields: Integers) -> None:
    """The same where every sequence has one new token, without a loop over them."""
    count = len(rows)
    starts = np.fromiter((row.plan.start for row in rows), np.int32, count)
    fields[BodyField.TOKEN, :count] = [row.plan.tokens[0] if row.plan.tokens else 0 for row in rows]
    fields[BodyField.SOURCE, :count] = [-1 if row.source is None else row.source for row in rows]
    fields[BodyField.POSITION, :count] = starts
    fields[BodyField.TILE_ROW, :count] = np.arange(count)
    fields[BodyField.TILE_COUNT, :count] = 1
    fields[BodyField.TILE_POSITION, :count] = starts
    fields[BodyField.TILE_START, :count] = starts


# ---- the block tables of one group


class _Places(NamedTuple):
    """Rows of the fields: what a group's tables are looked up for, and what becomes of them."""

    positions: Integers
    slots: Integers
    tile_tables: Integers


def _places(fields: Integers, group: int) -> _Places:
    slots, tables = (group_field(x, group) for x in (BodyField.SLOT, BodyField.TILE_TABLE))
    return _Places(fields[BodyField.POSITION], fields[slots], fields[tables])


def _tables(rows: Sequence[PackedRow], group: int) -> list[tuple[int, ...]]:
    if not group:
        return [row.plan.block_table for row in rows]
    return [row.plan.other_tables[group - 1] for row in rows]


def _first_block(window: Window | None, start: int) -> int:
    """The first block that a row sees which begins at that position: none before it is sent."""
    return 0 if window is None else window.first_seen(start) // BLOCK_SIZE


def _chunk_tables(
    rows: Sequence[PackedRow],
    tables: Sequence[tuple[int, ...]],
    spans: Sequence[slice],
    places: _Places,
    window: Window | None,
    offset: int,
) -> Integers:
    """A group's tables, which go to `offset` of the tables; fills its places."""
    sent = []
    for row, table, tiles in zip(rows, tables, spans, strict=True):
        plan = row.plan
        first = _first_block(window, plan.start)
        blocks = np.array(table[first : -(-plan.end // BLOCK_SIZE)], dtype=np.int32)
        span = slice(row.first, row.last + 1)
        place = places.positions[span]
        places.slots[span] = blocks[place // BLOCK_SIZE - first] * BLOCK_SIZE + place % BLOCK_SIZE
        places.tile_tables[tiles] = offset - first
        sent.append(blocks)
        offset += len(blocks)
    return np.concatenate(sent)


def _single_tables(
    tables: Sequence[tuple[int, ...]], places: _Places, window: Window | None, offset: int
) -> Integers:
    """The same where every sequence has one new token, without a loop over blocks."""
    count = len(tables)
    starts = places.positions[:count]
    ends = starts // BLOCK_SIZE + 1
    firsts = np.zeros(count, np.int32)
    if window is not None:
        firsts[:] = [_first_block(window, start) for start in starts.tolist()]
    bounds = zip(tables, firsts.tolist(), ends.tolist(), strict=True)
    used = [table[first:end] for table, first, end in bounds]
    stops = np.cumsum(ends - firsts, dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(used), np.int32, int(stops[-1]))
    places.slots[:count] = flat[stops - 1] * BLOCK_SIZE + starts % BLOCK_SIZE
    places.tile_tables[:count] = offset + stops - ends
    return flat
