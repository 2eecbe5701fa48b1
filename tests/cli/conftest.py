"""The model file that commands are tried on."""

from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")
