"""Cores and memory that this process may use, within its cgroups, and what the KV cache gets."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.windows import NO_WINDOWS, Windows, longest_context, peak_blocks
from quire.executors.base import BLOCK_SIZE

DEFAULT_KV_BYTES = 2 << 30

_ROOT = Path("/")
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


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


# ---- the KV cache's share


def parse_bytes(amount: str | int, name: str = "kv_memory") -> int:
    """Bytes from a number or from text such as "2GiB", "512 MB" or "1.5GiB"."""
    if isinstance(amount, int) and not isinstance(amount, bool):
        size = amount
    else:
        written = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)\s*", str(amount))
        unit = _UNITS.get(written[2].lower()) if written else None
        if not isinstance(amount, str) or written is None or unit is None:
            raise ConfigError(f'{name} must be bytes or text such as "2GiB", got {amount!r}')
        size = int(float(written[1]) * unit)
    if size < 1:
        raise ConfigError(f"{name} must be above 0, got {amount!r}")
    return size


def format_bytes(size: float) -> str:
    """A size for people, such as 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model needs and what the machine has, before anything is loaded."""

    weights: int  # bytes, as the executor keeps them
    kv_per_token: int  # bytes, of all layers
    available: int | None  # bytes; None where the machine does not say
    workspace: int = 0  # bytes that steps work in
    windows: Windows = NO_WINDOWS  # of the groups of layers
    group_bytes: int | None = None  # of a token in a block, which holds one group; None: all layers
    chunk: int = 1  # tokens of a sequence that must fit into steps not collected
    state_bytes: int = 0  # of a state, of a model whose layers keep any
    num_states: int = 0  # slots for them; see EngineConfig.states_per_sequence

    @property
    def taken(self) -> int:
        """Bytes of all but the KV cache."""
        return self.weights + self.workspace + self.state_bytes * self.num_states

    def with_states(self, wanted: int, fewest: int, kv_memory: str | int | None) -> "MemoryPlan":
        """With slots for states: those that are wanted, fewer where memory for them and the cache
        is short. What cannot hold the fewest either is refused with the weights."""
        if not self.state_bytes or self.available is None:
            return replace(self, num_states=wanted if self.state_bytes else 0)
        left = self.available - self.weights - self.workspace
        cache = min(DEFAULT_KV_BYTES, left // 2) if kv_memory is None else parse_bytes(kv_memory)
        fitting = max(fewest, (left - cache) // self.state_bytes)
        return replace(self, num_states=min(wanted, fitting))

    @property
    def block_bytes(self) -> int:
        return (self.kv_per_token if self.group_bytes is None else self.group_bytes) * BLOCK_SIZE

    def sequence_bytes(self, num_tokens: int) -> int:
        """What a sequence of so many tokens holds at most."""
        return peak_blocks(self.windows, BLOCK_SIZE, num_tokens, self.chunk) * self.block_bytes

    def longest_context(self, num_blocks: int, limit: int) -> int:
        """Tokens of a sequence that so many blocks hold, up to a limit."""
        return longest_context(self.windows, BLOCK_SIZE, num_blocks, limit, self.chunk)

    def pool_bytes(self, kv_memory: str | int | None) -> int:
        """The bytes of the cache: as asked, or what suits the machine."""
        self._check_model()
        taken = self.taken
        if kv_memory is None:
            left = DEFAULT_KV_BYTES if self.available is None else (self.available - taken) // 2
            return min(DEFAULT_KV_BYTES, left)
        size = parse_bytes(kv_memory)
        if self.available is not None and taken + size > self.available:
            raise ConfigError(
                f"kv_memory is {format_bytes(size)} and the weights{self._and_others} take "
                f"{format_bytes(taken)}, but this machine has "
                f"{format_bytes(self.available)} available: give at most "
                f"{format_bytes(self.available - taken)}"
            )
        return size

    @property
    def _and_others(self) -> str:
        """What is taken beside the weights."""
        states = f" and {self.num_states} states of sequences" if self.num_states else ""
        if not self.workspace:
            return states
        return f", what steps work in{states}" if states else " and what steps work in"

    def _check_model(self) -> None:
        taken = self.taken
        if self.available is not None and taken > self.available:
            raise ConfigError(
                f"the model's weights{self._and_others} take {format_bytes(taken)} as this "
                f"executor keeps them, but this machine has {format_bytes(self.available)} "
                "available: use a smaller model or --max-batch-size, or a machine with more memory"
            )

    def num_blocks(self, pool_bytes: int, max_context: int | None) -> int:
        """Blocks in so many bytes; a ConfigError where they do not hold the context asked for."""
        count = pool_bytes // self.block_bytes
        if max_context is None or self.longest_context(count, max_context) == max_context:
            return count
        needed, fitting = self.sequence_bytes(max_context), self.longest_context(count, max_context)
        raise ConfigError(
            f"max_context is {max_context} tokens, which take {format_bytes(needed)}, but the KV "
            f"cache of {format_bytes(pool_bytes)} holds {fitting}: "
            + _way_out(needed, "max_context", fitting)
        )

    def check_batch(self, num_blocks: int, max_batch_size: int) -> None:
        """Every sequence of a batch needs a block of its own in each group of layers."""
        groups = len(self.windows)
        if num_blocks < max_batch_size * groups:
            needed = max_batch_size * groups * self.block_bytes
            each = f" for each of {groups} groups of layers" if groups > 1 else ""
            raise ConfigError(
                f"the KV cache holds {num_blocks} blocks of {BLOCK_SIZE} tokens "
                f"({format_bytes(self.block_bytes)} each), fewer than max_batch_size "
                f"({max_batch_size}){each}: "
                + _way_out(needed, "max_batch_size", num_blocks // groups)
            )


def _way_out(needed: int, name: str, fitting: int) -> str:
    """The settings that would do: more memory, or less of `name` where any fits."""
    more = f"give kv_memory at least {format_bytes(needed)} ({needed} bytes)"
    return f"{more} or lower {name} to {fitting}" if fitting else more
