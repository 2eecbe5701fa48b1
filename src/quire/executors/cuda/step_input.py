"""A plan's rows packed into the integers that the kernels read, in one buffer.

    head rows [rows] | head slots [rows]
    BodyInput.fields [BodyField, tokens]
    block tables, one after the other

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
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.decoder import BodyField, BodyInput
from quire.executors.cuda.planes import Array

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the buffer."""

    max_rows: int

    def size(self, num_tokens: int, table_entries: int) -> int:
        return 2 * self.max_rows + len(BodyField) * num_tokens + table_entries

    def head(self, buffer: Array) -> tuple[Array, Array]:
        """Rows and slots."""
        return buffer[: self.max_rows], buffer[self.max_rows : 2 * self.max_rows]

    def body(self, buffer: Array, num_tokens: int) -> BodyInput:
        start = 2 * self.max_rows
        fields = buffer[start : start + len(BodyField) * num_tokens].view(
            len(BodyField), num_tokens
        )
        return BodyInput(fields, buffer[start + len(BodyField) * num_tokens :])


class PackedRow(NamedTuple):
    """A sequence's tokens in the step: rows `first` to `last` of the body."""

    plan: SequencePlan
    first: int
    last: int
    source: int | None = None  # the slot among the samples of its pending token


def pack_body(rows: Sequence[PackedRow], num_tokens: int, tile_tokens: int) -> Integers:
    """The body's share of the buffer for these rows, padded to so many tokens."""
    if not rows or rows[-1].last == len(rows) - 1:  # one new token each
        return _pack_single(rows, num_tokens)
    fields = _padding(num_tokens)
    tables: list[tuple[int, ...]] = []
    offset = tile = 0
    for row in rows:
        plan = row.plan
        count = plan.num_new_tokens
        span = slice(row.first, row.first + count)
        used = plan.block_table[: -(-plan.end // BLOCK_SIZE)]
        fields[BodyField.TOKEN, row.first : row.first + len(plan.tokens)] = plan.tokens
        if row.source is not None:
            fields[BodyField.SOURCE, row.last] = row.source
        positions = np.arange(plan.start, plan.end, dtype=np.int32)
        fields[BodyField.POSITION, span] = positions
        blocks = np.array(used, dtype=np.int32)
        fields[BodyField.SLOT, span] = (
            blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        starts = np.arange(0, count, tile_tokens, dtype=np.int32)
        tiles = slice(tile, tile + len(starts))
        fields[BodyField.TILE_ROW, tiles] = row.first + starts
        fields[BodyField.TILE_COUNT, tiles] = np.minimum(tile_tokens, count - starts)
        fields[BodyField.TILE_POSITION, tiles] = plan.start + starts
        fields[BodyField.TILE_TABLE, tiles] = offset
        fields[BodyField.TILE_START, tiles] = plan.start
        tile += len(starts)
        tables.append(used)
        offset += len(used)
    flat = np.fromiter(chain.from_iterable(tables), np.int32, offset)
    return np.concatenate([fields.ravel(), flat])


def _padding(num_tokens: int) -> Integers:
    fields = np.zeros((len(BodyField), num_tokens), np.int32)
    fields[BodyField.SOURCE] = -1
    fields[BodyField.SLOT] = -1
    return fields


def _pack_single(rows: Sequence[PackedRow], num_tokens: int) -> Integers:
    """The same where every sequence has one new token, without a loop over them."""
    count = len(rows)
    fields = _padding(num_tokens)
    starts = np.fromiter((row.plan.start for row in rows), np.int32, count)
    tables = [row.plan.block_table[: row.plan.start // BLOCK_SIZE + 1] for row in rows]
    lengths = np.fromiter(map(len, tables), np.int32, count)
    flat = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    ends = np.cumsum(lengths, dtype=np.int32)
    fields[BodyField.TOKEN, :count] = [row.plan.tokens[0] if row.plan.tokens else 0 for row in rows]
    fields[BodyField.SOURCE, :count] = [-1 if row.source is None else row.source for row in rows]
    fields[BodyField.POSITION, :count] = starts
    fields[BodyField.SLOT, :count] = flat[ends - 1] * BLOCK_SIZE + starts % BLOCK_SIZE
    fields[BodyField.TILE_ROW, :count] = np.arange(count)
    fields[BodyField.TILE_COUNT, :count] = 1
    fields[BodyField.TILE_POSITION, :count] = starts
    fields[BodyField.TILE_TABLE, :count] = ends - lengths
    fields[BodyField.TILE_START, :count] = starts
    return np.concatenate([fields.ravel(), flat])
