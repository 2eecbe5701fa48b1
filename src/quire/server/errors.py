"""ApiError: what goes wrong, as OpenAI's API says it, and what quire's errors become there."""

import json
import math
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from operator import attrgetter

from pydantic import BaseModel

from quire.core.errors import (
    ContextLengthError,
    DeadlineError,
    ModelFileError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestError,
    RowFaultError,
    StepTimeoutError,
    WorkerCrashError,
)
from quire.server.replies import ErrorReply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

RESTART_S = 5.0  # a supervisor's usual time to restart the process


class ApiError(Exception):
    """An answer that is an error; `param` names the field it is about, where it is about one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = "invalid_field" if code is None and status == 400 and param else code
        self.retry_after_s = retry_after_s
        self.own_headers = headers

    @property
    def retry_after_ms(self) -> int | None:
        if self.retry_after_s is None:
            return None
        return max(1, round(1000 * self.retry_after_s))

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Retry-After has whole seconds; OpenAI's clients read retry-after-ms first."""
        found = list(self.own_headers)
        if self.retry_after_s is not None:
            found.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
            found.append(("retry-after-ms", str(self.retry_after_ms)))
        return found


# ---- how APIs write errors


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API writes an error: as a body, and in a stream whose headers were sent."""

    body: Callable[[ApiError], bytes]
    frame: Callable[[ApiError], bytes]
    status: Callable[[ApiError], int] = attrgetter("status")
    reply: type[BaseModel] = ErrorReply  # the body, as it is described
    overloaded: int = 429  # the status of a full queue
    id_header: bytes | None = None  # where clients read the request's id, beside x-request-id


def _openai_fields(error: ApiError) -> dict[str, object]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def _openai_body(error: ApiError) -> bytes:
    return json.dumps({"error": _openai_fields(error)}).encode()


def _openai_frame(error: ApiError) -> bytes:
    """With retry_after_ms, which can be in no header any more."""
    fields = _openai_fields(error)
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = error.retry_after_ms
    return b"data: " + json.dumps({"error": fields}).encode() + b"\n\n"


OPENAI_ERRORS = ErrorShape(_openai_body, _openai_frame)


# ---- what quire's errors become


def as_api_error(error: QuireError, fields: Container[str], *, is_draining: bool) -> ApiError:
    """The HTTP error of a request's error; `fields` are those of the request's schema."""
    text = str(error)
    match error:
        case DeadlineError():
            return ApiError(408, text, code="timeout")
        case RequestCancelledError():
            return ApiError(
                503,
                "the server ended this request: it is shutting down",
                code="drain",
                retry_after_s=RESTART_S,
            )
        case ContextLengthError():
            # In the words that clients know OpenAI's error by.
            known = f"This model's maximum context length is {error.max_context} tokens."
            param = _field_of(error.param, fields)
            words = f"{known} However, {text}"
            return ApiError(400, words, param=param, code="context_length_exceeded")
        case RequestError():
            # With a code, as a call's log line has that in place of words of the request.
            return ApiError(400, text, param=_field_of(error.param, fields), code="invalid_field")
        case OverloadedError() if is_draining:
            return ApiError(503, text, code="drain", retry_after_s=error.retry_after_s)
        case OverloadedError():
            return ApiError(429, text, code="overloaded", retry_after_s=error.retry_after_s)
        case WorkerCrashError():
            return ApiError(500, text, code="worker_crash")
        case RowFaultError():
            return ApiError(500, f"this request failed alone: {text}", code="row_fault")
        case StepTimeoutError():
            return ApiError(503, text, code="stuck", retry_after_s=RESTART_S)
        case ModelFileError():
            return ApiError(500, f"the model's chat template failed: {text}", code="template")
    return ApiError(500, text, code="engine")


# Fields that set a parameter of the engine or the tokenizer; the first in the schema counts.
_FIELD_NAMES = {
    "prompt": ("prompt", "messages", "input"),
    "text": ("prompt",),
    "timeout_s": ("timeout",),
}


def _field_of(param: str | None, fields: Container[str]) -> str | None:
    """The field that sets a parameter, or None."""
    if param is None:
        return None
    root = re.split(r"[.\[]", param)[0]
    names = _FIELD_NAMES.get(root, (root,))
    found = next((name for name in names if name in fields), None)
    return None if found is None else found + param.removeprefix(root)
