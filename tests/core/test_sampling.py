"""SamplingParams: what is refused, with the value and the limit; what users may write.

Philox against its published vectors, and draws that depend on all they are said to depend on.
"""

import math
from dataclasses import FrozenInstanceError, fields
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import RequestError
from quire.core.sampling import (
    CONSTRAINT_KINDS,
    MAX_COMPLETIONS,
    MAX_CONSTRAINT_LENGTH,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    SWITCHES,
    Constraint,
    SamplingParams,
    draw_bits,
    new_seed,
    philox,
)

INTEGERS = ["max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs"]
INTEGERS += ["repeat_last_n", "dry_allowed_length", "dry_penalty_last_n"]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dynatemp_range",
    "dynatemp_exponent",
]
FIELDS = [field.name for field in fields(SamplingParams) if field.init]


def refusal(**values: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_tokens", -1, "at least 0"),
        ("min_tokens", -1, "at least 0"),
        ("top_k", -2, "at least 0"),
        ("n", 0, "from 1 to 128"),
        ("n", MAX_COMPLETIONS + 1, f"from 1 to {MAX_COMPLETIONS}"),
        ("n", 10**6, f"from 1 to {MAX_COMPLETIONS}"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", 100.5, "from 0 to 100"),
        ("temperature", math.inf, "from 0 to 100"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0 and at most 100"),
        ("repetition_penalty", -1.0, "above 0 and at most 100"),
        ("presence_penalty", -2.5, "from -2 to 2"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", 2.5, "from -2 to 2"),
        ("seed", -(2**63) - 1, f"from {-(2**63)} to {2**64 - 1}"),
        ("seed", 2**64, f"from {-(2**63)} to {2**64 - 1}"),
        ("logprobs", -1, f"from 0 to {MAX_LOGPROBS}"),
        ("logprobs", MAX_LOGPROBS + 1, f"from 0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", MAX_LOGPROBS + 1, f"from 0 to {MAX_LOGPROBS}"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_limit(
    name: str, value: float, limit: str
) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert limit in message
    assert str(value) in message


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1},
        {"max_tokens": 3, "min_tokens": 3},
        {"max_tokens": None, "min_tokens": 100},
        {"n": MAX_COMPLETIONS},
        {"temperature": 0.0},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logprobs": MAX_LOGPROBS, "prompt_logprobs": 0},
        {"logit_bias": {0: -100.0, 5: 100.0}},
        {"stop": ["x"] * MAX_STOP_STRINGS},
    ],
)
def test_a_value_at_its_limit_is_taken(values: dict[str, Any]) -> None:
    SamplingParams(**values)


@pytest.mark.parametrize("name", NUMBERS)
def test_nan_is_refused_wherever_a_number_is_meant(name: str) -> None:
    message = refusal(**{name: math.nan})
    assert name in message
    assert "nan" in message


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_that_no_float_can_hold_is_refused_like_any_other(name: str) -> None:
    assert name in refusal(**{name: 10**400})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_only_an_integer_is_taken_for_an_integer(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert "integer" in message
    assert repr(value) in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "0.5", None])
def test_only_a_number_is_taken_for_a_number(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert "number" in message
    assert repr(value) in message


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [1, "yes", None])
def test_only_true_and_false_are_taken_for_a_switch(name: str, value: object) -> None:
    assert name in refusal(**{name: value})


@pytest.mark.parametrize(
    ("bias", "part"),
    [
        ([(1, 2.0)], "must map"),
        ({-1: 0.0}, "logit_bias token"),
        ({"1": 0.0}, "logit_bias token"),
        ({True: 0.0}, "logit_bias token"),
        ({4: 100.5}, "logit_bias[4] must be from -100 to 100, got 100.5"),
        ({4: math.nan}, "logit_bias[4]"),
        ({4: "1"}, "logit_bias[4]"),
    ],
)
def test_a_bias_names_the_token_it_cannot_be_used_for(bias: Any, part: str) -> None:
    assert part in refusal(logit_bias=bias)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"stop": [""]}, "non-empty"),
        ({"stop": [3]}, "got 3"),
        ({"stop": 3}, "stop must be a list, got 3"),
        ({"stop": ["x"] * 17}, "at most 16 strings, got 17"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
    ],
)
def test_stops_that_make_no_sense_are_refused(values: dict[str, Any], part: str) -> None:
    assert part in refusal(**values)


def test_a_constraint_names_its_kinds() -> None:
    with pytest.raises(RequestError) as caught:
        Constraint("yaml")
    assert "yaml" in str(caught.value)
    assert all(kind in str(caught.value) for kind in CONSTRAINT_KINDS)


