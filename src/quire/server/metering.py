"""Meter: what a call asks of the engine is admitted before it is queued, and settled at its end.

    read the body, tokenise -> Meter.admit(key, demand) -> engine -> Admission.settle(outputs)

`settle` is called exactly once for every admission, whatever became of the call: with the outputs
of all its requests, or with none where the engine refused them. A request that was cut off has an
output too, with the tokens it got.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.request import RequestOutput
from quire.core.sampling import SamplingParams
from quire.llm.prompts import Prepared
from quire.server.keys import ApiKey


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a call can use."""

    num_prompts: int
    num_prompt_tokens: int
    max_new_tokens: int  # of all completions of all prompts


class Admission(Protocol):
    """What a call was let in with."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the answer says of the key's limits."""

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        """Replace the demand by what was really used."""


class Meter(Protocol):
    """Decides whether a key may have what it asks for; raises an ApiError (429) where not."""

    def admit(self, key: ApiKey | None, demand: Demand) -> Admission: ...


def demand_of(
    prompts: Iterable[tuple[Prepared, SamplingParams]], *, pooling: bool = False
) -> Demand:
    """`pooling`: prompts that are computed for their states, without new tokens."""
    listed = list(prompts)
    return Demand(
        len(listed),
        sum(len(prompt.tokens) for prompt, _ in listed),
        0 if pooling else sum(params.max_tokens * params.n for _, params in listed),
    )
