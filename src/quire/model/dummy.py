"""Models without files: `dummy:SHAPE[:MIX[:SEED]]`, of random weights, for measuring alone.

    dummy:llama-8b:Q4_K_M      the shape of an 8B Llama as llama.cpp would quantise it
    dummy:tiny                 a shape for tests: nothing is learnt of speed from it

They take token ids, have no tokenizer, and say nothing sensible. One name is the same model on
every machine, byte by byte.

Weights are made straight in their block format, so that a model is made in seconds: every byte of a
block is random; then its float16 scales are set so that the weights have about the size asked for
and a mean near zero. Nothing is quantised. The result is noise of a trained model's shape and size:
it takes as long to compute with, and stays finite. BitNet's ternary matrices have one scale each,
as trained ones do.
"""

import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ConfigError
from quire.loader.defaults import DUMMY_PREFIX
from quire.loader.metadata import Metadata
from quire.loader.reading import Bytes
from quire.loader.tensor import Tensor, packed_size
from quire.model.gguf_spec import gguf_family, spec_from_gguf
from quire.model.quant_mixes import Mix, find_mix, tensor_format
from quire.model.spec import ModelSpec, takes_bytes_by_token, tensor_shapes
from quire.quant.formats import E4M3_SIZES, Format, format_named

_MAX_SEED = (1 << 32) - 1
_NORM_SPREAD = 0.1  # norm weights lie around one
_NORM_EPSILON = float(np.float32(1e-5))  # GGUF keeps float32
_QUANTIZATION_VERSION = 2  # of the block formats, as files say it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    vocabulary_size: int
    tied_head: bool
    family: str = "llama"
    rope_base: float = 500_000.0
    context_length: int = 8192
    usual_mix: str = "Q4_K_M"
    head_size: int | None = None  # None: hidden_size / num_heads
    num_experts: int = 0
    num_used_experts: int = 0
    expert_size: int = 0
    has_biases: bool = False  # of attention's matrices
    fields: Mapping[str, str | int | float] = field(default_factory=dict)  # this family's own

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads


