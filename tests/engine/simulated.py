"""What the engine's tests share: an engine over a fake executor, and solo runs to compare with."""

from collections.abc import Iterable
from functools import lru_cache

from quire.core.config import EngineConfig
from quire.core.request import Ended, Event, RequestOutput
from quire.core.sampling import SamplingParams
from quire.core.windows import NO_WINDOWS, Windows
from quire.engine import Engine
from quire.executors.fake import FakeExecutor

END_TOKEN = 7


def new_engine(executor: FakeExecutor | None = None, **settings: object) -> Engine:
    """An engine on the executor's virtual clock."""
    executor = executor or FakeExecutor()
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return Engine(executor, config, clock=executor.clock, end_token_ids=[END_TOKEN])


def finish(engine: Engine, *, check: bool = True) -> dict[str, RequestOutput]:
    """Run to the end; the outputs by request id. Fails if a request ends twice."""
    return outputs(_events(engine, check=check))


def _events(engine: Engine, *, check: bool) -> Iterable[Event]:
    while engine.has_work:
        yield from engine.step()
        if check:
            engine.check_integrity()
        engine.sleep_until_due()


def outputs(events: Iterable[Event]) -> dict[str, RequestOutput]:
    ended: dict[str, RequestOutput] = {}
    for event in events:
        if isinstance(event, Ended):
            assert event.request_id not in ended, f"{event.request_id} ended twice"
            ended[event.request_id] = event.output
    return ended


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


def solo(
    prompt: Iterable[int],
    params: SamplingParams,
    *,
    vocabulary_size: int = 1000,
    windows: Windows = NO_WINDOWS,
    keeps_states: bool = False,
) -> list[list[int]]:
    """The tokens this request gets when it has the engine to itself and room for all of it, also
    for what is out of every window; states are computed from all tokens, without slots."""
    found = _solo(tuple(prompt), _Params(params), vocabulary_size, windows, keeps_states)
    return [list(tokens) for tokens in found]


class _Params:
    """SamplingParams as a cache key: they hold a mapping, which does not hash."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __hash__(self) -> int:
        return hash(repr(self.params))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Params) and other.params == self.params


@lru_cache(maxsize=20_000)
def _solo(
    prompt: tuple[int, ...],
    key: _Params,
    vocabulary_size: int,
    windows: Windows,
    keeps_states: bool,
) -> tuple[tuple[int, ...], ...]:
    executor = FakeExecutor(
        num_blocks=512,
        block_size=64,
        vocabulary_size=vocabulary_size,
        windows=windows,
        has_groups=False,
        keeps_states=keeps_states,
    )
    engine = new_engine(executor, max_step_tokens=4096, prefix_reuse=False, plan_ahead=False)
    engine.add_request(prompt, key.params)
    (output,) = finish(engine, check=False).values()
    assert output.error is None, output.error
    return tuple(tuple(tokens) for tokens in tokens_of(output))
