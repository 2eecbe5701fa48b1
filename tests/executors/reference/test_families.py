"""Every family against transformers: from safetensors, and from GGUF as the family writes it."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from tests.drawn_families import CASES, DRAWN, drawn_config, in_its_context, write_drawn
from tests.executors.reference.plans import logits, row, run
from tests.fixture_files import FIXTURES
from tests.model import llama_cpp_files
from tests.model.gguf_copies import write_gguf
from tests.model.gguf_families import ARCHITECTURES, Written, write_family
from tests.oracles.drawn_weights import drawn as drawn_weights

from quire.executors.reference import ReferenceExecutor
from quire.loader.gguf import GGUFFile
from quire.loader.gguf_writer import write_gguf as write_fields
from quire.loader.safetensors import SafetensorsFolder
from quire.model.families import CONFIG_FAMILIES, GGUF_FAMILIES
from quire.model.loading import Model, load_model
from quire.model.rope import YarnScaling
from quire.model.spec import Attention, ModelSpec

Floats = npt.NDArray[np.float32]
SCATTERED_BLOCKS = (9, 2, 14)
BOUND = 1e-5
FILE = "model.safetensors"
ONES = np.ones(7, np.float32)
SEEING = [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")]  # the second with a decoder of the first
OF_STORED_FIXTURES = {"llama", "mistral", "qwen2", "qwen3", "bitnet"}
OF_SEEING = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
OF_SEEING |= {"glm4v_text", "glm4v_moe_text"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def drawn(case: str, folder: Path) -> Iterator[Model]:
    target = folder / case
    with load_model(target if target.exists() else write_drawn(case, target)) as model:
        yield in_its_context(case, model)


def computed(model: Model, case: str) -> Floats:
    executor = ReferenceExecutor(model, num_blocks=16)
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()
    found = logits(executor, row(tokens, SCATTERED_BLOCKS))
    executor.close()
    return found


def relative_error(found: Floats, golden: Floats) -> float:
    return float(np.linalg.norm(found - golden) / np.linalg.norm(golden))


@pytest.mark.parametrize("case", CASES)
def test_a_family_gives_the_logits_of_transformers(case: str, folder: Path) -> None:
    golden = np.load(DRAWN / case / "golden.npz")["logits"]
    with drawn(case, folder) as model:
        assert relative_error(computed(model, case), golden) <= BOUND


def test_every_family_is_compared() -> None:
    compared = {drawn_config(case)["model_type"] for case in CASES} | OF_STORED_FIXTURES
    compared.add("bailing_moe_v2")  # whose files say bailing_moe
    assert CONFIG_FAMILIES.keys() == compared | OF_SEEING
    written = {*ARCHITECTURES.values()} | OF_STORED_FIXTURES - {"mistral"}
    also = {"bitnet-25", "bitnet-b1.58", "qwen3vlmoe"} | {seeing for _, seeing in SEEING}
    assert GGUF_FAMILIES.keys() == written | also


@pytest.mark.parametrize("case", CASES)
def test_batches_and_chunks_change_no_bit_of_a_family(case: str, folder: Path) -> None:
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:30]
    generator = np.random.default_rng(3)
    with drawn(case, folder) as model:
        executor = ReferenceExecutor(model, num_blocks=64, block_size=4)
        alone = logits(executor, row(tokens, range(8)))
        found, start = [], 0
        while start < len(tokens):  # each step: a chunk of it, and two others before and after
            stop = min(len(tokens), start + int(generator.integers(1, 12)))
            others = [generator.permutation(tokens)[: 5 * n].tolist() for n in (1, 3)]
            results = run(
                executor,
                row(others[0], range(10, 20), sequence_id=1),
                row(tokens[start:stop], range(30, 38), start=start, sequence_id=2),
                row(others[1], range(40, 50), sequence_id=3),
            )
            found.append(results[1].logits)
            start = stop
        executor.close()
    assert np.concatenate(found).tobytes() == alone.tobytes()


def as_llama_cpp_reads(case: str, spec: ModelSpec) -> ModelSpec:
    """What GGUF files of these families do not say, and llama.cpp takes for granted."""

    def changed(mixer: Attention) -> Attention:
        if case == "gpt-oss":  # yarn's `truncate`
            assert mixer.rope is not None and isinstance(mixer.rope.scaling, YarnScaling)
            scaling = replace(mixer.rope.scaling, truncates=True)
            return replace(mixer, rope=replace(mixer.rope, scaling=scaling))
        if mixer.position_scale is not None:  # the length of chunks and of steps of the scale
            mixer = replace(mixer, position_scale=replace(mixer.position_scale, length=8192))
        return replace(mixer, window=None, is_chunked=False)

    if case == "falcon_mamba":  # the epsilon of the norms within its mixers
        own = {n: replace(part, norm_epsilon=1e-5) for n, part in spec.states.items()}
        states = [replace(layer, mixer=own[n]) for n, layer in enumerate(spec.layers)]
        return replace(spec, layers=tuple(states))
    if case not in ("gpt-oss", "llama4", "starcoder2"):
        return spec
    layers = [replace(layer, mixer=changed(layer.attention)) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_the_gguf_of_a_family_gives_the_same(case: str, folder: Path) -> None:
    golden = np.load(DRAWN / case / "golden.npz")["logits"]
    with drawn(case, folder) as model:
        path = write_family(case, drawn_config(case), model, folder / f"{case}.gguf")
        spec = as_llama_cpp_reads(case, model.spec)
        if spec != model.spec:
            unlike, golden = golden, computed(replace(model, spec=spec), case)
            assert relative_error(golden, unlike) > 1e-3
    with load_model(path) as copy:
        found = computed(in_its_context(case, copy), case)
    assert relative_error(found, golden) <= BOUND
    assert found.argmax(axis=1).tolist() == golden.argmax(axis=1).tolist()


@pytest.mark.parametrize(("case", "architecture"), SEEING)
def test_files_of_models_that_see_run_as_their_decoder(
    case: str, architecture: str, tmp_path: Path
) -> None:
    """Text has one position in time, height and width, so that its rope is the usual one."""
    path = tmp_path / f"{architecture}.gguf"
    with load_model(llama_cpp_files.fixture(case)) as model:
        write_gguf(model, path, architecture)
    golden = np.load(llama_cpp_files.fixture(case) / "llama-cpp.npz")["logits"]
    found = llama_cpp_files.computed(case, path, as_llama_cpp=True)
    assert llama_cpp_files.nmse(found, golden) <= 1e-6


def test_files_of_mixtures_that_see_run_as_their_decoder(folder: Path) -> None:
    with drawn("qwen3moe", folder) as model:
        path = write_family("qwen3moe", drawn_config("qwen3moe"), model, folder / "vl.gguf")
    with GGUFFile(path) as file:
        own: dict[str, Any] = {
            key.replace("qwen3moe.", "qwen3vlmoe."): value for key, value in file.metadata.items()
        }
        own |= {"general.architecture": "qwen3vlmoe", "qwen3vlmoe.n_deepstack_layers": 3}
        own["qwen3vlmoe.rope.dimension_sections"] = [4, 2, 2, 0]
        write_fields(path, own, list(file.tensors.values()))
    golden = np.load(DRAWN / "qwen3moe" / "golden.npz")["logits"]
    with load_model(path) as copy:
        assert relative_error(computed(copy, "qwen3moe"), golden) <= BOUND


MROPE = {"mrope_section": [2, 2, 2], "rope_theta": 10000.0}


def stored(folder: Path, config: dict[str, Any], weights: dict[str, Floats]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / FILE)
    return folder


@pytest.mark.parametrize(
    ("case", "model_type", "is_flat"),
    [
        ("qwen2", "qwen2_vl", True),
        ("qwen2", "qwen2_5_vl", False),
        ("qwen3", "qwen3_vl", False),
    ],
)
def test_safetensors_of_models_that_see_run_as_their_decoder(
    case: str, model_type: str, is_flat: bool, tmp_path: Path
) -> None:
    """With the names of their tensors on the hub, and the decoder's fields where they are there."""
    source = FIXTURES / "families" / case
    text = json.loads((source / "config.json").read_text())
    text |= {"rope_parameters": None, "rope_scaling": {"type": "mrope", **MROPE}}
    if case == "qwen3":
        text |= {"sliding_window": None, "rope_scaling": {"mrope_interleaved": True, **MROPE}}
    own = {"model_type": model_type, "vision_config": {"hidden_size": 7}}
    apart = {**own, "text_config": {**text, "model_type": f"{model_type}_text"}}
    prefix = "model.language_model." if case == "qwen3" else "model."
    with SafetensorsFolder(source) as files:
        weights = {
            name.replace("model.", prefix): tensor.to_float32()
            for name, tensor in files.tensors.items()
        }
    weights["model.visual.merger.norm.bias" if case == "qwen3" else "visual.x.weight"] = ONES
    path = stored(tmp_path / "seeing", {**text, **own} if is_flat else apart, weights)
    golden = np.load(source / "golden.npz")
    with load_model(path) as model:
        executor = ReferenceExecutor(model, num_blocks=16)
        found = logits(executor, row(golden["tokens"].tolist(), SCATTERED_BLOCKS))
        executor.close()
    assert relative_error(found, golden["logits"]) <= BOUND


