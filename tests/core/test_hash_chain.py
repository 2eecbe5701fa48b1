"""A chain of hashes: whatever is done to its lines is found."""

import json
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.core.hash_chain import (
    GENESIS,
    MAX_LINE_BYTES,
    Chain,
    Verdict,
    canonical,
    hash_of,
    read_secret,
    verify,
)

SECRET = b"a secret of some length"


def lines_of(count: int, chain: Chain | None = None) -> list[bytes]:
    chain = chain or Chain()
    return [chain.append({"event": "e", "number": number}) for number in range(count)]


def verdict_of(path: Path, *lines: bytes, **options: object) -> Verdict:
    file = path / "log"
    file.write_bytes(b"".join(lines))
    return verify([file], **options)  # type: ignore[arg-type]


def test_what_was_written_is_sound(tmp_path: Path) -> None:
    chain = Chain()
    found = verdict_of(tmp_path, *lines_of(5, chain))
    assert found.is_sound
    assert (found.num_lines, found.first_seq, found.last_seq) == (5, 1, 5)
    assert found.last_hash == chain.last
    assert found.events == {"e": 5}


def test_a_line_says_what_it_follows() -> None:
    first, second = map(json.loads, lines_of(2))
    assert first["prev"] == GENESIS
    assert second["prev"] == first["hash"]
    content = {name: value for name, value in second.items() if name != "hash"}
    assert second["hash"] == hash_of(content, None)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_bit_counts(tmp_path: Path, secret: bytes | None) -> None:
    lines = lines_of(3, Chain(secret))
    for place in range(len(lines[1])):
        for bit in (1, 32):
            changed = bytearray(lines[1])
            changed[place] ^= bit
            found = verdict_of(tmp_path, lines[0], bytes(changed), lines[2], secret=secret)
            assert not found.is_sound, f"byte {place}"
            assert found.line in (2, 3)


@pytest.mark.parametrize(
    ("order", "line", "problem"),
    [
        ([0, 2, 3], 2, "1 lines before it are missing"),
        ([1, 2, 3], 1, None),  # an earlier file holds the first
        ([0, 2, 1, 3], 2, "1 lines before it are missing"),
        ([0, 1, 1, 2], 3, "moved or repeated: its number is 2 where 3 should be"),
        ([0, 1, 0, 1], 3, "a new chain begins"),
        ([], None, "there is no line"),
    ],
)
def test_lines_keep_their_places(
    tmp_path: Path, order: list[int], line: int | None, problem: str | None
) -> None:
    lines = lines_of(4)
    found = verdict_of(tmp_path, *(lines[place] for place in order))
    if problem is None:
        assert found.is_sound
        assert found.first_seq == 2
    else:
        assert found.line == line
        assert problem in (found.problem or "")


def test_a_line_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    lines = lines_of(3)
    other = Chain(seq=1, last=json.loads(lines[0])["hash"]).append({"event": "forged"})
    found = verdict_of(tmp_path, lines[0], other, lines[2])
    assert found.line == 3
    assert "the line before it was replaced" in (found.problem or "")


def test_what_is_cut_off_shows_to_who_knows_the_last_hash(tmp_path: Path) -> None:
    chain = Chain()
    lines = lines_of(4, chain)
    assert verdict_of(tmp_path, *lines, expected_hash=chain.last).lines_after_expected == 0
    assert verdict_of(tmp_path, *lines[:3]).is_sound, "by itself it does not show"
    found = verdict_of(tmp_path, *lines[:3], expected_hash=chain.last)
    assert "no line has the expected hash" in (found.problem or "")
    noted = json.loads(lines[1])["hash"]
    assert verdict_of(tmp_path, *lines, expected_hash=noted).lines_after_expected == 2


def test_a_line_that_is_cut_off_is_found(tmp_path: Path) -> None:
    lines = lines_of(2)
    for length in range(1, len(lines[1])):
        found = verdict_of(tmp_path, lines[0], lines[1][:length])
        assert (found.line, found.problem) == (2, "it is cut off")


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"null\n",
        b"[" * 50_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b'{"seq": 2}\n',
        b'{"alg":"sha256","hash":"\xc3\xa9","prev":"x","seq":2}\n',
        b'{"alg":"sha256","hash":"x","prev":"x","seq":true}\n',
        b'{"alg":"sha256","hash":"x","prev":"x","seq":2,"x":NaN}\n',
        b'{"alg":"sha256","hash":"\\ud800","prev":"x","seq":2}\n',
        b"x" * (MAX_LINE_BYTES + 10) + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_nonsense_is_no_line(tmp_path: Path, line: bytes) -> None:
    found = verdict_of(tmp_path, *lines_of(1), line)
    assert not found.is_sound
    assert (found.num_lines, found.line) == (1, 2)


def test_the_same_content_written_otherwise_is_a_change(tmp_path: Path) -> None:
    [line] = lines_of(1)
    for other in (line.replace(b",", b", ", 1), b" " + line, line[:-1] + b" \n"):
        found = verdict_of(tmp_path, other)
        assert "it is not written as it was" in (found.problem or "")


def test_a_chain_goes_on_in_another_file(tmp_path: Path) -> None:
    lines = lines_of(4)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"".join(lines[:2]))
    new.write_bytes(b"".join(lines[2:]))
    assert verify([old, new]).last_seq == 4
    assert verify([new]).first_seq == 3
    found = verify([new, old])
    assert (found.file, found.line) == (str(old), 1)
    old.write_bytes(lines[0])
    assert "1 lines before it are missing" in (verify([old, new]).problem or "")


def test_a_secret_cannot_be_done_without(tmp_path: Path) -> None:
    lines = lines_of(2, Chain(SECRET))
    assert verdict_of(tmp_path, *lines, secret=SECRET).is_sound
    assert "hashed by 'hmac-sha256', not by sha256" in (verdict_of(tmp_path, *lines).problem or "")
    found = verdict_of(tmp_path, *lines, secret=b"another secret!!")
    assert "does not match its own hash" in (found.problem or "")
    made_anew = lines_of(2)
    found = verdict_of(tmp_path, *made_anew, secret=SECRET)
    assert "hashed by 'sha256', not by hmac-sha256" in (found.problem or "")


def test_what_is_in_a_line_cannot_make_another() -> None:
    line = Chain().append({"event": 'x"}\n{"seq":9', "name": "\u2028\x00é"})
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert json.loads(line)["event"] == 'x"}\n{"seq":9'
    assert canonical({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    assert read_secret(path) == SECRET
    for content in (b"", b"short", b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="from 16 to 4096 bytes"):
            read_secret(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(tmp_path / "none")
