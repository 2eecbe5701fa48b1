"""Every product and attention on this machine's GPU at real shapes, in one table.

    python -m quire.executors.cuda.check

Errors are against float64 over the weights as the reference decoders give them, relative in the
2-norm; `bits` says whether a token's sums were the same in every batch. Attention's errors come of
weights rounded to bfloat16.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.executors.cuda import check_attention
from quire.executors.cuda.planes import PLANE_FORMATS, Array, reorder, to_operand_order
from quire.executors.cuda.products import Products, products_for
from quire.executors.cuda.weights import GATED_SHRINK, Linear, Segment, num_splits
from quire.loader.reading import Bytes
from quire.model.dummy import random_blocks
from quire.quant.formats import Format, format_named

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "down": (4096, 14336), "gated": (28672, 4096)}
BATCHES = (1, 2, 7, 16, 33, 64, 100, 256, 300)
_FORMATS = (*PLANE_FORMATS, "BF16", "F16")


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
        part = blocks[start : start + 1024]
        values = block_format.decode(part.reshape(-1, size))
        pieces.append(torch.from_numpy(values.reshape(len(part), -1)).cuda())
    return torch.cat(pieces)


def check_sums(products: Products, case: Case) -> tuple[float, bool]:
    """Error and invariance of plain sums."""
    rows = case.linear.num_rows
    found = {}
    for batch in BATCHES:
        sums = torch.full((case.linear.num_splits, batch, rows), float("nan"), device="cuda")
        products.multiply(case.linear, case.tokens[:batch].contiguous(), sums, batch)
        total = sums[0].clone()
        for split in sums[1:]:
            total += split
        found[batch] = total
    return _judged(found, case.wanted)


def check_gated(products: Products, case: Case) -> tuple[float, bool]:
    rows = case.gated.num_rows
    sums = torch.zeros((1, max(BATCHES), rows), device="cuda")
    found = {}
    for batch in BATCHES:
        out = torch.full((batch, rows // 2), float("nan"), dtype=torch.half, device="cuda")
        products.multiply_gated(case.gated, case.tokens[:batch].contiguous(), sums, out, batch)
        found[batch] = out.float() * GATED_SHRINK
    turns = case.wanted.view(len(case.wanted), -1, 2, 8)
    wanted = torch.nn.functional.silu(turns[:, :, 0]) * turns[:, :, 1]
    return _judged(found, wanted.flatten(1))


def _judged(found: dict[int, Array], wanted: Array) -> tuple[float, bool]:
    largest = found[max(BATCHES)]
    errors = [
        float((value.double() - wanted[:batch]).norm() / wanted[:batch].norm())
        for batch, value in found.items()
    ]
    same = all(torch.equal(value, largest[:batch]) for batch, value in found.items())
    return float(np.max(errors)), same


def _attention_cases(args: argparse.Namespace) -> list[tuple[Any, int | None]]:
    if args.no_attention:
        return []
    return [(shape, size) for shape in check_attention.SHAPES for size in check_attention.WINDOWS]


def _attention_line(shape: Any, window: int | None) -> bool:
    error, same = check_attention.check_attention(shape, window)
    heads = f"{shape.num_heads} heads over {shape.num_kv_heads} of {shape.head_dim}"
    bits = "same" if same else "DIFFER"
    print(f"attention, {heads}, window {window}: error {error:.2e}  bits {bits}", flush=True)
    return same and error < 6e-3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="*", default=list(_FORMATS), choices=_FORMATS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--no-attention", action="store_true")
    args = parser.parse_args(arguments)
    products = products_for("cuda")
    print(f"{products.name} on {torch.cuda.get_device_name()}; batches {BATCHES}", flush=True)
    is_sound = True
    for format_name in args.formats:
        for seed, shape in enumerate(args.shapes):
            began = time.perf_counter()
            case = Case(format_name, *SHAPES[shape], seed)
            check = check_gated if shape == "gated" else check_sums
            error, same = check(products, case)
            is_sound &= same and error < 2e-3
            bits = "same" if same else "DIFFER"
            took = time.perf_counter() - began
            print(
                f"{format_name:6} {shape:6} error {error:.2e}  bits {bits}  ({took:.1f} s)",
                flush=True,
            )
            del case
            torch.cuda.empty_cache()
    is_sound &= all(_attention_line(shape, window) for shape, window in _attention_cases(args))
    print("sound" if is_sound else "NOT SOUND")
    return 0 if is_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
