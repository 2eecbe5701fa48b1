"""Draws charts: as SVG that follows a page's light or dark colours, and as PNG files.

A chart is data; matplotlib draws it in placeholder colours, which become CSS variables in the SVG
and a theme's colours in a PNG.
"""

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.core.errors import ConfigError

Scale = Literal["zero", "log"]
MAX_SERIES = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A value, with the least and most that was measured where that is known."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one thing; `like` names the series whose colour it shares.

    The legend names series of one name once.
    """

    name: str
    points: Sequence[Point]
    style: Literal["line", "dashed", "limit"] = "line"
    like: str | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw: axes begin at zero, or are logarithmic and say so in their labels.

    With `x_names` it is a chart of bars: a point's x is the index of its name.
    """

    slug: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Scale = "zero"
    y_scale: Scale = "zero"
    x_ticks: Sequence[float] = ()
    x_names: Sequence[str] = ()
    note: str = ""
    marked_x: tuple[float, str] | None = None  # a vertical line, and what it says


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page."""

    page: str
    ink: str
    muted: str
    grid: str
    series: Sequence[str]


LIGHT = Theme(
    page="#ffffff",
    ink="#1b1f24",
    muted="#57606a",
    grid="#d8dee4",
    series=["#1f63c4", "#c4570a", "#18794e", "#7c3fc0", "#c4264a", "#0b7a8c", "#8a6100", "#5b6472"],
)
DARK = Theme(
    page="#14171c",
    ink="#e8ecf1",
    muted="#a3adb8",
    grid="#343b45",
    series=["#6ea8fe", "#ff9f5a", "#56d19b", "#c198ff", "#ff7f9a", "#4fd0e3", "#e3b84d", "#b3bcc7"],
)
# matplotlib wants colours; these stand for the theme's
_PLACES = Theme(
    page="#000001",
    ink="#000002",
    muted="#000003",
    grid="#000004",
    series=[f"#0000{index:02x}" for index in range(0x10, 0x10 + MAX_SERIES)],
)
_MARKERS = "osD^vPX*"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def variables(theme: Theme) -> str:
    """A theme as CSS variables, by the names that the SVG uses."""
    named = {"page": theme.page, "ink": theme.ink, "muted": theme.muted, "grid": theme.grid}
    named |= {f"series-{index}": color for index, color in enumerate(theme.series)}
    return " ".join(f"--{name}: {color};" for name, color in named.items())


def svg(chart: Chart) -> str:
    """The chart for a page: no file of its own, no fixed colour."""
    content = io.StringIO()
    figure = _draw(chart, _PLACES, with_title=False)
    with _settings(chart):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: (\d+(?:\.\d+)?px) [^;\"]*", rf"font: \1 {_FONT}", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    named = re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", variables(_PLACES))
    for name, color in named:
        text = text.replace(color, f"var(--{name})")
    return text


def png(chart: Chart, path: Path, theme: Theme = LIGHT) -> None:
    """The chart as a picture for slides."""
    figure = _draw(chart, theme, with_title=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _settings(chart):
            figure.savefig(path, format="png", dpi=160, facecolor=theme.page, metadata={})
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _settings(chart: Chart) -> Any:
    """matplotlib's settings while drawing: text stays text, and never a formula."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": chart.slug,  # the same chart gives the same file, unlike any other's
            "text.parse_math": False,  # names from receipts may hold a dollar
            "font.size": 13,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


def _draw(chart: Chart, theme: Theme, *, with_title: bool) -> Any:
    with _settings(chart):
        from matplotlib.figure import Figure

        legend = _Legend.of(chart)
        title = textwrap.fill(_clean(chart.title), 62) if with_title else ""
        lines = legend.num_rows + (title.count("\n") + 1.5 if title else 0)
        figure = Figure(figsize=(7.4, 4.0 + 0.26 * lines), layout="constrained")
        axis = figure.subplots()
        axis.set_facecolor("none")
        shown = set(legend.names)
        for index, (series, look) in enumerate(
            zip(chart.series, _looks(chart, theme), strict=True)
        ):
            label = _clean(series.name) if series.name in shown else "_"
            shown.discard(series.name)
            if chart.x_names:
                _draw_bars(axis, chart, index, label, look[0], theme)
            else:
                _draw_series(axis, series, label, look, theme)
        _shape_axes(axis, chart, theme)
        if chart.marked_x is not None:
            _mark(axis, chart.marked_x, theme)
        _draw_legend(figure, axis, legend.num_columns, theme)
        if title:
            figure.suptitle(title, color=theme.ink, fontsize=15)
        return figure


def _looks(chart: Chart, theme: Theme) -> list[tuple[str, str]]:
    """Colour and marker of each series; one that is like another shares its own."""
    limit = (theme.muted, "")
    own = [series.name for series in chart.series if _is_own(series)]
    if len(own) > MAX_SERIES:
        raise ConfigError(f"chart {chart.slug!r} has {len(own)} series; {MAX_SERIES} fit")
    found = {name: (theme.series[index], _MARKERS[index]) for index, name in enumerate(own)}
    return [
        limit if series.style == "limit" else found[series.like or series.name]
        for series in chart.series
    ]


