"""What those who run a server look at: health, readiness, metrics, stats, logs, traces, docs."""

import asyncio
import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from tests.server.raw import exchange
from tests.server.servers import (
    PATIENCE_S,
    QUESTION,
    PacedExecutor,
    Reply,
    RunningServer,
    fake_assembly,
    fake_server,
    running,
    settings_of,
)
from tests.server.test_streams import completion_bytes, events

from quire.core.errors import ConfigError, ModelFileError
from quire.core.plan import StepPlan
from quire.core.progress import report
from quire.llm import AsyncLLM
from quire.llm.prompts import PromptReader
from quire.server.calls import Tracing, open_tracing
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.logs import set_up_logs
from quire.server.model_service import State
from quire.server.service import Service

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
# What dashboards rely on; counters as Prometheus' own libraries would name them.
GAUGES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "memory_bytes"),
    *("engine_health", "batch_limit"),
)
COUNTERS = (
    *("steps_failed", "steps_retried"),
    *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens"),
    *("generation_tokens", "request_success", "padding_tokens", "fault_isolated"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
    *("batch_size", "step_seconds", "launch_seconds"),
)


def families(server: RunningServer) -> dict[str, Any]:
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = text_string_to_metric_families(reply.body.decode())
    return {family.name.removeprefix("quire:"): family for family in found}


# ---- health and readiness


def test_a_server_that_loads_is_alive_and_not_ready(text_model: Path) -> None:
    may_load = threading.Event()

    def load(on_stuck: Callable[[], None]) -> AsyncLLM:
        assert may_begin.wait(PATIENCE_S)
        report("loading weights", 0.436)
        has_begun.set()
        assert may_load.wait(PATIENCE_S)
        return AsyncLLM.of(fake_assembly(text_model, PacedExecutor()), on_stuck)

    may_begin, has_begun = threading.Event(), threading.Event()
    with running(settings_of(), load) as server:
        starting = {"phase": "starting", "percent": 0}
        assert server.get("/health").json == {"status": "ok", "loading": starting}
        may_begin.set()
        assert has_begun.wait(PATIENCE_S)
        progress = {"phase": "loading weights", "percent": 43}
        assert server.get("/health").json == {"status": "ok", "loading": progress}
        ready = server.get("/ready")
        assert (ready.status, ready.json) == (503, {"status": "loading", "loading": progress})
        for path in ("/v1/models", "/metrics", "/v1/stats"):
            assert server.get(path).status == 503
        early = server.chat()
        assert (early.status, early.error["code"]) == (503, "loading")
        assert int(early.headers["retry-after"]) >= 1
        may_load.set()
        server.wait_until(lambda: server.get("/ready").status == 200)
        assert server.get("/health").json == {"status": "ok"}
        assert server.chat(max_tokens=2).status == 200


def test_a_model_that_cannot_be_loaded_ends_the_server(text_model: Path) -> None:
    def load(_: object) -> AsyncLLM:
        raise ModelFileError("it is broken")

    with running(settings_of(), load) as server:
        server.wait_until(server.service.has_ended.is_set)
        assert isinstance(server.service.failure, ModelFileError)
        assert server.get("/ready").json == {"status": "failed"}


def test_who_ends_a_server_that_loads_need_not_wait() -> None:
    never = threading.Event()

    def load(_: object) -> AsyncLLM:
        never.wait()
        raise AssertionError

    async def main() -> None:
        service = Service(settings_of(), load)
        opening = asyncio.create_task(service.open())
        await asyncio.sleep(0.01)
        await service.drain()
        await asyncio.wait_for(opening, PATIENCE_S)
        assert service.state is State.DRAINING

    asyncio.run(main())


def test_a_part_that_cannot_be_stopped_ends_no_request_and_keeps_no_server_alive(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    with fake_server(text_model, PacedExecutor(0.005, num_blocks=1024)) as server:
        service = server.service
        answers: list[Reply] = []
        ask = partial(server.chat, max_tokens=100, ignore_eos=True)
        asking = threading.Thread(target=lambda: answers.append(ask()))
        asking.start()
        server.wait_until(lambda: server.engine.has_work)
        monkeypatch.setattr(service.background, "stop", fail)
        asyncio.run_coroutine_threadsafe(service.drain(), server.loop).result(PATIENCE_S)
        assert service.has_ended.is_set()
        asking.join(PATIENCE_S)
        assert [reply.status for reply in answers] == [200], answers


def test_a_request_that_is_read_while_the_server_ends_may_be_sent_again(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()
    read_chat = PromptReader.read_chat

    def read_slowly(*args: Any, **given: Any) -> Any:
        is_reading.set()
        assert may_go_on.wait(PATIENCE_S)
        return read_chat(*args, **given)

    monkeypatch.setattr(PromptReader, "read_chat", read_slowly)
    with fake_server(text_model) as server:
        answers: list[Reply] = []
        asking = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=2)))
        asking.start()
        assert is_reading.wait(PATIENCE_S)
        draining = server.service.drain()
        asyncio.run_coroutine_threadsafe(draining, server.loop).result(PATIENCE_S)
        may_go_on.set()
        asking.join(PATIENCE_S)
        assert [(reply.status, reply.error["code"]) for reply in answers] == [(503, "drain")]


