"""Masks: computed once they are started, by threads; slow grammars are known for it."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.structured.walks import grammars_of, mask_of, tokens_in
from tests.tokenizer.vocabularies import built, byte_level_metadata

from quire.core.sampling import Constraint, SamplingParams
from quire.structured import grammars, masks
from quire.structured.grammars import MatcherGrammar
from quire.structured.masks import SLOW_S, Mask, MaskThreads

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
    assert waiting.seconds is not None and waiting.seconds < masks.SLOW_S


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


@pytest.fixture(autouse=True)
def _with_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are few processors."""
    monkeypatch.setattr(grammars, "NUM_POOL_THREADS", 2)


def digits_grammars(count: int) -> tuple[grammars.Grammars, list[MatcherGrammar], list[int]]:
    """Grammars that are past their first token, and the tokens of the ten digits."""
    tokenizer = built(byte_level_metadata([], "gpt-2"))
    digits = [tokenizer.encode(str(digit), add_special=False)[0] for digit in range(10)]
    made = grammars_of(tokenizer)
    found = []
    for index in range(count):
        constraint = Constraint.regex(f"[0-9][0-{index % 9 + 1}]{{2,{index + 3}}}")
        found.append(made(SamplingParams(structured=constraint)))
        found[-1].accept(digits[0])
    return made, found, digits


def promised_masks(
    made: grammars.Grammars, found: list[MatcherGrammar], *, at_once: bool = False
) -> list[Mask]:
    promised = [grammar.allowed() for grammar in found]
    made.start_masks(at_once)
    return [mask for mask in promised if isinstance(mask, Mask)]


def test_masks_of_a_step_are_made_in_one_call_that_needs_no_thread_of_ours_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, found, digits = digits_grammars(12)
    alone: list[MatcherGrammar] = []

    def compute(self: MatcherGrammar) -> bytes:
        alone.append(self)
        return b""

    monkeypatch.setattr(MatcherGrammar, "_compute", compute)
    pending = promised_masks(made, found)
    assert len(pending) == 12
    for index, mask in enumerate(pending):
        assert tokens_in(mask.result()) == sorted(digits[: index % 9 + 2])
        assert mask.failure is None
    assert not alone


def test_a_mask_that_is_not_used_for_some_calls_keeps_a_copy_and_not_all_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "SLOW_S", 60.0)  # on a busy machine any call may take long
    made, found, digits = digits_grammars(1)
    found += [made(SamplingParams(structured=Constraint.regex("[0-9]{20}"))) for _ in range(2)]
    for grammar in found[1:]:
        grammar.accept(digits[0])
    held, *_ = promised_masks(made, found, at_once=True)
    bits = held.result()
    assert tokens_in(bits) == digits[:2]
    for _ in range(6):
        place = held.row()
        assert place is None or place.bits[place.row].tobytes() == bits
        for grammar in found[1:]:
            grammar.accept(digits[0])
        others = promised_masks(made, found[1:], at_once=True)
        assert all(mask.row() is not None for mask in others), "these are used before the next"
    assert held.row() is None and held.result() == bits


def test_masks_that_took_long_together_are_made_alone_until_the_slow_one_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, found, digits = digits_grammars(3)
    monkeypatch.setattr(masks, "SLOW_S", -1.0)  # every call takes long
    for mask in promised_masks(made, found):
        mask.result()
    monkeypatch.setattr(masks, "SLOW_S", SLOW_S)
    slow = found[1]
    alone: list[MatcherGrammar] = []

    def compute(self: MatcherGrammar) -> bytes:
        alone.append(self)
        started = time.thread_time()
        while self is slow and time.thread_time() - started < 2 * masks.SLOW_S:
            pass
        return self._finished(self._matcher.compute_bitmask())

    monkeypatch.setattr(MatcherGrammar, "_compute", compute)
    for grammar in found:
        grammar.accept(digits[0])
        assert not grammar.is_slow, "nothing says yet which one was slow"
    for mask in promised_masks(made, found):
        mask.result()
    assert sorted(map(id, alone)) == sorted(map(id, found))
    for grammar in found:
        grammar.accept(digits[0])
    assert [grammar.is_slow for grammar in found] == [False, True, False]
    alone.clear()
    for mask in promised_masks(made, found):
        mask.result()
    assert alone == [slow], "the others are made in one call again"


