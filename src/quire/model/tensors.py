"""From the tensors of a file to those of a ModelSpec: names of Hugging Face, and what files fuse,
stack, transpose or store less one. Nothing is copied: a tensor made of others reads their bytes.
"""

import bisect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.metadata import Metadata
from quire.loader.reading import Bytes, Region
from quire.loader.tensor import Tensor
from quire.model.family import (
    ExpertLayout,
    Family,
)
from quire.model.spec import Attention, Experts, Latent, Layer, ModelSpec
from quire.model.states import StateKind, StateMixer
from quire.quant.formats import format_named

# ---- names: ours are GGUF's, and these tables give Hugging Face's in ours

_EMBEDDINGS = ("embed_in", "embeddings", "tok_embeddings", "wte", "word_embeddings")
_OUTSIDE_LAYERS = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "wpe.weight": "position_embd.weight",
    **{f"word_embeddings_layernorm.{x}": f"token_embd_norm.{x}" for x in ("weight", "bias")},
    # Phi's, GPT-NeoX's, InternLM's, Falcon's and EXAONE's
    **{
        f"{name}.{x}": f"output_norm.{x}"
        for name in ("final_layernorm", "final_layer_norm", "ln_f", "norm_f")
        for x in ("weight", "bias")
    },
    **{f"{name}.weight": "token_embd.weight" for name in _EMBEDDINGS},
    **{f"{name}.weight": "output.weight" for name in ("embed_out", "output")},
    "embedding_norm.weight": "output_norm.weight",  # LFM2's
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}

# Inside layer N: model.layers.N.<left>.<weight, bias or weight_scale> is blk.N.<right>.<the same>.
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",  # the same, in the first BitNet checkpoints
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_gate_up",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.shared_expert{s}.{name}_proj": f"ffn_{name}_shexp"
        for s in ("", "s")
        for name in ("gate", "up", "down")
    },
    # Gated DeltaNet's and Mamba's
    **{f"linear_attn.in_proj_{x}": "ssm_in" for x in ("qkv", "qkvz")},
    "linear_attn.in_proj_z": "ssm_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    **{f"{module}.in_proj": "ssm_in" for module in ("mamba", "mixer")},
    **{
        f"{module}.{theirs}": ours
        for module in ("linear_attn", "mamba", "mixer")
        for theirs, ours in (
            ("conv1d", "ssm_conv1d"),
            ("x_proj", "ssm_x"),
            ("dt_proj", "ssm_dt"),
            *((f"{x}_layernorm", f"ssm_{x}_norm") for x in ("dt", "b", "c")),
            ("norm", "ssm_norm"),
            ("out_proj", "ssm_out"),
        )
    },
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{
        f"feed_forward.shared_expert.{name}_proj": f"ffn_{name}_shexp"
        for name in ("gate", "up", "down")
    },
}

# Parameters without a suffix, whole.
_WHOLE_IN_LAYERS = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.expert_bias": "exp_probs_b.bias",  # Ling's
    "mlp.e_score_correction_bias": "exp_probs_b.bias",  # K-EXAONE's
    "mlp.expert_bias": "exp_probs_b.bias",  # Trinity's
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",  # Ernie's
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mixer.experts.{name}_proj": f"ffn_{name}_exps.weight" for name in ("up", "down")},
    **{
        f"{module}.{theirs}": ours
        for module in ("linear_attn", "mamba", "mixer")
        for theirs, ours in (
            ("A_log", "ssm_a_log.weight"),
            ("D", "ssm_d.weight"),
            ("dt_bias", "ssm_dt.bias"),
        )
    },
    **{f"mlp.act_fn.{name}": f"ffn_xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    **{
        f"{module}.experts.{theirs}": ours
        for module in ("mlp", "feed_forward")
        for theirs, ours in (
            ("gate_up_proj", "ffn_gate_up_exps.weight"),
            ("gate_up_proj_bias", "ffn_gate_up_exps.bias"),
            ("down_proj", "ffn_down_exps.weight"),
            ("down_proj_bias", "ffn_down_exps.bias"),
            *(
                (f"{proj}_proj_{part}", f"ffn_{proj}_exps.{part}")  # MXFP4's
                for proj in ("gate_up", "down")
                for part in ("blocks", "scales")
            ),
        )
    },
}
_EXPERT_MATRICES = {
    **{f"{name}_proj": name for name in ("gate", "up", "down")},
    "w1": "gate",
    "w3": "up",
    "w2": "down",  # Mixtral's
}

