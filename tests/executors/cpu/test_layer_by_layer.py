"""Steps that are computed one layer at a time, with hidden states given and taken in between."""

from typing import Any

import numpy as np
import pytest
from tests.executors.cpu import running
from tests.executors.reference.plans import row

from quire.core.errors import StepCancelledError
from quire.core.plan import BlockCopy, StepPlan
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.worker import CancelFlag

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def layer_by_layer(executor: CpuExecutor, plan: StepPlan, width: int) -> Any:
    rows = executor.step_rows(plan)
    tokens = sum(len(one.tokens) for one in plan.sequences)
    hidden = np.zeros((tokens, width), np.float32)
    for layer in range(executor._spec.num_layers):
        executor.run_layer(rows, layer, hidden, CancelFlag())
    return rows.faults, hidden


@pytest.mark.parametrize("model", ["dummy:tiny", "dummy:tiny-moe:Q4_K_M"])
def test_a_layer_at_a_time_gives_the_hidden_states_of_all_at_once(model: str) -> None:
    with running.opened(model) as executor:
        size = executor._spec.hidden_size
        first, second = row(PROMPT, (0,)), row(PROMPT[:5], (1,), sequence_id=1)
        outputs = executor.run_layers(StepPlan(0, (first, second)), CancelFlag())
        expected = np.concatenate(
            [output.hidden for output in outputs if output.hidden is not None]
        )
        again = StepPlan(1, (first._replace(block_table=(2,)), second._replace(block_table=(3,))))
        faults, found = layer_by_layer(executor, again, size + 7)
        assert faults == ["", ""]
        np.testing.assert_array_equal(found[:, :size], expected)
        assert not found[:, size:].any()


def test_blocks_are_copied_and_later_rows_attend_to_them() -> None:
    with running.opened("dummy:tiny") as executor:
        size = executor._spec.hidden_size
        layer_by_layer(executor, StepPlan(0, (row(PROMPT, (0,)),)), size)
        _, expected = layer_by_layer(executor, StepPlan(1, (row((7,), (0,), start=8),)), size)
        copied = StepPlan(2, (row((7,), (3,), start=8),), (BlockCopy(0, 3),))
        np.testing.assert_array_equal(layer_by_layer(executor, copied, size)[1], expected)


def test_a_row_that_cannot_be_computed_faults_alone() -> None:
    with running.opened("dummy:tiny") as executor:
        size = executor._spec.hidden_size
        _, expected = layer_by_layer(executor, StepPlan(0, (row(PROMPT, (0,)),)), size)
        rows = (row((1, 1 << 20), (1,), sequence_id=1), row(PROMPT, (2,)))
        faults, found = layer_by_layer(executor, StepPlan(1, rows), size)
        assert "outside the vocabulary" in faults[0] and faults[1] == ""
        np.testing.assert_array_equal(found[:8], expected)


def test_memory_that_does_not_hold_the_rows_is_refused() -> None:
    flag = CancelFlag()
    with running.opened("dummy:tiny") as executor, running.opened("dummy:tiny") as other:
        size = executor._spec.hidden_size
        rows = executor.step_rows(StepPlan(0, (row(PROMPT, (0,)),)))
        for shape in ((7, size), (8, size - 1)):
            with pytest.raises(ValueError, match="of hidden states"):
                executor.run_layer(rows, 0, np.zeros(shape, np.float32), flag)
        hidden = np.zeros((8, size), np.float32)
        with pytest.raises(ValueError, match="of the decoder that they were made by"):
            other.run_layer(rows, 0, hidden, flag)
        with pytest.raises(ValueError, match="a layer"):
            executor.run_layer(rows, executor._spec.num_layers, hidden, flag)
        flag.set()
        with pytest.raises(StepCancelledError):
            executor.run_layer(rows, 0, hidden, flag)
