"""Processes that do what may loop for ever, fill the memory or crash: started when needed, shared,
asked one thing at a time, and ended when they overrun.

The worker sets its own limits, and the kernel ends it when it has used its processor time. Its
owner notices, reports it, and goes on with another process. There are a few of them, so that
threads which ask at once do not wait for one that is slow.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from quire.core.errors import OverloadedError

WAIT_S = 60.0  # for an answer, whatever the processor time: the machine may be busy
_END_S = 5.0  # for a process to exit after it closed its socket
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")  # all that the process gets

# What the process runs: the worker's main(). Packages are stubs, so that nothing else of them is
# imported.
_BOOTSTRAP = """
import importlib, sys, types
module, folder, *libraries = sys.argv[1:]
package = module.rpartition(".")[0]
for name, path in (("quire", folder.rpartition("/")[0]), (package, folder)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.path += libraries
importlib.import_module(module).main()
"""


class WorkerProcess:
    """One process, and the socket that is its standard input and output."""

    def __init__(self, worker: ModuleType, libraries: Sequence[ModuleType]) -> None:
        assert worker.__file__ is not None
        folders = {str(Path(library.__path__[0]).parent) for library in libraries}
        ours, theirs = socket.socketpair()
        arguments = [worker.__name__, str(Path(worker.__file__).parent), *sorted(folders)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
                start_new_session=True,  # Ctrl-C goes to the parent alone
            )
        self._socket = ours
        self._deadline = 0.0
        self.is_sound = True  # may be asked again

    def send(self, content: bytes) -> None:
        """A question; what is received until the next one has WAIT_S in all."""
        self.is_sound = False  # until its owner has the answer
        self._deadline = time.monotonic() + WAIT_S
        self._socket.settimeout(WAIT_S)
        self._socket.sendall(content)

    def receive(self, num_bytes: int) -> bytes:
        """At most so many; none where the process has ended. TimeoutError after the deadline."""
        self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
        return self._socket.recv(num_bytes)

    def exit_code(self) -> int | None:
        """Of a process that no longer answers; None where it does not exit either."""
        self._socket.close()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """After a fork, in the child: the process belongs to the parent."""
        self._socket.close()
        self._process.returncode = 0


OUT_OF_TIME = -signal.SIGPROF  # the exit code of a process that used up its processor time
P = TypeVar("P", bound=WorkerProcess)


class WorkerProcesses(Generic[P]):
    """A few processes of one kind, ended with the program. Safe to use from several threads."""

    def __init__(self, start: Callable[[], P], max_processes: int, purpose: str) -> None:
        self._start = start
        self._max_processes = max_processes
        self._purpose = purpose
        self._reset()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[P] = []
        self._slots = threading.BoundedSemaphore(self._max_processes)

    @contextmanager
    def one(self) -> Iterator[P]:
        """Whichever is free; afterwards kept where it is sound, ended where it is not."""
        with self._slots:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or self._started()
            try:
                yield process
            finally:
                if process.is_sound:
                    with self._lock:
                        self._idle.append(process)
                else:
                    process.close()

    def _started(self) -> P:
        try:
            return self._start()
        except OSError as error:
            raise OverloadedError(f"no process to {self._purpose}: {error}", 1.0) from None

    def end(self) -> None:
        """End those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _forget(self) -> None:
        for process in self._idle:
            process.forget()
        self._reset()
