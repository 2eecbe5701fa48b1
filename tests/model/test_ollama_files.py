"""GGUF files of Ollama's own converters give the logits of llama.cpp's of the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drawn_families import drawn_config, write_drawn
from tests.executors.reference.plans import logits, row
from tests.fixture_files import FIXTURES
from tests.model.gguf_copies import write_gguf
from tests.model.gguf_families import Floats, Written, write_family

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.executors.reference import ReferenceExecutor
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import write_gguf as write_fields
from quire.model.loading import load_model, read_tokenizer
from quire.model.rope import LinearScaling

Fields = dict[str, Any]
Tensors = dict[str, Floats]
EYE = {"v.blk.0.attn_k.weight": np.ones((4, 4), np.float32), "mm.input.weight": np.ones(4, "<f4")}


def renamed(items: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): value for name, value in items.items()}


def gemma3(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "rope.freq_base", "rope.global.freq_base")
    del fields["gemma3.attention.layer_norm_rms_epsilon"]
    own = {"gemma3.rope.local.freq_base": 1e4, "gemma3.vision.block_count": 27}
    return fields | own | {"gemma3.mm.tokens_per_image": 256}, tensors | EYE


def gemma4(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    own = {"gemma4.audio.block_count": 3, "gemma4.vision.projector.scale_factor": 3}
    tensors = renamed(tensors, "ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale")
    return fields | own, tensors | EYE | {"a.conv1d.0.weight": np.ones((3, 3), np.float32)}


def gpt_oss(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "gpt-oss.", "gptoss.") | {"general.architecture": "gptoss"}
    for key in ("rope.scaling.type", "expert_feed_forward_length"):
        del fields[f"gptoss.{key}"]
    for old, new in (
        ("attn_output.", "attn_out."),
        ("attn_sinks.weight", "attn_sinks"),
        ("post_attention_norm", "ffn_norm"),
    ):
        tensors = renamed(tensors, old, new)
    return fields, tensors


def llama4(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return fields | {"llama4.use_qk_norm": True, "llama4.attention.chunk_size": 8192}, tensors | EYE


def mistral3(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "rope.scaling.yarn_log_multiplier", "rope.scaling.mscale_all_dim")
    fields = renamed(fields, "attention.temperature_scale", "rope.scaling_beta")
    own = {"rope.scaling.beta_fast": 32.0, "rope.scaling.beta_slow": 1.0, "image_token_index": 10}
    return fields | {f"mistral3.{key}": value for key, value in own.items()}, tensors | EYE


def olmo3(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return renamed(fields, "olmo2.", "olmo3.") | {"general.architecture": "olmo3"}, tensors


def glm4moelite(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "deepseek2.", "glm4moelite.")
    fields |= {"general.architecture": "glm4moelite"}
    for name in ("key", "value"):
        cached, own = (f"glm4moelite.attention.{name}_length{end}" for end in ("", "_mla"))
        fields |= {cached: fields[own], own: fields[cached]}
    return fields, tensors


def qwen25vl(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "qwen2vl.", "qwen25vl.") | {"general.architecture": "qwen25vl"}
    fields["qwen25vl.rope.mrope_section"] = fields.pop("qwen25vl.rope.dimension_sections")
    return fields | {"qwen25vl.vision.block_count": 32}, tensors | EYE


def qwen3vlmoe(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    fields = renamed(fields, "qwen3moe.", "qwen3vlmoe.") | {"general.architecture": "qwen3vlmoe"}
    return fields | {"qwen3vlmoe.vision.block_count": 27}, tensors | EYE


def qwen35(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """With experts or without; what predicts further tokens is there by names of its own."""
    name = fields["general.architecture"]
    fields[f"{name}.rope.dimension_sections"] = [2, 1, 1]
    own: Fields = {
        "attention.head_count_kv": [0, 0, 0, 2],
        "image_token_id": 9,
        "mrope_sections": [2, 1, 1],
        "rope.mrope_interleaved": True,
        "rope.mrope_section": [2, 1, 1],
        "ssm.v_head_reordered": True,
        "vision.block_count": 27,
        "vision_end_token_id": 8,
        "vision_start_token_id": 7,
    }
    if f"{name}.expert_count" in fields:
        own |= {"norm_top_k_prob": True, "feed_forward_length": 0}
    fields |= {f"{name}.{key}": value for key, value in own.items()}
    tensors = renamed(tensors, "ssm_dt.bias", "ssm_dt")
    return fields, tensors | EYE | {"mtp.fc.weight": np.ones((4, 4), np.float32)}


def qwen3next(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return fields | {"qwen3next.norm_top_k_prob": True}, renamed(tensors, "ssm_dt.bias", "ssm_dt")


def lfm2(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    unadjusted = {"lfm2.feed_forward_length": 9 * fields["lfm2.feed_forward_length"]}
    return fields | unadjusted, renamed(tensors, "token_embd_norm", "output_norm")


def computed(path: Path) -> Floats:
    with load_model(path) as model:
        executor = ReferenceExecutor(model, num_blocks=4)
        found = logits(executor, row(range(3, 35), range(4)))
        executor.close()
    return found


def rewritten(path: Path, change: Callable[[Fields, Tensors], tuple[Fields, Tensors]]) -> Path:
    with GGUFFile(path) as file:
        fields: Fields = dict(file.metadata)
        tensors = {name: tensor.to_float32() for name, tensor in file.tensors.items()}
    fields, tensors = change(fields, tensors)
    target = path.with_suffix(".ollama")
    write_fields(target, fields, [Written(name, weights) for name, weights in tensors.items()])
    return target


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gemma3", gemma3),
        ("gemma4-experts", gemma4),
        ("gpt-oss", gpt_oss),
        ("llama4", llama4),
        ("ministral3", mistral3),
        ("olmo3", olmo3),
        ("deepseek2", glm4moelite),
        ("qwen2", qwen25vl),
        ("qwen3moe", qwen3vlmoe),
        ("qwen35", qwen35),
        ("qwen35moe", qwen35),
        ("qwen3next", qwen3next),
        ("lfm2", lfm2),
    ],
)
def test_files_of_ollama_run_as_llama_cpps_do(
    case: str, change: Callable[[Fields, Tensors], tuple[Fields, Tensors]], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    if case == "qwen2":
        with load_model(FIXTURES / "families" / case) as model:
            write_gguf(model, path, "qwen2vl")
    else:
        with load_model(write_drawn(case, tmp_path / case)) as model:
            write_family(case, drawn_config(case), model, path)
    assert computed(rewritten(path, change)).tobytes() == computed(path).tobytes()


def test_heads_of_values_that_are_grouped_in_a_qwen35_of_ollama_are_taken_as_they_are(
    tmp_path: Path,
) -> None:
    """As its converter writes Qwen3-Next by that name; what is divided by groups is refused where
    heads take turns instead."""

    def grouped(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields = renamed(fields, "qwen3next.", "qwen35moe.")
        fields |= {"general.architecture": "qwen35moe", "qwen35moe.ssm.v_head_reordered": False}
        return fields, tensors

    def untold(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = grouped(fields, tensors)
        del fields["qwen35moe.ssm.v_head_reordered"]
        return fields, tensors

    with load_model(write_drawn("qwen3next", tmp_path / "folder")) as model:
        path = write_family("qwen3next", drawn_config("qwen3next"), model, tmp_path / "model.gguf")
    assert computed(rewritten(path, grouped)).tobytes() == computed(path).tobytes()
    with pytest.raises(ModelFileError, match=r"ssm_alpha\.weight .* is missing"):
        load_model(rewritten(path, untold))


def test_large_gemma3_of_ollama_has_the_rope_scaling_that_its_file_leaves_out(
    tmp_path: Path,
) -> None:
    def long(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = gemma3(fields, tensors)
        fields = {key: value for key, value in fields.items() if ".scaling." not in key}
        return fields | {"gemma3.context_length": 131_072}, tensors

    with load_model(write_drawn("gemma3", tmp_path / "folder")) as model:
        path = write_family("gemma3", drawn_config("gemma3"), model, tmp_path / "model.gguf")
    with load_model(rewritten(path, long)) as model:
        scalings = [
            layer.attention.rope and layer.attention.rope.scaling for layer in model.spec.layers
        ]
    assert scalings == [LinearScaling(8.0) if index == 5 else None for index in range(7)]


def test_tokens_of_pictures_behind_the_embeddings_rows_are_left_out(tmp_path: Path) -> None:
    def with_tokens(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        tokens = [f"t{number}" for number in range(64)]
        own: Fields = {"tokenizer.ggml.tokens": [*tokens, "<image_soft_token>"]}
        own |= {"tokenizer.ggml.token_type": [1] * 65, "tokenizer.ggml.model": "llama"}
        return gemma3(fields, tensors)[0] | own, tensors

    with load_model(write_drawn("gemma3", tmp_path / "folder")) as model:
        path = write_family("gemma3", drawn_config("gemma3"), model, tmp_path / "model.gguf")
    with GGUFFile(rewritten(path, with_tokens)) as file:
        assert len(file.metadata.texts("tokenizer.ggml.tokens")) == 64
        assert len(file.metadata.integers("tokenizer.ggml.token_type")) == 64


def test_what_is_not_known_in_a_file_of_ollama_is_refused(tmp_path: Path) -> None:
    def odd(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = gpt_oss(fields, tensors)
        return fields | {"gptoss.attention.twist": 2}, tensors

    with load_model(write_drawn("gpt-oss", tmp_path / "folder")) as model:
        path = write_family("gpt-oss", drawn_config("gpt-oss"), model, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"gpt-oss\.attention\.twist"):
        load_model(rewritten(path, odd))


@pytest.mark.parametrize(
    ("case", "own", "told"),
    [
        ("gpt-oss", {"gpt-oss.block_count": 7}, "block_count is another value than"),
        ("gpt-oss", {"tokenizer.ggml.pre": [1, 2]}, r"pre must be a string|pre = "),
        ("gpt-oss", {"tensor": "blk.0.attn_output.weight"}, "by Ollama's and by llama.cpp's name"),
        ("gemma3", {"gemma3.rope.freq_base": 5.0}, "is another value than that of"),
        ("gemma3", {"gemma3.rope.global.freq_base": [1.0, 2.0]}, "must be a finite number"),
        ("gemma3", {"gemma3.context_length": "long"}, "must be an integer"),
    ],
)
def test_what_a_file_of_ollama_contradicts_or_says_wrongly_is_a_model_file_error(
    case: str, own: Fields, told: str, tmp_path: Path
) -> None:
    def wrong(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
        fields, tensors = {"gpt-oss": gpt_oss, "gemma3": gemma3}[case](fields, tensors)
        if "tensor" in own:
            return fields, tensors | {own["tensor"]: np.ones((4, 4), np.float32)}
        tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
        return fields | tokens | {"tokenizer.ggml.merges": ["a b"]} | own, tensors

    with load_model(write_drawn(case, tmp_path / "folder")) as model:
        path = write_family(case, drawn_config(case), model, tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=told), load_model(rewritten(path, wrong)) as model:
        read_tokenizer(model)
