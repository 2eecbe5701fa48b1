"""A row has one schema: what depends on it beyond Python's names refuses another at import."""

import importlib.util
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from tests.executors.cpu.running import opened
from tests.executors.reference.plans import logits, row
from tests.fixture_files import fixture_file

from quire.core import plan
from quire.core.plan import SequencePlan, TokenLogprob, Want
from quire.engine import step
from quire.executors.cpu.native import native

FIELDS = SequencePlan._fields
REORDERED = (FIELDS[1], FIELDS[0], *reversed(FIELDS[2:]))


class SwappedWant(IntEnum):
    SAMPLE = 0
    NOTHING = 1
    LOGITS = 2
    POOLED = 3


class LongerWant(IntEnum):
    NOTHING = 0
    SAMPLE = 1
    LOGITS = 2
    POOLED = 3
    SCORES = 4


def row_type(names: tuple[str, ...]) -> Any:
    return NamedTuple("SequencePlan", [(name, Any) for name in names])


@pytest.fixture
def rebound() -> Iterator[None]:
    """Whatever a test binds, native code reads the real rows afterwards."""
    yield
    native.bind_plan_types(SequencePlan, Want, TokenLogprob)


def imported_anew(module: ModuleType) -> None:
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location("anew", module.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("names", [(*FIELDS, "adapter"), FIELDS[:-1], REORDERED], ids=len)
def test_the_fast_path_of_decodes_refuses_other_fields_when_it_is_imported(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SequencePlan", row_type(names))
    with pytest.raises(TypeError, match=rf"rows are made by position .* are {', '.join(names)}$"):
        imported_anew(step)


def test_native_code_refuses_a_field_that_it_does_not_know(rebound: None) -> None:
    with pytest.raises(TypeError, match='does not know the field "adapter" of a row: change'):
        native.bind_plan_types(row_type((*FIELDS, "adapter")), Want, TokenLogprob)


@pytest.mark.parametrize("missing", FIELDS)
def test_native_code_refuses_rows_without_a_field(missing: str, rebound: None) -> None:
    names = tuple(name for name in FIELDS if name != missing)
    with pytest.raises(TypeError, match="knows 13 fields of a row, but it has 12: change"):
        native.bind_plan_types(row_type(names), Want, TokenLogprob)


def test_native_code_refuses_another_want_or_score(rebound: None) -> None:
    for want in (SwappedWant, LongerWant):
        with pytest.raises(TypeError, match="another Want"):
            native.bind_plan_types(SequencePlan, want, TokenLogprob)
    with pytest.raises(TypeError, match="other fields of TokenLogprob"):
        native.bind_plan_types(SequencePlan, Want, row_type(("token", "rank", "logprob", "top")))


def test_native_code_reads_reordered_rows_by_name(rebound: None) -> None:
    reordered = row_type(REORDERED)
    asked = row((5, 6, 7), (2, 0))
    with opened(fixture_file("tiny/Q4_0.gguf")) as executor:
        expected = logits(executor, asked)
        native.bind_plan_types(reordered, Want, TokenLogprob)
        rows: Any = (reordered(**asked._asdict()),)
        results = executor._decoder.step(rows, [None], [0], (), 64, 16)
        assert results is not None
        [(fault, _, _, _, values)] = results
        assert fault is None and values is not None
        assert values.tobytes() == expected.tobytes()
        with pytest.raises(TypeError, match="a row must be a SequencePlan"):
            executor._decoder.step((asked,), [None], [0], (), 64, 16)
