"""Servers shared by the tests: one over a real tiny model, one over a model made of hashes."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import RunningServer, fake_server, model_server


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="session")
def tiny(text_model: Path) -> Iterator[RunningServer]:
    """The tiny text model on the reference executor."""
    with model_server(text_model) as server:
        yield server


@pytest.fixture(scope="session")
def fake(text_model: Path) -> Iterator[RunningServer]:
    """The hash model: instant steps, the tiny model's tokenizer."""
    with fake_server(text_model) as server:
        yield server


@pytest.fixture
def client(tiny: RunningServer) -> Iterator[openai.OpenAI]:
    with tiny.client() as made:
        yield made
