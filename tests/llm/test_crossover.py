"""Crossover: measured steps, what is kept of them, and the device that they choose."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.executors.cpu import running

from quire.llm import crossover
from quire.llm.crossover import better_device, remember, remembered, small_batch, step_seconds
from quire.llm.devices import CPU, DEVICES, CudaDevice, Options, resolve_auto
from quire.model.loading import Model, load_model

FAST_CPU = {"cpu": {1: 0.001, 8: 0.004, 64: 0.040}, "cuda": {1: 0.002, 8: 0.0044, 64: 0.006}}


class Gpu(CudaDevice):
    def why_unavailable(self) -> str | None:
        return None

    def why_unsupported(self, _model: Model, /) -> str | None:
        return None

    @property
    def hardware(self) -> str:
        return "a GPU"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("num_sequences", "device"),
    [(1, "cpu"), (2, "cuda"), (8, "cuda"), (9, "cuda"), (64, "cuda"), (500, "cuda")],
)
def test_the_cpu_is_taken_where_it_is_faster_by_far(num_sequences: int, device: str) -> None:
    """8 sequences are 1.1 times as fast on the CPU, which is not enough."""
    assert better_device(FAST_CPU, num_sequences) == device


def test_without_a_common_measurement_the_gpu_is_taken() -> None:
    assert better_device({"cpu": {1: 0.1}, "cuda": {}}, 1) == "cuda"


def test_steps_are_measured_as_far_as_there_are_blocks() -> None:
    ticks = iter(range(1000))
    with running.opened("dummy:tiny", num_blocks=20) as executor:
        found = step_seconds(executor, repeats=2, clock=lambda: float(next(ticks)))
    assert found == {1: 1.0, 2: 1.0}  # each sequence has 8 blocks


def test_steps_are_measured_as_far_as_there_are_states() -> None:
    ticks = iter(range(1000))
    with running.opened("dummy:tiny-qwen35", num_blocks=512) as executor:
        assert executor.capacity.num_states
        found = step_seconds(executor, repeats=2, clock=lambda: float(next(ticks)))
    counts = [count for count in crossover.COUNTS if 2 * count <= executor.capacity.num_states]
    assert found == dict.fromkeys(counts, 1.0)


def test_no_larger_step_is_begun_with_once_the_time_is_over() -> None:
    ticks = iter(range(1000))
    with running.opened("dummy:tiny", num_blocks=512) as executor:
        found = step_seconds(
            executor, repeats=1, clock=lambda: 3.0 * next(ticks), most_seconds=20.0
        )
    assert sorted(found) == [1, 2]


@pytest.mark.parametrize(
    ("cpu", "most"),
    [({1: 1.0, 2: 1.0, 4: 9.0}, 2), ({1: 9.0, 2: 1.0}, 0), ({1: 1.0, 2: 1.9, 4: 1.0}, 1)],
)
def test_small_batches_are_those_up_to_which_the_cpu_is_always_faster(
    cpu: crossover.StepSeconds, most: int
) -> None:
    assert small_batch({"cpu": cpu, "cuda": {1: 2.0, 2: 2.0, 4: 2.0}}) == most


def test_what_was_measured_is_found_again_for_the_same_model_and_machine(cache: Path) -> None:
    with load_model("dummy:tiny") as model, load_model("dummy:tiny:Q8_0") as other:
        assert remembered(model, "a GPU") is None
        kept = remember(model, "a GPU", FAST_CPU)
        assert kept.is_relative_to(cache)
        assert remembered(model, "a GPU") == FAST_CPU
        assert remembered(model, "another GPU") is None
        assert remembered(other, "a GPU") is None
        kept.write_text('{"seconds": {"cpu": [1]}}')
        assert remembered(model, "a GPU") is None


@pytest.mark.skipif(CPU.why_unavailable() is not None, reason="the native module is not built")
def test_auto_obeys_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Gpu())
    said: list[str] = []

    def chosen(max_batch_size: int, device: str = "auto", invariant: bool = True) -> str:
        options = Options(device=device, max_batch_size=max_batch_size, invariant=invariant)
        return resolve_auto(options, model, said.append).device

    with load_model("dummy:tiny") as model:
        assert chosen(1) == "cuda"  # nothing is known
        remember(model, "a GPU", FAST_CPU)
        assert chosen(1) == "cpu"
        assert "a step of 1 took 2.0 ms on the GPU and 1.0 ms on the CPU" in said[-1]
        assert chosen(64) == "cuda"
        assert chosen(1, device="cuda") == "cuda"
        assert chosen(1, invariant=False) == "cuda"


def test_the_curves_of_both_devices_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    from quire_bench.charts import svg
    from quire_bench.commands.crossover import chart_of

    times: Mapping[str, crossover.StepSeconds] = FAST_CPU
    drawn = svg(chart_of("a model", times))
    assert drawn.startswith("<svg") or "<svg" in drawn[:500]
    assert [len(series.points) for series in chart_of("a model", times).series] == [3, 3]
