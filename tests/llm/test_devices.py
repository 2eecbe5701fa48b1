"""Devices: what "auto" chooses, and what is said of one that is not there."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.drawn_families import write_drawn

from quire.core.errors import ConfigError
from quire.executors.cpu import has_native_module
from quire.llm import choice, devices
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import DEVICES, CudaDevice, Loaded, Options, ReferenceDevice, device_of
from quire.llm.machine import MemoryPlan
from quire.model.loading import Model, load_model


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver before the packages, which are of no use without it."""
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "no such library")
    with pytest.raises(ConfigError, match="there is no NVIDIA driver on this machine: use device"):
        assemble("dummy:tiny", Options(device="cuda"))
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    if importlib.util.find_spec("torch") is None:
        message = r"needs torch and triton \(No module named 'torch'\): pip install 'quire\[cuda\]'"
    else:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        message = "torch finds no NVIDIA GPU"
    with pytest.raises(ConfigError, match=message):
        assemble("dummy:tiny", Options(device="cuda"))


def test_steps_are_large_and_planned_ahead() -> None:
    config = Options(device="cuda", max_batch_size=8).engine_config()
    assert config.plan_ahead
    assert config.max_step_tokens == 2048
    assert Options(device="cuda", max_batch_size=4096).engine_config().max_step_tokens == 4096


class FakeGpu(CudaDevice):
    """A GPU that can run a model, or cannot for a reason."""

    def __init__(self, reason: str | None) -> None:
        self._reason = reason

    def why_unavailable(self) -> str | None:
        return None

    def available_memory(self) -> int | None:
        return None

    def why_unsupported(self, _model: Model, /) -> str | None:
        return self._reason

    @property
    def hardware(self) -> str:
        return "a GPU of tests"

    def load(self, model: Model, options: Options) -> Loaded:
        executor = ReferenceDevice().make_executor(model, 64, options)
        return Loaded(executor, MemoryPlan(1, 1 << 12, 1 << 30))


def auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, reason: str | None, **given: Any) -> Assembly:
    """What "auto" makes of a machine with such a GPU."""
    monkeypatch.setitem(DEVICES, "cuda", FakeGpu(reason))
    monkeypatch.setattr(choice, "step_seconds", lambda *_, **__: {1: 1.0, 64: 1.0})  # of both
    monkeypatch.setattr(choice, "remember", lambda *_: None)
    monkeypatch.setattr(devices, "remembered", lambda *_: None)
    return assemble("dummy:tiny", Options(device="auto", max_batch_size=2, **given))


def test_auto_takes_a_gpu_that_can_run_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = auto_on_a_gpu(monkeypatch, None)
    assert found.options.device == "cuda"
    assert found.options.engine_config().plan_ahead


def test_auto_says_why_it_leaves_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for has_driver in (True, False):  # without one there is no GPU to speak of
        monkeypatch.setattr(devices, "has_nvidia_driver", lambda found=has_driver: found)
        found = auto_on_a_gpu(monkeypatch, "its weights have no room")
        found.executor.close()
        assert found.options.device in ("cpu", "reference")
        printed = capsys.readouterr().err
        assert ("executor: its weights have no room" in printed) == has_driver


def test_auto_stays_where_options_of_the_processor_are_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_native_module():
        pytest.skip("the native module is not built")
    found = auto_on_a_gpu(monkeypatch, None, threads=1)
    found.executor.close()
    assert found.options.device == "cpu"


def test_auto_takes_a_gpu_for_a_cache_in_bytes_and_says_where_fp8_lacks_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in ("fp8", "int8"):
        found = auto_on_a_gpu(monkeypatch, None, kv_cache_dtype=kind)
        assert found.options.device == "cuda"
    with pytest.raises(ConfigError, match=r"'fp8', which the cpu .* run here: it is too small;"):
        auto_on_a_gpu(monkeypatch, "it is too small", kv_cache_dtype="fp8")
    if has_native_module():
        found = auto_on_a_gpu(monkeypatch, "it is too small", kv_cache_dtype="int8")
        found.executor.close()
        assert found.options.device == "cpu"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_gpus_cache_in_bytes_holds_nearly_twice_as_much(kind: str) -> None:
    with load_model("dummy:llama-1b") as model:
        blocks = {}
        for each in ("auto", kind):
            plan = CudaDevice.memory_plan(FakeGpu(None), model, Options(kv_cache_dtype=each))
            blocks[each] = plan.num_blocks(1 << 30, None)
    assert blocks[kind] == pytest.approx(blocks["auto"] * 128 / 68, rel=0.001)  # heads of 64


