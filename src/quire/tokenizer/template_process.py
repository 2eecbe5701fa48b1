"""The processes that render chat templates: started when needed, shared, ended when they overrun.

A template may loop for ever or fill the memory inside of one call of C, where nothing in the same
process can stop it. So each is rendered in a process with limits (`template_worker`), which the
kernel ends when it has used its processor time. Its owner notices, reports it, and goes on with
another. A process is asked one thing at a time; there are a few of them, so that threads which
render at once do not wait for one that is slow.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from quire.core.errors import OverloadedError
from quire.tokenizer import template_worker
from quire.tokenizer.template_worker import (
    ENDLESS,
    HEADER,
    Answer,
    Question,
    decoded,
    encoded,
    read_frame,
)

MAX_PROCESSES = 4
_END_S = 5.0  # for a process to exit after it closed its socket
WAIT_S = 60.0  # for an answer, whatever the processor time: the machine may be busy
_MAX_REPLY_BYTES = 256 << 20
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")  # all that the process gets


# What the process runs: the worker. Packages are stubs, so that nothing else of them is imported.
_BOOTSTRAP = """
import sys, types
for name, folder in (("quire", sys.argv[1]), ("quire.tokenizer", sys.argv[2])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
sys.path += sys.argv[3:]
from quire.tokenizer.template_worker import main
main()
"""


class TemplateProcessError(Exception):
    """The process ended, or had to be ended, before it answered."""


class _TemplateProcess:
    """One process, and the socket that is its standard input."""

    def __init__(self) -> None:
        here = Path(template_worker.__file__).parent
        libraries = {str(Path(library.__path__[0]).parent) for library in (jinja2, markupsafe)}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, here.parent, here, *libraries],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
                start_new_session=True,  # Ctrl-C goes to the parent alone
            )
        self._socket = ours
        self.is_sound = True

    def ask(self, head: Question, values: bytes) -> Answer:
        self.is_sound = False  # until it has answered
        content = encoded(head)
        self._deadline = time.monotonic() + WAIT_S
        try:
            self._socket.settimeout(WAIT_S)
            self._socket.sendall(HEADER.pack(len(content), len(values)) + content + values)
            answer, _ = read_frame(self._receive, _MAX_REPLY_BYTES)
            reply: Answer = decoded(answer)
            self.is_sound = not reply["last"]
        except TimeoutError:
            raise TemplateProcessError(f"it did not end within {WAIT_S:g} s") from None
        except OSError:
            raise TemplateProcessError(self._how_it_ended(head["seconds"])) from None
        except (ValueError, LookupError, TypeError) as error:
            raise TemplateProcessError(f"its process answers nonsense: {error}") from None
        return reply

    def _receive(self, num_bytes: int) -> bytes:
        self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
        return self._socket.recv(num_bytes)

    def _how_it_ended(self, seconds: float) -> str:
        self._socket.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        if code == -signal.SIGPROF:
            return f"{ENDLESS}; it may take {seconds:.3g} s of processor time"
        return f"{ENDLESS}, or breaks the interpreter: its process ended with {code}"

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """After a fork, in the child: the process belongs to the parent."""
        self._socket.close()
        self._process.returncode = 0


class TemplateProcesses:
    """The processes of this program. Safe to use from several threads."""

    def __init__(self, max_processes: int) -> None:
        self._max_processes = max_processes
        self._users = weakref.WeakSet[Any]()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_TemplateProcess] = []
        self._slots = threading.BoundedSemaphore(self._max_processes)

    def ask(self, head: Question, values: bytes = b"") -> Answer:
        """The answer of whichever process is free; TemplateProcessError where it gives none."""
        with self._one() as process:
            return process.ask(head, values)

    @contextmanager
    def _one(self) -> Iterator[_TemplateProcess]:
        with self._slots:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _started()
            try:
                yield process
            finally:
                if process.is_sound:
                    with self._lock:
                        self._idle.append(process)
                else:
                    process.close()

    def open(self, user: Any) -> None:
        """Keep processes until this user, among others, closes."""
        self._users.add(user)

    def close(self, user: Any) -> None:
        """End the processes that are idle, if nobody else uses them."""
        self._users.discard(user)
        if not self._users:
            self.end()

    def end(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def forget(self) -> None:
        for process in self._idle:
            process.forget()
        self._reset()


def _started() -> _TemplateProcess:
    try:
        return _TemplateProcess()
    except OSError as error:
        raise OverloadedError(f"no process to render the chat: {error}", 1.0) from None


PROCESSES = TemplateProcesses(MAX_PROCESSES)
atexit.register(PROCESSES.end)
os.register_at_fork(after_in_child=PROCESSES.forget)
