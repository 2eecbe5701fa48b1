"""The small kernels between the products: norms, rope with the cache's writing, rows, argmax."""

# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def _begin(PDL: tl.constexpr):
    """Let the kernel after this one get ready, and wait for the one before.

    In this order, a product's weights are on their way while the product before it still runs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_and_norm(
    state,
    parts,
    weight,
    out,
    finite,
    width,
    size,
    epsilon,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FINITE: tl.constexpr,
    PDL: tl.constexpr,
):
    """state += the sum of `parts`, in order; out = RMS norm of it, as float16.

    One program a token. `size` is the number of real columns; the others are zero. FINITE: say of
    each token whether its state is finite.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = token * width + column
    scales = tl.load(weight + column, mask=inside, other=0.0)
    if PARTS > 0:  # the state is that of the norm before: long there
        x = tl.load(state + place, mask=inside, other=0.0)
        _begin(PDL)
    else:
        _begin(PDL)
        x = tl.load(state + place, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(parts + place, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            added += tl.load(parts + part * part_stride + place, mask=inside, other=0.0)
        x += added
        tl.store(state + place, x, mask=inside)
    mean = tl.sum(x * x, axis=0) / size
    scale = 1.0 / tl.sqrt(mean + epsilon)
    normed = x * scale * scales
    normed = tl.minimum(tl.maximum(normed, -65504.0), 65504.0)
    tl.store(out + place, normed.to(tl.float16), mask=inside)
    if FINITE:
        # Not finite: not a number, or not below infinity.
        wrong = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=0)
        tl.store(finite + token, 1 - wrong)


@triton.jit
def _both(
    row,
    head,
    first,
    second,
    is_head,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The two numbers of every pair of these heads, [HEADS, PAIRS] each."""
    if INTERLEAVED:  # neighbours: in one load
        column = tl.arange(0, 2 * PAIRS)[None, :]
        place = head * HEAD_DIM + column
        whole = tl.load(row + place, mask=is_head & (column < HEAD_DIM), other=0.0)
        x, y = tl.split(tl.reshape(whole, [HEADS, PAIRS, 2]))
    else:
        inside = is_head & (tl.arange(0, PAIRS)[None, :] < HEAD_DIM // 2)
        x = tl.load(row + head * HEAD_DIM + first, mask=inside, other=0.0)
        y = tl.load(row + head * HEAD_DIM + second, mask=inside, other=0.0)
    return x, y


@triton.jit
def _keep_both(
    place,
    x,
    y,
    first,
    second,
    kept,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store pairs at [HEADS, 1] places; `kept` [HEADS, 1] says which heads."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        whole = tl.reshape(tl.join(x, y), [HEADS, 2 * PAIRS])
        tl.store(place + column, whole, mask=kept & (column < HEAD_DIM))
    else:
        inside = kept & (tl.arange(0, PAIRS)[None, :] < HEAD_DIM // 2)
        tl.store(place + first, x, mask=inside)
        tl.store(place + second, y, mask=inside)


@triton.jit
def turn_and_store(
    sums,
    positions,
    slots,
    cosines,
    sines,
    query_norm,
    key_norm,
    queries,
    keys,
    values,
    part_stride,
    row_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries, keys and values out of one product: norm and turn the first two, keep the last two.

    sums [part, token, heads + 2 * kv heads, head_dim]; keys and values [block, kv head, slot,
    head_dim]. A slot below zero is nobody's: nothing is kept. One program a token and HEADS heads.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    turned = pair < ROPE_DIMS // 2
    if INTERLEAVED:
        first = pair * 2
        second = first + 1
    else:
        rest = ROPE_DIMS + 2 * (pair - ROPE_DIMS // 2)
        first = tl.where(turned, pair, rest)
        second = tl.where(turned, pair + ROPE_DIMS // 2, rest + 1)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    # Nothing of these comes from the kernel before.
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    angle = position.to(tl.int64) * (ROPE_DIMS // 2) + pair
    cosine = tl.load(cosines + angle, mask=turned, other=1.0)
    sine = tl.load(sines + angle, mask=turned, other=0.0)
    _begin(PDL)
    row = sums + token * row_stride
    x, y = _both(row, head, first, second, is_head, HEAD_DIM, HEADS, PAIRS, INTERLEAVED)
    for part in tl.static_range(1, PARTS):
        more_x, more_y = _both(
            row + part * part_stride,
            head,
            first,
            second,
            is_head,
            HEAD_DIM,
            HEADS,
            PAIRS,
            INTERLEAVED,
        )
        x += more_x
        y += more_y
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if NORMED:
        mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM
        scale = (1.0 / tl.sqrt(mean + epsilon))[:, None]
        in_head = pair < HEAD_DIM // 2
        query_x = tl.load(query_norm + first, mask=in_head, other=0.0)
        query_y = tl.load(query_norm + second, mask=in_head, other=0.0)
        key_x = tl.load(key_norm + first, mask=in_head, other=0.0)
        key_y = tl.load(key_norm + second, mask=in_head, other=0.0)
        x = tl.where(is_value, x, x * scale * tl.where(is_query, query_x, key_x))
        y = tl.where(is_value, y, y * scale * tl.where(is_query, query_y, key_y))
    turned_x = tl.where(is_value, x, x * cosine - y * sine)
    turned_y = tl.where(is_value, y, x * sine + y * cosine)
    turned_x = turned_x.to(tl.bfloat16)
    turned_y = turned_y.to(tl.bfloat16)
    place = queries + (token * NUM_HEADS + head) * HEAD_DIM
    _keep_both(
        place, turned_x, turned_y, first, second, is_query, HEAD_DIM, HEADS, PAIRS, INTERLEAVED
    )
    kept = is_head & (slot >= 0)
    block = (slot // BLOCK_SIZE).to(tl.int64)
    kv_head = tl.where(is_key, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    cell = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    _keep_both(
        keys + cell,
        turned_x,
        turned_y,
        first,
        second,
        kept & is_key,
        HEAD_DIM,
        HEADS,
        PAIRS,
        INTERLEAVED,
    )
    _keep_both(
        values + cell,
        turned_x,
        turned_y,
        first,
        second,
        kept & is_value,
        HEAD_DIM,
        HEADS,
        PAIRS,
        INTERLEAVED,
    )


@triton.jit
def take_rows(source, rows, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[i] = source[rows[i]]."""
    _begin(PDL)
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + to).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * width + column, mask=column < width, other=0.0)
    tl.store(out + to * width + column, value, mask=column < width)


