"""Call: one HTTP request from its first byte to its last, as logs and traces know it.

Tracing sends a span for every call that generates, by OpenTelemetry, where that is configured.
"""

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.core.request import RequestOutput
from quire.server.answers.store import StoredResponse
from quire.server.database import StoreError
from quire.server.errors import OPENAI_ERRORS, ApiError, ErrorShape
from quire.server.fields import IgnoredFields
from quire.server.keys import ApiKey
from quire.server.quotas import QuotaReservation

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SCOPE_KEY = "quire.call"  # of a call in its ASGI scope
PING = "quire.ping"  # in an ASGI message: its body is no part of the answer
CLIENT_GONE = "client_gone"  # the error of a call whose client disconnected
_LOGGED_PATH = 200  # characters
_RETRY_S = 5.0
_SOUND_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def unavailable(error: StoreError) -> ApiError:
    """What clients are told where the store of answers cannot be used."""
    return ApiError(503, str(error), code="answers_unavailable", retry_after_s=_RETRY_S)


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What an answer has besides what its body says. With the same identity, the same body gets the
    same answer, whenever it is computed: tokens, ids and time. What was measured while it was
    computed differs: tokens that were cached, durations, the time of its end."""

    name: str  # random, that its ids are made of
    created: int
    seed: int  # of the first prompt, where the body has none
    model: str = ""  # the fingerprint of what computes it, once that is known

    def of_model(self, fingerprint: str) -> "AnswerIdentity":
        """The identity of the answer by this model: by another one it is another answer."""
        if self.model:
            return self
        digest = hashlib.sha256(f"{self.name}/{self.seed}/{fingerprint}".encode()).digest()
        seed = int.from_bytes(digest[16:24], "little")
        return AnswerIdentity(digest[:16].hex(), self.created, seed, fingerprint)


class IdSource:
    """Ids of an answer and its parts; those of one with an identity are the same each time. Not the
    request's id: a client may choose that, and what is stored must not be guessed."""

    def __init__(self, identity: AnswerIdentity | None = None) -> None:
        self._identity = identity
        self._count = 0

    def new(self, kind: str) -> str:
        if self._identity is None:
            return f"{kind}_{uuid.uuid4().hex}"
        self._count += 1
        name = f"{self._identity.name}/{kind}/{self._count}"
        return f"{kind}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class ItemIds:
    """Ids of a response's items, from which its own can be read: clients refer to a stored item by
    its id alone. `mark`: a digit that tells two sources of one response apart."""

    def __init__(self, response_id: str, mark: int = 0) -> None:
        self._stem = f"{response_id.removeprefix('resp_')}{mark}"
        self._count = 0

    def new(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._stem}{self._count:05x}"

    @staticmethod
    def response_of(item_id: str) -> str:
        """The id of the response that an item would be of."""
        return f"resp_{item_id.partition('_')[2][:-6]}"


@dataclass(slots=True)
class Call:
    """The state of a call; each stage of the server adds what it finds out."""

    method: str
    path: str
    id: str
    client: str = ""  # the client's address, behind trusted proxies
    wants_trace: bool = False
    traceparent: str | None = None
    wants_ids: bool = False  # of a stream's events, so that it can be resumed
    last_event_id: str | None = None  # that the client has of a stream
    body_digest: str = ""  # where it has to do with either
    key: ApiKey | None = None
    user: str | None = None
    started_at: float = field(default_factory=time.time)
    started_tick: float = field(default_factory=time.perf_counter)
    status: int | None = None
    error: str | None = None
    error_field: str | None = None  # that the error is about
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    error_shape: ErrorShape = OPENAI_ERRORS  # of the API that its path belongs to
    is_streaming: bool = False
    is_background: bool = False  # a line of a job: behind all other requests
    quota: QuotaReservation | None = None
    outputs: list[RequestOutput] = field(default_factory=list)
    idempotency_key: str | None = None  # of an upload, which is read before it is looked up
    identity: AnswerIdentity | None = None  # of an answer that may be computed again
    is_replayed: bool = False  # answered by what was kept for its idempotency key
    # A response that is made in the background: what is known of it, and what became of it.
    stored: StoredResponse | None = None
    made: StoredResponse | None = None
    # On the disk before the end of the answer is sent; each is called in a thread.
    writes: list[Callable[[], object]] = field(default_factory=list)

    async def write_all(self) -> None:
        """Raises an ApiError where something could not be written."""
        while self.writes:
            try:
                await asyncio.to_thread(self.writes.pop(0))
            except StoreError as error:
                raise unavailable(error) from error

    @property
    def key_name(self) -> str:
        """The key that the engine accounts it to; without keys, one for all."""
        return "" if self.key is None else self.key.name

    def note(self, error: ApiError) -> None:
        """It was answered by an error."""
        self.error = error.code or error.message
        self.error_field = error.param

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_tick

    def summary(self) -> dict[str, object]:
        """The fields of its log line; nothing of its contents."""
        line: dict[str, object] = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path[:_LOGGED_PATH],
            "status": self.status,
            "seconds": round(self.seconds, 6),
        }
        if self.client:
            line["client"] = self.client
        if self.key is not None:
            line["key"] = self.key.name
        if self.user is not None:
            line["user"] = self.user
        if self.error is not None:
            line["error"] = self.error
        if self.error_field is not None:
            line["field"] = self.error_field
        if self.ignored_fields.names:
            line["ignored_fields"] = list(self.ignored_fields.names)
        if self.is_replayed:
            line["replayed"] = True
        if self.outputs:
            line |= _summary_of(self.outputs)
        return line


