"""A small HTTP/1.1 client for load: one connection a request, chunked bodies, server-sent events.

It is ours because a load generator must see every byte when it comes, and needs no dependency.
"""

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.core.errors import ConfigError, QuireError

MAX_LINE_BYTES = 1 << 20  # of a header or of an event; a longer one is no OpenAI server's
MAX_HEADERS = 200
MAX_JSON_BYTES = 8 << 20
MAX_ERROR_BYTES = 1 << 16


class ExchangeError(QuireError):
    """One exchange with the server that failed, by kind: "connect", "http 503", "broken stream"."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible server listens; `base` ends in /v1."""

    host: str
    port: int
    base: str
    is_tls: bool
    api_key: str | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self.is_tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.base}"


def parse_endpoint(url: str, *, api_key: str | None = None, allow_remote: bool = False) -> Endpoint:
    """The endpoint a URL names, with or without /v1; other machines only where allowed."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("URL: leave out user, password, query and fragment; keys go to --api-key")
    if any(mark <= " " or mark == "\x7f" for mark in parts.hostname + parts.path + (api_key or "")):
        raise ConfigError("URL and key must not hold blanks or control characters")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise ConfigError(
            f"{parts.hostname} is another machine: load is sent to this one (127.0.0.1, localhost) "
            "unless --allow-remote says that you may load that server"
        )
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), base, is_tls, api_key)


def _is_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"host {host!r} is not known here: {error}") from error
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


@dataclass(slots=True)
class Exchange:
    """An answer whose body is still coming."""

    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come; ExchangeError where the server stops in between."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            pieces = _chunks(self.reader)
        elif "content-length" in self.headers:
            pieces = _counted(self.reader, self.headers["content-length"])
        else:
            pieces = _until_closed(self.reader)
        async for piece in pieces:
            yield piece

    async def read(self, limit: int) -> bytes:
        """The whole body; one longer than the limit is an error."""
        found = bytearray()
        async for piece in self.body():
            found += piece
            if len(found) > limit:
                raise ExchangeError("bad reply", f"the reply is longer than {limit} bytes")
        return bytes(found)

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError, ssl.SSLError):
            await self.writer.wait_closed()


async def send(endpoint: Endpoint, method: str, path: str, body: Any = None) -> Exchange:
    """Send a request and read the head of its answer."""
    context = ssl.create_default_context() if endpoint.is_tls else None
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=context, limit=MAX_LINE_BYTES
        )
    except (OSError, ssl.SSLError) as error:
        raise ExchangeError("connect", f"no connection to {endpoint.url}: {error}") from error
    try:
        writer.write(_request_bytes(endpoint, method, path, body))
        await writer.drain()
        status, headers = await _read_head(reader)
    except OSError as error:
        writer.close()
        raise ExchangeError("disconnected", f"the server hung up: {error}") from error
    except BaseException:
        writer.close()
        raise
    return Exchange(status, headers, reader, writer)


async def get_json(endpoint: Endpoint, path: str) -> tuple[int, Any]:
    """Status and JSON of a GET; the JSON is None where the body is none."""
    exchange = await send(endpoint, "GET", path)
    try:
        content = await exchange.read(MAX_JSON_BYTES)
    finally:
        await exchange.close()
    try:
        return exchange.status, json.loads(content)
    except ValueError:
        return exchange.status, None


async def post_for_events(endpoint: Endpoint, path: str, body: Any) -> AsyncGenerator[str, None]:
    """Post JSON and give the data of each server-sent event as it comes, up to and with [DONE]."""
    exchange = await send(endpoint, "POST", path, body)
    try:
        if exchange.status != 200:
            raise await _refusal(exchange)
        kind = exchange.headers.get("content-type", "")
        if "text/event-stream" not in kind.lower():
            raise ExchangeError("bad reply", f"expected text/event-stream, got {kind!r}")
        async for event in _events(exchange.body()):
            yield event
    except OSError as error:
        raise ExchangeError("broken stream", f"the stream broke: {error}") from error
    finally:
        await exchange.close()


def _request_bytes(endpoint: Endpoint, method: str, path: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = [
        f"{method} {endpoint.base}{path} HTTP/1.1",
        f"Host: {host}:{endpoint.port}",
        "Accept: text/event-stream, application/json",
        "Connection: close",
    ]
    if endpoint.api_key is not None:
        lines.append(f"Authorization: Bearer {endpoint.api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await _line(reader, "disconnected")).split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ExchangeError("bad reply", "the server does not speak HTTP/1.1")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await _line(reader, "disconnected")
        if not line:
            return int(words[1]), headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ExchangeError("bad reply", f"more than {MAX_HEADERS} headers")


async def _line(reader: asyncio.StreamReader, kind_at_end: str) -> str:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise ExchangeError("bad reply", f"a line of more than {MAX_LINE_BYTES} bytes") from error
    if not line.endswith(b"\n"):
        raise ExchangeError(kind_at_end, "the server hung up in the middle of a line")
    return line.rstrip(b"\r\n").decode("latin-1")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size_text = (await _line(reader, "broken stream")).partition(";")[0].strip()
        try:
            size = int(size_text, 16)
        except ValueError:
            raise ExchangeError("broken stream", f"chunk size {size_text!r} is none") from None
        if size < 0:
            raise ExchangeError("broken stream", f"chunk size {size_text!r} is negative")
        if size == 0:
            while await _line(reader, "broken stream"):
                pass  # trailers
            return
        async for piece in _counted(reader, str(size)):
            yield piece
        await _line(reader, "broken stream")


async def _counted(reader: asyncio.StreamReader, length: str) -> AsyncIterator[bytes]:
    if not length.isdigit():
        raise ExchangeError("bad reply", f"length {length!r} is none")
    left = int(length)
    while left:
        piece = await reader.read(min(left, 1 << 16))
        if not piece:
            raise ExchangeError("broken stream", f"the server hung up {left} bytes too early")
        left -= len(piece)
        yield piece


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Data of each event; a body that ends without [DONE] is a broken stream."""
    waiting = b""
    data: list[str] = []
    async for piece in body:
        *lines, waiting = (waiting + piece).split(b"\n")
        if len(waiting) > MAX_LINE_BYTES:
            raise ExchangeError("bad reply", f"an event of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                event = "\n".join(data)
                data.clear()
                yield event
                if event == "[DONE]":
                    return
    raise ExchangeError("broken stream", "the stream ended without [DONE]")


async def _refusal(exchange: Exchange) -> ExchangeError:
    """What a status other than 200 says."""
    with suppress(ExchangeError):
        content = await exchange.read(MAX_ERROR_BYTES)
        said = _message(content)
        text = f"HTTP {exchange.status}: {said}"
        return ExchangeError(f"http {exchange.status}", text, exchange.status)
    return ExchangeError(
        f"http {exchange.status}", f"HTTP {exchange.status}, unreadable", exchange.status
    )


def _message(content: bytes) -> str:
    """The message in an OpenAI-like error, or the start of whatever came."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(content)["error"]
        return str(found["message"] if isinstance(found, dict) else found)[:300]
    return content[:300].decode("utf-8", "replace")
