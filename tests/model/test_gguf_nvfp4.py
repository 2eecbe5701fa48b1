"""GGUF files in NVFP4 as llama.cpp converts checkpoints to them: a scale for a whole matrix, or for
each of a stack of experts, is a tensor of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.reference.plans import logits, row

from quire import LLM
from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.executors.reference import ReferenceExecutor
from quire.loader.gguf_writer import write_gguf
from quire.loader.tensor import Tensor
from quire.model.dummy import DummyModel
from quire.model.loading import load_model
from quire.quant.formats import format_named

Floats = npt.NDArray[np.float32]
TOKENS = list(range(3, 19))
EXPERTS = 8


def floats(name: str, values: Floats) -> Tensor:
    return Tensor(name, values.shape, format_named("F32", name), values.view(np.uint8))


def scales_of(model: DummyModel) -> dict[str, Floats]:
    """Of most matrices of the layers, of none of values."""
    found: dict[str, Floats] = {}
    for tensor in model.planned:
        stem = tensor.name.removesuffix(".weight")
        if tensor.format.name == "NVFP4" and "attn_v" not in stem:
            count = EXPERTS if stem.endswith("_exps") else 1
            seed = np.random.default_rng(len(found))
            found[f"{stem}.scale"] = seed.uniform(0.5, 2, count).astype(np.float32)
    return found


def write(path: Path, name: str, more: dict[str, Floats]) -> Path:
    model = DummyModel(name)
    fields: dict[str, Any] = dict(model.fields)
    tensors = [*model.make_tensors().values(), *(floats(*item) for item in more.items())]
    write_gguf(path, fields, tensors)
    return path


@pytest.mark.parametrize("name", ["dummy:tiny:NVFP4", "dummy:tiny-moe:NVFP4"])
def test_matrices_are_multiplied_by_their_scales(name: str, tmp_path: Path) -> None:
    scales = scales_of(DummyModel(name))
    inputs = {name.replace(".scale", ".input_scale"): values for name, values in scales.items()}
    path = write(tmp_path / "a.gguf", name, scales | inputs)
    with load_model(name) as plain, load_model(path) as model:
        for own, tensor in model.tensors.items():
            factors = scales.get(own.replace(".weight", ".scale"), np.ones(1, np.float32))
            shape = (-1, *[1] * (len(tensor.shape) - 1))
            wanted = plain.tensors[own].to_float32() * factors.reshape(shape)
            assert np.array_equal(tensor.to_float32(), wanted), own
        formats = {tensor.format.name for tensor in model.tensors.values()}
        assert formats == {"F32", "BF16", "NVFP4", "NVFP4_128"}
        executor = ReferenceExecutor(model, num_blocks=16, block_size=4)
        exact = logits(executor, row(TOKENS, range(8)))
        executor.close()
    with LLM(path, device="cpu", kv_memory="8MiB") as llm:
        found = np.asarray(llm.forward_batch([TOKENS])[0], np.float32)
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.median(errors) < 5e-2  # activations are rounded


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            np.ones(2, np.float32),
            r"attn_q.scale has type F32 and shape \[2\], expected F32 and \[1\]",
        ),
        (np.full(1, np.nan, np.float32), "attn_q.scale has scales that are no numbers"),
    ],
)
def test_broken_scales_are_refused_by_name(scale: Floats, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "dummy:tiny:NVFP4", {"blk.0.attn_q.scale": scale})
    with pytest.raises(ModelFileError, match=message), load_model(path) as model:
        model.tensors["blk.0.attn_q.weight"].to_float32()


def test_a_scale_beside_other_blocks_is_refused(tmp_path: Path) -> None:
    scale = {"blk.1.attn_q.scale": np.ones(1, np.float32)}
    path = write(tmp_path / "a.gguf", "dummy:tiny:Q4_0", scale)
    with pytest.raises(UnsupportedModelError, match=r"blk.1.attn_q.scale"):
        load_model(path)
