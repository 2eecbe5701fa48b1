"""Makes tests/fixtures/families: tiny random models of each family, with logits by transformers.

Needs torch and transformers, which the tests do not; run it in an environment of its own:

    pip install torch==2.13.0 transformers==5.22.2 safetensors
    python tests/oracles/make_family_goldens.py tests/fixtures/families

The weights follow from a seed. Each folder holds config.json and model.safetensors as transformers
writes them, and golden.npz: `tokens` [40] and `logits` [40, vocabulary] in float32.
"""

import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers  # type: ignore[import-not-found,unused-ignore]

NUM_TOKENS = 40
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Case(NamedTuple):
    name: str
    model_type: str
    dtype: torch.dtype  # of the stored weights; logits are computed in float32 from these
    settings: dict[str, Any]


CASES = (
    Case("llama", "llama", torch.float32, {}),
    Case(
        "llama-linear-biased-tied",
        "llama",
        torch.float16,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        },
    ),
    Case(
        "llama3",
        "llama",
        torch.bfloat16,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 50000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    Case("mistral", "mistral", torch.bfloat16, {"sliding_window": 5}),
    Case(
        "qwen2",
        "qwen2",
        torch.bfloat16,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    Case(
        "qwen2-yarn",
        "qwen2",
        torch.float16,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    Case("qwen3", "qwen3", torch.bfloat16, {"head_dim": 16, "tie_word_embeddings": True}),
    Case("bitnet", "bitnet", torch.bfloat16, {"tie_word_embeddings": True}),
)


def main(folder: Path) -> None:
    for seed, case in enumerate(CASES):
        target = folder / case.name
        shutil.rmtree(target, ignore_errors=True)
        make(case, seed, target)
        size = sum(file.stat().st_size for file in target.iterdir())
        print(f"{case.name}: {size} bytes")


def make(case: Case, seed: int, target: Path) -> None:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(case.model_type, **SIZES, **case.settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    draw_weights(model)
    model.to(case.dtype).save_pretrained(target)
    (target / "generation_config.json").unlink(missing_ok=True)
    stored = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    with torch.no_grad():
        logits = stored.eval()(tokens[None]).logits[0]
    np.savez_compressed(
        target / "golden.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy()
    )


def draw_weights(model: torch.nn.Module) -> None:
    """Weights strong enough that every part of a layer shows in the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.2)
            elif weight.ndim == 1:
                weight.normal_(0.0, 0.3)
            else:
                weight.normal_(0.0, 1.4 / weight.shape[1] ** 0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
