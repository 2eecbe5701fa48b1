"""`quire top` in a real terminal, over a real server."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import quire
from tests.cli.terminal import Terminal, in_terminal
from tests.llm.text_models import write_text_model
from tests.server.servers import PacedExecutor, RunningServer, fake_server, free_port
from tests.server.test_keys import bearer, secret, with_scopes

from quire.cli.top_view import View, picture
from quire.server.keys import KeyRing, KeyScope

SCREEN, CURSOR = "1049", "25"
LONG = {"prompt": [[1, 2, 3]], "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "text.gguf")


@pytest.fixture(scope="module")
def busy(text_model: Path) -> Iterator[RunningServer]:
    """A server with keys on which alice has two requests that run."""
    ring = KeyRing(
        [
            with_scopes("alice", KeyScope.INFERENCE),
            with_scopes("bob", KeyScope.INFERENCE),
            with_scopes("watcher", KeyScope.STATS),
        ]
    )
    executor = PacedExecutor(0.1, num_blocks=1024)
    with fake_server(text_model, executor, keys=ring) as server, ThreadPoolExecutor() as pool:

        def ask() -> int:
            """Again and again while the tests go on: on a busy machine they take long."""
            status = 200
            while status == 200 and executor.step_s:
                status = server.post("/v1/completions", LONG, bearer("alice")).status
            return status

        asked = [pool.submit(ask) for _ in range(2)]
        server.wait_until(lambda: server.engine.snapshot().num_running == 2)
        yield server
        executor.step_s = 0.0
        assert [one.result() for one in asked] == [200, 200]


def key_of(name: str) -> Mapping[str, str]:
    return {"QUIRE_API_KEY": secret(name)}


def watching(server: RunningServer, name: str = "watcher", **size: int) -> Any:
    return in_terminal("top", "--url", server.url, "--interval", "0.1", env=key_of(name), **size)


def quit_and_check(terminal: Terminal, before: list[Any]) -> None:
    terminal.type(b"q")
    assert terminal.wait() == 0
    check_restored(terminal, before)


def check_restored(terminal: Terminal, before: list[Any]) -> None:
    assert SCREEN not in terminal.screen.modes
    assert CURSOR in terminal.screen.modes, "the cursor is shown again"
    assert terminal.attributes == before


def test_the_engine_is_drawn_and_q_leaves_the_terminal_as_it_was(busy: RunningServer) -> None:
    with watching(busy) as terminal:
        before = terminal.attributes
        terminal.wait_for("━━━")
        assert SCREEN in terminal.screen.modes
        assert CURSOR not in terminal.screen.modes
        text = terminal.screen.text
        assert "tiny-text" in text
        assert "batch     2 of" in text
        assert "of 1,024 blocks in use" in text
        lanes = [line for line in text.splitlines() if line.startswith(" #")]
        assert len(lanes) == 2
        assert all("alice" in line and "3+" in line for line in lanes)
        terminal.wait_until(lambda: terminal.screen.text != text)
        quit_and_check(terminal, before)


def test_it_follows_the_size_of_the_terminal(busy: RunningServer) -> None:
    env = {**key_of("watcher"), "COLUMNS": "50"}  # as some shells export it
    top = ("top", "--url", busy.url, "--interval", "0.1")
    with in_terminal(*top, env=env, width=100, height=30) as terminal:
        terminal.wait_for(" cached")
        terminal.resize(40, 6)
        terminal.wait_until(lambda: max(map(len, terminal.screen.text.splitlines())) <= 40)
        terminal.wait_until(lambda: len(terminal.screen.text.splitlines()) <= 6)
        assert " cached" not in terminal.screen.text
        terminal.resize(100, 30)
        terminal.wait_for(" cached")


def test_a_key_without_the_scope_sees_its_own(busy: RunningServer) -> None:
    with watching(busy, "alice") as terminal:
        terminal.wait_for("━━━")
        assert "key alice: its own figures" in terminal.screen.text
        assert "blocks in use" not in terminal.screen.text
    with watching(busy, "bob") as terminal:
        terminal.wait_for("key bob: its own figures")
        assert "alice" not in terminal.screen.text


def test_space_holds_the_picture(busy: RunningServer) -> None:
    with watching(busy) as terminal:
        terminal.wait_for("━━━")
        terminal.type(b" ")
        terminal.wait_for("(held")
        held = terminal.screen.text
        for _ in range(5):
            terminal.read(0.1)
        assert terminal.screen.text == held
        terminal.type(b" ")
        terminal.wait_until(lambda: "(held" not in terminal.screen.text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(busy: RunningServer, number: int) -> None:
    with watching(busy) as terminal:
        before = terminal.attributes
        terminal.wait_for("batch     2")
        terminal.process.send_signal(number)
        assert terminal.wait() == -number
        check_restored(terminal, before)


def test_ctrl_c_leaves_the_terminal_as_it_was(busy: RunningServer) -> None:
    with watching(busy) as terminal:
        before = terminal.attributes
        terminal.wait_for("batch     2")
        terminal.type(b"\x03")
        assert terminal.wait() == 130
        check_restored(terminal, before)


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(busy: RunningServer) -> None:
    with watching(busy) as terminal:
        before = terminal.attributes
        terminal.wait_for("batch     2")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.wait_until(lambda: SCREEN not in terminal.screen.modes)
        os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert terminal.attributes == before
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_until(lambda: SCREEN in terminal.screen.modes)
        terminal.wait_for("batch     2")
        quit_and_check(terminal, before)


def test_a_server_that_goes_away_is_waited_for(text_model: Path) -> None:
    with fake_server(text_model) as server:
        terminal_of = in_terminal("top", "--url", server.url, "--interval", "0.1")
        terminal = terminal_of.__enter__()
        terminal.wait_for("batch     0")
    try:
        terminal.wait_for("trying again")
        assert "batch     0" in terminal.screen.text, "what was seen last stays"
        assert "Traceback" not in terminal.screen.text
        terminal.type(b"q")
        assert terminal.wait() == 0
    finally:
        terminal_of.__exit__(None, None, None)


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with in_terminal("top", "--url", f"127.0.0.1:{free_port()}") as terminal:
        terminal.wait_for("does not answer: Connection refused; trying again")
        terminal.type(b"q")
        assert terminal.wait() == 0


def test_a_wrong_key_ends_it_with_a_line(busy: RunningServer) -> None:
    env = {"QUIRE_API_KEY": "nobody-has-this-key"}
    with in_terminal("top", "--url", busy.url, env=env) as terminal:
        assert terminal.wait() == 1
        assert "QUIRE_API_KEY is not accepted" in terminal.screen.text
        assert SCREEN not in terminal.screen.modes


# ---- without a terminal


def test_a_snapshot_is_printed_as_json(busy: RunningServer) -> None:
    run = quire("top", "--json", "--url", busy.url, "--interval", "1", env=key_of("watcher"))
    assert run.code == 0
    found = json.loads(run.out)
    assert found["num_running"] == 2
    assert found["rates"]["completion_tokens_per_second"] > 0
    assert found["rates"]["step_seconds"] > 0
    assert found["rates"]["floor_share"] is None
    assert len(found["latest"]["steps"][-1]["decodes"]) == 2


def refused(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    run = quire("top", *arguments, env=env)
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("quire: ")
    assert run.err.count("\n") == 1
    return run.err


def test_what_is_wrong_is_one_line(busy: RunningServer) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert "does not answer: Connection refused" in refused("--json", "--url", nowhere)
    assert "QUIRE_API_KEY is not set" in refused("--json", "--url", busy.url)
    assert "expected http://HOST:PORT" in refused("--json", "--url", "ftp://somewhere")
    assert "from 0.1 to 60" in refused("--interval", "0")
    assert "--json prints a snapshot" in refused("--url", busy.url)


class _Stranger(BaseHTTPRequestHandler):
    """Answers as no quire server does, or sends the client elsewhere."""

    def do_GET(self) -> None:
        assert isinstance(self.server, HTTPServer)
        is_redirect = self.path.startswith("/away")
        self.send_response(302 if is_redirect else 200)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_is_told_apart() -> None:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert "answers as no quire server does" in refused("--json", "--url", url)
        assert "HTTP 302" in refused("--json", "--url", f"{url}/away")
        server.shutdown()


# ---- the picture


def reply(**more: Any) -> dict[str, Any]:
    own = {"num_running": 1, "num_waiting": 0}
    return {"status": "ready", "model": "m", "uptime_s": 1.0, "key": "k", "own": own, **more}


def latest(*steps: Mapping[str, Any], key: str = "k") -> dict[str, Any]:
    lanes = {"5": {"request": "r", "key": key, "prompt_tokens": 8}}
    return {"latest": {"lanes": lanes, "steps": list(steps)}}


def step(number: int, **rows: Any) -> dict[str, Any]:
    given = {"id": number, "at": number * 0.1, "elapsed_s": 0.1, "floor_s": None}
    return {**given, "chunks": [], "decodes": [], **rows}


def test_a_lane_has_a_column_for_each_step() -> None:
    view = View()
    view.take(reply(**latest(step(1, chunks=[(5, 0, 4)]), step(2, chunks=[(5, 4, 4)]))))
    view.take(reply(uptime_s=2.0, **latest(step(3), step(4, decodes=[(5, 8)]))))
    [lane] = [line for line in picture(view, 80, 24) if line.startswith(" #5")]
    assert "8+1" in lane
    assert lane.endswith("\x1b[33m██\x1b[0m \x1b[36m━\x1b[0m")


def test_the_floor_is_that_of_decodes() -> None:
    view = View()
    view.take(reply())
    steps = (step(11, decodes=[(5, 8)], floor_s=0.025), step(12, chunks=[(5, 0, 4)], floor_s=0.025))
    view.take(reply(uptime_s=2.0, **latest(*steps)))
    assert view.rates()["floor_share"] == pytest.approx(0.25)
    assert any("25% of the floor" in line for line in picture(view, 100, 24))


def test_a_server_that_was_started_again_is_followed() -> None:
    view = View()
    view.take(reply(uptime_s=9.0, **latest(step(80, decodes=[(5, 8)]))))
    view.take(reply(uptime_s=1.0, **latest(step(2, decodes=[(5, 9)]))))
    assert view.newest == 2
    assert len(view.steps) == 1


def test_names_cannot_write_on_the_terminal() -> None:
    view = View()
    harm = "\x1b]0;owned\x07\x1b[2J\r\n\u202e"
    found = reply(model=harm, key=harm, **latest(step(1, decodes=[(5, 8)]), key=harm))
    view.take(found)
    text = "".join(picture(view, 200, 24, note=harm))
    for style in ("", "1", "2", "31", "33", "34", "36", "0"):
        text = text.replace(f"\x1b[{style}m", "")
    assert all(mark.isprintable() for mark in text)


def test_more_lanes_than_lines_are_counted() -> None:
    view = View()
    lanes = {str(n): {"request": "r", "key": "", "prompt_tokens": 1} for n in range(20)}
    one = step(1, decodes=[(n, 3) for n in range(20)])
    view.take(reply(latest={"lanes": lanes, "steps": [one]}))
    lines = picture(view, 80, 12)
    assert len(lines) == 12
    shown = sum(line.startswith(" #") for line in lines)
    assert f"and {20 - shown} more" in lines[-1]


def test_a_model_that_is_loaded_or_another_one_begins_anew() -> None:
    view = View()
    view.take(reply(status="unloaded"))
    assert view.rates()["completion_tokens_per_second"] is None
    figures = {"device": "cpu", "num_steps": 9, "completion_tokens": 5, "prompt_tokens": 3}
    view.take(reply(uptime_s=2.0, **figures))
    assert view.rates()["completion_tokens_per_second"] is None
    view.take(reply(uptime_s=3.0, model="other", **{**figures, "completion_tokens": 9000}))
    assert view.rates()["completion_tokens_per_second"] is None
