"""CallableExecutor: what the user's function is given, and what becomes of what it returns."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from quire.batching import CallableExecutor
from quire.core.errors import ExecutorError, StepCancelledError
from quire.core.plan import BlockCopy, Capacity, Sampling, SequencePlan, StepPlan, StepResult, Want
from quire.core.sampling import SamplingParams
from quire.executors.base import Executor

VOCABULARY = 10
GREEDY = Sampling(SamplingParams(temperature=0.0), seed=0, index=0)
PATIENCE_S = 120.0


class Recorder:
    """A forward function that keeps what it was given and answers with the last token plus one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, tokens: Any, mask: Any) -> Any:
        self.calls.append((tokens.copy(), mask.copy()))
        logits = np.zeros((len(tokens), VOCABULARY))
        logits[np.arange(len(tokens)), (tokens[:, -1] + 1) % VOCABULARY] = 5.0
        return logits


@contextmanager
def executor_over(forward: Any, **options: Any) -> Iterator[CallableExecutor]:
    executor = CallableExecutor(forward, Capacity(16, 4, 64, VOCABULARY, 8, 256), **options)
    try:
        yield executor
    finally:
        executor.close()


def row(name: int, tokens: tuple[int, ...], table: tuple[int, ...], **more: Any) -> SequencePlan:
    plan = SequencePlan(name, 0, tokens, None, table, Want.SAMPLE, GREEDY)
    return plan._replace(**more)


def run(executor: Executor, *rows: SequencePlan, **more: Any) -> StepResult:
    return executor.collect(executor.submit(StepPlan(1, rows, **more)), PATIENCE_S)


def test_rows_are_padded_on_the_left_and_masked() -> None:
    forward = Recorder()
    with executor_over(forward, pad_token=7) as executor:
        result = run(executor, row(1, (1, 2, 3), (0,)), row(2, (4,), (1,)), row(3, (5, 6), (2,)))
    tokens, mask = forward.calls[0]
    assert tokens.tolist() == [[1, 2, 3], [7, 7, 4], [7, 5, 6]]
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert tokens.dtype == np.int64
    assert mask.dtype == np.bool_
    assert [part.token for part in result.sequences] == [4, 5, 7]
    assert result.padding_tokens == 3
    assert result.elapsed_s >= 0


def test_the_whole_sequence_is_given_whatever_part_of_it_is_new() -> None:
    forward = Recorder()
    with executor_over(forward) as executor:
        run(executor, row(1, (1, 2, 3, 4, 5), (3, 0), want=Want.NOTHING))
        assert forward.calls == [], "nothing was wanted yet"
        run(executor, row(1, (6,), (3, 0), start=5))
    assert forward.calls[0][0].tolist() == [[1, 2, 3, 4, 5, 6]]


def test_rows_that_want_nothing_are_stored_and_left_out() -> None:
    forward = Recorder()
    with executor_over(forward) as executor:
        result = run(executor, row(1, (1, 2), (0,), want=Want.NOTHING), row(2, (4,), (1,)))
    assert forward.calls[0][0].tolist() == [[4]]
    assert [(part.sequence_id, part.token) for part in result.sequences] == [(1, None), (2, 5)]


def test_blocks_are_copied_first() -> None:
    forward = Recorder()
    with executor_over(forward) as executor:
        run(executor, row(1, (1, 2), (0,)))
        copies = (BlockCopy(0, 9),)
        run(executor, row(2, (3,), (9,), start=2), copies=copies)
    assert forward.calls[1][0].tolist() == [[1, 2, 3]]


