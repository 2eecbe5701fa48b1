"""Draws the engine's figures as SVG, readable on light and dark pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire_bench.engine import Fairness, Pacing

_QUIET = "#4c78a8"
_FLOODED = "#e45756"
_UNFAIR = "#b0a8b9"


def draw_fairness(results: Sequence[tuple[Fairness, Fairness]], path: Path) -> None:
    """Light keys' first-token times: without the heavy key, with it, and with fairness off."""
    figure, axes = _axes(len(results))
    for axis, (fair, unfair) in zip(axes, results, strict=True):
        values = [fair.quiet_p95_s, fair.flooded_p95_s, unfair.flooded_p95_s]
        milliseconds = [1000 * value for value in values]
        names = ["without\nthe flood", "with it", "with it,\nfairness off"]
        bars = axis.bar(names, milliseconds, color=[_QUIET, _FLOODED, _UNFAIR])
        axis.bar_label(bars, [f"{value:,.0f} ms" for value in milliseconds], padding=2)
        axis.set_yscale("log")
        axis.set_ylim(min(milliseconds) / 3, max(milliseconds) * 3)
        axis.set_ylabel("p95 time to first token, ms (log scale)")
        axis.set_title(fair.machine)
    figure.suptitle("Five keys beside one at ten times their load (simulated)")
    _save(figure, path)


def draw_pacing(results: Sequence[Pacing], path: Path) -> None:
    """Inter-token times against load: paced, and the best static setting."""
    figure, axes = _axes(len(results))
    for axis, result in zip(axes, results, strict=True):
        loads = [100 * row.load for row in result.loads]
        axis.plot(loads, [row.p95_itl_ms for row in result.loads], "o-", label="paced")
        static = f"static: batch {result.best_batch}, {result.best_step_tokens} tokens a step"
        axis.plot(loads, [row.static_p95_itl_ms for row in result.loads], "s--", label=static)
        axis.axhline(result.slo_itl_ms, color=_FLOODED, linewidth=1, label="target")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("load, % of what the best static setting can do")
        axis.set_ylabel("p95 time between tokens, ms")
        axis.set_title(result.machine)
        axis.legend(loc="lower right")
    figure.suptitle("Pacing to an inter-token target (simulated)")
    _save(figure, path)


def _axes(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * count, 4.2), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "quire"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None})
