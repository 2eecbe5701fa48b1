"""docs/glossary.md: sorted, every term in use, and no retired word left in the tree."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".md", ".toml", ".json", ".html")
TERM = re.compile(r"- \*\*(.+?)\*\*: (.+)")
# Words of older code and notes for what has another name now; regular expressions.
RETIRED = (
    r"attend_apart",
    r"attending",
    r"bur(?:y|ied|ies)",
    r"casualt(?:y|ies)",
    r"company",
    r"cpu_assembly",
    r"cuda_assembly",
    r"dares",
    r"departures",
    r"findable",
    r"footing",
    r"foretold",
    r"kv_memory\.py",
    r"ledger",
    r"most_queries",
    r"parts_apart",
    r"refined",
    r"row_group",
    r"seen_by",
    r"touch_?ahead",
    r"turn_and_store",
    r"vacant",
    r"WaitingLines",
    r"whole_rows",
)


def entries() -> list[tuple[str, str]]:
    lines = PAGE.read_text().splitlines()
    found = [TERM.fullmatch(line) for line in lines if line.startswith("-")]
    assert all(found), "a line is: - **term**: what it is"
    return [(match[1], match[2]) for match in found if match]


@cache
def texts() -> dict[str, str]:
    """What the words are looked for in, by path; the glossary itself is not among them."""
    folders = (ROOT / "src", ROOT / "native", ROOT / "docs")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if path != PAGE}


def test_terms_are_sorted_and_stand_once() -> None:
    terms = [term.lower() for term, _ in entries()]
    assert len(terms) >= 50
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("term", [term for term, _ in entries()])
def test_every_term_is_used(term: str) -> None:
    words = re.escape(term).replace(r"\ ", r"[\s_-]?").replace(r"\-", r"[\s_-]?")
    pattern = re.compile(words, re.IGNORECASE)
    assert any(pattern.search(text) for text in texts().values())


@pytest.mark.parametrize("word", RETIRED)
def test_no_retired_word_is_left(word: str) -> None:
    pattern = re.compile(rf"(?<![a-z]){word}(?![a-z])", re.IGNORECASE)
    found = {path: match[0] for path, text in texts().items() if (match := pattern.search(text))}
    assert not found
