"""What a server and its worker say to each other: plain data as msgpack, never code.

Commands go to the worker, reports come back. Errors keep their type, as far as core.errors knows
it. All pieces of a step are in one report.
"""

from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from quire.core import errors
from quire.core.errors import ContextLengthError, ExecutorError, OverloadedError, QuireError
from quire.core.plan import TokenLogprob
from quire.core.request import Completion, Piece, RequestMetrics, RequestOutput, Status
from quire.core.sampling import SamplingParams
from quire.engine.stats import Histogram, Snapshot
from quire.engine.step_log import StepRecord
from quire.llm.assembly import EngineFacts
from quire.llm.devices import Options


class _Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    pass


# ---- commands


class Start(_Message, frozen=True):
    """The first: load this file with these fields of Options."""

    path: str
    options: dict[str, Any]

    @classmethod
    def of(cls, path: object, options: Options) -> "Start":
        given = {option.name: getattr(options, option.name) for option in fields(options)}
        if not isinstance(options.chat_template, bool):
            given["chat_template"] = str(options.chat_template)
        return cls(str(path), given)


class Submit(_Message, frozen=True):
    """A request; `resumed` as in Engine.add_request."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: str
    priority: int
    timeout_s: float | None
    pooling: bool
    num_generated: int
    arrived_at: float
    resumed: list[Completion] | None = None


class Cancel(_Message, frozen=True):
    request_id: str


class Pause(_Message, frozen=True):
    request_id: str


class Resume(_Message, frozen=True):
    request_id: str


class Prepare(_Message, frozen=True):
    """Compile a constraint; answered when it is done or refused."""

    call: int
    params: SamplingParams


class AskSnapshot(_Message, frozen=True):
    call: int


class AskSteps(_Message, frozen=True):
    call: int
    count: int
    after: int | None


class Ping(_Message, frozen=True):
    call: int


class KeyWeights(_Message, frozen=True):
    weights: dict[str, float]


class Drain(_Message, frozen=True):
    pass


class Close(_Message, frozen=True):
    pass


Command = (
    Start | Submit | Cancel | Pause | Resume | Prepare | AskSnapshot | AskSteps | Ping | KeyWeights
    | Drain | Close
)  # fmt: skip


# ---- reports


class WireError(_Message, frozen=True):
    """One of quire's errors by the name of its class."""

    kind: str
    message: str
    fields: dict[str, str | float | None]

    @classmethod
    def of(cls, error: BaseException) -> "WireError":
        if not isinstance(error, QuireError):
            return cls("ExecutorError", f"the worker failed: {error!r}", {})
        names = ("param", "retry_after_s", "max_context")
        found = {name: getattr(error, name) for name in names if hasattr(error, name)}
        return cls(type(error).__name__, str(error), found)

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind, None)
        if not isinstance(kind, type) or not issubclass(kind, QuireError):
            return ExecutorError(f"{self.kind}: {self.message}")
        if issubclass(kind, OverloadedError):
            return kind(self.message, float(self.fields.get("retry_after_s") or 1.0))
        made = kind(self.message)
        for name in ("param",):
            if name in self.fields:
                setattr(made, name, self.fields[name])
        if isinstance(made, ContextLengthError):
            made.max_context = int(self.fields.get("max_context") or 0)
        return made


class Loading(_Message, frozen=True):
    """How far loading is, as in core/progress.py."""

    phase: str
    done: float


class Ready(_Message, frozen=True):
    facts: EngineFacts


class Failed(_Message, frozen=True):
    """The model could not be loaded."""

    error: WireError


class Accepted(_Message, frozen=True):
    request_id: str


class Refused(_Message, frozen=True):
    request_id: str
    error: WireError


class Started(_Message, frozen=True):
    """These are in the batch from now on; said before the executor has their rows."""

    request_ids: list[str]


class WireCompletion(_Message, frozen=True):
    """How a completion ended; its tokens and scores came in pieces."""

    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    is_stop_token_left_out: bool


class WireEnded(_Message, frozen=True):
    request_id: str
    status: Status
    completions: list[WireCompletion]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprob] | None
    pooled: bytes | None  # float32
    error: WireError | None

    @classmethod
    def of(cls, output: RequestOutput) -> "WireEnded":
        pooled = output.pooled
        return cls(
            output.request_id,
            output.status,
            [
                WireCompletion(c.text, c.finish_reason, c.stop_reason, c.is_stop_token_left_out)
                for c in output.completions
            ],
            output.metrics,
            output.prompt_logprobs,
            None if pooled is None else np.asarray(pooled, np.float32).tobytes(),
            None if output.error is None else WireError.of(output.error),
        )

    def vector(self) -> Any:
        return None if self.pooled is None else np.frombuffer(self.pooled, np.float32)


class Events(_Message, frozen=True):
    pieces: list[Piece]
    ended: list[WireEnded]


class Answer(_Message, frozen=True):
    """To a command with a number."""

    call: int
    error: WireError | None = None
    snapshot: Snapshot | None = None
    steps: list[StepRecord] | None = None


class Drained(_Message, frozen=True):
    pass


class Log(_Message, frozen=True):
    """A record of the worker's logging, for that of the server."""

    name: str
    level: int
    message: str
    event: str | None
    about: dict[str, Any]


Report = (
    Loading | Ready | Failed | Accepted | Refused | Started | Events | Answer | Drained | Log
)  # fmt: skip


# ---- bytes


def _to_plain(value: object) -> object:
    if isinstance(value, Histogram):
        return [list(value.bounds), value.counts, value.total, value.sum]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)  # in what a log line says


def _from_plain(kind: type, value: Any) -> object:
    assert kind is Histogram
    bounds, counts, total, added = value
    found = Histogram(bounds)
    found.counts, found.total, found.sum = counts, total, added
    return found


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_commands = msgspec.msgpack.Decoder(Command, dec_hook=_from_plain)
_reports = msgspec.msgpack.Decoder(Report, dec_hook=_from_plain)

encode = _encoder.encode
read_command = _commands.decode
read_report = _reports.decode
