"""For tests that run kernels on a CPU: Triton's interpreter must have been chosen beforehand."""

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("runs with TRITON_INTERPRET=1: make test-cuda", allow_module_level=True)
