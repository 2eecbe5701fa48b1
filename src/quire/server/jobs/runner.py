"""JobRunner: works batches off behind all other requests, one of each key at a time.

What it has to know after a crash is in the store: a batch's status, and which lines have answers.
A batch whose window is over, that is cancelled, whose key or input is gone, ends with the answers
that it has; every other line is in its file of errors.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from quire.core.errors import RequestError
from quire.server.bodies import SMALL_BYTES
from quire.server.database import StoreError
from quire.server.errors import ApiError
from quire.server.jobs.files import MAX_JOB_LINE_BYTES, lines_of
from quire.server.jobs.lines import (
    BatchLine,
    GivenUpError,
    LineAnswerer,
    LineError,
    answer_line,
    error_line,
    read_line,
)
from quire.server.jobs.store import Batch, BatchProblem, JobStore, Result, digest_of
from quire.server.keys import ApiKey
from quire.server.logs import LOGGER, log

MAX_LINES = 50_000  # of one batch
MAX_PROBLEMS = 100  # that a batch's errors list
_POLL_S = 1.0  # batches that other processes made, windows that are over
_RETRY_S = 2.0  # of writes that failed: the disk is full, most often
_MAX_OWNERS = 16  # whose batches run at once
_READ_LINES = 64  # at a time, where they are short

P = ParamSpec("P")
T = TypeVar("T")
FindKey = Callable[[str], ApiKey | None]  # by its name; raises a LookupError without one
CheckModel = Callable[[str | None], None]  # raises an ApiError


class _FailedError(Exception):
    """A batch cannot go on."""

    def __init__(self, *problems: BatchProblem) -> None:
        super().__init__(problems[0].message)
        self.problems = problems


class CheckedInput(NamedTuple):
    num_lines: int
    model: str | None
    problems: list[BatchProblem]


def check_input(path: Path, endpoint: str, check_model: CheckModel) -> CheckedInput:
    """Every line of a batch's file, before any is answered."""
    seen: set[str] = set()
    models: set[str | None] = set()
    problems: list[BatchProblem] = []
    number = 0
    for number, data in enumerate(lines_of(path), 1):
        if number > MAX_LINES:
            problems.append(
                BatchProblem("too_many_lines", f"a batch has {MAX_LINES:,} lines at most", number)
            )
        if len(problems) >= MAX_PROBLEMS or number > MAX_LINES:
            break
        problem = _problem_of(data, endpoint, seen, models, check_model)
        if problem is not None:
            problems.append(problem._replace(line=number))
    if not number:
        problems.append(BatchProblem("empty_file", "the file has no lines"))
    return CheckedInput(number, next(iter(models), None), problems)


def _problem_of(
    data: bytes, endpoint: str, seen: set[str], models: set[str | None], check_model: CheckModel
) -> BatchProblem | None:
    try:
        if len(data) > MAX_JOB_LINE_BYTES:
            raise LineError(f"it has more than {MAX_JOB_LINE_BYTES} bytes")
        line = read_line(data, endpoint)
    except LineError as error:
        return BatchProblem("invalid_line", str(error))
    if line.custom_id in seen:
        return BatchProblem(
            "duplicate_custom_id", f"{line.custom_id!r:.100} is another line's", param="custom_id"
        )
    seen.add(line.custom_id)
    model = json.loads(line.body).get("model")
    if not isinstance(model, str | None):
        return BatchProblem("invalid_line", "model must be a string", param="body.model")
    try:
        check_model(model)
    except ApiError as error:
        return BatchProblem("model_not_found", error.message, param="body.model")
    models.add(model)
    if len(models) > 1:
        return BatchProblem(
            "mismatched_model", "all lines of a batch have one model", param="body.model"
        )
    return None


