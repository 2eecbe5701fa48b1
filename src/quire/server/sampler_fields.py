"""llama.cpp's fields for its samplers, which chat and plain completions share."""

from typing import Annotated, Any

from pydantic import Field

from quire.core.errors import RequestError
from quire.core.samplers import MAX_SAMPLERS
from quire.core.sampling import MAX_BREAKER_BYTES, MAX_SEQUENCE_BREAKERS
from quire.server.fields import Strict

_MOST = 2**31 - 1
_BreakerText = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_BYTES)]
_SamplerName = Annotated[str, Field(max_length=32)]


class SamplerFields(Strict):
    """Their names, meanings and defaults are llama.cpp's; docs/guide/sampling.md has formulas."""

    repeat_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="llama.cpp's name of repetition_penalty"
    )
    repeat_last_n: int | None = Field(
        default=None,
        ge=-1,
        le=_MOST,
        description="all penalties look at the last N tokens of prompt and answer; -1: all of "
        "them, 0: no penalties",
    )
    typical_p: float | None = Field(
        default=None, gt=0, le=1, description="keep the most typical tokens that add up to this"
    )
    top_n_sigma: float | None = Field(
        default=None,
        ge=-1,
        le=1000,
        description="keep logits within so many standard deviations of the greatest; 0 or -1: all",
    )
    xtc_probability: float | None = Field(
        default=None, ge=0, le=1, description="how often XTC leaves out the likeliest tokens"
    )
    xtc_threshold: float | None = Field(
        default=None, ge=0, le=1, description="the chance from which XTC takes a token for likely"
    )
    dry_multiplier: float | None = Field(
        default=None, ge=0, le=100, description="DRY lowers tokens that go on with a repetition"
    )
    dry_base: float | None = Field(
        default=None, ge=1, le=100, description="to the power of the repetition's length"
    )
    dry_allowed_length: int | None = Field(
        default=None, ge=0, le=_MOST, description="repetitions shorter than this are let be"
    )
    dry_penalty_last_n: int | None = Field(
        default=None, ge=-1, le=_MOST, description="look at so many tokens; -1: all, 0: no DRY"
    )
    dry_sequence_breakers: (
        Annotated[list[_BreakerText], Field(max_length=MAX_SEQUENCE_BREAKERS, fail_fast=True)]
        | None
    ) = Field(default=None, description="texts over which no repetition reaches")
    dynatemp_range: float | None = Field(
        default=None, ge=0, le=100, description="the temperature moves so far by the entropy"
    )
    dynatemp_exponent: float | None = Field(
        default=None, ge=0, le=100, description="the power that the entropy's share is taken to"
    )
    samplers: (
        _SamplerName
        | Annotated[list[_SamplerName], Field(max_length=MAX_SAMPLERS, fail_fast=True)]
        | None
    ) = Field(
        default=None,
        description="the samplers to apply, in this order: names, or their letters as a string",
        examples=["edskypmxt", ["top_k", "temperature"]],
    )

    def sampler_options(self, repetition_penalty: float | None) -> dict[str, Any]:
        """As fields of SamplingParams, those that were given."""
        given: dict[str, Any] = {
            name: value
            for name in SamplerFields.model_fields
            if (value := getattr(self, name)) is not None
        }
        penalty = given.pop("repeat_penalty", None)
        if penalty is not None:
            if repetition_penalty not in (None, penalty):
                message = f"repetition_penalty is {repetition_penalty} and repeat_penalty {penalty}"
                raise RequestError(f"{message}: give one of them", param="repeat_penalty")
            given["repetition_penalty"] = penalty
        return given
