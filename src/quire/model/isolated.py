"""Has a model file read in a process without privileges before this process reads it.

Readers are written to withstand any file; the libraries under them (tokenizers, numpy, JSON) are
not ours. A fault that a file can trigger should cost that process, not one that holds keys, sockets
and other people's requests. See `quire.core.lockdown` for what is taken from it, and
`quire.model.isolated_reader` for what it does.
"""

import glob
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.loader.defaults import DEFAULT_MODELS, DUMMY_PREFIX


class ProcessLimits(NamedTuple):
    """What the process may take."""

    cpu_s: int
    memory: int  # bytes of addresses, the interpreter's included


USUAL_LIMITS = ProcessLimits(cpu_s=60, memory=4 << 30)
_USUAL_ENTRY = "quire.model.isolated_reader:read"
_TIMES_SLOWER = 5  # wall-clock limit over processor time, for busy machines
_MAX_REPLY_BYTES = 1 << 16
_MAX_REMEMBERED = 64
# The process gets no other variables: no keys, no settings of Python.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
_BOOTSTRAP = """
import json, sys
request = json.loads(sys.stdin.buffer.read())
sys.path[:] = request["sys_path"]
from quire.model.isolated_reader import main
main(request)
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model file was read, and the result."""

    in_force: tuple[str, ...] = ()  # restrictions of the process that read it
    why_not: str | None = None  # why there was no such process
    refusal: ModelFileError | UnsupportedModelError | None = None  # what is wrong with the file

    @property
    def text(self) -> str:
        return ", ".join(self.in_force) or f"none: {self.why_not}"

    def check(self) -> None:
        """Raise what is wrong with the file."""
        if self.refusal is not None:
            raise self.refusal


class PendingVerdict:
    """A file that is being read in another process. Ask for the result once, or close it."""

    def __init__(self, path: Path, entry: str = _USUAL_ENTRY, limits: ProcessLimits = USUAL_LIMITS):
        self._path = path
        self._limits = limits
        self._deadline = time.monotonic() + _TIMES_SLOWER * limits.cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not: str | None = None
        try:
            self._process = _start()
            self._send({"path": str(path), "entry": entry, "limits": limits})
        except OSError as error:
            self._why_not = f"no process can be started: {error.strerror or error}"

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        request["sys_path"] = [folder for folder in sys.path if folder]
        try:
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; `result` reports that

    def result(self) -> Verdict:
        """The verdict. A ModelFileError where the process was killed or died."""
        if self._process is None:
            return Verdict(why_not=self._why_not)
        try:
            lines = self._lines()
        finally:
            self.close()
        if not lines:  # it ended before it opened the file
            code = self._process.returncode
            return Verdict(why_not=f"the process to read it in ended at its start, with {code}")
        in_force = tuple(str(measure) for measure in lines[0]["in_force"])
        if len(lines) < 2:
            raise self._failed(_how_it_ended(self._process.returncode, self._limits))
        if "failure" in lines[1]:
            raise self._failed(_how_it_failed(str(lines[1]["failure"]), self._limits))
        return Verdict(in_force, refusal=_refusal(lines[1]))

    def close(self) -> None:
        """End the process, if it has not ended."""
        if self._process is not None:
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process.kill()
            self._process.wait()

    def _lines(self) -> list[dict[str, Any]]:
        """Its output, up to two lines; waits for its end."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        said = b""
        while len(said) <= _MAX_REPLY_BYTES:
            left = self._deadline - time.monotonic()
            if left <= 0 or not _is_readable(descriptor, left):
                raise self._failed(f"it did not end within {_TIMES_SLOWER * self._limits.cpu_s} s")
            piece = os.read(descriptor, _MAX_REPLY_BYTES)
            if not piece:
                self._process.wait()
                break
            said += piece
        try:
            lines = [json.loads(line) for line in said.splitlines()[:2]]
        except (ValueError, RecursionError):
            lines = [None]
        if not all(isinstance(line, dict) for line in lines):
            raise self._failed("it gave no answer that can be read")
        return lines

    def _failed(self, how: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path} was not read: the process without privileges that read it first failed: "
            f"{how}. The file is hostile or broken, or quire has a fault; if you trust the file, "
            "--trust-model-file (trust_model_file=True) reads it here"
        )


def _start() -> "subprocess.Popen[bytes]":
    if sys.platform != "linux" or not sys.executable:
        raise OSError(None, f"not on {sys.platform}")
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=inherited | _ENVIRONMENT,
        start_new_session=True,  # Ctrl-C goes to the parent alone
    )


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()  # unlike select, for any descriptor
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(min(timeout_s, 3600) * 1000))


def _how_it_ended(code: int, limits: ProcessLimits) -> str:
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"it took more than {limits.cpu_s} s of processor time, or was killed"
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with {code}"


def _how_it_failed(failure: str, limits: ProcessLimits) -> str:
    if failure == "memory":
        return f"it took more than {limits.memory >> 20} MiB of memory"
    return _plain(failure)


def _refusal(outcome: dict[str, Any]) -> ModelFileError | UnsupportedModelError | None:
    if "refusal" not in outcome:
        return None
    kind = UnsupportedModelError if outcome["refusal"] == "unsupported" else ModelFileError
    return kind(_plain(str(outcome.get("message", ""))))


def _plain(text: str) -> str:
    """Printable text alone: the process may be under a file's control."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def probe() -> Verdict:
    """The restrictions that this system supports, tried with an empty file."""
    return PendingVerdict(Path(os.devnull)).result()


