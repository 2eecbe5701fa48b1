"""Models shared by the tests of a module: one that takes text, one that takes token ids."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixture_files import fixture_file
from tests.llm.text_models import write_text_model

from quire import LLM

KV_MEMORY = "2MiB"  # 128 blocks of the tiny model, whose keys and values are halves


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The tiny model without a tokenizer."""
    with LLM(fixture_file("tiny/Q4_K_M.gguf"), kv_memory=KV_MEMORY) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text_llm(text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, kv_memory=KV_MEMORY) as loaded:
        yield loaded
