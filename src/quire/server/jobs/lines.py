"""Lines of OpenAI's batch format, each a request, and their answers by the server's own handlers.

A line's answer is what the server would have sent for the same body, so that all that holds of a
request (its fields, its errors, its tokens) holds of a line. Streams are refused: nobody reads
them. A line that samples without a seed gets one made of it, so that its tokens are the same
however often a crash makes it begin again.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.core.errors import QuireError
from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import OPENAI_ERRORS
from quire.server.keys import ApiKey
from quire.server.logs import LOGGER
from quire.server.middleware import App, Message, Scope

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ID_LENGTH = 512
_BUSY = (429, 503)  # statuses of a request that another moment would have had room for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class LineError(QuireError):
    """What is wrong with a line; `custom_id` where that much could be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class BatchLine(NamedTuple):
    custom_id: str
    url: str
    body: bytes  # JSON


class Answer(NamedTuple):
    """What the server would have sent."""

    request_id: str
    status: int
    body: bytes  # JSON

    @property
    def is_good(self) -> bool:
        return self.status == 200


def read_line(data: bytes, endpoint: str | None = None) -> BatchLine:
    """A line of a file. `endpoint`: what its url must be, or is where it has none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LineError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineError("it must be a JSON object")
    name = found.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_LENGTH:
        raise LineError(f"custom_id must be a text of 1 to {MAX_ID_LENGTH} characters")
    _check_line(found, name, endpoint)
    url, body = str(found.get("url", endpoint)), found["body"]
    if url != "/v1/embeddings" and body.get("seed") is None:
        body["seed"] = _seed_of(name, body)
    return BatchLine(name, url, _dumped(body))


def _check_line(found: dict[str, Any], name: str, endpoint: str | None) -> None:
    unknown = [key for key in found if key not in ("custom_id", "method", "url", "body")]
    url = found.get("url", endpoint)
    body = found.get("body")
    problem = None
    if unknown:
        problem = f"unknown field {unknown[0]!r:.100}; a line has custom_id, method, url and body"
    elif found.get("method", "POST") != "POST":
        problem = f"method must be POST, got {found['method']!r:.100}"
    elif url not in ENDPOINTS:
        problem = f"url must be one of {', '.join(ENDPOINTS)}, got {url!r:.100}"
    elif endpoint is not None and url != endpoint:
        problem = f"url is {url}, and the batch is for {endpoint}"
    elif not isinstance(body, dict):
        problem = "body must be a JSON object"
    elif body.get("stream"):
        problem = "stream: a line is answered in one piece"
    if problem is not None:
        raise LineError(problem, name)


def _seed_of(name: str, body: dict[str, Any]) -> int:
    digest = hashlib.sha256(_dumped([name, body])).digest()
    return int.from_bytes(digest[:4], "little")


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def answer_line(line: BatchLine, answer: Answer) -> bytes:
    """The line of the output, with its newline."""
    head = json.dumps({"id": f"batch_req_{answer.request_id}", "custom_id": line.custom_id})
    response = json.dumps({"status_code": answer.status, "request_id": answer.request_id})
    middle = f'{head[:-1]}, "response": {response[:-1]}, "body": '.encode()
    return middle + answer.body.replace(b"\n", b" ") + b'}, "error": null}\n'


def error_line(error: LineError, number: int, code: str = "invalid_line") -> bytes:
    """The line of the output for one that is no request, or was not answered."""
    found = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": code, "message": f"line {number}: {error}"},
    }
    return json.dumps(found).encode() + b"\n"


class LineAnswerer:
    """Answers lines by the handlers of an application; `on_done` gets every call at its end."""

    def __init__(self, app: App, on_done: Callable[[Call], None]) -> None:
        self._app = app
        self._on_done = on_done

    async def answer(
        self, line: BatchLine, key: ApiKey | None = None, *, background: bool = False
    ) -> Answer:
        """Waits while the server has no room. `background`: behind all other requests."""
        pause_s = _FIRST_PAUSE_S
        while True:
            answer = await self._once(line, key, background)
            if answer.status not in _BUSY:
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _once(self, line: BatchLine, key: ApiKey | None, background: bool) -> Answer:
        call = Call("POST", line.url, uuid.uuid4().hex, key=key, is_background=background)
        call.error_shape = OPENAI_ERRORS
        body = [line.body]
        parts: list[bytes] = []

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await asyncio.Event().wait()  # nobody disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(_scope_of(call), receive, send)
        except Exception:  # a bug, which was answered by a 500
            if call.status is None:
                raise
            LOGGER.exception("line_failed")
        finally:
            self._on_done(call)
        assert call.status is not None
        return Answer(call.id, call.status, b"".join(parts))


def _scope_of(call: Call) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        SCOPE_KEY: call,
    }
