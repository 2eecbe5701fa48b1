"""as_llama_cpp: GGUF files of Ollama's own converters, under the names that llama.cpp's have.

They call some architectures, keys and tensors otherwise, leave keys out, and keep what sees or
hears in the same file, which is left out here: quire runs the decoder.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.loader.metadata import Lazy, Metadata
from quire.loader.tensor import Tensor

_LONG_GEMMA3 = 131_072  # contexts of those that were trained on shorter ones and then extended
_TOKENS = ("tokens", "scores", "token_type")  # of the tokenizer: one item a token
_WRONG_TOKENIZERS = ("", "default", "llama")
_NOT_OF_DECODER = ("v.", "mm.", "a.", "model.vision_tower.", "mtp.")  # tensors
_LAYER = re.compile(r"blk\.[0-9]+\.")
_KEYS_NOT_OF_DECODER = (
    *("vision.", "mm.", "audio.", "spatial_merge_size"),
    *("image_token_id", "image_token_index", "vision_start_token_id", "vision_end_token_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How the files of one architecture differ. Keys are those under the architecture's name."""

    architecture: str  # llama.cpp's
    markers: tuple[str, ...] = ()  # keys that such files alone have; they may see or hear instead
    marking_tensor: str = ""  # likewise
    keys: Mapping[str, str | None] = field(default_factory=dict)  # None: says nothing that is used
    missing: Mapping[str, object] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors in layers
    tokenizer: Mapping[str, str] = field(default_factory=dict)  # what files say wrongly


_DELTA_NET = _Form(
    architecture="qwen35",
    markers=("mrope_sections", "norm_top_k_prob", "rope.mrope_interleaved", "ssm.v_head_reordered"),
    keys={
        **dict.fromkeys(("mrope_sections", "rope.mrope_section", "rope.mrope_interleaved")),
        "norm_top_k_prob": "expert_weights_norm",
    },
    names={"ssm_dt": "ssm_dt.bias"},
)
_FORMS = {
    "gemma3": _Form(
        architecture="gemma3",
        markers=("rope.global.freq_base", "rope.local.freq_base"),
        keys={
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
        },
        missing={
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        },
    ),
    "gemma4": _Form(
        architecture="gemma4",
        names={"ffn_gate_inp.per_expert_scale": "ffn_down_exps.scale"},
        tokenizer={"model": "gemma4"},
    ),
    "gptoss": _Form(
        architecture="gpt-oss",
        missing={"rope.scaling.type": "yarn"},
        names={
            "attn_out.weight": "attn_output.weight",
            "attn_out.bias": "attn_output.bias",
            "attn_sinks": "attn_sinks.weight",
            "ffn_norm.weight": "post_attention_norm.weight",
        },
        tokenizer={"pre": "gpt-4o"},
    ),
    "llama4": _Form(
        architecture="llama4",
        markers=("use_qk_norm", "attention.chunk_size"),
        keys={"use_qk_norm": None, "attention.chunk_size": None},  # as they are taken for granted
    ),
    "mistral3": _Form(
        architecture="mistral3",
        markers=("rope.scaling.beta_fast", "rope.scaling.mscale_all_dim", "rope.scaling_beta"),
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale": None,  # 1, as llama.cpp has it
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        tokenizer={"pre": "tekken"},
    ),
    "olmo3": _Form(architecture="olmo2"),
    "lfm2": _Form(
        architecture="lfm2", marking_tensor="output_norm.weight", tokenizer={"pre": "lfm2"}
    ),
    # Its sizes of heads are under the names of older files; those of the cached vector are named
    # as llama.cpp names the heads'.
    "glm4moelite": _Form(
        architecture="deepseek2",
        keys={"attention.key_length_mla": None, "attention.value_length_mla": None},
        tokenizer={"pre": "glm4"},
    ),
    "qwen25vl": _Form(architecture="qwen2vl", keys={"rope.mrope_section": None}),
    "qwen3vl": _Form(architecture="qwen3vl", keys={"rope.mrope_section": None}),
    "qwen3vlmoe": _Form(architecture="qwen3vlmoe", keys={"rope.mrope_section": None}),
    "qwen35": _DELTA_NET,
    "qwen35moe": replace(_DELTA_NET, architecture="qwen35moe"),
    "qwen3next": replace(_DELTA_NET, architecture="qwen3next"),
}


