"""A quantised linear's tensors, as the checkpoints of quantised.py (and GGUF files in NVFP4) have
them, joined into one of blocks, which are made when they are read."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.reading import Bytes, Region
from quire.loader.tensor import Tensor, packed_size
from quire.quant.formats import Floats, Format, format_named
from quire.quant.packing import (
    by_halves,
    pack_codes,
    pack_mxfp4,
    pack_nvfp4_128,
    pack_scaled,
)

_E4M3 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_FACTORS = ("weight_scale_2", "weight_global_scale")  # of a linear in NVFP4
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SHAPED_PARTS = (
    *("weight_packed", "weight_scale", "weight_shape"),
    *("weight_zero_point", "weight_g_idx"),
)
PARTS = frozenset({"weight", *_SCALES, *_FACTORS, *_PACKED_PARTS, *_SHAPED_PARTS})
_BYTES_AT_ONCE = 1 << 24

Block = tuple[int, int]  # rows and columns that share a scale


class Linear(NamedTuple):
    """The tensors of one linear, by the last part of their names."""

    name: str
    parts: Mapping[str, Tensor]

    def part(self, name: str) -> Tensor:
        if name not in self.parts:
            raise ModelFileError(f"tensor {self.name}.{name} is missing: quantised weights need it")
        return self.parts[name]

    def check_has_only(self, names: Collection[str]) -> None:
        odd = min(self.parts.keys() - set(names), default=None)
        if odd is not None:
            raise ModelFileError(
                f"tensor {self.name}.{odd} has no place beside {', '.join(sorted(self.parts))}"
            )


class Coding(NamedTuple):
    """How codes of four or eight bits are packed."""

    bits: int
    group: int | None  # columns that share a scale; None: all
    has_zeros: bool  # otherwise each is half of the codes' range
    least_zero: int = 0  # what a zero point of 0 stands for
    is_ordered: bool = True  # whether groups are known to be of neighbours
    is_awq: bool = False  # words hold rows, not columns


# ---- scales


class _Grid(NamedTuple):
    """A linear's scales: those of `span` rows and columns are one."""

    tensor: Tensor  # [rows, columns] of the grid
    span: Block

    def rows(self, first: int, last: int, width: int, in_size: int) -> Floats:
        """Of each run of `width` columns of rows first to last: [rows, in_size / width]."""
        rows, columns = self.span
        start = first // rows
        values = self.tensor.rows_float32(start, -(-last // rows))
        _check_scales(self.tensor, values)
        at_row = np.arange(first, last) // rows - start
        at_column = np.arange(0, in_size, width) // columns
        return values[at_row[:, None], at_column]


def _check_scales(tensor: Tensor, values: npt.NDArray[np.floating]) -> None:
    if not (np.isfinite(values) & (values >= 0)).all():
        raise _odd_scales(tensor)


def _odd_scales(tensor: Tensor) -> ModelFileError:
    return ModelFileError(
        f"tensor {tensor.name} has scales that are no numbers or below 0: the file is broken, "
        "or quantised otherwise than config.json says"
    )


def _grid(linear: Linear, shape: tuple[int, int], block: Block | None) -> _Grid:
    scale = next((linear.parts[name] for name in _SCALES if name in linear.parts), None)
    if scale is None:
        raise ModelFileError(
            f"tensor {linear.name}.weight has no {' or '.join(_SCALES)} beside it: it is quantised"
        )
    if scale.format.is_raw:
        raise ModelFileError(f"tensor {scale.name} has type {scale.format.name}: no scale's")
    out_size, in_size = shape
    if block is not None:
        expected = -(-out_size // block[0]), -(-in_size // block[1])
        if scale.shape != expected:
            raise ModelFileError(
                f"tensor {scale.name} has shape {list(scale.shape)}, expected {list(expected)}: "
                f"one for each block of {block[0]} by {block[1]} of {list(shape)}"
            )
        return _Grid(scale, block)
    if math.prod(scale.shape) == 1:
        return _Grid(replace(scale, shape=(1, 1)), shape)
    if scale.shape in ((out_size,), (out_size, 1)):
        return _Grid(replace(scale, shape=(out_size, 1)), (1, in_size))
    if len(scale.shape) == 2 and scale.shape[0] == out_size and in_size % scale.shape[1] == 0:
        return _Grid(scale, (1, in_size // scale.shape[1]))
    raise ModelFileError(
        f"tensor {scale.name} has shape {list(scale.shape)}, expected one for the tensor, for each "
        f"of {out_size} rows, or for equal groups of {in_size} columns of each"
    )


# ---- blocks


_Make = Callable[[int, int], Bytes]  # blocks of rows first to last


class _Rows:
    """Blocks that are made when they are read, some rows at a time."""

    def __init__(self, count: int, row_bytes: int, begin: Callable[[], _Make]) -> None:
        self.size = count * row_bytes
        self._row_bytes = row_bytes
        self._begin = begin  # reads what all rows need

    def read(self, start: int, stop: int) -> Bytes:
        size = self._row_bytes
        step = max(1, _BYTES_AT_ONCE // size)
        found = []
        make, last = self._begin(), -(-stop // size)
        for first in range(start // size, last, step):
            made = make(first, min(first + step, last))
            found.append(made[max(0, start - first * size) : stop - first * size])
        return np.concatenate(found) if found else np.empty(0, np.uint8)


def _made(
    linear: Linear, shape: tuple[int, int], kind: Format, begin: Callable[[], _Make]
) -> Tensor:
    """A matrix in blocks of this kind."""
    out_size, in_size = shape
    if in_size % kind.block_size:
        raise UnsupportedModelError(
            f"tensor {linear.name}.weight has rows of {in_size} weights, quantised: quire runs "
            f"multiples of {kind.block_size}"
        )
    source = _Rows(out_size, packed_size(kind, in_size), begin)
    return Tensor(f"{linear.name}.weight", shape, kind, Region(source, 0, source.size))


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}: of quantised weights quire "
            "reads matrices, and of experts one a tensor"
        )
    return tensor.shape[0], tensor.shape[1]


def _check_span(scales: Tensor, span: int, in_size: int, kind: Format) -> None:
    if span < in_size and span % kind.block_size:
        raise UnsupportedModelError(
            f"tensor {scales.name} has a scale of type {scales.format.name} for each {span} "
            f"columns; quire runs multiples of {kind.block_size}"
        )


_E4M3_128 = format_named("E4M3_128", "")


def of_e4m3(linear: Linear, block: Block | None) -> Tensor:
    linear.check_has_only(("weight", *_SCALES))
    weight, kind = linear.part("weight"), _E4M3_128
    if weight.format.name != _E4M3:
        raise ModelFileError(
            f"tensor {weight.name} has type {weight.format.name} and a scale; with one, {_E4M3} is "
            "expected"
        )
    shape = _matrix_shape(weight)
    grid = _grid(linear, shape, block)
    _check_span(grid.tensor, grid.span[1], shape[1], kind)

    def make(first: int, last: int) -> Bytes:
        codes = weight.row_blocks(first, last)
        if (codes & 0x7F == 0x7F).any():
            raise ModelFileError(f"tensor {weight.name} has weights that are no numbers")
        return pack_scaled(codes, grid.rows(first, last, kind.block_size, shape[1]))

    return _made(linear, shape, kind, lambda: make)


# ---- floats of four bits

_NVFP4_128, _MXFP4 = format_named("NVFP4_128", ""), format_named("MXFP4", "")
_NVFP4_GROUP = 16  # weights that share a scale
_NVFP4_BLOCK = np.dtype([("scales", "V4"), ("codes", "V32")])


def of_nvfp4(linear: Linear) -> Tensor:
    """Of a scale for sixteen weights, and one for all: a factor (modelopt's weight_scale_2) or a
    divisor (compressed-tensors' weight_global_scale)."""
    is_divided = "weight_packed" in linear.parts
    names = ("weight_packed" if is_divided else "weight", _FACTORS[is_divided], "weight_scale")
    linear.check_has_only(names)
    packed, whole, scales = (linear.part(name) for name in names)
    shape = _e2m1_shape(packed)
    _expect(scales, _E4M3, (shape[0], shape[1] // _NVFP4_GROUP))
    _expect(whole, "F32", whole.shape if math.prod(whole.shape) == 1 else (1,))

    def begin() -> _Make:
        value = whole.to_float32().reshape(1)
        _check_scales(whole, value)
        if is_divided and not value[0]:
            raise ModelFileError(f"tensor {whole.name} is 0, and scales are divided by it")
        factor = 1 / value if is_divided else value

        def make(first: int, last: int) -> Bytes:
            own = scales.row_blocks(first, last).reshape(last - first, -1)
            if (own >= 0x7F).any():
                raise _odd_scales(scales)
            codes = by_halves(packed.row_blocks(first, last).reshape(-1, 8))
            codes = codes.reshape(last - first, -1)
            return pack_nvfp4_128(own, codes, np.broadcast_to(factor, last - first))

        return make

    return _made(linear, shape, _NVFP4_128, begin)


def of_mxfp4(linear: Linear) -> Tensor:
    """Of a power of two for 32 weights."""
    names = ("weight_packed", "weight_scale")
    linear.check_has_only(names)
    packed, scales = (linear.part(name) for name in names)
    shape = _e2m1_shape(packed)
    _expect(scales, "U8", (shape[0], shape[1] // _MXFP4.block_size))

    def make(first: int, last: int) -> Bytes:
        own = scales.row_blocks(first, last).reshape(last - first, -1)
        if (own == 0xFF).any():
            raise _odd_scales(scales)
        return pack_mxfp4(own, packed.row_blocks(first, last))

    return _made(linear, shape, _MXFP4, lambda: make)


def _e2m1_shape(packed: Tensor) -> tuple[int, int]:
    rows, columns = _matrix_shape(packed)
    _expect(packed, "U8", packed.shape)
    return rows, 2 * columns


def nvfp4_with_factors(weight: Tensor, factors: Tensor) -> Tensor:
    """A GGUF tensor in NVFP4, a matrix or a stack, times the scale of each of its matrices."""
    *stacked, rows, columns = weight.shape
    count = math.prod(stacked)
    _expect(factors, "F32", (count,))

    def begin() -> _Make:
        values = factors.to_float32()
        _check_scales(factors, values)

        def make(first: int, last: int) -> Bytes:
            size = columns // 64 * _NVFP4_BLOCK.itemsize
            blocks = weight.read(first * size, last * size).view(_NVFP4_BLOCK)
            scales, codes = (
                np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(last - first, -1)
                for name in ("scales", "codes")
            )
            return pack_nvfp4_128(scales, codes, values[np.arange(first, last) // rows])

        return make

    stem = weight.name.removesuffix(".weight")
    made = _made(Linear(stem, {}), (count * rows, columns), _NVFP4_128, begin)
    return replace(made, shape=weight.shape)


# ---- codes of four or eight bits, with a scale and a zero point for each group of columns

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row of eight that each nibble of a word is of


def of_columns(linear: Linear, coding: Coding) -> Tensor:
    """A linear that AWQ or GPTQ have packed, its columns being the first axis."""
    linear.check_has_only(_PACKED_PARTS)
    packed, scales, zeros = (linear.part(name) for name in ("qweight", "scales", "qzeros"))
    in_a_word = 32 // coding.bits
    columns, rows = _matrix_shape(packed)
    shape = (rows * in_a_word, columns) if coding.is_awq else (rows, columns * in_a_word)
    group = coding.group or shape[1]
    num_groups = -(-shape[1] // group)
    _expect(packed, "I32", packed.shape)
    _expect(zeros, "I32", (num_groups, -(-shape[0] // in_a_word)))
    _expect(scales, "F16" if scales.format.is_raw else scales.format.name, (num_groups, shape[0]))
    kind = _kind(scales, coding.bits, coding.has_zeros, group, shape[1])
    order = linear.parts.get("g_idx")
    if order is not None and not coding.is_ordered:
        _check_order(order, shape[1], group)

    def begin() -> _Make:
        if order is not None:
            _check_order(order, shape[1], group)
        content = packed.data.reshape(columns, -1)
        values = scales.to_float32().T  # [out, groups]
        _check_scales(scales, values)
        _check_scales_of(kind, scales, values)
        points = _zero_points(zeros, coding, shape[0])

        def make(first: int, last: int) -> Bytes:
            codes = (_awq_codes if coding.is_awq else _gptq_codes)(content, first, last)
            return pack_codes(kind, codes, values[first:last], points[first:last], group)

        return make

    return _made(linear, shape, kind, begin)


def _zero_points(zeros: Tensor, coding: Coding, out_size: int) -> npt.NDArray[np.int16]:
    """[out, groups]; the last words may have room for more."""
    words = zeros.data.reshape(zeros.shape[0], -1)
    found = _unpacked(words, coding.bits, coding.is_awq)[:out_size].astype(np.int16)
    found += coding.least_zero
    if not coding.has_zeros and (found != 1 << (coding.bits - 1)).any():
        raise ModelFileError(
            f"tensor {zeros.name} has zero points, but config.json says that there are none (sym "
            "true)"
        )
    return found


def _expect(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    if tensor.format.name != dtype or tensor.shape != shape:
        raise ModelFileError(
            f"tensor {tensor.name} has type {tensor.format.name} and shape {list(tensor.shape)}, "
            f"expected {dtype} and {list(shape)}"
        )


def _kind(scales: Tensor, bits: int, has_zeros: bool, group: int, in_size: int) -> Format:
    """What holds such weights. Blocks with float32 scales have 128 weights; where groups do not
    fill them, scales must be numbers that float16 has too."""
    fills_128 = in_size % 128 == 0 and (group % 128 == 0 or group >= in_size)
    is_half = scales.format.name == "F16" or not fills_128
    if bits == 8:
        name = "Q8_0" if is_half else "I8_128"
    else:
        name = ("Q5_0" if has_zeros else "Q4_0") if is_half else "U4_128"
    kind = format_named(name, scales.name)
    _check_span(scales, group, in_size, kind)
    return kind


def _check_scales_of(kind: Format, scales: Tensor, values: Floats) -> None:
    if kind.name in ("U4_128", "I8_128"):
        return
    with np.errstate(over="ignore"):
        odd = values[values.astype(np.float16) != values]
    if odd.size:
        raise UnsupportedModelError(
            f"tensor {scales.name} has the scale {odd[0]:.9g}, which no float16 is: of groups that "
            "do not fill 128 columns quire runs such scales alone"
        )


def _check_order(index: Tensor, in_size: int, group: int) -> None:
    """Groups must be of neighbours, as blocks are."""
    _expect(index, "I32", (in_size,))
    found = index.data.view("<i4")
    if found.min() < 0 or found.max() > (in_size - 1) // group:
        raise ModelFileError(
            f"tensor {index.name} names groups {found.min()} to {found.max()}; there are "
            f"{-(-in_size // group)} of {group} columns"
        )
    if (found != np.arange(in_size) // group).any():
        raise UnsupportedModelError(
            f"tensor {index.name} puts columns into groups by their activations (desc_act or "
            "actorder: group), which quire does not run: take a checkpoint without, one with "
            "static groups, or a GGUF file"
        )


def of_rows(linear: Linear) -> Tensor:
    """A linear that compressed-tensors have packed, its rows being the first axis."""
    linear.check_has_only(_SHAPED_PARTS)
    packed, zeros = linear.part("weight_packed"), linear.parts.get("weight_zero_point")
    shape, bits = _shape_and_bits(linear)
    grid = _grid(linear, shape, None)
    group, num_groups = grid.span[1], -(-shape[1] // grid.span[1])
    if bits == 8 and zeros is not None:
        raise _unsupported_zeros(zeros)
    kind = _kind(grid.tensor, bits, zeros is not None, group, shape[1])
    if "weight_g_idx" in linear.parts:
        _check_order(linear.part("weight_g_idx"), shape[1], group)
    if zeros is not None:
        is_packed = zeros.format.name == "I32"
        rows = -(-shape[0] // 8) if is_packed else shape[0]
        _expect(zeros, "I32" if is_packed else "I8", (rows, num_groups))

    def begin() -> _Make:
        points = np.full((shape[0], num_groups), 1 << (bits - 1), np.int16)
        if zeros is not None:
            points = _signed_zero_points(zeros)[: shape[0]]

        def make(first: int, last: int) -> Bytes:
            codes = packed.row_blocks(first, last).reshape(last - first, -1)
            scales = grid.rows(first, last, group, shape[1])
            _check_scales_of(kind, grid.tensor, scales)
            return pack_codes(kind, codes, scales, points[first:last], group)

        return make

    return _made(linear, shape, kind, begin)


def _shape_and_bits(linear: Linear) -> tuple[tuple[int, int], int]:
    """What packed rows hold: the shape is a tensor beside them."""
    packed, shape = linear.part("weight_packed"), linear.part("weight_shape")
    rows, words = _matrix_shape(packed)
    _expect(packed, "I32", packed.shape)
    _expect(shape, "I32" if shape.format.name == "I32" else "I64", (2,))
    out_size, in_size = shape.data.view(f"<i{shape.format.block_bytes}").tolist()
    for bits in (4, 8):
        if out_size == rows and in_size * bits == words * 32:
            return (out_size, in_size), bits
    raise ModelFileError(
        f"tensor {packed.name} has shape {[rows, words]}, but {shape.name} says "
        f"{[out_size, in_size]}: with 4 bits a code that is {[out_size, in_size // 8]}, with 8 "
        f"{[out_size, in_size // 4]}"
    )


def _signed_zero_points(zeros: Tensor) -> npt.NDArray[np.int16]:
    """Of codes from -8 to 7, less -8, as the codes are kept: [out, groups]."""
    if zeros.format.name == "I32":
        words = np.ascontiguousarray(zeros.data.view("<u4").reshape(zeros.shape).T)
        return _unpacked(words.view(np.uint8), 4, is_awq=False).astype(np.int16)
    found = zeros.data.view(np.int8).reshape(zeros.shape).astype(np.int16) + 8
    if found.min() < 0 or found.max() > 15:
        raise ModelFileError(f"tensor {zeros.name} has zero points that are not from -8 to 7")
    return found


def of_bytes(linear: Linear) -> Tensor:
    """A linear of signed bytes, with scales for the whole, for rows or for groups."""
    if "weight_zero_point" in linear.parts:
        raise _unsupported_zeros(linear.part("weight_zero_point"))
    linear.check_has_only(("weight", *_SCALES))
    weight = linear.part("weight")
    shape = _matrix_shape(weight)
    grid = _grid(linear, shape, None)
    group = grid.span[1]
    kind = _kind(grid.tensor, 8, False, group, shape[1])

    def make(first: int, last: int) -> Bytes:
        codes = weight.row_blocks(first, last).reshape(last - first, -1) ^ np.uint8(0x80)
        scales = grid.rows(first, last, group, shape[1])
        _check_scales_of(kind, grid.tensor, scales)
        return pack_codes(kind, codes, scales, np.empty((0, 0), np.int16), group)

    return _made(linear, shape, kind, lambda: make)


def _unsupported_zeros(zeros: Tensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tensor {zeros.name}: zero points of codes of 8 bits are not supported; take a checkpoint "
        "that is quantised symmetrically, or a GGUF file of the model"
    )


# ---- words [columns, bytes] of AWQ and GPTQ, as rows of bytes: of four bits, two neighbours each


def _gptq_codes(content: Bytes, first: int, last: int) -> Bytes:
    words = content.view("<u4")[:, first:last]
    return np.ascontiguousarray(words.T).view(np.uint8)


def _awq_codes(content: Bytes, first: int, last: int) -> Bytes:
    start = first // 8
    words = content[:, 4 * start : 4 * -(-last // 8)]
    codes = _unpacked(words, 4, is_awq=True)[first - 8 * start : last - 8 * start]
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def _unpacked(words: Bytes, bits: int, is_awq: bool) -> Bytes:
    """Codes one by one, transposed: [n, 4 * words] as [codes, n]."""
    if bits == 8:
        return np.ascontiguousarray(words.T)
    order = _AWQ_ORDER if is_awq else range(8)
    count, width = words.shape
    codes = np.empty((width // 4, 8, count), np.uint8)
    for byte in range(4):
        own = words[:, byte::4].T
        codes[:, order[2 * byte]] = own & 15
        codes[:, order[2 * byte + 1]] = own >> 4
    return codes.reshape(-1, count)