# ---- metrics


def test_metrics_are_those_that_dashboards_rely_on(text_model: Path) -> None:
    with fake_server(text_model) as server:
        for _ in range(3):
            server.chat(max_tokens=5, ignore_eos=True)
        assert server.chat(temperature=-1).status == 400
        found = families(server)
        for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
            for name in names:
                assert found[name].type == kind, name
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in found.values()
            for sample in family.samples
        }
        model = ("model_name", "tiny-text")
        assert samples["quire:generation_tokens_total", (model,)] == 15
        reasons = (("finished_reason", "length"), model)
        assert samples["quire:request_success_total", reasons] == 3
        assert samples["quire:requests_rejected_total", (("code", "400"), model)] == 1
        assert samples["quire:inter_token_latency_seconds_count", (model,)] == 3 * 4
        for name in HISTOGRAMS:
            total = samples[f"quire:{name}_bucket", (("le", "+Inf"), model)]
            assert total == samples[f"quire:{name}_count", (model,)] > 0
        stats = server.get("/v1/stats").json
        assert stats["completion_tokens"] == 15
        assert stats["requests_ended"] == {"finished": 3}
        assert stats["status"] == "ready"


def test_every_panel_of_the_dashboard_asks_for_metrics_there_are(fake: RunningServer) -> None:
    kinds = re.findall(r"# TYPE (\S+) (\S+)", fake.get("/metrics").body.decode())
    exposed = {name for name, _ in kinds}
    exposed |= {
        f"{name}_{part}"
        for name, kind in kinds
        for part in ("bucket", "sum", "count")
        if kind == "histogram"
    }
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"title", "panels", "templating", "schemaVersion", "uid"} <= set(dashboard)
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert len(queries) >= 12
    for query in queries:
        names = re.findall(r"quire:[a-z0-9_]+", query)
        assert names, query
        assert set(names) <= exposed, query
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboard_shows_every_metric_of_the_list() -> None:
    text = DASHBOARD.read_text()
    for name in (*GAUGES, *COUNTERS, *HISTOGRAMS, "device_utilization"):
        assert f"quire:{name}" in text, name


# ---- where the time went


