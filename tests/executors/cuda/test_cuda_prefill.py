"""kernels/prefill.cu: its machine code, what it takes, and what happens where it cannot run.

nvcc compiles it here, or NVRTC where it is found. Nothing is launched.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.executors.cuda.compiling import SHARED_MEMORY  # noqa: E402
from tests.executors.cuda.test_cuda_source import FakeCompiler  # noqa: E402

from quire.executors.cuda import attention, compiling, cuda_source  # noqa: E402
from quire.executors.cuda.attention import (  # noqa: E402
    AttentionInput,
    CudaPrefill,
    LayerAttention,
    LayerCache,
)
from quire.executors.cuda.cuda_source import CudaError, Nvrtc  # noqa: E402
from quire.executors.cuda.kernels.attention import TokenTiles  # noqa: E402

SOURCE = Path(cuda_source.__file__).with_name("kernels") / CudaPrefill.FILE
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65536 // CudaPrefill.THREADS // 8 * 8  # as many as a program of that size can have


# ---- machine code


def _with_nvcc(target: Path) -> str:
    options = [option.replace("--gpu-architecture=", "-arch=") for option in cuda_source.OPTIONS]
    command = ["nvcc", "-cubin", *options, "-o", str(target), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_the_prefill_kernel_spills_nothing_and_multiplies_without_waiting(
    compiler: str, tmp_path: Path
) -> None:
    cubin = tmp_path / "prefill.cubin"
    if compiler == "nvcc":
        if shutil.which("nvcc") is None:
            pytest.skip("nvcc is not here")
        told = _with_nvcc(cubin)
        assert "C7512" not in told and "serialized" not in told  # products that wait for each other
    else:
        try:
            found = Nvrtc()
        except CudaError as error:
            pytest.skip(str(error))
        cubin.write_bytes(found.compile(SOURCE.read_text(), SOURCE.name))
    report = _told("cuobjdump", "--dump-resource-usage", cubin)
    usage = re.search(r"Function attend:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    assert usage is not None, report
    registers, stack, shared, local = map(int, usage.groups())
    assert (registers, stack, local) == (REGISTERS, 0, 0)
    assert shared + CudaPrefill.SHARED_BYTES <= SHARED_MEMORY
    listing = _told("nvdisasm", cubin)
    products = re.findall(r"HGMMA\.64x128x16\.F32\.BF16 R\d+, (\w+)", listing)
    kinds = [operand == "gdesc" for operand in products]  # queries, or weights in registers
    # Keys before the loop and in it; values in the loop whole and in halves, and behind it.
    assert (kinds.count(True), kinds.count(False)) == (2 * 8, 3 * 8)
    # Each chain of products waits once, and in the loop keys are waited for while values go on.
    assert listing.count("WARPGROUP.DEPBAR") <= 8
    assert all(word in listing for word in ("UTMALDG", "USETMAXREG", "ACQBULK", "PREEXIT"))


def _told(tool: str, *arguments: object) -> str:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_sizes_that_the_launch_repeats_are_those_of_the_source() -> None:
    source = SOURCE.read_text()
    assert f"static_assert(kShared == {CudaPrefill.SHARED_BYTES});" in source
    assert f"constexpr int kThreads = {CudaPrefill.THREADS};" in source
    assert f"constexpr int kDim = {CudaPrefill.HEAD_DIM};" in source
    assert f"constexpr int kBlock = {CudaPrefill.BLOCK_SIZE};" in source
    given = re.search(r"struct Arguments \{(.*?)\};", source, re.DOTALL)
    assert given is not None
    fields = re.findall(r"(\w+);", given[1])
    assert fields == [name for name, *_ in attention._PrefillArguments._fields_]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


# ---- which layers it takes, and what runs where it cannot


def _inputs(
    head_dim: int = 128,
    *,
    queries: str = "bfloat16",
    kept: str = "bfloat16",
    out: str = "float16",
    block_size: int = 16,
    num_kv_heads: int = 2,
) -> tuple[AttentionInput, LayerCache]:
    integers = torch.zeros((5, 512), dtype=torch.int32)
    given = AttentionInput(
        queries=torch.zeros((512, 8, head_dim), dtype=getattr(torch, queries)),
        tables=integers[0],
        tiles=TokenTiles(*integers),
        out=torch.zeros((512, 8 * head_dim), dtype=getattr(torch, out)),
    )
    keys = torch.zeros((4, num_kv_heads, block_size, head_dim), dtype=getattr(torch, kept))
    return given, LayerCache(keys, keys)


PLAIN = LayerAttention(0.1)


@pytest.mark.parametrize(
    ("case", "is_taken"),
    [
        ((_inputs(), PLAIN), True),
        ((_inputs(), LayerAttention(0.1, window=300)), False),
        ((_inputs(), LayerAttention(0.1, soft_cap=30.0)), False),
        ((_inputs(), LayerAttention(0.1, sinks=torch.zeros(8))), False),
        ((_inputs(64), PLAIN), False),
        ((_inputs(queries="float32", kept="float16"), PLAIN), False),
        ((_inputs(kept="int8"), PLAIN), False),
        ((_inputs(out="float32"), PLAIN), False),
        ((_inputs(block_size=32), PLAIN), False),
        ((_inputs(num_kv_heads=1), PLAIN), True),
        ((_inputs(num_kv_heads=8), PLAIN), False),
    ],
)
def test_it_takes_heads_of_128_that_see_everything(case: Any, is_taken: bool) -> None:
    (given, cache), layer = case
    assert CudaPrefill(FakeCompiler()).takes(given, cache, layer) == is_taken


def _attended(kernel: CudaPrefill) -> bool:
    given, cache = _inputs()
    return kernel.attend(given, cache, PLAIN, 16, is_dependent=True)


def test_it_says_why_it_does_not_run_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda="99.0"))
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    kernel = CudaPrefill()
    wanted = "libnvrtc.so.99 is not found: attention of prompts runs in Gluon, slower"
    assert kernel.fallback == wanted
    assert not _attended(kernel)


def _no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_it_says_why_it_does_not_run_where_it_does_not_compile(own_cache: None) -> None:
    compiler = FakeCompiler(
        "NVRTC 12.0 does not compile prefill.cu: NVRTC_ERROR (6)\nline 1\nline 2"
    )
    kernel = CudaPrefill(compiler)
    with compiling.compiled_together():
        for _ in range(3):
            assert _attended(kernel) or kernel.fallback is not None
    assert compiler.count == 1
    assert kernel.fallback == (
        "NVRTC 12.0 does not compile prefill.cu: NVRTC_ERROR (6): attention of prompts runs in "
        "Gluon, slower"
    )
    assert not _attended(kernel)


def test_it_says_why_it_does_not_run_where_it_does_not_load(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CudaError("cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE (200)")

    monkeypatch.setattr(cuda_source, "_loaded", fail)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = CudaPrefill(FakeCompiler())
    assert kernel.fallback is None
    assert not _attended(kernel)
    assert kernel.fallback is not None and kernel.fallback.startswith("cuModuleLoadData failed")


def test_it_is_compiled_beside_the_others_and_then_launched(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    driver = FakeDriver(calls)
    monkeypatch.setattr(cuda_source, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    cuda_source._loaded.cache_clear()
    compiler = FakeCompiler()
    kernel = CudaPrefill(compiler)
    with compiling.compiled_together():
        assert _attended(kernel)
        assert _attended(kernel)
    assert (compiler.count, calls, kernel.fallback) == (1, [], None)
    assert _attended(kernel)
    assert _attended(kernel)
    names = [name for name, _ in calls]
    launch = ["cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled", "cuLaunchKernelEx"]
    load = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"]
    assert names == [*load, *launch, *launch]
    cuda_source._loaded.cache_clear()
    configuration = calls[5][1][0]._obj
    assert tuple(configuration.grid) == (2, 16, 1)
    assert tuple(configuration.block) == (CudaPrefill.THREADS, 1, 1)
    assert (configuration.shared_bytes, configuration.stream) == (CudaPrefill.SHARED_BYTES, 7)
    assert configuration.num_attributes == 1


class FakeDriver:
    """Every call succeeds, and is kept."""

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self._calls.append((name, arguments))
            return 0

        return call
