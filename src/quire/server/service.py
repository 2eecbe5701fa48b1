"""Service: the model behind the server, from loading it to letting it go."""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

from quire.core.errors import ConfigError, ExecutorError
from quire.core.progress import PhaseTimes, reporting
from quire.llm import OnlineModel
from quire.server.bodies import BodyLimits, body_limits, parse_body
from quire.server.calls import Call
from quire.server.errors import RESTART_S, ApiError
from quire.server.fields import Strict
from quire.server.jobs.jobs import JobNeeds, Jobs, key_finder
from quire.server.jobs.store import JobLimits
from quire.server.keys import Access, ApiKey, KeyChanges, KeyRing
from quire.server.logs import LOGGER, log, num_dropped_lines
from quire.server.quotas import Meter
from quire.server.schemas import MAX_MESSAGES, MAX_PROMPTS
from quire.server.settings import ServerSettings
from quire.server.shared import ProcessFigures, ServerFigures, SharedState
from quire.server.work_pool import WorkPool

B = TypeVar("B", bound=Strict)
OnStuck = Callable[[], None]
Load = Callable[[OnStuck], OnlineModel]  # called once, on a thread of its own

LOADING_THREAD = "quire-load"
_RETRY_WHILE_LOADING_S = 5.0


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STUCK = "stuck"  # the executor does not answer, or the engine failed: only a new process helps
    FAILED = "failed"  # the model could not be loaded