def test_a_trace_says_where_the_time_went(text_model: Path) -> None:
    executor = PacedExecutor(step_s=0.002)
    engine = {"max_batch_size": 1, "max_step_tokens": 16}
    with fake_server(text_model, executor, engine) as server:
        body = {"prompt": list(range(3, 43)), "max_tokens": 5, "ignore_eos": True}
        threads = [
            threading.Thread(target=lambda: server.post("/v1/completions", body)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        reply = server.post("/v1/completions", body, {"x-quire-trace": "1"})
        for thread in threads:
            thread.join()
        [trace] = reply.json["quire_trace"]
        assert trace["prompt_tokens"] == 40
        assert trace["steps"] >= 5
        assert trace["chunks"] >= 1
        assert trace["preemptions"] == 0
        assert 0 <= trace["queued_s"] <= trace["first_token_s"] <= trace["total_s"]
        assert sum(trace["waited_for_s"].values()) <= trace["total_s"]
        again = server.post("/v1/completions", body, {"x-quire-trace": "1"}).json
        assert again["quire_trace"][0]["cached_tokens"] >= 32, "the prefix was found"
        assert "quire_trace" not in server.post("/v1/completions", body).json


def test_a_stream_is_traced_in_its_last_chunk(fake: RunningServer) -> None:
    ask = completion_bytes(3).replace(b"\r\n", b"\r\nx-quire-trace: 1\r\n", 1)
    *_, last, done = events(exchange(fake.port, ask))
    assert done == "data: [DONE]"
    chunk = json.loads(last.removeprefix("data: "))
    assert chunk["choices"] == []
    assert chunk["quire_trace"][0]["steps"] == 3


# ---- logs


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    stream = io.StringIO()
    set_up_logs("json", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    set_up_logs("json", "error", io.StringIO())


def _requests(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "request"]


def test_each_request_is_a_line_with_its_id(
    text_model: Path, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    key = "k" * 20
    ring = KeyRing([ApiKey("alice", digest_of(key))])
    with fake_server(text_model, keys=ring) as server:
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "mine-1"}
        body = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True, "user": "eve\nforged"}
        reply = server.post("/v1/completions", body, headers)
        assert reply.headers["x-request-id"] == "mine-1"
        refused = server.post("/v1/completions", {}, {"X-Request-Id": "with blank"})
        assert refused.status == 401
        assert refused.headers["x-request-id"] != "with blank"
        server.wait_until(lambda: len(_requests(log_lines())) >= 2)
    first, second = _requests(log_lines())[:2]
    assert first["request_id"] == "mine-1"
    assert (first["key"], first["user"]) == ("alice", "eve\nforged")
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["completion_tokens"] == 3
    assert first["finish_reason"] == "length"
    assert {"queued_s", "first_token_s", "seconds", "prompt_tokens"} <= set(first)
    assert second["request_id"] == refused.headers["x-request-id"]
    assert (second["status"], second["error"]) == (401, "invalid_api_key")
    text = json.dumps(log_lines())
    assert "secret" not in text, "what users ask is theirs"
    assert key not in text


def test_logs_for_people_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    writer = set_up_logs("text", "info", stream)
    logging.getLogger("quire.server").info("request", extra={"fields": {"user": "a\nb", "n": 1}})
    assert writer.flush(PATIENCE_S)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith(r'info request user="a\nb" n=1' + "\n")


# ---- batches that fail


class OneRowAtATime(PacedExecutor):
    """Fails every step of more than one row while it is broken."""

    is_broken = True

    def _raise_faults(self, plan: StepPlan) -> None:
        if self.is_broken and len(plan.sequences) > 1:
            raise RuntimeError("one at a time, please")


def test_batches_that_fail_are_in_stats_metrics_traces_and_logs(
    text_model: Path, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    executor = OneRowAtATime()
    body = {"prompt": [[3], [4], [5], [6]], "max_tokens": 3, "ignore_eos": True}
    with fake_server(text_model, executor, {"max_batch_size": 4, "plan_ahead": False}) as server:
        healthy = server.get("/v1/stats").json["health"]
        assert (healthy["status"], healthy["cause"], healthy["since_s"]) == ("ok", None, None)
        assert server.get("/v1/stats").json["device"] == "reference"
        assert server.get("/v1/stats").json["device_reason"] == "asked for"
        reply = server.post("/v1/completions", body, {"x-quire-trace": "1"})
        stats = server.get("/v1/stats").json
        samples = metric_samples(server)
        executor.is_broken = False
        server.post("/v1/completions", {**body, "prompt": [3], "max_tokens": 64})
        over = server.get("/v1/stats").json["health"]
        server.wait_until(lambda: any(line["event"] == "recovered" for line in log_lines()))

    assert reply.status == 200
    assert stats["num_steps"] == stats["completion_tokens"] == 12
    assert stats["mean_batch_size"] == 1.0
    assert stats["faults_isolated"] == {"ExecutorError": 3}
    health = stats["health"]
    assert (health["status"], health["cause"]) == (
        "degraded",
        "RuntimeError: one at a time, please",
    )
    assert health["since_s"] > 0
    assert (health["batch_limit"], health["max_batch_size"]) == (1, 4)
    assert health["step_token_limit"] == health["max_step_tokens"] == 512
    assert health["steps_failed"] == {"RuntimeError": 3}
    assert (health["step_splits"], health["steps_retried"]) == (3 * 3, 3 * 6)
    assert (over["status"], over["batch_limit"]) == ("ok", 4)

    assert samples["engine_health", "degraded"] == 1
    assert samples["engine_health", "ok"] == 0
    assert samples["degraded_seconds", ""] > 0
    assert (samples["batch_limit", ""], samples["step_token_limit", ""]) == (1, 512)
    assert samples["steps_total", ""] == 12
    assert samples["steps_failed_total", "RuntimeError"] == 3
    assert (samples["steps_retried_total", ""], samples["step_splits_total", ""]) == (18, 9)
    assert samples["batch_size_count", ""] == 12

    traces = reply.json["quire_trace"]
    failed = {step for trace in traces for step in trace["failed_steps"]}
    assert all(trace["first_step"] in failed for trace in traces)
    assert all(trace["last_step"] not in failed for trace in traces)
    lines = log_lines()
    [first, *more] = [line for line in lines if line["event"] == "step_failed"]
    assert all(first["step"] in trace["failed_steps"] for trace in traces)
    assert (first["num_requests"], first["cause"], first["count"]) == (4, "RuntimeError", 1)
    assert first["error"] == "RuntimeError: one at a time, please"
    assert "_raise_faults" in first["traceback"]
    assert [line["count"] for line in more] == [2]
    [call, later] = [line for line in lines if line["event"] == "request"]
    assert call["failed_steps"] == sorted(failed)
    assert call["first_step"] == first["step"]
    assert call["last_step"] == max(trace["last_step"] for trace in traces)
    assert "failed_steps" not in later
    assert later["first_step"] > call["last_step"]


def metric_samples(server: RunningServer) -> dict[tuple[str, str], float]:
    """Values by name, without the prefix, and by the one label that is not the model's name."""
    return {
        (
            sample.name.removeprefix("quire:"),
            "".join(value for name, value in sample.labels.items() if name != "model_name"),
        ): sample.value
        for family in families(server).values()
        for sample in family.samples
    }


def test_a_key_without_the_scope_is_not_told_why_steps_fail(text_model: Path) -> None:
    key = "k" * 20
    with fake_server(text_model, keys=KeyRing([ApiKey("alice", digest_of(key))])) as server:
        stats = server.get("/v1/stats", {"Authorization": f"Bearer {key}"}).json
    assert "own" in stats
    assert "health" not in stats


# ---- traces


def test_spans_tell_of_each_request(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    closed: list[bool] = []

    def opened(endpoint: str, model: str) -> Tracing:
        assert endpoint == "http://127.0.0.1:4318"
        return Tracing(provider.get_tracer("t"), model, lambda: closed.append(True))

    monkeypatch.setattr("quire.server.app.open_tracing", opened)
    with fake_server(text_model, otlp_endpoint="http://127.0.0.1:4318") as server:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}
        server.post("/v1/completions", body, {"traceparent": parent, "X-Request-Id": "r1"})
        server.get("/health")
        server.wait_until(lambda: bool(exporter.get_finished_spans()))
    [span] = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.attributes is not None
    assert span.attributes["quire.request_id"] == "r1"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert (span.attributes["quire.first_step"], span.attributes["quire.last_step"]) == (1, 4)
    assert "quire.failed_steps" not in span.attributes
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    names = [event.name for event in span.events]
    assert names == ["queued", "started", "first token", "ended"]
    assert span.start_time is not None
    assert span.end_time is not None
    moments = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert moments == sorted(moments)
    assert closed == [True], "what was not sent is sent at the end"


def test_spans_go_to_a_collector() -> None:
    """A collector of our own: one path, one body."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.handle_request)
    thread.start()
    tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}", "tiny")
    from quire.server.calls import Call

    tracing.record(Call("POST", "/v1/completions", "r-collected", status=200))
    tracing.close()
    thread.join(PATIENCE_S)
    collector.server_close()
    [(path, body)] = received
    assert path == "/v1/traces"
    assert b"r-collected" in body


def test_traces_without_their_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"quire\[tracing\]"):
        open_tracing("http://127.0.0.1:4318", "tiny")


# ---- docs


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_docs_show_every_route_and_need_no_other_host(fake: RunningServer) -> None:
    page = fake.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    described = fake.get("/openapi.json").json
    assert "/v1/chat/completions" in described["paths"]
    for path in described["paths"]:
        assert path in text
    for name in ("repetition_penalty", "max_completion_tokens", "messages"):
        assert f"<code>{name}</code>" in text
    tags = Tags()
    tags.feed(text)
    links = [
        link for _, found in tags.found for name, link in found.items() if name in ("href", "src")
    ]
    assert links == ["openapi.json"]
    assert not [tag for tag, _ in tags.found if tag in ("script", "iframe", "img", "link")]


# ---- texts


def test_texts_become_tokens_and_back(tiny: RunningServer) -> None:
    tokens = tiny.post("/tokenize", {"prompt": "Hello there"}).json
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert tokens["max_model_len"] == 512
    back = tiny.post("/detokenize", {"tokens": tokens["tokens"]}).json
    assert back == {"prompt": "Hello there"}
    chat = tiny.post("/tokenize", {"messages": QUESTION}).json
    assert chat["count"] == tiny.chat(max_tokens=1).json["usage"]["prompt_tokens"]
    assert tiny.post("/tokenize", {}).error["param"] == "prompt"
    assert tiny.post("/tokenize", {"prompt": "x", "messages": QUESTION}).status == 400
    assert tiny.post("/detokenize", {"tokens": [512]}).error["param"] == "tokens"


def test_a_model_without_a_tokenizer_serves_token_ids() -> None:
    from tests.fixture_files import fixture_file
    from tests.server.servers import model_server

    with model_server(fixture_file("tiny/Q4_0.gguf")) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1}
        choice = server.post("/v1/completions", {**body, "return_token_ids": True}).json["choices"][
            0
        ]
        assert len(choice["token_ids"]) == 4
        assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
        assert server.post("/v1/completions", {"prompt": "text"}).status == 400
        assert server.chat().status == 400
        assert server.post("/tokenize", {"prompt": "x"}).error["code"] == "no_tokenizer"
