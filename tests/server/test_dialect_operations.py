"""What holds for every route holds for Responses and Messages: keys, quotas, limits, the log, the
audit log, traces, cancelling, time limits and draining."""

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.server.answers import data_of
from tests.server.raw import head
from tests.server.servers import NAME, PATIENCE_S, PacedExecutor, RunningServer, fake_server
from tests.server.test_errors import fields_of

from quire.server.keys import ApiKey, KeyRing, digest_of


class Api(NamedTuple):
    path: str
    body: dict[str, Any]
    max_tokens: str
    error_type: str  # of a key's limits

    def sent(self, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        return {"model": NAME, **self.body, self.max_tokens: max_tokens, **fields}


RESPONSES = Api("/v1/responses", {"input": "Hello"}, "max_output_tokens", "rate_limit_error")
MESSAGES = Api(
    "/v1/messages",
    {"messages": [{"role": "user", "content": "Hello"}]},
    "max_tokens",
    "rate_limit_error",
)
SECRET = "alice-0123456789abcdef"
KEY = {"x-api-key": SECRET}
each_api = pytest.mark.parametrize("api", [RESPONSES, MESSAGES], ids=["responses", "messages"])


def ring(**limits: Any) -> KeyRing:
    return KeyRing([ApiKey("alice", digest_of(SECRET), **limits)])


@pytest.fixture
def slow(text_model: Path) -> Iterator[RunningServer]:
    """A step in 50 ms: a long answer is still being made when something happens to it."""
    with fake_server(text_model, PacedExecutor(step_s=0.05)) as server:
        yield server


@each_api
def test_the_call_is_logged_audited_and_counted_as_its_keys(
    text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, api: Api
) -> None:
    audit = tmp_path / "audit"
    with fake_server(text_model, keys=ring(), audit_log=audit, audit_requests=True) as server:
        with caplog.at_level(logging.INFO, logger="quire"):
            reply = server.post(api.path, api.sent(user="someone"), KEY)
        assert reply.status == 200
        usage = reply.json["usage"]
        stats = server.get("/v1/stats", KEY).json["own"]
        assert stats["completion_tokens"] == usage["output_tokens"] > 0
    fields = fields_of(caplog, reply.headers["x-request-id"])
    assert (fields["path"], fields["key"], fields["user"]) == (api.path, "alice", "someone")
    assert fields["completion_tokens"] == usage["output_tokens"]
    written = [json.loads(row) for row in audit.read_text().splitlines()]
    assert api.path in [row.get("path") for row in written]


@each_api
def test_a_keys_quota_holds(text_model: Path, api: Api) -> None:
    with fake_server(text_model, keys=ring(tokens_per_minute=100)) as server:
        assert server.post(api.path, api.sent(), KEY).status == 200
        reply = server.post(api.path, api.sent(200), KEY)
        assert reply.status == 429
        assert reply.error["type"] == api.error_type
        assert "retry-after" in reply.headers


@each_api
def test_a_full_queue_is_said_as_the_api_says_it(text_model: Path, api: Api) -> None:
    engine = {"max_queue_requests": 1, "max_batch_size": 1}
    with (
        fake_server(text_model, PacedExecutor(step_s=0.05), engine) as server,
        ThreadPoolExecutor(6) as pool,
    ):
        replies = list(pool.map(lambda _: server.post(api.path, api.sent(20)), range(6)))
    expected = (529, "overloaded_error") if api is MESSAGES else (429, "rate_limit_error")
    refused = [(reply.status, reply.error["type"]) for reply in replies if reply.status != 200]
    assert refused and set(refused) == {expected}


@each_api
def test_a_trace_comes_where_it_is_asked_for(fake: RunningServer, api: Api) -> None:
    headers = {"x-quire-trace": "1"}
    [trace] = fake.post(api.path, api.sent(), headers).json["quire_trace"]
    assert trace["prompt_tokens"] > 0
    assert "quire_trace" not in fake.post(api.path, api.sent()).json
    events = data_of(fake.post(api.path, api.sent(stream=True), headers).body)
    [found] = [
        holder["quire_trace"]
        for event in events
        for holder in (event, event.get("response", {}))
        if "quire_trace" in holder
    ]
    assert found[0]["prompt_tokens"] == trace["prompt_tokens"]


@each_api
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_client_that_goes_away_ends_its_request(
    slow: RunningServer, api: Api, is_streamed: bool
) -> None:
    body = json.dumps(api.sent(400, stream=is_streamed, temperature=0)).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    address = ("127.0.0.1", slow.port)
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(head(api.path, *lines) + body)
        slow.wait_until(lambda: slow.engine.snapshot().num_running > 0)
    slow.wait_until_idle()
    assert slow.engine.stats.requests_ended == {"cancelled": 1}


@each_api
def test_a_deadline_is_a_timeout(slow: RunningServer, api: Api) -> None:
    whole = slow.post(api.path, api.sent(400, timeout=0.05, temperature=0))
    assert (whole.status, whole.error["type"]) == (408, "timeout_error")
    body = api.sent(400, timeout=0.3, stream=True, temperature=0)
    events = data_of(slow.post(api.path, body).body)
    assert events[-1]["type"] == ("error" if api is MESSAGES else "response.failed")
    assert "ran out of time" in json.dumps(events[-1])


@each_api
def test_a_server_that_drains_takes_no_more(slow: RunningServer, api: Api) -> None:
    asyncio.run_coroutine_threadsafe(slow.service.drain(), slow.loop).result(PATIENCE_S)
    reply = slow.post(api.path, api.sent())
    assert reply.status == 503
    assert "shutting down" in reply.error["message"]
