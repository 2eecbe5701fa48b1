"""What a receipt says of the machine and the software a measurement ran on."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from quire.llm.machine import total_memory, usable_cores
from quire_bench.receipts import Machine

_PACKAGES = ("quire", "numpy", "tokenizers", "safetensors", "torch", "triton", "llama_cpp_python")
_GPU_TIMEOUT_S = 10.0
_RESET_PEAK = "5"  # what Linux takes in clear_refs to forget the largest resident size


def machine() -> Machine:
    """Processor, the cores and memory this process may use, GPU, system."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "gpu": _gpu_name(),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter to speed, those that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str | None:
    matched = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return matched[1].strip() if matched else platform.processor() or None


def _gpu_name() -> str | None:
    """NVIDIA's GPUs, as its own tool names them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # the tool is there, a GPU that answers is not
    return ", ".join(line.strip() for line in done.stdout.splitlines() if line.strip()) or None


def forget_peak_memory() -> bool:
    """Begin anew to watch for the largest resident size; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """The largest resident size of this process, since it was last forgotten."""
    matched = re.search(r"^VmHWM:\s*(\d+) kB$", _text(Path("/proc/self/status")), re.MULTILINE)
    if matched:
        return int(matched[1]) << 10
    import resource  # not on every system

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest << 10


class PeakMemory:
    """Watches for the most memory that this process has, and on a GPU for the most of that.

    The peak begins with what the process holds already: what a model needs is known where no other
    model was loaded before it.
    """

    def __init__(self, device: str) -> None:
        self._gpu: ModuleType | None = None
        if device == "cuda":
            from quire.executors.cuda import device as gpu  # torch takes seconds to import

            gpu.forget_peak_memory()
            self._gpu = gpu
        self._since = "the measurement began" if forget_peak_memory() else "the process began"

    def as_data(self) -> dict[str, object]:
        """As a receipt's `memory` has it."""
        found: dict[str, object] = {
            "peak_rss_bytes": peak_memory_bytes(),
            "peak_rss_since": self._since,
        }
        if self._gpu is not None:
            found["peak_gpu_bytes"] = self._gpu.peak_memory_bytes()
        return found


def largest_cache_bytes() -> int | None:
    """The size of the processor's last cache; None where the system does not say."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [_text(index / "size").strip() for index in folder.glob("index*")]
    known = [int(size[:-1]) << 10 for size in sizes if re.fullmatch(r"\d+K", size)]
    return max(known, default=None)


def usable_threads() -> int:
    """Threads that can run at once."""
    return max(1, min(os.cpu_count() or 1, int(usable_cores())))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
