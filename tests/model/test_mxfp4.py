"""gpt-oss's experts in MXFP4 as Hugging Face keeps them: what they are worth, and refusals."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from tests.drawn_families import DRAWN, drawn_config
from tests.executors.reference.plans import logits, row
from tests.oracles.drawn_weights import drawn

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, load_model

Array = npt.NDArray[Any]
SIZES = {48: 64, 56: 96, 112: 192}  # of the drawn model, to such as blocks of 32 fill
CONFIG = {"hidden_size": 64, "intermediate_size": 96}
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
# A float of four bits: a sign, two bits of exponent, one of fraction.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def is_expert(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


def packed_experts(name: str, shape: tuple[int, ...]) -> dict[str, Array]:
    """`shape`: [experts, in, out], as floats are kept; in blocks matrices are [out, in]."""
    experts, in_size, out_size = shape
    generator = np.random.default_rng(len(name))
    blocks = generator.integers(0, 256, (experts, out_size, in_size // 32, 16), np.uint8)
    scales = generator.integers(121, 124, (experts, out_size, in_size // 32), np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def dequantised(blocks: Array, scales: Array) -> Array:
    """Floats [experts, in, out]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    values = np.where(codes & 8, -1, 1).astype(np.float32) * E2M1[codes & 7]
    weights = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
    flat = weights.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return np.ascontiguousarray(flat)


def weights_in_mxfp4() -> dict[str, Array]:
    weights: dict[str, Array] = {}
    for name, drawn_shape in json.loads((DRAWN / "gpt-oss" / "tensors.json").read_text()).items():
        shape = tuple(SIZES.get(size, size) for size in drawn_shape)
        weights |= packed_experts(name, shape) if is_expert(name) else {name: drawn(name, shape)}
    return weights


def as_floats(weights: Mapping[str, Array]) -> dict[str, Array]:
    found = {n: w for n, w in weights.items() if not n.endswith(("_blocks", "_scales"))}
    for name in weights:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            found[stem] = dequantised(weights[name], weights[f"{stem}_scales"])
    return found


def write(folder: Path, weights: Mapping[str, Array], **more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = drawn_config("gpt-oss") | CONFIG | more
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def computed(model: Model) -> Array:
    executor = ReferenceExecutor(model, num_blocks=16, block_size=4)
    found = logits(executor, row(list(range(3, 33)), range(8)))
    executor.close()
    return found


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    return weights_in_mxfp4()


def test_experts_stay_in_blocks_and_are_worth_what_they_stand_for(
    weights: dict[str, Array], tmp_path: Path
) -> None:
    path = write(tmp_path, weights, quantization_config=METHOD)
    stem = "model.layers.2.mlp.experts"
    with load_model(path) as model:
        found = model.tensors
        for index, part in enumerate(("gate", "up")):  # rows take turns
            gate_up = dequantised(
                weights[f"{stem}.gate_up_proj_blocks"], weights[f"{stem}.gate_up_proj_scales"]
            )
            own = found[f"blk.2.ffn_{part}_exps.weight"]
            assert own.format.name == "MXFP4"
            assert np.array_equal(own.to_float32(), gate_up[:, :, index::2].swapaxes(1, 2))
        down = dequantised(weights[f"{stem}.down_proj_blocks"], weights[f"{stem}.down_proj_scales"])
        own = found["blk.2.ffn_down_exps.weight"]
        assert np.array_equal(own.to_float32(), down.swapaxes(1, 2))
        raw = own.data
        assert own.read(29, own.nbytes - 31).tobytes() == raw[29:-31].tobytes()
    theirs = gguf.quants.dequantize(raw.reshape(-1, 17), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(theirs.reshape(own.shape), down.swapaxes(1, 2))


def test_experts_in_mxfp4_give_the_bits_of_the_same_experts_in_float32(
    weights: dict[str, Array], tmp_path: Path
) -> None:
    with load_model(write(tmp_path / "a", weights, quantization_config=METHOD)) as model:
        assert model.tensors["blk.0.ffn_up_exps.weight"].format.name == "MXFP4"
        packed = computed(model)
    with load_model(write(tmp_path / "b", as_floats(weights))) as model:
        assert model.tensors["blk.0.ffn_up_exps.weight"].format.name == "F32"
        floats = computed(model)
        other = replace(model, tensors={**model.tensors, **swapped(model)})
        assert computed(other).tobytes() != floats.tobytes()
    assert packed.tobytes() == floats.tobytes()


def swapped(model: Model) -> dict[str, Any]:
    """Gate for up in one layer: which the logits must show."""
    gate, up = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up"))
    return {gate: model.tensors[up], up: model.tensors[gate]}


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{EXPERTS}.down_proj_scales": None}, "blk.1.ffn_down_exps.blocks has no scales"),
        ({f"{EXPERTS}.down_proj_blocks": None}, "blk.1.ffn_down_exps.scales has no blocks"),
        (
            {f"{EXPERTS}.down_proj_scales": np.zeros((8, 64, 2), np.uint8)},
            r"ffn_down_exps: blocks of shape \[8, 64, 3, 16\] and scales of shape \[8, 64, 2\]",
        ),
        (
            {f"{EXPERTS}.down_proj_scales": np.zeros((8, 64, 3), np.float32)},
            "blk.1.ffn_down_exps: blocks and scales of MXFP4 are bytes",
        ),
        (
            {
                f"{EXPERTS}.gate_up_proj_blocks": np.zeros((8, 191, 2, 16), np.uint8),
                f"{EXPERTS}.gate_up_proj_scales": np.zeros((8, 191, 2), np.uint8),
            },
            "blk.1.ffn_gate_up_exps.weight has 191 rows: gate and up take turns",
        ),
    ],
)
def test_broken_pairs_are_refused_by_name(
    change: dict[str, Array | None], message: str, weights: dict[str, Array], tmp_path: Path
) -> None:
    changed = {name: w for name, w in (weights | change).items() if w is not None}
    with pytest.raises(ModelFileError, match=message):
        load_model(write(tmp_path, changed, quantization_config=METHOD))


def test_bytes_mean_nothing_without_the_configuration_and_other_options_are_refused(
    weights: dict[str, Array], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="such numbers are weights only where"):
        load_model(write(tmp_path, weights))
    with pytest.raises(UnsupportedModelError, match="block_size"):
        load_model(write(tmp_path, weights, quantization_config={**METHOD, "block_size": 16}))
