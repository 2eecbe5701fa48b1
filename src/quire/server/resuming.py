"""Streams that go on after their connection was lost: ids of their events, and what they say.

An answer is a function of its body, the model and the seed. So the id of an event needs to hold
only what the body does not: the seed, the answer's own id and time, and how many tokens of each
choice the client has with this event. A client that sends the same body with the last id it got is
sent the rest, by any process or replica: the answer is computed again, and what it has is skipped.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.core.request import Piece
from quire.core.sampling import SamplingParams, new_seed
from quire.core.version import own_version
from quire.server.errors import ApiError

T = TypeVar("T")

_MAX_LENGTH = 8192
_FORM = re.compile(
    r"1/(?P<answer>[A-Za-z0-9_.:-]{1,160})/(?P<created>\d{1,12})/(?P<digest>[0-9a-f]{32})"
    r"/(?P<seed>\d{1,20})/(?P<marks>(?:x|\d{1,9}f?)(?:,(?:x|\d{1,9}f?))*)(?P<ended>/e)?"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a client has of a choice; `num_tokens` is None before its first event."""

    num_tokens: int | None = None
    is_finished: bool = False

    def __str__(self) -> str:
        if self.num_tokens is None:
            return "x"
        return f"{self.num_tokens}f" if self.is_finished else str(self.num_tokens)


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of an event."""

    answer: str
    created: int
    digest: str  # of the body and of what computes
    seed: int  # of the first prompt, where the body has none
    marks: tuple[Mark, ...]  # of each choice, through all prompts
    has_ending: bool = False  # the event without choices that has the counts

    def __str__(self) -> str:
        marks = ",".join(map(str, self.marks))
        head = f"1/{self.answer}/{self.created}/{self.digest}/{self.seed}/{marks}"
        return f"{head}/e" if self.has_ending else head

    @classmethod
    def read(cls, text: str) -> "EventId":
        """Of a Last-Event-ID header."""
        found = _FORM.fullmatch(text) if len(text) <= _MAX_LENGTH else None
        if found is None or int(found["seed"]) >= 2**64:
            raise _refusal(f"Last-Event-ID {text!r:.100} is none that this server gave", "event_id")
        return cls(
            found["answer"],
            int(found["created"]),
            found["digest"],
            int(found["seed"]),
            tuple(_mark(text) for text in found["marks"].split(",")),
            found["ended"] is not None,
        )


def _mark(text: str) -> Mark:
    if text == "x":
        return Mark()
    return Mark(int(text.removesuffix("f")), text.endswith("f"))


def _refusal(message: str, code: str) -> ApiError:
    return ApiError(400, message, code=code)


def not_resumed(path: str) -> ApiError:
    return _refusal(
        f"Last-Event-ID: answers of {path} are not resumed where they ended; streams of "
        "/v1/chat/completions and /v1/completions are",
        "not_resumable",
    )


def digest_of(body: bytes, *computed_by: str) -> str:
    """Of a body as it was sent, and of what makes the same tokens of it."""
    found = hashlib.sha256("\0".join((own_version(), *computed_by)).encode() + b"\0")
    found.update(body)
    return found.hexdigest()[:32]


def first_id(
    given: str | None,
    digest: str,
    answer: str,
    created: int,
    num_choices: int,
    seed: int | None = None,
) -> EventId:
    """What a stream begins behind: the id that the client gives, or one of its own. `seed`: where
    the answer has one already."""
    if given is None:
        drawn = new_seed() if seed is None else seed
        return EventId(answer, created, digest, drawn, (Mark(),) * num_choices)
    found = EventId.read(given)
    if found.digest != digest:
        raise _refusal(
            "Last-Event-ID is of another body, version or model (weights may have been replaced "
            "under the same name): send the body that the stream began with, byte for byte, or "
            "leave the header out to begin anew",
            "resume_mismatch",
        )
    if len(found.marks) != num_choices:
        raise _refusal(
            f"Last-Event-ID is of {len(found.marks)} choices, this body asks for {num_choices}",
            "resume_mismatch",
        )
    return found


def with_seeds(
    prompts: Sequence[tuple[T, SamplingParams]], seed: int
) -> list[tuple[T, SamplingParams]]:
    """The same with the seeds that the server draws where the body has none: one for each prompt,
    all from the one in the id."""
    return [
        (prompt, params)
        if params.seed is not None
        else (prompt, replace(params, seed=(seed + index) % 2**64))
        for index, (prompt, params) in enumerate(prompts)
    ]


class StreamIds:
    """Writes ids into a stream's events, and knows which of them the client has."""

    def __init__(self, first: EventId) -> None:
        self._first = first
        self._marks = list(first.marks)

    def opens(self, index: int) -> bool:
        """A choice begins; whether the client is still to be told."""
        is_new = self._first.marks[index].num_tokens is None
        if is_new:
            self._marks[index] = Mark(0)
        return is_new

    def split(
        self, index: int, pieces: Sequence[Piece], num_before: int
    ) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """Pieces that the client has, and the others; so many tokens came before them."""
        mark = self._first.marks[index]
        at, count = 0, num_before
        while at < len(pieces):
            count += len(pieces[at].token_ids)
            is_end = pieces[at].finish_reason is not None
            if count > (mark.num_tokens or 0) or (is_end and not mark.is_finished):
                break
            at += 1
        return pieces[:at], pieces[at:]

    def advance(self, index: int, num_tokens: int, *, is_finished: bool) -> None:
        self._marks[index] = Mark(num_tokens, is_finished)

    def stamped(self, event: bytes) -> bytes:
        """An event with the id of what the client has with it; nothing stays nothing."""
        return self._stamp(event, has_ending=False) if event else event

    def ending(self, content: bytes) -> bytes:
        """What ends a stream: an event with counts, where it is wanted, and the last one."""
        counts, _, last = content.partition(b"\n\n")
        if not last:
            return content
        if self._first.has_ending:
            return last
        return self._stamp(counts + b"\n\n", has_ending=True) + last

    def _stamp(self, event: bytes, *, has_ending: bool) -> bytes:
        found = replace(self._first, marks=tuple(self._marks), has_ending=has_ending)
        return f"id: {found}\n".encode() + event
