"""Whatever a file says of its model, it is described or refused: no other exception gets out."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tests.drawn_families import drawn_config, write_drawn
from tests.fixture_files import FIXTURES, fixture_file
from tests.model.gguf_families import ARCHITECTURES, write_family

from quire.core.errors import QuireError
from quire.loader.gguf import GGUFFile
from quire.loader.metadata import Metadata
from quire.model.config_spec import spec_from_config
from quire.model.gguf_spec import gguf_family, spec_from_gguf
from quire.model.loading import load_model, norm_health
from quire.model.spec import check_tensors
from quire.model.tensors import arranged, named_in_gguf

ODD_VALUES: tuple[object, ...] = (
    *(None, 0, -1, 1, 2, 2**70, -(2**70), 1.5, 1e308, float("nan"), float("inf"), True, False),
    *("", "x", [], [1], ["full_attention"], {}, {"a": 1}),
    {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1},
    {"rope_type": "yarn", "factor": 2**2000},
    *({"rope_type": "llama3"}, {"rope_type": 5}, {"rope_type": ["x"]}, {"rope_theta": 1e300}),
)
MORE_KEYS = ("rope_scaling", "layer_types", "sliding_window", "no_rope_layers", "num_experts")


FAMILIES = (
    *("families/llama3", "families/mistral", "families/qwen2-yarn", "families/bitnet"),
    *("drawn/phi3-long", "drawn/gemma3", "drawn/qwen2moe", "drawn/gpt-oss", "drawn/olmo3"),
    *("drawn/gemma4", "drawn/gemma4-experts"),
    *("drawn/llama4", "drawn/deepseek2", "drawn/smollm3", "drawn/ministral3", "drawn/granite"),
    *("drawn/nemotron_h_moe-latent", "drawn/falcon-h1", "drawn/mamba2", "drawn/jamba"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_in_a_config_are_read_or_refused(family: str) -> None:
    config = json.loads((FIXTURES / family / "config.json").read_text())
    outcomes = {"read": 0, "refused": 0}
    for key in (*config, *MORE_KEYS):
        for value in ODD_VALUES:
            try:
                for rope in spec_from_config({**config, key: value}).ropes:
                    rope.frequencies()
                outcomes["read"] += 1
            except QuireError as error:
                assert str(error)
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 100


def test_a_gguf_file_with_broken_metadata_is_opened_or_refused(tmp_path: Path) -> None:
    sound = fixture_file("tiny-bitnet/TQ1_0.gguf").read_bytes()
    path = tmp_path / "broken.gguf"
    generator = random.Random(1)
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(400):
        broken = bytearray(sound)
        for _ in range(generator.randint(1, 3)):
            broken[generator.randrange(24, 2200)] = generator.choice((0, 1, 128, 255))
        path.write_bytes(broken)
        try:
            with load_model(path) as model:
                norm_health(model)
            outcomes["opened"] += 1
        except QuireError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10


ODD_ARRAYS: tuple[object, ...] = (
    *(np.array([1, 2, 3, 4]), np.array([True] * 4), np.array([], np.int32), ("a", "b")),
    *(np.array([-5, 0, 2**40, 1]), np.array([0.5, 1e300]), np.array([2])),
)
MORE_GGUF_KEYS = (
    *("expert_count", "expert_group_count", "expert_gating_func", "leading_dense_block_count"),
    *("attention.sliding_window_pattern", "attention.shared_kv_layers", "attention.scale"),
    *("embedding_length_per_layer_input", "nextn_predict_layers", "logit_scale"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.yarn_log_multiplier"),
)


@pytest.mark.parametrize(
    "case",
    [
        *("gemma4-experts", "deepseek2", "llama4", "phi3-long", "glm4moe"),
        *("nemotron_h_moe-latent", "falcon-h1", "mamba2", "jamba"),
    ],
)
def test_odd_values_in_gguf_metadata_are_read_or_refused(case: str, tmp_path: Path) -> None:
    with load_model(write_drawn(case, tmp_path)) as model:
        file = GGUFFile(write_family(case, drawn_config(case), model, tmp_path / "x.gguf"))
    fields = {key: file.metadata[key] for key in file.metadata}
    keys = [*fields, *(f"{ARCHITECTURES[case]}.{key}" for key in MORE_GGUF_KEYS)]
    outcomes = {"read": 0, "refused": 0}
    for key in keys:
        for value in (*ODD_VALUES, *ODD_ARRAYS):
            try:
                metadata = Metadata("x.gguf", {**fields, key: value})
                spec = spec_from_gguf(metadata, file.tensors)
                family = gguf_family(metadata)
                named = named_in_gguf(family, spec.num_layers, file.tensors)
                check_tensors(spec, arranged(family, spec, named, is_gguf=True))
                outcomes["read"] += 1
            except QuireError as error:
                assert str(error)
                outcomes["refused"] += 1
    assert outcomes["read"] > 40 and outcomes["refused"] > 400, outcomes


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "factor", "llama_4_scaling_beta"])
def test_odd_numbers_of_a_rope_are_read_or_refused(key: str) -> None:
    outcomes = set()
    for case in ("deepseek2", "ministral3"):
        config = drawn_config(case)
        for value in (0, -1, 1e-300, 1e300, -1e300, -7.213475204444817, 2.0):
            try:
                spec_from_config(
                    {**config, "rope_parameters": {**config["rope_parameters"], key: value}}
                )
                outcomes.add("read")
            except QuireError:
                outcomes.add("refused")
    assert "read" in outcomes
