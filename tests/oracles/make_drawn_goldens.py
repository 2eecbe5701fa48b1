"""Makes tests/fixtures/drawn: logits by transformers of a tiny model of each family.

Needs torch and transformers, which the tests do not; run it in an environment of its own:

    pip install torch==2.13.0 transformers==5.22.2 safetensors
    python tests/oracles/make_drawn_goldens.py tests/fixtures/drawn [CASE ...]

A folder holds config.json as transformers writes it, tensors.json (the names and shapes of the
tensors in the checkpoint that it writes), and golden.npz: `tokens`, and `logits` in float32,
[tokens, vocabulary]. Weights are not stored: they follow from names and shapes (drawn_weights.py).
"""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from drawn_weights import drawn  # type: ignore[import-not-found,unused-ignore]

transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)
NUM_TOKENS = 40
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.9],
    "long_factor": [1.2, 1.9, 2.8, 4.0, 6.5, 9.0],
}

GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000.0,
    },
}

# By case: the model type and its settings; what is None is left out.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    ),
    "phi3-short": (
        "phi3",
        {
            "rope_parameters": {
                **LONG,
                "partial_rotary_factor": 0.5,
                "short_factor": LONG["short_factor"][:3],
                "long_factor": LONG["long_factor"][:3],
            },
            "original_max_position_embeddings": 48,
            "max_position_embeddings": 96,
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}),
    "gemma2-scale": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 2},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 12,
            "global_head_dim": 16,
            "sliding_window": 9,
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            "rope_parameters": GEMMA4_ROPE,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "head_dim": 12,
            "global_head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "rope_parameters": GEMMA4_ROPE,
        },
    ),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3moe-dense": (
        "qwen3_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "max_position_embeddings": 256,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 64,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    # llama.cpp takes for granted that there are as many KV heads as heads
    "olmoe": ("olmoe", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "granite-shared": (
        "granitemoehybrid",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 56,
            "layer_types": ["attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,  # of layers that are not there
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 6.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "arcee": ("arcee", {}),
    "nemotron": ("nemotron", {"head_dim": 12, "partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "olmo": ("olmo", {}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "dots1": (
        "dots1",
        {
            "head_dim": 16,
            "num_key_value_heads": 4,  # llama.cpp takes for granted that there are as many
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
            "max_window_layers": 4,
        },
    ),
    "glm": ("glm", {"head_dim": 12}),
    "glm4": ("glm4", {"head_dim": 16}),
    "command-r": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"sliding_window": 9}),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "exaone4": ("exaone4", {"sliding_window": 9}),
    "glm4moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
        },
    ),
    "deepseek2": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek2-glm": (
        "glm4_moe_lite",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "mistral4": (
        "mistral4",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "phi2": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "gptneox": (
        "gpt_neox",
        {
            "num_key_value_heads": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gptneox-after": (
        "gpt_neox",
        {
            "num_key_value_heads": None,
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {
            "head_dim": 12,
            "num_experts": 8,
            "moe_topk": 3,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 28,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "solar_open": (
        "solar_open",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek2-lite": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": None,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
        },
    ),
}

OLD_ROPE: dict[str, Any] = {"rope_parameters": None, "rope_theta": 10000.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Twin:
    """A family that transformers has no code for, and one of its own that computes the same."""

    model_type: str  # transformers' own
    settings: dict[str, Any]
    config: dict[str, Any]  # where the family's config.json differs; None is left out
    names: dict[str, str]  # parts of names of tensors, in the family's; all in one: fused by group


TWINS = {
    "internlm2": Twin(
        "llama",
        {"attention_bias": False},
        {
            **OLD_ROPE,
            "model_type": "internlm2",
            "bias": False,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        {
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "self_attn.q_proj": "attention.wqkv",
            "self_attn.k_proj": "attention.wqkv",
            "self_attn.v_proj": "attention.wqkv",
            "self_attn.o_proj": "attention.wo",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
    ),
    "internlm3": Twin(
        "llama",
        {"head_dim": 16},
        {
            **OLD_ROPE,
            "model_type": "internlm3",
            "attention_bias": None,
            "mlp_bias": None,
            "bias": False,
            "qkv_bias": False,
            "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        },
        {},
    ),
    "exaone": Twin(
        "llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}, "rms_norm_eps": 1e-5},
        {
            **OLD_ROPE,
            "model_type": "exaone",
            "rope_scaling": LLAMA3,
            "num_layers": 4,
            "num_hidden_layers": None,
            "activation_function": "silu",
            "hidden_act": None,
            "layer_norm_epsilon": 1e-5,
            "rms_norm_eps": None,
        },
        {
            "model.": "transformer.",
            "embed_tokens": "wte",
            "layers.": "h.",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn.": "attn.attention.",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
            "transformer.norm": "transformer.ln_f",
        },
    ),
    "minicpm": Twin(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 12**-0.5,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
        {
            **OLD_ROPE,
            "model_type": "minicpm",
            "embedding_multiplier": None,
            "residual_multiplier": None,
            "attention_multiplier": None,
            "logits_scaling": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 12,
        },
        {},
    ),
}


def main(folder: Path, names: list[str]) -> None:
    for name in names or [*CASES, *TWINS]:
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if name in TWINS:
            make_twin(TWINS[name], target)
        else:
            make(*CASES[name], target)
        size = sum(file.stat().st_size for file in target.iterdir())
        print(f"{name}: {size} bytes", flush=True)


def make(model_type: str, settings: dict[str, Any], target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = save_model(model_type, settings, folder)
        weights = {key: drawn(key, tuple(shape)) for key, shape in shapes.items()}
        shutil.copy(folder / "config.json", target / "config.json")
        store(folder, weights, shapes, target)


def make_twin(twin: Twin, target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = save_model(twin.model_type, twin.settings, folder)
        config = {**json.loads((folder / "config.json").read_text()), **twin.config}
        del config["architectures"]
        kept = {key: value for key, value in config.items() if value is not None}
        (target / "config.json").write_text(json.dumps(kept, indent=2) + "\n")
        groups: dict[str, list[str]] = {}
        for key in own:
            groups.setdefault(named_by(twin, key), []).append(key)
        shapes: dict[str, list[int]] = {}
        weights: dict[str, Any] = {}
        for theirs, keys in sorted(groups.items()):
            shapes[theirs] = [sum(own[key][0] for key in keys), *own[keys[0]][1:]]
            whole = drawn(theirs, tuple(shapes[theirs]))
            weights |= {keys[0]: whole} if len(keys) == 1 else of_groups(whole, keys)
        store(folder, weights, shapes, target)


def named_by(twin: Twin, name: str) -> str:
    for ours, theirs in twin.names.items():
        name = name.replace(ours, theirs)
    return name


def of_groups(whole: Any, names: list[str]) -> dict[str, Any]:
    """Queries, keys and values of rows that come by key head: its queries, its key, its value."""
    num_keys, hidden = SIZES["num_key_value_heads"], whole.shape[1]
    shared = SIZES["num_attention_heads"] // num_keys
    rows = whole.reshape(num_keys, shared + 2, -1, hidden)
    parts = {"q": rows[:, :shared], "k": rows[:, shared], "v": rows[:, shared + 1]}
    found = {}
    for name in names:
        part = parts[name.split("_proj")[0][-1]]
        found[name] = np.ascontiguousarray(part.reshape(-1, hidden))
    return found


def save_model(model_type: str, settings: dict[str, Any], folder: Path) -> dict[str, list[int]]:
    """The shapes of its tensors, by name."""
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.to(torch.float32).save_pretrained(folder)
    file = folder / "model.safetensors"
    return {key: list(value.shape) for key, value in sorted(load_file(file).items())}


def store(folder: Path, weights: Any, shapes: dict[str, list[int]], target: Path) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stored = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(7).integers(0, SIZES["vocab_size"], NUM_TOKENS, dtype=np.int32)
    with torch.no_grad():
        logits = stored.eval()(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    lines = ",\n".join(f"{json.dumps(key)}: {shape}" for key, shape in shapes.items())
    (target / "tensors.json").write_text("{\n" + lines + "\n}\n")
    np.savez_compressed(target / "golden.npz", tokens=tokens, logits=logits.float().numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
