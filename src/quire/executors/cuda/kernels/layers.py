"""The kernels between the GEMMs: norm, rope with the write to the cache, rows of the head,
argmax."""

# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.executors.cuda.kernels.activations import activated
from quire.executors.cuda.kernels.attention import operand_column
from quire.executors.cuda.kernels.kv_codes import quantized

# How a row's sampling went: the second number of `sampled`.
NOT_FINITE, FINITE, NOTHING_ALLOWED, TOO_LARGE = 0, 1, 2, 3
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_FINITE = tl.constexpr(FINITE)
_ROOT_HALF = tl.constexpr(0.7071067811865476)


class RopeShape(NamedTuple):
    """Sizes of a `rope_and_store` launch, known when it is compiled."""

    num_heads: int
    num_kv_heads: int  # 0: of a layer that makes no keys and values
    head_dim: int
    rope_dims: int
    is_interleaved: bool  # pairs are neighbours; otherwise halves of the first `rope_dims`
    norm: str  # the spec.NormSpan of queries and keys, or "": no norm
    is_layer_norm: bool
    is_norm_after_rope: bool
    norms_values: bool  # RMS norm of each value head, without weights
    has_key_values: bool  # values are what keys are before norm and rope: no sums of their own
    block_size: int
    block_heads: int  # kv heads of that size that a block of the cache has room for
    heads: int  # of a program
    pairs: int  # of a head, up to a power of two

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim


class HeadNorms(NamedTuple):
    """Weights of the norms of queries and keys, float32: [head_dim], or [heads, head_dim] where
    the norm's span is not one head. None where there are no weights."""

    queries: Any
    keys: Any


class OutputNorm(NamedTuple):
    """The norm of what a half of a layer made, before it is added; None where it lacks one."""

    weight: Any
    bias: Any
    epsilon: Any


class QueryKeyValue(NamedTuple):
    """Where `rope_and_store` writes."""

    queries: Any  # [token, head, head_dim]: bfloat16, or float32 beside a cache in float16
    key_cache: Any  # bfloat16, float16 or codes [block, kv head, slot, head_dim]
    value_cache: Any
    scales: Any  # of codes (see kernels/kv_codes.py), or None


class TernarySums(NamedTuple):
    """What makes numbers of a ternary GEMM's sums (see kernels/ternary.py)."""

    units: Any  # float32 [token]
    query_scale: Any
    key_scale: Any
    value_scale: Any


class ChunkBest(NamedTuple):
    """The argmax of each chunk of a row of logits, [row, chunk] each."""

    logits: Any
    tokens: Any
    not_finite: Any  # 1 where a logit of the chunk is not finite


@triton.jit
def _begin_dependent(PDL: tl.constexpr):
    """Allow the next kernel to start, then wait for the previous one to end.

    In this order, a GEMM loads weights while the GEMM before this kernel still runs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _natural_column(column):
    """The column at this index of operand order (see planes.py)."""
    inner = column % 128
    return column - inner + inner % 8 // 2 * 32 + inner // 16 * 4 + inner % 16 // 8 * 2 + inner % 2


@triton.jit
def _loaded(vector, column, inside):
    """A norm's weights or biases; None where it has none."""
    loaded = None
    if vector is not None:
        loaded = tl.load(vector + column, mask=inside, other=0.0)
    return loaded


@triton.jit
def _normed(x, weights, biases, column, size, epsilon, NORM: tl.constexpr):
    """RMS or layer norm of a vector in operand order; NORM is "" where there is none."""
    if NORM == "layer":
        centred = x - tl.sum(x, axis=0) / size
        x = tl.where(_natural_column(column) < size, centred, 0.0)
    if NORM != "":
        mean = tl.sum(x * x, axis=0) / size
        scale = 1.0 / tl.sqrt(mean + epsilon)
        x = x * scale
        if weights is not None:
            x = x * weights
        if biases is not None:
            x += biases
    return x


