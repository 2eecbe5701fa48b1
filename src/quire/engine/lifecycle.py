"""Lifecycle: applies a step's results to requests: tokens, text, stop rules, events, the end."""

from collections.abc import Iterable
from contextlib import suppress

from quire.core.errors import DeadlineError, QuireError, RequestCancelledError, RowFaultError
from quire.core.plan import SequenceResult, Want
from quire.core.request import (
    Ended,
    Event,
    FinishReason,
    Piece,
    RequestOutput,
    Status,
    WaitReason,
)
from quire.engine.admission import Admission
from quire.engine.health import HealthMonitor
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import LiveRequest, NewText, Sequence
from quire.engine.stats import EngineStats
from quire.engine.step import Row

_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is
_REASONS = {
    Status.CANCELLED: FinishReason.CANCELLED,
    Status.EXPIRED: FinishReason.TIMEOUT,
    Status.FAILED: FinishReason.ERROR,
}


class Lifecycle:
    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        stats: EngineStats,
        health: HealthMonitor,
    ) -> None:
        self.live: dict[str, LiveRequest] = {}
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._admission = admission
        self._stats = stats
        self._health = health
        self._step_id = 0  # the step whose results are applied
        # Of tokens that are about to be applied, by sequence: see Sequence.completes_grammar().
        self._verdicts: dict[int, bool | Exception] = {}

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events

    def begin(self, live: LiveRequest, now: float) -> None:
        if not self.live:
            self._admission.completion_rate.busy_from(now)
        self.live[live.request.id] = live
        for sequence in live.sequences:
            if not sequence.is_done:
                self._scheduler.enqueue(sequence, WaitReason.QUEUED, now)

    def advance_grammars(self, results: Iterable[tuple[Row, SequenceResult]]) -> None:
        """Give the tokens of results that apply() is given next to their grammars: the masks that
        follow can be computed while the rest is done."""
        for (plan, sequence, *_), result in results:
            token = result.token
            if plan.allowed is None or sequence.is_done or result.fault is not None:
                continue
            if token is not None and sequence.is_plain and sequence.last_token_at:
                self._verdicts[sequence.id] = _verdict(sequence, token)

    def apply(
        self, step_id: int, results: Iterable[tuple[Row, SequenceResult]], now: float
    ) -> None:
        """Apply each row's result to its sequence."""
        self._step_id = step_id
        cache = self._scheduler.cache
        block_size, has_windows = cache.block_size, cache.has_windows
        has_states = cache.has_states
        gaps: dict[float, int] = {}  # number of rows by the time of their previous token
        for row, result in results:
            plan, sequence, epoch, _ = row
            if sequence.is_done:
                self._stats.discarded_rows += 1
                continue
            if result.fault is not None:
                self._fail_row(sequence.live, _fault(sequence, result.fault), now)
                continue
            start = plan.start
            end = start + len(plan.tokens) + (plan.follows is not None)
            if start < sequence.prompt_length:
                self._advance_prompt(sequence, row, result, end)
            table = sequence.block_table
            if end // block_size > table.num_cached and epoch == sequence.epoch:
                cache.cache_full_blocks(table, sequence.tokens, end)
                if has_windows:
                    cache.release_unseen(table, end)
            if has_states and epoch == sequence.epoch:
                # Siblings to come start before the prompt's last token.
                first = sequence.prompt_length - 1 if sequence.has_siblings_to_come else end
                is_decoded = end > sequence.prompt_length
                cache.state_computed(table, end, min(first, end), is_decoded=is_decoded)
            if plan.want is Want.SAMPLE:
                before = sequence.last_token_at
                gaps[before] = gaps.get(before, 0) + 1
                if sequence.is_plain and before:  # a first token is more than a token
                    self._accept_plain(sequence, result, now)
                else:
                    self._accept(sequence, result, now)
                continue
            sequence.row_computed()
            if plan.want is Want.POOLED:
                self._take_pooled(sequence, result, now)
            elif sequence.goal is Want.NOTHING and end == sequence.prompt_length:
                self._end_prompt(sequence, now)
        self._verdicts.clear()  # of sequences that ended meanwhile
        gaps.pop(0.0, None)  # first tokens
        for before, count in gaps.items():
            self._stats.requests.token_gap.add(now - before, count)

    def _advance_prompt(
        self, sequence: Sequence, row: Row, result: SequenceResult, end: int
    ) -> None:
        metrics = sequence.request.metrics
        metrics.num_chunks += 1
        if metrics.first_step is None:
            metrics.first_step = self._step_id
        start = row.plan.start
        self._stats.prompt_tokens += min(end, sequence.prompt_length) - start
        if result.prompt_logprobs:
            sequence.live.add_prompt_logprobs(start, result.prompt_logprobs)

    def _accept_plain(self, sequence: Sequence, result: SequenceResult, now: float) -> None:
        """_accept() in half the time, where the token ends nothing."""
        token, logprob = result.token, result.logprob
        length = len(sequence.tokens) + 1
        if token is None or token in sequence.stop_token_ids or length >= sequence.max_length:
            self._accept(sequence, result, now)
            return
        completes = False
        if sequence.grammar is not None:
            verdict = self._verdict_of(sequence, token)
            if isinstance(verdict, Exception):
                sequence.sampled(token, logprob, now)
                self._stats.completion_tokens += 1
                self._fail_grammar(sequence, verdict, now)
                return
            completes = verdict
        try:
            text = None if completes else sequence.sampled_plainly(token, logprob, now)
        except Exception:
            text = None  # _accept() will meet it again
        if text is None:
            self._accept(sequence, result, now, completes_grammar=completes)
            return
        self._stats.completion_tokens += 1
        live = sequence.live
        if live.wants_pieces:
            name, index = live.request.id, sequence.completion.index
            logprobs = () if logprob is None else (logprob,)
            piece = (name, index, (token,), text, logprobs, None, None, False)
            self.events.append(_new_tuple(Piece, piece))

    def _accept(
        self,
        sequence: Sequence,
        result: SequenceResult,
        now: float,
        completes_grammar: bool | None = None,
    ) -> None:
        """Append a sampled token, then apply the stop rules. `completes_grammar`: what its grammar
        said of the token; None: it was not asked yet."""
        token = result.token
        live = sequence.live
        if token is None:
            sequence.sample_dropped()
            self._fail_row(live, RowFaultError("the executor gave no token"), now)
            return
        completion = sequence.completion
        is_first = not sequence.last_token_at
        sequence.sampled(token, result.logprob, now)
        self._stats.completion_tokens += 1
        if is_first:
            self._begin_completion(sequence, now)
        reason: FinishReason | None = None
        if completes_grammar is None and sequence.grammar is not None:
            completes_grammar = self._completes_grammar(sequence, token, now)
        if completes_grammar:
            reason = FinishReason.STOP
        elif sequence.is_done:
            return  # its grammar failed
        elif len(sequence.tokens) >= sequence.max_length or token in sequence.stop_token_ids:
            reason = self._reason_to_stop(sequence, token)
        text = ""
        if sequence.transcript is not None:
            try:
                text, reason = self._detokenize(sequence, token, reason)
            except Exception as error:  # fails this request alone
                self._fail_row(live, _caused(f"the detokenizer failed: {error!r}", error), now)
                return
        if live.wants_pieces:
            is_left_out = completion.is_stop_token_left_out
            tokens = () if is_left_out else (token,)
            logprobs = () if result.logprob is None or is_left_out else (result.logprob,)
            how = (reason, completion.stop_reason, is_left_out)
            piece = (live.request.id, completion.index, tokens, text, logprobs, *how)
            self.events.append(_new_tuple(Piece, piece))
        if reason is not None:
            self._finish(sequence, reason, now)

    def _take_pooled(self, sequence: Sequence, result: SequenceResult, now: float) -> None:
        if result.pooled is None:
            self._fail_row(sequence.live, RowFaultError("the executor gave no pooled state"), now)
            return
        sequence.live.set_pooled(result.pooled)
        self._finish(sequence, FinishReason.STOP, now)

    def _end_prompt(self, sequence: Sequence, now: float) -> None:
        """The prompt was all that it asked for."""
        if sequence.live.wants_pieces:
            reason = FinishReason.LENGTH
            self.events.append(Piece(sequence.request.id, 0, (), "", finish_reason=reason))
        self._finish(sequence, FinishReason.LENGTH, now)

    def _begin_completion(self, sequence: Sequence, now: float) -> None:
        metrics = sequence.request.metrics
        if metrics.first_token_at is None:
            metrics.first_token_at = now
        if sequence.has_siblings_to_come:
            self._fork(sequence, now)

    def _fork(self, first: Sequence, now: float) -> None:
        """The prompt is computed: start the request's other sequences from it."""
        self._scheduler.release_slots(first)
        for sibling in self._admission.fork(first):
            if first.is_running:
                self._scheduler.join(sibling)
            else:  # it was pre-empted: the siblings wait as it does
                self._scheduler.enqueue(sibling, WaitReason.PREEMPTED, now)
                if first.live.is_paused:
                    self._scheduler.park(sibling, now)

    def _completes_grammar(self, sequence: Sequence, token: int, now: float) -> bool:
        """Whether nothing may follow the token; a grammar that raises ends its request."""
        verdict = self._verdict_of(sequence, token)
        if isinstance(verdict, Exception):
            self._fail_grammar(sequence, verdict, now)
            return False
        return verdict

    def _verdict_of(self, sequence: Sequence, token: int) -> bool | Exception:
        verdict = self._verdicts.pop(sequence.id, None)
        return _verdict(sequence, token) if verdict is None else verdict

    def _fail_grammar(self, sequence: Sequence, error: Exception, now: float) -> None:
        self._fail_row(sequence.live, _caused(f"the grammar failed: {error}", error), now)

    def _reason_to_stop(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.sampling.params
        count = len(sequence.completion.token_ids)
        if token in sequence.stop_token_ids and count > params.min_tokens:
            sequence.stopped_by_token(token)
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_length else None

    def _detokenize(
        self, sequence: Sequence, token: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Turn the token into text; a stop string may end the sequence."""
        assert sequence.transcript is not None
        completion = sequence.completion
        new = NewText("")
        if completion.stop_reason is None:  # the token that ends a sequence is not part of its text
            may_stop = len(completion.token_ids) >= sequence.sampling.params.min_tokens
            new = sequence.transcript.add(token, may_stop=may_stop)
        if new.stopped_by is None and reason is not None:
            rest = sequence.transcript.finish()
            new = NewText(new.text + rest.text, rest.stopped_by)
        sequence.add_text(new.text)
        if new.stopped_by is not None:
            sequence.stopped_by(new.stopped_by)
            reason = FinishReason.STOP
        return new.text, reason

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        sequence.ended(reason)
        self._scheduler.remove(sequence, now)
        if sequence.live.num_open == 0:
            self._end(sequence.live, Status.FINISHED, None, now)

    # ---- other ends

    def cancel(self, live: LiveRequest, now: float) -> None:
        error = RequestCancelledError(f"{live.request.id} was cancelled")
        self._abort(live, Status.CANCELLED, error, now)

    def expire(self, live: LiveRequest, now: float) -> None:
        waited = now - live.request.metrics.arrived_at
        error = DeadlineError(f"{live.request.id} ran out of time after {waited:.3f} s")
        self._abort(live, Status.EXPIRED, error, now)

    def fail(self, live: LiveRequest, error: QuireError, step_id: int, now: float) -> None:
        """End a request because of a fault of its own in a step; others go on."""
        self._stats.count_isolated(error)
        self._health.request_failed(live.request.id, step_id, error, now)
        self._abort(live, Status.FAILED, error, now)

    def _fail_row(self, live: LiveRequest, error: RowFaultError, now: float) -> None:
        """Its row of the step that is applied is at fault, and the step's others are sound."""
        live.request.metrics.failed_in(self._step_id)
        self.fail(live, error, self._step_id, now)

    def fail_all(self, error: QuireError, now: float) -> None:
        """End every request because of a fault that is none of theirs."""
        for live in list(self.live.values()):
            self._abort(live, Status.FAILED, error, now)

    def _abort(self, live: LiveRequest, status: Status, error: QuireError, now: float) -> None:
        for sequence in live.sequences:
            if sequence.is_done:
                continue
            sequence.ended(_REASONS[status])
            if sequence.transcript is not None:
                with suppress(Exception):  # the detokenizer may be what failed
                    sequence.add_text(sequence.transcript.finish().text)
            self._scheduler.remove(sequence, now, faulted=status is Status.FAILED)
        self._end(live, status, error, now)

    def _end(self, live: LiveRequest, status: Status, error: QuireError | None, now: float) -> None:
        request = live.request
        del self.live[request.id]
        request.move_to(status, now)
        request.metrics.finished_at = now
        self._admission.completion_rate.completed(now)
        request.metrics.num_steps = sum(sequence.num_steps for sequence in live.sequences)
        request.metrics.last_step = max(sequence.last_step for sequence in live.sequences) or None
        ended = self._stats.requests_ended
        ended[status.value] = ended.get(status.value, 0) + 1
        self._record(live)
        output = RequestOutput(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            completions=[sequence.completion for sequence in live.sequences],
            metrics=request.metrics,
            status=status,
            prompt_logprobs=live.prompt_logprobs,
            pooled=live.pooled,
            error=error,
        )
        self.events.append(Ended(request.id, output))

    def _record(self, live: LiveRequest) -> None:
        reasons = self._stats.finish_reasons
        reason = live.sequences[0].completion.finish_reason
        assert reason is not None
        reasons[reason.value] = reasons.get(reason.value, 0) + 1
        num_tokens = sum(sequence.completion.num_tokens for sequence in live.sequences)
        request = live.request
        num_sampled = num_tokens - request.num_resumed_tokens
        self._stats.requests.record(request.metrics, len(request.prompt), num_sampled)


def _verdict(sequence: Sequence, token: int) -> bool | Exception:
    """Whether a token completes its grammar, or why that failed."""
    try:
        return sequence.completes_grammar(token)
    except Exception as error:
        return error


def _fault(sequence: Sequence, fault: str) -> RowFaultError:
    """A row's fault; where its mask could not be computed, the reason of that."""
    failure = None if sequence.grammar is None else sequence.grammar.failure
    return RowFaultError(fault if failure is None else f"the grammar failed: {failure}")


def _caused(message: str, error: Exception) -> RowFaultError:
    fault = RowFaultError(message)
    fault.__cause__ = error
    return fault
