"""What the machine gives this process: cores and memory, within the limits of its cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> float:
    """Cores this process may keep busy: those it is bound to, and no more than its quota."""
    if hasattr(os, "sched_getaffinity"):
        bound = len(os.sched_getaffinity(0))
    else:
        bound = os.cpu_count() or 1
    quota = cgroup_cores(root)
    return bound if quota is None else min(float(bound), quota)


def cgroup_cores(root: Path = _ROOT) -> float | None:
    """The cores that the process's cgroups allow; None where there is no such limit."""
    quotas = [
        _words(folder / "cpu.max")
        or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for folder in _cgroups(root, "cpu")
    ]
    cores = [
        int(words[0]) / int(words[1])
        for words in quotas
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words)
    ]
    return min(cores, default=None)


def total_memory(root: Path = _ROOT) -> int | None:
    """Bytes of memory the process may have; None where the system does not say."""
    amounts = [_meminfo(root, "MemTotal"), *(limit for limit, _ in _memory_limits(root))]
    return min((amount for amount in amounts if amount is not None), default=None)


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes the process can still take without driving others out; None where unknown."""
    amounts = [_meminfo(root, "MemAvailable")]
    amounts += [max(0, limit - used) for limit, used in _memory_limits(root)]
    return min((amount for amount in amounts if amount is not None), default=None)


def resident_memory(root: Path = _ROOT) -> int | None:
    """Bytes this process has in memory now; None where the system does not say."""
    words = _words(root / "proc/self/status")
    return int(words[words.index("VmRSS:") + 1]) << 10 if "VmRSS:" in words else None


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each of the process's cgroups that has one, and what is used of it."""
    for folder in _cgroups(root, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < 1 << 60:  # above: v1's "no limit"
            yield limit, max(0, used - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Bytes of cached files, which make room for whoever needs it."""
    words = _words(folder / "memory.stat")
    return int(words[words.index("inactive_file") + 1]) if "inactive_file" in words else 0


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's cgroup and of those around it, version 2 and version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = base / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(base))


def _meminfo(root: Path, field: str) -> int | None:
    words = _words(root / "proc/meminfo")
    return int(words[words.index(f"{field}:") + 1]) << 10 if f"{field}:" in words else None


def _number(*files: Path) -> int | None:
    """The number in the first of these files that holds one."""
    for file in files:
        words = _words(file)
        if words and words[0].isdigit():
            return int(words[0])
    return None


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
