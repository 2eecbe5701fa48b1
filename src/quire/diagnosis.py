"""What this machine offers, which executor quire would take, and advice on what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ConfigError
from quire.executors.cpu import has_native_module, units
from quire.llm.devices import DEVICES, UNIT_VARIABLE, chosen_unit, num_threads
from quire.llm.machine import available_memory, cgroup_cores, total_memory, usable_cores
from quire.loader.defaults import DEFAULT_MODELS, cache_folder
from quire.model.isolated import Verdict, probe

_PACKAGES = ("quire", "numpy", "tokenizers", "jinja2", "torch", "triton")
# The features that kernels of quantised models are written for.
_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")
_GPU_TIMEOUT_S = 10.0
_SMALL_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Processor:
    name: str | None
    architecture: str
    features: list[str]  # those of `_FEATURES` that it has
    cores: int | None
    usable_cores: float
    quota: float | None  # cores that its cgroups allow; None without such a limit


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, within the limits of cgroups; None where the system does not say."""

    total: int | None
    available: int | None


@dataclass(frozen=True, slots=True)
class Executors:
    known: dict[str, str]  # what each is, or why it cannot run here
    picked: str  # by device="auto"


@dataclass(frozen=True, slots=True)
class CpuKernels:
    unit: str | None  # that runs; None where the environment asks for one that cannot
    units: list[str]  # that can run here, the slowest first
    threads: int


@dataclass(frozen=True, slots=True)
class Cache:
    folder: str
    models: dict[str, bool]  # whether each known model is there


@dataclass(frozen=True, slots=True)
class Diagnosis:
    system: str
    cpu: Processor
    memory: Memory
    gpus: list[dict[str, str]]  # nvidia-smi's fields by name
    versions: dict[str, str]
    executors: Executors
    cpu_kernels: CpuKernels | None  # None where the native module is not built
    cache: Cache
    isolation: Verdict  # on a file that is empty: what reading model files is cut off from

    @property
    def advice(self) -> list[str]:
        """What could be better, a sentence each."""
        lines = [*_kernel_advice(self.cpu_kernels)]
        if self.memory.available is not None and self.memory.available < _SMALL_MEMORY:
            lines.append("less than 1 GiB of memory is available: give --kv-memory a small size")
        if not all(self.cache.models.values()) and importlib.util.find_spec("pip") is None:
            lines.append("this Python has no pip, which quire pull needs: python -m ensurepip")
        lines += _isolation_advice(self.isolation)
        if not _is_writable(Path(self.cache.folder)):
            lines.append("the cache folder cannot be written: set QUIRE_CACHE to one that can")
        return lines


def diagnose() -> Diagnosis:
    """Look at this machine; takes about a second."""
    return Diagnosis(
        system=f"{platform.system()} {platform.release()}",
        cpu=_processor(),
        memory=Memory(total_memory(), available_memory()),
        gpus=_gpus(),
        versions=_versions(),
        executors=_executors(),
        cpu_kernels=_cpu_kernels(),
        cache=_cache(),
        isolation=probe(),
    )


def _processor() -> Processor:
    fields = _cpuinfo(Path("/proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(
        name=fields.get("model name") or platform.processor() or None,
        architecture=platform.machine(),
        features=[feature for feature in _FEATURES if feature in flags],
        cores=os.cpu_count(),
        usable_cores=usable_cores(),
        quota=cgroup_cores(),
    )


def _cpuinfo(path: Path) -> dict[str, str]:
    """What the system says of its first processor."""
    try:
        lines = path.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpus() -> list[dict[str, str]]:
    """NVIDIA's GPUs, as its own tool lists them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [{"name": f"nvidia-smi fails: {error}"}]
    rows = (line.split(", ") for line in done.stdout.splitlines() if line.strip())
    names = [field.replace(".", "_") for field in _GPU_FIELDS]
    return [dict(zip(names, row, strict=False)) for row in rows]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _executors() -> Executors:
    known = {device.name: device.description for device in DEVICES.values()}
    reasons = {device.name: device.why_unavailable() for device in DEVICES.values()}
    for name, reason in reasons.items():
        if reason is not None:
            known[name] += f" ({reason})"
    picked = next(name for name in ("cuda", "cpu", "reference") if reasons[name] is None)
    return Executors(known, picked)


def _cpu_kernels() -> CpuKernels | None:
    if not has_native_module():
        return None
    try:
        unit = chosen_unit() or units()[-1]
    except ConfigError:
        unit = None  # the advice says why
    return CpuKernels(unit, units(), threads=num_threads(None))


def _cache() -> Cache:
    folder = cache_folder()
    models = {name: (folder / model.file_name).is_file() for name, model in DEFAULT_MODELS.items()}
    return Cache(str(folder), models)


def _kernel_advice(kernels: CpuKernels | None) -> list[str]:
    if kernels is None:
        return [
            "the CPU executor's native module is not built: install quire with a C++ compiler at "
            "hand, or run `make native` in a checkout"
        ]
    if kernels.unit is None:
        runs = ", ".join(kernels.units)
        return [f"{UNIT_VARIABLE} names kernels that do not run here: there are {runs}"]
    if kernels.units == ["portable"]:
        return ["this CPU has no AVX2: the CPU executor runs its portable kernels, slowly"]
    return []


def _isolation_advice(isolation: Verdict) -> list[str]:
    if not isolation.in_force:
        return [f"model files are read without a process of their own: {isolation.why_not}"]
    if "seccomp" not in isolation.in_force:
        return [
            "this system has no seccomp: model files are read first in a process with "
            "limits, but not cut off from the network"
        ]
    return []


def _is_writable(folder: Path) -> bool:
    """Whether files can be put there, making it if need be."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return existing.is_dir() and os.access(existing, os.W_OK)
