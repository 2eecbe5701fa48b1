"""TLS: real handshakes, certificates that change and that cannot be used, odd clients."""

import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.cli.program import fails
from tests.server.processes import ServeProcess, serving
from tests.server.raw import head, read_all, status_of
from tests.server.servers import PATIENCE_S, PacedExecutor, RunningServer, fake_server, wait_until
from tests.server.test_connections import ENDLESS, JSON, is_closed_while_it_trickles
from tests.server.test_streams import completion_bytes, events

from quire.cli import main
from quire.core.errors import ConfigError
from quire.server.runner import Certificate

SMALL = ("--device", "reference", "--kv-memory", "4MiB")


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path

    @property
    def context(self) -> ssl.SSLContext:
        """Of a client that knows this certificate and no other."""
        return ssl.create_default_context(cafile=str(self.certificate))


def make_pair(folder: Path, name: str, *options: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}-key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-keyout", str(pair.key), "-out", str(pair.certificate), "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *(options or ("-nodes",))], check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tls"), "first")


@pytest.fixture(scope="module")
def secure(text_model: Path, pair: Pair) -> Iterator[RunningServer]:
    """With deadlines of fractions of a second."""
    settings: dict[str, Any] = {"tls_cert": pair.certificate, "tls_key": pair.key}
    deadlines: dict[str, Any] = {"linger_timeout_s": 0.3, "header_timeout_s": 1.0}
    deadlines |= {"unread_timeout_s": 0.5, "max_body_bytes": 100_000}
    executor = PacedExecutor(num_blocks=2048, max_context=20_000)
    with fake_server(text_model, executor, **settings, **deadlines) as server:
        yield server


@contextmanager
def connected(port: int, context: ssl.SSLContext, small: bool = False) -> Iterator[ssl.SSLSocket]:
    with socket.socket() as plain:
        if small:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(PATIENCE_S)
        plain.connect(("127.0.0.1", port))
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            yield connection


def test_the_openai_client_is_served_and_streamed_to(secure: RunningServer, pair: Pair) -> None:
    url = f"https://localhost:{secure.port}/v1"
    with (
        httpx2.Client(verify=pair.context) as carrier,
        openai.OpenAI(base_url=url, api_key="none", http_client=carrier) as client,
    ):
        assert client.models.list().data
        stream = client.completions.create(
            model="tiny-text", prompt="hi", max_tokens=5, stream=True
        )
        assert [chunk.choices[0].text for chunk in stream]


def test_old_versions_are_refused(secure: RunningServer, pair: Pair) -> None:
    for version, is_welcome in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
        context = pair.context
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = version
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        try:
            with connected(secure.port, context):
                assert is_welcome
        except OSError:
            assert not is_welcome


def test_plain_http_is_told_to_use_https(secure: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), PATIENCE_S) as plain:
        plain.sendall(head("/health", method="GET"))
        answer = read_all(plain)
    assert status_of(answer) == 400
    assert b"use https" in answer
    wait_until(lambda: secure.service.connections.num_open == 0)


@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x40\x00\x01", b"\0garbage"])
def test_a_handshake_that_does_not_end_is_given_up(secure: RunningServer, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), PATIENCE_S) as silent:
        silent.sendall(start)
        wait_until(lambda: secure.service.connections.num_open <= 1)
        read_all(silent)  # until it is closed
    wait_until(lambda: secure.service.connections.num_open == 0)


def test_connections_count_before_their_handshake(text_model: Path, pair: Pair) -> None:
    """Those that never begin one give way to those that do."""
    settings: dict[str, Any] = {"tls_cert": pair.certificate, "tls_key": pair.key}
    with fake_server(text_model, max_connections=4, header_timeout_s=600, **settings) as server:
        silent = [
            socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(20)
        ]
        wait_until(lambda: server.service.connections.cut["made room"] >= 16)
        wait_until(lambda: server.service.connections.num_open <= 4)
        with connected(server.port, pair.context) as connection:
            connection.sendall(head("/health", "Connection: close", method="GET"))
            assert status_of(read_all(connection)) == 200
        for plain in silent:
            plain.close()
        wait_until(lambda: server.service.connections.num_open == 0)


def test_deadlines_hold_under_tls(secure: RunningServer, pair: Pair) -> None:
    with connected(secure.port, pair.context) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert status_of(read_all(connection)) == 408
    with connected(secure.port, pair.context) as connection:
        connection.sendall(head("/health", ENDLESS, method="GET"))
        assert status_of(connection.recv(1 << 16)) == 200
        assert is_closed_while_it_trickles(connection)
    with connected(secure.port, pair.context, small=True) as connection:
        before = secure.service.connections.cut["unread"]
        connection.sendall(completion_bytes(8_000, logprobs=20))
        wait_until(lambda: secure.service.connections.cut["unread"] > before)
    wait_until(lambda: secure.service.connections.num_open == 0)
    secure.wait_until_idle()