def test_a_matcher_that_fails_among_others_fails_alone() -> None:
    made, found, digits = digits_grammars(3)
    found[1]._matcher.consume_token(digits[0])
    assert not found[1]._matcher.consume_tokens([1] * 50)
    results = [(bool(mask.result()), mask.failure) for mask in promised_masks(made, found)]
    assert [bits for bits, _ in results] == [True, False, True]
    assert results[0][1] is None and results[2][1] is None
    assert results[1][1]


def test_where_the_call_fails_each_mask_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, found, digits = digits_grammars(3)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt("panicked")

    monkeypatch.setattr(masks.MaskPool, "compute", fail)
    for index, mask in enumerate(promised_masks(made, found)):
        assert tokens_in(mask.result()) == sorted(digits[: index + 2])


def test_the_call_for_masks_that_a_step_waits_for_runs_when_it_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, found, digits = digits_grammars(3)
    order: list[str] = []
    compute = masks.MaskPool.compute

    def slow(pool: masks.MaskPool, *asked: object) -> None:
        time.sleep(0.05)  # as long as others have the GIL
        order.append("called")
        compute(pool, *asked)  # type: ignore[arg-type]

    monkeypatch.setattr(masks.MaskPool, "compute", slow)
    promised = promised_masks(made, found, at_once=True)
    order.append("begun")
    assert [tokens_in(mask.result()) for mask in promised] == [digits[:2], digits[:3], digits[:4]]
    assert order == ["called", "begun"]


def test_where_the_call_at_once_fails_each_mask_is_made_by_a_thread_with_a_large_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, found, digits = digits_grammars(3)
    names: list[str] = []
    compute = MatcherGrammar._compute

    def noted(grammar: MatcherGrammar) -> bytes:
        names.append(threading.current_thread().name)
        return compute(grammar)

    def fail(*_: object) -> None:
        raise BaseException("panicked")

    monkeypatch.setattr(masks.MaskPool, "compute", fail)
    monkeypatch.setattr(MatcherGrammar, "_compute", noted)
    for index, mask in enumerate(promised_masks(made, found, at_once=True)):
        assert tokens_in(mask.result()) == sorted(digits[: index + 2])
    assert names == ["quire-mask-calls"] * 3


