"""Every GEMM, attention and mixture of experts on this machine's GPU at real shapes, in one table.

    python -m tests.executors.cuda.check            everything
    python -m tests.executors.cuda.check --prefill  prompts in CUDA C++ beside Gluon alone

Errors are against float64 over the weights as the reference decoders give them, relative in the
2-norm; `bits` says whether a token's sums were the same in every batch. Attention's errors come of
weights rounded to bfloat16.
"""

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda.attention import (
    SPLIT_SIZE,
    Attention,
    AttentionInput,
    HopperAttention,
    LayerAttention,
    LayerCache,
    PlainAttention,
    attention_for,
)
from quire.executors.cuda.device import runs_hopper_kernels
from quire.executors.cuda.expert_weights import ExpertLoader
from quire.executors.cuda.experts import ExpertRunner
from quire.executors.cuda.gemm import Gemm, HopperGemm, gemm_for
from quire.executors.cuda.kernels.attention import TokenTiles
from quire.executors.cuda.planes import (
    GATED_DIVISOR,
    PLANE_FORMATS,
    Array,
    padded,
    reorder,
    to_natural_order,
    to_operand_order,
)
from quire.executors.cuda.weights import Linear, Segment, num_splits
from quire.loader.reading import Bytes
from quire.loader.tensor import Tensor
from quire.model.dummy import random_blocks
from quire.model.spec import Activation, Experts, Router
from quire.quant.formats import Format, format_named

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "down": (4096, 14336), "gated": (28672, 4096)}
BATCHES = (1, 2, 7, 16, 33, 64, 100, 256, 300)
_FORMATS = (*PLANE_FORMATS, "BF16", "F16")

LENGTHS = (1, 5, 16, 63, 64, 65, 200, 512, 513, 700, 1100)  # of sequences that attend
CHUNK = 20  # tokens of each that the step computes, of the longest LAST_CHUNK: 252 together
LAST_CHUNK = 90  # more than a tile of tokens in any kernel
LONG_LENGTHS = (131_072, 70_001)
_FEW, _MANY = 256, 512  # tokens a step, padding included


class Case:
    """A random matrix, its planes and its exact values."""

    def __init__(self, format_name: str, rows: int, columns: int, seed: int) -> None:
        block_format = format_named(format_name, "check")
        raw = random_blocks(
            block_format, rows * columns, columns**-0.5, np.random.default_rng(seed)
        )
        self.exact = _decoded(block_format, raw, rows)
        planes = reorder(format_name, torch.from_numpy(raw).cuda(), rows, columns)
        self.linear = Linear((Segment(planes, 0, None),), rows, num_splits(rows, planes.num_blocks))
        self.gated = Linear((Segment(planes, 0, None),), rows, 1, is_gated=True)
        generator = torch.Generator("cuda").manual_seed(seed)
        tokens = torch.randn((max(BATCHES), columns), generator=generator, device="cuda")
        self.tokens = to_operand_order(tokens.half()).contiguous()
        self.wanted = tokens.half().double() @ self.exact.double().T


def _decoded(block_format: Format, raw: Bytes, rows: int) -> Array:
    pieces = []
    size = block_format.block_bytes
    blocks = raw.reshape(rows, -1, size)
    for start in range(0, rows, 1024):
        some = blocks[start : start + 1024]
        values = block_format.decode(some.reshape(-1, size))
        pieces.append(torch.from_numpy(values.reshape(len(some), -1)).cuda())
    return torch.cat(pieces)


def chunk_of(length: int) -> int:
    """Tokens of a sequence of that length that the step computes."""
    return min(LAST_CHUNK if length >= max(LENGTHS) else CHUNK, length)


