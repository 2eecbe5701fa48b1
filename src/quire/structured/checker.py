"""Checks constraints in another process (`checker_worker`), which the kernel ends when it overruns
its limits: a constraint that loops, grows or crashes ends that process and its own request."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import llguidance

from quire.core.errors import OverloadedError, RequestError
from quire.core.sampling import Constraint
from quire.structured import checker_worker
from quire.structured.checker_worker import HEADER, Answer, Question

SECONDS = 2.0  # of processor time
_WAIT_S = 60.0  # for an answer, whatever the processor time: the machine may be busy
_END_S = 5.0  # for a process to exit after it closed its socket
_ENVIRONMENT = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # all that the process gets

# What the process runs. Packages are stubs, so that nothing else of them is imported.
_BOOTSTRAP = """
import sys, types
for name, folder in (("quire", sys.argv[1]), ("quire.structured", sys.argv[2])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
sys.path += sys.argv[3:]
from quire.structured.checker_worker import main
main()
"""


class _CheckerProcess:
    """One process, and the socket that is its standard input and output."""

    def __init__(self) -> None:
        here = Path(checker_worker.__file__).parent
        library = Path(llguidance.__path__[0]).parent
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, here.parent, here, library],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
                start_new_session=True,  # Ctrl-C goes to the parent alone
            )
        self._socket = ours

    def ask(self, question: Question) -> Answer:
        """Raises OSError where the process ends before it has answered."""
        content = json.dumps(question).encode()
        self._socket.settimeout(_WAIT_S)
        self._socket.sendall(HEADER.pack(len(content)) + content)
        (length,) = HEADER.unpack(self._receive(HEADER.size))
        answer: Answer = json.loads(self._receive(length))
        return answer

    def _receive(self, num_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            some = self._socket.recv(num_bytes - len(found))
            if not some:
                raise ConnectionError("the process has ended")
            found += some
        return bytes(found)

    def how_it_ended(self) -> str:
        self._socket.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        if code == -signal.SIGPROF:
            return f"compiling it takes more than {SECONDS:g} s of processor time"
        return "it is too large or nested too deeply to be compiled"

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Checker:
    """One process for all who check; it is started when needed. Safe to use from several threads,
    which wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _CheckerProcess | None = None

    def grammar(self, constraint: Constraint) -> str:
        """The constraint as llguidance takes it; a RequestError says why it cannot be one."""
        question = Question(kind=constraint.kind, value=constraint.value, seconds=SECONDS)
        with self._lock:
            answer = self._ask(question)
        if "error" in answer:
            message = f"{constraint.kind}: {answer['error']}"
            raise RequestError(message[:2000], param="structured")
        return answer["grammar"]

    def _ask(self, question: Question) -> Answer:
        try:
            process = self._process or _CheckerProcess()
        except OSError as error:
            raise OverloadedError(f"no process to check the grammar: {error}", 1.0) from None
        self._process = None  # until it has answered
        try:
            answer = process.ask(question)
        except (OSError, ValueError):
            reason = process.how_it_ended()
            process.close()
            return {"error": reason}
        self._process = process
        return answer

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def forget(self) -> None:
        """After a fork, in the child: the process belongs to the parent."""
        self.__init__()  # type: ignore[misc]


CHECKER = Checker()
atexit.register(CHECKER.end)
os.register_at_fork(after_in_child=CHECKER.forget)
