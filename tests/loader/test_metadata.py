"""Typed getters: what they give, and how they name what is wrong."""

import math
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelFileError
from quire.loader.metadata import Lazy, Metadata

FIELDS: dict[str, object] = {
    "integer": 7,
    "float": 0.5,
    "true": True,
    "text": "hello",
    "texts": ("a", "b"),
    "list": [1, 2],
    "floats": np.array([0.5, -math.inf], dtype=np.float32),
    "counts": np.array([1, 2], dtype=np.uint16),
    "object": {"inner": 1},
    "null": None,
    "huge": 10**400,
    "nan": math.nan,
}


@pytest.fixture
def metadata() -> Metadata:
    return Metadata("m.gguf", FIELDS)


def test_getters_give_what_is_there(metadata: Metadata) -> None:
    assert metadata.integer("integer", low=7, high=7) == 7
    assert metadata.number("float") == 0.5
    assert metadata.number("integer") == 7.0
    assert type(metadata.number("integer")) is float
    assert metadata.boolean("true") is True
    assert metadata.text("text") == "hello"
    assert metadata.texts("texts") == ("a", "b")
    assert metadata.integers("list") == (1, 2)
    assert metadata.integers("counts") == (1, 2)
    assert metadata.numbers("floats") == (0.5, -math.inf)
    assert metadata.numbers("list") == (1.0, 2.0)
    assert metadata.section("object").integer("inner") == 1


def test_defaults_stand_in_for_missing_fields_only(metadata: Metadata) -> None:
    assert metadata.integer("absent", 3) == 3
    assert metadata.number("null", 1.5) == 1.5
    assert metadata.boolean("absent", False) is False
    assert metadata.text("absent", "") == ""
    assert metadata.integer("integer", 3) == 7
    with pytest.raises(ModelFileError, match=r"m.gguf: text must be an integer, got 'hello'"):
        metadata.integer("text", 3)


@pytest.mark.parametrize(
    ("getter", "key", "message"),
    [
        ("integer", "absent", "m.gguf: absent is missing"),
        ("integer", "null", "m.gguf: null is missing"),
        ("integer", "true", "true must be an integer, got True"),
        ("integer", "float", "float must be an integer, got 0.5"),
        ("number", "true", "true must be a finite number, got True"),
        ("number", "nan", "nan must be a finite number, got nan"),
        ("number", "huge", "huge must be a finite number, got 1000"),
        ("boolean", "integer", "integer must be true or false, got 7"),
        ("text", "integer", "integer must be a string, got 7"),
        ("texts", "text", "text must be an array of strings, got 'hello'"),
        ("texts", "list", r"list must be an array of strings, got \[1, 2\]"),
        ("integers", "floats", r"floats must be an array of integers, got \[0.5, -inf\]"),
        ("integers", "integer", "integer must be an array of integers, got 7"),
        ("numbers", "texts", "texts must be an array of numbers"),
        ("section", "text", "text must be an object, got 'hello'"),
    ],
)
def test_what_is_wrong_is_named(metadata: Metadata, getter: str, key: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        getattr(metadata, getter)(key)


def test_bounds_are_named(metadata: Metadata) -> None:
    with pytest.raises(ModelFileError, match="integer must be an integer from 1 to 6, got 7"):
        metadata.integer("integer", low=1, high=6)
    with pytest.raises(ModelFileError, match="integer must be an integer of at least 8, got 7"):
        metadata.integer("integer", low=8)
    with pytest.raises(ModelFileError, match=r"float must be a finite number of at most 0.1, got"):
        metadata.number("float", high=0.1)


def test_fields_inside_a_section_are_named_with_it(metadata: Metadata) -> None:
    with pytest.raises(ModelFileError, match=r"m.gguf: object: absent is missing"):
        metadata.section("object").integer("absent")


def test_numbers_too_large_for_a_float_are_refused() -> None:
    metadata = Metadata("config.json", {"numbers": [1, 10**400]})
    with pytest.raises(ModelFileError, match="numbers must be an array of numbers that a float"):
        metadata.numbers("numbers")


def test_a_long_value_is_shortened_in_errors() -> None:
    metadata = Metadata("config.json", {"text": "x" * 1_000_000})
    with pytest.raises(ModelFileError) as caught:
        metadata.integer("text")
    assert len(str(caught.value)) < 200


def test_lazy_values_are_decoded_when_they_are_asked_for() -> None:
    calls: list[int] = []

    def decode() -> Any:
        calls.append(1)
        return "decoded"

    metadata = Metadata("m.gguf", {"lazy": Lazy(decode)})
    assert "lazy" in metadata
    assert list(metadata) == ["lazy"]
    assert len(metadata) == 1
    assert not calls
    assert metadata.text("lazy") == "decoded"
    assert len(calls) == 1
