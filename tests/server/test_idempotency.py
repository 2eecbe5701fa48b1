"""Idempotency keys: a request that is sent again gets the answer that it had, computed once."""

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.processes import serving
from tests.server.servers import (
    NAME,
    PATIENCE_S,
    QUESTION,
    PacedExecutor,
    Reply,
    RunningServer,
    fake_server,
    model_server,
    wait_until,
)
from tests.worker.test_server import SMALL, ask

from quire.server.answers.store import StoredResponse
from quire.server.calls import AnswerIdentity, IdSource
from quire.server.jobs.store import JobStore
from quire.server.keys import ApiKey, KeyRing, digest_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HOT = {"temperature": 1.0, "max_tokens": 12}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": QUESTION, **HOT}),
    (CHAT, {"messages": QUESTION, **HOT, "n": 2, "stream": True}),
    (TEXT, {"prompt": ["one", "two"], **HOT, "logprobs": 1}),
    (TEXT, {"prompt": "one", **HOT, "stream": True}),
    ("/v1/responses", {"input": "Hello", "temperature": 1.0, "max_output_tokens": 12}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 12, "stream": True}),
    ("/v1/messages", {"model": NAME, "messages": QUESTION, **HOT}),
    ("/v1/messages", {"model": NAME, "messages": QUESTION, **HOT, "stream": True}),
    ("/v1/embeddings", {"input": ["one", "two"]}),
    ("/api/chat", {"model": NAME, "messages": QUESTION, "options": {"num_predict": 5}}),
    ("/tokenize", {"prompt": "one"}),
]


def key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}


@pytest.fixture
def server(text_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    with model_server(text_model, state_folder=tmp_path / "state") as running:
        yield running


def computed(server: RunningServer) -> int:
    """Requests that the engine had."""
    return sum(server.engine.snapshot().stats.requests_ended.values())


@pytest.mark.parametrize("path, body", CALLS)
def test_a_request_that_is_sent_again_gets_the_same_answer(
    tiny: RunningServer, path: str, body: dict[str, Any]
) -> None:
    name = key(f"{path} {body.get('stream')}")
    first = tiny.post(path, body, name)
    before = computed(tiny)
    again = tiny.post(path, body, name)
    assert first.status == again.status == 200, first.body
    assert again.body == first.body
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["content-type"] == first.headers["content-type"]
    assert computed(tiny) == before
    if "temperature" in body:
        other = tiny.post(path, body, key(name["Idempotency-Key"] + " other"))
        assert other.body != first.body, "another key is another answer"


def test_another_request_with_the_key_is_refused(tiny: RunningServer) -> None:
    body = {"prompt": "one", **HOT}
    assert tiny.post(TEXT, body, key("taken")).status == 200
    for path, other in ((TEXT, {**body, "max_tokens": 3}), (CHAT, {"messages": QUESTION})):
        refused = tiny.post(path, other, key("taken"))
        assert refused.status == 422
        assert refused.error["code"] == "idempotency_key_reused"
        assert "another request" in refused.error["message"]
    traced = tiny.post(TEXT, body, {**key("taken"), "x-quire-trace": "1"})
    assert traced.status == 422, "its answer would have other fields"


def test_mistakes_of_the_client_are_sent_again(tiny: RunningServer) -> None:
    body = {"prompt": "one", "max_tokens": -2}
    first, again = (tiny.post(TEXT, body, key("wrong")) for _ in range(2))
    assert first.status == again.status == 400
    assert first.body == again.body
    assert again.headers["idempotent-replayed"] == "true"


def test_what_another_moment_would_answer_is_not_kept(text_model: Path) -> None:
    executor = PacedExecutor(num_blocks=1024, step_s=0.5)
    engine = {"max_queue_requests": 1, "max_batch_size": 1}
    with fake_server(text_model, executor, engine) as server:
        body = {"prompt": "one", "max_tokens": 40, "ignore_eos": True, "temperature": 1.0}
        with ThreadPoolExecutor(2) as pool:
            busy = [pool.submit(server.post, TEXT, body)]
            server.wait_until(lambda: server.engine.snapshot().num_running == 1)
            busy.append(pool.submit(server.post, TEXT, body))
            server.wait_until(lambda: server.engine.snapshot().num_waiting == 1)
            refused = server.post(TEXT, body, key("later"))
            assert refused.status == 429
            executor.step_s = 0.0  # until here nothing could end
            for each in busy:
                each.result()
        later = server.post(TEXT, body, key("later"))
        assert later.status == 200
        assert "idempotent-replayed" not in later.headers


def test_two_at_once_are_computed_once(text_model: Path) -> None:
    executor = PacedExecutor(num_blocks=1024, step_s=0.01)
    with fake_server(text_model, executor) as server:
        body = {"prompt": "one two three", "max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
        for name, fields in (("whole", body), ("stream", {**body, "stream": True})):
            before = computed(server)
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(server.post, TEXT, fields, key(name)) for _ in range(8)]
                answers = [each.result() for each in asked]
            assert {answer.status for answer in answers} == {200}
            assert len({answer.body for answer in answers}) == 1
            replayed = [a for a in answers if "idempotent-replayed" in a.headers]
            assert len(replayed) == 7
            assert computed(server) == before + 1


def test_another_body_is_refused_while_the_first_is_computed(text_model: Path) -> None:
    executor = PacedExecutor(num_blocks=1024, step_s=0.02)
    with fake_server(text_model, executor) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "one", "max_tokens": 60, "ignore_eos": True}
        first = pool.submit(server.post, TEXT, body, key("busy"))
        wait_until(lambda: server.engine.has_work)
        assert server.post(TEXT, {**body, "max_tokens": 2}, key("busy")).status == 422
        assert not first.done()
        assert first.result().status == 200


