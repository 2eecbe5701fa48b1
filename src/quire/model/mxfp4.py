"""gpt-oss's experts as Hugging Face keeps them in MXFP4, read as the blocks that GGUF files have.

    X_blocks   uint8 [experts, rows, columns / 32, 16]   byte i: weights 2i (low) and 2i + 1
    X_scales   uint8 [experts, rows, columns / 32]       one for each 32 weights

Here they are blk.N.X.blocks and blk.N.X.scales, and make blk.N.X.weight.
"""

from collections.abc import Mapping

import numpy as np

from quire.core.errors import ModelFileError
from quire.loader.metadata import Fields
from quire.loader.reading import Bytes, Region
from quire.loader.tensor import Tensor
from quire.model.tensors import Slabs
from quire.quant.formats import RAW, format_named
from quire.quant.packing import by_halves

METHOD = "mxfp4"  # quant_method of config.json's quantization_config
_KNOWN = ("quant_method", "modules_to_not_convert")
_BLOCKS, _SCALES = ".blocks", ".scales"
MXFP4 = format_named("MXFP4", "")
_BLOCK = np.dtype([("scale", "u1"), ("codes", "V16")])


def experts_joined(fields: Fields, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with each pair of blocks and scales as one. Which modules were converted, the
    names of tensors say."""
    fields.refuse_unknown(_KNOWN)
    found = {name: t for name, t in tensors.items() if not name.endswith((_BLOCKS, _SCALES))}
    for name, blocks in tensors.items():
        if name.endswith(_BLOCKS):
            stem = name.removesuffix(_BLOCKS)
            found[f"{stem}.weight"] = _joined(stem, blocks, tensors.get(stem + _SCALES))
        elif name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in tensors:
            raise ModelFileError(f"tensor {name} has no {_BLOCKS[1:]} beside it")
    return found


def _joined(stem: str, blocks: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        raise ModelFileError(f"tensor {blocks.name} has no {_SCALES[1:]} beside it")
    shape = blocks.shape
    if blocks.format is not RAW or scales.format is not RAW:
        raise ModelFileError(f"{stem}: blocks and scales of MXFP4 are bytes, of type {RAW.name}")
    if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3]:
        raise ModelFileError(
            f"{stem}: blocks of shape {list(shape)} and scales of shape {list(scales.shape)}, "
            "expected [experts, rows, n, 16] and [experts, rows, n]"
        )
    experts, rows, blocks_a_row = shape[:3]
    count = rows * blocks_a_row  # of an expert

    def make(expert: int) -> Bytes:
        codes = blocks.read(16 * count * expert, 16 * count * (expert + 1)).reshape(-1, 16)
        made = np.empty(count, _BLOCK)
        made["scale"] = scales.read(count * expert, count * (expert + 1))
        made["codes"] = by_halves(codes).view("V16").ravel()
        return made.view(np.uint8)

    source = Slabs(experts, count * MXFP4.block_bytes, make)
    size = (experts, rows, 32 * blocks_a_row)
    return Tensor(f"{stem}.weight", size, MXFP4, Region(source, 0, source.size))
