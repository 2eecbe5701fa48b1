"""Sampler: the rows of a step that want more than the argmax, sampled by kernels behind the head.

A row's parameters go up as words of one buffer (kernels/sampling.py), grammar masks as words of
another. The kernels are captured as graphs, one a size, as the head is. Rows that need samplers
beyond temperature, top-k, top-p, min-p, penalties and DRY are sampled by chain.py.
"""

import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from quire.core.errors import RowFaultError
from quire.core.plan import (
    FollowingMasks,
    History,
    MaskRow,
    PendingMask,
    Sampling,
    SequencePlan,
    TokenLogprob,
    check_fields,
)
from quire.core.sampling import MAX_LOGPROBS, SamplingParams
from quire.executors.base import NO_SAMPLING
from quire.executors.cuda import chain
from quire.executors.cuda.chain import SampleRow, to_device
from quire.executors.cuda.kernels import sampling as kernels
from quire.executors.cuda.kernels import scoring
from quire.executors.cuda.kernels.sampling import RowInput, Workspace
from quire.executors.cuda.planes import Array
from quire.executors.cuda.step_input import PlanColumns
from quire.executors.cuda.token_counts import CountChange, TokenCounts
from quire.executors.cuda.upload import Upload
from quire.executors.dry import dry_penalties

_EDITS = 1 << 15  # bans and biases of a step; rows beyond are sampled by chain.py
_ALWAYS = struct.Struct("<QIi4f4d")
_THIS_STEP = struct.Struct("<iQ13i")
_PLACE = struct.Struct("<Qi")  # of a row's token: position and slot, the words after its kind
_MASKED_PLACE = struct.Struct("<Qi3i")  # and then no counts, no pending token, and the mask
_BEFORE_COUNTS = 4 + _PLACE.size
_AFTER_MASK = 4 + _MASKED_PLACE.size
_EDIT = struct.Struct("<if")
_NOTHING = bytes(4 * kernels.WORDS)
_MAX_KNOWN = 4096
_ALIGNED = 4  # words
_NO_CHANGE = CountChange(-1)
_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is
check_fields(TokenLogprob, ("token", "logprob", "rank", "top"))  # as Scores.of_all() writes them


class Tile(NamedTuple):
    """Sizes that the kernels are compiled for; powers of two."""

    chunk: int = kernels.CHUNK
    group: int = kernels.GROUP
    listed: int = kernels.LISTED_AT_MOST


class SampleRequest(NamedTuple):
    """A row of logits to sample."""

    head_row: int
    slot: int  # of its token among the samples
    row: SampleRow


class Sampled(NamedTuple):
    """What became of a step's rows besides their tokens."""

    faults: dict[int, str]  # by head row: why it has no token
    is_scored: bool  # scores_on_host() has what rows asked for


def wants_argmax(plan: SequencePlan) -> bool:
    """Whether the token is the argmax of the unmodified logits, and no logprobs are wanted."""
    how = plan.sampling
    if how is None or plan.allowed is not None or plan.history is not None:
        return False
    is_banned = plan.completion_position < how.params.min_tokens and bool(how.end_token_ids)
    return not is_banned and _takes_argmax(how.params)


def _takes_argmax(params: SamplingParams) -> bool:
    """The same of a row without history, mask and bans."""
    return (
        params.temperature == 0.0
        and params.order == ("temperature",)
        and params.is_greedy
        and params.logprobs is None
        and not params.logit_bias
    )


class _Known(NamedTuple):
    """What a sequence's rows have in common."""

    sampling: Sampling
    words: bytes
    kind: int
    bans: bytes
    biases: bytes
    highest_bias: int  # token; -1: no biases
    # The words of a row without history, mask and bans, around its position and slot; empty where
    # its sequence has others. With a mask it ends otherwise.
    begin: bytes
    end: bytes
    masked_end: bytes
    # Words for any step, without a mask and with one, but for position, slot and mask; None where
    # steps differ in more.
    usual: bytes | None
    masked: bytes | None


