"""Scheduler: who joins the batch, who is pre-empted for it, and how rows are planned."""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import Multiples, greedy, rows_of, run_until, toy_engine

from quire.core.plan import StepPlan
from quire.core.request import Status, WaitReason
from quire.core.sampling import Constraint, SamplingParams
from quire.engine import Engine
from quire.engine.pacing import StepTimeModel
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence
from quire.engine.step import RowPlanner, Step
from quire.executors.fake import FakeExecutor


def plans_of_a_run(*, plan_ahead: bool) -> tuple[list[StepPlan], list[tuple[int, int]]]:
    """The plans of a run, and each step's tokens and context as the step-time model is told."""
    executor = FakeExecutor(keep_plans=True, num_blocks=20, block_size=4)
    engine = new_engine(executor, max_batch_size=6, max_step_tokens=16, plan_ahead=plan_ahead)
    observed = []
    with patch.object(
        StepTimeModel, "observe", lambda _, tokens, context, __: observed.append((tokens, context))
    ):
        _run_nine(engine)
    return executor.plans, observed


def _run_nine(engine: Engine) -> None:
    for i in range(9):
        params = SamplingParams(max_tokens=5 + i, seed=i, n=2 if i == 3 else 1)
        engine.add_request(range(i, 2 * i + 1), params, key=str(i % 2))
    finish(engine)


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_the_quick_way_plans_what_the_general_way_plans(
    plan_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = plans_of_a_run(plan_ahead=plan_ahead)

    def general(
        _: RowPlanner,
        step: Step,
        sequences: Iterable[Sequence],
        plan_other: Callable[[Step, Sequence], None],
    ) -> None:
        for sequence in sequences:
            if sequence.is_running:
                plan_other(step, sequence)

    monkeypatch.setattr(RowPlanner, "plan_decodes", general)
    assert quick == plans_of_a_run(plan_ahead=plan_ahead)


# ---- blocks that running sequences still need


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_a_newcomer() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    long = engine.add_request([1] * 128, greedy(4), key="a")  # 8 blocks, of which two a step
    engine.step()
    late = engine.add_request([2] * 90, greedy(4), key="b")  # 6 of 10 free blocks, 6 still needed
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
    assert snapshot.waiting_by_reason == {WaitReason.NO_BLOCKS: 1}
    outputs = finish(engine)
    assert engine.stats.num_preemptions == 0
    for request in (long, late):
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)