# One expert of a stack, or the norm of one head.
_STACKED = re.compile(r"(blk\.\d+\.(?:ffn_\w+_exps|attn_[qk]_norm))\.(\d+)\.weight", re.ASCII)
# Numbers that files have of xielu: alphas are kept as what softplus makes them of.
_XIELU = re.compile(r"(blk\.\d+\.ffn_xielu)\.(alpha_p|alpha_n|beta|eps)", re.ASCII)
_XIELU_DEFAULTS = {"beta": 0.5, "eps": -1e-6}
_IN_OUR_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([\w.]+)\.(\w+)", re.ASCII)
_BARE_IN_GGUF = re.compile(
    r"blk\.[0-9]{1,4}\.(ssm_[ad]|ffn_norm)", re.ASCII
)  # names without a suffix
_PREFIX = re.compile(
    r"(language_model\.)?((model|gpt_neox|transformer)\.)?(backbone\.)?((language|text)_model\.)?"
)
_LAYER = re.compile(r"(?:layers|h|blocks)\.(0|[1-9][0-9]{0,3})\.(.+)")
_PART = re.compile(r"(.+)\.(weight|bias|weight_scale)")
_HEAD_NORM = re.compile(r"self_attn\.([qk])_layernorm\.norms\.(0|[1-9][0-9]{0,4})\.weight")
_EXPERT = re.compile(
    r"(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts\.(0|[1-9][0-9]{0,4})\.(\w+)\.weight"
)

# What predicts further tokens, where it is not a layer behind the last.
_EXTRA = re.compile(r"mtp(_\w+)?\..+")
# Tables that old exporters saved although they follow from the configuration.
_DERIVED = re.compile(
    r"((layers|h)\.[0-9]+\.(self_attn|attention|attn\.attention)\.)?(rotary_emb|rotary)\.inv_freq"
    r"|layers\.[0-9]+\.attention\.(bias|masked_bias)"  # GPT-NeoX's mask
    r"|h\.[0-9]+\.attn\.(attention\.)?(bias|masked_bias)"  # GPT-2's
)
# Of models that see or hear: quire runs their decoder.
_NOT_OF_DECODER = re.compile(
    r"(model\.)?((visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector"
    r"|embed_vision|embed_audio|connector)\..+|image_newline)"
)


def from_hugging_face(family: Family, name: str) -> str | None:
    """Our name of a Hugging Face tensor, or None if it holds nothing a model needs.

    A name we do not know is an error: leaving a weight out would give wrong text, silently.
    """
    prefix = _PREFIX.match(name)
    assert prefix is not None  # it may be empty
    rest = name[prefix.end() :]  # checkpoints of the bare decoder leave the prefix out
    if _DERIVED.fullmatch(rest) or (family.has_extra_layers and _EXTRA.fullmatch(rest)):
        return None
    inside = _LAYER.fullmatch(rest)
    ours = _OUTSIDE_LAYERS.get(rest) if inside is None else _in_layer(family, inside[2])
    if ours is None:
        raise UnsupportedModelError(
            f"tensor {name!r} is not part of the {family.name} model as quire runs it"
        )
    return ours if inside is None else f"blk.{inside[1]}.{ours}"


def _in_layer(family: Family, name: str) -> str | None:
    if name in _WHOLE_IN_LAYERS:
        return _WHOLE_IN_LAYERS[name]
    expert = _EXPERT.fullmatch(name)
    if expert is not None and expert[2] in _EXPERT_MATRICES:
        return f"ffn_{_EXPERT_MATRICES[expert[2]]}_exps.{expert[1]}.weight"
    head = _HEAD_NORM.fullmatch(name)  # of StableLM
    if head is not None:
        return f"attn_{head[1]}_norm.{head[2]}.weight"
    part = _PART.fullmatch(name)
    ours = None if part is None else family.config_names.get(part[1], _IN_LAYERS.get(part[1]))
    return None if part is None or ours is None else f"{ours}.{part[2]}"


