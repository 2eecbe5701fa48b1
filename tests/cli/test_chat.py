"""`quire chat`: through a pipe, and on a terminal with its keys."""

import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.program import COMMAND, environment, fails, quire
from tests.fixture_files import fixture_file

from quire import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
FLAGS = ("--temperature", "0", "--max-tokens", "10")
PATIENCE_S = 60.0  # a guard against waiting for ever; nothing is measured
SILENCE_S = 5.0  # so long only a program that waits for a key says nothing


def expected_answers(text_model: Path, messages: list[str], system: str | None) -> list[str]:
    """What the model says in a conversation of these messages."""
    history = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    with LLM(text_model, kv_memory="4MiB") as llm:
        for message in messages:
            history.append({"role": "user", "content": message})
            [output] = llm.chat(history, GREEDY)
            assert output.error is None
            history.append({"role": "assistant", "content": output.text})
            answers.append(output.text)
    return answers


def test_every_line_of_a_pipe_is_a_message_of_one_conversation(text_model: Path) -> None:
    run = quire(
        *("chat", "--model", text_model, *FLAGS, "--system", "Be kind.", "--json"),
        stdin="hi\n\nand you?\n/exit\nnever said\n",
    )
    answers = expected_answers(text_model, ["hi", "and you?"], "Be kind.")
    assert (run.code, run.err) == (0, "")
    assert [json.loads(line) for line in run.out.splitlines()] == [
        {"text": answer, "finish_reason": "length"} for answer in answers
    ]


def test_answers_are_printed_as_text(text_model: Path) -> None:
    [answer] = expected_answers(text_model, ["hi"], None)
    run = quire("chat", "--model", text_model, *FLAGS, stdin="hi")
    assert (run.code, run.out, run.err) == (0, answer + "\n", "")


def test_clear_begins_a_new_conversation(text_model: Path) -> None:
    run = quire("chat", "--model", text_model, *FLAGS, "--json", stdin="hi\n/clear\nhi\n")
    first, second = run.out.splitlines()
    assert first == second


def test_an_unknown_command_is_no_message(text_model: Path) -> None:
    [answer] = expected_answers(text_model, ["hi"], None)
    run = quire("chat", "--model", text_model, *FLAGS, stdin="/quit\nhi\n")
    assert (run.code, run.out) == (1, answer + "\n")
    assert run.err.startswith("quire: there is no command /quit: /clear begins anew, /exit (or")


def test_a_message_may_begin_with_a_slash(text_model: Path) -> None:
    [answer] = expected_answers(text_model, ["/etc/hosts holds what?"], None)
    run = quire("chat", "--model", text_model, *FLAGS, stdin="/etc/hosts holds what?")
    assert (run.code, run.out, run.err) == (0, answer + "\n", "")


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(
    text_model: Path,
) -> None:
    [answer] = expected_answers(text_model, ["hi"], None)
    run = quire("chat", "--model", text_model, *FLAGS, stdin=f"{'x' * 600}\nhi\n")
    assert run.code == 1
    assert run.out == answer + "\n"
    assert run.err.startswith("quire: the prompt does not fit into the context")
    assert run.err.endswith("(/clear begins anew)\n")


def test_bytes_that_are_no_text_do_not_end_the_conversation(text_model: Path) -> None:
    run = quire("chat", "--model", text_model, *FLAGS, stdin=b"hi \xff\n")
    assert (run.code, run.err) == (0, "")


def test_a_model_that_cannot_chat_says_so() -> None:
    error = fails("chat", "--model", fixture_file("tiny/Q4_0.gguf"), stdin="hi\n")
    assert error == (
        "quire: this model has no tokenizer, so it cannot chat: it completes token ids "
        "(LLM.generate, quire generate --prompt-tokens, /v1/completions)\n"
    )


def test_a_wrong_flag_is_said_before_anything_is_loaded() -> None:
    error = fails("chat", "--model", "missing.gguf", "--temperature", "-1")
    assert "temperature must be from 0 to 100" in error


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._keyboard, screen = pty.openpty()
        self.program = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment({"TERM": "dumb"}),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(screen)

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def read_until(self, end: str, again: str = "") -> str:
        """What appears on the screen up to and with this text; `again`: typed at every silence."""
        seen = ""
        deadline = time.monotonic() + PATIENCE_S
        while not seen.endswith(end):
            assert time.monotonic() < deadline, f"waited for {end!r}, saw {seen!r}"
            if self._is_ready(SILENCE_S):
                seen += self.read(1)
            elif again:
                self.type(again)
        return seen

    def read(self, most: int) -> str:
        """What appears next, waiting for it."""
        assert self._is_ready(PATIENCE_S), "nothing appears"
        try:
            return os.read(self._keyboard, most).decode(errors="replace")
        except OSError as error:
            raise AssertionError("the program ended") from error

    def close(self) -> int:
        """Wait for the program to end; its exit code."""
        with suppress(OSError):
            while self._is_ready(PATIENCE_S) and os.read(self._keyboard, 1024):
                pass
        os.close(self._keyboard)
        return self.program.wait(PATIENCE_S)

    def _is_ready(self, timeout_s: float) -> bool:
        """Whether something appears within that time, or the program ends."""
        ready, _, _ = select.select([self._keyboard], [], [], timeout_s)
        return bool(ready)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C on it reaches the program


@pytest.fixture
def terminal(text_model: Path) -> Iterator[Terminal]:
    # Slow enough that an answer can be stopped.
    options = ("--device", "reference", "--temperature", "0", "--ignore-eos")
    opened = Terminal("chat", "--model", str(text_model), *options)
    yield opened
    if opened.program.poll() is None:
        opened.program.kill()
        opened.close()


def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    assert "/exit (or Ctrl-D) leaves" in terminal.read_until("> ")
    terminal.type("hi\n")
    terminal.read_until("hi\r\n")
    assert terminal.read_until("\n> ").strip("\r\n> ")
    terminal.type("/help\n")
    assert "/clear begins anew" in terminal.read_until("\n> ")
    terminal.type("/exit\n")
    assert terminal.close() == 0


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.read_until("> ")
    terminal.type("hi\n")
    terminal.read_until("hi\r\n")
    assert terminal.read(1), "it answers"
    terminal.type("\x03")
    terminal.read_until("\n> ")
    time.sleep(0.2)  # until the line is being edited
    terminal.type("half a line")
    terminal.read_until("half a line")
    terminal.type("\x03")
    # input() may miss a signal that comes while it handles a key; the next one wakes it.
    terminal.read_until("\n> ", again="\x03")
    time.sleep(0.2)
    terminal.type("\x04")
    assert terminal.close() == 0
