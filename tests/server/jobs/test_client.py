"""Every method of the openai client for files and batches, and batches of every endpoint."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tests.server.jobs.test_batches import _num_done as num_done
from tests.server.jobs.test_batches import answers, begin, line, slow_server, upload, wait
from tests.server.servers import model_server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/embeddings": {"input": "a river"},
    "/v1/responses": {"input": "a", "max_output_tokens": 4, "store": False},
}
OBJECTS = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "list",
    "/v1/responses": "response",
}
# What OpenAI's guide shows of a line of an output file and of an error file.
OUTPUT_FIELDS = {"id", "custom_id", "response", "error"}
RESPONSE_FIELDS = {"status_code", "request_id", "body"}


def of(endpoint: str, number: int, **body: Any) -> dict[str, Any]:
    body = {**BODIES[endpoint], **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}


@pytest.mark.parametrize("endpoint", [name for name in BODIES if name != "/v1/embeddings"])
def test_a_batch_of_each_endpoint(endpoint: str, client: openai.OpenAI) -> None:
    check_endpoint(client, endpoint)


def test_a_batch_of_embeddings(text_model: Path, tmp_path: Path) -> None:
    """Of a model that computes: the one that fakes has no hidden states."""
    with model_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        check_endpoint(client, "/v1/embeddings")


def check_endpoint(client: openai.OpenAI, endpoint: str) -> None:
    made = begin(client, [of(endpoint, 0), of(endpoint, 1, unheard=1)], endpoint=endpoint)
    done = wait(client, made)
    assert (done.status, done.endpoint) == ("completed", endpoint)
    (good,) = answers(client, done.output_file_id)
    (bad,) = answers(client, done.error_file_id)
    for each, status in ((good, 200), (bad, 400)):
        assert set(each) == OUTPUT_FIELDS
        assert set(each["response"]) == RESPONSE_FIELDS
        assert each["id"].startswith("batch_req_")
        assert (each["response"]["status_code"], each["error"]) == (status, None)
    assert good["response"]["body"]["object"] == OBJECTS[endpoint]
    assert bad["response"]["body"]["error"]["param"] == "unheard"


def test_every_method_for_files(client: openai.OpenAI) -> None:
    kept = client.files.create(
        file=("in.jsonl", json.dumps(line(0)).encode()),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (kept.object, kept.status, kept.expires_at) == (
        "file",
        "processed",
        kept.created_at + 3600,
    )
    assert client.files.retrieve(kept.id) == kept
    assert client.files.wait_for_processing(kept.id, poll_interval=0.01) == kept
    assert client.files.content(kept.id).read() == json.dumps(line(0)).encode()
    with client.files.with_streaming_response.content(kept.id) as streamed:
        assert b"".join(streamed.iter_bytes()) == json.dumps(line(0)).encode()
    with pytest.deprecated_call():
        assert client.files.retrieve_content(kept.id) == json.dumps(line(0))
    more = [upload(client, [line(number)]) for number in range(1, 4)]
    page = client.files.list(limit=3, order="asc")
    assert [file.id for file in page.data] == [kept.id, *more[:2]]
    assert page.has_more and page.has_next_page()
    assert [file.id for file in page.get_next_page().data] == more[2:]
    after = client.files.list(after=more[0], order="asc")
    assert [file.id for file in after.data] == more[1:]
    with pytest.raises(openai.BadRequestError, match="nothing with the id"):
        client.files.list(after="file-x")
    assert client.files.delete(kept.id).to_dict() == {
        "id": kept.id,
        "object": "file",
        "deleted": True,
    }


def test_a_file_is_gone_when_its_time_is_over(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the files of answers, and no file that a batch still reads."""
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        expiring: Any = {"anchor": "created_at", "seconds": 3600}
        done = wait(client, begin(client, [line(0)], output_expires_after=expiring))
        assert done.output_file_id is not None
        content = "".join(json.dumps(line(number)) + "\n" for number in range(80)).encode()
        read = client.files.create(file=("a", content), purpose="batch", expires_after=expiring)
        made = client.batches.create(
            input_file_id=read.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)
        store = server.service.jobs._store
        assert store is not None
        monkeypatch.setattr(store, "_now", lambda: time.time() + 4000)
        with pytest.raises(openai.NotFoundError):
            client.files.content(done.output_file_id)
        server.wait_until(lambda: not store.path_of(str(done.output_file_id)).exists())
        assert store.path_of(read.id).exists(), "its batch goes on"
        client.batches.cancel(made.id)
        wait(client, made, "cancelled")
        server.wait_until(lambda: not store.path_of(read.id).exists())


def test_every_method_for_batches(text_model: Path, tmp_path: Path) -> None:
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        made = begin(client, [line(number) for number in range(40)], metadata={"a": "b"})
        assert made.object == "batch"
        running = wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)
        assert running.to_dict().keys() >= {"expires_at", "in_progress_at", "request_counts"}
        assert (running.output_file_id, running.error_file_id) == (None, None)
        other = begin(client, [line(number) for number in range(3)])
        assert [batch.id for batch in client.batches.list()] == [other.id, made.id]
        page = client.batches.list(limit=1)
        assert page.has_more and page.get_next_page().data[0].id == made.id
        assert [batch.id for batch in client.batches.list(after=other.id)] == [made.id]
        assert client.batches.cancel(made.id).cancelling_at is not None
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")  # again
        done = wait(client, made, "cancelled")
        counts = done.request_counts
        assert counts is not None and counts.total == 40 == counts.completed + counts.failed
        assert len(answers(client, done.output_file_id)) == counts.completed >= 2
        assert wait(client, other).status == "completed"
        for name in ("retrieve", "cancel"):
            with pytest.raises(openai.NotFoundError):
                getattr(client.batches, name)("batch_x")


# ---- the clock


def test_a_clock_that_goes_back_ends_nothing_early(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch made before it went back is worked off; times stay those of the clock."""
    with slow_server(text_model, tmp_path) as server, server.client() as client:
        made = begin(client, [line(number) for number in range(20)])
        wait(client, made, "in_progress", until=lambda batch: num_done(batch) >= 2)
        earlier = SimpleNamespace(time=lambda: time.time() - 10 * 86_400)
        monkeypatch.setattr("quire.server.jobs.runner.time", earlier)
        store = server.service.jobs._store
        assert store is not None
        monkeypatch.setattr(store, "_now", earlier.time)
        after = begin(client, [line(0)])
        assert wait(client, made).status == "completed"
        assert wait(client, after).status == "completed"
        assert [batch.id for batch in client.batches.list()] == [after.id, made.id]
