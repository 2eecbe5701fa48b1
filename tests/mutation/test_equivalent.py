"""equivalent.toml: every entry is about a line that is still there, and gives a reason."""

import tomllib
from pathlib import Path

import quire

ENTRIES = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get("mutant", [])
SOURCE = Path(quire.__file__).parent


def test_every_entry_is_about_a_line_that_is_there() -> None:
    for entry in ENTRIES:
        lines = [line.strip() for line in (SOURCE / entry["file"]).read_text().splitlines()]
        assert entry["was"] in lines, f"{entry['file']} has no line {entry['was']!r}"


def test_every_entry_gives_a_reason() -> None:
    assert all(len(entry["reason"]) > 10 for entry in ENTRIES)
