"""What receipts of models show as charts: throughput, times, the roofline and memory.

Receipts of the same point (a model on a device at a batch and prompt length) are one point: the
median of their values, and the least and most among them. A receipt that lacks a figure is left out
of the charts that need it.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from quire_bench.charts import MAX_SERIES, Chart, Point, Series
from quire_bench.receipts import Receipt, number, slug

GIB = 1 << 30
_FLAT = 20  # a series so many times lower than another is a flat line
_OWN_KINDS = ("throughput", "grid-cell")


class Configuration(NamedTuple):
    """Where in the charts a throughput receipt belongs."""

    name: str  # model and device
    prompt_tokens: int
    new_tokens: int
    batch: int


Groups = dict[Configuration, list[Receipt]]


def model_charts(receipts: Sequence[Receipt]) -> list[Chart]:
    """Every chart that throughput receipts and grid cells have figures for."""
    groups = by_configuration(receipts)
    return [
        *_throughput_charts(groups),
        *_inter_token_charts(groups),
        *_rooflines(groups, receipts),
        *_memory_charts(groups),
    ]


def by_configuration(receipts: Sequence[Receipt]) -> Groups:
    """Throughput receipts and grid cells by their configuration, in order."""
    groups: Groups = defaultdict(list)
    for receipt in receipts:
        configuration = _configuration_of(receipt) if receipt.kind in _OWN_KINDS else None
        if configuration is not None:
            groups[configuration].append(receipt)
    return dict(sorted(groups.items()))


def title_of(receipt: Receipt) -> str:
    """The model with its mix, where the name does not say it, and what it ran on: the executor, or
    the server, where its name was given."""
    name, quant = str(receipt.model["name"]), receipt.model.get("quant")
    shown = name if not quant or str(quant) in name else f"{name} {quant}"
    ran_on = receipt.executed["device"] or receipt.executed.get("server")
    return f"{shown} on {ran_on}" if ran_on else shown


def _configuration_of(receipt: Receipt) -> Configuration | None:
    settings = receipt.settings
    batch = number(settings, "batch")
    if batch is None:
        sizes = [number(settings, name) for name in ("requests", "max_batch_size")]
        batch = min((size for size in sizes if size is not None), default=None)
    prompt, new = number(settings, "prompt_tokens"), number(settings, "new_tokens")
    if batch is None or prompt is None or new is None:
        return None
    return Configuration(title_of(receipt), int(prompt), int(new), int(batch))


def _throughput_charts(groups: Groups) -> list[Chart]:
    rate = "completion_tokens_per_second"
    found: list[Chart] = []
    for (prompt, new), members in _by_lengths(groups).items():
        chart = Chart(
            slug=f"throughput-{prompt}-{new}",
            title=f"Throughput against batch: prompts of {prompt}, completions of {new} tokens",
            x_label="batch, sequences a step",
            y_label="completion tokens a second",
            series=_against_batch(members, (rate,), samples=rate),
            x_scale="log",
            x_ticks=sorted({configuration.batch for configuration in members}),
            note="Decode steps alone. Dots are medians of the runs, bars the slowest and fastest.",
        )
        found += map(_fitting_scale, _split(chart))
    return found


def _inter_token_charts(groups: Groups) -> list[Chart]:
    found: list[Chart] = []
    for (prompt, new), members in _by_lengths(groups).items():
        chart = Chart(
            slug=f"inter-token-{prompt}-{new}",
            title=f"Time between tokens against batch: prompts of {prompt} tokens",
            x_label="batch, sequences a step",
            y_label="median time between tokens, ms",
            series=_against_batch(members, ("inter_token_s", "p50"), factor=1000.0),
            x_scale="log",
            x_ticks=sorted({configuration.batch for configuration in members}),
        )
        found += map(_fitting_scale, _split(chart))
    return found


def _memory_charts(groups: Groups) -> list[Chart]:
    """Of each model and batch the receipt with the longest prompts."""
    longest: Groups = {}
    for configuration, members in groups.items():  # in order: later ones have longer prompts
        longest[Configuration(configuration.name, 0, 0, configuration.batch)] = members
    peak = _against_batch(longest, ("memory", "peak_bytes"), factor=1 / GIB)
    allocated = _against_batch(longest, ("memory", "allocated_bytes"), factor=1 / GIB)
    named = {series.name for series in peak}
    dashed = [
        replace(series, name="weights and KV cache", style="dashed", like=series.name)
        for series in allocated
        if series.name in named
    ]
    chart = Chart(
        slug="memory",
        title="Memory against batch",
        x_label="batch, sequences a step",
        y_label="memory, GiB",
        series=[*peak, *dashed],
        x_scale="log",
        x_ticks=sorted({configuration.batch for configuration in longest}),
        note="Solid: largest resident size of the process, or the most it had of a GPU. Dashed: "
        "weights and KV cache alone.",
    )
    return _split(chart)


def _by_lengths(groups: Groups) -> dict[tuple[int, int], Groups]:
    found: dict[tuple[int, int], Groups] = defaultdict(dict)
    for configuration, members in groups.items():
        found[configuration.prompt_tokens, configuration.new_tokens][configuration] = members
    return dict(sorted(found.items()))


def _against_batch(
    groups: Groups, path: tuple[str, ...], *, samples: str | None = None, factor: float = 1.0
) -> list[Series]:
    points: dict[str, list[Point]] = defaultdict(list)
    for configuration, members in groups.items():
        values = [factor * value for receipt in members for value in _figure(receipt, path)]
        if not values:
            continue
        every = [value for receipt in members for value in receipt.samples.get(samples or "", ())]
        ends = (min(every), max(every)) if len(every) > 1 else (None, None)
        points[configuration.name].append(Point(configuration.batch, median(values), *ends))
    return [Series(name, found) for name, found in points.items()]


def _figure(receipt: Receipt, path: tuple[str, ...]) -> list[float]:
    if path == ("memory", "allocated_bytes"):
        parts = [number(receipt.results, "memory", f"{part}_bytes") for part in ("weights", "kv")]
        known = [part for part in parts if part is not None]
        return [sum(known)] if len(known) == len(parts) else []
    is_peak = path == ("memory", "peak_bytes")
    value = peak_bytes(receipt) if is_peak else number(receipt.results, *path)
    return [] if value is None else [value]


def peak_bytes(receipt: Receipt) -> float | None:
    """The most memory that a measurement had: of the GPU where that ran it, else of the process."""
    of = "gpu" if receipt.executed["device"] == "cuda" else "rss"
    return number(receipt.results, "memory", f"peak_{of}_bytes")


def _fitting_scale(chart: Chart) -> Chart:
    """From zero, unless that would flatten a series: then logarithmic."""
    heights = [max(point.y for point in series.points) for series in chart.series]
    is_flat = min(heights) > 0 and max(heights) > _FLAT * min(heights)
    return replace(chart, y_scale="log") if is_flat else chart


def _split(chart: Chart) -> list[Chart]:
    """As many charts as keep within MAX_SERIES colours each; none of no series."""
    own = [series for series in chart.series if series.like is None]
    parts = [own[start : start + MAX_SERIES] for start in range(0, len(own), MAX_SERIES)]
    found = []
    for count, part in enumerate(parts, start=1):
        names = {series.name for series in part}
        like = [series for series in chart.series if series.like in names]
        more = f" ({count} of {len(parts)})" if len(parts) > 1 else ""
        slug_of = chart.slug if len(parts) == 1 else f"{chart.slug}-{count}"
        whole = replace(chart, slug=slug_of, title=chart.title + more, series=[*part, *like])
        found.append(_named_apart(whole))
    return found


def _named_apart(chart: Chart) -> Chart:
    """What all series' names share goes to the title, so that the legend tells them apart."""
    own = [series.name for series in chart.series if series.like is None]
    words = [re.split(r"(?<=[ :])", name) for name in own]
    start, end = _num_shared(words), _num_shared([list(reversed(found)) for found in words])
    if len(own) < 2 or start + end >= min(map(len, words)):
        return chart
    shared = "".join(words[0][:start]).rstrip(" :"), "".join(words[0][len(words[0]) - end :])
    short = {
        name: "".join(found[start : len(found) - end]).rstrip(" :")
        for name, found in zip(own, words, strict=True)
    }
    series = [
        replace(
            found,
            name=short.get(found.name, found.name),
            like=found.like and short.get(found.like, found.like),
        )
        for found in chart.series
    ]
    title = ", ".join([chart.title, " ".join(part for part in shared if part)])
    return replace(chart, title=title.rstrip(", "), series=series)


