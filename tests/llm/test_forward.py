"""forward_batch: plain forward passes that keep keys and values per row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.fixture_files import fixture_file
from tests.llm.text_models import write_changed_model

from quire import LLM, RequestError, SamplingParams
from quire.core.config import EngineConfig
from quire.core.errors import ExecutorError, RowFaultError
from quire.core.plan import SequencePlan, SequenceResult, Want
from quire.engine import Engine
from quire.executors.fake import FakeExecutor
from quire.llm.forward import ForwardRows

Logits = npt.NDArray[np.float32]
GOLDEN = np.load(fixture_file("tiny/golden.npz"))
TOKENS = [int(token) for token in GOLDEN["tokens"]]


@pytest.fixture
def rows(llm: LLM) -> Iterator[LLM]:
    """The model with nothing kept."""
    llm.clear()
    yield llm
    llm.clear()


def whole(llm: LLM, tokens: list[int]) -> Logits:
    """The logits of a row computed at once and alone."""
    llm.clear()
    return llm.forward_batch([tokens])[0]


def test_the_logits_are_those_of_the_golden_file() -> None:
    path = fixture_file("tiny/Q4_K_M.gguf")
    with LLM(path, device="reference", kv_memory="4MiB", max_batch_size=2) as llm:
        [logits] = llm.forward_batch([TOKENS])
    exact = GOLDEN["Q4_K_M.exact"]
    assert logits.dtype == np.float32
    assert logits.shape == exact.shape
    assert np.linalg.norm(logits - exact) <= 1e-5 * np.linalg.norm(exact)


def test_rows_may_differ_in_length_and_do_not_change_each_other(rows: LLM) -> None:
    given = [TOKENS[:5], TOKENS[3:20], [7]]
    together = rows.forward_batch(given)
    assert [logits.shape for logits in together] == [(5, 512), (17, 512), (1, 512)]
    for tokens, logits in zip(given, together, strict=True):
        np.testing.assert_array_equal(logits, whole(rows, tokens))


def test_a_row_goes_on_where_it_was(rows: LLM) -> None:
    expected = whole(rows, TOKENS)
    rows.clear()
    parts = []
    for start, stop in [(0, 3), (3, 4), (4, 20), (20, 32)]:
        parts += rows.forward_batch([TOKENS[start:stop]], [start])
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_a_start_before_the_end_drops_what_comes_after(rows: LLM) -> None:
    rows.forward_batch([TOKENS])
    changed = [*TOKENS[:6], 9, 10]
    [logits] = rows.forward_batch([[9, 10]], [6])
    np.testing.assert_array_equal(logits, whole(rows, changed)[6:])
    with pytest.raises(RequestError, match=r"start_positions\[0\] is 9; the row has 8 tokens"):
        rows.forward_batch([[1]], [9])


def test_without_starts_every_row_begins_anew(rows: LLM) -> None:
    rows.forward_batch([[1, 2, 3], [4, 5]])
    [logits, _] = rows.forward_batch([TOKENS[:4], [6]])
    np.testing.assert_array_equal(logits, whole(rows, TOKENS[:4]))


def test_one_start_serves_all_rows(rows: LLM) -> None:
    rows.forward_batch([[1, 2], [3, 4]])
    expected = rows.forward_batch([[5], [6]], [2, 2])
    for start in (2, np.int64(2), np.array(2)):
        given = rows.forward_batch([[5], [6]], start)  # type: ignore[arg-type]
        np.testing.assert_array_equal(given, expected)
    with pytest.raises(RequestError, match=r"start_positions\[0\] is 4; the row has 3 tokens"):
        rows.forward_batch([[5], [6]], 4)


def test_more_rows_than_a_batch_holds_are_refused_unless_they_are_to_be_split() -> None:
    with LLM(fixture_file("tiny/Q4_K_M.gguf"), kv_memory="4MiB", max_batch_size=2) as llm:
        given = [[1, 2], [3], [4, 5, 6]]
        message = r"3 rows were given; a batch holds 2: .* set_batch_size\(\), .* split=True"
        with pytest.raises(RequestError, match=message):
            llm.forward_batch(given)
        assert llm.stats.kv_usage == 0.0
        split = llm.forward_batch(given, split=True)
        llm.set_batch_size(3)
        for one, other in zip(split, llm.forward_batch(given), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_row_that_is_none_is_left_as_it_is(rows: LLM) -> None:
    expected = whole(rows, TOKENS[:6])
    rows.clear()
    rows.forward_batch([TOKENS[:5], [1, 2]])
    nothing, some = rows.forward_batch([None, [3]], [5, 2])
    assert nothing.shape == (0, 512)
    assert some.shape == (1, 512)
    [logits, _] = rows.forward_batch([TOKENS[5:6], None], [5, 3])
    np.testing.assert_array_equal(logits, expected[5:])


def test_no_rows_give_no_logits(rows: LLM) -> None:
    assert rows.forward_batch([]) == []


def test_steps_are_cut_as_the_executor_takes_them() -> None:
    path = fixture_file("tiny/Q4_K_M.gguf")
    given = [TOKENS * 4, TOKENS[:7], TOKENS[:1], TOKENS[5:9]]
    with (
        LLM(path, kv_memory="4MiB") as wide,
        LLM(path, kv_memory="4MiB", max_batch_size=2, max_step_tokens=5) as narrow,
    ):
        cut = narrow.forward_batch(given, split=True)
        for one, other in zip(wide.forward_batch(given), cut, strict=True):
            np.testing.assert_array_equal(one, other)


def test_clearing_a_row_gives_its_blocks_back(rows: LLM) -> None:
    rows.forward_batch([[1] * 17, [2] * 33])
    held = rows.stats.kv_usage
    rows.clear(row=1)
    assert rows.stats.kv_usage == pytest.approx(held * 2 / 5)
    with pytest.raises(RequestError, match="the row has 0 tokens"):
        rows.forward_batch([None, [3]], [17, 33])
    rows.forward_batch([[3], None], 17)
    rows.clear()
    rows.clear(row=0)
    assert rows.stats.kv_usage == 0.0


@pytest.mark.parametrize("row", [-1, 64])
def test_clearing_a_row_that_no_batch_has_is_refused(rows: LLM, row: int) -> None:
    with pytest.raises(RequestError, match=f"row is {row}; a batch holds rows 0 to 63"):
        rows.clear(row)


def test_a_row_that_was_split_off_can_be_cleared(rows: LLM) -> None:
    rows.forward_batch([[1]] * 65, split=True)
    held = rows.stats.kv_usage
    rows.clear(64)
    assert rows.stats.kv_usage == pytest.approx(held * 64 / 65)
    rows.clear()


def test_truncating_a_row_gives_blocks_back(rows: LLM) -> None:
    rows.forward_batch([[1] * 100])
    rows.forward_batch([[1]], [20])
    assert rows.stats.kv_usage * 128 == 2


def test_rows_may_grow_into_blocks_that_others_give_back_in_the_same_call(rows: LLM) -> None:
    rows.forward_batch([[1], [1] * 500, [1] * 500, [1] * 500, [1]])  # 98 of 128 blocks
    rows.forward_batch([[1] * 512, [1], [1], [1], [1]])  # the first needs 32 of them
    assert rows.stats.kv_usage * 128 == 36


@pytest.mark.parametrize(
    ("given", "starts", "message"),
    [
        ([[512]], None, r"rows\[0\]\[0\] is 512; the vocabulary has 0 to 511"),
        ([[1], [2, -1]], None, r"rows\[1\]\[1\] is -1"),
        ([[1.5]], None, r"rows\[0\]\[0\] must be an integer, got 1.5"),
        ([[True]], None, r"rows\[0\]\[0\] must be an integer"),
        ("text", None, "rows must be a list"),
        ([5], None, r"rows\[0\] must be a list, got 5"),
        ([[1]], [0, 0], "1 rows but 2 start_positions"),
        ([[1]], [-1], r"start_positions\[0\] is -1"),
        ([[1]], ["0"], r"start_positions\[0\] must be an integer"),
        ([[1]], "0", "start_positions must be an integer for all rows or a list, got '0'"),
        ([[1]], 1.5, "start_positions must be an integer for all rows or a list, got 1.5"),
        ([[1]], True, "start_positions must be an integer, got True"),
        ([[1], []], None, r"rows\[1\] is empty: give it a token, or None"),
        ([[1]] * 65, None, "65 rows were given; a batch holds 64"),
        ([[1] * 513], None, r"rows\[0\] would come to 513 tokens; the context holds 512"),
        ([[1] * 512] * 5, None, "need 160 blocks .* hold 0 of its 128"),
    ],
)
def test_what_cannot_be_computed_is_refused_and_changes_nothing(
    rows: LLM, given: Any, starts: Any, message: str
) -> None:
    expected = whole(rows, TOKENS[:3])
    rows.clear()
    rows.forward_batch([TOKENS[:2]])
    with pytest.raises(RequestError, match=message):
        rows.forward_batch(given, starts)
    [logits] = rows.forward_batch([TOKENS[2:3]], [2])
    np.testing.assert_array_equal(logits, expected[2:])


def test_arrays_are_taken_as_lists(rows: LLM) -> None:
    expected = rows.forward_batch([[1, 2], [3, 4]])
    given = rows.forward_batch(np.array([[1, 2], [3, 4]]), np.array([0, 0]))  # type: ignore[arg-type]
    np.testing.assert_array_equal(given, expected)


def test_requests_and_rows_share_the_cache_without_touching_each_other(rows: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=1)
    prompts = [[n, n + 1, n + 2] for n in range(60)]
    alone = rows.generate(prompts, params)
    expected = whole(rows, [*TOKENS, 5])
    rows.clear()
    rows.forward_batch([TOKENS, [1] * 480, [2] * 480, [3] * 480])  # most of the cache
    beside = rows.generate(prompts, params)
    assert [out.logprobs for out in beside] == [out.logprobs for out in alone]
    assert any(out.metrics.num_preemptions for out in beside)
    [logits, *_] = rows.forward_batch([[5], None, None, None], 32)
    np.testing.assert_array_equal(logits, expected[-1:])


def test_a_request_that_the_rows_leave_no_room_for_is_refused_alone(rows: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    rows.forward_batch([[1] * 500, [1] * 500, [1] * 500, [1] * 100])  # 103 of 128 blocks
    refused, fits = rows.generate([[1] * 381, [1] * 380], params, on_error="keep")
    assert "401 tokens need 26 blocks" in str(refused.error)
    assert "rows leave 25 of 128: call clear() first" in str(refused.error)
    assert fits.error is None
    rows.forward_batch([[1] * 500] * 4)
    [output] = rows.generate([[1]], params, on_error="keep")
    assert "need 2 blocks of the KV cache, and forward_batch's rows leave 0" in str(output.error)
    rows.clear()
    assert rows.generate([[1]], params)[0].error is None


def test_a_row_that_is_not_finite_fails_and_counts_no_further(tmp_path: Path) -> None:
    path = write_changed_model(tmp_path / "poisoned.gguf", {"token_embd.weight": (7, np.nan)})
    with LLM(path, kv_memory="4MiB") as llm:
        expected = llm.forward_batch([[1, 2, 3]])[0]
        llm.forward_batch([[1, 2], [4]])
        with pytest.raises(RowFaultError, match=r"rows\[1\]: the hidden state is not finite"):
            llm.forward_batch([[3], [7]], [2, 1])
        [logits, _] = llm.forward_batch([[3], [5]], [2, 1])
        np.testing.assert_array_equal(logits, expected[2:])


@pytest.mark.parametrize("row", [-1.5, "0", True])
def test_only_a_number_names_a_row(llm: LLM, row: Any) -> None:
    with pytest.raises(RequestError, match="row must be an integer"):
        llm.clear(row)


def test_no_pass_begins_on_an_executor_that_does_not_answer() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = Engine(executor)
    engine.fail_all(ExecutorError("the executor did not answer"))
    with pytest.raises(ExecutorError, match="did not answer; restart the process"):
        ForwardRows(engine).run([[1]])
    assert executor.plans == []


# ---- models that keep states


class StateExecutor(FakeExecutor):
    """Logits that are hashes of all tokens, of which a part comes from a state."""

    def _row(self, row: SequencePlan) -> SequenceResult:
        if row.want is not Want.LOGITS:
            return super()._row(row)
        result = super()._row(row._replace(want=Want.NOTHING))
        digests = [self._digest(row, end) for end in range(row.start + 1, row.end + 1)]
        logits = np.array(digests, np.uint64).astype(np.float32)[:, None]
        return result._replace(logits=np.broadcast_to(logits, (len(digests), 1000)))


def rows_with_states(num_states: int = 12, **options: Any) -> tuple[ForwardRows, Engine]:
    """Three rows at most, which are computed in steps of eight tokens."""
    executor = StateExecutor(num_states=num_states, **options)
    config = EngineConfig(max_batch_size=3, max_step_tokens=8, plan_ahead=True)
    engine = Engine(executor, config, clock=executor.clock)
    return ForwardRows(engine), engine


def with_all_tokens(tokens: list[int]) -> Logits:
    """The logits of a row, with states computed from all tokens and without slots."""
    rows, _ = rows_with_states(num_states=0, keeps_states=True)
    return rows.run([tokens])[0]


def test_rows_keep_their_states() -> None:
    rows, engine = rows_with_states()
    first, second = TOKENS[:19], TOKENS[5:12]
    found = [rows.run([first[:11], second[:3]]), rows.run([first[11:], second[3:]], [11, 3])]
    for row, tokens in enumerate((first, second)):
        joined = np.concatenate([logits[row] for logits in found])
        np.testing.assert_array_equal(joined, with_all_tokens(tokens))
    assert engine.cache.state_pool.num_used == 2
    engine.cache.check_integrity([row.table for row in rows._rows.values()])
    [again, _] = rows.run([second, None])
    np.testing.assert_array_equal(again, with_all_tokens(second))
    rows.clear()
    assert engine.cache.state_pool.num_used == 0


def test_a_row_with_a_state_goes_on_where_it_ended_or_begins_anew() -> None:
    rows, _ = rows_with_states()
    rows.run([TOKENS[:9]])
    with pytest.raises(RequestError, match=r"is 5; .* goes on where it ended \(9\) or begins anew"):
        rows.run([[1]], [5])
    [logits] = rows.run([[1]], [9])
    np.testing.assert_array_equal(logits, with_all_tokens([*TOKENS[:9], 1])[9:])


def test_rows_leave_the_states_that_requests_need() -> None:
    rows, engine = rows_with_states()
    rows.run([[1], [2], [3]])
    for index in range(3):
        engine.add_request([index + 5] * 6, SamplingParams(max_tokens=9))
    for _ in engine.run():
        assert engine.stats.num_preemptions == 0
    rows.run([[4], [5], [6]], 1)  # as many as a batch holds: each has its own
    with pytest.raises(RequestError, match=r"there are 4 rows, each with a state, .* holds 3"):
        rows.run([None, None, None, [4]])
    rows.clear(0)
    rows.run([None, None, None, [4]])


def test_rows_of_a_failed_step_go_on_from_their_states() -> None:
    rows, engine = rows_with_states()
    executor = engine.executor
    assert isinstance(executor, StateExecutor)
    rows.run([TOKENS[:3], TOKENS[:4]])
    executor.faults.nan = lambda row: row.sequence_id == 1
    with pytest.raises(RowFaultError, match=r"rows\[1\]"):
        rows.run([[7], [8]], [3, 4])
    executor.faults.nan = lambda row: False
    found = rows.run([[7], [8]], [3, 4])
    np.testing.assert_array_equal(found[0], with_all_tokens([*TOKENS[:3], 7])[3:])
    np.testing.assert_array_equal(found[1], with_all_tokens([*TOKENS[:4], 8])[4:])


def test_a_row_whose_state_is_lost_begins_anew() -> None:
    rows, engine = rows_with_states()
    executor = engine.executor
    assert isinstance(executor, StateExecutor)
    rows.run([TOKENS[:3]])
    executor.faults.nan = lambda row: row.start > 3  # the second step
    with pytest.raises(RowFaultError):
        rows.run([TOKENS[3:20]], [3])
    assert engine.cache.state_pool.num_used == 0
    assert engine.snapshot().kv_usage == 0.0
    with pytest.raises(RequestError, match="the row has 0 tokens so far"):
        rows.run([[7]], [3])