def of_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the decoder, of a model that sees or hears."""
    return {name: t for name, t in tensors.items() if not _NOT_OF_DECODER.fullmatch(name)}


def named_as_ours(
    family: Family, num_layers: int, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A checkpoint's tensors under our names; what it has for training alone is left out."""
    found: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        is_extra = family.has_extra_layers and _their_layer(theirs) >= num_layers
        name = None if is_extra else from_hugging_face(family, theirs)
        if name is None:
            continue
        if name in found:
            raise ModelFileError(f"tensor {theirs!r} appears twice, as {name}")
        found[name] = replace(tensor, name=name)
    return found


def _their_layer(name: str) -> int:
    """The layer that a tensor of Hugging Face is of; -1: none."""
    prefix = _PREFIX.match(name)
    assert prefix is not None
    inside = _LAYER.fullmatch(name[prefix.end() :])
    return -1 if inside is None else int(inside[1])


def _layer_of(name: str) -> int:
    """The layer that a tensor is of; -1: none."""
    inside = _IN_OUR_LAYER.fullmatch(name)
    return -1 if inside is None else int(inside[1])


def named_in_gguf(
    family: Family, num_layers: int, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A GGUF file's tensors under the names that all families share."""
    found: dict[str, Tensor] = {}
    has_others = family.gguf_names_if is None or f"blk.0.{family.gguf_names_if}.weight" in tensors
    names = family.gguf_names if has_others else {}
    for theirs, tensor in tensors.items():
        if family.has_extra_layers and _layer_of(theirs) >= num_layers:
            continue
        name = f"{theirs}.weight" if _BARE_IN_GGUF.fullmatch(theirs) else theirs
        inside, (stem, _, suffix) = _IN_OUR_LAYER.fullmatch(theirs), theirs.rpartition(".")
        if inside is not None and inside[2] in names:
            name = f"blk.{inside[1]}.{names[inside[2]]}.{inside[3]}"
        elif stem in names:
            name = f"{names[stem]}.{suffix}"
        found[name] = tensor if name == theirs else replace(tensor, name=name)
    return found


# ---- tensors made of others

Words = npt.NDArray[np.unsignedinteger]  # weights as they stand


class _Joined:
    """Byte ranges of tensors, one after the other."""

    def __init__(self, pieces: Sequence[tuple[Tensor, int, int]]) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(stop - start for _, start, stop in pieces))
        self.size = self._ends[-1]

    def read(self, start: int, stop: int) -> Bytes:
        found = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            tensor, _, last = self._pieces[index]
            begin = last - (self._ends[index] - start)
            end = min(last, begin + stop - start)
            found.append(tensor.read(begin, end))
            start += end - begin
            index += 1
        return np.concatenate(found) if found else np.empty(0, np.uint8)


