"""BitNet checkpoints of Hugging Face: packed or master weights, read as I2_S; and I2_S in the
packing of ARM builds, read in that of x86 builds, which executors take.

    quantization_config   quantization_mode   X.weight                 weights are
    autobitlinear         offline             uint8 [out / 4, in]      code · weight_scale
    bitlinear (default)   offline (default)   uint8 [out / 4, in]      code / weight_scale
    autobitlinear         online              floats [out, in]         made ternary as in training

The matrices of the layers alone are ternary; embedding and head are not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.core.config import check_i2s_packing
from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.loader.metadata import Fields, Metadata
from quire.loader.reading import Bytes, Region
from quire.loader.tensor import Tensor, packed_size
from quire.model import mxfp4
from quire.model.spec import LAYER_LINEARS
from quire.quant.formats import RAW, format_named
from quire.quant.ternary import (
    ARM_BLOCK,
    X86_BLOCK,
    Codes,
    check_codes,
    i2s_tail,
    mean_size,
    pack_i2s,
    rounded,
    unpack_i2s,
    unpack_rows_of_four,
)

KEY = "quantization_config"
METHOD = "bitnet"  # its quant_method
_KNOWN = (
    "quant_method",
    "linear_class",
    "quantization_mode",
    "modules_to_not_convert",
    "use_rms_norm",
    "rms_norm_eps",
)
_SCALE_SUFFIX = ".weight_scale"  # of the tensor beside a packed matrix
_ROWS_AT_ONCE = 512
I2_S = format_named("I2_S", "")


@dataclass(frozen=True, slots=True)
class _AsI2S:
    """A ternary matrix of another form, as the bytes that an I2_S file has of it."""

    shape: tuple[int, int]
    codes: Callable[[int, int], Codes]  # of rows from .. to
    scale: Callable[[], np.float32]

    @property
    def size(self) -> int:
        return packed_size(I2_S, self.shape[0] * self.shape[1])

    def read(self, start: int, stop: int) -> Bytes:
        num_rows, columns = self.shape
        row_bytes = columns // 4
        end = num_rows * row_bytes
        pieces = []
        if start < end:
            first, last = start // row_bytes, min(num_rows, -(-stop // row_bytes))
            rows = pack_i2s(self.codes(first, last))
            pieces.append(rows[start - first * row_bytes : min(stop, end) - first * row_bytes])
        if stop > end:
            pieces.append(i2s_tail(self.scale())[max(0, start - end) : stop - end])
        return np.concatenate(pieces)


def weights_of(config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights as executors take them; what config.json says of quantisation decides
    what its tensors mean. quantised.py has read other methods than these two."""
    fields = Fields(Metadata("config.json", config), "config.json").section(KEY)
    method = fields.get("quant_method")
    if method == mxfp4.METHOD:
        return _floats(mxfp4.experts_joined(fields, tensors))
    if method != METHOD:
        return _floats(tensors)
    convert = _converter(fields)
    weights = {name: t for name, t in tensors.items() if not name.endswith(_SCALE_SUFFIX)}
    for name, tensor in weights.items():
        if name.startswith("blk.") and _linear_of(name) in LAYER_LINEARS:
            weights[name] = convert(tensor, tensors.get(f"{name}_scale"))
    return _floats(weights)


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        if tensor.format.is_raw:
            raise UnsupportedModelError(
                f"tensor {name} has type {tensor.format.name}: such numbers are weights only where "
                "config.json has a quantization_config that says how; of safetensors quire runs "
                "F32, F16 and BF16 as they are"
            )
    return dict(tensors)


def _linear_of(name: str) -> str | None:
    return name.removesuffix(".weight").rpartition(".")[2] if name.endswith(".weight") else None


Convert = Callable[[Tensor, Tensor | None], Tensor]


def _converter(fields: Fields) -> Convert:
    fields.refuse_unknown(_KNOWN)
    fields.refuse({"use_rms_norm": (False,)})
    left_out = fields.get("modules_to_not_convert")
    if left_out not in (None, [], ["lm_head"]):
        raise fields.unsupported("modules_to_not_convert", ["lm_head"])
    linear = fields.text("linear_class", "bitlinear")
    mode = fields.text("quantization_mode", "offline")
    if linear not in ("bitlinear", "autobitlinear"):
        raise fields.unsupported("linear_class", ["bitlinear", "autobitlinear"])
    if mode == "offline":
        return _from_packed_dividing if linear == "bitlinear" else _from_packed
    if mode != "online" or linear != "autobitlinear":
        raise fields.unsupported("quantization_mode", ["offline", "online with autobitlinear"])
    return _from_master


