"""Log-probabilities of tokens under rows of logits: one program a row, no copy of the row."""

# ruff: noqa: N803

import triton
import triton.language as tl

BLOCK = 2048  # columns at once; with WARPS it fixes the order of a row's sum
WARPS = 8


@triton.jit
def _logprobs_at(row, column, width, largest, log_sum):
    """float64 log-probabilities of these columns; minus infinity beyond the row."""
    x = tl.load(row + column, mask=column < width, other=float("-inf")).to(tl.float64)
    return (x - largest) - log_sum


@triton.jit(do_not_specialize=["num_top"])
def score_rows(
    logits,
    tokens,
    logprobs,
    ranks,
    top_tokens,
    top_logprobs,
    width,
    stride,
    num_top,
    top_stride,
    BLOCK: tl.constexpr,
):
    """Of each row its token's log-probability and rank, and the likeliest `num_top` tokens.

    Sums run in float64: column c goes to sum c % BLOCK, in ascending order, then the BLOCK sums
    meet in one tree. That order is a function of the row's width alone. Of equal log-probabilities
    the lower token comes first. A row with NaN yields anything, within bounds.
    """
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * stride
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + lane
        x = tl.load(row + column, mask=column < width, other=float("-inf"))
        most = tl.maximum(most, x)
    largest = tl.max(most, axis=0).to(tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        column = start + lane
        x = tl.load(row + column, mask=column < width, other=float("-inf")).to(tl.float64)
        sums += tl.exp(x - largest)
    log_sum = tl.log(tl.sum(sums, axis=0))

    token = tl.load(tokens + at)
    own = (tl.load(row + token).to(tl.float64) - largest) - log_sum
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        above += (_logprobs_at(row, start + lane, width, largest, log_sum) > own).to(tl.int32)
    tl.store(logprobs + at, own)
    tl.store(ranks + at, 1 + tl.sum(above, axis=0).to(tl.int64))

    last = tl.full([], float("inf"), tl.float64)  # the one found before: next come those after it
    last_token = tl.full([], -1, tl.int32)
    for place in range(num_top):
        best = tl.full([BLOCK], float("-inf"), tl.float64)
        best_token = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, width, BLOCK):
            column = start + lane
            x = _logprobs_at(row, column, width, largest, log_sum)
            is_after = (x < last) | ((x == last) & (column > last_token))
            is_better = (column < width) & is_after & ((x > best) | (best_token == 2147483647))
            best = tl.where(is_better, x, best)
            best_token = tl.where(is_better, column, best_token)
        last = tl.max(best, axis=0)
        last_token = tl.min(tl.where(best == last, best_token, 2147483647), axis=0)
        tl.store(top_tokens + at * top_stride + place, last_token.to(tl.int64))
        tl.store(top_logprobs + at * top_stride + place, last)
