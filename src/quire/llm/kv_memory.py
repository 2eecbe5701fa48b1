"""How much memory the key-value cache gets, and how many blocks that makes."""

import re
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.executors.base import BLOCK_SIZE

USUAL_BYTES = 2 << 30

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
    kv_per_token: int  # bytes
    available: int | None  # bytes; None where the machine does not say
    workspace: int = 0  # bytes that steps work in

    @property
    def block_bytes(self) -> int:
        return self.kv_per_token * BLOCK_SIZE

    def pool_bytes(self, kv_memory: str | int | None) -> int:
        """The bytes of the cache: as asked, or what suits the machine."""
        self._check_model()
        taken = self.weights + self.workspace
        if kv_memory is None:
            left = USUAL_BYTES if self.available is None else (self.available - taken) // 2
            return min(USUAL_BYTES, left)
        size = parse_bytes(kv_memory)
        if self.available is not None and taken + size > self.available:
            raise ConfigError(
                f"kv_memory is {format_bytes(size)} and the weights{self._and_workspace} take "
                f"{format_bytes(taken)}, but this machine has "
                f"{format_bytes(self.available)} available: give at most "
                f"{format_bytes(self.available - taken)}"
            )
        return size

    @property
    def _and_workspace(self) -> str:
        return " and what steps work in" if self.workspace else ""

    def _check_model(self) -> None:
        taken = self.weights + self.workspace
        if self.available is not None and taken > self.available:
            raise ConfigError(
                f"the model's weights{self._and_workspace} take {format_bytes(taken)} as this "
                f"executor keeps them, but this machine has {format_bytes(self.available)} "
                "available: use a smaller model or a machine with more memory"
            )

    def num_blocks(self, pool_bytes: int, max_context: int | None) -> int:
        """Blocks in so many bytes; a ConfigError where they do not hold the context asked for."""
        count = pool_bytes // self.block_bytes
        if max_context is not None and count * BLOCK_SIZE < max_context:
            needed = -(-max_context // BLOCK_SIZE) * self.block_bytes
            raise ConfigError(
                f"max_context is {max_context} tokens of {format_bytes(self.kv_per_token)}, but "
                f"the KV cache of {format_bytes(pool_bytes)} holds {count * BLOCK_SIZE}: "
                + _way_out(needed, "max_context", count * BLOCK_SIZE)
            )
        return count

    def check_batch(self, num_blocks: int, max_batch_size: int) -> None:
        """Every sequence of a batch needs a block of its own."""
        if num_blocks < max_batch_size:
            needed = max_batch_size * self.block_bytes
            raise ConfigError(
                f"the KV cache holds {num_blocks} blocks of {BLOCK_SIZE} tokens "
                f"({format_bytes(self.block_bytes)} each), fewer than max_batch_size "
                f"({max_batch_size}): " + _way_out(needed, "max_batch_size", num_blocks)
            )


def _way_out(needed: int, name: str, fitting: int) -> str:
    """The settings that would do: more memory, or less of `name` where any fits."""
    more = f"give kv_memory at least {format_bytes(needed)} ({needed} bytes)"
    return f"{more} or lower {name} to {fitting}" if fitting else more
