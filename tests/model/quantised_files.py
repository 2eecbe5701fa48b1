"""Tiny checkpoints whose linears are quantised, written as the tools that publish them write them,
beside the same weights as floats. Formulas are those of the formats' publishers, in float64."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from tests.drawn_families import DRAWN, drawn_config
from tests.loader.safetensors_bytes import with_header
from tests.oracles.drawn_weights import drawn

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]


class Stored(NamedTuple):
    """A tensor as safetensors keep it: bytes of a type."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "int32": "I32", "int64": "I64"}


def stored(values: Array, dtype: str | None = None) -> Stored:
    content = np.ascontiguousarray(values)
    return Stored(dtype or _DTYPES[str(values.dtype)], values.shape, content.tobytes())


def bfloat(values: Array) -> tuple[Stored, Doubles]:
    """As BF16, and what that is worth."""
    kind = gguf.GGMLQuantizationType.BF16
    raw = gguf.quants.quantize(np.atleast_1d(values).astype(np.float32), kind)
    worth = gguf.quants.dequantize(raw, kind).reshape(values.shape)
    return Stored("BF16", values.shape, raw.tobytes()), worth.astype(np.float64)


def as_type(values: Array, dtype: str) -> tuple[Stored, Doubles]:
    """As F32, F16 or BF16, and what that is worth."""
    if dtype == "BF16":
        return bfloat(values)
    rounded = values.astype({"F32": np.float32, "F16": np.float16}[dtype])
    return stored(rounded), rounded.astype(np.float64)


# ---- models: those of tests/fixtures/drawn in sizes that blocks fill


class Case(NamedTuple):
    sizes: Mapping[int, int]  # of tensors, from the drawn model's
    config: Mapping[str, int]
    named: Mapping[str, tuple[int, ...]] = {}  # shapes that sizes do not tell, by the names' ends


