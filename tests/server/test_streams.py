"""Streams: what is on the wire, pings, slow readers, tokens that share frames, leaving."""

import gc
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.server.raw import exchange, head, read_all
from tests.server.servers import PATIENCE_S, QUESTION, PacedExecutor, RunningServer, fake_server

from quire.executors.fake import Faults

JSON = "Content-Type: application/json"


def request_bytes(path: str, **body: Any) -> bytes:
    content = json.dumps(body).encode()
    return head(path, JSON, f"Content-Length: {len(content)}", "Connection: close") + content


def completion_bytes(max_tokens: int, prompt: object = "hello", **more: Any) -> bytes:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return request_bytes("/v1/completions", stream=True, **fields)


def events(answer: bytes) -> list[str]:
    """Without pings, of which there are more the slower the machine is."""
    return [event for event in events_and_pings(answer) if event != ": ping"]


def events_and_pings(answer: bytes) -> list[str]:
    """The data of each event, taken out of the chunks they came in."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    assert body.endswith(b"\n\n")
    return body.decode().split("\n\n")[:-1]


def texts(answer: bytes) -> list[str]:
    data = events(answer)[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in data]
    return [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]


@pytest.fixture(scope="module")
def paced(text_model: Path) -> Iterator[RunningServer]:
    """Steps of 20 ms."""
    executor = PacedExecutor(step_s=0.02, num_blocks=1024)
    with fake_server(text_model, executor, ping_interval_s=1.0) as server:
        yield server


def test_the_wire_is_server_sent_events(fake: RunningServer) -> None:
    answer = exchange(fake.port, completion_bytes(4))
    assert b"content-type: text/event-stream" in answer
    assert b"cache-control: no-cache" in answer
    *data, done = events(answer)
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") for event in data)


def test_every_chunk_is_whole_json_of_openais_shape(fake: RunningServer) -> None:
    body = request_bytes(
        "/v1/chat/completions",
        messages=QUESTION,
        stream=True,
        n=2,
        logprobs=True,
        max_tokens=5,
        stream_options={"include_usage": True},
    )
    chunks = [json.loads(e.removeprefix("data: ")) for e in events(exchange(fake.port, body))[:-1]]
    shared = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert all(set(chunk) == shared for chunk in chunks)
    *choices, last = chunks
    for chunk in choices:
        [choice] = chunk["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert chunk["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] <= 10


@pytest.mark.parametrize("is_chat", [True, False])
def test_counts_so_far_come_with_every_chunk_on_request(fake: RunningServer, is_chat: bool) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    body = said if is_chat else {"prompt": "hi"}
    body |= {"max_tokens": 8, "ignore_eos": True, "n": 2, "stream": True}
    reply = fake.post(path, {**body, "stream_options": {"continuous_usage_stats": True}})
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in reply.body.decode().split("\n\n")
        if line.startswith("data: {")
    ]
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 16
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    whole = fake.post(path, {**body, "stream": False}).json["usage"]
    assert usages[-1].items() <= whole.items()


def test_text_is_escaped_on_the_wire(fake: RunningServer) -> None:
    """The hash model says anything: quotes, line breaks, halves of characters."""
    prompts = [[number, 7] for number in range(40)]
    whole = fake.post(
        "/v1/completions", {"prompt": prompts, "max_tokens": 40, "ignore_eos": True, "seed": 1}
    )
    wanted = [choice["text"] for choice in whole.json["choices"]]
    assert any('"' in text or "\\" in text or "\n" in text for text in wanted)
    found = [""] * len(prompts)
    for event in events(exchange(fake.port, completion_bytes(40, prompts, seed=1)))[:-1]:
        [choice] = json.loads(event.removeprefix("data: "))["choices"]
        found[choice["index"]] += choice["text"]
    assert found == wanted


def test_a_silent_stream_is_pinged(text_model: Path) -> None:
    executor = PacedExecutor(step_s=1.0)
    with fake_server(text_model, executor, ping_interval_s=0.1) as server:
        data = events_and_pings(exchange(server.port, completion_bytes(2)))
    assert data[0] == ": ping", "it is opened before the first token"
    assert data.count(": ping") >= 2
    assert [event for event in data if event != ": ping"][-1] == "data: [DONE]"


def test_a_busy_stream_is_not_pinged(paced: RunningServer) -> None:
    """Two intervals long, and never silent for one, unless the machine is: some try is not."""
    assert any(b": ping" not in exchange(paced.port, completion_bytes(100)) for _ in range(5))


def test_a_lone_stream_gets_a_frame_a_token(text_model: Path) -> None:
    """Unless the machine is too busy to write in time: some try of five is not."""
    ask = completion_bytes(12, logprobs=0)
    with fake_server(text_model, PacedExecutor(step_s=0.1)) as server:
        assert 12 in (len(texts(exchange(server.port, ask))) for _ in range(5))


def test_with_many_streams_tokens_share_frames(paced: RunningServer) -> None:
    """A hundred streams may get a thousand frames a second together: one each in 100 ms."""
    answers: list[bytes] = []
    ask = completion_bytes(40, logprobs=0, temperature=0)
    threads = [
        threading.Thread(target=lambda: answers.append(exchange(paced.port, ask)))
        for _ in range(60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    frames = [len(texts(answer)) for answer in answers]
    alone = texts(exchange(paced.port, ask))
    assert all("".join(texts(answer)) == "".join(alone) for answer in answers)
    assert max(frames) < 30, "sixty streams at fifty steps a second would be 3,000 frames a second"


def test_streams_that_wait_for_their_turn_take_no_frames_from_the_others(text_model: Path) -> None:
    """One at a time: it alone is counted, and one that has ended and writes its last frames."""
    counted: list[int] = []
    ask = completion_bytes(10, logprobs=0)
    with fake_server(
        text_model, PacedExecutor(step_s=0.01, num_blocks=256), {"max_batch_size": 1}
    ) as server:
        threads = [threading.Thread(target=lambda: exchange(server.port, ask)) for _ in range(30)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if server.engine.snapshot().num_waiting > 10:
                counted.append(server.service.num_streams)
            time.sleep(0.001)
    assert 1 in counted
    assert median(counted) <= 2


def test_a_slow_reader_gets_everything_in_fewer_frames(text_model: Path) -> None:
    """Ten megabytes: more than the sockets' buffers hold."""
    engine = {"max_unread_tokens": 64}
    executor = PacedExecutor(max_context=4096, num_blocks=1024)
    fields = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "n": 10, "seed": 3}
    with fake_server(text_model, executor, engine) as server:
        ask = request_bytes("/v1/completions", **fields, logprobs=20, stream=True)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(PATIENCE_S)
            slow.connect(("127.0.0.1", server.port))
            slow.sendall(ask)
            # It keeps nothing of the machine meanwhile.
            server.wait_until(lambda: set(server.engine.snapshot().waiting_by_reason) == {"unread"})
            found = [""] * 10
            num_frames = 0
            for event in events(read_all(slow))[:-1]:
                [choice] = json.loads(event.removeprefix("data: "))["choices"]
                found[choice["index"]] += choice["text"]
                num_frames += 1
        whole = server.post("/v1/completions", fields).json
        assert found == [choice["text"] for choice in whole["choices"]]
        assert num_frames < 10 * 1500 / 2


