"""The latest steps, as those who watch an engine see them."""

from tests.engine.simulated import finish, new_engine
from tests.engine.toys import greedy

from quire.engine.step_log import MAX_STEPS, WATCHED_S
from quire.executors.fake import FakeExecutor, StepCost

TEN_MS = StepCost(a=0.010, b=0.0)


def test_a_prompt_comes_in_chunks_then_token_by_token() -> None:
    engine = new_engine(FakeExecutor(cost=TEN_MS), max_batch_size=4, max_step_tokens=4)
    assert engine.latest_steps(MAX_STEPS) == []
    engine.add_request([1, 2, 3, 4, 5, 6], greedy(3), request_id="r", key="alice")
    finish(engine)
    steps = engine.latest_steps(MAX_STEPS)
    [first, *others] = [row for step in steps for row in step.rows]
    assert (first.request_id, first.key, first.num_prompt_tokens) == ("r", "alice", 6)
    assert (first.start, first.num_tokens, first.is_decode) == (0, 4, False)
    assert [(row.start, row.num_tokens, row.is_decode) for row in others] == [
        (4, 2, False),
        (6, 1, True),
        (7, 1, True),
    ]
    assert [step.context for step in steps] == [4, 6, 7, 8]
    assert [round(step.elapsed_s, 6) for step in steps] == [0.010] * 4
    assert [round(step.at, 6) for step in steps] == [0.010, 0.020, 0.030, 0.040]


def test_a_prompt_of_one_token_is_no_decode() -> None:
    engine = new_engine()
    engine.latest_steps(1)
    engine.add_request([1], greedy(2))
    finish(engine)
    rows = [row for step in engine.latest_steps(9) for row in step.rows]
    assert [row.is_decode for row in rows] == [False, True]


def test_the_latest_come_and_only_those_after_a_step() -> None:
    engine = new_engine()
    engine.latest_steps(1)
    engine.add_request([1, 2], greedy(10))
    finish(engine)
    ids = [step.id for step in engine.latest_steps(MAX_STEPS)]
    assert len(ids) == 10
    assert ids == sorted(ids)
    assert [step.id for step in engine.latest_steps(3)] == ids[-3:]
    assert [step.id for step in engine.latest_steps(MAX_STEPS, after=ids[6])] == ids[7:]
    assert engine.latest_steps(0) == []


def test_only_so_many_are_kept() -> None:
    engine = new_engine(FakeExecutor(num_blocks=64))
    engine.latest_steps(1)
    engine.add_request([1, 2], greedy(MAX_STEPS + 50))
    finish(engine, check=False)
    steps = engine.latest_steps(2 * MAX_STEPS)
    assert len(steps) == MAX_STEPS
    assert steps[-1].rows[0].start == MAX_STEPS + 50, "the last token that is computed"


def test_nothing_is_kept_when_nobody_watches() -> None:
    engine = new_engine()
    engine.add_request([1, 2], greedy(5))
    finish(engine)
    assert engine.latest_steps(MAX_STEPS) == []
    engine.clock.sleep(WATCHED_S + 1)
    engine.add_request([1, 2], greedy(5))
    finish(engine)
    assert engine.latest_steps(MAX_STEPS) == [], "who asked is gone"
