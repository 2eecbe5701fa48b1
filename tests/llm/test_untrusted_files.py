"""Files that break the process which reads them first are not loaded, unless they are trusted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.core.errors import ConfigError, ModelFileError, RequestError
from quire.core.sampling import SamplingParams
from quire.llm import LLM, AsyncLLM
from quire.model import isolated
from quire.model.isolated import PendingVerdict, ProcessLimits

SMALL: dict[str, Any] = {"device": "reference", "kv_memory": "1MiB", "max_batch_size": 2}
ARGUMENTS = ("--device", "reference", "--kv-memory", "1MiB")


@pytest.fixture
def breaking(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that crashes whoever reads it first."""
    original = PendingVerdict

    def pending(path: Path) -> PendingVerdict:
        return original(path, "tests.model.hostile_readers:crash", ProcessLimits(30, 1 << 30))

    monkeypatch.setattr(isolated, "_remembered", {})
    monkeypatch.setattr(isolated, "PendingVerdict", pending)
    return text_model


def test_an_llm_is_not_made_of_it_unless_it_is_trusted(breaking: Path) -> None:
    with pytest.raises(ModelFileError, match=r"was not read: .* ended by SIGSEGV"):
        LLM(breaking, **SMALL)
    with LLM(breaking, trust_model_file=True, **SMALL) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=1))[0].completions


def test_an_async_llm_is_not_made_of_it_unless_it_is_trusted(breaking: Path) -> None:
    async def run() -> None:
        with pytest.raises(ModelFileError, match=r"was not read: .* ended by SIGSEGV"):
            AsyncLLM(breaking, **SMALL)
        async with AsyncLLM(breaking, trust_model_file=True, **SMALL):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "ab", "--max-tokens", "1", *ARGUMENTS, "--model"],
        ["inspect", "--json"],
        [
            *("bench", "throughput", *ARGUMENTS, "--requests", "1", "--prompt-tokens", "4"),
            *("--new-tokens", "2", "--repeats", "1", "--max-batch-size", "1"),
            *("--receipts", "{folder}", "--model"),
        ],
    ],
    ids=lambda command: str(command[0]),
)
def test_no_command_reads_it_unless_it_is_trusted(
    breaking: Path, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(folder=tmp_path) for word in command] + [str(breaking)]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "ended by SIGSEGV" in printed.err
    assert '"tensors"' not in printed.out
    assert main([*words, "--trust-model-file"]) == 0


def test_the_server_does_not_start_with_it(breaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    monkeypatch.setattr("quire.cli.program.print_error", complaints.append)
    assert main(["serve", str(breaking), *ARGUMENTS, "--port", "0"]) == 1
    assert "ended by SIGSEGV" in complaints[0]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_trust_is_true_or_false(text_model: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="trust_model_file must be true or false"):
        LLM(text_model, trust_model_file=value, **SMALL)


# ---- which chat template


def test_a_template_of_ones_own_is_taken(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    with LLM(text_model, chat_template=tmp_path / "own.jinja", **SMALL) as llm:
        assert llm.prompts.read_chat([{"role": "user", "content": "ab"}]).text == "ab"


def test_a_model_may_be_used_without_its_template(text_model: Path) -> None:
    with LLM(text_model, chat_template=False, **SMALL) as llm:
        assert not llm.prompts.can_chat
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such-file", "chat_template: cannot read no-such-file: No such file"),
        (3, "chat_template must be a file's path, or False for none, got 3"),
        (None, "chat_template must be a file's path"),
    ],
)
def test_a_template_that_is_not_there_is_named(text_model: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(text_model, chat_template=value, **SMALL)


def test_a_template_that_is_no_text_is_refused(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"own\.jinja is no UTF-8 text: byte 0 is wrong"):
        LLM(text_model, chat_template=tmp_path / "own.jinja", **SMALL)


def test_a_template_for_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("x")
    with pytest.raises(ConfigError, match="chat_template names a file, but the model has no token"):
        LLM("dummy:tiny", chat_template=tmp_path / "own.jinja", **SMALL)
