"""State has one writer: nobody assigns to the fields of another object of the engine."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import quire.engine
from quire.engine.sequence import LiveRequest, Sequence

FOLDER = Path(quire.engine.__file__).parent
MODULES = sorted(path.name for path in FOLDER.glob("*.py"))
SEQUENCE_FIELDS = {field.name for kind in (Sequence, LiveRequest) for field in fields(kind)}
# Methods that change what they are called on, so that calling them on a field is writing it.
CHANGING = {"append", "extend", "insert", "remove", "pop", "clear"}
# Plain records that others fill by design: counters, times of a request, a step under construction,
# what isolating a fault found.
SHARED = {"stats", "_stats", "metrics", "step", "outcome"}


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, deleted or changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value
            if node.func.attr in CHANGING and isinstance(target, ast.Attribute):
                yield target


def owner(node: ast.Attribute) -> str:
    """The name that the attribute is taken of: `sequence` in sequence.num_computed."""
    value = node.value
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "?")


def foreign_writes(source: str) -> list[str]:
    """Writes to fields of anything but `self` and the shared records, as "line: owner.field"."""
    found = [
        (node.lineno, owner(node), node.attr)
        for node in written(ast.parse(source))
        if owner(node) != "self" and owner(node) not in SHARED and node.attr != "__cause__"
    ]
    return [f"{line}: {name}.{field}" for line, name, field in found]


@pytest.mark.parametrize("module", MODULES)
def test_nobody_writes_into_another_object(module: str) -> None:
    if module == "sequence.py":
        pytest.skip("the owner itself, whose methods write what the sequence owns")
    assert foreign_writes((FOLDER / module).read_text()) == []


def test_the_sequence_writes_its_own_fields_and_its_completion_alone() -> None:
    found = foreign_writes((FOLDER / "sequence.py").read_text())
    assert {line.split(": ")[1].split(".")[0] for line in found} <= {"completion"}


@pytest.mark.parametrize(
    "line",
    [
        "sequence.num_computed = 3",
        "row.sequence.num_pending -= 1",
        "sequence.tokens.append(3)",
        "self._scheduler.batch_limit = 1",
        "live.sequences.remove(sequence)",
        "del live.pooled",
        "sequence.is_done, other = True, 1",
    ],
)
def test_the_check_finds(line: str) -> None:
    assert len(foreign_writes(line)) == 1


def test_fields_that_the_check_leaves_to_others_are_none_of_a_sequences() -> None:
    assert not SHARED & SEQUENCE_FIELDS
