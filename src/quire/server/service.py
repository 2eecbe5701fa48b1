"""Service: the model behind the server, from loading it to letting it go."""

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from quire.core.errors import ConfigError, ExecutorError
from quire.core.progress import PhaseTimes, reporting
from quire.llm import OnlineModel
from quire.llm.assembly import predict_memory
from quire.llm.devices import Options
from quire.llm.machine import format_bytes
from quire.server.bodies import BodyLimits, body_limits, parse_body
from quire.server.calls import Call
from quire.server.control import Reload, Say, control_socket
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
from quire.worker import RemoteLLM

B = TypeVar("B", bound=Strict)
OnStuck = Callable[[], None]
Load = Callable[[OnStuck], OnlineModel]  # called once, on a thread of its own


@dataclass(frozen=True, slots=True)
class Replacement:
    """What is to be served instead: another model, or the same with other settings."""

    names: tuple[str, ...]
    model: str
    config: str | None  # the path of its configuration
    options: Options
    load: Load


# From a model and the path of a configuration, None meaning those that are served, to the rest.
Replace = Callable[[str | None, str | None], Replacement]

LOADING_THREAD = "quire-load"
_RETRY_WHILE_LOADING_S = 5.0
# After the last request of a model that was replaced: others may be on their way to it.
_RETIRED_AFTER_S = 30.0


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STUCK = "stuck"  # the executor does not answer, or the engine failed: only a new process helps
    FAILED = "failed"  # the model could not be loaded


