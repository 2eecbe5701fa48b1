"""The report: which charts and tables receipts give, on a page that needs and trusts nothing."""

import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.bench.receipt_samples import receipt

from quire.cli import main
from quire.core.errors import ConfigError
from quire_bench.charts import DARK, LIGHT, MAX_SERIES, Chart, Point, Series, png, svg
from quire_bench.commands.grid import BATCHES, PROMPTS, QUANTS
from quire_bench.receipts import Executed, Receipt, write
from quire_bench.report import BEGIN, END, charts, gather, html, markdown, with_tables, write_pngs
from quire_bench.report_tables import tables

LIMITS = {"memory_read_bytes_per_second": 20e9, "float32_operations_per_second": 100e9}
HOSTILE = '<script>alert("x")</script> $\\frac{1}{0}$ & | `code`'


def cell(batch: int, rate: float, **changes: Any) -> Receipt:
    results: dict[str, Any] = {
        "completion_tokens_per_second": rate,
        "prompt_tokens_per_second": 10 * rate,
        "spread": {"completion_tokens_per_second": {"low": 0.9 * rate, "high": 1.1 * rate}},
        "inter_token_s": {"p50": batch / rate, "p95": 0.2, "p99": 0.3},
        "time_to_first_token_s": {"p50": 0.1, "p95": 0.2, "p99": 0.3},
        "memory": {
            "weights_bytes": 1 << 30,
            "kv_bytes": batch << 20,
            "peak_rss_bytes": 3 << 29,
        },
        "achieved": {
            "decode_bytes_per_second": 1e9 * rate,
            "decode_operations_per_second": 2e9 * rate * batch,
        },
        "utilisation": {"decode_memory_share": rate / 20},
    }
    settings = {"batch": batch, "prompt_tokens": 16, "new_tokens": 8}
    facts: dict[str, Any] = {"kind": "grid-cell", "settings": settings, "limits": LIMITS, **changes}
    samples = {"completion_tokens_per_second": [0.9 * rate, rate, 1.1 * rate]}
    return receipt(samples, results=results, **facts)


def step(rate: float, first: float) -> Mapping[str, Any]:
    times = {"p50": first, "p95": 2 * first, "p99": 3 * first, "max": 4 * first, "count": 9}
    return {
        "rate": rate,
        "requests": 9,
        "errors": 1,
        "errors_by_kind": {"timeout": 1},
        "completion_tokens_per_second": 50.0,
        "time_to_first_token_s": times,
        "inter_token_s": times,
    }


def saturation() -> Receipt:
    steps = [step(1.0, 0.1), step(2.0, 0.2), step(4.0, 2.0)]
    return receipt(
        kind="serve",
        settings={"scenario": "saturation", "mix": "chat"},
        results={"saturation": {"steps": steps}, "knee_rate": 2.0},
    )


def some() -> list[Receipt]:
    cells = [cell(batch, 10.0 * batch**0.5) for batch in (1, 2, 4)]
    limits = receipt(
        kind="limits",
        settings={"threads": [1, 2]},
        results={name: {"1": 1e9, "2": 2e9, "best": value} for name, value in LIMITS.items()},
    )
    return [*cells, saturation(), limits]


def by_slug(receipts: list[Receipt]) -> dict[str, Chart]:
    return {chart.slug: chart for chart in charts(receipts)}


def test_receipts_give_every_chart_they_have_figures_for() -> None:
    found = by_slug(some())
    assert list(found) == [
        "throughput-16-8",
        "inter-token-16-8",
        "roofline-a",
        "memory",
        "load-time_to_first_token-1-tiny-Q8_0-on-cpu",
        "load-inter_token-1-tiny-Q8_0-on-cpu",
    ]
    (throughput,) = found["throughput-16-8"].series
    assert [(point.x, point.y) for point in throughput.points] == [
        (1, 10.0),
        (2, 10.0 * 2**0.5),
        (4, 20.0),
    ]
    assert (throughput.points[0].low, throughput.points[0].high) == (9.0, 11.0)
    load = found["load-time_to_first_token-1-tiny-Q8_0-on-cpu"]
    assert [series.name for series in load.series] == ["p50", "p95", "p99"]
    assert [point.y for point in load.series[2].points] == pytest.approx([300.0, 600.0, 6000.0])
    assert load.marked_x == (2.0, "knee")
    peak, held = found["memory"].series
    assert peak.points[0].y == 1.5
    assert held.points[2].y == 1.0 + 4 / 1024
    assert not charts([receipt()])