class Slabs:
    """Bytes that are computed, one slab of equal size after the other; the last is kept."""

    def __init__(self, count: int, slab_bytes: int, make: Callable[[int], Bytes]) -> None:
        self.size = count * slab_bytes
        self._slab_bytes = slab_bytes
        self._make = make
        self._last: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))

    def read(self, start: int, stop: int) -> Bytes:
        size = self._slab_bytes
        found = []
        for index in range(start // size, -(-stop // size)):
            begin = index * size
            found.append(self._slab(index)[max(0, start - begin) : stop - begin])
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    def _slab(self, index: int) -> Bytes:
        if self._last[0] != index:
            self._last = (index, self._make(index))
        return self._last[1]


def _joined(name: str, shape: tuple[int, ...], pieces: Sequence[tuple[Tensor, int, int]]) -> Tensor:
    source = _Joined(pieces)
    return Tensor(name, shape, pieces[0][0].format, Region(source, 0, source.size))


def _rows(name: str, tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows of a matrix, or a part of a vector."""
    _check_divisible(tensor)
    per_row = tensor.nbytes // tensor.shape[0]
    shape = (stop - start, *tensor.shape[1:])
    return _joined(name, shape, [(tensor, start * per_row, stop * per_row)])


def _half_rows(name: str, tensor: Tensor, half: int) -> Tensor:
    """One half of the rows of every matrix of a stack: [n, 2 * out, ...] as [n, out, ...]."""
    _check_divisible(tensor)
    count, double = tensor.shape[:2]
    per_matrix = tensor.nbytes // count
    size = per_matrix // 2
    pieces = [
        (tensor, index * per_matrix + half * size, index * per_matrix + (half + 1) * size)
        for index in range(count)
    ]
    return _joined(name, (count, double // 2, *tensor.shape[2:]), pieces)


def _every_other_row(name: str, tensor: Tensor, first: int) -> Tensor:
    """Every second row of every matrix of a stack: [n, 2 * out, ...] as [n, out, ...]."""
    count, double = tensor.shape[:2]
    if double % 2:
        raise ModelFileError(f"tensor {tensor.name} has {double} rows: gate and up take turns")
    size = tensor.nbytes // count

    def make(index: int) -> Bytes:
        rows = tensor.read(index * size, (index + 1) * size).reshape(double, -1)
        return np.ascontiguousarray(rows[first::2]).ravel()

    source = Slabs(count, size // 2, make)
    shape = (count, double // 2, *tensor.shape[2:])
    return Tensor(name, shape, tensor.format, Region(source, 0, source.size))


def _stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors:
        _check_divisible(tensor)
        if tensor.shape != first.shape or tensor.format is not first.format:
            raise UnsupportedModelError(
                f"tensor {tensor.name} differs from {first.name} in shape or type: experts of one "
                "layer must be alike"
            )
    pieces = [(tensor, 0, tensor.nbytes) for tensor in tensors]
    return _joined(name, (len(tensors), *first.shape), pieces)


def _remade(
    name: str, tensor: Tensor, shape: tuple[int, ...], take: Callable[[Words], Words]
) -> Tensor:
    """A stack of arrays, each of them made of one array of `tensor` by `take`."""
    if not tensor.format.is_float:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has type {tensor.format.name}; quire reads F32, F16 and BF16 "
            "where matrices are transposed or columns alternate"
        )
    count, width = tensor.shape[0], tensor.format.block_bytes
    slab_bytes = tensor.nbytes // count

    def make(index: int) -> Bytes:
        raw = tensor.read(index * slab_bytes, (index + 1) * slab_bytes)
        words = raw.view(f"<u{width}").reshape(tensor.shape[1:])
        return np.ascontiguousarray(take(words)).ravel().view(np.uint8)

    source = Slabs(count, math.prod(shape[1:]) * width, make)
    return Tensor(name, shape, tensor.format, Region(source, 0, source.size))


def _transposed(tensor: Tensor) -> Tensor:
    in_size, out_size = tensor.shape
    stack = replace(tensor, shape=(1, in_size, out_size))
    made = _remade(tensor.name, stack, (1, out_size, in_size), _columns_as_rows(slice(None)))
    return replace(made, shape=(out_size, in_size))


Floats = npt.NDArray[np.float32]


def _with_offset(tensor: Tensor, offset: float) -> Tensor:
    return computed(tensor.name, tensor, lambda x: x + np.float32(offset))


def computed(name: str, tensor: Tensor, function: Callable[[Floats], Floats]) -> Tensor:
    """A function of a tensor's floats, as F32."""
    source = Slabs(
        1,
        4 * tensor.num_weights,
        lambda _: function(tensor.to_float32()).astype("<f4").ravel().view(np.uint8),
    )
    kind = format_named("F32", tensor.name)
    return Tensor(name, tensor.shape, kind, Region(source, 0, source.size))


def _check_divisible(tensor: Tensor) -> None:
    if tensor.format.tail_bytes:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has type {tensor.format.name}, whose scale is for the whole "
            "tensor: it cannot be divided"
        )


# ---- what files fuse


def arranged(
    family: Family, spec: ModelSpec, tensors: Mapping[str, Tensor], *, is_gguf: bool
) -> dict[str, Tensor]:
    """The tensors as the spec names them: fused ones divided, experts stacked."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    of_xielu: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stacked, number = _STACKED.fullmatch(name), _XIELU.fullmatch(name)
        if number is not None:
            of_xielu.setdefault(f"{number[1]}.weight", {})[number[2]] = tensor
        elif stacked is not None:
            stacks.setdefault(f"{stacked[1]}.weight", {})[int(stacked[2])] = tensor
        elif 0 <= _layer_of(name) < spec.num_layers:
            _check_has_rows(tensor)
            if family.transposes_matrices and not is_gguf and len(tensor.shape) == 2:
                tensor = _transposed(tensor)
            for part in _parts(family, spec, tensor, is_gguf):
                found[part.name] = part
        else:
            found[name] = tensor
    for name, experts in stacks.items():
        if sorted(experts) != list(range(len(experts))):
            raise ModelFileError(f"{name}: the experts are not numbered from 0 on")
        found[name] = _stack(name, [experts[index] for index in range(len(experts))])
    found |= {name: _xielu_numbers(name, parts) for name, parts in of_xielu.items()}
    if family.has_bare_norms:
        found |= _ones(spec)
    if family.norm_offset and not is_gguf:
        for name, tensor in found.items():
            if name.endswith("_norm.weight") and not name.endswith("ssm_norm.weight"):
                found[name] = _with_offset(tensor, family.norm_offset)
    return found


def _xielu_numbers(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """As executors take them: softplus of alpha_p, beta plus softplus of alpha_n, beta, epsilon."""
    numbers = dict(_XIELU_DEFAULTS)
    for part, tensor in parts.items():
        if tensor.num_weights != 1:
            raise ModelFileError(
                f"tensor {tensor.name} has shape {list(tensor.shape)}, expected one number"
            )
        numbers[part] = float(tensor.to_float32().ravel()[0])
    for part in ("alpha_p", "alpha_n"):
        if part not in numbers:
            raise ModelFileError(f"tensor {name.replace('weight', part)} is missing")
    beta = numbers["beta"]
    positive, other = (np.logaddexp(0.0, numbers[part]) for part in ("alpha_p", "alpha_n"))
    made = np.array([positive, beta + other, beta, numbers["eps"]], "<f4")
    return Tensor(name, made.shape, format_named("F32", name), made.view(np.uint8))


def xielu_in_gguf(metadata: Metadata, num_layers: int) -> dict[str, Tensor]:
    """What GGUF files keep in metadata: a number for each layer, or one for all."""
    found: dict[str, Tensor] = {}
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{part}"
        is_listed = isinstance(metadata.get(key), np.ndarray)
        numbers = metadata.numbers(key) if is_listed else (metadata.number(key),) * num_layers
        if len(numbers) != num_layers:
            raise ModelFileError(f"{key} has {len(numbers)} numbers for {num_layers} layers")
        for layer, number in enumerate(numbers):
            name, data = f"blk.{layer}.ffn_xielu.{part}", np.array([number], "<f4")
            found[name] = Tensor(name, (1,), format_named("F32", name), data.view(np.uint8))
    return found


def _ones(spec: ModelSpec) -> dict[str, Tensor]:
    """The weights of norms of halves and of the last one."""
    names = ["output_norm.weight"]
    for layer in range(spec.num_layers):
        names += [f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight"]
    ones = np.ones(spec.hidden_size, "<f4").view(np.uint8)
    shape = (spec.hidden_size,)
    return {name: Tensor(name, shape, format_named("F32", name), ones) for name in names}


def _check_has_rows(tensor: Tensor) -> None:
    if not tensor.shape:
        raise ModelFileError(f"tensor {tensor.name} has no dimensions")


def _parts(family: Family, spec: ModelSpec, tensor: Tensor, is_gguf: bool) -> Iterator[Tensor]:
    """The tensors that one of a layer's holds: mostly itself."""
    inside = _IN_OUR_LAYER.fullmatch(tensor.name)
    assert inside is not None
    index, stem, suffix = inside.groups()
    prefix, layer = f"blk.{index}.", spec.layers[int(index)]
    state = layer.state
    part = layer.mixer if isinstance(layer.mixer, Attention) else None
    match stem:
        case "attn_norm" if layer.mixer is None:  # files have one name for norms before any half
            yield replace(tensor, name=f"{prefix}ffn_norm.{suffix}")
        case _ if state is not None and _is_of_state(stem, part):
            yield from _state_parts(tensor, prefix, stem, suffix, state)
        case "attn_qkv" if part is not None and family.grouped_qkv and not is_gguf:
            yield from _divided_groups(tensor, prefix, suffix, part)
        case "attn_qkv" if part is not None:
            yield from _divided_qkv(tensor, prefix, suffix, part)
        case "attn_q" if part is not None and _has_gate_within(tensor, part):
            sizes = {"attn_q": part.head_dim, "attn_gate": part.value_dim}
            yield from _divided_in_turns(tensor, prefix, suffix, part.num_heads, sizes)
        case "ffn_gate_up":
            half = tensor.shape[0] // 2
            yield _rows(f"{prefix}ffn_gate.{suffix}", tensor, 0, half)
            yield _rows(f"{prefix}ffn_up.{suffix}", tensor, half, 2 * half)
        case "ffn_gate_up_exps":
            layout = _layout(family, tensor, spec.hidden_size, 1)
            yield from _divided_experts(layout, tensor, prefix, suffix)
        case "ffn_down_exps" if not is_gguf and _is_transposed(family, spec, tensor, suffix):
            yield from _transposed_down(tensor)
        case "ffn_gate_up_shexp" | "ffn_down_shexp":
            yield from _shared_parts(tensor, layer, prefix, stem, suffix)
        case "attn_kv_b" if part is not None and part.latent is not None:
            yield from _divided_kv_b(tensor, prefix, part, part.latent)
        case "attn_k" | "attn_v" | "attn_k_norm" if part is not None and part.kv_layer is not None:
            return  # files keep what layers that share keys and values do not use
        case "ffn_gate_inp_shexp" | "exp_probs_b" if tensor.shape[0] == 1 and len(tensor.shape) > 1:
            yield replace(tensor, shape=tensor.shape[1:])  # a matrix of one row
        case _:
            yield tensor


def _has_gate_within(tensor: Tensor, part: Attention) -> bool:
    """Whether a query's matrix has the rows of the output's gate too, as Qwen's do."""
    return part.has_output_gate and tensor.shape[0] != part.query_size


def _divided_qkv(tensor: Tensor, prefix: str, suffix: str, part: Attention) -> Iterator[Tensor]:
    values = part.num_kv_heads * part.value_dim
    sizes = {"attn_q": part.query_size, "attn_k": part.kv_size, "attn_v": values}
    if tensor.shape[0] != sum(sizes.values()):
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected "
            f"{sum(sizes.values())} rows: queries, keys and values"
        )
    start = 0
    for name, size in sizes.items():
        yield _rows(f"{prefix}{name}.{suffix}", tensor, start, start + size)
        start += size