SHAPES = {
    "smollm2-135m": Shape(
        num_layers=30,
        hidden_size=576,
        ffn_size=1536,
        num_heads=9,
        num_kv_heads=3,
        vocabulary_size=49_152,
        tied_head=True,
        rope_base=100_000.0,
    ),
    "llama-1b": Shape(
        num_layers=16,
        hidden_size=2048,
        ffn_size=8192,
        num_heads=32,
        num_kv_heads=8,
        vocabulary_size=49_152,
        tied_head=False,
    ),
    "llama-8b": Shape(
        num_layers=32,
        hidden_size=4096,
        ffn_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        vocabulary_size=128_256,
        tied_head=False,
    ),
    "bitnet-2b": Shape(
        num_layers=30,
        hidden_size=2560,
        ffn_size=6912,
        num_heads=20,
        num_kv_heads=5,
        vocabulary_size=128_256,
        tied_head=True,
        family="bitnet",
        context_length=4096,
        usual_mix="TQ2_0",
    ),
    "olmoe-7b": Shape(
        num_layers=16,
        hidden_size=2048,
        ffn_size=1024,
        num_heads=16,
        num_kv_heads=16,
        vocabulary_size=50_304,
        tied_head=False,
        family="olmoe",
        rope_base=10_000.0,
        context_length=4096,
        num_experts=64,
        num_used_experts=8,
        expert_size=1024,
    ),
    "qwen3-30b-a3b": Shape(
        num_layers=48,
        hidden_size=2048,
        ffn_size=6144,
        num_heads=32,
        num_kv_heads=4,
        vocabulary_size=151_936,
        tied_head=False,
        family="qwen3moe",
        rope_base=1e6,
        context_length=32_768,
        head_size=128,
        num_experts=128,
        num_used_experts=8,
        expert_size=768,
    ),
    "gpt-oss-20b": Shape(
        num_layers=24,
        hidden_size=2880,
        ffn_size=2880,
        num_heads=64,
        num_kv_heads=8,
        vocabulary_size=201_088,
        tied_head=False,
        family="gpt-oss",
        rope_base=150_000.0,
        context_length=131_072,
        usual_mix="MXFP4",
        head_size=64,
        num_experts=32,
        num_used_experts=4,
        expert_size=2880,
        has_biases=True,
        fields={
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "gemma3-1b": Shape(
        num_layers=26,
        hidden_size=1152,
        ffn_size=6912,
        num_heads=4,
        num_kv_heads=1,
        vocabulary_size=262_144,
        tied_head=True,
        family="gemma3",
        rope_base=1e6,
        context_length=32_768,
        head_size=256,
        fields={"attention.sliding_window": 512},
    ),
    "tiny-gemma3": Shape(
        num_layers=7,
        hidden_size=256,
        ffn_size=512,
        num_heads=4,
        num_kv_heads=2,
        vocabulary_size=512,
        tied_head=True,
        family="gemma3",
        rope_base=1e6,
        context_length=8192,
        head_size=128,
        fields={"attention.sliding_window": 100},
    ),
    "tiny-gpt-oss": Shape(
        num_layers=4,
        hidden_size=256,
        ffn_size=256,
        num_heads=16,
        num_kv_heads=2,
        vocabulary_size=512,
        tied_head=False,
        family="gpt-oss",
        rope_base=150_000.0,
        context_length=8192,
        usual_mix="MXFP4",
        head_size=64,
        num_experts=8,
        num_used_experts=2,
        expert_size=256,
        has_biases=True,
        fields={
            "attention.sliding_window": 100,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
        },
    ),
    "tiny-qwen35": Shape(
        num_layers=4,
        hidden_size=256,
        ffn_size=512,
        num_heads=4,
        num_kv_heads=2,
        vocabulary_size=512,
        tied_head=False,
        family="qwen35",
        context_length=2048,
        head_size=64,
        fields={
            "rope.dimension_count": 32,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 2,
            "ssm.inner_size": 256,
            "ssm.state_size": 64,
            "ssm.time_step_rank": 4,
        },
    ),
    "tiny-moe": Shape(
        num_layers=2,
        hidden_size=256,
        ffn_size=512,
        num_heads=4,
        num_kv_heads=2,
        vocabulary_size=512,
        tied_head=False,
        family="qwen3moe",
        context_length=2048,
        num_experts=8,
        num_used_experts=2,
        expert_size=256,
    ),
    "tiny": Shape(
        num_layers=2,
        hidden_size=256,
        ffn_size=512,
        num_heads=4,
        num_kv_heads=2,
        vocabulary_size=512,
        tied_head=False,
        context_length=2048,
    ),
}


class DummyName(NamedTuple):
    """What a name such as dummy:llama-1b:Q4_K_M:7 asks for."""

    shape: str
    mix: Mix
    seed: int

    @property
    def text(self) -> str:
        seed = f":{self.seed}" if self.seed else ""
        return f"{DUMMY_PREFIX}{self.shape}:{self.mix.name}{seed}"


def read_name(name: str) -> DummyName:
    """Take a name apart; a ConfigError where there is no such model."""
    shape, *rest = name.removeprefix(DUMMY_PREFIX).split(":")
    if not name.startswith(DUMMY_PREFIX) or len(rest) > 2:
        raise ConfigError(f"a model without a file is named dummy:SHAPE:MIX, got {name!r:.100}")
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r:.100}; there are {', '.join(SHAPES)}")
    mix = find_mix(rest[0] if rest else SHAPES[shape].usual_mix)
    seed = rest[1] if len(rest) == 2 else "0"
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 10 and int(seed) <= _MAX_SEED):
        raise ConfigError(f"the seed must be from 0 to {_MAX_SEED}, got {seed!r:.100}")
    return DummyName(shape, mix, int(seed))


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is made when its data are asked for, always the same."""

    name: str
    shape: tuple[int, ...]
    format: Format
    seed: int
    has_one_scale: bool = False  # for all of its blocks

    @property
    def nbytes(self) -> int:
        return packed_size(self.format, math.prod(self.shape))

    def pieces(self) -> Iterator[Bytes]:
        yield self.data

    @property
    def data(self) -> Bytes:
        own = np.random.SeedSequence([self.seed, zlib.crc32(self.name.encode())])
        rng = np.random.Generator(np.random.SFC64(own))
        if len(self.shape) == 1 or self.name.endswith(".bias"):
            spread = _NORM_SPREAD * rng.standard_normal(self.shape, dtype=np.float32)
            centre = 0 if self.name.endswith(".bias") else 1
            if self.name.endswith("ssm_a.weight"):  # a state decays
                centre = -1
            return (centre + spread).astype("<f4").ravel().view(np.uint8)
        # With this scale a product has about the scale of its input.
        size = self.shape[-1] ** -0.5
        return random_blocks(
            self.format, math.prod(self.shape), size, rng, has_one_scale=self.has_one_scale
        )


class DummyModel:
    """What a GGUF file would hold: its metadata and its tensors, made when wanted, under the names
    that files of its family have."""

    def __init__(self, name: str) -> None:
        asked = read_name(name)
        self.name = asked.text
        self.mix = asked.mix
        self.fields = _fields(SHAPES[asked.shape], asked)
        self.metadata = Metadata(self.name, self.fields)
        self.planned = tuple(_planned(SHAPES[asked.shape], self.metadata, asked))

    @property
    def path(self) -> Path:
        return Path(self.name)

    @property
    def file_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.planned)

    def make_tensors(self) -> dict[str, Tensor]:
        """All tensors, in memory."""
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        _check_memory(self.name, self.file_bytes)
        with ThreadPoolExecutor() as pool:  # numpy makes random numbers without the GIL
            data = list(pool.map(lambda tensor: tensor.data, self.planned))
        return {
            tensor.name: Tensor(tensor.name, tensor.shape, tensor.format, made)
            for tensor, made in zip(self.planned, data, strict=True)
        }

    def close(self) -> None:
        """There is no file to let go of."""


def _fields(shape: Shape, asked: DummyName) -> dict[str, str | int | float]:
    """The metadata of a GGUF file; llama.cpp takes "none" for a model without a tokenizer."""
    own: dict[str, str | int | float] = {
        "vocab_size": shape.vocabulary_size,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden_size,
        "block_count": shape.num_layers,
        "feed_forward_length": shape.ffn_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.layer_norm_rms_epsilon": _NORM_EPSILON,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_base,
    }
    if shape.head_size is not None:
        own |= {"attention.key_length": shape.head_size, "attention.value_length": shape.head_size}
    if shape.num_experts:
        own |= {
            "expert_count": shape.num_experts,
            "expert_used_count": shape.num_used_experts,
            "expert_feed_forward_length": shape.expert_size,
        }
    own |= shape.fields
    return {
        "general.architecture": shape.family,
        "general.name": asked.text,
        "general.file_type": asked.mix.file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{shape.family}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "none",
    }


def _planned(shape: Shape, metadata: Metadata, asked: DummyName) -> Iterator[PlannedTensor]:
    spec = _spec(shape, metadata)
    names = {ours: theirs for theirs, ours in gguf_family(metadata).gguf_names.items()}
    for name, sizes in tensor_shapes(spec).items():
        chosen = tensor_format(asked.mix, spec, name, sizes)
        is_trained_ternary = takes_bytes_by_token(spec, chosen)
        parts = [names.get(part, part) for part in name.split(".")]
        yield PlannedTensor(".".join(parts), sizes, chosen, asked.seed, is_trained_ternary)


def _spec(shape: Shape, metadata: Metadata) -> ModelSpec:
    """As of a file: the names of tensors say whether the head is tied and attention has biases."""
    size = (shape.vocabulary_size, shape.hidden_size)
    names = ["token_embd.weight"] + ([] if shape.tied_head else ["output.weight"])
    if shape.has_biases:
        names += ["blk.0.attn_q.bias", "blk.0.attn_output.bias"]
    nothing = np.empty(0, np.uint8)
    heads = {name: Tensor(name, size, format_named("F32", name), nothing) for name in names}
    return spec_from_gguf(metadata, heads)


def _check_memory(name: str, num_bytes: int) -> None:
    """Refuse a model that is larger than the machine's memory."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise ConfigError(
            f"{name} takes {num_bytes / 2**30:.1f} GiB, and this machine has "
            f"{memory / 2**30:.1f} GiB of memory: choose a smaller shape or a mix of fewer bits"
        )


