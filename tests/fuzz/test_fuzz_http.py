"""A bounded part of the HTTP fuzzer, the same every time; its oracle sees what is wrong."""

import asyncio
from collections import Counter

import pytest
from tests.fuzz.choices import Choices
from tests.fuzz.fuzz_http import BATCH, CORPUS
from tests.fuzz.http_answers import BadAnswerError, answers_of, check_answer
from tests.fuzz.http_wire import Case, Leaving, case_of
from tests.fuzz.http_world import World, world

NUM_RUNS = 960
SEED = 1
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def _run(cases: list[Case]) -> World:
    async with world() as server:
        for start in range(0, len(cases), BATCH):
            await server.run(cases[start : start + BATCH])
        return server


def test_random_connections_are_answered_well_and_leave_nothing() -> None:
    cases = [case_of(Choices.drawn(SEED, number)) for number in range(NUM_RUNS)]
    server = asyncio.run(_run(cases))
    answered = server.statuses
    assert sum(answered.values()) > NUM_RUNS / 2
    assert {200, 400, 401, 403, 405, 408, 413} <= {*answered}, answered
    assert answered[200] > 100, "most of the grammar must get as far as the model"


def test_what_coverage_led_to_is_answered_well() -> None:
    kept = sorted(CORPUS.iterdir())
    assert len(kept) > 20
    asyncio.run(_run([case_of(Choices(path.read_bytes())) for path in kept]))


def test_a_case_is_its_bytes() -> None:
    assert case_of(Choices.drawn(1, 7)) == case_of(Choices(Choices.drawn(1, 7).content))
    assert case_of(Choices(b"")).is_sound


def test_the_grammar_makes_every_kind_of_case() -> None:
    cases = [case_of(Choices.drawn(2, number)) for number in range(600)]
    kinds = Counter((case.leaving, case.is_sound) for case in cases)
    assert {leaving for leaving, _ in kinds} == {*Leaving}
    assert all(kinds[Leaving.STAYS, is_sound] > 50 for is_sound in (True, False))


@pytest.mark.parametrize(
    "written",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nbad header\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nHTTP/1.1 408 x\r\n\r\n",
        OK + b"stray",
        b"200 OK",
    ],
)
def test_bytes_that_are_no_answers_are_seen(written: bytes) -> None:
    with pytest.raises(BadAnswerError):
        answers_of(written, (False,))


@pytest.mark.parametrize(
    ("status", "more", "body"),
    [
        (500, "", b"{}"),
        (503, "", b'{"error": {"message": "x", "type": "x", "param": null, "code": null}}'),
        (400, "", b'{"detail": "x"}'),
        (200, "", b'{"a": NaN}'),
        (200, "", b"{"),
    ],
)
def test_answers_that_say_what_they_must_not_are_seen(status: int, more: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n{more}"
    written = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    [answer] = answers_of(written, (False,))
    with pytest.raises(BadAnswerError):
        check_answer(answer)


@pytest.mark.parametrize(
    "events",
    [
        b'data: {"choices": []}\n\n',
        b"data: [DONE]\n",
        b'data: {"error": {}}\n\ndata: [DONE]\n\n',
        b"data: {\n\ndata: [DONE]\n\n",
        b"HTTP/1.1 408 x\n\ndata: [DONE]\n\n",
    ],
)
def test_streams_that_end_wrongly_are_seen(events: bytes) -> None:
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    [answer] = answers_of(head + chunk, (False,))
    with pytest.raises(BadAnswerError):
        check_answer(answer)