class Service:
    """The model and its state, and all that requests share."""

    def __init__(
        self,
        settings: ServerSettings,
        load: Load,
        shared: SharedState | None = None,
        replace: Replace | None = None,
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
        self.model_names = settings.model_names  # the first is the one that answers carry
        self._load = load
        self._replace = replace
        self._replaced: Replacement | None = None  # what is served, after a reload
        self._replacing = asyncio.Lock()
        self._llm: OnlineModel | None = None
        self._retiring: dict[OnlineModel, asyncio.Task[None]] = {}
        self._control = AsyncExitStack()
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
        loaded = asyncio.ensure_future(self._loaded(self._load))
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
        folder = self.settings.state_folder
        if folder is not None and self._replace is not None:
            await self._control.enter_async_context(control_socket(folder, self._do_reload))

    async def _loaded(self, load: Load) -> OnlineModel:
        loading: Future[OnlineModel] = Future()
        # A daemon, unlike asyncio's threads: the process can end while the model is loaded.
        threading.Thread(
            target=self._load_on_thread, args=[load, loading], name=LOADING_THREAD, daemon=True
        ).start()
        return await asyncio.wrap_future(loading)

    def _load_on_thread(self, load: Load, loading: "Future[OnlineModel]") -> None:
        found: list[OnlineModel] = []
        try:
            with reporting(self._set_progress):
                llm = load(lambda: self._on_stuck(found))
            found.append(llm)
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
        return self.model_names[0]

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
        if name is not None and name not in self.model_names:
            known = ", ".join(repr(known) for known in self.model_names)
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
        await self._control.aclose()
        if self._llm is not None and not was_stuck:
            served = [self._llm, *self._retiring]
            timeout_s = self.settings.drain_timeout_s
            draining: asyncio.Future[Any] = asyncio.gather(*(m.drain(timeout_s) for m in served))
            hurrying = asyncio.ensure_future(self._hurry.wait())
            either: set[asyncio.Future[Any]] = {draining, hurrying}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurrying.cancel()
            if not draining.done():
                draining.cancel()
                with suppress(asyncio.CancelledError):
                    await draining
            for retiring in self._retiring.values():
                retiring.cancel()
            await asyncio.gather(*(llm.close() for llm in served))
        self.has_ended.set()

    def give_up(self, reason: str) -> None:
        """End: nothing computes any more, and whoever started this process knows why."""
        if self._llm is not None and self._llm.failure is None:
            self._llm.fail(ExecutorError(reason))
        if self.state is not State.DRAINING:
            self.state = State.STUCK
        self.has_ended.set()

    # ---- another model

    async def _do_reload(self, asked: Reload, say: Say) -> str:
        assert self._replace is not None
        now = self._replaced
        model = asked.model or (None if now is None else now.model)
        config = asked.config or (None if now is None else now.config)
        return await self.replace_model(self._replace(model, config), say)

    async def replace_model(self, wanted: Replacement, say: Say) -> str:
        """Serve another model, or the same one otherwise, and end no stream; what was done.

        Raises a QuireError where that cannot be, and then everything is as it was.
        """
        if self._replacing.locked():
            raise ConfigError("the server is reloading already: wait until that has ended")
        async with self._replacing:
            old = self._llm
            if not self.is_ready or not isinstance(old, RemoteLLM):
                reason = "serves without a worker (--no-worker)" if self.is_ready else self.status
                raise ConfigError(f"the server cannot reload now: it is {reason}")
            log("reload", model=wanted.model)
            need = await asyncio.to_thread(predict_memory, wanted.model, wanted.options)
            is_after = not need.fits
            sizes = f"it needs {format_bytes(need.num_bytes)}"
            if need.available is not None:
                sizes += f", and {format_bytes(need.available)} are available"
            if is_after and not old.continues(need.path, wanted.options):
                raise ConfigError(
                    f"{wanted.model} does not fit beside the model that is served ({sizes}), whose "
                    "requests could not finish: give both a smaller --kv-memory, or start the "
                    "server again"
                )
            say(f"loading {wanted.model} {'after' if is_after else 'beside'} the old one: {sizes}")
            new = await self._loaded_instead(old, wanted, is_after=is_after)
            return self._switch(old, new, wanted)

    async def _loaded_instead(
        self, old: RemoteLLM, wanted: Replacement, *, is_after: bool
    ) -> RemoteLLM:
        if is_after:
            await old.suspend()
        try:
            new = await self._loaded(wanted.load)
            assert isinstance(new, RemoteLLM)
            await new.open()
        except BaseException as error:
            log("reload_failed", logging.ERROR, error=str(error))
            if is_after:
                await old.revive()
            raise
        return new

    def _switch(self, old: RemoteLLM, new: RemoteLLM, wanted: Replacement) -> str:
        """In one go: a request is in one engine or in the other."""
        count = old.num_live
        moved = new.take_over(old)
        retiring = self._retiring[old] = asyncio.ensure_future(self._retire(old, moved=moved))
        retiring.add_done_callback(lambda _: self._retiring.pop(old, None))
        self._llm, self.model_names, self.loaded_at = new, wanted.names, time.time()
        self._replaced = wanted
        if self.access.ring:
            new.set_key_weights(self.access.ring.weights)
        how = "go on in the new worker" if moved else "finish with the old weights"
        log("reloaded", model=wanted.model, requests=count, moved=moved)
        return f"{wanted.model} is served as {wanted.names[0]}; {count} requests {how}"

    async def _retire(self, old: RemoteLLM, *, moved: bool) -> None:
        """Close a model that was replaced, once its last request has ended. Some may have been read
        for it and come late: they are answered by it, or moved as the others were."""
        if moved:
            await old.end_worker()
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < _RETIRED_AFTER_S:
            await asyncio.sleep(min(0.5, _RETIRED_AFTER_S))
            if old.num_live:
                idle_since = time.monotonic()
        await old.close()

    def _on_stuck(self, found: "list[OnlineModel]") -> None:
        """On the engine's thread. `found` has the model that is stuck, once it was loaded."""
        if found and found[0] is not self._llm:
            return  # one that was replaced: its requests ended, and the others go on
        assert self._loop is not None
        self.state = State.STUCK
        self._loop.call_soon_threadsafe(self.has_ended.set)
