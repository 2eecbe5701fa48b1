"""Kernels in CUDA C++: compiled by NVRTC, kept in Triton's cache, launched by the driver.

What Triton does for its own kernels, for a source file that Triton cannot express. NVRTC comes with
torch's packages; nothing else of the CUDA toolkit is needed.
"""

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from triton.runtime.cache import get_cache_manager

from quire.core.errors import ExecutorError

# Sums are fused into multiply-adds where the source says so, and nowhere else.
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false")
_KERNELS = Path(__file__).with_name("kernels")
_CACHED = "kernel.cubin"
_DIGEST_BYTES = 32

# Of the driver's header.
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTION_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64


class CudaError(ExecutorError):
    """A call of NVRTC or of the driver failed, or the library is missing."""


# ---- compiling


class Compiler(Protocol):
    @property
    def version(self) -> str: ...

    def compile(self, source: str, file_name: str) -> bytes:
        """A cubin, or a CudaError."""


class Nvrtc:
    """The compiler that torch brings."""

    def __init__(self) -> None:
        self._library = _find_nvrtc()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"NVRTC {major.value}.{minor.value}"

    def compile(self, source: str, file_name: str) -> bytes:
        program = ctypes.c_void_p()
        text, name = source.encode(), file_name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
            result = self._library.nvrtcCompileProgram(program, len(OPTIONS), options)
            if result != 0:
                log = self._bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
                why = self._reason(result)
                raise CudaError(f"{self.version} does not compile {file_name}: {why}\n{log}")
            return self._bytes(program, "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        self._call(function, program, found)
        return found.raw

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise CudaError(f"{function} failed: {self._reason(result)}")

    def _reason(self, result: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return f"{describe(result).decode()} ({result})"


def _find_nvrtc() -> ctypes.CDLL:
    """From the packages beside torch, else what is loaded or in the loader's path; of torch's own
    CUDA version first."""
    own = int((torch.version.cuda or "13").split(".")[0])
    packages = Path(torch.__file__).parents[1] / "nvidia"
    names = [f"libnvrtc.so.{major}" for major in dict.fromkeys((own, 13, 12))]
    for name in names:
        for file in (*sorted(packages.glob(f"*/lib/{name}")), Path(name)):
            try:
                library = ctypes.CDLL(str(file))
                # It opens its second library by name alone, which finds it where it is loaded.
                if file.is_absolute():
                    for builtins in file.parent.glob("libnvrtc-builtins.so.*"):
                        ctypes.CDLL(str(builtins))
            except OSError:
                continue
            return library
    raise CudaError(f"{names[0]} is not found")


def cached_cubin(source: str, file_name: str, compiler: Compiler) -> bytes:
    """From the cache, or compiled and stored there: the file's digest, then the cubin. A file that
    is not what was written is compiled again, and what cannot be stored is compiled at each start.
    """
    key = repr((source, OPTIONS, compiler.version)).encode()
    cache, stored = None, b""
    with suppress(OSError):  # a folder that cannot be made, a file that another process removes
        cache = get_cache_manager(hashlib.sha256(key).hexdigest())
        path = cache.get_file(_CACHED)
        stored = b"" if path is None else Path(path).read_bytes()
    digest, cubin = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if stored and hashlib.sha256(cubin).digest() == digest:
        return cubin
    cubin = compiler.compile(source, file_name)
    if cache is not None:
        with suppress(OSError):
            cache.put(hashlib.sha256(cubin).digest() + cubin, _CACHED)  # replaces the file at once
    return cubin


# ---- the driver


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the driver's library cannot be loaded: {error}") from error


def _call(function: str, *arguments: object) -> None:
    driver = _driver()
    result = getattr(driver, function)(*arguments)
    if result != 0:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(name))
        driver.cuGetErrorString(result, ctypes.byref(text))
        words = [part.decode() for part in (name.value, text.value) if part is not None]
        raise CudaError(f"{function} failed: {': '.join(words) or 'unknown error'} ({result})")


class TensorMap:
    """A TMA descriptor: `array`, of bfloat16 rows, is copied in boxes of so many rows and columns,
    swizzled over 128 bytes."""

    def __init__(self, array: Any, box: Sequence[int]) -> None:
        size = _TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self._memory)
        self.address = -(-start // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        rows, columns = array.shape
        _call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(self.address),
            _BFLOAT16,
            2,
            ctypes.c_void_p(array.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(array.stride(0) * array.element_size()),
            (ctypes.c_uint32 * 2)(box[1], box[0]),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128B,
            _PROMOTION_256B,
            0,
        )


@functools.cache
def _loaded(cubin: bytes, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """The function of a cubin in the device's context; never unloaded."""
    del device  # a key of the cache: the context is the current one
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), cubin)
    _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
    return function


class CudaKernel:
    """One function of a file in kernels/, which is compiled once and loaded where it is first
    launched."""

    def __init__(
        self, file_name: str, name: str, num_threads: int, shared_bytes: int, compiler: Compiler
    ) -> None:
        self._file_name = file_name
        self._name = name
        self._num_threads = num_threads
        self._shared_bytes = shared_bytes
        self._compiler = compiler
        self._cubin: bytes | None = None

    def compile(self) -> bytes:
        if self._cubin is None:
            source = (_KERNELS / self._file_name).read_text()
            self._cubin = cached_cubin(source, self._file_name, self._compiler)
        return self._cubin

    def load(self) -> ctypes.c_void_p:
        """Not while a graph is captured."""
        device = torch.cuda.current_device()
        return _loaded(self.compile(), self._name, self._shared_bytes, device)

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[TensorMap | ctypes.Structure],
        *,
        is_dependent: bool,
    ) -> None:
        """On the current stream. A dependent launch may start before the previous kernel ends."""
        function = self.load()
        dependent = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        dependent.value[0] = 1
        configuration = _Configuration(
            grid=grid,
            block=(self._num_threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=ctypes.pointer(dependent),
            num_attributes=int(is_dependent),
        )
        addresses = [
            given.address if isinstance(given, TensorMap) else ctypes.addressof(given)
            for given in arguments
        ]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        _call("cuLaunchKernelEx", ctypes.byref(configuration), function, pointers, None)
