"""`quire serve` as a process: what it prints, how it ends, what it refuses to start with."""

import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from tests.cli.program import environment, fails, quire
from tests.llm.text_models import write_text_model
from tests.server.processes import ROOT, ServeProcess, serving
from tests.server.servers import PATIENCE_S, free_port, settings_of, wait_until
from tests.server.test_streams import events

from quire.cli import main
from quire.core.errors import ConfigError
from quire.llm import AsyncLLM
from quire.server import serve
from quire.server.runner import SWITCH_INTERVAL_S

SMALL = ("--device", "reference", "--kv-memory", "4MiB")
SLOWLY = (sys.executable, "-m", "tests.server.paced_program")
LONG = 480  # tokens: over a minute and a half, unless it is ended early


def ask(server: ServeProcess, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def stream(server: ServeProcess, max_tokens: int, has_begun: threading.Semaphore) -> bytes:
    """The whole answer of a stream, as it came; tells when it has begun."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + content)
        found = connection.recv(1)
        has_begun.release()
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def start_streams(server: ServeProcess, count: int, max_tokens: int) -> list[Future[bytes]]:
    """So many streams under way, each with its first bytes read."""
    has_begun = threading.Semaphore(0)
    pool = ThreadPoolExecutor(count)
    answers = [pool.submit(stream, server, max_tokens, has_begun) for _ in range(count)]
    for _ in range(count):
        assert has_begun.acquire(timeout=PATIENCE_S)
    pool.shutdown(wait=False)
    return answers


def last_events(answers: list[Future[bytes]]) -> list[str]:
    return [events(answer.result(PATIENCE_S))[-1] for answer in answers]


def test_it_says_which_models_of_a_folder_it_serves(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(text_model.read_bytes()[:1000])
    (tmp_path / "whole.gguf").symlink_to(text_model)
    with serving("--models", tmp_path, "--kv-memory", "4MiB") as server:
        assert f"quire serves whole.gguf at {server.url}/v1" in server.greeting


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_it_says_where_it_is_and_how_to_try_it(text_model: Path, device: str) -> None:
    with serving(text_model, "--device", device, "--kv-memory", "4MiB") as server:
        assert f"quire serves text.gguf at {server.url}/v1" in server.greeting
        [line] = [line for line in server.greeting.splitlines() if line.startswith("try: ")]
        tried = subprocess.run(
            shlex.split(line.removeprefix("try: ")), capture_output=True, text=True, check=False
        )
        assert tried.returncode == 0, tried.stderr
        assert json.loads(tried.stdout)["object"] == "chat.completion"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        with client:
            assert client.models.list().data[0].id == "text.gguf"
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.errors().splitlines()]
        assert {"ready", "request", "signal", "stopped"} <= {line["event"] for line in lines}


def test_sigterm_lets_what_runs_finish_and_takes_nothing_new(text_model: Path) -> None:
    with serving(text_model, "--drain-timeout", "3600", command=SLOWLY) as server:
        answers = start_streams(server, 4, LONG)
        server.signal(signal.SIGTERM)
        wait_until(lambda: ask(server, "GET", "/ready")[0] == 503)
        status, body = ask(server, "POST", "/v1/completions", {"prompt": "late"})
        assert status == 503
        assert json.loads(body)["error"]["code"] == "drain"
        assert ask(server, "GET", "/health")[0] == 200
        assert not any(answer.done() for answer in answers)
        server.signal(signal.SIGUSR1)
        assert last_events(answers) == ["data: [DONE]"] * 4
        assert server.wait() == 0


def test_after_the_drain_timeout_each_gets_an_error(text_model: Path) -> None:
    with serving(text_model, "--drain-timeout", "0.2", command=SLOWLY) as server:
        answers = start_streams(server, 4, LONG)
        server.signal(signal.SIGTERM)
        for event in last_events(answers):
            error = json.loads(event.removeprefix("data: "))["error"]
            assert error["code"] == "drain"
            assert error["retry_after_ms"] == 5000, "a stream's headers are gone"
        assert server.wait() == 0


def test_sigterm_while_the_model_is_loaded_ends_it_at_once(
    text_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    errors = tmp_path / "errors"
    command = [sys.executable, "-m", "tests.server.loading_program", str(text_model)]
    with errors.open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=environment(),
            cwd=ROOT,
        )
    try:
        wait_until(lambda: "loading" in _reason_of_503(port))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [line["event"] for line in lines][-2:] == ["signal", "stopped"]


def _reason_of_503(port: int) -> str:
    """Why a server is not ready; nothing while it does not listen."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().read().decode()
    except ConnectionRefusedError:
        return ""
    finally:
        connection.close()


def test_threads_hand_the_interpreter_on_sooner_while_it_serves() -> None:
    seen = []

    def load(_: object) -> AsyncLLM:
        seen.append(sys.getswitchinterval())
        raise ConfigError("enough")

    before = sys.getswitchinterval()
    with pytest.raises(ConfigError, match="enough"):
        serve(settings_of(port=0), load, print)
    assert seen == [pytest.approx(SWITCH_INTERVAL_S)]
    assert seen[0] < before == sys.getswitchinterval()


def test_a_second_signal_does_not_wait(text_model: Path) -> None:
    with serving(text_model, "--drain-timeout", "3600", command=SLOWLY) as server:
        answers = start_streams(server, 2, LONG)
        server.signal(signal.SIGTERM)
        wait_until(lambda: ask(server, "GET", "/ready")[0] == 503)
        server.signal(signal.SIGTERM)
        assert all('"error"' in event for event in last_events(answers))
        assert server.wait() == 0


def test_a_hung_executor_ends_the_process_with_a_failure(text_model: Path) -> None:
    command = [sys.executable, "-m", "tests.server.stuck_program"]
    with serving(text_model, command=command) as server:
        status, body = ask(server, "POST", "/v1/completions", {"prompt": "hi"})
        assert status == 500
        assert b"did not answer" in body
        assert server.wait() == 1


def test_sighup_reads_files_again_and_one_that_is_broken_stops_nothing(text_model: Path) -> None:
    command = [sys.executable, "-m", "tests.server.reload_program"]
    with serving(text_model, command=command) as server:
        assert server.process.stdout is not None
        for _ in range(2):
            server.signal(signal.SIGHUP)
            assert server.process.stdout.readline() == "read again\n"
        assert ask(server, "GET", "/health")[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_it_reads_what_tune_wrote_and_options_go_first(text_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "quire.toml"
    config.write_text(
        '[engine]\nmax_batch_size = 2\nmax_step_tokens = 16\n\n[run]\nkv_memory = "4MiB"\n'
        'max_context = 64\ndevice = "reference"\n'
    )
    with serving(text_model, "--config", config, "--max-context", "128") as server:
        [card] = json.loads(ask(server, "GET", "/v1/models")[1])["data"]
        assert card["max_model_len"] == 128
        status, body = ask(server, "POST", "/v1/completions", {"prompt": "hi", "n": 3})
        assert status == 400
        assert "a batch holds 2" in json.loads(body)["error"]["message"]


def test_a_key_from_the_environment_locks_it(text_model: Path) -> None:
    key = "k" * 20
    with serving(text_model, *SMALL, env={"QUIRE_API_KEY": key}) as server:
        assert ask(server, "GET", "/v1/models")[0] == 401
        assert "Authorization: Bearer $QUIRE_API_KEY" in server.greeting
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
        with client:
            assert client.models.list().data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--api-keys", "none.toml"], "cannot read none.toml"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--port", "99999"], "port must be from 0 to 65535"),
        (["--max-batch-size", "0"], "max_batch_size must be an integer of at least 1"),
        (["--cors-origin", "*"], "CORS origin '*'"),
        (["--otlp-endpoint", "collector:4318"], "OTLP endpoint 'collector:4318': expected a URL"),
        (["--otlp-endpoint", "http://"], "OTLP endpoint 'http://': expected a URL"),
        (["--drain-timeout", "nan"], "drain_timeout_s must be 0 or more"),
        (["--device", "abacus"], "device must be one of"),
        (["--request-timeout", "0"], "timeout_s must be a number above 0"),
    ],
)
def test_what_cannot_be_served_is_said_before_loading(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert main(["serve", "no-such-model.gguf", *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_taken_port_is_said_before_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen on" in fails("serve", tmp_path / "none.gguf", "--port", port)


BROKEN = "{% if true %}\n{% endfor %}"


def test_a_model_whose_template_does_not_compile_is_not_served(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "broken.gguf", chat_template=BROKEN)
    run = quire("serve", path, *SMALL, "--port", "0")
    assert (run.code, run.out) == (1, "")
    message = run.err.splitlines()[-1]
    assert message.startswith("quire: the chat template does not compile: line 2: ")
    assert "--chat-template FILE takes another one, --no-chat-template serves" in message
    assert '"ready"' not in run.err


def test_a_model_without_its_template_completes_and_refuses_chats(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "broken.gguf", chat_template=BROKEN)
    with serving(path, *SMALL, "--no-chat-template", "--trust-model-file") as server:
        body = {"prompt": "ab", "max_tokens": 2}
        assert ask(server, "POST", "/v1/completions", body)[0] == 200
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
        status, answer = ask(server, "POST", "/v1/chat/completions", chat)
        assert status == 400
        assert b"no chat template" in answer


def test_another_template_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "broken.gguf", chat_template=BROKEN)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    with serving(path, *SMALL, "--chat-template", str(tmp_path / "own.jinja")) as server:
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
        status, answer = ask(server, "POST", "/v1/chat/completions", chat)
        assert status == 200
        assert json.loads(answer)["usage"]["prompt_tokens"] == 1  # the pair of letters


def test_a_model_that_is_not_there_ends_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", str(tmp_path / "none.gguf"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert "quire: " in run.stderr.splitlines()[-1]
    assert "none.gguf" in run.stderr.splitlines()[-1]


def test_without_the_servers_packages_it_says_what_to_install() -> None:
    without = "import sys; sys.modules['fastapi'] = None; from quire.cli import main; "
    for arguments, code, message in (
        (["serve"], 1, "quire: quire serve needs fastapi: pip install 'quire[server]'\n"),
        (["serve", "--help"], 0, ""),
    ):
        run = subprocess.run(
            [sys.executable, "-c", f"{without}sys.exit(main({arguments}))"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (run.returncode, run.stderr) == (code, message)
