"""Lines of OpenAI's batch format, each a request, and their answers by the server's own handlers.

A line's answer is what the server would have sent for the same body, so that all that holds of a
request (its fields, its errors, its tokens) holds of a line. Streams are refused: nobody reads
them. A line that samples without a seed gets one made of it, so that its tokens are the same
however often a crash makes it begin again.
"""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.core.errors import QuireError
from quire.server.calls import SCOPE_KEY, Call
from quire.server.errors import OPENAI_ERRORS
from quire.server.keys import ApiKey
from quire.server.logs import LOGGER
from quire.server.middleware import App, Message, Receive, Scope

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ID_LENGTH = 512
_BUSY = (429, 503)  # statuses of a request that another moment would have had room for
_QUOTA_CODES = ("rate_limit_exceeded", "insufficient_quota")  # of a key that used up its tokens
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_GIVING_UP_S = 0.1  # within which a server knows that it has lost its model
_MAX_LOSSES = 5  # of its model, before a line's error is its answer
_LONGEST_QUOTA_PAUSE_S = 60.0  # as quotas can be raised, and other calls give tokens back
_QUOTA_LOOK_S = 1.0  # between two looks whether another line found room


class LineError(QuireError):
    """What is wrong with a line; `custom_id` where that much could be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class GivenUpError(QuireError):
    """Nothing computes any more in this process: a line is to be answered by another."""


class BatchLine(NamedTuple):
    custom_id: str
    url: str
    body: bytes  # JSON


class Answer(NamedTuple):
    """What the server would have sent."""

    request_id: str
    status: int
    body: bytes  # JSON
    retry_after_s: float | None = None

    @property
    def is_good(self) -> bool:
        return self.status == 200

    @property
    def error_code(self) -> str | None:
        return None if self.is_good else json.loads(self.body)["error"]["code"]

    @property
    def is_over_quota(self) -> bool:
        return self.status == 429 and self.error_code in _QUOTA_CODES


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
    elif body.get("background"):
        problem = "background: a line is answered when there is room"
    if problem is not None:
        raise LineError(problem, name)


def _seed_of(name: str, body: dict[str, Any]) -> int:
    digest = hashlib.sha256(_dumped([name, body])).digest()
    return int.from_bytes(digest[:4], "little")


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        errors="surrogatepass"
    )


def answer_line(line: BatchLine, answer: Answer, name: str | None = None) -> bytes:
    """The line of the output, with its newline; `name`: its id, by default the request's."""
    name = f"batch_req_{answer.request_id}" if name is None else name
    head = json.dumps({"id": name, "custom_id": line.custom_id})
    response = json.dumps({"status_code": answer.status, "request_id": answer.request_id})
    middle = f'{head[:-1]}, "response": {response[:-1]}, "body": '.encode()
    return middle + answer.body.replace(b"\n", b" ") + b'}, "error": null}\n'


def error_line(
    error: LineError, number: int, code: str = "invalid_line", name: str | None = None
) -> bytes:
    """The line of the output for one that is no request, or was not answered."""
    found = {
        "id": f"batch_req_{uuid.uuid4().hex}" if name is None else name,
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": code, "message": f"line {number}: {error}"},
    }
    return json.dumps(found).encode() + b"\n"


class LineAnswerer:
    """Answers lines by the handlers of an application; `on_done` gets every call at its end."""

    def __init__(
        self,
        app: App,
        on_done: Callable[[Call], None],
        has_given_up: Callable[[], bool] = lambda: False,
        num_losses: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_given_up`: whether the model was lost for good. `num_losses`: how often one was that
        the next request has loaded again."""
        self._app = app
        self._on_done = on_done
        self._has_given_up = has_given_up
        self._num_losses = num_losses
        self._now = now
        self._quota_at: dict[str, float] = {}  # by key: when there may be room again

    async def answer(
        self, line: BatchLine, key: ApiKey | None = None, *, background: bool = False
    ) -> Answer:
        """Waits while the server has no room, or the key's quota has none. `background`: behind
        all other requests. Raises GivenUpError where there will be no answer."""
        pause_s = _FIRST_PAUSE_S
        num_lost = 0  # answers
        while True:
            await self._until_quota(key)
            num_losses = self._num_losses()
            answer = await self._once(line, key, background)
            if key is not None and answer.is_over_quota:
                wait_s = min(answer.retry_after_s or _LONGEST_PAUSE_S, _LONGEST_QUOTA_PAUSE_S)
                self._quota_at[key.name] = self._now() + wait_s
                continue
            if key is not None:
                self._quota_at.pop(key.name, None)  # it gave back what it did not use
            if answer.status >= 500:
                await self._check_goes_on()
            is_lost = answer.status >= 500 and self._num_losses() != num_losses
            num_lost += is_lost
            if answer.status not in _BUSY and not (is_lost and num_lost < _MAX_LOSSES):
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _check_goes_on(self) -> None:
        """An error of the server is the line's only if others are still answered."""
        await asyncio.sleep(_GIVING_UP_S)
        if self._has_given_up():
            raise GivenUpError("the engine failed, and answers nothing more in this process")

    async def _until_quota(self, key: ApiKey | None) -> None:
        """Wait while the key's quota has no room. Then one line is tried, and the others when that
        has an answer."""
        while key is not None and (at := self._quota_at.get(key.name)) is not None:
            left_s = at - self._now()
            if left_s <= 0:
                self._quota_at[key.name] = self._now() + _LONGEST_QUOTA_PAUSE_S
                return
            await asyncio.sleep(min(left_s, _QUOTA_LOOK_S))

    async def _once(self, line: BatchLine, key: ApiKey | None, background: bool) -> Answer:
        call = Call("POST", line.url, uuid.uuid4().hex, key=key, is_background=background)
        call.error_shape = OPENAI_ERRORS
        parts: list[bytes] = []
        headers: dict[bytes, bytes] = {}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers.update(message.get("headers", ()))
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(scope_of(call), receive_of(line.body), send)
        except Exception:  # a bug, which was answered by a 500
            if call.status is None:
                raise
            LOGGER.exception("line_failed")
        finally:
            self._on_done(call)
        assert call.status is not None
        retry_ms = headers.get(b"retry-after-ms")
        retry_s = None if retry_ms is None else int(retry_ms) / 1000
        return Answer(call.id, call.status, b"".join(parts), retry_s)


def receive_of(body: bytes) -> Receive:
    """The application's `receive` of a request that comes from no connection."""
    given = [body]

    async def receive() -> Message:
        if given:
            return {"type": "http.request", "body": given.pop(), "more_body": False}
        await asyncio.Event().wait()  # nobody disconnects
        raise AssertionError

    return receive


def scope_of(call: Call) -> Scope:
    """The ASGI scope of a request that comes from no connection."""
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
