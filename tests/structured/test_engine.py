"""Random constrained requests in an engine whose steps fail, pre-empt, go on in another engine, and
whose masks take long by chance: beside runs alone with masks made one token at a time.

Which steps have a row depends on when threads end. What is compared does not.
"""

import random
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.engine.simulated import finish
from tests.engine.toys import Letters
from tests.structured.schemas import random_schema
from tests.structured.walks import grammars_of
from tests.tokenizer.vocabularies import built, byte_level_metadata, learnt_merges, to_letters

from quire.core.config import EngineConfig
from quire.core.errors import RowFaultError
from quire.core.plan import SequencePlan
from quire.core.request import Completion, Ended, Event, FinishReason, RequestOutput, Status
from quire.core.sampling import Constraint, SamplingParams, Thinking
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, Faults
from quire.structured import Grammars, grammars, masks
from quire.structured.grammars import EndBits

TEXTS = ('{"name": "tags", "age": 12345678901, "x": ["true", "false", null]}', "12 345 red-A é")
TOKENIZER = built(
    byte_level_metadata(learnt_merges([to_letters(text) for text in TEXTS], 50), "llama-bpe")
)
SIZE = TOKENIZER.vocabulary_size + 3
ENDS = TOKENIZER.end_token_ids
SPELLING = {t: TOKENIZER.token_bytes(t).decode("latin-1") or "·" for t in range(SIZE - 3)}


