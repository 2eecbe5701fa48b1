"""`quire batch`: every line answered once, at its place, whatever happens to the process."""

import json
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import COMMAND, environment, fails, quire

from quire.cli import batch_options
from quire.server.jobs import lines

_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# Of an answer: new whenever it is made; and what the process that made it had in its prefix cache.
_OWN = re.compile(
    rb'"(?:id|request_id)": ?"[^"]*"|"(?:created|created_at|completed_at|cached_tokens)": ?\d+'
)


def request(number: int) -> dict[str, Any]:
    url = _URLS[number % 4]
    bodies: dict[str, dict[str, Any]] = {
        _URLS[0]: {"messages": [{"role": "user", "content": f"Count to {number}"}]},
        _URLS[1]: {"prompt": f"The number {number}", "temperature": 0.9},  # without a seed
        _URLS[2]: {"input": f"text {number}"},
        _URLS[3]: {"input": f"hello {number}"},
    }
    body = bodies[url]
    length = "max_output_tokens" if url == _URLS[3] else "max_tokens"
    if url != _URLS[2]:
        body[length] = 4 + number % 7
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def same_parts(path: Path) -> bytes:
    """Without ids, times and cached tokens, which no two runs share."""
    return _OWN.sub(b"", path.read_bytes())


@pytest.fixture(scope="module")
def whole(
    text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A file of requests, and its answers by an undisturbed run."""
    folder = tmp_path_factory.mktemp("batch")
    source = write_lines(folder / "in.jsonl", [request(number) for number in range(60)])
    target = folder / "out.jsonl"
    run = quire("batch", source, target, "--model", text_model, "--max-batch-size", "1", "--json")
    assert run.code == 0, run.err
    summary = json.loads(run.out)
    assert (summary["lines"], summary["answered"], summary["failed"]) == (60, 60, 0)
    assert summary["completion_tokens"] > 100
    yield source, target


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_requests_may_come_through_a_pipe(
    name: str, text_model: Path, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    source, answered = whole
    target = tmp_path / "out.jsonl"
    arguments = ("batch", name, target, "--model", text_model, "--json")
    run = quire(*arguments, stdin=source.read_bytes())
    assert json.loads(run.out)["lines"] == len(answers(answered))
    assert same_parts(target) == same_parts(answered)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_the_summary_is_not_written_into_the_answers(
    name: str, text_model: Path, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    with (tmp_path / "out.jsonl").open("wb") as output:
        run = subprocess.run(
            [*COMMAND, "batch", source, name, "--model", text_model],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )
    said = f"quire: {name} is standard output, where the summary goes: name a file\n"
    assert (run.returncode, run.stderr) == (1, said)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_line_is_answered_at_its_place_the_same_in_any_batch(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    source, target = whole
    assert [answer["custom_id"] for answer in answers(target)] == [f"r{n}" for n in range(60)]
    assert {answer["response"]["status_code"] for answer in answers(target)} == {200}
    other = tmp_path / "other.jsonl"
    quire("batch", source, other, "--model", text_model, "--max-batch-size", "16")
    assert same_parts(other) == same_parts(target)


def test_what_is_no_request_is_answered_by_an_error_at_its_place(
    text_model: Path, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    lines: list[Any] = [
        request(1),
        "no JSON",
        "[" * 100_000,
        {"custom_id": "no-url", "body": chat},
        {"custom_id": "other", "url": "/v1/files", "body": chat},
        {"custom_id": "stream", "url": _URLS[0], "body": {**chat, "stream": True}},
        {"custom_id": "extra", "url": _URLS[0], "body": chat, "more": 1},
        {"custom_id": "get", "method": "GET", "url": _URLS[0], "body": chat},
        {"custom_id": "unknown", "url": _URLS[0], "body": {**chat, "foo": 1}},
        {"custom_id": "long", "url": _URLS[1], "body": {"prompt": "a " * 10_000}},
        "",
        request(5),
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    run = quire("batch", source, tmp_path / "out.jsonl", "--model", text_model)
    assert "9 of 11 failed" in run.out
    found = answers(tmp_path / "out.jsonl")
    named = [None, None, "no-url", "other", "stream", "extra", "get", "unknown", "long"]
    assert [answer["custom_id"] for answer in found] == ["r1", *named, "r5"]
    for answer in found[1:8]:
        assert (answer["response"], answer["error"]["code"]) == (None, "invalid_line") or (
            answer["custom_id"] == "unknown"
        )
    assert found[8]["response"]["body"]["error"]["param"] == "foo"
    assert found[9]["response"]["status_code"] == 400
    assert found[1]["error"]["message"].startswith("line 2: it is no JSON")


def test_lines_without_a_url_are_for_the_endpoint_that_is_named(
    text_model: Path, tmp_path: Path
) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "body": body}, request(0)])
    arguments = (source, tmp_path / "out.jsonl", "--model", text_model)
    run = quire("batch", *arguments, "--endpoint", "/v1/completions")
    assert "1 of 2 failed" in run.out
    answered, refused = answers(tmp_path / "out.jsonl")
    assert answered["response"]["body"]["object"] == "text_completion"
    assert "the batch is for /v1/completions" in refused["error"]["message"]


# ---- beginning again


def test_a_second_run_does_what_is_missing(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    source, target = whole
    content = target.read_bytes()
    lines = content.splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:23]) + lines[23][:50])
    run = quire("batch", source, cut, "--model", text_model, "--json")
    summary = json.loads(run.out)
    assert (summary["answered_before"], summary["answered"]) == (23, 37)
    assert cut.read_bytes().startswith(b"".join(lines[:23]))
    assert same_parts(cut) == same_parts(target)
    before = cut.read_bytes()
    assert (
        json.loads(quire("batch", source, cut, "--model", text_model, "--json").out)["answered"]
        == 0
    )
    assert cut.read_bytes() == before


def check_killed(source: Path, target: Path, model: Path, out: Path, num_kills: int) -> None:
    """A run killed at random moments, the last of them soon before its end: the answers of an
    undisturbed one. Every run but the first finds what the one before had written."""
    command = [*COMMAND, "batch", str(source), str(out), "--model", str(model)]
    command += ["--max-batch-size", "2"]
    moments = random.Random(num_kills)
    whole_size = target.stat().st_size
    kept = b""
    for kill in range(num_kills):
        least = whole_size * (kill + moments.random()) / (num_kills + 1)
        with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and (not out.exists() or out.stat().st_size < least):
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)  # on a busy machine it may have ended before
        found = out.read_bytes()
        lines = found[: found.rfind(b"\n") + 1]
        assert lines.startswith(kept), "what was written once stays"
        kept = lines
    run = quire(*command[len(COMMAND) :], "--json")
    assert json.loads(run.out)["answered_before"] == kept.count(b"\n") > 0
    assert same_parts(out) == same_parts(target)


def test_a_killed_run_loses_nothing(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    check_killed(*whole, text_model, tmp_path / "out.jsonl", num_kills=3)


@pytest.mark.long
def test_a_run_of_500_lines_killed_20_times_has_the_same_answers(
    text_model: Path, tmp_path: Path
) -> None:
    lines: list[Any] = [request(number) for number in range(500)]
    lines[7::50] = ["no JSON"] * len(lines[7::50])
    source = write_lines(tmp_path / "in.jsonl", lines)
    target = tmp_path / "whole.jsonl"
    assert quire("batch", source, target, "--model", text_model).code == 0
    check_killed(source, target, text_model, tmp_path / "out.jsonl", num_kills=20)


def test_a_full_disk_ends_a_run_that_another_goes_on_with(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    source, target = whole
    out = tmp_path / "out.jsonl"
    size = target.stat().st_size // 2
    run = subprocess.run(
        [*COMMAND, "batch", str(source), str(out), "--model", str(text_model)],
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert run.returncode == 1
    assert "out.jsonl cannot be written: File too large" in run.stderr
    assert "Traceback" not in run.stderr
    num_kept = out.read_bytes().count(b"\n")
    again = quire("batch", source, out, "--model", text_model, "--json")
    assert json.loads(again.out)["answered_before"] == num_kept > 10
    assert same_parts(out) == same_parts(target)


def test_a_changed_or_deleted_input_is_said(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    source, target = whole
    out, mine = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    out.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:20]))
    mine.write_bytes(source.read_bytes().replace(b"Count to 4", b"Count up to 4"))
    before = out.read_bytes()
    refused = fails("batch", mine, out, "--model", text_model)
    assert "line 5 answers 'r4', and the input has another line 5 now" in refused
    mine.unlink()
    assert "in.jsonl: No such file" in fails("batch", mine, out, "--model", text_model)
    assert out.read_bytes() == before


def test_an_output_that_is_of_something_else_is_left_alone(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    _, target = whole
    other = write_lines(tmp_path / "other.jsonl", [request(number) for number in range(1, 9)])
    mine = tmp_path / "mine.jsonl"
    mine.write_bytes(target.read_bytes())
    model = ("--model", text_model)
    assert "line 1 answers 'r0'" in fails("batch", other, mine, *model)
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    assert "is no line that `quire batch` wrote" in fails("batch", other, notes, *model)
    assert notes.read_text() == "my notes\n"
    assert "name another output" in fails("batch", other, other, *model)
    assert "No such file" in fails("batch", tmp_path / "none.jsonl", mine, *model)
    assert mine.read_bytes() == target.read_bytes()
    assert quire("batch", other, mine, *model, "--restart").code == 0
    assert len(answers(mine)) == 8


def test_two_runs_do_not_write_one_output(
    whole: tuple[Path, Path], text_model: Path, tmp_path: Path
) -> None:
    source, _ = whole
    out = tmp_path / "out.jsonl"
    command = [*COMMAND, "batch", str(source), str(out), "--model", str(text_model)]
    command += ["--max-batch-size", "1"]  # so that it goes on for long after its first answer
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
        while not out.exists() or not out.stat().st_size:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        refused = fails("batch", source, out, "--model", text_model)
        process.send_signal(signal.SIGCONT)
    assert "another `quire batch` is writing it" in refused


# ---- tables


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_columns_of_a_table(suffix: str, text_model: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"q": ["What is\na river?", "Name, please", None], "n": ["a", "b", "c"]})
    source, target = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
    write = parquet.write_table if suffix == "parquet" else csv.write_csv
    write(table, source)
    arguments = ("batch", source, target, "--model", text_model, "--column", "q")
    run = quire(*arguments, "--id-column", "n", "--body", '{"max_tokens": 5, "temperature": 0}')
    assert run.code == 0, run.err
    read = parquet.read_table if suffix == "parquet" else csv.read_csv
    rows = read(target).to_pylist()
    assert [row["custom_id"] for row in rows] == ["a", "b", "c"]
    assert [row["completion_tokens"] for row in rows[:2]] == [5, 5]
    assert rows[0]["text"] and rows[0]["finish_reason"] == "length"
    assert not list(tmp_path.glob("*.jsonl"))
    assert "say --restart" in fails(*arguments)
    assert "no column 'other'" in fails(*arguments[:-1], "other", "--restart")


def test_vectors_of_a_table(text_model: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["one", "two"]}), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    options = ("--column", "text", "--endpoint", "/v1/embeddings", "--model", text_model)
    quire("batch", tmp_path / "in.parquet", out, *options)
    first, second = parquet.read_table(out).column("embedding").to_pylist()
    assert len(first) == len(second) > 10
    assert first != second
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--body", "{max_tokens: 4}"), "--body is no JSON"),
        (("--body", "[1]"), "--body must be a JSON object"),
        (("--endpoint", "/v1/files"), "invalid choice: '/v1/files'"),
    ],
)
def test_wrong_options_are_refused_before_loading(
    options: tuple[str, str], message: str, tmp_path: Path
) -> None:
    run = quire("batch", tmp_path / "in.csv", tmp_path / "out.csv", *options)
    assert run.code == 2
    assert message in run.err


def test_an_output_that_cannot_be_opened_is_named(text_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    refused = fails("batch", source, tmp_path / "none" / "out.jsonl", "--model", text_model)
    assert f"out.jsonl: there is no folder {tmp_path / 'none'}; make it first" in refused


def test_the_endpoints_are_those_of_lines() -> None:
    assert batch_options._ENDPOINTS == lines.ENDPOINTS


def test_options_for_tables_are_refused_for_lines(text_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    run = quire("batch", source, tmp_path / "out", "--model", text_model, "--column", "x")
    assert run.code == 2
    assert "--column is for Parquet and CSV files" in run.err
