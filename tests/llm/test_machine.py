"""Cores and memory as the system tells them, within the limits of cgroups."""

from pathlib import Path

import pytest

from quire.llm.machine import (
    available_memory,
    cgroup_cores,
    resident_memory,
    total_memory,
    usable_cores,
)

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_cgroups_gives_what_it_has(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert (total_memory(root), available_memory(root)) == (16000 << 10, 8000 << 10)
    assert cgroup_cores(root) is None
    assert usable_cores(root) >= 1


def test_a_system_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert (total_memory(tmp_path), available_memory(tmp_path)) == (None, None)
    assert resident_memory(tmp_path) is None


def test_what_the_process_holds_is_what_its_status_says(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": "VmHWM:\t 900 kB\nVmRSS:\t 700 kB\n"})
    assert resident_memory(root) == 700 << 10


def test_the_tightest_of_nested_cgroups_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/outer"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{group}/cpu.max": "150000 100000\n",
        f"{group}/memory.max": "4096000\n",
        f"{group}/memory.current": "3000000\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 1000000\n",
        f"{group}/inner/cpu.max": "max 100000\n",
        f"{group}/inner/memory.max": "max\n",
        f"{group}/inner/memory.current": "3000000\n",
    }
    root = write(tmp_path, files)
    assert cgroup_cores(root) == 1.5
    assert usable_cores(root) <= 1.5
    assert total_memory(root) == 4096000
    assert available_memory(root) == 4096000 - 2000000


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("-1", None)])
def test_the_first_version_of_cgroups_counts_too(
    tmp_path: Path, quota: str, cores: float | None
) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000000",
    }
    root = write(tmp_path, files)
    assert cgroup_cores(root) == cores
    assert total_memory(root) == 16000 << 10
