"""What templates are given travels as JSON, in parts that hold no other thread up."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenizer.template_worker import decoded, encoded

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(VALUES)
def test_the_parts_are_the_json_of_the_whole(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encoded(value) == whole.encode("utf-8", "surrogatepass")


def test_half_a_character_goes_through() -> None:
    assert decoded(encoded({"a": ["\ud800"]})) == {"a": ["\ud800"]}


def test_no_call_of_the_encoder_writes_more_than_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lets no other thread run meanwhile: 4096 messages at once were 50 ms of a still server."""
    sizes: list[int] = []
    dumps = json.dumps

    def counted(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", counted)
    encoded({"messages": [{"role": "user", "content": "x" * 900}] * 4096})
    assert len(sizes) > 4096
    assert max(sizes) < 1000
