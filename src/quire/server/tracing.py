"""Traces: a span for every call that generates, sent by OpenTelemetry where that is configured."""

from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.core.request import RequestOutput
from quire.server.calls import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

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


def _attributes(call: Call, model: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {
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
                len(completion.token_ids) for o in call.outputs for completion in o.completions
            ),
            "quire.cached_tokens": metrics.num_cached_tokens,
            "quire.chunks": metrics.num_chunks,
            "quire.steps": metrics.num_steps,
            "quire.preemptions": metrics.num_preemptions,
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
