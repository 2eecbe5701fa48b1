"""BitNet models in another form: GGUF files whose matrices are TQ2_0, TQ1_0 or I2_S, made of any
form that quire reads.

    source                                 codes      scales
    TQ1_0, TQ2_0  ->  TQ2_0, TQ1_0         the same   the same
    TQ1_0, TQ2_0  ->  I2_S                 the same   the same, where a matrix has one
    I2_S, safetensors  ->  I2_S            the same   the same
    I2_S, safetensors  ->  TQ1_0, TQ2_0    the same   float32 rounded to float16

A plan is made first, which reads headers alone and refuses what cannot be done. Matrices are read,
converted and written some rows at a time: memory does not grow with the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import Field, Progress, Writable, write_gguf
from quire.loader.metadata import Metadata
from quire.loader.reading import Bytes
from quire.loader.safetensors import SafetensorsFolder
from quire.loader.tensor import Tensor, packed_size
from quire.model.config_spec import config_family
from quire.model.dummy import DummyModel
from quire.model.families import GGUF_FAMILIES
from quire.model.gguf_spec import fields_of_spec, spec_from_gguf
from quire.model.loading import Model, tokenizer_files
from quire.model.rope import Llama3Scaling
from quire.model.spec import LAYER_LINEARS, Activation, ModelSpec
from quire.model.tensors import named_as_ours
from quire.quant.formats import ENCODERS, Format, format_named
from quire.quant.ternary import (
    TQ_BLOCK,
    X86_BLOCK,
    Codes,
    check_codes,
    half_scales,
    i2s_tail,
    pack_i2s,
    pack_tq,
    unpack_i2s,
    unpack_tq,
)
from quire.tokenizer.gguf import fields_of_json

FILE_TYPES = {"TQ2_0": 37, "TQ1_0": 36, "I2_S": 40}  # the targets, by general.file_type
EMBEDDINGS = ("keep", "F16", "Q8_0", "Q6_K")
_QUANTIZATION_VERSION = 2  # of the block formats, as files say it
_WEIGHTS_AT_ONCE = 1 << 22
_EMBEDDINGS = ("token_embd.weight", "output.weight")
# Of a source's fields, those that say how it was written.
_OF_THE_FILE = ("general.alignment", "split.no", "split.count", "split.tensors.count")

_SQUARED = (
    "squared ReLU and sub-norms, which bitnet.cpp runs under this name; llama.cpp does not: it has "
    "`bitnet` alone, whose activation is SiLU"
)
_GRAPHS = {
    "bitnet-b1.58": _SQUARED,
    "bitnet-25": _SQUARED,
    "bitnet": "SiLU and sub-norms, which llama.cpp and bitnet.cpp run under this name",
    "llama": "SiLU without sub-norms, queries and keys in interleaved order, which llama.cpp and "
    "bitnet.cpp run under this name",
}


class WrittenTokenizer(NamedTuple):
    num_tokens: int
    pre_tokenizer: str | None  # None: not named
    has_chat_template: bool


class Loss(NamedTuple):
    """A matrix's scale before and after."""

    tensor: str
    before: float
    after: float

    @property
    def relative(self) -> float:
        return abs(self.after - self.before) / self.before if self.before else 0.0


@dataclass(slots=True)
class Losses:
    """What the conversion rounded; known when the file is written."""

    scales: list[Loss] = field(default_factory=list)  # of matrices that have one scale
    rounded: dict[str, int] = field(default_factory=dict)  # weights of embeddings that F16 rounded


@dataclass(frozen=True, slots=True)
class Conversion:
    """A plan: what a file will hold. `write` makes it."""

    to: str
    architecture: str
    reason: str  # why this architecture
    fields: dict[str, Field]
    tensors: tuple[Writable, ...]
    matrices: dict[str, int]  # how many were of each type
    embeddings: dict[str, str]  # type by tensor
    left_out: tuple[str, ...]  # tensors that the architecture does not compute with
    notes: tuple[str, ...]
    losses: Losses

    @property
    def tokenizer(self) -> WrittenTokenizer | None:
        """None where the file takes token ids alone."""
        tokens, pre = (self.fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "pre"))
        if not isinstance(tokens, Sequence):
            return None
        named = pre if isinstance(pre, str) else None
        return WrittenTokenizer(len(tokens), named, "tokenizer.chat_template" in self.fields)

    @property
    def worst_loss(self) -> Loss | None:
        """The scale that lost the largest part of its size; None where all are what they were."""
        lost = [loss for loss in self.losses.scales if loss.before != loss.after]
        return max(lost, key=lambda loss: loss.relative, default=None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, path: Path, progress: Progress | None = None) -> None:
        """Write the file, whole or not at all; `losses` are those of the last time."""
        self.losses.scales.clear()
        self.losses.rounded.clear()
        write_gguf(path, self.fields, self.tensors, progress)


