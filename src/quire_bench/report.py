"""Renders receipts: one page that needs no other file, PNGs of its charts, and Markdown tables."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from quire.core.errors import ConfigError
from quire_bench.charts import DARK, LIGHT, Chart, png, svg, variables
from quire_bench.receipts import Receipt, read, read_folder
from quire_bench.report_compare import compare_charts
from quire_bench.report_data import model_charts
from quire_bench.report_headline import headline
from quire_bench.report_serving import serving_charts
from quire_bench.report_tables import Table, tables

TEMPLATE = Path(__file__).with_name("report.html")
TITLE = "quire, measured"
BEGIN, END = "<!-- receipts: begin -->", "<!-- receipts: end -->"  # between them all tables go,
HEADLINE_BEGIN, HEADLINE_END = "<!-- headline: begin -->", "<!-- headline: end -->"  # and one here
_GENERATED = "<!-- made by `quire bench report --markdown`; edit nothing between the marks -->"


def gather(paths: Sequence[str | Path]) -> list[Receipt]:
    """The receipts of files and folders, each once."""
    found: dict[Path, Receipt] = {}
    for given in paths:
        path = Path(given)
        chosen = read_folder(path) if path.is_dir() else {path: read(path)}
        if not chosen:
            raise ConfigError(f"{path} holds no receipts (*.json)")
        found |= {name.resolve(): receipt for name, receipt in chosen.items()}
    return list(found.values())


def charts(receipts: Sequence[Receipt]) -> list[Chart]:
    """Every chart that the receipts have figures for."""
    return [
        *model_charts(receipts),
        *compare_charts(receipts),
        *serving_charts(receipts),
    ]


def html(receipts: Sequence[Receipt], title: str = TITLE) -> str:
    """The page; whatever comes from receipts is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    drawn = [
        {"slug": chart.slug, "title": chart.title, "note": chart.note, "svg": Markup(svg(chart))}
        for chart in charts(receipts)
    ]
    return template.render(
        title=title,
        summary=_summary(receipts),
        light=Markup(variables(LIGHT)),
        dark=Markup(variables(DARK)),
        charts=drawn,
        tables=tables(receipts),
    )


def write_pngs(receipts: Sequence[Receipt], folder: Path) -> list[Path]:
    """Each chart for light and for dark slides."""
    written = []
    for chart in charts(receipts):
        for theme, name in ((LIGHT, f"{chart.slug}.png"), (DARK, f"{chart.slug}-dark.png")):
            png(chart, folder / name, theme)
            written.append(folder / name)
    return written


def markdown(receipts: Sequence[Receipt]) -> str:
    """The tables for a Markdown file."""
    return "\n".join(line for table in tables(receipts) for line in _markdown_table(table))


def with_tables(document: str, receipts: Sequence[Receipt], name: str = "the file") -> str:
    """The document with the tables, the headline or both between their marks."""
    has_headline = HEADLINE_BEGIN in document or HEADLINE_END in document
    if has_headline:
        rows = "\n".join(_markdown_table(headline(receipts)))
        document = _between(document, HEADLINE_BEGIN, HEADLINE_END, rows, name)
    if has_headline and BEGIN not in document and END not in document:
        return document
    return _between(document, BEGIN, END, markdown(receipts), name)


def _between(document: str, begin: str, end: str, text: str, name: str) -> str:
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ConfigError(f"{name} must have the lines {begin} and {end} once each")
    before, _, rest = document.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ConfigError(f"{name}: {end} comes before {begin}")
    return f"{before}{begin}\n{_GENERATED}\n\n{text}\n{end}{after}"


def write_text(path: Path, text: str) -> None:
    """Replace a file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".report-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _summary(receipts: Sequence[Receipt]) -> str:
    count = len(receipts)
    machines = dict.fromkeys(str(receipt.machine["cpu"]) for receipt in receipts)
    days = sorted(receipt.created[:10] for receipt in receipts)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    noun = "receipt" if count == 1 else "receipts"
    return f"From {count} {noun}, measured {when} on {', '.join(machines)}."


def _markdown_table(table: Table) -> list[str]:
    ruler = ["---" if index < table.text_columns else "---:" for index in range(len(table.columns))]
    lines = [f"### {table.title}", ""] if table.title else []
    lines += [_markdown_row(table.columns), _markdown_row(ruler)]
    lines += [_markdown_row([_escaped(cell) for cell in row]) for row in table.rows]
    return [*lines, "", *([table.note, ""] if table.note else [])]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(cell: str) -> str:
    """Text that stays within its cell and means nothing to Markdown or HTML."""
    plain = " ".join("".join(mark if mark.isprintable() else " " for mark in cell).split())
    for mark in "\\`*_[]|#":
        plain = plain.replace(mark, f"\\{mark}")
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
