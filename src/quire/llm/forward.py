"""What LLM computes beside completions: forward passes over rows of tokens; scores and embeddings
of texts.

ForwardRows keeps keys and values between calls. Its rows take their blocks from the engine's own
cache, so that the two never write the same one. They offer nothing to prefix reuse and take nothing
from it. Blocks that they keep are reserved: requests must fit into the others. Where layers keep
states, a row keeps the state after its last token alone: it goes on there or begins anew.

A TextScore comes from the log-probabilities of a text's tokens. An embedding is the hidden state
after the last token and the final norm, scaled to length 1: fit to compare texts roughly, and no
match for a model trained to embed.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ExecutorError, QuireError, RequestError, RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, StepPlan, Want
from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.stats import Health
from quire.kvcache import BlockTable
from quire.llm.prompts import Prompt, listed_prompts

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

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ForwardRows:
    """The rows of one engine's cache; used between two of its steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._cache = engine.cache
        capacity = engine.executor.capacity
        self._max_batch_size = engine.config.batch_size(capacity)
        self._max_step_tokens = min(engine.config.max_step_tokens, capacity.max_step_tokens)
        self._rows: dict[int, _Row] = {}
        self._step_ids = count(-1, -1)  # apart from the engine's

    def run(self, rows: Any, start_positions: Any = None, *, split: bool = False) -> list[Logits]:
        """The logits after every token of every row; nothing changes where a row is refused.

        `split`: more rows than a batch holds run in several passes, and are no error.
        """
        self._engine.settle()
        if self._engine.health is Health.STUCK:  # a step would never come back
            raise ExecutorError(f"{self._engine.health_report.cause}; restart the process")
        given = _items(rows, "rows")
        chunks = self._checked(given, start_positions, split=split)
        self._cut_rows(chunks)
        try:
            logits = self._compute(chunks)
        except BaseException:
            for chunk in chunks:
                self._give_up(chunk)
            raise
        finally:
            self._reserve()
        for chunk in chunks:
            self._rows[chunk.row].length = chunk.end
        none = np.empty((0, self._executor.capacity.vocabulary_size), np.float32)
        return [logits.get(number, none) for number in range(len(given))]

    def clear(self, row: int | None = None) -> None:
        """Forget a row, or all of them, and give their blocks back."""
        if row is not None and not self._has_place(_integer(row, "row")):
            raise RequestError(
                f"row is {row}; a batch holds rows 0 to {self._max_batch_size - 1}", param="row"
            )
        for index in list(self._rows) if row is None else [operator.index(row)]:
            kept = self._rows.pop(index, None)
            if kept is not None:
                self._cache.free(kept.table)
        self._reserve()

    def _has_place(self, row: int) -> bool:
        """Whether a row can have that number; split passes keep rows beyond a batch."""
        return 0 <= row < self._max_batch_size or row in self._rows

    # ---- before anything changes

    def _checked(self, rows: list[Any], start_positions: Any, *, split: bool) -> list[_Chunk]:
        """The rows' new tokens, without those of rows that are None."""
        starts = _starts(start_positions, len(rows))
        chunks = [
            _Chunk(n, starts[n], _tokens(row, f"rows[{n}]"))
            for n, row in enumerate(rows)
            if row is not None
        ]
        if len(chunks) > self._max_batch_size and not split:
            raise RequestError(
                f"{len(chunks)} rows were given; a batch holds {self._max_batch_size}: give fewer, "
                "raise it with set_batch_size(), or say split=True for several passes",
                param="rows",
            )
        for chunk in chunks:
            self._check(chunk)
        self._check_blocks(chunks)
        if self._cache.has_states:
            self._check_states(chunks)
        return chunks

    def _check(self, chunk: _Chunk) -> None:
        capacity = self._executor.capacity
        if not chunk.tokens:
            raise RequestError(
                f"rows[{chunk.row}] is empty: give it a token, or None to leave that row as it is",
                param="rows",
            )
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
        if self._cache.has_states and chunk.start not in (0, length):
            raise RequestError(
                f"start_positions[{chunk.row}] is {chunk.start}; layers of this model keep a state "
                f"instead of keys and values, so a row goes on where it ended ({length}) or begins "
                "anew at 0",
                param="start_positions",
            )
        if chunk.end > capacity.max_context:
            raise RequestError(
                f"rows[{chunk.row}] would come to {chunk.end} tokens; the context holds "
                f"{capacity.max_context}",
                param="rows",
            )

    def _check_blocks(self, chunks: Sequence[_Chunk]) -> None:
        given = {chunk.row for chunk in chunks}
        kept = sum(row.table.num_held for n, row in self._rows.items() if n not in given)
        # A row keeps all of its blocks, also of windowed groups: it may go back to any position.
        each = [self._cache.blocks_for(chunk.end) for chunk in chunks]
        needed = sum(each) * len(self._cache.windows)
        num_blocks = self._cache.pool.num_blocks
        # Not those that requests hold, nor those that the largest of them needs.
        unused = self._cache.pool.num_free + self._num_blocks
        available = min(unused, self._engine.num_blocks_to_spare)
        if needed + kept > available:
            requests = "" if available == num_blocks else f", requests {num_blocks - available}"
            raise RequestError(
                f"the rows need {needed} blocks of the KV cache, and rows of earlier calls hold "
                f"{kept}{requests} of its {num_blocks}: clear() rows, give fewer, or give "
                "kv_memory more",
                param="rows",
            )

    def _check_states(self, chunks: Sequence[_Chunk]) -> None:
        """Each row keeps one; those that a full batch of requests holds are not touched, so that
        there are enough for steps of rows, too: between its steps a request holds one."""
        per_request = self._engine.config.states_per_running
        most = self._cache.state_pool.num_blocks - self._max_batch_size * per_request
        rows = {chunk.row for chunk in chunks} | self._rows.keys()
        if len(rows) > most:
            raise RequestError(
                f"with rows of earlier calls there are {len(rows)} rows, each with a state, and "
                f"memory holds {most} beside those of requests: clear() rows or give fewer",
                param="rows",
            )

    # ---- computing

    @property
    def _num_blocks(self) -> int:
        """Blocks that the rows hold."""
        return sum(row.table.num_held for row in self._rows.values())

    def _reserve(self) -> None:
        self._engine.reserve_blocks(self._num_blocks)

    def _cut_rows(self, chunks: Sequence[_Chunk]) -> None:
        """Take back the rows' blocks past their starts."""
        for chunk in chunks:
            row = self._rows.setdefault(chunk.row, _Row(self._cache.new_table(None)))
            whole = row.table
            row.table = self._cache.fork(whole, chunk.start)
            self._cache.free(whole)
            row.length = chunk.start

    def _give_up(self, chunk: _Chunk) -> None:
        """A row counts as far as it is known to be sound, or not at all where steps that ran gave
        back the state that it started from."""
        row = self._rows[chunk.row]
        row.length = chunk.start
        self._cache.drop_states(row.table, chunk.start)
        if self._cache.has_states and not row.table.states:
            self._cache.free(row.table)
            row.length = 0

    def _compute(self, chunks: Sequence[_Chunk]) -> dict[int, Logits]:
        """The logits of each row, by its number."""
        pieces: dict[int, list[Logits]] = {chunk.row: [] for chunk in chunks}
        for step in self._steps(chunks):
            plan = StepPlan(next(self._step_ids), tuple(map(self._plan, step)))
            for chunk, result in zip(step, self._execute(plan), strict=True):
                if result.fault is not None:
                    raise RowFaultError(f"rows[{chunk.row}]: {result.fault}")
                pieces[chunk.row].append(np.asarray(result.logits, np.float32))
            if self._cache.has_states:
                for chunk in step:
                    self._cache.state_computed(self._rows[chunk.row].table, chunk.end, chunk.end)
        return {row: np.concatenate(of_row) for row, of_row in pieces.items()}

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
        table = self._rows[chunk.row].table
        copies = self._cache.extend(table, chunk.start, chunk.end)
        assert copies == [], "rows share no blocks, and there are enough"
        return SequencePlan(
            chunk.row,
            chunk.start,
            chunk.tokens,
            None,
            table.ids,
            Want.LOGITS,
            other_tables=table.other_ids,
            states=table.row_states,
        )

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