def check_sums(gemm: Gemm, case: Case) -> tuple[float, bool]:
    """Error and invariance of plain sums."""
    rows = case.linear.num_rows
    found = {}
    for batch in BATCHES:
        sums = torch.full((case.linear.num_splits, batch, rows), float("nan"), device="cuda")
        gemm.multiply(case.linear, case.tokens[:batch].contiguous(), sums, batch)
        total = sums[0].clone()
        for split in sums[1:]:
            total += split
        found[batch] = total
    error, same = _judged(found, case.wanted)
    if isinstance(gemm, HopperGemm):
        added = torch.full_like(total, float("nan"))
        gemm.multiply_added(case.linear, case.tokens, added, len(added))
        same &= torch.equal(added, total)
    return error, same


def check_gated(gemm: Gemm, case: Case) -> tuple[float, bool]:
    rows = case.gated.num_rows
    sums = torch.zeros((1, max(BATCHES), rows), device="cuda")
    found = {}
    for batch in BATCHES:
        out = torch.full((batch, rows // 2), float("nan"), dtype=torch.half, device="cuda")
        gemm.multiply_gated(case.gated, case.tokens[:batch].contiguous(), sums, out, batch)
        found[batch] = out.float() * GATED_DIVISOR
    pairs = case.wanted.view(len(case.wanted), -1, 2, 8)  # eight gates, then eight ups
    wanted = torch.nn.functional.silu(pairs[:, :, 0]) * pairs[:, :, 1]
    return _judged(found, wanted.flatten(1))


def _judged(found: dict[int, Array], wanted: Array) -> tuple[float, bool]:
    largest = found[max(BATCHES)]
    errors = [
        float((value.double() - wanted[:batch]).norm() / wanted[:batch].norm())
        for batch, value in found.items()
    ]
    same = all(torch.equal(value, largest[:batch]) for batch, value in found.items())
    return float(np.max(errors)), same


# ---- attention


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


ATTENTION_SHAPES = (
    AttentionShape(32, 8, 128),
    AttentionShape(9, 3, 64),
    AttentionShape(32, 4, 128),
    AttentionShape(64, 8, 64),
    AttentionShape(4, 1, 256),
    AttentionShape(32, 4, 512),
)
LONG_SHAPE = AttentionShape(8, 2, 128)
_ALIBI = LayerAttention(0.0, slopes=())  # of as many heads as there are
LAYERS = (  # a scale of 0: head_dim ** -0.5
    LayerAttention(0.0),
    LayerAttention(0.0, window=300),
    LayerAttention(0.3, window=128, soft_cap=2.0),
    _ALIBI,
    LayerAttention(0.0, window=300, is_chunked=True),
)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCase:
    """Random keys, values and queries; what nobody wrote is not a number."""

    spec: AttentionShape
    layer: LayerAttention
    lengths: Sequence[int]
    chunks: Sequence[int]  # tokens of each that the step computes
    keys: Array
    values: Array
    tables: list[list[int]]
    queries: Array  # [tokens, heads, head_dim]

    @classmethod
    def made(
        cls,
        spec: AttentionShape,
        layer: LayerAttention,
        lengths: Sequence[int],
        chunks: Sequence[int] = (),
    ) -> "AttentionCase":
        generator = torch.Generator("cuda").manual_seed(7)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(counts) + 3).tolist()  # some blocks are nobody's
        shape = (len(order), spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        kept = [torch.full(shape, float("nan"), device="cuda").bfloat16() for _ in range(2)]
        tables = []
        for length, count in zip(lengths, counts, strict=True):
            tables.append([order.pop() for _ in range(count)])
            for index, block in enumerate(tables[-1]):
                used = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
                for array in kept:
                    own = (spec.num_kv_heads, used, spec.head_dim)
                    array[block, :, :used] = torch.randn(own, generator=generator, device="cuda")
        chunks = chunks or [chunk_of(length) for length in lengths]
        tokens = sum(chunks)
        queries = torch.randn(
            (tokens, spec.num_heads, spec.head_dim), generator=generator, device="cuda"
        ).bfloat16()
        layer = layer._replace(scale=layer.scale or spec.head_dim**-0.5)
        if layer.soft_cap:
            layer = layer._replace(sinks=torch.linspace(-4, 4, spec.num_heads, device="cuda"))
        if layer.slopes is not None:
            slopes = torch.logspace(-8, -1, spec.num_heads, 2.0, device="cuda")
            layer = layer._replace(slopes=slopes)
        return cls(spec, layer, lengths, chunks, kept[0], kept[1], tables, queries)

    def found(
        self,
        attention: Attention,
        num_tokens: int,
        num_splits: int = 0,
        *,
        captured: bool = False,
        sharing: int = 1,
    ) -> Array:
        """All rows, in a step padded to so many tokens. `captured`: by a graph, run once before.
        `sharing`: so many programs share a tile."""
        spec = self.spec
        tile_tokens = sharing * attention.tokens_per_tile(num_tokens, num_splits)
        tiles = self._tiles(tile_tokens, num_tokens)
        queries = torch.zeros((num_tokens, *self.queries.shape[1:]), device="cuda").bfloat16()
        queries[: len(self.queries)] = self.queries
        out = torch.full((num_tokens, padded(spec.num_heads * spec.head_dim)), float("nan"))
        out = out.half().cuda()
        blocks = list(chain.from_iterable(self.tables))
        flat = torch.tensor(blocks, dtype=torch.int32, device="cuda")
        given = AttentionInput(queries, flat, tiles, out, tile_tokens)
        cache = LayerCache(self.keys, self.values)
        attention.attend(given, cache, self.layer, num_splits)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attention.attend(given, cache, self.layer, num_splits)
            out.fill_(float("nan"))
            graph.replay()
        width = spec.num_heads * spec.head_dim
        return to_natural_order(out[: len(self.queries)])[:, :width]

    def _tiles(self, tokens: int, num_tokens: int) -> TokenTiles:
        rows: list[tuple[int, ...]] = []
        row = table = 0
        for length, count, blocks in zip(self.lengths, self.chunks, self.tables, strict=True):
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
        outputs = []
        row = 0
        for length, count, table in zip(self.lengths, self.chunks, self.tables, strict=True):
            keys, values = (
                array[table].transpose(0, 1).flatten(1, 2)[:, :length].double()
                for array in (self.keys, self.values)
            )
            own = self.queries[row : row + count].double().transpose(0, 1)
            scores = own @ keys.repeat_interleave(group, 0).mT * self.layer.scale
            if self.layer.soft_cap:
                scores = self.layer.soft_cap * (scores / self.layer.soft_cap).tanh()
            position = torch.arange(length - count, length, device="cuda")[:, None]
            key = torch.arange(length, device="cuda")  # positions
            seen = self.layer.num_seen
            first = position // seen * seen if self.layer.is_chunked else position - seen + 1
            masked = (key > position) | (key < first)
            if self.layer.slopes is not None:
                slopes = self.layer.slopes.double()[:, None, None] / np.log2(np.e)
                scores = scores + slopes * (key - position)
            scores = scores.masked_fill(masked, float("-inf"))
            if self.layer.sinks is not None:
                sinks = self.layer.sinks.double()[:, None, None] / np.log2(np.e)
                scores = torch.cat([scores, sinks.expand(-1, count, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            outputs.append(
                (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
            )
            row += count
        return torch.cat(outputs)


def check_attention(
    spec: AttentionShape, layer: LayerAttention, lengths: Sequence[int] = LENGTHS
) -> tuple[float, bool]:
    """Error, and whether a row's bits depend on the step's size, on tiles or on splits."""
    case = AttentionCase.made(spec, layer, lengths)
    num_splits = -(-max(lengths) // SPLIT_SIZE)
    is_plain = layer.slopes is not None or layer.is_chunked
    attention = _attention(spec, num_splits, is_plain=is_plain)
    found = case.found(attention, _FEW)
    others = [case.found(attention, _MANY), case.found(attention, _MANY, num_splits)]
    if isinstance(attention, PlainAttention):
        others.append(case.found(attention, _MANY, sharing=4))
    wanted = case.exact()
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error, all(torch.equal(found, other) for other in others)


def _attention(spec: AttentionShape, num_splits: int, *, is_plain: bool = False) -> Attention:
    is_hopper = torch.cuda.get_device_capability()[0] >= 9
    return attention_for(
        spec,
        max_split_tokens=_MANY,
        max_splits=num_splits,
        max_sequences=_MANY,
        block_size=BLOCK_SIZE,
        launch_options={"PDL": is_hopper, "launch_pdl": is_hopper},
        device="cuda",
        is_plain=is_plain,
    )


def _attention_line(
    shape: AttentionShape, layer: LayerAttention, lengths: Sequence[int] = LENGTHS
) -> bool:
    error, same = check_attention(shape, layer, lengths)
    heads = f"{shape.num_heads} heads over {shape.num_kv_heads} of {shape.head_dim}"
    bits = "same" if same else "DIFFER"
    more = ", sinks and a soft cap" if layer.soft_cap else ""
    more += ", ALiBi" if layer.slopes is not None else ""
    more += ", chunks" if layer.is_chunked else ""
    what = f"attention, {heads}, up to {max(lengths)} positions, window {layer.window}{more}"
    print(f"{what}: error {error:.2e}  bits {bits}", flush=True)
    return same and error < 6e-3


class PrefillCase(NamedTuple):
    """A step of prompts: of each sequence the positions before it and its tokens."""

    starts: Sequence[int]
    counts: Sequence[int]
    loudness: float = 1.0  # of queries: how far scores are apart
    shape: AttentionShape = ATTENTION_SHAPES[0]


PREFILL_CASES = (
    PrefillCase([0], [300]),
    PrefillCase([1000], [777]),
    PrefillCase([2048], [2048]),
    PrefillCase([100], [512], 8.0),
    PrefillCase([333], [1111], 30.0),
    PrefillCase([50], [700], 1.0, AttentionShape(28, 4, 128)),
    PrefillCase([0, 511, 512, 63, 1500, 0, 7], [1, 129, 128, 2, 300, 64, 65], 4.0),
)


def _prefill_line(given: PrefillCase) -> bool:
    """The bits of kernels/prefill.cu beside those of kernels/hopper_prefill.py."""
    in_cuda = _attention(given.shape, 1)
    assert isinstance(in_cuda, HopperAttention)
    in_gluon = copy.copy(in_cuda)
    in_gluon._cuda_prefill = None
    lengths = [start + count for start, count in zip(given.starts, given.counts, strict=True)]
    layer = LayerAttention(0.0)
    case = AttentionCase.made(given.shape, layer, lengths, given.counts)
    case = replace(case, queries=case.queries * given.loudness)
    num_tokens = sum(given.counts) + 13  # of padding
    wanted = case.found(in_gluon, num_tokens)
    found = case.found(in_cuda, num_tokens)
    again = case.found(in_cuda, num_tokens, captured=True)
    bits = [x.contiguous().view(torch.int16) for x in (wanted, found, again)]
    same = torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2])
    is_sound = same and bool(wanted.isfinite().all()) and in_cuda.fallback is None
    print(
        f"prompts in CUDA C++, {given.shape.num_heads} heads over {given.shape.num_kv_heads}, "
        f"{given.counts} tokens after {given.starts}, queries times {given.loudness}: "
        f"bits {'same' if same else 'DIFFER'}  {in_cuda.fallback or ''}",
        flush=True,
    )
    return is_sound


# ---- experts


class ExpertShape(NamedTuple):
    num_experts: int
    num_used: int
    size: int
    hidden: int
    format_name: str
    activation: Activation


EXPERT_SHAPES = (
    ExpertShape(32, 8, 768, 2048, "Q4_K", Activation.SILU),
    ExpertShape(32, 8, 768, 2048, "Q6_K", Activation.SILU),
    ExpertShape(32, 8, 704, 2816, "Q4_K", Activation.GELU_TANH),
    ExpertShape(8, 4, 2880, 2880, "Q8_0", Activation.CLAMPED_SWIGLU),
    ExpertShape(8, 4, 2880, 2880, "MXFP4", Activation.CLAMPED_SWIGLU),
    ExpertShape(8, 2, 768, 2048, "E4M3_128", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "NVFP4_128", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "BF16", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "Q2_K", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "Q3_K", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "IQ1_M", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "IQ2_S", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "IQ3_XXS", Activation.SILU),
    ExpertShape(8, 2, 768, 2048, "IQ4_XS", Activation.SILU),
)
EXPERT_BATCHES = (1, 2, 8, 9, 16, 33, 64, 130, 256, 600, 2048)


class ExpertCase:
    """Random experts, and what float64 makes of the pairs that the router chose."""

    def __init__(self, shape: ExpertShape) -> None:
        has_bias = shape.activation is Activation.CLAMPED_SWIGLU
        router = Router(normalises=True, has_bias=has_bias)
        self.part = Experts(
            count=shape.num_experts,
            num_used=shape.num_used,
            size=shape.size,
            activation=shape.activation,
            router=router,
            has_bias=has_bias,
        )
        self.shape = shape
        self.tensors = {f"blk.0.{name}": x for name, x in self._drawn(has_bias).items()}
        self.weights = ExpertLoader(self.tensors, "cuda").load(self.part, "blk.0.")
        options = {"PDL": True, "launch_pdl": True}
        self.most = max(EXPERT_BATCHES)
        self.width = padded(shape.hidden)
        gemm = gemm_for("cuda")
        self.runner = ExpertRunner([self.part], self.width, self.most, gemm, options, "cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        tokens = torch.zeros((self.most, self.width), device="cuda")
        drawn = torch.randn((self.most, shape.hidden), generator=generator, device="cuda")
        tokens[:, : shape.hidden] = drawn
        self.natural = tokens.half()
        self.tokens = to_operand_order(self.natural).contiguous()

    def _drawn(self, has_bias: bool) -> dict[str, Tensor]:
        count, size, hidden = self.shape.num_experts, self.shape.size, self.shape.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "ffn_gate_inp.weight": (count, hidden),
            "ffn_gate_exps.weight": (count, size, hidden),
            "ffn_up_exps.weight": (count, size, hidden),
            "ffn_down_exps.weight": (count, hidden, size),
        }
        if has_bias:
            names = {name.replace("weight", "bias"): x[:-1] for name, x in shapes.items()}
            shapes |= names
        found = {}
        for place, (name, sizes) in enumerate(shapes.items()):
            is_stack = len(sizes) == 3
            kind = format_named(self.shape.format_name if is_stack else "F32", name)
            rng = np.random.default_rng(place)
            data = random_blocks(kind, int(np.prod(sizes)), sizes[-1] ** -0.5, rng)
            found[name] = Tensor(name, sizes, kind, data)
        return found

    def found(self, batch: int) -> Array:
        """What each of a token's experts adds: [slot, token, column]."""
        slots = (self.part.num_used, self.most, self.width)
        sums = torch.full(slots, float("nan"), device="cuda")
        self.runner.run(self.weights, self.tokens, sums, batch)
        return sums[:, :batch].clone()

    def exact(self, batch: int) -> tuple[Array, float]:
        """The same in float64, of the pairs that the runner chose for its last batch; and which
        share of the tokens has the experts of float64 scores."""
        floats = {
            name.removeprefix("blk.0."): torch.from_numpy(x.to_float32()).cuda()
            for name, x in self.tensors.items()
        }
        x = self.natural[:batch, : self.shape.hidden].double()
        used = self.part.num_used
        chosen = self.runner._pairs.experts[: batch * used].view(batch, used)
        weights = self.runner._pairs.weights[: batch * used].view(batch, used)
        logits = x @ floats["ffn_gate_inp.weight"].double().T
        logits += floats.get("ffn_gate_inp.bias", 0.0)
        best = logits.topk(used).indices.sort().values
        out = torch.zeros((used, batch, self.shape.hidden), dtype=torch.double, device="cuda")
        for expert in range(self.part.count):
            token, slot = torch.nonzero(chosen == expert, as_tuple=True)
            rows = [
                x[token] @ floats[f"ffn_{kind}_exps.weight"][expert].double().T
                + (floats[f"ffn_{kind}_exps.bias"][expert] if self.part.has_bias else 0.0)
                for kind in ("gate", "up")
            ]
            made = _activated(self.part.activation, *rows)
            made = made @ floats["ffn_down_exps.weight"][expert].double().T
            if self.part.has_bias:
                made += floats["ffn_down_exps.bias"][expert]
            out[slot, token] = made * weights[token, slot, None]
        return out, float((best == chosen).all(1).double().mean())


def _activated(activation: Activation, gates: Array, ups: Array) -> Array:
    if activation is Activation.CLAMPED_SWIGLU:
        gates, ups = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0)
        return gates * torch.sigmoid(1.702 * gates) * (ups + 1.0)
    if activation is Activation.GELU_TANH:
        return torch.nn.functional.gelu(gates, approximate="tanh") * ups
    return torch.nn.functional.silu(gates) * ups


def _expert_line(shape: ExpertShape) -> bool:
    case = ExpertCase(shape)
    largest = case.found(case.most)
    wanted, agreed = case.exact(case.most)
    natural = to_natural_order(largest)[:, :, : shape.hidden]
    error = float((natural.double() - wanted).norm() / wanted.norm())
    wrong = [x for x in EXPERT_BATCHES if not torch.equal(case.found(x), largest[:, :x])]
    again = torch.equal(case.found(case.most), largest)
    print(
        f"experts {shape.num_experts}x{shape.size} of {shape.hidden} {shape.format_name}: error "
        f"{error:.2e}  routed alike {agreed:.4f}  bits {wrong or 'same'} "
        f"{'again' if again else 'NOT AGAIN'}",
        flush=True,
    )
    return error < 2e-3 and not wrong and again and agreed > 0.98


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="*", default=list(_FORMATS), choices=_FORMATS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--prefill", action="store_true", help="prompts in CUDA C++ alone")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--no-experts", action="store_true")
    args = parser.parse_args(arguments)
    if args.prefill:
        sound = [_prefill_line(case) for case in PREFILL_CASES]
        return _ended(all(sound))
    gemm = gemm_for("cuda")
    print(f"{gemm.name} on {torch.cuda.get_device_name()}; batches {BATCHES}", flush=True)
    is_sound = True
    for format_name in args.formats:
        for seed, shape in enumerate(args.shapes):
            began = time.perf_counter()
            case = Case(format_name, *SHAPES[shape], seed)
            check = check_gated if shape == "gated" else check_sums
            error, same = check(gemm, case)
            is_sound &= same and error < 2e-3
            bits = "same" if same else "DIFFER"
            took = time.perf_counter() - began
            print(
                f"{format_name:7} {shape:6} error {error:.2e}  bits {bits}  ({took:.1f} s)",
                flush=True,
            )
            del case
            torch.cuda.empty_cache()
    if not args.no_attention:
        cases = [(shape, layer) for shape in ATTENTION_SHAPES for layer in LAYERS]
        sound = [_attention_line(shape, layer) for shape, layer in cases]
        sound += [_attention_line(LONG_SHAPE, layer, LONG_LENGTHS) for layer in LAYERS]
        if runs_hopper_kernels("cuda"):
            sound += [_prefill_line(case) for case in PREFILL_CASES]
        is_sound &= all(sound)
    if not args.no_experts:
        is_sound &= all(_expert_line(shape) for shape in EXPERT_SHAPES)
    return _ended(is_sound)


def _ended(is_sound: bool) -> int:
    print("sound" if is_sound else "NOT SOUND")
    return 0 if is_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
