"""Responses that outlive their request, with OpenAI's own client: stored ones across restarts,
streamed again, and made in the background."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.jobs.test_crashes import _descendants as descendants
from tests.server.jobs.test_crashes import kill_everything
from tests.server.processes import ServeProcess, serving
from tests.server.servers import (
    NAME,
    PATIENCE_S,
    PacedExecutor,
    RunningServer,
    fake_assembly,
    fake_server,
    model_server,
    running,
    settings_of,
    wait_until,
)
from tests.server.test_models import NAMES, room_for, serving_all, three_models
from tests.worker.test_server import SMALL

from quire.llm import AsyncLLM
from quire.server.answers import background
from quire.server.answers.store import DATABASE, AnswerStore
from quire.server.database import StoreError
from quire.server.jobs.jobs import Jobs
from quire.server.jobs.lines import LineError, read_line
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.service import Service

# With this seed the model writes no end in 400 tokens.
LONG = {"max_output_tokens": 60, "temperature": 1.0, "extra_body": {"seed": 2}}


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": NAME, "input": "Hello there", "max_output_tokens": 8, "temperature": 0.0}
    return client.responses.create(**{**given, **fields})


def replayed(client: openai.OpenAI, response_id: str, **options: Any) -> list[Any]:
    return list(client.responses.retrieve(response_id, stream=True, **options))


def wait(client: openai.OpenAI, response_id: str) -> Any:
    """Until a background response has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def slow(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Five milliseconds a token."""
    executor = PacedExecutor(num_blocks=1024, step_s=0.005)
    state = tmp_path_factory.mktemp("state")
    with fake_server(text_model, executor, state_folder=state) as server:
        yield server


# ---- across restarts


def test_a_response_follows_one_of_before_the_restart(text_model: Path, tmp_path: Path) -> None:
    with model_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        first = respond(client, metadata={"a": "b"})
        expected = respond(client, input="And now?", previous_response_id=first.id)
    with model_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        assert client.responses.retrieve(first.id) == first
        [item] = client.responses.input_items.list(first.id).data
        assert item.content[0].text == "Hello there"  # type: ignore[union-attr,index]
        follows = respond(client, input="And now?", previous_response_id=first.id)
        assert follows.output_text == expected.output_text
        client.responses.delete(first.id)
    with model_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            respond(client, previous_response_id=first.id)
        assert client.responses.retrieve(follows.id) == follows


def test_a_store_that_is_damaged_is_said_before_anything_is_computed(
    text_model: Path, tmp_path: Path
) -> None:
    (tmp_path / DATABASE).write_bytes(b"no database " * 1000)
    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        with pytest.raises(openai.APIStatusError, match="send store: false") as refused:
            respond(client)
        assert refused.value.status_code == 503
        assert refused.value.code == "answers_unavailable"
        assert sum(server.engine.snapshot().stats.requests_ended.values()) == 0
        assert respond(client, store=False).status == "incomplete"
        for read in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.APIStatusError, match="cannot be read"):
                read("resp_1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_fails_the_response_instead_of_losing_it(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def full(*_: object) -> bool:
        raise StoreError("cannot write to the folder: disk full")

    with fake_server(text_model, state_folder=tmp_path) as server:
        monkeypatch.setattr(AnswerStore, "put", full)
        body = {"input": "Hello", "max_output_tokens": 4, "stream": stream}
        answer = server.post("/v1/responses", body)
        assert b"disk full" in answer.body
        assert answer.status == (200 if stream else 503)
        assert (b"event: response.failed" in answer.body) is stream
        assert b"response.incomplete" not in answer.body


# ---- streams of what is stored


def test_events_are_streamed_again_as_they_were(slow: RunningServer) -> None:
    with slow.client() as client:
        events = list(respond(client, stream=True, **LONG))
        name = events[-1].response.id
        assert replayed(client, name) == events
        for after in (0, 5, len(events) - 2, len(events) - 1, len(events) + 5):
            rest = replayed(client, name, starting_after=after)
            assert rest == events[after + 1 :]


def test_a_response_that_was_not_streamed_has_events_too(slow: RunningServer) -> None:
    with slow.client() as client:
        whole = respond(client, include=["message.output_text.logprobs"], top_logprobs=1)
        events = replayed(client, whole.id)
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(9))
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert events[3].part.text == "" and events[4].delta == whole.output_text
    assert len(events[4].logprobs) == 8
    assert events[-1].response.model_dump() == whole.model_dump()


@pytest.mark.parametrize(
    "query, param",
    [
        ("stream=yes", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=99999999999", "starting_after"),
        ("include=all", "include"),
        ("include[]=message.output_text.logprobs", "include"),
        ("after=3", "after"),
        ("include_obfuscation=2", "include_obfuscation"),
    ],
)
def test_parameters_that_are_wrong_or_unknown_are_named(
    slow: RunningServer, query: str, param: str
) -> None:
    name = slow.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2}).json["id"]
    refused = slow.get(f"/v1/responses/{name}?{query}")
    assert refused.status == 400 and refused.error["param"] == param
    items = slow.get(f"/v1/responses/{name}/input_items?{query}")
    assert items.status == 400
    for method, path in (("DELETE", ""), ("POST", "/cancel")):
        body: dict[str, Any] | None = {} if method == "POST" else None
        refused = slow.send(method, f"/v1/responses/{name}{path}?x=1", body)
        assert refused.status == 400 and refused.error["param"] == "x"


def test_parameters_that_change_nothing_are_taken(slow: RunningServer) -> None:
    with slow.client() as client:
        whole = respond(client)
        again = client.responses.retrieve(whole.id, include=["reasoning.encrypted_content"])
        assert again == whole
        events = replayed(client, whole.id, include_obfuscation=False)
        assert events[-1].response.id == whole.id


def test_a_stream_that_cannot_be_read_on_says_why(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise StoreError("cannot be read")

    with fake_server(text_model, state_folder=tmp_path) as server, server.client() as client:
        whole = respond(client)
        monkeypatch.setattr(AnswerStore, "events", broken)
        [event] = replayed(client, whole.id)
        assert (event.type, event.code) == ("error", "answers_unavailable")
        assert event.message == "cannot be read"


# ---- in the background


def test_a_response_is_made_in_the_background(slow: RunningServer) -> None:
    with slow.client() as client:
        fields = {**LONG, "metadata": {"a": "b"}}
        made = respond(client, background=True, **fields)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert made.usage is None
        ended = wait(client, made.id)
        plain = respond(client, **fields)
        assert ended.output_text == plain.output_text
        assert (ended.status, ended.background) == ("incomplete", True)
        assert ended.usage.output_tokens == 60 and ended.created_at == made.created_at
        assert client.responses.cancel(made.id) == ended, "it has ended"
        follows = respond(client, previous_response_id=made.id, background=True)
        assert wait(client, follows.id).usage.input_tokens > ended.usage.input_tokens
        [item] = client.responses.input_items.list(made.id).data
        assert item.content[0].text == "Hello there"  # type: ignore[union-attr,index]


def test_its_stream_can_be_left_and_taken_up_again(slow: RunningServer) -> None:
    with slow.client() as client:
        events = []
        with respond(client, background=True, stream=True, **LONG) as stream:
            for event in stream:
                events.append(event)
                if len(events) == 6:
                    break
        name = events[0].response.id
        events += replayed(client, name, starting_after=5)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        ended = wait(client, name)
        assert events[-1].response == ended
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == ended.output_text
        assert replayed(client, name) == events


def test_it_is_cancelled(slow: RunningServer) -> None:
    with slow.client() as client:
        made = respond(client, background=True, **{**LONG, "max_output_tokens": 400})
        wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            respond(client, previous_response_id=made.id)
        cancelled = client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        assert client.responses.cancel(made.id).status == "cancelled", "again"
        slow.wait_until_idle()
        replayed(client, made.id)  # ends
        gone = respond(client, background=True, **{**LONG, "max_output_tokens": 400})
        client.responses.delete(gone.id)
        slow.wait_until_idle()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def test_what_is_wrong_with_it_is_said_at_once(slow: RunningServer) -> None:
    with slow.client() as client:
        for wrong, param in (
            ({"store": False}, "background"),
            ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
            ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                respond(client, background=True, **wrong)
            assert refused.value.param == param


def test_a_line_of_a_job_cannot_ask_for_it() -> None:
    line = {"custom_id": "a", "body": {"input": "Hi", "background": True}}
    with pytest.raises(LineError, match="background"):
        read_line(json.dumps(line).encode(), "/v1/responses")


def test_what_the_engine_refuses_is_said_when_it_ends(slow: RunningServer) -> None:
    with slow.client() as client:
        ended = wait(client, respond(client, background=True, max_output_tokens=10_000).id)
        assert (ended.status, ended.error.code) == ("failed", "invalid_prompt")
        assert "max_output_tokens" in ended.error.message
        events = replayed(client, ended.id)
        assert events[-1].type == "response.failed" and events[-1].response == ended


def test_a_key_has_a_limit_of_them(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_LIVE", 2)
    secrets = {name: f"{name}-{'k' * 20}" for name in ("alice", "bob")}
    ring = KeyRing([ApiKey(name, digest_of(secret)) for name, secret in secrets.items()])
    executor = PacedExecutor(num_blocks=1024, step_s=0.01)
    with (
        fake_server(text_model, executor, keys=ring) as server,
        server.client(secrets["alice"]) as alice,
        server.client(secrets["bob"]) as bob,
    ):
        long = {**LONG, "max_output_tokens": 400, "background": True}
        made = [respond(alice, **long) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="have not ended"):
            respond(alice, **long)
        other = respond(bob, background=True)
        with pytest.raises(openai.NotFoundError):
            alice.responses.cancel(other.id)
        for each in made:
            alice.responses.cancel(each.id)
        assert wait(bob, other.id).status == "incomplete"


@pytest.mark.parametrize("has_begun", [False, True])
def test_one_whose_key_is_gone_fails(text_model: Path, tmp_path: Path, has_begun: bool) -> None:
    secrets = {name: f"{name}-{'k' * 20}" for name in ("alice", "bob")}
    keys = {name: ApiKey(name, digest_of(secret)) for name, secret in secrets.items()}
    executor = PacedExecutor(num_blocks=1024, step_s=0.01)
    ring = KeyRing(keys.values())
    with (
        fake_server(text_model, executor, keys=ring, state_folder=tmp_path) as server,
        server.client(secrets["alice"]) as alice,
    ):
        made = respond(alice, background=True, **{**LONG, "max_output_tokens": 400})
        if has_begun:
            wait_until(lambda: bool(server.service.responses.events(made.id, 0)))
    with fake_server(text_model, keys=KeyRing([keys["bob"]]), state_folder=tmp_path) as server:

        def ended() -> bool:
            found = server.service.responses.find("alice", made.id)
            return found is not None and not found.is_live

        wait_until(ended)
        found = server.service.responses.find("alice", made.id)
        assert found is not None and found.status == "failed"
        assert "no longer valid" in json.loads(found.body)["error"]["message"]
    with fake_server(text_model, keys=ring, state_folder=tmp_path) as server:
        events = replayed(server.client(secrets["alice"]), made.id)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.failed"
        assert (len(events) > 3) is has_begun


def test_a_look_for_responses_that_fails_is_not_the_last(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(text_model) as server, server.client() as client:
        claims, num_tried = server.service.claims, 0
        take = claims.take

        def fail_first(name: str) -> bool:
            nonlocal num_tried
            num_tried += 1
            if num_tried == 1:
                raise RuntimeError("a bug")
            return take(name)

        monkeypatch.setattr(claims, "take", fail_first)
        made = respond(client, background=True)
        assert wait(client, made.id).status == "incomplete"
        assert num_tried > 1


def test_a_server_that_ends_while_it_opens_its_jobs_makes_no_response(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Jobs.start

    async def start_and_drain(jobs: Jobs) -> None:
        await start(jobs)
        await services[0].drain()

    services: list[Service] = []
    init = Service.__init__

    def keep(service: Service, *args: Any, **options: Any) -> None:
        init(service, *args, **options)
        services.append(service)

    monkeypatch.setattr(Service, "__init__", keep)
    monkeypatch.setattr(Jobs, "start", start_and_drain)
    assembly = fake_assembly(text_model, PacedExecutor(num_blocks=1024))
    load = partial(AsyncLLM.of, assembly)
    settings = settings_of(state_folder=tmp_path)
    with running(settings, load, replace=lambda *_: None) as server:
        server.wait_until(lambda: server.service.has_ended.is_set())
        time.sleep(0.2)
        assert server.service.background._sweeping is None
        assert list(tmp_path.glob("control/*.sock")) == []


def served(model: Path, state: Path, *more: str) -> Any:
    named = ("--state", state, "--served-model-name", NAME)
    return serving(model, *SMALL, *named, *more, log=state / "log")


def client_of(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    )


# A text that cannot end soon.
ENDLESS = {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 2000}}


@pytest.mark.parametrize("more", [(), ("--api-processes", "2")])
def test_one_of_a_server_that_was_killed_is_made_anew(
    text_model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    long = {"max_output_tokens": 400, "temperature": 1.0, "text": {"format": ENDLESS}}
    live: list[tuple[str, str]] = []
    while not live:  # unless it had ended before the kill, as it may on a busy machine
        with served(text_model, tmp_path, *more) as server, client_of(server) as client:
            events = []
            for event in respond(client, background=True, stream=True, **long):
                events.append(event)
                if len(events) == 20:
                    break
            kill_everything(server)
        store = AnswerStore(tmp_path)
        live = store.live()
        store.close()
    name = events[0].response.id
    assert live == [("", name)]
    with served(text_model, tmp_path, *more) as server, client_of(server) as client:
        ended = wait(client, name)
        whole = replayed(client, name)
        assert [e.model_dump() for e in whole[:20]] == [e.model_dump() for e in events]
        assert whole[-1].response == ended
        assert ended.status == "incomplete" and ended.usage.output_tokens == 400


def test_one_of_an_api_process_that_died_is_made_by_another(
    text_model: Path, tmp_path: Path
) -> None:
    long = {"max_output_tokens": 400, "temperature": 1.0, "text": {"format": ENDLESS}}
    with served(text_model, tmp_path, "--api-processes", "2") as server:
        with client_of(server) as client:
            made = [respond(client, background=True, **long) for _ in range(6)]
            for pid in api_processes(server):
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.5)  # the other one takes over
        wait_until(lambda: can_connect(server))
        with client_of(server) as client:
            for each in made:
                ended = wait(client, each.id)
                assert ended.usage.output_tokens == 400


def api_processes(server: ServeProcess) -> list[int]:
    """What they start has their command line until it runs a program of its own."""
    found: dict[int, int] = {}  # by number: the parent's
    for pid in descendants(server.process.pid):
        with suppress(OSError):  # one that has ended meanwhile
            if b"quire.server.processes" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = int(
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                )
    processes = [pid for pid, parent in found.items() if parent not in found]
    assert len(processes) == 2
    return processes


def can_connect(server: ServeProcess) -> bool:
    try:
        with client_of(server) as client:
            return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False


def test_each_of_several_models_makes_its_own(tmp_path: Path) -> None:
    state, models = tmp_path / "state", tmp_path / "models"
    models.mkdir()
    three_models(models)
    with serving_all(models, room_for(models, 1), settings={"state_folder": state}) as server:
        with server.client() as client:
            fields = {"extra_body": {"seed": 3}, "temperature": 1.0}
            made = [respond(client, model=name, background=True, **fields) for name in NAMES]
            ended = [wait(client, each.id) for each in made]
            assert [each.model for each in ended] == list(NAMES)
            for each in ended:
                plain = respond(client, model=each.model, **fields)
                assert each.output_text == plain.output_text
        body = {"model": "red", "prompt": "one", "max_tokens": 8, "temperature": 1.0}
        named = {"Idempotency-Key": "a"}
        first = server.post("/v1/completions", body, named)
        respond_to = {**body, "model": "blue"}
        assert server.post("/v1/completions", respond_to).status == 200
        assert not has_loaded(server, "red")
        assert server.post("/v1/completions", body, named).body == first.body
        assert not has_loaded(server, "red"), "nothing is loaded for an answer that was kept"


def has_loaded(server: RunningServer, name: str) -> bool:
    return server.service.model_of(name).loaded is not None
