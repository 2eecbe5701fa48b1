"""Which replicas have computed which prefixes, and what follows for a request."""

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

_MAX_PREFIXES = 1 << 20  # that are remembered, some 200 bytes each
_MAX_HOLDERS = 16  # of a prefix: the latest
_MAX_LOOKED_AT = 16  # replicas whose load is compared for a request
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
        self._holders: OrderedDict[int, tuple[Any, ...]] = OrderedDict()  # the latest last

    def add(self, prefix: Sequence[int], replica: Any) -> None:
        for value in prefix:
            held = self._holders.get(value, ())
            if not held or held[-1] != replica:
                others = tuple(holder for holder in held if holder != replica)
                self._holders[value] = (*others[1 - _MAX_HOLDERS :], replica)
            self._holders.move_to_end(value)
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)

    def holders(self, prefix: Sequence[int], alive: Container[Any]) -> list[Any]:
        """Those of the longest prefix that anybody alive has."""
        for value in reversed(prefix):
            found = [one for one in self._holders.get(value, ()) if one in alive]
            if found:
                return found
        return []


class Replicas:
    """Those that run: to be drawn from, and to be asked whether they do."""

    def __init__(self, names: Sequence[Any]) -> None:
        self._names = list(names)
        self.alive = frozenset(names)

    def some(self) -> Sequence[Any]:
        """All, or of many as many as are looked at, by chance: a request's cost does not grow with
        the number of replicas, and several routers do not all run to the same idle one."""
        if len(self._names) <= _MAX_LOOKED_AT:
            return self._names
        return random.sample(self._names, _MAX_LOOKED_AT)


def choose(
    prefix: Sequence[int],
    replicas: Replicas,
    load_of: Callable[[Any], int],
    table: PrefixTable,
    max_lead: int,
) -> list[Any]:
    """Replicas, the best two first. A holder of the prefix is taken while it has at most `max_lead`
    requests more than the idlest; else the idlest, and chance decides between equals."""
    loads = {replica: load_of(replica) for replica in replicas.some()}
    least = min(loads.values())
    idlest = random.choice([replica for replica, load in loads.items() if load == least])
    held = {replica: load_of(replica) for replica in table.holders(prefix, replicas.alive)}
    best = min(held, key=held.__getitem__, default=idlest)
    is_near = best not in held or held[best] <= least + max_lead
    first = [best, idlest] if is_near else [idlest, best]
    return [*dict.fromkeys([*first, *loads])]
