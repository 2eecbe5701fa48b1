"""Tells change from noise between two sets of receipts.

Receipts are paired by kind, model, device and settings. Of each pair, every list of samples whose
name says which way is better is judged (`…_s` and `…_bytes`: less; `…_per_second`: more):

1. Samples that follow one another in a run resemble one another, so more than MAX_BLOCKS of them
   are folded into MAX_BLOCKS medians of consecutive ones; these are compared.
2. Effect: the ratio of the medians. Below the least effect (5% by default) it is no change; a
   rate's fall to 1/1.05 counts as a time's rise by 5%.
3. Chance: a two-sided permutation test of the rank sum (Mann and Whitney's), with a seed; exact
   where there are few samples. Of all p-values together, those pass that Benjamini and Hochberg's
   procedure lets pass at 1%, so that a large grid does not find changes by its size alone.
4. Size: the change is at least four standard errors of the ratio, from the samples' spread
   (median absolute deviation), widened by how much neighbours resemble one another
   (autocorrelation). Noise that lasts for several samples looks like signal to a permutation test.
5. Runs: a run's own samples cannot show how much whole runs differ. Where both sides hold several
   receipts of the same thing, the spread of the receipts' medians adds to the standard error, and
   the two sides' ranges of medians must not overlap. So on a machine that others use as well,
   measure each side several times, in turn; a single receipt a side is noted.

A change needs all of 2 to 5. Where there are too few samples for any p-value of 1% (fewer than
five on each side), the verdict is "too few", not "same"; seven show a change in one list among
many.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from quire.core.errors import ConfigError
from quire_bench.receipts import Receipt, read, read_folder

LEAST_EFFECT = 0.05
FALSE_DISCOVERIES = 0.01
LEAST_ERRORS = 4.0
MAX_BLOCKS = 20
NUM_PERMUTATIONS = 20_000

Verdict = Literal["loss", "gain", "same", "too few"]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One list of samples on both sides, and what it says."""

    name: str  # what was measured: kind, model, settings that differ among the pairs
    sample: str
    before: float  # medians
    after: float
    count_before: int
    count_after: int
    p_value: float
    verdict: Verdict
    standard_error: float = 0.0  # of the change
    receipts_overlap: bool = False

    @property
    def change(self) -> float:
        """How much more `after` is, as a share of `before`."""
        return self.after / self.before - 1.0 if self.before else 0.0

    @property
    def log_ratio(self) -> float:
        """The change's size, the same whether something doubles or halves."""
        if self.before > 0 and self.after > 0:
            return abs(math.log(self.after / self.before))
        return 0.0 if self.before == self.after else math.inf


@dataclass(frozen=True, slots=True)
class Regression:
    """Everything compared, what had no partner, and what a reader should know."""

    comparisons: list[Comparison]
    only_before: list[str]
    only_after: list[str]
    notes: list[str]

    @property
    def has_loss(self) -> bool:
        return any(comparison.verdict == "loss" for comparison in self.comparisons)


def load_receipts(path: str | Path) -> list[Receipt]:
    """A receipt, or all of a folder."""
    found = list(read_folder(path).values()) if Path(path).is_dir() else [read(path)]
    if not found:
        raise ConfigError(f"{path} holds no receipts (*.json)")
    return found


def compare(
    before: Sequence[Receipt],
    after: Sequence[Receipt],
    *,
    least_effect: float = LEAST_EFFECT,
    seed: int = 0,
) -> Regression:
    """Pair the receipts and judge every pair."""
    if not 0 <= least_effect < 1:
        raise ConfigError(f"the least effect must be at least 0 and below 1, got {least_effect}")
    old, new = _by_key(before), _by_key(after)
    shared = [key for key in old if key in new]
    if not shared:
        raise ConfigError(
            "no receipt of one side has a partner on the other: they pair by kind, model, device "
            "and settings"
        )
    names = _names({key: group[0] for key, group in {**new, **old}.items()})
    rng = np.random.default_rng(seed)
    found = [
        comparison
        for key in shared
        for comparison in _compare_group(names[key], old[key], new[key], rng)
    ]
    return Regression(
        comparisons=_judge(found, least_effect),
        only_before=[names[key] for key in old if key not in new],
        only_after=[names[key] for key in new if key not in old],
        notes=[*_single_runs(old, new, shared), *_notes(before, after)],
    )