def as_llama_cpp(
    metadata: Metadata, tensors: Mapping[str, Tensor]
) -> tuple[Metadata, dict[str, Tensor]]:
    """A file's metadata and tensors; as they are where Ollama's converters did not write it."""
    name = metadata.get("general.architecture")
    form = _FORMS.get(name) if isinstance(name, str) else None
    if form is None or not _is_of_ollama(f"{name}.", form, metadata, tensors):
        return metadata, dict(tensors)
    kept = _renamed(form, metadata, tensors)
    changes = {
        "general.architecture": form.architecture,
        **_keys(f"{name}.", form, metadata),
        **_adjusted_lfm2(form, kept),
        **_tokenizer(form, metadata, kept),
    }
    return metadata.replaced(changes), kept


def _is_of_ollama(
    prefix: str, form: _Form, metadata: Metadata, tensors: Mapping[str, Tensor]
) -> bool:
    if prefix != f"{form.architecture}." or form.marking_tensor in tensors:
        return True
    if any(prefix + key in metadata for key in form.markers):
        return True
    return any(name.startswith(_NOT_OF_DECODER) for name in tensors)


def _keys(prefix: str, form: _Form, metadata: Metadata) -> dict[str, object]:
    """What changes under the architecture's name."""
    changes: dict[str, object] = {}
    for name in metadata:
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            changes.setdefault(name, None)
            ours = form.keys.get(key, key)
            value: Any = metadata[name]
            is_empty = isinstance(value, str) and not value  # the kind of a scaling there is not
            if ours is not None and not key.startswith(_KEYS_NOT_OF_DECODER) and not is_empty:
                llama_cpps = f"{form.architecture}.{ours}"
                other: Any = metadata.get(llama_cpps) if llama_cpps != name else None
                if other is not None and not np.array_equal(other, value):
                    raise metadata.error(name, f"is another value than that of {llama_cpps}")
                changes[llama_cpps] = value
    for key, value in form.missing.items():
        changes.setdefault(f"{form.architecture}.{key}", value)
    if form.architecture == "gemma3":
        changes |= _extended_gemma3(changes)
    return changes


def _extended_gemma3(fields: Mapping[str, object]) -> dict[str, object]:
    """The scaling of the larger ones' rope, which files do not say."""
    context, key = fields.get("gemma3.context_length"), "gemma3.rope.scaling.type"
    if key in fields or not isinstance(context, int) or context < _LONG_GEMMA3:
        return {}
    return {key: "linear", "gemma3.rope.scaling.factor": 8.0}


def _adjusted_lfm2(form: _Form, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """The size of the feed-forward, which files give as it was before it was adjusted."""
    gate = tensors.get("blk.0.ffn_gate.weight")
    if form.architecture != "lfm2" or gate is None or not gate.shape:
        return {}
    return {"lfm2.feed_forward_length": gate.shape[0]}


def _tokenizer(form: _Form, metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Vocabularies may have tokens of pictures behind those that the embedding has."""
    changes: dict[str, object] = {
        f"tokenizer.ggml.{key}": name
        for key, name in form.tokenizer.items()
        if _is_wrong(metadata.get(f"tokenizer.ggml.{key}"))
    }
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        for name in _TOKENS:
            key = f"tokenizer.ggml.{name}"
            if key in metadata:
                changes[key] = Lazy(_first(metadata, key, embedding.shape[0]))
    return changes


def _is_wrong(tokenizer: object) -> bool:
    """What is no text is left for whoever reads the field to refuse."""
    return tokenizer is None or (isinstance(tokenizer, str) and tokenizer in _WRONG_TOKENIZERS)


def _first(metadata: Metadata, key: str, count: int) -> Callable[[], object]:
    def decode() -> object:
        items = metadata[key]
        return items[:count] if isinstance(items, tuple | np.ndarray) else items

    return decode


def _renamed(form: _Form, metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        if theirs.startswith(_NOT_OF_DECODER):
            continue
        layer = _LAYER.match(theirs)
        part = theirs[layer.end() :] if layer else ""
        name = f"{layer[0]}{form.names[part]}" if layer and part in form.names else theirs
        if name in kept:
            raise metadata.error(f"tensor {name}", "is there by Ollama's and by llama.cpp's name")
        kept[name] = tensor if name == theirs else replace(tensor, name=name)
    return kept
