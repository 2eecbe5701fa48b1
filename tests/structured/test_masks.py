"""Masks: computed once they are started, by threads; slow grammars are known for it."""

import threading

import pytest
from tests.structured.walks import grammars_of, mask_of, tokens_in
from tests.tokenizer.vocabularies import built, byte_level_metadata

from quire.core.sampling import Constraint, SamplingParams
from quire.structured import grammars, masks
from quire.structured.masks import Mask, MaskThreads

PATIENCE_S = 60.0


def test_masks_are_computed_once_they_are_started() -> None:
    threads = MaskThreads()
    names: list[str] = []

    def compute() -> bytes:
        names.append(threading.current_thread().name)
        return b"\x05"

    promised = [Mask(compute) for _ in range(10)]
    for mask in promised:
        threads.promise(mask)
    assert not any(mask.is_done for mask in promised)
    threads.start()
    assert [mask.result() for mask in promised] == [b"\x05"] * 10
    assert set(names) == {"quire-masks"}


def test_a_mask_that_fails_allows_nothing_and_says_why() -> None:
    def fail() -> bytes:
        raise KeyboardInterrupt("panicked")  # as a panic in Rust, it is no Exception

    threads = MaskThreads()
    failing, sound = Mask(fail), Mask(lambda: b"\x01")
    for mask in (failing, sound):
        threads.promise(mask)
    threads.start()
    assert (failing.result(), failing.failure) == (b"", "panicked")
    assert (sound.result(), sound.failure) == (b"\x01", None)


def test_a_mask_that_waits_for_a_processor_is_not_slow() -> None:
    waiting = Mask(lambda: (threading.Event().wait(5 * masks.SLOW_S) and b"") or b"\x01")
    waiting.compute()
    assert waiting.result() == b"\x01"
    assert waiting.seconds < masks.SLOW_S


def test_few_masks_wake_one_thread() -> None:
    used: set[int] = set()

    def compute() -> bytes:
        used.add(threading.get_ident())
        return b""

    threads = MaskThreads()
    promised = [Mask(compute) for _ in range(16)]
    for mask in promised:
        threads.promise(mask)
    threads.start()
    for mask in promised:
        mask.result()
    assert len(used) == 1


def test_threads_end_with_their_owner() -> None:
    threads = MaskThreads()
    before = set(threading.enumerate())
    mask = Mask(lambda: b"")
    threads.promise(mask)
    threads.start()
    slow = Mask(lambda: b"")
    threads.start_slow(slow)
    mask.result(), slow.result()
    started = set(threading.enumerate()) - before
    assert len(started) == masks.NUM_THREADS + 1
    del threads
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_grammar_that_was_slow_is_ready_once_its_mask_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = built(byte_level_metadata([], "gpt-2"))
    [letter] = tokenizer.encode("a", add_special=False)
    made = grammars_of(tokenizer)
    grammar = made(SamplingParams(structured=Constraint.regex("a+")))
    monkeypatch.setattr(grammars, "SLOW_S", -1.0)  # every mask takes long
    may_go_on = threading.Event()
    compute = grammar._compute

    def compute_when_told() -> bytes:
        assert may_go_on.wait(PATIENCE_S)
        return compute()

    monkeypatch.setattr(grammar, "_compute", compute_when_told)
    may_go_on.set()
    grammar.accept(letter)
    assert grammar.is_ready, "nothing says yet that it is slow"
    assert letter in tokens_in(mask_of(made, grammar))
    may_go_on.clear()
    grammar.accept(letter)
    assert not grammar.is_ready
    may_go_on.set()
    assert letter in tokens_in(mask_of(made, grammar))
    assert grammar.is_ready
