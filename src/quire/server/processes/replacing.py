"""`quire reload` with several API processes: all of them go from one worker to another.

The supervisor starts the new worker at a socket of its own. First every process prepares: it reads
what turns text into requests and connects; where one cannot, all is as it was. Then each switches
in one go, and requests go on in the new worker or finish in the old one, as with one process. A
process that is started meanwhile prepares as well, or begins with the new worker.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from quire.core.errors import ConfigError
from quire.llm import OnlineModel
from quire.llm.devices import Options
from quire.server.model_service import Replacement, State
from quire.server.processes import messages as wire
from quire.server.service import Service
from quire.worker import RemoteLLM
from quire.worker.messages import Start

_BACKLOG = 2048
_LOOK_S = 0.05  # between looks whether a process has its first model

# ---- in the supervisor


class WorkerSockets:
    """Where workers take channels: a listening socket for each, which outlives its crashes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._sockets: dict[str, socket.socket] = {}
        self._number = 0
        self._unused: str | None = None

    def next(self) -> tuple[str, socket.socket]:
        """One that no worker was used at; the same one until use()."""
        if self._unused is None:
            self._number += 1
            path = self._unused = str(self._folder / f"worker-{self._number}")
            listener = self._sockets[path] = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen(_BACKLOG)
        return self._unused, self._sockets[self._unused]

    def use(self) -> None:
        self._unused = None

    def close(self, path: str) -> None:
        """Whoever waits there, or comes, finds out that no worker will be."""
        listener = self._sockets.pop(path, None)
        if listener is not None:
            listener.close()
            Path(path).unlink(missing_ok=True)

    def close_all(self) -> None:
        for path in list(self._sockets):
            self.close(path)


class Process(Protocol):
    """An API process, as its supervisor sees it."""

    async def ask(self, make: Callable[[int], wire.Prepare | wire.Switch]) -> wire.Done | None:
        """Its answer; None: it has ended."""

    def tell(self, news: wire.News) -> None: ...


class Followers:
    """All API processes, which use the worker that the supervisor does (an Elsewhere)."""

    def __init__(self, processes: Callable[[], Iterable[Process]], sockets: WorkerSockets) -> None:
        self.num_switched = 0
        self.load: wire.Load | None = None  # what a process begins with
        self._processes = processes
        self._sockets = sockets
        self._users: dict[OnlineModel, tuple[str, set[Process]]] = {}  # of replaced models

    def begin(self, llm: RemoteLLM, names: Iterable[str], options: Options) -> None:
        """The first worker is there."""
        self.load = self._load_of(llm, names, options)
        self._sockets.use()

    def _load_of(self, llm: RemoteLLM, names: Iterable[str], options: Options) -> wire.Load:
        path, _ = self._sockets.next()
        return wire.Load(str(llm.path), path, Start.of(llm.path, options).options, list(names))

    async def replace(self, old: RemoteLLM, new: RemoteLLM, wanted: Replacement) -> None:
        assert self.load is not None
        load = self._load_of(new, wanted.names, wanted.options)
        await self._prepare(load, continues=new.can_take_over(old))
        # Without an await since the last process was asked: whoever comes now begins with this.
        before, self.load = self.load.socket, load
        self._sockets.use()
        processes = list(self._processes())
        self._users[old] = (before, set(processes))
        done = await asyncio.gather(*(process.ask(wire.Switch) for process in processes))
        self.num_switched = sum(each.num_requests for each in done if each is not None)

    async def _prepare(self, load: wire.Load, *, continues: bool) -> None:
        ready: set[Process] = set()
        try:
            while asked := [each for each in self._processes() if each not in ready]:
                ready.update(asked)
                questions = (
                    each.ask(lambda call: wire.Prepare(call, load, continues)) for each in asked
                )
                for done in await asyncio.gather(*questions):
                    if done is not None and done.error is not None:
                        raise ConfigError(f"an API process cannot use the new worker: {done.error}")
        except BaseException:
            for process in ready.intersection(self._processes()):
                process.tell(wire.Forget())
            raise

    def retired(self, process: Process, path: str) -> None:
        """A process does not use the worker at that socket any more."""
        for before, users in self._users.values():
            if before == path:
                users.discard(process)

    def uses(self, old: OnlineModel) -> bool:
        path, users = self._users[old]
        if old.failure is not None:  # no worker comes any more: requests there fail
            self._sockets.close(path)
        return not users.isdisjoint(self._processes())

    def on_retired(self, old: OnlineModel) -> None:
        """Its worker has ended, and nobody connects to it."""
        path, _ = self._users.pop(old)
        self._sockets.close(path)


# ---- in an API process

Attach = Callable[[wire.Load, bool, Callable[[], None]], OnlineModel]


class NextWorker:
    """A process's way from its worker to the next one. `attach` connects to a worker."""

    def __init__(
        self, service: Service, attach: Attach, tell: Callable[[wire.Notice], None]
    ) -> None:
        self._service = service
        self._attach = attach
        self._tell = tell
        self._prepared: tuple[RemoteLLM, Replacement, str] | None = None
        self._socket = ""  # of the worker that is used
        self._retiring: dict[OnlineModel, str] = {}
        service.on_retired = self._on_retired

    def begin(self, load: wire.Load) -> None:
        """The first worker that the process uses is at this socket."""
        self._socket = load.socket
        self._service.first.model_names = tuple(load.names)

    async def prepare(self, asked: wire.Prepare) -> None:
        try:
            self._prepared = await self._ready_with(asked)
        except Exception as error:
            self._tell(wire.Done(asked.call, error=str(error) or type(error).__name__))
        else:
            self._tell(wire.Done(asked.call))

    async def _ready_with(self, asked: wire.Prepare) -> tuple[RemoteLLM, Replacement, str]:
        model, load = self._service.first, asked.load
        while model.state is State.LOADING:  # it was started a moment ago
            await asyncio.sleep(_LOOK_S)
        old = model.loaded
        if not isinstance(old, RemoteLLM):
            raise ConfigError(f"it is {model.status}")
        attach = partial(self._attach, load, asked.continues)
        options = Options(**load.options)
        wanted = Replacement(tuple(load.names), load.path, None, options, attach)
        return await model.loaded_instead(old, wanted, is_after=False), wanted, load.socket

    def switch(self, asked: wire.Switch) -> None:
        assert self._prepared is not None
        (new, wanted, path), self._prepared = self._prepared, None
        old = self._service.first.loaded
        assert isinstance(old, RemoteLLM)
        count = old.num_live
        self._retiring[old], self._socket = self._socket, path
        self._service.first.switch(old, new, wanted)
        self._tell(wire.Done(asked.call, num_requests=count))

    async def forget(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            await prepared[0].close()

    def _on_retired(self, old: OnlineModel) -> None:
        self._tell(wire.Retired(self._retiring.pop(old)))
