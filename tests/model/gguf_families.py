"""Writes a drawn family as GGUF with that family's own conventions: keys from its config.json, its
q and k rows permuted, tensors fused and named as llama.cpp's converter does it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.loader.gguf_writer import Field, write_gguf
from quire.loader.reading import Bytes
from quire.model.loading import Model
from quire.model.states import StateMixer
from quire.quant.formats import Format, format_named

Floats = npt.NDArray[np.float32]
Config = dict[str, Any]

# By case: the architecture. Cases of the same family whose settings GGUF cannot say are not here.
ARCHITECTURES = {
    "phi3": "phi3",
    "phi3-long": "phi3",
    "phimoe": "phimoe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4-experts": "gemma4",
    "qwen3moe": "qwen3moe",
    "qwen2moe": "qwen2moe",
    "qwen": "qwen",
    "baichuan": "baichuan",
    "mixtral": "llama",
    "gpt-oss": "gpt-oss",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "granite-shared": "granite",
    "granitemoe": "granitemoe",
    "granitemoe-shared": "granitemoe",
    "ministral3": "mistral3",
    "arcee": "arcee",
    "apertus": "apertus",
    "nemotron": "nemotron",
    "stablelm": "stablelm",
    "olmo": "olmo",
    "ernie4_5": "ernie4_5",
    "dots1": "dots1",
    "glm": "chatglm",
    "glm4": "glm4",
    "command-r": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "exaone-moe": "exaone-moe",
    "afmoe": "afmoe",
    "glm4moe": "glm4moe",
    "llama4": "llama4",
    "solar_open": "glm4moe",
    "mistral4": "mistral4",
    "stablelm-parallel": "stablelm",
    "phi2": "phi2",
    "gptneox": "gptneox",
    "gptneox-after": "gptneox",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "mpt": "mpt",
    "starcoder": "starcoder",
    "falcon": "falcon",
    "falcon-one-key": "falcon",
    "internlm2": "internlm2",
    "internlm3": "llama",
    "exaone": "exaone",
    "minicpm": "minicpm",
    "minicpm3": "minicpm3",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan-moe": "hunyuan-moe",
    "ernie4_5-moe": "ernie4_5-moe",
    "minimax-m2": "minimax-m2",
    "qwen3next": "qwen3next",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2moe",
    "granitehybrid": "granitehybrid",
    "granitehybrid-dense": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe",
    "nemotron_h_moe-latent": "nemotron_h_moe",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "jamba": "jamba",
    "mamba2": "mamba2",
    "falcon-h1": "falcon-h1",
    "falcon-h1-normed": "falcon-h1",
    "deepseek2": "deepseek2",
    "deepseek2-lite": "deepseek2",
    "kimi_k2": "deepseek2",
    "deepseek": "deepseek",
    "bailingmoe": "bailingmoe",
    "bailingmoe2": "bailingmoe2",
}
PERMUTED = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "arcee", "olmo"}
PERMUTED |= {"baichuan", "internlm2", "minicpm", "granitehybrid", "deepseek", "bailingmoe"}
FUSED_QKV = {"phi3", "chatglm", "gptneox", "gpt2", "starcoder", "falcon", "bailingmoe2"}
FUSED_QKV |= {"qwen", "bloom", "mpt"}
FUSED_GATE = {"phi3", "glm4", "chatglm"}
WITH_PATTERN = {"olmo2", "exaone4", "exaone-moe", "gemma4"}
WITHOUT_WINDOW = {"starcoder2", "dots1"}  # the converter does not write it
DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
NEMOTRONS = {"nemotron_h", "nemotron_h_moe"}  # whose layers are one half alone
FIRST_MAMBAS = {"mamba", "jamba"}
MAMBAS = {"granitehybrid", "falcon-h1", "mamba2", *NEMOTRONS}
# It is called post_attention_norm.
NORM_BEFORE_FEED = {"gpt-oss", "seed_oss", "glm4moe", *DELTA_NETS}


@dataclass(frozen=True)
class Written:
    name: str
    weights: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    @property
    def format(self) -> Format:
        return format_named("F32", self.name)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def pieces(self) -> Iterator[Bytes]:
        yield np.ascontiguousarray(self.weights, "<f4").ravel().view(np.uint8)


def write_family(
    case: str, config: Config, model: Model, path: Path, *, is_old: bool = False
) -> Path:
    """`model`: what quire loads of the safetensors. `is_old`: as deepseek2's files were before
    keys' and values' matrices were divided."""
    architecture = ARCHITECTURES[case]
    tensors = {name: tensor.to_float32() for name, tensor in model.tensors.items()}
    own = _fields(architecture, config) | _scaling(architecture, config, tensors)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type") == "llama3":
        rope = model.spec.rope
        plain = replace(rope, scaling=None).frequencies()
        tensors["rope_freqs.weight"] = (plain / rope.frequencies()).astype(np.float32)
    fields: dict[str, Field] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "none",  # which llama.cpp wants said
    }
    if architecture == "falcon-h1":
        tensors = _with_multipliers(config, model, tensors)
        del own["embedding_scale"]
    if architecture == "apertus":
        fields |= _xielu(tensors, config["num_hidden_layers"])
    if architecture == "gemma4":
        tensors = _fused_experts(tensors)
    if architecture == "glm4moe":  # a layer that predicts a further token comes last
        own |= {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
        tensors[f"blk.{config['num_hidden_layers']}.nextn.enorm.weight"] = np.ones(48, np.float32)
    if architecture == "olmo":  # whose norms have no weights
        tensors = {name: weights for name, weights in tensors.items() if "_norm." not in name}
    if is_old:
        own |= {
            name: own.pop(f"{name}_mla")
            for name in ("attention.key_length", "attention.value_length")
        }
        own["attention.head_count_kv"] = config["num_attention_heads"]
    if is_old or architecture == "minicpm3":
        tensors = _joined_kv_b(tensors)
    fields |= {f"{architecture}.{key}": value for key, value in own.items()}
    if architecture == "qwen35moe":  # no layer is dense
        del fields[f"{architecture}.feed_forward_length"]
    tensors = _with_states(architecture, model, tensors)
    written = _renamed(architecture, _fused(architecture, _permuted(architecture, config, tensors)))
    write_gguf(path, fields, [Written(name, weights) for name, weights in written.items()])
    return path


# ---- keys


def _fields(architecture: str, config: Config) -> dict[str, Field]:
    if architecture in _ALONE:
        return _ALONE[architecture](config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope: Config = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    usual = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
    base = rope.get("full_attention", rope).get("rope_theta", usual)
    fields: dict[str, Field] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": _num_layers(config),
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * share),
        "rope.freq_base": float(base),
        "vocab_size": config["vocab_size"],
    }
    for key, name in (
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("norm_epsilon", "attention.layer_norm_epsilon"),
        ("norm_eps", "attention.layer_norm_epsilon"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("attention_multiplier", "attention.scale"),
        ("logits_scaling", "logit_scale"),
        ("logit_scale", "logit_scale"),
    ):
        if config.get(key) is not None:
            fields[name] = float(config[key])
    if config.get("sliding_window") and architecture not in WITHOUT_WINDOW:
        fields["attention.sliding_window"] = config["sliding_window"]
    if architecture in WITH_PATTERN and "layer_types" in config:
        kinds = config["layer_types"]
        fields["attention.sliding_window_pattern"] = [kind != "full_attention" for kind in kinds]
    return fields | _expert_fields(config) | _OWN.get(architecture, _nothing)(config)


def _num_layers(config: Config) -> int:
    listed = len(config.get("layers_block_type", ()))
    return int(config.get("num_hidden_layers") or config.get("num_layers") or listed)


def _expert_fields(config: Config) -> dict[str, Field]:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if count is None:
        return {}
    fields: dict[str, Field] = {
        "expert_count": count,
        "expert_used_count": next(
            config[name]
            for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
            if config.get(name)
        ),
    }
    if config.get("moe_intermediate_size"):
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(name):
            fields["expert_shared_feed_forward_length"] = config[name]
    return fields


def _deepseek_experts(config: Config) -> dict[str, Field]:
    is_third = config["model_type"] not in ("deepseek_v2", "mistral4")
    fields: dict[str, Field] = {
        "leading_dense_block_count": config.get("first_k_dense_replace", 0),
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["model_type"] != "deepseek_v2",
    }
    if is_third:
        fields["expert_gating_func"] = 2  # absent: softmax
    if config["n_group"] > 1:
        fields |= {
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    return fields


def _deepseek(config: Config) -> dict[str, Field]:
    rank, rope_dims = config["kv_lora_rank"], config["qk_rope_head_dim"]
    fields: dict[str, Field] = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dims,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dims,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope_dims,
    }
    if config["q_lora_rank"] is not None:
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    return fields | _deepseek_experts(config)


def _ling(config: Config) -> dict[str, Field]:
    """DeepSeek's first mixture, and Ling's."""
    counts = (config.get("num_shared_experts"), config.get("n_shared_experts"))
    fields: dict[str, Field] = {
        "rope.scaling.type": "none",
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": next(count for count in counts if count),
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
    }
    if "num_shared_experts" in config:
        fields["expert_weights_norm"] = config["norm_topk_prob"]
    return fields


def _ling2(config: Config) -> dict[str, Field]:
    return _ling(config) | {
        "block_count": config["num_hidden_layers"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_gating_func": 2,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "nextn_predict_layers": 0,
    }


def _exaone_moe(config: Config) -> dict[str, Field]:
    size = config["moe_intermediate_size"] * config["num_shared_experts"]
    own: dict[str, Field] = {"expert_gating_func": 2, "expert_shared_feed_forward_length": size}
    return _ling(config) | own


def _llama4(config: Config) -> dict[str, Field]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "expert_gating_func": 2,
    }


def _gemma4(config: Config) -> dict[str, Field]:
    num_layers, num_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    own = next(iter(config["per_layer_config"].values()))
    full, heads = own["head_dim"], config["num_key_value_heads"]
    fields: dict[str, Field] = {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config["use_double_wide_mlp"]:
        size, first = config["intermediate_size"], num_layers - num_shared
        sizes = [size if layer < first else 2 * size for layer in range(num_layers)]
        fields["feed_forward_length"] = sizes
    if "num_key_value_heads" in own:
        counts = {"full_attention": own["num_key_value_heads"], "sliding_attention": heads}
        fields["attention.head_count_kv"] = [counts[kind] for kind in config["layer_types"]]
    if config["top_k_experts"]:
        fields["expert_used_count"] = config["top_k_experts"]
    return fields


def _hunyuan(config: Config) -> dict[str, Field]:
    rope, dims = config["rope_parameters"], config["head_dim"]
    base = rope["rope_theta"] * rope["alpha"] ** (dims / (dims - 2))
    fields: dict[str, Field] = {
        "rope.freq_base": base,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 262144,
    }
    if "num_experts" in config:
        size = config["intermediate_size"]
        fields |= {"expert_feed_forward_length": size, "expert_shared_feed_forward_length": size}
        fields["expert_shared_count"] = 1
    return fields


def _ernie_moe(config: Config) -> dict[str, Field]:
    return {
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"]
        // config["num_key_value_heads"],
    }


def _granite(config: Config) -> dict[str, Field]:
    """Files of Granite 4 describe experts and state-space layers that they do not have."""
    if "shared_intermediate_size" not in config:
        return {}
    num_layers = config["num_hidden_layers"]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"]] * num_layers,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "expert_count": 0,
        "expert_used_count": 0,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 1,
        "ssm.inner_size": 96,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 3,
    }


def _delta_net(config: Config) -> dict[str, Field]:
    heads = config["linear_num_value_heads"]
    fields: dict[str, Field] = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": 4,
    }
    if config["model_type"] != "qwen3_next":
        fields["rope.dimension_sections"] = [2, 1, 1, 0]
    return fields


def _by_attention(config: Config, value: int) -> list[int]:
    """A number for each layer: 0 in those that keep a state."""
    full = ("full_attention", "attention")
    return [value if kind in full else 0 for kind in config["layer_types"]]


def _lfm2(config: Config) -> dict[str, Field]:
    fields: dict[str, Field] = {
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": _by_attention(config, config["num_key_value_heads"]),
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
    }
    if "num_experts" not in config:
        multiple = config["block_multiple_of"]
        fields["feed_forward_length"] = -(-(2 * config["intermediate_size"] // 3) // multiple) * (
            multiple
        )
        return fields
    return fields | {
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def _mamba(config: Config) -> dict[str, Field]:
    heads = config["mamba_n_heads"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": heads * config["mamba_d_head"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": heads,
    }


def _granite_hybrid(config: Config) -> dict[str, Field]:
    shared = config["shared_intermediate_size"]
    fields: dict[str, Field] = _mamba(config) | {
        "attention.head_count_kv": _by_attention(config, config["num_key_value_heads"]),
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
    }
    if config["num_local_experts"]:
        return fields | {"expert_shared_feed_forward_length": shared}
    return fields | {"feed_forward_length": shared}


def _nemotron_h(config: Config) -> dict[str, Field]:
    kinds = config["layers_block_type"]
    size = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]

    def of(names: tuple[str, ...], value: int) -> list[int]:
        return [value if kind in names else 0 for kind in kinds]

    fields: dict[str, Field] = {
        "attention.head_count_kv": of(("full_attention",), config["num_key_value_heads"]),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": of(("mlp", "moe"), size),
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if "moe" not in kinds:
        return fields | {"expert_count": 0, "expert_used_count": 0}
    return fields | {
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        **({"moe_latent_size": config["moe_latent_size"]} if config["moe_latent_size"] else {}),
    }


def _xielu(tensors: dict[str, Floats], num_layers: int) -> dict[str, Field]:
    """Takes the numbers of each layer out, and what softplus makes them of."""
    numbers = np.array([tensors.pop(f"blk.{x}.ffn_xielu.weight") for x in range(num_layers)])
    alpha, other, beta, epsilon = numbers.T.astype(np.float64)
    found = {"alpha_p": alpha, "alpha_n": other - beta}
    found = {name: np.log(np.expm1(values)) for name, values in found.items()}
    found |= {"beta": beta, "eps": epsilon}
    return {f"xielu.{name}": values.tolist() for name, values in found.items()}


def _gpt_oss(config: Config) -> dict[str, Field]:
    return {"expert_feed_forward_length": config["intermediate_size"]}


def _gpt2(config: Config) -> dict[str, Field]:
    return {
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "block_count": config["n_layer"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "vocab_size": config["vocab_size"],
    }


def _starcoder(config: Config) -> dict[str, Field]:
    own: dict[str, Field] = {"feed_forward_length": config["n_inner"], "attention.head_count_kv": 1}
    return _gpt2(config) | own


def _falcon(config: Config) -> dict[str, Field]:
    has_one = not config["new_decoder_architecture"]
    return {
        "context_length": 2048,
        "tensor_data_layout": "jploski",
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 4 * config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1 if has_one else config["num_kv_heads"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "vocab_size": config["vocab_size"],
    }


def _minicpm3(config: Config) -> dict[str, Field]:
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "vocab_size": config["vocab_size"],
    }


def _mamba2(config: Config) -> dict[str, Field]:
    return {
        "context_length": 1 << 20,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["num_heads"] * config["head_dim"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["num_heads"],
        "vocab_size": config["vocab_size"],
    }


def _jamba(config: Config) -> dict[str, Field]:
    period, first = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    heads = config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [heads if x % period == first else 0 for x in layers],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


def _mamba1(config: Config) -> dict[str, Field]:
    own = {**config, "n_groups": 0, "num_heads": config["time_step_rank"], "head_dim": 0}
    fields = _mamba2(own) | {
        "ssm.inner_size": config["expand"] * config["hidden_size"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }
    del fields["ssm.group_count"]
    return fields


def _mpt(config: Config) -> dict[str, Field]:
    return {
        "context_length": config["max_seq_len"],
        "embedding_length": config["d_model"],
        "block_count": config["n_layers"],
        "feed_forward_length": 4 * config["d_model"],
        "attention.head_count": config["n_heads"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
        "vocab_size": config["vocab_size"],
    }


def _bloom(config: Config) -> dict[str, Field]:
    return {
        "context_length": config["seq_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 4 * config["hidden_size"],
        "block_count": config["n_layer"],
        "attention.head_count": config["n_head"],
        "attention.head_count_kv": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "vocab_size": config["vocab_size"],
    }


_ALONE: dict[str, Callable[[Config], dict[str, Field]]] = {
    "bloom": _bloom,
    "mpt": _mpt,
    "mamba2": _mamba2,
    "mamba": _mamba1,
    "minicpm3": _minicpm3,
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "falcon": _falcon,
}


def _nothing(_: Config) -> dict[str, Field]:
    return {}


_OWN: dict[str, Callable[[Config], dict[str, Field]]] = {
    "glm4moe": _deepseek_experts,
    "dots1": _deepseek_experts,
    "olmo": lambda _: {"attention.layer_norm_epsilon": 1e-5},
    "stablelm": lambda _: {"use_parallel_residual": True},
    "gptneox": lambda config: {"use_parallel_residual": config["use_parallel_residual"]},
    "minicpm": lambda config: {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    },
    "deepseek": _ling,
    "bailingmoe": _ling,
    "bailingmoe2": _ling2,
    "exaone-moe": _exaone_moe,
    "afmoe": lambda config: {
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["route_scale"],
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
    "deepseek2": _deepseek,
    "mistral4": _deepseek,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    **dict.fromkeys(DELTA_NETS, _delta_net),
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _mamba,
    "jamba": _jamba,
    **dict.fromkeys(NEMOTRONS, _nemotron_h),
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan,
    "ernie4_5-moe": _ernie_moe,
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
    },
}


def _scaling(architecture: str, config: Config, tensors: dict[str, Floats]) -> dict[str, Field]:
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
        if architecture == "minicpm3":
            return {}
        original = int(config["original_max_position_embeddings"])
        factor = config["max_position_embeddings"] / original
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(factor) / math.log(original)),
        }
    if kind == "proportional":
        own = next(iter(config["per_layer_config"].values()))
        num_pairs, share = own["head_dim"] // 2, rope["partial_rotary_factor"]
        turned = np.arange(num_pairs) < num_pairs * share
        tensors["rope_freqs.weight"] = np.where(turned, 1.0, 1e30).astype(np.float32)
    if kind in ("default", "proportional", "dynamic", "llama3"):  # the last is a tensor
        return {}
    fields: dict[str, Field] = {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]
        fields["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                fields[f"rope.scaling.yarn_{name}"] = rope[name]
    if rope.get("mscale_all_dim"):
        unit = 0.1 if architecture in ("deepseek2", "mistral4") else 1.0
        fields["rope.scaling.yarn_log_multiplier"] = unit * rope["mscale_all_dim"]
    if rope.get("llama_4_scaling_beta"):
        fields["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        if architecture == "mistral4":
            fields["attention.temperature_length"] = rope["original_max_position_embeddings"]
    return fields


# ---- tensors


def _permuted(architecture: str, config: Config, tensors: dict[str, Floats]) -> dict[str, Floats]:
    if architecture not in PERMUTED:
        return tensors
    num_heads = config["num_attention_heads"]
    heads = {"attn_q": num_heads, "attn_k": config.get("num_key_value_heads", num_heads)}
    found = {}
    for name, weights in tensors.items():
        part = name.split(".")[-2]
        found[name] = _interleaved(weights, heads[part]) if part in heads else weights
    return found


def _interleaved(weights: Floats, num_heads: int) -> Floats:
    """Rows reordered so that the two of a pair, half a head apart, become neighbours."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _fused(architecture: str, tensors: dict[str, Floats]) -> dict[str, Floats]:
    groups: list[tuple[tuple[str, ...], str]] = []
    if architecture in FUSED_QKV:
        groups.append((("attn_q", "attn_k", "attn_v"), "attn_qkv"))
    if architecture in FUSED_GATE:
        groups.append((("ffn_gate", "ffn_up"), "ffn_up"))
    found = dict(tensors)
    for parts, whole in groups:
        for name in [n for n in tensors if n.split(".")[-2] == parts[0]]:
            pieces = [found.pop(name.replace(parts[0], part)) for part in parts]
            found[name.replace(parts[0], whole)] = np.concatenate(pieces)
    return found


