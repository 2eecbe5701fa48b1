"""Attention on this machine's GPU at real shapes: its error against float64, and whether a row's
bits depend on how many tokens a step has, on its tile, or on splits in programs of their own."""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.attention import (
    SPLIT_SIZE,
    Attention,
    AttentionInput,
    LayerCache,
    attention_for,
)
from quire.executors.cuda.kernels.attention import TokenTiles
from quire.executors.cuda.planes import Array, padded, to_natural_order

LENGTHS = (1, 5, 16, 63, 64, 65, 200, 512, 513, 700, 1100)  # of sequences
CHUNK = 20  # tokens of each that the step computes: 182 together
_FEW, _MANY = 256, 512  # tokens a step, with what pads it


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = (AttentionShape(32, 8, 128), AttentionShape(9, 3, 64), AttentionShape(32, 4, 128))
WINDOWS = (None, 300)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCase:
    """Random keys, values and queries; what nobody wrote is not a number."""

    spec: AttentionShape
    window: int | None
    keys: Array
    values: Array
    tables: list[list[int]]
    queries: Array  # [tokens, heads, head_dim]

    @classmethod
    def made(cls, spec: AttentionShape, window: int | None) -> "AttentionCase":
        generator = torch.Generator("cuda").manual_seed(7)
        counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        order = torch.randperm(sum(counts) + 3).tolist()  # some blocks are nobody's
        shape = (len(order), spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        kept = [torch.full(shape, float("nan"), device="cuda").bfloat16() for _ in range(2)]
        tables = []
        for length, count in zip(LENGTHS, counts, strict=True):
            tables.append([order.pop() for _ in range(count)])
            for place, block in enumerate(tables[-1]):
                used = min(BLOCK_SIZE, length - place * BLOCK_SIZE)
                for array in kept:
                    own = (spec.num_kv_heads, used, spec.head_dim)
                    array[block, :, :used] = torch.randn(own, generator=generator, device="cuda")
        tokens = sum(min(CHUNK, length) for length in LENGTHS)
        queries = torch.randn(
            (tokens, spec.num_heads, spec.head_dim), generator=generator, device="cuda"
        ).bfloat16()
        return cls(spec, window, kept[0], kept[1], tables, queries)

    def found(self, attention: Attention, num_tokens: int, num_splits: int = 0) -> Array:
        """All rows, in a step padded to so many tokens."""
        spec = self.spec
        tiles = self._tiles(attention.tokens_per_tile(num_tokens, num_splits), num_tokens)
        queries = torch.zeros((num_tokens, *self.queries.shape[1:]), device="cuda").bfloat16()
        queries[: len(self.queries)] = self.queries
        out = torch.full((num_tokens, padded(spec.num_heads * spec.head_dim)), float("nan"))
        out = out.half().cuda()
        blocks = list(chain.from_iterable(self.tables))
        flat = torch.tensor(blocks, dtype=torch.int32, device="cuda")
        given = AttentionInput(queries, flat, tiles, out)
        attention.attend(given, LayerCache(self.keys, self.values, self.window), num_splits)
        width = spec.num_heads * spec.head_dim
        return to_natural_order(out[: len(self.queries)])[:, :width]

    def _tiles(self, tokens: int, num_tokens: int) -> TokenTiles:
        rows: list[tuple[int, ...]] = []
        row = table = 0
        for length, blocks in zip(LENGTHS, self.tables, strict=True):
            count = min(CHUNK, length)
            first = length - count
            for start in range(0, count, tokens):
                own = min(tokens, count - start)
                rows.append((row + start, own, first + start, table, first))
            row += count
            table += len(blocks)
        rows += [(0, 0, 0, 0, 0)] * (num_tokens - len(rows))
        return TokenTiles(*torch.tensor(rows, dtype=torch.int32, device="cuda").T.contiguous())

    def exact(self) -> Array:
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        mixed = []
        row = 0
        for length, table in zip(LENGTHS, self.tables, strict=True):
            count = min(CHUNK, length)
            keys, values = (
                array[table].transpose(0, 1).flatten(1, 2)[:, :length].double()
                for array in (self.keys, self.values)
            )
            own = self.queries[row : row + count].double().transpose(0, 1)
            scores = own @ keys.repeat_interleave(group, 0).mT * spec.head_dim**-0.5
            position = torch.arange(length - count, length, device="cuda")[:, None]
            place = torch.arange(length, device="cuda")
            hidden = (place > position) | (place <= position - (self.window or 1 << 30))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            mixed.append((weights @ values.repeat_interleave(group, 0)).transpose(0, 1).flatten(1))
            row += count
        return torch.cat(mixed)


def check_attention(spec: AttentionShape, window: int | None) -> tuple[float, bool]:
    """Error and invariance."""
    case = AttentionCase.made(spec, window)
    num_splits = -(-max(LENGTHS) // SPLIT_SIZE)
    major = torch.cuda.get_device_capability()[0]
    is_hopper = major >= 9
    attention = attention_for(
        spec,
        max_split_tokens=_MANY,
        max_splits=num_splits,
        max_sequences=_MANY,
        block_size=BLOCK_SIZE,
        launch_options={"PDL": is_hopper, "launch_pdl": is_hopper},
        device="cuda",
    )
    found = case.found(attention, _FEW)
    others = [case.found(attention, _MANY), case.found(attention, _MANY, num_splits)]
    wanted = case.exact()
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error, all(torch.equal(found, other) for other in others)
