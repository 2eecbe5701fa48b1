"""ForwardRows: plain forward passes over rows of tokens, with keys and values kept between calls.

The rows take their blocks from the engine's own cache, so that the two never write the same one.
They offer nothing to prefix reuse and take nothing from it.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ExecutorError, QuireError, RequestError, RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, Want
from quire.executors.base import Executor
from quire.kvcache import BlockTable, KVCache

Logits = npt.NDArray[np.float32]  # [tokens, vocabulary]


@dataclass(slots=True)
class _Row:
    """A row's blocks, and how many of its tokens they hold."""

    table: BlockTable
    length: int = 0


class _Chunk(NamedTuple):
    """Tokens of one row that go into one step."""

    row: int
    start: int
    tokens: tuple[int, ...]


class ForwardRows:
    def __init__(
        self, executor: Executor, cache: KVCache, *, max_batch_size: int, max_step_tokens: int
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._rows: dict[int, _Row] = {}
        self._step_ids = count(-1, -1)  # apart from the engine's

    @property
    def num_blocks(self) -> int:
        """Blocks that the rows hold."""
        return sum(len(row.table.blocks) for row in self._rows.values())

    def run(self, rows: Any, start_positions: Any = None) -> list[Logits]:
        """The logits after every token of every row; nothing changes where a row is refused."""
        chunks = self._checked(rows, start_positions)
        for chunk in chunks:
            self._make_room(chunk)
        try:
            logits = self._compute(chunks)
        except BaseException:
            for chunk in chunks:  # a row counts as far as it is known to be sound
                self._rows[chunk.row].length = chunk.start
            raise
        for chunk in chunks:
            self._rows[chunk.row].length = chunk.start + len(chunk.tokens)
        return logits

    def clear(self, row: int | None = None) -> None:
        """Forget a row, or all of them, and give their blocks back."""
        for index in list(self._rows) if row is None else [_integer(row, "row")]:
            kept = self._rows.pop(index, None)
            if kept is not None:
                self._cache.free(kept.table)

    # ---- before anything changes

    def _checked(self, rows: Any, start_positions: Any) -> list[_Chunk]:
        token_rows = [_tokens(row, f"rows[{n}]") for n, row in enumerate(_items(rows, "rows"))]
        starts = [0] * len(token_rows)
        if start_positions is not None:
            given = enumerate(_items(start_positions, "start_positions"))
            starts = [_integer(start, f"start_positions[{n}]") for n, start in given]
        if len(starts) != len(token_rows):
            raise RequestError(
                f"there are {len(token_rows)} rows but {len(starts)} start_positions",
                param="start_positions",
            )
        chunks = [_Chunk(n, *pair) for n, pair in enumerate(zip(starts, token_rows, strict=True))]
        for chunk in chunks:
            self._check(chunk)
        self._check_blocks(chunks)
        return chunks

    def _check(self, chunk: _Chunk) -> None:
        capacity = self._executor.capacity
        for offset, token in enumerate(chunk.tokens):
            if not 0 <= token < capacity.vocabulary_size:
                raise RequestError(
                    f"rows[{chunk.row}][{offset}] is {token}; the vocabulary has 0 to "
                    f"{capacity.vocabulary_size - 1}",
                    param="rows",
                )
        length = self._rows[chunk.row].length if chunk.row in self._rows else 0
        if not 0 <= chunk.start <= length:
            raise RequestError(
                f"start_positions[{chunk.row}] is {chunk.start}; the row has {length} tokens so "
                "far, and a start is at most that",
                param="start_positions",
            )
        end = chunk.start + len(chunk.tokens)
        if end > capacity.max_context:
            raise RequestError(
                f"rows[{chunk.row}] would come to {end} tokens; the context holds "
                f"{capacity.max_context}",
                param="rows",
            )

    def _check_blocks(self, chunks: Sequence[_Chunk]) -> None:
        given = {chunk.row for chunk in chunks}
        kept = sum(len(row.table.blocks) for n, row in self._rows.items() if n not in given)
        needed = sum(self._cache.blocks_for(chunk.start + len(chunk.tokens)) for chunk in chunks)
        num_blocks = self._cache.pool.num_blocks
        if needed + kept > num_blocks:
            raise RequestError(
                f"the rows need {needed} blocks of the KV cache, and rows of earlier calls hold "
                f"{kept} of its {num_blocks}: clear() rows, give fewer, or give kv_memory more",
                param="rows",
            )

    # ---- computing

    def _make_room(self, chunk: _Chunk) -> None:
        """Give the row blocks for its new tokens and take back those past its start."""
        row = self._rows.setdefault(chunk.row, _Row(self._cache.new_table(None)))
        whole = row.table
        row.table = self._cache.fork(whole, chunk.start)
        self._cache.free(whole)
        row.length = chunk.start
        copies = self._cache.extend(row.table, chunk.start, chunk.start + len(chunk.tokens))
        assert copies == [], "rows share no blocks, and there are enough"

    def _compute(self, chunks: Sequence[_Chunk]) -> list[Logits]:
        vocabulary = self._executor.capacity.vocabulary_size
        pieces: list[list[Logits]] = [[np.empty((0, vocabulary), np.float32)] for _ in chunks]
        for step in self._steps(chunks):
            plan = StepPlan(next(self._step_ids), tuple(map(self._plan, step)))
            for chunk, result in zip(step, self._execute(plan), strict=True):
                if result.fault is not None:
                    raise RowFaultError(f"rows[{chunk.row}]: {result.fault}")
                pieces[chunk.row].append(np.asarray(result.logits, np.float32))
        return [np.concatenate(of_row) for of_row in pieces]

    def _steps(self, chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
        """The same tokens in steps that an executor takes."""
        step: list[_Chunk] = []
        budget = self._max_step_tokens
        for row, start, tokens in chunks:
            done = 0
            while done < len(tokens):
                taken = tokens[done : done + budget]
                step.append(_Chunk(row, start + done, taken))
                done += len(taken)
                budget -= len(taken)
                if not budget or len(step) == self._max_batch_size:
                    yield step
                    step, budget = [], self._max_step_tokens
        if step:
            yield step

    def _plan(self, chunk: _Chunk) -> SequencePlan:
        table = self._rows[chunk.row].table.ids
        return SequencePlan(chunk.row, chunk.start, chunk.tokens, None, table, Want.LOGITS)

    def _execute(self, plan: StepPlan) -> tuple[SequenceResult, ...]:
        try:
            return self._executor.collect(self._executor.submit(plan)).sequences
        except QuireError:
            raise
        except Exception as error:
            raise ExecutorError(f"{type(error).__name__}: {error}") from error


def _items(given: Any, name: str) -> list[Any]:
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list | tuple):
        raise RequestError(f"{name} must be a list, got {given!r:.100}", param=_param(name))
    return list(given)


def _tokens(row: Any, name: str) -> tuple[int, ...]:
    return tuple(_integer(t, f"{name}[{n}]") for n, t in enumerate(_items(row, name)))


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name} must be an integer, got {value!r:.100}", param=_param(name))
    return operator.index(value)


def _param(name: str) -> str:
    """The parameter of an item such as rows[3][0]."""
    return name.partition("[")[0]
