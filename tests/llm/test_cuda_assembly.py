"""Asking for a GPU where there is none says what is missing."""

import importlib.util
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.executors.cpu import has_native_module
from quire.llm import assembly, cuda_assembly
from quire.llm.assembly import Assembly, Options, assemble
from quire.llm.cuda_assembly import USUAL_STEP_TOKENS
from quire.llm.kv_memory import MemoryPlan


def test_what_is_missing_is_named() -> None:
    if importlib.util.find_spec("torch") is None:
        message = r"needs torch and triton: install quire\[cuda\]"
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
    assert config.max_step_tokens == USUAL_STEP_TOKENS
    assert Options(device="cuda", max_batch_size=4096).engine_config().max_step_tokens == 4096


def auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, reason: str | None, **given: Any) -> Assembly:
    """What "auto" makes of a machine on which a GPU can run the model, or cannot for a reason."""
    monkeypatch.setattr(cuda_assembly, "why_not", lambda _: reason)

    def on_gpu(model: Any, *sizes: Any, **more: Any) -> Any:
        del sizes, more
        return assembly._reference_executor(model, 64), MemoryPlan(1, 1 << 12, 1 << 30)

    monkeypatch.setattr(cuda_assembly, "cuda_executor", on_gpu)
    return assemble("dummy:tiny", Options(device="auto", max_batch_size=2, **given))


def test_auto_takes_a_gpu_that_can_run_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = auto_on_a_gpu(monkeypatch, None)
    assert found.options.executor == "cuda"
    assert found.options.engine_config().plan_ahead


def test_auto_says_why_it_leaves_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for has_driver in (True, False):  # without one there is no GPU to speak of
        monkeypatch.setattr(cuda_assembly, "has_driver", lambda found=has_driver: found)
        found = auto_on_a_gpu(monkeypatch, "its weights have no room")
        found.executor.close()
        assert found.options.executor in ("cpu", "reference")
        told = capsys.readouterr().err
        assert ("executor: its weights have no room" in told) == has_driver


def test_auto_stays_where_options_of_the_processor_are_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_native_module():
        pytest.skip("the native module is not built")
    found = auto_on_a_gpu(monkeypatch, None, threads=1)
    found.executor.close()
    assert found.options.executor == "cpu"


def test_without_invariance_auto_means_a_gpu() -> None:
    assert Options(device="auto", invariant=False).executor == "cuda"


def test_no_driver_is_found_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(cuda_assembly, "_DRIVER", "no such library")
    assert cuda_assembly.why_no_gpu() == "there is no NVIDIA driver"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cuda_assembly, "has_driver", lambda: True)
    assert cuda_assembly.why_no_gpu() == "torch is not installed"