def less_is_better(sample: str) -> bool | None:
    """Which way a list of samples is better, by its name up to a dot; None where not known."""
    sample = sample.partition(".")[0]
    if sample.endswith(("_per_second", "_per_s")):
        return False
    return True if sample.endswith(("_s", "_ms", "_bytes")) else None


def folded(values: Sequence[float]) -> list[float]:
    """At most MAX_BLOCKS values: medians of consecutive ones."""
    if len(values) <= MAX_BLOCKS:
        return list(values)
    return [float(np.median(block)) for block in np.array_split(np.asarray(values), MAX_BLOCKS)]


def permutation_p_value(
    one: Sequence[float], other: Sequence[float], rng: np.random.Generator
) -> float:
    """How often a random split of all values parts the ranks as far as this one, or farther."""
    values = np.asarray([*one, *other], dtype=np.float64)
    size, total = len(one), len(values)
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal values share their mean rank
    expected = size * (total + 1) / 2
    seen = abs(ranks[:size].sum() - expected)
    is_exact = math.comb(total, size) <= NUM_PERMUTATIONS
    if is_exact:
        splits = np.array(list(combinations(range(total), size)))
    else:
        splits = rng.random((NUM_PERMUTATIONS, total)).argsort(axis=1)[:, :size]
    distances = np.abs(ranks[splits].sum(axis=1) - expected)
    hits = int(np.count_nonzero(distances >= seen - 1e-9))
    # a drawn set of splits counts the one seen as one of them, else p could be nought
    return hits / len(splits) if is_exact else (hits + 1) / (len(splits) + 1)


def _by_key(receipts: Sequence[Receipt]) -> dict[Key, list[Receipt]]:
    groups: dict[Key, list[Receipt]] = defaultdict(list)
    for receipt in sorted(receipts, key=lambda receipt: receipt.created):
        groups[_key(receipt)].append(receipt)
    return dict(groups)


def _key(receipt: Receipt) -> Key:
    model = {name: receipt.model.get(name) for name in ("name", "sha256", "quant")}
    parts = (receipt.kind, model, receipt.asked.get("device"), receipt.settings)
    return tuple(json.dumps(part, sort_keys=True, default=str) for part in parts)


def _names(receipts: Mapping[Key, Receipt]) -> dict[Key, str]:
    """A short name for each: kind, model, quant, and the settings in which they differ."""
    settings = [receipt.settings for receipt in receipts.values()]
    every = sorted({name for found in settings for name in found})
    shown = [name for name in every if len({str(found.get(name)) for found in settings}) > 1]
    names = {}
    for key, receipt in receipts.items():
        words = [receipt.kind, str(receipt.model["name"]), str(receipt.model.get("quant") or "")]
        words += [f"{name}={receipt.settings[name]}" for name in shown if name in receipt.settings]
        names[key] = " ".join(word for word in words if word)
    return names


def _compare_group(
    name: str, before: Sequence[Receipt], after: Sequence[Receipt], rng: np.random.Generator
) -> list[Comparison]:
    found = []
    for sample in before[0].samples:
        old, new = _runs(before, sample), _runs(after, sample)
        if less_is_better(sample) is None or not old or not new:
            continue
        one = [value for run in old for value in folded(run)]
        other = [value for run in new for value in folded(run)]
        found.append(
            Comparison(
                name=name,
                sample=sample,
                before=median(one),
                after=median(other),
                count_before=sum(map(len, old)),
                count_after=sum(map(len, new)),
                p_value=permutation_p_value(one, other, rng),
                verdict="too few" if _is_too_few(one, other) else "same",
                standard_error=_standard_error(list(map(folded, old)), list(map(folded, new))),
                receipts_overlap=_overlap(old, new),
            )
        )
    return found


def _runs(receipts: Sequence[Receipt], sample: str) -> list[Sequence[float]]:
    lists = [receipt.samples.get(sample, ()) for receipt in receipts]
    return [values for values in lists if values]