def _divided_groups(tensor: Tensor, prefix: str, suffix: str, part: Attention) -> Iterator[Tensor]:
    """Of each key head in turn: the queries that use it, its key and its value."""
    shared, size = part.num_heads // part.num_kv_heads, part.head_dim
    sizes = {"attn_q": shared * size, "attn_k": size, "attn_v": size}
    yield from _divided_in_turns(tensor, prefix, suffix, part.num_kv_heads, sizes)


def _divided_in_turns(
    tensor: Tensor, prefix: str, suffix: str, count: int, sizes: Mapping[str, int]
) -> Iterator[Tensor]:
    """Tensors whose rows take turns, `count` times: so many of each."""
    whole = sum(sizes.values())
    if tensor.shape[0] != count * whole:
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {count * whole} rows: "
            f"{', '.join(sizes)}"
        )
    _check_divisible(tensor)
    row_bytes = tensor.nbytes // tensor.shape[0]
    start = 0
    for name, size in sizes.items():
        pieces = [
            (tensor, (turn * whole + start) * row_bytes, (turn * whole + start + size) * row_bytes)
            for turn in range(count)
        ]
        yield _joined(f"{prefix}{name}.{suffix}", (count * size, *tensor.shape[1:]), pieces)
        start += size


_OF_STATES = frozenset(
    {"ssm_in", "ssm_ba", "ssm_conv1d", "ssm_norm", "ssm_a", "ssm_a_log", "ssm_d"}
)
_NAMED_AS_ATTENTION = frozenset({"attn_qkv", "attn_gate"})  # of DeltaNets in GGUF