def plan_conversion(
    model: Model, to: str, *, embedding: str | None = None, with_tokenizer: bool = True
) -> Conversion:
    """How the model becomes a GGUF file with matrices of type `to`.

    `embedding`: the type of embedding and head; None keeps a GGUF file's, and makes F16 of floats.
    """
    source, target, losses = model.source, format_named(to, ""), Losses()
    if isinstance(source, DummyModel):
        raise UnsupportedModelError(f"{source.name} is made in memory and has no file to convert")
    sources = dict(source.tensors)
    if isinstance(source, SafetensorsFolder):
        family = config_family(source.whole_config)
        sources = named_as_ours(family, model.spec.num_layers, sources)
    matrices = _check_matrices(model, sources, target)
    if isinstance(source, GGUFFile):
        architecture, reason = _kept_architecture(source.metadata)
        written = _copied_fields(source.metadata, to)
        names = [name for name in source.tensors if name in model.tensors]  # in the file's order
    else:
        architecture, reason = _chosen_architecture(model.spec)
        written = _written_fields(model, source, architecture, to, with_tokenizer)
        names = list(model.tensors)
    how = _How(target, embedding, architecture, losses)
    tensors = [_converted(model, name, how) for name in names]
    if isinstance(source, SafetensorsFolder):
        tensors += _rope_divisors(model.spec)
        _check_spec(model.spec, architecture, written, tensors)
    return Conversion(
        to=to,
        architecture=architecture,
        reason=reason,
        fields=written if with_tokenizer else _without_tokenizer(written),
        tensors=tuple(tensors),
        matrices=matrices,
        embeddings={t.name: t.format.name for t in tensors if t.name in _EMBEDDINGS},
        left_out=tuple(name for name in sources if _is_left_out(name, model)),
        notes=(*_notes(model.spec, matrices, to), *_tokenizer_notes(written, with_tokenizer)),
        losses=losses,
    )


def _is_left_out(name: str, model: Model) -> bool:
    return name not in model.tensors and not name.endswith(".weight_scale")


def _check_matrices(model: Model, sources: Mapping[str, Tensor], target: Format) -> dict[str, int]:
    """How many matrices of each type there are; refuses models that are not BitNet's."""
    found: dict[str, int] = {}
    for name, tensor in model.tensors.items():
        if not _is_matrix(name):
            continue
        if not tensor.format.is_ternary:
            raise UnsupportedModelError(
                f"{model.path.name} is no BitNet model that quire converts: tensor {name} has type "
                f"{tensor.format.name}, and its weights are nowhere said to be ternary"
            )
        if tensor.shape[1] % (TQ_BLOCK if target.name != "I2_S" else X86_BLOCK):
            raise UnsupportedModelError(
                f"tensor {name} has rows of {tensor.shape[1]} weights, which do not fill "
                f"{target.name}'s blocks of {target.block_size}; llama.cpp's quantiser writes such "
                "rows nevertheless, and they are rubbish. Take --to I2_S"
            )
        kind = _source_type(sources[name])
        found[kind] = found.get(kind, 0) + 1
    return found


def _is_matrix(name: str) -> bool:
    prefix, _, kind = name.removesuffix(".weight").rpartition(".")
    return prefix.startswith("blk.") and name.endswith(".weight") and kind in LAYER_LINEARS


def _source_type(tensor: Tensor) -> str:
    if tensor.format.is_ternary:
        return tensor.format.name
    name = tensor.format.name
    return "packed bytes" if name == "U8" else f"{name}, made ternary as in training"


