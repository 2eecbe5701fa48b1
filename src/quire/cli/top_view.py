"""What `quire top` shows: an engine's steps and rates as /v1/stats tells them, drawn as text."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.cli.program import printable

_MAX_LANES = 512
_GUTTER = 34  # columns before the steps of a lane


class StepSeen(NamedTuple):
    """A step, by the lanes that it had rows in."""

    at: float
    elapsed_s: float
    floor_s: float | None
    chunks: frozenset[int]
    decodes: frozenset[int]


@dataclass
class View:
    """The latest answer, the steps and rates before it, and the lanes of sequences."""

    reply: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    newest: int | None = None  # id of the newest step
    steps: deque[StepSeen] = field(default_factory=lambda: deque(maxlen=1024))
    lanes: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # in order of appearance
    done: dict[int, int] = field(default_factory=dict)  # tokens computed, by lane
    history: deque[float] = field(default_factory=lambda: deque(maxlen=512))  # tokens/s

    def take(self, reply: Mapping[str, Any]) -> None:
        if self._is_of_another_engine(reply):
            self._forget()
        self.before, self.reply = self.reply, reply
        latest = reply.get("latest") or {"lanes": {}, "steps": []}
        for name, lane in latest["lanes"].items():
            self.lanes.setdefault(int(name), lane)
        for step in latest["steps"]:
            self._take_step(step)
        while len(self.lanes) > _MAX_LANES:
            oldest = next(iter(self.lanes))
            del self.lanes[oldest]
            self.done.pop(oldest, None)
        if self.before:
            self.history.append(self.rates()["completion_tokens_per_second"] or 0.0)

    def _is_of_another_engine(self, reply: Mapping[str, Any]) -> bool:
        """Whether the server was started again, as its counters are lower, or it is another
        model's."""
        if self.reply and any(
            reply.get(name) != self.reply.get(name) for name in ("model", "device")
        ):
            return True
        return any(
            reply[name] < self.reply[name]
            for name in ("uptime_s", "num_steps")
            if name in self.reply
        )

    def _forget(self) -> None:
        self.reply, self.newest = {}, None
        for kept in (self.steps, self.lanes, self.done, self.history):
            kept.clear()

    def _take_step(self, step: Mapping[str, Any]) -> None:
        self.newest = step["id"]
        for lane, start, count in step["chunks"]:
            self.done[lane] = start + count
        for lane, start in step["decodes"]:
            self.done[lane] = start + 1
        self.steps.append(
            StepSeen(
                step["at"],
                step["elapsed_s"],
                step["floor_s"],
                frozenset(row[0] for row in step["chunks"]),
                frozenset(row[0] for row in step["decodes"]),
            )
        )

    def rates(self) -> dict[str, float | None]:
        """Over the time between the last two answers; None where nothing is known."""
        seconds = self.reply["uptime_s"] - self.before.get("uptime_s", self.reply["uptime_s"])
        since = self.before.get("uptime_s", 0.0)
        recent = [step for step in self.steps if step.at > since]
        spent = [step for step in recent if step.floor_s is not None and not step.chunks]
        return {
            "completion_tokens_per_second": self._rate("completion_tokens", seconds, recent),
            "prompt_tokens_per_second": self._rate("prompt_tokens", seconds, None),
            "steps_per_second": len(recent) / seconds if seconds else None,
            "step_seconds": _mean([step.elapsed_s for step in recent]),
            "floor_share": _share(
                sum(step.floor_s or 0.0 for step in spent), sum(step.elapsed_s for step in spent)
            ),
        }

    def _rate(self, name: str, seconds: float, steps: list[StepSeen] | None) -> float | None:
        if not seconds:
            return None
        if name in self.reply:
            return float(self.reply[name] - self.before[name]) / seconds
        return None if steps is None else sum(len(step.decodes) for step in steps) / seconds

    def live_lanes(self) -> list[int]:
        """Those with a row in one of the last steps, in order of appearance."""
        last = list(self.steps)[-3:]
        seen = {lane for step in last for lane in (*step.chunks, *step.decodes)}
        return [lane for lane in self.lanes if lane in seen]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if part and whole else None


# ---- the picture

_BOLD, _DIM, _RED, _AMBER, _TEAL, _BLUE = "1", "2", "31", "33", "36", "34"


class Line:
    """Pieces of text, each in a style, cut at the screen's width."""

    def __init__(self, width: int) -> None:
        self._left = width
        self._parts: list[str] = []

    def add(self, text: str, style: str = "") -> "Line":
        text = printable(text)[: self._left]
        self._left -= len(text)
        self._parts.append(f"\x1b[{style}m{text}\x1b[0m" if style and text else text)
        return self

    def __str__(self) -> str:
        return "".join(self._parts)


def picture(view: View, width: int, height: int, note: str = "") -> list[str]:
    """The screen's lines, at most `height`."""
    if not view.reply:
        return [str(Line(width).add("quire top", _BOLD)), "", str(Line(width).add(note, _RED))]
    lines = [_title(view, width), *_figures(view, width)]
    lines.append(Line(width).add(note, _RED) if note else Line(width))
    lines += _lanes(view, width, height - len(lines) - 1)
    return [str(line) for line in lines][:height]