def test_a_newcomer_that_fits_into_the_headroom_joins() -> None:
    executor = FakeExecutor(num_blocks=12, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    engine.add_request([1] * 128, greedy(4), key="a")
    engine.step()
    engine.add_request([2] * 60, greedy(4), key="b")  # 4 of the 4 that are not needed
    engine.step()
    assert engine.snapshot().num_running == 2


def test_prompts_are_admitted_only_while_there_is_room_for_all_of_them() -> None:
    executor = FakeExecutor(num_blocks=24, block_size=16)
    engine = new_engine(executor, max_batch_size=8, max_step_tokens=64)
    requests = [engine.add_request([i] * 160, greedy(4)) for i in range(8)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, greedy(4))
    assert engine.stats.num_preemptions == 0  # two prompts of ten blocks fit, three do not


@pytest.mark.parametrize(("prompt", "joins"), [(32, True), (33, False)])
def test_a_block_to_grow_into_is_left_for_each_running_sequence(prompt: int, joins: bool) -> None:
    executor = FakeExecutor(num_blocks=6, block_size=16)
    engine = new_engine(executor, max_batch_size=8, plan_ahead=False)
    for first in (1, 2):
        engine.add_request([first] * 8, greedy(20))  # a block each, half full
    engine.step()
    engine.add_request([3] * prompt, greedy(5))  # of four free blocks two are left
    engine.step()
    assert engine.snapshot().num_running == (3 if joins else 2)


def test_a_key_admits_prompts_up_to_a_step_of_tokens() -> None:
    engine = new_engine(max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    for first in range(6):
        engine.add_request([first] * 20, greedy(4), key="a")
    engine.add_request([9] * 20, greedy(4), key="b")
    engine.step()
    assert engine.snapshot().running_by_key == {"a": 2, "b": 1}, "40 tokens; another key's own"
    assert engine.snapshot().waiting_by_reason == {WaitReason.QUEUED: 4}


def test_decodes_are_no_backlog() -> None:
    engine = new_engine(max_batch_size=8, max_step_tokens=8, plan_ahead=False)
    for first in range(7):
        engine.add_request([first], greedy(30))
    engine.step()
    engine.add_request([9] * 5, greedy(4))
    engine.step()
    assert engine.snapshot().num_running == 8


# ---- pre-emption for other keys


def test_a_newcomer_takes_the_slot_of_the_last_of_the_largest_key() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    floods = [engine.add_request([first], greedy(50), key="flood") for first in range(4)]
    engine.step()
    engine.step()
    newcomer = engine.add_request([9], greedy(50), key="new")
    engine.step()
    assert newcomer.status is Status.RUNNING
    assert [request.status for request in floods] == [Status.RUNNING] * 3 + [Status.PREEMPTED]
    assert engine.stats.num_preemptions == 1
    assert floods[3].metrics.num_preemptions == 1


def test_only_sequences_of_the_largest_key_give_way() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    floods = [engine.add_request([first], greedy(50), key="flood") for first in range(3)]
    last = engine.add_request([5], greedy(50), key="zeal")  # the last in rank, of a later name
    engine.step()
    engine.step()
    engine.add_request([9], greedy(50), key="new")
    engine.step()
    assert [request.status for request in (*floods, last)] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.PREEMPTED,
        Status.RUNNING,
    ]


def test_a_sequence_whose_sample_is_pending_pre_empts_nobody() -> None:
    engine = new_engine(max_batch_size=4)
    for first in range(3):
        engine.add_request([first], greedy(50), key="flood")
    small = engine.add_request([5], greedy(50), key="small")
    run_until(engine, lambda: small.metrics.first_token_at is not None)
    engine.step()
    (sequence,) = engine._lifecycle.live[small.id].sequences
    assert sequence.num_pending == 1
    engine._scheduler.preempt(sequence, engine.clock.now())
    engine._scheduler.schedule(engine.clock.now(), is_idle=False)
    assert engine.stats.num_preemptions == 1, "its own"


def test_a_sequence_without_a_token_since_its_admission_is_not_pre_empted() -> None:
    engine = new_engine(max_batch_size=2, max_step_tokens=8, plan_ahead=False)
    first = engine.add_request([1], greedy(50), key="flood")
    engine.step()
    prompt = engine.add_request([2] * 30, greedy(50), key="flood")
    engine.step()  # a chunk of its prompt
    engine.add_request([3], greedy(50), key="new")
    engine.step()
    assert (first.status, prompt.status) == (Status.PREEMPTED, Status.RUNNING)


def test_equal_keys_do_not_pre_empt_each_other() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    for number in range(8):
        engine.add_request([number], greedy(40), key="ab"[number % 2])
    finish(engine)
    assert engine.stats.num_preemptions == 0


def test_keys_share_the_batch_by_weight() -> None:
    engine = new_engine(max_batch_size=8, plan_ahead=False, key_weights={"heavy": 3.0})
    for number in range(60):
        engine.add_request([number], greedy(30), key="light")
    engine.step()
    engine.step()
    for number in range(60):
        engine.add_request([number], greedy(30), key="heavy")
    running = []
    for _ in range(60):
        engine.step()
        running.append(engine.snapshot().running_by_key)
    assert running[20] == {"heavy": 6, "light": 2}
    assert sum(counts["heavy"] for counts in running[10:]) >= 5.5 * 50


def test_slots_of_siblings_are_reserved_and_handed_back() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    engine.add_request([1] * 3, greedy(6, n=3))
    for first in (2, 3):
        engine.add_request([first], greedy(6))
    engine.step()
    assert engine.snapshot().num_running == 4, "three of the first request, one other"
    assert engine._scheduler._shares.num_slots == 4
    finish(engine)
    assert (engine._scheduler._shares.num_slots, engine._scheduler._shares.num_keys) == (0, 0)


def test_who_is_pre_empted_starts_again_where_its_cached_prefix_ends() -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4, keep_plans=True)
    engine = new_engine(executor, max_batch_size=1, plan_ahead=False)
    request = engine.add_request([1] * 10, greedy(20), key="a")
    run_until(engine, lambda: engine.stats.completion_tokens == 4)
    sequence = engine._lifecycle.live[request.id].sequences[0]
    assert (sequence.num_computed, sequence.epoch) == (13, 0)
    engine._scheduler.preempt(sequence, engine.clock.now())
    assert (sequence.num_computed, sequence.epoch, sequence.is_running) == (0, 1, False)
    engine.step()
    again = rows_of(executor, sequence.id)[-1]
    assert (again.start, again.num_new_tokens) == (12, 2)
    assert tokens_of(finish(engine)[request.id]) == solo([1] * 10, greedy(20))


