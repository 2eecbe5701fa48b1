"""A whole server in this process, its connections made by hand, and what must hold of it.

Connections are fake transports under the real protocol class: no port, no descriptor, no wait.
Everything above them is the real thing: middleware, application, engine, the tiny model.
"""

import asyncio
import gc
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.http_answers import BadAnswerError, answers_of, check_answer
from tests.fuzz.http_wire import KEY, Case, Leaving
from tests.llm.text_models import write_text_model

from quire.engine.aio import AsyncEngine
from quire.llm import AsyncLLM
from quire.llm.assembly import assemble
from quire.llm.devices import Options
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.runner import make_server
from quire.server.service import Service
from quire.server.settings import ServerSettings

PATIENCE_S = 60.0  # a guard against waiting for ever
TRICKLE_S = 0.02
DEADLINE_S = 0.4  # of heads and bodies
WINDOW_BYTES = 64 << 10
SLACK = 8  # descriptors that are opened once, on first use
MAX_THREADS = 64  # of all pools together
MAX_CONTEXT = 96  # so that the longest answers are short
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' and not message.content %}"
    "{{ raise_exception('a tool says something') }}{% endif %}"
    "<|im_start|>{{ message.role }}{% if message.name %} {{ message['name'] | trim }}{% endif %}\n"
    "{% set parts = message.content.split('</think>') %}{{ parts[-1] | trim }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeTransport(asyncio.Transport):
    """The server's end of a connection; behaves as asyncio's own towards its protocol."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__({"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8000)})
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._reads = reads
        self._is_closing = False
        self._num_waiting = 0  # bytes that the client has not taken
        self._is_write_paused = False
        self.written = bytearray()
        self.can_receive = asyncio.Event()
        self.can_receive.set()
        self.has_news = asyncio.Event()  # something was written, or it closed
        self.is_lost = False
        self.has_eof = False

    def attach(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    # ---- the protocol's side

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self.can_receive.is_set()

    def pause_reading(self) -> None:
        self.can_receive.clear()

    def resume_reading(self) -> None:
        self.can_receive.set()

    def get_write_buffer_size(self) -> int:
        return self._num_waiting

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def write(self, data: Any) -> None:
        if self.has_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_closing:
            return  # as asyncio does: what comes after close() is dropped
        self.written += data
        self.has_news.set()
        if not self._reads:
            self._num_waiting += len(data)
            if self._num_waiting > WINDOW_BYTES and not self._is_write_paused:
                self._is_write_paused = True
                self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True
        self.has_news.set()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._num_waiting:
                self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        self._is_closing = True
        self._loop.call_soon(self.lose, None)

    # ---- the client's side

    def take_all(self) -> None:
        """Read what is there, and all that will come."""
        self._reads = True
        self._num_waiting = 0
        if self._is_write_paused:
            self._is_write_paused = False
            if not self.is_lost:
                self._protocol.resume_writing()
        if self._is_closing:
            self._loop.call_soon(self.lose, None)

    def lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self._protocol.connection_lost(error)
            self.can_receive.set()
            self.has_news.set()


class _Complaints(logging.Handler):
    """Lines that no client may cause: errors and tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            told = logging.Formatter().format(record)
            fields = getattr(record, "fields", "")
            self.found.append(f"{record.name}: {told} {fields}"[:4000])


@dataclass
class World:
    """The server, its books as they were at the start, and counts of what it answered."""

    service: Service
    server: Any
    make_protocol: Callable[[], Any]
    complaints: _Complaints
    num_tasks: int
    num_descriptors: int
    statuses: Counter[int] = field(default_factory=Counter)
    largest_answer: int = 0

    async def run(self, cases: Sequence[Case]) -> None:
        """All connections side by side; raises AssertionError where one is treated wrongly."""
        await asyncio.gather(*(self._converse(case) for case in cases))
        await self.check()

    async def check(self) -> None:
        """Everything that a connection took has been given back, and nobody complained."""
        await _until(lambda: not self.server.server_state.connections, "connections are open")
        await _until(lambda: not self.server.server_state.tasks, "calls are running")
        await _until(lambda: len(asyncio.all_tasks()) <= self.num_tasks, "tasks are left")
        await self._check_engine()
        assert self.service.num_streams == 0, f"{self.service.num_streams} streams"
        gc.collect(0)  # only then does a future complain that nobody looked at it
        assert not self.complaints.found, self.complaints.found[0]
        assert _num_descriptors() <= self.num_descriptors + SLACK, "descriptors are open"
        assert threading.active_count() <= MAX_THREADS, threading.enumerate()

    async def _check_engine(self) -> None:
        """Nothing runs, the books are in order, every block is free; seen by its own thread."""
        loaded = self.service.loaded
        assert isinstance(loaded, AsyncLLM)
        engine = loaded._engine.engine

        def is_idle() -> bool:
            if engine.has_work:
                return False
            engine.check_integrity()
            assert engine.snapshot().kv_usage == 0, "blocks are held"
            return True

        async with asyncio.timeout(PATIENCE_S):
            while not await _on_engines_thread(loaded._engine, is_idle):
                await asyncio.sleep(0.001)

    async def _converse(self, case: Case) -> None:
        transport = FakeTransport(reads=case.reads)
        protocol = self.make_protocol()
        started_at = asyncio.get_running_loop().time()
        transport.attach(protocol)
        await self._send(case, transport, protocol)
        # On a machine that is busy with something else a client may be late; that is not judged.
        is_late = asyncio.get_running_loop().time() - started_at > DEADLINE_S / 2
        left_early = await self._leave(case, transport, protocol)
        transport.take_all()
        await _until(lambda: transport.is_lost, "the connection is not closed")
        self._judge(case, bytes(transport.written), left_early=left_early or is_late)

    async def _send(self, case: Case, transport: FakeTransport, protocol: Any) -> None:
        for piece in case.pieces:
            if not piece:
                continue
            if not transport.is_reading():
                transport.take_all()  # nobody reads and nobody writes: one has to begin
            await asyncio.wait_for(transport.can_receive.wait(), PATIENCE_S)
            if transport.is_closing():
                return
            protocol.data_received(piece)
            if case.yields:
                await asyncio.sleep(0)

    async def _leave(self, case: Case, transport: FakeTransport, protocol: Any) -> bool:
        """End the connection as the case says; True: before the server had answered all."""
        if transport.is_closing():
            return False
        match case.leaving:
            case Leaving.STAYS:
                transport.take_all()
                await self._wait_for_answers(case, transport)
                if not transport.is_closing():
                    _hang_up(transport, protocol)
                return False
            case Leaving.TRICKLES:
                transport.take_all()
                await _trickle(case.trickle, transport, protocol)
                return False
            case Leaving.HALF_CLOSES:
                _hang_up(transport, protocol)
            case Leaving.GOES:
                _hang_up(transport, protocol)
                transport.lose(None)
            case Leaving.RESETS:
                transport.lose(ConnectionResetError(104, "Connection reset by peer"))
        return True

    async def _wait_for_answers(self, case: Case, transport: FakeTransport) -> None:
        """Until the server closes, or has answered all of a sound case."""
        async with asyncio.timeout(PATIENCE_S):
            while not transport.is_closing() and not transport.has_eof:
                if case.is_sound and self._has_all(case, bytes(transport.written)):
                    return
                transport.has_news.clear()
                if not transport.is_closing():
                    await transport.has_news.wait()

    @staticmethod
    def _has_all(case: Case, written: bytes) -> bool:
        if written.count(b"HTTP/1.1 ") < case.num_sound:
            return False
        try:
            answers = answers_of(written, case.heads_only)
        except BadAnswerError:
            return False  # half of one; what it is, is judged at the end
        return len(answers) == case.num_sound and answers[-1].is_whole

    def _judge(self, case: Case, written: bytes, *, left_early: bool) -> None:
        try:
            answers = answers_of(written, case.heads_only)
        except BadAnswerError as error:
            if left_early and "half a head" in str(error):
                return
            raise
        for number, answer in enumerate(answers):
            self.statuses[answer.status] += 1
            self.largest_answer = max(self.largest_answer, len(answer.body))
            may_be_head = not answer.body and b"HEAD" in b"".join(case.pieces)
            if not answer.is_whole and not left_early and not may_be_head:
                raise BadAnswerError(f"answer {number} is cut off: {written[-300:]!r}")
            check_answer(answer)
        most = 2 * (case.num_requests - case.num_sound) + case.num_sound + 1
        if case.is_sound and case.leaving is not Leaving.TRICKLES:
            most = case.num_sound
        assert len(answers) <= most, f"{len(answers)} answers to {case.num_requests} requests"
        if not left_early and len(answers) < case.num_sound:
            may_end = bool(answers) and answers[-1].closes and answers[-1].status >= 400
            assert may_end, f"{len(answers)} answers to {case.num_sound} sound requests"


async def _on_engines_thread(engine: AsyncEngine, look: Callable[[], bool]) -> bool:
    seen: Future[bool] = Future()

    def tell() -> None:
        try:
            seen.set_result(look())
        except AssertionError as error:
            seen.set_exception(error)

    engine.post(tell)
    return await asyncio.wrap_future(seen)


def _hang_up(transport: FakeTransport, protocol: Any) -> None:
    """The client sends its last byte; a protocol that does not keep the connection loses it."""
    if not protocol.eof_received():
        transport.close()


async def _trickle(trickle: bytes, transport: FakeTransport, protocol: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not transport.is_closing():
            await asyncio.sleep(TRICKLE_S)
            if transport.is_reading() and not transport.is_closing():
                protocol.data_received(trickle)


async def _until(is_reached: Callable[[], bool], complaint: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_reached():
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(complaint) from None


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settings() -> ServerSettings:
    """Short times, so that what must end by a deadline ends soon."""
    return ServerSettings(
        model_names=("tiny-text",),
        keys=KeyRing([ApiKey("fuzz", digest_of(KEY))]),
        max_body_bytes=256 << 10,
        max_header_bytes=16 << 10,
        header_timeout_s=DEADLINE_S,
        body_timeout_s=DEADLINE_S,
        linger_timeout_s=DEADLINE_S,
        unread_timeout_s=DEADLINE_S,
        keep_alive_s=1.0,
        drain_timeout_s=5.0,
        ping_interval_s=5.0,
    )


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """The server over the tiny model, until the block ends."""
    complaints = _Complaints()
    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(complaints)
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: complaints.found.append(f"event loop: {context!r}"[:4000])
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "text.gguf", chat_template=TEMPLATE)
        options = Options(kv_memory="1MiB", max_batch_size=16, max_context=MAX_CONTEXT)
        service = Service(settings(), lambda stuck: AsyncLLM.of(assemble(model, options), stuck))
        server = make_server(service)
        config = server.config
        config.load()
        lifespan = config.lifespan_class(config)
        await lifespan.startup()
        await service.open()
        assert service.failure is None, service.failure

        protocol_class: Any = config.http_protocol_class

        def make_protocol() -> Any:
            return protocol_class(
                config=config, server_state=server.server_state, app_state=lifespan.state
            )

        num_tasks = len(asyncio.all_tasks())
        made = World(service, server, make_protocol, complaints, num_tasks, _num_descriptors())
        try:
            yield made
        finally:
            await service.drain()
            await lifespan.shutdown()
            for logger in loggers:
                logger.removeHandler(complaints)