def _is_of_state(stem: str, beside: Attention | None) -> bool:
    return stem in _OF_STATES or (beside is None and stem in _NAMED_AS_ATTENTION)


def _state_parts(
    tensor: Tensor, prefix: str, stem: str, suffix: str, part: StateMixer
) -> Iterator[Tensor]:
    each = part.num_heads // part.num_groups  # heads of a group
    values = each * part.value_dim
    match stem:
        case "attn_qkv":
            yield replace(tensor, name=f"{prefix}ssm_in.{suffix}")
        case "attn_gate":
            yield replace(tensor, name=f"{prefix}ssm_gate.{suffix}")
        case "ssm_ba" if not part.is_tiled:
            sizes = {"ssm_beta": each, "ssm_alpha": each}
            yield from _divided_in_turns(tensor, prefix, suffix, part.num_groups, sizes)
        case "ssm_in" if part.kind is StateKind.MAMBA:
            sizes = {
                "ssm_gate": part.output_size,
                "ssm_in": part.num_channels,
                "ssm_alpha": part.num_heads,
            }
            yield from _divided_in_turns(tensor, prefix, suffix, 1, sizes)
        case "ssm_in" if part.kind is StateKind.MAMBA_1:
            sizes = {"ssm_in": part.output_size, "ssm_gate": part.output_size}
            yield from _divided_in_turns(tensor, prefix, suffix, 1, sizes)
        case "ssm_in" if part.kind is StateKind.DELTA_NET and _is_by_group(tensor, part):
            sizes = {"query": part.key_dim, "key": part.key_dim, "value": values, "gate": values}
            divided = _divided_in_turns(tensor, prefix, suffix, part.num_groups, sizes)
            *channels, gate = divided
            pieces = [(piece, 0, piece.nbytes) for piece in channels]
            shape = (part.num_channels, *tensor.shape[1:])
            yield _joined(f"{prefix}ssm_in.{suffix}", shape, pieces)
            yield replace(gate, name=f"{prefix}ssm_gate.{suffix}")
        case "ssm_conv1d" if len(tensor.shape) == 3 and tensor.shape[1] == 1:
            yield replace(tensor, shape=(tensor.shape[0], tensor.shape[2]))
        case "ssm_a_log":
            yield computed(f"{prefix}ssm_a.weight", tensor, lambda x: -np.exp(x))
        case "ssm_a" if part.kind is StateKind.MAMBA_1:
            yield tensor  # a row for each value
        case "ssm_a" | "ssm_d" | "ssm_norm":
            yield replace(tensor, shape=(math.prod(tensor.shape),))  # files may have two dimensions
        case _:
            yield tensor


