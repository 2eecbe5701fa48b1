"""How keys share a step: beside others a key that floods keeps steps short, and gets on."""

from collections import Counter
from typing import Any

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, run_until

from quire.core.plan import SequencePlan, StepPlan
from quire.core.request import Request
from quire.engine import Engine
from quire.executors.fake import FakeExecutor, StepCost

BATCH, STEP = 8, 64  # places, tokens a step
PROMPT = 40


def flooded(**settings: Any) -> tuple[FakeExecutor, Engine]:
    """An engine that one key has had to itself for some steps, with many more in its queue."""
    executor = FakeExecutor(keep_plans=True)
    engine = new_engine(
        executor,
        max_batch_size=BATCH,
        **{"max_step_tokens": STEP, "plan_ahead": False, **settings},
    )
    for number in range(150):
        engine.add_request(prompt(number), greedy(2 + number % 5), key="flood")
    run_until(engine, lambda: len(executor.plans) == 10)
    return executor, engine


def prompt(number: int, length: int = PROMPT) -> list[int]:
    return [(number * 31 + place * 7) % 1000 for place in range(length)]


def sizes(plan: StepPlan, sequence_ids: set[int]) -> list[int]:
    """How many tokens each row of these sequences has."""
    return [row.num_new_tokens for row in plan.sequences if row.sequence_id in sequence_ids]


def sequence_of(engine: Engine, request: Request) -> int:
    return engine._lifecycle.live[request.id].sequences[0].id


def is_decode(row: SequencePlan) -> bool:
    return row.start >= PROMPT or row.num_new_tokens == 1


def total(plan: StepPlan) -> int:
    return sum(row.num_new_tokens for row in plan.sequences)


def test_a_key_alone_fills_its_steps() -> None:
    executor, _ = flooded()
    assert [total(plan) for plan in executor.plans] == [STEP] * 10


def test_a_newcomers_whole_prompt_is_in_the_next_step() -> None:
    """Also if the key that had the machine to itself so far was never charged for it."""
    executor, engine = flooded()
    newcomer = sequence_of(engine, engine.add_request(prompt(99, 50), greedy(4), key="other"))
    engine.step()
    assert sizes(executor.plans[-1], {newcomer}) == [50]


