"""The seam between APIs and the engine: why answers end, and errors in each API's own names."""

from typing import Any, cast

import pytest

from quire.chat import Answer, ToolCall
from quire.core.errors import RequestError
from quire.core.request import FinishReason
from quire.server import app
from quire.server.dialect import arguments_object, finish_word
from quire.server.errors import OPENAI_ERRORS, ApiError, ErrorShape
from quire.server.schemas import ChatRequest
from quire.server.submission import ErrorMapper

CALLS = Answer(None, None, (ToolCall("1", "f", "{}"),))


class NotDraining:
    is_draining = False


def test_calls_that_the_model_finished_are_a_reason_of_their_own() -> None:
    assert finish_word(FinishReason.STOP, CALLS) == "tool_calls"
    assert finish_word(FinishReason.LENGTH, CALLS) == "length"
    assert finish_word(FinishReason.STOP, Answer("text")) == "stop"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"a": "\\ud83d!"}', {"a": "\ufffd!"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": 1', {}),
        ('{"a": ' + "[" * 100_000, {}),
    ],
)
def test_arguments_as_an_object_are_what_a_reply_can_hold(text: str, given: dict[str, str]) -> None:
    assert arguments_object(text) == given


@pytest.mark.parametrize(
    "error",
    [RequestError("too many", param="max_tokens"), ApiError(400, "too many", param="max_tokens")],
)
def test_an_error_about_a_translated_field_has_the_name_that_the_client_gave(
    error: Exception,
) -> None:
    service = cast(Any, NotDraining())
    with (
        pytest.raises(ApiError) as caught,
        ErrorMapper(service, ChatRequest, {"max_tokens": "num_predict"}),
    ):
        raise error
    assert caught.value.param == "num_predict"


def test_a_path_has_the_errors_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ErrorShape(lambda _: b"plain", lambda _: b"frame")
    monkeypatch.setitem(app._ERROR_SHAPES, "/other/", shape)
    assert app.error_shape("/other/path") is shape
    assert app.error_shape("/v1/chat/completions") is OPENAI_ERRORS
    assert app.error_shape("/nowhere") is OPENAI_ERRORS
