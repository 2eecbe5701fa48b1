"""Worker processes: starting one that loads a model, and the same model again when it has died."""

import logging
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Protocol

from quire.core.errors import ExecutorError, ModelFileError
from quire.core.progress import report
from quire.llm.assembly import EngineFacts
from quire.llm.devices import Options
from quire.model.fingerprint import model_files
from quire.worker import messages as wire
from quire.worker.channel import FrameReader, frame

COMMAND = (sys.executable, "-P", "-m", "quire.worker")  # -P: nothing of the folder it starts in
_LAST_LINES = 40  # of standard error that are kept
_LAST_WORDS = 600  # characters of them that an error repeats


class Worker(Protocol):
    """A worker that has loaded its model, and our end of its channel."""

    socket: socket.socket
    is_own: bool  # whether this process started it, and says of its death

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def end(self, timeout_s: float = 0.5) -> str:
        """Wait for its end, or cause it; how it ended, in words."""

    def last_words(self) -> str:
        """What it wrote on standard error before it ended."""


class Launcher(Protocol):
    """Makes the workers of one model. Not on an event loop: both calls may take long."""

    def start(self) -> tuple[Worker, EngineFacts]:
        """A worker that has loaded the model; raises a QuireError or an OSError."""

    def abort(self) -> None:
        """Start no more, and end a worker that loads; from any thread."""

    def continues_launcher(self, old: "Launcher") -> bool:
        """Whether its workers compute what those of another one would."""


class WorkerProcess:
    """A worker that was started, and our end of its channel."""

    is_own = True

    def __init__(self, command: Sequence[str], listener: socket.socket | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            given = [each.fileno() for each in (theirs, listener) if each is not None]
            self._process = subprocess.Popen(
                [*command, *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C goes to the server alone
            )
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        errors = self._process.stderr
        assert errors is not None
        self._relay = threading.Thread(
            target=self._relay_errors, args=[errors], name="quire-worker-errors", daemon=True
        )
        self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, path: Path, options: Options) -> EngineFacts:
        """Have it load a model and wait; raises what it raised, and then it has ended."""
        try:
            facts = self._load(path, options)
        except ConnectionError:  # it ended with bytes unread, or before they were sent
            facts = None
        except BaseException:
            self.kill()
            self.end()
            raise
        if facts is None:
            ended, words = self.end(), self.last_words()
            said = f"; it said: {words}" if words else ""
            raise ExecutorError(f"the worker ended while it loaded the model: {ended}{said}")
        self.socket.setblocking(False)
        return facts

    def _load(self, path: Path, options: Options) -> EngineFacts | None:
        reader = FrameReader()
        self.socket.sendall(frame(wire.encode(wire.Start.of(path, options))))
        while data := self.socket.recv(1 << 16):
            for content in reader.feed(data):
                match wire.read_report(content):
                    case wire.Log() as record:
                        emit(record)
                    case wire.Loading(phase, done):
                        report(phase, done)
                    case wire.Ready(facts):
                        return facts
                    case wire.Failed(error):
                        raise error.error()
        return None

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout_s: float = 0.5) -> str:
        """Wait for its end, or cause it; how it ended, in words."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.socket.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        """What it wrote on standard error before it ended."""
        self._relay.join(1.0)  # a child of the worker may hold the pipe open
        text = " ".join("\n".join(self._last_lines).split())
        start = max(0, text.rfind("Fatal Python error"))  # faulthandler's; what follows is long
        return text[start : start + _LAST_WORDS] if start else text[-_LAST_WORDS:]

    def _relay_errors(self, errors: IO[str]) -> None:
        with errors:
            for line in errors:
                self._last_lines.append(line.rstrip())
                if sys.stderr is not None:
                    sys.stderr.write(line)


class ModelLauncher:
    """Starts workers for one model file, each of which computes what the first one would.

    The first one decides what the machine's state decides: the device, its layers, the size of the
    KV cache. Files that have changed are refused: requests that began with the old ones would go
    on with others. From `listener` they take further channels.
    """

    def __init__(
        self,
        path: Path,
        options: Options,
        command: Sequence[str] = COMMAND,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener
        self._path = path
        self._given = options
        self._options = options
        self._command = command
        self._files = model_files(path)
        self._first: EngineFacts | None = None  # of the first worker
        self._loading: WorkerProcess | None = None
        self._is_aborted = False
        self._lock = threading.Lock()  # of both

    def start(self) -> tuple[WorkerProcess, EngineFacts]:
        self._check_files()
        worker = WorkerProcess(self._command, self._listener)
        with self._lock:
            self._loading = worker
            if self._is_aborted:
                worker.kill()
        try:
            facts = worker.load(self._path, self._options)
            if self._first is not None:  # a pinned device was asked for, the first one chosen
                facts = replace(facts, device_reason=self._first.device_reason)
            try:
                self._check_files()  # it may have read either
            except BaseException:
                worker.end(0.0)
                raise
        finally:
            with self._lock:
                self._loading = None
        self._first = self._first or facts
        self._options = _pinned(self._options, facts)
        return worker, facts

    def abort(self) -> None:
        with self._lock:
            self._is_aborted = True
            if self._loading is not None:
                self._loading.kill()

    def continues(self, path: Path, options: Options) -> bool:
        """Whether workers of that file with those options compute the same tokens."""
        return model_files(path) == self._files and _decisive(options) == _decisive(self._given)

    def continues_launcher(self, old: Launcher) -> bool:
        if not isinstance(old, ModelLauncher):
            return False
        return self._files == old._files and _decisive(self._given) == _decisive(old._given)

    def _check_files(self) -> None:
        if model_files(self._path) != self._files:
            raise ModelFileError(
                f"{self._path} has changed since the server loaded it, and its requests cannot go "
                "on with another file: put the old one back, or start the server again"
            )


# Of Options, what no token depends on.
_FREE = {"max_batch_size", "kv_memory", "threads", "batch_timeout_ms", "engine", "chat_template"}


def _decisive(options: Options) -> dict[str, object]:
    """The options that tokens depend on, or may."""
    names = [option.name for option in fields(options) if option.name not in _FREE]
    found: dict[str, object] = {name: getattr(options, name) for name in names}
    return found


def _pinned(options: Options, facts: EngineFacts) -> Options:
    """The options with what the first worker made of them."""
    on_gpu = facts.device == "cuda"
    return replace(
        options,
        device=facts.device,
        gpu_layers=facts.gpu_layers if on_gpu else None,
        gpu_memory=options.gpu_memory if on_gpu else None,
        placement=options.placement if on_gpu else None,
        kv_memory=facts.kv_bytes,
    )


def emit(record: wire.Log) -> None:
    """Into this process's log, as if it had been written here."""
    extra: dict[str, object] = {"fields": record.about}
    if record.event is not None:
        extra["event"] = record.event
    logging.getLogger(record.name).log(record.level, record.message, extra=extra)
