"""TokenCounts: how often penalties find each token, on the device, a step's change at a time."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling
from quire.executors.cuda.chain import SampleRow, to_device
from quire.executors.cuda.kernels.sampling import SEEN_IN_PROMPT
from quire.executors.cuda.planes import Array

_NO_TOKEN = -1
_CHANGES = 2  # that a row's step can carry


class CountChange(NamedTuple):
    """The row of the counts, and what the step adds to the counts of two tokens of it."""

    row: int
    tokens: tuple[int, int] = (_NO_TOKEN, _NO_TOKEN)
    by: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Counted:
    """What a row of the counts holds: the tokens from `low` to `high` of prompt and completion.

    A sequence keeps its Sampling and its prompt, and its completion only grows, so these say
    whether the counts are of the beginning of a history.
    """

    sampling: Sampling
    prompt: tuple[int, ...]
    row: int
    low: int = 0
    high: int = 0


class TokenCounts:
    """Rows of counts for the sequences that were sampled last. A pending token is not counted here:
    the kernel finds it among the samples."""

    def __init__(self, counts: Array) -> None:
        self._counts = counts  # int32 [rows, vocabulary]
        self._known: OrderedDict[int, _Counted] = OrderedDict()  # by Sampling's id; last used last
        self._fresh: list[tuple[_Counted, History]] = []

    def forget(self) -> None:
        """Count all tokens again: a step may have failed before its changes were made."""
        self._known.clear()
        self._fresh.clear()

    def change(self, row: SampleRow, history: History) -> CountChange:
        """What a step must do so that the counts are those of this history."""
        low, high = _range(row, history)
        known = self._known.get(id(row.sampling))
        if known is not None:
            self._known.move_to_end(id(row.sampling))
            is_next = high == known.high + 1 and low == known.low and history.completion
            if is_next and known.prompt is history.prompt:  # the usual step
                token = history.completion[-1]
                if 0 <= token < self._counts.shape[1]:
                    known.high = high
                    return CountChange(known.row, (token, _NO_TOKEN), (1, 0))
            change = _moved(known, history, low, high)
            if change is not None:
                self._check([token for token in change.tokens if token != _NO_TOKEN])
                known.low, known.high = low, high
                return change
        self._check(history.prompt)
        self._check(history.completion)
        counted = _Counted(row.sampling, history.prompt, self._free_row(known), low, high)
        self._known[id(row.sampling)] = counted
        self._fresh.append((counted, history))
        return CountChange(counted.row)

    def _check(self, tokens: Sequence[int]) -> None:
        size = self._counts.shape[1]
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            raise RowFaultError(f"a token id is beyond the {size} logits")

    def _free_row(self, known: _Counted | None) -> int:
        if known is not None:
            return known.row
        if len(self._known) < self._counts.shape[0]:
            taken = {counted.row for counted in self._known.values()}
            return next(row for row in range(self._counts.shape[0]) if row not in taken)
        return self._known.popitem(last=False)[1].row

    def count_fresh(self) -> None:
        """Count the histories of sequences that are new here, before the step's kernels run."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        width = self._counts.shape[1]
        device = self._counts.device
        rows = np.array([counted.row for counted, _ in fresh], np.int64)
        self._counts.index_fill_(0, to_device(rows, device), 0)
        flat = self._counts.view(-1)
        repeated = [
            np.array(counted.prompt, np.int64) + counted.row * width
            for counted, _ in fresh
            if _marks_prompt(counted.sampling)
        ]
        if repeated:
            flat.index_fill_(0, to_device(np.concatenate(repeated), device), SEEN_IN_PROMPT)
        tokens = [
            np.array(_between(history, counted.low, counted.high), np.int64) + counted.row * width
            for counted, history in fresh
        ]
        index = to_device(np.concatenate(tokens), device)
        flat.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def _marks_prompt(sampling: Sampling) -> bool:
    params = sampling.params
    return params.repeat_last_n is None and params.repetition_penalty != 1.0


def _range(row: SampleRow, history: History) -> tuple[int, int]:
    """Of prompt and completion, the tokens that are counted beside a pending one."""
    last = row.sampling.params.repeat_last_n
    high = len(history.prompt) + len(history.completion)
    if last is None:
        return len(history.prompt), high
    if last < 0:
        return 0, high
    return max(0, high - (last - (row.pending is not None))), high


def _between(history: History, low: int, high: int) -> tuple[int, ...]:
    first = len(history.prompt)
    if low >= first:
        return history.completion[low - first : high - first]
    return (history.prompt + history.completion)[low:high]


def _moved(known: _Counted, history: History, low: int, high: int) -> CountChange | None:
    """None where the counts cannot be carried on."""
    gone, new = low - known.low, high - known.high
    if gone < 0 or new < 0 or gone + new > _CHANGES or low > known.high:
        return None
    if known.prompt is not history.prompt and known.prompt != history.prompt:
        return None
    tokens = [(token, -1) for token in _between(history, known.low, low)] if gone else []
    tokens += [(token, 1) for token in _between(history, known.high, high)] if new else []
    tokens += [(_NO_TOKEN, 0)] * (_CHANGES - len(tokens))
    (first, by_first), (second, by_second) = tokens
    return CountChange(known.row, (first, second), (by_first, by_second))
