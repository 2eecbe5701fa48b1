"""ModelService: one model behind the server, from loading it to letting it go, as its requests see
it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quire.core.errors import ConfigError, ExecutorError
from quire.core.progress import PhaseTimes, reporting
from quire.engine.stats import Snapshot
from quire.llm import OnlineModel
from quire.llm.assembly import MemoryNeed, predict_memory
from quire.llm.devices import Options
from quire.llm.machine import format_bytes
from quire.server.answers.store import AnswerStore
from quire.server.bodies import BodyLimits, body_limits, parse_body
from quire.server.calls import Call
from quire.server.control import Say
from quire.server.errors import RESTART_S, ApiError
from quire.server.fields import Strict
from quire.server.keys import ApiKey
from quire.server.logs import log
from quire.server.quotas import Meter
from quire.server.schemas import MAX_MESSAGES, MAX_PROMPTS
from quire.server.work_pool import WorkPool
from quire.worker import RemoteLLM

if TYPE_CHECKING:
    from quire.server.service import Service

B = TypeVar("B", bound=Strict)
OnStuck = Callable[[], None]
Load = Callable[[OnStuck], OnlineModel]  # on a thread of its own


@dataclass(frozen=True, slots=True)
class Replacement:
    """What is to be served instead: another model, or the same with other settings."""

    names: tuple[str, ...]
    model: str
    config: str | None  # the path of its configuration
    options: Options
    load: Load


class Elsewhere(Protocol):
    """Other processes, which have requests computed by the worker that this one starts."""

    num_switched: int  # requests that they had at the last replacement

    async def replace(self, old: RemoteLLM, new: RemoteLLM, wanted: Replacement) -> None:
        """Have all of them use the new worker; raises where one cannot, and then none does."""

    def uses(self, old: OnlineModel) -> bool:
        """Whether one of them has requests of a model that was replaced."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to serve."""

    names: tuple[str, ...]  # the first is the one that answers carry
    load: Load
    model: str = ""  # its name or path, and with which options: where it is loaded on demand
    options: Options = field(default_factory=Options)

    def need(self) -> MemoryNeed:
        """What it will take; raises what loading it would raise about its file."""
        return predict_memory(self.model, self.options)


LOADING_THREAD = "quire-load"
_RETRY_WHILE_LOADING_S = 5.0
# After the last request of a model that was replaced: others may be on their way to it.
_RETIRED_AFTER_S = 30.0


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    UNLOADED = "unloaded"  # the next request has it loaded
    DRAINING = "draining"
    STUCK = "stuck"  # the executor does not answer, or the engine failed: only a new process helps
    FAILED = "failed"  # the model could not be loaded