def _known(sampling: Sampling) -> _Known:
    params = sampling.params
    least = math.log(params.min_p) - 1e-9 if params.min_p else kernels.ZERO_EXPONENT
    words = _ALWAYS.pack(
        sampling.seed & (2**64 - 1),
        sampling.index & 0xFFFFFFFF,
        min(params.top_k, 2**31 - 1),
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        0.0,
        params.temperature or 1.0,
        params.top_p,
        params.min_p,
        max(least, kernels.ZERO_EXPONENT),
    )
    kind, num_top = _kind(params), 0 if params.logprobs is None else params.logprobs + 1
    usual = _THIS_STEP.pack(kind, 0, 0, -1, -1, -1, 0, 0, 0, 0, -1, -1, 0, 0, num_top)
    masked = _THIS_STEP.pack(kind, 0, 0, -1, -1, 0, 0, 0, 0, 1, -1, -1, 0, 0, num_top)
    is_usual = kind != kernels.SKIP and not params.logit_bias
    may_ban = params.min_tokens > 0 and bool(sampling.end_token_ids)
    is_same = is_usual and not may_ban and not params.needs_history
    whole = _NOTHING if _takes_argmax(params) else words + usual
    return _Known(
        sampling,
        words,
        kind,
        b"".join(_EDIT.pack(token, -math.inf) for token in sampling.end_token_ids),
        b"".join(_EDIT.pack(*entry) for entry in params.logit_bias.items()),
        max(params.logit_bias, default=-1),
        words + usual[:4] if is_usual else b"",
        usual[_BEFORE_COUNTS:],
        masked[_AFTER_MASK:],
        whole if is_same else None,
        words + masked if is_same else None,
    )


def _kind(params: SamplingParams) -> int:
    """How kernels/sampling.py treats such rows; SKIP: chain.py samples them."""
    if not params.is_plain:
        return kernels.SKIP
    if params.is_greedy:
        return kernels.GREEDY
    if params.top_k:
        return kernels.LISTED
    return kernels.ALL if params.top_p == 1.0 else kernels.WEIGHED


class _Usual(NamedTuple):
    """Rows that need nothing but their position, slot and mask, as a step sends them: the same in
    every step of the same sequences."""

    samplings: tuple[Sampling | None, ...]
    masked: tuple[int, ...]  # the rows that have a mask
    others: tuple[int, ...]  # the rows that need more, whose words are not here
    words: npt.NDArray[np.int32]  # [rows of the graph, words]; positions, slots and masks are 0
    is_sampled: npt.NDArray[np.int32]  # [rows]: 0 or 1
    kinds: "_Kinds"
    num_top: tuple[int | None, ...]  # likeliest tokens that each row wants beside its score

    def is_of(self, samplings: Sequence[Sampling | None], masked: tuple[int, ...]) -> bool:
        return (
            len(samplings) == len(self.samplings)
            and masked == self.masked
            and all(map(operator.is_, samplings, self.samplings))
        )


class _Kinds(NamedTuple):
    """Which kernels some rows need."""

    is_sampled: bool
    has_weighed: bool
    is_scored: bool

    @classmethod
    def of(cls, words: npt.NDArray[np.int32]) -> "_Kinds":
        kinds = words[:, kernels.KIND]
        is_sampled, has_weighed = kinds != kernels.SKIP, kinds == kernels.WEIGHED
        return cls(
            bool(is_sampled.any()),
            bool(has_weighed.any()),
            bool(words[:, kernels.NUM_TOP].any()),
        )


