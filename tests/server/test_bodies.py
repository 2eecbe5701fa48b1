"""Which queue of the work pool a request is in."""

from starlette.requests import Request

from quire.server.calls import SCOPE_KEY, new_call
from quire.server.keys import ApiKey
from quire.server.submission import _queue_of


def request_of(client: str, key: ApiKey | None = None) -> Request:
    call = new_call("POST", "/v1/completions", [])
    call.client, call.key = client, key
    proxy = ("10.0.0.1", 4711)  # the peer; the call knows for whom it speaks
    return Request({"type": "http", "headers": [], "client": proxy, SCOPE_KEY: call})


def test_without_keys_a_line_is_an_addresss_behind_its_proxy() -> None:
    assert _queue_of(request_of("192.0.2.1")) != _queue_of(request_of("192.0.2.2"))
    assert _queue_of(request_of("192.0.2.1")) == _queue_of(request_of("192.0.2.1"))


def test_a_key_has_one_line_wherever_it_comes_from() -> None:
    key = ApiKey("alice", b"digest")
    assert _queue_of(request_of("192.0.2.1", key)) == _queue_of(request_of("192.0.2.2", key))
    other = ApiKey("bob", b"other")
    assert _queue_of(request_of("192.0.2.1", key)) != _queue_of(request_of("192.0.2.1", other))
