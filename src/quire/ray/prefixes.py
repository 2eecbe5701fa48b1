"""Which replicas have computed which prefixes, and what follows for a request."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

_MAX_PREFIXES = 1 << 17  # that are remembered
_FIRST_LENGTH = 16  # tokens


def prefix_hashes(key: str, prompt: Sequence[int]) -> list[int]:
    """Hashes of a prompt's beginnings of 16, 24, 32, 48, 64, 96 ... tokens. Prefixes are shared
    within a key alone, so that the key is a part of them. For one process: strings' hashes differ
    between processes."""
    found, value, done, length = [], hash(key), 0, _FIRST_LENGTH
    while length <= len(prompt):
        value = hash((value, *prompt[done:length]))
        found.append(value)
        done = length
        # 16, 24, 32, 48: half of the power of two below it is added.
        length += 1 << (length.bit_length() - 2) if length & (length - 1) == 0 else length // 3
    return found


class PrefixTable:
    """Which replicas got which prefixes, the latest ones."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._holders: OrderedDict[int, dict[Any, None]] = OrderedDict()

    def add(self, prefix: Sequence[int], replica: Any) -> None:
        for value in prefix:
            self._holders.setdefault(value, {})[replica] = None
            self._holders.move_to_end(value)
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)

    def holders(self, prefix: Sequence[int], alive: set[Any]) -> list[Any]:
        """Those of the longest prefix that anybody alive has."""
        for value in reversed(prefix):
            found = self._holders.get(value)
            if found is None:
                continue
            for gone in [replica for replica in found if replica not in alive]:
                del found[gone]
            if found:
                return list(found)
        return []


def choose(
    prefix: Sequence[int], loads: dict[Any, int], table: PrefixTable, max_lead: int
) -> list[Any]:
    """The replicas, the best two first. A holder of the prefix is taken while it has at most
    `max_lead` requests more than the idlest; else the idlest, and chance decides between equals."""
    least = min(loads.values())
    idlest = random.choice([replica for replica, load in loads.items() if load == least])
    held = table.holders(prefix, set(loads))
    best = min(held, key=lambda replica: loads[replica], default=idlest)
    first = [best, idlest] if loads[best] <= least + max_lead else [idlest, best]
    return [*dict.fromkeys([*first, *loads])]
