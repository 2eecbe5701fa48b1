"""Files that mean harm: an answer each time, a server that goes on, and nothing left behind."""

import gzip
import json
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.jobs.test_batches import CHAT, answers, begin, line, wait
from tests.server.servers import RunningServer

GOOD = json.dumps(line(0)).encode()


def send(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def outcome(client: openai.OpenAI, content: bytes) -> Any:
    """What becomes of a batch of this file."""
    made = client.batches.create(
        input_file_id=send(client, content), endpoint=CHAT, completion_window="24h"
    )
    return wait(client, made)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"{}\n" * 1_000_000), "line 1 is no JSON object"),
        (GOOD + b"\n\0\0\0\n", "line 2 is no JSON object"),
        (b'{"a": "\xff\xfe"}\n', "line 1 is no JSON object"),
        (b"[" * 200_000 + b"]" * 200_000, "line 1 is no JSON object"),
        (b'{"a":' * 100_000, "line 1 is no JSON object"),
        (b'{"a": ' + b"1" * 100_000 + b"}\n", "line 1 is no JSON object"),
        (b"\n" * 1_000_000, "no lines but blank ones"),
        (b'{"a": "' + b"x" * (64 << 20) + b'"}\n', "line 1 has more than"),
        (GOOD + b"\n" + b" " * (5 << 20), "line 2 has more than"),
    ],
    ids=["zip bomb", "NUL", "UTF-8", "deep", "deep cut", "digits", "empty", "long", "blanks"],
)
def test_what_is_no_file_of_requests_is_refused(
    content: bytes, message: str, server: RunningServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        send(client, content)
    assert list(client.files.list()) == []
    assert list((tmp_path / "jobs" / "files").glob("*")) == []
    assert server.chat().status == 200


def test_a_byte_order_mark_is_no_part_of_a_line(client: openai.OpenAI) -> None:
    done = outcome(client, b"\xef\xbb\xbf" + GOOD)
    assert [each["custom_id"] for each in answers(client, done.output_file_id)] == ["r0"]


def test_blank_lines_between_are_no_lines(client: openai.OpenAI) -> None:
    content = b"\n" * 200_000 + GOOD + b"\n" * 200_000 + json.dumps(line(1)).encode()
    done = outcome(client, content)
    assert [each["custom_id"] for each in answers(client, done.output_file_id)] == ["r0", "r1"]


@pytest.mark.parametrize("name", ["", "x" * 513, 7, None, ["a"]])
def test_a_custom_id_that_is_none_fails_the_batch(name: Any, client: openai.OpenAI) -> None:
    done = outcome(client, json.dumps({**line(0), "custom_id": name}).encode())
    assert done.status == "failed"
    assert done.errors.data[0].code == "invalid_line"


@pytest.mark.parametrize("name", ["\ud800", "\0", "\u202e", "a\nb", "'; DROP TABLE results; --"])
def test_any_text_is_a_custom_id_and_comes_back_as_it_was(name: str, client: openai.OpenAI) -> None:
    done = outcome(client, json.dumps({**line(0), "custom_id": name}).encode())
    assert [each["custom_id"] for each in answers(client, done.output_file_id)] == [name]


def test_lines_that_are_deep_inside_fail_alone(client: openai.OpenAI) -> None:
    """JSON nests a little below Python's own limit: a body is held to a request's limits."""
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    lines = [line(0), line(1, logit_bias=deep), line(2, messages=deep), line(3)]
    done = wait(client, begin(client, lines))
    assert done.status == "completed"
    assert [each["custom_id"] for each in answers(client, done.output_file_id)] == ["r0", "r3"]
    refused = answers(client, done.error_file_id)
    assert [each["response"]["status_code"] for each in refused] == [400, 400]


def test_numbers_that_json_does_not_have_fail_alone(client: openai.OpenAI) -> None:
    content = b"\n".join(
        json.dumps(line(number)).replace('"temperature": 0.7', f'"temperature": {value}').encode()
        for number, value in enumerate(("0.5", "NaN", "Infinity", "1e999", "-0"))
    )
    done = outcome(client, content)
    assert done.status == "completed"
    good = [each["custom_id"] for each in answers(client, done.output_file_id)]
    assert good == ["r0", "r4"]


def test_a_name_of_a_file_is_no_path(client: openai.OpenAI, tmp_path: Path) -> None:
    for name in ("x\0y", "\r\nset-cookie: a"):
        with suppress(openai.BadRequestError):  # as the client writes it, it may be no form
            client.files.create(file=(name, GOOD), purpose="batch")
    for name in ("../../x.jsonl", "/etc/passwd", "a" * 900):
        made = client.files.create(file=(name, GOOD), purpose="batch")
        assert len(made.filename) <= 255
        assert (tmp_path / "jobs" / "files" / made.id).read_bytes() == GOOD
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert all(name.startswith(("file-", "jobs.", "usage")) for name in names), names


def test_an_upload_that_is_no_form_is_refused(server: RunningServer) -> None:
    kind = "multipart/form-data; boundary=x"
    for body, sent in (
        (b"--x\r\n", kind),
        (b"no form", kind),
        (b"--x--\r\n", kind),
        (b"--y\r\n\r\n--y--", kind),
        (GOOD, "multipart/form-data"),
        (GOOD, "application/json"),
        (b"--x\r\n" + b"content-disposition: form-data; name=a\r\n\r\nb\r\n--x\r\n" * 5000, kind),
    ):
        reply = server.send("POST", "/v1/files", body, {"content-type": sent})
        assert reply.status in (400, 415), (body[:20], reply.body)
    assert server.chat().status == 200


def test_a_large_file_is_not_held_in_memory(server: RunningServer, client: openai.OpenAI) -> None:
    """150 MiB: what is kept of an upload is on disk."""
    row = json.dumps(line(0, messages=[{"role": "user", "content": "x" * 1_000_000}])).encode()
    content = (row + b"\n") * 150
    send(client, row)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    send(client, content)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 3 * 150 * 1024, "the client's copies, and none of the server's"
