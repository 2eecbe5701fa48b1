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
    spans = _pack_rows(rows, fields, tile_tokens)
    packed = [fields.ravel()]
    offset = 0
    for group, window in enumerate(windows):
        tables = _pack_tables(_tables(rows, group), spans, _places(fields, group), window, offset)
        packed.append(tables)
        offset += len(tables)
    return np.concatenate(packed)


def _padding(num_tokens: int, num_groups: int) -> Integers:
    fields = np.zeros((num_fields(num_groups), num_tokens), np.int32)
    fields[BodyField.SOURCE] = -1
    for group in range(num_groups):
        fields[group_field(BodyField.SLOT, group)] = -1
    return fields


class _Spans(NamedTuple):
    """Of each row: the position of its first new token, how many there are, and its tiles."""

    starts: Integers
    counts: Integers
    num_tiles: Integers


def _pack_rows(rows: Sequence[PackedRow], fields: Integers, tile_tokens: int) -> _Spans:
    """What all groups share, into the fields; without a loop over rows but to read them."""
    plans, first_rows, last_rows, sources = zip(*rows, strict=True)
    firsts, lasts = np.array(first_rows, np.int32), np.array(last_rows, np.int32)
    starts = np.array([plan.start for plan in plans], np.int32)
    counts = lasts - firsts + 1
    total = last_rows[-1] + 1
    known = zip(plans, sources, strict=True)
    tokens = [plan.tokens if source is None else (*plan.tokens, 0) for plan, source in known]
    fields[BodyField.TOKEN, :total] = np.fromiter(chain.from_iterable(tokens), np.int32, total)
    fields[BodyField.SOURCE, lasts] = [-1 if source is None else source for source in sources]
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


def _pack_tables(
    tables: Sequence[tuple[int, ...]],
    spans: _Spans,
    places: _Places,
    window: Window | None,
    offset: int,
) -> Integers:
    """A group's tables, which go to `offset` of the tables; fills its places."""
    ends = -(-(spans.starts + spans.counts) // BLOCK_SIZE)
    firsts = np.zeros(len(tables), np.int32)
    if window is not None:  # blocks that the row does not see are not sent
        seen = [window.first_seen(start) for start in spans.starts.tolist()]
        firsts[:] = np.array(seen, np.int32) // BLOCK_SIZE
    bounds = zip(tables, firsts.tolist(), ends.tolist(), strict=True)
    used = [table[first:end] for table, first, end in bounds]
    stops = np.cumsum(ends - firsts, dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(used), np.int32, int(stops[-1]))
    begins = stops - ends  # where each whole table would begin
    place = places.positions[: int(spans.counts.sum())]
    blocks = flat[np.repeat(begins, spans.counts) + place // BLOCK_SIZE]
    places.slots[: len(place)] = blocks * BLOCK_SIZE + place % BLOCK_SIZE
    places.tile_tables[: int(spans.num_tiles.sum())] = np.repeat(offset + begins, spans.num_tiles)
    return flat