class _Step:
    """What a step sends, while it is packed."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows  # of the graph
        self.usual: _Usual | None = None
        self.words: dict[int, bytes] = {}  # by head row, of the rows that are packed one by one
        self.edits: list[bytes] = []
        self.num_edits = 0
        self.masks: list[bytes | PendingMask] = []
        self.masked_rows: list[int] = []  # usual ones, whose words lack the index of their mask
        self.mask_indices: list[int] = []
        self.chained: list[SampleRequest] = []
        self.faults: dict[int, str] = {}
        self.kinds = _Kinds(False, False, False)

    def asks_nothing(self) -> bool:
        """Whether every row has its token already: the argmax."""
        is_packed = not self.chained and not self.faults and not self.masked_rows
        is_usual = self.usual is None or not any(self.usual.kinds)
        return is_packed and is_usual and all(words == _NOTHING for words in self.words.values())

    def add_masks(self, masks: Mapping[int, bytes | PendingMask]) -> None:
        """Those of usual rows, by head row."""
        first = len(self.masks)
        self.masks += masks.values()
        self.masked_rows += masks
        self.mask_indices += range(first, len(self.masks))

    def add_mask(self, mask: bytes | None) -> int:
        """Its index among those of the step; -1: none."""
        if mask is None:
            return -1
        self.masks.append(mask)
        return len(self.masks) - 1

    def add_edits(self, *edits: bytes) -> int:
        """Where they begin."""
        start = self.num_edits
        self.edits += edits
        self.num_edits += sum(map(len, edits)) // _EDIT.size
        return start


class Sampler:
    """Samples rows of `logits` [rows, vocabulary] into `sampled` [rows, (token, status)] and into
    `samples` at their slots."""

    def __init__(
        self, logits: Array, samples: Array, sampled: Array, tile: Tile | None = None
    ) -> None:
        self._logits = logits
        self._samples = samples
        self._sampled = sampled
        self._tile = tile = tile or Tile()
        num_rows, self._width = logits.shape
        self._num_chunks = -(-self._width // tile.chunk)
        self._mask_words = -(-self._width // 32)
        device = str(logits.device)
        self._step = Upload(num_rows * kernels.WORDS + 2 * _EDITS, device)
        self._masks = Upload(num_rows * self._mask_words, device)
        self._work = self._workspace(num_rows)
        self._rows = self._row_input(num_rows)
        self._scored = self._scoring(num_rows)
        self._counts = TokenCounts(self._work.counts)
        self._by_sampling: dict[int, _Known] = {}  # by Sampling's id
        self._usual: _Usual | None = None  # of the last step
        self._graphs: dict[int, tuple[Any, Any, Any]] = {}
        self._chained_at_once = num_rows

    # ---- memory

    def _made(self, kind: Any, *shape: int) -> Array:
        return torch.zeros(shape, dtype=kind, device=self._logits.device)

    def _workspace(self, rows: int) -> Workspace:
        tile, chunks = self._tile, self._num_chunks
        return Workspace(
            scores=self._made(torch.float32, rows, self._width),
            counts=self._made(torch.int32, rows, self._width),
            chunk_best=self._made(torch.float32, rows, chunks),
            chunk_faults=self._made(torch.int32, rows, chunks),
            chunk_sums=self._made(torch.int64, rows, chunks),
            chunk_above=self._made(torch.int64, rows, chunks),
            group_best=self._made(torch.float32, rows, chunks, tile.chunk // tile.group),
            kinds=self._made(torch.int32, rows),
            best=self._made(torch.float32, rows),
            masses=self._made(torch.float32, rows, kernels.ROUNDS, 8),
            bounds=self._made(torch.float32, rows),
            upper_bounds=self._made(torch.float32, rows),
            num_listed=self._made(torch.int32, rows),
            listed=self._made(torch.int32, rows, tile.listed),
            listed_scores=self._made(torch.float32, rows, tile.listed),
            listed_weights=self._made(torch.int64, rows, tile.listed),
        )

    def _row_input(self, rows: int) -> RowInput:
        size = rows * kernels.WORDS
        words, edits = self._step.buffer[:size], self._step.buffer[size:]
        return RowInput(
            words,
            words.view(torch.float32),
            words.view(torch.float64),
            edits,
            edits.view(torch.float32),
            self._masks.buffer,
        )

    def _scoring(self, rows: int) -> scoring.Scored:
        return scoring.Scored(
            self._sampled,
            2,
            self._step.buffer[kernels.NUM_TOP :],
            kernels.WORDS,
            self._made(torch.float64, rows, self._num_chunks),
            self._made(torch.float64, rows),
            self._made(torch.int32, rows),
            self._made(torch.float64, rows, scoring.RESULTS),
        )

    def limit_chained(self, rows: int) -> None:
        """So many rows at once have memory for chain.py's arrays."""
        self._chained_at_once = rows

    def rehearse(self) -> None:
        """Allocate the memory that the most demanding rows need beyond what is there."""
        rows = [chain.most_demanding_row(self._width)] * self._chained_at_once
        index = self._integers(range(len(rows)))
        chain.choose(self._logits[index], rows, self._samples)

    # ---- a step

    def sample(self, requests: Sequence[SampleRequest], num_rows: int) -> dict[int, str]:
        """Sample rows below `num_rows`, on the current stream; the faults of rows that have no
        token for it. Scores are there for scores_on_host() to fetch."""
        step = _Step(self._padded(num_rows))
        with self._counted_again_after_errors():
            for request in requests:
                self._pack(step, request)
            self._send(step)
            self._launch_step(step)
        return step.faults

    def sample_plans(
        self,
        plans: Sequence[SequencePlan],
        sources: Sequence[int],
        slots: Sequence[int],
        columns: PlanColumns | None = None,
    ) -> Sampled:
        """sample() for the rows of a head that want more than the argmax, which all have by now.
        `sources`: the slots of pending tokens; -1: none. Rows that need only their position, slot
        and mask are packed together, by words that were made when their sequence was first sampled.
        `columns`: of these plans, where the caller has them."""
        if not plans:
            return Sampled({}, is_scored=False)
        columns = columns or PlanColumns.of(plans)
        masks = _masks_of(columns)
        step = _Step(self._padded(len(plans)))
        step.usual = usual = self._usual_rows(columns.sampling, tuple(masks), step.num_rows)
        others = usual.others
        if any(columns.history):
            others = tuple({*others, *(at for at, seen in enumerate(columns.history) if seen)})
        if not others and not masks and not any(usual.kinds):
            return Sampled({}, is_scored=False)
        with self._counted_again_after_errors():
            if not others:
                step.add_masks(masks)
            for head_row in sorted({*others, *masks}) if others else ():
                if head_row in masks and head_row not in others:
                    step.add_masks({head_row: masks[head_row]})
                else:
                    self._pack_plan(step, head_row, plans[head_row], sources, slots)
            if step.asks_nothing():
                return Sampled({}, is_scored=False)
            self._send(step, columns.completion_position, slots)
            self._launch_step(step)
        return Sampled(step.faults, step.kinds.is_scored)

    def _usual_rows(
        self, samplings: tuple[Sampling | None, ...], masked: tuple[int, ...], num_rows: int
    ) -> _Usual:
        """Those of the last step, where it had the same sequences."""
        kept = self._usual
        if kept is not None and len(kept.words) == num_rows and kept.is_of(samplings, masked):
            return kept
        known = []
        for sampling in samplings:
            assert sampling is not None, NO_SAMPLING
            known.append(self._find(sampling))
        found = [each.usual for each in known]
        for head_row in masked:
            found[head_row] = known[head_row].masked
        given = [_NOTHING if words is None else words for words in found]
        given += [_NOTHING] * (num_rows - len(given))
        words = np.frombuffer(b"".join(given), np.int32).reshape(-1, kernels.WORDS)
        self._usual = _Usual(
            samplings,
            masked,
            tuple([head_row for head_row, words in enumerate(found) if words is None]),
            words,
            (words[: len(samplings), kernels.KIND] != kernels.SKIP).astype(np.int32),
            _Kinds.of(words),
            tuple([each.sampling.params.logprobs for each in known]),
        )
        return self._usual

    def _padded(self, num_rows: int) -> int:
        """Also the rows that a graph has beyond the step's: none of them is sampled."""
        return next((size for size in self._graphs if size >= num_rows), num_rows)

    @contextmanager
    def _counted_again_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._counts.forget()
            raise

    def _launch_step(self, step: "_Step") -> None:
        num_rows = step.num_rows
        if step.kinds.is_sampled:
            if step.kinds.has_weighed:
                self._run(num_rows, 1, self._launch_with_rounds)
            else:
                self._run(num_rows, 0, self._launch)
        for start in range(0, len(step.chained), self._chained_at_once):
            self._chain(step.chained[start : start + self._chained_at_once])
        if step.kinds.is_scored:
            self._run(num_rows, 2, self._launch_scores)

    def _pack_plan(
        self,
        step: _Step,
        head_row: int,
        plan: SequencePlan,
        sources: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        how = plan.sampling
        assert how is not None, NO_SAMPLING
        if wants_argmax(plan):
            step.words[head_row] = _NOTHING
            return
        pending = None if sources[head_row] < 0 else sources[head_row]
        row = SampleRow(how, plan.completion_position, plan.history, pending, plan.mask())
        self._pack(step, SampleRequest(head_row, slots[head_row], row))

    def _find(self, sampling: Sampling) -> _Known:
        """What is known of a sequence's rows; made when it is first sampled."""
        known = self._by_sampling.get(id(sampling))
        if known is None:
            if len(self._by_sampling) >= _MAX_KNOWN:
                self._by_sampling.clear()
            known = self._by_sampling[id(sampling)] = _known(sampling)
        return known

    def _pack(self, step: _Step, request: SampleRequest) -> None:
        row = request.row
        known = self._find(row.sampling)
        is_usual = row.history is None and known.begin
        if not is_usual or row.completion_position < row.sampling.params.min_tokens:
            try:
                self._pack_unusual(step, request, known)
            except RowFaultError as fault:
                step.faults[request.head_row] = str(fault)
            return
        position, slot = row.completion_position, request.slot
        if row.allowed is None:
            place, end = _PLACE.pack(position, slot), known.end
        else:
            mask = step.add_mask(row.allowed)
            place, end = _MASKED_PLACE.pack(position, slot, -1, -1, mask), known.masked_end
        step.words[request.head_row] = known.begin + place + end

    def _pack_unusual(self, step: _Step, request: SampleRequest, known: _Known) -> None:
        row = request.row
        params = row.sampling.params
        bans = known.bans if row.completion_position < params.min_tokens else b""
        self._check_tokens(known, row, bool(bans))
        num_top = 0 if params.logprobs is None else params.logprobs + 1
        late = b""
        if row.history is not None and known.kind != kernels.SKIP and "dry" in params.order:
            late = _dry_edits(row, row.history)
        num_edits, num_late = (len(some) // _EDIT.size for some in (bans + known.biases, late))
        if known.kind == kernels.SKIP or step.num_edits + num_edits + num_late > _EDITS:
            step.chained.append(request)
            step.words[request.head_row] = _NOTHING[:-4] + num_top.to_bytes(4, "little")
            return
        change = _NO_CHANGE
        if row.history is not None and "penalties" in params.order:
            change = self._counts.change(row, row.history)
        mask = step.add_mask(row.allowed)
        step.words[request.head_row] = known.words + _THIS_STEP.pack(
            known.kind,
            row.completion_position,
            request.slot,
            change.row,
            -1 if row.pending is None else row.pending,
            mask,
            step.add_edits(bans, known.biases, late),
            num_edits,
            num_late,
            mask >= 0 or num_edits > 0 or num_late > 0 or change.row >= 0,
            *change.tokens,
            *change.by,
            num_top,
        )

    def _check_tokens(self, known: _Known, row: SampleRow, is_banned: bool) -> None:
        """Tokens that the sampler is told of must be in the vocabulary; counted ones are checked
        as they are counted."""
        highest = known.highest_bias
        if is_banned:
            highest = max(highest, *row.sampling.end_token_ids)
        params = row.sampling.params
        if row.history is not None and (known.kind == kernels.SKIP or "dry" in params.order):
            highest = max(highest, *(max(part, default=0) for part in row.history))
        if highest >= self._width:
            raise RowFaultError(f"a token id is beyond the {self._width} logits")

    def _send(self, step: _Step, positions: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """`positions` and `slots`: of the usual rows and of those between them."""
        self._counts.count_fresh()
        host = self._step.host()
        count = step.num_rows * kernels.WORDS
        words = host[:count].reshape(step.num_rows, kernels.WORDS)
        usual = step.usual
        if usual is None:
            words[:] = 0
        else:
            step.kinds = usual.kinds
            words[:] = usual.words
            is_sampled = usual.is_sampled
            words[: len(is_sampled), kernels.POSITION] = np.array(positions, np.int32) * is_sampled
            words[: len(is_sampled), kernels.SLOT] = np.array(slots, np.int32) * is_sampled
            if step.masked_rows:
                words[step.masked_rows, kernels.MASK] = step.mask_indices
        if step.words:
            each = np.frombuffer(b"".join(step.words.values()), np.int32)
            words[list(step.words)] = each.reshape(-1, kernels.WORDS)
            step.kinds = _Kinds.of(words)
        if step.num_edits:
            start = self._rows.words.numel()
            count = start + 2 * step.num_edits
            host[start:count] = np.frombuffer(b"".join(step.edits), np.int32)
        self._step.send(count)
        if step.masks:
            self._send_masks([_there(mask) for mask in step.masks])

    def _send_masks(self, masks: Sequence[bytes | MaskRow]) -> None:
        """A mask has a bit a token; what it lacks is not allowed."""
        host = self._masks.host()[: len(masks) * self._mask_words].reshape(len(masks), -1)
        together = _of_one_array(masks)
        if together is not None:
            bits, rows = together
            width = min(bits.shape[1], self._mask_words)
            host[:, :width] = bits[rows, :width]
            host[:, width:] = 0
        else:
            width = 4 * self._mask_words
            whole = [_as_bytes(mask)[:width].ljust(width, b"\0") for mask in masks]
            host[:] = np.frombuffer(b"".join(whole), np.int32).reshape(host.shape)
        self._masks.send(host.size)

    def _chain(self, requests: Sequence[SampleRequest]) -> None:
        index = self._integers([request.head_row for request in requests])
        tokens, status = chain.choose(
            self._logits[index], [request.row for request in requests], self._samples
        )
        self._samples[self._integers([request.slot for request in requests])] = tokens.int()
        self._sampled[index] = torch.stack([tokens.int(), status.int()], dim=1)

    def _integers(self, values: Sequence[int]) -> Array:
        """On the device."""
        return to_device(np.array(values, np.int64), self._logits.device)

    # ---- kernels

    def launch_all(self) -> None:
        """Launch every kernel, each as steps will, with a row that none of them changes."""
        host = self._step.host()
        host[:] = 0
        self._step.send(len(host))
        self._launch_with_rounds(1)
        self._launch_scores(1)
        self.score(self._logits[:1], [0], 0)

    def capture(self, sizes: Sequence[int], captured: Callable[[Callable[[], None]], Any]) -> None:
        """Capture graphs for these numbers of rows."""
        self.launch_all()
        for size in sorted(sizes):
            self._graphs[size] = (
                captured(lambda size=size: self._launch(size)),  # type: ignore[misc]
                captured(lambda size=size: self._launch_with_rounds(size)),  # type: ignore[misc]
                captured(lambda size=size: self._launch_scores(size)),  # type: ignore[misc]
            )

    def close(self) -> None:
        self._graphs.clear()

    def _run(self, num_rows: int, which: int, launch: Callable[[int], None]) -> None:
        if num_rows in self._graphs:
            self._graphs[num_rows][which].replay()
        else:
            launch(num_rows)

    def _launch_with_rounds(self, num_rows: int) -> None:
        self._launch(num_rows, kernels.ROUNDS)

    def _launch(self, num_rows: int, num_rounds: int = 0) -> None:
        """The rounds are for WEIGHED rows alone."""
        tile, chunks, width = self._tile, self._num_chunks, self._width
        work, rows, logits = self._work, self._rows, self._logits
        powers = {"CHUNKS": triton.next_power_of_2(chunks)}
        groups = powers["CHUNKS"] * (tile.chunk // tile.group)
        exact: dict[str, Any] = {"enable_fp_fusion": False}
        wide = {"CHUNK": tile.chunk, "num_warps": 8, **exact}
        by_chunk = (num_rows, chunks)
        kernels.adjust[by_chunk](
            logits, rows, work, self._samples, width, self._mask_words, GROUP=tile.group, **wide
        )
        kernels.find_bounds[(num_rows,)](
            rows,
            work,
            self._samples,
            self._sampled,
            chunks,
            NUM_GROUPS=groups,
            num_warps=8,
            **powers,
            **exact,
        )
        for number in range(num_rounds):
            kernels.narrow[by_chunk](logits, rows, work, width, ROUND=number, **wide)
        kernels.weigh_or_list[by_chunk](logits, rows, work, width, LIST=tile.listed, **wide)
        kernels.choose[(num_rows,)](
            logits,
            rows,
            work,
            self._samples,
            self._sampled,
            width,
            chunks,
            CHUNK=tile.chunk,
            LIST=tile.listed,
            num_warps=4,
            **powers,
            **exact,
        )

    def _launch_scores(self, num_rows: int, logits: Array = None, scored: Any = None) -> None:
        tile, chunks, width, work = self._tile, self._num_chunks, self._width, self._work
        logits = self._logits if logits is None else logits
        scored = scored or self._scored
        powers = {"CHUNKS": triton.next_power_of_2(chunks)}
        groups = powers["CHUNKS"] * (tile.chunk // tile.group)
        exact: dict[str, Any] = {"enable_fp_fusion": False}
        wide = {"CHUNK": tile.chunk, "num_warps": 8, **exact}
        by_chunk, by_row = (num_rows, chunks), (num_rows,)
        scoring.score_bests[by_chunk](logits, scored, work, width, GROUP=tile.group, **wide)
        scoring.score_sums[by_chunk](logits, scored, work, width, **powers, **wide)
        scoring.score_tokens[by_row](
            logits, scored, work, width, chunks, NUM_GROUPS=groups, num_warps=8, **powers, **exact
        )
        scoring.score_ranks[by_chunk](
            logits, scored, work, width, LIST=tile.listed, **powers, **wide
        )
        scoring.score_likeliest[by_row](
            logits, scored, work, width, chunks, LIST=tile.listed, num_warps=4, **powers, **exact
        )

    # ---- scores

    def scores_on_host(self, num_rows: int) -> "Scores":
        """Those of the rows that were sampled last."""
        wanted = () if self._usual is None else self._usual.num_top
        return Scores(_to_host(self._scored.results[:num_rows]), self._width, wanted)

    def score(self, logits: Array, tokens: Sequence[int], num_top: int) -> "Scores":
        """Of other logits than those that are sampled, as many rows at most; on the host once the
        stream is done."""
        count, width = logits.shape
        if not logits.is_contiguous() or logits.dtype != torch.float32 or width != self._width:
            raise ValueError(f"no scores of {logits.dtype} {tuple(logits.shape)}")
        if len(tokens) != count or count > len(self._scored.ranks):
            raise ValueError(f"no scores of {len(tokens)} tokens in {count} rows")
        # Kernels are compiled for pointers that 16 bytes divide, so both parts begin there.
        given = np.zeros((2, -(-count // _ALIGNED) * _ALIGNED), np.int32)
        given[:, :count] = [tokens, [num_top + 1] * count]
        of_rows = to_device(given, self._logits.device)
        scored = self._scored._replace(
            tokens=of_rows[0], token_stride=1, num_top=of_rows[1], num_top_stride=1
        )
        self._launch_scores(count, logits, scored)
        return Scores(_to_host(scored.results[:count]), width)


def _masks_of(rows: PlanColumns) -> dict[int, bytes | PendingMask]:
    """By row, of the rows that have one; they may still be computed."""
    if rows.allowed.count(None) == len(rows.allowed):
        return {}
    found: dict[int, bytes | PendingMask] = {}
    for row, (sequence_id, allowed) in enumerate(zip(rows.sequence_id, rows.allowed, strict=True)):
        mask = allowed.of(sequence_id) if isinstance(allowed, FollowingMasks) else allowed
        if mask is not None:
            found[row] = mask
    return found


def _there(mask: bytes | PendingMask) -> bytes | MaskRow:
    """Waited for."""
    return mask if isinstance(mask, bytes) else mask.row() or mask.result()


def _of_one_array(
    masks: Sequence[bytes | MaskRow],
) -> tuple[npt.NDArray[np.int32], slice | list[int]] | None:
    """The array that holds all of them, and their rows; None: there is none."""
    if not isinstance(masks[0], MaskRow):
        return None
    bits, rows = masks[0].bits, []
    for mask in masks:
        if isinstance(mask, bytes) or mask.bits is not bits:
            return None
        rows.append(mask.row)
    in_order = rows == list(range(rows[0], rows[0] + len(rows)))
    return bits, slice(rows[0], rows[-1] + 1) if in_order else rows


def _as_bytes(mask: bytes | MaskRow) -> bytes:
    if isinstance(mask, bytes):
        return mask
    found: bytes = mask.bits[mask.row].tobytes()
    return found


def _dry_edits(row: SampleRow, history: History) -> bytes:
    """The host finds the repetitions: such a row is planned when its last token is known."""
    assert row.pending is None, "a row with DRY was planned before its last token was known"
    params = row.sampling.params
    found = dry_penalties(history.last(params.dry_penalty_last_n), params, row.sampling.breakers)
    values = np.array(list(found.values()), np.float32)
    pairs = zip(found, (-values).tolist(), strict=True)
    return b"".join(_EDIT.pack(token, value) for token, value in pairs)


class Scores(NamedTuple):
    """Log-probabilities of tokens, their ranks, and the likeliest beside them."""

    results: npt.NDArray[np.float64]  # [rows, scoring.RESULTS]
    width: int  # of the vocabulary
    wanted: Sequence[int | None] = ()  # by row of a plan: see of_all()

    def of(self, row: int, num_top: int) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        """Log-probability, rank, and (token, log-probability) of the likeliest."""
        found = self.results[row].tolist()
        num_top = min(num_top, self.width)
        tokens = map(int, found[2 : 2 + num_top])
        top = zip(tokens, found[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num_top], strict=True)
        return found[0], int(found[1]), tuple(top)

    def of_all(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """of() each row, with its token and the number of likeliest that it wants; None where it
        wants none. All rows have the largest number at first: zip() makes their pairs without
        Python work for each."""
        wanted = self.wanted
        most = min(max((count or 0 for count in wanted), default=0), self.width)
        results = self.results[: len(wanted)]
        ranks = results[:, 1].astype(np.int64).tolist()
        likeliest = results[:, 2 : 2 + most].astype(np.int64).ravel().tolist()
        beside = results[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + most].ravel().tolist()
        pairs = zip(likeliest, beside, strict=True)
        tops: Iterable[tuple[tuple[int, float], ...]] = zip(*[pairs] * most, strict=True)
        if not most:
            tops = repeat((), len(wanted))
        if wanted.count(most) < len(wanted):
            tops = [top[:count] for top, count in zip(tops, wanted, strict=True)]
        rows = zip(tokens, results[:, 0].tolist(), ranks, tops, strict=True)
        entries: list[TokenLogprob | None] = list(map(_new_tuple, repeat(TokenLogprob), rows))
        if None in wanted:
            return [
                None if count is None else entry
                for entry, count in zip(entries, wanted, strict=True)
            ]
        return entries


def _to_host(array: Array) -> npt.NDArray[np.float64]:
    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=array.is_cuda)
    found: npt.NDArray[np.float64] = host.copy_(array, non_blocking=True).numpy()
    return found
