"""StepInput: a plan's rows packed into the integers that the kernels read, in one buffer.

    head rows [rows] | head slots [rows]
    tokens | sources | positions | slots [tokens each]
    tiles' rows | counts | positions | tables | starts [tokens each]
    block tables, one after the other

A graph is captured for a number of tokens, so everything behind the head lies where that number
puts it. The buffer is sent with one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.plan import SequencePlan
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.decoder import BodyInput
from quire.executors.cuda.planes import Array

Integers = npt.NDArray[np.int32]

_FIELDS = 9  # a token


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in the buffer."""

    max_rows: int

    def size(self, num_tokens: int, table_entries: int) -> int:
        return 2 * self.max_rows + _FIELDS * num_tokens + table_entries

    def head(self, buffer: Array) -> tuple[Array, Array]:
        """Rows and slots."""
        return buffer[: self.max_rows], buffer[self.max_rows : 2 * self.max_rows]

    def body(self, buffer: Array, num_tokens: int) -> BodyInput:
        start = 2 * self.max_rows
        fields = buffer[start : start + _FIELDS * num_tokens].view(_FIELDS, num_tokens)
        return BodyInput(fields, buffer[start + _FIELDS * num_tokens :])


class PackedRow(NamedTuple):
    """A sequence's place in the step: its tokens are rows first to last."""

    plan: SequencePlan
    first: int
    last: int
    source: int | None = None  # where its pending token is, among the samples


def pack_body(rows: Sequence[PackedRow], num_tokens: int, tile_tokens: int) -> Integers:
    """The body's part of the buffer for these rows, padded to so many tokens."""
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
        fields[0, row.first : row.first + len(plan.tokens)] = plan.tokens
        if row.source is not None:
            fields[1, row.last] = row.source
        places = np.arange(plan.start, plan.end, dtype=np.int32)
        fields[2, span] = places
        blocks = np.array(used, dtype=np.int32)
        fields[3, span] = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        starts = np.arange(0, count, tile_tokens, dtype=np.int32)
        tiles = slice(tile, tile + len(starts))
        fields[4, tiles] = row.first + starts
        fields[5, tiles] = np.minimum(tile_tokens, count - starts)
        fields[6, tiles] = plan.start + starts
        fields[7, tiles] = offset
        fields[8, tiles] = plan.start
        tile += len(starts)
        tables.append(used)
        offset += len(used)
    flat = np.fromiter(chain.from_iterable(tables), np.int32, offset)
    return np.concatenate([fields.ravel(), flat])


def _padding(num_tokens: int) -> Integers:
    fields = np.zeros((_FIELDS, num_tokens), np.int32)
    fields[1] = -1
    fields[3] = -1
    return fields


def _pack_single(rows: Sequence[PackedRow], num_tokens: int) -> Integers:
    """The same where every sequence has one new token, without a look at each."""
    count = len(rows)
    fields = _padding(num_tokens)
    starts = np.fromiter((row.plan.start for row in rows), np.int32, count)
    tables = [row.plan.block_table[: row.plan.start // BLOCK_SIZE + 1] for row in rows]
    lengths = np.fromiter(map(len, tables), np.int32, count)
    flat = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    ends = np.cumsum(lengths, dtype=np.int32)
    fields[0, :count] = [row.plan.tokens[0] if row.plan.tokens else 0 for row in rows]
    fields[1, :count] = [-1 if row.source is None else row.source for row in rows]
    fields[2, :count] = starts
    fields[3, :count] = flat[ends - 1] * BLOCK_SIZE + starts % BLOCK_SIZE
    fields[4, :count] = np.arange(count)
    fields[5, :count] = 1
    fields[6, :count] = starts
    fields[7, :count] = ends - lengths
    fields[8, :count] = starts
    return np.concatenate([fields.ravel(), flat])
