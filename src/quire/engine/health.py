"""Health of the engine: failed steps by cause, since when it is degraded and why, and log lines.

A cause is logged in full when it first occurs and then counted: a line a minute says how often,
and one when the engine has recovered. Step ids are those of requests' metrics and traces.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.execution import Backoff
from quire.engine.stats import EngineStats, Health, HealthReport

LOGGER = logging.getLogger("quire.engine")
REPEATS_S = 60.0  # how long a cause is only counted after a line about it
_MAX_CAUSES = 64  # known at a time; all others are one
_MAX_WRAPPED = 8  # errors around the first
_MAX_LISTED = 16  # requests named in a line


class _Cause(NamedTuple):
    """What tells one cause from another: the root error's type, and where it was raised."""

    event: str
    kind: str
    place: str


@dataclass(slots=True)
class _Repeats:
    logged_at: float
    count: int = 0  # since the last line

    def add(self) -> None:
        self.count += 1

    def logged(self, now: float) -> None:
        self.count = 0
        self.logged_at = now


class FaultLog:
    """Log lines about faults, limited by cause. `now` is the engine's clock."""

    def __init__(self) -> None:
        self._causes: dict[_Cause, _Repeats] = {}

    def report(
        self,
        event: str,
        message: str,
        error: BaseException,
        now: float,
        fields: Mapping[str, object],
    ) -> None:
        """A line with everything for a cause's first time, with a traceback unless another event
        gave it; later a count at most once a minute."""
        cause = _cause_of(event, error)
        if cause not in self._causes and len(self._causes) >= _MAX_CAUSES:
            cause = _Cause(event, "others", "")
        found = self._causes.get(cause)
        if found is None:
            is_new = all(known[1:] != cause[1:] for known in self._causes)
            self._causes[cause] = _Repeats(now)
            more = {**fields, "cause": cause.kind, "error": str(error), "count": 1}
            _write(event, f"{message}: {error}", more, _root(error) if is_new else None)
            return
        found.add()
        if now - found.logged_at >= REPEATS_S:
            self._write_count(cause, found, now)

    def flush(self, now: float) -> None:
        """Write the counts that no line has told."""
        for cause, found in self._causes.items():
            if found.count:
                self._write_count(cause, found, now)

    def _write_count(self, cause: _Cause, found: _Repeats, now: float) -> None:
        in_s = round(now - found.logged_at, 3)
        fields = {"cause": cause.kind, "count": found.count, "in_s": in_s}
        text = f"{cause.event} {found.count} more times in {in_s:g} s, by {cause.kind}"
        found.logged(now)
        _write(cause.event, text, fields)


class HealthMonitor:
    """Counts failed steps and logs them; knows since when the engine is degraded, and why."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._log = FaultLog()
        self._num_failed = 0  # steps, from the one on that degraded the engine
        self.degraded_since: float | None = None
        self.cause: str | None = None
        self.last_failed_step: int | None = None
        self.fatal: BaseException | None = None  # what ended the engine
        self.fatal_since: float | None = None

    def step_failed(
        self, step_id: int, request_ids: Sequence[str], error: BaseException, now: float
    ) -> None:
        """A step failed and its rows are run again in parts."""
        failed = self._stats.steps_failed
        kind = type(_root(error)).__name__
        failed[kind] = failed.get(kind, 0) + 1
        self.last_failed_step = step_id
        self.cause = str(error)
        self._num_failed = 1 if self.degraded_since is None else self._num_failed + 1
        count = len(request_ids)
        fields = {"step": step_id, "num_requests": count, "requests": request_ids[:_MAX_LISTED]}
        message = f"step {step_id} of {count} requests failed, and its rows are run again in parts"
        self._log.report("step_failed", message, error, now, fields)

    def degraded(self, now: float) -> None:
        """From now on, unless it was before."""
        if self.degraded_since is None:
            self.degraded_since = now

    def recovered(self, now: float) -> None:
        """Whole batches run again."""
        since, self.degraded_since = self.degraded_since, None
        count, self._num_failed = self._num_failed, 0
        if since is None:
            return
        self._log.flush(now)
        lasted_s = round(now - since, 3)
        fields = {"failed_steps": count, "degraded_s": lasted_s}
        _write("recovered", f"steps run whole again; {count} failed in {lasted_s:g} s", fields)

    def request_failed(
        self, request_id: str, step_id: int, error: BaseException, now: float
    ) -> None:
        """A fault ended one request alone."""
        fields = {"step": step_id, "requests": [request_id]}
        message = f"{request_id} failed alone in step {step_id}"
        self._log.report("request_failed", message, error, now, fields)

    def ended(
        self, error: BaseException, num_requests: int, step_id: int | None, now: float
    ) -> None:
        """The engine takes and finishes no requests any more; `step_id`: the step that hangs."""
        if self.fatal is not None:
            return
        self.fatal, self.fatal_since = error, now
        self.last_failed_step = self.last_failed_step if step_id is None else step_id
        fields = {"step": step_id, "num_requests": num_requests, "error": str(error)}
        text = f"the engine ended with {num_requests} requests: {error}"
        _write("engine_ended", text, fields, _root(error), logging.ERROR)

    def report(self, state: Health, backoff: Backoff) -> HealthReport:
        cause, since = None, None
        if self.fatal is not None:
            cause, since = str(self.fatal), self.fatal_since
        elif self.degraded_since is not None:
            cause, since = self.cause, self.degraded_since
        return HealthReport(
            state=state,
            cause=cause,
            since=since,
            last_failed_step=self.last_failed_step,
            batch_limit=backoff.batch_limit,
            max_batch_size=backoff.max_batch_size,
            token_limit=backoff.token_limit,
            max_step_tokens=backoff.max_step_tokens,
        )

    def close(self, now: float) -> None:
        """Write the counts that no line has told."""
        self._log.flush(now)


def _root(error: BaseException) -> BaseException:
    """What was raised first: executors' errors wrap those of others."""
    for _ in range(_MAX_WRAPPED):  # a user's errors may go round in a circle
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


def _cause_of(event: str, error: BaseException) -> _Cause:
    """Messages may hold ids or a user's values, so they do not tell causes apart."""
    root = _root(error)
    place = ""
    trace = root.__traceback__
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return _Cause(event, type(root).__name__, place)


def _write(
    event: str,
    text: str,
    fields: Mapping[str, object],
    error: BaseException | None = None,
    level: int = logging.WARNING,
) -> None:
    LOGGER.log(level, text, exc_info=error, extra={"event": event, "fields": fields})
