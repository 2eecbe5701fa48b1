"""Call: one HTTP request from its first byte to its last, as logs and traces know it."""

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.request import RequestOutput
from quire.server.keys import ApiKey
from quire.server.quotas import Admission

SCOPE_KEY = "quire.call"  # of a call in its ASGI scope
CLIENT_GONE = "client_gone"  # the error of a call whose client disconnected
_LOGGED_PATH = 200  # characters
_SOUND_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(slots=True)
class Call:
    """The state of a call; each stage of the server adds what it finds out."""

    method: str
    path: str
    id: str
    client: str = ""  # the client's address, behind trusted proxies
    wants_trace: bool = False
    traceparent: str | None = None
    key: ApiKey | None = None
    user: str | None = None
    started_at: float = field(default_factory=time.time)
    started_tick: float = field(default_factory=time.perf_counter)
    status: int | None = None
    error: str | None = None
    is_streaming: bool = False
    admission: Admission | None = None
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def key_name(self) -> str:
        """The key that the engine accounts it to; without keys, one for all."""
        return "" if self.key is None else self.key.name

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
        if self.outputs:
            line |= _summary_of(self.outputs)
        return line


def new_call(method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Call:
    """A call from its request head; a well-formed x-request-id is kept."""
    found = dict(headers)
    given = found.get(b"x-request-id", b"").decode("latin-1")
    name = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex
    parent = found.get(b"traceparent")
    return Call(
        method,
        path,
        name,
        wants_trace=found.get(b"x-quire-trace") == b"1",
        traceparent=None if parent is None else parent.decode("latin-1"),
    )


def _summary_of(outputs: list[RequestOutput]) -> dict[str, object]:
    first = outputs[0].metrics
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs),
        "completion_tokens": sum(
            len(completion.token_ids) for output in outputs for completion in output.completions
        ),
        "finish_reason": outputs[0].finish_reason,
        "queued_s": _rounded(first.queued_s),
        "first_token_s": _rounded(first.time_to_first_token_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