class ModelService:
    """A model and its state, and what its requests share with those of others.

    Where the server has a Residency it is loaded on demand and unloaded again; else it is loaded
    once, and the server ends with it.
    """

    def __init__(self, server: "Service", source: ModelSource) -> None:
        self.server = server
        self.settings = server.settings
        self.source = source
        self.model_names = source.names
        self.need: MemoryNeed | None = None  # as predicted last, where it is loaded on demand
        self.state = State.LOADING if server.residency is None else State.UNLOADED
        self.failure: BaseException | None = None  # why loading failed
        self.phases = PhaseTimes()  # of loading
        self.loaded_at = time.time()
        self.num_calls = 0  # being answered, up to their streams
        self.used_at = time.monotonic()
        self.keep_s: float | None = None  # loaded without use, if a request said so
        self._llm: OnlineModel | None = None
        self._replacing = asyncio.Lock()
        self._retiring: dict[OnlineModel, asyncio.Task[None]] = {}
        # Of copies besides the one that is served: what each takes, until its worker has ended.
        self._copies: dict[object, MemoryNeed] = {}

    # ---- what it shares with others

    @property
    def pool(self) -> WorkPool:
        return self.server.pool

    @property
    def meter(self) -> Meter:
        return self.server.meter

    @property
    def responses(self) -> AnswerStore:
        return self.server.responses

    @property
    def num_streams(self) -> int:
        """Of the whole server: being written right now."""
        return self.server.num_streams

    @num_streams.setter
    def num_streams(self, count: int) -> None:
        self.server.num_streams = count

    @property
    def is_draining(self) -> bool:
        return self.server.is_draining

    def parses_control_tokens(self, key: ApiKey | None) -> bool:
        """Whether a key's chat messages, or without keys all, may write control tokens."""
        return (self.settings if key is None else key).parse_control_tokens

    # ---- the model

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.model_names[0]

    @property
    def status(self) -> str:
        """The state; "recovering" where requests are taken and wait for the next worker."""
        if self.is_draining:
            return State.DRAINING.value
        is_recovering = self._llm is not None and self._llm.is_recovering
        return "recovering" if self.state is State.READY and is_recovering else self.state.value

    @property
    def llm(self) -> OnlineModel:
        """The model, for a new request; a 503 where none can be taken."""
        if self.is_draining:
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
    def loaded(self) -> OnlineModel | None:
        """The model in any state, for figures."""
        return self._llm

    async def snapshot(self) -> Snapshot | None:
        """Its engine's figures; None where it is not loaded, or is unloaded before they come."""
        llm = self._llm
        try:
            return None if llm is None else await llm.snapshot()
        except ExecutorError:
            if self.server.residency is None:
                raise
            return None

    @property
    def max_context(self) -> int | None:
        """In tokens; None where nothing is known of the model yet."""
        if self._llm is not None:
            return self._llm.max_context
        return None if self.need is None else self.need.max_context

    @property
    def body_limits(self) -> BodyLimits:
        """What a body for the model may hold."""
        assert self.max_context is not None
        return body_limits(self.max_context, MAX_PROMPTS, MAX_MESSAGES)

    def read_body(self, call: Call, data: bytes, schema: type[B]) -> B:
        """A body as its schema; an ApiError about the first field that is wrong."""
        ignored = call.ignored_fields if self.settings.ignore_unknown_fields else None
        return parse_body(data, schema, self.body_limits, ignored)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; one that names none means this one."""
        if name is not None and name not in self.model_names:
            raise self.server.unknown_model(name)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a call is answered: a model that is loaded on demand stays. Of requests that
        outlast the block, the model itself knows."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            self.used_at = time.monotonic()
            if self.keep_s is not None and self.server.residency is not None:
                self.server.residency.look()

    def num_bytes_on(self, device: str) -> int:
        """What it takes of a device's memory, as was predicted: loaded or being loaded, and copies
        that replace it or that it replaced."""
        is_there = self._llm is not None or self.state is State.LOADING
        needs = [self.need] if is_there and self.need is not None else []
        needs += self._copies.values()
        return sum(need.num_bytes for need in needs if need.device == device)

    @property
    def is_idle(self) -> bool:
        """Whether nobody would miss it."""
        live = self._num_live
        if live:
            self.used_at = time.monotonic()
        return not (live or self.num_calls or self._replacing.locked())

    @property
    def _num_live(self) -> int:
        """Requests that have not ended."""
        served = (self._llm, *self._retiring)  # what comes late for these is a call
        return sum(each.num_live for each in served if isinstance(each, RemoteLLM))

    # ---- loading

    async def open(self) -> None:
        """Load the model off the event loop; raises what failed. Cancelled, it goes on loading."""
        self.state = State.LOADING
        self.failure = None
        try:
            llm = await self._loaded(self.source.load)
            await _open(llm)
        except Exception as error:
            self.failure = error
            self.state = State.FAILED if self.server.residency is None else State.UNLOADED
            raise
        self._llm = llm
        self.loaded_at = time.time()
        self.used_at = time.monotonic()
        self.server.weigh_keys(llm)
        if llm.failure is not None:  # before anybody knew that it is this model's
            self._on_stuck([llm])
        if self.state is State.LOADING:  # else it is stuck already
            self.state = State.READY

    async def _loaded(self, load: Load) -> OnlineModel:
        loading: Future[OnlineModel] = Future()
        # A daemon, unlike asyncio's threads: the process can end while the model is loaded.
        threading.Thread(
            target=self._load_on_thread, args=[load, loading], name=LOADING_THREAD, daemon=True
        ).start()
        try:
            return await asyncio.wrap_future(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_drop)
            raise

    def _load_on_thread(self, load: Load, loading: "Future[OnlineModel]") -> None:
        loading.set_running_or_notify_cancel()  # it cannot be cancelled from here on
        found: list[OnlineModel] = []
        self.phases = PhaseTimes()
        try:
            with reporting(self._set_progress):
                llm = load(lambda: self._on_stuck(found))
            found.append(llm)
        except BaseException as error:
            loading.set_exception(error)
        else:
            self.phases.finish()
            seconds = {phase: round(taken, 3) for phase, taken in self.phases.seconds.items()}
            log("model_loaded", model=self.name, phases=seconds)
            loading.set_result(llm)

    def _set_progress(self, phase: str, done: float) -> None:
        """On the thread that loads."""
        if phase != self.phases.phase:
            log("loading", model=self.name, phase=phase)
        self.phases(phase, done)
        self.server.on_progress(phase, done)

    def _on_stuck(self, found: "list[OnlineModel]") -> None:
        """On the engine's thread. `found` has the model that is stuck, once it was loaded."""
        if found and found[0] is not self._llm:
            return  # one that was replaced: its requests ended, and the others go on
        self.state = State.STUCK
        self.server.on_stuck(self)

    # ---- letting it go

    def unload_soon(self) -> None:
        """Have it unloaded when its requests have ended, if it is loaded or being loaded."""
        assert self.server.residency is not None
        if self.state is not State.UNLOADED:
            self.keep_s = 0.0
            self.server.residency.look()

    def unload(self) -> "asyncio.Future[None]":
        """Close it and give its memory back; the next request has it loaded again. It takes no
        request from the moment of the call."""
        llm, self._llm, self.state = self._llm, None, State.UNLOADED
        self.keep_s = None
        if llm is not None:
            self.server.num_past_restarts += llm.num_restarts
        if llm is not None and self.need is not None:
            self._copies[llm] = self.need  # until it is closed
        closed = [each for each in (llm, *self._retiring) if each is not None]
        for retiring in self._retiring.values():
            retiring.cancel()
        return asyncio.ensure_future(self._close(closed))

    async def _close(self, closed: Sequence[OnlineModel]) -> None:
        try:
            await asyncio.gather(*(each.close() for each in closed))
        finally:
            for each in closed:
                self._copies.pop(each, None)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let running requests finish until the deadline, or until `hurry`; then close."""
        if self._llm is None or self.state is State.STUCK:
            return
        served = [self._llm, *self._retiring]
        timeout_s = self.settings.drain_timeout_s
        draining: asyncio.Future[Any] = asyncio.gather(*(each.drain(timeout_s) for each in served))
        hurrying: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
        await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            with suppress(asyncio.CancelledError):
                await draining
        for retiring in self._retiring.values():
            retiring.cancel()
        served += [self._llm, *self._retiring]  # a reload may have ended meanwhile
        await asyncio.gather(*(each.close() for each in dict.fromkeys(served)))

    def give_up(self, reason: str) -> None:
        """Nothing computes any more."""
        if self._llm is not None and self._llm.failure is None:
            self._llm.fail(ExecutorError(reason))
        self.state = State.STUCK

    # ---- another model in its place

    async def replace(self, wanted: Replacement, say: Say) -> str:
        """Serve another model, or the same one otherwise, and end no stream; what was done.

        Raises a QuireError where that cannot be, and then everything is as it was.
        """
        if self._replacing.locked():
            raise ConfigError("the server is reloading already: wait until that has ended")
        async with self._replacing:
            old = self._llm
            if self.status != State.READY or not isinstance(old, RemoteLLM):
                is_ready = self.status == State.READY
                reason = "serves without a worker (--no-worker)" if is_ready else self.status
                raise ConfigError(f"the server cannot reload now: it is {reason}")
            log("reload", model=wanted.model)
            need = await asyncio.to_thread(predict_memory, wanted.model, wanted.options)
            is_after = not (need.fits and self._has_room_beside(need))
            if is_after and not old.continues(need.path, wanted.options):
                return await self._unload_for(wanted, need)
            sizes = self._sizes_of(need)
            if is_after and not self._has_room_instead(need):
                raise ConfigError(f"{wanted.model} does not fit into --model-memory: {sizes}")
            say(f"loading {wanted.model} {'after' if is_after else 'beside'} the old one: {sizes}")
            new = await self._loaded_within(need, old, wanted, is_after=is_after)
            if self._llm is not old:
                await new.close()
                raise ConfigError(f"{wanted.model} was lost while it was loaded anew")
            if self.need is not None:
                if not is_after:
                    self._copies[old] = self.need
                self.need = need  # what is counted of it, where it is loaded on demand
            return self.switch(old, new, wanted)

    def _has_room_beside(self, need: MemoryNeed) -> bool:
        """Whether a second copy stays within what models may take together."""
        residency = self.server.residency
        return residency is None or residency.missing(need) <= 0

    def _has_room_instead(self, need: MemoryNeed) -> bool:
        residency = self.server.residency
        return residency is None or residency.missing_of_budget(need) <= self.num_bytes_on(
            need.device
        )

    def _sizes_of(self, need: MemoryNeed) -> str:
        said = [f"it needs {format_bytes(need.num_bytes)}"]
        if need.available is not None:
            said.append(f"{format_bytes(need.available)} are available")
        residency = self.server.residency
        budget = None if residency is None else residency.budget_of(need.device)
        if budget is not None:
            said.append(f"models may take {format_bytes(budget)} together")
        return ", and ".join(said)

    async def _unload_for(self, wanted: Replacement, need: MemoryNeed) -> str:
        """Of other weights that do not fit beside those that are served: where nobody uses these,
        the next request has the others loaded."""
        is_used = self.num_calls or self._num_live
        if is_used or self.server.residency is None:
            raise ConfigError(
                f"{wanted.model} does not fit beside the model that is served "
                f"({self._sizes_of(need)}), whose requests could not finish: give both a smaller "
                "--kv-memory, or start the server again"
            )
        self.model_names = wanted.names
        self.renew(wanted)
        self.need = need
        await self.unload()
        self.server.residency.look()
        return f"{wanted.model} is loaded by its next request: it does not fit beside the old one"

    async def _loaded_within(
        self, need: MemoryNeed, old: RemoteLLM, wanted: Replacement, *, is_after: bool
    ) -> RemoteLLM:
        """The model that is wanted, whose memory nobody else takes meanwhile."""
        counted = need
        if is_after and self.need is not None and self.need.device == need.device:
            more = max(0, need.num_bytes - self.need.num_bytes)  # than the old one gives back
            counted = need._replace(num_bytes=more)
        place = object()
        self._copies[place] = counted
        try:
            return await self.loaded_instead(old, wanted, is_after=is_after)
        finally:
            del self._copies[place]

    def renew(self, wanted: Replacement) -> None:
        """Be loaded like this from now on."""
        self.source = replace(self.source, options=wanted.options, load=wanted.load)

    async def loaded_instead(
        self, old: RemoteLLM, wanted: Replacement, *, is_after: bool
    ) -> RemoteLLM:
        """The model that is wanted, open, and in use in other processes."""
        if is_after:
            await old.suspend()
        new: OnlineModel | None = None
        try:
            new = await self._loaded(wanted.load)
            assert isinstance(new, RemoteLLM)
            await new.open()
            if self.server.elsewhere is not None:
                await self.server.elsewhere.replace(old, new, wanted)
        except BaseException as error:
            if new is not None:
                await new.close()
            log("reload_failed", logging.ERROR, error=str(error))
            if is_after:
                await old.revive()
            raise
        return new

    def switch(self, old: RemoteLLM, new: RemoteLLM, wanted: Replacement) -> str:
        """In one go: a request is in one engine or in the other."""
        elsewhere = self.server.elsewhere
        count = old.num_live + (0 if elsewhere is None else elsewhere.num_switched)
        moved = new.take_over(old)
        retiring = self._retiring[old] = asyncio.ensure_future(self._retire(old, moved=moved))
        retiring.add_done_callback(lambda _: self._retiring.pop(old, None))
        self._llm, self.model_names, self.loaded_at = new, wanted.names, time.time()
        self.renew(wanted)
        self.server.weigh_keys(new)
        how = "go on in the new worker" if moved else "finish with the old weights"
        log("reloaded", model=wanted.model, requests=count, moved=moved)
        return f"{wanted.model} is served as {wanted.names[0]}; {count} requests {how}"

    async def _retire(self, old: RemoteLLM, *, moved: bool) -> None:
        """Close a model that was replaced, once its last request has ended. Some may have been read
        for it and come late: they are answered by it, or moved as the others were."""
        if moved:
            await old.end_worker()
            self._copies.pop(old, None)
        idle_since = time.monotonic()
        while time.monotonic() - idle_since < _RETIRED_AFTER_S:
            await asyncio.sleep(min(0.5, _RETIRED_AFTER_S))
            elsewhere = self.server.elsewhere
            if old.num_live or (elsewhere is not None and elsewhere.uses(old)):
                idle_since = time.monotonic()
        await old.close()
        self._copies.pop(old, None)
        self.server.on_retired(old)


async def _open(llm: OnlineModel) -> None:
    """Or end its worker."""
    try:
        await llm.open()
    except BaseException:
        if isinstance(llm, RemoteLLM):
            llm.kill()
        raise


def _drop(loading: "Future[OnlineModel]") -> None:
    """Of a model that nobody waits for any more, end the worker."""
    if loading.exception() is None and isinstance(llm := loading.result(), RemoteLLM):
        llm.kill()
