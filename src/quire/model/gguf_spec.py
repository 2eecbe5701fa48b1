"""From a GGUF file's metadata to a ModelSpec, and back."""

from collections.abc import Mapping

from quire.core.errors import ModelFileError
from quire.loader.metadata import Fields, Metadata
from quire.loader.tensor import Tensor
from quire.model.families import GGUF_FAMILIES, Facts, Family, describe, find_family
from quire.model.rope import DivisorScaling, LinearScaling, Rope, RopeScaling, YarnScaling
from quire.model.spec import MAX_SIZES, Attention, Dense, ModelSpec, Norm, QKNorm

# Keys under the architecture's name that are read below or say nothing about the mathematics.
_READ_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_epsilon",  # of layer norms; these families have RMS norms alone
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "attn_logit_softcapping",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)
# Keys that quire does not compute, with the values that mean "not in this model". Any other key is
# refused: it may change the mathematics.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),  # none, or the last token's state, which is what Want.POOLED gives
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
_SCALING_TYPES = ("none", "linear", "yarn")
_WINDOW_LIMIT = 1 << 62


def spec_from_gguf(metadata: Metadata, tensors: Mapping[str, Tensor]) -> ModelSpec:
    """Describe the model; the tensors' names say which optional parts it has."""
    architecture = metadata.text("general.architecture")
    family = find_family(GGUF_FAMILIES, "general.architecture", architecture)
    fields = Fields(metadata, "GGUF metadata", f"{architecture}.")
    fields.refuse(_NEUTRAL_VALUES)
    fields.refuse_unknown(_READ_KEYS | _NEUTRAL_VALUES.keys())
    hidden_size = fields.integer("embedding_length", high=MAX_SIZES["hidden_size"])
    num_layers = fields.integer("block_count", high=MAX_SIZES["num_layers"])
    epsilon = fields.number("attention.layer_norm_rms_epsilon")
    attention = _attention(family, fields, tensors, hidden_size, epsilon)
    feed = Dense(
        size=fields.integer("feed_forward_length", high=MAX_SIZES["ffn_size"]),
        activation=family.gguf_activation,
        has_bias="blk.0.ffn_up.bias" in tensors,
        inner_norm=Norm(epsilon=epsilon) if family.sub_norms else None,
    )
    facts = Facts(
        hidden_size=hidden_size,
        vocabulary_size=_vocabulary_size(fields, tensors),
        context_length=fields.integer("context_length", high=MAX_SIZES["context_length"]),
        norm_epsilon=epsilon,
        attention=attention,
        ropes=(_rope(family, fields, tensors, attention.head_dim),) * num_layers,
        windows=(_window(fields),) * num_layers,
        feed_forwards=(feed,) * num_layers,
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
        tied_head=family.gguf_tied_head or "output.weight" not in tensors,
        linear_scales="blk.0.attn_q.scale" in tensors,
    )
    return describe(family, facts)


def _attention(
    family: Family,
    fields: Fields,
    tensors: Mapping[str, Tensor],
    hidden_size: int,
    epsilon: float,
) -> Attention:
    num_heads = fields.integer("attention.head_count", high=MAX_SIZES["num_heads"])
    limit = MAX_SIZES["num_kv_heads"]
    norm = Norm(epsilon=epsilon)
    return Attention(
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads, high=limit),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        qkv_bias=family.qkv_bias is True or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=None if family.qk_norm is None else QKNorm(norm=norm, span=family.qk_norm),
        output_norm=norm if family.sub_norms else None,
        soft_cap=fields.number("attn_logit_softcapping", 0.0),
    )


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    limit = MAX_SIZES["head_dim"]
    default = max(1, hidden_size // num_heads)
    head_dim = fields.integer("attention.key_length", default, high=limit)
    if fields.integer("attention.value_length", head_dim, high=limit) != head_dim:
        raise fields.unsupported("attention.value_length", [f"{head_dim}, the key_length"])
    return head_dim


def _vocabulary_size(fields: Fields, tensors: Mapping[str, Tensor]) -> int:
    """Files may leave it to the embedding matrix."""
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    return fields.integer("vocab_size", rows, high=MAX_SIZES["vocabulary_size"])


def _window(fields: Fields) -> int | None:
    """Zero means none."""
    return fields.integer("attention.sliding_window", 0, low=0, high=_WINDOW_LIMIT) or None


def _rope(family: Family, fields: Fields, tensors: Mapping[str, Tensor], head_dim: int) -> Rope:
    dims = fields.integer("rope.dimension_count", head_dim, high=MAX_SIZES["head_dim"])
    scaling = _scaling(fields)
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None:
        if scaling is not None:
            raise fields.unsupported("rope.scaling.type", ["none beside rope_freqs.weight"])
        scaling = _divisors(divisors, dims)
    return Rope(
        base=fields.number("rope.freq_base", 10000.0),
        dims=dims,
        interleaved=family.interleaved_in_gguf,
        scaling=scaling,
    )


def _divisors(tensor: Tensor, dims: int) -> DivisorScaling:
    if tensor.shape != (dims // 2,):
        raise ModelFileError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, expected [{dims // 2}]: half of "
            f"the {dims} rope dimensions"
        )
    return DivisorScaling(tuple(tensor.to_float32().tolist()))


def _scaling(fields: Fields) -> RopeScaling | None:
    factor = fields.number("rope.scaling.factor", 1.0)
    kind = fields.text("rope.scaling.type", "linear")  # a factor alone means linear
    if kind not in _SCALING_TYPES:
        raise fields.unsupported("rope.scaling.type", _SCALING_TYPES)
    if kind == "yarn":
        limit = MAX_SIZES["context_length"]
        return YarnScaling(
            factor=factor,
            original_context=fields.integer(
                "rope.scaling.original_context_length",
                fields.integer("context_length", high=limit),
                high=limit,
            ),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if kind == "none" or factor in (0.0, 1.0):
        return None
    return LinearScaling(factor)


# ---- the metadata of a spec


def fields_of_spec(spec: ModelSpec, architecture: str) -> dict[str, str | int | float]:
    """The fields under the architecture's name from which `spec_from_gguf` makes this spec, as far
    as GGUF has words for it; rope_freqs.weight is a tensor."""
    fields: dict[str, str | int | float] = {
        "vocab_size": spec.vocabulary_size,
        "context_length": spec.context_length,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.ffn_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.layer_norm_rms_epsilon": spec.norm_epsilon,
        "rope.dimension_count": spec.rope.dims,
        "rope.freq_base": spec.rope.base,
    }
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        fields |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    match spec.rope.scaling:
        case LinearScaling(factor):
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling() as yarn:
            fields |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": yarn.factor,
                "rope.scaling.original_context_length": yarn.original_context,
                "rope.scaling.yarn_beta_fast": yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": yarn.beta_slow,
            }
    return {f"{architecture}.{key}": value for key, value in fields.items()}
