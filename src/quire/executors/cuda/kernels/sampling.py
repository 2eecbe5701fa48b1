"""The sampler's kernels: adjusted scores, integer weights, cuts and draws, as executors/sampler.py
has them, for rows with parameters of their own.

A row goes through `adjust` and `find_bounds`; then its kind decides. GREEDY takes the best. ALL
weighs every token and draws. LISTED lists the tokens that a bound on their scores does not exclude
and cuts and draws among these. WEIGHED, top-p without top-k, needs the weight of all tokens:
`narrow` finds about where the cut is by approximate sums, only the tokens near it are listed, and
`choose` checks with exact sums that the cut is among them; if not, it takes the whole row.

A cut is (threshold, id): a token stays with a greater weight, or with that weight and an id up to
this one. Both are found by digits of three bits, so nothing is sorted. Weights are integers: sums
do not depend on their order. Launched without fused multiply-adds: every operation of a float has
the reference's rounding.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors import elementary
from quire.executors.cuda.kernels import layers

CHUNK = 4096  # columns of one program
GROUP = 32  # columns whose greatest score is kept for bounds
LISTED_AT_MOST = 16384  # of a row: where more tokens are left, the whole row is read again
SEEN_IN_PROMPT = 1 << 30  # added to the count of a token

# What becomes of a row.
SKIP, GREEDY, ALL, LISTED, WEIGHED = 0, 1, 2, 3, 4
_SKIP, _GREEDY, _ALL = tl.constexpr(SKIP), tl.constexpr(GREEDY), tl.constexpr(ALL)
_LISTED, _WEIGHED = tl.constexpr(LISTED), tl.constexpr(WEIGHED)
_COUNT_BITS = tl.constexpr(SEEN_IN_PROMPT - 1)
_FINITE, _NOT_FINITE = tl.constexpr(layers.FINITE), tl.constexpr(layers.NOT_FINITE)
_NOTHING_ALLOWED = tl.constexpr(layers.NOTHING_ALLOWED)
_TOO_LARGE = tl.constexpr(layers.TOO_LARGE)

# A row's words: what its sequence always has, then what the step gives it.
WORDS = 32
SEED, INDEX, TOP_K = 0, 2, 3  # a seed has two words
REPETITION, FREQUENCY, PRESENCE = 4, 5, 6  # float32
TEMPERATURE, TOP_P, MIN_P, LEAST_EXPONENT = 4, 5, 6, 7  # float64: in pairs of words
KIND, POSITION, SLOT, COUNTS, PENDING, MASK = 16, 17, 19, 20, 21, 22  # a position has two words
EDITS, NUM_EDITS, NUM_LATE_EDITS, IS_CHANGED = 23, 24, 25, 26
COUNTED, COUNTED_BY = 27, 29  # two tokens, and what is added to the count of each
NUM_TOP = 31  # see scoring.Scored
_WORDS = tl.constexpr(WORDS)
_SEED, _INDEX, _TOP_K = tl.constexpr(SEED), tl.constexpr(INDEX), tl.constexpr(TOP_K)
_REPETITION, _FREQUENCY = tl.constexpr(REPETITION), tl.constexpr(FREQUENCY)
_PRESENCE = tl.constexpr(PRESENCE)
_TEMPERATURE, _TOP_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_P)
_MIN_P, _LEAST_EXPONENT = tl.constexpr(MIN_P), tl.constexpr(LEAST_EXPONENT)
_KIND, _POSITION, _SLOT = tl.constexpr(KIND), tl.constexpr(POSITION), tl.constexpr(SLOT)
_COUNTS, _PENDING, _MASK = tl.constexpr(COUNTS), tl.constexpr(PENDING), tl.constexpr(MASK)
_EDITS, _NUM_EDITS = tl.constexpr(EDITS), tl.constexpr(NUM_EDITS)
_NUM_LATE_EDITS, _IS_CHANGED = tl.constexpr(NUM_LATE_EDITS), tl.constexpr(IS_CHANGED)
_COUNTED, _COUNTED_BY = tl.constexpr(COUNTED), tl.constexpr(COUNTED_BY)

ZERO_EXPONENT = -22.2  # e to this is less than 2**-32: a weight of 0
_ZERO_EXPONENT = tl.constexpr(ZERO_EXPONENT)
_BLOCK = tl.constexpr(1024)  # listed tokens at once
_DIGIT = tl.constexpr(8)
ROUNDS = 4  # of `narrow`
_ROUNDS = tl.constexpr(ROUNDS)
_LOG2_E, _TO_INTEGER = tl.constexpr(elementary.LOG2_E), tl.constexpr(elementary.TO_INTEGER)
_LN2_HIGH, _LN2_LOW = tl.constexpr(elementary.LN2_HIGH), tl.constexpr(elementary.LN2_LOW)
_LOWEST = tl.constexpr(elementary.LOWEST_EXPONENT)
_TAIL = tuple(tl.constexpr(coefficient) for coefficient in elementary.EXP_TAIL)
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9 = _TAIL
_NO_TOKEN = tl.constexpr(2**31 - 1)


class RowInput(NamedTuple):
    """What a step sends for its rows."""

    words: Any  # int32 [row, WORDS]
    floats: Any  # the same as float32
    doubles: Any  # the same as float64 [row, WORDS / 2]
    edit_tokens: Any  # int32 [edit, 2]: bans and biases of a row, then what DRY adds
    edit_values: Any  # the same as float32: the second of each
    masks: Any  # int32 [row, words of a mask]: bit t % 32 of word t // 32 allows t


class Workspace(NamedTuple):
    """What the kernels leave for one another, by row."""

    scores: Any  # float32 [row, vocabulary]: adjusted, where IS_CHANGED
    counts: Any  # int32 [row of counts, vocabulary]: how often penalties find a token
    chunk_best: Any  # float32 [row, chunk]
    chunk_faults: Any  # int32 [row, chunk]: 1 where a logit is not finite
    chunk_sums: Any  # int64 [row, chunk]: of weights
    chunk_above: Any  # int64 [row, chunk]: of those that reach the upper bound
    group_best: Any  # float32 [row, chunk, group]
    kinds: Any  # int32 [row]: SKIP where a row has no token
    best: Any  # float32 [row]
    masses: Any  # float32 [row, ROUNDS, 8]: about how much weight reaches the bounds of a round
    bounds: Any  # float32 [row]: what scores less is not listed
    upper_bounds: Any  # float32 [row]: nor what reaches this, of a WEIGHED row
    num_listed: Any  # int32 [row]
    listed: Any  # int32 [row, LISTED_AT_MOST]: tokens
    listed_scores: Any  # float32
    listed_weights: Any  # int64


@triton.jit
def _exp(x):
    """executors/elementary.py's exp of float64 values of at most 0."""
    bounded = tl.maximum(x, tl.full([], _LOWEST, tl.float64))
    to_integer = tl.full([], _TO_INTEGER, tl.float64)
    shifted = bounded * tl.full([], _LOG2_E, tl.float64) + to_integer
    power = shifted - to_integer
    rest = bounded - power * tl.full([], _LN2_HIGH, tl.float64)
    rest = rest - power * tl.full([], _LN2_LOW, tl.float64)
    result = tl.full([], _T9, tl.float64) * rest + tl.full([], _T8, tl.float64)
    result = result * rest + tl.full([], _T7, tl.float64)
    result = result * rest + tl.full([], _T6, tl.float64)
    result = result * rest + tl.full([], _T5, tl.float64)
    result = result * rest + tl.full([], _T4, tl.float64)
    result = result * rest + tl.full([], _T3, tl.float64)
    result = result * rest + tl.full([], _T2, tl.float64)
    result = result * rest + tl.full([], _T1, tl.float64)
    result = result * rest + tl.full([], _T0, tl.float64)
    result = result * rest
    result = result * rest
    result = result + rest
    result = result + tl.full([], 1.0, tl.float64)
    bits = result.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
    is_zero = x < tl.full([], _LOWEST, tl.float64)
    return tl.where(is_zero, tl.full([], 0.0, tl.float64), bits.to(tl.float64, bitcast=True))