@triton.jit
def best_of_chunk(
    logits, best, where, wrong, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of each chunk of a row, the first of equals, and if any is not finite."""
    _begin(PDL)
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf"))
    is_wrong = inside & ~(tl.abs(x) < float("inf"))
    known = tl.where(is_wrong, float("-inf"), x)
    largest = tl.max(known, axis=0)
    first = tl.min(tl.where(inside & (known == largest), column, width - 1), axis=0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, largest)
    tl.store(where + place, first)
    tl.store(wrong + place, tl.max(is_wrong.to(tl.int32), axis=0))


@triton.jit
def best_of_row(
    best, where, wrong, slots, samples, answers, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The first of the largest over a row's chunks: to its place in `samples`, and to the answers
    (token, whether the logits are finite)."""
    _begin(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    place = row * num_chunks + chunk
    x = tl.load(best + place, mask=inside, other=float("-inf"))
    at = tl.load(where + place, mask=inside, other=0)
    bad = tl.max(tl.load(wrong + place, mask=inside, other=0), axis=0)
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == largest), chunk, BLOCK), axis=0)
    token = tl.sum(tl.where(chunk == first, at, 0), axis=0)
    tl.store(answers + row * 2, token)
    tl.store(answers + row * 2 + 1, 1 - bad)
    slot = tl.load(slots + row)
    tl.store(samples + tl.maximum(slot, 0), token, mask=slot >= 0)