def _fused_experts(tensors: dict[str, Floats]) -> dict[str, Floats]:
    found = dict(tensors)
    for name in [n for n in tensors if ".ffn_gate_exps." in n]:
        gate, up = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate", "gate_up")] = np.concatenate([gate, up], axis=1)
    return found


def _joined_kv_b(tensors: dict[str, Floats]) -> dict[str, Floats]:
    found = dict(tensors)
    for name in [n for n in tensors if ".attn_k_b." in n]:
        keys, values = found.pop(name), found.pop(name.replace("attn_k_b", "attn_v_b"))
        whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        found[name.replace("attn_k_b", "attn_kv_b")] = whole.reshape(-1, whole.shape[2])
    return found


def _with_multipliers(
    config: Config, model: Model, tensors: dict[str, Floats]
) -> dict[str, Floats]:
    """Falcon-H1's multipliers as its converter has them: in the weights, none in the taps."""
    scales = {name: tensors[name] for name in tensors if name.endswith(".scale")}
    found = {name: weights for name, weights in tensors.items() if name not in scales}
    for name, scale in scales.items():
        found[name.replace(".scale", ".weight")] *= scale
    found["token_embd.weight"] *= config["embedding_multiplier"]
    found["output.weight"] *= config["lm_head_multiplier"]
    for layer, part in model.spec.states.items():
        sizes = (part.output_size, part.group_size, part.group_size)
        factors = np.repeat(np.float32(config["ssm_multipliers"][1:4]), sizes)[:, None]
        factors *= np.float32(config["ssm_in_multiplier"])
        found[f"blk.{layer}.ssm_conv1d.weight"] /= factors
        found[f"blk.{layer}.ssm_in.weight"] *= factors
    return found