def begin_and_leave(server: RunningServer, body: dict[str, Any], name: str) -> bytes:
    """What came of a stream before its client went away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json", **key(name)}
    connection.request("POST", TEXT, json.dumps(body), headers)
    answer = connection.getresponse()
    begun = b"".join(answer.readline() for _ in range(6))
    answer.close()
    connection.close()
    return begun


def text_of(content: bytes) -> str:
    events = [line[6:] for line in content.decode().split("\n") if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_a_client_that_left_gets_the_same_answer_from_the_beginning(text_model: Path) -> None:
    executor = PacedExecutor(num_blocks=1024, step_s=0.01)
    with fake_server(text_model, executor) as server:
        body = {"prompt": "one", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0}
        body["stream"] = True
        begun = begin_and_leave(server, body, "left")
        server.wait_until_idle()
        again = server.post(TEXT, body, key("left"))
        assert "idempotent-replayed" not in again.headers, "it was not whole"
        first, whole = (json.loads(c.split(b"\n")[0][6:]) for c in (begun, again.body))
        assert (first["id"], first["created"]) == (whole["id"], whole["created"])
        assert text_of(begun) and text_of(again.body).startswith(text_of(begun))
        third = server.post(TEXT, body, key("left"))
        assert third.body == again.body and "idempotent-replayed" in third.headers


def test_keys_of_others_are_not_ones_own(text_model: Path, tmp_path: Path) -> None:
    secrets = {name: f"{name}-{'k' * 20}" for name in ("alice", "bob")}
    ring = KeyRing([ApiKey(name, digest_of(secret)) for name, secret in secrets.items()])
    with fake_server(text_model, keys=ring, state_folder=tmp_path) as server:
        body = {"prompt": "one", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        alice, bob = ({"Authorization": f"Bearer {secret}"} for secret in secrets.values())
        first = server.post(TEXT, body, {**alice, **key("same")})
        other = server.post(TEXT, body, {**bob, **key("same")})
        assert other.status == 200 and other.json["id"] != first.json["id"]
        assert server.post(TEXT, {**body, "max_tokens": 2}, {**bob, **key("same")}).status == 422
        assert server.post(TEXT, body, {**alice, **key("same")}).body == first.body


def test_an_answer_that_is_sent_again_costs_no_tokens(text_model: Path, tmp_path: Path) -> None:
    secret = "alice-" + "k" * 20
    alice = ApiKey("alice", digest_of(secret), tokens_per_day=1000)
    with fake_server(text_model, keys=KeyRing([alice]), state_folder=tmp_path) as server:
        body = {"prompt": "one", "max_tokens": 12, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {secret}", **key("once")}

        def used() -> int:
            return server.service.quotas.usage_of(alice).today

        server.post(TEXT, body, headers)
        wait_until(lambda: used() > 0)
        before = used()
        assert server.post(TEXT, body, headers).headers["idempotent-replayed"] == "true"
        assert used() == before


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def test_a_key_is_forgotten_after_a_day(text_model: Path, tmp_path: Path) -> None:
    clock = Clock()
    with fake_server(text_model, state_folder=tmp_path) as server:
        server.service.responses._now = clock
        body = {"prompt": "one", "max_tokens": 8}
        first = server.post(TEXT, body, key("old"))
        clock.ahead_s = 86000.0
        assert server.post(TEXT, body, key("old")).body == first.body
        clock.ahead_s = 86500.0
        other = server.post(TEXT, {**body, "max_tokens": 4}, key("old"))
        assert other.status == 200 and other.json["id"] != first.json["id"]


@pytest.mark.parametrize(
    "value", [b"", b" ", b"a" * 256, b"caf\xc3\xa9", b"a\tb", b"\x01", b"a\x7f", b"\xff\xfe"]
)
def test_hostile_keys_are_refused(tiny: RunningServer, value: bytes) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"prompt": "one", "max_tokens": 2}'
    length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    sent = head.encode() + b"Idempotency-Key: " + value + b"\r\n" + length + body
    with socket.create_connection(("127.0.0.1", tiny.port), PATIENCE_S) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_key_that_is_given_twice_is_refused(tiny: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=PATIENCE_S)
    body = json.dumps({"prompt": "one", "max_tokens": 2})
    connection.putrequest("POST", TEXT)
    for name, value in (
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Idempotency-Key", "one"),
        ("Idempotency-Key", "two"),
    ):
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    answer = connection.getresponse()
    assert answer.status == 400 and b"given once" in answer.read()
    connection.close()


def test_the_longest_key_is_taken(tiny: RunningServer) -> None:
    body = {"prompt": "one", "max_tokens": 2}
    assert tiny.post(TEXT, body, key("~" * 255)).status == 200
    assert tiny.post("/ping", {}, key("ping")).status == 200, "can be repeated as it is"


def test_openais_client_sends_keys(tiny: RunningServer) -> None:
    with tiny.client() as client:
        body: dict[str, Any] = {"model": NAME, "messages": QUESTION, **HOT}
        named: dict[str, Any] = {**body, "extra_headers": key("by hand")}
        one, two = (client.chat.completions.create(**named) for _ in range(2))
        assert one == two
        client._idempotency_header = "Idempotency-Key"  # one of its own for each request
        three = client.chat.completions.create(**body)
        assert three.id != one.id


def test_what_is_kept_is_bounded(text_model: Path, tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"max_idempotency_keys": 5, "max_idempotency_bytes": 20_000}
    with fake_server(text_model, state_folder=tmp_path, **bounds) as server:
        body = {"prompt": "one", "max_tokens": 8, "temperature": 1.0}
        first = server.post(TEXT, body, key("0"))
        for number in range(1, 8):
            server.post(TEXT, body, key(str(number)))
        assert server.service.responses.counts()["keyed_answers"] == 5
        assert server.post(TEXT, body, key("0")).json["id"] != first.json["id"]
        long = {"prompt": "one", "max_tokens": 200, "ignore_eos": True, "logprobs": 5, **HOT}
        long["max_tokens"] = 200
        large = [server.post(TEXT, long, key("large")) for _ in range(2)]
        assert len(large[0].body) > 2500
        assert "idempotent-replayed" not in large[1].headers, "computed again"
        assert untimed(large[0]) == untimed(large[1])


def untimed(answer: Reply) -> Any:
    found = answer.json
    found["usage"] = None  # the second prompt was cached
    return found


# ---- files and batches, which are made once


LINE = {"custom_id": "a", "url": TEXT, "method": "POST", "body": {"prompt": "one", "max_tokens": 2}}


def upload(server: RunningServer, name: str, line: Any = LINE, boundary: str = "x") -> Reply:
    parts = [
        'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        + json.dumps(line),
    ]
    body = "".join(f"--{boundary}\r\n{part}\r\n" for part in parts) + f"--{boundary}--\r\n"
    form = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    return server.post("/v1/files", body.encode(), {**form, **key(name)})


def begin_batch(server: RunningServer, file: str, name: str) -> Reply:
    body = {"input_file_id": file, "endpoint": TEXT, "completion_window": "24h"}
    return server.post("/v1/batches", body, key(name))


def num_listed(server: RunningServer, path: str) -> int:
    return len(server.get(path).json["data"])


def test_an_upload_that_is_sent_again_is_one_file(server: RunningServer) -> None:
    first = upload(server, "file")
    again = upload(server, "file", boundary="another")
    assert (first.status, again.status) == (200, 200)
    assert again.body == first.body and again.headers["idempotent-replayed"] == "true"
    assert num_listed(server, "/v1/files?purpose=batch") == 1
    other = upload(server, "file", {**LINE, "custom_id": "b"})
    assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")
    assert upload(server, "another").json["id"] != first.json["id"]
    wrong = [upload(server, "wrong", []) for _ in range(2)]
    assert [each.error["code"] for each in wrong] == ["invalid_file"] * 2


def test_two_uploads_at_once_are_one_file(server: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: upload(server, "file"), range(8)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert num_listed(server, "/v1/files?purpose=batch") == 1


def test_an_upload_waits_for_another_with_its_key_longer_than_bodies_may_take(
    text_model: Path, tmp_path: Path
) -> None:
    with fake_server(text_model, state_folder=tmp_path, body_timeout_s=1.0) as server:
        claim = "idempotency 0  file"
        assert server.service.claims.take(claim)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(upload, server, "file")
            time.sleep(1.3)
            assert not waiting.done()
            server.service.claims.leave(claim)
            assert waiting.result(PATIENCE_S).status == 200


def test_a_crash_before_the_answer_is_kept_makes_nothing_twice(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.responses, "end_keyed", lambda *_: None)
    files = [upload(server, "file") for _ in range(2)]
    assert files[0].body == files[1].body
    batches = [begin_batch(server, files[0].json["id"], "batch")]

    def is_done() -> bool:
        found: str = server.get(f"/v1/batches/{batches[0].json['id']}").json["status"]
        return found == "completed"

    server.wait_until(is_done)
    assert server.send("DELETE", f"/v1/files/{files[0].json['id']}").status == 200
    batches.append(begin_batch(server, files[0].json["id"], "batch"))
    assert batches[0].body == batches[1].body
    assert all("idempotent-replayed" not in reply.headers for reply in (*files, *batches))
    assert num_listed(server, "/v1/batches") == 1


def test_a_background_response_is_made_once_for_a_key(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its answer was not kept: it is not begun anew."""
    monkeypatch.setattr(server.service.responses, "end_keyed", lambda *_: None)
    body = {"input": "Hello", "temperature": 1.0, "max_output_tokens": 12, "background": True}
    first = server.post("/v1/responses", body, key("slow"))
    path = f"/v1/responses/{first.json['id']}"
    server.wait_until(lambda: server.get(path).json["status"] in ("completed", "incomplete"))
    ended = server.get(path).body
    assert server.post("/v1/responses", body, key("slow")).body == first.body
    assert server.get(path).body == ended
    assert computed(server) == 1


