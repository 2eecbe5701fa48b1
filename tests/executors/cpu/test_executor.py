"""What is the CPU executor's own: stopping mid-step, faults in native code, kernels, memory."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.executors.cpu.blocks import UNITS, nmse
from tests.executors.cpu.running import opened
from tests.executors.reference.plans import logits, row, run
from tests.fixture_files import TINY_BITNET_FILES, TINY_FILES, fixture_file
from tests.llm.text_models import write_changed_model

from quire.core.errors import ConfigError, ExecutorError, StepCancelledError, StepTimeoutError
from quire.core.plan import BlockCopy, StepPlan, Want
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu import executor as executor_module
from quire.executors.cpu import lowering
from quire.executors.cpu.lowering import Threads, workspace_bytes
from quire.executors.cpu.native import native
from quire.llm import devices
from quire.llm.devices import CpuDevice, Options
from quire.model.dummy import SHAPES
from quire.model.loading import load_model
from quire.model.spec import Dense

PATH = fixture_file("tiny/Q4_0.gguf")
PROMPT = tuple(range(5, 30))
TABLE = (2, 0)


class HeldUp:
    """A native decoder whose steps begin when they have been cancelled."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.is_running, self._is_cancelled = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def set_cancelled(self, is_cancelled: bool) -> None:
        self._decoder.set_cancelled(is_cancelled)
        if is_cancelled:
            self._is_cancelled.set()

    def step(self, *args: Any) -> Any:
        self.is_running.set()
        assert self._is_cancelled.wait(60)
        return self._decoder.step(*args)


def held_up_in(executor: Any) -> HeldUp:
    executor._decoder = HeldUp(executor._decoder)
    found: HeldUp = executor._decoder
    return found


def test_a_cancelled_step_stops_in_native_code_and_the_next_one_runs() -> None:
    with opened(PATH) as executor:
        expected = logits(executor, row(PROMPT, TABLE))
        rows_before = executor.counters["rows"]
        held_up = held_up_in(executor)
        ticket = executor.submit(StepPlan(1, (row(PROMPT, TABLE),)))
        follower = executor.submit(StepPlan(2, (row(PROMPT, TABLE),)))
        assert held_up.is_running.wait(60)
        with pytest.raises(StepTimeoutError, match="step 1 took over"):
            executor.collect(ticket, timeout_s=0.01)
        executor.cancel(ticket)
        with pytest.raises(StepCancelledError, match="step 1 was cancelled"):
            executor.collect(ticket, timeout_s=60)
        # The step after it is not cancelled with it.
        [result] = executor.collect(follower, timeout_s=60).sequences
        assert result.logits.tobytes() == expected.tobytes()
        assert executor.counters["rows"] == rows_before + len(PROMPT)


def test_a_step_cancelled_before_it_begins_is_not_computed() -> None:
    with opened(PATH) as executor:
        held_up = held_up_in(executor)
        first = executor.submit(StepPlan(1, (row(PROMPT, TABLE),)))
        second = executor.submit(StepPlan(2, (row(PROMPT, TABLE),)))
        assert held_up.is_running.wait(60)
        executor.cancel(second)
        executor.cancel(first)
        for ticket in (first, second):
            with pytest.raises(StepCancelledError):
                executor.collect(ticket, timeout_s=60)
        assert executor.counters["rows"] == 0


def test_what_is_not_finite_fails_its_own_row_and_stays_in_its_blocks(tmp_path: Path) -> None:
    path = write_changed_model(tmp_path / "poisoned.gguf", {"token_embd.weight": (7, np.nan)})
    sound = tuple(token for token in PROMPT if token != 7)
    with opened(path) as executor:
        expected = logits(executor, row(sound, TABLE))
        poisoned, beside = run(
            executor,
            row((1, 2, 7, 3), (5,), sequence_id=1),
            row(sound, TABLE, sequence_id=2),
        )
        assert poisoned.fault == "the hidden state is not finite"
        assert poisoned.logits is None
        assert beside.logits.tobytes() == expected.tobytes()
        # A row that reads that block's keys and values fails too; one that writes it anew does not.
        reader, writer = run(
            executor,
            row((4,), (5,), start=4, sequence_id=3),
            row(sound[:1], (6,), sequence_id=4),
        )
        assert reader.fault == "the hidden state is not finite"
        assert writer.logits.tobytes() == expected[:1].tobytes()
        [anew] = run(executor, row(sound, (5, 6), sequence_id=5))
        assert anew.logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("copy", [BlockCopy(0, 16), BlockCopy(-1, 0), BlockCopy(99, 1)])
def test_copies_outside_the_cache_are_refused(copy: BlockCopy) -> None:
    with opened(PATH) as executor:
        with pytest.raises(ExecutorError, match="but there are 16 blocks"):
            run(executor, row(PROMPT, TABLE), copies=[copy])
        assert run(executor, row(PROMPT, TABLE))[0].fault is None


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q6_K"])
@pytest.mark.parametrize("unit", UNITS)
def test_a_gate_gives_the_same_bits_whether_or_not_it_writes_for_the_next_product(
    mix: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few threads a task of it is a whole block of the next product's activations."""
    monkeypatch.setitem(SHAPES, "wide", replace(SHAPES["tiny"], ffn_size=9 * 256))
    name = Path(f"dummy:wide:{mix}")
    tokens, table = list(range(257)), tuple(range(17))  # more than a gate takes at once
    found, formats = [], []
    for num_threads in (1, 2, 3):
        with load_model(name) as model:
            lowered = lowering._Lowering(
                model.spec, model.tensors, Threads(num_threads, may_spin=False), "", True
            )
            down = lowered._matrices(["blk.0.ffn_down"])[0]
            feed = model.spec.layers[0].feed_forward
            assert isinstance(feed, Dense)
            formats.append(lowered._gated_format(feed, down))
        with opened(name, 17, num_threads, unit=unit) as executor:
            found.append(logits(executor, row(tokens, table)).tobytes())
    assert formats == ["blocks", "blocks", "floats"]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["tiny/Q4_0.gguf", "tiny/Q4_K_M.gguf", "tiny/F16.gguf"])
def test_the_workspace_of_steps_is_about_the_estimate(name: str) -> None:
    tokens = list(range(5, 261))
    with load_model(fixture_file(name)) as model:
        expected = workspace_bytes(model.spec, model.tensors, len(tokens), 512)
    with opened(fixture_file(name)) as executor:
        run(executor, row(tokens, range(16)))
        found = executor.memory_bytes["workspace"]
    assert found == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("name", ["tiny/Q8_0.gguf", "tiny/Q6_K.gguf"])
def test_the_value_projection_alone_has_a_residual_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fixture_file(name)
    exact = np.load(fixture_file("tiny/golden.npz"))
    tokens = exact["tokens"].tolist()
    errors, stored = [], []
    for projections in (lowering.RESIDUAL_PASS, ()):
        monkeypatch.setattr(lowering, "RESIDUAL_PASS", projections)
        with opened(path) as executor:
            found = logits(executor, row(tokens, (9, 2, 14)))
            block = np.frombuffer(executor.cache_block(0, 9), np.uint16)
        errors.append(nmse(found, exact[f"{path.stem}.exact"]))
        stored.append(block.reshape(executor._spec.num_kv_heads, 2, -1))  # keys, values
    assert errors[0] < 0.95 * errors[1]
    assert np.array_equal(stored[0][:, 0], stored[1][:, 0])
    assert not np.array_equal(stored[0][:, 1], stored[1][:, 1])


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("name", [*TINY_FILES, *TINY_BITNET_FILES])
def test_memory_is_the_estimate(name: str, is_int8: bool) -> None:
    with load_model(fixture_file(name)) as model:
        options = Options(kv_cache_dtype="int8" if is_int8 else "f16", threads=1)
        memory = CpuDevice().memory_plan(model, options)
        file_bytes = sum(tensor.nbytes for tensor in model.tensors.values())
    with opened(fixture_file(name), num_blocks=5, kv_int8=is_int8) as executor:
        held = executor.memory_bytes
    assert held["weights"] == memory.weights
    assert held["kv"] == 5 * memory.block_bytes
    growth = 66 / 54 if name.endswith("TQ1_0.gguf") else 1.05
    assert memory.weights <= growth * file_bytes


def test_kernels_are_named_by_unit_and_format_and_counted() -> None:
    for unit in UNITS:
        with opened(fixture_file("tiny/Q4_K_M.gguf"), unit=unit) as executor:
            assert executor.unit == unit
            assert executor.kernels == [f"cpu/{unit}/{name}" for name in ("F32", "Q4_K", "Q6_K")]
            assert executor.fallback is None
            run(executor, row(PROMPT, TABLE, want=Want.SAMPLE))
            counted = executor.counters
            assert (counted["steps"], counted["rows"]) == (1, len(PROMPT))
            # Once the last layer's keys and values are there, only for the row that samples.
            first, second = 256 * 256 + 2 * 128 * 256, 256 * 256 + 3 * 512 * 256
            of_prompt = len(PROMPT) * (2 * first + second)
            assert counted["multiplications"] == of_prompt + second + 512 * 256
            assert 0 < counted["gemm_seconds"] <= counted["seconds"]


def test_native_code_and_the_executors_have_one_block_size() -> None:
    assert native.block_size == BLOCK_SIZE


def test_a_unit_that_does_not_run_here_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="no CPU kernels called 'sse' run on"),
        opened(PATH, unit="sse"),
    ):
        pass
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"), opened(PATH, 0):
        pass


def test_a_processor_without_avx2_runs_portable_kernels_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor_module, "units", lambda: ["portable"])
    devices._warn_once.cache_clear()
    with load_model(PATH) as model:
        for _ in range(2):
            executor: Any = CpuDevice().make_executor(model, 4, Options(threads=1))
            assert executor.unit == "portable"
            assert executor.fallback == "this CPU has no AVX2: the portable kernels run, slowly"
            executor.close()
    assert capsys.readouterr().err == f"quire: {executor.fallback}\n"