def _num_shared(words: Sequence[Sequence[str]]) -> int:
    """How many first words are the same in all."""
    count = 0
    while all(len(found) > count and found[count] == words[0][count] for found in words):
        count += 1
    return count


def _rooflines(groups: Groups, receipts: Sequence[Receipt]) -> list[Chart]:
    """One for each processor whose limits are known."""
    found = []
    for cpu in dict.fromkeys(str(receipt.machine["cpu"]) for receipt in receipts):
        bounds = _limits(receipts, cpu)
        own = {
            configuration: [receipt for receipt in members if str(receipt.machine["cpu"]) == cpu]
            for configuration, members in groups.items()
        }
        series = _roofline_points(_longest_prompts(own))
        if bounds is not None and series:
            roof = _roofline(cpu, bounds, [point for one in series for point in one.points])
            parts = _split(replace(roof, series=series))
            found += [replace(part, series=[*part.series, *roof.series]) for part in parts]
    return found


def _longest_prompts(groups: Groups) -> Groups:
    """Each model's cells of the longest prompts; other lengths would lie on top of them."""
    longest: dict[str, int] = {}
    for configuration, found in groups.items():
        if found:
            longest[configuration.name] = max(
                configuration.prompt_tokens, longest.get(configuration.name, 0)
            )
    return {
        configuration: found
        for configuration, found in groups.items()
        if configuration.prompt_tokens == longest.get(configuration.name)
    }


