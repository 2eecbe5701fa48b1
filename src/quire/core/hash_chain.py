"""Hash chain: lines of JSON, each with the hash of the one before it.

A line that was changed does not match its own hash; lines that were taken out, put in or moved do
not match their neighbours'. Who can write the file can compute all hashes anew, unless they are
made with a secret key (HMAC); and lines cut off at the end show only to who knows a later hash.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError

GENESIS = "0" * 64  # the hash of the line before, in the first line of all
MAX_LINE_BYTES = 64 << 10
MIN_SECRET_BYTES = 16
_OWN = ("seq", "prev", "hash", "alg")  # fields that the chain adds


@dataclass(slots=True)
class Chain:
    """The end of a chain; `append` makes its next line."""

    secret: bytes | None = None
    seq: int = 0  # of the last line
    last: str = GENESIS  # its hash

    @property
    def algorithm(self) -> str:
        return "sha256" if self.secret is None else "hmac-sha256"

    def append(self, record: Mapping[str, object]) -> bytes:
        """The next line of the chain, with its line break."""
        assert not set(_OWN) & record.keys(), f"{_OWN} are the chain's"
        content = {**record, "seq": self.seq + 1, "prev": self.last, "alg": self.algorithm}
        found = hash_of(content, self.secret)
        line = canonical({**content, "hash": found}) + b"\n"
        assert len(line) <= MAX_LINE_BYTES, "a line is too long to be checked"
        self.seq += 1
        self.last = found
        return line


class ChainLine(NamedTuple):
    """A line that matches its own hash."""

    seq: int
    prev: str  # the hash of the line before
    hash: str
    record: Mapping[str, object]  # all of its fields


class BrokenLineError(ValueError):
    """A line that is not as it was written."""


def canonical(record: Mapping[str, object]) -> bytes:
    """The one way to write a record: names sorted, no blanks, all but ASCII escaped."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def hash_of(content: Mapping[str, object], secret: bytes | None) -> str:
    text = canonical(content)
    if secret is None:
        return hashlib.sha256(text).hexdigest()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def read_line(line: bytes, secret: bytes | None) -> ChainLine:
    """A line, if it matches its own hash; raises a BrokenLineError."""
    if not line.endswith(b"\n"):
        raise BrokenLineError("it is cut off" if len(line) <= MAX_LINE_BYTES else "it is too long")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise BrokenLineError("it is no JSON") from None
    if not isinstance(record, dict) or not _has_own_fields(record):
        raise BrokenLineError("it is no line of a chain")
    if canonical_or_none(record) != line[:-1]:
        raise BrokenLineError("it was changed: it is not written as it was")
    expected = "sha256" if secret is None else "hmac-sha256"
    if record["alg"] != expected:
        raise BrokenLineError(f"it is hashed by {record['alg']!r:.40}, not by {expected}")
    content = {name: value for name, value in record.items() if name != "hash"}
    if not hmac.compare_digest(hash_of(content, secret), record["hash"]):
        raise BrokenLineError("it was changed: it does not match its own hash")
    return ChainLine(record["seq"], record["prev"], record["hash"], record)


def canonical_or_none(record: Mapping[str, object]) -> bytes | None:
    try:
        return canonical(record)
    except (ValueError, RecursionError):
        return None


def _has_own_fields(record: Mapping[str, object]) -> bool:
    is_number = isinstance(record.get("seq"), int) and not isinstance(record["seq"], bool)
    texts = [record.get(name) for name in ("prev", "hash", "alg")]
    return is_number and all(isinstance(text, str) and text.isascii() for text in texts)


@dataclass(slots=True)
class Verdict:
    """What is known of a chain after reading it; `problem` is the first thing wrong."""

    num_lines: int = 0
    first_seq: int | None = None  # 1 unless the files before were not given
    last_seq: int | None = None
    last_hash: str | None = None
    problem: str | None = None
    file: str | None = None  # where the problem is
    line: int | None = None
    lines_after_expected: int | None = None  # after the line with the expected hash
    events: dict[str, int] = field(default_factory=dict)  # lines by event
    num_lost_events: int = 0  # by the chain's own gap lines

    @property
    def is_sound(self) -> bool:
        return self.problem is None


def verify(
    paths: Iterable[Path], secret: bytes | None = None, expected_hash: str | None = None
) -> Verdict:
    """Check files that follow each other, from the first line to the first problem.

    `expected_hash`: of a line that must be there, such as the last one that somebody noted.
    """
    verdict = Verdict()
    for path in paths:
        for number, line in _lines(path):
            try:
                _follow(verdict, read_line(line, secret))
            except BrokenLineError as error:
                verdict.problem = str(error)
                verdict.file, verdict.line = str(path), number
                return verdict
            if verdict.last_hash == expected_hash:
                verdict.lines_after_expected = 0
            elif verdict.lines_after_expected is not None:
                verdict.lines_after_expected += 1
    if verdict.num_lines == 0:
        verdict.problem = "there is no line: it is empty, or all of it was cut off"
    elif expected_hash is not None and verdict.lines_after_expected is None:
        verdict.problem = (
            f"no line has the expected hash {expected_hash}: lines were cut off at the end, or "
            "the chain was made anew"
        )
    return verdict


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file's lines with their numbers; none is read further than it may be long."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                yield number, line
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _follow(verdict: Verdict, line: ChainLine) -> None:
    """Add the next line to the verdict; raises where it does not follow the last."""
    seq = line.seq
    if verdict.last_seq is None:
        if (seq == 1) != (line.prev == GENESIS) or seq < 1:
            raise BrokenLineError(f"it has number {seq}, which does not fit what it follows")
        verdict.first_seq = seq
    elif seq > verdict.last_seq + 1:
        missing = seq - verdict.last_seq - 1
        raise BrokenLineError(f"{missing} lines before it are missing: its number is {seq}")
    elif seq == 1:
        raise BrokenLineError("a new chain begins with it: it does not follow what came before")
    elif seq <= verdict.last_seq:
        raise BrokenLineError(
            f"it was moved or repeated: its number is {seq} where {verdict.last_seq + 1} should be"
        )
    elif line.prev != verdict.last_hash:
        raise BrokenLineError("the line before it was replaced: it follows one with another hash")
    verdict.num_lines += 1
    verdict.last_seq = seq
    verdict.last_hash = line.hash
    event = str(line.record.get("event"))
    verdict.events[event] = verdict.events.get(event, 0) + 1
    lost = line.record.get("lost")
    if event == "gap" and isinstance(lost, int):
        verdict.num_lost_events += lost


def read_secret(path: Path) -> bytes:
    """The key of an HMAC: a file's content without the line break at its end."""
    try:
        with path.open("rb") as file:
            secret = file.read(4097).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= 4096:
        raise ConfigError(f"{path}: a key has from {MIN_SECRET_BYTES} to 4096 bytes")
    return secret
