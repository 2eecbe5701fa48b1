"""Layers that keep a state (model/states.py): their convolution, and a head's recurrence.

The tokens of a sequence follow each other in a step: its chunk. A token's convolution sees inputs
of the chunk and, before its first token, those that the state kept; a head's matrix goes through
the chunk token by token, in registers, in float32. So a token's bits are the same in any chunks,
and those of a state too. The first state is read from slot `source` (-1: zeros), the last one is
written to slot `target`; no other chunk of a step reads or writes either.
"""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.attention import operand_column
from quire.executors.cuda.kernels.gates import begin, sigmoid, summed

_UNIT_EPSILON = tl.constexpr(1e-6)  # of vectors that are made one long


class Chunks(NamedTuple):
    """int32. One entry a token in `sequences`, one a chunk in the others."""

    sequences: Any  # the token's chunk; padding: -1
    rows: Any  # its first token
    counts: Any  # tokens; 0: there is no such chunk
    sources: Any
    targets: Any


class Convolution(NamedTuple):
    """What a layer's convolution reads beside its inputs, and where it keeps these; float32."""

    taps: Any  # [kernel, channels]; the last is of the token itself
    bias: Any  # [channels], or None
    kept: Any  # [slot, kernel - 1, channels]: inputs, the last token's last


class HeadWeights(NamedTuple):
    """Of a layer's heads, float32 [heads] each."""

    a: Any
    dt: Any


class HeadVectors(NamedTuple):
    """What the recurrence takes of each token, float32."""

    channels: Any  # [token, channels], convolved
    decays: Any  # [token, head]
    steps: Any  # [token, head]: Mamba's time step, DeltaNet's beta


class StateShape(NamedTuple):
    """Sizes of a layer, known when its kernels are compiled."""

    kernel: int
    num_channels: int
    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    is_delta_net: bool
    is_tiled: bool  # see StateMixer
    query_at: int  # among the channels
    key_at: int
    value_at: int
    alpha_at: int  # among the rows of the GEMM
    beta_at: int


@triton.jit
def _chunk_of(chunks, token):
    """The token's chunk, its place in it, and whether there is one."""
    sequence = tl.load(chunks.sequences + token)
    known = tl.maximum(sequence, 0)
    index = token - tl.load(chunks.rows + known)
    return known, index, (sequence >= 0) & (index < tl.load(chunks.counts + known))


