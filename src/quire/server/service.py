"""Service: the whole server, from its start to its end: its models, and all that their requests
share."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from quire.core.errors import ConfigError, QuireError
from quire.core.progress import PhaseTimes
from quire.llm import OnlineModel
from quire.server.answers.background import Background
from quire.server.calls import Call
from quire.server.control import Reload, Say, control_socket
from quire.server.errors import ApiError
from quire.server.fields import Strict
from quire.server.folder_watch import watch_folder
from quire.server.jobs.jobs import JobNeeds, Jobs, key_finder
from quire.server.jobs.store import JobLimits
from quire.server.keys import Access, KeyChanges, KeyRing
from quire.server.logs import LOGGER, log, num_dropped_lines
from quire.server.model_folder import ModelFolder
from quire.server.model_service import (
    Elsewhere,
    Load,
    ModelService,
    ModelSource,
    Replacement,
    State,
)
from quire.server.quotas import Meter
from quire.server.residency import Residency
from quire.server.settings import ServerSettings
from quire.server.shared import ProcessFigures, ServerFigures, SharedState
from quire.server.work_pool import WorkPool

B = TypeVar("B", bound=Strict)
# From a model and the path of a configuration, None meaning those that are served, to the rest.
Replace = Callable[[str | None, str | None], Replacement]

_LISTED_NAMES = 20  # of models, in an error
_LOOK_S = 0.05  # between looks whether a model is still being loaded


class Service:
    """The whole server: its models, and all that their requests share."""

    def __init__(
        self,
        settings: ServerSettings,
        load: Load | Sequence[ModelSource],
        shared: SharedState | None = None,
        replace: Replace | None = None,
        residency: Residency | None = None,
        folder: ModelFolder | None = None,
    ) -> None:
        """`load`: that of the one model, or several models. With a `residency` they are loaded on
        demand, and those of a `folder` come and go with its files; else all are loaded at once, and
        the server ends with any of them."""
        self.settings = settings
        self.access = Access(settings.keys)
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
        self.claims = self.shared.claims
        self.reloads: list[Callable[[], None]] = []  # what SIGHUP does
        if self.audit is not None:
            self.reloads.append(self.audit.reopen)
        if settings.keys.can_be_read_again:
            self.reloads.append(self._start_reloading_keys)
        self.on_new_keys: Callable[[KeyRing], None] = lambda _: None
        self.on_progress: Callable[[str, float], None] = lambda *_: None  # on the loading thread
        self.elsewhere: Elsewhere | None = None
        self.on_retired: Callable[[OnlineModel], None] = lambda _: None  # of a replaced model
        self._wants_reload = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_lock = asyncio.Lock()
        self.has_opened = False
        self.pool = WorkPool()
        self.residency = residency
        self.num_losses = 0  # of models: they do not answer any more
        self.left_out: dict[str, str] = {}  # models that cannot be served: why, by name
        self.num_past_restarts = 0  # of workers of models that were unloaded since
        self._folder = folder
        self._watching: asyncio.Task[None] | None = None
        if callable(load):
            load = [ModelSource(settings.model_names, load)]
        # Threads look through it: it is replaced, never changed.
        self.models = [ModelService(self, source) for source in load]
        pid = os.getpid() if shared is None else os.getppid()
        self.jobs = self._jobs(self.shared.server_name or f"pid {pid}")
        find_key = key_finder(self.access, time.time)
        self.background = Background(self.responses, self.claims, find_key, lambda: self.num_losses)
        self._replace = replace
        self._replaced: Replacement | None = None  # what is served, after a reload
        self._config: str | None = None  # of models on demand, after a reload
        self._is_draining = False
        self._state = State.LOADING  # of models on demand: until they were looked at
        self._failure: BaseException | None = None  # none of them can be served
        self._control = AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()

    def _jobs(self, server: str) -> Jobs:
        """`server`: a name that all processes of this server share."""
        settings = self.settings
        limits = JobLimits(settings.max_job_bytes, settings.max_jobs, settings.max_job_lines)
        find_key = key_finder(self.access, time.time)
        needs = JobNeeds(find_key, self.check_model, lambda: self.max_batch_size)
        return Jobs(settings.state_folder, limits, needs, server)

    # ---- its models

    @property
    def first(self) -> ModelService:
        """The model of requests that name none."""
        return self.models[0]

    def model_of(self, name: str | None) -> ModelService:
        """The model that a request asks for; a 404 where there is none of that name, a 503 where
        it cannot be served."""
        if name is None:
            return self.first
        for model in self.models:
            if name in model.model_names:
                return model
        raise self.unknown_model(name)

    def check_model(self, name: str | None) -> None:
        self.model_of(name)

    def unknown_model(self, name: str) -> ApiError:
        """Why a request cannot have the model that it names."""
        reason = self.left_out.get(name)
        if reason is not None:
            message = f"{name} cannot be loaded: {reason}"
            return ApiError(503, message, param="model", code="model_not_loaded")
        names = [repr(known) for model in self.models for known in model.model_names]
        known = ", ".join(names[:_LISTED_NAMES])
        more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
        return ApiError(
            404,
            f"there is no model {name!r:.100}; this server has {known}{more}",
            param="model",
            code="model_not_found",
        )

    @property
    def name(self) -> str:
        """What the first model is called in answers."""
        return self.first.name

    @property
    def llm(self) -> OnlineModel:
        """The first model, for a new request; a 503 where none can be taken."""
        return self.first.llm

    @property
    def loaded(self) -> OnlineModel | None:
        """The first model in any state, for figures."""
        return self.first.loaded

    @property
    def max_batch_size(self) -> int:
        """Of the model with the largest; as far as is known."""
        return max(
            model.source.options.max_batch_size
            if model.loaded is None
            else model.loaded.max_batch_size
            for model in self.models
        )

    def read_body(self, call: Call, data: bytes, schema: type[B]) -> B:
        """A body whose model is not known yet, within the limits of the one with the longest
        context; a 503 while none is known."""
        known = [model for model in self.models if model.max_context is not None]
        if self.residency is None or not known:
            _ = self.llm
        longest = max(known, key=lambda model: model.max_context or 0)
        return longest.read_body(call, data, schema)

    def weigh_keys(self, llm: OnlineModel) -> None:
        """Tell a model that was loaded the keys' weights, where they changed since the start."""
        if self.access.ring is not self.settings.keys:
            llm.set_key_weights(self.access.ring.weights)

    # ---- its state

    @property
    def state(self) -> State:
        """Without residency that of the model that is furthest from READY; else models come and
        go."""
        if self._is_draining:
            return State.DRAINING
        if self.residency is not None:
            return self._state
        states = [model.state for model in self.models]
        return next((state for state in states if state is not State.READY), State.READY)

    @property
    def status(self) -> str:
        """The state; "recovering" where requests are taken and wait for the next worker."""
        is_recovering = self.residency is None and any(
            model.status == "recovering" for model in self.models
        )
        return "recovering" if is_recovering else self.state.value

    @property
    def is_ready(self) -> bool:
        return self.status == State.READY.value

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_stuck(self) -> bool:
        """Whether a model is lost for good in this process. One that is loaded on demand is loaded
        again."""
        return self.residency is None and any(m.state is State.STUCK for m in self.models)

    @property
    def failure(self) -> BaseException | None:
        """Why a model could not be loaded, if the server ends with it."""
        if self.residency is not None:
            return self._failure
        return next((m.failure for m in self.models if m.failure is not None), None)

    @property
    def phases(self) -> PhaseTimes:
        """Of loading the first model."""
        return self.first.phases

    async def open(self) -> None:
        """Load what is not loaded on demand, off the event loop; returns early if the service ends
        before."""
        self.has_opened = True
        self._loop = asyncio.get_running_loop()
        if self.residency is None:
            await self._open_models()
        else:
            await self._unless_ended(self._look_at_models(self.residency))
        if self.state is State.READY:
            await self._unless_ended(self._go_on_with_work())
        folder = self.settings.state_folder
        is_open = self.loaded is not None or self.residency is not None
        if is_open and not self._is_draining and folder is not None and self._replace is not None:
            await self._control.enter_async_context(control_socket(folder, self._do_reload))

    async def _open_models(self) -> None:
        loaded = asyncio.gather(*(model.open() for model in self.models))
        ended = asyncio.ensure_future(self.has_ended.wait())
        both: list[asyncio.Future[Any]] = [loaded, ended]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        # Where the server ends before, the loop's end cancels it: nobody is told of that.
        loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        if loaded.done() and loaded.exception() is not None:
            self.has_ended.set()

    async def _go_on_with_work(self) -> None:
        """With what outlives its request: jobs and background responses."""
        await self.shared.own_folder()
        await self.jobs.start()
        if self.state is State.READY:  # still: a server that drains makes nothing more
            self.background.start()

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something, as far as it comes before the service ends."""
        working = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.has_ended.wait())
        both: list[asyncio.Future[Any]] = [working, ended]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if working.done():
            working.result()
        working.cancel()

    # ---- models on demand

    async def _look_at_models(self, residency: Residency) -> None:
        """Predict what each takes; one that cannot be served is left out."""
        entered = [model for model in self.models if await self.enter(residency, model)]
        try:
            residency.check_models()
        except ConfigError as error:
            self._failure = error
            self._state = State.FAILED
            self.has_ended.set()
            return
        self.models = entered
        self._state = State.READY
        residency.start()
        if self._folder is not None:
            self._watching = asyncio.create_task(watch_folder(self, self._folder, residency))

    async def enter(self, residency: Residency, model: ModelService) -> bool:
        """Whether it can be served: that is predicted of it."""
        try:
            need = await asyncio.to_thread(model.source.need)
        except (QuireError, OSError) as error:
            self.leave_out(model.name, error)
            return False
        self.left_out.pop(model.name, None)
        residency.enter(model, need)
        return True

    def leave_out(self, name: str, error: Exception) -> None:
        """A model cannot be served; requests for it are told why."""
        log("model_left_out", logging.ERROR, model=name, error=str(error))
        self.left_out[name] = str(error)

    def new_model(self, source: ModelSource) -> ModelService:
        """One that is not served yet, with the options of now."""
        model = ModelService(self, source)
        if self._config is not None and self._replace is not None:
            model.renew(self._replace(source.model, self._config))
        return model

    def on_stuck(self, model: ModelService) -> None:
        """On an engine's thread: a model does not answer. What is loaded on demand is loaded again
        by its next request."""
        assert self._loop is not None
        if self.residency is not None:
            log("model_stuck", logging.ERROR, model=model.name)
        self._loop.call_soon_threadsafe(self._note_loss)

    def _note_loss(self) -> None:
        self.num_losses += 1
        if self.residency is None:
            self.has_ended.set()
        else:
            self.residency.look()

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
            for model in self.models:
                if model.loaded is not None:
                    model.loaded.set_key_weights(ring.weights)
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
            self.num_worker_restarts,
        )

    @property
    def num_worker_restarts(self) -> int:
        """Workers that died and were replaced, of all models that were ever loaded."""
        left = [] if self.residency is None else list(self.residency.leaving)
        loaded = [model.loaded for model in (*self.models, *left)]
        return self.num_past_restarts + sum(llm.num_restarts for llm in loaded if llm is not None)

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
        if self._is_draining:
            self._hurry.set()  # asked twice: do not wait
            return
        self._is_draining = True
        try:
            for stop in (self.jobs.stop, self.background.stop, self._control.aclose):
                try:
                    await stop()
                except Exception:  # a bug: running requests still finish
                    LOGGER.exception("drain_failed")
            await self._drain_models()
        finally:
            self.has_ended.set()

    async def _drain_models(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self.residency is not None:
            await self.residency.stop()
        # A model that is no longer served may have requests that run.
        left = () if self.residency is None else self.residency.leaving
        await asyncio.gather(*(model.drain(self._hurry) for model in (*self.models, *left)))

    def give_up(self, reason: str) -> None:
        """End: nothing computes any more, and whoever started this process knows why."""
        for model in self.models:
            model.give_up(reason)
        self.has_ended.set()

    # ---- another model

    async def _do_reload(self, asked: Reload, say: Say) -> str:
        assert self._replace is not None
        if self.residency is not None:
            return await self._reload_all(asked, self._replace, say)
        now = self._replaced
        model = asked.model or (None if now is None else now.model)
        config = asked.config or (None if now is None else now.config)
        return await self.replace_model(self._replace(model, config), say)

    async def _reload_all(self, asked: Reload, make: Replace, say: Say) -> str:
        """All that are loaded, one after another; the others when they are asked for."""
        if asked.model is not None:
            raise ConfigError(
                f"the server has several models: `quire reload` without {asked.model} loads those "
                "anew that are loaded"
            )
        config = asked.config or self._config
        wanted = {
            model: replace(make(model.source.model, config), names=model.model_names)
            for model in self.models
        }
        self._config = config
        count, refused = 0, []
        for model, replacement in wanted.items():
            while model.state is State.LOADING:  # as it was before
                await asyncio.sleep(_LOOK_S)
            if model.loaded is None:
                model.renew(replacement)
                continue
            try:
                say(await model.replace(replacement, say))
                count += 1
            except (QuireError, OSError) as error:  # it is as it was; the others are loaded anew
                refused.append(f"{model.name} is as it was: {error}")
        done = f"{count} of {len(wanted)} models were loaded, and are so anew"
        if refused:
            raise ConfigError("; ".join([done, *refused]))
        return done

    async def replace_model(self, wanted: Replacement, say: Say) -> str:
        """Serve another model instead of the first, or the same one otherwise, and end no stream;
        what was done. Raises a QuireError where that cannot be."""
        done = await self.first.replace(wanted, say)
        self._replaced = wanted
        return done