# ---- once for each file

_remembered: dict[object, Verdict] = {}
_begun: dict[object, PendingVerdict] = {}
_lock = threading.Lock()  # guards both


def examine(model: str | Path, path: Path, *, trusted: bool) -> Verdict:
    """Have the file of a model read without privileges, unless there is no need to.

    `model` is what the user gave, `path` where that was found.
    """
    if trusted:
        return Verdict(why_not="the file is trusted")
    if model in DEFAULT_MODELS:
        return Verdict(why_not="a known model, which was checked when it was fetched")
    if str(path).startswith(DUMMY_PREFIX):
        return Verdict(why_not="the model has no file")
    return _read_once(path)


def begin(model: str) -> None:
    """Start reading a model's file for a later `examine`, while modules are imported."""
    path = Path(model)
    if model in DEFAULT_MODELS or not os.path.exists(path):
        return
    identity = identity_of(path) or object()
    with _lock:
        if identity not in _remembered and identity not in _begun:
            _begun[identity] = PendingVerdict(path)


def _read_once(path: Path) -> Verdict:
    """The verdict, from an earlier call if the files have not changed."""
    identity = identity_of(path) or object()  # equal to nothing: reading it reports the error
    with _lock:
        known, pending = _remembered.get(identity), _begun.pop(identity, None)
    if known is not None:
        return known
    verdict = (pending or PendingVerdict(path)).result()
    if verdict.refusal is None and verdict.in_force:
        with _lock:
            if len(_remembered) >= _MAX_REMEMBERED:
                _remembered.clear()
            _remembered[identity] = verdict
    return verdict


FileState = tuple[str, int, int, int, int]  # name, device, inode, size, time


def identity_of(path: Path) -> tuple[FileState, ...] | None:
    """A value that changes when a file of the model does; None where they cannot be looked at."""
    try:
        if path.is_dir():
            paths = sorted(path.iterdir())
        else:  # and its other parts, if it has any
            start = path.name.partition("-00001-of-")[0]
            paths = sorted(path.parent.glob(f"{glob.escape(start)}*"))
        states = [(str(one), os.stat(one)) for one in paths]
    except (OSError, ValueError):
        return None
    return tuple(
        (name, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        for name, state in states
    )