def test_a_row_follows_the_step_before() -> None:
    forward = Recorder()
    with executor_over(forward) as executor:
        first = executor.submit(StepPlan(1, (row(1, (1, 2), (0,)),)))
        second = executor.submit(StepPlan(2, (row(1, (), (0,), start=2, follows=1),)))
        assert executor.collect(first, PATIENCE_S).sequences[0].token == 3
        assert executor.collect(second, PATIENCE_S).sequences[0].token == 4
    assert forward.calls[1][0].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.zeros((2, 3, VOCABULARY)), ["(2, 3, 10)", "(2, 10)"]),
        (np.zeros((1, VOCABULARY)), ["(1, 10)", "(2, 10)"]),
        (np.zeros((2, VOCABULARY - 1)), ["(2, 9)", "(2, 10)"]),
        (np.zeros(VOCABULARY), ["(10,)", "(2, 10)"]),
        (None, ["()", "(2, 10)"]),
        (np.zeros((2, VOCABULARY), np.complex64), ["complex64", "real numbers"]),
        (np.zeros((2, VOCABULARY), np.bool_), ["bool", "real numbers"]),
        ([["a"] * VOCABULARY] * 2, ["real numbers"]),
    ],
)
def test_a_wrong_answer_is_named_with_what_was_expected(returned: Any, words: list[str]) -> None:
    with executor_over(lambda *_: returned) as executor, pytest.raises(ExecutorError) as caught:
        run(executor, row(1, (1,), (0,)), row(2, (2,), (1,)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_without_a_vocabulary_any_width_is_taken_and_none_is_not() -> None:
    def forward(tokens: Any, _mask: Any) -> Any:
        return np.zeros((len(tokens), width))

    with executor_over(forward, checks_vocabulary=False) as executor:
        width = 3
        assert run(executor, row(1, (1,), (0,))).sequences[0].token == 0
        width = 0
        with pytest.raises(ExecutorError, match=r"\(1, 0\), expected \(1, V\)"):
            run(executor, row(1, (1,), (0,)))


@pytest.mark.parametrize("convert", [np.float16, np.float64, np.int32, np.asarray])
def test_any_real_numbers_are_taken(convert: Callable[[Any], Any]) -> None:
    with executor_over(lambda *_: convert([[0, 1, 5, 0, 0, 0, 0, 0, 0, 0]])) as executor:
        assert run(executor, row(1, (1,), (0,))).sequences[0].token == 2


def test_lists_are_taken_too() -> None:
    with executor_over(lambda *_: [[0.0] * 9 + [1.0]]) as executor:
        assert run(executor, row(1, (1,), (0,))).sequences[0].token == 9


def test_a_row_of_nan_is_a_fault_of_that_row() -> None:
    def forward(tokens: Any, _mask: Any) -> Any:
        logits = np.zeros((len(tokens), VOCABULARY))
        logits[1] = np.nan
        return logits

    with executor_over(forward) as executor:
        result = run(executor, *(row(n, (n,), (n,)) for n in range(3)))
    assert [part.fault is None for part in result.sequences] == [True, False, True]


@pytest.mark.parametrize("more", [{"want": Want.LOGITS}, {"prompt_targets": (2,)}])
def test_what_a_forward_function_cannot_give_is_a_fault_of_the_row(more: dict[str, Any]) -> None:
    with executor_over(Recorder()) as executor:
        sound, refused = run(executor, row(1, (1,), (0,)), row(2, (1,), (1,), **more)).sequences
    assert sound.token == 2
    assert refused.fault is not None


def test_a_step_cancelled_before_its_turn_does_not_call_the_function() -> None:
    forward = Recorder()
    gate = threading.Event()

    def gated(tokens: Any, mask: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return forward(tokens, mask)

    with executor_over(gated) as executor:
        first, second = (executor.submit(StepPlan(n, (row(1, (1,), (0,)),))) for n in (1, 2))
        executor.cancel(second)
        gate.set()
        executor.collect(first, PATIENCE_S)
        with pytest.raises(StepCancelledError):
            executor.collect(second, PATIENCE_S)
    assert len(forward.calls) == 1


def test_memory_is_told() -> None:
    with executor_over(Recorder()) as executor:
        assert executor.memory_bytes == {"kv": 16 * 4 * 8}
        assert executor.is_warm
        executor.warm_up()
