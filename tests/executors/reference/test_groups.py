"""Models with windows under the engine: blocks out of the window are given back, written over, and
no bit of any output changes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.drawn_families import CASES, in_its_context, write_drawn
from tests.executors.poisoned import outputs

from quire.core.config import EngineConfig
from quire.core.plan import StepPlan
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.reference import ReferenceExecutor, kv_token_bytes
from quire.executors.worker import CancelFlag, RowResults
from quire.model.kv_layout import grouped, one_group
from quire.model.loading import Model, load_model

BLOCK_SIZE = 2  # smaller than any of these models' windows
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1, ignore_eos=True)
SHARED = tuple(range(20, 44))
REQUESTS = [
    ((*SHARED, 3), GREEDY),
    ((*SHARED, 4, 5, 6), replace(GREEDY, temperature=1.2, seed=5, n=2)),
    ((7, 8), replace(GREEDY, max_tokens=30)),
    (SHARED, replace(GREEDY, prompt_logprobs=0)),
]


class PoisonedExecutor(ReferenceExecutor):
    """Before each step every block that nobody uses is filled with NaN."""

    engine: Engine | None = None
    num_poisoned = 0
    most_used = 0

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        assert self.engine is not None
        pool = self.engine.cache.pool
        self.most_used = max(self.most_used, pool.num_used)
        empty = list(pool._empty)
        self.num_poisoned += len(empty)
        for array in self._blocks._memory:
            array[empty] = np.nan
        return super()._run(plan, flag)


def windowed_cases(folder: Path) -> Iterator[tuple[str, Model]]:
    for case in CASES:
        with load_model(write_drawn(case, folder / case)) as model:
            if any(window is not None for window in model.spec.windows):
                yield case, in_its_context(case, model)


SETTINGS = [
    EngineConfig(max_batch_size=5, max_step_tokens=7, plan_ahead=False, prefix_reuse=False),
    EngineConfig(max_batch_size=5, max_step_tokens=64, plan_ahead=False),
]


def test_blocks_out_of_the_window_are_written_over_and_no_bit_changes(tmp_path: Path) -> None:
    compared = set()
    for case, model in windowed_cases(tmp_path):
        whole = PoisonedExecutor(model, num_blocks=400, block_size=BLOCK_SIZE)
        expected = outputs(whole, SETTINGS[0], REQUESTS)
        layout = grouped(model.spec, BLOCK_SIZE)
        assert any(window is not None for window in layout.windows), case
        for config in SETTINGS:
            executor = PoisonedExecutor(
                model, num_blocks=60 * len(layout.windows), block_size=BLOCK_SIZE, layout=layout
            )
            assert outputs(executor, config, REQUESTS) == expected, case
            assert executor.num_poisoned > 0
            executor.close()
        whole.close()
        compared.add(case)
    assert {"gemma3", "gpt-oss", "gemma4", "llama4", "cohere2"} <= compared


@pytest.mark.parametrize("case", ["gemma3", "gemma4"])
def test_memory_is_that_of_the_layout(case: str, tmp_path: Path) -> None:
    with load_model(write_drawn(case, tmp_path)) as model:
        spec = model.spec
        for layout in (one_group(spec), grouped(spec, BLOCK_SIZE)):
            executor = ReferenceExecutor(model, num_blocks=10, block_size=BLOCK_SIZE, layout=layout)
            held = executor.memory_bytes["kv"]
            executor.close()
            assert held == 10 * BLOCK_SIZE * kv_token_bytes(spec, layout)
        assert kv_token_bytes(spec, one_group(spec)) == 4 * spec.num_kv_elements
