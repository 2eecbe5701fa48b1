"""What a server wrote on a connection, read as strictly as a proxy in front of it would."""

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_BYTES = 48 << 20  # 128 choices with 20 log-probabilities a token, in a short context
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [\x20-\x7e]*")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_SIZE = re.compile(rb"[0-9a-f]+")


class BadAnswerError(AssertionError):
    """The bytes are no HTTP/1.1, or say what they must not."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @property
    def closes(self) -> bool:
        return "close" in self.headers.get("connection", "").lower()


def answers_of(content: bytes, heads_only: tuple[bool, ...]) -> list[Answer]:
    """Every answer, interim ones (100) left out; the last may be cut off.

    `heads_only` says of the first ones whether they are answers to HEAD, which have no body; of
    the others nobody knows, so that is tried as well.
    """
    found: list[Answer] = []
    while content:
        if len(found) < len(heads_only):
            answer, content = _one(content, heads_only[len(found)])
        else:
            try:
                answer, rest = _one(content, False)
                if answer.body.startswith(b"HTTP/1.1 "):
                    raise BadAnswerError("an answer within an answer")
                if rest and not rest.startswith(b"HTTP/1.1 "):
                    raise BadAnswerError(f"after an answer comes {rest[:80]!r}")
            except BadAnswerError:
                answer, rest = _one(content, True)
                if rest and not rest.startswith(b"HTTP/1.1 "):
                    raise
            content = rest
        if answer.status >= 200:
            found.append(answer)
    return found


def _one(content: bytes, head_only: bool) -> tuple[Answer, bytes]:
    head, end, rest = content.partition(b"\r\n\r\n")
    if not end:
        raise BadAnswerError(f"half a head: {content[:200]!r}")
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise BadAnswerError(f"no status line: {first[:200]!r}")
    code = int(status.group(1))
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise BadAnswerError(f"no header: {line[:200]!r}")
        name = header.group(1).decode().lower()
        if name in headers and name in ("content-length", "transfer-encoding", "content-type"):
            raise BadAnswerError(f"{name} twice")
        headers[name] = header.group(2).decode("latin-1")
    if "content-length" in headers and "transfer-encoding" in headers:
        raise BadAnswerError("two lengths")
    if head_only or code in (204, 304) or code < 200:
        return Answer(code, headers, b"", True), rest
    if "content-length" in headers:
        size = int(headers["content-length"])
        return Answer(code, headers, rest[:size], len(rest) >= size), rest[size:]
    if "transfer-encoding" not in headers and headers.get("connection") == "close":
        return Answer(code, headers, rest, True), b""  # as HTTP/1.0 has it
    if headers.get("transfer-encoding") != "chunked":
        raise BadAnswerError(f"an answer without a length: {headers}")
    body, is_whole, rest = _chunks(rest)
    return Answer(code, headers, body, is_whole), rest


def _chunks(rest: bytes) -> tuple[bytes, bool, bytes]:
    parts = []
    while rest:
        size, end, after = rest.partition(b"\r\n")
        if not end:
            break
        if not _SIZE.fullmatch(size):
            raise BadAnswerError(f"no size of a chunk: {size[:80]!r}")
        length = int(size, 16)
        part = after[:length]
        if length and len(after) < length + 2:
            break
        if after[length : length + 2] != b"\r\n":
            raise BadAnswerError(f"a chunk runs into {after[length : length + 80]!r}")
        parts.append(part)
        rest = after[length + 2 :]
        if length == 0:
            return b"".join(parts), True, rest
    return b"".join(parts), False, b""


# ---- what they say


def check_answer(answer: Answer) -> None:
    """A status that a client can act on, and a body of the kind that its head promises."""
    if answer.status >= 500 and answer.status not in (501, 503):
        raise BadAnswerError(f"{answer.status}: {answer.body[:500]!r}")
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        raise BadAnswerError(f"{answer.status} without Retry-After: {answer.body[:200]!r}")
    if len(answer.body) > MAX_ANSWER_BYTES:
        raise BadAnswerError(f"an answer of {len(answer.body)} bytes")
    if not answer.is_whole or not answer.body:
        return
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "application/json":
        _check_json(answer)
    elif kind == "text/event-stream":
        _check_events(answer.body)


def _check_json(answer: Answer) -> None:
    try:
        body = json.loads(answer.body, parse_constant=_no_constant)
    except ValueError as error:
        raise BadAnswerError(f"no JSON: {error}: {answer.body[:200]!r}") from error
    if answer.status >= 400:
        _check_error(body)


def _check_error(body: Any) -> None:
    error = body.get("error")
    if not isinstance(error, dict) or {*error} != {"message", "type", "param", "code"}:
        raise BadAnswerError(f"no error in OpenAI's shape: {body!r:.300}")
    if not error["message"] or len(error["message"]) > 2000:
        raise BadAnswerError(f"a message of {len(error['message'])} characters")


def _check_events(body: bytes) -> None:
    *frames, rest = body.split(b"\n\n")
    if rest or not frames:
        raise BadAnswerError(f"half an event: {body[-200:]!r}")
    for frame in frames[:-1]:
        if frame != b": ping":
            chunk = _event(frame)
            if "error" in chunk:
                raise BadAnswerError("events after an error")
    if frames[-1] != b"data: [DONE]":
        last = _event(frames[-1])
        if "error" not in last:
            raise BadAnswerError(f"a stream ends by {frames[-1][:200]!r}")
        _check_error(last)
        if last["error"]["type"] == "server_error":
            raise BadAnswerError(f"a stream fails: {last}")


def _event(frame: bytes) -> Any:
    if not frame.startswith(b"data: ") or b"\n" in frame:
        raise BadAnswerError(f"no event: {frame[:200]!r}")
    try:
        return json.loads(frame.removeprefix(b"data: "), parse_constant=_no_constant)
    except ValueError as error:
        raise BadAnswerError(f"no JSON in an event: {frame[:200]!r}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
