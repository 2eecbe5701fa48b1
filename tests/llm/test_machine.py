"""Cores and memory within the limits of cgroups, and how large the KV cache is made."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.llm.machine import (
    MemoryPlan,
    available_memory,
    cgroup_cores,
    format_bytes,
    parse_bytes,
    resident_memory,
    total_memory,
    usable_cores,
)

MIB = 1 << 20
PLAN = MemoryPlan(weights=100 * MIB, kv_per_token=64 << 10, available=1124 * MIB)  # block: 1 MiB

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


# ---- the KV cache's share


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        (12345, 12345),
        ("12345", 12345),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("512MB", 512_000_000),
        (" 64 KiB ", 65536),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(amount: str | int, size: int) -> None:
    assert parse_bytes(amount) == size


@pytest.mark.parametrize(
    "amount", ["", "GiB", "-1GiB", "1e9", "2 gigs", "nan", "2GiB!", 1.5, None, True, "9" * 40]
)
def test_other_sizes_are_refused_by_name(amount: object) -> None:
    with pytest.raises(ConfigError, match="kv_memory must be bytes or text"):
        parse_bytes(amount)  # type: ignore[arg-type]


@pytest.mark.parametrize("amount", [0, -5, "0GiB", "0.1B"])
def test_nothing_is_no_size(amount: str | int) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"),
     (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")],
)  # fmt: skip
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_the_usual_cache_is_two_gibibytes_or_half_of_what_the_weights_leave() -> None:
    assert PLAN.pool_bytes(None) == 512 * MIB
    assert MemoryPlan(100 * MIB, 64 << 10, None).pool_bytes(None) == 2 << 30
    assert MemoryPlan(100 * MIB, 64 << 10, 64 << 30).pool_bytes(None) == 2 << 30


def test_a_size_that_was_asked_for_is_taken() -> None:
    assert PLAN.pool_bytes("1GiB") == 1 << 30
    assert PLAN.num_blocks(1 << 30, None) == 1024
    assert PLAN.num_blocks((1 << 30) - 1, None) == 1023


def test_more_than_the_machine_has_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"2\.0 GiB and .* 100\.0 MiB, .* 1\.1 GiB .* 1\.0 GiB"):
        PLAN.pool_bytes("2GiB")


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    with pytest.raises(ConfigError, match=r"weights take 1\.0 GiB .* has 512\.0 MiB available"):
        MemoryPlan(1 << 30, 64 << 10, 512 * MIB).pool_bytes(None)


def test_states_are_taken_beside_the_weights() -> None:
    plan = replace(PLAN, state_bytes=4 * MIB, num_states=64)
    assert plan.taken == 356 * MIB
    assert plan.pool_bytes(None) == 384 * MIB
    with pytest.raises(
        ConfigError,
        match=r"the weights and 64 states of sequences take 356\.0 MiB, .* at most 768\.0 MiB",
    ):
        plan.pool_bytes("1GiB")
    with pytest.raises(
        ConfigError,
        match=r"weights, what steps work in and 300 states of sequences take 1\.3 GiB .* smaller",
    ):
        replace(plan, num_states=300, workspace=MIB).pool_bytes(None)
    with pytest.raises(ConfigError, match=r"weights and what steps work in take 1\.1 GiB"):
        replace(PLAN, workspace=1 << 30, weights=101 * MIB).pool_bytes(None)


def test_fewer_states_are_made_where_memory_is_short() -> None:
    plan = replace(PLAN, state_bytes=4 * MIB)
    assert plan.available == 1124 * MIB
    assert PLAN.with_states(200, 3, None).num_states == 0, "no layer keeps any"
    assert replace(plan, available=None).with_states(200, 3, None).num_states == 200
    assert plan.with_states(100, 3, None).num_states == 100
    assert plan.with_states(200, 3, None).num_states == 128, "the other half is for the cache"
    assert plan.with_states(200, 3, "824MiB").num_states == 50
    assert plan.with_states(200, 3, "824MiB").pool_bytes("824MiB") == 824 * MIB
    few = plan.with_states(200, 3, "1020MiB")
    assert few.num_states == 3
    with pytest.raises(ConfigError, match=r"weights and 3 states of sequences take 112\.0 MiB"):
        few.pool_bytes("1020MiB")


def test_a_context_that_the_cache_cannot_hold_is_refused_with_figures() -> None:
    assert PLAN.num_blocks(4 * MIB, 64) == 4
    with pytest.raises(
        ConfigError, match=r"max_context is 65 .* holds 64: .* 5\.0 MiB \(5242880"
    ) as caught:
        PLAN.num_blocks(4 * MIB, 65)
    assert str(caught.value).endswith("or lower max_context to 64")
    with pytest.raises(ConfigError, match=r"at least 5\.0 MiB \(5242880 bytes\)$"):
        PLAN.num_blocks(0, 65)


def test_a_batch_needs_a_block_for_each_sequence() -> None:
    PLAN.check_batch(8, 8)
    with pytest.raises(ConfigError, match=r"holds 8 blocks .* max_batch_size \(9\): .* 9\.0 MiB"):
        PLAN.check_batch(8, 9)
    with pytest.raises(ConfigError, match=r"or lower max_batch_size to 8$"):
        PLAN.check_batch(8, 9)
