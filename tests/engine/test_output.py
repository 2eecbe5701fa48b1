"""What a caller sees: ends by token, string, length and grammar; text; scores; pieces."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.simulated import END_TOKEN, finish, new_engine, outputs, solo, tokens_of
from tests.engine.toys import Letters, Multiples, ended, greedy, mask, rows_of, toy_engine

from quire.core.errors import OverloadedError, RequestError, RowFaultError
from quire.core.plan import Breakers, FollowingMasks, StepResult, allows
from quire.core.request import (
    Completion,
    Ended,
    Event,
    FinishReason,
    Piece,
    RequestOutput,
    Status,
)
from quire.core.sampling import Constraint, SamplingParams
from quire.engine import Engine
from quire.engine.lifecycle import Lifecycle
from quire.engine.sequence import Transcript
from quire.executors.fake import FakeExecutor

PROMPT = [3, 1, 4]
REGEX = Constraint("regex", "x")


def run(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    engine = new_engine()
    engine.add_request(prompt, params)
    (output,) = finish(engine).values()
    return output


# ---- stopping by token


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_ends_the_completion_and_is_left_out_of_it(is_included: bool) -> None:
    tokens = solo(PROMPT, greedy(10))[0]
    params = greedy(10, stop_token_ids=(tokens[4],), logprobs=0)
    engine = new_engine()
    engine.add_request(PROMPT, replace(params, include_stop_token=is_included), stream=True)
    events = list(engine.run())
    pieces = [event for event in events if isinstance(event, Piece)]
    [output] = [event.output for event in events if isinstance(event, Ended)]
    expected = tokens[: 4 + is_included]
    assert output.token_ids == expected
    assert [score.token for score in output.logprobs or []] == expected
    assert [token for piece in pieces for token in piece.token_ids] == expected
    assert [score.token for piece in pieces for score in piece.logprobs] == expected
    assert pieces[-1].finish_reason is output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == tokens[4]
    assert output.completions[0].num_tokens == engine.stats.completion_tokens == 5
    assert engine.stats.requests.completion_tokens.sum == 5


def test_without_a_stop_the_length_ends_it() -> None:
    output = run(greedy(10))
    assert len(output.token_ids) == 10
    assert output.finish_reason is FinishReason.LENGTH
    assert output.completions[0].stop_reason is None


def prompt_that_ends() -> list[int]:
    """A prompt after which the end token comes up on its own, between the third and ninth token."""
    for first in range(1000):
        tokens = solo([first], greedy(10), vocabulary_size=50)[0]
        if END_TOKEN in tokens[2:9] and END_TOKEN not in tokens[:2]:
            return [first]
    raise AssertionError("no such prompt")


def run_small(prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine = new_engine(FakeExecutor(vocabulary_size=50))
    engine.add_request(prompt, params)
    (output,) = finish(engine).values()
    return output


def test_the_models_end_token_ends_the_completion_unless_it_is_ignored() -> None:
    prompt = prompt_that_ends()
    whole = run_small(prompt, greedy(10))
    assert len(whole.token_ids) == 10, "ignored"
    ended_early = run_small(prompt, replace(greedy(10), ignore_eos=False))
    at = whole.token_ids.index(END_TOKEN)
    assert ended_early.token_ids == whole.token_ids[:at]
    assert ended_early.finish_reason is FinishReason.STOP


def test_no_end_comes_before_the_minimum() -> None:
    prompt = prompt_that_ends()
    output = run_small(prompt, replace(greedy(20), ignore_eos=False, min_tokens=12))
    assert len(output.token_ids) > 12
    assert END_TOKEN not in output.token_ids[:12]


# ---- stop strings


def spelled(text: Sequence[str]) -> dict[int, str]:
    """Spell the tokens that the fake model gives after PROMPT as told."""
    tokens = solo(PROMPT, greedy(len(text)))[0]
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, text, strict=True))


def write(text: Sequence[str], **params: object) -> tuple[RequestOutput, list[Piece]]:
    spelling = spelled(text)
    engine = toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Letters(spelling))
    engine.add_request(PROMPT, greedy(len(text), **params), stream=True)
    events = list(engine.run())
    (output,) = ended(events)
    return output, [event for event in events if isinstance(event, Piece)]


def test_text_comes_with_its_tokens() -> None:
    output, pieces = write(["Once", " upon", " a", " time"])
    assert output.text == "Once upon a time"
    assert [piece.text for piece in pieces] == ["Once", " upon", " a", " time"]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("stop", ["END", "a EN", "D"])
def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(stop: str) -> None:
    text = ["Once", " a", " E", "N", "D of", " it"]
    output, pieces = write(text, stop=[stop])
    whole = "".join(text)
    assert output.text == whole[: whole.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == stop
    assert len(output.token_ids) == (4 if stop == "a EN" else 5)
    assert "".join(piece.text for piece in pieces) == output.text, "nothing of it was leaked"
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_can_be_kept_in_the_text() -> None:
    output, pieces = write(["a", "EN", "Dx"], stop=["END"], include_stop_str_in_output=True)
    assert output.text == "aEND"
    assert "".join(piece.text for piece in pieces) == "aEND"


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    output, pieces = write(["a", "E", "N", "x", "E"], stop=["END"])
    assert output.text == "aENxE"
    assert [piece.text for piece in pieces] == ["a", "", "", "ENx", "E"]
    assert output.finish_reason is FinishReason.LENGTH


def test_the_first_of_several_stop_strings_counts() -> None:
    output, _ = write(["a", "bcd", "e"], stop=["d", "c", "e"])
    assert output.text == "ab"
    assert output.completions[0].stop_reason == "c"


def test_a_stop_string_before_the_minimum_is_text_like_any_other() -> None:
    output, _ = write(["a", "X", "b", "X", "c"], stop=["X"], min_tokens=3)
    assert output.text == "aXb"
    assert len(output.token_ids) == 4


def test_a_stop_token_is_no_part_of_the_text_and_held_text_comes_out() -> None:
    spelling = spelled(["a", "E", "N", "!"])
    last = list(spelling)[-1]
    engine = toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Letters(spelling))
    engine.add_request(PROMPT, greedy(9, stop=["END"], stop_token_ids=[last]))
    (output,) = finish(engine).values()
    assert output.text == "aEN"
    assert output.completions[0].stop_reason == last


def test_held_text_of_a_cancelled_request_comes_out() -> None:
    spelling = spelled(["a", "E", "N", "D"])
    engine = toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Letters(spelling))
    request = engine.add_request(PROMPT, greedy(9, stop=["END"]))
    while len(engine._lifecycle.live[request.id].sequences[0].completion.token_ids) < 3:
        engine.step()
    engine.cancel(request.id)
    assert finish(engine)[request.id].text == "aEN"


class Speechless(Letters):
    """A detokenizer that one token leaves without words."""

    def __init__(self, unknown: int) -> None:
        super().__init__({})
        self._unknown = unknown
        self._is_lost = False

    def add(self, token: int) -> str:
        self._is_lost |= token == self._unknown
        return self.flush() + super().add(token)

    def flush(self) -> str:
        if self._is_lost:
            raise UnicodeError("no such letter")
        return ""


def test_a_detokenizer_that_raises_fails_its_request_alone() -> None:
    unknown = solo(PROMPT, greedy(10))[0][4]
    prompts = [PROMPT, [1], [2]]
    assert all(unknown not in solo(prompt, greedy(10))[0] for prompt in prompts[1:])
    engine = toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Speechless(unknown))
    doomed, *others = [engine.add_request(prompt, greedy(10, stop=["x"])) for prompt in prompts]
    found = finish(engine)
    assert isinstance(found[doomed.id].error, RowFaultError)
    assert "no such letter" in str(found[doomed.id].error)
    for request in others:
        assert tokens_of(found[request.id]) == solo(request.prompt, greedy(10))
        assert found[request.id].text == "·" * 10
    assert engine.snapshot().kv_usage == 0.0


class Raw:
    """A detokenizer that is told what each token adds, and holds some of it to the end."""

    def __init__(self, parts: Sequence[str], rest: str) -> None:
        self._parts = parts
        self._rest = rest

    def add(self, token: int) -> str:
        return self._parts[token]

    def flush(self) -> str:
        return self._rest


@given(
    parts=st.lists(st.text("abX", max_size=4), max_size=12),
    rest=st.text("abX", max_size=3),
    stop=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=500)
def test_text_is_cut_at_the_first_stop_string_however_it_comes(
    parts: list[str], rest: str, stop: list[str], include: bool
) -> None:
    transcript = Transcript(Raw(parts, rest), tuple(stop), include_stop=include)
    shown = ""
    stopped_by = None
    for token in range(len(parts)):
        new = transcript.add(token, may_stop=True)
        shown += new.text
        stopped_by = new.stopped_by
        if stopped_by is not None:
            break
    else:
        new = transcript.finish()
        shown += new.text
        stopped_by = new.stopped_by
    whole = "".join(parts) + rest
    if stopped_by is None:
        assert shown == whole
        assert not any(text in whole for text in stop)
        return
    text = shown if include else shown + stopped_by
    assert whole.startswith(text)
    assert text.endswith(stopped_by)
    before = text[: len(text) - len(stopped_by)]
    assert not any(other in before for other in stop), "an earlier one was leaked"


# ---- scores


def test_scores_are_given_where_they_are_asked_for() -> None:
    output = run(greedy(5, logprobs=2, prompt_logprobs=1))
    assert output.logprobs is not None
    assert [score.token for score in output.logprobs] == output.token_ids
    assert all(len(score.top) == 2 for score in output.logprobs)
    assert output.prompt_logprobs is not None
    assert [score.token for score in output.prompt_logprobs] == PROMPT[1:]
    assert all(len(score.top) == 1 for score in output.prompt_logprobs)


def test_scores_are_left_out_where_they_are_not() -> None:
    output = run(greedy(5))
    assert output.logprobs is None
    assert output.prompt_logprobs is None


def test_pieces_carry_the_scores_of_their_tokens() -> None:
    engine = new_engine()
    engine.add_request(PROMPT, greedy(4, logprobs=0), stream=True)
    events = list(engine.run())
    pieces = [event for event in events if isinstance(event, Piece)]
    (output,) = outputs(events).values()
    assert output.logprobs == [score for piece in pieces for score in piece.logprobs]


@pytest.mark.parametrize("budget", [3, 8, 17])
def test_chunks_and_company_do_not_change_the_scores(budget: int) -> None:
    prompt = list(range(200, 240))
    params = greedy(6, logprobs=3, prompt_logprobs=2)
    whole = run(params, prompt)
    engine = new_engine(max_batch_size=3, max_step_tokens=budget)
    request = engine.add_request(prompt, params)
    engine.add_request([5, 6], greedy(30))
    output = finish(engine)[request.id]
    assert output.metrics.num_chunks > 1
    assert output.logprobs == whole.logprobs
    assert output.prompt_logprobs == whole.prompt_logprobs


def test_preemption_does_not_change_the_scores() -> None:
    params = greedy(20, logprobs=1, prompt_logprobs=1)
    prompts = [[i] * 8 for i in range(4)]
    engine = new_engine(FakeExecutor(num_blocks=10, block_size=4), max_batch_size=4)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    found = finish(engine)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        whole = run(params, request.prompt)
        assert found[request.id].logprobs == whole.logprobs
        assert found[request.id].prompt_logprobs == whole.prompt_logprobs


def test_all_completions_share_the_scores_of_the_prompt() -> None:
    output = run(SamplingParams(n=3, max_tokens=3, seed=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT) - 1


# ---- pieces


def test_pieces_are_given_to_streams_only_and_add_up() -> None:
    engine = new_engine()
    streamed = engine.add_request([1], greedy(5, n=2), stream=True)
    engine.add_request([2], greedy(5))
    events = list(engine.run())
    pieces = [event for event in events if isinstance(event, Piece)]
    assert {piece.request_id for piece in pieces} == {streamed.id}
    output = outputs(events)[streamed.id]
    for completion in output.completions:
        own = [piece for piece in pieces if piece.completion_index == completion.index]
        assert [token for piece in own for token in piece.token_ids] == completion.token_ids
        assert [piece.finish_reason for piece in own] == [None] * 4 + [FinishReason.LENGTH]


# ---- grammars


def test_a_grammar_is_followed_and_ends_the_completion() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_grammar=lambda _: Multiples(of=7, count=4))
    held = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    free = engine.add_request(PROMPT, greedy(10))
    found = finish(engine)
    tokens = found[held.id].token_ids
    assert len(tokens) == 4
    assert all(token % 7 == 0 for token in tokens)
    assert found[held.id].finish_reason is FinishReason.STOP
    assert tokens_of(found[free.id]) == solo(PROMPT, greedy(10))


def test_a_sequence_with_dry_is_planned_when_its_last_token_is_known() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_breakers=lambda texts: Breakers(frozenset([7]), {}))
    engine.add_request(PROMPT, greedy(10, dry_multiplier=1.0))
    engine.add_request(PROMPT, greedy(10, repetition_penalty=2.0))
    finish(engine)
    assert any(row.follows is not None for row in rows_of(executor, 2)), "penalties do not wait"
    held = rows_of(executor, 1)
    assert all(row.follows is None and row.history is not None for row in held)
    assert all(row.sampling and row.sampling.breakers.tokens == {7} for row in held)


def test_breakers_of_dry_need_a_tokenizer() -> None:
    engine = toy_engine(FakeExecutor())
    with pytest.raises(RequestError, match="give an empty list") as caught:
        engine.add_request(PROMPT, greedy(10, dry_multiplier=1.0))
    assert caught.value.param == "dry_sequence_breakers"
    engine.add_request(PROMPT, greedy(4, dry_multiplier=1.0, dry_sequence_breakers=()))
    engine.add_request(PROMPT, greedy(4))
    assert len(finish(engine)) == 2


def test_a_sequence_with_a_grammar_is_planned_beside_others_before_its_last_token_is_known() -> (
    None
):
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_grammar=lambda _: Multiples(of=7, count=4))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    engine.add_request(PROMPT, greedy(10))
    finish(engine)
    held = rows_of(executor, 1)
    assert [row.follows is not None for row in held] == [False, True, True, True, True]
    masks = [row.mask() for row in held]
    assert all(mask is not None and allows(mask, 14) for mask in masks[:4])
    assert masks[4] == b"", "it was planned before the grammar was complete, and given up"
    assert all(row.allowed is None for row in rows_of(executor, 2))
    assert [len(plan.sequences) for plan in executor.plans[:5]] == [2] * 5, "in the same steps"


def test_a_slow_grammar_is_planned_when_its_last_token_is_known() -> None:
    class Slow(Multiples):
        is_slow = True

    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_grammar=lambda _: Slow(of=7, count=4))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    engine.add_request(PROMPT, greedy(10))
    finish(engine)
    assert any(row.follows is not None for row in rows_of(executor, 2)), "others are planned ahead"
    assert all(row.follows is None for row in rows_of(executor, 1))


@pytest.mark.parametrize("how", ["failed", "unresponsive", "interrupted"])
def test_no_step_waits_for_a_mask_whose_token_never_comes(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(
        executor, make_grammar=lambda _: Multiples(of=7, count=9), step_timeout_s=1.0
    )
    held = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    free = engine.add_request(PROMPT, greedy(10))
    while len(executor.plans) < 3:
        engine.step()
    waiting: list[FollowingMasks] = []
    if how == "failed":
        executor.faults.raises = lambda row: len(executor.plans) < 5
        collect = executor.collect  # a real one would not end before its masks are given

        def collect_given(ticket: Any, timeout_s: float | None = None) -> StepResult:
            masks = [row.allowed for row in ticket.plan.sequences]
            following = [one for one in masks if isinstance(one, FollowingMasks)]
            waiting.extend(one for one in following if not one._is_settled.is_set())
            return collect(ticket, timeout_s)

        monkeypatch.setattr(executor, "collect", collect_given)
    elif how == "unresponsive":
        executor.faults.hangs, executor.faults.heeds_cancel = (lambda row: True), False
    else:
        monkeypatch.setattr(executor, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.close()
    found = {} if how == "interrupted" else finish(engine)
    masks = [row.allowed for row in rows_of(executor, 1)]
    following = [one for one in masks if isinstance(one, FollowingMasks)]
    assert len(following) >= 3 and waiting == []
    assert all(one._is_settled.is_set() for one in following)
    if how == "failed":
        assert tokens_of(found[free.id]) == solo(PROMPT, greedy(10))
        assert [token % 7 for token in found[held.id].token_ids] == [0] * 9


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_each_completion_has_a_grammar_of_its_own() -> None:
    made: list[Multiples] = []

    def make_grammar(_: SamplingParams) -> Multiples:
        made.append(Multiples(of=2, count=3))
        return made[-1]

    engine = toy_engine(FakeExecutor(), make_grammar=make_grammar)
    params = SamplingParams(n=3, max_tokens=10, seed=1, ignore_eos=True, structured=REGEX)
    engine.add_request(PROMPT, params)
    (output,) = finish(engine).values()
    assert len(made) == 3
    assert [len(tokens) for tokens in tokens_of(output)] == [3, 3, 3]


def test_a_grammar_holds_after_preemption() -> None:
    prompts = [[i] * 8 for i in range(4)]

    def tokens(num_blocks: int) -> tuple[list[list[list[int]]], int]:
        executor = FakeExecutor(num_blocks=num_blocks, block_size=4)
        engine = toy_engine(executor, make_grammar=lambda _: Multiples(of=3, count=20))
        params = greedy(30, structured=REGEX)
        ids = [engine.add_request(prompt, params).id for prompt in prompts]
        found = finish(engine)
        return [tokens_of(found[name]) for name in ids], engine.stats.num_preemptions

    roomy, none = tokens(100)
    tight, some = tokens(12)
    assert (none, some > 0) == (0, True)
    assert tight == roomy


class Broken(Multiples):
    """A grammar that raises when asked for one thing, the third time."""

    def __init__(self, part: str) -> None:
        super().__init__(of=1, count=10)
        self._part = part
        self._asked = 0

    def _ask(self, part: str) -> None:
        if part == self._part:
            self._asked += 1
            if self._asked == 3:
                raise RuntimeError("lost the thread")

    def allowed(self) -> bytes:
        self._ask("allowed")
        return super().allowed()

    def accept(self, token: int) -> None:
        self._ask("accept")
        super().accept(token)

    @property
    def is_complete(self) -> bool:
        self._ask("is_complete")
        return super().is_complete


@pytest.mark.parametrize("part", ["allowed", "accept", "is_complete"])
def test_a_grammar_that_raises_fails_alone(part: str) -> None:
    engine = toy_engine(FakeExecutor(), make_grammar=lambda _: Broken(part))
    doomed = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    others = [engine.add_request([i], greedy(10)) for i in range(3)]
    found = finish(engine)
    output = found[doomed.id]
    assert output.status is Status.FAILED
    assert isinstance(output.error, RowFaultError)
    assert "lost the thread" in str(output.error)
    for request in others:
        assert tokens_of(found[request.id]) == solo(request.prompt, request.params)
    assert engine.snapshot().kv_usage == 0.0


def test_a_mask_that_allows_nothing_fails_alone() -> None:
    class Impossible(Multiples):
        def allowed(self) -> bytes:
            return mask([], 1000)

    engine = toy_engine(FakeExecutor(), make_grammar=lambda _: Impossible(1, 1))
    doomed = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    other = engine.add_request(PROMPT, greedy(10))
    found = finish(engine)
    assert isinstance(found[doomed.id].error, RowFaultError)
    assert found[other.id].status is Status.FINISHED


class Later:
    """A mask that is there once it was started."""

    def __init__(self, bits: bytes) -> None:
        self._bits = bits
        self.is_started = False

    def result(self) -> bytes:
        assert self.is_started, "a step waits for a mask that nobody computes"
        return self._bits

    def row(self) -> None:
        return None


class Promising(Multiples):
    """A grammar whose masks are computed after the step was planned."""

    def __init__(self, promised: list[Later], of: int, count: int) -> None:
        super().__init__(of, count)
        self._promised = promised

    def allowed(self) -> Later:  # type: ignore[override]
        self._promised.append(Later(self.mask))
        return self._promised[-1]


def start_all(promised: list[Later]) -> None:
    for later in promised:
        later.is_started = True
    promised.clear()


def test_masks_are_started_before_the_step_that_needs_them() -> None:
    promised: list[Later] = []
    engine = toy_engine(
        FakeExecutor(),
        make_grammar=lambda _: Promising(promised, of=7, count=4),
        start_masks=lambda _: start_all(promised),
    )
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    for output in finish(engine).values():
        assert [token % 7 for token in output.token_ids] == [0] * 4


def test_masks_that_a_step_under_way_needs_are_asked_for_at_once() -> None:
    promised: list[Later] = []
    started: list[tuple[bool, int]] = []

    def start(at_once: bool) -> None:
        started.append((at_once, len(promised)))
        start_all(promised)

    engine = toy_engine(
        FakeExecutor(),
        make_grammar=lambda _: Promising(promised, of=7, count=4),
        start_masks=start,
        plan_ahead=True,
    )
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    finish(engine)
    counts = {at_once: sum(n for own, n in started if own is at_once) for at_once in (False, True)}
    assert counts == {False: 1, True: 3}, "only the first is of a step that is not submitted yet"


def test_why_a_mask_could_not_be_computed_is_the_requests_error() -> None:
    class Failing(Multiples):
        failure = "too complex"

        def allowed(self) -> bytes:
            return b""

    engine = toy_engine(FakeExecutor(), make_grammar=lambda _: Failing(1, 1))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    (output,) = finish(engine).values()
    assert str(output.error) == "the grammar failed: too complex"


class Slow(Multiples):
    """A grammar whose mask is ready at every third look."""

    def __init__(self) -> None:
        super().__init__(of=7, count=4)
        self._looks = 0

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        self._looks += 1
        return self._looks % 3 == 0


def test_others_do_not_wait_for_a_slow_mask() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_grammar=lambda _: Slow(), plan_ahead=False)
    slow = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    free = engine.add_request(PROMPT, greedy(10))
    found = finish(engine)
    assert len(found[slow.id].token_ids) == 4
    assert tokens_of(found[free.id]) == solo(PROMPT, greedy(10))
    sizes = [len(plan.sequences) for plan in executor.plans]
    assert 1 in sizes[: sizes.index(2) + 4], "the others have steps without it before it ends"
    assert sizes.count(2) >= 2


def test_a_slow_mask_is_waited_for_where_nothing_else_is_to_do() -> None:
    class NeverReady(Multiples):
        is_ready = False

    engine = toy_engine(FakeExecutor(), make_grammar=lambda _: NeverReady(of=7, count=4))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    engine.add_request(PROMPT, greedy(10, structured=REGEX))
    assert [len(output.token_ids) for output in finish(engine).values()] == [4, 4]


# ---- going on with a completion


@pytest.mark.parametrize("num_generated", [1, 3, 7])
def test_a_completion_goes_on_as_it_would_have(num_generated: int) -> None:
    """Draws, penalties, the minimum, text, grammar and the end."""
    params = SamplingParams(
        max_tokens=9, min_tokens=8, seed=4, frequency_penalty=1.0, structured=REGEX, logprobs=1
    )

    def engine_of_letters() -> Engine:
        return toy_engine(
            FakeExecutor(),
            make_detokenizer=lambda **_: Letters({token: f"<{token}>" for token in range(1000)}),
            make_grammar=lambda _: Multiples(of=7, count=9),
        )

    engine = engine_of_letters()
    engine.add_request(PROMPT, params)
    (whole,) = finish(engine).values()
    engine = engine_of_letters()
    given = whole.token_ids[:num_generated]
    engine.add_request([*PROMPT, *given], params, num_generated=num_generated, stream=True)
    events = list(engine.run())
    (rest,) = ended(events)
    assert rest.prompt_token_ids == tuple(PROMPT)
    assert rest.token_ids == whole.token_ids
    assert rest.text == whole.text
    assert rest.finish_reason is whole.finish_reason
    assert rest.logprobs == (whole.logprobs or [])[num_generated:]
    pieces = [event for event in events if isinstance(event, Piece)]
    assert [piece.token_ids[0] for piece in pieces] == whole.token_ids[num_generated:]
    assert rest.metrics.time_to_first_token_s is not None
    assert engine.stats.completion_tokens == 9 - num_generated
    assert engine.stats.requests.completion_tokens.sum == 9 - num_generated


def _cut(events: list[Event], count: int, num_completions: int) -> list[Completion]:
    """The completions that the first so many events make, as their reader has them."""
    found = [Completion(index) for index in range(num_completions)]
    for event in events[:count]:
        assert isinstance(event, Piece)
        completion = found[event.completion_index]
        completion.token_ids += event.token_ids
        completion.text += event.text
        completion.finish_reason = event.finish_reason
    return found


def _texts(output: RequestOutput) -> list[tuple[list[int], str, FinishReason | None]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in output.completions]


@pytest.mark.parametrize("count", range(1, 14))
def test_several_completions_go_on_in_another_engine(count: int) -> None:
    """Each as it would have: those that have ended stay as they are, those not begun begin."""
    params = SamplingParams(
        max_tokens=6, n=3, seed=119, presence_penalty=0.5, stop=("7>",), min_tokens=2
    )

    def engine_of_letters() -> Engine:
        letters = {token: f"<{token}>" for token in range(1000)}
        return toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Letters(letters))

    engine = engine_of_letters()
    engine.add_request(PROMPT, params, stream=True)
    events = list(engine.run())
    (whole,) = ended(events)
    assert whole.finish_reason is FinishReason.STOP, "one of them ends before the others"
    so_far = _cut(events, count, 3)
    engine = engine_of_letters()
    engine.add_request(PROMPT, params, stream=True, resumed=so_far)
    rest = list(engine.run())
    assert _texts(ended(rest)[0]) == _texts(whole)
    for completion in _cut(rest, len(rest) - 1, 3):
        known = so_far[completion.index]
        assert known.token_ids + completion.token_ids == whole.completions[known.index].token_ids
        assert known.text + completion.text == whole.completions[known.index].text
    engine.check_integrity()
    sampled = sum(len(completion.token_ids) for completion in so_far)
    assert engine.stats.requests.completion_tokens.sum == (
        sum(completion.num_tokens for completion in whole.completions) - sampled
    )


def test_a_stop_string_before_the_least_length_stops_no_resumed_completion() -> None:
    params = SamplingParams(max_tokens=8, min_tokens=6, temperature=0.0, stop=(">",))
    letters = {token: f"<{token}>" for token in range(1000)}
    outputs: list[RequestOutput] = []
    for count in (0, 3):
        engine = toy_engine(FakeExecutor(), make_detokenizer=lambda **_: Letters(letters))
        so_far = [Completion(0, outputs[0].token_ids[:count])] if count else None
        engine.add_request(PROMPT, params, resumed=so_far)
        outputs += finish(engine).values()
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text == outputs[1].text


def test_what_another_engine_took_is_not_refused_by_a_full_queue_or_a_drain() -> None:
    engine = toy_engine(FakeExecutor(), max_queue_requests=1)
    engine.add_request(PROMPT, greedy(2))
    with pytest.raises(OverloadedError):
        engine.add_request(PROMPT, greedy(2))
    engine.add_request(PROMPT, greedy(2), resumed=[])
    engine.drain()
    engine.add_request(PROMPT, greedy(2), resumed=[])
    with pytest.raises(OverloadedError, match="draining"):
        engine.add_request(PROMPT, greedy(2))
    assert len(finish(engine)) == 3


@pytest.mark.parametrize(
    ("params", "resumed"),
    [
        (greedy(5, n=2), [Completion(0, [1])]),
        (greedy(5, prompt_logprobs=1), [Completion(0, [1])]),
        (greedy(5), [Completion(0, [1], finish_reason=FinishReason.STOP)]),
    ],
)
def test_completions_that_cannot_go_on_are_refused(
    params: SamplingParams, resumed: list[Completion]
) -> None:
    with pytest.raises(RequestError, match="resumed"):
        toy_engine(FakeExecutor()).add_request(PROMPT, params, resumed=resumed)


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_the_quick_way_reports_what_the_general_way_reports(
    plan_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events_of_a_run() -> list[object]:
        spelling = {token: chr(ord("a") + token % 26) for token in range(40)}
        engine = toy_engine(
            FakeExecutor(vocabulary_size=40),
            make_detokenizer=lambda **_: Letters(spelling),
            plan_ahead=plan_ahead,
        )
        for i in range(12):
            params = SamplingParams(
                max_tokens=3 + 2 * i,
                seed=i,
                n=1 + (i == 3),
                stop=("bc",) if i % 3 == 1 else (),
                logprobs=2 if i % 4 == 2 else None,
                ignore_eos=i % 5 == 0,
            )
            engine.add_request(range(i, 2 * i + 1), params, request_id=str(i), stream=i % 6 != 5)
        events = list(engine.run())
        texts = {output.request_id: output.text for output in ended(events)}
        return [*(event for event in events if isinstance(event, Piece)), texts]

    quick = events_of_a_run()
    assert len(quick) > 60
    accepted: list[int] = []

    def refuse(lifecycle: Lifecycle, sequence: Any, result: Any, now: float) -> None:
        accepted.append(result.token)
        lifecycle._accept(sequence, result, now)

    monkeypatch.setattr(Lifecycle, "_accept_plain", refuse)
    assert events_of_a_run() == quick
    assert len(accepted) > 30, "most tokens are plain"


# ---- the short ways that most rows take


def planned_and_told(
    params: SamplingParams, *, is_short: bool, count: int = 3
) -> tuple[list[Any], list[Any]]:
    """Rows as they are planned, and pieces, of requests that are treated the short way or not."""
    executor = FakeExecutor()
    rows: list[Any] = []
    submit = executor.submit

    def noted(plan: Any) -> Any:
        rows.append([row._replace(allowed=_kind_of(row.allowed)) for row in plan.sequences])
        return submit(plan)

    executor.submit = noted  # type: ignore[method-assign]
    engine = toy_engine(executor, make_grammar=lambda _: Multiples(of=7, count=6), plan_ahead=True)
    for number in range(count):
        seeded = replace(params, seed=number)
        engine.add_request([*PROMPT, number], seeded, request_id=str(number), stream=True)
    for live in engine._lifecycle.live.values():
        for sequence in live.sequences:
            if not is_short:
                sequence.is_plain = sequence.has_short_extras = False
    pieces = [event for event in engine.run() if isinstance(event, Piece)]
    return rows, pieces


def _kind_of(allowed: object) -> object:
    return type(allowed) if isinstance(allowed, FollowingMasks) else allowed


@pytest.mark.parametrize(
    "params",
    [
        greedy(9),
        greedy(9, logprobs=2),
        greedy(9, structured=REGEX),
        greedy(9, structured=REGEX, logprobs=1),
        greedy(9, structured=REGEX, presence_penalty=0.5),
        greedy(9, repetition_penalty=1.5),
    ],
    ids=["plain", "logprobs", "mask", "mask and logprobs", "mask and history", "history"],
)
def test_the_short_way_plans_and_tells_the_same(params: SamplingParams) -> None:
    rows, pieces = planned_and_told(params, is_short=True)
    assert (rows, pieces) == planned_and_told(params, is_short=False)
    assert len(pieces) >= 3 * 6
    masks = [row.allowed for step in rows for row in step]
    assert (FollowingMasks in masks) is (params.structured is not None)


def test_a_grammar_that_raises_while_a_row_is_planned_the_short_way_ends_its_request() -> None:
    class Raising(Multiples):
        def allowed(self) -> bytes:
            if self._left < 3:
                raise ValueError("no mask")
            return super().allowed()

    engine = toy_engine(FakeExecutor(), make_grammar=lambda _: Raising(7, 4), plan_ahead=False)
    doomed = engine.add_request(PROMPT, greedy(10, structured=REGEX))
    other = engine.add_request(PROMPT, greedy(10))
    found = finish(engine)
    assert "no mask" in str(found[doomed.id].error)
    assert found[other.id].status is Status.FINISHED
