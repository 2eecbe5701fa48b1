"""The store of responses and of idempotency keys' answers: bounds, age, damage, processes."""

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.server.answers.claims import Claims
from quire.server.answers.store import (
    DATABASE,
    AnswerLimits,
    AnswerStore,
    KeyedAnswer,
    StoredResponse,
)
from quire.server.database import StoreError
from quire.server.processes import messages as wire
from quire.server.processes.client import AskedAnswers, SharedClaims

ROW = 256  # bytes that each counts besides its contents


def response_of(name: str, size: int = 100) -> StoredResponse:
    return StoredResponse(name, b"[]", b"[]", b" " * (size - 4))


def live(name: str) -> StoredResponse:
    return StoredResponse(name, b"[]", b"[]", b"{}", status="queued", seed=5, request=b"{}")


def has(store: AnswerStore, owner: str, name: str) -> bool:
    return store.find(owner, name) is not None


@pytest.mark.parametrize("is_file", [True, False])
def test_the_oldest_of_the_key_that_holds_most_goes(tmp_path: Path, is_file: bool) -> None:
    limits = AnswerLimits(max_responses=3, max_response_bytes=1000 + 3 * ROW)
    store = AnswerStore(tmp_path if is_file else None, limits)
    store.put("alice", response_of("a"))
    for name in ("b", "c", "d"):
        store.put("bob", response_of(name))
    assert has(store, "alice", "a"), "bob's pushed out bob's"
    assert [has(store, "bob", name) for name in "bcd"] == [False, True, True]
    store.put("alice", response_of("large", 700))
    assert store.counts()["responses"] <= 3
    assert has(store, "alice", "large") and not has(store, "alice", "a")
    assert not store.put("bob", response_of("beyond", 2000))
    assert not has(store, "bob", "beyond")
    assert not store.delete("alice", "d"), "it is bob's"
    assert store.delete("bob", "d") and not store.delete("bob", "d")
    store.close()


