"""A grammar of what clients send over a connection: requests, lies about them, and how they come.

A case says which bytes come in which pieces, and how the client leaves. `num_sound` counts requests
from the first byte on that every HTTP/1.1 server must answer, one by one.
"""

from dataclasses import dataclass
from enum import Enum

from tests.fuzz.choices import Choices
from tests.fuzz.http_bodies import POSTED, body_of

KEY = "a key that is long enough"
HOST = b"Host: 127.0.0.1"
JSON = b"Content-Type: application/json"
AUTHORIZED = b"Authorization: Bearer " + KEY.encode()

GOT = (b"/health", b"/ready", b"/metrics", b"/v1/models", b"/v1/models/tiny-text", b"/v1/stats")
TARGETS = (
    b"/docs",
    b"/openapi.json",
    b"/",
    b"*",
    b"//",
    b"/%00",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"/v1/models/" + b"a" * 300,
    b"/v1/models/%ff%fe",
    b"/v1/models/../../health",
    b"/health?a=b&" + b"c" * 500,
    b"/health#fragment",
    b"http://127.0.0.1/health",
    b"http://evil.example/health",
    b"http://[::1",
    b"/\xc3\xa9",
    b"/\xff",
    b"evil.example:443",
    b"/health/",
    b"/v1/chat/completions/",
    b"/" + b"a" * 9000,
    b"",
    b"/he alth",
    b"?",
    b"/docs%0d%0aSet-Cookie:%20a=b",
)
METHODS = (
    *(b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"CONNECT"),
    *(b"PRI", b"get", b"", b"G\x00T", b"M-SEARCH", b"POST" * 50, b"\x16\x03\x01"),
)
VERSIONS = (
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.1 ",
    b"http/1.1",
    b"",
    b"X",
)
HEADERS = (
    b"Accept: */*",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Expect: 100-continue",
    b"Expect: 200-maybe",
    b"Host: evil.example",
    b"Host:",
    b"Host: 127.0.0.1:99999",
    b"Host: [::1]",
    b"Host: a@127.0.0.1",
    b"Origin: http://evil.example",
    b"Origin: null",
    b"Origin: http://127.0.0.1",
    b"Access-Control-Request-Method: POST",
    b"Authorization: Bearer wrong",
    b"Authorization: Basic YTpi",
    b"Authorization: Bearer \xff\xfe",
    b"Authorization:",
    b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Encoding: gzip",
    b"Content-Length: 0",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 18446744073709551616",
    b"Content-Length: 1000000000",
    b"Content-Length: 5, 5",
    b"Content-Length: 0x10",
    b"Content-Length: \xb2",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\x0bchunked",
    b"X-Request-Id: sound-id",
    b"X-Request-Id: a\tb",
    b"X-Request-Id: " + b"i" * 200,
    b"X-Request-Id: \xe9",
    b"X-Quire-Trace: 1",
    b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"Traceparent: \xff",
    b"X-Forwarded-For: 10.0.0.1, ::1, unknown",
    b'Forwarded: for="[::1]:9"',
    b"X-Large: " + b"v" * 3000,
    b"X-Larger: " + b"v" * 9000,
    b" folded: line",
    b"\tX: y",
    b"NoColon",
    b": no name",
    b"Na me: x",
    b"X: a\x00b",
    b"X: a\rb",
    b"Range: bytes=0-",
    b"TE: trailers",
    b"Trailer: Content-Length",
    b"Keep-Alive: timeout=99999999999999999999",
    b"Accept-Encoding: gzip;q=nan",
)
CHUNK_SIZES = (
    b"0",
    b"-1",
    b"5",
    b"0x5",
    b"fffffffffffffffff",
    b"",
    b'5;ext="x"',
    b"z",
    b"00000000005",
)
TRAILERS = (b"", b"X: y\r\n", b"Content-Length: 3\r\n", b"T: " + b"v" * 9000 + b"\r\n", b"bad\r\n")
GARBAGE = (
    b"\x00",
    b"\r\n",
    b"\n\n\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-x\r\n",
    b"\xff" * 64,
    b"GET",
    b"GET / HT",
    b"0\r\n\r\n",
    b"a" * 9000,
)


class Leaving(Enum):
    """What the client does when everything is sent."""

    STAYS = "stays"  # until the server closes or has answered what is sound
    TRICKLES = "trickles"  # sends a byte now and then, until the server closes
    HALF_CLOSES = "half closes"  # sends no more, and reads on
    GOES = "goes"  # closes
    RESETS = "resets"


@dataclass(frozen=True, slots=True)
class Case:
    """One client's connection."""

    pieces: list[bytes]
    num_sound: int
    num_requests: int  # sound or not
    heads_only: tuple[bool, ...]  # of the sound ones: whether it asks for no body (HEAD)
    leaving: Leaving
    trickle: bytes
    yields: bool  # to the event loop between pieces
    reads: bool  # else its window is full for a while

    @property
    def is_sound(self) -> bool:
        """Every byte of it belongs to a request that must be answered."""
        return self.num_sound == self.num_requests


