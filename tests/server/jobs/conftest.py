"""A server with a state folder, and OpenAI's client of it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.server.servers import RunningServer, fake_server


@pytest.fixture
def server(text_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    with fake_server(text_model, state_folder=tmp_path) as made:
        yield made


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
