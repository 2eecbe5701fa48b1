"""A serve receipt as lines for a person."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire_bench.receipts import Receipt

_HEAD = (
    f"{'':<12} {'requests':>8} {'errors':>6} {'tokens/s':>9}   "
    f"{'first token, ms':^26}     {'between tokens, ms':^26}"
)
_UNDER = f"{'':<41}{'p50':>8} {'p95':>8} {'p99':>8}     {'p50':>8} {'p95':>8} {'p99':>8}"


def lines(receipt: Receipt) -> Iterator[str]:
    """What a load gave, whatever its scenario."""
    results = receipt.results
    counted = receipt.executed.get("tokens_counted_by")
    yield f"{receipt.model['name']} at {receipt.asked.get('url')}, tokens counted by {counted}"
    yield _HEAD
    yield _UNDER
    for name, figures in loads(results):
        yield _row(name, figures)
    yield from _conclusions(results)
    for name, figures in loads(results):
        for kind, count in figures["errors_by_kind"].items():
            yield f"{name}: {count} × {kind}"


_PARTS = {  # of scenarios with several loads
    "beside_long": {"alone": "alone", "beside_long": "beside long", "long": "long"},
    "beside_flood": {
        "alone": "alone",
        "beside_full": "beside full",
        "beside_flood": "beside flood",
        "neighbour_when_full": "(full)",
        "neighbour_when_flooding": "(flood)",
    },
}


def loads(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The single loads in a receipt's results, with their names."""
    if "saturation" in results:
        steps = results["saturation"]["steps"]
        return [(f"{step['rate']:.3g}/s", step) for step in steps]
    for mark, names in _PARTS.items():
        if mark in results:
            return [(title, results[name]) for name, title in names.items()]
    return [("all", results)]


def _row(name: str, figures: Mapping[str, Any]) -> str:
    rate = figures["completion_tokens_per_second"]
    first, between = figures["time_to_first_token_s"], figures["inter_token_s"]
    shown = [
        " ".join(_milliseconds(times[share]) for share in ("p50", "p95", "p99"))
        for times in (first, between)
    ]
    head = f"{name:<12} {figures['requests']:>8} {figures['errors']:>6} {rate:>9.1f}"
    return f"{head}   {shown[0]}     {shown[1]}"


def _milliseconds(seconds: float | None) -> str:
    return f"{'-':>8}" if seconds is None else f"{1000 * seconds:>8.1f}"


def _conclusions(results: Mapping[str, Any]) -> Iterator[str]:
    if "saturation" in results:
        knee = results["knee_rate"]
        found = "no knee found" if knee is None else f"knee: {knee:.3g} requests/s"
        yield f"{found}; most served: {results['capacity_tokens_per_second']:.1f} tokens/s"
    if "beside_long" in results:
        for name, title in (
            ("time_to_first_token", "first token"),
            ("inter_token", "between tokens"),
        ):
            ratio = results[f"{name}_p99_ratio"]
            if ratio is not None:
                yield f"short requests' p99, {title}: {ratio:.2f} × that without long prompts"
    if "beside_flood" in results:
        for name, title in (
            ("flood_over_full", "beside a key that keeps the server busy"),
            ("flood_over_alone", "alone"),
        ):
            if results[name] is not None:
                yield f"p95 of first tokens beside a flood: {results[name]:.2f} × that {title}"
    for name, drift in results.get("drift", {}).items():
        if drift is not None:
            yield f"drift over the run, {name}: {drift:+.1%}"
