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
_CONTEXTS = {"phi3-short": 48}
CASES = sorted(folder.name for folder in DRAWN.iterdir())


def drawn_config(case: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DRAWN / case / "config.json").read_text())
    return config


def in_its_context(case: str, model: Model) -> Model:
    """The model with the context that its golden was made for."""
    if case not in _CONTEXTS:
        return model
    return replace(model, spec=replace(model.spec, context_length=_CONTEXTS[case]))


def write_drawn(case: str, folder: Path) -> Path:
    """The model as a folder of safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DRAWN / case / "config.json", folder / "config.json")
    shapes = json.loads((DRAWN / case / "tensors.json").read_text())
    weights = {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder
