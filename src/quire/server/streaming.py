"""Streams: an answer written as its tokens come, in a dialect's frames. Its requests end when the
client goes away."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from quire.chat import AnswerEvent, AnswerParser, ReasoningDelta
from quire.core.errors import QuireError, RequestCancelledError
from quire.core.request import FinishReason, Piece, RequestOutput
from quire.engine.aio import Stream
from quire.server.calls import CLIENT_GONE, PING
from quire.server.dialect import Choice, Frames, GenerationCall, choice_of, finish_word
from quire.server.errors import ApiError
from quire.server.middleware import Message, Receive, Scope, Send, send_error
from quire.server.model_service import ModelService
from quire.server.resuming import StreamIds

FRAMES_PER_SECOND = 1000  # of all streams together; beyond it tokens share frames
LONGEST_PAUSE_S = 0.2  # between frames of one stream
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would buffer the stream
)
SSE_PING = b": ping\n\n"

AsApiError = Callable[[BaseException], ApiError]


class StreamReply(Response):
    """One or more requests of one client, their choices side by side in one stream.

    The status is sent with the first tokens, so that a request that fails before them gets a
    status of its own; one that waits long is opened by a ping.
    """

    def __init__(
        self,
        service: ModelService,
        generation: GenerationCall,
        streams: Sequence[Stream],
        frames: Frames,
        as_api_error: AsApiError,
        ids: StreamIds | None = None,
    ) -> None:
        self._service = service
        self._ids = ids
        self._call = generation.call
        self._generation = generation
        self._streams = streams
        self._frames = frames
        self._choices_each = generation.body.n or 1
        self._choices: dict[int, Choice] = {}  # that have ended
        self._num_tokens: dict[int, int] = {}  # by choice, where events have ids
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
            choices = [self._choices[index] for index in sorted(self._choices)]
            ending = self._frames.ending(outputs, choices)
            if self._ids is not None:
                ending = self._ids.ending(ending)
            try:
                await self._call.write_all()
            except ApiError as error:
                await self._fail(error)
                return
            await self._write(ending, more=False)

    async def _fail(self, error: ApiError) -> None:
        self._call.error = error.code or error.message
        if not self._is_open:
            await send_error(self._send, error, self._call.error_shape)
            return
        await self._write(self._frames.error(error), more=False)

    async def _pump(self, stream: Stream, first_choice: int) -> RequestOutput:
        """Write one request's pieces until it has ended."""
        parsers: dict[int, AnswerParser] = {}
        not_before = 0.0
        try:
            while pieces := await stream.take(not_before):
                if not parsers:  # a queued request does not count: it needs no frames
                    self._service.num_streams += 1
                content = b""
                by_choice = _by_choice(pieces) if self._choices_each > 1 else {0: pieces}
                for index, some in by_choice.items():
                    if index not in parsers:
                        parsers[index] = self._generation.new_parser(first_choice + index)
                        content += self._opening(first_choice + index)
                    # Of one that may be made again, events must not depend on what came at once.
                    runs = [some] if self._call.stored is None else [[piece] for piece in some]
                    for run in runs:
                        content += self._rest(first_choice + index, parsers[index], run)
                if content:
                    await self._write(content)
                    not_before = self._sent_at + self._pause_s()
        finally:
            self._service.num_streams -= bool(parsers)
        output = await stream.output()
        if output.error is not None:  # the answer has failed: cancel its other requests
            for other in self._streams:
                other.cancel()
        for completion in output.completions:
            if completion.index in parsers:
                parser = parsers[completion.index]
                index = first_choice + completion.index
                thought = parser.num_reasoning_tokens
                self._choices[index] = choice_of(
                    self._generation, index, completion, parser.answer, thought
                )
        return output

    def _opening(self, index: int) -> bytes:
        opening = self._frames.opening(index)
        if self._ids is None:
            return opening
        return self._ids.stamped(opening) if self._ids.opens(index) else b""

    def _rest(self, index: int, parser: AnswerParser, pieces: Sequence[Piece]) -> bytes:
        """The frames of these pieces, without those that a resumed stream's client has."""
        if self._ids is None:
            return self._chunk(index, parser, pieces)
        num_before = self._num_tokens.get(index, 0)
        self._num_tokens[index] = num_before + sum(len(piece.token_ids) for piece in pieces)
        had, rest = self._ids.split(index, pieces, num_before)
        if had:
            self._chunk(index, parser, had)
        if not rest:
            return b""
        chunk = self._chunk(index, parser, rest)
        is_finished = rest[-1].finish_reason is not None
        self._ids.advance(index, self._num_tokens[index], is_finished=is_finished)
        return self._ids.stamped(chunk)

    def _chunk(self, index: int, parser: AnswerParser, pieces: Sequence[Piece]) -> bytes:
        """The frames of all these pieces of a choice."""
        events: list[AnswerEvent] = []
        at = 0
        while at < len(pieces) and parser.may_think:
            events += parser.feed(pieces[at].text, num_tokens=len(pieces[at].token_ids))
            at += 1
        if at < len(pieces):
            events += parser.feed("".join([piece.text for piece in pieces[at:]]))
        reason = pieces[-1].finish_reason
        word = None
        if reason is not None:
            events += parser.end(is_cut=reason is FinishReason.LENGTH)
            word = finish_word(reason, parser.answer)
        if not self._generation.shows_reasoning:
            events = [event for event in events if not isinstance(event, ReasoningDelta)]
        return self._frames.chunk(index, events, pieces, word)

    def _pause_s(self) -> float:
        """With many streams, each gets fewer and larger frames."""
        return min(LONGEST_PAUSE_S, self._service.num_streams / FRAMES_PER_SECOND)

    async def _write(self, content: bytes, *, more: bool = True, is_ping: bool = False) -> None:
        if not self._is_open:
            self._is_open = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": list(self._frames.headers),
                }
            )
        self._sent_at = self._loop.time()
        message: Message = {"type": "http.response.body", "body": content, "more_body": more}
        if is_ping:
            message[PING] = True
        await self._send(message)

    async def _ping(self) -> None:
        """Write what says nothing, so that proxies and clients do not time out."""
        if not self._frames.ping:
            return
        interval_s = self._service.settings.ping_interval_s
        while True:
            silent_s = self._loop.time() - self._sent_at
            await asyncio.sleep(max(0.001, interval_s - silent_s))
            if self._loop.time() - self._sent_at >= interval_s:
                with suppress(OSError):
                    await self._write(self._frames.ping, is_ping=True)

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


def _by_choice(pieces: list[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.completion_index, []).append(piece)
    return found


async def _all(pumps: list[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """Concurrently; a single one, the usual case, without a task."""
    if len(pumps) == 1:
        return [await pumps[0]]
    return list(await asyncio.gather(*pumps))
