"""What receipts of `quire bench compare` show: rates side by side, and their ratios."""

from collections.abc import Iterator, Sequence

from quire_bench.charts import MAX_SERIES, Chart, Point, Series
from quire_bench.compare import KIND, METRICS, QUIRE, Measured, measured
from quire_bench.receipts import Receipt, number, slug
from quire_bench.report_data import title_of

_WORDS = {
    "output_tokens_per_second": "Completion tokens a second of the whole run, prompts included",
    "prompt_tokens_per_second": "Prompt tokens a second",
    "completion_tokens_per_second": "Completion tokens a second once the prompts are read",
}


def engine_name(receipt: Receipt, engine: str) -> str:
    """An engine with its version or executor, and its threads where they are known."""
    if engine == QUIRE:
        return f"quire, {receipt.executed['device']}{_threads(receipt.asked.get('threads'))}"
    version = receipt.versions.get(engine)
    if version in (None, "unknown"):
        return engine  # a server: its threads are not known
    threads = number(receipt.settings, "rival_threads") or receipt.asked.get("threads")
    return f"{engine} {version}{_threads(threads)}"


def _threads(count: float | None) -> str:
    return "" if count is None else f", {count:g} thread{'' if count == 1 else 's'}"


def compare_charts(receipts: Sequence[Receipt]) -> list[Chart]:
    """A chart of bars for each rate of each receipt."""
    compared = [receipt for receipt in receipts if receipt.kind == KIND]
    return [
        chart
        for count, receipt in enumerate(compared, start=1)
        for chart in _charts(receipt, f"{count}-{slug(title_of(receipt))}")
    ]


def _charts(receipt: Receipt, ending: str) -> Iterator[Chart]:
    lengths = [number(receipt.settings, name) for name in ("prompt_tokens", "new_tokens")]
    prompt, new = (f"{length or 0:g}" for length in lengths)
    for metric in METRICS:
        found = [one for one in measured(receipt.results) if one.metric == metric]
        batches = sorted({one.batch for one in found})
        engines = list(dict.fromkeys(one.engine for one in found))[:MAX_SERIES]
        if len(engines) < 2:
            continue  # nothing to compare with
        yield Chart(
            slug=f"compare-{metric.removesuffix('_tokens_per_second')}-{ending}",
            title=f"{_WORDS[metric]}: {receipt.model['name']}, prompts of {prompt}, "
            f"completions of {new}",
            x_label="batch, sequences that run together",
            y_label="tokens a second",
            series=[
                Series(
                    engine_name(receipt, engine),
                    [_point(one, batches) for one in found if one.engine == engine],
                )
                for engine in engines
            ],
            x_names=list(map(str, batches)),
            note="Engines in turn, round by round; bars are medians, lines the slowest and fastest "
            "round.",
        )


def _point(one: Measured, batches: Sequence[int]) -> Point:
    middle, low, high = (number(one.rate, name) for name in ("median", "low", "high"))
    return Point(batches.index(one.batch), middle or 0.0, low, high)
