"""Models whose layers keep states, under the engine: in any company, chunks, forks, prefixes and
after pre-emption no bit of any output changes, though slots are written over once they are free."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.drawn_families import CASES, DRAWN, drawn_config, write_drawn
from tests.executors.poisoned import outputs

from quire.core.config import EngineConfig
from quire.core.plan import StepPlan
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.reference import ReferenceExecutor
from quire.executors.worker import CancelFlag, RowResults
from quire.model.config_spec import spec_from_config
from quire.model.loading import Model, load_model

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1, ignore_eos=True)
SHARED = tuple(range(20, 59))
REQUESTS = [
    ((*SHARED, 3), GREEDY),
    ((*SHARED, 4, 5, 6), replace(GREEDY, temperature=1.2, seed=5, n=3)),
    ((7, 8), replace(GREEDY, max_tokens=40)),
    (SHARED, replace(GREEDY, prompt_logprobs=0)),
    (SHARED[:32], GREEDY),
    ((9,), replace(GREEDY, n=2)),
]
ALONE = EngineConfig(max_batch_size=3, max_step_tokens=64, plan_ahead=False, prefix_reuse=False)
SETTINGS = {
    "small chunks": EngineConfig(max_batch_size=7, max_step_tokens=7, plan_ahead=False),
    "prefixes": EngineConfig(max_batch_size=7, max_step_tokens=64, plan_ahead=False),
    "steps ahead": EngineConfig(max_batch_size=4, max_step_tokens=20, plan_ahead=True),
}
FEW = 7  # blocks
PART = ("granitehybrid", "lfm2", "qwen35", "mamba")  # one of each kind
# Beside attention, in layers of one half alone, and without attention.
OTHERS = ("falcon-h1", "nemotron_h_moe", "mamba2", "jamba")


class PoisonedExecutor(ReferenceExecutor):
    """Before each step every slot that nobody uses is filled with NaN."""

    engine: Engine | None = None
    num_poisoned = 0

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        assert self.engine is not None
        empty = list(self.engine.cache.state_pool._empty)
        self.num_poisoned += len(empty)
        for array in self._cache.states._layers.values():
            array[empty] = np.nan
        return super()._run(plan, flag)


class RunningCpuExecutor(CpuExecutor):
    engine: Engine | None = None


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def executor_of(
    device: str, model: Model, num_blocks: int
) -> PoisonedExecutor | RunningCpuExecutor:
    if device == "reference":
        return PoisonedExecutor(model, num_blocks=num_blocks, num_states=28)
    threads = Threads(2, may_spin=False)
    return RunningCpuExecutor(model, num_blocks=num_blocks, threads=threads, num_states=28)


def alone(device: str, model: Model) -> list[object]:
    found = []
    for request in REQUESTS:
        executor = executor_of(device, model, num_blocks=100)
        found += outputs(executor, ALONE, [request])
        executor.close()
    return found


@pytest.mark.parametrize("case", [*PART, *OTHERS])
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_company_changes_no_bit(device: str, case: str, folder: Path) -> None:
    with load_model(write_drawn(case, folder / case)) as model:
        assert model.spec.states
        expected = alone(device, model)
        num_preemptions = 0
        for name, config in SETTINGS.items():
            # With few blocks some are pre-empted, and computed again from nothing.
            for num_blocks in (100, FEW):
                executor = executor_of(device, model, num_blocks)
                assert outputs(executor, config, REQUESTS) == expected, (name, num_blocks)
                assert executor.engine is not None
                stats = executor.engine.stats
                num_preemptions += stats.num_preemptions
                assert name == "small chunks" or num_blocks == FEW or stats.prefix_hits > 0
                if isinstance(executor, PoisonedExecutor):
                    assert executor.num_poisoned > 0
                executor.close()
        assert num_preemptions > 0


@pytest.mark.parametrize(
    "case", ["lfm2", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2", "falcon_mamba"]
)
def test_rows_that_nobody_asked_for_are_dropped_behind_the_last_state(
    case: str, folder: Path
) -> None:
    """It may be in the last layer, beside attention, or before layers without any."""
    with load_model(write_drawn(case, folder / case)) as model:
        golden = np.load(DRAWN / case / "golden.npz")
        tokens = tuple(golden["tokens"].tolist())
        expected = golden["logits"].argmax(axis=1)
        for device in ("reference", "cpu"):
            executor = executor_of(device, model, 100)
            requests = [(tokens[: 9 + 7 * n], replace(GREEDY, max_tokens=1)) for n in range(4)]
            for n, found in enumerate(outputs(executor, SETTINGS["prefixes"], requests)):
                assert found[0][0][0] == [expected[8 + 7 * n]]  # type: ignore[index]
            executor.close()


def test_every_kind_of_state_is_run() -> None:
    kinds, compared = set(), set()
    for case in CASES:
        own = {part.kind for part in spec_from_config(drawn_config(case)).states.values()}
        kinds |= own
        compared |= own if case in PART else set()
    assert kinds == compared