@triton.jit
def _entering(
    sums,
    token,
    channel,
    inside,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """What a token's convolution takes; with GATED times the gate before it, which comes first
    among the rows."""
    if GATED:
        x = summed(sums, token, 2 * SHAPE.num_channels + channel, inside, SPLITS)
        x = x * summed(sums, token, channel, inside, SPLITS)
    else:
        x = summed(sums, token, channel, inside, SPLITS)
    return x


@triton.jit
def _convolved(
    sums,
    chunks,
    convolution,
    sequence,
    token,
    index,
    channel,
    inside,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Some channels of a token: the sum over the last tokens in their order, this one last. The
    chunk's last token leaves the state."""
    TAPS: tl.constexpr = SHAPE.kernel
    PAST: tl.constexpr = TAPS - 1
    source = tl.load(chunks.sources + sequence).to(tl.int64)
    target = tl.load(chunks.targets + sequence).to(tl.int64)
    is_last = index == tl.load(chunks.counts + sequence) - 1
    total = tl.zeros_like(channel).to(tl.float32)
    for tap in tl.static_range(TAPS):
        at = index - PAST + tap
        is_new = at >= 0
        seen = tl.maximum(token - PAST + tap, 0).to(tl.int64)
        new = _entering(sums, seen, channel, inside & is_new, SPLITS, GATED, SHAPE)
        place = (source * PAST + tl.minimum(PAST + at, PAST - 1)) * SHAPE.num_channels + channel
        is_kept = inside & (at < 0) & (source >= 0)
        x = tl.where(is_new, new, tl.load(convolution.kept + place, mask=is_kept, other=0.0))
        weight = tl.load(
            convolution.taps + tap * SHAPE.num_channels + channel, mask=inside, other=0.0
        )
        total = tl.fma(weight, x, total)
        if tap > 0:
            place = (target * PAST + tap - 1) * SHAPE.num_channels + channel
            tl.store(convolution.kept + place, x, mask=inside & is_last)
    if convolution.bias is not None:
        total += tl.load(convolution.bias + channel, mask=inside, other=0.0)
    return total


@triton.jit
def convolve_alone(
    sums,
    chunks,
    convolution,
    out,
    stride,
    factor,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A layer of short convolutions: gate * convolution(gate * x) * factor, in operand order; rows
    of `out` are `stride` long. Rows of the GEMM are the gate before, the gate after, and x. One
    program: a token and BLOCK channels."""
    begin(PDL)
    token = tl.program_id(0)
    sequence, index, is_there = _chunk_of(chunks, token)
    if is_there:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < SHAPE.num_channels
        made = _convolved(
            sums, chunks, convolution, sequence, token, index, channel, inside, SPLITS, True, SHAPE
        )
        row = token.to(tl.int64)
        made = made * summed(sums, row, SHAPE.num_channels + channel, inside, SPLITS)
        made = tl.minimum(tl.maximum(made * factor, -65504.0), 65504.0)
        tl.store(
            out + row * stride + operand_column(channel),
            made.to(out.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _softplus(x):
    power = tl.exp(-tl.abs(x))
    above = 1.0 + power
    # The logarithm of 1 + power, though that is rounded.
    log = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _weigh_token(
    sums,
    weights,
    out,
    row,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """How much of each head's matrix stays, and how much of the token is added."""
    head = tl.arange(0, HEADS)
    is_head = head < SHAPE.num_heads
    alpha = summed(sums, row, SHAPE.alpha_at + head, is_head, SPLITS)
    step = _softplus(alpha + tl.load(weights.dt + head, mask=is_head, other=0.0))
    decay = tl.exp(tl.load(weights.a + head, mask=is_head, other=0.0) * step)
    if SHAPE.is_delta_net:
        step = sigmoid(summed(sums, row, SHAPE.beta_at + head, is_head, SPLITS))
    at = row * SHAPE.num_heads + head
    tl.store(out.decays + at, decay, mask=is_head)
    tl.store(out.steps + at, step, mask=is_head)


@triton.jit
def convolve_heads(
    sums,
    chunks,
    convolution,
    weights,
    out,
    query_scale,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    VECTORS: tl.constexpr,
    DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HeadVectors of a step: queries, keys and values are convolved and pass silu; DeltaNet's
    queries and keys are made one long, queries then scaled.

    One program: a token and VECTORS heads, queries' and keys' groups first; the last one of a token
    weighs it. DIMS, HEADS: the larger of key_dim and value_dim, and num_heads, up to powers of two.
    """
    begin(PDL)
    token = tl.program_id(0)
    sequence, index, is_there = _chunk_of(chunks, token)
    row = token.to(tl.int64)
    if is_there:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            _weigh_token(sums, weights, out, row, HEADS, SPLITS, SHAPE)
        else:
            vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)[:, None]
            is_query = vector < SHAPE.num_groups
            is_shared = vector < 2 * SHAPE.num_groups
            keys = SHAPE.key_at + (vector - SHAPE.num_groups) * SHAPE.key_dim
            values = SHAPE.value_at + (vector - 2 * SHAPE.num_groups) * SHAPE.value_dim
            start = tl.where(is_query, SHAPE.query_at + vector * SHAPE.key_dim, keys)
            start = tl.where(is_shared, start, values)
            size = tl.where(is_shared, SHAPE.key_dim, SHAPE.value_dim)
            column = tl.arange(0, DIMS)[None, :]
            inside = (vector < 2 * SHAPE.num_groups + SHAPE.num_heads) & (column < size)
            channel = start + column
            x = _convolved(
                sums,
                chunks,
                convolution,
                sequence,
                token,
                index,
                channel,
                inside,
                SPLITS,
                False,
                SHAPE,
            )
            x = x * sigmoid(x)
            if SHAPE.is_delta_net:
                squares = tl.sum(tl.where(inside, x * x, 0.0), axis=1)[:, None]
                scale = 1.0 / tl.sqrt(squares + _UNIT_EPSILON)
                unit = x * scale
                unit = tl.where(is_query, unit * query_scale, unit)
                x = tl.where(is_shared, unit, x)
            tl.store(out.channels + row * SHAPE.num_channels + channel, x, mask=inside)


@triton.jit
def recur(
    vectors,
    chunks,
    matrices,
    d,
    SHAPE: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk through one head's matrix [values, keys]; what it leaves of each token is written in
    the place of the token's values.

    One program: VALUES values of a head, and a chunk. matrices [slot, head, value, key]; `d`
    [heads] is Mamba's, else None. Keys, up to a power of two, are in PARTS of KEYS, so that most of
    a sum over keys is within a lane. Tokens are loaded while others before them are computed, in
    STAGES.
    """
    begin(PDL)
    sequence = tl.program_id(2)
    count = tl.load(chunks.counts + sequence)
    if count > 0:
        head = tl.program_id(1)
        if SHAPE.is_tiled:
            group = head % SHAPE.num_groups
        else:
            group = head // (SHAPE.num_heads // SHAPE.num_groups)
        key = tl.arange(0, PARTS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
        value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        is_key = key < SHAPE.key_dim
        is_value = value < SHAPE.value_dim
        inside = is_value[:, None, None] & is_key[None, :, :]
        row = (head * SHAPE.value_dim + value) * SHAPE.key_dim
        place = row[:, None, None] + key[None, :, :]
        SIZE: tl.constexpr = SHAPE.num_heads * SHAPE.key_dim * SHAPE.value_dim
        source = tl.load(chunks.sources + sequence).to(tl.int64)
        target = tl.load(chunks.targets + sequence).to(tl.int64)
        state = tl.load(matrices + source * SIZE + place, mask=inside & (source >= 0), other=0.0)
        first = tl.load(chunks.rows + sequence).to(tl.int64)
        if d is not None:
            skip = tl.load(d + head)
        shared = group * SHAPE.key_dim + key
        own = SHAPE.value_at + head * SHAPE.value_dim + value
        for at in tl.range(0, count, num_stages=STAGES):
            token = first + at
            channels = vectors.channels + token * SHAPE.num_channels
            k = tl.load(channels + SHAPE.key_at + shared, mask=is_key, other=0.0)[None, :, :]
            q = tl.load(channels + SHAPE.query_at + shared, mask=is_key, other=0.0)[None, :, :]
            v = tl.load(channels + own, mask=is_value, other=0.0)
            decay = tl.load(vectors.decays + token * SHAPE.num_heads + head)
            step = tl.load(vectors.steps + token * SHAPE.num_heads + head)
            state = state * decay
            update = v
            if SHAPE.is_delta_net:
                update = v - tl.sum(tl.sum(state * k, axis=1), axis=1)
            update = update * step
            state = tl.fma(update[:, None, None], k, state)
            left = tl.sum(tl.sum(state * q, axis=1), axis=1)
            if d is not None:
                left = tl.fma(skip, v, left)
            tl.store(channels + own, left, mask=is_value)
        tl.store(matrices + target * SIZE + place, state, mask=inside)
