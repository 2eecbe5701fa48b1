"""A small OpenAI-like server for tests: streams pieces with known delays, and faults on demand."""

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    """What the server does; faults are by the number of the request, from 0."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    long_prompt_delay_s: float = 0.0  # more before the first token of prompts over 200 words
    max_running: int | None = None  # others wait: first come, first served
    together: int | None = None  # none of so many is answered before all of them have come
    api_key: str | None = None
    has_usage: bool = True
    has_models: bool = True
    model: str = "tiny"
    is_chunked: bool = True
    max_pieces: int | None = None  # ends early, as at an end of text
    tokens_per_piece: int = 1
    statuses: dict[int, int] = field(default_factory=dict)
    breaks: set[int] = field(default_factory=set)  # hangs up after one piece
    hangs: set[int] = field(default_factory=set)  # never answers
    says_error: set[int] = field(default_factory=set)  # an error event after one piece
    speaks_nonsense: bool = False  # 200, but HTML
    bodies: list[dict[str, Any]] = field(default_factory=list)  # as they came
    present: Counter[str] = field(default_factory=Counter)  # requests that wait or run, by key
    most_present: int = 0
    # By key: how many of other keys each of its requests found present.
    met: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


class OpenAILikeServer:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.port = 0
        limit = behaviour.max_running
        self._places = nullcontext() if limit is None else asyncio.Semaphore(limit)
        self._meeting: asyncio.Barrier | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            headers = {
                line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines
            }
            content = await reader.readexactly(int(headers.get("content-length", "0")))
            await self.answer(first.split()[1], headers, content, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    async def answer(
        self, path: str, headers: dict[str, str], content: bytes, writer: asyncio.StreamWriter
    ) -> None:
        behaviour = self.behaviour
        if behaviour.speaks_nonsense:
            _write(writer, 200, b"<html>hello</html>", "text/html")
        elif (
            behaviour.api_key is not None
            and headers.get("authorization") != f"Bearer {behaviour.api_key}"
        ):
            _write_json(writer, 401, {"error": {"message": "wrong key"}})
        elif path == "/v1/models" and behaviour.has_models:
            _write_json(writer, 200, {"object": "list", "data": [{"id": behaviour.model}]})
        elif path in ("/v1/completions", "/v1/chat/completions"):
            key = headers.get("authorization", "").removeprefix("Bearer ")
            await self.complete(path.endswith("chat/completions"), key, json.loads(content), writer)
        else:
            _write_json(writer, 404, {"error": {"message": "no such path"}})

    async def complete(
        self, is_chat: bool, key: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        behaviour = self.behaviour
        number = len(behaviour.bodies)
        behaviour.bodies.append(body)
        if number in behaviour.hangs:
            await asyncio.sleep(3600)
        if number in behaviour.statuses:
            _write_json(writer, behaviour.statuses[number], {"error": {"message": "not now"}})
            return
        async with self.turn(key):
            await self.stream(number, is_chat, body, writer)

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """A request's place among the others: it comes, meets them, waits, and goes."""
        behaviour = self.behaviour
        behaviour.met[key].append(behaviour.present.total() - behaviour.present[key])
        behaviour.present[key] += 1
        behaviour.most_present = max(behaviour.most_present, behaviour.present.total())
        try:
            await self.meet()
            async with self._places:
                yield
        finally:
            behaviour.present[key] -= 1

    async def meet(self) -> None:
        """Wait for those that are to come together."""
        if self.behaviour.together is None:
            return
        if self._meeting is None:
            self._meeting = asyncio.Barrier(self.behaviour.together)
        await self._meeting.wait()

    async def stream(
        self, number: int, is_chat: bool, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        behaviour = self.behaviour
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        num_prompt = len(prompt.split())
        send = _Sender(writer, behaviour.is_chunked)
        if is_chat:
            send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(
            behaviour.first_delay_s + (num_prompt > 200) * behaviour.long_prompt_delay_s
        )
        count = min(body["max_tokens"], behaviour.max_pieces or body["max_tokens"])
        for place in range(count):
            if place:
                await asyncio.sleep(behaviour.gap_s)
            text = " word"
            send({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
            await writer.drain()
            if number in behaviour.breaks:
                writer.transport.abort()
                return
            if number in behaviour.says_error:
                send({"error": {"message": "the model fell over"}})
                return
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": count * behaviour.tokens_per_piece,
        }
        if behaviour.has_usage and body.get("stream_options", {}).get("include_usage"):
            send({"choices": [], "usage": usage})
        send("[DONE]")
        send.end()


class _Sender:
    def __init__(self, writer: asyncio.StreamWriter, is_chunked: bool) -> None:
        self.writer = writer
        self.is_chunked = is_chunked
        encoding = "Transfer-Encoding: chunked\r\n" if is_chunked else ""
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{encoding}\r\n".encode()
        )

    def __call__(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}\r\n\r\n".encode()
        if self.is_chunked:  # cut in two, so that no event is a chunk
            for part in (data[:7], data[7:]):
                self.writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        else:
            self.writer.write(data)

    def end(self) -> None:
        if self.is_chunked:
            self.writer.write(b"0\r\n\r\n")


def _write_json(writer: asyncio.StreamWriter, status: int, data: Any) -> None:
    _write(writer, status, json.dumps(data).encode(), "application/json")


def _write(writer: asyncio.StreamWriter, status: int, content: bytes, kind: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[OpenAILikeServer]:
    """A server on a free loopback port, in a thread of its own, until the block ends."""
    server = OpenAILikeServer(behaviour)
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(listening.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
