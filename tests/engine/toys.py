"""Stand-ins for the engine's tests: a detokenizer, a grammar, scripts played in virtual time."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.engine.simulated import END_TOKEN

from quire.core.config import EngineConfig
from quire.core.plan import SequencePlan
from quire.core.request import Ended, Event, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine import Engine
from quire.engine.sequence import Grammar, MakeBreakers, MakeDetokenizer
from quire.executors.fake import FakeExecutor

Script = Sequence[tuple[float, Callable[[], object]]]


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    """So many tokens, whatever they are."""
    values = {"temperature": 0.0, "ignore_eos": True, **more}
    return SamplingParams.from_mapping({"max_tokens": max_tokens, **values})


def play(engine: Engine, script: Script) -> list[Event]:
    """Run the engine to its end, doing each thing of the script at its time."""
    coming = sorted(script, key=lambda entry: entry[0])
    events: list[Event] = []
    while coming or engine.has_work:
        while coming and coming[0][0] <= engine.clock.now():
            coming.pop(0)[1]()
        events.extend(engine.step())
        engine.check_integrity()
        idle_until = engine.wake_at
        if idle_until is not None:
            until = min(idle_until, coming[0][0] if coming else idle_until)
            if until < float("inf"):
                engine.clock.sleep(until - engine.clock.now())
    return events


def run_until(
    engine: Engine, is_reached: Callable[[], bool], most_steps: int = 1000
) -> list[Event]:
    """Step until something holds."""
    events: list[Event] = []
    for _ in range(most_steps):
        if is_reached():
            return events
        events.extend(engine.step())
        engine.check_integrity()
        engine.sleep_until_due()
    raise AssertionError(f"not reached within {most_steps} steps")


def ended(events: Iterable[Event]) -> list[RequestOutput]:
    return [event.output for event in events if isinstance(event, Ended)]


class Letters:
    """A detokenizer that spells tokens as told; '·' for the others."""

    def __init__(self, spelling: Mapping[int, str]) -> None:
        self._spelling = spelling

    def add(self, token: int) -> str:
        return self._spelling.get(token, "·")

    def flush(self) -> str:
        return ""


class Multiples:
    """A grammar of so many multiples of a number, after which nothing may follow."""

    def __init__(self, of: int, count: int, vocabulary_size: int = 1000) -> None:
        self._left = count
        self._of = of
        self.mask = mask(range(0, vocabulary_size, of), vocabulary_size)

    is_ready = True
    is_slow = False
    failure: str | None = None

    def allowed(self) -> bytes:
        return self.mask

    def accept(self, token: int) -> None:
        assert token % self._of == 0
        self._left -= 1

    @property
    def is_complete(self) -> bool:
        return self._left == 0


def mask(tokens: Iterable[int], vocabulary_size: int) -> bytes:
    bits = bytearray(-(-vocabulary_size // 8))
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def toy_engine(
    executor: FakeExecutor,
    *,
    make_detokenizer: MakeDetokenizer | None = None,
    make_grammar: Callable[[SamplingParams], Grammar] | None = None,
    start_masks: Callable[[bool], None] | None = None,
    make_breakers: MakeBreakers | None = None,
    **settings: object,
) -> Engine:
    return Engine(
        executor,
        EngineConfig(**settings),  # type: ignore[arg-type]
        clock=executor.clock,
        end_token_ids=[END_TOKEN],
        make_detokenizer=make_detokenizer,
        make_grammar=make_grammar,
        make_breakers=make_breakers,
        start_masks=start_masks,
    )


def rows_of(executor: FakeExecutor, sequence_id: int) -> list[SequencePlan]:
    """Every row that was planned for a sequence, where the executor keeps plans."""
    return [
        row for plan in executor.plans for row in plan.sequences if row.sequence_id == sequence_id
    ]