class Model:
    """Looks like a pydantic model class, or like its TypeAdapter, to who asks for a schema."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]:
        return {"type": "string"}


class Adapter:
    def json_schema(self) -> dict[str, object]:
        return {"type": "string"}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "string"},
        ' {"type" :"string"}',
        Model,
        Adapter(),
        MappingProxyType({"type": "string"}),
    ],
)
def test_a_json_schema_comes_in_any_form(given: object) -> None:
    wanted = Constraint("json_schema", '{"type": "string"}')
    assert SamplingParams.from_mapping({"structured": given}).structured == wanted


def test_other_constraints_are_written_by_name() -> None:
    assert SamplingParams(structured=["a", "ü"]).structured == Constraint.choice(("a", "ü"))  # type: ignore[arg-type]
    assert Constraint.choice(["a", "ü"]).value == '["a", "ü"]'
    for made, kind in (
        (Constraint.regex("a+"), "regex"),
        (Constraint.grammar("start: A"), "grammar"),
        (Constraint.json_object(), "json_object"),
    ):
        assert SamplingParams(structured=made).structured is made
        assert made.kind == kind


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("a+", "for a pattern write Constraint.regex"),
        ("[1]", "a JSON schema is an object, got [1]"),
        (5, "a JSON schema is an object, got 5"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        ({"a": {1, 2}}, "cannot be written as JSON"),
        ([], "a choice is a list of non-empty strings"),
        (["a", ""], "a choice is a list of non-empty strings"),
        (["a", 1], "a choice is a list of non-empty strings"),
        ({"const": "a" * MAX_CONSTRAINT_LENGTH}, "structured (json_schema) has 524301 characters"),
        ("[" * 100_000, "structured is no JSON schema"),
    ],
)
def test_what_is_no_constraint_is_refused(given: object, part: str) -> None:
    assert part in refusal(structured=given)


def test_a_constraint_holds_text() -> None:
    with pytest.raises(RequestError, match="value is a string, got 5"):
        Constraint("regex", 5)  # type: ignore[arg-type]


def test_what_is_put_together_of_tools_is_named_by_them() -> None:
    with pytest.raises(
        RequestError, match="schemas of tools and answer have 524289 char"
    ) as caught:
        Constraint("answer", "a" * (MAX_CONSTRAINT_LENGTH + 1))
    assert caught.value.param == "tools"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(RequestError, match="'best_of'"):
        SamplingParams.from_mapping({"max_tokens": 3, "best_of": 2})


def test_a_mapping_gives_what_the_constructor_gives() -> None:
    values = {"max_tokens": 3, "stop": ["a"], "logit_bias": {3: 1.0}, "temperature": 0.5}
    assert SamplingParams.from_mapping(values) == SamplingParams(**values)  # type: ignore[arg-type]


def test_the_forms_users_write_are_brought_to_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1).top_k == 0


def test_a_bias_changed_later_by_its_owner_does_not_change_the_request() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = -2.0
    assert params.logit_bias == {1: 2.0}


def test_params_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"frequency_penalty": -0.1, "repeat_last_n": 0}, False),
        ({"frequency_penalty": -0.1, "samplers": ["top_k"]}, False),
        ({"dry_multiplier": 0.5}, True),
        ({"dry_multiplier": 0.5, "dry_penalty_last_n": 0}, False),
        ({"typical_p": 0.5, "xtc_probability": 0.5, "top_n_sigma": 1.0}, False),
    ],
)
def test_history_is_needed_by_the_penalties_and_dry_alone(
    values: dict[str, Any], needs: bool
) -> None:
    assert SamplingParams(**values).needs_history is needs


def test_a_minimum_above_the_maximum_is_refused() -> None:
    assert refusal(max_tokens=16, min_tokens=17) == "min_tokens must be from 0 to 16, got 17"


def test_every_field_is_covered_by_these_tests() -> None:
    tested = {*INTEGERS, *NUMBERS, "logit_bias", "stop", "stop_token_ids", "structured"}
    tested |= {*SWITCHES}
    tested |= {"allowed_token_ids", "bad_words"}  # tests/llm/test_filters.py
    tested |= {"spelled_token_ids", "thinking"}  # tests/llm/test_chats.py
    tested |= {"samplers", "dry_sequence_breakers"}
    assert set(FIELDS) == tested


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2)), max_size=20),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.floats(), max_size=3),
)


@pytest.mark.parametrize("name", FIELDS)
@given(value=JUNK)
def test_a_refusal_carries_the_parameter(name: str, value: object) -> None:
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except RequestError as error:
        assert error.param == name


def test_a_refusal_of_an_unknown_field_carries_its_name() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_mapping({"best_of": 2})
    assert caught.value.param == "best_of"
    with pytest.raises(RequestError) as caught:
        Constraint("yaml")
    assert caught.value.param == "structured"


# ---- samplers and their order


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("edskypmxt", "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature"),
        (["penalties", "dry", "top_n_sigma", "top_k"], "penalties dry top_n_sigma top_k"),
        (["Top-K", "topp", "minp", "TEMP", "nucleus"], "top_k top_p min_p temperature top_p"),
        (["typ", "typical_p", "typ-p", "typp"], "typ_p typ_p typ_p typ_p"),
        ("top_k;temperature", "top_k temperature"),
        ("", ""),
        ([], ""),
    ],
)
def test_samplers_have_llama_cpps_names_and_letters(given: Any, names: str) -> None:
    assert SamplingParams(samplers=given).samplers == tuple(names.split())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("kz", "'z'; a string is of the letters e (penalties)"),
        (["top_k", "top_q"], "'top_q'; there are penalties, dry"),
        ("a", "'adaptive_p', which quire does not have: what it does depends on tokens"),
        (["mirostat"], "'mirostat', which quire does not have"),
        (["infill"], "quire has no infill sampler"),
        (7, "must be a list of names"),
        ([7], "must be a list of names"),
        ("k" * 33, "at most 32"),
    ],
)
def test_other_samplers_are_refused_by_name(given: Any, words: str) -> None:
    assert words in refusal(samplers=given)


def test_breakers_are_few_short_texts() -> None:
    params = SamplingParams.from_mapping({"dry_sequence_breakers": "ab"})
    assert params.dry_sequence_breakers == ("ab",)
    assert "at most 32" in refusal(dry_sequence_breakers=["a"] * 33)
    assert "40 bytes" in refusal(dry_sequence_breakers=["a" * 41])
    assert "40 bytes" in refusal(dry_sequence_breakers=["\u20ac" * 14])
    assert "non-empty" in refusal(dry_sequence_breakers=[""])


def test_the_order_is_of_the_samplers_that_change_something() -> None:
    assert SamplingParams().order == ()
    given: dict[str, Any] = {
        "typical_p": 0.5,
        "top_k": 4,
        "temperature": 0.5,
        "presence_penalty": 1.0,
    }
    assert SamplingParams(**given).order == ("penalties", "temperature", "top_k", "typ_p")
    named = SamplingParams.from_mapping({**given, "samplers": "kytkx"})
    assert named.order == ("top_k", "typ_p", "temperature", "top_k")
    assert SamplingParams(xtc_probability=0.5, xtc_threshold=0.51).order == ()


def test_a_row_is_plain_without_llama_cpps_cuts_and_orders() -> None:
    plain = {"min_p": 0.1, "top_k": 4, "top_p": 0.5, "temperature": 0.5, "dry_multiplier": 1.0}
    assert SamplingParams.from_mapping({**plain, "repeat_last_n": 3}).is_plain
    for name, value in {
        "typical_p": 0.5,
        "top_n_sigma": 1.0,
        "xtc_probability": 0.1,
        "dynatemp_range": 0.1,
        "samplers": "k",
    }.items():
        assert not SamplingParams.from_mapping({**plain, name: value}).is_plain


def test_zero_is_greedy_only_where_the_temperature_is_applied() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=0.0, samplers=("top_k", "temperature")).is_greedy
    assert not SamplingParams(temperature=0.0, samplers=("top_k",)).is_greedy
    assert not SamplingParams(temperature=0.0, dynatemp_range=0.5).is_greedy


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({"repetition_penalty": 2.0}, None),
        ({"repetition_penalty": 2.0, "repeat_last_n": -1}, None),
        ({"repetition_penalty": 2.0, "repeat_last_n": 5}, 5),
        ({"dry_multiplier": 1.0}, 64),
        ({"dry_multiplier": 1.0, "dry_penalty_last_n": -1}, None),
        ({"dry_multiplier": 1.0, "repetition_penalty": 2.0, "repeat_last_n": 70}, 70),
        ({"dry_multiplier": 1.0, "presence_penalty": 2.0}, None),
    ],
)
def test_the_history_is_as_long_as_its_longest_reader(
    values: dict[str, Any], length: int | None
) -> None:
    assert SamplingParams(**values).history_length == length


# ---- random bits


Words4 = tuple[int, int, int, int]
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_vectors_of_random123(
    counter: Words4, key: tuple[int, int], expected: Words4
) -> None:
    assert philox(counter, key) == expected


def test_a_draw_is_the_low_words_of_philox_at_its_place() -> None:
    low, high, _, _ = philox((7, 1, 3, 0), (0x89ABCDEF, 0x01234567))
    assert draw_bits(0x0123456789ABCDEF, 3, (1 << 32) + 7) == (high << 32) | low


@pytest.mark.parametrize("part", ["seed", "index", "position"])
def test_a_draw_depends_on(part: str) -> None:
    place = {"seed": 5, "index": 1, "position": 9}
    drawn = {draw_bits(**{**place, part: value}) for value in range(100)}
    assert len(drawn) == 100


def test_both_halves_of_the_seed_count() -> None:
    assert draw_bits(1, 0, 0) != draw_bits(1 + (1 << 32), 0, 0) != draw_bits(1 << 32, 0, 0)


def test_the_same_place_gives_the_same_draw() -> None:
    assert draw_bits(5, 1, 9) == draw_bits(5, 1, 9)


def test_new_seeds_differ_and_fit_64_bits() -> None:
    seeds = {new_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
