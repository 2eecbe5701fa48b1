"""What an API process and its supervisor say to each other, as msgpack, on two sockets.

On the first the process asks, and waits: limits, quotas, stored responses; what needs no answer
gets none. On the second both say what the other's event loop takes up: drains, keys, figures.
"""

from typing import Any

import msgspec

from quire.server.dialects.responses_store import StoredResponse
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


class PutResponse(_Message, frozen=True):
    key: str
    response: StoredResponse


class FindResponse(_Message, frozen=True):
    """Answered by the response, if there is one."""

    key: str
    response_id: str


class DeleteResponse(_Message, frozen=True):
    """Answered: whether there was one."""

    key: str
    response_id: str


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
    | Settle | CountUsage | CountFailedKey | PutResponse | FindResponse | DeleteResponse
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
    response: StoredResponse | None = None
    is_found: bool = False


# ---- the second socket: to the process


class Load(_Message, frozen=True):
    """A worker has loaded the model at this path, and takes channels at the socket."""

    path: str
    socket: str


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


News = Load | Loading | Keys | ReadCertificate | CloseIdle | Drain | GiveUp | AskFigures | Told


# ---- the second socket: to the supervisor


class Up(_Message, frozen=True):
    """It takes requests."""


class OwnFigures(_Message, frozen=True):
    call: int
    figures: ProcessFigures


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
Notice = Up | OwnFigures | EndTurn | Question

encode = msgspec.msgpack.Encoder().encode
read_call = msgspec.msgpack.Decoder(Call).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode
read_news = msgspec.msgpack.Decoder(News).decode
read_notice = msgspec.msgpack.Decoder(Notice).decode