_HEADS = {"head_dim": 64, "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2}
_HEAD_SIZES = {48: 256, 64: 256, 32: 128, 16: 64}
MODELS = {
    "ministral3": Case(_HEAD_SIZES | {56: 384}, _HEADS | {"intermediate_size": 384}),
    "qwen3moe": Case(_HEAD_SIZES | {24: 128}, _HEADS | {"moe_intermediate_size": 128}),
    "deepseek2": Case(
        {48: 256, 56: 384, 20: 128, 28: 256, 24: 128, 80: 128, 88: 192, 40: 128, 64: 64},
        {
            "hidden_size": 256,
            "intermediate_size": 384,
            "kv_lora_rank": 128,
            "q_lora_rank": 256,
            "moe_intermediate_size": 128,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "qk_head_dim": 32,
            "head_dim": 16,
            "v_head_dim": 32,
            "num_hidden_layers": 2,
        },
        {"kv_a_proj_with_mqa.weight": (144, 256)},  # blocks of 128 rows do not fill it
    ),
}


def float_weights(model: str) -> dict[str, Array]:
    case = MODELS[model]
    found = {}
    for name, drawn_shape in json.loads((DRAWN / model / "tensors.json").read_text()).items():
        if ".layers." in name and int(name.split(".")[2]) >= 2:
            continue
        shape = tuple(case.sizes.get(size, size) for size in drawn_shape)
        for end, own in case.named.items():
            shape = own if name.endswith(end) else shape
        found[name] = drawn(name, shape)
    return found


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


Quantise = Callable[[str, Array], tuple[dict[str, Stored], Doubles]]


def quantised(model: str, quantise: Quantise) -> tuple[dict[str, Stored], dict[str, Array]]:
    """The tensors of a checkpoint, and the floats that they stand for."""
    tensors: dict[str, Stored] = {}
    floats: dict[str, Array] = {}
    for name, weight in float_weights(model).items():
        if is_linear(name):
            made, worth = quantise(name.removesuffix(".weight"), weight)
            tensors |= made
            floats[name] = worth.astype(np.float32)
        else:
            tensors[name], floats[name] = stored(weight), weight
    return tensors, floats


def write_checkpoint(
    folder: Path, model: str, tensors: Mapping[str, Stored | Array], method: object = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = drawn_config(model) | dict(MODELS[model].config)
    if method is not None:
        config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    contents, end = [], 0
    for name, tensor in tensors.items():
        kept = tensor if isinstance(tensor, Stored) else stored(tensor)
        ends = [end, end + len(kept.content)]
        header[name] = {"dtype": kept.dtype, "shape": list(kept.shape), "data_offsets": ends}
        contents.append(kept.content)
        end = ends[1]
    file = with_header(json.dumps(header).encode(), b"".join(contents))
    (folder / "model.safetensors").write_bytes(file)
    return folder


# ---- FP8


def e4m3_values() -> Doubles:
    """The 127 numbers of at least 0: four bits of exponent from 2**-6 on, three of fraction."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, (codes & 7) / 8
    return np.where(exponent, 2.0 ** (exponent - 7.0) * (1 + fraction), 2.0**-6 * fraction)


E4M3 = e4m3_values()


def to_e4m3(values: Doubles) -> tuple[Array, Doubles]:
    """The nearest codes, and what these are worth."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    worth = np.where(values < 0, -E4M3[codes], E4M3[codes])
    return codes | (values < 0).astype(np.uint8) << 7, worth


def spread(scales: Doubles, block: tuple[int, int], shape: Iterable[int]) -> Doubles:
    out_size, in_size = shape
    whole = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)
    return whole[:out_size, :in_size]


def fp8(
    block: tuple[int, int] | None,
    dtype: str = "F32",
    name: str = "weight_scale_inv",
    *,
    by_row: bool = False,
) -> Quantise:
    """In blocks; None: with one scale, or one a row. The scale of activations is there too."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        rows, columns = block or ((1 if by_row else weight.shape[0]), weight.shape[1])
        grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = np.zeros((grid[0] * rows, grid[1] * columns))
        padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
        largest = padded.reshape(grid[0], rows, grid[1], columns).max(axis=(1, 3))
        scale, worth = as_type(largest / 448, dtype)
        factors = spread(worth, (rows, columns), weight.shape)
        codes, values = to_e4m3(np.clip(weight / factors, -448, 448))
        if block is None and not by_row:
            scale = scale._replace(shape=())
        return {
            f"{stem}.weight": stored(codes, "F8_E4M3"),
            f"{stem}.{name}": scale,
            f"{stem}.activation_scale": stored(np.array(0.5, np.float32)),
        }, values * factors

    return quantise


# ---- floats of four bits

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_e2m1(values: Doubles) -> tuple[Array, Doubles]:
    """The nearest codes, the first of two neighbours in a byte's lower bits, and their worth."""
    codes = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, np.abs(values)).astype(np.uint8)
    worth = np.where(values < 0, -E2M1[codes], E2M1[codes])
    codes |= (values < 0).astype(np.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4, worth


def largest_of(weight: Array, group: int) -> Doubles:
    groups = np.abs(weight).astype(np.float64).reshape(len(weight), -1, group)
    return np.asarray(groups.max(axis=2))


def nvfp4(*, is_divided: bool = False) -> Quantise:
    """modelopt's, or with `is_divided` compressed-tensors', whose one scale divides."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        largest = largest_of(weight, 16)
        whole = np.float32(largest.max() / (6 * 448))
        if is_divided:
            divisor = np.float32(1 / whole)
            whole = np.float32(1 / divisor)
        codes, scales = to_e4m3(largest / 6 / whole)
        factors = np.repeat(scales, 16, axis=1) * np.float64(whole)
        packed, values = to_e2m1(weight / np.where(factors == 0, 1, factors))
        parts = {"weight_scale": stored(codes, "F8_E4M3")}
        if is_divided:
            parts["weight_packed"] = stored(packed, "U8")
            parts["weight_global_scale"] = stored(np.array([divisor]))
            parts["input_global_scale"] = stored(np.array([0.5], np.float32))
        else:
            parts["weight"] = stored(packed, "U8")
            parts["weight_scale_2"] = stored(np.array(whole))
            parts["input_scale"] = stored(np.array(0.5, np.float32))
        return {f"{stem}.{name}": part for name, part in parts.items()}, values * factors

    return quantise


def mxfp4() -> Quantise:
    """compressed-tensors'."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        powers = np.floor(np.log2(largest_of(weight, 32))) - 2
        factors = np.repeat(2.0**powers, 32, axis=1)
        packed, values = to_e2m1(np.clip(weight / factors, -6, 6))
        return {
            f"{stem}.weight_packed": stored(packed, "U8"),
            f"{stem}.weight_scale": stored((powers + 127).astype(np.uint8), "U8"),
        }, values * factors

    return quantise


# ---- codes of four or eight bits


class Codes(NamedTuple):
    """A matrix [out, in] as small integers, with scales and zero points [out, groups]."""

    codes: npt.NDArray[np.int64]
    scale: Stored
    zeros: npt.NDArray[np.int64]
    worth: Doubles


def to_codes(weight: Array, bits: int, group: int, dtype: str, *, has_zeros: bool) -> Codes:
    """Unsigned codes; without zero points zero is the middle of their range."""
    out_size, in_size = weight.shape
    groups = weight.astype(np.float64).reshape(out_size, -1, group or in_size)
    top = (1 << bits) - 1
    if has_zeros:
        low, high = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
        scale, worth = as_type((high - low) / top, dtype)
        zeros = np.rint(-low / worth).astype(np.int64).clip(0, top)
    else:
        scale, worth = as_type(np.abs(groups).max(axis=2) / (top // 2), dtype)
        zeros = np.full(worth.shape, 1 << (bits - 1))
    codes = np.rint(groups / worth[..., None]).astype(np.int64) + zeros[..., None]
    codes = codes.clip(0, top)
    values = (codes - zeros[..., None]) * worth[..., None]
    return Codes(codes.reshape(weight.shape), scale, zeros, values.reshape(weight.shape))


def transposed(tensor: Stored) -> Stored:
    size = len(tensor.content) // int(np.prod(tensor.shape))
    values = np.frombuffer(tensor.content, f"<u{size}").reshape(tensor.shape).T
    return stored(values, tensor.dtype)


def words(values: npt.NDArray[np.int64], bits: int, order: Iterable[int] | None = None) -> Array:
    """The last axis packed into integers of 32 bits, the first value lowest; `order`: which of
    eight is which."""
    count = 32 // bits
    parts = values.reshape(*values.shape[:-1], -1, count)
    places = np.arange(count) if order is None else np.array(list(order))
    shifted = parts[..., places] << (bits * np.arange(count))
    return np.asarray(shifted.sum(axis=-1), np.uint32).view(np.int32)


def gptq(
    bits: int = 4,
    group: int = 128,
    *,
    has_zeros: bool = False,
    dtype: str = "F16",
    version: int = 1,
) -> Quantise:
    """As AutoGPTQ packs: words of columns, zero points less one; `group` 0: whole rows."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        made = to_codes(weight, bits, group, dtype, has_zeros=has_zeros)
        zeros = made.zeros.T
        if version == 1:
            zeros = (zeros - 1) & ((1 << bits) - 1)
        index = np.arange(weight.shape[1], dtype=np.int32) // (group or weight.shape[1])
        worth = made.worth
        if version == 1 and has_zeros:  # a zero point of 0 is read as 16
            span = group or weight.shape[1]
            scales = np.frombuffer(made.scale.content, np.float16).reshape(made.zeros.shape)
            lost = np.where(made.zeros == 0, scales.astype(np.float64) * (1 << bits), 0)
            worth = worth - np.repeat(lost, span, axis=1)
        return {
            f"{stem}.qweight": stored(np.ascontiguousarray(words(made.codes, bits).T)),
            f"{stem}.qzeros": stored(words(zeros, bits)),
            f"{stem}.scales": transposed(made.scale),
            f"{stem}.g_idx": stored(index),
        }, worth

    return quantise


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(group: int = 128, dtype: str = "F16") -> Quantise:
    """As AutoAWQ's GEMM packs: words of rows, in its order."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        made = to_codes(weight, 4, group, dtype, has_zeros=True)
        return {
            f"{stem}.qweight": stored(words(made.codes.T, 4, AWQ_ORDER)),
            f"{stem}.qzeros": stored(words(made.zeros.T, 4, AWQ_ORDER)),
            f"{stem}.scales": transposed(made.scale),
        }, made.worth

    return quantise


def compressed_packed(
    bits: int = 4,
    group: int = 128,
    dtype: str = "BF16",
    *,
    has_zeros: bool = False,
    are_zeros_packed: bool = True,
) -> Quantise:
    """As compressed-tensors' pack-quantized: words of columns; zero points in words of rows."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        made = to_codes(weight, bits, group, dtype, has_zeros=has_zeros)
        tensors = {
            f"{stem}.weight_packed": stored(words(made.codes, bits)),
            f"{stem}.weight_scale": made.scale,
            f"{stem}.weight_shape": stored(np.array(weight.shape)),
        }
        if has_zeros:
            zeros = np.ascontiguousarray(words(made.zeros.T, bits).T)
            if not are_zeros_packed:
                zeros = (made.zeros - 8).astype(np.int8)
            tensors[f"{stem}.weight_zero_point"] = stored(zeros)
        return tensors, made.worth

    return quantise


def compressed_bytes(group: int = 0, dtype: str = "BF16") -> Quantise:
    """As compressed-tensors' int-quantized: signed bytes; `group` 0: a scale for each row."""

    def quantise(stem: str, weight: Array) -> tuple[dict[str, Stored], Doubles]:
        made = to_codes(weight, 8, group, dtype, has_zeros=False)
        return {
            f"{stem}.weight": stored((made.codes - 128).astype(np.int8)),
            f"{stem}.weight_scale": made.scale,
            f"{stem}.input_scale": stored(np.array([0.5], np.float32)),
            f"{stem}.input_zero_point": stored(np.array([0], np.int8)),
        }, made.worth

    return quantise