def test_a_background_response_has_the_seed_of_its_key(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is the same where a crash came before it was stored."""
    seeds: list[int] = []

    async def add(_: str, response: StoredResponse) -> None:
        seeds.append(response.seed)

    monkeypatch.setattr(server.service.background, "add", add)
    monkeypatch.setattr(server.service.responses, "end_keyed", lambda *_: None)
    for name in ("slow", "slow", "other"):
        server.post("/v1/responses", {"input": "Hello", "background": True}, key(name))
    assert seeds[0] == seeds[1] != seeds[2]


def test_what_is_made_has_its_name_on_disk_before(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could else take the name away and leave the batch."""
    events: list[str] = []
    store = server.service.responses

    def note(owner: Any, method: str, event: str) -> None:
        own = getattr(owner, method)

        def noted(*args: Any) -> Any:
            events.append(event)
            return own(*args)

        monkeypatch.setattr(owner, method, noted)

    note(store, "begin_keyed", "named")
    note(store, "sync", "synced")
    note(JobStore, "add_file", "made")
    note(JobStore, "add_batch", "made")
    file = upload(server, "file").json["id"]
    begin_batch(server, file, "batch")
    assert events == ["named", "synced", "made"] * 2
    events.clear()
    server.post(TEXT, {"prompt": "one", "max_tokens": 2}, key("answer"))
    assert events == ["named"], "an answer can be computed again"


def test_openais_client_uploads_with_a_key(server: RunningServer) -> None:
    with server.client() as client:
        given: dict[str, Any] = {"purpose": "batch", "extra_headers": key("file")}
        file = ("in.jsonl", json.dumps(LINE).encode())
        one, two = (client.files.create(file=file, **given) for _ in range(2))
        assert one == two


# ---- restarts, crashes, several processes


def test_answers_survive_a_restart(text_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "one", **HOT, "stream": True}
    with model_server(text_model, state_folder=tmp_path) as server:
        first = server.post(TEXT, body, key("kept"))
    with model_server(text_model, state_folder=tmp_path) as server:
        again = server.post(TEXT, body, key("kept"))
        assert again.body == first.body and again.headers["idempotent-replayed"] == "true"
        assert computed(server) == 0
        assert server.post(TEXT, {**body, "n": 2}, key("kept")).status == 422


def test_another_model_makes_another_answer() -> None:
    stored = AnswerIdentity("name", 1000, 7)
    one = stored.of_model("one")
    assert one == stored.of_model("one") == one.of_model("two"), "bound once"
    other = stored.of_model("two")
    assert one.name != other.name and one.seed != other.seed and one.created == other.created
    ids = [IdSource(identity).new("resp") for identity in (one, one, other)]
    assert ids[0] == ids[1] != ids[2]
    assert IdSource().new("resp") != IdSource().new("resp")


def test_without_a_folder_a_restart_forgets(text_model: Path) -> None:
    body = {"prompt": "one", **HOT}
    found = []
    for _ in range(2):
        with model_server(text_model) as server:
            found.append(server.post(TEXT, body, key("kept")))
            assert server.post(TEXT, body, key("kept")).body == found[-1].body
    assert found[0].json["id"] != found[1].json["id"]


def test_a_server_that_was_killed_computes_the_same_answer(
    text_model: Path, tmp_path: Path
) -> None:
    long = {"prompt": "one", "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    long["stream"] = True
    arguments = (text_model, *SMALL, "--state", tmp_path, "--served-model-name", "same")
    with serving(*arguments) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json", **key("cut")}
        connection.request("POST", TEXT, json.dumps(long), headers)
        answer = connection.getresponse()
        begun = b"".join(answer.readline() for _ in range(40))
        server.process.kill()
        server.wait()
        connection.close()
    with serving(*arguments) as server:
        status, whole = ask(server, TEXT, long, key("cut"))
        assert status == 200 and whole.endswith("data: [DONE]\n\n")
        assert json.loads(begun.split(b"\n")[0][6:])["id"] in whole
        assert text_of(whole.encode()).startswith(text_of(begun))


def test_processes_share_what_keys_stand_for(text_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "one", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    arguments = (text_model, *SMALL, "--state", tmp_path, "--api-processes", "2")
    with serving(*arguments, log=tmp_path / "log") as server:
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, server, TEXT, body, key("shared")) for _ in range(12)]
            answers = [each.result() for each in asked]
        assert {status for status, _ in answers} == {200}
        assert len({text for _, text in answers}) == 1
        assert ask(server, TEXT, {**body, "n": 2}, key("shared"))[0] == 422
        status, metrics = ask(server, "/metrics")
        counted = re.search(r"^quire:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
        assert status == 200 and counted is not None
        assert float(counted[1]) == 40, "computed once"
