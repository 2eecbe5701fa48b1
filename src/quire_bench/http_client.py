"""Where a server is, and a client for load: a connection a request, events, errors by kind.

It is aiohttp's, since a load generator must not take the time of the server that it measures: a
token of 64 streams costs it 44 to 59 µs of a core (on uvloop 26), httpx's client 58 to 96 (70).
"""

import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from quire.core.errors import ConfigError, QuireError

MAX_LINE_BYTES = 1 << 20  # of a header or of an event; a longer one is no OpenAI server's
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


class Client:
    """Requests to one endpoint; `connect` makes it."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._session = session
        self._endpoint = endpoint

    async def get_json(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET; the JSON is None where the body is none."""
        async with self._answer("GET", path) as response:
            content = await _read(response, MAX_JSON_BYTES)
        try:
            return response.status, json.loads(content)
        except ValueError:
            return response.status, None

    async def get_text(self, path: str) -> str:
        """The body of a GET; ExchangeError of any status but 200."""
        async with self._answer("GET", path) as response:
            if response.status != 200:
                raise await _refusal(response)
            return (await _read(response, MAX_JSON_BYTES)).decode("utf-8", "replace")

    async def post_json(self, path: str, body: Any) -> Any:
        """The JSON that answers a POST of JSON; ExchangeError of any status but 200."""
        return await self._posted(path, json=body)

    async def upload(self, path: str, fields: Mapping[str, str], name: str, content: bytes) -> Any:
        """The JSON that answers a form with a file of this name; otherwise as `post_json`."""
        form = aiohttp.FormData(fields)
        form.add_field("file", content, filename=name)
        return await self._posted(path, data=form)

    async def _posted(self, path: str, **body: Any) -> Any:
        async with self._answer("POST", path, **body) as response:
            if response.status != 200:
                raise await _refusal(response)
            content = await _read(response, MAX_JSON_BYTES)
        try:
            return json.loads(content)
        except ValueError:
            raise ExchangeError("bad reply", f"the reply to POST {path} is no JSON") from None

    async def post_for_events(self, path: str, body: Any) -> AsyncGenerator[str, None]:
        """Post JSON, and give the data of each server-sent event as it comes, up to [DONE]."""
        async with self._answer("POST", path, json=body) as response:
            if response.status != 200:
                raise await _refusal(response)
            kind = response.headers.get("content-type", "")
            if "text/event-stream" not in kind.lower():
                raise ExchangeError("bad reply", f"expected text/event-stream, got {kind!r}")
            async for event in _events(_body(response)):
                yield event

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose body is still coming."""
        url = f"{self._endpoint.url}{path}"
        try:
            response = await self._session.request(method, url, allow_redirects=False, **more)
        except aiohttp.ClientConnectorError as error:
            text = f"no connection to {self._endpoint.url}: {error}"
            raise ExchangeError("connect", text) from error
        except (aiohttp.ServerDisconnectedError, OSError) as error:
            raise ExchangeError("disconnected", f"the server hung up: {error}") from error
        except aiohttp.ClientError as error:
            raise ExchangeError("bad reply", f"the server does not speak HTTP: {error}") from error
        try:
            yield response
        finally:
            response.close()


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Client]:
    """A client for any number of requests at a time, each on a connection of its own."""
    headers = {"Accept": "text/event-stream, application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),  # the load has its own
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=MAX_LINE_BYTES,
    ) as session:
        yield Client(session, endpoint)


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body's bytes as they come; ExchangeError where the server stops in between."""
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
        raise ExchangeError("broken stream", f"the stream broke: {error}") from error


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body; one longer than the limit is an error."""
    found = bytearray()
    async for piece in _body(response):
        found += piece
        if len(found) > limit:
            raise ExchangeError("bad reply", f"the reply is longer than {limit} bytes")
    return bytes(found)


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


async def _refusal(response: aiohttp.ClientResponse) -> ExchangeError:
    """What a status other than 200 says."""
    text = "unreadable"
    with suppress(ExchangeError):
        text = _message(await _read(response, MAX_ERROR_BYTES))
    status = response.status
    return ExchangeError(f"http {status}", f"HTTP {status}: {text}", status)


def _message(content: bytes) -> str:
    """The message in an OpenAI-like error, or the start of whatever came."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(content)["error"]
        return str(found["message"] if isinstance(found, dict) else found)[:300]
    return content[:300].decode("utf-8", "replace")
