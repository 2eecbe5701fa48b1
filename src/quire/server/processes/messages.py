"""What an API process and its supervisor say to each other, as msgpack, on two sockets.

On the first the process asks, and waits: limits, quotas, answers in memory; what needs no answer
gets none. On the second both say what the other's event loop takes up: drains, keys, figures.
"""

from typing import Any, get_type_hints

import msgspec

from quire.server.answers.store import AnswerStore
from quire.server.errors import ApiError
from quire.server.keys import ApiKey
from quire.server.quotas import Demand
from quire.server.shared import ProcessFigures, ServerFigures


class _Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    pass


# ---- the first socket: to the supervisor


class OpenConnection(_Message, frozen=True):
    """Answered by the limit that it would exceed, if any."""

    group: str | None


class CloseConnection(_Message, frozen=True):
    group: str | None


class OpenProxied(_Message, frozen=True):
    """A request that a proxy makes for an address; answered likewise."""

    group: str


class CloseProxied(_Message, frozen=True):
    group: str


class EnterKey(_Message, frozen=True):
    """Answered: a request of this key begins, or is refused."""

    key: ApiKey


class LeaveKey(_Message, frozen=True):
    key: ApiKey


class Admit(_Message, frozen=True):
    """Answered: a reservation, or why there is none."""

    key: ApiKey | None
    demand: Demand


class Settle(_Message, frozen=True):
    reservation: int
    prompt: int
    completion: int


class CountUsage(_Message, frozen=True):
    """Of a call that needed no reservation."""

    key: ApiKey | None
    prompt: int
    completion: int


class CountFailedKey(_Message, frozen=True):
    """Answered by the penalty in seconds."""

    group: str


class AskAnswers(_Message, frozen=True):
    """A method of the AnswerStore in memory, and its arguments; answered by what it returns."""

    method: str
    arguments: msgspec.Raw


class TakeClaim(_Message, frozen=True):
    """Answered: whether nobody had it."""

    name: str


class LeaveClaim(_Message, frozen=True):
    name: str


class RecordEvent(_Message, frozen=True):
    event: str
    about: dict[str, Any]


class RecordRepeated(_Message, frozen=True):
    event: str
    group: dict[str, Any]
    about: dict[str, Any]
    max_groups: int


Call = (
    OpenConnection | CloseConnection | OpenProxied | CloseProxied | EnterKey | LeaveKey | Admit
    | Settle | CountUsage | CountFailedKey | AskAnswers | TakeClaim | LeaveClaim
    | RecordEvent | RecordRepeated
)  # fmt: skip


class WireApiError(_Message, frozen=True):
    status: int
    message: str
    param: str | None
    code: str | None
    retry_after_s: float | None
    headers: list[tuple[str, str]]

    @classmethod
    def of(cls, error: ApiError) -> "WireApiError":
        return cls(
            error.status,
            error.message,
            error.param,
            error.code,
            error.retry_after_s,
            list(error.own_headers),
        )

    def error(self) -> ApiError:
        return ApiError(
            self.status,
            self.message,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
            headers=tuple(self.headers),
        )


class Reply(_Message, frozen=True):
    """Of the supervisor; what the call asks for, or an error."""

    error: WireApiError | None = None
    limit: str | None = None
    reservation: int = 0
    headers: list[tuple[str, str]] = []
    penalty_s: float = 0.0
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    is_taken: bool = False


# ---- the second socket: to the process


class Load(_Message, frozen=True):
    """A worker has loaded the model at this path with these fields of Options, and takes channels
    at the socket; the model is called by these names."""

    path: str
    socket: str
    options: dict[str, Any]
    names: list[str]


class Prepare(_Message, frozen=True):
    """Be ready to use another worker; answered by Done. `continues`: it computes what the old one
    would, so that requests can go on there."""

    call: int
    load: Load
    continues: bool


class Switch(_Message, frozen=True):
    """Use the worker that was prepared for; answered by Done, with how many requests there are."""

    call: int


class Forget(_Message, frozen=True):
    """The worker that was prepared for will not be used."""


class Loading(_Message, frozen=True):
    """How far the worker is."""

    phase: str
    done: float


class Keys(_Message, frozen=True):
    """In force from now on."""

    keys: list[ApiKey]


class ReadCertificate(_Message, frozen=True):
    pass


class CloseIdle(_Message, frozen=True):
    """Close an idle connection: another process has a new one."""


class Drain(_Message, frozen=True):
    """As a signal would; the second time, do not wait."""


class GiveUp(_Message, frozen=True):
    """No worker can be started any more."""

    reason: str


class AskFigures(_Message, frozen=True):
    call: int


class Told(_Message, frozen=True):
    """To what a process asked on this socket."""

    call: int
    figures: ServerFigures | None = None
    error: str | None = None
    are_all: bool = False


News = (
    Load | Prepare | Switch | Forget | Loading | Keys | ReadCertificate | CloseIdle | Drain | GiveUp
    | AskFigures | Told
)  # fmt: skip


# ---- the second socket: to the supervisor


class Up(_Message, frozen=True):
    """It takes requests."""


class OwnFigures(_Message, frozen=True):
    call: int
    figures: ProcessFigures


class Done(_Message, frozen=True):
    """What was asked for, or why not."""

    call: int
    error: str | None = None
    num_requests: int = 0


class Retired(_Message, frozen=True):
    """The worker at this socket is not used any more."""

    socket: str


class AskTotals(_Message, frozen=True):
    """Answered by the figures of all processes; with this one's own."""

    call: int
    own: ProcessFigures


class AskReload(_Message, frozen=True):
    """Answered when the keys were read again, or could not be."""

    call: int


class ReportSuspects(_Message, frozen=True):
    """The worker died: as in worker/turns.py, as are the next two; answered."""

    call: int
    num_suspects: int
    has_probed: bool


class TakeTurn(_Message, frozen=True):
    """Answered when it is this process's turn."""

    call: int


class EndTurn(_Message, frozen=True):
    pass


Question = AskTotals | AskReload | ReportSuspects | TakeTurn
Notice = Up | OwnFigures | Done | Retired | EndTurn | Question

encode = msgspec.msgpack.Encoder().encode
read_call = msgspec.msgpack.Decoder(Call).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode
read_news = msgspec.msgpack.Decoder(News).decode
read_notice = msgspec.msgpack.Decoder(Notice).decode


# ---- methods of the store of answers, whose arguments and values are plain data

_METHODS = (
    *("check", "put", "find", "events", "delete", "live", "begin_response", "add_events"),
    *("end_response", "begin_keyed", "end_keyed", "counts"),
)
_HINTS = {name: get_type_hints(getattr(AnswerStore, name)) for name in _METHODS}
_VALUES = {name: msgspec.msgpack.Decoder(hints["return"]) for name, hints in _HINTS.items()}
_ARGUMENTS = {
    name: msgspec.msgpack.Decoder(tuple[tuple(t for n, t in hints.items() if n != "return")])  # type: ignore[misc]
    for name, hints in _HINTS.items()
}
ANSWER_METHODS = _METHODS


def read_value(method: str, value: msgspec.Raw) -> Any:
    return _VALUES[method].decode(value)


def call_answers(store: AnswerStore, call: AskAnswers) -> msgspec.Raw:
    """Raises a KeyError for what is no method."""
    arguments = _ARGUMENTS[call.method].decode(call.arguments)
    return msgspec.Raw(encode(getattr(store, call.method)(*arguments)))