def _starts(given: Any, num_rows: int) -> list[int]:
    """A start for each row: the one for all, one for each, or 0."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if given is None or isinstance(given, int):
        return [_integer(0 if given is None else given, "start_positions")] * num_rows
    if not isinstance(given, list | tuple):
        raise RequestError(
            f"start_positions must be an integer for all rows or a list, got {given!r:.100}",
            param="start_positions",
        )
    starts = [_integer(start, f"start_positions[{n}]") for n, start in enumerate(given)]
    if len(starts) != num_rows:
        raise RequestError(
            f"there are {num_rows} rows but {len(starts)} start_positions: give one for each, or "
            "one number for all",
            param="start_positions",
        )
    return starts


def _tokens(row: Any, name: str) -> tuple[int, ...]:
    return tuple(_integer(t, f"{name}[{n}]") for n, t in enumerate(_items(row, name)))


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name} must be an integer, got {value!r:.100}", param=_param(name))
    return operator.index(value)


def _param(name: str) -> str:
    """The parameter of an item such as rows[3][0]."""
    return name.partition("[")[0]


# ---- scores


SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class TextScore(NamedTuple):
    """The log-probability of each token of a text, given all before it."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """Of the whole text: the sum."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The inverse of the tokens' mean probability, by the geometric mean; lower is likelier."""
        return math.exp(-self.logprob / len(self.logprobs))


def paired(
    prompts: Prompt | Iterable[Prompt], completions: Prompt | Iterable[Prompt] | None
) -> list[tuple[Prompt, Prompt | None]]:
    """Each prompt with its completion; one prompt goes with all of them."""
    firsts = listed_prompts(prompts)
    if completions is None:
        return [(prompt, None) for prompt in firsts]
    seconds = listed_prompts(completions)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"there are {len(firsts)} prompts but {len(seconds)} completions: give one for each, "
            "or one prompt for all",
            param="completions",
        )
    return list(zip(firsts, seconds, strict=True))


def score_of(output: RequestOutput, start: int) -> TextScore:
    """Of the prompt's tokens from `start` on, of which the first one has no log-probability."""
    found = output.prompt_logprobs or []
    scores = found[start - 1 :]
    if not scores:
        raise RequestError("a text of one token has nothing to score", param="prompts")
    return TextScore([score.token for score in scores], [score.logprob for score in scores])


# ---- embeddings


Vectors = npt.NDArray[np.float32]  # [prompts, hidden], or one of them

NO_TOKENS = SamplingParams(max_tokens=1)  # the least there is; pooling samples nothing


def unit_vector(pooled: Any) -> Vectors:
    """A pooled state at length 1; one of zeros as it is."""
    state = np.asarray(pooled, np.float64)
    length = float(np.linalg.norm(state))
    return (state / length if length > 0 else state).astype(np.float32)
