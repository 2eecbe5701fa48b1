"""Every field of OpenAI's API is obeyed or refused by name; random bodies break nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fixture_files import fixture_file
from tests.server.servers import PATIENCE_S, PacedExecutor, RunningServer, fake_server

from quire.server.app import BODY_OF_PATH, create_routes
from quire.server.fields import FieldPolicy, Standing, policies
from quire.server.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generation,
    StreamOptions,
)
from quire.server.service import Service
from quire.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
EMBED = {"input": "hi"}


def fields_of(params: Any) -> set[str]:
    return set(params.__annotations__) | {
        name for base in params.__mro__[1:] for name in getattr(base, "__annotations__", {})
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat.CompletionCreateParamsBase, ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
        (
            chat_completion_stream_options_param.ChatCompletionStreamOptionsParam,
            StreamOptions,
        ),
    ],
)
def test_every_field_of_openais_is_known(theirs: Any, ours: type[Generation]) -> None:
    assert {*fields_of(theirs)} <= {*ours.model_fields, "stream"}
    assert len(fields_of(theirs)) >= 2


def known_fields() -> Iterator[Any]:
    """Names that clients and other servers of August to November 2026 have, by path."""
    for path, lists in json.loads(fixture_file("client-fields.json").read_text()).items():
        for whose, names in lists.items() if path in BODY_OF_PATH else ():
            yield pytest.param(path, names, id=f"{path}-{whose}")


@pytest.mark.parametrize(("path", "names"), [*known_fields()])
def test_every_field_of_todays_clients_is_known(path: str, names: list[str]) -> None:
    """So that nobody is told that there is no such field: it is obeyed, accepted or refused."""
    assert [name for name in names if name not in policies(BODY_OF_PATH[path])] == []
    assert len(names) >= 2


def fields_with(standing: Standing) -> Iterator[Any]:
    for path, body, model in (
        ("/v1/chat/completions", CHAT, ChatRequest),
        ("/v1/completions", TEXT, CompletionRequest),
        ("/v1/embeddings", EMBED, EmbeddingRequest),
    ):
        for name, policy in policies(model).items():
            if policy.standing is standing:
                yield pytest.param(path, body, name, policy, id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "body", "name", "policy"), [*fields_with(Standing.REFUSED)])
def test_what_is_not_there_is_refused_by_name(
    fake: RunningServer, path: str, body: dict[str, Any], name: str, policy: FieldPolicy
) -> None:
    """For the reason that its description has; null and what asks for nothing is taken."""
    values: list[object] = [True, 7, "text", {"a": 1}, ["a"]]
    for value in values:
        if value in policy.neutral:
            continue
        reply = fake.post(path, {**body, name: value})
        assert (reply.status, reply.error["param"]) == (400, name)
        assert reply.error["code"] == "unsupported_field"
        assert reply.error["message"] == f"{name} is not supported: {policy.text}"
    for neutral in (None, *policy.neutral):
        reply = fake.post(path, {**body, name: neutral})
        if path == "/v1/embeddings":  # for which the hash model has no states
            assert reply.error["code"] == "row_fault"
        else:
            assert reply.status == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"maximum_tokens": 5},
        {"pattern": "(a+)+$"},
        {"": 1},
        {"odd name": 1},
    ],
)
def test_an_unknown_field_is_refused_by_name(
    fake: RunningServer, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    [name] = fields
    reply = fake.post(path, {**body, **fields})
    assert reply.status == 400
    assert (reply.error["param"] or "") == name


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema"},
        {"type": 5},
        {"type": "regex", "regex": "(a+)+$"},
        {"type": "text", "extra": 1},
        "text",
    ],
)
def test_shapes_that_cannot_be_followed_are_refused_at_once(
    fake: RunningServer, value: Any
) -> None:
    reply = fake.chat(response_format=value)
    assert reply.status == 400
    assert reply.error["param"].startswith("response_format")
    assert fake.chat(response_format={"type": "text"}, max_tokens=1).status == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
    ],
)
def test_nothing_is_fetched_for_a_message(fake: RunningServer, part: dict[str, Any]) -> None:
    reply = fake.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert reply.status == 400
    assert "is not supported; supported: 'text'" in reply.error["message"]


# ---- random bodies


@pytest.fixture(scope="module")
def fuzzed(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    executor = PacedExecutor(num_blocks=1024)
    state = tmp_path_factory.mktemp("state")
    with fake_server(text_model, executor, body_timeout_s=60.0, state_folder=state) as server:
        yield server


def _description() -> dict[str, Any]:
    def never(_: object) -> Any:
        raise AssertionError

    app: Any = create_routes(Service(ServerSettings(), never))
    found: dict[str, Any] = app.openapi()
    return found


schema = schemathesis.openapi.from_dict(_description())
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def hold(case: Any, fuzzed: RunningServer, tiny: RunningServer) -> None:
    """Answered as described; embeddings by a real model, since the hash model has no states."""
    server = tiny if case.path in ("/v1/embeddings", "/api/embed", "/api/embeddings") else fuzzed
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=PATIENCE_S)


@schema.parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
def test_random_requests_are_answered_as_described(
    case: Any, fuzzed: RunningServer, tiny: RunningServer
) -> None:
    hold(case, fuzzed, tiny)


@pytest.mark.long
@schema.parametrize()
@settings(max_examples=1000, suppress_health_check=list(HealthCheck), deadline=None)
def test_many_random_requests_are_answered_as_described(
    case: Any, fuzzed: RunningServer, tiny: RunningServer
) -> None:
    hold(case, fuzzed, tiny)


def test_the_server_is_sound_after_all_that(fuzzed: RunningServer) -> None:
    fuzzed.wait_until_idle()
    assert fuzzed.chat(max_tokens=2).status == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_token_at_most_is_no_limit(fake: RunningServer, name: str) -> None:
    """As LM Studio's and llama.cpp's clients say it."""
    asked = {"seed": 1, "temperature": 0}
    expected = fake.chat(**asked).json["choices"][0]["message"]
    assert fake.chat(**asked, **{name: -1}).json["choices"][0]["message"] == expected
    assert "must be at least" in fake.chat(**{name: -2}).error["message"]


def test_another_apis_name_of_a_field_is_met_with_the_one_here(fake: RunningServer) -> None:
    assert "did you mean seed?" in fake.chat(random_seed=1).error["message"]
