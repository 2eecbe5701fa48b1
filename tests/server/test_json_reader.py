"""Bodies are read within limits, like JSON's own decoder reads them, and refused by field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quire.server import bodies
from quire.server.bodies import BodyLimits, body_limits, parse_body, read_json
from quire.server.errors import OPENAI_ERRORS, ApiError
from quire.server.fields import Strict
from quire.server.schemas import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)

WIDE = BodyLimits(1 << 20, 1 << 20, 1 << 20)
BEYOND_SMALL = b" " * bodies.SMALL_BYTES  # makes any body one that is read value by value


def refusal(body: bytes, limits: BodyLimits = WIDE) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_json(body, limits)
    assert caught.value.status == 400
    assert caught.value.code in ("invalid_json", "invalid_body")
    assert len(OPENAI_ERRORS.body(caught.value)) < 2000
    return caught.value


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_what_is_json_is_read_as_the_decoder_reads_it(
    value: Any, indent: Any, escaped: bool
) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    for padding in (b"", BEYOND_SMALL):
        found = read_json(body + padding, WIDE)
        assert json.dumps(found) == json.dumps(value), "also the kinds of numbers"


ALPHABET = st.text(alphabet='[]{}:,"\\ 019.-eE+tfnulrasNI\n', max_size=30)


@given(ALPHABET)
def test_what_is_no_json_is_refused_by_both_readers(text: str) -> None:
    body = text.encode()
    outcomes = []
    for padding in (b"", BEYOND_SMALL):
        try:
            outcomes.append(json.dumps(read_json(body + padding, WIDE)))
        except ApiError as error:
            assert error.code in ("invalid_json", "invalid_body")
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]
    try:
        expected = json.dumps(json.loads(text))
    except ValueError:
        expected = "refused"
    if outcomes[0] != expected:  # stricter than the decoder: constants, infinity, double names
        assert outcomes[0] == "refused"


@pytest.mark.parametrize("padding", [b"", BEYOND_SMALL])
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"temperature": NaN}', "temperature", "Expecting value"),
        (b'{"a": [1, -Infinity]}', "a[1]", "Expecting value"),
        (b'{"a": {"b": 1e999999}}', "a.b", "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed", "a number of 5000 characters"),
        (b'{"seed": 1, "n": 2, "seed": 3}', "seed", "given twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "a[0].b", "given twice"),
        (b'{"' + b"k" * 5000 + b'": 1}', "k" * 200, "a name of 5000 characters"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", None, "nested more than 64 deep"),
        (b'{"a": ' + b'{"b":' * 70 + b"1" + b"}" * 70 + b"}", None, "nested more than 64 deep"),
        (b'{"a": [1,,2]}', "a[1]", "Expecting value"),
        (b'{"a": [,1]}', "a[0]", "Expecting value"),
        (b'{"a": [1,]}', "a[1]", "Expecting value"),
        (b'{"a": "half', "a", "Unterminated string"),
        (b'\xef\xbb\xbf{"a": 1}', None, "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), None, "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', None, "not UTF-8"),
        (b"", None, "Expecting value"),
        (b"{} {}", None, "Extra data"),
    ],
)
def test_what_is_wrong_is_told_with_its_field(
    body: bytes, param: str | None, message: str, padding: bytes
) -> None:
    error = refusal(body + padding)
    assert message in error.message
    if param is not None:
        assert error.param == param


# ---- limits


def test_limits_follow_from_the_context() -> None:
    short, long = (body_limits(context, MAX_PROMPTS, MAX_MESSAGES) for context in (512, 8192))
    assert short.max_items < long.max_items
    assert (short.max_length, long.max_length) == (MAX_MESSAGES, 8192)
    assert long.max_integers == MAX_PROMPTS * 8192
    assert body_limits(10**7, MAX_PROMPTS, MAX_MESSAGES).max_items == 1 << 18


@pytest.mark.parametrize("item", ['""', "[]", "{}", "null", "0.5", "-1", '{"":0}'])
def test_reading_stops_at_the_limit_of_items(item: str) -> None:
    """The end of the body is no JSON at all: it is never reached."""
    body = '{"prompt": [' + f"{item}," * 100_000 + "?"
    error = refusal(body.encode(), BodyLimits(1000, 10_000, 1000))
    assert "more than 1000 values" in error.message
    assert error.param is not None
    assert int(error.param.removeprefix("prompt[").partition("]")[0]) < 1000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": [' + b"[]," * 5000 + b"?", "prompt[1000]"),
        (b'{"prompt": [' + b"7," * 5000 + b'"",' * 5000 + b"?", "prompt[6000]"),
        (b'{"a": {' + b",".join(b'"%d":0' % n for n in range(5000)) + b"?", "a.999"),
    ],
)
def test_reading_stops_at_the_longest_list(body: bytes, param: str) -> None:
    error = refusal(body, BodyLimits(10_000, 1000, 10_000))
    assert "of more than 1000 values" in error.message
    assert error.param == param


def test_reading_stops_at_the_limit_of_integers() -> None:
    lists = "[" + "1234," * 10_000 + "1]"
    body = '{"prompt": [' + f"{lists}," * 20 + "?"
    error = refusal(body.encode(), BodyLimits(1000, 1000, 50_000))
    assert "more than 50000 integers" in error.message
    assert error.param == "prompt[5][0]", "five lists of ten thousand are within it"


def test_a_prompt_of_ids_is_read_in_slices_and_whole() -> None:
    ids = list(range(100_000))
    for text in (json.dumps(ids), json.dumps(ids, indent=1)):
        assert read_json(f'{{"prompt": {text}}}'.encode(), WIDE) == {"prompt": ids}


def test_reading_much_lets_other_threads_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    monkeypatch.setattr(bodies, "_pause", lambda: turns.append(1))
    read_json(json.dumps({"a": "b" * 100_000}).encode(), WIDE)
    assert not turns
    read_json(json.dumps([None] * 100_000).encode(), WIDE)
    assert len(turns) > 100
    turns.clear()
    read_json(json.dumps([1] * 1_000_000).encode(), WIDE)
    assert len(turns) > 100


# ---- schemas


def num_errors(schema: type[Strict], body: Any) -> int:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    return caught.value.error_count()


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": [""] * 5000}),
        (CompletionRequest, {"prompt": [[]] * 5000}),
        (CompletionRequest, {"prompt": [None] * 5000}),
        (CompletionRequest, {"prompt": ["a", *[0] * 5000]}),
        (CompletionRequest, {"prompt": [0, *["a"] * 5000]}),
        (CompletionRequest, {"prompt": [[-1] * 5000]}),
        (CompletionRequest, {"prompt": "x", "stop": [0] * 5000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1] * 5000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {f"x{n}": 0 for n in range(5000)}}),
        (CompletionRequest, {"prompt": "x"} | {f"x{n}": 0 for n in range(5000)}),
        (EmbeddingRequest, {"input": [""] * 5000}),
        (EmbeddingRequest, {"input": [0.5] * 5000}),
        (DetokenizeRequest, {"tokens": ["a"] * 50_000}),
        (ChatRequest, {"messages": [0] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * 5000}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [0] * 5000}]}),
        (ChatRequest, {"messages": [{}] * 4000}),
        (ChatRequest, {"messages": [{"role": "a"} | {f"x{n}": 0 for n in range(5000)}]}),
        (ChatRequest, {"messages": [{"role": "a", "content": "b"}], "tools": [0] * 5000}),
        (ChatRequest, {"messages": [{"role": "a", "content": "b"}], "modalities": [0] * 5000}),
    ],
)
def test_one_error_is_enough(schema: type[Strict], body: Any) -> None:
    assert num_errors(schema, body) <= 3  # a list that may also be a text is two kinds of error


def test_the_place_in_a_long_list_is_told() -> None:
    tokens: list[Any] = [1] * 50_000
    tokens[40_000] = "x"
    for schema, body in (
        (DetokenizeRequest, {"tokens": tokens}),
        (CompletionRequest, {"prompt": tokens}),
        (EmbeddingRequest, {"input": [[1], tokens]}),
    ):
        with pytest.raises(ApiError) as caught:
            parse_body(json.dumps(body).encode(), schema, WIDE)
        assert caught.value.param is not None
        assert caught.value.param.endswith("[40000]")
    tokens[40_000] = 2**31
    with pytest.raises(ApiError, match=r"tokens\[40000\] must be at most 2147483647"):
        parse_body(json.dumps({"tokens": tokens}).encode(), DetokenizeRequest, WIDE)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [5, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
    ],
)
def test_a_prompt_of_the_wrong_kind_is_refused_by_place(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(body).encode(), CompletionRequest, WIDE)
    assert caught.value.param == param
    assert "list of" not in str(caught.value.param)
