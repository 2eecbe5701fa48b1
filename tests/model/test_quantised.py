"""Quantised checkpoints: weights are what their publishers' formulas say, and stay in blocks."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.reference.plans import logits, row
from tests.model.quantised_files import (
    Quantise,
    Stored,
    awq,
    compressed_bytes,
    compressed_packed,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    quantised,
    stored,
    write_checkpoint,
)

from quire import LLM
from quire.core.errors import ModelFileError, QuireError, UnsupportedModelError
from quire.executors.reference import ReferenceExecutor
from quire.loader.safetensors import SafetensorsFolder
from quire.model.loading import load_model
from quire.model.quantised import linears_joined

Array = npt.NDArray[Any]
TOKENS = list(range(3, 33))
BLOCKS: dict[str, object] = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
WHOLE: dict[str, object] = {
    "quant_method": "fp8",
    "weight_block_size": None,
    "activation_scheme": "static",
}
AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
NVFP4: dict[str, object] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
    "ignore": ["lm_head"],
}
FP8 = "E4M3_128"


def compressed(kind: str, bits: int, **weights: object) -> dict[str, object]:
    """As llm-compressor writes it; which linears are ignored, none of which is quantised here."""
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"group_0": group | {"input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.15.0",
    }


SCHEMES: dict[str, tuple[Quantise, dict[str, object], str]] = {
    "fp8-blocks": (fp8((128, 128)), BLOCKS, FP8),
    "fp8-wide-blocks": (fp8((64, 256), "BF16"), BLOCKS | {"weight_block_size": [64, 256]}, FP8),
    "fp8-tensor": (fp8(None, "BF16"), WHOLE, FP8),
    "fp8-rows": (
        fp8(None, name="weight_scale", by_row=True),
        {"quant_method": "fbgemm_fp8"},
        FP8,
    ),
    "modelopt": (
        fp8(None, name="weight_scale"),
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}},
        FP8,
    ),
    "modelopt-nvfp4": (nvfp4(), NVFP4, "NVFP4_128"),
    "awq": (awq(), AWQ, "Q5_0"),
    "awq-64": (awq(64), AWQ | {"group_size": 64}, "Q5_0"),
    "awq-rows": (awq(0), AWQ | {"group_size": -1}, "Q5_0"),
    "awq-bf16": (awq(128, "BF16"), AWQ, "U4_128"),
    "gptq": (gptq(), GPTQ, "Q4_0"),
    "gptq-32": (gptq(group=32), GPTQ | {"group_size": 32}, "Q4_0"),
    "gptq-rows": (gptq(group=0), GPTQ | {"group_size": -1}, "Q4_0"),
    "gptq-bf16": (gptq(dtype="BF16"), GPTQ, "U4_128"),
    "gptq-64-bf16": (gptq(group=64, dtype="BF16"), GPTQ | {"group_size": 64}, "Q4_0"),
    "gptq-zeros": (gptq(has_zeros=True), GPTQ | {"sym": False}, "Q5_0"),
    "gptq-v2": (
        gptq(has_zeros=True, version=2),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        "Q5_0",
    ),
    "gptq-8": (gptq(8), GPTQ | {"bits": 8}, "Q8_0"),
    "gptq-8-f32": (gptq(8, dtype="F32"), GPTQ | {"bits": 8}, "I8_128"),
    "ct-fp8-tensor": (fp8(None, "BF16", "weight_scale"), compressed("float", 8), FP8),
    "ct-fp8-rows": (
        fp8(None, "BF16", "weight_scale", by_row=True),
        compressed("float", 8, strategy="channel"),
        FP8,
    ),
    "ct-fp8-blocks": (
        fp8((128, 128), "BF16", "weight_scale"),
        compressed("float", 8, strategy="block", block_structure=[128, 128]),
        FP8,
    ),
    "ct-fp8-groups": (fp8((1, 128), "F32", "weight_scale"), compressed("float", 8), FP8),
    "ct-nvfp4": (
        nvfp4(is_divided=True),
        compressed("float", 4, strategy="tensor_group", group_size=16),
        "NVFP4_128",
    ),
    "ct-mxfp4": (mxfp4(), compressed("float", 4, strategy="group", group_size=32), "MXFP4"),
    "ct-4": (compressed_packed(), compressed("int", 4, group_size=128), "U4_128"),
    "ct-4-f32": (compressed_packed(dtype="F32", has_zeros=True), compressed("int", 4), "U4_128"),
    "ct-4-f16": (compressed_packed(group=32, dtype="F16"), compressed("int", 4), "Q4_0"),
    "ct-4-rows": (compressed_packed(group=0), compressed("int", 4, strategy="channel"), "U4_128"),
    "ct-4-zeros": (
        compressed_packed(has_zeros=True),
        compressed("int", 4, symmetric=False),
        "U4_128",
    ),
    "ct-4-zeros-f16": (
        compressed_packed(dtype="F16", has_zeros=True, are_zeros_packed=False),
        compressed("int", 4, symmetric=False),
        "Q5_0",
    ),
    "ct-4-32": (compressed_packed(group=32), compressed("int", 4, group_size=32), "Q4_0"),
    "ct-8": (compressed_packed(8), compressed("int", 8, group_size=128), "I8_128"),
    "ct-bytes": (compressed_bytes(), compressed("int", 8, strategy="channel"), "I8_128"),
    "ct-bytes-f16": (compressed_bytes(64, "F16"), compressed("int", 8, group_size=64), "Q8_0"),
}


@cache
def checkpoint(model: str, scheme: str) -> tuple[dict[str, Stored], dict[str, Array]]:
    return quantised(model, SCHEMES[scheme][0])


def reference_logits(path: Path) -> Array:
    with load_model(path) as model:
        executor = ReferenceExecutor(model, num_blocks=16, block_size=4)
        found = logits(executor, row(TOKENS, range(8)))
        executor.close()
    return found


def cpu_logits(path: Path) -> Array:
    with LLM(path, device="cpu", kv_memory="8MiB") as llm:
        return np.asarray(llm.forward_batch([TOKENS])[0], np.float32)


def our_name(name: str) -> str:
    """Of tensors of layers that no expert is among."""
    names = {"q_proj": "attn_q", "o_proj": "attn_output", "down_proj": "ffn_down"}
    _, _, layer, _, module, _ = name.split(".")
    return f"blk.{layer}.{names[module]}.weight"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_what_the_formula_says_and_stay_in_blocks(scheme: str, tmp_path: Path) -> None:
    _, method, kind = SCHEMES[scheme]
    tensors, floats = checkpoint("ministral3", scheme)
    path = write_checkpoint(tmp_path, "ministral3", tensors, method)
    with load_model(path) as model:
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.1.{module}.weight"
            own = model.tensors[our_name(name)]
            assert own.format.name == kind
            assert np.array_equal(own.to_float32(), floats[name])
            raw = own.data
            assert len(raw) == own.num_weights // own.format.block_size * own.format.block_bytes
            assert own.read(29, own.nbytes - 31).tobytes() == raw[29:-31].tobytes()


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        *(("ministral3", scheme) for scheme in ("fp8-tensor", "gptq", "gptq-8", "ct-bytes")),
        *(("qwen3moe", scheme) for scheme in ("modelopt-nvfp4", "ct-mxfp4")),
        ("deepseek2", "ct-nvfp4"),
        *(
            (model, scheme)
            for model in ("deepseek2", "qwen3moe")
            for scheme in ("fp8-blocks", "awq", "gptq-bf16")
        ),
    ],
)
def test_logits_are_those_of_the_same_weights_as_floats(
    model: str, scheme: str, tmp_path: Path
) -> None:
    _, method, kind = SCHEMES[scheme]
    tensors, floats = checkpoint(model, scheme)
    path = write_checkpoint(tmp_path / "a", model, tensors, method)
    found = reference_logits(path)
    as_floats = write_checkpoint(tmp_path / "b", model, floats)
    assert found.tobytes() == reference_logits(as_floats).tobytes(), "of the very same weights"
    # On the CPU activations are floats beside floats, these among them, and bytes beside others.
    expected, limit = (cpu_logits(as_floats), 5e-4) if kind == FP8 else (found, 5e-2)
    errors = np.linalg.norm(cpu_logits(path) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) <= limit  # of some tokens another expert is chosen


# ---- what is refused

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


def zeros(dtype: str, *shape: int) -> Stored:
    size = {"F32": 4, "I32": 4, "I64": 8}.get(dtype, 1)
    return Stored(dtype, shape, bytes(size * int(np.prod(shape))))


def load_changed(
    tmp_path: Path, scheme: str, change: Mapping[str, Stored | None], **more: object
) -> None:
    """Read all weights of a checkpoint in which some tensors are others, or none."""
    method = SCHEMES[scheme][1]
    tensors = {**checkpoint("ministral3", scheme)[0], **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with load_model(write_checkpoint(tmp_path, "ministral3", kept, method | more)) as model:
        for tensor in model.tensors.values():
            tensor.data  # noqa: B018 - reads


HALVES = np.ones((2, 256), np.float16)
NAN, ONE = np.full((2, 2), np.nan, np.float32), np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("fp8-blocks", {f"{Q}.weight_scale_inv": None}, f"{Q}.weight has no weight_scale_inv or"),
        ("fp8-blocks", {f"{Q}.weight": None}, f"tensor {Q}.weight is missing"),
        ("fp8-blocks", {f"{Q}.weight_scale_inv": stored(NAN)}, f"{Q}.weight_scale_inv has scales"),
        ("fp8-blocks", {f"{Q}.weight_scale_inv": stored(-ONE)}, f"{Q}.weight_scale_inv has scales"),
        (
            "fp8-blocks",
            {f"{Q}.weight_scale_inv": stored(np.ones((2, 3), np.float32))},
            rf"{Q}.weight_scale_inv has shape \[2, 3\], expected \[2, 2\]: one for each block",
        ),
        ("fp8-blocks", {f"{Q}.weight_scale_inv": zeros("U8", 2, 2)}, "has type U8: no scale's"),
        (
            "fp8-blocks",
            {f"{Q}.weight": stored(np.full((256, 256), 0xFF, np.uint8), "F8_E4M3")},
            f"tensor {Q}.weight has weights that are no numbers",
        ),
        ("fp8-blocks", {f"{Q}.weight": zeros("F32", 256, 256)}, f"{Q}.weight has type F32 and a"),
        (
            "fp8-tensor",
            {f"{Q}.weight_scale_inv": stored(np.ones((3,), np.float32))},
            rf"{Q}.weight_scale_inv has shape \[3\], expected one for the tensor, for each",
        ),
        ("fp8-blocks", {f"{Q}.qzeros": zeros("I32", 2, 32)}, f"{Q}.qzeros has no place beside"),
        ("awq", {f"{Q}.scales": None}, f"tensor {Q}.scales is missing"),
        ("awq", {f"{Q}.qweight": None}, f"tensor {Q}.qweight is missing"),
        ("awq", {f"{Q}.weight": zeros("F32", 256, 256)}, f"{Q}.weight has no place beside"),
        (
            "awq",
            {f"{Q}.qzeros": zeros("I32", 2, 31)},
            rf"{Q}.qzeros has type I32 and shape \[2, 31\], expected I32 and \[2, 32\]",
        ),
        (
            "awq",
            {f"{Q}.scales": stored(HALVES[:, :1])},
            rf"{Q}.scales has type F16 and shape \[2, 1",
        ),
        ("awq", {f"{Q}.scales": stored(HALVES * np.nan)}, f"{Q}.scales has scales that are no num"),
        ("awq", {f"{Q}.scales": stored(HALVES * np.inf)}, f"{Q}.scales has scales that are no num"),
        ("awq", {f"{Q}.scales": zeros("I8", 2, 256)}, f"{Q}.scales has type I8 and shape"),
        ("gptq", {f"{Q}.qweight": zeros("F32", 32, 256)}, f"{Q}.qweight has type F32 and shape"),
        ("gptq", {f"{Q}.qweight": zeros("I32", 36, 256)}, f"{Q}.qzeros has type I32 and shape"),
        ("gptq", {f"{Q}.qzeros": zeros("I32", 2, 32)}, f"{Q}.qzeros has zero points, but config"),
        ("gptq", {f"{Q}.g_idx": zeros("I32", 255)}, rf"{Q}.g_idx has type I32 and shape \[255\]"),
        (
            "gptq",
            {f"{Q}.g_idx": stored(np.full(256, 2, np.int32))},
            f"{Q}.g_idx names groups 2 to 2; there are 2 of 128 columns",
        ),
        (
            "gptq",
            {f"{Q}.g_idx": stored(np.full(256, -1, np.int32))},
            f"{Q}.g_idx names groups -1 to -1",
        ),
        ("ct-4", {f"{Q}.weight_scale": None}, f"{Q}.weight has no weight_scale_inv or weight_sc"),
        ("ct-4", {f"{Q}.weight_shape": None}, f"tensor {Q}.weight_shape is missing"),
        ("ct-4", {f"{Q}.weight_shape": zeros("I64", 3)}, f"{Q}.weight_shape has type I64 and shap"),
        (
            "ct-4",
            {f"{Q}.weight_shape": zeros("I64", 2)},
            rf"{Q}.weight_shape says \[0, 0\]: with 4",
        ),
        (
            "ct-4",
            {f"{Q}.weight_shape": stored(np.array([256, -(2**62)]))},
            rf"{Q}.weight_packed has shape \[256, 32\], but {Q}.weight_shape says \[256, -4611",
        ),
        ("ct-4", {f"{Q}.weight_packed": zeros("I32", 256, 33)}, rf"has shape \[256, 33\], but {Q}"),
        ("ct-4", {f"{Q}.weight_packed": zeros("F32", 256, 32)}, f"{Q}.weight_packed has type F32"),
        ("ct-4", {f"{Q}.qzeros": zeros("I32", 2, 32)}, f"{Q}.qzeros has no place beside"),
        (
            "ct-4",
            {f"{Q}.weight_scale": stored(np.ones((256, 3), np.float32))},
            rf"{Q}.weight_scale has shape \[256, 3\], expected one for the tensor, for each",
        ),
        (
            "ct-4-zeros",
            {f"{Q}.weight_zero_point": zeros("I32", 31, 2)},
            rf"{Q}.weight_zero_point has type I32 and shape \[31, 2\], expected I32 and \[32, 2\]",
        ),
        (
            "ct-4-zeros",
            {f"{Q}.weight_zero_point": stored(np.full((256, 2), 8, np.int8))},
            f"{Q}.weight_zero_point has zero points that are not from -8 to 7",
        ),
        (
            "ct-4",
            {f"{Q}.weight_g_idx": stored(np.full(256, 9, np.int32))},
            f"{Q}.weight_g_idx names groups 9 to 9",
        ),
        ("ct-bytes", {f"{Q}.weight_scale": None}, f"{Q}.weight has no weight_scale_inv or weight_"),
        ("modelopt-nvfp4", {f"{Q}.weight_scale": None}, f"tensor {Q}.weight_scale is missing"),
        ("modelopt-nvfp4", {f"{Q}.weight_scale_2": None}, f"{Q}.weight has type U8 and a scale"),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_scale_2": stored(np.full((1,), np.nan, np.float32))},
            f"{Q}.weight_scale_2 has scales that are no",
        ),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_scale_2": stored(np.ones((2,), np.float32))},
            rf"{Q}.weight_scale_2 has type F32 and shape \[2\], expected F32 and \[1\]",
        ),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_scale": stored(np.full((256, 16), 0x7F, np.uint8), "F8_E4M3")},
            f"{Q}.weight_scale has scales that are no",
        ),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_scale": stored(np.full((256, 16), 0x80, np.uint8), "F8_E4M3")},
            f"{Q}.weight_scale has scales that are no numbers or below 0",
        ),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_scale": zeros("F8_E4M3", 256, 8)},
            rf"{Q}.weight_scale has type F8_E4M3 and shape \[256, 8\], expected .* \[256, 16\]",
        ),
        ("modelopt-nvfp4", {f"{Q}.weight": zeros("I8", 256, 128)}, f"{Q}.weight has type I8 and"),
        (
            "modelopt-nvfp4",
            {f"{Q}.weight_shape": zeros("I64", 2)},
            f"{Q}.weight_shape has no place",
        ),
        (
            "ct-nvfp4",
            {f"{Q}.weight_global_scale": zeros("F32", 1)},
            f"{Q}.weight_global_scale is 0",
        ),
        ("ct-nvfp4", {f"{Q}.weight_scale": None}, f"tensor {Q}.weight_scale is missing"),
        ("ct-mxfp4", {f"{Q}.weight_scale": None}, f"tensor {Q}.weight_scale is missing"),
        (
            "ct-mxfp4",
            {f"{Q}.weight_scale": stored(np.full((256, 8), 0xFF, np.uint8), "U8")},
            f"{Q}.weight_scale has scales that are no numbers",
        ),
        (
            "ct-mxfp4",
            {f"{Q}.weight_scale": zeros("U8", 256, 16)},
            rf"{Q}.weight_scale has type U8 and shape \[256, 16\], expected U8 and \[256, 8\]",
        ),
    ],
)
def test_broken_linears_are_refused_by_name(
    scheme: str, change: Mapping[str, Stored | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_changed(tmp_path, scheme, change)


@pytest.mark.parametrize(
    ("scheme", "more", "message"),
    [
        ("fp8-blocks", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8-blocks", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8-blocks", {"weight_block_size": [2**70, 128]}, "two sizes from 1 to 1048576"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ("fp8-blocks", {"rotation": "hadamard"}, "rotation = 'hadamard' is not supported"),
        (
            "fp8-blocks",
            {"quant_method": "bitsandbytes"},
            "quant_method = 'bitsandbytes' is not supported; supported: fp8.*a GGUF file of it",
        ),
        ("fp8-blocks", {"quant_method": None}, "quant_method is missing"),
        (
            "modelopt",
            {"quant_algo": "NVFP4_AWQ"},
            "quant_algo = 'NVFP4_AWQ' is not supp",
        ),
        (
            "modelopt",
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {Q: {"quant_algo": "FP8"}, K: {"quant_algo": "W4A8_AWQ"}},
            },
            "quant_algo = 'W4A8_AWQ' is not supp",
        ),
        ("awq", {"version": "gemv"}, "version = 'gemv' is not supported"),
        ("awq", {"zero_point": False}, "zero_point = False is not supported"),
        ("awq", {"bits": 3}, "bits = 3 is not supported; supported: 4"),
        ("awq", {"group_size": 0}, "group_size must be an integer from 1"),
        ("awq", {"group_size": None}, "group_size is missing"),
        ("awq", {"group_size": 96}, r"qzeros has type I32 and shape .* expected I32 and \[4, 32\]"),
        ("gptq", {"bits": 3}, "bits = 3 is not supported; supported: 4, 8"),
        ("gptq", {"group_size": -2}, "group_size must be an integer from 1"),
        ("gptq-8", {"sym": False}, "sym = False is not supported; supported: true with 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
        ("gptq", {"dynamic": {"+:down": {"bits": 8}}}, "dynamic = .* is not supported"),
        ("gptq", {"dynamic": [1]}, "dynamic = .* is not supported"),
        ("ct-4", {"format": "mxfp6-pack-quantized"}, "format = .mxfp6-pack-quantized. is"),
        (
            "ct-4",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format = .sparse-24-bi",
        ),
        ("ct-4", {"transform_config": {"config_groups": {"u": 1}}}, "config_groups = .* is not"),
        (
            "ct-4",
            {"config_groups": {"g": {"weights": {"num_bits": 3}}}},
            "num_bits = 3 is not supp",
        ),
        (
            "ct-4",
            {"config_groups": {"g": {"weights": {"num_bits": 6, "type": "float"}}}},
            "num_bits = 6 is not supported; supported: 4, 8",
        ),
        (
            "ct-4",
            {"config_groups": {"g": {"weights": {"strategy": "attn_head"}}}},
            "strategy = 'attn",
        ),
        ("ct-4", {"config_groups": [1]}, "config_groups"),
        ("ct-4", {"config_groups": {"g": 1}}, "g must be an object"),
        ("ct-4", {"moe_sparsity_config": {}}, "moe_sparsity_config = {} is not supported"),
    ],
)
def test_what_config_says_otherwise_is_refused_by_name(
    scheme: str, more: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QuireError, match=message):
        load_changed(tmp_path, scheme, {}, **more)


@pytest.mark.parametrize("scheme", ["modelopt", "modelopt-nvfp4"])
def test_older_checkpoints_of_modelopt_say_it_beside_config_json(
    scheme: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, "ministral3", checkpoint("ministral3", scheme)[0])
    with pytest.raises(QuireError):
        load_model(path)
    method = {**SCHEMES[scheme][1], "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    del method["quant_method"]
    beside = path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": method}))
    with load_model(path) as model:
        assert model.tensors["blk.1.attn_q.weight"].format.name == SCHEMES[scheme][2]
    beside.write_text(json.dumps({"quantization": method | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(UnsupportedModelError, match="quant_algo = 'W4A8_AWQ' is not supported"):
        load_model(path)


def test_quantised_keys_and_values_alone_change_no_weight(tmp_path: Path) -> None:
    _, floats = checkpoint("ministral3", "modelopt")
    path = write_checkpoint(tmp_path, "ministral3", floats)
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    with load_model(path) as model:
        assert model.tensors["blk.1.attn_q.weight"].format.name == "F32"


def test_modelopt_may_mix_fp8_and_nvfp4(tmp_path: Path) -> None:
    layers = {Q: {"quant_algo": "FP8"}, K: {"quant_algo": "NVFP4", "group_size": 16}}
    weight, kept = np.ones((256, 256), np.float32), ("weight", "weight_scale", "weight_scale_2")
    parts = fp8(None, name="weight_scale")(Q, weight)[0]
    change = {f"{Q}.{name}": parts.get(f"{Q}.{name}") for name in kept}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    load_changed(tmp_path, "modelopt-nvfp4", change, **mixed)
    with load_model(tmp_path) as model:
        assert model.tensors[our_name(f"{Q}.weight")].format.name == FP8
        assert model.tensors["blk.1.attn_k.weight"].format.name == "NVFP4_128"


def test_groups_of_columns_by_their_activations_are_refused_by_name(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(256).astype(np.int32) // 128
    for desc_act in (True, False):
        tensors = checkpoint("ministral3", "gptq")[0] | {f"{Q}.g_idx": stored(order)}
        path = write_checkpoint(tmp_path, "ministral3", tensors, GPTQ | {"desc_act": desc_act})
        with pytest.raises(UnsupportedModelError, match=f"{Q}.g_idx puts columns into groups by"):
            model = load_model(path)
            assert not desc_act, "what the configuration says is checked before weights are read"
            model.tensors[our_name(f"{Q}.weight")].to_float32()


def test_zero_points_of_eight_bits_are_refused_by_name(tmp_path: Path) -> None:
    for scheme in ("ct-bytes", "ct-8"):
        change = {f"{Q}.weight_zero_point": zeros("I8", 256, 1)}
        with pytest.raises(UnsupportedModelError, match=f"{Q}.weight_zero_point: zero points of c"):
            load_changed(tmp_path, scheme, change)


def test_groups_of_neighbours_run_whatever_desc_act_says(tmp_path: Path) -> None:
    load_changed(tmp_path, "gptq", {}, desc_act=True, dynamic={"-:lm_head": {}})


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    biases = {f"{Q}.bias": stored(np.zeros(256, np.float16))}
    load_changed(tmp_path, "gptq", biases)
    with pytest.raises(
        UnsupportedModelError, match=r"blk.0.attn_q.bias \[256\] has no place in the"
    ):
        load_changed(tmp_path, "gptq", {f"{Q}.bias": stored(np.ones(256, np.float16))})


def test_words_may_have_room_for_more_rows_than_there_are(tmp_path: Path) -> None:
    """Of the zero points of 12 rows four nibbles are left, which say nothing."""
    weight = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    parts, worth = gptq()("a", weight)
    for name, kind in (("qweight", "<i4"), ("scales", "<f2")):
        values = np.frombuffer(parts[f"a.{name}"].content, kind).reshape(-1, 16)
        parts[f"a.{name}"] = stored(values[:, :12])
    parts["a.qzeros"] = stored(np.array([[0x77777777, 0x7777]] * 2, np.int32))
    path = write_checkpoint(tmp_path, "ministral3", parts)
    joined = linears_joined({"quantization_config": GPTQ}, SafetensorsFolder(path).tensors)
    assert np.array_equal(joined["a.weight"].to_float32(), worth[:12].astype(np.float32))


def test_sizes_that_blocks_do_not_fill_are_refused_by_name(tmp_path: Path) -> None:
    change = {
        f"{K}.weight": zeros("F8_E4M3", 128, 192),
        f"{K}.weight_scale_inv": stored(np.ones((1, 2), np.float32)),
    }
    with pytest.raises(UnsupportedModelError, match=rf"{K}.weight has rows of 192 .*of 128"):
        load_changed(tmp_path / "a", "fp8-blocks", change)
    change[f"{K}.weight"] = zeros("F8_E4M3", 2, 128, 192)
    with pytest.raises(UnsupportedModelError, match=rf"{K}.weight has shape .* experts one a ten"):
        load_changed(tmp_path / "b", "fp8-blocks", change)
    narrow = {"weight_block_size": [128, 64]}
    quantise = fp8((128, 64))
    path = write_checkpoint(
        tmp_path / "c", "ministral3", quantised("ministral3", quantise)[0], BLOCKS | narrow
    )
    with pytest.raises(UnsupportedModelError, match="has a scale of type F32 for each 64 columns"):
        load_model(path)
    groups = {f"{Q}.weight_scale": stored(np.ones((256, 16), np.float32))}
    with pytest.raises(UnsupportedModelError, match="has a scale of type F32 for each 16 columns"):
        load_changed(tmp_path / "d", "ct-4", groups)


@pytest.mark.parametrize("scale", [2.0**-25, 1 / 3, 65536.0])
def test_scales_of_small_groups_must_be_such_as_float16_has(scale: float, tmp_path: Path) -> None:
    for scheme, name, shape in (
        ("gptq-64-bf16", "scales", (4, 256)),
        ("ct-4-32", "weight_scale", (256, 8)),
    ):
        change = {f"{Q}.{name}": stored(np.full(shape, scale, np.float32))}
        with pytest.raises(
            UnsupportedModelError, match=f"{Q}.{name} has the scale .*, which no fl"
        ):
            load_changed(tmp_path, scheme, change)
