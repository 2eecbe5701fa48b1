"""Compiling kernels side by side: for the thread that asks for it alone."""

import threading
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import JITFunction
from triton.runtime._async_compile import active_mode

from quire.executors.cuda.compiling import compiled_together


def test_launches_of_other_threads_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(warmup)

    monkeypatch.setattr(JITFunction, "run", run)

    def launch() -> None:
        JITFunction.run(None, grid=(1,), warmup=False)

    with compiled_together():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    launch()
    assert seen == [True, False, False]


def test_a_kernel_that_does_not_compile_leaves_nothing_behind() -> None:
    run = JITFunction.run

    def fail() -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"), compiled_together():
        mode = active_mode.get()
        assert mode is not None
        mode.submit("a kernel", fail, lambda kernel: None)
    assert active_mode.get() is None
    assert JITFunction.run is run
    with compiled_together():
        pass
