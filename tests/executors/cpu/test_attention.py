"""Native paged attention: against float64, and the same bits however the rows are grouped."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu.native import native

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

UNITS = native.units()


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    context: int = 300
    window: int = 0
    soft_cap: float = 0.0
    is_int8: bool = False
    value_dim: int = 0  # 0: as head_dim
    is_chunked: bool = False
    has_sinks: bool = False
    has_slopes: bool = False
    has_values_in_keys: bool = False

    @property
    def out_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Sequence:
    """Random queries, keys and values of one sequence."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        random = np.random.default_rng(seed)
        kv = (shape.context, shape.num_kv_heads, shape.head_dim)
        self.keys = random.standard_normal(kv).astype(np.float32)
        self.values = random.standard_normal((*kv[:2], shape.out_dim)).astype(np.float32)
        if shape.has_values_in_keys:
            self.values = self.keys[..., : shape.out_dim]
        self.sinks = random.standard_normal(shape.num_heads) if shape.has_sinks else None
        slopes = np.exp2(-np.arange(1.0, shape.num_heads + 1))
        self.slopes = slopes if shape.has_slopes else np.zeros(0)
        q = (shape.context, shape.num_heads, shape.head_dim)
        self.queries = (random.standard_normal(q) * 2).astype(np.float32)
        num_blocks = -(-shape.context // BLOCK_SIZE)
        self.block_table = random.permutation(num_blocks + 3)[:num_blocks].astype(np.int32)

    def cache(self, unit: str, stored: int | None = None) -> "native.Cache":
        """All keys and values written, or those of the first positions alone."""
        shape = self.shape
        cache = native.Cache(
            unit,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self.block_table,
            value_dim=shape.value_dim,
            window=shape.window,
            is_chunked=shape.is_chunked,
            scale=shape.scale,
            soft_cap=shape.soft_cap,
            sinks=[] if self.sinks is None else self.sinks.tolist(),
            has_values_in_keys=shape.has_values_in_keys,
            is_int8=shape.is_int8,
            slopes=self.slopes.tolist(),
        )
        for position in range(shape.context if stored is None else stored):
            self.store(cache, position)
        return cache

    def store(self, cache: "native.Cache", position: int) -> None:
        values = self.values[position].ravel()
        kept = values[:0] if self.shape.has_values_in_keys else values
        cache.store(position, self.keys[position].ravel(), kept)

    def attended(self, cache: "native.Cache", position: int, num_rows: int = 1) -> Floats:
        queries = self.queries[position : position + num_rows].ravel()
        out = self.output(num_rows)
        cache.attend(position, num_rows, queries, out)
        return out.reshape(num_rows, self.shape.num_heads, self.shape.out_dim)

    def output(self, num_rows: int) -> Floats:
        return np.empty(num_rows * self.shape.num_heads * self.shape.out_dim, np.float32)

    def exact(self, position: int) -> Doubles:
        """In float64, from keys and values as the cache rounds them."""
        shape = self.shape
        start = max(0, position - shape.window + 1) if shape.window else 0
        if shape.is_chunked:
            start = position // shape.window * shape.window
        keys = as_stored(self.keys[start : position + 1], shape.is_int8)
        values = as_stored(self.values[start : position + 1], shape.is_int8)
        if shape.has_values_in_keys:
            values = keys[..., : shape.out_dim]
        group = shape.num_heads // shape.num_kv_heads
        query = self.queries[position].astype(np.float64).reshape(-1, group, shape.head_dim)
        scores = np.einsum("hgd,thd->hgt", query, keys) * shape.scale
        if shape.soft_cap:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        if shape.has_slopes:
            distances = np.arange(start - position, 1)
            scores = scores + self.slopes.reshape(-1, group, 1) * distances
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.reshape(-1, group, 1) - top)
        output: Doubles = np.einsum("hgt,thd->hgd", weights / total, values)
        return output.reshape(shape.num_heads, shape.out_dim)