class Service:
    """The model and its state, and all that requests share."""

    def __init__(
        self, settings: ServerSettings, load: Load, shared: SharedState | None = None
    ) -> None:
        self.settings = settings
        self.access = Access(settings.keys)
        self.state = State.LOADING
        self.failure: BaseException | None = None  # why loading failed
        self.phases = PhaseTimes()  # of loading
        self.loaded_at = time.time()
        self.has_ended = asyncio.Event()  # drained, stuck or failed: nothing more will come
        self.num_streams = 0  # being written right now
        self.rejected: Counter[str] = Counter()  # requests, by status
        self.shared = shared or SharedState.of(settings)
        self.connections = self.shared.connections
        self.limits = self.shared.limits
        self.failed_keys = self.shared.failed_keys
        self.quotas = self.shared.quotas
        self.meter: Meter = self.quotas
        self.audit = self.shared.audit
        self.responses = self.shared.responses
        self.reloads: list[Callable[[], None]] = []  # what SIGHUP does
        if self.audit is not None:
            self.reloads.append(self.audit.reopen)
        if settings.keys.can_be_read_again:
            self.reloads.append(self._start_reloading_keys)
        self.on_new_keys: Callable[[KeyRing], None] = lambda _: None
        self.on_progress: Callable[[str, float], None] = lambda *_: None  # on the loading thread
        self._wants_reload = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_lock = asyncio.Lock()
        self.pool = WorkPool()
        self.jobs = self._jobs(os.getpid() if shared is None else os.getppid())
        self._load = load
        self._llm: OnlineModel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()

    def _jobs(self, server_pid: int) -> Jobs:
        """`server_pid`: of the process that was started as the server."""
        settings = self.settings
        limits = JobLimits(settings.max_job_bytes, settings.max_jobs, settings.max_job_lines)
        find_key = key_finder(self.access, time.time)
        needs = JobNeeds(find_key, self.check_model, lambda: self.llm.max_batch_size)
        return Jobs(settings.state_folder, limits, needs, f"pid {server_pid}")

    async def open(self) -> None:
        """Load the model off the event loop; returns early if the service ends before."""
        self._loop = asyncio.get_running_loop()
        loading: Future[OnlineModel] = Future()
        # A daemon, unlike asyncio's threads: the process can end while the model is loaded.
        threading.Thread(
            target=self._load_on_thread, args=[loading], name=LOADING_THREAD, daemon=True
        ).start()
        loaded = asyncio.ensure_future(asyncio.wrap_future(loading))
        ended = asyncio.ensure_future(self.has_ended.wait())
        both: set[asyncio.Future[Any]] = {loaded, ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not loaded.done():
            return
        self.failure = loaded.exception()
        if self.failure is not None:
            self.state = State.FAILED
            self.has_ended.set()
            return
        self._llm = loaded.result()
        await self._llm.open()
        self.loaded_at = time.time()
        if self.access.ring is not self.settings.keys:  # they changed meanwhile
            self._llm.set_key_weights(self.access.ring.weights)
        if self.state is State.LOADING:
            self.state = State.READY
            await self.jobs.start()

    def _load_on_thread(self, loading: "Future[OnlineModel]") -> None:
        try:
            with reporting(self._set_progress):
                llm = self._load(self._on_stuck)
        except BaseException as error:
            loading.set_exception(error)
        else:
            self.phases.finish()
            seconds = {phase: round(taken, 3) for phase, taken in self.phases.seconds.items()}
            log("model_loaded", phases=seconds)
            loading.set_result(llm)

    def _set_progress(self, phase: str, done: float) -> None:
        """On the thread that loads."""
        if phase != self.phases.phase:
            log("loading", phase=phase)
        self.phases(phase, done)
        self.on_progress(phase, done)

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.settings.model_names[0]

    @property
    def status(self) -> str:
        """The state; "recovering" where requests are taken and wait for the next worker."""
        is_recovering = self._llm is not None and self._llm.is_recovering
        return "recovering" if self.state is State.READY and is_recovering else self.state.value

    @property
    def is_ready(self) -> bool:
        return self.status == State.READY.value

    @property
    def is_draining(self) -> bool:
        return self.state is State.DRAINING

    @property
    def llm(self) -> OnlineModel:
        """The model, for a new request; a 503 where none can be taken."""
        if self.state is State.DRAINING:
            left_s = self.settings.drain_timeout_s
            raise ApiError(
                503, "the server is shutting down", code="drain", retry_after_s=max(1.0, left_s)
            )
        if self._llm is None:
            raise ApiError(
                503,
                "the model is being loaded",
                code="loading",
                retry_after_s=_RETRY_WHILE_LOADING_S,
            )
        if self.state is State.STUCK:
            raise ApiError(
                503,
                "the executor does not answer or the engine failed; the server restarts",
                code="stuck",
                retry_after_s=RESTART_S,
            )
        return self._llm

    @property
    def body_limits(self) -> BodyLimits:
        """What a body for the loaded model may hold."""
        assert self._llm is not None
        return body_limits(self._llm.max_context, MAX_PROMPTS, MAX_MESSAGES)

    def read_body(self, call: Call, data: bytes, schema: type[B]) -> B:
        """A body as its schema; an ApiError about the first field that is wrong."""
        ignored = call.ignored_fields if self.settings.ignore_unknown_fields else None
        return parse_body(data, schema, self.body_limits, ignored)

    @property
    def loaded(self) -> OnlineModel | None:
        """The model in any state, for figures."""
        return self._llm

    def parses_control_tokens(self, key: ApiKey | None) -> bool:
        """Whether a key's chat messages, or without keys all, may write control tokens."""
        return (self.settings if key is None else key).parse_control_tokens

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; one that names none means this one."""
        if name is not None and name not in self.settings.model_names:
            known = ", ".join(repr(known) for known in self.settings.model_names)
            raise ApiError(
                404,
                f"there is no model {name!r:.100}; this server has {known}",
                param="model",
                code="model_not_found",
            )

    async def reload_keys(self) -> KeyChanges:
        """Read the keys again, for new requests; running ones finish.

        Raises a ConfigError where the file cannot be used; the keys are then as they were.
        """
        if self.shared.reload_keys is not None:
            before = self.access.ring
            await self.shared.reload_keys()
            return KeyChanges(before, self.access.ring)
        async with self._reload_lock:
            try:
                ring = await asyncio.to_thread(self.access.ring.read_again)
                await asyncio.to_thread(self.quotas.open, ring)
            except ConfigError as error:
                log("reload_failed", logging.ERROR, error=str(error))
                self.record("keys_refused", error=str(error))
                raise
            changes = self.access.replace(ring)
            self.on_new_keys(ring)
            if self._llm is not None:
                self._llm.set_key_weights(ring.weights)
            log("keys_reloaded", logging.INFO, **changes.summary())
            self.record("keys_reloaded", **changes.summary())
            return changes

    def own_figures(self) -> ProcessFigures:
        """What this process counts."""
        return ProcessFigures(
            rejected=dict(self.rejected),
            num_streams=self.num_streams,
            num_connections=self.connections.num_open,
            refused=dict(self.connections.refused),
            cut=dict(self.connections.cut),
            num_dropped_lines=num_dropped_lines(),
        )

    async def figures(self) -> ServerFigures:
        """What the whole server counts, beside its engine."""
        return await self.shared.figures(
            self.own_figures(),
            self.access.ring,
            0 if self.loaded is None else self.loaded.num_restarts,
        )

    def record(self, event: str, **about: object) -> None:
        """Into the audit log, where there is one."""
        if self.audit is not None:
            self.audit.record(event, **about)

    def _start_reloading_keys(self) -> None:
        """At most one reload runs, and at most one more is pending."""
        self._wants_reload = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload_while_wanted())

    async def _reload_while_wanted(self) -> None:
        while self._wants_reload:
            self._wants_reload = False
            try:
                await self.reload_keys()
            except ConfigError:
                pass  # it is in the log
            except Exception:
                LOGGER.exception("reload_failed")

    async def drain(self) -> None:
        """Take no new requests; let running ones finish until the deadline, then end each with an
        error."""
        if self.state is State.DRAINING:
            self._hurry.set()  # asked twice: do not wait
            return
        was_stuck = self.state is State.STUCK
        self.state = State.DRAINING
        await self.jobs.stop()
        if self._llm is not None and not was_stuck:
            draining = asyncio.ensure_future(self._llm.drain(self.settings.drain_timeout_s))
            hurrying = asyncio.ensure_future(self._hurry.wait())
            await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            if not draining.done():
                draining.cancel()
                with suppress(asyncio.CancelledError):
                    await draining
            await self._llm.close()
        self.has_ended.set()

    def give_up(self, reason: str) -> None:
        """End: nothing computes any more, and whoever started this process knows why."""
        if self._llm is not None and self._llm.failure is None:
            self._llm.fail(ExecutorError(reason))
        if self.state is not State.DRAINING:
            self.state = State.STUCK
        self.has_ended.set()

    def _on_stuck(self) -> None:
        """On the engine's thread."""
        assert self._loop is not None
        self.state = State.STUCK
        self._loop.call_soon_threadsafe(self.has_ended.set)
