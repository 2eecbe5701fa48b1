"""docs/threats.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "threats.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SOURCE = re.compile(r"`((?:\w+/)+\w+\.(?:py|h|cpp))`")


def rows() -> list[list[str]]:
    """The cells of every row but the heads of tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "threat"]


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_threat_has_a_test_that_exists() -> None:
    found = rows()
    assert len(found) >= 50
    for row in found:
        assert len(row) == 3, row
        named = NAMED.findall(row[2])
        assert named, f"no test for: {row[0]}"
        for path, name in named:
            assert (ROOT / path).is_file(), f"{path} is named for: {row[0]}"
            assert name in names_in(ROOT / path), f"{path} has no {name}, named for: {row[0]}"
            assert name.startswith("test_")


def test_every_module_that_is_named_is_there() -> None:
    for name in SOURCE.findall(PAGE.read_text()):
        places = (ROOT / "src" / "quire" / name, ROOT / name)
        assert any(place.is_file() for place in places), f"{name} is named"
