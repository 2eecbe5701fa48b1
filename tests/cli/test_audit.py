"""`quire audit`: the verdict, in words and as JSON, and as an exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import fails, quire

from quire.core.hash_chain import Chain


@pytest.fixture
def log(tmp_path: Path) -> Path:
    chain = Chain()
    path = tmp_path / "audit.jsonl"
    records: list[dict[str, Any]] = [{"event": "start"}, {"event": "gap", "lost": 7}]
    lines = [chain.append(record) for record in (*records, {"event": "stop"})]
    path.write_bytes(b"".join(lines))
    return path


def test_a_sound_log_says_so(log: Path) -> None:
    run = quire("audit", log)
    assert run.code == 0
    last = json.loads(log.read_bytes().splitlines()[-1])["hash"]
    assert run.out.splitlines() == [
        f"OK: 3 lines, 1 to 3, last hash {last}",
        "7 events could not be written, as the log itself says",
        "events: gap 1, start 1, stop 1",
    ]
    run = quire("audit", log, "--expect", last.upper(), "--json")
    assert run.code == 0
    found = json.loads(run.out)
    assert (found["ok"], found["num_lines"], found["last_hash"]) == (True, 3, last)


def test_the_first_bad_line_is_named(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"lost":7', b'"lost":1'))
    message = fails("audit", log)
    assert f"{log}, line 2: it was changed: it does not match its own hash (1 lines" in message
    run = quire("audit", log, "--json")
    assert run.code == 1
    found = json.loads(run.out)
    assert (found["ok"], found["line"], found["file"]) == (False, 2, str(log))


def test_what_was_cut_off_is_found(log: Path) -> None:
    first, second, third = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(first + second)
    assert quire("audit", log).code == 0
    last = json.loads(third)["hash"]
    assert "no line has the expected hash" in fails("audit", log, "--expect", last)
    rest = log.with_name("rest")
    rest.write_bytes(third)
    assert quire("audit", log, rest, "--expect", last).code == 0
    assert "the 2 lines before them are in an earlier file" in quire("audit", rest).out


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "cannot read" in fails("audit", tmp_path / "none")
    assert "cannot read" in fails("audit", tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    assert "there is no line" in fails("audit", tmp_path / "empty")
    assert quire("audit").code == 2


def test_it_needs_none_of_the_server(log: Path, tmp_path: Path) -> None:
    text = (
        "import sys\nfor name in ('fastapi', 'uvicorn', 'numpy'):\n    sys.modules[name] = None\n"
    )
    (tmp_path / "sitecustomize.py").write_text(text)
    path = f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"
    assert quire("audit", log, env={"PYTHONPATH": path}).code == 0