def _is_too_few(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether even the clearest split could not reach a p-value low enough."""
    splits = math.comb(len(one) + len(other), len(one))
    mirrored = 2 if len(one) == len(other) else 1
    return mirrored / splits > FALSE_DISCOVERIES


def _standard_error(old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> float:
    """Of the ratio of the two sides' medians, from noise within runs and between them."""
    sides = [[_residuals(run) for run in side] for side in (old, new)]
    likeness = _autocorrelation([run for side in sides for run in side])
    widening = (1 + likeness) / (1 - likeness)  # neighbours that agree count for less
    variance = 0.0
    for runs in sides:
        values = np.concatenate(runs)
        spread = 1.4826 * float(np.median(np.abs(values)))  # as a normal deviation
        variance += 1.5708 * spread**2 * widening / len(values)  # pi/2: of a median
    if min(len(old), len(new)) > 1:
        for side in (old, new):
            middles = _residuals([median(run) for run in side])
            variance += float(np.var(middles, ddof=1)) / len(side)
    return math.sqrt(variance)


def _residuals(run: Sequence[float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """A run's values about their median, as shares of it."""
    middle = float(np.median(np.asarray(run)))
    return np.asarray(run, dtype=np.float64) / middle - 1.0 if middle else np.zeros(len(run))


def _autocorrelation(runs: "Sequence[np.ndarray[Any, np.dtype[np.float64]]]") -> float:
    """How alike neighbours are, from 0 to 0.9; outliers are cut, since one makes no trend."""
    limit = 4.5 * float(np.median(np.abs(np.concatenate(runs))))
    cut = [np.clip(run, -limit, limit) for run in runs]
    total = sum(float(np.sum(run * run)) for run in cut)
    shared = sum(float(np.sum(run[1:] * run[:-1])) for run in cut)
    return min(0.9, max(0.0, shared / total)) if total else 0.0


def _overlap(old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> bool:
    if min(len(old), len(new)) < 2:
        return False
    one, other = [median(run) for run in old], [median(run) for run in new]
    return min(one) <= max(other) and min(other) <= max(one)


def _judge(comparisons: Sequence[Comparison], least_effect: float) -> list[Comparison]:
    limit = _discovery_limit([c.p_value for c in comparisons if c.verdict != "too few"])
    return [_verdict(comparison, limit, least_effect) for comparison in comparisons]


def _discovery_limit(p_values: Sequence[float]) -> float:
    """Benjamini and Hochberg: the largest p-value that counts as a discovery; 0 where none does."""
    passing = [
        p_value
        for rank, p_value in enumerate(sorted(p_values), start=1)
        if p_value <= FALSE_DISCOVERIES * rank / len(p_values)
    ]
    return max(passing, default=0.0)


def _verdict(comparison: Comparison, limit: float, least_effect: float) -> Comparison:
    is_change = (
        comparison.verdict != "too few"
        and comparison.log_ratio >= math.log1p(least_effect)
        and comparison.log_ratio >= LEAST_ERRORS * comparison.standard_error
        and comparison.p_value <= limit
        and not comparison.receipts_overlap
    )
    if not is_change:
        return comparison
    is_worse = (comparison.after > comparison.before) == less_is_better(comparison.sample)
    return replace(comparison, verdict="loss" if is_worse else "gain")


def _single_runs(
    old: Mapping[Key, Sequence[Receipt]],
    new: Mapping[Key, Sequence[Receipt]],
    shared: Sequence[Key],
) -> list[str]:
    single = sum(min(len(old[key]), len(new[key])) < 2 for key in shared)
    if not single:
        return []
    return [
        f"{single} of {len(shared)} pairs have a single receipt on a side: how much whole runs "
        "differ is not known; measure each side several times, in turn"
    ]


def _notes(before: Sequence[Receipt], after: Sequence[Receipt]) -> list[str]:
    """What makes the two sides hard to compare."""
    notes = []
    for what, part in (("machine", _machine), ("path executed", _path)):
        old, new = {part(receipt) for receipt in before}, {part(receipt) for receipt in after}
        if old != new:
            one, other = (" and ".join(sorted(side)) for side in (old, new))
            notes.append(f"another {what}: {one} before, {other} after")
    return notes


def _machine(receipt: Receipt) -> str:
    facts = receipt.machine
    return f"{facts['cpu']}, {facts['cores']} cores, GPU {facts['gpu'] or 'none'}"


def _path(receipt: Receipt) -> str:
    kernels = ", ".join(map(str, receipt.executed["kernels"])) or "no kernels named"
    return f"{receipt.executed['device']} ({kernels})"
