"""The load generator against a real server on a loopback port, with known delays and faults."""

import asyncio
import time
from dataclasses import replace
from random import Random

import pytest
from tests.bench.openai_like_server import Behaviour, OpenAILikeServer, serving

from quire.core.errors import ConfigError
from quire_bench.http_client import connect, parse_endpoint
from quire_bench.lengths import MIXES, Bounds, fixed
from quire_bench.load import (
    Api,
    Outcome,
    PlannedRequest,
    Target,
    check_server,
    closed_loop,
    draw_arrivals,
    draw_requests,
    find_model,
    open_loop,
    perform,
)
from quire_bench.load_summary import counted_by, errors, figures, percentile, samples


def target_of(server: OpenAILikeServer, timeout_s: float = 20.0) -> Target:
    return Target(parse_endpoint(server.url), timeout_s=timeout_s)


async def performed(target: Target, request: PlannedRequest) -> Outcome:
    async with connect(target.endpoint) as client:
        return await perform(client, target, request, time.perf_counter())


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_stream_is_timed_and_its_tokens_are_counted(api: Api, is_chunked: bool) -> None:
    with serving(Behaviour(first_delay_s=0.05, gap_s=0.02, is_chunked=is_chunked)) as server:
        target = replace(target_of(server), api=api, model="tiny", ignore_eos=True)
        outcome = asyncio.run(performed(target, PlannedRequest("one two three", 4)))
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.usage_tokens, outcome.completion_tokens) == (3, 4, 4)
    assert outcome.first_token_s is not None
    assert outcome.first_token_s >= 0.05  # chat's first chunk, without text, is no token
    assert len(outcome.gaps) == 3
    # The first piece may be read late, and the gap after it be short: only the whole is held.
    assert outcome.first_token_s + sum(outcome.gaps) >= 0.05 + 3 * 0.02
    (body,) = server.behaviour.bodies
    assert body["model"] == "tiny"
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) == (api == "chat")


def test_what_was_not_asked_for_is_not_sent() -> None:
    with serving(Behaviour()) as server:
        target = replace(target_of(server), wants_usage=False)
        outcome = asyncio.run(performed(target, PlannedRequest("one", 3)))
    assert set(server.behaviour.bodies[0]) == {"prompt", "max_tokens", "temperature", "stream"}
    assert outcome.usage_tokens is None
    assert outcome.completion_tokens == 3  # pieces
    assert counted_by([outcome]) == "pieces"


def test_a_server_that_sends_several_tokens_a_piece_is_seen_to() -> None:
    with serving(Behaviour(tokens_per_piece=3)) as server:
        load = asyncio.run(closed_loop(target_of(server), iter([PlannedRequest("one", 4)]), 1))
    assert figures(load)["completion_tokens"] == 12
    assert figures(load)["tokens_per_piece"] == 3


def test_errors_are_counted_by_kind_and_the_other_requests_go_on() -> None:
    behaviour = Behaviour(statuses={1: 503, 2: 429, 3: 503}, breaks={4}, hangs={5}, says_error={6})
    with serving(behaviour) as server:
        target = target_of(server, timeout_s=3.0)
        requests = [PlannedRequest("one", 3) for _ in range(9)]
        load = asyncio.run(closed_loop(target, iter(requests), 1))
    assert errors(load.outcomes) == {
        "http 503": 2,
        "http 429": 1,
        "broken stream": 1,
        "timeout": 1,
        "error event": 1,
    }
    found = figures(load)
    assert (found["requests"], found["completed"], found["errors"]) == (9, 3, 6)
    assert found["completion_tokens"] == 9
    assert [len(values) for values in samples(load.outcomes).values()] == [3, 6, 3]
    assert next(o.detail for o in load.outcomes if o.error == "http 429") == "HTTP 429: not now"


def test_prompts_within_a_spread_are_of_every_length_in_it_and_of_no_other() -> None:
    requests = draw_requests(Random(1), fixed(70, 64, prompt_spread=40), Bounds(1.0, 110, 64), 2000)
    assert {len(request.prompt.split()) for request in requests} == set(range(30, 111))
    assert {request.max_tokens for request in requests} == {64}
    with pytest.raises(
        ConfigError, match=r"--prompt-spread must be from 0 to below .*\(5\), got 5"
    ):
        fixed(5, 3, prompt_spread=5)


def test_a_closed_loop_keeps_so_many_requests_running_and_sends_each_once() -> None:
    with serving(Behaviour(first_delay_s=0.1, gap_s=0.005, together=3)) as server:
        requests = draw_requests(Random(1), fixed(5, 3), Bounds(), 12)
        load = asyncio.run(closed_loop(target_of(server), iter(requests), 3))
        assert server.behaviour.most_present == 3
    assert sorted(body["prompt"] for body in server.behaviour.bodies) == sorted(
        request.prompt for request in requests
    )
    assert len(load.outcomes) == 12
    assert load.seconds >= 4 * 0.11


def test_an_open_loop_counts_from_when_a_request_was_due_and_waits_for_none() -> None:
    with serving(Behaviour(max_running=1, first_delay_s=0.5, together=4)) as server:
        requests = [PlannedRequest("one", 1, due_s=0.001 * place) for place in range(4)]
        load = asyncio.run(open_loop(target_of(server), requests))
    waits = sorted(outcome.first_token_s or 0.0 for outcome in load.outcomes)
    assert waits[-1] >= 4 * 0.5 - 0.003  # it queued behind three, and that is told
    assert all(outcome.sent_at >= outcome.due_at for outcome in load.outcomes)
    assert max(outcome.sent_at for outcome in load.outcomes) < min(
        outcome.ended_at for outcome in load.outcomes
    )


