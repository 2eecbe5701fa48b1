"""What tests of the KV cache's groups share: requests under an engine whose executor writes over
every block that nobody uses."""

from collections.abc import Sequence
from typing import Any, Protocol

from quire.core.config import EngineConfig
from quire.core.plan import Capacity
from quire.core.request import Ended, RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine


class PoisonedExecutor(Protocol):
    """An executor that fills the empty blocks of its engine's pool with NaN before each step."""

    engine: Engine | None
    capacity: Capacity


Requests = Sequence[tuple[tuple[int, ...], SamplingParams]]


def outputs(executor: PoisonedExecutor, config: EngineConfig, requests: Requests) -> list[object]:
    """Of each request, run together: tokens, their log-probabilities and those of its prompt."""
    runnable: Any = executor
    engine = executor.engine = Engine(runnable, config)
    ids = [engine.add_request(prompt, params).id for prompt, params in requests]
    ended: dict[str, RequestOutput] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Ended):
                ended[event.request_id] = event.output
        engine.check_integrity()
    found = [ended[request_id] for request_id in ids]
    assert all(output.error is None for output in found), [output.error for output in found]
    return [
        ([(c.token_ids, c.logprobs) for c in one.completions], one.prompt_logprobs) for one in found
    ]