# ---- limits


def test_lowered_limits_keep_running_sequences_waiting() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    requests = [engine.add_request([first], greedy(9)) for first in range(4)]
    engine.step()
    engine._scheduler.set_limits(2, 100)
    step = engine._scheduler.schedule(engine.clock.now(), is_idle=True)
    assert step is not None
    assert [row.sequence.id for row in step.rows] == [1, 2]
    waiting = [engine._lifecycle.live[r.id].sequences[0].wait_reason for r in requests]
    assert waiting == [None, None, WaitReason.DEGRADED, WaitReason.DEGRADED]


def test_a_newcomer_waits_for_a_degraded_batch_under_that_reason() -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    for first in range(2):
        engine.add_request([first], greedy(9))
    engine.step()
    engine._scheduler.set_limits(2, 100)
    engine.add_request([9], greedy(9))
    engine._scheduler.schedule(engine.clock.now(), is_idle=True)
    assert engine.snapshot().waiting_by_reason == {WaitReason.DEGRADED: 1}


def test_a_prompt_waits_while_its_key_has_a_step_of_tokens_to_catch_up() -> None:
    engine = new_engine(max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    for first in range(2):
        engine.add_request([first] * 100, greedy(4), key="a")
    running = []
    for _ in range(4):
        engine.step()
        running.append(engine.snapshot().num_running)
    assert running == [1, 1, 1, 2], "68, 36, then 4 tokens are left of the first"


def test_the_tokens_that_several_prompts_lack_add_up() -> None:
    engine = new_engine(max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    for first in range(6):
        engine.add_request([first] * 31, greedy(4), key="a")
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.snapshot().num_running)
    assert running == [2, 3, 4], "62 - 32 = 30 tokens leave room for one more"


def test_a_batch_full_of_slots_says_so_and_one_slot_less_takes_another() -> None:
    engine = new_engine(max_batch_size=3, plan_ahead=False)
    for first in range(4):
        engine.add_request([first], greedy(9))
    engine.step()
    assert engine.snapshot().num_running == 3
    assert engine.snapshot().waiting_by_reason == {WaitReason.BATCH_FULL: 1}


def test_of_several_queues_the_one_with_most_credit_is_admitted_first() -> None:
    engine = new_engine(max_batch_size=3, max_step_tokens=64, plan_ahead=False)
    for number in range(30):
        engine.add_request([number], greedy(4), key="busy")
    for _ in range(10):
        engine.step()
    engine.add_request([90], greedy(4), key="late")
    engine.add_request([91], greedy(4), key="later")
    engine.step()
    assert engine.snapshot().running_by_key == {"busy": 1, "late": 1, "later": 1}


def test_a_step_without_blocks_for_anyone_pre_empts_from_the_last() -> None:
    executor = FakeExecutor(num_blocks=8, block_size=4, keep_plans=True)
    engine = new_engine(executor, max_batch_size=3, max_step_tokens=8, prefix_reuse=False)
    requests = [engine.add_request([first] * 12, greedy(16)) for first in range(3)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
    assert outputs[requests[0].id].metrics.num_preemptions == 0, "the first in rank goes on"


def test_a_full_house_without_chunks_makes_progress() -> None:
    executor = FakeExecutor(num_blocks=8, block_size=4)
    engine = new_engine(executor, max_batch_size=3, max_step_tokens=24, chunking=False)
    requests = [engine.add_request([first] * 12, greedy(12)) for first in range(3)]
    outputs = finish(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == solo(request.prompt, request.params)
        assert outputs[request.id].status is Status.FINISHED


@pytest.mark.parametrize("params", [greedy(9), greedy(9, frequency_penalty=0.5)])
def test_the_wait_under_lowered_limits_ends_with_the_next_row(params: SamplingParams) -> None:
    engine = new_engine(max_batch_size=4, plan_ahead=False)
    requests = [engine.add_request([first], params) for first in range(4)]
    engine.step()
    sequences = [engine._lifecycle.live[request.id].sequences[0] for request in requests]
    scheduler = engine._scheduler
    scheduler.set_limits(2, 100)
    scheduler.schedule(1.0, is_idle=True)
    scheduler.set_limits(4, 100)
    scheduler.schedule(3.5, is_idle=True)
    assert [sequence.wait_reason for sequence in sequences] == [None] * 4
    waited = [request.metrics.waited_for.get(WaitReason.DEGRADED) for request in requests]
    assert waited == [None, None, 2.5, 2.5]


def test_a_sequence_whose_last_token_is_pending_does_not_hold_up_those_after_it() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor)
    engine.add_request([1], greedy(3))
    engine.add_request([2], greedy(6))
    finish(engine)
    rows = [[row.sequence_id for row in plan.sequences] for plan in executor.plans]
    assert rows == [[1, 2]] * 3 + [[2]] * 3


def test_a_sequence_whose_mask_is_pending_does_not_hold_up_those_after_it() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = toy_engine(executor, make_grammar=lambda _: Multiples(of=5, count=3))
    constraint = Constraint("regex", "x")
    first = engine.add_request([1], SamplingParams(max_tokens=9, structured=constraint))
    engine.add_request([2], greedy(6))
    outputs = finish(engine)
    assert len(outputs[first.id].token_ids) == 3
    rows = [[row.sequence_id for row in plan.sequences] for plan in executor.plans]
    assert [2 in step for step in rows] == [True] * 6, "a row in each step"
    assert [1 in step for step in rows] == [True] * 4 + [False] * 2, "one was planned too many"


def test_two_keys_are_charged_for_their_tokens() -> None:
    engine = new_engine(max_batch_size=4, max_step_tokens=100, plan_ahead=False)
    engine.add_request([1] * 30, greedy(9), key="a")
    engine.add_request([2] * 10, greedy(9), key="b")
    engine.step()
    shares = engine._scheduler._shares
    assert (shares.credit("a"), shares.credit("b")) == (400.0 - 10, 400.0)
    engine.step()
    assert shares.credit("a") == 400.0 - 10, "a token each"


def test_tokens_that_are_still_on_the_device_are_charged() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor, max_batch_size=4, max_step_tokens=100)
    for first in range(3):
        engine.add_request([first], greedy(50), key="a")
    engine.add_request([4], greedy(50), key="b")
    run_until(engine, lambda: len(executor.plans) == 10)
    # Three tokens a step against one: the third is one more than an equal share.
    assert engine._scheduler._shares.credit("a") == 400.0 - 10


@pytest.mark.parametrize("chunking", [True, False])
def test_where_no_running_prompt_finds_blocks_the_first_takes_them_from_the_last(
    chunking: bool,
) -> None:
    executor = FakeExecutor(num_blocks=12, block_size=4)
    engine = new_engine(
        executor, max_batch_size=4, max_step_tokens=8, plan_ahead=False, chunking=chunking
    )
    scheduler = engine._scheduler
    requests = [engine.add_request([n] * 16, greedy(4), key=str(n)) for n in (1, 2, 3)]
    sequences = [engine._lifecycle.live[request.id].sequences[0] for request in requests]
    for sequence in sequences:
        scheduler._admit(sequence)
        assert scheduler.cache.extend(sequence.block_table, 0, 8) == []
    pool = scheduler.cache.pool
    while pool.allocate() is not None:  # another user of the cache
        pass
    scheduler._planner.plan_chunk(Step(99), sequences[0], 8)  # what blocks there are is used up
    scheduler._planner.plan_chunk(Step(99), sequences[1], 8)
    scheduler._planner.plan_chunk(Step(99), sequences[2], 8)
    step = scheduler.schedule(1.0, is_idle=True)
    assert step is not None
    assert [row.sequence for row in step.rows] == [sequences[0]]
    assert step.rows[0].plan.num_new_tokens == 8
    assert [sequence.is_running for sequence in sequences] == [True, True, False]
    assert requests[2].status is Status.PREEMPTED


def test_the_positions_of_its_own_blocks_are_writable_without_the_cache() -> None:
    engine = new_engine(FakeExecutor(block_size=8), plan_ahead=False)
    request = engine.add_request([1] * 10, greedy(20))
    sequence = engine._lifecycle.live[request.id].sequences[0]
    found = []
    for _ in range(8):
        engine.step()
        found.append((sequence.num_computed, sequence.num_writable))
    assert found == [(10 + i, 16) for i in range(7)] + [(17, 24)]


@pytest.mark.parametrize(("chunking", "num_tokens"), [(True, 10), (False, 0)])
def test_a_chunk_is_halved_until_there_are_blocks_for_it(chunking: bool, num_tokens: int) -> None:
    engine = new_engine(FakeExecutor(num_blocks=8, block_size=4), chunking=chunking)
    request = engine.add_request([1] * 20, greedy(4))
    sequence = engine._lifecycle.live[request.id].sequences[0]
    for _ in range(4):
        engine.cache.pool.allocate()  # another user of the cache
    step = Step(1)
    engine._scheduler._planner.plan_chunk(step, sequence, 20)
    assert [row.plan.num_new_tokens for row in step.rows] == ([num_tokens] if num_tokens else [])
    assert step.num_tokens == sequence.num_computed == num_tokens


def test_a_chunk_may_be_of_one_token() -> None:
    engine = new_engine()
    request = engine.add_request([1] * 20, greedy(4))
    step = Step(1)
    sequence = engine._lifecycle.live[request.id].sequences[0]
    engine._scheduler._planner.plan_chunk(step, sequence, 1)
    assert step.num_tokens == 1


def test_every_step_has_an_id_of_its_own() -> None:
    engine = new_engine(plan_ahead=False)
    engine.add_request([1], greedy(9))
    scheduler = engine._scheduler
    ids = [scheduler.new_step_id(), scheduler.new_step_id(), scheduler.new_step_id()]
    step = scheduler.schedule(0.0, is_idle=True)
    assert step is not None
    assert [*ids, step.id, scheduler.new_step_id()] == [1, 2, 3, 4, 5]


def test_the_expected_context_is_half_way_to_what_requests_ask_for() -> None:
    engine = new_engine(plan_ahead=False)
    engine.add_request([1] * 4, greedy(20))
    run_until(engine, lambda: engine.stats.completion_tokens == 6)
    newcomer = engine.add_request([2] * 3, greedy(9))
    sequence = engine._lifecycle.live[newcomer.id].sequences[0]
    assert engine._scheduler._expected_context(sequence) == (4 + 6 + 14 // 2) + (3 + 9 // 2)


def test_only_the_first_completion_scores_the_prompt() -> None:
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(executor, plan_ahead=False)
    request = engine.add_request([1, 2, 3], greedy(9, n=2, prompt_logprobs=0))
    engine.step()
    first, sibling = engine._lifecycle.live[request.id].sequences
    engine.step()
    for sequence in (first, sibling):
        engine._scheduler.preempt(sequence, engine.clock.now())
    engine.step()
    assert rows_of(executor, first.id)[-1].prompt_targets == (2, 3)
    assert rows_of(executor, sibling.id)[-1].prompt_targets == ()


@pytest.mark.parametrize(("length", "num_running"), [(31, 2), (32, 1), (33, 1)])
def test_a_prompt_as_long_as_a_step_is_enough_for_its_key(length: int, num_running: int) -> None:
    engine = new_engine(max_batch_size=8, max_step_tokens=32, plan_ahead=False)
    for first in range(3):
        engine.add_request([first] * length, greedy(4), key="a")
    engine.step()
    assert engine.snapshot().num_running == num_running


def test_a_sequence_alone_without_blocks_waits_for_them() -> None:
    engine = new_engine(
        FakeExecutor(num_blocks=4, block_size=4), max_step_tokens=8, max_batch_size=2
    )
    request = engine.add_request([1] * 12, greedy(4))
    scheduler = engine._scheduler
    scheduler._admit(engine._lifecycle.live[request.id].sequences[0])
    taken = [block for _ in range(4) if (block := engine.cache.pool.allocate()) is not None]
    assert scheduler.schedule(1.0, is_idle=True) is None
    assert request.status is Status.RUNNING
    for block in taken:
        engine.cache.pool.release(block)
    assert tokens_of(finish(engine)[request.id]) == solo([1] * 12, greedy(4))


def test_admitting_many_asks_each_running_sequence_once_what_it_needs() -> None:
    """A sum over all that run for each that waits would be quadratic in a burst of requests."""
    engine = new_engine(FakeExecutor(num_blocks=1000), max_batch_size=64, max_step_tokens=512)
    for i in range(64):
        engine.add_request([i] * 4, greedy(3))
    asked: list[Sequence] = []
    original = Scheduler._blocks_to_come

    def blocks_to_come(self: Scheduler, sequence: Sequence) -> int:
        asked.append(sequence)
        return original(self, sequence)

    with patch.object(Scheduler, "_blocks_to_come", blocks_to_come):
        engine.step()
    assert engine.snapshot().num_running == 64
    assert len(asked) == len(set(map(id, asked))) == 64
    finish(engine)