# ---- random weights


# By format: where a block keeps its float16 scales, and how large each is relative to the first.
# Minimums take the codes' mean off: 7.5 of 0 to 15. Codes of other formats are centred as they are.
_SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 1.0},
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ1_S": {0: 1.0},
    "IQ2_XXS": {0: 1.0},
    "IQ2_XS": {0: 1.0},
    "IQ2_S": {0: 1.0},
    "IQ3_XXS": {0: 1.0},
    "IQ3_S": {0: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
    "Q1_0": {0: 1.0},
    "Q2_0": {0: 1.0},
    "TQ1_0": {52: 1.0},
    "TQ2_0": {64: 1.0},
}
# Those that begin with a float32 scale.
_WITH_SINGLES = ("U4_128", "I8_128", "E4M3_128", "NVFP4_128")
# By float format: its integer type, and the bits of its fraction and its exponent.
_FLOATS = {"F32": ("<u4", 23, 8), "F16": ("<u2", 10, 5), "BF16": ("<u2", 7, 8)}
_MEAN_SIZE = math.sqrt(7 / 3)  # root mean square of uniform numbers from 1 to 2
_SAMPLE_BLOCKS = 256
_E8M0_ONE = 128  # MXFP4's scale that multiplies its doubled values by 1
_E4M3_TWO = 0x40  # and NVFP4's


