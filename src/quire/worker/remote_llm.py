"""RemoteLLM: a model whose engine is in a worker process."""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from quire.core.errors import ExecutorError
from quire.core.sampling import SamplingParams
from quire.llm.assembly import EngineFacts, ModelText, read_text
from quire.llm.devices import Options
from quire.llm.online import OnlineModel
from quire.llm.prompts import Prepared, PromptReader
from quire.structured import PreparedGrammar
from quire.worker.launch import COMMAND, Launcher, ModelLauncher
from quire.worker.remote import HANG_S, MAX_DEATHS, MAX_IDLE_DEATHS, RemoteEngine
from quire.worker.turns import Others


class RemoteLLM(OnlineModel):
    """A model file behind a worker process, as AsyncLLM is one in this process."""

    _engine: RemoteEngine
    _launcher: Launcher

    @classmethod
    def load(
        cls,
        model: str | Path,
        options: Options,
        on_stuck: Callable[[], None] | None = None,
        *,
        command: Sequence[str] = COMMAND,
        hang_s: float = HANG_S,
        listener: socket.socket | None = None,
    ) -> Self:
        """Start a worker that loads the model, and read here what turns text into requests.

        `listener`: other processes have requests of theirs computed by the same worker; each
        connects to it and uses `attach`.
        """
        text = read_text(model, options)
        launcher = ModelLauncher(text.path, options, command, listener)
        deaths = MAX_IDLE_DEATHS if listener is None else MAX_DEATHS  # idle: without own requests
        return cls._over(text, launcher, on_stuck, hang_s=hang_s, max_idle_deaths=deaths)

    @classmethod
    def attach(
        cls,
        model: str | Path,
        options: Options,
        launcher: Launcher,
        on_stuck: Callable[[], None] | None = None,
        *,
        prefix: str,
        others: Others,
    ) -> Self:
        """Over workers that another process starts, again and again where they die; `prefix` is
        that of requests' names, another one in each process. `others` share the worker."""
        deaths = sys.maxsize  # that process counts them
        return cls._over(
            read_text(model, options),
            launcher,
            on_stuck,
            max_idle_deaths=deaths,
            prefix=prefix,
            others=others,
        )

    @classmethod
    def _over(
        cls,
        text: ModelText,
        launcher: Launcher,
        on_stuck: Callable[[], None] | None,
        *,
        hang_s: float = HANG_S,
        max_idle_deaths: int,
        prefix: str = "request-",
        others: Others | None = None,
    ) -> Self:
        made = cls()
        made._text, made._launcher = text, launcher
        worker, facts = launcher.start()
        try:
            made._engine = RemoteEngine(
                worker,
                facts,
                launcher,
                on_stuck,
                hang_s=hang_s,
                max_idle_deaths=max_idle_deaths,
                prefix=prefix,
                others=others,
            )
            made.prompts = PromptReader(made.tokenizer, made.max_context)
        except BaseException:
            worker.end(0.0)
            raise
        return made

    @property
    def _facts(self) -> EngineFacts:  # type: ignore[override]
        return self._engine.facts

    @property
    def worker_pid(self) -> int:
        return self._engine.worker.pid

    @property
    def num_restarts(self) -> int:
        """Workers that died and were replaced."""
        return self._engine.num_restarts

    @property
    def is_recovering(self) -> bool:
        return self._engine.is_recovering

    @property
    def failure(self) -> ExecutorError | None:
        return self._engine.failure

    @property
    def path(self) -> Path:
        """Where the model was found."""
        assert isinstance(self._text, ModelText)
        return self._text.path

    def fail(self, failure: ExecutorError) -> None:
        self._engine.fail_all(failure)

    async def open(self) -> None:
        await self._engine.open()

    def kill(self) -> None:
        """End the worker of a model that was never opened."""
        self._engine.worker.end(0.0)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._engine.num_live

    def continues(self, path: Path, options: Options) -> bool:
        """Whether a worker with this file and these options would give the same tokens."""
        launcher = self._launcher
        return isinstance(launcher, ModelLauncher) and launcher.continues(path, options)

    def take_over(self, old: "RemoteLLM") -> bool:
        """Go on with the requests of a model that this one continues; whether it does."""
        if not self.can_take_over(old):
            return False
        self._engine.take_over(old._engine)
        return True

    def can_take_over(self, old: "RemoteLLM") -> bool:
        """Whether it continues another model, and did not turn out to have another context or
        device."""
        ours, theirs = self._facts, old._facts
        return self._launcher.continues_launcher(old._launcher) and (
            (ours.device, ours.gpu_layers, ours.max_context)
            == (theirs.device, theirs.gpu_layers, theirs.max_context)
        )

    async def end_worker(self) -> None:
        """After another model took over: what still comes goes there."""
        await self._engine.close()

    async def suspend(self) -> None:
        """End the worker, so that its memory is free, and keep its requests."""
        await self._engine.suspend()

    async def revive(self) -> None:
        """Start the worker again after suspend()."""
        await self._engine.revive()

    def prepare_grammar(self, params: SamplingParams) -> PreparedGrammar | None:
        """Compiled by the worker, which keeps it; on any thread but the event loop's."""
        loop = self._engine._loop
        asyncio.run_coroutine_threadsafe(self._engine.prepare(params), loop).result()
        return None

    async def _with_grammar(self, prepared: Prepared, params: SamplingParams) -> Prepared:  # noqa: ARG002
        return prepared  # the worker compiles what the request brings
