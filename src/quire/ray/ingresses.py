"""What ingresses of one application share, and what they cannot.

A single ingress has the state folder, after the one in whose place it is put. Of several, figures
are those of all of them; what each would count or keep by itself is refused.
"""

import asyncio
import fcntl
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path

from ray.serve.handle import DeploymentHandle

from quire.core.errors import ConfigError
from quire.server.keys import KeyRing
from quire.server.logs import log
from quire.server.quotas import Usage
from quire.server.settings import ServerSettings
from quire.server.shared import ProcessFigures, ServerFigures, SharedState

_ANSWER_S = 5.0  # for figures of the others
_LOCK_NAME = "ingress.lock"
_LOOK_EVERY_S = 0.2  # whether the ingress before has ended
_LIMITS = ("requests_per_minute", "max_concurrent", "tokens_per_minute", "tokens_per_day")


def for_several(settings: ServerSettings) -> ServerSettings:
    """The settings of one of several ingresses, which store no responses: another one would not
    have them. Raises a ConfigError about what each would count by itself."""
    for key in settings.keys:
        limited = next((name for name in _LIMITS if getattr(key, name) is not None), None)
        if limited is not None:
            raise ConfigError(
                f"the key {key.name!r} has {limited}, which several ingresses would each count "
                "by themselves: leave --ingress-replicas out, or the key's limits"
            )
    if settings.audit_log is not None:
        raise ConfigError(
            "--audit-log is one chain of lines, which several ingresses cannot write: leave "
            "--ingress-replicas out"
        )
    return replace(settings, max_stored_responses=0)


class OneIngress(SharedState):
    """The state of the only ingress. When a new version is deployed, Serve starts its ingress while
    the old one drains: until that has ended, the new one answers requests but leaves jobs and
    background responses to it, so that none is worked off twice."""

    folder_lock: int | None = None  # a file's descriptor; open until the process ends

    @classmethod
    def over(cls, settings: ServerSettings, server_name: str) -> "OneIngress":
        """Raises a ConfigError where the state folder cannot be used."""
        made = cls.of(settings)
        assert isinstance(made, OneIngress)
        made.server_name = server_name
        if settings.state_folder is not None:
            made.folder_lock = _open_lock(settings.state_folder)
        return made

    async def own_folder(self) -> None:
        if self.folder_lock is None or _is_locked(self.folder_lock):
            return
        log("jobs_wait", reason="the ingress before this one still has the state folder")
        while not _is_locked(self.folder_lock):
            await asyncio.sleep(_LOOK_EVERY_S)
        log("jobs_go_on")


def _open_lock(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / _LOCK_NAME, flags, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the state in {folder}: {error.strerror}; name another folder by --state"
        ) from error


def _is_locked(descriptor: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SeveralIngresses(SharedState):
    """The state of one of several ingresses. `all_of_them` is the ingresses' deployment."""

    all_of_them: DeploymentHandle

    @classmethod
    def over(cls, settings: ServerSettings, all_of_them: DeploymentHandle) -> "SeveralIngresses":
        made = cls.of(settings)
        assert isinstance(made, SeveralIngresses)
        made.all_of_them = all_of_them
        made.reload_keys = _refuse_to_reload
        return made

    async def figures(
        self, own: ProcessFigures, ring: KeyRing, num_worker_restarts: int
    ) -> ServerFigures:
        """Of all ingresses; where others do not answer, of those that do."""
        answers: Sequence[object] = []
        with suppress(TimeoutError):
            asked = self.all_of_them.broadcast("own_figures")
            answers = await asked.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, ServerFigures)]
        return added(found or [self.figures_of(own, ring, num_worker_restarts)])


async def _refuse_to_reload() -> None:
    raise ConfigError(
        "each of several ingresses has read the keys: deploy the application again, and all read "
        "them anew"
    )


def added(figures: Iterable[ServerFigures]) -> ServerFigures:
    return reduce(_plus, figures)


def _plus(one: ServerFigures, other: ServerFigures) -> ServerFigures:
    names = dict.fromkeys([*one.usage, *other.usage])
    nothing = Usage()
    usage = {
        name: _sum_of(one.usage.get(name, nothing), other.usage.get(name, nothing))
        for name in names
    }
    return ServerFigures(
        **vars(one.plus(other)),
        usage=usage,
        day_left_s=one.day_left_s,
        audit=None,
        num_worker_restarts=one.num_worker_restarts + other.num_worker_restarts,
    )


def _sum_of(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        max(one.today, other.today),
    )