def test_the_model_is_asked_of_the_server_or_left_out() -> None:
    with serving(Behaviour()) as server:
        assert asyncio.run(find_model(target_of(server))) == "tiny"
    with serving(Behaviour(has_models=False)) as server:
        assert asyncio.run(find_model(target_of(server))) is None


def test_a_server_that_cannot_be_used_is_told_of_in_words() -> None:
    with serving(Behaviour(api_key="secret")) as server:
        with pytest.raises(ConfigError, match="wants a key"):
            asyncio.run(find_model(target_of(server)))
        with pytest.raises(ConfigError, match="wants a key"):
            asyncio.run(check_server(target_of(server)))
        keyed = Target(parse_endpoint(server.url, api_key="secret"))
        assert asyncio.run(check_server(keyed)).error is None
    with pytest.raises(ConfigError, match="no server answers"):
        asyncio.run(find_model(target_of(server)))  # it has gone
    with (
        serving(Behaviour(speaks_nonsense=True)) as server,
        pytest.raises(ConfigError, match="not OpenAI-compatible"),
    ):
        asyncio.run(check_server(target_of(server)))
    with serving(Behaviour(hangs={0})) as server, pytest.raises(ConfigError, match="--timeout"):
        asyncio.run(check_server(target_of(server, timeout_s=0.2)))
    with serving(Behaviour(statuses={0: 404})) as server, pytest.raises(ConfigError, match="--api"):
        asyncio.run(check_server(target_of(server)))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://127.0.0.1", "expected http"),
        ("127.0.0.1:8000", "expected http"),
        ("http://127.0.0.1:99999", "ort"),
        ("http://user:word@127.0.0.1", "--api-key"),
        ("http://192.0.2.1:8000", "--allow-remote"),
        ("http://127.0.0.1/a b", "blanks"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_endpoint(url)


def test_a_url_may_leave_out_the_version_and_name_another_machine_where_allowed() -> None:
    assert parse_endpoint("http://127.0.0.1:8000").url == "http://127.0.0.1:8000/v1"
    assert parse_endpoint("http://localhost:8000/v1/").base == "/v1"
    assert parse_endpoint("http://[::1]:8000/api").url == "http://[::1]:8000/api/v1"
    assert parse_endpoint("https://192.0.2.1", allow_remote=True).port == 443


async def _answered(reply: bytes) -> tuple[str | None, str]:
    """The kind of error that a raw reply makes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        target = Target(parse_endpoint(f"http://127.0.0.1:{port}"), timeout_s=5.0)
        outcome = await performed(target, PlannedRequest("one", 3))
        return outcome.error, outcome.detail


_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
_CHUNKED = _STREAM + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", "disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "bad reply"),
        (b"HTTP/1.1 200 OK\r\nContent-Ty", "disconnected"),
        (_CHUNKED + b"zz\r\n", "bad reply"),
        (_CHUNKED + b"-5\r\n", "bad reply"),
        (_CHUNKED + b"ff\r\ndata: {}\n\n", "broken stream"),
        (_CHUNKED + b"0\r\n\r\n", "broken stream"),  # whole, but without [DONE]
        (_STREAM + b"Content-Length: many\r\n\r\n", "bad reply"),
        (_STREAM + b"Content-Length: 99\r\n\r\ndata: [DO", "broken stream"),
        (_STREAM + b"\r\ndata: nonsense\n\n", "bad reply"),
        (_STREAM + b"\r\ndata: [1]\n\n", "bad reply"),
        (_STREAM + b"\r\ndata: {}\n\n: remark\nevent: x\n\ndata: [DONE]\n\n", None),
    ],
)
def test_a_reply_that_breaks_the_rules_is_an_error_of_its_kind(
    reply: bytes, kind: str | None
) -> None:
    assert asyncio.run(_answered(reply))[0] == kind


def test_lengths_are_seeded_bounded_and_of_the_published_middle() -> None:
    bounds = Bounds(max_prompt_tokens=100_000, max_new_tokens=100_000)
    draws = [MIXES["chat"].scaled_draw(Random(seed), bounds) for seed in range(4000)]
    mean = sum(prompt for prompt, _ in draws) / len(draws)
    assert 161 * 0.9 < mean < 161 * 1.1
    assert percentile([new for _, new in draws], 0.5) < 338  # type: ignore[operator]
    tight = Bounds(scale=0.1, max_prompt_tokens=9, max_new_tokens=7)
    small = [MIXES["code"].scaled_draw(Random(seed), tight) for seed in range(50)]
    assert {prompt for prompt, _ in small} <= set(range(1, 10))
    assert {new for _, new in small} <= set(range(1, 8))
    first, second = (draw_requests(Random(5), MIXES["chat"], bounds, 3) for _ in range(2))
    assert first == second
    assert len({request.prompt for request in first}) == 3
    with pytest.raises(ConfigError, match="--scale"):
        Bounds(scale=0.0)


def test_arrivals_keep_the_rate_and_the_duration() -> None:
    times = draw_arrivals(Random(3), 50.0, 20.0)
    assert times == sorted(times)
    assert times[-1] < 20.0
    assert 850 < len(times) < 1150
    assert draw_arrivals(Random(3), 0.001, 1.0) == [0.0]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50.0, 95.0, 99.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None