@triton.jit
def _weigh(x, best, temperature, min_p):
    """Integer weights of scores; 0 for a likelihood below min_p."""
    return _weigh_exponents((x.to(tl.float64) - best.to(tl.float64)) / temperature, min_p)


@triton.jit
def _weigh_exponents(exponents, min_p):
    likelihood = _exp(exponents)
    weights = (likelihood * tl.full([], 4294967296.0, tl.float64)).to(tl.int64)
    return tl.where(likelihood < min_p, 0, weights)


@triton.jit
def _scores_of(rows, logits, work, row, width):
    """Where a row's scores are: its logits, unless something changed them."""
    scores = logits + row.to(tl.int64) * width
    if tl.load(rows.words + row * _WORDS + _IS_CHANGED) != 0:
        scores = work.scores + row.to(tl.int64) * width
    return scores


# ---- adjusting


@triton.jit
def _edited(x, column, first, tokens, values, start, count, CHUNK: tl.constexpr):
    for index in range(start, start + count):
        token = tl.load(tokens + 2 * index)
        if (token >= first) & (token < first + CHUNK):
            x = tl.where(column == token, x + tl.load(values + 2 * index + 1), x)
    return x


@triton.jit
def _penalised(x, column, inside, rows, work, samples, row, width):
    """Penalties by the counts, after the step's change to them."""
    words = rows.words + row * _WORDS
    counts = work.counts + tl.load(words + _COUNTS).to(tl.int64) * width + column
    count = tl.load(counts, mask=inside, other=0)
    first, second = tl.load(words + _COUNTED), tl.load(words + _COUNTED + 1)
    changed = inside & ((column == first) | (column == second))
    count += tl.where(column == first, tl.load(words + _COUNTED_BY), 0)
    count += tl.where(column == second, tl.load(words + _COUNTED_BY + 1), 0)
    tl.store(counts, count, mask=changed)
    pending = tl.load(words + _PENDING)
    if pending >= 0:  # not known to the host yet: counted now, and not kept
        count += (column == tl.load(samples + pending)).to(tl.int32)
    factor = tl.load(rows.floats + row * _WORDS + _REPETITION)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x = tl.where((count > 0) & (tl.zeros_like(x) + factor != 1.0), repeated, x)
    count = count & _COUNT_BITS
    frequency = tl.load(rows.floats + row * _WORDS + _FREQUENCY)
    once = x - frequency * count.to(tl.float32)
    return tl.where(count > 0, once - tl.load(rows.floats + row * _WORDS + _PRESENCE), x)