def test_models_of_very_different_speed_share_a_log_scale() -> None:
    slow, fast = cell(1, 10.0), cell(1, 900.0, name="another")
    assert by_slug([slow])["throughput-16-8"].y_scale == "zero"
    assert by_slug([slow, fast])["throughput-16-8"].y_scale == "log"
    assert by_slug([slow, cell(1, 90.0, name="another")])["throughput-16-8"].y_scale == "zero"


def test_the_roofline_has_our_points_under_the_measured_roof() -> None:
    ours, roof = by_slug(some())["roofline-a"].series
    assert [point.x for point in ours.points] == [2.0, 4.0, 8.0]  # operations a byte
    assert [point.y for point in ours.points] == pytest.approx([20.0, 40 * 2**0.5, 160.0])
    assert roof.style == "limit"
    assert [point.y for point in roof.points] == pytest.approx([20.0, 100.0, 100.0])
    assert roof.points[1].x == 5.0
    without = [cell(1, 10.0, limits=None)]
    assert "roofline-a" not in by_slug(without)


def test_receipts_of_one_point_are_their_median_and_their_ends() -> None:
    (series,) = by_slug([cell(1, 10.0), cell(1, 14.0), cell(1, 30.0)])["throughput-16-8"].series
    (point,) = series.points
    assert (point.y, point.low) == (14.0, 9.0)
    assert point.high == pytest.approx(33.0)


def test_a_throughput_receipt_is_a_point_at_its_batch() -> None:
    settings = {"requests": 9, "max_batch_size": 4, "prompt_tokens": 16, "new_tokens": 8}
    found = by_slug([cell(1, 10.0, kind="throughput", settings=settings)])
    assert found["throughput-16-8"].series[0].points[0].x == 4


def test_names_of_series_are_what_sets_them_apart() -> None:
    cells = [cell(1, 10.0, name=f"dummy:one:{mix}", quant=mix) for mix in ("Q8_0", "Q4_1")]
    chart = by_slug(cells)["throughput-16-8"]
    assert sorted(series.name for series in chart.series) == ["Q4_1", "Q8_0"]
    assert chart.title.endswith(", dummy:one on cpu")
    memory = by_slug(cells)["memory"]
    assert {series.like for series in memory.series} == {None, "Q4_1", "Q8_0"}
    assert svg(memory).count("weights and KV cache") == 1  # the legend says it once


def test_many_series_are_drawn_in_several_charts() -> None:
    cells = [cell(1, 10.0, name=f"model {place:02}") for place in range(MAX_SERIES + 3)]
    found = [chart for chart in charts(cells) if chart.slug.startswith("throughput")]
    assert [len(chart.series) for chart in found] == [MAX_SERIES, 3]
    assert ["1 of 2" in found[0].title, "2 of 2" in found[1].title] == [True, True]


def test_axes_begin_at_zero_or_say_that_they_are_logarithmic() -> None:
    for chart in charts(some()):
        text = svg(chart)
        assert text.count("(log scale)") == (chart.x_scale == "log") + (chart.y_scale == "log")
        if chart.y_scale == "zero":
            assert re.search(r">0(\.0+)?</text>", text)


class _Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]


def test_the_page_needs_no_other_file_and_follows_light_and_dark() -> None:
    text = html(some())
    page = _Page(text)
    assert page.tags.count("svg") == 6
    assert all(address.startswith("#") for address in page.addresses)
    assert "url(http" not in text
    assert "@import" not in text
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "prefers-color-scheme: dark" in text
    drawn = text[text.index("<svg") : text.rindex("</svg>")]
    assert "var(--series-0)" in drawn
    assert not re.search(r"(fill|stroke): #", drawn)  # no colour that would stay as it is
    assert html(some()) == text


def test_whatever_receipts_hold_is_text_on_the_page() -> None:
    hostile = cell(1, 10.0, name=HOSTILE, versions={"quire": HOSTILE})
    page = html([hostile], title=HOSTILE)
    assert "script" not in _Page(page).tags
    assert "&lt;script&gt;" in page
    assert "\\frac" in page  # and no formula
    table = markdown([hostile])
    assert "<script>" not in table
    widths = {re.sub(r"\\.", "", line).count("|") for line in table.splitlines() if "alert" in line}
    assert widths == {17, 9}  # bars of the two tables: none came from the name


