"""A serve receipt as lines for a person."""

from collections.abc import Iterator

from quire_bench.receipts import Facts, Receipt, listed, number, section

_HEAD = (
    f"{'':<12} {'requests':>8} {'errors':>6} {'tokens/s':>9}   "
    f"{'first token, ms':^26}     {'between tokens, ms':^26}"
)
_UNDER = f"{'':<41}{'p50':>8} {'p95':>8} {'p99':>8}     {'p50':>8} {'p95':>8} {'p99':>8}"


def lines(receipt: Receipt) -> Iterator[str]:
    """The figures of a load of any scenario."""
    results = receipt.results
    counted = receipt.executed.get("tokens_counted_by")
    yield f"{receipt.model['name']} at {receipt.asked.get('url')}, tokens counted by {counted}"
    yield _HEAD
    yield _UNDER
    for name, figures in loads(results):
        yield _row(name, figures)
    yield from _conclusions(results)
    for name, figures in loads(results):
        for kind, count in section(figures, "errors_by_kind").items():
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


def loads(results: Facts) -> list[tuple[str, Facts]]:
    """The single loads in a receipt's results, with their names."""
    if "saturation" in results:
        steps = map(section, listed(results, "saturation", "steps"))
        return [(f"{number(step, 'rate') or 0.0:.3g}/s", step) for step in steps]
    for mark, names in _PARTS.items():
        if mark in results:
            return [(title, section(results, name)) for name, title in names.items()]
    return [("all", results)]


def _row(name: str, figures: Facts) -> str:
    rate = number(figures, "completion_tokens_per_second") or 0.0
    shown = [
        " ".join(_milliseconds(number(figures, times, share)) for share in ("p50", "p95", "p99"))
        for times in ("time_to_first_token_s", "inter_token_s")
    ]
    head = f"{name:<12} {figures['requests']:>8} {figures['errors']:>6} {rate:>9.1f}"
    return f"{head}   {shown[0]}     {shown[1]}"


def _milliseconds(seconds: float | None) -> str:
    return f"{'-':>8}" if seconds is None else f"{1000 * seconds:>8.1f}"


def _conclusions(results: Facts) -> Iterator[str]:
    if "saturation" in results:
        knee, most = (number(results, n) for n in ("knee_rate", "capacity_tokens_per_second"))
        found = "no knee found" if knee is None else f"knee: {knee:.3g} requests/s"
        yield f"{found}; most served: {most or 0.0:.1f} tokens/s"
    if "beside_long" in results:
        for name, title in (
            ("time_to_first_token", "first token"),
            ("inter_token", "between tokens"),
        ):
            ratio = number(results, f"{name}_p99_ratio")
            if ratio is not None:
                yield f"short requests' p99, {title}: {ratio:.2f} × that without long prompts"
    if "beside_flood" in results:
        for name, title in (
            ("flood_over_full", "beside a key that keeps the server busy"),
            ("flood_over_alone", "alone"),
        ):
            if (ratio := number(results, name)) is not None:
                yield f"p95 of first tokens beside a flood: {ratio:.2f} × that {title}"
    for name in section(results, "drift"):
        if (drift := number(results, "drift", name)) is not None:
            yield f"drift over the run, {name}: {drift:+.1%}"
