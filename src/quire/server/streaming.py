"""Streams: an answer as server-sent events, written as its tokens come. Its requests end when the
client goes away.

Streams make a frame for nearly every token, so a frame is a few joined strings, not a model: what
every chunk of an answer shares is written once.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from quire.core.errors import QuireError, RequestCancelledError
from quire.core.plan import TokenLogprob
from quire.core.request import Piece, RequestOutput
from quire.engine.aio import Stream
from quire.server.calls import CLIENT_GONE, Call
from quire.server.errors import ApiError
from quire.server.middleware import Receive, Scope, Send, send_error
from quire.server.replies import LogprobWriter, TraceReport, Usage
from quire.server.service import Service

# ---- frames


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Frames:
    """The chunks of one answer; subclasses write the part that differs between the APIs."""

    kind: str

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        logprobs: LogprobWriter,
        *,
        with_usage: bool,
        with_token_ids: bool,
    ) -> None:
        shared = {
            "id": answer_id,
            "object": self.kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = "data: " + json.dumps(shared)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}\n\n' if with_usage else "]}\n\n"
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._with_token_ids = with_token_ids
        self._num_spelled: dict[int, int] = {}  # characters of each choice's tokens so far

    def opening(self, _index: int) -> bytes:
        """What comes before a choice's first text, if anything."""
        return b""

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        """A choice up to, and without, its finish reason."""
        raise NotImplementedError

    def chunk(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """One chunk of all these pieces of a choice; nothing where they have no text yet."""
        reason = pieces[-1].finish_reason
        text = "".join([piece.text for piece in pieces])
        scores = [score for piece in pieces for score in piece.logprobs]
        if not text and reason is None and not scores and not self._with_token_ids:
            return b""  # half a character, or the possible begin of a stop string
        parts = [self._head, self._choice(index, text, scores)]
        if self._with_token_ids:
            token_ids = [token for piece in pieces for token in piece.token_ids]
            parts.append(f', "token_ids": {json.dumps(token_ids)}')
        finish_reason = "null" if reason is None else f'"{reason}"'
        parts.append(f', "finish_reason": {finish_reason}}}{self._tail}')
        return "".join(parts).encode()

    def ending(self, usage: Usage, traces: Sequence[TraceReport]) -> bytes:
        """The chunk without choices: counts and traces, where they were asked for."""
        if not self._with_usage and not traces:
            return b""
        parts = []
        if self._with_usage:
            parts.append(f'"usage": {usage.model_dump_json()}')
        if traces:
            listed = ", ".join(trace.model_dump_json() for trace in traces)
            parts.append(f'"quire_trace": [{listed}]')
        return f"{self._head}], {', '.join(parts)}}}\n\n".encode()


class ChatFrames(Frames):
    kind = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        choice = f'{{"index": {index}, "delta": {{"role": "assistant", "content": ""}}, '
        return f'{self._head}{choice}"logprobs": null, "finish_reason": null}}{self._tail}'.encode()

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        logprobs = self._logprobs.for_chat(scores) if scores else "null"
        delta = f'{{"content": {json.dumps(text)}}}' if text else "{}"
        return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}'


class TextFrames(Frames):
    kind = "text_completion"

    def _choice(self, index: int, text: str, scores: Sequence[TokenLogprob]) -> str:
        logprobs = "null"
        if scores:
            offset = self._num_spelled.get(index, 0)
            written = self._logprobs.for_text(scores, offset)
            self._num_spelled[index] = offset + written.num_characters
            logprobs = written.json
        return f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {logprobs}'


# ---- the stream


FRAMES_PER_SECOND = 1000  # of all streams together; beyond it tokens share frames
LONGEST_PAUSE_S = 0.2  # between frames of one stream
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would buffer the stream
]

Ending = Callable[[Sequence[RequestOutput]], bytes]
AsApiError = Callable[[BaseException], ApiError]