def test_tables_show_figures_and_where_they_come_from() -> None:
    found = {table.title: table for table in tables(some())}
    row = dict(zip(found["Throughput"].columns, found["Throughput"].rows[2], strict=True))
    assert row["batch"] == "4"
    assert row["completion tokens/s"] == "20.0 (18.0–22.0)"
    assert row["× batch 1"] == "2"
    assert row["between p50, ms"] == "200"
    assert row["peak, MiB"] == "1,536"
    assert row["of memory bandwidth"] == "100.0%"
    assert [row[3] for row in found["Serving"].rows] == ["1/s", "2/s", "4/s"]
    assert found["Limits of the machine"].rows[1][1:3] == ["2", "2"]
    origin = found["Where the figures come from"].rows
    assert [origin[0][0], origin[0][1], origin[0][-1]] == ["grid-cell", "tiny Q8_0 on cpu", "3"]
    fallen = cell(1, 1.0, executed={"device": "reference", "kernels": [], "fallback": "no AVX2"})
    assert "no AVX2" in markdown([fallen])
    other = receipt(kind="tune", results={"ratio": 1.25, "more": {}})
    assert ["tune", "tiny Q8_0 on cpu", "ratio", "1.25"] in [
        list(row) for table in tables([other]) for row in table.rows
    ]


def test_traffic_stands_beside_the_greedy_rate_and_the_rivals_figures() -> None:
    none = {"of_greedy": None, "rival": None, "times_rival": None, "goal": None}
    results = {
        "sampled 16 x (128 + 256)": {
            **none,
            "seconds": 0.6,
            "output_tokens_per_second": 6780.0,
            "of_greedy": 0.961,
        },
        "long 1 x (32768 + 64)": {
            **none,
            "seconds": 1.63,
            "output_tokens_per_second": 39.2,
            "rival": 1.57,
            "times_rival": 0.963,
            "goal": 1.0,
        },
    }
    samples = {"sampled 16 x (128 + 256), seconds": [0.6, 0.62, 0.59]}
    [found] = [
        table
        for table in tables([receipt(samples, kind="traffic", results=results)])
        if table.title == "Traffic"
    ]
    sampled, long = found.rows
    assert sampled[2:5] == ["0.6 (0.59–0.62)", "6,780", "0.961"]
    assert long[2:] == ["1.63", "39.2", "–", "1.57", "0.963", "1"]


def test_a_cell_measured_without_limits_has_the_utilisation_of_its_machines_limits() -> None:
    *_, limits = some()
    bare = cell(2, 10.0)
    bare = replace(bare, results={**bare.results, "utilisation": None}, limits=None)
    (without,) = throughput_rows([bare])
    assert without["of memory bandwidth"] == without["of arithmetic"] == "–"
    (row,) = throughput_rows([bare, limits])
    assert (row["of memory bandwidth"], row["of arithmetic"]) == ("50.0%", "40.0%")


def test_on_a_gpu_the_peak_and_the_limits_are_the_gpus() -> None:
    gpu = {"memory_read_bytes_per_second": 40e9, "float16_operations_per_second": 50e9}
    on_gpu: Executed = {"device": "cuda", "kernels": [], "fallback": None}
    machine = {**receipt().machine, "gpu": "a GPU"}
    bare = cell(2, 10.0, executed=on_gpu, machine=machine)
    memory = {"peak_rss_bytes": 1 << 30, "peak_gpu_bytes": 5 << 30}
    bare = replace(bare, results={**bare.results, "utilisation": None, "memory": memory})
    best = {name: {"best": value} for name, value in LIMITS.items()}
    limits = receipt(
        kind="limits", machine=machine, settings={"threads": []}, results={**best, "gpu": gpu}
    )
    (row,) = throughput_rows([bare, limits])
    assert row["peak, MiB"] == "5,120"
    assert (row["of memory bandwidth"], row["of arithmetic"]) == ("25.0%", "80.0%")
    (table,) = [table for table in tables([limits]) if table.title == "Limits of the machine"]
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "processor": "a GPU",
        "threads": "–",
        "memory read, GB/s": "40.0",
        "memory copy, GB/s": "–",
        "float32, Gop/s": "–",
        "integer, Gop/s": "–",
        "float16, Gop/s": "50.0",
    }