@pytest.mark.parametrize(
    ("model_type", "prefix", "other"),
    [
        ("smolvlm", "model.text_model.", "model.connector.modality_projection.proj.weight"),
        ("idefics3", "model.text_model.", "model.vision_model.embeddings.x.weight"),
        ("llava_next", "language_model.model.", "image_newline"),
        ("llava_onevision", "model.language_model.", "model.image_newline"),
        ("aya_vision", "language_model.model.", "multi_modal_projector.linear_1.weight"),
        ("cohere2_vision", "model.language_model.", "model.vision_tower.x.weight"),
        ("glm46v", "model.language_model.", "model.visual.merger.norm.bias"),
        ("voxtral", "language_model.model.", "audio_tower.x.weight"),
        ("kimi_k25", "language_model.model.", "mm_projector.proj.0.weight"),
    ],
)
def test_decoders_of_models_that_see_say_what_they_are(
    model_type: str, prefix: str, other: str, tmp_path: Path
) -> None:
    source = FIXTURES / "families" / "llama"
    text = json.loads((source / "config.json").read_text())
    config = {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 7}}
    with SafetensorsFolder(source) as files:
        weights = {
            name.replace("model.", prefix) if name.startswith("model.") else name: x.to_float32()
            for name, x in files.tensors.items()
        }
    golden = np.load(source / "golden.npz")
    with load_model(stored(tmp_path / "seeing", config, {**weights, other: ONES})) as model:
        executor = ReferenceExecutor(model, num_blocks=16)
        found = logits(executor, row(golden["tokens"].tolist(), SCATTERED_BLOCKS))
        executor.close()
    assert relative_error(found, golden["logits"]) <= BOUND