def _is_by_group(tensor: Tensor, part: StateMixer) -> bool:
    """Whether queries, keys, values and gates of each group follow each other."""
    return tensor.shape[0] != part.num_channels and not part.is_tiled


def _shared_parts(
    tensor: Tensor, layer: Layer, prefix: str, stem: str, suffix: str
) -> Iterator[Tensor]:
    """Granite's shared feed-forward, which is a layer's only one where there are no experts."""
    own = "_shexp" if isinstance(layer.feed_forward, Experts) else ""
    if stem == "ffn_down_shexp":
        yield replace(tensor, name=f"{prefix}ffn_down{own}.{suffix}")
        return
    half = tensor.shape[0] // 2
    yield _rows(f"{prefix}ffn_gate{own}.{suffix}", tensor, 0, half)
    yield _rows(f"{prefix}ffn_up{own}.{suffix}", tensor, half, 2 * half)


def _layout(family: Family, tensor: Tensor, hidden_size: int, axis: int) -> ExpertLayout:
    """Of a stack of experts. Where a family's checkpoints have it transposed, transformers 5 may
    write it as other families' are: the hidden size is on `axis` where it is transposed."""
    layout, shape = family.expert_layout, tensor.shape
    is_as_others = len(shape) == 3 and shape[axis] != hidden_size == shape[3 - axis]
    is_halves = layout is ExpertLayout.TRANSPOSED_HALVES and is_as_others
    return ExpertLayout.HALVES if is_halves else layout