def _from_packed(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return _unpacked(tensor, _scale(tensor, scale))


def _from_packed_dividing(tensor: Tensor, scale: Tensor | None) -> Tensor:
    return _unpacked(tensor, np.float32(1.0) / _scale(tensor, scale))


def _scale(tensor: Tensor, scale: Tensor | None) -> np.float32:
    if scale is None:
        raise ModelFileError(f"tensor {tensor.name}_scale is missing: packed weights need it")
    if scale.shape not in ((), (1,)):
        raise ModelFileError(f"tensor {scale.name} has shape {list(scale.shape)}, expected [1]")
    value = np.float32(scale.to_float32().ravel()[0])
    if not 0 < value < np.inf:
        raise ModelFileError(f"tensor {scale.name} must be a positive number, got {value}")
    return value


def _unpacked(tensor: Tensor, scale: np.float32) -> Tensor:
    if tensor.format is not RAW:
        raise ModelFileError(
            f"tensor {tensor.name} has type {tensor.format.name}, but config.json says that "
            "weights are packed (quantization_mode offline): U8 is expected"
        )
    quarter, columns = _matrix_shape(tensor)

    def codes(first: int, last: int) -> Codes:
        pieces = []
        while first < last:
            part, row = divmod(first, quarter)
            stop = min(row + last - first, quarter)
            packed = tensor.row_blocks(row, stop).reshape(-1, columns)
            check_codes(packed, tensor.name)
            pieces.append(unpack_rows_of_four(packed, part))
            first += stop - row
        return np.concatenate(pieces)

    return _i2s(tensor, (4 * quarter, columns), codes, lambda: scale)


def _from_master(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if not tensor.format.is_float or tensor.format.is_raw or scale is not None:
        raise ModelFileError(
            f"tensor {tensor.name} has type {tensor.format.name}"
            f"{' and a scale' if scale is not None else ''}, but config.json says that weights are "
            "made ternary when they are loaded (quantization_mode online): floats are expected"
        )
    shape = _matrix_shape(tensor)
    sizes: list[np.float32] = []  # once known

    def mean() -> np.float32:
        if not sizes:
            pieces = range(0, shape[0], _ROWS_AT_ONCE)
            rows = (tensor.rows_float32(i, min(i + _ROWS_AT_ONCE, shape[0])) for i in pieces)
            sizes.append(mean_size(rows, shape[0] * shape[1]))
        return sizes[0]

    def codes(first: int, last: int) -> Codes:
        return rounded(tensor.rows_float32(first, last), mean())

    return _i2s(tensor, shape, codes, mean)


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ModelFileError(f"tensor {tensor.name} has shape {list(tensor.shape)}, no matrix's")
    return tensor.shape[0], tensor.shape[1]


def _i2s(
    tensor: Tensor,
    shape: tuple[int, int],
    codes: Callable[[int, int], Codes],
    scale: Callable[[], np.float32],
) -> Tensor:
    if shape[1] % X86_BLOCK:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has rows of {shape[1]} ternary weights; quire runs multiples of "
            f"{X86_BLOCK}"
        )
    source = _AsI2S(shape, codes, scale)
    return Tensor(tensor.name, shape, I2_S, Region(source, 0, source.size))


# ---- the packing of ARM builds


def with_packing(
    tensors: Mapping[str, Tensor], packing: str | None, path: str
) -> dict[str, Tensor]:
    """A file's tensors, its I2_S ones taken to be in the packing of that build (None: x86)."""
    check_i2s_packing(packing)
    if packing is None:
        return dict(tensors)
    if not any(tensor.format is I2_S for tensor in tensors.values()):
        raise ConfigError(
            f"i2s_packing is {packing!r}, but {path} has no tensor of type I2_S: leave it out"
        )
    if packing == "x86":
        return dict(tensors)
    return {n: _from_arm(t) if t.format is I2_S else t for n, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class _FromArm:
    """I2_S bytes in the packing of ARM builds, read in that of x86 builds. Two blocks of the one
    are 32 bytes, as is a block of the other: each 32 bytes hold the same codes."""

    tensor: Tensor

    @property
    def size(self) -> int:
        return self.tensor.nbytes

    def read(self, start: int, stop: int) -> Bytes:
        block_bytes, end = I2_S.block_bytes, self.tensor.num_block_bytes
        first = min(start, end) // block_bytes * block_bytes
        last = min(-(-stop // block_bytes) * block_bytes, end)
        codes = unpack_i2s(self.tensor.read(first, last), X86_BLOCK, ARM_BLOCK)
        packed = pack_i2s(codes)[start - first : stop - first]
        return packed if stop <= end else np.append(packed, self.tensor.read(max(start, end), stop))


def _from_arm(tensor: Tensor) -> Tensor:
    source = _FromArm(tensor)
    return Tensor(tensor.name, tensor.shape, I2_S, Region(source, 0, source.size))