@triton.jit
def adjust(
    logits,
    rows,
    work,
    samples,
    width,
    mask_words,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Mask, bans, bias and penalties of a chunk: to `scores`, where there are any; the greatest
    scores of the chunk and of its groups. One program: a row and a chunk."""
    row = tl.program_id(0)
    words = rows.words + row * _WORDS
    if tl.load(words + _KIND) != _SKIP:
        chunk = tl.program_id(1)
        first = chunk * CHUNK
        column = first + tl.arange(0, CHUNK)
        inside = column < width
        at = row.to(tl.int64) * width + column
        x = tl.load(logits + at, mask=inside, other=float("-inf"))
        fault = tl.max((inside & ~(tl.abs(x) < float("inf"))).to(tl.int32), axis=0)
        mask = tl.load(words + _MASK)
        if mask >= 0:
            bits = tl.load(rows.masks + mask * mask_words + column // 32, mask=inside, other=0)
            x = tl.where((bits >> (column % 32)) & 1 != 0, x, float("-inf"))
        start, count = tl.load(words + _EDITS), tl.load(words + _NUM_EDITS)
        x = _edited(x, column, first, rows.edit_tokens, rows.edit_values, start, count, CHUNK)
        if tl.load(words + _COUNTS) >= 0:
            x = _penalised(x, column, inside, rows, work, samples, row, width)
        start += count
        count = tl.load(words + _NUM_LATE_EDITS)
        x = _edited(x, column, first, rows.edit_tokens, rows.edit_values, start, count, CHUNK)
        if tl.load(words + _IS_CHANGED) != 0:
            tl.store(work.scores + at, x, mask=inside)
        index = row * tl.num_programs(1) + chunk
        tl.store(work.chunk_best + index, tl.max(x, axis=0))
        tl.store(work.chunk_faults + index, fault)
        GROUPS: tl.constexpr = CHUNK // GROUP
        best = tl.max(tl.reshape(x, [GROUPS, GROUP]), axis=1)
        tl.store(work.group_best + index * GROUPS + tl.arange(0, GROUPS), best)


# ---- bounds


@triton.jit
def _kth_greatest(values, k):
    """Of float32 values; by the bits of integers that have their order."""
    bits = values.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    found = tl.full([], 0, tl.int64)
    for digit in range(32):
        higher = found + (tl.full([], 1, tl.int64) << (31 - digit))
        if tl.sum((keys >= higher).to(tl.int32), axis=0) >= k:
            found = higher
    key = (found - 2147483648).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _score_bound(best, exponent, temperature):
    """A float32 below every score whose exponent reaches the given one."""
    bound = (best.to(tl.float64) + exponent * temperature).to(tl.float32)
    return bound - tl.abs(bound) * 2.4e-7 - 1e-37


@triton.jit
def _tie_exponent(exponent):
    """An exponent below which weights are less than the given one's weight, whose equals, though
    they score less, may come before it."""
    weight = tl.exp(exponent.to(tl.float32)) * 4294967296.0
    lower = exponent - (4.0 / tl.maximum(weight, 1.0)).to(tl.float64) - 1e-9
    return tl.where(weight < 1.0, tl.full([], _ZERO_EXPONENT, tl.float64), lower)


@triton.jit
def find_bounds(
    rows,
    work,
    samples,
    sampled,
    num_chunks,
    CHUNKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """A row's best score, whether it has any token, and for LISTED rows the bound: top-k keeps
    nothing below the k-th greatest of the groups' best scores, for k tokens reach it. One program a
    row; CHUNKS and NUM_GROUPS are powers of two."""
    row = tl.program_id(0)
    words = rows.words + row * _WORDS
    kind = tl.load(words + _KIND)
    if kind != _SKIP:
        chunk = tl.arange(0, CHUNKS)
        at = row * num_chunks + chunk
        is_chunk = chunk < num_chunks
        best = tl.max(tl.load(work.chunk_best + at, mask=is_chunk, other=float("-inf")), axis=0)
        fault = tl.max(tl.load(work.chunk_faults + at, mask=is_chunk, other=0), axis=0)
        status = tl.where(best < float("inf"), _FINITE, _TOO_LARGE)
        status = tl.where(best == float("-inf"), _NOTHING_ALLOWED, status)
        status = tl.where(fault != 0, _NOT_FINITE, status)
        tl.store(work.best + row, best)
        tl.store(work.num_listed + row, 0)
        tl.store(sampled + row * 2 + 1, status)
        if status != _FINITE:
            tl.store(sampled + row * 2, 0)
            tl.store(samples + tl.load(words + _SLOT), 0)
            kind = _SKIP
        if kind == _WEIGHED:
            own = work.masses + row * _ROUNDS * _DIGIT + tl.arange(0, _ROUNDS * _DIGIT)
            tl.store(own, tl.zeros([_ROUNDS * _DIGIT], tl.float32))
        if kind == _LISTED:
            doubles = rows.doubles + row * (_WORDS // 2)
            temperature = tl.load(doubles + _TEMPERATURE)
            exponent = tl.load(doubles + _LEAST_EXPONENT)
            top_k = tl.load(words + _TOP_K)
            if (top_k > 0) & (top_k <= NUM_GROUPS):
                group = tl.arange(0, NUM_GROUPS)
                num_groups = num_chunks * (NUM_GROUPS // CHUNKS)
                group_best = tl.load(
                    work.group_best + row * num_groups + group,
                    mask=group < num_groups,
                    other=float("-inf"),
                )
                least = _kth_greatest(group_best, top_k).to(tl.float64)
                tied = _tie_exponent((least - best.to(tl.float64)) / temperature)
                exponent = tl.maximum(exponent, tied)
            tl.store(work.bounds + row, _score_bound(best, exponent, temperature))
    tl.store(work.kinds + row, kind)


# ---- where top-p cuts


@triton.jit
def _bracket(rows, work, row, DONE: tl.constexpr):
    """After so many rounds: an exponent that the tokens at the cut reach, and how far above it is
    one that they do not."""
    doubles = rows.doubles + row * (_WORDS // 2)
    low = tl.load(doubles + _LEAST_EXPONENT).to(tl.float32)
    step = -low
    digit = tl.arange(0, _DIGIT)
    masses = work.masses + row * _ROUNDS * _DIGIT
    wanted = tl.load(masses) * tl.load(doubles + _TOP_P).to(tl.float32)
    for done in tl.static_range(DONE):
        is_reached = tl.load(masses + done * _DIGIT + digit) >= wanted
        step = step / 8
        low += step * (tl.sum((is_reached | (digit == 0)).to(tl.int32), axis=0) - 1)
    return low, step


@triton.jit
def narrow(logits, rows, work, width, ROUND: tl.constexpr, CHUNK: tl.constexpr):
    """Add up about how much of a chunk's weight reaches each of eight exponents between those that
    the rounds before left. The order of these sums is not fixed: no token depends on them. One
    program: a row and a chunk."""
    row = tl.program_id(0)
    if tl.load(work.kinds + row) == _WEIGHED:
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        scores = _scores_of(rows, logits, work, row, width)
        x = tl.load(scores + column, mask=column < width, other=float("-inf"))
        temperature = tl.load(rows.doubles + row * (_WORDS // 2) + _TEMPERATURE).to(tl.float32)
        exponents = (x - tl.load(work.best + row)) / tl.maximum(temperature, 1e-30)
        low, step = _bracket(rows, work, row, ROUND)
        digit = tl.arange(0, _DIGIT)
        tried = low + digit * (step / 8)
        is_reached = exponents[None, :] >= tried[:, None]
        reached = tl.sum(tl.where(is_reached, tl.exp(exponents)[None, :], 0.0), axis=1)
        tl.atomic_add(work.masses + (row * _ROUNDS + ROUND) * _DIGIT + digit, reached)


@triton.jit
def _score_bracket(rows, work, row):
    """Scores between which the cut is, with room for sums that are not exact and for ties."""
    low, step = _bracket(rows, work, row, _ROUNDS)
    high = low + step
    low -= step / 4 + 4.0 / tl.maximum(tl.exp(low) * 4294967296.0, 1.0)
    high += step / 4 + 4.0 / tl.maximum(tl.exp(high) * 4294967296.0, 1.0)
    best = tl.load(work.best + row)
    temperature = tl.load(rows.doubles + row * (_WORDS // 2) + _TEMPERATURE)
    lower = _score_bound(best, low.to(tl.float64), temperature)
    upper = (best.to(tl.float64) + high.to(tl.float64) * temperature).to(tl.float32)
    return lower, tl.where(high > 0.0, float("inf"), upper)


# ---- weights and lists


@triton.jit
def _list_tokens(work, row, x, column, is_listed, LIST: tl.constexpr):
    """Append to the row's list, in any order; its length may come out greater than LIST."""
    count = tl.sum(is_listed.to(tl.int32), axis=0)
    if count > 0:
        start = tl.atomic_add(work.num_listed + row, count)
        at = start + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        fits = is_listed & (at < LIST)
        tl.store(work.listed + row.to(tl.int64) * LIST + at, column, mask=fits)
        tl.store(work.listed_scores + row.to(tl.int64) * LIST + at, x, mask=fits)


@triton.jit
def weigh_or_list(logits, rows, work, width, CHUNK: tl.constexpr, LIST: tl.constexpr):
    """Of a chunk: the sum of all weights, or for LISTED rows the tokens that reach the bound. One
    program: a row and a chunk."""
    row = tl.program_id(0)
    kind = tl.load(work.kinds + row)
    if kind >= _ALL:
        chunk = tl.program_id(1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = _scores_of(rows, logits, work, row, width)
        x = tl.load(scores + column, mask=column < width, other=float("-inf"))
        if kind == _LISTED:
            is_listed = (column < width) & (x >= tl.load(work.bounds + row))
            _list_tokens(work, row, x, column, is_listed, LIST)
        else:
            doubles = rows.doubles + row * (_WORDS // 2)
            temperature, min_p = tl.load(doubles + _TEMPERATURE), tl.load(doubles + _MIN_P)
            weights = _weigh(x, tl.load(work.best + row), temperature, min_p)
            index = row * tl.num_programs(1) + chunk
            tl.store(work.chunk_sums + index, tl.sum(weights, axis=0))
            if kind == _WEIGHED:
                lower, upper = _score_bracket(rows, work, row)
                above = tl.sum(tl.where(x >= upper, weights, 0), axis=0)
                tl.store(work.chunk_above + index, above)
                is_listed = (column < width) & (x >= lower) & (x < upper)
                _list_tokens(work, row, x, column, is_listed, LIST)
                if chunk == 0:
                    tl.store(work.bounds + row, lower)
                    tl.store(work.upper_bounds + row, upper)


# ---- cuts and draws


class _Source(NamedTuple):
    """The tokens to choose among: a row's list, or where that is too short the whole row."""

    listed: Any
    weights: Any
    scores: Any
    best: Any
    temperature: Any
    min_p: Any
    count: Any
    is_whole: Any


@triton.jit
def _tokens_at(source, start):
    """Tokens and weights of a block; beyond the end no token and 0."""
    at = start + tl.arange(0, _BLOCK)
    inside = at < source.count
    tokens = at
    weights = tl.zeros([_BLOCK], tl.int64)
    if source.is_whole:
        x = tl.load(source.scores + at, mask=inside, other=float("-inf"))
        weights = _weigh(x, source.best, source.temperature, source.min_p)
    else:
        tokens = tl.load(source.listed + at, mask=inside, other=0)
        weights = tl.load(source.weights + at, mask=inside, other=0)
    return tl.where(inside, tokens, _NO_TOKEN), tl.where(inside, weights, 0)


@triton.jit
def _weigh_list(source, listed_scores):
    """Keep the weights of a list."""
    for start in range(0, source.count, _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        x = tl.load(listed_scores + at, mask=at < source.count, other=float("-inf"))
        weights = _weigh(x, source.best, source.temperature, source.min_p)
        tl.store(source.weights + at, weights, mask=at < source.count)
    tl.debug_barrier()


@triton.jit
def _threshold(source, target, BY_WEIGHT: tl.constexpr):
    """The greatest threshold that enough tokens reach, by their number or their weight."""
    found = tl.full([], 0, tl.int64)
    digit = tl.arange(0, _DIGIT).to(tl.int64)
    for place in range(11):
        unit = tl.full([], 1, tl.int64) << (30 - 3 * place)
        tried = found + digit * unit
        reached = tl.zeros([_DIGIT], tl.int64)
        for start in range(0, source.count, _BLOCK):
            tokens, weights = _tokens_at(source, start)
            measure = weights
            if not BY_WEIGHT:
                measure = (tokens != _NO_TOKEN).to(tl.int64)
            is_reached = weights[None, :] >= tried[:, None]
            reached += tl.sum(tl.where(is_reached, measure[None, :], 0), axis=1)
        is_enough = (reached >= target) | (digit == 0)
        found += (tl.sum(is_enough.to(tl.int64), axis=0) - 1) * unit
    return found


@triton.jit
def _above(source, threshold):
    """Number and weight of the tokens above a threshold, and the number of those at it."""
    number = tl.full([], 0, tl.int64)
    weight = tl.full([], 0, tl.int64)
    equal = tl.full([], 0, tl.int64)
    for start in range(0, source.count, _BLOCK):
        tokens, weights = _tokens_at(source, start)
        is_above = weights > threshold
        number += tl.sum(is_above.to(tl.int64), axis=0)
        weight += tl.sum(tl.where(is_above, weights, 0), axis=0)
        is_equal = (weights == threshold) & (tokens != _NO_TOKEN)
        equal += tl.sum(is_equal.to(tl.int64), axis=0)
    return number, weight, equal


@triton.jit
def _token_at(source, threshold, last_tie, point, OF_TIES: tl.constexpr):
    """The token at a point of the kept tokens, which stand in order of their ids: each as long as
    its weight; or OF_TIES, one of those at the threshold, each one long."""
    found = tl.full([], 0, tl.int64)
    digit = tl.arange(0, _DIGIT).to(tl.int64)
    for place in range(8):
        unit = tl.full([], 1, tl.int64) << (21 - 3 * place)
        tried = found + digit * unit
        before = tl.zeros([_DIGIT], tl.int64)
        for start in range(0, source.count, _BLOCK):
            tokens, weights = _tokens_at(source, start)
            if OF_TIES:
                length = ((weights == threshold) & (tokens != _NO_TOKEN)).to(tl.int64)
            else:
                is_kept = (weights > threshold) | ((weights == threshold) & (tokens <= last_tie))
                length = tl.where(is_kept, weights, 0)
            is_before = tokens.to(tl.int64)[None, :] < tried[:, None]
            before += tl.sum(tl.where(is_before, length[None, :], 0), axis=1)
        is_reached = (before <= point) | (digit == 0)
        found += (tl.sum(is_reached.to(tl.int64), axis=0) - 1) * unit
    return found


@triton.jit
def _ceil_quotient(dividend, divisor):
    divisor = tl.maximum(divisor, 1)
    return (dividend + divisor - 1) // divisor


@triton.jit
def _share_of(total, top_p):
    """The least integer that is no less than this share."""
    wanted = top_p * total.to(tl.float64)
    target = wanted.to(tl.int64)
    return target + (target.to(tl.float64) < wanted).to(tl.int64)


@triton.jit
def _drawn_of_list(source, bits, top_k, top_p):
    """Cut by top-k, then by top-p, and draw."""
    threshold = tl.full([], 0, tl.int64)
    if (top_k > 0) & (source.count > top_k):
        threshold = _threshold(source, top_k, False)
    number, above, equal = _above(source, threshold)
    ties = equal
    if top_k > 0:
        ties = tl.minimum(ties, tl.maximum(top_k - number, 0))
    if top_p < 1.0:
        target = _share_of(above + ties * threshold, top_p)
        if above >= target:
            threshold = _threshold(source, target, True)
            number, above, equal = _above(source, threshold)
            ties = equal
        ties = tl.minimum(ties, _ceil_quotient(target - above, threshold))
    last_tie = tl.full([], 1 << 30, tl.int64)
    if (ties < equal) & (threshold > 0):
        last_tie = _token_at(source, threshold, 0, ties - 1, True)
    total = above + ties * threshold
    point = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
    return _token_at(source, threshold, last_tie, point, False)


@triton.jit
def _drawn_in_chunk(scores, source, chunk, threshold, last_tie, point, width, CHUNK: tl.constexpr):
    """The token at a point of the kept tokens of a chunk."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(scores + column, mask=column < width, other=float("-inf"))
    weights = _weigh(x, source.best, source.temperature, source.min_p)
    is_kept = (weights > threshold) | ((weights == threshold) & (column <= last_tie))
    ends = tl.cumsum(tl.where(is_kept, weights, 0), axis=0)
    return (chunk * CHUNK + tl.sum((ends <= point).to(tl.int32), axis=0)).to(tl.int64)


@triton.jit
def _chunk_at(source, aboves, chunk, threshold, last_tie, point, CHUNK: tl.constexpr):
    """The chunk that holds a point of the kept tokens, and the point within it."""
    found = tl.full([], 0, tl.int32)
    base = tl.full([], 0, tl.int64)
    digit = tl.arange(0, _DIGIT)
    for place in range(3):
        unit = tl.full([], 1, tl.int32) << (6 - 3 * place)
        tried = found + digit * unit
        is_before = chunk[None, :] < tried[:, None]
        before = tl.sum(tl.where(is_before, aboves[None, :], 0), axis=1)
        for start in range(0, source.count, _BLOCK):
            tokens, weights = _tokens_at(source, start)
            is_kept = (weights > threshold) | ((weights == threshold) & (tokens <= last_tie))
            is_listed = tokens[None, :] < (tried * CHUNK)[:, None]
            kept = tl.where(is_kept, weights, 0)
            before += tl.sum(tl.where(is_listed, kept[None, :], 0), axis=1)
        is_reached = (before <= point) | (digit == 0)
        found += (tl.sum(is_reached.to(tl.int32), axis=0) - 1) * unit
        base = tl.max(tl.where(is_reached, before, 0), axis=0)
    return found, point - base


@triton.jit
def _drawn_of_bracket(
    source,
    bits,
    top_p,
    work,
    row,
    width,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Cut by top-p where the list has the tokens around the cut, and draw; -1 where it has not. A
    token that reaches the upper bound must weigh more than the threshold, one that does not reach
    the lower bound less: with a margin, for the exponential is not monotone to the last bit."""
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    sums = tl.load(work.chunk_sums + at, mask=chunk < num_chunks, other=0)
    aboves = tl.load(work.chunk_above + at, mask=chunk < num_chunks, other=0)
    beyond = tl.sum(aboves, axis=0)
    rest = _share_of(tl.sum(sums, axis=0), top_p) - beyond
    _number, listed, equal = _above(source, tl.full([], 0, tl.int64))
    token = tl.full([], -1, tl.int64)
    if (rest > 0) & (rest <= listed):
        threshold = _threshold(source, rest, True)
        _number, above, equal = _above(source, threshold)
        ties = tl.minimum(equal, _ceil_quotient(rest - above, threshold))
        lower, upper = tl.load(work.bounds + row), tl.load(work.upper_bounds + row)
        exponent = (lower.to(tl.float64) - source.best.to(tl.float64)) / source.temperature
        least = _weigh_exponents(exponent, tl.full([], 0.0, tl.float64))
        slightly_more = _weigh_exponents(exponent + 1e-12, source.min_p)
        highest = tl.minimum(upper, source.best)
        most = _weigh(highest, source.best, source.temperature, source.min_p)
        is_within = (slightly_more == 0) | (least + 1 < threshold)
        if is_within & ((upper > source.best) | (most > threshold + 1)):
            last_tie = tl.full([], 1 << 30, tl.int64)
            if ties < equal:
                last_tie = _token_at(source, threshold, 0, ties - 1, True)
            total = beyond + above + ties * threshold
            point = tl.umulhi(bits, total.to(tl.uint64)).to(tl.int64)
            own, point = _chunk_at(source, aboves, chunk, threshold, last_tie, point, CHUNK)
            token = _drawn_in_chunk(
                source.scores, source, own, threshold, last_tie, point, width, CHUNK
            )
    return token


@triton.jit
def _random_bits(words):
    """64 bits of Philox4x32-10: core/sampling.py's draw_bits."""
    k0 = tl.load(words + _SEED).to(tl.uint32, bitcast=True)
    k1 = tl.load(words + _SEED + 1).to(tl.uint32, bitcast=True)
    c0 = tl.load(words + _POSITION).to(tl.uint32, bitcast=True)
    c1 = tl.load(words + _POSITION + 1).to(tl.uint32, bitcast=True)
    c2 = tl.load(words + _INDEX).to(tl.uint32, bitcast=True)
    c3 = tl.full([], 0, tl.uint32)
    first, second = tl.full([], 0xD2511F53, tl.uint32), tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(first, c0), first * c0
        high1, low1 = tl.umulhi(second, c2), second * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return (c1.to(tl.uint64) << 32) | c0.to(tl.uint64)


@triton.jit
def _first_best(
    scores, best, work, row, width, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    chunk = tl.arange(0, CHUNKS)
    in_row = chunk < num_chunks
    bests = tl.load(work.chunk_best + row * num_chunks + chunk, mask=in_row, other=float("-inf"))
    first = tl.min(tl.where(in_row & (bests == best), chunk, num_chunks - 1), axis=0)
    column = first * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(scores + column, mask=column < width, other=float("-inf"))
    return tl.min(tl.where((column < width) & (x == best), column, width - 1), axis=0).to(tl.int64)


@triton.jit
def _drawn_of_all(
    scores, source, bits, work, row, width, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """The token at a point of all weights: its chunk by the chunks' sums, then within that."""
    chunk = tl.arange(0, CHUNKS)
    sums = tl.load(work.chunk_sums + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    ends = tl.cumsum(sums, axis=0)
    point = tl.umulhi(bits, tl.sum(sums, axis=0).to(tl.uint64)).to(tl.int64)
    found = tl.sum((ends <= point).to(tl.int32), axis=0)
    point -= tl.sum(tl.where(chunk < found, sums, 0), axis=0)
    return _drawn_in_chunk(scores, source, found, 0, 0, point, width, CHUNK)


@triton.jit
def choose(
    logits,
    rows,
    work,
    samples,
    sampled,
    width,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
):
    """A row's token: to `samples` at its slot, and to `sampled`. One program a row."""
    row = tl.program_id(0)
    kind = tl.load(work.kinds + row)
    if kind != _SKIP:
        words = rows.words + row * _WORDS
        doubles = rows.doubles + row * (_WORDS // 2)
        scores = _scores_of(rows, logits, work, row, width)
        best = tl.load(work.best + row)
        start = row.to(tl.int64) * LIST
        listed, weights = work.listed + start, work.listed_weights + start
        count = tl.load(work.num_listed + row)
        temperature, min_p = tl.load(doubles + _TEMPERATURE), tl.load(doubles + _MIN_P)
        top_k, top_p = tl.load(words + _TOP_K), tl.load(doubles + _TOP_P)
        is_whole = count > LIST
        source = _Source(
            listed, weights, scores, best, temperature, min_p, tl.minimum(count, LIST), False
        )
        bits = _random_bits(words)
        token = tl.full([], -1, tl.int64)
        if kind == _GREEDY:
            token = _first_best(scores, best, work, row, width, num_chunks, CHUNK, CHUNKS)
        elif kind == _ALL:
            token = _drawn_of_all(scores, source, bits, work, row, width, num_chunks, CHUNK, CHUNKS)
        else:
            _weigh_list(source, work.listed_scores + start)
            if (kind == _WEIGHED) & (count <= LIST):
                token = _drawn_of_bracket(
                    source, bits, top_p, work, row, width, num_chunks, CHUNK, CHUNKS
                )
            if token < 0:
                is_whole = is_whole | (kind == _WEIGHED)
                count = tl.where(is_whole, width, count)
                whole = _Source(listed, weights, scores, best, temperature, min_p, count, is_whole)
                token = _drawn_of_list(whole, bits, top_k, top_p)
        token = tl.minimum(token, width - 1).to(tl.int32)
        tl.store(sampled + row * 2, token)
        tl.store(samples + tl.load(words + _SLOT), token)
