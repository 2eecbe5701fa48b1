"""Model: an open model file together with its spec; what it will need, whether it is sound, and the
tokenizer that came with it, wherever its files keep it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from quire.loader.defaults import DUMMY_PREFIX
from quire.loader.files import open_model_file
from quire.loader.gguf import GGUFFile
from quire.loader.metadata import Metadata
from quire.loader.reading import DISK, Files, parse_json_object
from quire.loader.safetensors import SafetensorsFolder
from quire.loader.tensor import Tensor
from quire.model.bitnet import weights_of, with_packing
from quire.model.config_spec import config_family, spec_from_config
from quire.model.dummy import DummyModel
from quire.model.families import WITH_SENSES
from quire.model.gguf_spec import gguf_family, spec_from_gguf
from quire.model.multipliers import multiplied
from quire.model.quant_mixes import MIXES
from quire.model.quantised import factors_joined, linears_joined
from quire.model.spec import Activation, ModelSpec, check_tensors, tensor_shapes
from quire.model.tensors import (
    arranged,
    named_as_ours,
    named_in_gguf,
    of_decoder,
    xielu_in_gguf,
)
from quire.tokenizer import Tokenizer, check_vocabulary
from quire.tokenizer.tokenizer_json import (
    MAX_TEMPLATE_BYTES,
    template_of_files,
    template_of_processor,
)

_QUANTISATION = "hf_quant_config.json"
_MAX_QUANTISATION_BYTES = 4 << 20  # it may list all linears
LARGEST_SOUND_NORM = 1000.0  # trained norm weights stay far below


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose tensors were found to fit its spec. Close it, or use it in a `with`."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    source: GGUFFile | SafetensorsFolder | DummyModel

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def file_bytes(self) -> int:
        return self.source.file_bytes

    @property
    def metadata(self) -> Metadata:
        """GGUF's metadata, with the tokenizer's, or the fields of config.json."""
        source = self.source
        return source.config if isinstance(source, SafetensorsFolder) else source.metadata

    def close(self) -> None:
        """Release the files; they are closed with the last tensor in use."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load_model(path: str | Path, files: Files = DISK, *, i2s_packing: str | None = None) -> Model:
    """Open a GGUF file or a safetensors folder, or make a model without a file (`dummy:...`);
    nothing is decoded yet. `i2s_packing`: whose builds of bitnet.cpp wrote its I2_S tensors, "x86"
    (None) or "arm", which the file does not say."""
    if str(path).startswith(DUMMY_PREFIX):
        with_packing({}, i2s_packing, str(path))  # what is made in memory needs no such word
        return _make_model(str(path))
    source = open_model_file(path, files)
    tensors = with_packing(source.tensors, i2s_packing, source.path.name)
    if isinstance(source, GGUFFile):
        tensors = factors_joined(tensors)
        spec = spec_from_gguf(source.metadata, tensors)
        family = gguf_family(source.metadata)
        tensors = named_in_gguf(family, spec.num_layers, tensors)
        if family.gguf_activation is Activation.XIELU:
            tensors |= xielu_in_gguf(source.metadata, spec.num_layers)
    else:
        spec = spec_from_config(source.whole_config)
        family = config_family(source.whole_config)
        has_senses = source.config.get("model_type") in WITH_SENSES
        tensors = of_decoder(tensors) if has_senses else tensors
        config = _with_quantisation(source)
        tensors = linears_joined(config, tensors)
        tensors = named_as_ours(family, spec.num_layers, tensors)
        tensors = weights_of(config, tensors)
        if has_senses and "output.weight" not in tensors and _may_be_tied(source.config):
            spec = replace(spec, tied_head=True)
    tensors = arranged(family, spec, tensors, is_gguf=isinstance(source, GGUFFile))
    if spec.linear_scales and isinstance(source, SafetensorsFolder):
        tensors = multiplied(spec, source.whole_config, tensors)
    if spec.tied_head:
        tensors.pop("output.weight", None)  # some files keep a copy of the tied matrix
    tensors = _without_zero_biases(spec, tensors)
    check_tensors(spec, tensors)
    return Model(spec, tensors, source)


def _with_quantisation(folder: SafetensorsFolder) -> Mapping[str, object]:
    """config.json, with what older checkpoints of modelopt say beside it."""
    config = folder.whole_config
    content = folder.read_beside(_QUANTISATION, _MAX_QUANTISATION_BYTES)
    if content is None or config.get("quantization_config") is not None:
        return config
    section = Metadata(_QUANTISATION, parse_json_object(content, _QUANTISATION))
    said = dict(section.section("quantization"))
    if said.get("quant_algo") is None:  # keys and values alone
        return config
    return {**config, "quantization_config": {**said, "quant_method": "modelopt"}}