_OF_LFM2 = {
    "output_norm": "token_embd_norm",
    "ssm_in": "shortconv.in_proj",
    "ssm_conv1d": "shortconv.conv",
    "ssm_out": "shortconv.out_proj",
}


def _with_states(architecture: str, model: Model, tensors: dict[str, Floats]) -> dict[str, Floats]:
    """Tensors of layers with a state, and what is beside them, as converters write them."""
    found = dict(tensors)
    for index, part in model.spec.states.items():
        prefix = f"blk.{index}."
        own = {
            name.removeprefix(prefix): found.pop(name)
            for name in [n for n in found if n.startswith(f"{prefix}ssm_")]
        }
        if architecture in DELTA_NETS:
            own = _delta_net_tensors(architecture, part, own)
        elif architecture in FIRST_MAMBAS:
            own["ssm_in.weight"] = np.concatenate(
                [own["ssm_in.weight"], own.pop("ssm_gate.weight")]
            )
            own |= {name: own.pop(f"{name}.weight") for name in ("ssm_a", "ssm_d")}
        elif architecture in MAMBAS:
            names = [f"ssm_{name}.weight" for name in ("gate", "in", "alpha")]
            own["ssm_in.weight"] = np.concatenate([own.pop(name) for name in names])
            if part.has_norm:
                own["ssm_norm.weight"] = own["ssm_norm.weight"].reshape(part.num_groups, -1)
            own |= {name: own.pop(f"{name}.weight")[:, None] for name in ("ssm_a", "ssm_d")}
        found |= {prefix + name: weights for name, weights in own.items()}
    if architecture.startswith("lfm2"):
        for theirs, ours in _OF_LFM2.items():
            found = {name.replace(theirs, ours): weights for name, weights in found.items()}
    if architecture in DELTA_NETS:
        for name in [n for n in found if n.endswith(".attn_q.weight")]:
            gate = found.pop(name.replace("attn_q", "attn_gate"))
            heads = (model.spec.num_heads, -1, gate.shape[1])
            both = np.concatenate([found[name].reshape(heads), gate.reshape(heads)], axis=1)
            found[name] = both.reshape(-1, gate.shape[1])
    return found


