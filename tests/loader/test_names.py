"""Hugging Face's tensor names in ours; GGUF's own map is the reference."""

import gguf
import pytest

from quire.core.errors import UnsupportedModelError
from quire.loader.names import from_hugging_face

LAYER_PARTS = {
    "llama": (
        *("input_layernorm", "post_attention_layernorm"),
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm"),
    "bitnet": ("self_attn.inner_attn_ln", "mlp.ffn_layernorm"),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "bitnet": gguf.MODEL_ARCH.BITNET,
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_names_are_those_that_gguf_gives(family: str) -> None:
    theirs = gguf.get_tensor_name_map(ARCHITECTURES[family], 13)
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{n}.{part}" for n in (0, 12) for part in LAYER_PARTS[family]]
    for name in names:
        expected = theirs.get_name(name)
        if expected is None:
            assert (family, name) == ("bitnet", "lm_head")  # its head is always tied
            continue
        assert from_hugging_face(f"{name}.weight") == f"{expected}.weight"


def test_biases_are_named_like_their_weights() -> None:
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        weight = from_hugging_face(f"model.layers.3.{part}.weight")
        assert weight is not None
        assert from_hugging_face(f"model.layers.3.{part}.bias") == weight.replace("weight", "bias")


def test_both_names_of_bitnets_norms_are_known() -> None:
    layer = "model.layers.0."
    for new, old in (("attn_sub_norm", "inner_attn_ln"), ("ffn_sub_norm", "ffn_layernorm")):
        module = "self_attn" if new.startswith("attn") else "mlp"
        ours = from_hugging_face(f"{layer}{module}.{new}.weight")
        assert ours == from_hugging_face(f"{layer}{module}.{old}.weight") == f"blk.0.{new}.weight"


def test_the_bare_decoder_has_the_same_tensors() -> None:
    assert from_hugging_face("layers.0.mlp.up_proj.weight") == "blk.0.ffn_up.weight"
    assert from_hugging_face("embed_tokens.weight") == "token_embd.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.7.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_tables_that_follow_from_the_configuration_are_left_out(name: str) -> None:
    assert from_hugging_face(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "model.", "model.layers.0.self_attn.q_proj", "model.layers.-1.mlp.up_proj.weight"),
        *("model.layers.00.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"),
        *("model.layers.0.block_sparse_moe.gate.weight", "transformer.h.0.attn.c_attn.weight"),
        *("model.layers.99999.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight\n"),
        "blk.0.attn_q.weight",
    ],
)
def test_any_other_name_is_an_error_that_says_it(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        from_hugging_face(name)
    assert repr(name) in str(caught.value)