def test_glm_that_sees_runs_as_its_decoder(tmp_path: Path) -> None:
    text = {**drawn_config("glm4"), "model_type": "glm4v_text", "head_dim": None}
    text |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    shapes = json.loads((DRAWN / "glm4" / "tensors.json").read_text())
    sizes = {"q_proj": 48, "k_proj": 16, "v_proj": 16}
    for name, shape in shapes.items():
        part = name.split(".")[-2]
        shape[0] = sizes.get(part, shape[0])
        if part == "o_proj":
            shape[1] = 48
    weights = {name: drawn_weights(name, tuple(shape)) for name, shape in shapes.items()}
    plain = {**text, "model_type": "glm4", "head_dim": 16}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 1, 1]}
    inner = {name.replace("model.", "model.language_model."): x for name, x in weights.items()}
    seeing = {"model_type": "glm4v", "text_config": text, "vision_config": {}}
    with (
        load_model(stored(tmp_path / "plain", plain, weights)) as model,
        load_model(stored(tmp_path / "seeing", seeing, inner)) as other,
    ):
        assert computed(other, "glm4").tobytes() == computed(model, "glm4").tobytes()


def test_rows_of_a_glm_that_sees_are_in_halves_in_gguf(folder: Path) -> None:
    def in_halves(name: str, weights: Floats) -> Floats:
        """Rotated rows of each head: the first of every pair, then the second."""
        if ".attn_q." not in name and ".attn_k." not in name:
            return weights
        heads = weights.reshape(-1, 16, *weights.shape[1:])
        parts = [heads[:, 0:8:2], heads[:, 1:8:2], heads[:, 8:]]
        return np.concatenate(parts, axis=1).reshape(weights.shape)

    with drawn("glm4", folder) as model:
        path = write_family("glm4", drawn_config("glm4"), model, folder / "glm4v.gguf")
    with GGUFFile(path) as file:
        fields: dict[str, Any] = {**file.metadata, "glm4.rope.dimension_sections": [2, 1, 1, 0]}
        tensors = [Written(n, in_halves(n, x.to_float32())) for n, x in file.tensors.items()]
    write_fields(path, fields, tensors)
    golden = np.load(DRAWN / "glm4" / "golden.npz")["logits"]
    with load_model(path) as copy:
        assert relative_error(computed(copy, "glm4"), golden) <= BOUND