def test_an_interrupt_while_known_tokens_are_masked_interrupts_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, digits = digits_grammars(1)
    constraint = Constraint.regex("[0-9]" + "01234")
    found = [made(SamplingParams(structured=constraint)) for _ in range(2)]
    for grammar in found:
        grammar.accept(digits[5])
    promised = [grammar.allowed() for grammar in found]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(masks.MaskPool, "compute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.start_masks(True)
    for mask in promised:
        assert isinstance(mask, Mask) and mask.is_done
        assert tokens_in(mask.result()) == digits[:1]


SCHEMA = """{"type": "object", "required": ["name of the thing", "is_new"], "properties": {
"name of the thing": {"type": "string", "maxLength": 3}, "is_new": {"type": "boolean"}}}"""


@pytest.mark.parametrize("has_pool", [True, False])
def test_what_must_come_is_asked_once_and_masked_as_llguidance_does(
    monkeypatch: pytest.MonkeyPatch, *, has_pool: bool
) -> None:
    monkeypatch.setattr(grammars, "NUM_POOL_THREADS", 2 if has_pool else 1)
    tokenizer = built(byte_level_metadata([("n", "a"), ("i", "s")], "gpt-2"))
    made = grammars_of(tokenizer)
    grammar = made(SamplingParams(structured=Constraint("json_schema", SCHEMA)))
    plain = grammar._compiled.made_matcher()
    num_forced = 0
    text = b""
    while not grammar.is_complete:
        allowed = grammar.allowed()
        made.start_masks(True)
        mask = allowed if isinstance(allowed, bytes) else allowed.result()
        expected = tokens_in(plain.compute_bitmask())
        assert tokens_in(mask) == expected, text
        num_forced += bool(grammar._forced)
        token = expected[len(expected) // 2]
        grammar.accept(token)
        assert plain.consume_token(token)
        text += tokenizer.token_bytes(token)
    assert json.loads(text).keys() == {"name of the thing", "is_new"}
    assert num_forced > 12


def test_masks_are_the_same_whether_they_took_long_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits are tokens in groups of three from where a text begins: asked again after some of
    them, llguidance says other tokens."""
    tokenizer = built(byte_level_metadata([("4", "5"), ("3", "45")], "llama-bpe"))
    made = grammars_of(tokenizer)
    walks = []
    for limit in (60.0, -1.0):  # no mask takes long, or every mask
        monkeypatch.setattr(grammars, "SLOW_S", limit)
        constraint = Constraint.regex("[ab]{3}" + "1234567890" * 3)
        grammar, walk = made(SamplingParams(structured=constraint)), list[list[int]]()
        while not grammar.is_complete:
            walk.append(tokens_in(mask_of(made, grammar)))
            grammar.accept(walk[-1][0])
        walks.append(walk)
    assert walks[0] == walks[1]
    assert len(walks[0]) > 20


def test_an_end_token_that_must_come_is_masked_as_any_end() -> None:
    tokenizer = built(byte_level_metadata([], "gpt-2"))
    letter, other = tokenizer.encode("ab", add_special=False)
    end, *_ = tokenizer.end_token_ids
    made = grammars_of(tokenizer)
    constraint = Constraint.grammar(f'start: /[ab]/ "ab" <[{end}]> "a"')
    for more, allowed in (
        (SamplingParams(structured=constraint), [end]),
        (SamplingParams(structured=constraint, stop_token_ids=(other,)), [end, other]),
        (SamplingParams(structured=constraint, ignore_eos=True), []),
    ):
        grammar = made(more)
        for token in (letter, letter, other):
            assert token in tokens_in(mask_of(made, grammar))
            grammar.accept(token)
        assert tokens_in(mask_of(made, grammar)) == sorted(allowed)


def test_a_token_beside_what_must_come_is_refused() -> None:
    made, [grammar], digits = digits_grammars(1)
    grammar = made(SamplingParams(structured=Constraint.regex("[0-9]0123456789")))
    for token in [digits[0], *digits[:3]]:
        grammar.accept(token)
    with pytest.raises(ValueError):
        grammar.accept(digits[9])


def test_long_texts_that_must_come_become_tokens_in_threads() -> None:
    made, _, digits = digits_grammars(1)
    constraint = Constraint.regex("[0-9]" + "01234" * 400)
    grammar = made(SamplingParams(structured=constraint))
    grammar.accept(digits[5])
    assert not grammar._forced
    assert tokens_in(mask_of(made, grammar)) == digits[:1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_threads_of_the_pool_have_room_for_what_the_checker_let_pass() -> None:
    """In a process of its own: Rust asks once how large a stack is to be."""
    code = """
import threading
from quire.structured.masks import STACK_BYTES, MaskPool
def large() -> int:
    # Those that can be written: what the allocator reserves for a thread may be as large.
    lines = [line.split() for line in open("/proc/self/maps")]
    sizes = [fields[0].split("-") for fields in lines if fields[1].startswith("rw")]
    return sum(int(end, 16) - int(start, 16) >= STACK_BYTES for start, end in sizes)
before = large()
pool = MaskPool(100, (), num_threads=3)
print(large() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 3