def _is_own(series: Series) -> bool:
    """Whether it has a colour of its own."""
    return series.like is None and series.style != "limit"


def _draw_series(
    axis: Any, series: Series, label: str, look: tuple[str, str], theme: Theme
) -> None:
    color, marker = look
    points = sorted(series.points, key=lambda point: point.x)
    x, y = [point.x for point in points], [point.y for point in points]
    axis.plot(
        x,
        y,
        color=color,
        marker="" if series.style == "dashed" else marker,
        linestyle="--" if series.style == "dashed" else "-",
        linewidth=2.2,
        markersize=8,
        label=label,
        zorder=3,
    )
    for point in points:
        if point.low is not None and point.high is not None:
            axis.vlines(point.x, point.low, point.high, color=color, linewidth=1.6, zorder=3)
        if point.label:
            axis.annotate(
                _clean(point.label),
                (point.x, point.y),
                xytext=(0, -18),
                textcoords="offset points",
                ha="center",
                color=theme.ink,
                fontsize=11,
            )


def _draw_bars(axis: Any, chart: Chart, index: int, label: str, color: str, theme: Theme) -> None:
    """A series' bars, beside those of the others at each name, with their values above."""
    points = chart.series[index].points
    width = 0.8 / len(chart.series)
    shift = (index - (len(chart.series) - 1) / 2) * width
    middles = [point.x + shift for point in points]
    axis.bar(middles, [point.y for point in points], 0.94 * width, color=color, label=label)
    for middle, point in zip(middles, points, strict=True):
        top = point.y
        if point.low is not None and point.high is not None:
            top = max(top, point.high)
            axis.vlines(middle, point.low, point.high, color=theme.ink, linewidth=1.4, zorder=3)
        axis.annotate(
            f"{point.y:.3g}" if point.y < 1000 else f"{point.y:,.0f}",
            (middle, top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=theme.ink,
            fontsize=11,
        )


def _shape_axes(axis: Any, chart: Chart, theme: Theme) -> None:
    axis.margins(y=0.1)
    said = {"zero": "", "log": " (log scale)"}
    if chart.x_names:
        axis.set_xlim(-0.6, len(chart.x_names) - 0.4)
    elif chart.x_scale == "log":
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
    if chart.y_scale == "log":
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.12 * _highest(chart))  # room for markers and values
    if chart.x_names:
        axis.set_xticks(range(len(chart.x_names)), list(map(_clean, chart.x_names)))
    if chart.x_ticks:
        axis.set_xticks(chart.x_ticks, [f"{tick:.3g}" for tick in chart.x_ticks])
        axis.minorticks_off()
    if chart.y_scale == "log":
        _plain_log_labels(axis.yaxis)
    if chart.x_scale == "log" and not chart.x_ticks:
        _plain_log_labels(axis.xaxis)
    axis.set_xlabel(_clean(chart.x_label) + said[chart.x_scale], color=theme.ink)
    upright = textwrap.fill(_clean(chart.y_label), 32)  # no longer than the axis
    upright += said[chart.y_scale].replace(" ", "\n", 1)
    axis.set_ylabel(upright, color=theme.ink)
    axis.tick_params(colors=theme.muted, which="both", labelcolor=theme.ink)
    lines: Literal["y", "both"] = "y" if chart.x_names else "both"
    axis.grid(visible=True, which="major", axis=lines, color=theme.grid, linewidth=0.9)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_color(theme.muted)


def _highest(chart: Chart) -> float:
    points = [point for series in chart.series for point in series.points]
    return max((max(point.y, point.high or 0.0) for point in points), default=0.0) or 1.0


def _plain_log_labels(axis: Any) -> None:
    """1, 10, 100 in place of powers; between them 2 and 5 where the range is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high / max(low, 1e-300) < 300 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=15))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _mark(axis: Any, marked: tuple[float, str], theme: Theme) -> None:
    axis.axvline(marked[0], color=theme.muted, linewidth=1.4, linestyle=":")
    axis.annotate(
        _clean(marked[1]),
        (marked[0], 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(6, -4),
        textcoords="offset points",
        va="top",
        color=theme.ink,
        fontsize=12,
    )


class _Legend(NamedTuple):
    """Which series a legend names, and in how many columns they fit."""

    names: list[str]
    num_columns: int

    @property
    def num_rows(self) -> int:
        return math.ceil(len(self.names) / self.num_columns)

    @classmethod
    def of(cls, chart: Chart) -> "_Legend":
        names = list(dict.fromkeys(series.name for series in chart.series))
        widest = max((len(_clean(name)) for name in names), default=1)
        return cls(names, max(1, min(4, len(names), 62 // (widest + 6))))


def _draw_legend(figure: Any, axis: Any, num_columns: int, theme: Theme) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=num_columns,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=12,
    )


def _clean(text: str) -> str:
    """Text that XML can hold, on one line, not endlessly long."""
    shown = "".join(mark if mark.isprintable() else " " for mark in text)
    return shown if len(shown) <= 90 else shown[:89] + "…"
