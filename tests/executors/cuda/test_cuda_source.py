"""Kernels in CUDA C++: the cache of what was compiled, and calls that fail. Nothing is launched."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from triton.runtime.cache import FileCacheManager

from quire.executors.cuda import compiling, cuda_source
from quire.executors.cuda.cuda_source import CudaError, cached_cubin


class FakeCompiler:
    version = "fake 1.0"

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.count = 0

    def compile(self, source: str, file_name: str) -> bytes:
        self.count += 1
        if self.error is not None:
            raise CudaError(self.error)
        return b"cubin of " + source.encode()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_kernel_is_compiled_once(cache: Path) -> None:
    compiler = FakeCompiler()
    first = cached_cubin("a", "a.cu", compiler)
    assert first == cached_cubin("a", "a.cu", compiler) == b"cubin of a"
    assert compiler.count == 1
    [stored] = [path for path in cache.rglob("*") if path.is_file()]
    assert stored.read_bytes().endswith(first)


@pytest.mark.parametrize("other", ["source", "version", "options"])
def test_another_source_compiler_or_option_is_another_kernel(
    other: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler()
    cached_cubin("a", "a.cu", compiler)
    if other == "version":
        compiler.version = "fake 1.1"
    if other == "options":
        monkeypatch.setattr(cuda_source, "OPTIONS", (*cuda_source.OPTIONS, "-G"))
    cached_cubin("b" if other == "source" else "a", "a.cu", compiler)
    assert compiler.count == 2


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 60])
def test_a_damaged_file_is_compiled_again(damage: bytes, cache: Path) -> None:
    compiler = FakeCompiler()
    cubin = cached_cubin("a", "a.cu", compiler)
    [stored] = [path for path in cache.rglob("*") if path.is_file()]
    whole = stored.read_bytes()
    stored.write_bytes(damage)
    assert cached_cubin("a", "a.cu", compiler) == cubin
    assert compiler.count == 2
    assert stored.read_bytes() == whole
    assert [path for path in cache.rglob("*") if path.is_file()] == [stored]


def test_what_does_not_compile_leaves_no_file(cache: Path) -> None:
    with pytest.raises(CudaError, match="no such instruction"):
        cached_cubin("a", "a.cu", FakeCompiler("no such instruction"))
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("fails", ["__init__", "put", "get_file"])
def test_a_cache_that_cannot_be_used_is_none(
    fails: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(FileCacheManager, fails, fail)
    compiler = FakeCompiler()
    assert cached_cubin("a", "a.cu", compiler) == cached_cubin("a", "a.cu", compiler)
    assert compiler.count == 2


def test_a_file_that_is_removed_meanwhile_is_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler()
    monkeypatch.setattr(FileCacheManager, "get_file", lambda *_: str(cache / "gone"))
    assert cached_cubin("a", "a.cu", compiler) == b"cubin of a"


def test_a_compiler_whose_second_library_cannot_be_loaded_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).touch()
    opened: list[str] = []

    def load(name: str) -> object:
        opened.append(Path(name).name)
        if name != str(folder / "libnvrtc.so.13"):
            raise OSError("invalid ELF header")
        return object()

    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(CudaError, match="is not found"):
        cuda_source.Nvrtc()
    assert opened[:2] == ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"]


def test_a_call_that_fails_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(result: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0

    driver = SimpleNamespace(
        cuModuleLoadData=lambda *_: 201, cuGetErrorName=describe, cuGetErrorString=lambda *_: 1
    )
    monkeypatch.setattr(cuda_source, "_driver", lambda: driver)
    with pytest.raises(
        CudaError, match=r"^cuModuleLoadData failed: CUDA_ERROR_INVALID_CONTEXT \(201\)$"
    ):
        cuda_source._call("cuModuleLoadData")


def test_what_compiles_beside_others_is_compiled_once_for_a_key() -> None:
    seen: list[str] = []
    assert not compiling.compiles_together("a", lambda: seen.append("launched"))
    with compiling.compiled_together():
        for key in ("a", "b", "a"):
            assert compiling.compiles_together(key, lambda key=key: seen.append(key))  # type: ignore[misc]
    assert sorted(seen) == ["a", "b"]