def test_beside_another_key_a_flood_fills_a_third_of_what_decodes_leave() -> None:
    executor, engine = flooded()
    other = engine.add_request(prompt(99, 5), greedy(60), key="other")
    run_until(engine, lambda: len(executor.plans) == 50)
    assert other.id in engine._lifecycle.live, "it decodes beside them all the time"
    in_debt = executor.plans[20:]  # so many steps it took the flood to get there
    with_prompts = [plan for plan in in_debt if total(plan) > len(plan.sequences)]
    assert with_prompts, "the flood's prompts go on"
    for plan in with_prompts:
        num_decodes = sum(is_decode(row) for row in plan.sequences)
        assert total(plan) <= num_decodes + -(-(STEP - num_decodes) // 3)


def test_beside_a_newcomers_prompt_a_flood_fills_a_third_of_what_is_left() -> None:
    executor, engine = flooded()
    engine.add_request(prompt(99, 5), greedy(60), key="other")
    run_until(engine, lambda: len(executor.plans) == 50)  # the flood is in debt
    newcomer = sequence_of(engine, engine.add_request(prompt(98, 30), greedy(4), key="other"))
    engine.step()
    plan = executor.plans[-1]
    assert sizes(plan, {newcomer}) == [30]
    num_decodes = sum(is_decode(row) for row in plan.sequences)
    assert total(plan) <= num_decodes + 30 + -(-(STEP - 30 - num_decodes) // 3)


def test_when_the_other_key_has_left_steps_are_full_again() -> None:
    executor, engine = flooded()
    other = engine.add_request(prompt(99, 5), greedy(3), key="other")
    run_until(engine, lambda: other.id not in engine._lifecycle.live)
    start = len(executor.plans)
    run_until(engine, lambda: len(executor.plans) == start + 10)
    assert STEP in [total(plan) for plan in executor.plans[start:]]


def test_a_flood_is_served_to_its_end_beside_a_key_that_always_has_prompts() -> None:
    _, engine = flooded()
    for number in range(40):
        engine.add_request(prompt(200 + number, 25), greedy(2), key="other")
    live = set(engine._lifecycle.live)
    outputs = finish(engine)
    assert outputs.keys() == live
    for output in outputs.values():
        length = len(output.token_ids)
        assert tokens_of(output) == solo(output.prompt_token_ids, greedy(length))


def test_without_chunks_a_prompt_that_fits_beside_the_others_does_not_wait_for_an_empty_step() -> (
    None
):
    executor, engine = flooded(chunking=False)
    engine.add_request(prompt(99, 5), greedy(40), key="other")
    start = len(executor.plans)
    run_until(engine, lambda: len(executor.plans) == start + 30)
    shared = [plan for plan in executor.plans[start:] if PROMPT in sizes_of_all(plan)]
    assert shared
    assert all(len(plan.sequences) > 1 for plan in shared)


def sizes_of_all(plan: StepPlan) -> list[int]:
    return [row.num_new_tokens for row in plan.sequences]


# ---- what the streams of the others bear


def beside_a_stream(cost: StepCost, **settings: Any) -> tuple[FakeExecutor, Engine, int]:
    """A key that floods prompts and long completions, in debt, and a stream of another key."""
    executor = FakeExecutor(keep_plans=True, cost=cost, num_blocks=2048)
    options = {"max_batch_size": 48, "max_step_tokens": 256, "plan_ahead": False, **settings}
    engine = new_engine(executor, **options)
    for number in range(200):
        engine.add_request(prompt(number, 60), greedy(300), key="flood")
    stream = engine.add_request(prompt(999, 5), greedy(2000), key="stream")
    sequence = sequence_of(engine, stream)
    run_until(engine, lambda: len(executor.plans) == 150, most_steps=200)
    return executor, engine, sequence


def test_beside_a_stream_steps_are_no_longer_than_a_reader_needs() -> None:
    executor, _, sequence = beside_a_stream(StepCost(a=0.003, b=0.001))
    late = executor.plans[80:]
    assert all(sizes(plan, {sequence}) == [1] for plan in late), "the stream has a token a step"
    assert max(executor.cost.seconds(plan) for plan in late) <= 0.0155
    assert min(executor.cost.seconds(plan) for plan in late) > 0.011, "the rest is the flood's"


def test_where_steps_are_slow_they_are_at_most_twice_as_long_as_the_streams_own() -> None:
    executor, _, _ = beside_a_stream(StepCost(a=0.1, b=0.002))
    assert max(executor.cost.seconds(plan) for plan in executor.plans[80:]) <= 0.206


def test_where_tokens_are_cheap_nothing_is_held_back() -> None:
    executor, _, _ = beside_a_stream(StepCost(a=0.003, b=0.00001))
    assert max(total(plan) for plan in executor.plans[80:]) == 48, "every running sequence decodes"


def test_long_contexts_of_a_flood_count() -> None:
    executor, _, _ = beside_a_stream(StepCost(a=0.003, b=0.0005, c=0.00001))
    assert max(executor.cost.seconds(plan) for plan in executor.plans[80:]) <= 0.030


def test_a_lone_prompt_over_a_long_context_counts_as_well() -> None:
    cost = StepCost(a=0.003, b=0.0005, c=0.00001)
    executor = FakeExecutor(keep_plans=True, cost=cost, num_blocks=2048)
    engine = new_engine(executor, max_batch_size=48, max_step_tokens=256, plan_ahead=False)
    stream = engine.add_request(prompt(999, 5), greedy(2000), key="stream")
    run_until(engine, lambda: len(executor.plans) == 20)
    long = sequence_of(engine, engine.add_request(prompt(1, 4000), greedy(2), key="flood"))
    run_until(engine, lambda: len(executor.plans) == 300, most_steps=400)
    assert stream.id in engine._lifecycle.live
    rows = [row for plan in executor.plans for row in plan.sequences if row.sequence_id == long]
    over_24_ms = [row.num_new_tokens for row in rows if row.start > 2400]  # by its context alone
    assert over_24_ms
    assert set(over_24_ms) == {8}


def test_a_flood_gets_on_beside_a_stream_however_slow_the_steps() -> None:
    executor, _, sequence = beside_a_stream(StepCost(a=0.003, b=0.1))
    late = executor.plans[80:]
    assert all(total(plan) - len(sizes(plan, {sequence})) >= 8 for plan in late)


def test_the_sequences_of_a_flood_take_turns() -> None:
    executor, _, sequence = beside_a_stream(StepCost(a=0.003, b=0.001))
    decoded = Counter(
        row.sequence_id
        for plan in executor.plans[-60:]
        for row in plan.sequences
        if row.num_new_tokens == 1 and row.start >= 60 and row.sequence_id != sequence
    )
    assert len(decoded) > 20, "more than a step holds"
    assert max(decoded.values()) - min(decoded.values()) <= 2


def test_a_prompt_that_is_due_may_make_steps_half_as_long_again() -> None:
    executor, engine, stream = beside_a_stream(StepCost(a=0.003, b=0.001))
    newcomer = sequence_of(engine, engine.add_request(prompt(98, 120), greedy(4), key="new"))
    engine.step()
    plan = executor.plans[-1]
    assert sizes(plan, {stream}) == [1]
    assert sizes(plan, {newcomer})[0] >= 15
    assert 0.019 < executor.cost.seconds(plan) <= 0.023


def test_a_key_that_floods_anew_does_not_starve_a_stream_while_it_is_in_credit() -> None:
    executor = FakeExecutor(keep_plans=True, cost=StepCost(a=0.003, b=0.001), num_blocks=2048)
    engine = new_engine(executor, max_batch_size=48, max_step_tokens=256, plan_ahead=False)
    for number in range(2):
        engine.add_request(prompt(990 + number, 5 + number), greedy(2000), key="stream")
    run_until(engine, lambda: len(executor.plans) == 20)
    streams = {row.sequence_id for row in executor.plans[-1].sequences}
    for number in range(200):
        engine.add_request(prompt(number, 60), greedy(300), key="flood")
    run_until(engine, lambda: len(executor.plans) == 120, most_steps=200)
    for plan in executor.plans[20:]:
        assert sizes(plan, streams) == [1, 1]
        assert executor.cost.seconds(plan) <= 0.023


@pytest.mark.parametrize("target", ["slo_itl_ms", "slo_ttft_ms"])
def test_a_target_alone_says_how_long_steps_are(target: str) -> None:
    executor, engine = flooded(**{target: 10_000.0})
    engine.add_request(prompt(99, 5), greedy(40), key="other")
    start = len(executor.plans)
    run_until(engine, lambda: len(executor.plans) == start + 30)
    assert STEP in [total(plan) for plan in executor.plans[start:]]