def test_a_mixture_of_glm_that_sees_runs_as_its_decoder(tmp_path: Path) -> None:
    config = {**drawn_config("glm4moe"), "use_qk_norm": False}
    shapes = json.loads((DRAWN / "glm4moe" / "tensors.json").read_text())
    weights = {
        name: drawn_weights(name, tuple(shape))
        for name, shape in shapes.items()
        if "q_norm" not in name and "k_norm" not in name
    }
    text = {**config, "model_type": "glm4v_moe_text"}
    text["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [2, 1, 1]}
    seeing = {"model_type": "glm4v_moe", "text_config": text, "vision_config": {}}
    inner = {name.replace("model.", "model.language_model."): x for name, x in weights.items()}
    with (
        load_model(stored(tmp_path / "plain", config, weights)) as model,
        load_model(stored(tmp_path / "seeing", seeing, inner)) as other,
    ):
        assert computed(other, "glm4moe").tobytes() == computed(model, "glm4moe").tobytes()


def stacked(weights: dict[str, Floats], *, is_transposed: bool) -> dict[str, Floats]:
    """As Qwen3-VL keeps its experts: in one tensor, [experts, in, out] on the hub."""
    found: dict[str, Floats] = {}
    stacks: dict[str, list[Floats]] = {}
    for name, array in weights.items():
        head, is_expert, tail = name.partition(".experts.")
        if is_expert:
            stacks.setdefault(f"{head}.experts.{tail.split('.')[1]}", []).append(array)
        else:
            found[name.replace("model.", "model.language_model.")] = array
    for name in [name for name in stacks if name.endswith("gate_proj")]:
        gates, ups, downs = (
            np.stack(stacks[name.replace("gate", part)]) for part in ("gate", "up", "down")
        )
        own = name.replace("model.", "model.language_model.")
        both = np.concatenate([gates, ups], axis=1)
        for array, part in ((both, "gate_up_proj"), (downs, "down_proj")):
            turned = array.transpose(0, 2, 1) if is_transposed else array
            found[own.replace("gate_proj", part)] = turned
    return found


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_of_models_that_see_are_read_in_both_layouts(
    is_transposed: bool, tmp_path: Path
) -> None:
    config = {**drawn_config("qwen3moe"), "moe_intermediate_size": 20}
    shapes = json.loads((DRAWN / "qwen3moe" / "tensors.json").read_text())
    weights = {
        name: drawn_weights(name, tuple(20 if size == 24 else size for size in shape))
        for name, shape in shapes.items()
    }
    plain = stored(tmp_path / "plain", config, weights)
    text = {**config, "model_type": "qwen3_vl_moe_text", "rope_parameters": None}
    text |= {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, **MROPE}}
    seeing = stored(
        tmp_path / "seeing",
        {"model_type": "qwen3_vl_moe", "text_config": text},
        stacked(weights, is_transposed=is_transposed),
    )
    with load_model(plain) as model, load_model(seeing) as other:
        assert computed(other, "qwen3moe").tobytes() == computed(model, "qwen3moe").tobytes()


@pytest.mark.parametrize("case", ["deepseek2", "deepseek2-lite"])
def test_older_files_of_deepseek_have_one_matrix_for_keys_and_values(
    case: str, folder: Path
) -> None:
    golden = np.load(DRAWN / case / "golden.npz")["logits"]
    with drawn(case, folder) as model:
        path = folder / f"{case}-old.gguf"
        write_family(case, drawn_config(case), model, path, is_old=True)
    with load_model(path) as copy:
        assert relative_error(computed(copy, case), golden) <= BOUND


@pytest.mark.parametrize("case", llama_cpp_files.CASES)
def test_the_gguf_of_a_family_gives_the_logits_of_llama_cpp(case: str, tmp_path: Path) -> None:
    golden = np.load(llama_cpp_files.fixture(case) / "llama-cpp.npz")["logits"]
    path = llama_cpp_files.write_case(case, tmp_path)
    found = llama_cpp_files.computed(case, path, as_llama_cpp=True)
    assert llama_cpp_files.nmse(found, golden) <= llama_cpp_files.BOUND
    if case in llama_cpp_files.WITHOUT_WINDOWS | llama_cpp_files.BEST_TWO:
        as_said = llama_cpp_files.computed(case, path, as_llama_cpp=False)
        assert llama_cpp_files.nmse(as_said, golden) > 10 * llama_cpp_files.BOUND