def random_blocks(
    block_format: Format,
    num_weights: int,
    size: float,
    rng: np.random.Generator,
    *,
    has_one_scale: bool = False,
) -> Bytes:
    """So many weights of about that size (root mean square), packed."""
    data = _random_bytes(packed_size(block_format, num_weights), rng)
    if block_format.is_float:
        _set_exponents(data, block_format, size)
        return data
    blocks = data.reshape(-1, block_format.block_bytes)
    _keep_to_the_format(blocks, block_format)
    scale = size / _size_at_scale_one(block_format)
    if block_format.name == "MXFP4":
        _set_powers_of_two(blocks, scale)
    elif block_format.name == "NVFP4":
        _set_e4m3(blocks[:, :4], scale)
    elif block_format.name == "IQ1_M":
        _set_nibbles(blocks, scale)
    if block_format.name in _WITH_SINGLES:
        bits = np.float32(scale).view(np.uint32) & np.uint32(0xFFFF0000)  # as bfloat16's
        blocks[:, :4].view("<u4")[:] = bits
    for at, factor in _SCALES.get(block_format.name, {}).items():
        halves = blocks[:, at : at + 2].view("<u2")
        bits = np.float16(scale * factor).view(np.uint16)
        halves &= 0 if has_one_scale else _jitter(int(bits) & 0x7FFF)
        halves += bits
    return data


def _set_powers_of_two(blocks: Bytes, scale: float) -> None:
    """Of the powers around the scale as many each as make the mean square that of the scale."""
    fraction, exponent = math.frexp(scale)  # 0.5 <= fraction < 1
    share = (4 * fraction**2 - 1) / 3  # of the larger power
    is_larger = blocks[:, 0] < 256 * share
    blocks[:, 0] = _E8M0_ONE + exponent - 1 + is_larger