def new_call(method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Call:
    """A call from its request head; a well-formed x-request-id is kept."""
    found = dict(headers)
    given = found.get(b"x-request-id", b"").decode("latin-1")
    name = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex
    parent = found.get(b"traceparent")
    last = found.get(b"last-event-id")
    return Call(
        method,
        path,
        name,
        wants_trace=found.get(b"x-quire-trace") == b"1",
        wants_ids=last is not None or found.get(b"x-quire-resume") == b"1",
        last_event_id=None if last is None else last.decode("latin-1"),
        traceparent=None if parent is None else parent.decode("latin-1"),
    )


def _summary_of(outputs: list[RequestOutput]) -> dict[str, object]:
    first = outputs[0].metrics
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
        "completion_tokens": sum(
            completion.num_tokens for output in outputs for completion in output.completions
        ),
        "finish_reason": outputs[0].finish_reason,
        "queued_s": _rounded(first.queued_s),
        "first_token_s": _rounded(first.time_to_first_token_s),
        **_steps_of(outputs),
    }


def _steps_of(outputs: list[RequestOutput]) -> dict[str, int | list[int]]:
    """Ids of steps, which the engine's own lines name: the first and last that had rows of the
    call, and those that failed with rows of it."""
    metrics = [output.metrics for output in outputs]
    first = [each.first_step for each in metrics if each.first_step is not None]
    last = [each.last_step for each in metrics if each.last_step is not None]
    failed = sorted({step for each in metrics for step in each.failed_steps})
    found: dict[str, int | list[int]] = {}
    if first and last:
        found |= {"first_step": min(first), "last_step": max(last)}
    if failed:
        found["failed_steps"] = failed
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


# ---- traces


_NANOSECONDS = 1_000_000_000


class Tracing:
    """Spans follow OpenTelemetry's names for generative AI; times are the engine's own."""

    def __init__(self, tracer: "Tracer", model: str, close: Any) -> None:
        self._tracer = tracer
        self._model = model
        self._close = close

    def record(self, call: Call) -> None:
        """Write the span of an ended call, with the moments of its first request as events."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = None
        if call.traceparent is not None:
            carrier = {"traceparent": call.traceparent}
            parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            f"{call.method} {call.path}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=int(call.started_at * _NANOSECONDS),
            attributes=_attributes(call, self._model),
        )
        for output in call.outputs[:1]:
            _add_events(span, call, output)
        if call.error is not None:
            span.set_status(Status(StatusCode.ERROR, call.error))
        span.end(int((call.started_at + call.seconds) * _NANOSECONDS))

    def close(self) -> None:
        """Send what has not been sent."""
        self._close()


def open_tracing(endpoint: str, model: str) -> Tracing:
    """Spans to an OTLP collector over HTTP, in batches, off the event loop."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces need OpenTelemetry, which is not installed ({error}): pip install "
            "'quire[tracing]'"
        ) from error
    url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
    provider = TracerProvider(resource=Resource.create({"service.name": "quire"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider.get_tracer("quire"), model, provider.shutdown)


def _attributes(call: Call, model: str) -> dict[str, str | int | list[int]]:
    found: dict[str, str | int | list[int]] = {
        "http.request.method": call.method,
        "url.path": call.path,
        "http.response.status_code": call.status or 0,
        "quire.request_id": call.id,
        "gen_ai.system": "quire",
        "gen_ai.request.model": model,
    }
    if call.key is not None:
        found["quire.key"] = call.key.name
    if call.outputs:
        metrics = call.outputs[0].metrics
        found |= {
            "gen_ai.usage.input_tokens": sum(len(o.prompt_token_ids) for o in call.outputs),
            "gen_ai.usage.output_tokens": sum(
                completion.num_tokens for o in call.outputs for completion in o.completions
            ),
            "quire.cached_tokens": metrics.num_cached_tokens,
            "quire.chunks": metrics.num_chunks,
            "quire.steps": metrics.num_steps,
            "quire.preemptions": metrics.num_preemptions,
            **{f"quire.{name}": value for name, value in _steps_of(call.outputs).items()},
        }
    return found


def _add_events(span: Any, call: Call, output: RequestOutput) -> None:
    """The engine's clock and the call's tick are the same clock."""
    metrics = output.metrics
    for name, at in (
        ("queued", metrics.arrived_at),
        ("started", metrics.started_at),
        ("first token", metrics.first_token_at),
        ("ended", metrics.finished_at),
    ):
        if at is not None:
            moment = call.started_at + at - call.started_tick
            span.add_event(name, timestamp=int(moment * _NANOSECONDS))
