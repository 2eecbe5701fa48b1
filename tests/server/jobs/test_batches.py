"""/v1/files and /v1/batches by OpenAI's client: every line once, by its key, behind the others."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import openai
import pytest
from openai.types import Batch
from tests.server.servers import PATIENCE_S, PacedExecutor, RunningServer, fake_server

from quire.server.jobs.runner import _MAX_OWNERS
from quire.server.keys import ApiKey, KeyRing, digest_of

CHAT: Final = "/v1/chat/completions"
KEYS = {name: f"{name}-" + 20 * "x" for name in ("alice", "bob")}


def line(number: int, **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Count to {number}"}
    asked = {"messages": [message], "max_tokens": 3 + number % 5, "temperature": 0.7, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": asked}


def jsonl(lines: list[Any]) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in lines).encode()


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    content = ("in.jsonl", jsonl(lines))
    return client.files.create(file=content, purpose="batch").id


def begin(client: openai.OpenAI, lines: list[Any], window: str = "24h", **options: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines),
        endpoint=options.pop("endpoint", CHAT),
        completion_window=window,  # type: ignore[arg-type]
        **options,
    )


def wait(
    client: openai.OpenAI, batch: Batch, *statuses: str, until: Callable[[Batch], bool] = bool
) -> Batch:
    """Until it has one of these statuses; the usual end unless some are named."""
    wanted = statuses or ("completed", "failed", "expired", "cancelled")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = client.batches.retrieve(batch.id)
        if found.status in wanted and until(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{found.status}, not one of {wanted}")


def answers(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).content.splitlines()]


def test_every_line_is_answered_by_its_custom_id(client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(40)]
    made = begin(client, lines, metadata={"run": "a"})
    assert made.status in ("validating", "in_progress")
    done = wait(client, made)
    assert (done.status, done.metadata, done.errors) == ("completed", {"run": "a"}, None)
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    assert done.error_file_id is None
    assert done.in_progress_at and done.finalizing_at and done.completed_at
    assert done.expires_at == done.created_at + 86_400
    found = answers(client, done.output_file_id)
    assert [answer["custom_id"] for answer in found] == [f"r{number}" for number in range(40)]
    for number, answer in enumerate(found):
        body = answer["response"]["body"]
        assert body["usage"]["completion_tokens"] <= 3 + number % 5
        assert body["choices"][0]["message"]["content"]


def test_an_answer_is_what_the_server_would_have_sent(
    server: RunningServer, client: openai.OpenAI
) -> None:
    asked = line(7, seed=11)
    done = wait(client, begin(client, [asked]))
    (answer,) = answers(client, done.output_file_id)
    sent = server.post(CHAT, asked["body"]).json
    got = answer["response"]["body"]
    assert got["choices"] == sent["choices"]
    assert got["usage"]["completion_tokens"] == sent["usage"]["completion_tokens"]


def test_lines_that_are_refused_are_in_the_file_of_errors(client: openai.OpenAI) -> None:
    lines = [line(0), line(1, max_tokens=-2), line(2), line(3, foo=1)]
    done = wait(client, begin(client, lines))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert [a["custom_id"] for a in answers(client, done.output_file_id)] == ["r0", "r2"]
    refused = answers(client, done.error_file_id)
    assert [answer["custom_id"] for answer in refused] == ["r1", "r3"]
    assert refused[1]["response"]["body"]["error"]["param"] == "foo"


def test_a_file_that_is_no_batch_fails_with_the_numbers_of_its_lines(client: openai.OpenAI) -> None:
    lines = [
        line(0),
        line(0),
        {**line(2), "url": "/v1/completions"},
        {**line(3), "method": "GET"},
        line(4, model="other"),
        line(5, stream=True),
    ]
    done = wait(client, begin(client, lines))
    assert done.status == "failed"
    assert done.failed_at and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    found = [(error.line, error.code) for error in done.errors.data]
    assert found == [
        (2, "duplicate_custom_id"),
        (3, "invalid_line"),
        (4, "invalid_line"),
        (5, "model_not_found"),
        (6, "invalid_line"),
    ]


def test_files_are_checked_when_they_are_uploaded(client: openai.OpenAI) -> None:
    for content, message in ((b'{"a": 1}\nno\n', "line 2 is no JSON"), (b"", "empty")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.files.create(file=("a.jsonl", content), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.files.create(file=("a.jsonl", b"{}\n"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="files of requests; it is missing"):
        form: Any = {"headers": {"Content-Type": "multipart/form-data"}}
        client.post("/files", body={}, files={"file": b"{}\n"}, options=form, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        begin(client, [line(0)], window="soon")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a.jsonl", b"{}\n"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 5},
        )


def test_files_are_listed_page_by_page_and_deleted(client: openai.OpenAI) -> None:
    ids = [upload(client, [line(number)]) for number in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # of all pages
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    assert list(client.files.list(purpose="batch_output")) == []
    found = client.files.retrieve(ids[0])
    assert (found.filename, found.purpose, found.bytes) == (
        "in.jsonl",
        "batch",
        len(jsonl([line(0)])),
    )
    assert client.files.content(ids[0]).content == jsonl([line(0)])
    assert client.files.delete(ids[0]).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(ids[0])


def test_batches_are_listed_page_by_page(client: openai.OpenAI) -> None:
    made = [wait(client, begin(client, [line(number)])).id for number in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    first = client.batches.list(limit=2)
    assert (first.has_more, len(first.data)) == (True, 2)
    oldest_first = client.batches.list(limit=2, extra_query={"order": "asc"})
    assert [batch.id for batch in oldest_first] == made
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=0)
    with pytest.raises(openai.BadRequestError, match="there is no parameter 'purpose'"):
        client.batches.list(extra_query={"purpose": "batch"})


# ---- batches that end early


def slow_server(model: Path, folder: Path, **settings: Any) -> Any:
    executor = PacedExecutor(num_blocks=1024, step_s=0.05)
    return fake_server(model, executor, {"max_batch_size": 2}, state_folder=folder, **settings)


def test_a_cancelled_batch_keeps_its_answers(text_model: Path, tmp_path: Path) -> None:
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        made = begin(client, [line(number) for number in range(60)])
        wait(client, made, "in_progress", until=lambda batch: _num_done(batch) >= 2)
        with pytest.raises(openai.ConflictError, match="cancel it first"):
            client.files.delete(made.input_file_id)
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        done = wait(client, made)
        assert (done.status, bool(done.cancelled_at)) == ("cancelled", True)
        _check_halves(client, done, 60, "batch_cancelled")
        server.wait_until(lambda: not server.engine.has_work)
        with pytest.raises(openai.ConflictError, match="nothing to cancel"):
            client.batches.cancel(wait(client, begin(client, [line(1)])).id)


def test_a_batch_whose_window_is_over_keeps_its_answers(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        made = begin(client, [line(number) for number in range(60)], window="1d")
        wait(client, made, "in_progress", until=lambda batch: _num_done(batch) >= 2)
        later = SimpleNamespace(time=lambda: time.time() + 86_400)
        monkeypatch.setattr("quire.server.jobs.runner.time", later)
        done = wait(client, made)
        assert (done.status, bool(done.expired_at)) == ("expired", True)
        _check_halves(client, done, 60, "batch_expired")


def _num_done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def _check_halves(client: openai.OpenAI, batch: Batch, total: int, code: str) -> None:
    """Each line is in one of the two files."""
    good = answers(client, batch.output_file_id)
    bad = answers(client, batch.error_file_id)
    assert good and bad
    assert {answer["error"]["code"] for answer in bad} == {code}
    ids = [answer["custom_id"] for answer in (*good, *bad)]
    assert sorted(ids) == sorted(f"r{number}" for number in range(total))
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.completed, counts.failed) == (len(good), len(bad))


# ---- keys


@pytest.fixture
def keyed(text_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    ring = KeyRing(ApiKey(name, digest_of(secret)) for name, secret in KEYS.items())
    with fake_server(
        text_model,
        state_folder=tmp_path,
        keys=ring,
        max_job_bytes=20_000,
        max_jobs=2,
        max_job_lines=50,
    ) as made:
        yield made


def test_a_key_sees_its_own_alone(keyed: RunningServer) -> None:
    with keyed.client(KEYS["alice"]) as alice, keyed.client(KEYS["bob"]) as bob:
        done = wait(alice, begin(alice, [line(0)]))
        assert done.output_file_id is not None
        for file_id in (done.input_file_id, done.output_file_id):
            for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(file_id)
        for name in ("retrieve", "cancel"):
            with pytest.raises(openai.NotFoundError):
                getattr(bob.batches, name)(done.id)
        assert not [*bob.files.list(), *bob.batches.list()]
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            bob.batches.create(
                input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert keyed.service.quotas.by_key()["alice"].completion_tokens == 3


def test_a_keys_files_and_batches_are_bounded(keyed: RunningServer) -> None:
    with keyed.client(KEYS["alice"]) as alice, keyed.client(KEYS["bob"]) as bob:
        many = [line(number) for number in range(100)]
        with pytest.raises(openai.RateLimitError, match="delete some first"):
            for _ in range(3):
                upload(alice, many)
        small = upload(bob, [line(0)])  # the other key is not concerned
        asyncio.run_coroutine_threadsafe(_stop_jobs(keyed), keyed.loop).result(PATIENCE_S)
        for _ in range(2):
            bob.batches.create(input_file_id=small, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.RateLimitError, match="2 batches"):
            bob.batches.create(input_file_id=small, endpoint=CHAT, completion_window="24h")


async def _stop_jobs(server: RunningServer) -> None:
    await server.service.jobs.stop()


def test_a_batch_whose_key_is_gone_fails(text_model: Path, tmp_path: Path) -> None:
    secret = KEYS["alice"]
    ring = KeyRing([ApiKey("alice", digest_of(secret))])
    with slow_server(text_model, tmp_path, keys=ring) as server:
        with server.client(secret) as client:
            made = begin(client, [line(number) for number in range(40)])
            wait(client, made, "in_progress", until=lambda batch: _num_done(batch) >= 2)
        server.service.access.replace(KeyRing([ApiKey("bob", digest_of(KEYS["bob"]))]))
        server.wait_until(lambda: _status(server, made) == "failed")
        server.service.access.replace(ring)
        with server.client(secret) as client:
            done = client.batches.retrieve(made.id)
            assert done.errors is not None and done.errors.data is not None
            assert done.errors.data[0].code == "key_revoked"
            _check_halves(client, done, 40, "batch_failed")


def _status(server: RunningServer, made: Batch) -> str:
    store = server.service.jobs._store
    assert store is not None
    found = store.batch("alice", made.id)
    assert found is not None
    return found.status


def test_a_model_that_is_no_name_fails_the_batch(client: openai.OpenAI) -> None:
    wrong: tuple[Any, ...] = (["x"], {}, 10**30)
    for model in wrong:
        done = wait(client, begin(client, [line(0, model=model)]))
        assert done.errors is not None
        assert [(e.code, e.line, e.param) for e in done.errors.data or []] == [
            ("invalid_line", 1, "body.model")
        ]


def test_lines_without_a_url_are_named_when_a_batch_is_cancelled(
    text_model: Path, tmp_path: Path
) -> None:
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        lines = [line(number) for number in range(60)]
        for each in lines:
            del each["url"]
        made = begin(client, lines)
        wait(client, made, "in_progress", until=lambda batch: _num_done(batch) >= 2)
        client.batches.cancel(made.id)
        _check_halves(client, wait(client, made), 60, "batch_cancelled")


def test_halves_of_surrogate_pairs_are_refused(
    server: RunningServer, client: openai.OpenAI
) -> None:
    file = upload(client, [line(0)])
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for name, wrong in (("input_file_id", "\ud800"), ("metadata", {"a": "\ud800"})):
        reply = server.post("/v1/batches", {**body, name: wrong})
        assert (reply.status, reply.error["param"]) == (400, name)


def test_more_keys_than_work_at_once_get_their_turn(text_model: Path, tmp_path: Path) -> None:
    names = {f"k{number}": f"k{number}-" + 20 * "x" for number in range(_MAX_OWNERS + 1)}
    ring = KeyRing([ApiKey(name, digest_of(secret)) for name, secret in names.items()])
    with fake_server(text_model, keys=ring, state_folder=tmp_path) as server:
        for secret in names.values():
            with server.client(secret) as client:
                assert wait(client, begin(client, [line(0)])).status == "completed"
