"""`quire top`: the engine of a running server in a terminal, drawn from /v1/stats."""

import argparse
import http.client
import json
import os
import queue
import select
import shutil
import signal
import ssl
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from urllib.parse import quote, urlsplit

from quire.cli.program import print_json
from quire.cli.top_view import View, picture
from quire.core.errors import QuireError

KEY_VARIABLE = "QUIRE_API_KEY"
_PATIENCE_S = 10.0  # for an answer
_MAX_ANSWER_BYTES = 16 << 20
_NUM_STEPS = 256  # that are asked for
_EPILOG = """\
Every lane is a sequence, every column a step, the newest on the right: a block is a chunk of its
prompt, a line a decode. With keys, set QUIRE_API_KEY: a key with the scope `stats` sees all,
another one what is its own. The floor is shown where the server knows its --memory-bandwidth.

keys: q quits, space holds the picture

examples:
  quire top                                     the server on this machine
  quire top --url https://host:8000 --interval 0.5
  quire top --json                              one snapshot, with rates over the interval
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Watch a running server's engine: its batch, tokens/s, KV blocks."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="of the server (default: %(default)s)",
    )
    add(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between two looks, 0.1 to 60 (default: %(default)s)",
    )
    add(
        "--model",
        metavar="NAME",
        help="of a server with several (default: the one that was used last)",
    )
    add("--json", action="store_true", help="print one snapshot as JSON and leave")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 60:
        raise QuireError(f"--interval must be from 0.1 to 60 seconds, got {args.interval:g}")
    server = Server(args.url, os.environ.get(KEY_VARIABLE), args.model)
    if args.json:
        view = View()
        view.take(server.stats(None))
        time.sleep(args.interval)
        view.take(server.stats(view.newest))
        print_json({**view.reply, "rates": view.rates()})
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise QuireError("quire top draws in a terminal; --json prints a snapshot anywhere")
    watch(server, args.interval)
    return 0


# ---- the server


class UnreachableError(QuireError):
    """The server does not answer now; it may later."""


class Server:
    """A server by its URL. Redirects are not followed: the key is for this host alone."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QuireError(f"--url {url!r:.100}: expected http://HOST:PORT")
        self.name = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._parts = parts
        self._model = model

    def stats(self, after: int | None) -> Mapping[str, Any]:
        """What /v1/stats answers, with the steps after one."""
        query = f"steps={_NUM_STEPS}" + ("" if after is None else f"&after={after}")
        if self._model is not None:
            query += f"&model={quote(self._model, safe='')}"
        status, body = self._get(f"{self._path}/v1/stats?{query}")
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if status == 200 and isinstance(found, dict) and "own" in found:
            return found
        raise self._error(status, found)

    def _error(self, status: int, found: Any) -> QuireError:
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if status == 401:
            said = "is not accepted" if self._headers else "is not set, and the server wants a key"
            return QuireError(f"{self.name}: {KEY_VARIABLE} {said}")
        if status in (429, 502, 503, 504):
            return UnreachableError(f"{self.name}: {message or f'HTTP {status}'}")
        if message is None:
            return QuireError(f"{self.name} answers as no quire server does (HTTP {status})")
        return QuireError(f"{self.name}: {message}")

    def _get(self, target: str) -> tuple[int, bytes]:
        is_tls = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", target, headers=self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_ANSWER_BYTES)
        except ssl.SSLError as error:
            raise QuireError(f"{self.name}: TLS failed: {error.reason or error}") from error
        except (OSError, http.client.HTTPException) as error:
            what = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnreachableError(f"{self.name} does not answer: {what}") from error
        finally:
            connection.close()


# ---- the terminal

_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, without a cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"


class EndedError(Exception):
    """A signal ended the program: it is raised again once the terminal is as it was."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _screen() -> Iterator[Callable[[], None]]:
    """The alternate screen with keys as they are typed; whatever happens, the terminal is as it was
    afterwards. The value hides the screen while the program is stopped by Ctrl-Z."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def enter() -> None:
        tty.setcbreak(descriptor)
        _write(_ENTER)

    def leave() -> None:
        _write(_LEAVE)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def suspend() -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()

    enter()
    try:
        yield suspend
    finally:
        leave()


def _write(text: str) -> None:
    left = text.encode("utf-8", "replace")
    with suppress(OSError):  # the terminal is gone
        while left:
            left = left[os.write(sys.stdout.fileno(), left) :]


@contextmanager
def _signals(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(server: Server, interval_s: float) -> None:
    """Draw until q is pressed."""
    answers: queue.SimpleQueue[Mapping[str, Any] | QuireError] = queue.SimpleQueue()
    reader, writer = os.pipe()  # wakes the loop: an answer came, or a signal
    os.set_blocking(writer, False)
    view = View()
    threading.Thread(
        target=_poll, args=[server, interval_s, view, answers, writer], daemon=True
    ).start()

    def end(number: int, _: FrameType | None) -> None:
        raise EndedError(number)

    wanted: list[str] = []
    handlers = {
        **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), end),
        signal.SIGWINCH: lambda *_: None,
        signal.SIGTSTP: lambda *_: wanted.append("suspend"),
    }
    try:
        with _screen() as suspend, _signals(handlers):
            signal.set_wakeup_fd(writer)
            try:
                _loop(view, answers, reader, wanted, suspend)
            finally:
                signal.set_wakeup_fd(-1)
    except EndedError as ended:
        if ended.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)


def _poll(
    server: Server,
    interval_s: float,
    view: View,
    answers: "queue.SimpleQueue[Mapping[str, Any] | QuireError]",
    writer: int,
) -> None:
    while True:
        try:
            answers.put(server.stats(view.newest))
        except QuireError as error:
            answers.put(error)
        except Exception as error:  # a bug of ours: said on the screen, not over it
            answers.put(QuireError(f"{type(error).__name__}: {error}"))
        os.write(writer, b"!")
        time.sleep(interval_s)


def _loop(
    view: View,
    answers: "queue.SimpleQueue[Mapping[str, Any] | QuireError]",
    reader: int,
    wanted: list[str],
    suspend: Callable[[], None],
) -> None:
    note, is_held = "", False
    while True:
        ready, _, _ = select.select([sys.stdin, reader], [], [], 1.0)
        if reader in ready:
            os.read(reader, 4096)
        if sys.stdin in ready:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed.lower() or b"\x04" in typed:
                return
            is_held ^= b" " in typed
        if wanted:
            wanted.clear()
            suspend()
        while not answers.empty():
            note = _take(view, answers.get(), note, is_held=is_held)
        _draw(view, note + ("  (held: space goes on)" if is_held else ""))


def _take(view: View, answer: Mapping[str, Any] | QuireError, note: str, *, is_held: bool) -> str:
    """What to say beside the picture."""
    if isinstance(answer, UnreachableError):
        return f" {answer}; trying again"
    if isinstance(answer, QuireError):
        if not view.reply:
            raise answer
        return f" {answer}"
    if is_held:
        return note
    try:
        view.take(answer)
    except (KeyError, TypeError, ValueError) as error:
        raise QuireError(f"the answer is not a quire server's: {error!r}") from error
    return ""


def _terminal_size() -> os.terminal_size:
    """The terminal's own, before COLUMNS and LINES, which do not follow when it changes."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return size if size.columns and size.lines else shutil.get_terminal_size()


def _draw(view: View, note: str) -> None:
    width, height = _terminal_size()
    lines = picture(view, width, height, note)
    body = "".join(f"{line}\x1b[K\r\n" for line in lines[:-1]) + f"{lines[-1]}\x1b[K"
    _write(f"\x1b[H{body}\x1b[J")
