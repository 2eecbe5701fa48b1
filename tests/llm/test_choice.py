"""The device that "auto" takes: measured at the first start, known at the second."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ExecutorError
from quire.executors.base import Executor
from quire.llm import choice, devices
from quire.llm.choice import Chosen, load_chosen
from quire.llm.crossover import StepSeconds, remember
from quire.llm.devices import (
    CPU,
    DEVICES,
    EITHER,
    CudaDevice,
    EitherDevice,
    Loaded,
    Options,
    choose_device,
    device_of,
)
from quire.model.loading import Model, load_model

pytestmark = pytest.mark.skipif(
    CPU.why_unavailable() is not None, reason="the native module is not built"
)
FAST_CPU = {"cpu": {1: 0.001, 64: 0.004}, "cuda": {1: 0.002, 64: 0.005}}
FAST_GPU = {"cpu": {1: 0.001, 64: 0.040}, "cuda": {1: 0.0011, 64: 0.002}}
SMALL_CPU = {"cpu": {1: 0.001, 2: 0.001, 64: 0.040}, "cuda": {1: 0.002, 2: 0.002, 64: 0.002}}


class Gpu(CudaDevice):
    """A GPU that computes on the CPU."""

    def __init__(self) -> None:
        self.loads: list[Options] = []
        self.unloads = 0
        self.refusal: str | None = None

    def why_unavailable(self) -> str | None:
        return None

    def why_unsupported(self, _model: Model, /) -> str | None:
        return self.refusal

    @property
    def hardware(self) -> str:
        return "a GPU"

    def load(self, model: Model, options: Options) -> Loaded:
        self.loads.append(options)
        return CPU.load(model, Options(device="cpu", kv_memory="4MiB"))

    def unload(self, executor: Executor) -> None:
        self.unloads += 1
        executor.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    made = Gpu()
    monkeypatch.setitem(DEVICES, "cuda", made)
    return made


@pytest.fixture
def model() -> Iterator[Model]:
    with load_model("dummy:tiny") as found:
        yield found


class Timer:
    """In place of step_seconds: the times that a test wants, the CPU's first."""

    def __init__(self, times: Mapping[str, StepSeconds]) -> None:
        self.times = [times["cpu"], times["cuda"]]
        self.calls = 0

    def __call__(self, executor: Executor, **_: Any) -> StepSeconds:
        assert executor.capacity.num_blocks >= 64 * 8 or self.calls
        self.calls += 1
        return self.times[self.calls - 1]


def started(model: Model, said: list[str] | None = None, **options: Any) -> Chosen:
    given = Options(**{"kv_memory": "4MiB", **options})
    found = load_chosen(given, model, print if said is None else said.append)
    found.loaded.executor.close()
    return found


def test_the_first_start_measures_both_devices_and_the_second_neither(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Timer(FAST_CPU)
    monkeypatch.setattr(choice, "step_seconds", timer)
    said: list[str] = []
    found = started(model, said)
    assert timer.calls == 2 and "once for this model and machine" in said[0]
    assert found.options.device == "cpu"
    assert found.reason == "a step of 64 took 5.0 ms on the GPU and 4.0 ms on the CPU"
    assert (len(gpu.loads), gpu.unloads) == (1, 1)
    assert started(model).options.device == "cpu"
    assert (timer.calls, len(gpu.loads)) == (2, 1)


def test_the_gpu_is_loaded_once_where_it_is_the_better_one(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "step_seconds", Timer(FAST_GPU))
    found = started(model)
    assert found.options.device == "cuda" and "40.0 ms on the CPU" in found.reason
    assert (len(gpu.loads), gpu.unloads) == (1, 0)


def test_real_steps_are_measured(gpu: Gpu, model: Model) -> None:
    del gpu
    assert "on the GPU and" in started(model).reason  # both compute on the CPU here


def test_where_the_cpu_cannot_be_measured_the_gpu_is_taken(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> StepSeconds:
        raise ExecutorError("no step")

    monkeypatch.setattr(choice, "step_seconds", fails)
    found = started(model)
    assert (found.options.device, len(gpu.loads)) == ("cuda", 1)
    assert found.reason == "the CPU could not be measured: no step"


def test_a_choice_that_cannot_be_kept_is_not_made(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next start, or a worker that takes over, would come to another one."""
    del gpu
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(choice, "step_seconds", Timer(FAST_CPU))
    found = started(model)
    assert found.options.device == "cuda"
    assert "could not be kept" in found.reason


def test_nothing_is_measured_where_one_device_cannot_run_the_model(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Timer(FAST_CPU)
    monkeypatch.setattr(choice, "step_seconds", timer)
    gpu.refusal = "the weights do not fit"
    found = started(model)
    assert (found.options.device, found.reason) == ("cpu", "the weights do not fit")
    assert timer.calls == 0
    gpu.refusal = None
    monkeypatch.setattr(devices, "available_memory", lambda: 1 << 20)
    decided = choose_device(Options(), model, print)
    assert decided.options.device == "cuda" and not decided.may_measure
    assert "the CPU cannot run the model: the model's weights" in decided.reason


@pytest.mark.parametrize("given", [{"device": "cuda"}, {"device": "cpu"}, {"gpu_memory": "1GiB"}])
def test_nothing_is_measured_for_a_device_that_is_asked_for(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    del gpu
    timer = Timer(FAST_CPU)
    monkeypatch.setattr(choice, "step_seconds", timer)
    started(model, **given)
    assert timer.calls == 0


def test_without_invariance_small_batches_begin_on_the_cpu(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the number of sequences that was measured, never by a constant."""

    def on_gpu(self: object, model: Model, options: Options, num_blocks: int) -> Executor:
        assert not options.invariant
        return CPU.make_executor(model, num_blocks, Options(device="cpu"))

    monkeypatch.setattr(EitherDevice, "_make_executor", on_gpu)
    monkeypatch.setattr(choice, "step_seconds", Timer(SMALL_CPU))
    found = started(model, invariant=False)
    assert device_of(found.options) is EITHER
    assert found.options.cpu_batch == 2
    assert "sequences that begin in steps of up to 2 run on the CPU" in found.reason
    assert (len(gpu.loads), gpu.unloads) == (1, 1)
    assert started(model, invariant=False, engine={"prefix_reuse": True}).options.cpu_batch is None
    assert started(model).options.cpu_batch is None  # all requests alike: the law


def test_a_model_on_either_device_generates(
    gpu: Gpu, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_gpu(self: object, model: Model, options: Options, num_blocks: int) -> Executor:
        return CPU.make_executor(model, num_blocks, Options(device="cpu"))

    monkeypatch.setattr(EitherDevice, "_make_executor", on_gpu)
    remember(model, gpu.hardware, SMALL_CPU)
    prompts = [[1, 2, n] for n in range(6)]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with LLM("dummy:tiny", invariant=False, kv_memory="4MiB", max_batch_size=8) as llm:
        found = llm.generate(prompts, params)
        alone = llm.generate(prompts[:1], params)
    with LLM("dummy:tiny", device="cpu", kv_memory="4MiB", max_batch_size=8) as llm:
        expected = llm.generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
    assert alone[0].completions[0].token_ids == expected[0].completions[0].token_ids