def _notes(spec: ModelSpec, matrices: dict[str, int], to: str) -> Iterator[str]:
    """What is lost beside scales, or read differently elsewhere."""
    from_blocks = bool(matrices.keys() & {"TQ1_0", "TQ2_0"})
    if not spec.sub_norms and to != "I2_S" and not from_blocks:
        yield (
            f"under the architecture llama nothing says that a file of {to} is BitNet's: engines, "
            "quire among them, then do not round activations to one byte a token as it was trained"
        )
    if not spec.sub_norms and to == "I2_S" and from_blocks:
        yield (
            "engines round activations to one byte a token for I2_S, which suits models that were "
            "trained so, and no others"
        )
    if to == "I2_S":
        yield "I2_S is packed as x86 builds of bitnet.cpp do; llama.cpp does not read it"


def _tokenizer_notes(written: Mapping[str, Field], with_tokenizer: bool) -> Iterator[str]:
    is_byte_level = written.get("tokenizer.ggml.model") == "gpt2"
    if with_tokenizer and is_byte_level and "tokenizer.ggml.pre" not in written:
        yield (
            "the source does not name its pre-tokenizer (tokenizer.ggml.pre), and no more does "
            "this file: bitnet.cpp then splits text into other words than Llama 3's tokenizer, "
            "which quire takes for that vocabulary"
        )


# ---- tensors


class _How(NamedTuple):
    """What is asked for, for every tensor."""

    target: Format
    embedding: str | None
    architecture: str
    losses: Losses


def _converted(model: Model, name: str, how: _How) -> Writable:
    tensor = model.tensors[name]
    is_gguf = isinstance(model.source, GGUFFile)
    interleaves = not is_gguf and GGUF_FAMILIES[how.architecture].interleaved_in_gguf
    order = _interleaved_order(model.spec, name) if interleaves else None
    if _is_matrix(name):
        return _Matrix(tensor, how.target, how.losses, order)
    if name in _EMBEDDINGS:
        return _embedding(tensor, how.embedding or ("keep" if is_gguf else "F16"), how.losses)
    return tensor if is_gguf else _Floats(tensor, format_named("F32", name), how.losses, order)


def _embedding(tensor: Tensor, embedding: str, losses: Losses) -> Writable:
    if embedding == "keep":
        return tensor
    target = format_named(embedding, tensor.name)
    if tensor.shape[1] % target.block_size:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has rows of {tensor.shape[1]} weights, which do not fill "
            f"{target.name}'s blocks of {target.block_size}: take --embedding F16 or Q8_0"
        )
    return tensor if tensor.format is target else _Floats(tensor, target, losses)


