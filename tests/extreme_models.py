"""Small models of any shape and hyperparameters, of random weights, in memory or as a folder."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.model.flat_spec import flat_spec

from quire.loader.tensor import Tensor
from quire.model.dummy import DummyModel, random_blocks
from quire.model.loading import Model
from quire.model.rope import Rope
from quire.model.spec import Activation, ModelSpec, tensor_shapes
from quire.quant.formats import format_named


def small_spec(**changes: Any) -> ModelSpec:
    """A small llama's spec but for what is given; rope turns whole heads."""
    sizes: dict[str, Any] = {
        "family": "llama",
        "hidden_size": 16,
        "ffn_size": 24,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocabulary_size": 20,
        "context_length": 256,
        "norm_epsilon": 1e-5,
        "activation": Activation.SILU,
        **changes,
    }
    if "rope" not in sizes:
        sizes["rope"] = Rope(10000.0, sizes["head_dim"], interleaved=False)
    return flat_spec(**sizes)


def random_model(
    spec: ModelSpec,
    seed: int = 0,
    formats: Mapping[str, str] | None = None,
    usual_format: str = "F32",
) -> Model:
    """`formats`: of matrices, by their names without layer and suffix; a matrix whose rows do not
    fill a format's blocks is in F32."""
    rng = np.random.Generator(np.random.SFC64(seed))
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        wanted = usual_format
        for part, other in (formats or {}).items():
            if name.split(".")[-2] == part:
                wanted = other
        block_format = format_named(wanted, name)
        is_vector = len(shape) == 1 or name.endswith("ssm_a.weight")
        if is_vector or shape[-1] % block_format.block_size:
            block_format = format_named("F32", name)
        if is_vector:
            values = 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
            if name.endswith("ssm_a.weight"):  # a state decays
                values = -values
            data = values.astype("<f4").view(np.uint8)
        else:
            size = shape[-1] ** -0.5
            data = random_blocks(block_format, math.prod(shape), size, rng)
        tensors[name] = Tensor(name, shape, block_format, data)
    return Model(spec, tensors, DummyModel("dummy:tiny"))


def write_folder(folder: Path, **config: Any) -> Path:
    """A llama as transformers saves one; `config` overrides fields of its config.json."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    hidden, ffn = fields["hidden_size"], fields["intermediate_size"]
    queries = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (fields["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(fields["num_hidden_layers"]):
        own = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder
