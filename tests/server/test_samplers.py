"""llama.cpp's samplers over HTTP: every field reaches the engine, or is refused by its name."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from quire.core.errors import RequestError
from quire.core.sampling import SamplingParams
from quire.server.bodies import BodyLimits, parse_body
from quire.server.errors import ApiError
from quire.server.sampler_fields import SamplerFields
from quire.server.schemas import CompletionRequest

LIMITS = BodyLimits(1 << 20, 1 << 20, 1 << 20)
VALUES: dict[str, Any] = {
    "repeat_penalty": 1.5,
    "repeat_last_n": 12,
    "typical_p": 0.5,
    "top_n_sigma": 2.0,
    "xtc_probability": 0.25,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", "###"],
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "samplers": ["top_k", "temperature"],
}


def params_of(**given: Any) -> SamplingParams:
    body = CompletionRequest.model_validate({"prompt": "x", **given})
    return body.sampling(9, None, {})


@pytest.mark.parametrize("name", SamplerFields.model_fields)
def test_every_field_reaches_the_engine(name: str) -> None:
    usual, found = params_of(), params_of(**{name: VALUES[name]})
    own = {"repeat_penalty": "repetition_penalty"}.get(name, name)
    changed = [
        f.name
        for f in fields(SamplingParams)
        if f.init and getattr(usual, f.name) != getattr(found, f.name)
    ]
    assert changed == [own]
    wanted = VALUES[name]
    assert getattr(found, own) == (tuple(wanted) if isinstance(wanted, list) else wanted)
    assert replace(found, **{own: getattr(usual, own)}) == usual


def test_letters_do_as_well() -> None:
    assert params_of(samplers="kt").samplers == ("top_k", "temperature")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("samplers", ["mirostat"], "which quire does not have"),
        ("samplers", "kq", "'q'"),
        ("mirostat", 2, "no function of the row"),
        ("adaptive_target", 0.5, "no function of the row"),
        ("typical_p", 0, "above 0"),
        ("xtc_probability", 2, "at most 1"),
        ("dry_sequence_breakers", ["x" * 41], ""),
        ("dry_penalty_last_n", -2, ""),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(field: str, value: Any, words: str) -> None:
    data = json.dumps({"prompt": "x", field: value}).encode()
    with pytest.raises((ApiError, RequestError)) as caught:
        parse_body(data, CompletionRequest, LIMITS).sampling(9, None, {})
    assert isinstance(caught.value, ApiError | RequestError)
    assert field in str(caught.value.param)
    assert words in str(caught.value)


def test_two_names_of_one_penalty_must_agree() -> None:
    assert params_of(repeat_penalty=1.5, repetition_penalty=1.5).repetition_penalty == 1.5
    with pytest.raises(RequestError, match="give one of them") as caught:
        params_of(repeat_penalty=1.5, repetition_penalty=1.25)
    assert caught.value.param == "repeat_penalty"