class JobRunner:
    """Started when the model is loaded, stopped before it goes; on the event loop."""

    def __init__(
        self,
        store: JobStore,
        answerer: LineAnswerer,
        find_key: FindKey,
        check_model: CheckModel,
        max_batch_size: int,
    ) -> None:
        self._store = store
        self._answerer = answerer
        self._find_key = find_key
        self._check_model = check_model
        self._num_slots = 2 * max_batch_size
        self._wake = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._working: dict[str, asyncio.Task[None]] = {}  # by owner
        self._statuses: dict[str, str] = {}  # of live batches, as of the last look
        self._failure: str | None = None  # why the store could not be used the last time

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    def wake(self) -> None:
        """A batch was made or cancelled."""
        self._wake.set()

    async def stop(self) -> None:
        """Lines that are being answered are answered again when a runner is started next."""
        tasks = [*self._working.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except Exception:  # a bug: the next look may go well
                LOGGER.exception("jobs_interrupted")
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):  # wait_for() may lose a cancellation
                    await self._wake.wait()

    async def _look(self) -> None:
        batches = await self._stored(self._store.live_batches)
        self._statuses = {batch.id: batch.status for batch in batches}
        working = self._working
        self._working = {owner: task for owner, task in working.items() if not task.done()}
        for batch in batches:
            if batch.owner not in self._working and len(self._working) < _MAX_OWNERS:
                self._working[batch.owner] = asyncio.create_task(self._work(batch))
        await self._stored(self._store.drop_expired)

    async def _stored(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the store does, tried until it can: a full disk loses nothing."""
        while True:
            try:
                found = await asyncio.to_thread(work, *args, **kwargs)
            except StoreError as error:
                self._report(str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                self._report(None)
                return found

    def _report(self, failure: str | None) -> None:
        """Log when the store begins to fail, and when it works again."""
        if failure is not None and failure != self._failure:
            log("jobs_wait", logging.ERROR, error=failure, retry_s=_RETRY_S)
        elif failure is None and self._failure is not None:
            log("jobs_go_on")
        self._failure = failure

    # ---- one batch

    async def _work(self, batch: Batch) -> None:
        try:
            state: Batch | None = batch
            while state is not None and state.is_live:
                log("batch", batch=batch.id, key=batch.owner, status=state.status)
                await self._move_on(state)
                state = await self._stored(self._store.batch, batch.owner, batch.id)
            log("batch", batch=batch.id, key=batch.owner, status=state and state.status)
        except Exception:  # a bug: the batch stays as it is, and is tried again
            LOGGER.exception("batch_interrupted")
            await asyncio.sleep(_RETRY_S)
        finally:
            self._wake.set()

    async def _move_on(self, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                await self._check(batch)
            elif batch.status == "in_progress":
                await self._answer_lines(batch)
            elif batch.status == "cancelling":
                await self._finish(batch, "cancelled")
            else:
                num_answered = batch.num_completed + batch.num_failed
                is_whole = batch.num_lines > 0 and num_answered == batch.num_lines
                await self._finish(batch, "completed" if is_whole else "expired")
        except _FailedError as error:
            await self._finish(batch, "failed", *error.problems)

    async def _check(self, batch: Batch) -> None:
        """To in_progress; or to failed with all that is wrong."""
        await asyncio.to_thread(self._check_input, batch)
        path = self._store.path_of(batch.input_file_id)
        checked = await asyncio.to_thread(check_input, path, batch.endpoint, self._check_model)
        if checked.problems:
            raise _FailedError(*checked.problems)
        await self._stored(self._store.begin, batch.id, checked.num_lines, checked.model)

    def _has_input(self, batch: Batch) -> bool:
        try:
            self._check_input(batch)
        except _FailedError as error:
            log("batch_input_unusable", logging.ERROR, batch=batch.id, error=str(error))
            return False
        return True

    def _check_input(self, batch: Batch) -> None:
        try:
            found = digest_of(self._store.path_of(batch.input_file_id))
        except OSError as error:
            message = f"{batch.input_file_id} cannot be read: {error.strerror}"
            raise _FailedError(BatchProblem("input_missing", message)) from None
        if found != batch.input_digest:
            message = f"{batch.input_file_id} is not what was uploaded"
            raise _FailedError(BatchProblem("input_changed", message))

    async def _answer_lines(self, batch: Batch) -> None:
        """To finalizing, once every line has an answer or the window is over; returns earlier if
        the batch was cancelled."""
        await asyncio.to_thread(self._check_input, batch)
        done = await self._stored(self._store.answered, batch.id)
        answering: set[asyncio.Task[Result]] = set()
        try:
            async for number, data in self._unanswered_lines(batch, done):
                answering.add(asyncio.create_task(self._answer(batch, number, data)))
                while len(answering) >= self._num_slots and self._goes_on(batch):
                    answering = await self._keep_some(batch, answering)
                if not self._goes_on(batch):
                    break
            while answering and self._goes_on(batch):
                answering = await self._keep_some(batch, answering)
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
        await asyncio.to_thread(self._check_input, batch)  # it may have changed meanwhile
        await self._stored(self._store.move, batch.id, "finalizing", "in_progress")

    def _lines(self, batch: Batch) -> Iterator[tuple[int, bytes]]:
        return enumerate(lines_of(self._store.path_of(batch.input_file_id)), 1)

    async def _unanswered_lines(
        self, batch: Batch, done: set[int]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Read by a thread, some at a time: those that have answers may be many, and long."""
        left = ((number, data) for number, data in self._lines(batch) if number not in done)
        while some := await asyncio.to_thread(_taken, left):
            for each in some:
                yield each

    def _goes_on(self, batch: Batch) -> bool:
        if time.time() >= batch.expires_at:
            return False
        return self._statuses.get(batch.id) != "cancelling"

    async def _keep_some(
        self, batch: Batch, answering: set[asyncio.Task[Result]]
    ) -> set[asyncio.Task[Result]]:
        """Wait for answers and store them; what is still being answered."""
        done, rest = await asyncio.wait(
            answering, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        results = [task.result() for task in done if task.exception() is None]
        if results:
            await self._stored(self._store.add_results, batch.id, results)
        for task in done:
            task.result()  # what ends the batch is raised when the others' answers are kept
        return rest

    async def _answer(self, batch: Batch, number: int, data: bytes) -> Result:
        try:
            key = self._find_key(batch.owner)
        except LookupError as error:
            raise _FailedError(BatchProblem("key_revoked", str(error))) from None
        line = await _read(data, batch.endpoint)
        try:
            answer = await self._answerer.answer(line, key, background=True)
        except GivenUpError:  # the line stays to be answered, once there is another server
            await asyncio.Event().wait()
            raise
        return Result(number, answer.is_good, answer_line(line, answer))

    async def _finish(self, batch: Batch, status: str, *problems: BatchProblem) -> None:
        def finish() -> None:
            unanswered = self._unanswered(batch, status)
            self._store.finish(batch, status, unanswered, list(problems))

        await self._stored(finish)

    def _unanswered(self, batch: Batch, status: str) -> Iterator[Result]:
        """An error for every line without an answer, if there were answers to come, and the file
        still says which lines these are."""
        if not batch.has_begun or not self._has_input(batch):
            return
        done = self._store.answered(batch.id)
        try:
            for number, data in self._lines(batch):
                if number not in done and number <= batch.num_lines:
                    error = LineError(
                        _UNANSWERED[status], read_line(data, batch.endpoint).custom_id
                    )
                    written = error_line(error, number, f"batch_{status}")
                    yield Result(number, False, written)
        except (RequestError, LineError) as error:  # the input is gone: the batch's errors say so
            log("batch_input_unreadable", logging.ERROR, batch=batch.id, error=str(error))


def _taken(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The next ones, as far as they are not too much for memory; none at the end."""
    some: list[tuple[int, bytes]] = []
    for each in lines:
        some.append(each)
        if len(some) == _READ_LINES or len(each[1]) > SMALL_BYTES:
            break
    return some


async def _read(data: bytes, endpoint: str) -> BatchLine:
    """A long line takes milliseconds, in which nothing else would be answered."""
    if len(data) <= SMALL_BYTES:
        return read_line(data, endpoint)
    return await asyncio.to_thread(read_line, data, endpoint)


_UNANSWERED = {
    "expired": "the batch's window was over before it was answered",
    "cancelled": "the batch was cancelled before it was answered",
    "failed": "the batch ended before it was answered; its errors say why",
    "completed": "it has no answer",  # never: a batch is complete when every line has one
}