def test_a_413_can_be_read_under_tls(secure: RunningServer, pair: Pair) -> None:
    with httpx2.Client(verify=pair.context, timeout=PATIENCE_S) as client:
        answer = client.post(
            f"https://localhost:{secure.port}/tokenize",
            content=b"x" * 350_000,
            headers={"Content-Type": "application/json"},
        )
    assert answer.status_code == 413
    with connected(secure.port, pair.context) as connection:
        connection.sendall(head("/tokenize", JSON, "Content-Length: 350000") + b"x" * 350_000)
        assert status_of(connection.recv(1 << 16)) == 413


def test_a_page_of_the_server_itself_is_welcome(secure: RunningServer, pair: Pair) -> None:
    with httpx2.Client(verify=pair.context) as client:
        url = f"https://localhost:{secure.port}"
        assert client.get(f"{url}/health", headers={"Origin": url}).status_code == 200
        other = {"Origin": "https://evil.example.com"}
        assert client.get(f"{url}/health", headers=other).status_code == 403


# ---- as a process


def subject(server: ServeProcess) -> bytes:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with connected(server.port, context) as connection:
        found = connection.getpeercert(binary_form=True)
    assert found is not None
    return next(name for name in (b"first", b"second") if name in found)


def test_a_renewed_certificate_is_taken_up_without_dropping_a_stream(
    text_model: Path, tmp_path: Path
) -> None:
    first = make_pair(tmp_path, "first")
    second = make_pair(tmp_path, "second")
    options = ("--tls-cert", first.certificate, "--tls-key", first.key)
    context = first.context
    with serving(text_model, *SMALL, *options) as server:
        assert server.url.startswith("https://")
        assert subject(server) == b"first"
        with connected(server.port, context) as connection:
            body = completion_bytes(300)
            connection.sendall(body)
            begun = connection.recv(1)
            first.key.write_bytes(second.key.read_bytes())
            server.signal(signal.SIGHUP)  # half renewed: the key is not the certificate's
            assert subject(server) == b"first"
            first.certificate.write_bytes(second.certificate.read_bytes())
            server.signal(signal.SIGHUP)
            wait_until(lambda: subject(server) == b"second")
            assert events(begun + read_all(connection))[-1] == "data: [DONE]"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.errors().splitlines()]
    [failure] = [line for line in lines if line["event"] == "reload_failed"]
    assert "is not that of the certificate" in failure["error"]
    assert any(line["event"] == "reloaded" for line in lines)


def test_sigterm_does_not_wait_for_handshakes(text_model: Path, pair: Pair) -> None:
    options = ("--tls-cert", pair.certificate, "--tls-key", pair.key, "--header-timeout", "3600")
    with (
        serving(text_model, *SMALL, *options) as server,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_S),
    ):
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


# ---- files that cannot be used


def complaint(certificate: Path, key: Path | None, password: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificate(certificate, key, password)
    return str(caught.value)


def test_what_is_wrong_with_the_files_is_said(pair: Pair, tmp_path: Path) -> None:
    other = make_pair(tmp_path, "other")
    locked = make_pair(tmp_path, "locked", "-passout", "pass:secret")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    missing = tmp_path / "missing.pem"
    assert "--tls-cert: cannot read" in complaint(missing, pair.key)
    assert "--tls-key: cannot read" in complaint(pair.certificate, missing)
    assert "--tls-cert: cannot read" in complaint(tmp_path, pair.key)
    assert "holds no certificate in PEM form" in complaint(empty, pair.key)
    assert "holds no private key in PEM form" in complaint(pair.certificate, empty)
    assert "holds no private key in PEM form" in complaint(pair.certificate, None)
    assert "is not that of the certificate" in complaint(pair.certificate, other.key)
    assert "cannot be used" in complaint(broken, pair.key)
    assert "is encrypted" in complaint(locked.certificate, locked.key)
    assert "is not the password" in complaint(locked.certificate, locked.key, "wrong")
    Certificate(locked.certificate, locked.key, "secret")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    Certificate(both, None)


def test_a_certificate_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    said = fails("serve", tmp_path / "none.gguf", "--tls-cert", missing, "--port", "0")
    assert f"--tls-cert: cannot read {missing}" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-key", "none.pem"], "give --tls-cert too"),
        (["--trusted-proxies", "proxy.example.com"], "trusted proxy 'proxy.example.com'"),
        (["--max-connections", "0"], "max_connections must be at least 1"),
        (["--unread-timeout", "0"], "unread_timeout_s must be a number above 0"),
    ],
)
def test_options_that_cannot_be_are_said_before_loading(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-such-model.gguf", *options]) == 1
    assert message in capsys.readouterr().err
