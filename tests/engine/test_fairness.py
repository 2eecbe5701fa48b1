"""Fairness: how keys share the batch and each step, by weight, credit and turns."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from tests.engine.simulated import finish, new_engine, solo, tokens_of
from tests.engine.toys import greedy, run_until

from quire.core.config import EngineConfig
from quire.core.plan import SequencePlan, StepPlan
from quire.core.request import Request
from quire.engine import Engine
from quire.engine.fairness import DeficitRoundRobin, Ready, StepBudget, WaitingQueues
from quire.engine.pacing import Pacer, StepTimeModel
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


# ---- the latency bound of another key's decodes


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


def test_a_prompt_that_is_due_may_make_steps_twice_as_long() -> None:
    executor, engine, stream = beside_a_stream(StepCost(a=0.003, b=0.001))
    newcomer = sequence_of(engine, engine.add_request(prompt(98, 120), greedy(4), key="new"))
    engine.step()
    plan = executor.plans[-1]
    assert sizes(plan, {stream}) == [1]
    assert sizes(plan, {newcomer})[0] >= 20
    assert 0.025 < executor.cost.seconds(plan) <= 0.030


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
        assert executor.cost.seconds(plan) <= 0.030


@pytest.mark.parametrize("target", ["slo_itl_ms", "slo_ttft_ms"])
def test_a_target_alone_says_how_long_steps_are(target: str) -> None:
    executor, engine = flooded(**{target: 10_000.0})
    engine.add_request(prompt(99, 5), greedy(40), key="other")
    start = len(executor.plans)
    run_until(engine, lambda: len(executor.plans) == start + 30)
    assert STEP in [total(plan) for plan in executor.plans[start:]]


# ---- deficit round robin


def shares_of(*keys: str, weights: dict[str, float] | None = None) -> DeficitRoundRobin:
    shares = DeficitRoundRobin(weights or {}, 100)
    for key in keys:
        shares.reserve_slots(key, 1)
    return shares


def test_debt_is_bounded_by_four_steps() -> None:
    shares = shares_of("greedy", "idle")
    for _ in range(100):
        shares.charge({"greedy": 100}, ["idle"])
    assert shares.credit("greedy") == -400.0
    for _ in range(8):  # as long as it took to get into it: debt is forgiven at the same rate
        shares.charge({"idle": 100}, [])
    assert shares.credit("greedy") == 0.0


def test_credit_is_bounded_by_four_steps() -> None:
    shares = shares_of("patient", "busy")
    for _ in range(100):
        shares.charge({"busy": 100}, [])
    assert shares.credit("patient") == 400.0
    assert shares.credit("nobody yet") == 400.0


def test_a_key_that_left_owes_nothing_when_it_comes_back() -> None:
    shares = shares_of("a", "b")
    shares.charge({"a": 100}, [])
    shares.charge({"a": 100}, [])
    shares.reserve_slots("a", -1)
    shares.charge({"b": 100}, ["c"])
    assert shares.credit("a") == 400.0


def test_shares_go_by_weight() -> None:
    shares = shares_of("heavy", "light", weights={"heavy": 3.0})
    shares.charge({"heavy": 50, "light": 50}, [])
    assert shares.credit("heavy") == 400.0  # it earned 75 and got 50, and may save no more
    assert shares.credit("light") == 375.0  # it earned 25


def test_what_is_wanted_beyond_the_step_goes_to_credit_first_then_round() -> None:
    shares = shares_of("flood", "small")
    for _ in range(10):
        shares.charge({"flood": 100}, [])
    assert shares.split({"flood": 500, "small": 30}, 100) == {"flood": 70, "small": 30}
    assert shares.split({"flood": 500, "small": 300}, 100) == {"flood": 0, "small": 100}


def test_a_newcomer_displaces_a_key_in_debt_and_none_that_is_not() -> None:
    shares = shares_of("flood", "fair")
    shares.reserve_slots("flood", 7)
    for _ in range(10):
        shares.charge({"flood": 100}, ["new"])
    assert shares.victim_key("new", 1) == "flood"
    even = shares_of("a", "b")
    assert even.victim_key("c", 1) is None


def test_weights_can_change_and_credit_stays() -> None:
    shares = shares_of("a", "b")
    shares.charge({"a": 100}, [])
    assert (shares.credit("a"), shares.credit("b")) == (350.0, 400.0)
    shares.set_weights({"b": 4.0})
    assert (shares.credit("a"), shares.credit("b")) == (350.0, 400.0)
    shares.charge({"b": 100}, [])
    assert (shares.credit("a"), shares.credit("b")) == (370.0, 380.0)


def test_a_key_alone_is_not_charged() -> None:
    shares = shares_of("a")
    shares.charge({"a": 100}, [])
    assert shares.credit("a") == 400.0
    shares.charge({"a": 100}, ["b"])
    assert shares.credit("a") == 350.0, "one that waits counts"


def test_slots_are_counted_by_key_and_in_all() -> None:
    shares = shares_of("a", "b")
    shares.reserve_slots("a", 3)
    assert (shares.num_slots, shares.num_keys) == (5, 2)
    shares.reserve_slots("b", -1)
    assert (shares.num_slots, shares.num_keys) == (4, 1)
    shares.reserve_slots("a", -1)
    assert (shares.num_slots, shares.num_keys) == (3, 1)


def in_debt(*others: str) -> DeficitRoundRobin:
    """A key that got all tokens of some steps, beside others with credit."""
    shares = shares_of("flood", *others)
    for _ in range(10):
        shares.charge({"flood": 100}, [])
    return shares


def test_precedence_is_credit_by_weight() -> None:
    shares = shares_of("a", "b", "c", weights={"b": 2.0})
    shares.charge({"a": 60}, [])
    assert shares.precedence("a") == -355.0
    assert shares.precedence("b") == -200.0
    assert sorted("abc", key=shares.precedence) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("slots", "newcomer", "num_slots", "victim"),
    [
        ({"a": 2}, "b", 1, "a"),  # one each after the exchange
        ({"a": 1}, "b", 1, None),  # it would have less than the newcomer
        ({"a": 3}, "b", 2, None),
        ({"a": 4}, "b", 2, "a"),
        ({"a": 3, "c": 4}, "b", 1, "c"),  # of those with most slots
        ({"a": 4, "b": 2}, "b", 1, "a"),
        ({"a": 4, "b": 3}, "b", 1, None),
        ({"b": 5}, "b", 1, None),  # never its own
        ({}, "b", 1, None),
        ({"heavy": 6, "a": 3}, "b", 1, "a"),  # heavy has six for a weight of four
        ({"heavy": 11, "a": 3}, "b", 1, "a"),
        ({"heavy": 13, "a": 3}, "b", 1, "heavy"),
        ({"a": 2}, "heavy", 1, "a"),
        ({"a": 1}, "heavy", 1, None),
        ({"wide": 7, "heavy": 4}, "heavy", 1, "wide"),  # 5/4 of a slot, and 6/4 after it
        ({"wide": 5, "heavy": 4}, "heavy", 1, None),
    ],
)
def test_slots_are_taken_from_the_key_with_most_for_its_weight(
    slots: dict[str, int], newcomer: str, num_slots: int, victim: str | None
) -> None:
    shares = DeficitRoundRobin({"heavy": 4.0, "wide": 4.0}, 100)
    for key, count in slots.items():
        shares.reserve_slots(key, count)
    assert shares.victim_key(newcomer, num_slots) == victim


def test_a_key_in_debt_gives_way_whatever_slots_it_has() -> None:
    shares = in_debt("fair")
    shares.reserve_slots("fair", 9)
    assert shares.credit("flood") < 0 < shares.credit("fair")
    assert shares.victim_key("new", 1) == "flood"
    assert shares.victim_key("new", 399) == "flood"
    assert shares.victim_key("new", 400) is None, "more slots than it has credit for"
    assert shares.victim_key("fair", 1) == "flood"
    shares._credit["new"] = 3.0
    assert shares.victim_key("new", 2) == "flood"
    assert shares.victim_key("new", 4) == "fair", "by slots, for want of credit"


def test_a_key_without_credit_is_not_in_debt() -> None:
    shares = shares_of("even", "fair")
    shares._credit["even"] = 0.0
    assert shares.victim_key("new", 1) is None
    shares._credit["even"] = -1.0
    assert shares.victim_key("new", 1) == "even"


def test_a_newcomer_in_debt_displaces_by_slots_alone() -> None:
    shares = in_debt("fair")
    assert shares.victim_key("flood", 1) is None
    shares.reserve_slots("fair", 3)
    assert shares.victim_key("flood", 1) == "fair"


@pytest.mark.parametrize(
    ("wanted", "budget", "granted"),
    [
        ({"a": 50, "b": 50}, 60, {"a": 50, "b": 10}),  # both have credit: the first of equals
        ({"flood": 50, "a": 50}, 60, {"flood": 10, "a": 50}),
        ({"flood": 50, "a": 50, "b": 7}, 60, {"flood": 3, "a": 50, "b": 7}),
        ({"flood": 50}, 20, {"flood": 20}),
        ({"flood": 50, "a": 0}, 20, {"flood": 20, "a": 0}),
        ({"flood": 5, "a": 5}, 20, {"flood": 5, "a": 5}),
        ({"flood": 5, "a": 5}, 0, {"flood": 0, "a": 0}),
    ],
)
def test_credit_is_served_first(
    wanted: dict[str, int], budget: int, granted: dict[str, int]
) -> None:
    assert in_debt("a", "b").split(wanted, budget) == granted


def test_of_equal_credit_the_key_with_fewer_slots_is_served_first() -> None:
    shares = shares_of("early", "late")
    shares.reserve_slots("early", 1)
    assert shares.split({"early": 90, "late": 90}, 100) == {"early": 10, "late": 90}


def test_a_key_gets_no_more_on_credit_than_it_has() -> None:
    shares = shares_of("a", "b")
    shares._credit = {"a": -20.0, "b": 20.0}
    # 20 on credit to b, then by turns of 16: a, b, a.
    assert shares.split({"a": 100, "b": 100}, 60) == {"a": 24, "b": 36}


def test_turns_are_worth_sixteen_tokens_times_the_weight_and_go_on_where_they_stopped() -> None:
    shares = DeficitRoundRobin({"double": 2.0, "tiny": 0.01}, 100)
    for key in ("a", "double", "tiny"):
        shares.reserve_slots(key, 1)
        shares._credit[key] = -1.0  # nothing on credit
    wanted = {"a": 1000, "double": 1000, "tiny": 1000}
    assert shares.split(wanted, 16 + 32 + 1) == {"a": 16, "double": 32, "tiny": 1}
    assert shares.split(wanted, 20) == {"a": 16, "double": 4, "tiny": 0}
    assert shares.split(wanted, 1) == {"a": 0, "double": 0, "tiny": 1}
    assert shares.split({"double": 1000}, 8) == {"double": 8}


# ---- queues


def test_a_queue_is_in_order_of_rank_and_counts_what_is_asked() -> None:
    engine = new_engine(max_batch_size=1)
    for first, priority in enumerate((1, 0, 2)):
        engine.add_request([first] * (first + 1), greedy(10), key="a", priority=priority)
    engine.add_request([9], greedy(5), key="b")
    waiting = engine._scheduler.waiting
    assert isinstance(waiting, WaitingQueues)
    assert [sequence.tokens[0] for sequence in waiting.queue("a")] == [1, 0, 2]
    assert [sequence.tokens[0] for sequence in waiting] == [1, 0, 2, 9]
    assert (len(waiting), waiting.keys, waiting.num_tokens) == (4, ["a", "b"], 11 + 12 + 13 + 6)
    waiting.remove("a", waiting.queue("a")[1])
    assert [sequence.tokens[0] for sequence in waiting.queue("a")] == [1, 2]
    assert waiting.num_tokens == 12 + 13 + 6
    waiting.remove("b", waiting.queue("b")[0])
    assert (waiting.keys, waiting.queue("b")) == (["a"], [])


# ---- splitting a step


@dataclass(eq=False)
class Stub:
    """What the budget reads of a sequence."""

    key: str
    num_remaining: int
    num_computed: int = 0
    last_step: int = 0
    num_steps: int = 0


def split(
    *ready: Stub,
    limit: int = 100,
    shares: DeficitRoundRobin | None = None,
    model: StepTimeModel | None = None,
    **settings: Any,
) -> tuple[list[int], list[int]]:
    """Which of the sequences decode, and the chunk that each gets."""
    decodes: Any = [stub for stub in ready if stub.num_remaining == 1]
    prompts: Any = [stub for stub in ready if stub.num_remaining > 1]
    if shares is None:
        shares = shares_of(*{stub.key for stub in ready})
    config = EngineConfig(max_step_tokens=100, **settings)
    budget = StepBudget(config, Pacer(config, model or StepTimeModel()), shares)
    context = sum(stub.num_computed for stub in decodes)
    grants: Any = budget.split(Ready(decodes, prompts, context), limit)
    assert all(stub in prompts for stub in grants.chunks)
    return (
        [ready.index(stub) for stub in grants.decodes],
        [grants.chunks.get(stub, 0) for stub in ready],
    )


def test_one_keys_prompts_get_what_decodes_leave_in_order() -> None:
    found = split(Stub("a", 70), Stub("a", 1), Stub("a", 50), Stub("a", 1), Stub("a", 10))
    assert found == ([1, 3], [70, 0, 28, 0, 0])


def test_the_limit_on_tokens_bounds_the_step() -> None:
    assert split(Stub("a", 70), Stub("a", 1), limit=20) == ([1], [19, 0])


def test_without_chunks_the_first_prompt_that_does_not_fit_ends_the_step() -> None:
    prompts = [Stub("a", 60), Stub("a", 50), Stub("a", 10)]
    assert split(*prompts, chunking=False) == ([], [60, 0, 0])
    assert split(Stub("a", 1), Stub("a", 99), chunking=False) == ([0], [0, 99])
    assert split(Stub("a", 1), Stub("a", 100), chunking=False) == ([], [0, 100]), "it runs alone"


def test_two_keys_that_fit_get_what_they_want() -> None:
    assert split(Stub("a", 40), Stub("b", 30), Stub("a", 1)) == ([2], [40, 30, 0])


def test_of_two_keys_the_one_in_debt_gets_a_third_of_the_headroom() -> None:
    shares = in_debt("a")
    assert split(Stub("flood", 90), Stub("a", 40), shares=shares) == ([], [20, 40])
    assert split(Stub("flood", 90), Stub("a", 39), shares=shares) == ([], [21, 39]), "rounded up"
    decodes = [Stub("flood", 1) for _ in range(10)]
    assert split(Stub("flood", 90), *decodes, shares=shares)[1][0] == 30


def test_a_key_that_wants_more_than_its_share_of_a_shared_step_is_cut() -> None:
    shares = in_debt("a", "b")
    found = split(Stub("flood", 90), Stub("a", 80), Stub("b", 50), shares=shares)
    assert found == ([], [0, 80, 20])


def test_decodes_of_keys_in_credit_come_before_anything_else_few_first() -> None:
    shares = in_debt("a", "b")
    ready = [*[Stub("flood", 1) for _ in range(3)], *[Stub("a", 1) for _ in range(3)]]
    ready += [Stub("b", 1), Stub("b", 1)]
    assert split(*ready, shares=shares, limit=4) == ([3, 4, 6, 7], [0] * 8)
    assert split(*ready, shares=shares, limit=2) == ([6, 7], [0] * 8)
    assert split(*ready, shares=shares, limit=6) == ([0, 3, 4, 5, 6, 7], [0] * 8)


def test_within_a_key_the_decode_that_waited_longest_comes_first() -> None:
    shares = in_debt("a")
    waited = [(7, 1), (5, 9), (5, 2), (6, 1)]
    ready = [Stub("a", 1, last_step=step, num_steps=rows) for step, rows in waited]
    ready += [Stub("flood", 1)]
    assert split(*ready, shares=shares, limit=1)[0] == [2]
    assert split(*ready, shares=shares, limit=2)[0] == [1, 2]
    assert split(*ready, shares=shares, limit=3)[0] == [1, 2, 3]


def test_decodes_of_a_key_in_debt_come_before_its_prompts() -> None:
    shares = in_debt("a")
    ready = [Stub("flood", 50), Stub("flood", 1, last_step=9), Stub("flood", 1, last_step=8)]
    found = split(*ready, Stub("a", 98), shares=shares)
    assert found == ([1, 2], [0, 0, 0, 98])
    found = split(*ready, Stub("a", 90), shares=shares)
    assert found == ([1, 2], [3, 0, 0, 90])


def knows(a: float, b: float, c: float) -> StepTimeModel:
    """A model of step times that has learned these costs."""
    model = StepTimeModel()
    for number in range(1, 90):
        tokens, context = number * 37 % 89, number * 53 % 97 * 100
        model.observe(tokens, context, a + b * tokens + c * context)
    return model


def test_a_shared_step_stays_within_the_latency_bound_of_protected_decodes() -> None:
    shares = in_debt("a")
    model = knows(0.005, 0.0005, 0.0)  # 15 ms: 20 tokens, the decode among them
    found = split(Stub("a", 1), Stub("flood", 90), shares=shares, model=model)
    assert found == ([0], [0, pytest.approx(19, abs=1)])
    both = split(Stub("a", 1), Stub("flood", 90), Stub("a", 60), shares=shares, model=model)
    assert both[1][1] == 0
    assert both[1][2] == pytest.approx(49, abs=1), "30 ms for prompts of keys in credit"
    small = split(Stub("a", 1), Stub("flood", 90), Stub("a", 5), shares=shares, model=model)
    assert small[1][1:] == [pytest.approx(14, abs=1), 5]


def test_decodes_of_a_key_in_debt_are_not_protected() -> None:
    shares = in_debt("a")
    model = knows(0.005, 0.0005, 0.0)
    assert split(Stub("flood", 1), Stub("a", 90), shares=shares, model=model) == ([0], [0, 90])


def test_contexts_of_other_keys_count_against_the_bound() -> None:
    shares = in_debt("a")
    model = knows(0.005, 0.0005, 0.00001)  # 100 positions cost two tokens
    found = split(Stub("a", 1, 200), Stub("flood", 90, 300), shares=shares, model=model)
    assert found == ([0], [0, pytest.approx(19 - 4 - 6, abs=1)])


def test_under_a_target_the_context_of_a_row_takes_tokens_from_the_budget() -> None:
    model = knows(0.001, 0.0005, 0.00001)
    prompts = [Stub("a", 30, 500), Stub("a", 60, 1000)]  # the contexts cost 10 and 20 tokens
    chunks = split(*prompts, model=model, slo_itl_ms=41.7)[1]  # 78 tokens
    assert chunks == [30, pytest.approx(18, abs=2)]
    first = split(Stub("a", 60, 50_000), model=model, slo_itl_ms=41.7)[1]
    assert first == [16], "the smallest chunk, however long its context"


def test_under_a_target_contexts_count_between_keys_as_well() -> None:
    model = knows(0.001, 0.0005, 0.00001)
    shares = in_debt("a")
    ready = [Stub("a", 30, 500), Stub("flood", 90, 500)]
    chunks = split(*ready, model=model, shares=shares, slo_itl_ms=41.7)[1]
    assert chunks == [pytest.approx(20, abs=1), pytest.approx(38, abs=2)]


def test_between_keys_a_row_whose_context_costs_all_gets_one_token() -> None:
    model = knows(0.001, 0.0005, 0.00001)
    ready = [Stub("a", 30, 50_000), Stub("flood", 90, 500)]
    chunks = split(*ready, model=model, shares=in_debt("a"), slo_itl_ms=41.7)[1]
    assert chunks[0] == 1


def test_between_keys_without_chunks_a_prompt_that_does_not_fit_ends_its_keys_part() -> None:
    ready = [Stub("a", 70), Stub("a", 40), Stub("a", 5), Stub("flood", 20), Stub("flood", 20)]
    assert split(*ready, shares=in_debt("a"), chunking=False)[1] == [70, 0, 0, 0, 0]


def test_between_keys_the_context_of_decodes_is_not_charged_twice() -> None:
    model = knows(0.001, 0.0005, 0.00001)
    ready = [Stub("flood", 1, 2000), Stub("flood", 1, 2000), Stub("a", 98)]
    decodes, chunks = split(*ready, model=model, shares=in_debt("a"), slo_itl_ms=10_000.0, limit=99)
    assert (decodes, chunks) == ([0], [0, 0, 98])
    decodes, _ = split(*ready, model=model, shares=in_debt("a"), slo_itl_ms=10_000.0, limit=100)
    assert decodes == [0, 1]
    shares = in_debt("a")
    ready = [Stub("flood", 1, 2000), Stub("flood", 1, 2000), Stub("flood", 90), Stub("a", 60)]
    decodes, chunks = split(*ready, model=model, shares=shares, slo_itl_ms=10_000.0)
    assert (decodes, chunks) == ([0, 1], [0, 0, 38, 60])


def test_decodes_and_prompts_together_make_a_step_contended() -> None:
    ready = [*[Stub("flood", 1) for _ in range(5)], Stub("a", 97)]
    assert split(*ready, shares=in_debt("a")) == ([0, 1, 2], [0, 0, 0, 0, 0, 97])


def test_decodes_come_first_on_any_credit() -> None:
    shares = in_debt("a", "b")
    shares._credit |= {"a": 0.9, "b": 0.5}
    ready = [Stub("a", 1), Stub("a", 1), Stub("a", 1), Stub("b", 1), Stub("b", 1)]
    assert split(*ready, shares=shares, limit=2)[0] == [3, 4], "keys with few decodes first"


@pytest.mark.parametrize(("credit", "num_tokens"), [(0.5, 60), (0.0, 34), (-1.0, 34)])
def test_any_credit_is_credit(credit: float, num_tokens: int) -> None:
    shares = in_debt("a")
    shares._credit["a"] = credit
    chunks = split(Stub("flood", 90), Stub("a", 40), shares=shares)[1]
    assert sum(chunks) == num_tokens
