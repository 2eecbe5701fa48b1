"""BitNet models in every form that files have them in: those that the real tools wrote, and random
ones that are made here, one model in several forms."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from tests.fixture_files import FIXTURES

from quire.executors import reference
from quire.loader.gguf_writer import write_gguf
from quire.loader.tensor import Tensor
from quire.model.loading import load_model
from quire.quant.formats import format_named
from quire.quant.ternary import i2s_tail, pack_i2s

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

OURS = FIXTURES / "bitnet-published"
ALL = Path(__file__).parents[3] / "shared" / "fixtures" / "bitnet-published"  # beside a checkout

# By file: the golden logits, and how far the reference executor may be from them. Where the head is
# in blocks the tool rounds its activations; llama.cpp's formats take a scale for 256 activations.
# One activation of hf-packed-bitlinear lies between two codes, and a BLAS that sums in another
# order takes the other one: 4e-5. Activations that are not rounded at all would cost 6e-4.
FORMS = {
    "i2s.gguf": ("i2s", 1e-6),
    "i2s-b158.gguf": ("i2s_b158", 1e-6),
    "hf-bf16": ("hf_bf16", 1e-6),
    "hf-packed": ("hf_packed", 1e-6),
    "extra/hf-packed-bitlinear": ("hf_packed_bitlinear", 1e-4),
    "extra/i2s-embq6k.gguf": ("i2s_embq6k", 2e-4),
    "tq2.gguf": ("tq2", 2e-3),
    "extra/tq1.gguf": ("tq1", 2e-3),
    "extra/tq2-silu-upstream.gguf": ("tq2_silu_upstream", 2e-3),
    "extra/tq1-silu-upstream.gguf": ("tq1_silu_upstream", 2e-3),
    "extra/i2s-arm.gguf": ("i2s_arm", 1e-6),
}
CASES = [("a", form) for form in FORMS] + [
    ("c", form) for form in FORMS if "tq" not in form and "q6k" not in form
]


def packing_of(form: str) -> str | None:
    """What `i2s_packing` has to be for it."""
    return "arm" if "arm" in form else None


def published(model: str, name: str) -> Path:
    for folder in (OURS, ALL):
        if (folder / model / name).exists():
            return folder / model / name
    pytest.skip(f"{model}/{name} is not beside this checkout")


def golden(model: str, name: str) -> tuple[list[int], Floats]:
    extra = ALL / model / "extra" / "golden-extra.npz"
    files = [np.load(published(model, "golden.npz")), *([np.load(extra)] if extra.exists() else [])]
    found = {key: content[key] for content in files for key in content}
    if name not in found:
        pytest.skip(f"the logits of {model}'s {name} are not beside this checkout")
    return found["tokens"].tolist(), found[name]


def error(found: Floats, expected: Floats) -> float:
    """The normalised mean square error."""
    return float(np.square(found - expected).sum() / np.square(expected).sum())


def as_llama(source: Path, path: Path) -> Path:
    """The same matrices under the architecture `llama`: SiLU, interleaved rope, no sub-norms."""
    with load_model(source) as model:
        fields: dict[str, Any] = {"general.architecture": "llama"}
        for key in model.metadata:
            if key.startswith("bitnet-25."):
                fields["llama." + key.removeprefix("bitnet-25.")] = model.metadata[key]
        kept = [tensor for name, tensor in model.tensors.items() if "sub_norm" not in name]
        write_gguf(path, fields, kept)
    return path


# ---- rounding flips


@contextmanager
def smallest_margin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """How near the reference's activations come to where the next byte begins, in bytes: the
    smallest distance of each vector. An executor whose floats differ by less than that rounds
    every activation to the same byte."""
    margins: list[float] = []
    quantised = reference.quantised_by_token

    def recorded(x: Floats) -> tuple[Floats, np.float32]:
        codes, per_unit = quantised(x)
        exact = np.abs(x.astype(np.float64)) * np.float64(per_unit)
        margins.append(float(np.abs(exact % 1.0 - 0.5).min()))
        return codes, per_unit

    with monkeypatch.context() as patch:
        patch.setattr(reference, "quantised_by_token", recorded)
        yield margins


# ---- one model in several forms

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 512, 2, 4, 2, 64, 96
EPSILON, ROPE_BASE = 1e-5, 10_000.0
_SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
_NORMS = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
_SUB_NORMS = {"attn_sub_norm": HEADS * HEAD_DIM, "ffn_sub_norm": FFN}
_HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}


@dataclass(frozen=True)
class TernaryModel:
    """By GGUF's names without `.weight`; q and k as Hugging Face has them, halves rotated."""

    codes: Mapping[str, Codes]  # [out, in], each 0, 1 or 2 for -1, 0, 1
    scales: Mapping[str, np.float32]
    floats: Mapping[str, Floats]  # embedding and norms

    @property
    def has_sub_norms(self) -> bool:
        return "blk.0.attn_sub_norm" in self.floats

    def weights(self, name: str) -> Floats:
        signs = self.codes[name].astype(np.float32) - np.float32(1)
        return signs * self.scales[name]


