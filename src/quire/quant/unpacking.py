"""What decoders of block formats share: from packed bytes to small integers and scales.

Most formats keep small integers in *planes*: a run of bytes holds the low bits of as many weights,
its next bits the weights that follow, and so on. `planes` undoes that for all of them:

    bits=4, run=16:   byte 0 = w16 w0, byte 1 = w17 w1, ... byte 15 = w31 w15
    bits=1, run=1:    byte 0 = w7 w6 w5 w4 w3 w2 w1 w0, byte 1 = w15 ... w8
"""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def planes(packed: Blocks, bits: int, run: int) -> Blocks:
    """Unpack [blocks, bytes] into [blocks, bytes * 8 / bits] integers of so many bits."""
    blocks, width = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    runs = packed.reshape(blocks, width // run, 1, run)
    fields = (runs >> shifts[:, None]) & np.uint8((1 << bits) - 1)
    return fields.reshape(blocks, width * len(shifts))


def half(blocks: Blocks, at: int) -> Floats:
    """The float16 at a byte offset of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def single(blocks: Blocks, at: int) -> Floats:
    """The float32 at a byte offset of each block: [blocks, 1]."""
    return blocks[:, at : at + 4].view("<f4").astype(np.float32)


def grouped(scale: Floats, codes: npt.NDArray[np.generic]) -> Floats:
    """Scale [blocks, groups] times codes [blocks, weights], each group having its own scale."""
    blocks, groups = scale.shape
    grouped = codes.astype(np.float32).reshape(blocks, groups, codes.shape[1] // groups)
    return (scale[:, :, None] * grouped).reshape(codes.shape)


def repeated(minimum: Floats, weights: int) -> Floats:
    return np.repeat(minimum, weights // minimum.shape[1], axis=1)
