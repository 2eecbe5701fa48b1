"""What receipts of servers show as charts: saturation, convoy, neighbour and soak.

A server's times differ by powers of ten between an idle and a full one, so load has log scales.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire_bench.charts import Chart, Point, Series
from quire_bench.receipts import Facts, Receipt, listed, number, section, slug
from quire_bench.report_data import GIB, title_of

_SHARES = ("p50", "p95", "p99")
_TIMES = {
    "time_to_first_token_s": "Time to first token",
    "inter_token_s": "Time between tokens",
}
_SHORTS = {"alone": "without long prompts", "beside_long": "while long prompts arrive"}
_NEIGHBOURS = {
    "alone": "alone",
    "beside_full": "beside a busy key",
    "beside_flood": "beside a key that floods",
}


def serving_charts(receipts: Sequence[Receipt]) -> list[Chart]:
    """Every chart that serve receipts have figures for."""
    found: list[Chart] = []
    served = [receipt for receipt in receipts if receipt.kind == "serve"]
    for count, receipt in enumerate(served, start=1):
        ending = f"{count}-{slug(title_of(receipt))}"
        found += _saturation_charts(receipt, ending)
        found += _convoy_charts(receipt, ending)
        found += _neighbour_charts(receipt, ending)
        found += _soak_charts(receipt, ending)
    return [chart for chart in found if any(series.points for series in chart.series)]


def _saturation_charts(receipt: Receipt, ending: str) -> Iterator[Chart]:
    """Times at rising load."""
    steps = [step for step in _inside(receipt, "saturation", "steps") if _positive(step, "rate")]
    if not steps:
        return
    knee = number(receipt.results, "knee_rate")
    for name, words in _TIMES.items():
        yield Chart(
            slug=f"load-{name.removesuffix('_s')}-{ending}",
            title=f"{words} against load: {title_of(receipt)}",
            x_label="load, requests a second",
            y_label=f"{words.lower()}, ms",
            series=[_step_series(steps, name, share) for share in _SHARES],
            x_scale="log",
            y_scale="log",
            x_ticks=[number(step, "rate") or 0.0 for step in steps],
            marked_x=None if knee is None else (knee, "knee"),
            note="Open loop, Poisson arrivals; times count from when a request was due.",
        )


def _step_series(steps: Sequence[Facts], name: str, share: str) -> Series:
    values = [(number(step, "rate"), number(step, name, share)) for step in steps]
    return Series(share, [Point(x, 1000 * y) for x, y in values if x is not None and y])


def _convoy_charts(receipt: Receipt, ending: str) -> Iterator[Chart]:
    """Short requests' times without and with long prompts beside them."""
    if "beside_long" not in receipt.results:
        return
    length = number(receipt.settings, "long_prompt_tokens")
    rate = number(receipt.settings, "long_rate")
    arrivals = f" of {length:g} tokens, {rate:g} a second" if length and rate else ""
    note = f"The same short requests at the same times; long prompts{arrivals}."
    yield from _beside_charts(receipt, "convoy", ending, "of short requests", _SHORTS, note)


def _neighbour_charts(receipt: Receipt, ending: str) -> Iterator[Chart]:
    """One key's times alone and beside another key's."""
    if "beside_flood" not in receipt.results:
        return
    busy, flooding = (number(receipt.settings, name) or 0.0 for name in ("clients", "flood"))
    note = (
        "The same requests at the same times; the busy key has "
        f"{busy:g} requests running, the one that floods {flooding:g}."
    )
    yield from _beside_charts(receipt, "neighbour", ending, "beside another key", _NEIGHBOURS, note)


def _beside_charts(
    receipt: Receipt, scenario: str, ending: str, what: str, loads: Mapping[str, str], note: str
) -> Iterator[Chart]:
    """The same requests' times in several loads."""
    for name, words in _TIMES.items():
        yield Chart(
            slug=f"{scenario}-{name.removesuffix('_s')}-{ending}",
            title=f"{words} {what}: {title_of(receipt)}",
            x_label="share of the times that are no longer",
            y_label=f"{words.lower()}, ms",
            series=[
                Series(title, _share_points(receipt.results[load], name))
                for load, title in loads.items()
            ],
            x_names=_SHARES,
            note=note,
        )


def _share_points(figures: object, name: str) -> list[Point]:
    values = [number(figures, name, share) for share in _SHARES]
    return [Point(index, 1000 * y) for index, y in enumerate(values) if y is not None]


def _soak_charts(receipt: Receipt, ending: str) -> Iterator[Chart]:
    """Speed, waiting and memory over the time of a run."""
    windows = _inside(receipt, "soak", "windows")
    clients = number(receipt.settings, "clients")
    for name, words, unit, factor in (
        ("completion_tokens_per_second", "Throughput", "completion tokens a second", 1.0),
        ("time_to_first_token_p50_s", "Time to first token", "median, ms", 1000.0),
        ("memory_bytes", "Memory", "resident memory of the server, GiB", 1 / GIB),
    ):
        drift = number(receipt.results, "drift", name)
        yield Chart(
            slug=f"soak-{slug(words).lower()}-{ending}",
            title=f"{words} over time: {title_of(receipt)}",
            x_label="seconds since the start",
            y_label=unit,
            series=[Series(f"{clients or 0:g} clients", _window_points(windows, name, factor))],
            note="Closed loop; a dot is a tenth of the run."
            + ("" if drift is None else f" Drift over the whole run: {drift:+.1%}."),
        )


def _window_points(windows: Sequence[Facts], name: str, factor: float) -> list[Point]:
    starts = [number(window, "start_s") or 0.0 for window in windows]
    middle = (starts[1] - starts[0]) / 2 if len(starts) > 1 else 0.0
    values = [number(window, name) for window in windows]
    return [
        Point(start + middle, factor * value)
        for start, value in zip(starts, values, strict=True)
        if value is not None
    ]


def _inside(receipt: Receipt, scenario: str, parts: str) -> list[Facts]:
    """The steps or windows of a scenario; none where the receipt is of another."""
    return [section(member) for member in listed(receipt.results, scenario, parts)]


def _positive(step: Facts, name: str) -> bool:
    return (number(step, name) or 0.0) > 0