class PlainMasks:
    """MatcherGrammar without threads, calls of many and times: what must come is asked where the
    last answer has come whole."""

    def __init__(self, made: Grammars, params: SamplingParams) -> None:
        assert params.structured is not None
        compiled = made._compiled(params.structured)
        self._matcher = compiled.made_matcher()
        self._has_begun = False
        self._ends = EndBits(ENDS, params)
        self._known: list[int] = []

    is_ready = True
    is_slow = False
    failure: str | None = None
    is_complete = False

    def allowed(self) -> bytes:
        if self._known:
            return bytes(self._known[0] // 8) + bytes([1 << self._known[0] % 8])
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return b""
        return self._ends.apply(mask)

    def accept(self, token: int) -> None:
        assert self._matcher.validate_tokens([token]) == 1, "a token that does not fit was sampled"
        assert self._matcher.consume_token(token)
        self.is_complete = self._matcher.is_stopped()
        self._known = self._known[1:]
        if not self._known and 0 < len(self._matcher.compute_ff_bytes()) <= 1024:
            for known in self._matcher.compute_ff_tokens():
                if known in ENDS:
                    break
                self._known.append(known)


class ByChance(float):
    """A limit that times are over by chance, also those of threads."""

    draw = random.Random(0)

    def __lt__(self, seconds: float) -> bool:
        return self.draw.random() < 0.2

    def __add__(self, _: float) -> "ByChance":
        return self


def drawn_params(draw: random.Random) -> SamplingParams:
    digits = "".join(draw.choices("0123456789", k=draw.randint(1, 14)))
    constraint = draw.choice(
        [
            Constraint.json(random_schema(draw)),
            Constraint.json(random_schema(draw)),
            Constraint.regex(f"[a-c]{{0,3}}{digits}(true|{digits}7)[ab]{{1,2}}"),
            Constraint.regex(f"({digits}|x)+ red"),
            Constraint.choice([digits, f"{digits} name", "tags", "é 12"]),
            None,
        ]
    )
    more: dict[str, Any] = {"structured": constraint, "seed": draw.randrange(2**31)}
    more["max_tokens"] = draw.randint(1, 40)
    more["n"] = draw.choice([1, 1, 1, 3])
    if draw.random() < 0.2:
        more["stop_token_ids"] = tuple(draw.choices(range(SIZE), k=2))
    if draw.random() < 0.2:
        more["ignore_eos"] = True
    if draw.random() < 0.2:
        more["min_tokens"] = draw.randint(0, more["max_tokens"])
    if draw.random() < 0.2:
        more["repetition_penalty"] = 1.3
    if draw.random() < 0.2:
        more["bad_words"] = tuple(draw.choices(["5", "true", "name", "a1", "red"], k=2))
    if draw.random() < 0.1:
        more["stop"] = ("1",)
    if draw.random() < 0.3:
        [close, begin] = draw.sample(range(10, SIZE - 10), 2)
        is_open = draw.random() < 0.5
        forced = {"is_open": is_open, "is_forced": not is_open and draw.random() < 0.5}
        more["thinking"] = Thinking((close,), (begin,), budget=draw.randint(0, 5), **forced)
    return SamplingParams(**more)


class Once:
    """A fault of one step: what runs it again does not meet it."""

    def __init__(self, draw: random.Random, chance: float) -> None:
        self._draw, self._chance = draw, chance
        self._is_due = False

    def before_step(self) -> None:
        self._is_due = self._draw.random() < self._chance

    def __call__(self, _: SequencePlan) -> bool:
        is_due, self._is_due = self._is_due, False
        return is_due


def engine_of(executor: FakeExecutor, made: Grammars, **settings: Any) -> Engine:
    return Engine(
        executor,
        EngineConfig(**settings),
        clock=executor.clock,
        end_token_ids=ENDS,
        make_detokenizer=lambda **_: Letters(SPELLING),
        make_grammar=made.for_completion,
        start_masks=made.start_masks,
    )


Asked = tuple[list[int], SamplingParams]


def alone(made: Grammars, asked: Asked) -> RequestOutput:
    """With plain masks, in steps that are planned when all is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammars, "__call__", lambda made, params: PlainMasks(made, params))
        engine = engine_of(FakeExecutor(vocabulary_size=SIZE), made, plan_ahead=False)
        engine.add_request(*asked)
        [output] = finish(engine).values()
    return output


@dataclass
class Company:
    """All together: steps raise, hang and run out of memory, sequences lose their blocks, requests
    are cancelled, and engines end whose requests go on in the next one."""

    draw: random.Random
    asked: dict[str, Asked]
    found: dict[str, RequestOutput] = field(default_factory=dict)
    num_preempted: int = 0
    num_retried: int = 0
    num_resumed: int = 0

    def run(self, made: Grammars) -> None:
        waiting = list(self.asked)
        so_far: dict[str, list[Completion]] = {}
        while waiting or so_far:
            so_far = self._run_one(made, waiting, so_far)
            self.num_resumed += len(so_far)

    def _run_one(
        self, made: Grammars, waiting: list[str], so_far: dict[str, list[Completion]]
    ) -> dict[str, list[Completion]]:
        """One engine; what of its requests goes on in the next."""
        draw = self.draw
        faults = [Once(draw, 0.02) for _ in range(3)]
        executor = FakeExecutor(vocabulary_size=SIZE, block_size=4, num_blocks=40)
        executor.faults = Faults(raises=faults[0], no_memory=faults[1], hangs=faults[2])
        ahead = draw.random() < 0.8
        engine = engine_of(executor, made, plan_ahead=ahead, step_timeout_s=1.0, max_batch_size=8)
        for name, completions in so_far.items():
            engine.add_request(*self.asked[name], request_id=name, resumed=completions)
        live = engine._lifecycle.live
        limit = draw.randint(20, 150)
        while (waiting or engine.has_work) and engine.stats.num_steps < limit:
            if waiting and draw.random() < 0.4:
                name = waiting.pop()
                engine.add_request(*self.asked[name], request_id=name)
            for fault in faults:
                fault.before_step()
            self._take(engine.step())
            engine.check_integrity()
            engine.sleep_until_due()
            if live and draw.random() < 0.01:
                engine.cancel(draw.choice(list(live)))
        self._take(engine.take_events())
        self.num_preempted += engine.stats.num_preemptions
        self.num_retried += engine.stats.num_steps_retried
        return {
            name: [deepcopy(one.completion) for one in own.sequences]
            if len(own.sequences) == self.asked[name][1].n
            else []  # the others begin with its first token
            for name, own in live.items()
        }

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Ended):
                self.found[event.request_id] = event.output


def said(output: RequestOutput) -> list[tuple[list[int], str, FinishReason | None]]:
    return [(own.token_ids, own.text, own.finish_reason) for own in output.completions]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_plain_masks_whatever_happens_to_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "NUM_POOL_THREADS", 2 * (seed % 3 > 0))
    draw = random.Random(seed)
    made = grammars_of(TOKENIZER, padding=3)
    asked = {
        str(number): (draw.choices(range(SIZE), k=draw.randint(1, 20)), drawn_params(draw))
        for number in range(60)
    }
    expected = {name: alone(made, own) for name, own in asked.items()}
    for module in (grammars, masks):
        monkeypatch.setattr(module, "SLOW_S", ByChance())
    company = Company(draw, asked)
    company.run(made)
    assert company.found.keys() == asked.keys()
    for name, output in company.found.items():
        wanted = expected[name]
        is_own_fault = output.error is None or isinstance(output.error, RowFaultError)
        if not is_own_fault:  # cancelled, or a step failed with it alone
            for own, other in zip(output.completions, wanted.completions, strict=False):
                assert own.token_ids == other.token_ids[: len(own.token_ids)]
            continue
        assert output.status is wanted.status, (output.error, wanted.error)
        if output.status is Status.FINISHED:
            assert said(output) == said(wanted), asked[name]
    assert min(company.num_preempted, company.num_retried, company.num_resumed) > 0
    statuses = Counter(output.status for output in expected.values())
    assert statuses[Status.FINISHED] > 40
