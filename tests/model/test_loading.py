"""Opening models: the spec and the tensors together, what they will need, and sick norms."""

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.executors.reference.plans import logits, opened, row
from tests.fixture_files import FIXTURES, fixture_file
from tests.model.gguf_copies import write_gguf
from tests.model.tensors import tensor

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.executors.reference import ReferenceExecutor
from quire.model.loading import Model, form_of, load_model, memory_estimate, norm_health

LLAMA = FIXTURES / "families" / "llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A safetensors folder that a test may spoil."""
    return Path(shutil.copytree(LLAMA, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_gguf_file_opens_with_its_metadata() -> None:
    path = fixture_file("tiny/Q4_0.gguf")
    with load_model(path) as model:
        assert model.spec.family == "llama"
        assert model.path == path
        assert model.file_bytes == path.stat().st_size
        assert model.metadata.text("general.name") == "tiny"


def test_a_folder_opens_with_its_config(folder: Path) -> None:
    with load_model(folder) as model:
        assert model.metadata.text("model_type") == "llama"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("tiny/Q4_K_M.gguf", ("gguf", "Q4_K_M")),
        ("tiny/F16.gguf", ("gguf", "F16")),
        ("bitnet-published/c/i2s.gguf", ("gguf", "I2_S")),
        ("bitnet-published/c/hf-packed", ("safetensors", "I2_S")),
        ("families/llama", ("safetensors", "F32")),
    ],
)
def test_a_models_form_has_the_name_that_others_give_it(name: str, form: tuple[str, str]) -> None:
    with load_model(fixture_file(name)) as model:
        assert form_of(model) == form


def test_a_mix_that_its_file_is_not_in_is_not_believed(tmp_path: Path) -> None:
    content = fixture_file("tiny/Q4_0.gguf").read_bytes()
    said, instead = (b"general.file_type" + struct.pack("<II", 4, mix) for mix in (2, 17))
    assert said in content
    path = tmp_path / "model.gguf"
    path.write_bytes(content.replace(said, instead))
    with load_model(path) as model:
        assert form_of(model) == ("gguf", "Q4_0")


def test_tensors_that_contradict_the_config_are_refused(folder: Path) -> None:
    edit_config(folder, intermediate_size=81)
    with pytest.raises(
        ModelFileError, match=r"ffn_gate\.weight has shape \[80, 48\], expected \[81"
    ):
        load_model(folder)
    edit_config(folder, intermediate_size=80, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.1\..* has no place"):
        load_model(folder)
    edit_config(folder, num_hidden_layers=4096)
    with pytest.raises(ModelFileError, match=r"tensor blk\.2\..* is missing"):
        load_model(folder)


def test_a_copy_of_a_tied_head_is_left_out(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    with load_model(folder) as model:
        assert model.spec.tied_head
        assert "output.weight" not in model.tensors


def test_scales_of_linears_multiply_their_products(tmp_path: Path) -> None:
    """As llama.cpp's bitnet has them: halved weights with a scale of two are the same model."""
    source = fixture_file("tiny-bitnet/F32.gguf")
    path = tmp_path / "scaled.gguf"
    with load_model(source) as model:
        tensors = {}
        for name, found in model.tensors.items():
            is_linear = name.startswith("blk.") and not name.endswith("_norm.weight")
            tensors[name] = tensor(name, found.to_float32() / (2 if is_linear else 1))
            if is_linear:
                scale = name.replace(".weight", ".scale")
                tensors[scale] = tensor(scale, [2.0])
        write_gguf(Model(model.spec, tensors, model.source), path)
    with load_model(path) as model:
        assert model.spec.linear_scales
    plan = row((3, 1, 4, 1, 5), (0,))
    with opened(path) as scaled, opened(source) as plain:
        assert logits(scaled, plan).tobytes() == logits(plain, plan).tobytes()


@pytest.mark.parametrize("name", ["tiny/Q4_K_M.gguf", "tiny-bitnet/TQ1_0.gguf"])
def test_the_memory_estimate_is_what_the_executor_holds(name: str) -> None:
    with load_model(fixture_file(name)) as model:
        estimate = memory_estimate(model, num_kv_tokens=64)
        executor = ReferenceExecutor(model, num_blocks=4, block_size=16)
        held = executor.memory_bytes
        executor.close()
        tensors = gguf.GGUFReader(fixture_file(name)).tensors
    assert estimate.float32_weights == held["weights"]
    assert estimate.kv == held["kv"] == 64 * estimate.kv_per_token
    assert estimate.weights == sum(int(found.n_bytes) for found in tensors)


def test_sound_norms_have_no_problem() -> None:
    with load_model(fixture_file("tiny-bitnet/TQ2_0.gguf")) as model:
        found = norm_health(model)
    assert len(found) == 2 * 4 + 1
    assert all(health.problem is None for health in found)
    assert all(health.low < health.mean < health.high for health in found)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1.0, np.nan, np.inf], "2 of 3 weights are not finite"),
        ([np.nan] * 3, "3 of 3 weights are not finite"),
        ([0.0] * 3, "every weight is zero"),
        ([1.0, -2e4, 1.0], "a weight of -20000 is beyond 1000"),
    ],
)
def test_a_sick_norm_is_found_and_described(weights: list[float], problem: str) -> None:
    with load_model(LLAMA) as model:
        sick = tensor("blk.1.ffn_norm.weight", weights)
        tensors = {**model.tensors, sick.name: sick}
        found = norm_health(Model(model.spec, tensors, model.source))
    problems = {health.name: health.problem for health in found if health.problem is not None}
    assert problems == {"blk.1.ffn_norm.weight": problem}
