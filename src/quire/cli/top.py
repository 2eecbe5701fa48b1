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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.cli.program import print_json, printable
from quire.core.errors import QuireError

KEY_VARIABLE = "QUIRE_API_KEY"
_PATIENCE_S = 10.0  # for an answer
_MAX_ANSWER_BYTES = 16 << 20
_NUM_STEPS = 256  # that are asked for
_MAX_LANES = 512
_GUTTER = 34  # columns before the steps of a lane
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
    add("--json", action="store_true", help="print one snapshot as JSON and leave")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 60:
        raise QuireError(f"--interval must be from 0.1 to 60 seconds, got {args.interval:g}")
    server = Server(args.url, os.environ.get(KEY_VARIABLE))
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

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise QuireError(f"--url {url!r:.100}: expected http://HOST:PORT")
        self.name = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._parts = parts

    def stats(self, after: int | None) -> Mapping[str, Any]:
        """What /v1/stats answers, with the steps after one."""
        query = f"steps={_NUM_STEPS}" + ("" if after is None else f"&after={after}")
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


# ---- what was seen


class StepSeen(NamedTuple):
    """A step, by the lanes that it had rows in."""

    at: float
    elapsed_s: float
    floor_s: float | None
    chunks: frozenset[int]
    decodes: frozenset[int]


@dataclass
class View:
    """The latest answer, the steps and rates before it, and the lanes of sequences."""

    reply: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    newest: int | None = None  # id of the newest step
    steps: deque[StepSeen] = field(default_factory=lambda: deque(maxlen=1024))
    lanes: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # in order of appearance
    done: dict[int, int] = field(default_factory=dict)  # tokens computed, by lane
    history: deque[float] = field(default_factory=lambda: deque(maxlen=512))  # tokens/s

    def take(self, reply: Mapping[str, Any]) -> None:
        if self._is_of_another_engine(reply):
            self._forget()
        self.before, self.reply = self.reply, reply
        latest = reply.get("latest") or {"lanes": {}, "steps": []}
        for name, lane in latest["lanes"].items():
            self.lanes.setdefault(int(name), lane)
        for step in latest["steps"]:
            self._take_step(step)
        while len(self.lanes) > _MAX_LANES:
            oldest = next(iter(self.lanes))
            del self.lanes[oldest]
            self.done.pop(oldest, None)
        if self.before:
            self.history.append(self.rates()["completion_tokens_per_second"] or 0.0)

    def _is_of_another_engine(self, reply: Mapping[str, Any]) -> bool:
        """Whether the server was started again: its counters are lower."""
        return any(
            reply[name] < self.reply[name]
            for name in ("uptime_s", "num_steps")
            if name in self.reply
        )

    def _forget(self) -> None:
        self.reply, self.newest = {}, None
        for kept in (self.steps, self.lanes, self.done, self.history):
            kept.clear()

    def _take_step(self, step: Mapping[str, Any]) -> None:
        self.newest = step["id"]
        for lane, start, count in step["chunks"]:
            self.done[lane] = start + count
        for lane, start in step["decodes"]:
            self.done[lane] = start + 1
        self.steps.append(
            StepSeen(
                step["at"],
                step["elapsed_s"],
                step["floor_s"],
                frozenset(row[0] for row in step["chunks"]),
                frozenset(row[0] for row in step["decodes"]),
            )
        )

    def rates(self) -> dict[str, float | None]:
        """Over the time between the last two answers; None where nothing is known."""
        seconds = self.reply["uptime_s"] - self.before.get("uptime_s", self.reply["uptime_s"])
        since = self.before.get("uptime_s", 0.0)
        recent = [step for step in self.steps if step.at > since]
        spent = [step for step in recent if step.floor_s is not None and not step.chunks]
        return {
            "completion_tokens_per_second": self._rate("completion_tokens", seconds, recent),
            "prompt_tokens_per_second": self._rate("prompt_tokens", seconds, None),
            "steps_per_second": len(recent) / seconds if seconds else None,
            "step_seconds": _mean([step.elapsed_s for step in recent]),
            "floor_share": _share(
                sum(step.floor_s or 0.0 for step in spent), sum(step.elapsed_s for step in spent)
            ),
        }

    def _rate(self, name: str, seconds: float, steps: list[StepSeen] | None) -> float | None:
        if not seconds:
            return None
        if name in self.reply:
            return float(self.reply[name] - self.before[name]) / seconds
        return None if steps is None else sum(len(step.decodes) for step in steps) / seconds

    def live_lanes(self) -> list[int]:
        """Those with a row in one of the last steps, in order of appearance."""
        last = list(self.steps)[-3:]
        seen = {lane for step in last for lane in (*step.chunks, *step.decodes)}
        return [lane for lane in self.lanes if lane in seen]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if part and whole else None


# ---- the picture

_BOLD, _DIM, _RED, _AMBER, _TEAL, _BLUE = "1", "2", "31", "33", "36", "34"


class Line:
    """Pieces of text, each in a style, cut at the screen's width."""

    def __init__(self, width: int) -> None:
        self._left = width
        self._parts: list[str] = []

    def add(self, text: str, style: str = "") -> "Line":
        text = printable(text)[: self._left]
        self._left -= len(text)
        self._parts.append(f"\x1b[{style}m{text}\x1b[0m" if style and text else text)
        return self

    def __str__(self) -> str:
        return "".join(self._parts)


