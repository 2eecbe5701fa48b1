"""Tiny models of each family whose weights follow from names and shapes: a folder of safetensors is
written as transformers had it, and tests/fixtures/drawn has the logits that it computed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tests.fixture_files import FIXTURES
from tests.oracles.drawn_weights import drawn

from quire.model.loading import Model

DRAWN = FIXTURES / "drawn"
# longrope's set is fixed by the longest context: transformers' short set needs a shorter one.
_CONTEXTS = {"phi3-short": 48, "phimoe": 64}
CASES = sorted(folder.name for folder in DRAWN.iterdir())


def drawn_config(case: str, num_layers: int | None = None) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DRAWN / case / "config.json").read_text())
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        kinds = config.get("layer_types")
        if kinds is not None:
            config["layer_types"] = [kinds[layer % len(kinds)] for layer in range(num_layers)]
    return config


def in_its_context(case: str, model: Model) -> Model:
    """The model with the context that its golden was made for."""
    if case not in _CONTEXTS:
        return model
    return replace(model, spec=replace(model.spec, context_length=_CONTEXTS[case]))


def write_drawn(case: str, folder: Path, num_layers: int | None = None) -> Path:
    """The model as a folder of safetensors; `num_layers`: with as many more like the last."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = json.loads((DRAWN / case / "tensors.json").read_text())
    shutil.copy(DRAWN / case / "config.json", folder / "config.json")
    if num_layers is not None:
        last = drawn_config(case)["num_hidden_layers"] - 1
        (folder / "config.json").write_text(json.dumps(drawn_config(case, num_layers)))
        for name in [name for name in shapes if f".layers.{last}." in name]:
            for layer in range(last + 1, num_layers):
                shapes[name.replace(f".{last}.", f".{layer}.", 1)] = shapes[name]
    weights = {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder
