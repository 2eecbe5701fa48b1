"""Ternary matrices: codes 0, 1, 2 for -1, 0, +1, in the forms that BitNet's files keep them in.

    I2_S      bitnet.cpp's. Four codes a byte in blocks of 128, then one float32 scale for the whole
              matrix and 28 bytes without meaning. ARM builds since November 2025 have blocks of 64,
              which nothing in a file tells: the packing of x86 builds is read.
    packed    Hugging Face's. Byte [r, k] holds rows r, r + out/4, r + 2·out/4 and r + 3·out/4 of
              column k, the first in the lowest bits.
    master    floats, made ternary as they are in training.

llama.cpp's TQ1_0 and TQ2_0 are block formats like its others: quant/formats.py has them.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError
from quire.quant.formats import Blocks, Floats

Codes = npt.NDArray[np.uint8]  # [rows, columns], each 0, 1 or 2

I2S_TAIL_BYTES = 32  # behind the codes: the scale, and 28 bytes that mean nothing
X86_BLOCK = 128  # codes
_SMALLEST_MEAN = np.float32(1e-5)


def check_codes(packed: Blocks, tensor: str) -> None:
    """Refuse four codes a byte where one of them is 3, which no writer makes."""
    if np.any(packed & (packed >> 1) & 0x55):
        raise ModelFileError(
            f"tensor {tensor} holds the ternary code 3, which stands for no weight: it is broken, "
            "or of another type than the file says"
        )


def pack_i2s(codes: Codes) -> Blocks:
    """I2_S bytes without their tail; rows must hold whole blocks."""
    quarters = codes.reshape(-1, 4, X86_BLOCK // 4)
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    packed: Blocks = (quarters << shifts).sum(axis=1, dtype=np.uint8)
    return packed.ravel()


def i2s_tail(scale: np.float32) -> Blocks:
    tail = np.zeros(I2S_TAIL_BYTES, np.uint8)
    tail[:4] = np.array([scale], "<f4").view(np.uint8)
    return tail


def unpack_rows_of_four(packed: Blocks) -> Codes:
    """Codes [out, in] of Hugging Face's packed bytes [out / 4, in]."""
    return np.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])


def mean_size(pieces: Iterable[Floats], count: int) -> np.float32:
    """The scale of a master matrix of so many weights: the mean of their sizes."""
    total = sum(float(np.abs(piece).sum(dtype=np.float64)) for piece in pieces)
    return max(np.float32(total / count), _SMALLEST_MEAN)


def rounded(weights: Floats, mean: np.float32) -> Codes:
    """Codes of master weights, as training rounds them: to -1, 0 or 1 times the mean."""
    nearest = np.clip(np.rint(weights * (np.float32(1.0) / mean)), -1, 1)
    codes: Codes = (nearest + 1).astype(np.uint8)
    return codes
