"""How keys share a step: beside others a key that floods keeps steps short, and gets on."""

from typing import Any

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, run_until

from quire.core.plan import SequencePlan, StepPlan
from quire.core.request import Request
from quire.engine import Engine
from quire.executors.fake import FakeExecutor

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


@pytest.mark.parametrize("target", ["slo_itl_ms", "slo_ttft_ms"])
def test_a_target_alone_says_how_long_steps_are(target: str) -> None:
    executor, engine = flooded(**{target: 10_000.0})
    engine.add_request(prompt(99, 5), greedy(40), key="other")
    start = len(executor.plans)
    run_until(engine, lambda: len(executor.plans) == start + 30)
    assert STEP in [total(plan) for plan in executor.plans[start:]]
