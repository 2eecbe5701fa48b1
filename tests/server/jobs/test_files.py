"""A file of lines answered into another: flat memory, whole lines, and what cannot be written."""

import asyncio
import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.server.jobs import files
from quire.server.jobs.files import FileRun, Progress, line_id, num_lines_of, open_output
from quire.server.jobs.lines import GivenUpError, LineAnswerer

CHAT = "/v1/chat/completions"
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def echo(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"said": body["say"], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}


def answerer(answer: Answer = echo, **options: Any) -> LineAnswerer:
    """Without a model: an application that answers bodies by a function."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        status, reply = answer(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    return LineAnswerer(app, lambda _: None, **options)


def line(number: int, bad: bool = False) -> bytes:
    body = {"say": f"line {number}"}
    name = number if bad else f"r{number}"  # an id that is no text
    return json.dumps({"custom_id": name, "url": CHAT, "body": body}).encode() + b"\n"


def lines(count: int) -> Iterator[bytes]:
    return (line(number, bad=number % 3 == 2) for number in range(count))


def run(source: Iterator[bytes], out: Path, made: LineAnswerer | None = None) -> Progress:
    work = FileRun(made or answerer(), 4, None, lambda _: None)
    with open_output(out, source, restart=False) as (output, num_done):
        asyncio.run(work.run(source, output, num_done))
    return work.progress


# ---- memory


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some more than a window of lines takes as much as many times as many."""
    monkeypatch.setattr(files, "_MIN_WINDOW", 64)
    run(lines(10), tmp_path / "warm")
    few = peak_bytes(lambda: run(lines(200), tmp_path / "few"))
    many = peak_bytes(lambda: run(lines(4_000), tmp_path / "many"))
    assert many < few + 6 * 4_000, "six bytes a line would be none of Python's objects"
    assert sum(1 for _ in (tmp_path / "many").open("rb")) == 4_000


def test_memory_of_going_on_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    peaks: list[int] = []
    for count in (300, 300, 6_000):  # the first warms it
        out = tmp_path / f"out{len(peaks)}"
        run(lines(count), out)
        peaks.append(peak_bytes(lambda out=out, count=count: run(lines(count), out)))  # type: ignore[misc]
    assert peaks[2] < peaks[1] + 6 * 6_000


def test_an_input_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(lines(20_000)))
    assert peak_bytes(lambda: num_lines_of(path)) < path.stat().st_size // 10


@pytest.mark.parametrize("bound", ["lines", "bytes"])
def test_lines_behind_a_slow_one_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Their answers wait for its own: memory would grow with them, however long it takes."""
    most = 80
    if bound == "lines":
        monkeypatch.setattr(files, "_MIN_WINDOW", most)
    else:
        monkeypatch.setattr(files, "_WINDOW_BYTES", most * len(line(100)))
    num_taken = 0

    def source() -> Iterator[bytes]:
        nonlocal num_taken
        for number in range(400):
            num_taken = number + 1
            yield line(number)

    async def work() -> int:
        goes_on = asyncio.Event()

        async def app(_: Any, receive: Any, send: Any) -> None:
            status, reply = echo(json.loads((await receive())["body"]))
            if reply["said"] == "line 0":
                await goes_on.wait()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

        answering = FileRun(LineAnswerer(app, lambda _: None), 4, None, lambda _: None)
        given = source()
        with open_output(tmp_path / "out", given, restart=False) as (output, num_done):
            running = asyncio.create_task(answering.run(given, output, num_done))
            for _ in range(3_000):  # turns of the loop: many times as many as lines
                await asyncio.sleep(0)
            num_behind = num_taken
            goes_on.set()
            await running
        return num_behind

    assert 10 < asyncio.run(work()) <= most + 8  # the first lines are shorter
    assert sum(1 for _ in (tmp_path / "out").open("rb")) == 400


# ---- going on


def test_an_answer_is_of_its_line_alone(tmp_path: Path) -> None:
    """A line with the same custom_id and another body is another line."""
    out = tmp_path / "out"
    run(lines(6), out)
    before = out.read_bytes()
    changed = [line(number) for number in range(6)]
    for at in range(6):
        other = [*lines(6)]
        other[at] = changed[at].replace(b"line", b"words")
        with pytest.raises(ConfigError, match=f"line {at + 1} answers .*another line {at + 1} now"):
            run(iter(other), out)
        assert out.read_bytes() == before


def test_an_input_that_lost_lines_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(lines(6), out)
    with pytest.raises(ConfigError, match="line 5 answers 'r4', and the input has no such line"):
        run(lines(4), out)


def test_an_input_that_got_more_lines_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(lines(4), out)
    before = out.read_bytes()
    assert run(lines(9), out).num_earlier == 4
    assert out.read_bytes().startswith(before)
    assert out.read_bytes().count(b"\n") == 9


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"{}\n", b"\xff\xfe\n"])
def test_a_damaged_output_is_left_alone(damage: bytes, tmp_path: Path) -> None:
    """Such as blocks of zeros, where a machine lost its power."""
    out = tmp_path / "out"
    run(lines(3), out)
    out.write_bytes(out.read_bytes() + damage)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="line 4 is no line that `quire batch` wrote"):
        run(lines(9), out)
    assert out.read_bytes() == before


def test_ids_are_of_lines_and_places() -> None:
    assert line_id(1, b" {} \n") == line_id(1, b"{}") != line_id(2, b"{}")


# ---- what ends a run


def test_a_full_disk_leaves_whole_lines_and_the_next_run_goes_on(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(lines(40), whole)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"out cannot be written: .*the same command goes on"):
            run(lines(40), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = out.read_bytes()
    assert 0 < len(kept) < 1000
    assert kept.endswith(b"\n")
    progress = run(lines(40), out)
    assert progress.num_earlier == kept.count(b"\n")
    assert out.read_bytes().startswith(kept)
    assert without_ids(out) == without_ids(whole)


def without_ids(path: Path) -> list[Any]:
    found = [json.loads(each) for each in path.read_bytes().splitlines()]
    return [each | {"response": each["response"] and each["response"]["body"]} for each in found]


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_an_output_that_is_no_file_is_refused(device: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(device)
    with pytest.raises(ConfigError, match="out is no file"):
        run(lines(3), out)


def test_an_engine_that_gave_up_answers_no_line(tmp_path: Path) -> None:
    """The lines that it had answered stay; the others are no errors, but to be done."""
    asked: list[str] = []

    def dying(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(body["say"])
        if len(asked) > 5:
            return 500, {"error": {"code": "engine", "message": "no worker"}}
        return echo(body)

    out = tmp_path / "out"
    made = answerer(dying, has_given_up=lambda: len(asked) > 5)
    with pytest.raises(GivenUpError, match="answers nothing more"):
        run((line(number) for number in range(9)), out, made)
    assert b"no worker" not in out.read_bytes()
    assert run((line(number) for number in range(9)), out).num_earlier == 5


def test_an_error_of_a_line_alone_is_its_answer(tmp_path: Path) -> None:
    def failing(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["say"] == "line 1":
            return 500, {"error": {"code": "row_fault", "message": "NaN"}}
        return echo(body)

    out = tmp_path / "out"
    assert run((line(number) for number in range(3)), out, answerer(failing)).num_failed == 1
    assert b"NaN" in out.read_bytes()
