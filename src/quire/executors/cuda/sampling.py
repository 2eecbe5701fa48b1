"""Sampler: the rows of a step that want more than the argmax, sampled by kernels behind the head.

A row's parameters go up as words of one buffer (kernels/sampling.py), grammar masks as words of
another. The kernels are captured as graphs, one a size, as the head is. Rows that need samplers
beyond temperature, top-k, top-p, min-p, penalties and DRY are sampled by chain.py.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, SequencePlan
from quire.core.sampling import MAX_LOGPROBS, SamplingParams
from quire.executors.base import NO_SAMPLING
from quire.executors.cuda import chain
from quire.executors.cuda.chain import SampleRow, to_device
from quire.executors.cuda.kernels import sampling as kernels
from quire.executors.cuda.kernels import scoring
from quire.executors.cuda.kernels.sampling import RowInput, Workspace
from quire.executors.cuda.planes import Array
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


class _Step:
    """What a step sends, while it is packed."""

    def __init__(self, num_rows: int) -> None:
        self.words = [_NOTHING] * num_rows
        self.edits: list[bytes] = []
        self.num_edits = 0
        self.masks: list[bytes] = []
        self.masked_rows: list[int] = []  # whose words lack the index of their mask
        self.mask_indices: list[int] = []
        self.chained: list[SampleRequest] = []
        self.faults: dict[int, str] = {}
        self.is_sampled = False  # by the kernels
        self.has_weighed = False  # rows of that kind
        self.is_scored = False

    def asks_nothing(self) -> bool:
        """Whether every row has its token already: the argmax."""
        is_packed = not self.chained and not self.faults
        return is_packed and self.words.count(_NOTHING) == len(self.words)

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
        # The words of rows that need nothing but their position and slot, which are 0 here.
        self._usual_words: dict[int, bytes] = {}  # likewise
        self._masked_words: dict[int, bytes] = {}  # likewise, of rows with a mask, whose index is 0
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
        self, plans: Sequence[SequencePlan], sources: Sequence[int], slots: Sequence[int]
    ) -> Sampled:
        """sample() for the rows of a head that want more than the argmax, which all have by now.
        `sources`: the slots of pending tokens; -1: none. Rows that need only their position and
        slot are packed together, by words that were made when their sequence was first sampled."""
        usual = list(map(self._usual_words.get, [id(plan.sampling) for plan in plans]))
        others = [
            head_row
            for head_row, plan in enumerate(plans)
            if usual[head_row] is None or plan.allowed is not None or plan.history is not None
        ]
        if not others and usual.count(_NOTHING) == len(usual):
            return Sampled({}, is_scored=False)
        step = _Step(self._padded(len(plans)))
        step.words[: len(plans)] = [_NOTHING if words is None else words for words in usual]
        with self._counted_again_after_errors():
            for head_row in others:
                if not self._pack_masked(step, head_row, plans[head_row]):
                    self._pack_plan(step, head_row, plans[head_row], sources, slots)
            if step.asks_nothing():
                return Sampled({}, is_scored=False)
            positions = [plan.completion_position for plan in plans]
            self._send(step, np.array([positions, slots], np.int32))
            self._launch_step(step)
        return Sampled(step.faults, step.is_scored)

    def _pack_masked(self, step: _Step, head_row: int, plan: SequencePlan) -> bool:
        """A row that needs nothing but its position, slot and mask; False: it needs more."""
        words = self._masked_words.get(id(plan.sampling))
        if words is None or plan.history is not None:
            return False
        mask = plan.mask()
        if mask is None:
            return False
        step.words[head_row] = words
        step.masked_rows.append(head_row)
        step.mask_indices.append(step.add_mask(mask))
        return True

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
        num_rows = len(step.words)
        if step.is_sampled:
            if step.has_weighed:
                self._run(num_rows, 1, self._launch_with_rounds)
            else:
                self._run(num_rows, 0, self._launch)
        for start in range(0, len(step.chained), self._chained_at_once):
            self._chain(step.chained[start : start + self._chained_at_once])
        if step.is_scored:
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
            self._find(how)
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
                self._usual_words.clear()
                self._masked_words.clear()
            known = self._by_sampling[id(sampling)] = _known(sampling)
            if known.usual is not None and known.masked is not None:
                self._usual_words[id(sampling)] = known.usual
                self._masked_words[id(sampling)] = known.masked
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

    def _send(self, step: _Step, places: npt.NDArray[np.int32] | None = None) -> None:
        """`places`: positions and slots of the first rows, for those that are sampled."""
        self._counts.count_fresh()
        rows = np.frombuffer(b"".join(step.words), np.int32).reshape(-1, kernels.WORDS)
        kinds = rows[:, kernels.KIND]
        is_sampled = kinds != kernels.SKIP
        step.is_sampled = bool(is_sampled.any())
        step.has_weighed = bool((kinds == kernels.WEIGHED).any())
        step.is_scored = bool(rows[:, kernels.NUM_TOP].any())
        host = self._step.host()
        count = rows.size
        words = host[:count].reshape(rows.shape)
        words[:] = rows
        if places is not None:
            num_rows = places.shape[1]
            for word, values in zip((kernels.POSITION, kernels.SLOT), places, strict=True):
                words[:num_rows, word] = values * is_sampled[:num_rows]
        if step.masked_rows:
            words[step.masked_rows, kernels.MASK] = step.mask_indices
        if step.num_edits:
            start = self._rows.words.numel()
            count = start + 2 * step.num_edits
            host[start:count] = np.frombuffer(b"".join(step.edits), np.int32)
        self._step.send(count)
        if step.masks:
            self._send_masks(step.masks)

    def _send_masks(self, masks: Sequence[bytes]) -> None:
        """A mask has a bit a token; what it lacks is not allowed."""
        width = 4 * self._mask_words
        host = self._masks.host().view(np.uint8).data
        for start, mask in zip(range(0, len(host), width), masks, strict=False):
            whole = mask if len(mask) == width else mask[:width].ljust(width, b"\0")
            host[start : start + width] = whole
        self._masks.send(len(masks) * self._mask_words)

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
        return Scores(_to_host(self._scored.results[:num_rows]), self._width)

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

    def of(self, row: int, num_top: int) -> tuple[float, int, tuple[tuple[int, float], ...]]:
        """Log-probability, rank, and (token, log-probability) of the likeliest."""
        found = self.results[row].tolist()
        num_top = min(num_top, self.width)
        tokens = map(int, found[2 : 2 + num_top])
        top = zip(tokens, found[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num_top], strict=True)
        return found[0], int(found[1]), tuple(top)

    def of_all(
        self, wanted: Sequence[int | None]
    ) -> list[tuple[float, int, tuple[tuple[int, float], ...]] | None]:
        """of() each row with the number of likeliest that it wants; None where it wants none."""
        most = min(max((count or 0 for count in wanted), default=0), self.width)
        first, second = 2, 2 + MAX_LOGPROBS
        scores = self.results[: len(wanted), 0].tolist()
        ranks = self.results[: len(wanted), 1].astype(np.int64).tolist()
        tokens = self.results[: len(wanted), first : first + most].astype(np.int64).tolist()
        others = self.results[: len(wanted), second : second + most].tolist()
        columns = zip(wanted, scores, ranks, tokens, others, strict=True)
        return [
            None
            if count is None
            else (score, rank, tuple(zip(likeliest[:count], beside[:count], strict=True)))
            for count, score, rank, likeliest, beside in columns
        ]


def _to_host(array: Array) -> npt.NDArray[np.float64]:
    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=array.is_cuda)
    found: npt.NDArray[np.float64] = host.copy_(array, non_blocking=True).numpy()
    return found
