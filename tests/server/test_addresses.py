"""Whose request it is behind proxies, what an address may hold, and wrong keys slowed down."""

import asyncio
import threading
from pathlib import Path

import pytest
from tests.server.servers import PATIENCE_S, PacedExecutor, Reply, RunningServer, fake_server

from quire.core.errors import ConfigError
from quire.server import connections, middleware
from quire.server.connections import FailedKeys, Proxies, read_networks
from quire.server.keys import ApiKey, KeyRing, digest_of

KEY = "k" * 20
RING = KeyRing([ApiKey("alice", digest_of(KEY))])
LOOPBACK = read_networks(["127.0.0.0/8"])


# ---- who it is


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("203.0.113.9", {"x-forwarded-for": "198.51.100.1"}, "203.0.113.9"),
        ("10.0.0.1", {}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "198.51.100.1"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "1.2.3.4, 198.51.100.1"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "1.2.3.4,198.51.100.1 , 10.0.0.2"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "10.0.0.3, 10.0.0.2"}, "10.0.0.3"),
        ("10.0.0.1", {"x-forwarded-for": "198.51.100.1:4711"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "[2001:db8::7]:4711"}, "2001:db8::7"),
        ("10.0.0.1", {"x-forwarded-for": "2001:db8::7"}, "2001:db8::7"),
        ("10.0.0.1", {"x-forwarded-for": "unknown"}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "1.2.3.4, nonsense"}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "1.2.3.4, , 10.0.0.2"}, "10.0.0.2"),
        ("10.0.0.1", {"x-forwarded-for": ""}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "9.9.9.9," * 5000 + "198.51.100.1"}, "198.51.100.1"),
        ("::ffff:10.0.0.1", {"x-forwarded-for": "198.51.100.1"}, "198.51.100.1"),
        ("10.0.0.1", {"forwarded": "for=198.51.100.1;proto=https"}, "198.51.100.1"),
        ("10.0.0.1", {"forwarded": 'proto=https;For="[2001:db8::7]:47"'}, "2001:db8::7"),
        ("10.0.0.1", {"forwarded": "for=1.2.3.4, for=198.51.100.1, for=10.0.0.2"}, "198.51.100.1"),
        ("10.0.0.1", {"forwarded": "for=_hidden"}, "10.0.0.1"),
        ("10.0.0.1", {"forwarded": "for=1.2.3.4", "x-forwarded-for": "5.6.7.8"}, "5.6.7.8"),
    ],
)
def test_the_client_is_the_right_most_that_is_not_trusted(
    peer: str, headers: dict[str, str], client: str
) -> None:
    proxies = Proxies(read_networks(["10.0.0.0/8"]))
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert proxies.client_of(peer, encoded) == client


