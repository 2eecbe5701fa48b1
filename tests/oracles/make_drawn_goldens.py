"""Makes tests/fixtures/drawn: logits by transformers of a tiny model of each family.

Needs torch and transformers, which the tests do not; run it in an environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 safetensors
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
from importlib import import_module
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
# A DeltaNet token by token: transformers' prompts in chunks of 64 lose a digit in float32.
for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
    module: Any = import_module(f"transformers.models.{name}.modeling_{name}")
    module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
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
NOT_OF_FALCON = {"intermediate_size": ..., "num_key_value_heads": ...}
GPT2: dict[str, Any] = {
    **dict.fromkeys(SIZES, ...),
    "vocab_size": 64,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 64,
}
PHI_SCALE = (1 + 1 / 6) ** 0.5  # as GGUF files have it: twice the context of 2 ** 6

GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000.0,
    },
}

DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "mamba_n_heads": 6,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "shared_intermediate_size": 40,
}
FIRST_MAMBA: dict[str, Any] = {
    **dict.fromkeys(SIZES, ...),
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "state_size": 8,
    "time_step_rank": 5,
}
FALCON_H1: dict[str, Any] = {
    "head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.6,
    "key_multiplier": 1.3,
    "mlp_multipliers": [0.9, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.8, 0.7, 1.1, 0.9, 1.3],
    "ssm_out_multiplier": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": ...,  # it follows from the list
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}

# By case: the model type and its settings; what is ... is left out.
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
    # transformers takes the short set for any length
    "phimoe": (
        "phimoe",
        {
            "rope_parameters": {
                **LONG,
                "short_mscale": PHI_SCALE,
                "long_mscale": PHI_SCALE,
                "original_max_position_embeddings": 64,
            },
            "max_position_embeddings": 128,
            "num_local_experts": 8,
            "attention_bias": True,
            "lm_head_bias": True,
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
    "granitemoe-shared": (
        "granitemoeshared",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 6.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
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
    "apertus": (
        "apertus",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
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
    "afmoe": (
        "afmoe",
        {
            **EXPERTS,
            "head_dim": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 2.5,
            "sliding_window": 9,
            "mup_enabled": True,
        },
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "num_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "sliding_window": 9,
        },
    ),
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
    "gpt2": ("gpt2", GPT2),
    # Heads whose slopes are not all of the same power
    "bloom": (
        "bloom",
        {
            **dict.fromkeys(SIZES, ...),
            "vocab_size": 64,
            "hidden_size": 48,
            "n_head": 6,
            "n_layer": 4,
            "seq_length": 64,
        },
    ),
    "mpt": (
        "mpt",
        {
            **dict.fromkeys(SIZES, ...),
            "vocab_size": 64,
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": 64,
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads"), ...),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), ...),
            "num_layers": 4,
            "num_heads": 4,
            "window_size": 9,
            "attention_types": [[["global", "local"], 1], [["local"], 2]],
        },
    ),
    "starcoder": ("gpt_bigcode", {**GPT2, "n_inner": 56}),
    "starcoder-heads": ("gpt_bigcode", {**GPT2, "multi_query": False, "n_layer": 2}),
    "falcon": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, **NOT_OF_FALCON},
    ),
    "falcon-one-key": ("falcon", {"multi_query": True, **NOT_OF_FALCON}),
    "falcon-one-norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            **NOT_OF_FALCON,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 12,
            "max_position_embeddings": 256,
            "rope_parameters": {**LONG, "original_max_position_embeddings": 256},
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
    "qwen3next": (
        "qwen3_next",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 20},
    ),
    "qwen35": ("qwen3_5_text", {**DELTA_NET, "linear_num_value_heads": 4}),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 20},
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 8,
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "granitehybrid": (
        "granitemoehybrid",
        {**GRANITE, **MAMBA, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "granitehybrid-dense": (
        "granitemoehybrid",
        {
            **GRANITE,
            **MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mamba": ("mamba", FIRST_MAMBA),
    "falcon_mamba": (
        "falcon_mamba",
        {**FIRST_MAMBA, "mixer_rms_eps": 0.01, "tie_word_embeddings": False},
    ),
    "mamba2": (
        "mamba2",
        {
            **dict.fromkeys(SIZES, ...),
            "vocab_size": 64,
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
        },
    ),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-normed": (
        "falcon_h1",
        {
            **FALCON_H1,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention"),
                *("full_attention", "mlp", "full_attention", "mlp"),
            ],
            "mlp_bias": True,
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "moe", "linear_attention"),
            ],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_moe-latent": (
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 5.0,
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
NOT_OF_QWEN: dict[str, Any] = {
    "qkv_bias": None,
    "decoder_sparse_step": None,
    "mlp_only_layers": None,
    "shared_expert_intermediate_size": None,
    "use_sliding_window": None,
    "sliding_window": None,
    "max_window_layers": None,
    "layer_types": None,
}
BAILING_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.q_proj": "attention.query_key_value",
    "self_attn.k_proj": "attention.query_key_value",
    "self_attn.v_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
}
KIMI_YARN: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Twin:
    """A family that transformers has no code for, and one of its own that computes the same."""

    model_type: str  # transformers' own
    settings: dict[str, Any]
    config: dict[str, Any]  # where the family's config.json differs; None is left out
    # Parts of names of tensors, in the family's; all in one: queries, keys and values are fused.
    names: dict[str, str]
    is_by_group: bool = True  # fused rows come by key head
    fixed: tuple[str, ...] = ()  # tensors that the family does not have: zeros
    doubled: tuple[str, ...] = ()  # parts of names of tensors that are twice the family's


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
    "kimi_k2": Twin(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "first_k_dense_replace": 1,
            "rope_parameters": {**KIMI_YARN, "rope_type": "yarn", "rope_theta": 50000.0},
        },
        {
            "model_type": "kimi_k2",
            "rope_parameters": None,
            "rope_interleave": None,
            "rope_theta": 50000.0,
            "rope_scaling": {**KIMI_YARN, "type": "yarn"},
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        {},
    ),
    # Without its gate a shared expert of Qwen's is half of the family's.
    "deepseek": Twin(
        "qwen2_moe",
        {
            **EXPERTS,
            "qkv_bias": False,
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
        {
            **OLD_ROPE,
            **NOT_OF_QWEN,
            "model_type": "deepseek",
            "num_experts": None,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
        },
        {"shared_expert.": "shared_experts."},
        fixed=("shared_expert_gate.weight",),
        doubled=("shared_expert.down_proj.weight",),
    ),
    "bailingmoe": Twin(
        "qwen2_moe",
        {
            **EXPERTS,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        {
            **OLD_ROPE,
            **NOT_OF_QWEN,
            "model_type": "bailing_moe",
            "num_shared_experts": 2,
            "first_k_dense_replace": 0,
            "use_bias": False,
            "use_qkv_bias": False,
            "norm_head": False,
            "norm_softmax": False,
        },
        {**BAILING_NAMES, "shared_expert.": "shared_experts."},
        is_by_group=False,
        fixed=("shared_expert_gate.weight",),
        doubled=("shared_expert.down_proj.weight",),
    ),
    "bailingmoe2": Twin(
        "glm4_moe",
        {
            "head_dim": 12,  # llama.cpp takes for granted that heads have the hidden size
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
        },
        {
            **OLD_ROPE,
            "model_type": "bailing_moe",
            "partial_rotary_factor": 0.5,
            "attention_bias": None,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts": 8,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 24,
            "moe_router_enable_expert_bias": True,
            "score_function": "sigmoid",
            "use_bias": False,
            "use_qkv_bias": False,
        },
        {
            "e_score_correction_bias": "expert_bias",
            "self_attn.q_norm": "attention.query_layernorm",
            "self_attn.k_norm": "attention.key_layernorm",
            **BAILING_NAMES,
        },
        is_by_group=False,
    ),
    "qwen": Twin(
        "qwen2",
        {"num_key_value_heads": 4},
        {
            **OLD_ROPE,
            **NOT_OF_QWEN,
            "model_type": "qwen",
            "rope_theta": None,
            "rms_norm_eps": None,
            "num_key_value_heads": None,
            "hidden_act": None,
            "intermediate_size": 112,
            "kv_channels": 12,
            "layer_norm_epsilon": 1e-6,
            "max_position_embeddings": 256,
            "seq_length": 64,
            "rotary_pct": 1.0,
            "rotary_emb_base": 10000,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "no_bias": True,
            "scale_attn_weights": True,
        },
        {
            "model.": "transformer.",
            "embed_tokens": "wte",
            "layers.": "h.",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn.q_proj": "attn.c_attn",
            "self_attn.k_proj": "attn.c_attn",
            "self_attn.v_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.w1",
            "mlp.gate_proj": "mlp.w2",
            "mlp.down_proj": "mlp.c_proj",
            "transformer.norm": "transformer.ln_f",
        },
        is_by_group=False,
    ),
    "baichuan": Twin(
        "llama",
        {"num_key_value_heads": 4},
        {
            "model_type": "baichuan",
            "rope_parameters": None,
            "num_key_value_heads": None,
            "attention_bias": None,
            "mlp_bias": None,
            "head_dim": None,
        },
        {
            "self_attn.q_proj": "self_attn.W_pack",
            "self_attn.k_proj": "self_attn.W_pack",
            "self_attn.v_proj": "self_attn.W_pack",
        },
        is_by_group=False,
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
            if not key.endswith(twin.fixed):
                groups.setdefault(named_by(twin, key), []).append(key)
        shapes: dict[str, list[int]] = {}
        weights: dict[str, Any] = {}
        for theirs, keys in sorted(groups.items()):
            shapes[theirs] = [sum(own[key][0] for key in keys), *own[keys[0]][1:]]
            whole = drawn(theirs, tuple(shapes[theirs]))
            sizes = {key: own[key][0] for key in keys}
            is_by_group = twin.is_by_group and len(keys) > 1
            weights |= of_groups(whole, keys) if is_by_group else in_sequence(whole, sizes)
        for key, shape in own.items():
            if key.endswith(twin.fixed):
                weights[key] = np.zeros(shape, np.float32)
            elif key.endswith(twin.doubled):
                weights[key] = 2 * weights[key]
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


def in_sequence(whole: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Queries, keys and values of rows that come one after the other."""
    names = sorted(sizes, key=lambda name: "qkv".find(name.split("_proj")[0][-1]))
    ends = np.cumsum([sizes[name] for name in names])[:-1]
    parts = np.split(whole, ends)
    return {name: np.ascontiguousarray(part) for name, part in zip(names, parts, strict=True)}


def save_model(model_type: str, settings: dict[str, Any], folder: Path) -> dict[str, list[int]]:
    """The shapes of its tensors, by name."""
    given = {key: value for key, value in {**SIZES, **settings}.items() if value is not ...}
    config = transformers.AutoConfig.for_model(model_type, **given)
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
