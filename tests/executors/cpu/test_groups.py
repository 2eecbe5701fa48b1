"""Windows on the CPU: blocks out of the window are given back, written over, and no bit changes."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drawn_families import CASES, in_its_context, write_drawn
from tests.executors.cpu.running import opened
from tests.executors.poisoned import outputs
from tests.executors.reference.plans import row, run
from tests.fixture_files import fixture_file

from quire.core.config import EngineConfig
from quire.core.plan import NO_BLOCK, BlockCopy, StepPlan
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.worker import CancelFlag, RowResults
from quire.model.features import unsupported
from quire.model.kv_layout import KVLayout, grouped, kv_bytes_in_block, one_group
from quire.model.loading import Model, load_model

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, logprobs=1, ignore_eos=True)
SHARED = tuple(5 + 3 * n % 40 for n in range(33))
REQUESTS = [
    ((*SHARED, 3), GREEDY),
    ((*SHARED, 4, 5, 6), replace(GREEDY, temperature=1.2, seed=5, n=2)),
    ((7, 8), replace(GREEDY, max_tokens=50)),
    (SHARED[:32], replace(GREEDY, prompt_logprobs=0)),
]
CONFIGS = [
    EngineConfig(max_batch_size=5, max_step_tokens=11, plan_ahead=False, prefix_reuse=False),
    EngineConfig(max_batch_size=5, max_step_tokens=64, plan_ahead=True),
]


class PoisonedExecutor(CpuExecutor):
    """Before each step every block that nobody uses is filled with NaN."""

    engine: Engine | None = None
    layout: KVLayout
    is_int8: bool
    num_poisoned = 0

    def _run(self, plan: StepPlan, flag: CancelFlag) -> RowResults:
        assert self.engine is not None
        per_token = self.layout.slot_sizes(self._spec, lambda part: part.num_kv_elements)
        sizes = [BLOCK_SIZE * count * (1 if self.is_int8 else 2) for count in per_token]
        firsts = [self.capacity.num_blocks * sum(sizes[:slot]) for slot in range(len(sizes))]
        start = self._decoder.cache_address - firsts[self.layout.slots[0]]
        if not self.engine.config.plan_ahead:  # else blocks are taken while this step runs
            for block in list(self.engine.cache.pool._empty):
                self.num_poisoned += 1
                for first, size in zip(firsts, sizes, strict=True):
                    ctypes.memset(start + first + block * size, 0xFF, size)
        return super()._run(plan, flag)


def new_executor(
    model: Model, layout: KVLayout, num_blocks: int, **options: Any
) -> PoisonedExecutor:
    executor = PoisonedExecutor(
        model,
        num_blocks=num_blocks,
        threads=Threads(2, may_spin=False),
        layout=layout,
        prefault_bytes=0,
        **options,
    )
    executor.layout = layout
    executor.is_int8 = options.get("kv_int8", False)
    return executor


def windowed_models(folder: Path) -> Iterator[tuple[str, Model]]:
    with load_model(fixture_file("tiny/Q4_K_M.gguf")) as model:
        layers = list(model.spec.layers)
        for index in range(1, len(layers)):
            layers[index] = replace(
                layers[index], mixer=replace(layers[index].attention, window=5 * index)
            )
        yield "tiny", replace(model, spec=replace(model.spec, layers=tuple(layers)))
    for case in CASES:
        with load_model(write_drawn(case, folder / case)) as model:
            if any(model.spec.windows) and not unsupported(model.spec, "cpu"):
                yield case, in_its_context(case, model)


@pytest.mark.parametrize("kv_int8", [False, True])
def test_blocks_out_of_the_window_are_written_over_and_no_bit_changes(
    kv_int8: bool, tmp_path: Path
) -> None:
    compared = set()
    for case, model in windowed_models(tmp_path):
        whole = new_executor(model, one_group(model.spec), 40, kv_int8=kv_int8)
        expected = outputs(whole, CONFIGS[0], REQUESTS)
        layout = grouped(model.spec, BLOCK_SIZE)
        assert any(window is not None for window in layout.windows), case
        for config in CONFIGS:
            # So few that sequences are pre-empted.
            executor = new_executor(model, layout, 8 * len(layout.windows), kv_int8=kv_int8)
            assert outputs(executor, config, REQUESTS) == expected, case
            assert executor.num_poisoned > 0 or config.plan_ahead
            executor.close()
        whole.close()
        compared.add(case)
    assert {"tiny", "ministral", "phi3", "gemma3", "gemma4"} <= compared


def test_memory_is_that_of_the_layout(tmp_path: Path) -> None:
    for _, model in windowed_models(tmp_path):
        for is_int8 in (False, True):
            layout = grouped(model.spec, BLOCK_SIZE)
            executor = new_executor(model, layout, 10, kv_int8=is_int8)
            per_token = kv_bytes_in_block(model.spec, layout, is_int8)
            assert executor.memory_bytes["kv"] == 10 * BLOCK_SIZE * per_token
            executor.close()


def test_rows_whose_tables_lack_what_they_see_are_refused(tmp_path: Path) -> None:
    path = write_drawn("ministral", tmp_path)
    with load_model(path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
    assert layout.windows[0] is None
    with opened(path, num_blocks=16, layout=layout) as executor:
        whole = (0, 1, 2)
        seen = (NO_BLOCK, NO_BLOCK, 5)  # position 40 sees 32 to 40
        (fine,) = run(executor, row([1], whole, start=40, other_tables=(seen,) * 3))
        assert fine.fault is None
        for tables, message in [
            (((NO_BLOCK, 4, NO_BLOCK),) * 3, "block -1 of the block table"),
            ((seen, seen), "has 3 block tables for 4 groups"),
            ((seen, seen, seen, seen), "has 5 block tables for 4 groups"),
            ((seen, seen, (4, 5)), "2 blocks do not hold 41 positions"),
            ((seen, seen, 7), "other_tables is not of its type"),
        ]:
            (refused,) = run(executor, row([1], whole, start=40, other_tables=tables))
            assert refused.fault is not None and message in refused.fault
        (refused,) = run(executor, row([1], seen, start=40, other_tables=(seen,) * 3))
        assert refused.fault is not None and "block -1" in refused.fault


def test_a_copy_takes_every_slot_and_the_scales_along(tmp_path: Path) -> None:
    """A block copied for one group is as good as the one it came from."""
    path = write_drawn("phi3", tmp_path)
    with load_model(path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
    with opened(path, num_blocks=8, layout=layout, kv_int8=True) as executor:
        (first,) = run(executor, row(range(1, 20), (0, 1)))
        (again,) = run(executor, row([19], (0, 1), start=18))
        (copied,) = run(
            executor, row([19], (5, 6), start=18), copies=[BlockCopy(0, 5), BlockCopy(1, 6)]
        )
    assert copied.fault is None
    assert np.array_equal(copied.logits, again.logits)
    assert np.array_equal(first.logits[-1:], again.logits)
