"""Each sequence on one of two executors: what it reads is where it was written."""

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from tests.engine.machine import EngineMachine, configs, groups, pools
from tests.engine.simulated import END_TOKEN, finish, solo, tokens_of

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.plan import BlockCopy, StepPlan
from quire.core.sampling import SamplingParams
from quire.core.windows import Windows
from quire.engine import Engine
from quire.executors.either import EitherExecutor
from quire.executors.fake import FakeExecutor

OPTIONS = settings(max_examples=60, phases=[Phase.generate])  # shrinking takes minutes


def sides(**options: Any) -> tuple[FakeExecutor, FakeExecutor]:
    small = FakeExecutor(keep_plans=True, **options)
    return small, FakeExecutor(clock=small.clock, keep_plans=True, **options)


def engine_of(small: FakeExecutor, large: FakeExecutor, most: int, **config: Any) -> Engine:
    settings = EngineConfig(prefix_reuse=False, **config)
    either = EitherExecutor(small, large, most, clock=small.clock)
    return Engine(either, settings, clock=small.clock, end_token_ids=[END_TOKEN])


def rows_of(executor: FakeExecutor) -> set[int]:
    return {row.sequence_id for plan in executor.plans for row in plan.sequences}


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_small_batches_begin_on_one_executor_and_large_ones_on_the_other(plan_ahead: bool) -> None:
    small, large = sides()
    engine = engine_of(small, large, most=2, plan_ahead=plan_ahead)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    prompts = {engine.add_request([5, 6, n], params).id: (5, 6, n) for n in range(2)}
    for _ in range(3):
        engine.step()
    assert rows_of(small) and not rows_of(large)
    prompts |= {engine.add_request([5, 6, n], params).id: (5, 6, n) for n in range(2, 8)}
    found = finish(engine)
    for name, prompt in prompts.items():
        assert tokens_of(found[name]) == solo(prompt, params)
    assert len(rows_of(small)) == 2 and len(rows_of(large)) == 6
    assert not rows_of(small) & rows_of(large)  # a sequence stays where it began
    last = engine.add_request([9], params)
    assert tokens_of(finish(engine)[last.id]) == solo([9], params)
    assert len(rows_of(small)) == 3


class EitherMachine(EngineMachine):
    """Everything that can happen to an engine, over two executors."""

    @initialize(config=configs, pool=pools, windows=groups, most=st.integers(1, 4))
    def begin(
        self, config: dict[str, Any], pool: dict[str, int], windows: Windows, most: int
    ) -> None:
        super().begin({**config, "prefix_reuse": False}, pool, windows)
        one = self.executor
        other = FakeExecutor(
            clock=one.clock,
            block_size=one.block_size,
            num_blocks=one.num_blocks,
            vocabulary_size=one.vocabulary_size,
            max_context=one.max_context,
            windows=windows,
            faults=one.faults,
        )
        either = EitherExecutor(one, other, most, clock=one.clock)
        self.engine = Engine(either, self.engine.config, clock=one.clock, end_token_ids=[END_TOKEN])


def test_whatever_happens_a_request_reads_its_own_keys() -> None:
    run_state_machine_as_test(EitherMachine, settings=OPTIONS)


def test_a_copy_is_made_on_the_side_of_its_source() -> None:
    small, large = sides(num_blocks=8)
    either = EitherExecutor(small, large, 0, clock=small.clock)
    either.collect(either.submit(StepPlan(0, (), (BlockCopy(0, 1),))))
    assert not small.plans and large.plans[0].copies == (BlockCopy(0, 1),)


def test_executors_of_different_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="need the same num_blocks, got 8 and 9"):
        EitherExecutor(FakeExecutor(num_blocks=8), FakeExecutor(num_blocks=9), 1)
