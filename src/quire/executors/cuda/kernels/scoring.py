"""Log-probabilities of tokens under the model's own logits, their ranks, and the likeliest beside
them. Sums run in float64 by chunk, then over the chunks: an order that is a function of the row's
width alone. Of equal log-probabilities the lower token comes first."""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.core.sampling import MAX_LOGPROBS
from quire.executors.cuda.kernels.sampling import _exp, _kth_greatest, _list_tokens

RESULTS = 2 + 2 * MAX_LOGPROBS  # a row's log-probability, rank, likeliest tokens, theirs
_RESULTS, _MAX_TOP = tl.constexpr(RESULTS), tl.constexpr(MAX_LOGPROBS)
_BLOCK = tl.constexpr(1024)
_NO_TOKEN = tl.constexpr(2**31 - 1)


class Scored(NamedTuple):
    """Rows to score, and where to."""

    tokens: Any  # int32, each `token_stride` after the other
    token_stride: Any
    num_top: Any  # int32, likewise: how many of the likeliest, plus 1; 0: the row is not scored
    num_top_stride: Any
    chunk_sums: Any  # float64 [row, chunk]
    log_sums: Any  # float64 [row]
    ranks: Any  # int32 [row]
    results: Any  # float64 [row, RESULTS]


@triton.jit
def _num_top(scored, row):
    return tl.load(scored.num_top + row * scored.num_top_stride) - 1


@triton.jit
def score_bests(logits, scored, work, width, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The greatest logits of a chunk and of its groups. One program: a row and a chunk."""
    row = tl.program_id(0)
    if _num_top(scored, row) >= 0:
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = column < width
        x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=float("-inf"))
        index = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(work.chunk_best + index, tl.max(x, axis=0))
        GROUPS: tl.constexpr = CHUNK // GROUP
        best = tl.max(tl.reshape(x, [GROUPS, GROUP]), axis=1)
        tl.store(work.group_best + index * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def _largest(work, row, num_chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    at = work.chunk_best + row * num_chunks + chunk
    return tl.max(tl.load(at, mask=chunk < num_chunks, other=float("-inf")), axis=0).to(tl.float64)


@triton.jit
def score_sums(logits, scored, work, width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The likelihoods of a chunk, added. One program: a row and a chunk."""
    row = tl.program_id(0)
    if _num_top(scored, row) >= 0:
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        at = logits + row.to(tl.int64) * width + column
        x = tl.load(at, mask=column < width, other=float("-inf")).to(tl.float64)
        total = tl.sum(_exp(x - _largest(work, row, tl.num_programs(1), CHUNKS)), axis=0)
        tl.store(scored.chunk_sums + row * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def score_tokens(
    logits, scored, work, width, num_chunks, CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr
):
    """The log-probability of each row's token, and a bound that its likeliest tokens reach. One
    program a row."""
    row = tl.program_id(0)
    num_top = _num_top(scored, row)
    if num_top >= 0:
        largest = _largest(work, row, num_chunks, CHUNKS)
        chunk = tl.arange(0, CHUNKS)
        at = scored.chunk_sums + row * num_chunks + chunk
        log_sum = tl.log(tl.sum(tl.load(at, mask=chunk < num_chunks, other=0.0), axis=0))
        token = tl.load(scored.tokens + row * scored.token_stride)
        x = tl.load(logits + row.to(tl.int64) * width + token).to(tl.float64)
        tl.store(scored.results + row * _RESULTS, (x - largest) - log_sum)
        tl.store(scored.log_sums + row, log_sum)
        tl.store(scored.ranks + row, 1)
        tl.store(work.num_listed + row, 0)
        group = tl.arange(0, NUM_GROUPS)
        num_groups = num_chunks * (NUM_GROUPS // CHUNKS)
        group_best = tl.load(
            work.group_best + row * num_groups + group,
            mask=group < num_groups,
            other=float("-inf"),
        )
        bound = _kth_greatest(group_best, tl.maximum(num_top, 1)).to(tl.float64)
        # Logits that differ by less may have one log-probability.
        bound -= (tl.abs(bound) + tl.abs(largest) + log_sum) * 1e-15 + 1e-300
        lower = bound.to(tl.float32)
        lower -= tl.abs(lower) * 2.4e-7 + 1e-37
        lower = tl.where(num_top > NUM_GROUPS, float("-inf"), lower)
        tl.store(work.bounds + row, tl.where(num_top > 0, lower, float("inf")))


@triton.jit
def score_ranks(
    logits, scored, work, width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LIST: tl.constexpr
):
    """How many tokens of a chunk are likelier than the row's, and those that may be among the
    likeliest. One program: a row and a chunk."""
    row = tl.program_id(0)
    if _num_top(scored, row) >= 0:
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = column < width
        x = tl.load(logits + row.to(tl.int64) * width + column, mask=inside, other=float("-inf"))
        largest = _largest(work, row, tl.num_programs(1), CHUNKS)
        logprobs = (x.to(tl.float64) - largest) - tl.load(scored.log_sums + row)
        is_above = logprobs > tl.load(scored.results + row * _RESULTS)
        above = tl.sum(is_above.to(tl.int32), axis=0)
        if above > 0:
            tl.atomic_add(scored.ranks + row, above)
        is_listed = inside & (x >= tl.load(work.bounds + row))
        _list_tokens(work, row, x, column, is_listed, LIST)


@triton.jit
def score_likeliest(
    logits, scored, work, width, num_chunks, CHUNKS: tl.constexpr, LIST: tl.constexpr
):
    """Order the listed tokens, or where the list is too short the whole row, as far as asked for.
    One program a row."""
    row = tl.program_id(0)
    num_top = _num_top(scored, row)
    if num_top >= 0:
        results = scored.results + row * _RESULTS
        tl.store(results + 1, tl.load(scored.ranks + row).to(tl.float64))
        largest = _largest(work, row, num_chunks, CHUNKS)
        log_sum = tl.load(scored.log_sums + row)
        count = tl.load(work.num_listed + row)
        is_whole = count > LIST
        count = tl.where(is_whole, width, count)
        last = tl.full([], float("inf"), tl.float64)
        last_token = tl.full([], -1, tl.int32)
        for index in range(tl.minimum(num_top, width)):
            best = tl.full([_BLOCK], float("-inf"), tl.float64)
            best_token = tl.full([_BLOCK], _NO_TOKEN, tl.int32)
            for start in range(0, count, _BLOCK):
                at = start + tl.arange(0, _BLOCK)
                token = at
                x = tl.zeros([_BLOCK], tl.float32)
                if is_whole:
                    own = logits + row.to(tl.int64) * width + at
                    x = tl.load(own, mask=at < count, other=float("-inf"))
                else:
                    place = row.to(tl.int64) * LIST + at
                    token = tl.load(work.listed + place, mask=at < count, other=_NO_TOKEN)
                    x = tl.load(work.listed_scores + place, mask=at < count, other=float("-inf"))
                logprob = (x.to(tl.float64) - largest) - log_sum
                is_after = (logprob < last) | ((logprob == last) & (token > last_token))
                is_better = (logprob > best) | ((logprob == best) & (token < best_token))
                is_better = (at < count) & is_after & is_better
                best = tl.where(is_better, logprob, best)
                best_token = tl.where(is_better, token, best_token)
            last = tl.max(best, axis=0)
            last_token = tl.min(tl.where(best == last, best_token, _NO_TOKEN), axis=0)
            tl.store(results + 2 + index, last_token.to(tl.float64))
            tl.store(results + 2 + _MAX_TOP + index, last)