def random_model(seed: int, *, sub_norms: bool = True) -> TernaryModel:
    """Scales are powers of two, which halves, bfloat16 and reciprocals keep as they are."""
    rng = np.random.default_rng(seed)
    codes, scales, floats = {}, {}, {}
    floats["token_embd"] = rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    floats["output_norm"] = _norm(rng, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in _SHAPES.items():
            codes[f"blk.{layer}.{name}"] = rng.integers(0, 3, shape, dtype=np.uint8)
            scales[f"blk.{layer}.{name}"] = np.float32(2.0 ** -int(rng.integers(3, 6)))
        for name, size in (_NORMS | (_SUB_NORMS if sub_norms else {})).items():
            floats[f"blk.{layer}.{name}"] = _norm(rng, size)
    return TernaryModel(codes, scales, floats)


def _norm(rng: np.random.Generator, size: int) -> Floats:
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)


def as_gguf(model: TernaryModel, path: Path, architecture: str, block_format: str) -> Path:
    fields: dict[str, str | int | float] = {"general.architecture": architecture}
    sizes = {
        "vocab_size": VOCABULARY,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": ROPE_BASE,
    }
    fields |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    fields["tokenizer.ggml.model"] = "none"
    tensors = [_float_tensor(name, values) for name, values in model.floats.items()]
    tensors += [_ternary_tensor(model, name, block_format) for name in model.codes]
    write_gguf(path, fields, tensors)
    return path


def _float_tensor(name: str, values: Floats) -> Tensor:
    data = np.ascontiguousarray(values).view(np.uint8).ravel()
    return Tensor(f"{name}.weight", values.shape, format_named("F32", name), data)


def _ternary_tensor(model: TernaryModel, name: str, block_format: str) -> Tensor:
    codes = model.codes[name]
    if block_format == "I2_S":
        data = np.concatenate([pack_i2s(codes), i2s_tail(model.scales[name])])
    else:
        kind = gguf.GGMLQuantizationType[block_format]
        data = np.ascontiguousarray(gguf.quants.quantize(model.weights(name), kind)).ravel()
    return Tensor(f"{name}.weight", codes.shape, format_named(block_format, name), data)


def permuted(model: TernaryModel) -> TernaryModel:
    """q and k as llama.cpp's converter writes them for the architecture `llama`: the halves of a
    head's rows interleaved, so that neighbours are rotated together."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    codes = {}
    for name, rows in model.codes.items():
        count = heads.get(name.rpartition(".")[2])
        if count is not None:
            halves = rows.reshape(count, 2, HEAD_DIM // 2, HIDDEN)
            rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
        codes[name] = rows
    return TernaryModel(codes, model.scales, model.floats)


def as_folder(
    model: TernaryModel, folder: Path, *, linear_class: str, mode: str, activation: str = "relu2"
) -> Path:
    """A checkpoint of Hugging Face."""
    folder.mkdir()
    config: dict[str, Any] = {
        "model_type": "bitnet" if model.has_sub_norms else "llama",
        "hidden_act": activation,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPSILON,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": linear_class,
            "quantization_mode": mode,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, npt.NDArray[Any]] = {
        _hf_name(name): values for name, values in model.floats.items()
    }
    for name in model.codes:
        if mode == "online":
            tensors[_hf_name(name)] = master_weights(model, name)
            continue
        scale = model.scales[name]
        tensors[_hf_name(name)] = _packed(model.codes[name])
        value = 1 / scale if linear_class == "bitlinear" else scale
        tensors[f"{_hf_name(name)}_scale"] = np.array([value], np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _hf_name(name: str) -> str:
    if name == "token_embd":
        return "model.embed_tokens.weight"
    if name == "output_norm":
        return "model.norm.weight"
    _, layer, kind = name.split(".")
    return f"model.layers.{layer}.{_HF_NAMES[kind]}.weight"


def _packed(codes: Codes) -> Codes:
    """Four rows a byte: r, r + out/4, r + 2·out/4 and r + 3·out/4, the first in the low bits."""
    quarters = codes.reshape(4, -1, codes.shape[1])
    first, second, third, fourth = quarters
    packed = first | second << 2 | third << 4 | fourth << 6
    return packed.astype(np.uint8)


def master_weights(model: TernaryModel, name: str) -> Floats:
    """Floats that training rounds to the codes: any size above half of the mean for ±1, below it
    for 0. The mean is not the model's scale."""
    codes = model.codes[name]
    rng = np.random.default_rng(len(name))
    zero = codes == 1
    sizes = np.where(zero, rng.uniform(-0.2, 0.2, codes.shape), rng.uniform(0.9, 1.1, codes.shape))
    signs = np.where(zero, 1.0, codes.astype(np.float64) - 1)
    return (sizes * signs * model.scales[name]).astype(np.float32)


