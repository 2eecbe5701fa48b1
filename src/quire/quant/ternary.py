"""Ternary matrices: codes 0, 1, 2 for -1, 0, +1, in the forms that BitNet's files keep them in.

I2_S      bitnet.cpp's. Four codes a byte in blocks of 128, then one float32 scale for the whole
          matrix and 28 bytes without meaning. ARM builds since November 2025 have blocks of 64,
          which nothing in a file tells: the packing of x86 builds is read unless told otherwise.
packed    Hugging Face's. Byte [r, k] holds rows r, r + out/4, r + 2·out/4 and r + 3·out/4 of
          column k, the first in the lowest bits.
master    floats, made ternary as they are in training.
TQ2_0     llama.cpp's. Blocks of 256 codes, four a byte, and a float16 scale each.
TQ1_0     llama.cpp's. Blocks of 256 codes, five a byte, and a float16 scale each.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError
from quire.quant.formats import Blocks, Floats, decode_tq1_0, decode_tq2_0

Codes = npt.NDArray[np.uint8]  # [rows, columns], each 0, 1 or 2

I2S_TAIL_BYTES = 32  # behind the codes: the scale, and 28 bytes that mean nothing
X86_BLOCK, ARM_BLOCK = 128, 64  # codes
_SMALLEST_MEAN = np.float32(1e-5)


def check_codes(packed: Blocks, tensor: str) -> None:
    """Refuse four codes a byte where one of them is 3, which no writer makes."""
    if np.any(packed & (packed >> 1) & 0x55):
        raise ModelFileError(
            f"tensor {tensor} holds the ternary code 3, which stands for no weight: it is broken, "
            "or of another type than the file says"
        )


def pack_i2s(codes: Codes, block: int = X86_BLOCK) -> Blocks:
    """I2_S bytes without their tail; rows must hold whole blocks."""
    quarters = codes.reshape(-1, 4, block // 4)
    first, second, third, fourth = (quarters[:, i] for i in range(4))
    packed = first << 6 | second << 4 | third << 2 | fourth
    return packed.astype(np.uint8, copy=False).ravel()


def unpack_i2s(packed: Blocks, columns: int, block: int = X86_BLOCK) -> Codes:
    """Codes of I2_S bytes without their tail."""
    quarters = packed.reshape(-1, 1, block // 4)
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    codes: Codes = (quarters >> shifts) & np.uint8(3)
    return codes.reshape(-1, columns)


def i2s_tail(scale: np.float32) -> Blocks:
    tail = np.zeros(I2S_TAIL_BYTES, np.uint8)
    tail[:4] = np.array([scale], "<f4").view(np.uint8)
    return tail


def unpack_rows_of_four(packed: Blocks, part: int) -> Codes:
    """One of the four rows that each row of Hugging Face's packed bytes holds."""
    codes: Codes = (packed >> np.uint8(2 * part)) & np.uint8(3)
    return codes


def mean_size(pieces: Iterable[Floats], count: int) -> np.float32:
    """The scale of a master matrix of so many weights: the mean of their sizes."""
    total = sum(float(np.abs(piece).sum(dtype=np.float64)) for piece in pieces)
    return max(np.float32(total / count), _SMALLEST_MEAN)


def rounded(weights: Floats, mean: np.float32) -> Codes:
    """Codes of master weights, as training rounds them: to -1, 0 or 1 times the mean."""
    nearest = np.clip(np.rint(weights * (np.float32(1.0) / mean)), -1, 1)
    codes: Codes = (nearest + 1).astype(np.uint8)
    return codes


# ---- llama.cpp's blocks: 256 codes and a float16


TQ_BLOCK = 256  # codes
_SCALE_BYTES = 2
_ONE = np.frombuffer(np.array([1.0], "<f2").tobytes(), np.uint8)


def unpack_tq(packed: Blocks, name: str) -> tuple[Codes, Blocks]:
    """Codes [blocks, 256] and the bytes of the scales [blocks, 2] of TQ1_0 or TQ2_0 blocks."""
    scales = packed[:, -_SCALE_BYTES:].copy()
    plain = packed.copy()
    plain[:, -_SCALE_BYTES:] = _ONE
    decode = decode_tq1_0 if name == "TQ1_0" else decode_tq2_0
    return (decode(plain) + 1).astype(np.uint8), scales


def pack_tq(codes: Codes, scales: Blocks, name: str) -> Blocks:
    """TQ1_0 or TQ2_0 blocks of codes [blocks, 256] and the bytes of the scales [blocks, 2], as
    llama.cpp writes them."""
    packed = _pack_tq1(codes) if name == "TQ1_0" else _pack_tq2(codes)
    return np.hstack([packed, scales])


def _pack_tq2(codes: Codes) -> Blocks:
    quarters = codes.reshape(-1, 2, 4, 32)
    first, second, third, fourth = (quarters[:, :, i] for i in range(4))
    packed = first | second << 2 | third << 4 | fourth << 6
    return packed.astype(np.uint8, copy=False).reshape(-1, 64)


def _pack_tq1(codes: Codes) -> Blocks:
    first = _pack_trits(codes[:, :160].reshape(-1, 5, 32))
    second = _pack_trits(codes[:, 160:240].reshape(-1, 5, 16))
    rest = codes[:, 240:].reshape(-1, 4, 4)
    none = np.zeros((len(codes), 1, 4), np.uint8)  # four digits a byte, then a zero
    return np.hstack([first, second, _pack_trits(np.concatenate([rest, none], axis=1))])


def _pack_trits(digits: Codes) -> Blocks:
    """Bytes [blocks, n] of digits [blocks, 5, n], the first digit the highest. A byte b stands for
    the fraction b / 256, rounded up, so that truncating gives every digit back."""
    value = np.zeros((len(digits), digits.shape[2]), np.uint32)
    for place in range(5):
        value = value * 3 + digits[:, place]
    return ((value * 256 + 242) // 243).astype(np.uint8)


def half_scales(codes: Codes, scale: np.float32) -> Blocks:
    """One scale for all blocks [blocks, 256], as bytes [blocks, 2]; llama.cpp's quantiser gives
    blocks of zeros a scale of zero."""
    halves = np.where(np.any(codes != 1, axis=1), np.float16(scale), np.float16(0))
    return halves.astype("<f2")[:, None].view(np.uint8)
