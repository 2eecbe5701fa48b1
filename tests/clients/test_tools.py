"""Clients that call tools and want objects, unchanged, against a running server whose model writes
what each expects. `make test-clients-all` installs them, in an environment of their own.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import RunningServer, ScriptedExecutor, fake_server, model_server
from tests.server.test_tools import HERMES

from quire.core.plan import SequencePlan

PATIENCE_S = 600.0  # thousands of modules, read from a disk for the first time
HOME = Path(__file__).parents[2] / "build" / "clients-tools"
FOLDER = Path(__file__).parent / "tools"
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BOB = '{"name": "Bob", "age": 3}'
SUNNY = "It is sunny."
THOUGHT = "<think>Hm.</think>"


def call_with(arguments: str, name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def call_with_bob(name: str) -> str:
    return call_with(BOB, name)


# What the model answers each client, in order.
ANSWERS = {
    "openai_tools.py": [WEATHER, SUNNY, WEATHER, "Sunny.", BOB, call_with_bob("Person")],
    "langchain_tools.py": [WEATHER, WEATHER, call_with_bob("Person"), BOB, BOB],
    "instructor_tools.py": [call_with_bob("Person"), call_with_bob("Person"), BOB, BOB],
    "pydantic_ai_tools.py": [WEATHER, call_with_bob("final_result"), BOB, SUNNY],
    "anthropic_messages.py": [THOUGHT + WEATHER, SUNNY, THOUGHT + WEATHER, WEATHER, SUNNY, BOB],
    "litellm_dialects.py": [WEATHER, SUNNY, WEATHER, SUNNY],
    "litellm_tools.py": [*(WEATHER, SUNNY) * 2, WEATHER, THOUGHT + "Yes.", SUNNY, BOB],
    "ollama_tools.py": [*(WEATHER, SUNNY) * 2, THOUGHT + "Yes.", BOB, SUNNY],
    "agents_sdk.py": [
        *(WEATHER, SUNNY, THOUGHT + WEATHER, SUNNY),
        *(call_with("{}", "transfer_to_a"), SUNNY, BOB),
    ]
    * 2,
    "langgraph_agents.py": [THOUGHT + WEATHER, SUNNY] * 8,
    "smolagents_tools.py": [
        WEATHER,
        call_with('{"answer": "sunny"}', "final_answer"),
        "Thoughts: so.\n<code>\nfinal_answer(weather(city='Paris'))\n</code>",
    ],
    "sdks.mjs": [THOUGHT + WEATHER, WEATHER, SUNNY, BOB, THOUGHT + WEATHER, SUNNY],
    "openai_tools.mjs": [WEATHER, SUNNY, THOUGHT + "Yes."],
    "ai_sdk.mjs": [BOB, WEATHER, SUNNY, WEATHER, "Sunny."],
    "ai_sdk_responses.mjs": [THOUGHT + WEATHER, SUNNY, WEATHER, "Sunny."],
}

pytestmark = pytest.mark.skipif(
    not (HOME / ".ready").exists(), reason="not installed: run make test-clients-all"
)


class AnsweringExecutor(ScriptedExecutor):
    """Every sequence gets the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[list[int]] = []
        self._given: dict[int, list[int]] = {}

    def _choose(self, row: SequencePlan, digest: int) -> int | None:
        if row.sequence_id not in self._given:
            self._given[row.sequence_id] = self.answers.pop(0)
        self.script = self._given[row.sequence_id]
        return super()._choose(row, digest)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("clients")
    model = write_text_model(folder / "model.gguf", chat_template=HERMES)
    with fake_server(model, AnsweringExecutor()) as made:
        yield made


def run(name: str, server: RunningServer) -> None:
    program = str(HOME / "bin" / "python") if name.endswith(".py") else "node"
    done = subprocess.run(
        [program, str(FOLDER / name), f"{server.url}/v1", str(HOME)],
        env={**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_client_gets_its_calls_and_objects(name: str, server: RunningServer) -> None:
    llm = server.service.loaded
    assert llm is not None and llm.tokenizer is not None
    encode = llm.tokenizer.encode
    server.executor.answers = [encode(text, add_special=False) for text in ANSWERS[name]]
    run(name, server)
    assert server.executor.answers == []  # it asked as often as was expected


def test_clients_get_the_same_embeddings(tmp_path: Path) -> None:
    with model_server(write_text_model(tmp_path / "model.gguf")) as server:
        run("embeddings.py", server)