@triton.jit
def norm_hidden(
    hidden,
    weight,
    bias,
    width,
    size,
    epsilon,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden = norm of it. Arguments as of `add_and_norm`; one program a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weights = _loaded(weight, column, inside)
    biases = _loaded(bias, column, inside)
    _begin_dependent(PDL)
    x = tl.load(hidden + token * width + column, mask=inside, other=0.0)
    normed = _normed(x, weights, biases, column, size, epsilon, NORM)
    tl.store(hidden + token * width + column, normed, mask=inside)


@triton.jit
def add_and_norm(
    hidden,
    sums,
    weight,
    out,
    finite,
    width,
    size,
    epsilon,
    split_stride,
    bias,
    output_norm,
    residual_scale,
    state_scale,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    OUTPUT_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    STORE_FINITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden += the SPLITS of `sums`, added in order; out = norm of it, as float16.

    One program a token. `size` is the number of columns without padding, which is zero. NORM and
    OUTPUT_NORM are a spec.NormKind, or "" for none. What is added is normed by `output_norm` and
    multiplied by `residual_scale` (None: 1) first, the sum by
    `state_scale` (None: 1). STORE_FINITE: store of each token whether its hidden state is finite.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    index = token * width + column
    weights = _loaded(weight, column, inside)
    biases = _loaded(bias, column, inside)
    if OUTPUT_NORM != "":
        output_weights = _loaded(output_norm.weight, column, inside)
        output_biases = _loaded(output_norm.bias, column, inside)
    if SPLITS > 0:  # the hidden state comes from the norm before, which has ended
        x = tl.load(hidden + index, mask=inside, other=0.0)
        _begin_dependent(PDL)
    else:
        _begin_dependent(PDL)
        x = tl.load(hidden + index, mask=inside, other=0.0)
    if SPLITS > 0:
        added = tl.load(sums + index, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLITS):
            added += tl.load(sums + split * split_stride + index, mask=inside, other=0.0)
        if OUTPUT_NORM != "":
            added = _normed(
                added, output_weights, output_biases, column, size, output_norm.epsilon, OUTPUT_NORM
            )
        if residual_scale is not None:
            added = added * residual_scale
        x += added
        if state_scale is not None:
            x = x * state_scale
        tl.store(hidden + index, x, mask=inside)
    normed = _normed(x, weights, biases, column, size, epsilon, NORM)
    normed = tl.minimum(tl.maximum(normed, -65504.0), 65504.0)
    tl.store(out + index, normed.to(tl.float16), mask=inside)
    if STORE_FINITE:
        not_finite = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0)
        tl.store(finite + token, 1 - not_finite)


@triton.jit
def _load_pairs(row, head, first, second, is_head, SHAPE: tl.constexpr):
    """The two numbers of every pair of these heads, [heads, pairs] each."""
    HEADS: tl.constexpr = SHAPE.heads
    PAIRS: tl.constexpr = SHAPE.pairs
    if SHAPE.is_interleaved:  # neighbours: in one load
        column = tl.arange(0, 2 * PAIRS)[None, :]
        index = head * SHAPE.head_dim + column
        both = tl.load(row + index, mask=is_head & (column < SHAPE.head_dim), other=0.0)
        x, y = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
    else:
        inside = is_head & (tl.arange(0, PAIRS)[None, :] < SHAPE.head_dim // 2)
        x = tl.load(row + head * SHAPE.head_dim + first, mask=inside, other=0.0)
        y = tl.load(row + head * SHAPE.head_dim + second, mask=inside, other=0.0)
    return x, y


@triton.jit
def _store_pairs(address, x, y, first, second, is_stored, SHAPE: tl.constexpr):
    """Store pairs [heads, pairs] to `address` [heads, 1], of heads where `is_stored` [heads, 1]."""
    HEADS: tl.constexpr = SHAPE.heads
    PAIRS: tl.constexpr = SHAPE.pairs
    if SHAPE.is_interleaved:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(x, y), [HEADS, 2 * PAIRS])
        tl.store(address + column, both, mask=is_stored & (column < SHAPE.head_dim))
    else:
        inside = is_stored & (tl.arange(0, PAIRS)[None, :] < SHAPE.head_dim // 2)
        tl.store(address + first, x, mask=inside)
        tl.store(address + second, y, mask=inside)


@triton.jit
def _mean_square(row, first, count, split_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of `count` columns of a row of sums, from `first` on."""
    column = tl.arange(0, BLOCK)
    inside = column < count
    x = tl.load(row + first + column, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(row + split * split_stride + first + column, mask=inside, other=0.0)
    return tl.sum(x * x, axis=0) / count


@triton.jit
def _projection_mean(row, is_query, split_stride, SPLITS: tl.constexpr, SHAPE: tl.constexpr):
    """Of each head, the mean square of all query heads or of all key heads: [heads, 1]."""
    QUERIES: tl.constexpr = SHAPE.num_heads * SHAPE.head_dim
    KEYS: tl.constexpr = SHAPE.num_kv_heads * SHAPE.head_dim
    BLOCK: tl.constexpr = triton.next_power_of_2(QUERIES)
    KEY_BLOCK: tl.constexpr = triton.next_power_of_2(KEYS)
    queries = _mean_square(row, 0, QUERIES, split_stride, SPLITS, BLOCK)
    keys = _mean_square(row, QUERIES, KEYS, split_stride, SPLITS, KEY_BLOCK)
    return tl.where(is_query, queries, keys)


@triton.jit
def _norm_heads(
    x, y, norms, mean, epsilon, head, first, second, is_query, is_value, SHAPE: tl.constexpr
):
    """Norm of query and key heads by `norms`, HeadNorms; values stay, or are normed by head without
    weights. `mean` [heads, 1] is the mean square of the norm's span, or None where that is the
    head."""
    in_head = tl.arange(0, SHAPE.pairs)[None, :] < SHAPE.head_dim // 2
    normed_x, normed_y = x, y
    if SHAPE.is_layer_norm:
        middle = ((tl.sum(x, axis=1) + tl.sum(y, axis=1)) / SHAPE.head_dim)[:, None]
        normed_x = tl.where(in_head, x - middle, 0.0)
        normed_y = tl.where(in_head, y - middle, 0.0)
    if mean is None:
        squares = tl.sum(normed_x * normed_x, axis=1) + tl.sum(normed_y * normed_y, axis=1)
        mean = (squares / SHAPE.head_dim)[:, None]
    scale = 1.0 / tl.sqrt(mean + epsilon)
    normed_x = normed_x * scale
    normed_y = normed_y * scale
    if SHAPE.norms_values:
        x = normed_x
        y = normed_y
    if norms.queries is not None:
        if SHAPE.norm == "head":
            query_weights = norms.queries
            key_weights = norms.keys
        else:
            query_weights = norms.queries + tl.where(is_query, head, 0) * SHAPE.head_dim
            is_key = ~is_query & ~is_value
            key_weights = norms.keys + tl.where(is_key, head - SHAPE.num_heads, 0) * SHAPE.head_dim
        if SHAPE.num_kv_heads == 0:
            key_weights = query_weights
        query_x = tl.load(query_weights + first, mask=in_head, other=0.0)
        query_y = tl.load(query_weights + second, mask=in_head, other=0.0)
        key_x = tl.load(key_weights + first, mask=in_head, other=0.0)
        key_y = tl.load(key_weights + second, mask=in_head, other=0.0)
        normed_x = normed_x * tl.where(is_query, query_x, key_x)
        normed_y = normed_y * tl.where(is_query, query_y, key_y)
    return tl.where(is_value, x, normed_x), tl.where(is_value, y, normed_y)


@triton.jit
def _cached(x, HALF: tl.constexpr):
    """As the cache keeps it. What float16 has no room for becomes NaN: the rows that attend to it
    fail, where a score of minus infinity would only be left out."""
    if HALF == tl.float16:  # noqa: SIM300
        x = tl.where(tl.abs(x) <= 65504.0, x, float("nan"))
    return x.to(HALF)


@triton.jit
def rope_and_store(
    sums,
    positions,
    slots,
    cosines,
    sines,
    norms,
    out,
    ternary,
    split_stride,
    row_stride,
    epsilon,
    query_scales,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    TERNARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the SPLITS of the query, key and value GEMM; norm and rope queries and keys, or rope and
    norm them; store queries, and keys and values in the cache.

    sums [split, token, heads + 2 * kv heads, head_dim]; `norms` is HeadNorms where there are any;
    `out` is QueryKeyValue; `ternary` is TernarySums where TERNARY; `query_scales` is a factor of
    queries by position, or None. A token of slot -1 is padding: nothing of it goes to the cache.
    One program: a token and SHAPE.heads heads.
    """
    NUM_HEADS: tl.constexpr = SHAPE.num_heads
    NUM_KV_HEADS: tl.constexpr = SHAPE.num_kv_heads
    HALF: tl.constexpr = SHAPE.rope_dims // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SHAPE.heads + tl.arange(0, SHAPE.heads)[:, None]
    pair = tl.arange(0, SHAPE.pairs)[None, :]
    is_roped = pair < HALF
    if SHAPE.is_interleaved:
        first = pair * 2
        second = first + 1
    else:
        rest = SHAPE.rope_dims + 2 * (pair - HALF)
        first = tl.where(is_roped, pair, rest)
        second = tl.where(is_roped, pair + HALF, rest + 1)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    # Nothing of these comes from the previous kernel.
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    angle = position.to(tl.int64) * HALF + pair
    cosine = tl.load(cosines + angle, mask=is_roped, other=1.0)
    sine = tl.load(sines + angle, mask=is_roped, other=0.0)
    _begin_dependent(PDL)
    row = sums + token * row_stride
    source = head
    if SHAPE.has_key_values:
        source = tl.where(head < NUM_HEADS + NUM_KV_HEADS, head, head - NUM_KV_HEADS)
    x, y = _load_pairs(row, source, first, second, is_head, SHAPE)
    for split in tl.static_range(1, SPLITS):
        other_x, other_y = _load_pairs(
            row + split * split_stride, source, first, second, is_head, SHAPE
        )
        x += other_x
        y += other_y
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if TERNARY:
        unit = tl.load(ternary.units + token)
        scale = tl.where(is_key, ternary.key_scale, ternary.value_scale)
        scale = tl.where(is_query, ternary.query_scale, scale)
        x = tl.div_rn(x, unit) * scale
        y = tl.div_rn(y, unit) * scale
    if SHAPE.norm != "" and not SHAPE.is_norm_after_rope:
        mean = None
        if SHAPE.norm == "projection":
            mean = _projection_mean(row, is_query, split_stride, SPLITS, SHAPE)
        x, y = _norm_heads(
            x, y, norms, mean, epsilon, head, first, second, is_query, is_value, SHAPE
        )
    roped_x = tl.where(is_value, x, x * cosine - y * sine)
    roped_y = tl.where(is_value, y, x * sine + y * cosine)
    if SHAPE.is_norm_after_rope:
        roped_x, roped_y = _norm_heads(
            roped_x, roped_y, norms, None, epsilon, head, first, second, is_query, is_value, SHAPE
        )
    if query_scales is not None:
        factor = tl.where(is_query, tl.load(query_scales + position), 1.0)
        roped_x = roped_x * factor
        roped_y = roped_y * factor
    query = out.queries + (token * NUM_HEADS + head) * SHAPE.head_dim
    QUERY: tl.constexpr = out.queries.dtype.element_ty
    _store_pairs(query, roped_x.to(QUERY), roped_y.to(QUERY), first, second, is_query, SHAPE)
    is_stored = is_head & (slot >= 0)
    block = (slot // SHAPE.block_size).to(tl.int64)
    kv_head = tl.where(is_key, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    of_head = (block * SHAPE.block_heads + kv_head) * SHAPE.block_size
    index = (of_head + slot % SHAPE.block_size) * SHAPE.head_dim
    if out.scales is None:
        x = _cached(roped_x, out.key_cache.dtype.element_ty)
        y = _cached(roped_y, out.key_cache.dtype.element_ty)
    else:
        x, y, scale = quantized(roped_x, roped_y, out.key_cache.dtype.element_ty)
        place = 2 * of_head + tl.where(is_value, SHAPE.block_size, 0) + slot % SHAPE.block_size
        tl.store(out.scales + place, scale, mask=is_stored & ~is_query)
    _store_pairs(out.key_cache + index, x, y, first, second, is_stored & is_key, SHAPE)
    _store_pairs(out.value_cache + index, x, y, first, second, is_stored & is_value, SHAPE)


@triton.jit
def scale_by_gate(
    gated,
    tokens,
    weights,
    stride,
    width,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """gated[token] *= sigmoid(tokens[token] * weights), in place; rows of `gated` are `stride`
    long. One program a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weights + column, mask=inside, other=0.0)
    _begin_dependent(PDL)
    x = tl.load(tokens + token * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-tl.sum(x * weight, axis=0)))
    for first in range(0, stride, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        address = gated + token * stride + at
        product = tl.load(address, mask=at < stride, other=0.0).to(tl.float32) * factor
        tl.store(address, product.to(tl.float16), mask=at < stride)


@triton.jit
def _sum_of(sums, split_stride, inside, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Splits FIRST to LAST of these columns, added in order."""
    total = tl.load(sums + FIRST * split_stride, mask=inside, other=0.0)
    for split in tl.static_range(FIRST + 1, LAST):
        total += tl.load(sums + split * split_stride, mask=inside, other=0.0)
    return total


@triton.jit
def add_normed(
    sums,
    width,
    size,
    split_stride,
    dense_norm,
    expert_norm,
    DENSE_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums[0] = the first DENSE_SPLITS of `sums` behind an RMS norm, plus the rest behind another.
    One program a token; arguments as of `add_and_norm`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dense_weights = _loaded(dense_norm.weight, column, inside)
    expert_weights = _loaded(expert_norm.weight, column, inside)
    _begin_dependent(PDL)
    at = sums + token * width + column
    dense = _sum_of(at, split_stride, inside, 0, DENSE_SPLITS)
    routed = _sum_of(at, split_stride, inside, DENSE_SPLITS, SPLITS)
    dense = _normed(dense, dense_weights, None, column, size, dense_norm.epsilon, "rms")
    routed = _normed(routed, expert_weights, None, column, size, expert_norm.epsilon, "rms")
    tl.store(at, dense + routed, mask=inside)


@triton.jit
def make_layer_inputs(
    projected,
    embedded,
    weight,
    out,
    size,
    width,
    split_stride,
    projected_stride,
    embedded_stride,
    scale,
    epsilon,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, layer] = (RMS norm of the SPLITS of `projected` times `scale` + `embedded`) / root
    of two, in operand order: `size` numbers of `width`.

    projected [split, token, layer, size] in natural order; embedded [token, layer, size] in operand
    order over all layers. One program: a token and a layer.
    """
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weights = tl.load(weight + column, mask=inside, other=0.0)
    _begin_dependent(PDL)
    place = layer * size + column
    at = projected + token * projected_stride + place
    x = _sum_of(at, split_stride, inside, 0, SPLITS) * scale
    x = _normed(x, weights, None, column, size, epsilon, "rms")
    own = tl.load(
        embedded + token * embedded_stride + operand_column(place), mask=inside, other=0.0
    )
    to = (token * tl.num_programs(1) + layer) * width + operand_column(column)
    tl.store(out + to, (x + own) * _ROOT_HALF, mask=inside)


@triton.jit
def gate_layer_input(
    hidden,
    sums,
    inputs,
    out,
    width,
    size,
    input_width,
    input_stride,
    split_stride,
    epsilon,
    factor,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = activation(gate) * input * factor, as float16. The gate is the SPLITS of `sums` times
    what the RMS norm with this epsilon, which its GEMM was given, divided `hidden` by.

    One program a token; `inputs` are those of the layer, `input_stride` apart.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = tl.arange(0, INPUTS)
    inside = at < input_width
    _begin_dependent(PDL)
    x = tl.load(hidden + token * width + column, mask=column < width, other=0.0)
    divisor = tl.sqrt(tl.sum(x * x, axis=0) / size + epsilon)
    gates = _sum_of(sums + token * input_width + at, split_stride, inside, 0, SPLITS) * divisor
    own = tl.load(inputs + token * input_stride + at, mask=inside, other=0.0)
    product = activated(gates, ACTIVATION) * own * factor
    product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + token * input_width + at, product.to(tl.float16), mask=inside)


@triton.jit
def cap_logits(logits, cap, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """logits = cap * tanh(logits / cap), in place. One program: a row and BLOCK columns."""
    _begin_dependent(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(logits + index, mask=column < width, other=0.0)
    tl.store(logits + index, cap - 2.0 * cap / (1.0 + tl.exp(2.0 * x / cap)), mask=column < width)


@triton.jit
def take_rows(source, rows, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = source[rows[i]]."""
    _begin_dependent(PDL)
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + to).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * width + column, mask=column < width, other=0.0)
    tl.store(out + to * width + column, value, mask=column < width)


@triton.jit
def best_of_chunk(logits, best, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest logit of each chunk of a row, the first of equals, to ChunkBest."""
    _begin_dependent(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf"))
    not_finite = inside & ~(tl.abs(x) < float("inf"))
    known = tl.where(not_finite, float("-inf"), x)
    largest = tl.max(known, axis=0)
    first = tl.min(tl.where(inside & (known == largest), column, width - 1), axis=0)
    index = row * tl.num_programs(1) + chunk
    tl.store(best.logits + index, largest)
    tl.store(best.tokens + index, first)
    tl.store(best.not_finite + index, tl.max(not_finite.to(tl.int32), axis=0))


@triton.jit
def best_of_row(best, slots, samples, sampled, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The first of the largest over a row's chunks: to `samples` at the row's slot, and to
    `sampled` (token, status)."""
    _begin_dependent(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    index = row * num_chunks + chunk
    x = tl.load(best.logits + index, mask=inside, other=float("-inf"))
    tokens = tl.load(best.tokens + index, mask=inside, other=0)
    not_finite = tl.max(tl.load(best.not_finite + index, mask=inside, other=0), axis=0)
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == largest), chunk, BLOCK), axis=0)
    token = tl.sum(tl.where(chunk == first, tokens, 0), axis=0)
    tl.store(sampled + row * 2, token)
    tl.store(sampled + row * 2 + 1, tl.where(not_finite == 0, _FINITE, _NOT_FINITE))
    slot = tl.load(slots + row)
    tl.store(samples + tl.maximum(slot, 0), token, mask=slot >= 0)