def num_instructions(store: AnswerStore, work: Callable[[], object]) -> int:
    """Of SQLite's machine, in tens: what is measured in place of time."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    store._opened().set_progress_handler(tick, 10)
    work()
    store._opened().set_progress_handler(None, 10)
    return count


def test_pushing_out_many_takes_no_more_for_each() -> None:
    """One large answer takes the place of thousands of small ones."""
    taken = []
    for num_rows in (300, 1200):
        limits = AnswerLimits(max_keyed=num_rows, max_keyed_bytes=num_rows * 300)
        store = AnswerStore(limits=limits)
        for number in range(num_rows - 1):
            store.begin_keyed("alice", str(number), keyed())
        last = keyed(name="last")
        store.begin_keyed("alice", "last", last)
        answer = replace(last, status=200, headers=[], body=bytes(num_rows * 290))
        taken.append(num_instructions(store, lambda: store.end_keyed("alice", "last", answer)))  # noqa: B023
        assert store.counts()["keyed_answers"] < 50
    assert taken[1] < 6 * taken[0]


def test_storing_a_response_does_not_look_at_events_of_others() -> None:
    """A long one that was made in the background has thousands of runs of them."""
    taken = []
    for num_runs in (10, 1000):
        store = AnswerStore(limits=AnswerLimits(max_responses=3))
        for name in "ab":
            store.put("alice", replace(response_of(name), events=b"event\n\n"))
        store.put("bob", live("long"))
        assert store.begin_response("bob", "long", b"{}")
        for number in range(num_runs):
            assert store.add_events("long", number, b"event\n\n")
        taken.append(num_instructions(store, lambda: store.put("alice", response_of("c"))))  # noqa: B023
        assert [has(store, "alice", name) for name in "abc"] == [False, True, True]
        assert store.counts()["events"] == num_runs + 1, "those of the dropped one are gone"
    assert taken[1] < 2 * taken[0]


def test_what_is_being_made_is_not_pushed_out() -> None:
    store = AnswerStore(limits=AnswerLimits(max_responses=2))
    for name in ("a", "b", "c"):
        store.put("alice", live(name))
    store.put("alice", response_of("ended"))
    assert store.live() == [("alice", name) for name in "abc"]
    assert not has(store, "alice", "ended")
    assert store.end_response("alice", "a", "completed", b"{}", 0, b"")
    assert not has(store, "alice", "a"), "it ended beyond the limit"


def test_responses_are_gone_when_they_are_old(tmp_path: Path) -> None:
    now = [1_000_000.0]
    store = AnswerStore(tmp_path, AnswerLimits(max_response_age_s=100), lambda: now[0])
    store.put("", StoredResponse("a", b"[]", b"[]", b"{}", b"event\n\n"))
    now[0] += 99
    assert has(store, "", "a")
    now[0] += 1
    assert not has(store, "", "a") and not store.delete("", "a")
    store.put("", response_of("b"))
    assert store.counts() == {"responses": 1, "events": 0, "keyed_answers": 0}


def test_deleted_contents_are_overwritten(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    secret = b"a secret that nobody repeats"
    store.put("", StoredResponse("a", b"[]", b'["%s"]' % secret, b"{}"))
    store.put("", StoredResponse("b", b"[]", b"[]", b"{}"))
    assert store.delete("", "a")
    store.close()  # writes the log into the file
    assert secret not in (tmp_path / DATABASE).read_bytes()
    assert AnswerStore(tmp_path).find("", "b") is not None


def test_events_are_found_from_the_run_that_has_them(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.put("", live("a"))
    assert store.begin_response("", "a", b"{}")
    assert store.add_events("a", 0, b"0\n\n1\n\n") and store.add_events("a", 2, b"2\n\n")
    assert store.events("a", 1) == [(0, b"0\n\n1\n\n"), (2, b"2\n\n")]
    assert store.events("a", 2) == store.events("a", 7) == [(2, b"2\n\n")]
    assert store.begin_response("", "a", b"{}"), "it is made anew"
    assert store.events("a", 0) == []
    assert store.end_response("", "a", "cancelled", b"{}", 0, b"")
    assert not store.add_events("a", 0, b"x") and not store.begin_response("", "a", b"{}")
    assert not store.end_response("", "a", "completed", b"{}", 0, b"")


def keyed(digest: str = "d", name: str = "n") -> KeyedAnswer:
    return KeyedAnswer(digest, name, int(time.time()), 7)


def test_a_key_stands_for_its_first_request() -> None:
    store = AnswerStore()
    first = keyed()
    assert store.begin_keyed("alice", "k", first) == first
    assert store.begin_keyed("alice", "k", keyed(name="other")) == first
    assert store.begin_keyed("alice", "k", keyed("e")).digest == "d"
    assert store.begin_keyed("bob", "k", keyed("e", name="bob's")).name == "bob's"
    answer = replace(first, status=200, headers=[("a", "b")], body=b"text")
    store.end_keyed("alice", "k", answer)
    assert store.begin_keyed("alice", "k", keyed(name="a third")) == answer


def test_a_file_that_cannot_be_read_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    path.write_bytes(b"no database " * 1000)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="cannot be read"):
        AnswerStore(tmp_path).check()
    assert path.read_bytes() == before


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.check()
    store.close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="written by a newer quire"):
        AnswerStore(tmp_path).check()


def test_what_was_synced_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnswerStore(tmp_path)
    store.begin_keyed("alice", "k", keyed())
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", sync)
    store.sync()
    assert synced == [f"{DATABASE}-wal", DATABASE, tmp_path.name]
    synced.clear()
    AnswerStore().sync()
    assert synced == [], "in memory"


def test_nothing_is_written_before_it_is_used(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "state")
    assert not store.is_used and not (tmp_path / "state").exists()
    store.check()
    assert store.is_used
    assert (tmp_path / "state" / DATABASE).stat().st_mode & 0o077 == 0


class _Hub:
    """Answers calls as the supervisor does, over a store in memory."""

    def __init__(self) -> None:
        self.store = AnswerStore()
        self.claims = Claims()

    def ask(self, call: wire.Call) -> wire.Reply:
        call = wire.read_call(wire.encode(call))
        match call:
            case wire.AskAnswers():
                reply = wire.Reply(value=wire.call_answers(self.store, call))
            case wire.TakeClaim(name):
                reply = wire.Reply(is_taken=self.claims.take(name))
            case _:
                raise AssertionError(call)
        return wire.read_reply(wire.encode(reply))


def test_processes_without_a_folder_ask_for_what_is_in_memory() -> None:
    hub = _Hub()
    one, two = (AskedAnswers(AnswerLimits(), hub) for _ in range(2))  # type: ignore[arg-type]
    now = int(time.time())
    stored = StoredResponse("a", b"[1]", b"[2]", b"{}", b"event\n\n", "completed", now, 6, b"")
    assert one.put("alice", stored)
    found = two.find("alice", "a")
    assert found is not None and (found.earlier, found.created_at) == (b"[1]", now)
    assert two.events("a", 0) == [(0, b"event\n\n")]
    assert two.find("bob", "a") is None
    first = keyed()
    assert one.begin_keyed("alice", "k", first) == two.begin_keyed("alice", "k", keyed("e"))
    one.put("alice", live("b"))
    assert two.live() == [("alice", "b")]
    assert two.end_response("alice", "b", "failed", b"{}", 0, b"")
    assert one.delete("alice", "a") and not two.delete("alice", "a")
    claims = SharedClaims(hub)  # type: ignore[arg-type]
    assert claims.take("x") and not claims.take("x")