def as_stored(x: Floats, is_int8: bool) -> Doubles:
    if not is_int8:
        return x.astype(np.float16).astype(np.float64)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    codes = np.rint(x * (np.float32(127) / largest))
    stored: Doubles = codes.astype(np.float64) * (largest / np.float32(127)).astype(np.float64)
    return stored


def assert_close(got: Floats, exact: Doubles) -> None:
    error = np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() <= 1e-5


def same_bits(a: Floats, b: Floats) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


SHAPES = {
    "plain": Shape(),
    "smollm2": Shape(num_heads=9, num_kv_heads=3, context=140),
    "no groups": Shape(num_heads=3, num_kv_heads=3, head_dim=128, context=131),
    "groups of 16": Shape(num_heads=16, num_kv_heads=1, head_dim=32, context=70),
    "groups of 129": Shape(num_heads=258, num_kv_heads=2, head_dim=8, context=140),
    "groups of 256": Shape(num_heads=256, num_kv_heads=1, head_dim=16, context=34),
    "groups of 300, bytes": Shape(
        num_heads=300, num_kv_heads=1, head_dim=5, context=20, is_int8=True
    ),
    "groups of 7": Shape(num_heads=7, num_kv_heads=1, head_dim=256, context=40),
    "heads of 80": Shape(num_heads=4, num_kv_heads=2, head_dim=80, context=50),
    "heads of 20": Shape(head_dim=20, context=150),
    "heads of 7": Shape(head_dim=7, context=40),
    "window": Shape(window=50),
    "wide window": Shape(window=200),
    "window of 1": Shape(window=1, context=40),
    "capped": Shape(soft_cap=2.0, context=150),
    "chunks": Shape(window=50, is_chunked=True),
    "long chunks": Shape(window=130, is_chunked=True, is_int8=True),
    "sinks": Shape(has_sinks=True),
    "slopes": Shape(has_slopes=True),
    "slopes of bytes": Shape(has_slopes=True, is_int8=True, context=300),
    "slopes, sinks and a window": Shape(has_slopes=True, has_sinks=True, window=20, context=150),
    "sinks and a window": Shape(has_sinks=True, window=20, is_int8=True, context=150),
    "sinks of 130 heads": Shape(num_heads=260, num_kv_heads=2, head_dim=4, has_sinks=True),
    "short values": Shape(head_dim=48, value_dim=32, context=150),
    "long values": Shape(head_dim=20, value_dim=33, context=150, is_int8=True),
    "heads of 512": Shape(num_heads=4, num_kv_heads=2, head_dim=512, context=40),
    "latent": Shape(
        num_heads=5, num_kv_heads=1, head_dim=576, value_dim=512, has_values_in_keys=True
    ),
    "latent, bytes": Shape(
        num_heads=3,
        num_kv_heads=1,
        head_dim=44,
        value_dim=36,
        has_values_in_keys=True,
        is_int8=True,
    ),
    "bytes": Shape(is_int8=True),
    "bytes, all at once": Shape(is_int8=True, window=60, soft_cap=3.0, head_dim=40),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@EVERY_SHAPE
def test_every_row_is_the_mean_of_values_by_softmax_of_scores(shape: Shape) -> None:
    sequence = Sequence(shape)
    cache = sequence.cache(UNITS[-1])
    for position in {0, 1, 15, 16, 17, shape.context // 2, shape.context - 1}:
        assert_close(sequence.attended(cache, position)[0], sequence.exact(position))


def test_tiles_that_end_before_on_and_after_the_position_are_right() -> None:
    sequence = Sequence(Shape(context=520))
    cache = sequence.cache(UNITS[-1])
    for position in (126, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512):
        assert_close(sequence.attended(cache, position)[0], sequence.exact(position))


@EVERY_SHAPE
def test_all_units_write_the_same_bytes_and_attend_with_the_same_bits(shape: Shape) -> None:
    shape = replace(shape, context=min(shape.context, 150))
    sequence = Sequence(shape)
    caches = [sequence.cache(unit) for unit in UNITS]
    assert all(cache.contents() == caches[0].contents() for cache in caches)
    for first, count in ((0, 7), (shape.context - 5, 5)):
        rows = [sequence.attended(cache, first, count) for cache in caches]
        assert all(same_bits(rows[0], other) for other in rows)


@EVERY_SHAPE
@pytest.mark.parametrize("chunk", [2, 3, 5, 8, 16, 33, 64])
def test_rows_in_chunks_have_the_bits_of_rows_alone(shape: Shape, chunk: int) -> None:
    sequence = Sequence(shape)
    for unit in UNITS[1:] or UNITS:
        cache = sequence.cache(unit)
        alone = np.concatenate([sequence.attended(cache, p) for p in range(shape.context)])
        for first in range(0, shape.context, chunk):
            count = min(chunk, shape.context - first)
            chunked = sequence.attended(cache, first, count)
            assert same_bits(chunked, alone[first : first + count])


@EVERY_SHAPE
@pytest.mark.parametrize("unit", UNITS)
def test_a_split_row_has_the_bits_of_the_whole_row(shape: Shape, unit: str) -> None:
    sequence = Sequence(shape)
    cache = sequence.cache(unit)
    for position in (3, shape.context - 1):
        queries = sequence.queries[position].ravel()
        out = sequence.output(1)
        cache.attend_split(position, queries, out)
        assert same_bits(out, sequence.attended(cache, position).ravel())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_slots_never_written_do_not_matter(unit: str, is_int8: bool, head_dim: int) -> None:
    # A new cache is NaN throughout: whatever follows the last token stored is NaN.
    sequence = Sequence(Shape(is_int8=is_int8, head_dim=head_dim, context=160))
    for stored in (1, 5, 16, 130, 143):
        rows = sequence.attended(sequence.cache(unit, stored), max(0, stored - 4), min(4, stored))
        assert np.isfinite(rows).all()
        assert_close(rows[-1], sequence.exact(stored - 1))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_blocks_before_the_window_are_not_looked_at(unit: str, is_int8: bool) -> None:
    sequence = Sequence(Shape(window=40, context=150, is_int8=is_int8))
    whole = sequence.attended(sequence.cache(unit), 147, 3)
    cache = sequence.cache(unit, stored=0)
    for position in range(147 - 39, 150):
        sequence.store(cache, position)
    assert same_bits(sequence.attended(cache, 147, 3), whole)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_token_that_is_not_finite_spoils_no_row_before_it(unit: str, is_int8: bool) -> None:
    sequence = Sequence(Shape(context=40, is_int8=is_int8))
    good = sequence.attended(sequence.cache(unit), 30, 5)
    sequence.keys[33, :, 3] = np.nan
    sequence.values[33, :, 5] = np.inf
    spoiled = sequence.attended(sequence.cache(unit), 30, 5)
    assert same_bits(spoiled[:3], good[:3])
    assert np.isnan(spoiled[3:]).all(axis=(1, 2)).all()


@pytest.mark.parametrize("unit", UNITS)
def test_scores_far_apart_neither_overflow_nor_vanish(unit: str) -> None:
    sequence = Sequence(Shape(context=300))
    sequence.queries *= 100
    assert_close(sequence.attended(sequence.cache(unit), 299)[0], sequence.exact(299))


def test_bytes_cost_less_than_a_hundredth_beside_exact_keys_and_values() -> None:
    sequence = Sequence(Shape(is_int8=True))
    got = sequence.attended(sequence.cache(UNITS[-1]), 299)[0]
    halves = Sequence(Shape()).exact(299)
    error = np.square(got - halves).sum() / np.square(halves).sum()
    assert 0 < error <= 1e-3