def test_a_request_that_fails_early_has_a_status_of_its_own(fake: RunningServer) -> None:
    answer = exchange(fake.port, completion_bytes(5, list(range(3, 500)) * 2))
    assert answer.startswith(b"HTTP/1.1 400 ")
    unknown = exchange(fake.port, completion_bytes(5, model="another"))
    assert unknown.startswith(b"HTTP/1.1 404 ")


def test_a_fault_in_the_middle_ends_the_stream_with_an_error(text_model: Path) -> None:
    executor = PacedExecutor(faults=Faults(nan=lambda row: row.completion_position == 5))
    with fake_server(text_model, executor) as server:
        *data, last = events(exchange(server.port, completion_bytes(20)))
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "row_fault"
        assert "NaN" in error["message"]
        assert 1 <= len(data) <= 5
        early = server.post("/v1/completions", {"prompt": "x", "max_tokens": 9, "ignore_eos": True})
        assert (early.status, early.error["code"]) == (500, "row_fault")
        server.wait_until_idle()


def leave(port: int, ask: bytes, chance: random.Random) -> None:
    """Send a request and go away at some point: at once, politely, or by a reset."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(ask[: len(ask) - (9 if chance.random() < 0.05 else 0)])
        for _ in range(chance.choice([0, 0, 1, 1, 2, 5])):
            if not connection.recv(chance.choice([1, 100, 4096])):
                return
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def disconnect(server: RunningServer, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.random()
        prompt = [chance.randrange(3, 500) for _ in range(chance.randrange(1, 60))]
        if kind < 0.7:
            ask = completion_bytes(chance.randrange(1, 200), prompt, n=chance.choice([1, 1, 2, 4]))
        else:
            body = {"prompt": prompt, "max_tokens": chance.randrange(1, 80)}
            ask = request_bytes("/v1/completions", ignore_eos=True, **body)
        try:
            leave(server.port, ask, chance)
        except (ConnectionResetError, TimeoutError, BrokenPipeError):
            continue


def test_a_thousand_clients_that_go_away_leak_nothing(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = PacedExecutor(step_s=0.0005, num_blocks=256)
    with fake_server(
        text_model, executor, {"max_queue_requests": 64}, body_timeout_s=0.5
    ) as server:
        # Partial bodies wait for their timeout; clients in threads, so that they overlap.
        threads = [
            threading.Thread(target=disconnect, args=(server, 125, seed)) for seed in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Some who left may still be about to be let in: who comes now comes after them.
        server.wait_until(lambda: server.post("/v1/completions", {"prompt": "hi"}).status == 200)
        server.wait_until_idle()
        ended = server.engine.stats.requests_ended
        assert ended.get("cancelled", 0) > 100
        assert not ended.get("failed")
        server.wait_until(lambda: server.service.num_streams == 0)
    gc.collect()  # only then does a future complain that nobody looked at it
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_client_that_goes_away_frees_its_blocks_within_a_step(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.05, keep_plans=True)
    with fake_server(text_model, executor) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as leaving:
            leaving.sendall(completion_bytes(400))
            leaving.recv(100)
            executor.step_s = 2.0  # time enough to notice within a step that it left
        steps_before = len(executor.plans)
        server.wait_until_idle()
        assert len(executor.plans) - steps_before <= 2, "the one in flight, and one that raced it"