def picture(view: View, width: int, height: int, note: str = "") -> list[str]:
    """The screen's lines, at most `height`."""
    if not view.reply:
        return [str(Line(width).add("quire top", _BOLD)), "", str(Line(width).add(note, _RED))]
    lines = [_title(view, width), *_figures(view, width)]
    lines.append(Line(width).add(note, _RED) if note else Line(width))
    lines += _lanes(view, width, height - len(lines) - 1)
    return [str(line) for line in lines][:height]


def _title(view: View, width: int) -> Line:
    reply = view.reply
    line = Line(width).add(" quire top ", _BOLD).add(f" {reply['model']}", _BLUE)
    state = reply["health"]["status"] if "health" in reply else reply["status"]
    whose = "" if "num_running" in reply else f", key {reply['key']}: its own figures"
    line.add(f"  {state}", _TEAL if state in ("ok", "ready") else _RED)
    return line.add(f"  up {_duration(reply['uptime_s'])}{whose}   q quits", _DIM)


def _figures(view: View, width: int) -> Iterator[Line]:
    reply, rates = view.reply, view.rates()
    figures = reply if "num_running" in reply else reply["own"]
    rate = rates["completion_tokens_per_second"]
    line = Line(width).add(" tokens/s  ", _DIM).add("–" if rate is None else f"{rate:,.1f}", _BOLD)
    yield line.add("  ").add(_sparks(view.history, min(40, max(0, width - 24))), _TEAL)
    line = Line(width).add(" batch     ", _DIM).add(str(figures["num_running"]), _BOLD)
    if "health" in reply:
        line.add(f" of {reply['health']['batch_limit']}", _DIM)
    yield line.add(f"   waiting {figures['num_waiting']}").add(_reasons(reply), _AMBER)
    yield _step_line(rates, width)
    if "kv_blocks" in reply:
        yield _kv_line(reply["kv_blocks"], width)
        queries = reply["prefix_cache_queries"]
        found = f"{reply['prefix_cache_hits'] / queries:.0%}" if queries else "–"
        line = Line(width).add(" prefix    ", _DIM).add(found, _BOLD)
        yield line.add(f"  of {queries:,} prompt tokens were found computed", _DIM)


def _step_line(rates: Mapping[str, float | None], width: int) -> Line:
    line = Line(width).add(" step      ", _DIM)
    seconds, share, each = rates["step_seconds"], rates["floor_share"], rates["steps_per_second"]
    if seconds is None:
        return line.add("–  none ended lately", _DIM)
    line.add(f"{seconds * 1000:.1f} ms", _BOLD)
    if each is not None:
        line.add(f"  {each:.1f} a second", _DIM)
    if share is not None:
        line.add(f"  decodes at {share:.0%} of the floor's speed", _AMBER)
    return line


def _kv_line(blocks: Mapping[str, int], width: int) -> Line:
    cells = min(40, max(0, width - 48))
    used = round(cells * blocks["used"] / max(1, blocks["total"]))
    cached = min(cells - used, round(cells * blocks["cached"] / max(1, blocks["total"])))
    line = Line(width).add(" KV        ", _DIM).add("█" * used, _BLUE).add("▒" * cached, _BLUE)
    line.add("·" * (cells - used - cached), _DIM)
    words = (
        f"  {blocks['used']:,} of {blocks['total']:,} blocks in use, {blocks['cached']:,} cached"
    )
    return line.add(words, _DIM)


def _reasons(reply: Mapping[str, Any]) -> str:
    found = sorted(reply.get("waiting_by_reason", {}).items(), key=lambda pair: -pair[1])
    words = ", ".join(f"{count} {reason}" for reason, count in found)
    return f": {words}" if words else ""


def _lanes(view: View, width: int, height: int) -> Iterator[Line]:
    line = Line(width).add(f" {'sequence':<10}{'key':<9}{'tokens':<14}", _DIM)
    yield line.add("█", _AMBER).add(" prompt chunk  ", _DIM).add("━", _TEAL).add(" decode", _DIM)
    steps = list(view.steps)[-max(1, width - _GUTTER - 1) :]
    lanes = view.live_lanes()
    for lane in lanes[: height if len(lanes) <= height else max(0, height - 1)]:
        name = view.lanes[lane]
        prompt, done = name["prompt_tokens"], view.done.get(lane, 0)
        tokens = f"{prompt}+{done - prompt}" if done > prompt else f"{done}/{prompt}"
        line = Line(width).add(f" #{lane:<9}").add(f"{name['key'][:8]:<9}", _BLUE)
        line.add(f"{tokens:<14}", _DIM)
        yield _cells(line, lane, steps)
    if len(lanes) > height > 0:
        yield Line(width).add(f" and {len(lanes) - height + 1} more", _DIM)


def _cells(line: Line, lane: int, steps: list[StepSeen]) -> Line:
    """A column for each step; neighbours of one kind are one piece."""
    last, count = "", 0
    for step in [*steps, None]:
        if step is None:
            kind = "end"
        else:
            kind = "█" if lane in step.chunks else "━" if lane in step.decodes else " "
        if kind != last:
            line.add(last * count, {"█": _AMBER, "━": _TEAL}.get(last, ""))
            last, count = kind, 0
        count += 1
    return line


def _sparks(values: deque[float], width: int) -> str:
    seen = list(values)[-width:] if width else []
    most = max(seen, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * value / most)] if most else "▁" for value in seen)


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {whole:02d} s"


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


def _draw(view: View, note: str) -> None:
    width, height = shutil.get_terminal_size()
    lines = picture(view, width, height, note)
    body = "".join(f"{line}\x1b[K\r\n" for line in lines[:-1]) + f"{lines[-1]}\x1b[K"
    _write(f"\x1b[H{body}\x1b[J")
