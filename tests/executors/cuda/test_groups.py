"""Windows on CUDA: blocks out of the window are given back, written over, and no bit changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.drawn_families import write_drawn
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.poisoned import outputs
from tests.executors.reference.plans import row, run

from quire.core.config import EngineConfig
from quire.core.plan import NO_BLOCK, BlockCopy, StepPlan, Want
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors.base import BLOCK_SIZE
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.decoder import KVType
from quire.executors.cuda.tickets import CudaTicket
from quire.model.kv_layout import KVLayout, grouped, kv_bytes_in_block, one_group
from quire.model.loading import Model

# Triton's interpreter takes a tenth of a second for a token and layer: few of both here, more of
# them in on_gpu.py.
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, ignore_eos=True)
PROMPT = tuple(5 + 3 * n % 40 for n in range(26))
REQUESTS = [(PROMPT, GREEDY), ((*PROMPT[:17], 3), replace(GREEDY, temperature=1.2, seed=5, n=2))]
WHOLE = EngineConfig(max_batch_size=3, max_step_tokens=32, plan_ahead=False)
CHUNKS = EngineConfig(max_batch_size=3, max_step_tokens=11, plan_ahead=True)


class PoisonedExecutor(CudaExecutor):
    """Before each step every block that nobody uses is filled with NaN."""

    engine: Engine | None = None
    num_poisoned = 0

    def submit(self, plan: StepPlan) -> CudaTicket:
        assert self.engine is not None
        empty = list(self.engine.cache.pool._empty)  # a step is computed when it is submitted
        self.num_poisoned += len(empty)
        for array in self._blocks.arrays:  # a code of 127 is the NaN of e4m3
            array[:, empty] = float("nan") if array.is_floating_point() else 127
        return super().submit(plan)


@contextmanager
def drawn(case: str, folder: Path, layers: list[int]) -> Iterator[Model]:
    """A drawn family of layers like these of its own."""
    with load_in_bfloat(write_drawn(case, folder / case)) as model:
        parts = tuple(model.spec.layers[layer] for layer in layers)
        yield replace(model, spec=replace(model.spec, layers=parts))


def new_executor(
    kind: Any, model: Model, layout: KVLayout, num_blocks: int, kv_type: KVType = "auto"
) -> Any:
    config = CudaConfig(5, 32, num_blocks=num_blocks, device="cpu", kv_type=kv_type)
    executor = kind(model, config, layout=layout)
    executor.warm_up()
    return executor


@pytest.mark.parametrize(
    ("case", "layers", "kv_type"),
    [
        *(("gemma3", [0, 5], kv_type) for kv_type in ("auto", "fp8", "int8")),
        # Groups of other heads, whose slots are the same memory.
        *(("gemma4-experts", [0, 1], kv_type) for kv_type in ("auto", "int8")),
        ("gemma4", [0, 1, 2, 3, 4, 5], "auto"),  # of which three read others' keys and values
        ("llama4", [0, 3], "auto"),  # chunks
    ],
)
def test_blocks_out_of_the_window_are_written_over_and_no_bit_changes(
    case: str, layers: list[int], kv_type: KVType, tmp_path: Path
) -> None:
    with drawn(case, tmp_path, layers) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        assert layout.windows[0] is None and None not in layout.windows[1:]
        num_blocks = 6 * len(layout.windows)
        whole = new_executor(PoisonedExecutor, model, one_group(model.spec), 8, kv_type)
        executor = new_executor(PoisonedExecutor, model, layout, num_blocks, kv_type)
    expected = outputs(whole, WHOLE, REQUESTS)
    assert outputs(executor, CHUNKS, REQUESTS) == expected
    assert executor.num_poisoned > 0


def test_memory_is_that_of_the_layout(tmp_path: Path) -> None:
    with drawn("gemma3", tmp_path, list(range(7))) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        executor = new_executor(CudaExecutor, model, layout, 14)
        per_token = kv_bytes_in_block(model.spec, layout, is_8bit=False)
        assert per_token < kv_bytes_in_block(model.spec, one_group(model.spec), is_8bit=False)
        assert executor.memory_bytes["kv"] == 14 * BLOCK_SIZE * per_token
        assert executor.capacity.windows == layout.windows


def test_a_row_reads_nothing_before_its_windows_and_must_have_the_rest(tmp_path: Path) -> None:
    with drawn("ministral", tmp_path, [0, 1]) as model:
        executor = new_executor(CudaExecutor, model, grouped(model.spec, BLOCK_SIZE), 8)
        assert [window is None for window in executor.capacity.windows] == [True, False]
    whole, other, tokens = (0, 1), (2, 3), [5 + 3 * n % 40 for n in range(26)]
    run(executor, row(tokens[:25], whole, other_tables=(other,), want=Want.NOTHING))
    (first,) = run(executor, row(tokens[25:], whole, start=25, other_tables=(other,)))
    executor._blocks.keys[:, 2] = executor._blocks.values[:, 2] = float("nan")
    seen = (NO_BLOCK, 3)  # position 25 sees 17 to 25
    (again,) = run(executor, row(tokens[25:], whole, start=25, other_tables=(seen,)))
    copied = row(tokens[25:], whole, start=25, other_tables=((NO_BLOCK, 5),))
    (moved,) = run(executor, copied, copies=[BlockCopy(3, 5)])
    for found in (first, again, moved):
        assert found.fault is None and np.array_equal(found.logits, first.logits)
    for tables, message in (
        (((2, NO_BLOCK),), "leaves the 8 blocks"),
        (((2,),), "1 blocks do not hold 26 positions"),
        ((), "the row has 1 block tables for 2 groups"),
    ):
        (refused,) = run(executor, row([1], whole, start=25, other_tables=tables))
        assert refused.fault is not None and message in refused.fault


def test_rows_of_windowed_groups_are_checked_together_and_packed_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with drawn("ministral", tmp_path, [0, 1]) as model:
        executor = new_executor(CudaExecutor, model, grouped(model.spec, BLOCK_SIZE), 12)
    tokens = [5 + 3 * n % 40 for n in range(26)]
    moved = (NO_BLOCK, 3)  # the same table all along would hide what a window leaves
    sent: list[object] = []
    pack = executor._runner.pack

    def noted(*given: Any) -> Any:
        step = pack(*given)
        sent.append((step.shape, step.integers.tolist()))
        return step

    def results() -> list[object]:
        sent.clear()
        executor._samples._next = 0
        found: list[object] = []
        for step, start in enumerate((0, 24, 25)):
            plan = row(
                tokens[start : 26 if start == 25 else 24 + bool(start)],
                (0, 1),
                start=start,
                other_tables=(moved if start == 25 else (2, 3),),
                want=Want.SAMPLE,
            )
            other = row(
                *((7,), (4, 5)),
                start=step,
                other_tables=((6, 7),),
                sequence_id=9,
                want=Want.SAMPLE,
            )
            found += run(executor, plan, other, step_id=step)
        return [*found, list(sent)]

    monkeypatch.setattr(executor._runner, "pack", noted)
    one_by_one = executor._pack_each
    monkeypatch.setattr(executor, "_pack_each", lambda ticket: pytest.fail("rows one by one"))
    together = results()
    monkeypatch.setattr(executor, "_pack_each", one_by_one)
    monkeypatch.setattr(executor, "_sound_rows", lambda rows: None)
    assert results() == together
