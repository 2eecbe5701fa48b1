"""Whatever a file says of its model, it is described or refused: no other exception gets out."""

import json
import random
from pathlib import Path

import pytest
from tests.fixture_files import FIXTURES, fixture_file

from quire.core.errors import QuireError
from quire.model.config_spec import spec_from_config
from quire.model.loading import load_model, norm_health

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