def test_without_invariance_auto_means_a_gpu() -> None:
    assert device_of(Options(device="auto", invariant=False)).name == "cuda"


def test_no_driver_is_found_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "no such library")
    assert CudaDevice().why_unavailable() == "there is no NVIDIA driver"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: True)
    assert CudaDevice().why_unavailable() == "torch is not installed"


def test_every_device_is_listed_by_its_name_and_has_defaults_that_an_engine_takes() -> None:
    assert list(DEVICES) == ["cpu", "cuda", "reference"]
    for name, device in DEVICES.items():
        assert device.name == name
        if device.why_unavailable() is None or name == "cuda":
            config = Options(device=name).engine_config()
            assert config.max_step_tokens >= device.engine_defaults.max_step_tokens


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda, reference, got 'tpu'"):
        device_of(Options(device="tpu"))


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [
        ("cuda", {"threads": 2}, "the cuda executor does not compute on threads"),
        ("cuda", {"kv_cache_dtype": "f16"}, "executor keeps keys and values as auto, fp8, int8"),
        ("cpu", {"kv_cache_dtype": "fp8"}, "executor keeps keys and values as auto, f16, int8"),
        ("reference", {"invariant": False}, "the reference executor has one order of summation"),
    ],
)
def test_options_that_a_device_does_not_take_are_refused(
    device: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        device_of(Options(device=device, **given))


def test_a_gpus_memory_is_divided_between_states_and_keys() -> None:
    options = Options(max_batch_size=64, kv_memory="1MiB")
    each = options.engine_config().states_per_sequence
    with load_model("dummy:tiny-qwen35") as model:
        wanted = CudaDevice.memory_plan(FakeGpu(None), model, options)
        assert wanted.state_bytes == 4 * model.spec.num_state_elements
        assert wanted.num_states >= 64 * each
        room = wanted.weights + wanted.workspace + (1 << 20) + 9 * wanted.state_bytes
        gpu = FakeGpu(None)
        gpu.available_memory = lambda: room  # type: ignore[method-assign]
        assert CudaDevice.memory_plan(gpu, model, options).num_states == 9


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_batch_is_as_large_as_there_is_memory_for_its_states(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    device = DEVICES[name]
    if device.why_unavailable() is not None:
        pytest.skip("it is not built")
    options = Options(device=name, max_batch_size=64, threads=1 if device.has_threads else None)
    options = replace(options, kv_memory="1MiB")
    each = options.engine_config().states_per_sequence
    with load_model(write_drawn("qwen35", tmp_path)) as model:
        plan = device.memory_plan(model, options)
        room = plan.weights + plan.workspace + (1 << 20) + (5 * each + 1) * plan.state_bytes
        monkeypatch.setattr(devices, "available_memory", lambda: room)
        devices._warn_once.cache_clear()
        loaded = device.load(model, options)
        device.unload(loaded.executor)
    assert loaded.executor.capacity.num_states == loaded.memory.num_states == 5 * each + 1
    assert options.engine_config().batch_size(loaded.executor.capacity) == 5
    assert (
        "memory for the states of a batch of 5, not of max_batch_size (64)"
        in capsys.readouterr().err
    )


def test_a_gpus_blocks_of_a_model_without_attention_count_as_on_a_cpu(tmp_path: Path) -> None:
    options = Options(max_batch_size=2)
    with load_model(write_drawn("mamba2", tmp_path)) as model:
        found = CudaDevice.memory_plan(FakeGpu(None), model, options)
        usual = DEVICES["reference"].memory_plan(model, options)
    assert found.block_bytes == usual.block_bytes > 0


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_blocks_of_a_model_without_attention_are_numbered_and_take_nothing(
    name: str, tmp_path: Path
) -> None:
    device = DEVICES[name]
    if device.why_unavailable() is not None:
        pytest.skip("it is not built")
    options = Options(device=name, kv_memory="1MiB", max_batch_size=2)
    with load_model(write_drawn("mamba2", tmp_path)) as model:
        plan = device.memory_plan(model, options)
        loaded = device.load(model, options)
        states, held = plan.num_states * plan.state_bytes, loaded.executor.memory_bytes["kv"]
        num_blocks = loaded.executor.capacity.num_blocks
        device.unload(loaded.executor)
    assert plan.kv_per_token == 0 and plan.num_states > 2
    assert num_blocks == (1 << 20) // plan.block_bytes == 256
    assert held == states
