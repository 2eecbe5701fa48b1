"""A worker that another process started: this one only has a channel to it."""

import socket

from quire.core.errors import ExecutorError
from quire.llm.assembly import EngineFacts
from quire.worker import messages as wire
from quire.worker.channel import FrameReader
from quire.worker.launch import Launcher, emit


class AttachedWorker:
    """Ends, for this process, when its channel does; whoever started it replaces it."""

    is_own = False

    def __init__(self, channel: socket.socket) -> None:
        self.socket = channel

    @property
    def pid(self) -> int:
        return 0

    def kill(self) -> None:
        """Nothing: whoever started it notices a worker that hangs as well."""

    def end(self, timeout_s: float = 0.5) -> str:  # noqa: ARG002
        self.socket.close()
        return "its channel is closed"

    def last_words(self) -> str:
        return ""


class Attacher:
    """Connects to workers at a Unix socket, which outlives them: a connection that is made while
    there is none waits there for the next.

    `continues`: whoever starts the workers says that they compute what those before would."""

    def __init__(self, path: str, *, continues: bool = False) -> None:
        self._path = path
        self._continues = continues
        self._waiting: socket.socket | None = None
        self._is_aborted = False

    def start(self) -> tuple[AttachedWorker, EngineFacts]:
        channel = socket.socket(socket.AF_UNIX)
        self._waiting = channel
        try:
            if self._is_aborted:
                raise ExecutorError("no further worker is wanted")
            channel.connect(self._path)
            facts = _facts(channel)
        except BaseException:
            channel.close()
            raise
        finally:
            self._waiting = None
        channel.setblocking(False)
        return AttachedWorker(channel), facts

    def continues_launcher(self, old: Launcher) -> bool:  # noqa: ARG002
        return self._continues

    def abort(self) -> None:
        self._is_aborted = True
        waiting = self._waiting
        if waiting is not None:
            waiting.shutdown(socket.SHUT_RDWR)


def _facts(channel: socket.socket) -> EngineFacts:
    """What a worker says first."""
    reader = FrameReader()
    while data := channel.recv(1 << 16):
        for content in reader.feed(data):
            match wire.read_report(content):
                case wire.Log() as record:
                    emit(record)
                case wire.Ready(facts):
                    return facts
    raise ExecutorError("the worker ended before it took the channel")
