"""The program itself: help, versions, wrong calls, pipes that close."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name

import pytest
from tests.cli.program import COMMAND, environment, quire

from quire.cli import generate, main
from quire.cli.program import COMMANDS, Command

NAMES = (
    *(
        "generate",
        "chat",
        "serve",
        "reload",
        "batch",
        "ray",
        "top",
        "inspect",
        "pull",
        "models",
        "rm",
        "convert",
        "doctor",
    ),
    *("audit", "bench"),
)


def test_the_version_is_the_package_version() -> None:
    run = quire("--version")
    assert (run.code, run.out, run.err) == (0, f"quire {version('quire')}\n", "")


def test_help_names_every_command_and_none_that_does_not_exist() -> None:
    run = quire("--help")
    assert run.code == 0
    assert re.findall(r"^    (\w+)  ", run.out, re.MULTILINE) == list(NAMES)
    assert "examples:" in run.out


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name: str) -> None:
    run = quire(name, "--help")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"usage: quire {name}")
    assert f"quire {name}" in run.out.partition("\n")[2] or name == "bench"


def modules_after(*arguments: str) -> set[str]:
    """What Python has imported after a command line that only prints."""
    code = (
        "import sys\nfrom quire.cli import main\n"
        f"try:\n    main({list(arguments)})\n"
        "finally:\n    print('\\n', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bench"])
def test_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    assert not modules_after(name, "--help") & {"numpy", "tokenizers", "jinja2", "fastapi"}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_command(option: str) -> None:
    commands = {command.run.partition(":")[0] for command in COMMANDS.values()}
    assert not modules_after(option) & {*commands, "quire.cli.options", "numpy"}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_has_the_functions_that_the_table_names(command: Command) -> None:
    assert callable(resolve_name(command.options))
    assert callable(resolve_name(command.run))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "a", "--nonsense"],
        ["generate", "--nonsense"],
        ["generate", "--prompt", "x", "--file", "y"],
        ["generate", "--prompt-tokens", "1,x"],
        ["generate", "--prompt", "x", "--temperature", "warm"],
        ["generate", "--prompt", "x", "--logit-bias", "5"],
        ["generate", "--prompt", "x", "--logprobs", "2"],
        ["chat", "extra"],
        ["inspect", "a", "b"],
        ["bench", "throughput", "--nonsense"],
        ["ray", "serve", "--nonsense"],
    ],
)
def test_a_wrong_call_says_how_it_is_done_and_exits_with_2(arguments: list[str]) -> None:
    """In two lines, of its own command."""
    run = quire(*arguments)
    assert run.code == 2
    assert run.out == ""
    usage, error = run.err.splitlines()
    command = " ".join(["quire", *arguments[: 2 if arguments[:1] in (["bench"], ["ray"]) else 1]])
    assert usage.startswith(f"usage: {command} ")
    assert error.startswith(f"{command}: error: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "What is gravity?"], "did you mean --prompt 'What is gravity?'?"),
        (["generate", "--max-tokenz=3"], "did you mean --max-tokens?"),
        (["chat", "model.gguf"], "did you mean --model model.gguf?"),
        (["serv"], "did you mean serve?"),
        (["bench", "laten"], "did you mean latency?"),
        (["convert", "a", "b", "--to", "TQ20"], "did you mean TQ2_0?"),
        (["serve", "--api-key", "x"], "unrecognized arguments: --api-key (did you mean"),
    ],
)
def test_an_unknown_argument_is_met_with_what_it_may_mean(arguments: list[str], hint: str) -> None:
    assert hint in quire(*arguments).err


@pytest.mark.parametrize("arguments", [["inspect"], ["generate", "--prompt", "hi", "--n", "8"]])
def test_a_reader_that_goes_away_is_met_with_silence(
    text_model: Path, arguments: list[str]
) -> None:
    model = [str(text_model)] if arguments == ["inspect"] else ["--model", str(text_model)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments, *model],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr(generate, "generate", run)
    monkeypatch.delenv("QUIRE_TRACEBACK", raising=False)
    assert main(["generate"]) == 1
    assert capsys.readouterr().err == (
        "quire: this should not have happened: ZeroDivisionError: by nothing "
        "(QUIRE_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv("QUIRE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["generate"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, ""), (MemoryError(), 1, "quire: there is not enough memory\n")],
)
def test_interrupts_and_exhaustion_have_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr(generate, "generate", run)
    assert main(["generate"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("command", "ended"),
    [("generate", (1, "quire: the prompt is empty\n")), ("chat", (0, ""))],
)
def test_an_input_that_is_closed_is_an_empty_one(
    text_model: Path, command: str, ended: tuple[int, str]
) -> None:
    run = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *COMMAND, command, "--model", str(text_model)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert (run.returncode, run.stderr) == ended


@pytest.mark.parametrize("arguments", [["doctor"], ["--help"], ["serve", "--help"]])
def test_an_output_that_is_closed_or_full_is_no_accident(arguments: list[str]) -> None:
    called = ["sh", *COMMAND, *arguments]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', *called], capture_output=True)
    assert (closed.returncode, closed.stderr) == (0, b"")
    full = subprocess.run(["sh", "-c", '"$@" >/dev/full', *called], capture_output=True, text=True)
    assert full.returncode == 1
    assert full.stderr == "quire: cannot write the output: No space left on device\n"
