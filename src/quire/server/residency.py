"""Residency: which of a server's models are loaded, within the memory that they may take together.

A model is loaded when a request asks for it and unloaded when nobody has used it for a while, or
when another needs its place: the one that was used least recently goes first, and only when its
requests have ended. One model is loaded at a time, in the order in which they were asked for; those
that nobody but jobs wait for come last.

A model that is to give its place to another takes no more requests until the other is loaded: they
wait and then ask for it in turn. So no model waits for ever behind one that is always busy.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import ConfigError, ExecutorError, QuireError
from quire.llm.assembly import MemoryNeed
from quire.llm.machine import format_bytes
from quire.server.errors import ApiError
from quire.server.logs import LOGGER, log
from quire.server.model_service import ModelService, State

_PREDICTED_S = 2.0  # before it is asked again what a model takes that waits for its place
_IDLE_FOR_JOBS_S = 10.0  # before a model gives its place to one that only jobs wait for
_LOOK_S = 0.1  # between two looks whether requests have ended
_FAILED_S = 5.0  # a model that could not be loaded is not tried again before that


@dataclass(eq=False)
class _Wanted:
    """A model that calls wait for."""

    loaded: "asyncio.Future[ApiError | None]"  # why it cannot be
    num_calls: int = 0  # that wait
    num_background: int = 0  # of these, lines of jobs
    predicted_at: float = -math.inf  # when it was last asked what the model takes

    @property
    def is_background(self) -> bool:
        return self.num_background == self.num_calls


@dataclass(frozen=True)
class _Failure:
    error: ApiError
    at: float = field(default_factory=time.monotonic)


class Residency:
    """On the event loop. `budget`: bytes that loaded models may take of a device's memory; None:
    what is available when the first is looked at. `idle_s`: None keeps models loaded."""

    def __init__(self, budget: int | None = None, idle_s: float | None = None) -> None:
        self.idle_s = idle_s
        self._given = budget
        self._budgets: dict[str, int] = {}  # by device
        self._models: list[ModelService] = []
        self._wanted: dict[ModelService, _Wanted] = {}  # in the order in which they were asked for
        self._yielding: set[ModelService] = set()  # to the first of these
        # Loaded, and calls that waited for it have not begun yet: it is not idle.
        self._arriving: dict[ModelService, _Wanted] = {}
        self._failures: dict[ModelService, _Failure] = {}
        self.leaving: set[ModelService] = set()  # of the models: no longer served
        self._changed = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self._is_stopped = False

    def enter(self, model: ModelService, need: MemoryNeed) -> None:
        """A model that may be loaded, as was predicted of it."""
        model.need = need
        self._models.append(model)
        if need.available is not None:
            self._budgets.setdefault(need.device, self._given or need.available)

    def check_models(self) -> None:
        """Raise a ConfigError where none of the models can ever be loaded."""
        needs = {model.name: model.need.num_bytes for model in self._models if model.need}
        if not needs:
            raise ConfigError("there is no model that can be served: the log says why")
        smallest = min(needs, key=needs.__getitem__)
        if self._given is not None and needs[smallest] > self._given:
            raise ConfigError(
                f"--model-memory is {format_bytes(self._given)}, and {smallest} alone, of all "
                f"models the smallest, needs {format_bytes(needs[smallest])}: give more, or a "
                "smaller --kv-memory"
            )

    def leave(self, model: ModelService) -> None:
        """A model that is no longer served: it is unloaded when its requests have ended."""
        self.leaving.add(model)
        self._changed.set()

    def budget_of(self, device: str) -> int | None:
        """Bytes that models may take together; None: not known."""
        return self._budgets.get(device, self._given)

    @property
    def names(self) -> Sequence[str]:
        return [model.name for model in self._models]

    @property
    def loaded(self) -> Sequence[ModelService]:
        return [model for model in self._models if model.loaded is not None]

    def look(self) -> None:
        """Something has changed that nobody waits for."""
        self._changed.set()

    def has(self, model: ModelService) -> bool:
        """Whether a model is loaded and takes requests."""
        return model.state is State.READY and model not in self._yielding

    def idle_s_of(self, model: ModelService) -> float:
        """How long a model stays loaded that nobody uses; infinity: for ever."""
        own = self.idle_s if model.keep_s is None else model.keep_s
        return math.inf if own is None else own

    def start(self) -> None:
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Load nothing more; what waits is refused."""
        self._is_stopped = True
        if self._working is not None:
            self._working.cancel()
            with suppress(asyncio.CancelledError):
                await self._working
        for wanted in self._wanted.values():
            if not wanted.loaded.done():
                wanted.loaded.set_result(_stopped())

    async def load(
        self,
        model: ModelService,
        leaving: "asyncio.Future[None]",
        *,
        is_background: bool = False,
    ) -> bool:
        """Wait until a model is loaded and takes requests, or until `leaving`; whether it is. An
        ApiError where it cannot be.

        It stays loaded until the caller awaits something, so that a call which has waited has its
        turn, also where the model is to give its place to another.
        """
        while not self.has(model):
            if self._is_stopped:
                raise _stopped()
            self._raise_failure(model)
            if await self._wait_for(model, leaving, is_background):
                return True
            if leaving.done():
                return False
        return True

    def _raise_failure(self, model: ModelService) -> None:
        failure = self._failures.get(model)
        if failure is not None and time.monotonic() - failure.at < _FAILED_S:
            raise failure.error

    async def _wait_for(
        self, model: ModelService, leaving: "asyncio.Future[None]", is_background: bool
    ) -> bool:
        """Whether it was loaded."""
        future = asyncio.get_running_loop().create_future
        wanted = self._wanted.get(model) or self._wanted.setdefault(model, _Wanted(future()))
        wanted.num_calls += 1
        wanted.num_background += is_background
        self._changed.set()
        both: list[asyncio.Future[Any]] = [wanted.loaded, leaving]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.num_calls -= 1
            wanted.num_background -= is_background
            if not wanted.num_calls:
                self._forget(model, wanted)
        if not wanted.loaded.done():
            return False
        error = wanted.loaded.result()
        if error is not None:
            raise error
        return True

    def _forget(self, model: ModelService, wanted: _Wanted) -> None:
        """All calls that waited have begun or gone."""
        for waiting in (self._wanted, self._arriving):
            if waiting.get(model) is wanted:
                del waiting[model]
        self._changed.set()

    def _is_idle(self, model: ModelService) -> bool:
        return model.is_idle and model not in self._arriving

    # ---- the task that loads and unloads

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            try:
                has_moved = await self._move()
            except Exception:  # a bug: the others are still served
                LOGGER.exception("residency_failed")
                has_moved = False
            if not has_moved:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s):  # wait_for() may lose a cancellation
                        await self._changed.wait()

    @property
    def _pause_s(self) -> float | None:
        """Until the next look: requests end, and models fall idle, without a word."""
        if self._wanted or self.leaving:
            return _LOOK_S
        shortest = min((self.idle_s_of(model) for model in self.loaded), default=math.inf)
        return None if shortest == math.inf else min(1.0, max(_LOOK_S, shortest / 10))

    async def _move(self) -> bool:
        """Load or unload one model, if that can be done now; whether it was."""
        for model in self._models:
            if model.state is State.STUCK:
                await self._unload(model, "it does not answer")
                return True
        for model in self.leaving:
            if self._is_idle(model) and model not in self._wanted:
                if model.loaded is not None:
                    await self._unload(model, "it is no longer served")
                self._drop(model)
                return True
        wanted = self._next_wanted()
        if wanted is None:
            self._yielding.clear()
            return await self._unload_unused()
        try:
            return await self._load(wanted)
        except Exception as error:
            self._fail(wanted, error)
            return True

    def _drop(self, model: ModelService) -> None:
        self.leaving.discard(model)
        self._models.remove(model)
        self._failures.pop(model, None)

    def _next_wanted(self) -> ModelService | None:
        """The first that somebody waits for, else the first that jobs wait for."""
        waiting = sorted(self._wanted, key=lambda model: self._wanted[model].is_background)
        return waiting[0] if waiting else None

    async def _unload_unused(self) -> bool:
        for model in self.loaded:
            idle_s = self.idle_s_of(model)
            if self._is_idle(model) and time.monotonic() - model.used_at >= idle_s:
                await self._unload(model, f"nobody used it for {idle_s:g} s")
                return True
        return False

    async def _load(self, model: ModelService) -> bool:
        if model.state is State.READY:  # it was to give its place to one that was given up
            self._yielding.clear()
            self._finish(model)
            return True
        if model not in self._models:  # it was dropped after the request had chosen it
            raise model.server.unknown_model(model.name)
        wanted = self._wanted[model]  # also where all that wait go meanwhile
        if model.need is None or time.monotonic() - wanted.predicted_at > _PREDICTED_S:
            model.need = await asyncio.to_thread(model.source.need)
            wanted.predicted_at = time.monotonic()
        if not await self._has_room(model, model.need, is_background=wanted.is_background):
            return False
        self._yielding.clear()
        log("model_loading", model=model.name, predicted_bytes=model.need.num_bytes)
        try:
            await model.open()
        except ExecutorError as error:  # its worker was killed, perhaps by chance
            log("model_loading", logging.WARNING, model=model.name, after=str(error))
            await model.open()
        self._finish(model)
        return True

    async def _has_room(
        self, model: ModelService, need: MemoryNeed, *, is_background: bool
    ) -> bool:
        """Whether it fits now. Else one that is idle is unloaded, for jobs alone one that has been
        for a while; or those that are to go are told to take no more requests."""
        missing = self.missing(need)
        if missing <= 0:
            return True
        sizes = {other: other.num_bytes_on(need.device) for other in self._models}
        if missing > sum(sizes.values()):
            raise self._too_large(model, need)  # nobody makes room in vain
        others = [other for other in self.loaded if sizes[other]]
        missing -= sum(size for other, size in sizes.items() if other not in others)
        if missing <= 0:  # once workers have ended that were told to
            return False
        others.sort(key=lambda other: other.used_at)
        idle_s = _IDLE_FOR_JOBS_S if is_background else 0.0
        for other in others:
            if self._is_idle(other) and time.monotonic() - other.used_at >= idle_s:
                await self._unload(other, f"its place is needed for {model.name}")
                again = model.need = await asyncio.to_thread(model.source.need)
                return await self._has_room(model, again, is_background=is_background)
        if not is_background:
            self._yielding = set(_enough(others, need.device, missing))
        return False

    def missing(self, need: MemoryNeed) -> int:
        """Bytes that others must give back: of the budget, or of what the machine has left."""
        lacking = 0 if need.available is None else need.num_bytes - need.available
        return max(self.missing_of_budget(need), lacking)

    def missing_of_budget(self, need: MemoryNeed) -> int:
        used = sum(model.num_bytes_on(need.device) for model in self._models)
        budget = self.budget_of(need.device)
        return 0 if budget is None else used + need.num_bytes - budget

    def _too_large(self, model: ModelService, need: MemoryNeed) -> ApiError:
        has = [x for x in (self.budget_of(need.device), need.available) if x is not None]
        return ApiError(
            503,
            f"{model.name} needs {format_bytes(need.num_bytes)} of memory, and models may take "
            f"{format_bytes(min(has))} now: ask whoever runs the server for a smaller --kv-memory "
            "or a larger --model-memory",
            param="model",
            code="model_too_large",
            retry_after_s=60.0,
        )

    def _finish(self, model: ModelService) -> None:
        self._failures.pop(model, None)
        wanted = self._wanted.pop(model, None)
        if wanted is not None and not wanted.loaded.done():
            self._arriving[model] = wanted
            wanted.loaded.set_result(None)

    def _fail(self, model: ModelService, error: Exception) -> None:
        log("model_not_loaded", logging.ERROR, model=model.name, error=str(error))
        if not isinstance(error, ApiError):
            reason = str(error)
            if not isinstance(error, QuireError | OSError):  # a bug, which others do not wait for
                LOGGER.error("model_not_loaded", exc_info=error)
                reason = "this should not have happened"
            message = f"{model.name} cannot be loaded: {reason}"
            error = ApiError(
                503, message, param="model", code="model_not_loaded", retry_after_s=_FAILED_S
            )
        self._yielding.clear()
        if model in self._models:
            self._failures[model] = _Failure(error)
        wanted = self._wanted.pop(model, None)
        if wanted is not None and not wanted.loaded.done():
            wanted.loaded.set_result(error)

    async def _unload(self, model: ModelService, reason: str) -> None:
        log("model_unloaded", model=model.name, reason=reason)
        unloading = model.unload()
        self._yielding.discard(model)
        try:
            await asyncio.shield(unloading)
        except asyncio.CancelledError:  # the server ends, and with it the worker: not before
            await unloading
            raise


def _stopped() -> ApiError:
    return ApiError(503, "the server is shutting down", code="drain", retry_after_s=1.0)


def _enough(models: Iterable[ModelService], device: str, num_bytes: int) -> Iterator[ModelService]:
    """The first models that hold so many bytes of a device's memory together."""
    for model in models:
        if num_bytes <= 0:
            return
        num_bytes -= model.num_bytes_on(device)
        yield model