def _without_zero_biases(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantisers have written a bias for each linear, of zeros where the model has none."""
    known = tensor_shapes(spec)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in known
        or not name.endswith(".bias")
        or len(tensor.shape) != 1
        or tensor.to_float32().any()
    }


def _may_be_tied(config: Metadata) -> bool:
    """Whether a model that sees may use its embedding as its head. Its decoder's type and its own
    have different defaults, and transformers writes both."""
    places = [config, config.section("text_config")] if "text_config" in config else [config]
    said = [place["tie_word_embeddings"] for place in places if "tie_word_embeddings" in place]
    return not said or True in said


def _make_model(name: str) -> Model:
    source = DummyModel(name)
    made = source.make_tensors()
    spec = spec_from_gguf(source.metadata, made)
    tensors = named_in_gguf(gguf_family(source.metadata), spec.num_layers, made)
    check_tensors(spec, tensors)
    return Model(spec, tensors, source)


class FileForm(NamedTuple):
    """What a model's file is, as other programs call it."""

    format: str  # "gguf" or "safetensors"; "" of a model that is made in memory
    quantization: str  # the mix that it is in, else the format of most of its weights


def form_of(model: Model) -> FileForm:
    """A mix is believed where the file has weights in its format: the numbers of some mixes mean
    others in forks of llama.cpp."""
    weights: Counter[str] = Counter()
    for tensor in model.tensors.values():
        weights[tensor.format.name] += tensor.num_weights
    said = model.metadata.get("general.file_type")
    mixes = (mix.name for mix in MIXES.values() if mix.file_type == said and mix.base in weights)
    formats = {GGUFFile: "gguf", SafetensorsFolder: "safetensors"}
    most = weights.most_common(1)[0][0]
    return FileForm(formats.get(type(model.source), ""), next(mixes, most))


class MemoryEstimate(NamedTuple):
    """Bytes a model takes. `weights`: as packed in the file; `float32_weights`: as the reference
    executor unpacks them."""

    weights: int
    float32_weights: int
    kv_per_token: int
    kv: int


def memory_estimate(model: Model, *, num_kv_tokens: int) -> MemoryEstimate:
    """What a model takes with room for so many tokens in its cache, in float32."""
    kv_per_token = 4 * model.spec.num_kv_elements
    return MemoryEstimate(
        weights=sum(tensor.nbytes for tensor in model.tensors.values()),
        float32_weights=4 * sum(tensor.num_weights for tensor in model.tensors.values()),
        kv_per_token=kv_per_token,
        kv=kv_per_token * num_kv_tokens,
    )


class NormHealth(NamedTuple):
    """One norm's weights at a glance; `problem` says what is suspicious, if anything is."""

    name: str
    low: float
    high: float
    mean: float
    problem: str | None


def norm_health(model: Model) -> list[NormHealth]:
    """Check every norm: broken conversions show there first."""
    return [
        _health(tensor) for name, tensor in model.tensors.items() if name.endswith("_norm.weight")
    ]


def _health(tensor: Tensor) -> NormHealth:
    with np.errstate(invalid="ignore"):
        weights = tensor.to_float32().astype(np.float64)
    finite = weights[np.isfinite(weights)]
    low, high, mean = (
        (float(finite.min()), float(finite.max()), float(finite.mean()))
        if finite.size
        else (np.nan, np.nan, np.nan)
    )
    problem = None
    if finite.size < weights.size:
        problem = f"{weights.size - finite.size} of {weights.size} weights are not finite"
    elif not finite.any():
        problem = "every weight is zero"
    elif max(-low, high) > LARGEST_SOUND_NORM:
        problem = f"a weight of {max(low, high, key=abs):g} is beyond {LARGEST_SOUND_NORM:g}"
    return NormHealth(tensor.name, low, high, mean, problem)


# ---- its tokenizer


_TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 16 << 20  # some tokenizer configs list every special token
_EOS = "eos_token_id"


def read_tokenizer(model: Model) -> Tokenizer | None:
    """The model's tokenizer, known to fit its vocabulary; None where it takes token ids alone."""
    source = model.source
    if isinstance(source, SafetensorsFolder):
        tokenizer = _folder_tokenizer(source)
    else:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocabulary_size)
    return tokenizer


class TokenizerFiles(NamedTuple):
    """What a folder says of its tokenizer."""

    content: bytes  # of tokenizer.json
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    chat_template: str | None  # of files of its own


def tokenizer_files(folder: SafetensorsFolder) -> TokenizerFiles | None:
    content = folder.read_beside(_TOKENIZER, _MAX_TOKENIZER_BYTES)
    if content is None:
        return None
    config = _read_config(folder, "tokenizer_config.json") or {}
    return TokenizerFiles(
        content, config, generation_config(folder), _chat_template(folder, config)
    )


def _chat_template(folder: SafetensorsFolder, config: Mapping[str, object]) -> str | None:
    """The template of files beside the tokenizer's; None: the config may have one."""
    template = template_of_files(lambda name: folder.read_beside(name, MAX_TEMPLATE_BYTES))
    if template is not None or config.get("chat_template") is not None:
        return template
    content = folder.read_beside("chat_template.json", 2 * MAX_TEMPLATE_BYTES)
    return None if content is None else template_of_processor(content)


def _folder_tokenizer(folder: SafetensorsFolder) -> Tokenizer | None:
    files = tokenizer_files(folder)
    if files is None:
        return None
    return Tokenizer.from_json(*files[:3], chat_template=files.chat_template)


def end_token_ids(model: Model, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a generation, of a model with or without a tokenizer."""
    if tokenizer is not None:
        named = tokenizer.end_token_ids
    elif isinstance(model.source, SafetensorsFolder):
        named = _named_ends(generation_config(model.source))
    elif "tokenizer.ggml.eos_token_id" in model.metadata:
        named = (model.metadata.integer("tokenizer.ggml.eos_token_id"),)
    else:
        named = ()
    known = range(model.spec.vocabulary_size)
    return tuple(dict.fromkeys(token for token in named if token in known))


def generation_config(folder: SafetensorsFolder) -> Mapping[str, object]:
    """generation_config.json; a folder without one says in config.json what ends a text."""
    config = _read_config(folder, "generation_config.json")
    if config is not None:
        return config
    return {_EOS: folder.config[_EOS]} if _EOS in folder.config else {}


def _named_ends(config: Mapping[str, object]) -> tuple[int, ...]:
    """One end token, or several, or none."""
    value = config.get(_EOS)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    return Metadata("the generation config", {_EOS: listed}).integers(_EOS)


def _read_config(folder: SafetensorsFolder, name: str) -> Mapping[str, object] | None:
    content = folder.read_beside(name, _MAX_CONFIG_BYTES)
    return None if content is None else parse_json_object(content, name)