def _set_e4m3(random: Bytes, scale: float) -> None:
    """Of the codes around twice the scale as many each as make the mean square that of it."""
    above = int(np.searchsorted(E4M3_SIZES[:-1], 2 * scale, side="right").clip(1, 126))
    low, high = (float(size) ** 2 for size in E4M3_SIZES[above - 1 : above + 1])
    share = (4 * scale**2 - low) / (high - low)  # of the larger code
    random[:] = above - 1 + (random < 256 * share)


def _set_nibbles(blocks: Bytes, scale: float) -> None:
    """IQ1_M: a nibble of the scale, the lowest first, in the upper half of every other byte."""
    bits = int(np.float16(scale).view(np.uint16))
    blocks[:, 49::2] &= 15
    blocks[:, 49::2] |= np.array(
        [bits << 4 & 240, bits & 240, bits >> 4 & 240, bits >> 8 & 240], np.uint8
    )


def _jitter(bits: int) -> int:
    """A mask of the low bits of a float16 that may be random: they change it by an eighth at most.
    Subnormal numbers are spaced as integers are."""
    return 0x7F if bits >= 1 << 10 else (1 << max(0, bits.bit_length() - 4)) - 1


def _random_bytes(count: int, rng: np.random.Generator) -> Bytes:
    words: npt.NDArray[np.uint64] = rng.bit_generator.random_raw(-(-count // 8))  # the fastest
    return words.view(np.uint8)[:count]


def _set_exponents(data: Bytes, block_format: Format, size: float) -> None:
    """Keep the random signs and fractions, and set one exponent for all."""
    kind, fraction_bits, exponent_bits = _FLOATS[block_format.name]
    exponent = round(math.log2(size / _MEAN_SIZE)) + (1 << (exponent_bits - 1)) - 1
    words = data.view(kind)
    words &= ~np.array(((1 << exponent_bits) - 1) << fraction_bits, dtype=kind)
    words |= np.array(max(1, exponent) << fraction_bits, dtype=kind)


def _keep_to_the_format(blocks: Bytes, block_format: Format) -> None:
    """Change bit patterns that no quantiser writes."""
    if block_format.name in ("TQ2_0", "Q2_0"):
        # 3 is no ternary digit, and Q2_0's only 2: make it 1, which means zero.
        packed = blocks[:, :64] if block_format.name == "TQ2_0" else blocks[:, 2:]
        packed &= ~((packed & (packed >> 1) & 0x55) << 1)
    elif block_format.name == "Q6_K":  # full-range group scales would need a subnormal float16
        groups = blocks[:, 192:208]
        groups &= 15
        groups += 8
    elif block_format.name == "U4_128":  # its zero point is one of the codes
        blocks[:, 4:8].view("<f4")[:] = 8.0
    elif block_format.name == "NVFP4_128":  # from 1 to 3.75; the float32 has their size
        scales = blocks[:, 4:12]
        scales &= 15
        scales += 0x38


@cache
def _size_at_scale_one(block_format: Format) -> float:
    """The root mean square of random weights whose scale is one."""
    rng = np.random.default_rng(0)
    data = _random_bytes(_SAMPLE_BLOCKS * block_format.block_bytes, rng)
    blocks = data.reshape(-1, block_format.block_bytes)
    _keep_to_the_format(blocks, block_format)
    if block_format.name == "MXFP4":
        blocks[:, 0] = _E8M0_ONE
    elif block_format.name == "NVFP4":
        blocks[:, :4] = _E4M3_TWO
    elif block_format.name == "IQ1_M":
        _set_nibbles(blocks, 1.0)
    if block_format.name in _WITH_SINGLES:
        blocks[:, :4].view("<f4")[:] = 1.0
    for at, factor in _SCALES.get(block_format.name, {}).items():
        blocks[:, at : at + 2].view("<f2")[:] = factor
    weights = block_format.decode(blocks).astype(np.float64)
    return float(np.sqrt(np.mean(weights**2)))