def _title(view: View, width: int) -> Line:
    reply = view.reply
    line = Line(width).add(" quire top ", _BOLD).add(f" {reply['model']}", _BLUE)
    state = reply["health"]["status"] if "health" in reply else reply["status"]
    whose = "" if "num_running" in reply else f", key {reply['key']}: its own figures"
    line.add(f"  {state}", _TEAL if state in ("ok", "ready") else _RED)
    return line.add(f"  up {_duration(reply['uptime_s'])}{whose}   q quits", _DIM)


def _figures(view: View, width: int) -> Iterator[Line]:
    reply, rates = view.reply, view.rates()
    figures = reply if "num_running" in reply else reply["own"]
    rate = rates["completion_tokens_per_second"]
    line = Line(width).add(" tokens/s  ", _DIM).add("–" if rate is None else f"{rate:,.1f}", _BOLD)
    yield line.add("  ").add(_sparks(view.history, min(40, max(0, width - 24))), _TEAL)
    line = Line(width).add(" batch     ", _DIM).add(str(figures["num_running"]), _BOLD)
    if "health" in reply:
        line.add(f" of {reply['health']['batch_limit']}", _DIM)
    yield line.add(f"   waiting {figures['num_waiting']}").add(_reasons(reply), _AMBER)
    yield _step_line(rates, width)
    if "kv_blocks" in reply:
        yield _kv_line(reply["kv_blocks"], width)
        queries = reply["prefix_cache_queries"]
        found = f"{reply['prefix_cache_hits'] / queries:.0%}" if queries else "–"
        line = Line(width).add(" prefix    ", _DIM).add(found, _BOLD)
        yield line.add(f"  of {queries:,} prompt tokens were found computed", _DIM)


def _step_line(rates: Mapping[str, float | None], width: int) -> Line:
    line = Line(width).add(" step      ", _DIM)
    seconds, share, each = rates["step_seconds"], rates["floor_share"], rates["steps_per_second"]
    if seconds is None:
        return line.add("–  none ended lately", _DIM)
    line.add(f"{seconds * 1000:.1f} ms", _BOLD)
    if each is not None:
        line.add(f"  {each:.1f} a second", _DIM)
    if share is not None:
        line.add(f"  decodes at {share:.0%} of the floor's speed", _AMBER)
    return line


def _kv_line(blocks: Mapping[str, int], width: int) -> Line:
    cells = min(40, max(0, width - 48))
    used = round(cells * blocks["used"] / max(1, blocks["total"]))
    cached = min(cells - used, round(cells * blocks["cached"] / max(1, blocks["total"])))
    line = Line(width).add(" KV        ", _DIM).add("█" * used, _BLUE).add("▒" * cached, _BLUE)
    line.add("·" * (cells - used - cached), _DIM)
    words = (
        f"  {blocks['used']:,} of {blocks['total']:,} blocks in use, {blocks['cached']:,} cached"
    )
    return line.add(words, _DIM)


def _reasons(reply: Mapping[str, Any]) -> str:
    found = sorted(reply.get("waiting_by_reason", {}).items(), key=lambda pair: -pair[1])
    words = ", ".join(f"{count} {reason}" for reason, count in found)
    return f": {words}" if words else ""


def _lanes(view: View, width: int, height: int) -> Iterator[Line]:
    line = Line(width).add(f" {'sequence':<10}{'key':<9}{'tokens':<14}", _DIM)
    yield line.add("█", _AMBER).add(" prompt chunk  ", _DIM).add("━", _TEAL).add(" decode", _DIM)
    steps = list(view.steps)[-max(1, width - _GUTTER - 1) :]
    lanes = view.live_lanes()
    for lane in lanes[: height if len(lanes) <= height else max(0, height - 1)]:
        name = view.lanes[lane]
        prompt, done = name["prompt_tokens"], view.done.get(lane, 0)
        tokens = f"{prompt}+{done - prompt}" if done > prompt else f"{done}/{prompt}"
        line = Line(width).add(f" #{lane:<9}").add(f"{name['key'][:8]:<9}", _BLUE)
        line.add(f"{tokens:<14}", _DIM)
        yield _cells(line, lane, steps)
    if len(lanes) > height > 0:
        yield Line(width).add(f" and {len(lanes) - height + 1} more", _DIM)


def _cells(line: Line, lane: int, steps: list[StepSeen]) -> Line:
    """A column for each step; neighbours of one kind are one piece."""
    last, count = "", 0
    for step in [*steps, None]:
        if step is None:
            kind = "end"
        else:
            kind = "█" if lane in step.chunks else "━" if lane in step.decodes else " "
        if kind != last:
            line.add(last * count, {"█": _AMBER, "━": _TEAL}.get(last, ""))
            last, count = kind, 0
        count += 1
    return line


def _sparks(values: deque[float], width: int) -> str:
    seen = list(values)[-width:] if width else []
    most = max(seen, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * value / most)] if most else "▁" for value in seen)


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {whole:02d} s"
