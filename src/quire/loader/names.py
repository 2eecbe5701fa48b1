"""What tensors are called: our names are GGUF's, and this table gives Hugging Face's in ours."""

import re

from quire.core.errors import UnsupportedModelError

_OUTSIDE_LAYERS = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# Inside layer N: model.layers.N.<left>.<weight or bias> is blk.N.<right>.<weight or bias>.
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",  # the same, in the first BitNet checkpoints
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
}

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)\.(weight|bias)")

# Tables that old exporters saved although they follow from the configuration.
_DERIVED = re.compile(r"(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


def from_hugging_face(name: str) -> str | None:
    """Our name of a Hugging Face tensor, or None if it holds nothing a model needs.

    A name we do not know is an error: leaving a weight out would give wrong text, silently.
    """
    rest = name.removeprefix("model.")  # checkpoints of the bare decoder leave the prefix out
    if _DERIVED.fullmatch(rest):
        return None
    if rest in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[rest]
    inside = _LAYER.fullmatch(rest)
    if inside is None or inside[2] not in _IN_LAYERS:
        raise UnsupportedModelError(
            f"tensor {name!r} is not part of any model that quire runs (llama, mistral, qwen2, "
            "qwen3, bitnet)"
        )
    layer, part, kind = inside.groups()
    return f"blk.{layer}.{_IN_LAYERS[part]}.{kind}"