def _delta_net_tensors(
    architecture: str, part: StateMixer, tensors: dict[str, Floats]
) -> dict[str, Floats]:
    if architecture != "qwen3next":  # heads take turns with groups
        tensors = {name: _tiled(part, name, weights) for name, weights in tensors.items()}
    renamed = {"ssm_in.weight": "attn_qkv.weight", "ssm_gate.weight": "attn_gate.weight"}
    renamed["ssm_a.weight"] = "ssm_a"
    found = {renamed.get(name, name): weights for name, weights in tensors.items()}
    if architecture == "qwen3next":
        both = [found.pop(f"ssm_{name}.weight") for name in ("beta", "alpha")]
        grouped = [x.reshape(part.num_groups, -1, x.shape[1]) for x in both]
        found["ssm_ba.weight"] = np.concatenate(grouped, axis=1).reshape(-1, both[0].shape[1])
    return found


def _tiled(part: StateMixer, name: str, weights: Floats) -> Floats:
    """Heads of values reordered, from those of each group in turn to one of each group in turn."""

    def turned(rows: Floats) -> Floats:
        heads = rows.reshape(part.num_groups, part.num_heads // part.num_groups, -1)
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)

    match name.split(".")[0]:
        case "ssm_in" | "ssm_conv1d":
            keys = 2 * part.group_size
            return np.concatenate([weights[:keys], turned(weights[keys:])])
        case "ssm_gate" | "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt":
            return turned(weights)
        case "ssm_out":
            return np.ascontiguousarray(turned(np.ascontiguousarray(weights.T)).T)
    return weights


def _renamed(architecture: str, tensors: dict[str, Floats]) -> dict[str, Floats]:
    if architecture == "falcon" and "blk.0.ffn_norm.weight" in tensors:
        found = {n.replace(".attn_norm.", ".attn_norm_2."): w for n, w in tensors.items()}
        return {n.replace(".ffn_norm.", ".attn_norm."): w for n, w in found.items()}
    if architecture == "falcon-h1":  # a name without a suffix
        return {n.replace(".ffn_norm.weight", ".ffn_norm"): w for n, w in tensors.items()}
    if architecture in NEMOTRONS:
        return {n.replace(".ffn_norm.", ".attn_norm."): w for n, w in tensors.items()}
    if architecture not in NORM_BEFORE_FEED:
        return tensors
    return {n.replace(".ffn_norm.", ".post_attention_norm."): w for n, w in tensors.items()}