def _interleaved_order(spec: ModelSpec, name: str) -> npt.NDArray[np.intp] | None:
    """The rows of a query or key projection in GGUF's order for llama: pair i of a head's rope,
    rows i and i + half of Hugging Face's, become rows 2i and 2i + 1."""
    kind = name.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return None
    num_heads = spec.num_heads if kind == "attn_q" else spec.num_kv_heads
    rows = np.arange(num_heads * spec.head_dim).reshape(num_heads, 2, spec.head_dim // 2)
    return rows.swapaxes(1, 2).ravel()


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(1, _WEIGHTS_AT_ONCE // shape[1])
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


@dataclass(frozen=True, slots=True)
class _Remade:
    """A tensor in another type, made as it is written."""

    tensor: Tensor
    format: Format
    losses: Losses
    order: npt.NDArray[np.intp] | None = None  # of its rows, each within its head's

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return packed_size(self.format, self.tensor.num_weights)


class _Floats(_Remade):
    """A tensor that is not ternary."""

    __slots__ = ()

    def pieces(self) -> Iterator[Bytes]:
        if len(self.shape) < 2:
            weights = self.tensor.to_float32()
            yield self._encoded(weights if self.order is None else weights[self.order])
            return
        for first, last in _row_ranges(self.shape):
            yield self._encoded(self.tensor.rows_float32(first, last))

    def _encoded(self, weights: npt.NDArray[np.float32]) -> Bytes:
        if not np.isfinite(weights).all():
            raise ModelFileError(f"tensor {self.name} holds weights that are not finite")
        with np.errstate(over="ignore"):
            blocks = ENCODERS[self.format.name](weights.reshape(-1, self.format.block_size))
        if self.format.name == "F16":
            self._note_rounding(weights, blocks)
        return blocks.ravel()

    def _note_rounding(self, weights: npt.NDArray[np.float32], blocks: Bytes) -> None:
        kept = self.format.decode(blocks).reshape(weights.shape)
        if not np.isfinite(kept).all():
            raise UnsupportedModelError(
                f"tensor {self.name} holds {np.abs(weights).max()}, which is too large for F16: "
                "take --embedding keep"
            )
        rounded = self.losses.rounded
        rounded[self.name] = rounded.get(self.name, 0) + int(np.count_nonzero(kept != weights))


class _Matrix(_Remade):
    """A ternary matrix."""

    __slots__ = ()

    def pieces(self) -> Iterator[Bytes]:
        if self.format.name != "I2_S":
            yield from self._blocks_of_256()
            return
        scale = self._one_scale()
        for first, last in _row_ranges(self.shape):
            yield pack_i2s(self._rows(first, last)[0])
        self.losses.scales.append(Loss(self.name, scale, scale))
        yield i2s_tail(np.float32(scale))

    def _blocks_of_256(self) -> Iterator[Bytes]:
        scale = self._half() if self.tensor.format.name == "I2_S" else None
        for first, last in _row_ranges(self.shape):
            codes, scales = self._rows(first, last)
            blocks = codes.reshape(-1, TQ_BLOCK)
            if scale is not None:
                scales = half_scales(blocks, scale)
            assert scales is not None
            yield pack_tq(blocks, scales, self.format.name).ravel()

    def _half(self) -> np.float32:
        """The scale as llama.cpp's blocks keep it."""
        scale = np.float32(self.tensor.scale)
        with np.errstate(over="ignore"):
            half = np.float32(np.float16(scale))
        if not np.isfinite(half) or (half == 0) != (scale == 0):
            raise UnsupportedModelError(
                f"tensor {self.name} has the scale {scale}, which a float16 cannot hold, and "
                f"{self.format.name} has no other: take --to I2_S"
            )
        self.losses.scales.append(Loss(self.name, float(scale), float(half)))
        return half

    def _rows(self, first: int, last: int) -> tuple[Codes, Bytes | None]:
        """Codes of rows, and where they are in blocks of 256 the bytes of their scales."""
        if self.order is None:
            return self._source_rows(first, last)
        rows = self.order[first:last]
        start, stop = int(rows.min()), int(rows.max()) + 1
        codes, scales = self._source_rows(start, stop)
        assert scales is None, "a file in GGUF is in its order already"
        return codes[rows - start], None

    def _source_rows(self, first: int, last: int) -> tuple[Codes, Bytes | None]:
        packed = self.tensor.row_blocks(first, last)
        kind, columns = self.tensor.format, self.shape[1]
        if kind.name == "I2_S":
            return unpack_i2s(packed, columns), None
        blocks = packed.reshape(-1, kind.block_bytes)
        if kind.name == "TQ2_0":
            check_codes(blocks[:, :-2], self.name)
        codes, scales = unpack_tq(blocks, kind.name)
        return codes.reshape(-1, columns), scales

    def _one_scale(self) -> float:
        """The scale of the matrix; refuses one whose blocks, those of zeros apart, differ."""
        if self.tensor.format.name == "I2_S":
            return self.tensor.scale
        found: float | None = None
        blocks_per_row = self.shape[1] // TQ_BLOCK
        for first, last in _row_ranges(self.shape):
            codes, scales = self._source_rows(first, last)
            assert scales is not None
            halves = scales.view("<f2")[:, 0].astype(np.float32)
            used = np.flatnonzero(np.any(codes.reshape(-1, TQ_BLOCK) != 1, axis=1))
            for block in used[halves[used] != (halves[used[:1]] if found is None else found)][:1]:
                row, column = divmod(int(block), blocks_per_row)
                before = float(halves[used[0]]) if found is None else found
                raise self._differing(first + row, column, float(halves[block]), before)
            if len(used):
                found = float(halves[used[0]])
        if found is not None and not 0 <= found < np.inf:
            raise ModelFileError(f"tensor {self.name} has the scale {found}: the file is broken")
        return 0.0 if found is None else found

    def _differing(
        self, row: int, block: int, scale: float, before: float
    ) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"tensor {self.name} cannot be I2_S, which has one scale for a matrix: block {block} "
            f"of row {row} has the scale {scale:.6g}, those before it {before:.6g}. BitNet's have "
            "one; for this model take --to TQ2_0 or TQ1_0"
        )


# ---- metadata


def _copied_fields(metadata: Metadata, to: str) -> dict[str, Field]:
    copied: dict[str, Field] = {}
    for key in metadata:
        value = metadata[key]
        if key not in _OF_THE_FILE and not (isinstance(value, tuple) and not value):
            if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
                raise metadata.error(key, "holds arrays of arrays, which quire does not write")
            assert isinstance(value, str | int | float | tuple | np.ndarray)
            copied[key] = value
    copied["general.file_type"] = FILE_TYPES[to]
    return copied


def _kept_architecture(metadata: Metadata) -> tuple[str, str]:
    name = metadata.text("general.architecture")
    if name not in _GRAPHS:
        raise UnsupportedModelError(
            f"architecture {name!r} is none of BitNet's, which are {', '.join(_GRAPHS)}"
        )
    return name, f"the source's: {_GRAPHS[name]}"


def _chosen_architecture(spec: ModelSpec) -> tuple[str, str]:
    """Which of GGUF's architectures has the graph of a model from safetensors."""
    if not spec.sub_norms:
        name = "llama"
    else:
        name = "bitnet-b1.58" if spec.activation is Activation.RELU2 else "bitnet"
    return name, f"the model has {_GRAPHS[name]}"


def _written_fields(
    model: Model, folder: SafetensorsFolder, architecture: str, to: str, with_tokenizer: bool
) -> dict[str, Field]:
    written: dict[str, Field] = {
        "general.architecture": architecture,
        "general.name": model.path.resolve().name,
        "general.file_type": FILE_TYPES[to],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **fields_of_spec(model.spec, architecture),
    }
    files = tokenizer_files(folder) if with_tokenizer else None
    if files is None:
        return written | {"tokenizer.ggml.model": "none"}
    return written | fields_of_json(*files, model.spec.vocabulary_size)


def _without_tokenizer(written: dict[str, Field]) -> dict[str, Field]:
    kept = {key: value for key, value in written.items() if not key.startswith("tokenizer.")}
    return kept | {"tokenizer.ggml.model": "none"}


def _rope_divisors(spec: ModelSpec) -> list[Writable]:
    """Llama 3's scaling of rope as GGUF keeps it: a divisor for each frequency."""
    scaling = spec.rope.scaling
    if not isinstance(scaling, Llama3Scaling):
        return []
    plain = spec.rope.base ** (-np.arange(0, spec.rope.dims, 2) / spec.rope.dims)
    divisors = (plain / spec.rope.frequencies()).astype("<f4")
    kind = format_named("F32", "rope_freqs.weight")
    return [Tensor("rope_freqs.weight", divisors.shape, kind, divisors.view(np.uint8))]


def _check_spec(
    spec: ModelSpec, architecture: str, written: dict[str, Field], tensors: list[Writable]
) -> None:
    """Refuse a model of which GGUF's words would make another: they are read back."""
    nothing = np.empty(0, np.uint8)
    found = {
        t.name: t if isinstance(t, Tensor) else Tensor(t.name, t.shape, t.format, nothing)
        for t in tensors
    }
    if architecture != "llama":
        found.pop("rope_freqs.weight", None)  # which its graph does not know
    said = spec_from_gguf(Metadata("the file to write", written), found)
    for what in _differences(spec, said, "the model"):
        raise _unsaid(architecture, what)
    for wanted, got in zip(spec.ropes, said.ropes, strict=True):
        is_same = np.allclose(got.frequencies(), wanted.frequencies(), rtol=1e-6, atol=0)
        if not is_same or not np.isclose(got.magnitude, wanted.magnitude, rtol=1e-6):
            raise _unsaid(architecture, f"rope is scaled by {wanted.scaling}")


def _differences(wanted: object, got: object, where: str) -> Iterator[str]:
    """In which fields two descriptions differ; floats may as far as float32s do."""
    if isinstance(wanted, tuple) and isinstance(got, tuple) and len(wanted) == len(got):
        for index, (one, other) in enumerate(zip(wanted, got, strict=True)):
            yield from _differences(one, other, f"layer {index}")
    elif is_dataclass(wanted) and type(wanted) is type(got):
        for part in fields(wanted):
            if part.name not in ("family", "rope"):
                parts = getattr(wanted, part.name), getattr(got, part.name)
                yield from _differences(*parts, f"{part.name} of {where}")
    elif isinstance(wanted, float) and isinstance(got, float):
        if np.float32(wanted) != np.float32(got):
            yield f"{where} is {wanted}, which there is {got}"
    elif wanted != got:
        yield f"{where} is {wanted}, which there is {got}"


def _unsaid(architecture: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"GGUF's architecture {architecture}, the nearest to this model, cannot say all of it: "
        f"{what}"
    )