RECEIPTS = Path(__file__).parents[2] / "receipts"


@pytest.mark.parametrize("folder", [RECEIPTS, RECEIPTS / "h200"], ids=["receipts", "h200"])
def test_every_row_of_the_committed_grids_has_its_utilisation(folder: Path) -> None:
    found = gather([folder])
    grids = [one for one in found if one.kind == "grid-cell"]
    rows = throughput_rows([*grids, *(one for one in found if one.kind == "limits")])
    assert len(rows) == len(grids) > 0
    assert all(row["of memory bandwidth"].endswith("%") for row in rows)
    assert all(row["of arithmetic, prompts"].endswith("%") for row in rows)


@pytest.mark.parametrize("folder", [RECEIPTS, RECEIPTS / "h200"], ids=["receipts", "h200"])
def test_every_committed_grid_is_whole(folder: Path) -> None:
    """No combination of its batches and prompts is missing, and none is there twice."""
    grids: dict[str, list[tuple[Any, Any]]] = {}
    for one in gather([folder]):
        if one.kind == "grid-cell":
            cell = (one.settings["batch"], one.settings["prompt_tokens"])
            grids.setdefault(str(one.model["name"]), []).append(cell)
    for name, cells in grids.items():
        batches, prompts = (sorted({cell[place] for cell in cells}) for place in (0, 1))
        assert sorted(cells) == list(product(batches, prompts)), name


def test_the_gpu_grid_has_every_mix_batch_and_prompt() -> None:
    cells = {
        (one.model["quant"], one.settings["batch"], one.settings["prompt_tokens"])
        for one in gather([RECEIPTS / "h200"])
        if one.kind == "grid-cell"
    }
    assert cells == set(product(QUANTS, BATCHES, PROMPTS))


def throughput_rows(receipts: list[Receipt]) -> list[dict[str, str]]:
    (table,) = [table for table in tables(receipts) if table.title == "Throughput"]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_every_chart_becomes_a_picture_in_light_and_dark(tmp_path: Path) -> None:
    written = write_pngs(some()[:1], tmp_path / "pictures")
    assert len(written) == 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    chart = Chart("x", "t", "x", "y", [Series("s", [Point(1.0, 2.0)])])
    png(chart, tmp_path / "light.png", LIGHT)
    png(chart, tmp_path / "dark.png", DARK)
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()


def test_tables_go_between_the_marks_and_nowhere_else() -> None:
    document = f"# Speed\n\n{BEGIN}\nold\n{END}\n\nThe end.\n"
    made = with_tables(document, some())
    assert made.startswith("# Speed\n\n")
    assert made.endswith(f"{END}\n\nThe end.\n")
    assert "old" not in made
    assert "| 20.0 (18.0–22.0) |" in made
    assert with_tables(made, some()) == made
    assert with_tables(made, list(reversed(some()))) == made  # the order of files is nothing
    for wrong in ("no marks", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ConfigError, match="receipts:"):
            with_tables(wrong, some())


def test_the_command_writes_the_page_the_pictures_and_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page, document = tmp_path / "receipts", tmp_path / "a" / "r.html", tmp_path / "p.md"
    first, *others = [write(found, folder) for found in some()]
    document.write_text(f"{BEGIN}\n{END}\n")
    words = ["bench", "report", str(folder), str(first)]  # one twice: it counts once
    assert main([*words, "--out", str(page), "--title", "Ours"]) == 0
    assert "<title>Ours</title>" in page.read_text()
    assert "From 5 receipts" in page.read_text()
    update = [*words, "--markdown", str(document)]
    assert main([*update, "--check"]) == 1
    assert "does not match" in capsys.readouterr().err
    assert document.read_text() == f"{BEGIN}\n{END}\n"
    assert main(update) == 0
    assert main([*update, "--check"]) == 0
    others[0].unlink()
    assert main([*update, "--check"]) == 1
    capsys.readouterr()
    title = [*update, "--title", "Ours"]
    absent = [*words, "--markdown", str(tmp_path / "none.md")]
    for wrong in (words, [*words, "--check"], absent, title):
        assert main(wrong) == 1
        assert re.search("say what to make|goes with|cannot read", capsys.readouterr().err)


def test_a_folder_without_receipts_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no receipts"):
        gather([tmp_path])