def case_of(choices: Choices) -> Case:
    """Some connection: mostly one or two requests, of which most are sound."""
    requests = [_request(choices) for _ in range(choices.of((1, 1, 1, 2, 2, 3, 5)))]
    content = b"".join(content for content, *_ in requests)
    num_sound = _num_sound(requests)
    if choices.one_in(16):  # cut off
        content, num_sound = content[: choices.below(len(content) + 1)], 0
    return Case(
        _pieces(content, choices),
        num_sound,
        len(requests),
        tuple(content.startswith(b"HEAD") for content, *_ in requests[:num_sound]),
        choices.of((Leaving.STAYS, Leaving.STAYS, Leaving.STAYS, *Leaving)),
        choices.of((b"a", b"\r\n", b"0", b"\x00")),
        yields=not choices.one_in(3),
        reads=not choices.one_in(6),
    )


def _num_sound(requests: list[tuple[bytes, bool, bool]]) -> int:
    """Up to the first that is not, or that ends the connection."""
    for count, (_, is_sound, is_last) in enumerate(requests):
        if not is_sound:
            return count
        if is_last:
            return count + 1
    return len(requests)


def _request(choices: Choices) -> tuple[bytes, bool, bool]:
    """Its bytes, whether it must be answered, and whether the connection ends with it."""
    kind = choices.below(12)
    if kind < 5:
        return _sound_post(choices)
    if kind < 7:
        return _sound_get(choices)
    if kind < 9:
        return _odd_head(choices), False, False
    if kind == 9:
        return _lying_body(choices), False, False
    if kind == 10:
        return _bad_chunks(choices), False, False
    return choices.of(GARBAGE), False, False


def _sound_get(choices: Choices) -> tuple[bytes, bool, bool]:
    is_last = choices.one_in(4)
    lines = [HOST, AUTHORIZED, b"Connection: close"] if is_last else [HOST, AUTHORIZED]
    method = b"HEAD" if choices.one_in(9) else b"GET"
    return _head(method, choices.of(GOT), lines), True, is_last


def _sound_post(choices: Choices) -> tuple[bytes, bool, bool]:
    path = choices.of(POSTED)
    body = body_of(path, choices)
    is_last = choices.one_in(4)
    lines = [HOST, JSON, AUTHORIZED]
    if is_last:
        lines.append(b"Connection: close")
    if choices.one_in(8):
        lines.append(b"Expect: 100-continue")
    if choices.one_in(5):
        head = _head(b"POST", path.encode(), [*lines, b"Transfer-Encoding: chunked"])
        return head + _chunked(body, choices), True, is_last
    lines.append(b"Content-Length: %d" % len(body))
    return _head(b"POST", path.encode(), lines) + body, True, is_last


def _head(method: bytes, target: bytes, lines: list[bytes], version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([b"%b %b %b" % (method, target, version), *lines, b"", b""])


def _chunked(body: bytes, choices: Choices) -> bytes:
    size = choices.of((1 << 20, 1000, 37, 1))
    if len(body) // size > 2000:
        size = 1000
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def _odd_head(choices: Choices) -> bytes:
    method = choices.of(METHODS)
    target = choices.of((*TARGETS, *GOT, *(path.encode() for path in POSTED)))
    lines = choices.some(HEADERS, 8)
    if not choices.one_in(4):
        lines = [HOST, AUTHORIZED, *lines]
    if choices.one_in(10):
        lines *= 40
    end = choices.of((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\n\r"))
    version = choices.of(VERSIONS) if choices.one_in(3) else b"HTTP/1.1"
    return end.join([b"%b %b %b" % (method, target, version), *lines, b"", b""])


def _lying_body(choices: Choices) -> bytes:
    """A length that is not the body's, or two lengths."""
    path = choices.of(POSTED)
    body = body_of(path, choices)
    told = choices.of((0, 1, len(body) + 1, len(body) - 1, 10**9, 5 << 20))
    lines = [HOST, JSON, b"Content-Length: %d" % told]
    if not choices.one_in(3):
        lines.append(AUTHORIZED)
    if choices.one_in(3):
        lines.append(choices.of(HEADERS))
    if choices.one_in(4):
        lines.append(b"Transfer-Encoding: chunked")
        body = _chunked(body, choices)
    target = choices.of((path.encode(), *GOT))
    return _head(choices.of((b"POST", b"GET", b"PUT")), target, lines) + body


def _bad_chunks(choices: Choices) -> bytes:
    path = choices.of(POSTED)
    lines = [HOST, JSON, AUTHORIZED, b"Transfer-Encoding: chunked"]
    content = _head(b"POST", path.encode(), lines)
    for _ in range(choices.below(5)):
        size = choices.of(CHUNK_SIZES)
        content += size + choices.of((b"\r\n", b"\n", b"")) + b"abcde" + choices.of((b"\r\n", b""))
    return content + b"0\r\n" + choices.of(TRAILERS) + b"\r\n"


def _pieces(content: bytes, choices: Choices) -> list[bytes]:
    """As one, in two, byte by byte, or in random cuts."""
    kind = choices.below(6)
    if kind < 2:
        return [content]
    if kind == 2:
        at = choices.below(len(content) + 1)
        return [content[:at], content[at:]]
    if kind == 3:  # every byte alone, where they are few, or the last hundred of the first head
        end = content.find(b"\r\n\r\n") + 4
        if len(content) <= 400:
            return [content[at : at + 1] for at in range(len(content))]
        start = max(0, end - 100)
        singles = [content[at : at + 1] for at in range(start, end)]
        return [content[:start], *singles, content[end:]]
    cuts = sorted(choices.below(len(content) + 1) for _ in range(choices.below(12)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