def _is_transposed(family: Family, spec: ModelSpec, tensor: Tensor, suffix: str) -> bool:
    """Whether a stack of experts is; in blocks it never is."""
    layout = _layout(family, tensor, spec.hidden_size, 2)
    transposed = (ExpertLayout.TRANSPOSED_HALVES, ExpertLayout.TRANSPOSED_ALTERNATING)
    return suffix == "weight" and layout in transposed and tensor.format.is_float


def _divided_experts(
    layout: ExpertLayout, tensor: Tensor, prefix: str, suffix: str
) -> Iterator[Tensor]:
    """Gate and up of a stack of experts."""
    is_bias = suffix == "bias"
    _check_dimensions(tensor, 2 if is_bias else 3)
    count, size = tensor.shape[0], tensor.shape[1 if is_bias else 2] // 2
    for index, name in enumerate(("gate", "up")):
        full = f"{prefix}ffn_{name}_exps.{suffix}"
        if layout is ExpertLayout.HALVES:
            yield _half_rows(full, tensor, index)
            continue
        if layout is ExpertLayout.TRANSPOSED_ALTERNATING and not tensor.format.is_float:
            yield _every_other_row(full, tensor, index)  # in blocks rows are kept as rows
            continue
        columns = slice(index * size, (index + 1) * size)
        if layout is ExpertLayout.TRANSPOSED_ALTERNATING:
            columns = slice(index, None, 2)
        shape = (count, size) if is_bias else (count, size, tensor.shape[1])
        yield _remade(full, tensor, shape, _columns_as_rows(columns))


def _columns_as_rows(columns: slice) -> Callable[[Words], Words]:
    return lambda words: words[..., columns].T


def _transposed_down(tensor: Tensor) -> Iterator[Tensor]:
    _check_dimensions(tensor, 3)
    count, in_size, out_size = tensor.shape
    yield _remade(tensor.name, tensor, (count, out_size, in_size), _columns_as_rows(slice(None)))


def _divided_kv_b(tensor: Tensor, prefix: str, part: Attention, latent: Latent) -> Iterator[Tensor]:
    """By head: rows of the key's matrix, which is kept transposed, then rows of the value's."""
    heads, rank = part.num_heads, latent.kv_rank
    plain_dims = part.head_dim - latent.rope_dims
    rows = plain_dims + part.value_dim
    if tensor.shape != (heads * rows, rank):
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {[heads * rows, rank]}"
        )
    _check_divisible(tensor)
    keys, name = (heads, rank, plain_dims), f"{prefix}attn_k_b.weight"
    if tensor.format.is_float:
        stack = replace(tensor, shape=(heads, rows, rank))
        yield _remade(name, stack, keys, lambda words: words[:plain_dims].T)
    else:
        yield _transposed_as_floats(name, tensor, keys, rows)
    row_bytes = tensor.nbytes // tensor.shape[0]
    ends = [(head * rows + plain_dims, (head + 1) * rows) for head in range(heads)]
    pieces = [(tensor, start * row_bytes, stop * row_bytes) for start, stop in ends]
    yield _joined(f"{prefix}attn_v_b.weight", (heads, part.value_dim, rank), pieces)


def _transposed_as_floats(
    name: str, tensor: Tensor, shape: tuple[int, int, int], stride: int
) -> Tensor:
    """The first rows of each `stride` rows, transposed. Blocks run along rows, so that weights
    can only be kept decoded, as F32."""
    count, _, num_rows = shape

    def make(index: int) -> Bytes:
        rows = tensor.rows_float32(index * stride, index * stride + num_rows)
        return np.ascontiguousarray(rows.T, "<f4").ravel().view(np.uint8)

    source = Slabs(count, 4 * math.prod(shape[1:]), make)
    return Tensor(name, shape, format_named("F32", name), Region(source, 0, source.size))


def _check_dimensions(tensor: Tensor, count: int) -> None:
    if len(tensor.shape) != count:
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {count} dimensions"
        )
