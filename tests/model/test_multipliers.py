"""Falcon-H1's multipliers: numbers of config.json that become scales of linears."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.drawn_families import drawn_config, write_drawn

from quire.core.errors import ModelFileError
from quire.model.loading import Model, load_model

CASE = "falcon-h1"
WHOLE = {
    "attn_q": 0.8,
    "attn_k": 0.8 * 1.3,
    "attn_v": 0.8,
    "attn_output": 0.6,
    "ssm_gate": 1.25 * 0.8,
    "ssm_in": 1.0,
    "ssm_alpha": 1.25 * 1.3,
    "ssm_out": 0.5,
    "ffn_gate": 0.9,
    "ffn_up": 1.0,
    "ffn_down": 0.7,
}


def loaded(folder: Path, **changes: object) -> Model:
    path = write_drawn(CASE, folder)
    (path / "config.json").write_text(json.dumps({**drawn_config(CASE), **changes}))
    return load_model(path)


def scales(model: Model) -> dict[str, float]:
    """Of the last layer's linears."""
    return {
        name.split(".")[2]: float(tensor.to_float32()[0])
        for name, tensor in model.tensors.items()
        if name.startswith("blk.3.") and name.endswith(".scale")
    }


def test_multipliers_are_scales_of_linears_and_of_taps(tmp_path: Path) -> None:
    with (
        loaded(tmp_path / "some") as model,
        loaded(tmp_path / "none", ssm_multipliers=None) as bare,
    ):
        assert scales(model) == pytest.approx(WHOLE)
        assert model.spec.embedding_scale == 3.0 and model.spec.logit_scale == 0.4
        taps, others = (x.tensors["blk.3.ssm_conv1d.weight"].to_float32() for x in (model, bare))
        factors = [0.7] * 96 + [1.1] * 8 + [0.9] * 8  # of values, keys and queries
        np.testing.assert_allclose(taps, others * np.array(factors, np.float32)[:, None], rtol=1e-6)


def test_multipliers_that_a_file_leaves_out_are_one(tmp_path: Path) -> None:
    names = [name for name in drawn_config(CASE) if name.endswith(("multiplier", "multipliers"))]
    with loaded(tmp_path, **dict.fromkeys(names)) as model:
        assert set(scales(model).values()) == {1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be 5 numbers, got 4"),
        ({"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers must be from 1e-09 to 1e.09, got 0.0"),
        ({"key_multiplier": -1.0}, "key_multiplier must be from 1e-09 to 1e.09, got -1.0"),
        ({"ssm_out_multiplier": "2"}, "ssm_out_multiplier must be a finite number"),
    ],
)
def test_multipliers_that_cannot_be_are_named(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        loaded(tmp_path, **changes)
