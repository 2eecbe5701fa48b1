"""What the report draws of convoys, soaks and comparisons, and how bars look."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.bench.receipt_samples import receipt

from quire_bench.charts import Chart, Point, Series, svg
from quire_bench.receipts import Receipt
from quire_bench.report import charts
from quire_bench.report_tables import Table, tables


def times(first: float) -> Mapping[str, Any]:
    ranks = {"p50": first, "p95": 2 * first, "p99": 3 * first}
    return {
        "requests": 9,
        "errors": 0,
        "completion_tokens_per_second": 50.0,
        "time_to_first_token_s": ranks,
        "inter_token_s": ranks,
    }


def convoy() -> Receipt:
    return receipt(
        kind="serve",
        settings={"scenario": "convoy", "mix": "chat", "long_prompt_tokens": 512, "long_rate": 0.5},
        results={"alone": times(0.1), "beside_long": times(0.4), "long": times(2.0)},
        executed={"device": None, "kernels": [], "fallback": None, "server": "a server 1.0"},
    )


def soak(**window: Any) -> Receipt:
    windows = [
        {
            "start_s": 2.0 * place,
            "completion_tokens_per_second": 100.0 - place,
            "time_to_first_token_p50_s": None if place else 0.1,
            "memory_bytes": None,
        }
        | window
        for place in range(3)
    ]
    return receipt(
        kind="serve",
        settings={"scenario": "soak", "clients": 4},
        results={
            **times(0.1),
            "soak": {"windows": windows},
            "drift": {"completion_tokens_per_second": -0.02},
        },
    )


def compared() -> Receipt:
    def rate(median: float) -> dict[str, float]:
        return {"low": median / 2, "median": median, "high": 2 * median}

    def cell(ours: float, theirs: float) -> dict[str, Any]:
        name = "completion_tokens_per_second"
        rival = {"rate": rate(theirs), "quire_by_rival": rate(ours / theirs)}
        return {"quire": {name: {"rate": rate(ours)}}, "llama.cpp": {name: rival}}

    return receipt(
        kind="compare",
        settings={"prompt_tokens": 16, "new_tokens": 8, "rival_threads": 2},
        asked={"device": "cpu", "threads": 1},
        results={"batch_1": cell(10.0, 40.0), "batch_8": cell(60.0, 50.0)},
        versions={"quire": "0.1.0", "llama.cpp": "0.3"},
    )


def table(receipts: list[Receipt], title: str) -> Table:
    (found,) = [table for table in tables(receipts) if table.title == title]
    return found


def test_a_convoy_shows_short_requests_without_and_beside_long_ones() -> None:
    first, between = charts([convoy()])
    assert first.x_names == between.x_names == ("p50", "p95", "p99")
    alone, beside = first.series
    assert [point.y for point in alone.points] == pytest.approx([100.0, 200.0, 300.0])
    assert [point.y for point in beside.points] == pytest.approx([400.0, 800.0, 1200.0])
    assert first.y_scale == "zero"
    assert "long prompts of 512 tokens, 0.5 a second" in first.note
    assert first.title.endswith("tiny Q8_0 on a server 1.0")


def test_a_neighbour_shows_one_keys_times_alone_and_beside_another() -> None:
    loads = {"alone": 0.1, "beside_full": 0.2, "beside_flood": 0.3}
    first, _ = charts(
        [
            receipt(
                kind="serve",
                settings={"scenario": "neighbour", "clients": 8, "flood": 64},
                results={name: times(first) for name, first in loads.items()},
            )
        ]
    )
    assert [series.points[1].y for series in first.series] == pytest.approx([200.0, 400.0, 600.0])
    assert "8 requests running, the one that floods 64" in first.note


def test_a_soak_shows_what_it_has_over_time() -> None:
    speed, waiting = charts([soak()])  # no memory: its process was not known
    assert [(point.x, point.y) for point in speed.series[0].points] == [
        (1.0, 100.0),
        (3.0, 99.0),
        (5.0, 98.0),
    ]
    assert "-2.0%" in speed.note
    assert len(waiting.series[0].points) == 1
    *_, memory = charts([soak(memory_bytes=3 << 29)])
    assert {point.y for point in memory.series[0].points} == {1.5}
    assert memory.y_scale == "zero"


def test_a_load_is_tabled_by_its_clients_or_its_rate() -> None:
    opened = receipt(kind="serve", settings={"rate": 0.5}, results=times(0.1))
    rows = table([soak(), opened], "Serving").rows
    assert [row[3] for row in rows] == ["4 clients", "0.5/s"]


def test_a_comparison_is_drawn_and_tabled_by_engine_and_batch() -> None:
    (chart,) = charts([compared()])
    assert chart.x_names == ["1", "8"]
    ours, theirs = chart.series
    assert (ours.name, theirs.name) == ("quire, cpu, 1 thread", "llama.cpp 0.3, 2 threads")
    assert theirs.points == [Point(0, 40.0, 20.0, 80.0), Point(1, 50.0, 25.0, 100.0)]
    rows = table([compared()], "Beside other engines").rows
    assert rows[0] == [
        *("tiny", "quire, cpu, 1 thread", "completion", "1", "16", "8", "10.0 (5–20.0)", "–"),
    ]
    assert rows[3][-2:] == ["50.0 (25.0–100)", "1.2 (0.6–2.4)"]


def test_quire_alone_is_no_comparison() -> None:
    alone = compared()
    cells = {name: {"quire": cell["quire"]} for name, cell in alone.results.items()}  # type: ignore[index]
    assert charts([receipt(kind="compare", results=cells)]) == []


def test_bars_stand_on_zero_beside_one_another_with_their_values() -> None:
    chart = Chart(
        slug="bars",
        title="bars",
        x_label="x",
        y_label="y",
        series=[Series("one", [Point(0, 1234.0)]), Series("two", [Point(1, 0.5, 0.25, 0.75)])],
        x_names=("left", "right"),
    )
    drawn = svg(chart)
    assert "1,234" in drawn and ">0.5<" in drawn
    assert ">left<" in drawn and ">right<" in drawn
    assert ">0<" in drawn  # where the axis begins
