"""Jobs: the store and the runner of a server's batches, from the first use to the end.

Of a server's processes one works the batches off, whichever came first; where it dies, another
takes over.

Nothing is written before a client uploads a file; a server that finds jobs of an earlier one goes
on with them once its model is loaded.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.server.database import StoreError
from quire.server.errors import ApiError
from quire.server.jobs.lines import LineAnswerer
from quire.server.jobs.runner import CheckModel, FindKey, JobRunner
from quire.server.jobs.store import JobLimits, JobStore, has_jobs
from quire.server.keys import Access, ApiKey
from quire.server.logs import log

_RETRY_S = 5.0
_TAKE_OVER_S = 1.0  # between two looks whether the process that works them off is there


class JobNeeds(NamedTuple):
    """What the runner asks of the server."""

    find_key: FindKey
    check_model: CheckModel
    max_batch_size: Callable[[], int]


class Jobs:
    """`server`: a name that all processes of this server share, and no other server has."""

    def __init__(
        self, folder: Path | None, limits: JobLimits, needs: JobNeeds, server: str
    ) -> None:
        self._folder = None if folder is None else folder / "jobs"
        self._limits = limits
        self._needs = needs
        self._server = server
        self._taking_over: asyncio.Task[None] | None = None
        self._answerer: LineAnswerer | None = None
        self._store: JobStore | None = None
        self._runner: JobRunner | None = None
        self._failure: str | None = None  # why the folder could not be taken the last time
        self._is_started = False
        self._starting: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    def answer_by(self, answerer: LineAnswerer) -> None:
        """May come after the start: a replaced API process has its model first."""
        self._answerer = answerer
        if self._is_started:
            self._starting = asyncio.get_running_loop().create_task(self.start())

    async def start(self) -> None:
        """The model is loaded: go on with what is there."""
        self._is_started = True
        if self._store is not None:
            self._start_runner(self._store)
        elif self._answerer is not None and self._folder is not None:
            try:
                if await asyncio.to_thread(has_jobs, self._folder):
                    await self._open(self._folder)
            except StoreError as error:
                log("jobs_unavailable", logging.ERROR, error=str(error))

    async def store(self) -> JobStore:
        """Opened if it was not; a 503 where it cannot be used."""
        if self._folder is None:
            message = "there is no folder for jobs: start the server with --state FOLDER"
            raise ApiError(503, message, code="jobs_unavailable")
        try:
            return await self._open(self._folder)
        except StoreError as error:
            raise unavailable(error) from error

    async def _open(self, folder: Path) -> JobStore:
        async with self._opening:
            if self._store is None:
                store = JobStore(folder, self._limits, self._server)
                await asyncio.to_thread(store.open)
                self._store = store
                if self._is_started:
                    self._start_runner(store)
            return self._store

    def _start_runner(self, store: JobStore) -> None:
        if self._answerer is None or self._runner is not None:
            return
        if not store.is_owner:
            self._taking_over = asyncio.create_task(self._take_over(store))
            return
        find_key, check_model, max_batch_size = self._needs
        self._runner = JobRunner(store, self._answerer, find_key, check_model, max_batch_size())
        self._runner.start()

    async def _take_over(self, store: JobStore) -> None:
        while not await self._is_taken(store):
            await asyncio.sleep(_TAKE_OVER_S)
        self._start_runner(store)

    async def _is_taken(self, store: JobStore) -> bool:
        """Another server that has the folder just now may end, too."""
        failure: str | None = None
        try:
            return await asyncio.to_thread(store.take_folder)
        except (StoreError, OSError) as error:
            failure = str(error)
            return False
        finally:
            if failure is not None and failure != self._failure:
                log("jobs_unavailable", logging.ERROR, error=failure)
            self._failure = failure

    def wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    async def stop(self) -> None:
        """Work nothing more off; files and batches can still be asked for."""
        self._is_started = False
        if self._taking_over is not None:
            self._taking_over.cancel()
        if self._runner is not None:
            await self._runner.stop()
            self._runner = None

    async def close(self) -> None:
        await self.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)


def unavailable(error: StoreError) -> ApiError:
    return ApiError(503, str(error), code="jobs_unavailable", retry_after_s=_RETRY_S)


def key_finder(access: Access, now: Callable[[], float]) -> FindKey:
    """Keys by name; a LookupError where one is gone or has expired."""

    def find(name: str) -> ApiKey | None:
        if not access.ring and not name:
            return None
        for key in access.ring:
            if key.name == name and not key.has_expired(now()):
                return key
        raise LookupError(f"the API key {name!r} is no longer valid")

    return find
