"""The facts `quire doctor` shows: processor, memory, GPUs, versions, executors, cache."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.executors.cpu import has_native_module, units
from quire.llm.assembly import DEVICES, EXECUTORS
from quire.llm.cpu_assembly import UNIT_VARIABLE, chosen_unit, num_threads
from quire.llm.cuda_assembly import why_no_gpu
from quire.llm.machine import available_memory, cgroup_cores, total_memory, usable_cores
from quire.loader.defaults import DEFAULT_MODELS, cache_folder
from quire.model.isolated import probe

Facts = dict[str, Any]  # in JSON's types

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


def diagnose() -> Facts:
    facts: Facts = {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "memory": {"total": total_memory(), "available": available_memory()},
        "gpus": _gpus(),
        "versions": _versions(),
        "executors": _executors(),
        "cpu_kernels": _cpu_kernels(),
        "cache": _cache(),
        "isolation": _isolation(),
    }
    facts["advice"] = _advice(facts)
    return facts


def _cpu() -> Facts:
    fields = _cpuinfo(Path("/proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "name": fields.get("model name") or platform.processor() or None,
        "architecture": platform.machine(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "quota": cgroup_cores(),
    }


def _cpuinfo(path: Path) -> dict[str, str]:
    """What the system says of its first processor."""
    try:
        lines = path.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpus() -> list[Facts]:
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


def _executors() -> Facts:
    known = [device for device in DEVICES if device != "auto"]
    states = {name: EXECUTORS[name] for name in known}
    if not has_native_module():
        states["cpu"] = "its native module is not built"
    reason = why_no_gpu()
    if reason is not None:
        states["cuda"] += f" ({reason})"
        return {"known": states, "picked": "cpu" if has_native_module() else "reference"}
    return {"known": states, "picked": "cuda"}


def _cpu_kernels() -> Facts | None:
    """Which of the CPU executor's kernels run, on how many threads; None where it is not built."""
    if not has_native_module():
        return None
    try:
        picked = chosen_unit() or units()[-1]
    except ConfigError:
        picked = None  # the environment asks for what is not there: see the advice
    return {"unit": picked, "units": units(), "threads": num_threads(None)}


def _cache() -> Facts:
    folder = cache_folder()
    return {
        "folder": str(folder),
        "models": {
            name: (folder / model.file_name).is_file() for name, model in DEFAULT_MODELS.items()
        },
    }


def _isolation() -> Facts:
    """What is taken from the process that reads a model file first."""
    verdict = probe()
    return {"in_force": list(verdict.in_force), "why_not": verdict.why_not}


def _advice(facts: Facts) -> list[str]:
    lines = []
    kernels = facts["cpu_kernels"]
    if kernels is None:
        lines.append(
            "the CPU executor's native module is not built: install quire with a C++ compiler at "
            "hand, or run `make native` in a checkout"
        )
    elif kernels["unit"] is None:
        runs = ", ".join(kernels["units"])
        lines.append(f"{UNIT_VARIABLE} names kernels that do not run here: there are {runs}")
    elif kernels["units"] == ["portable"]:
        lines.append("this CPU has no AVX2: the CPU executor runs its portable kernels, slowly")
    available = facts["memory"]["available"]
    if available is not None and available < _SMALL_MEMORY:
        lines.append("less than 1 GiB of memory is available: give --kv-memory a small size")
    if not all(facts["cache"]["models"].values()) and importlib.util.find_spec("pip") is None:
        lines.append("this Python has no pip, which quire pull needs: python -m ensurepip")
    if not facts["isolation"]["in_force"]:
        reason = facts["isolation"]["why_not"]
        lines.append(f"model files are read without a process of their own: {reason}")
    elif "seccomp" not in facts["isolation"]["in_force"]:
        lines.append(
            "this system has no seccomp to lend: model files are read first in a process with "
            "limits, but not cut off from the network"
        )
    if not _is_writable(Path(facts["cache"]["folder"])):
        lines.append("the cache folder cannot be written: set QUIRE_CACHE to one that can")
    return lines


def _is_writable(folder: Path) -> bool:
    """Whether files can be put there, making it if need be."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return existing.is_dir() and os.access(existing, os.W_OK)
