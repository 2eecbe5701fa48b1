"""Engine: accepts requests, runs the loop (schedule, execute, update), reports events."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush

from quire.core.clock import Clock, RealClock
from quire.core.config import EngineConfig
from quire.core.errors import (
    ExecutorError,
    ExecutorMemoryError,
    OverloadedError,
    StepCancelledError,
)
from quire.core.plan import NO_STATE, SequencePlan, SequenceResult, StepResult, Want
from quire.core.request import Completion, Event, Request
from quire.core.sampling import SamplingParams
from quire.engine.admission import Admission
from quire.engine.execution import (
    Backoff,
    Flight,
    Outcome,
    StepRunner,
    UnresponsiveError,
    isolate,
)
from quire.engine.health import HealthMonitor
from quire.engine.lifecycle import Lifecycle
from quire.engine.pacing import LostTime
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import MakeBreakers, MakeDetokenizer, MakeGrammar
from quire.engine.stats import EngineStats, Health, HealthReport, Snapshot
from quire.engine.step import Row, Step
from quire.engine.step_log import StepLog, StepRecord
from quire.executors.base import Executor
from quire.kvcache import KVCache


class Engine:
    """Continuous batching over any executor. Not thread-safe: see AsyncEngine for that."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        end_token_ids: Iterable[int] = (),
        make_detokenizer: MakeDetokenizer | None = None,
        make_grammar: MakeGrammar | None = None,
        make_breakers: MakeBreakers | None = None,
        start_masks: Callable[[bool], None] | None = None,
        default_max_tokens: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        """`start_masks`: begins to compute the masks that grammars promised since the last call;
        True: a step that needs them is under way.
        `before_step`: called when a step is planned and the executor does not have it yet.
        `default_max_tokens`: of requests that say nothing; fewer where the context leaves fewer."""
        self.config = config or EngineConfig()
        self.executor = executor
        self.clock = clock or RealClock()
        self.stats = EngineStats(since=self.clock.now())
        self._step_log = StepLog()
        self._scheduler = Scheduler(self.config, executor.capacity, self.stats)
        self._admission = Admission(
            self.config,
            executor.capacity,
            self._scheduler.cache,
            end_token_ids,
            make_detokenizer,
            make_grammar,
            make_breakers,
            default_max_tokens,
        )
        self._start_masks = start_masks
        self._before_step = before_step
        self._health = HealthMonitor(self.stats)
        self._lifecycle = Lifecycle(self._scheduler, self._admission, self.stats, self._health)
        self._runner = StepRunner(executor, self.config.step_grace_s)
        self._backoff = Backoff(self._scheduler.max_batch_size, self._scheduler.max_step_tokens)
        self._flights: deque[Flight] = deque()
        self._lost_time = LostTime()
        self._giving_way: Flight | None = None  # the step that is waited for, if it may give way
        self._has_arrival = False  # that a step begun now would make wait
        self._deadlines: list[tuple[float, str]] = []
        self._is_draining = False
        self._key_weights: Mapping[str, float] = {}  # over the configuration's

    # ---- requests

    def add_request(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        key: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        stream: bool = False,
        pooling: bool = False,
        num_generated: int = 0,
        arrived_at: float | None = None,
        resumed: SequenceOf[Completion] | None = None,
    ) -> Request:
        """Queue a request; its events come from step(). Raises if it can never run, or not now.

        `key`: whose it is (fairness, prefix reuse); `priority`: lower is more urgent; `stream`:
        report each token; `pooling`: compute the hidden state after the prompt and no tokens;
        `num_generated`: the prompt ends with so many tokens of the completion, which goes on as it
        would have; `arrived_at`: on the engine's clock, where it arrived before it could be handed
        over; `resumed`: another engine took the request, and its completions had come this far (an
        empty list: none had begun). They go on as they would have, and no limit of the queue holds.
        """
        now = self.clock.now() if arrived_at is None else arrived_at
        self._has_arrival = False
        self._check_open(is_new=resumed is None)
        request = self._admission.build_request(
            prompt,
            params or SamplingParams(),
            now,
            request_id=request_id,
            key=key,
            priority=priority,
            timeout_s=timeout_s,
            num_generated=num_generated,
            resumed=resumed or (),
            taken_ids=self._lifecycle.live,
        )
        if resumed is None:
            waiting, num_parked = self._scheduler.waiting, len(self._scheduler.parked)
            self._admission.check_queue(request, waiting, num_parked, self.clock.now())
        self._queue(request, now, stream=stream, pooling=pooling)
        return request

    def _queue(self, request: Request, now: float, *, stream: bool, pooling: bool) -> None:
        live = self._admission.open(request, wants_pieces=stream, pooling=pooling)
        self._lifecycle.begin(live, now)
        self._scheduler.request_arrived(now)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.id))

    def _check_open(self, *, is_new: bool) -> None:
        if self._health.fatal is not None:
            raise ExecutorError(f"{self._health.fatal}; restart the process")
        if self._is_draining and is_new:
            raise OverloadedError("the engine is draining and takes no new requests", 30.0)

    def cancel(self, request_id: str) -> bool:
        """End a request now and free its blocks; False if it is not live."""
        live = self._lifecycle.live.get(request_id)
        if live is not None:
            self._lifecycle.cancel(live, self.clock.now())
        return live is not None

    def pause(self, request_id: str) -> None:
        """Compute nothing more for a request until resume(): its reader does not keep up."""
        live = self._lifecycle.live.get(request_id)
        if live is None or live.is_paused:
            return
        live.set_paused(True)
        for sequence in live.sequences:
            if not sequence.is_done:
                self._scheduler.park(sequence, self.clock.now())

    def resume(self, request_id: str) -> None:
        live = self._lifecycle.live.get(request_id)
        if live is None or not live.is_paused:
            return
        live.set_paused(False)
        for sequence in live.sequences:
            if sequence in self._scheduler.parked:
                self._scheduler.unpark(sequence, self.clock.now())

    def arrival_waits(self) -> None:
        """From any thread: a request that is not in the background is about to be added. A step
        under way of the background alone is cancelled, so that the request need not wait for it."""
        self._has_arrival = True
        flight, self._giving_way = self._giving_way, None
        if flight is not None:
            flight.give_way()
            self._runner.cancel(flight)

    def drain(self) -> None:
        """Take no more requests; those it has go on."""
        self._is_draining = True

    # ---- the loop

    def step(self) -> list[Event]:
        """Schedule a step and execute it; update with the one that is done. What happened."""
        started = time.perf_counter()
        self._expire_requests()
        step = self._scheduler.schedule(self.clock.now(), is_idle=not self._flights)
        self._fail_unplanned(step)
        plan = None if step is None else step.plan()
        if self._start_masks is not None and plan is not None:
            self._start_masks(False)
        if self._before_step is not None and plan is not None:
            self._before_step()
        host_s = time.perf_counter() - started
        if step is not None and plan is not None:
            self._flights.append(self._runner.submit(step, plan))
        if self._flights and (step is None or len(self._flights) > self.config.plan_ahead):
            host_s += self._complete(self._flights.popleft())
            self._begin_following_masks()
        self.stats.host_seconds.add(host_s)
        return self.take_events()

    def _begin_following_masks(self) -> None:
        """A step was updated with: of the masks that depend on its tokens, begin those that rows
        are still wanted for, and give up the others."""
        if self._start_masks is not None:
            self._start_masks(True)
        for flight in self._flights:
            _give_up_masks(flight)

    def take_events(self) -> list[Event]:
        """What happened since the last step, such as cancellations."""
        return self._lifecycle.take_events()

    def run(self) -> Iterable[Event]:
        """Step until every request has ended or is paused, sleeping while the engine waits."""
        while self.has_work and self.wake_at != float("inf"):
            yield from self.step()
            self.sleep_until_due()

    def sleep_until_due(self) -> None:
        """Sleep until the engine has something to do; returns at once if it has, or never will."""
        due = self.wake_at
        if due is not None and due != float("inf"):
            self.clock.sleep(due - self.clock.now())

    @property
    def has_work(self) -> bool:
        return bool(self._lifecycle.live or self._flights or self._lifecycle.events)

    @property
    def wake_at(self) -> float | None:
        """When step() should next be called if nothing arrives before; None: call it at once."""
        if self._flights or self._scheduler.running or self._lifecycle.events:
            return None
        if self._scheduler.waiting and self._scheduler.wake_at is None:
            return None
        times = [t for t in (self._scheduler.wake_at, self._next_deadline()) if t is not None]
        return min(times, default=float("inf"))

    def _complete(self, flight: Flight) -> float:
        """Wait for a step, then update; returns the host's seconds, the waiting left out."""
        step = flight.step
        can_give_way = self._can_give_way(step)
        if can_give_way:
            self._let_give_way(flight)
        try:
            result = self._runner.collect(flight, self.config.step_timeout_s)
        except ExecutorError as error:
            if flight.gave_way and isinstance(error, StepCancelledError):
                self._plan_again(flight)
                return 0.0
            try:
                self._recover(step, error)
            except UnresponsiveError:
                self._give_up(step)
            return 0.0
        except UnresponsiveError:
            self._give_up(step)
            return 0.0
        finally:
            self._giving_way = None
        started = time.perf_counter()
        if can_give_way:
            self._lost_time.ran(result.elapsed_s)
        self._backoff.succeeded(len(step.rows))
        self._apply_backoff()
        self._record(step, result)
        self._release_sources(step.rows)
        results = list(zip(step.rows, result.sequences, strict=True))
        if step.has_masks and self._start_masks is not None:
            self._lifecycle.advance_grammars(results)
            self._start_masks(True)
        self._lifecycle.apply(step.id, results, self.clock.now())
        return time.perf_counter() - started

    def _can_give_way(self, step: Step) -> bool:
        """Whether it holds rows of the background alone, and none is planned on top of it."""
        is_behind = all(row.sequence.request.is_background for row in step.rows)
        return is_behind and not self.config.plan_ahead

    def _let_give_way(self, flight: Flight) -> None:
        """While the step is waited for, arrival_waits() may cancel it; at once, where an arrival
        came while it was planned."""
        if self._lost_time.is_left:
            self._giving_way = flight
            if self._has_arrival:
                self.arrival_waits()
        self._has_arrival = False

    def _plan_again(self, flight: Flight) -> None:
        """A step gave way to an arrival: it counts as never planned."""
        self._lost_time.lost(self.clock.now() - flight.step.planned_at)
        _give_up_masks(flight)
        for row in flight.step.rows:
            self._roll_back(row)
        self._release_sources(flight.step.rows)

    def _record(self, step: Step, result: StepResult) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.batch_size.add(len(step.rows))
        stats.step_tokens.add(step.num_tokens)
        stats.step_seconds.add(result.elapsed_s)
        stats.busy_s += result.elapsed_s
        stats.padding_tokens += result.padding_tokens
        self._scheduler.observe(step, result.elapsed_s)
        self._step_log.record(step.id, step.rows, result.elapsed_s, self.clock.now())

    def _release_sources(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.copies:
                self._scheduler.cache.release_sources(row.copies)

    def _expire_requests(self) -> None:
        now = self.clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heappop(self._deadlines)
            live = self._lifecycle.live.get(request_id)
            if live is None or live.request.deadline is None:
                continue
            if live.request.deadline <= now:  # not another request that took the same id
                self._lifecycle.expire(live, now)

    def _next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _fail_unplanned(self, step: Step | None) -> None:
        """End the requests whose grammar failed while a row of theirs was planned; the row stays in
        the step, and its result is discarded."""
        for sequence, error in self._scheduler.take_failed():
            if not sequence.is_done:
                step_id = 0 if step is None else step.id
                self._lifecycle.fail(sequence.live, error, step_id, self.clock.now())

    # ---- when a step fails

    def _recover(self, step: Step, error: ExecutorError) -> None:
        """Isolate the rows that make a step fail; the others go on."""
        self._abandon_later_flights()
        requests = self._note_failed(step)
        self._health.step_failed(step.id, requests, error, self.clock.now())
        current = []
        for row in step.rows:
            if not row.sequence.is_done and row.epoch == row.sequence.epoch:
                current.append(row)
            else:
                self._roll_back(row)
        run = partial(self._run_rows, is_hung=isinstance(error, StepCancelledError))
        outcome = isolate(current, run, can_shrink=self.config.chunking)
        self._release_sources(step.rows)
        now = self.clock.now()
        self._back_off(step, error, outcome, now)
        self._lifecycle.apply(step.id, outcome.succeeded, now)
        for row, fault in outcome.failed:
            sequence = row.sequence
            if not sequence.is_done:
                self._lifecycle.fail(sequence.live, fault, sequence.last_step, now)
        for row in outcome.retry:
            self._roll_back(row)
        if isinstance(error, ExecutorMemoryError):
            self._shed_load()

    def _back_off(self, step: Step, error: ExecutorError, outcome: Outcome, now: float) -> None:
        self.stats.num_step_splits += outcome.num_splits
        if not outcome.failed and (outcome.succeeded or outcome.retry):
            self.stats.count_isolated(error)
        self._backoff.failed(
            len(step.rows), step.num_tokens, error, is_explained=outcome.is_explained
        )
        self._apply_backoff()
        if self._backoff.is_degraded:
            self._health.degraded(now)

    def _note_failed(self, step: Step) -> list[str]:
        """Name the step in the metrics of its requests; their ids."""
        requests = {row.sequence.request.id: row.sequence.request for row in step.rows}
        for request in requests.values():
            request.metrics.failed_in(step.id)
        return list(requests)

    def _abandon_later_flights(self) -> None:
        """Steps planned on top of a failed one count as never run."""
        for flight in self._flights:
            self._runner.cancel(flight)
            _give_up_masks(flight)
        while self._flights:
            flight = self._flights.popleft()
            with suppress(ExecutorError):  # its rows are run again in any case
                self._runner.collect(flight, self.config.step_timeout_s)
            for row in flight.step.rows:
                self._roll_back(row)
            self._release_sources(flight.step.rows)

    def _roll_back(self, row: Row) -> None:
        """Forget that a row was planned."""
        sequence = row.sequence
        if sequence.is_done:
            return
        if row.plan.want is Want.SAMPLE:
            sequence.sample_dropped()
        if row.epoch != sequence.epoch:
            return
        if row.copies:
            self._scheduler.free_blocks(sequence)  # whether they were copied is unknown
        else:
            self._scheduler.roll_back(sequence, row.plan.start)

    def _run_rows(self, rows: SequenceOf[Row], *, is_hung: bool) -> SequenceOf[SequenceResult]:
        """Run some rows of a failed step again, as a step of their own."""
        part = self._part(rows)
        timeout_s = self.config.step_timeout_s
        if timeout_s is not None and is_hung:  # a part takes less than the whole step
            timeout_s = min(timeout_s, self.config.step_grace_s)
        self.stats.num_steps_retried += 1
        try:
            result = self._runner.collect(self._runner.submit(part, part.plan()), timeout_s)
        except ExecutorError:
            self._note_failed(part)
            raise
        self._record(part, result)
        return result.sequences

    def _part(self, rows: SequenceOf[Row]) -> Step:
        step_id = self._scheduler.new_step_id()
        again = [row._replace(plan=_resolved(row)) for row in rows]
        for row in again:
            row.sequence.retried(step_id)
        num_tokens = sum(row.plan.num_new_tokens for row in again)
        return Step(step_id, again, num_tokens, context=sum(row.plan.end for row in again))

    def _apply_backoff(self) -> None:
        self._scheduler.set_limits(self._backoff.batch_limit, self._backoff.token_limit)
        if self._health.degraded_since is not None and not self._backoff.is_degraded:
            self._health.recovered(self.clock.now())

    def _shed_load(self) -> None:
        """Pre-empt down to the lowered batch limit, the last in rank first."""
        running = self._scheduler.running
        while len(running) > self._backoff.batch_limit:
            self._scheduler.preempt(running[-1], self.clock.now())

    def _give_up(self, step: Step) -> None:
        """The executor is unresponsive: fail every request."""
        self._release_sources(step.rows)
        self._note_failed(step)
        waited = (self.config.step_timeout_s or 0.0) + self.config.step_grace_s
        self._fail_all(ExecutorError(f"the executor did not answer within {waited:g} s"), step.id)

    def fail_all(self, error: ExecutorError) -> list[Event]:
        """End every request with this error, which is no fault of theirs; the engine is stuck: it
        accepts no more."""
        self._fail_all(error)
        return self.take_events()

    def _fail_all(self, error: ExecutorError, step_id: int | None = None) -> None:
        now = self.clock.now()
        self._health.ended(error, len(self._lifecycle.live), step_id, now)
        while self._flights:
            flight = self._flights.popleft()
            _give_up_masks(flight)
            self._release_sources(flight.step.rows)
        self._lifecycle.fail_all(error, now)

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        """Override the configuration's weights, from the next step on."""
        self._key_weights = dict(weights)
        self._scheduler.set_key_weights({**self.config.key_weights, **weights})

    def take_over(self, previous: "Engine") -> None:
        """Replace another engine: keep its key weights, and drain if it drains."""
        self.set_key_weights(previous._key_weights)
        self._is_draining = previous._is_draining

    # ---- beside other users of its executor and cache

    @property
    def cache(self) -> KVCache:
        """Its KV blocks; other users of it allocate and free between two steps."""
        return self._scheduler.cache

    def reserve_blocks(self, count: int) -> None:
        """Others keep so many blocks: requests that do not fit into the rest are refused."""
        self._admission.reserve_blocks(count)

    @property
    def num_blocks_to_spare(self) -> int:
        """Blocks that others may keep so that every live request can still run, alone at least."""
        lengths = [s.max_length for live in self._lifecycle.live.values() for s in live.sequences]
        largest = self.cache.peak_blocks(max(lengths, default=0), self.config.smallest_chunk)
        return self.cache.pool.num_blocks - largest

    def settle(self) -> None:
        """Wait for the steps in flight and update, so that others may submit steps."""
        while self._flights:
            self._complete(self._flights.popleft())

    # ---- looking at it

    @property
    def health(self) -> Health:
        if self._health.fatal is not None:
            return Health.STUCK
        if self._is_draining:
            return Health.DRAINING
        return Health.OK if self._health.degraded_since is None else Health.DEGRADED

    @property
    def health_report(self) -> HealthReport:
        """The health with its reason, and what steps may hold now."""
        return self._health.report(self.health, self._backoff)

    def snapshot(self) -> Snapshot:
        """What runs, what waits and why, right now."""
        scheduler = self._scheduler
        waiting = [*scheduler.waiting, *list(scheduler.parked)]
        now = self.clock.now()
        elapsed = now - self.stats.since
        return Snapshot(
            at=now,
            num_running=len(scheduler.running),
            num_waiting=len(waiting),
            waiting_by_reason=Counter(s.wait_reason for s in waiting if s.wait_reason),
            waiting_by_key=Counter(s.request.key for s in waiting),
            running_by_key=Counter(s.request.key for s in list(scheduler.running)),
            queued_tokens=scheduler.waiting.num_tokens,
            kv_usage=scheduler.cache.usage,
            num_blocks=scheduler.cache.pool.num_blocks,
            num_used_blocks=scheduler.cache.pool.num_used,
            num_evictable_blocks=scheduler.cache.pool.num_evictable,
            num_cached_blocks=scheduler.cache.pool.num_cached,
            memory_bytes=self.executor.memory_bytes,
            utilisation=self.stats.busy_s / elapsed if elapsed > 0 else 0.0,
            health=self.health.value,
            health_report=self.health_report,
            stats=self.stats,
        )

    def latest_steps(self, count: int, after: int | None = None) -> SequenceOf[StepRecord]:
        """Steps that ran lately and their rows, in order; from any thread. See StepLog."""
        return self._step_log.latest(count, self.clock.now(), after)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state of the engine is inconsistent. For tests."""
        scheduler = self._scheduler
        sequences = [s for live in self._lifecycle.live.values() for s in live.sequences]
        alive = [s for s in sequences if not s.is_done]
        copies = [c for f in self._flights for row in f.step.rows for c in row.copies]
        scheduler.cache.check_integrity([s.block_table for s in alive], copies)
        placed = Counter([*scheduler.running, *scheduler.waiting, *scheduler.parked])
        assert placed == Counter(alive), "a live sequence is not in exactly one list"
        assert all(s.is_running == (s in scheduler.running) for s in alive), "a flag is wrong"
        assert scheduler.running == sorted(scheduler.running, key=lambda s: s.rank), "out of order"
        for sequence in alive:
            assert sequence.num_pending >= 0, "collected more than was planned"
            assert sequence.num_computed <= len(sequence.tokens) + sequence.num_pending
            scheduler.cache.check_state(sequence.block_table, sequence.num_computed)
        for row in [row for flight in self._flights for row in flight.step.rows]:
            if not row.sequence.is_done and row.epoch == row.sequence.epoch:
                held = {NO_STATE, *(slot for _, slot in row.sequence.block_table.states)}
                assert held >= set(row.plan.states), "a step in flight has lost its states"

    def close(self) -> None:
        """Cancel every request and close the executor."""
        for live in list(self._lifecycle.live.values()):
            self._lifecycle.cancel(live, self.clock.now())
        for flight in self._flights:
            self._runner.cancel(flight)
            _give_up_masks(flight)
        self._health.close(self.clock.now())
        self.executor.close()


def _resolved(row: Row) -> SequencePlan:
    """A row's plan with all tokens known: the steps it followed are collected."""
    sequence = row.sequence
    plan = row.plan._replace(
        tokens=tuple(sequence.tokens[row.plan.start : row.plan.end]), follows=None
    )
    if plan.history is not None:
        completion = tuple(sequence.tokens[sequence.prompt_length :])
        plan = plan._replace(history=plan.history._replace(completion=completion))
    return plan


def _give_up_masks(flight: Flight) -> None:
    """Those that were not given: no token came that they depend on."""
    flight.step.following_masks.settle()
