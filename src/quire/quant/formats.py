"""The table of block formats: what a tensor's bytes mean, by name and by GGUF's type number."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import UnsupportedModelError
from quire.quant import decoders
from quire.quant.decoders import Blocks, Floats


@dataclass(frozen=True, slots=True)
class Format:
    """How `block_size` weights are packed into `block_bytes` bytes."""

    name: str
    ggml_type: int  # the number GGUF files give it
    block_size: int  # weights
    block_bytes: int
    decode: Callable[
        [Blocks], Floats
    ]  # uint8 [blocks, block_bytes] -> float32 [blocks, block_size]

    @property
    def is_float(self) -> bool:
        """Whether weights stand alone, unquantised."""
        return self.block_size == 1


FORMATS = (
    Format("F32", 0, 1, 4, decoders.decode_f32),
    Format("F16", 1, 1, 2, decoders.decode_f16),
    Format("BF16", 30, 1, 2, decoders.decode_bf16),
    Format("Q8_0", 8, 32, 34, decoders.decode_q8_0),
    Format("Q4_0", 2, 32, 18, decoders.decode_q4_0),
    Format("Q4_1", 3, 32, 20, decoders.decode_q4_1),
    Format("Q5_0", 6, 32, 22, decoders.decode_q5_0),
    Format("Q5_1", 7, 32, 24, decoders.decode_q5_1),
    Format("Q2_K", 10, 256, 84, decoders.decode_q2_k),
    Format("Q3_K", 11, 256, 110, decoders.decode_q3_k),
    Format("Q4_K", 12, 256, 144, decoders.decode_q4_k),
    Format("Q5_K", 13, 256, 176, decoders.decode_q5_k),
    Format("Q6_K", 14, 256, 210, decoders.decode_q6_k),
    Format("IQ4_NL", 20, 32, 18, decoders.decode_iq4_nl),
    Format("IQ4_XS", 23, 256, 136, decoders.decode_iq4_xs),
    Format("TQ1_0", 34, 256, 54, decoders.decode_tq1_0),
    Format("TQ2_0", 35, 256, 66, decoders.decode_tq2_0),
)

_BY_NAME = {known.name: known for known in FORMATS}
_BY_GGML_TYPE = {known.ggml_type: known for known in FORMATS}

# Types that sound files may hold and we do not run, so that errors can call them by name.
_OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    39: "MXFP4",
    40: "NVFP4",
}


def format_named(name: str, tensor: str) -> Format:
    """The format of that name; `tensor` is whose it is, for the error."""
    if name not in _BY_NAME:
        raise _unsupported(tensor, name)
    return _BY_NAME[name]


def format_of_ggml_type(ggml_type: int, tensor: str) -> Format:
    """The format of that GGUF type number; `tensor` is whose it is, for the error."""
    if ggml_type not in _BY_GGML_TYPE:
        known_as = _OTHER_NAMES.get(ggml_type, "unknown")
        raise _unsupported(tensor, f"{known_as} (GGUF type {ggml_type})")
    return _BY_GGML_TYPE[ggml_type]


def _unsupported(tensor: str, described: str) -> UnsupportedModelError:
    supported = ", ".join(_BY_NAME)
    return UnsupportedModelError(
        f"tensor {tensor!r} has type {described}, which quire does not run; supported: "
        f"{supported}. Convert the model to one of these"
    )