def _limits(receipts: Sequence[Receipt], cpu: str) -> tuple[float, float] | None:
    """Bytes and operations a second at best: of a limits receipt, or of what others relate to.

    Operations in float32 or in integers, whichever the machine does faster: quantised products are
    integer arithmetic, and would lie above a roof of floats.
    """
    reading = "memory_read_bytes_per_second"
    arithmetic = ("float32_operations_per_second", "integer_operations_per_second")
    found = []
    for receipt in receipts:
        if str(receipt.machine["cpu"]) != cpu:
            continue
        if receipt.kind == "limits":
            rates = [number(receipt.results, name, "best") for name in (reading, *arithmetic)]
        else:
            rates = [number(receipt.limits, name) for name in (reading, *arithmetic)]
        operations = max((rate for rate in rates[1:] if rate), default=None)
        if rates[0] and operations:
            found.append((rates[0], operations))
    if not found:
        return None
    return max(memory for memory, _ in found), max(operations for _, operations in found)


def _roofline_points(groups: Groups) -> list[Series]:
    """Decode steps: operations a byte, and operations a second."""
    points: dict[str, list[Point]] = defaultdict(list)
    for configuration, members in groups.items():
        for receipt in members[-1:]:
            achieved = receipt.results.get("achieved")
            bytes_rate = number(achieved, "decode_bytes_per_second")
            rate = number(achieved, "decode_operations_per_second")
            if bytes_rate and rate:
                is_first = not points or configuration.name in list(points)[:1]
                label = str(configuration.batch) if is_first else ""  # all series' would collide
                points[configuration.name].append(Point(rate / bytes_rate, rate / 1e9, label=label))
    return [Series(name, found) for name, found in points.items()]


def _roofline(cpu: str, bounds: tuple[float, float], points: Sequence[Point]) -> Chart:
    """The chart with its roof alone, wide enough for the points."""
    memory, arithmetic = bounds
    ridge = arithmetic / memory
    every = [ridge, *(point.x for point in points)]
    ends = (min(every) / 2, ridge, max(every) * 2)
    name = f"limit: {memory / 1e9:.1f} GB/s read, {arithmetic / 1e9:.1f} Gop/s"
    roof = [Point(x, min(memory * x, arithmetic) / 1e9) for x in ends]
    return Chart(
        slug=f"roofline-{slug(_short_cpu(cpu))}",
        title=f"Roofline: decode steps on {_short_cpu(cpu)}",
        x_label="operations for each byte read",
        y_label="10⁹ operations a second",
        series=[Series(name, roof, style="limit")],
        x_scale="log",
        y_scale="log",
        note="Numbers are batch sizes; they rise from left to right in every series. Each model at "
        "its longest prompts. Limits as measured on this machine. Bytes and operations are what "
        "the mathematics needs at least: an executor that moves or computes more lies lower, "
        "one whose weights stay in the caches may lie above.",
    )


def _short_cpu(name: str) -> str:
    """A processor's name without its marks and clock."""
    return " ".join(re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|@.*$", " ", name).split())