def test_lists_over_several_headers_are_one() -> None:
    headers = [(b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-for", b"198.51.100.1")]
    assert Proxies(LOOPBACK).client_of("127.0.0.1", headers) == "198.51.100.1"


def test_without_proxies_nobody_is_believed() -> None:
    assert Proxies().client_of("127.0.0.1", [(b"x-forwarded-for", b"1.2.3.4")]) == "127.0.0.1"


@pytest.mark.parametrize("name", ["proxy.example.com", "10.0.0.1/8", "10.0.0.0/33", "all"])
def test_what_is_no_network_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="trusted proxy"):
        read_networks([name])


# ---- what an address may hold


def test_a_proxied_client_has_its_share_of_requests(text_model: Path) -> None:
    """Others behind the same proxy, and the proxy's own requests, have theirs."""
    executor = PacedExecutor(step_s=0.02)
    with fake_server(
        text_model, executor, trusted_proxies=LOOPBACK, max_connections_per_address=2
    ) as server:
        greedy = {"X-Forwarded-For": "198.51.100.1"}
        body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}
        replies: list[Reply] = []
        threads = [
            threading.Thread(
                target=lambda: replies.append(server.post("/v1/completions", body, greedy))
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: len(replies) == 3)
        for reply in replies:
            assert (reply.status, reply.error["code"]) == (429, "too_many_connections")
            assert reply.headers["retry-after"] == "1"
        assert server.get("/health", {"X-Forwarded-For": "198.51.100.2"}).status == 200
        assert server.get("/health").status == 200
        executor.step_s = 0.0
        for thread in threads:
            thread.join()
        assert server.get("/health", greedy).status == 200, "its places are free again"
        assert not server.service.connections._by_group


# ---- wrong keys


def test_wrong_keys_cost_more_and_more_and_are_forgotten() -> None:
    now = 0.0
    failed = FailedKeys(lambda: now)
    assert [failed.add("a") for _ in range(10)] == [0.0] * 10
    assert [failed.add("a") for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert failed.add("b") == 0.0
    now = 18 * 6.0
    assert failed.add("a") == 0.0


def test_addresses_that_failed_are_remembered_within_bounds() -> None:
    failed = FailedKeys()
    for number in range(10_000):
        failed.add(str(number))
    assert len(failed) == 4096
    for _ in range(10):
        failed.add("busy")
    assert failed.add("busy") > 0


def wrong(server: RunningServer, number: int = 0) -> Reply:
    headers = {"Authorization": f"Bearer wrong-key-{number:010}"}
    return server.post("/v1/completions", {"prompt": "hi"}, headers)


def right(server: RunningServer) -> int:
    return server.get("/v1/models", {"Authorization": f"Bearer {KEY}"}).status


def test_wrong_keys_are_slowed_down_and_right_ones_are_not(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(middleware, "sleep", sleep)
    monkeypatch.setattr(connections, "_FORGOTTEN_S", 1e12)
    with fake_server(text_model, keys=RING, trusted_proxies=LOOPBACK) as server:
        server.headers["X-Forwarded-For"] = "198.51.100.1"
        assert {wrong(server, number).status for number in range(10)} == {401}
        assert waits == []
        late = [wrong(server) for _ in range(8)]
        assert {(reply.status, reply.error["code"]) for reply in late} == {
            (429, "too_many_failed_keys")
        }
        assert [int(reply.headers["retry-after"]) for reply in late][:4] == [1, 2, 4, 8]
        assert max(int(reply.headers["retry-after"]) for reply in late) <= 60
        assert waits == pytest.approx([1, 2, 2, 2, 2, 2, 2, 2])
        assert right(server) == 200
        assert server.get("/v1/models").status == 401, "no key is no wrong key"
        waits.clear()
        del server.headers["X-Forwarded-For"]
        local = [wrong(server) for _ in range(13)]
        assert {reply.status for reply in local} == {401}, "loopback is anybody's"
        assert [reply.headers.get("retry-after") for reply in local[9:]] == [None, "1", "2", "4"]
        assert waits == [0.1, 0.1, 0.1]


def test_answers_to_wrong_keys_wait_within_bounds(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    num_waiting = [0]

    async def sleep(_: float) -> None:
        num_waiting[0] += 1
        while not may_answer.is_set():
            await asyncio.sleep(0.005)

    monkeypatch.setattr(middleware, "sleep", sleep)
    monkeypatch.setattr(middleware, "_MAX_DELAYED", 2)
    with fake_server(text_model, keys=RING) as server:
        for _ in range(10):
            wrong(server)
        replies: list[Reply] = []
        threads = [threading.Thread(target=lambda: replies.append(wrong(server))) for _ in range(5)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: len(replies) == 3)
        assert num_waiting == [2]
        assert right(server) == 200
        may_answer.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert {reply.status for reply in replies} == {401}


def test_behind_a_proxy_only_the_sender_is_slowed_down(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_LONGEST_DELAY_S", 0.0)
    with fake_server(text_model, keys=RING, trusted_proxies=LOOPBACK) as server:
        server.headers["X-Forwarded-For"] = "198.51.100.1"
        assert [wrong(server).status for _ in range(11)] == [401] * 10 + [429]
        server.headers["X-Forwarded-For"] = "198.51.100.2"
        assert wrong(server).status == 401
