"""Attention is one function of a row: alone or in a tile, with one program a split or for all."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401

torch = pytest.importorskip("torch")

from tests.executors.cuda import emulation  # noqa: E402

from quire.executors.cuda import attention as launchers  # noqa: E402
from quire.executors.cuda.attention import LayerAttention  # noqa: E402
from quire.executors.cuda.kernels import attention as kernels  # noqa: E402
from quire.executors.cuda.planes import to_natural_order  # noqa: E402

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 16
CONTEXT, SPLIT, TILE = 90, 32, 16
NO_WINDOW = 1 << 30


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    blocks = -(-CONTEXT // BLOCK)
    made = {
        name: torch.randn((blocks + 2, KV_HEADS, BLOCK, DIM), generator=generator).bfloat16()
        for name in ("keys", "values")
    }
    made["queries"] = torch.randn((CONTEXT, HEADS, DIM), generator=generator).bfloat16()
    made["table"] = torch.tensor([5, 0, 3, 7, 2, 6], dtype=torch.int32)
    for name in ("keys", "values"):  # nobody wrote these: they must not matter
        made[name][1] = float("nan")
        made[name][6, :, CONTEXT % BLOCK :] = float("nan")
    return made


def _integers(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def attended(
    cache: dict[str, Any],
    positions: range,
    tokens: int,
    *,
    window: int = NO_WINDOW,
    splits: int = 0,
    out_type: Any = torch.float16,
    soft_cap: float = 0.0,
    sinks: Any = None,
    slopes: Any = None,
    is_chunked: bool = False,
    parts: int = 1,
) -> Any:
    """Rows at these positions, so many tokens a tile, in operand order."""
    sinks, slopes = (None if x is None else x * np.log2(np.e) for x in (sinks, slopes))
    layer = LayerAttention(DIM**-0.5, window, soft_cap, sinks, slopes, is_chunked)
    starts = list(positions)[::tokens]
    tiles = kernels.TokenTiles(
        rows=_integers([start - positions[0] for start in starts]),
        counts=_integers([min(tokens, positions[-1] + 1 - start) for start in starts]),
        positions=_integers(starts),
        tables=_integers([0] * len(starts)),
        starts=_integers(starts),
    )
    out = torch.full((len(positions), 128), float("nan"), dtype=out_type)
    count = max(1, splits) * len(starts) * HEADS
    buffers = kernels.SplitBuffers(torch.zeros(count), torch.zeros(count), torch.zeros(count, DIM))
    shape = kernels.AttentionShape(
        HEADS, KV_HEADS, DIM, BLOCK, 16, 2, SPLIT, TILE, KV_HEADS, 0, DIM
    )
    shape = shape._replace(block_heads=cache["keys"].shape[1])
    kernels.attend[(len(starts) * parts, KV_HEADS, max(1, splits))](
        cache["queries"][positions[0] :],
        cache["keys"],
        cache["values"],
        cache.get("scales"),
        cache["table"],
        tiles,
        out,
        buffers,
        layer.exp2_scale,
        window,
        128,
        layer.sinks,
        layer.exp2_soft_cap,
        layer.slopes,
        SHAPE=shape,
        DIMS=DIM,
        SPLIT_PROGRAMS=splits > 0,
        LARGE=False,
        EXACT=True,
        PDL=False,
        CHUNKED=is_chunked,
        PARTS=parts,
    )
    if splits:
        kernels.merge_splits[(len(starts), 1)](
            *(tiles, out, buffers, window, 128, len(starts), layer.sinks),
            SHAPE=shape,
            DIMS=DIM,
            HEADS=4,
            AT_ONCE=2,
            PDL=False,
            CHUNKED=is_chunked,
        )
    return out


def exact(
    cache: dict[str, Any],
    position: int,
    window: int = NO_WINDOW,
    soft_cap: float = 0.0,
    sinks: Any = None,
    slopes: Any = None,
    is_chunked: bool = False,
) -> Any:
    """In float64, [heads * dims]."""
    first = position // window * window if is_chunked else max(0, position + 1 - window)
    seen = range(first, position + 1)
    places = [(int(cache["table"][n // BLOCK]), n % BLOCK) for n in seen]
    mixed = []
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        keys = torch.stack([cache["keys"][b, own, s] for b, s in places]).double()
        values = torch.stack([cache["values"][b, own, s] for b, s in places]).double()
        scores = keys @ cache["queries"][position, head].double() * DIM**-0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if slopes is not None:
            scores = scores + slopes[head].double() * (torch.tensor(list(seen)) - position)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head, None].double()])
        mixed.append(torch.softmax(scores, 0)[: len(values)] @ values)
    return torch.cat(mixed)


@pytest.mark.parametrize("window", [NO_WINDOW, 20])
def test_rows_are_softmax_attention(cache: dict[str, Any], window: int) -> None:
    found = to_natural_order(attended(cache, range(70, 78), 8, window=window))
    for place, position in enumerate(range(70, 78)):
        wanted = exact(cache, position, window)
        error = (found[place].double() - wanted).norm() / wanted.norm()
        assert error < 6e-3  # the weights are rounded to bfloat16


@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("positions", [range(5), range(60, 68), range(85, 90)])
def test_a_row_has_the_same_bits_alone_in_a_tile_and_in_splits(
    cache: dict[str, Any], positions: range, window: int
) -> None:
    together = attended(cache, positions, 8, window=window)
    assert together.isfinite().all()
    for tokens, splits in ((1, 0), (3, 0), (1, 4)):
        found = attended(cache, positions, tokens, window=window, splits=splits)
        assert torch.equal(found, together), (tokens, splits)


SLOPES = torch.tensor([0.5, 0.0625, 0.01, 2.0])
SINKS = torch.tensor([-1.0, 0.5, 3.0, 9.0])  # of each head: the last takes nearly all weight
SINGULAR: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": SINKS},
    "a soft cap": {"soft_cap": 1.5},
    "ALiBi": {"slopes": SLOPES},
    "ALiBi, a soft cap and a window": {"slopes": SLOPES, "soft_cap": 1.5, "window": 20},
    "sinks, a soft cap and a window": {"sinks": SINKS, "soft_cap": 1.5, "window": 20},
    "a chunk": {"window": 33, "is_chunked": True},
    "chunks, one of which ends among the rows": {"window": 21, "is_chunked": True},
}


@pytest.mark.parametrize("options", SINGULAR.values(), ids=SINGULAR.keys())
def test_sinks_soft_caps_and_slopes_are_a_rows_own(
    cache: dict[str, Any], options: dict[str, Any]
) -> None:
    together = attended(cache, range(60, 68), 8, **options)
    found = to_natural_order(together)
    plain = to_natural_order(attended(cache, range(60, 68), 8))
    for place, position in enumerate(range(60, 68)):
        wanted = exact(cache, position, **options)
        assert (found[place].double() - wanted).norm() / wanted.norm() < 6e-3
        assert (plain[place].double() - wanted).norm() / wanted.norm() > 2e-2
    for tokens, splits in ((1, 0), (3, 0), (1, 4)):
        found = attended(cache, range(60, 68), tokens, splits=splits, **options)
        assert torch.equal(found, together), (tokens, splits)


@pytest.mark.parametrize(
    ("first", "options"),
    [(51, {"window": 20}), (64, {"window": 64, "is_chunked": True})],
    ids=["window", "chunk"],
)
@pytest.mark.parametrize(("tokens", "splits"), [(8, 0), (1, 0), (1, 4)])
def test_blocks_before_the_window_are_not_read(
    cache: dict[str, Any], tokens: int, splits: int, first: int, options: dict[str, Any]
) -> None:
    """They may be another sequence's by now: here one that nobody wrote."""
    whole = attended(cache, range(70, 78), tokens, splits=splits, **options)
    table = cache["table"].clone()
    table[: first // BLOCK] = 1
    freed = attended({**cache, "table": table}, range(70, 78), tokens, splits=splits, **options)
    assert torch.equal(freed, whole)


@pytest.mark.parametrize("window", [NO_WINDOW, 20])
def test_programs_that_share_a_tile_change_no_bit(cache: dict[str, Any], window: int) -> None:
    wanted = attended(cache, range(60, 83), 8, window=window)
    assert torch.equal(attended(cache, range(60, 83), 16, window=window, parts=2), wanted)
    assert torch.equal(attended(cache, range(60, 83), 32, window=window, parts=4), wanted)


@pytest.mark.parametrize("splits", [0, 4])
def test_blocks_may_have_room_for_heads_of_other_layers(cache: dict[str, Any], splits: int) -> None:
    empty = torch.full_like(cache["keys"][:, :1], float("nan"))
    roomy = {name: torch.cat([cache[name], empty], 1) for name in ("keys", "values")}
    found = attended({**cache, **roomy}, range(60, 68), 1, splits=splits)
    assert torch.equal(found, attended(cache, range(60, 68), 1, splits=splits))


@pytest.fixture(scope="module")
def in_float16(cache: dict[str, Any]) -> dict[str, Any]:
    """A cache in float16, and queries in float32."""
    queries = torch.randn((CONTEXT, HEADS, DIM), generator=torch.Generator().manual_seed(2))
    halves = {name: cache[name].to(torch.float16) for name in ("keys", "values")}
    return {**cache, **halves, "queries": queries}


@pytest.mark.parametrize("splits", [0, 4])
def test_beside_queries_in_float32_nothing_but_the_cache_is_rounded(
    in_float16: dict[str, Any], splits: int
) -> None:
    rows = attended(in_float16, range(70, 78), 1, splits=splits, out_type=torch.float32)
    found = to_natural_order(rows)
    for place, position in enumerate(range(70, 78)):
        wanted = exact(in_float16, position)
        error = (found[place].double() - wanted).norm() / wanted.norm()
        assert error < 1e-6  # 2e-4 with queries or weights in one float16


def test_a_row_in_float16_has_the_same_bits_alone_in_a_tile_and_in_splits(
    in_float16: dict[str, Any],
) -> None:
    together = attended(in_float16, range(60, 68), 8, out_type=torch.float32)
    for tokens, splits in ((1, 0), (3, 0), (1, 4)):
        found = attended(in_float16, range(60, 68), tokens, splits=splits, out_type=torch.float32)
        assert torch.equal(found, together), (tokens, splits)


def emulated(cache: dict[str, Any], positions: range, window: int = NO_WINDOW) -> Any:
    """What a program of the Hopper kernel makes of rows at these positions: [rows, heads * dims],
    with tiles and splits of its own, as small as here."""
    table = cache["table"]
    group = HEADS // KV_HEADS
    rows = cache["queries"][positions[0] : positions[-1] + 1]
    scale = DIM**-0.5 * float(np.log2(np.e))
    mixed = []
    for head in range(KV_HEADS):
        keys, values = (cache[name][table, head].reshape(-1, DIM) for name in ("keys", "values"))
        own = rows[:, head * group : (head + 1) * group]
        cut = emulation.Cut(TILE, SPLIT)
        mixed.append(emulation.attended(own, keys, values, positions[0], scale, window, cut))
    return torch.cat(mixed, 1).flatten(1)


@pytest.mark.parametrize("window", [NO_WINDOW, 20])
@pytest.mark.parametrize("positions", [range(5), range(60, 68), range(85, 90)])
def test_the_hopper_kernel_emulated_is_softmax_attention_whatever_nobody_wrote(
    cache: dict[str, Any], positions: range, window: int
) -> None:
    together = emulated(cache, positions, window)
    assert together.isfinite().all()
    for place, position in enumerate(positions):
        wanted = exact(cache, position, window)
        error = (together[place].double() - wanted).norm() / wanted.norm()
        assert error < 6e-3
        alone = emulated(cache, range(position, position + 1), window)
        assert torch.equal(alone[0], together[place])


def test_the_hopper_kernel_emulated_makes_what_the_plain_one_does(cache: dict[str, Any]) -> None:
    plain = to_natural_order(attended(cache, range(60, 68), 8))
    assert torch.allclose(plain.float(), emulated(cache, range(60, 68)).float(), atol=4e-3)


def test_the_hopper_kernel_emulated_scales_weights_anew_where_scores_rise(
    cache: dict[str, Any],
) -> None:
    """Some later scores are so far above the first ones that weights would be infinite."""
    rising = {**cache, "queries": cache["queries"] * 400}
    for position in (60, 89):
        found = emulated(rising, range(position, position + 1))[0].double()
        wanted = exact(rising, position, NO_WINDOW)
        assert (found - wanted).norm() / wanted.norm() < 6e-3


LATENT: Any = SimpleNamespace(num_heads=6, num_kv_heads=2, head_dim=24)  # two groups of heads
ROPE_DIMS = 8


def attended_latents(kept: Any, queries: Any, first: int, tokens: int, splits: int) -> Any:
    """Rows from position `first` on, so many a tile: [rows, heads, columns], in natural order."""
    buffers = launchers.split_buffers([LATENT], len(queries), max(1, splits), "cpu")
    attention = launchers.PlainAttention(
        *(LATENT, launchers._Splits(buffers), BLOCK, {"PDL": False}),
        exact=True,
        latent_rope_dims=ROPE_DIMS,
    )
    starts = range(0, len(queries), tokens)
    tiles = kernels.TokenTiles(
        rows=_integers(list(starts)),
        counts=_integers([min(tokens, len(queries) - start) for start in starts]),
        positions=_integers([first + start for start in starts]),
        tables=_integers([0] * len(starts)),
        starts=_integers([first] * len(starts)),
    )
    out = torch.full((len(queries), 6 * 256), float("nan"), dtype=torch.float16)
    table = torch.arange(len(kept), dtype=torch.int32)
    given = launchers.AttentionInput(queries, table, tiles, out, tokens)
    cache, layer = launchers.LayerCache(kept, kept), LayerAttention(0.2)
    attention.attend(given, cache, layer, splits)
    return to_natural_order(out).view(len(queries), 6, 256)[..., : LATENT.head_dim]


def test_latent_attention_has_values_among_its_keys_and_the_same_bits_in_tiles_and_splits() -> None:
    generator, first, count = torch.Generator().manual_seed(3), 522, 6
    size = LATENT.head_dim + ROPE_DIMS
    kept = torch.randn((34, 1, BLOCK, size), generator=generator).bfloat16()
    queries = torch.randn((count, 6, size), generator=generator).bfloat16()
    found = attended_latents(kept, queries, first, 4, 0)
    vectors = kept.view(-1, size).double()
    for row in range(count):
        seen = vectors[: first + row + 1]
        weights = torch.softmax(0.2 * queries[row].double() @ seen.T, -1)
        wanted = weights @ seen[:, : LATENT.head_dim]
        assert (found[row].double() - wanted).norm() / wanted.norm() < 6e-3
    for tokens, splits in ((1, 0), (1, 2)):
        assert torch.equal(attended_latents(kept, queries, first, tokens, splits), found)