def with_master_scales(model: TernaryModel) -> TernaryModel:
    """The model as its master weights are trained: a matrix's scale is the mean of their sizes."""
    means = {
        name: np.float32(np.abs(master_weights(model, name).astype(np.float64)).mean())
        for name in model.codes
    }
    return TernaryModel(model.codes, means, model.floats)


# ---- the mathematics, written as transformers has it

Doubles = npt.NDArray[np.float64]


class PlainModel:
    """A whole sequence at once in float64, but for the activations, which are rounded to bytes.
    q and k are as Hugging Face has them: a head's halves are rotated together."""

    def __init__(self, model: TernaryModel, *, relu2: bool) -> None:
        self._model = model
        self._relu2 = relu2

    def logits(self, tokens: Sequence[int]) -> Floats:
        state = self._model.floats["token_embd"][list(tokens)].astype(np.float64)
        for layer in range(LAYERS):
            state = state + self._attention(f"blk.{layer}.", state)
            state = state + self._feed_forward(f"blk.{layer}.", state)
        head = self._model.floats["token_embd"].T.astype(np.float64)
        return (self._norm("output_norm", state) @ head).astype(np.float32)

    def _attention(self, layer: str, state: Doubles) -> Doubles:
        x = self._norm(f"{layer}attn_norm", state)
        query, key, value = (
            self._linear(f"{layer}attn_{name}", x).reshape(len(x), -1, HEAD_DIM) for name in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        key, value = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(HEAD_DIM)
        position = np.arange(len(x))
        scores[:, position[:, None] < position] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        output = np.einsum("hqk,khd->qhd", shares, value).reshape(len(x), -1)
        return self._linear(f"{layer}attn_output", self._norm(f"{layer}attn_sub_norm", output))

    def _feed_forward(self, layer: str, state: Doubles) -> Doubles:
        x = self._norm(f"{layer}ffn_norm", state)
        gate, up = (self._linear(f"{layer}ffn_{name}", x) for name in ("gate", "up"))
        gate = np.maximum(gate, 0) ** 2 if self._relu2 else gate / (1 + np.exp(-gate))
        product = self._norm(f"{layer}ffn_sub_norm", gate * up)
        return self._linear(f"{layer}ffn_down", product)

    def _norm(self, name: str, x: Doubles) -> Doubles:
        if name not in self._model.floats:  # a sub-norm that the model lacks
            return x
        size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON)
        return np.asarray(x / size * self._model.floats[name])

    def _linear(self, name: str, x: Doubles) -> Doubles:
        per_unit = 127 / np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-5)
        rounded = np.clip(np.rint(x * per_unit), -128, 127)
        signs = self._model.codes[name].astype(np.float64) - 1
        return np.asarray(rounded @ signs.T / per_unit * float(self._model.scales[name]))

    @staticmethod
    def _rotated(x: Doubles) -> Doubles:
        frequencies = ROPE_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.arange(len(x))[:, None] * np.concatenate([frequencies, frequencies])
        first, second = np.split(x, 2, axis=-1)
        turned = np.concatenate([-second, first], axis=-1)
        return np.asarray(x * np.cos(angles)[:, None] + turned * np.sin(angles)[:, None])