class StreamReply(Response):
    """One or more requests of one client, their choices side by side in one stream.

    The status is sent with the first tokens, so that a request that fails before them gets a
    status of its own; one that waits long is opened by a ping.
    """

    def __init__(
        self,
        service: Service,
        call: Call,
        streams: Sequence[Stream],
        frames: Frames,
        *,
        choices_each: int,
        ending: Ending,
        as_api_error: AsApiError,
    ) -> None:
        self._service = service
        self._call = call
        self._streams = streams
        self._frames = frames
        self._choices_each = choices_each
        self._ending = ending
        self._as_api_error = as_api_error
        self._is_open = False
        self._sent_at = 0.0
        self._send: Send
        self._loop = asyncio.get_running_loop()
        self.background = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._call.is_streaming = True
        self._sent_at = self._loop.time()
        watchers = [asyncio.create_task(self._watch(receive)), asyncio.create_task(self._ping())]
        try:
            await self._write_all()
        finally:
            for task in watchers:
                task.cancel()
            for stream in self._streams:
                stream.cancel()

    async def _write_all(self) -> None:
        outputs = await _all(
            [
                self._pump(stream, index * self._choices_each)
                for index, stream in enumerate(self._streams)
            ]
        )
        self._call.outputs += outputs
        cause = cause_of(outputs)
        if self._call.error == CLIENT_GONE:
            return
        with suppress(OSError):
            if cause is not None:
                await self._fail(self._as_api_error(cause))
                return
            await self._write(self._ending(outputs) + DONE, more=False)

    async def _fail(self, error: ApiError) -> None:
        self._call.error = error.code or error.message
        if not self._is_open:
            await send_error(self._send, error)
            return
        await self._write(error.frame, more=False)

    async def _pump(self, stream: Stream, first_choice: int) -> RequestOutput:
        """Write one request's pieces until it has ended."""
        opened: set[int] = set()
        not_before = 0.0
        try:
            while pieces := await stream.take(not_before):
                if not opened:  # a queued request does not count: it needs no frames
                    self._service.num_streams += 1
                content = b""
                for index, some in _by_choice(pieces).items():
                    if index not in opened:
                        opened.add(index)
                        content += self._frames.opening(first_choice + index)
                    content += self._frames.chunk(first_choice + index, some)
                if content:
                    await self._write(content)
                    not_before = self._sent_at + self._pause_s()
        finally:
            self._service.num_streams -= bool(opened)
        output = await stream.output()
        if output.error is not None:  # the answer has failed: cancel its other requests
            for other in self._streams:
                other.cancel()
        return output

    def _pause_s(self) -> float:
        """With many streams, each gets fewer and larger frames."""
        return min(LONGEST_PAUSE_S, self._service.num_streams / FRAMES_PER_SECOND)

    async def _write(self, content: bytes, *, more: bool = True) -> None:
        if not self._is_open:
            self._is_open = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
            )
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def _ping(self) -> None:
        """Write comments, so that proxies and clients do not time out."""
        interval_s = self._service.settings.ping_interval_s
        while True:
            silent_s = self._loop.time() - self._sent_at
            await asyncio.sleep(max(0.001, interval_s - silent_s))
            if self._loop.time() - self._sent_at >= interval_s:
                with suppress(OSError):
                    await self._write(PING)

    async def _watch(self, receive: Receive) -> None:
        """Cancel the requests when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.error = CLIENT_GONE
        for stream in self._streams:
            stream.cancel()


def cause_of(outputs: Sequence[RequestOutput]) -> QuireError | None:
    """The error of an answer: the first that is not a cancellation, if there is one."""
    errors = [output.error for output in outputs if output.error is not None]
    own = [error for error in errors if not isinstance(error, RequestCancelledError)]
    return next(iter([*own, *errors]), None)


def _by_choice(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.completion_index, []).append(piece)
    return found


async def _all(pumps: list[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """Concurrently; a single one, the usual case, without a task."""
    if len(pumps) == 1:
        return [await pumps[0]]
    return list(await asyncio.gather(*pumps))
