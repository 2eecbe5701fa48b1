"""What receipts show as tables, for the page and for Markdown alike."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from quire_bench.compare import KIND, measured
from quire_bench.load_tables import loads
from quire_bench.receipts import Facts, Receipt, deviation, listed, number
from quire_bench.report_compare import engine_name
from quire_bench.report_data import by_configuration, peak_bytes, title_of
from quire_bench.utilisation import arithmetic_share, utilisation_of

NONE = "–"
_KNOWN_KINDS = (
    "throughput",
    "grid-cell",
    "latency",
    "limits",
    "serve",
    "compare",
    "jobs",
    "traffic",
)


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text; columns from `text_columns` on hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = field(default=1)


def tables(receipts: Sequence[Receipt]) -> list[Table]:
    """Every table that the receipts have figures for; oldest receipts first within each."""
    ordered = sorted(receipts, key=_order)
    found = [
        _limits_table(ordered),
        _throughput_table(ordered),
        _traffic_table(ordered),
        _latency_table(ordered),
        _compare_table(ordered),
        _serve_table(ordered),
        _jobs_table(ordered),
        _other_table(ordered),
        _origin_table(ordered),
    ]
    return [table for table in found if table.rows]


def _order(receipt: Receipt) -> tuple[str, ...]:
    """Oldest first, and never as the files happen to come."""
    return receipt.created, receipt.kind, json.dumps(dict(receipt.settings), sort_keys=True)


def _throughput_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    groups = by_configuration(receipts)
    for configuration, members in groups.items():
        alone = _completion_rate(groups.get(configuration._replace(batch=1), ()))
        for receipt in members:
            results = receipt.results
            sizes = [
                str(configuration.batch),
                str(configuration.prompt_tokens),
                str(configuration.new_tokens),
            ]
            own = _completion_rate([receipt])
            scaling = NONE if not own or not alone else short(own / alone)
            rates = [_rate(results, "prompt"), _rate(results, "completion"), scaling]
            times = [
                _milliseconds(number(results, "time_to_first_token_s", "p50")),
                _milliseconds(number(results, "inter_token_s", "p50")),
                _milliseconds(number(results, "inter_token_s", "p99")),
            ]
            memory = [number(results, "memory", f"{part}_bytes") for part in ("weights", "kv")]
            held = map(_mib, [*memory, peak_bytes(receipt)])
            used = _utilisation(receipt, receipts)
            rows.append([configuration.name, *sizes, *rates, *times, *held, *used])
    return Table(
        title="Throughput",
        columns=(
            *("model", "batch", "prompt", "new", "prompt tokens/s", "completion tokens/s"),
            "× batch 1",
            *("first token p50, ms", "between p50, ms", "between p99, ms"),
            *("weights, MiB", "KV, MiB", "peak, MiB"),
            *("of memory bandwidth", "of arithmetic", "of arithmetic, prompts"),
        ),
        rows=rows,
        note=_THROUGHPUT_NOTE,
    )


_THROUGHPUT_NOTE = (
    "Rates are medians of the runs, with the slowest and the fastest. The peak is the largest "
    "resident size of the process that measured the model, or on a GPU the most memory that it had "
    "of that. The last columns are utilisation: what decode steps need to read, what they need to "
    "compute, and what prompt steps need to compute, as shares of the read bandwidth and of the "
    "arithmetic (integer on a CPU, float16 on a GPU) that `quire bench limits` measured there. "
    "Weights that stay in the processor's caches can come to more than all of the "
    "bandwidth."
)


def _traffic_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        if receipt.kind != "traffic":
            continue
        for name, own in receipt.results.items():
            seconds = receipt.samples.get(f"{name}, seconds", ())
            ends = f" ({short(min(seconds))}–{short(max(seconds))})" if seconds else ""
            share, rival, times, goal = (
                number(own, part) for part in ("of_greedy", "rival", "times_rival", "goal")
            )
            rows.append(
                [
                    title_of(receipt),
                    name,
                    _short_or_none(number(own, "seconds")) + ends,
                    _short_or_none(number(own, "output_tokens_per_second")),
                    NONE if share is None else f"{share:.3f}",
                    *(_short_or_none(value) for value in (rival, times, goal)),
                ]
            )
    return Table(
        title="Traffic",
        columns=(
            *("model", "load", "seconds", "completion tokens/s", "of the greedy rate"),
            *("vLLM's", "times that", "goal"),
        ),
        rows=rows,
        note="Whole runs of so many requests of prompt + completion tokens at once: medians, with "
        "the fastest and the slowest. vLLM's figures are tokens a second, of long loads seconds; "
        "each receipt says where they come from.",
        text_columns=2,
    )


def _short_or_none(value: float | None) -> str:
    return NONE if value is None else short(value)


def _utilisation(receipt: Receipt, receipts: Sequence[Receipt]) -> list[str]:
    found = utilisation_of(receipt, receipts)
    memory = number(found, "decode_memory_share")
    arithmetic = (arithmetic_share(found, phase) for phase in ("decode", "prompt"))
    return [_percent(memory), *map(_percent, arithmetic)]


def _completion_rate(members: Sequence[Receipt]) -> float | None:
    """The median of receipts of one configuration."""
    rates = [number(receipt.results, "completion_tokens_per_second") for receipt in members]
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _rate(results: Facts, name: str) -> str:
    name = f"{name}_tokens_per_second"
    value = number(results, name)
    low, high = (number(results, "spread", name, end) for end in ("low", "high"))
    if value is None:
        return NONE
    return short(value) + (f" ({short(low)}–{short(high)})" if low and high else "")


def _latency_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        for name in ("alone", "together") if receipt.kind == "latency" else ():
            times = [
                _milliseconds(number(receipt.results, name, what, share))
                for what in ("time_to_first_token_s", "inter_token_s")
                for share in ("p50", "p95", "p99")
            ]
            concurrency = number(receipt.results, name, "concurrency")
            prompt = number(receipt.settings, "prompt_tokens")
            rows.append([title_of(receipt), _count(concurrency), _count(prompt), *times])
    return Table("Latency", ("model", "requests at a time", "prompt", *_TIME_COLUMNS), rows)


_TIME_COLUMNS = tuple(
    f"{what} {share}, ms" for what in ("first token", "between") for share in ("p50", "p95", "p99")
)


def _compare_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        sizes = [_count(number(receipt.settings, n)) for n in ("prompt_tokens", "new_tokens")]
        for one in measured(receipt.results) if receipt.kind == KIND else ():
            kind = one.metric.removesuffix("_tokens_per_second")
            names = [str(receipt.model["name"]), engine_name(receipt, one.engine), kind]
            shown = [ranged(one.rate), ranged(one.ratio)]
            rows.append([*names, str(one.batch), *sizes, *shown])
    return Table(
        title="Beside other engines",
        columns=(
            *("model", "engine", "rate", "batch", "prompt", "new"),
            *("tokens/s", "quire / rival"),
        ),
        rows=rows,
        note="Medians of the rounds, with the least and the most; a ratio is of one round, above 1 "
        "where quire is faster. `output` is completion tokens by the time of the whole batch, "
        "`prompt` and `completion` are those of each phase.",
        text_columns=3,
    )


def ranged(spread: Facts) -> str:
    middle, low, high = (number(spread, name) for name in ("median", "low", "high"))
    if middle is None or low is None or high is None:
        return NONE
    return f"{short(middle)} ({short(low)}–{short(high)})"


def _serve_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        for name, figures in loads(receipt.results) if receipt.kind == "serve" else ():
            times = [
                _milliseconds(number(figures, what, share))
                for what in ("time_to_first_token_s", "inter_token_s")
                for share in ("p50", "p95", "p99")
            ]
            counts = [_count(number(figures, what)) for what in ("requests", "errors")]
            rate = number(figures, "completion_tokens_per_second")
            scenario = str(receipt.settings.get("scenario", ""))
            mix = str(receipt.settings.get("mix", ""))
            names = [title_of(receipt), scenario, mix, _load_name(receipt, name)]
            rows.append([*names, *counts, NONE if rate is None else short(rate), *times])
    return Table(
        title="Serving",
        columns=(
            *("model", "scenario", "lengths", "load", "requests", "errors", "tokens/s"),
            *_TIME_COLUMNS,
        ),
        rows=rows,
        text_columns=4,
    )


def _load_name(receipt: Receipt, name: str) -> str:
    """A load that has no name of its own by its clients or its rate."""
    clients, rate = (number(receipt.settings, key) for key in ("clients", "rate"))
    if name != "all" or (clients is None and rate is None):
        return name
    return f"{rate:g}/s" if clients is None else f"{clients:g} clients"


def _jobs_table(receipts: Sequence[Receipt]) -> Table:
    rows = []
    for receipt in receipts:
        if receipt.kind != "jobs":
            continue
        results, settings = receipt.results, receipt.settings
        times = [
            _milliseconds(number(results, part, "time_to_first_token_s", share))
            for share in ("p50", "p95")
            for part in ("alone", "beside_job")
        ]
        rates = [number(results, f"{name}_tokens_per_second") for name in _JOB_RATES]
        share, ratio = (number(results, n) for n in ("job_share_of_what_is_left", _JOB_RATIO))
        rows.append(
            [
                title_of(receipt),
                _lengths(settings, ""),
                _lengths(settings, "job_"),
                _count(number(results, "alone", "requests")),
                NONE if (rate := number(settings, "rate")) is None else f"{rate:g}",
                *times,
                NONE if ratio is None else short(ratio),
                *(NONE if rate is None else short(rate) for rate in rates),
                NONE if share is None else f"{share:.0%}",
            ]
        )
    return Table(
        title="Requests beside a batch job",
        columns=(
            *("model", "request", "line", "requests", "a second"),
            *("first token p50 alone, ms", "beside the job", "p95 alone, ms", "beside the job"),
            *("p95 ratio", "job alone, tokens/s", "beside requests", "requests, tokens/s"),
            "job's share of what is left",
        ),
        rows=rows,
        note="Lengths are prompt + completion. What is left to the job is its rate alone less the "
        "requests' tokens, those of prompts and of completions; the share is the median of the "
        "rounds.",
        text_columns=3,
    )


_JOB_RATES = ("job_alone", "job", "request")
_JOB_RATIO = "first_token_p95_ratio"


def _lengths(settings: Facts, prefix: str) -> str:
    return " + ".join(_count(number(settings, f"{prefix}{n}_tokens")) for n in ("prompt", "new"))


def _limits_table(receipts: Sequence[Receipt]) -> Table:
    found = [receipt for receipt in receipts if receipt.kind == "limits"]
    names = {
        "memory_read_bytes_per_second": "memory read, GB/s",
        "memory_copy_bytes_per_second": "memory copy, GB/s",
        "float32_operations_per_second": "float32, Gop/s",
        "integer_operations_per_second": "integer, Gop/s",
    }
    if any("gpu" in receipt.results for receipt in found):
        names["float16_operations_per_second"] = "float16, Gop/s"
    rows = []
    for receipt in found:
        for count in map(str, listed(receipt.settings, "threads")):
            values = [number(receipt.results, name, count) for name in names]
            rows.append([str(receipt.machine["cpu"]), count, *map(_billions, values)])
        if "gpu" in receipt.results:
            values = [number(receipt.results, "gpu", name) for name in names]
            rows.append([str(receipt.machine["gpu"]), NONE, *map(_billions, values)])
    kernels = [str(one.settings.get("integer_kernel", "an unnamed kernel")) for one in found]
    return Table(
        title="Limits of the machine",
        columns=("processor", "threads", *names.values()),
        rows=rows,
        note=f"Best of the samples. Integer: {'; '.join(dict.fromkeys(kernels))}.",
    )


def _other_table(receipts: Sequence[Receipt]) -> Table:
    """Numbers of receipts of a kind that has no table of its own."""
    rows = [
        [receipt.kind, title_of(receipt), name, short(float(value))]
        for receipt in receipts
        if receipt.kind not in _KNOWN_KINDS
        for name, value in receipt.results.items()
        if isinstance(value, int | float)
    ]
    return Table("More figures", ("kind", "model", "figure", "value"), rows, text_columns=3)


def _origin_table(receipts: Sequence[Receipt]) -> Table:
    """Where each figure comes from: one row for receipts alike in all that is shown."""
    rows: dict[tuple[str, ...], int] = {}
    for receipt in receipts:
        machine = receipt.machine
        gpu = f", {machine['gpu']}" if machine["gpu"] else ""
        kernels = ", ".join(map(str, receipt.executed["kernels"])) or NONE
        row = (
            receipt.kind,
            title_of(receipt),
            receipt.created[:10],
            f"{machine['cpu']}, {machine['cores']:g} cores{gpu}",
            f"quire {receipt.versions.get('quire', '?')}",
            kernels,
            deviation(receipt) or "as asked",
        )
        rows[row] = rows.get(row, 0) + 1
    return Table(
        title="Where the figures come from",
        columns=("kind", "model", "day", "machine", "measured by", "kernels", "path", "receipts"),
        rows=[[*row, str(count)] for row, count in rows.items()],
        text_columns=7,
    )


def short(value: float) -> str:
    """Three digits or more, without an exponent."""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else short(1000 * seconds)


def _billions(value: float | None) -> str:
    return NONE if value is None else short(value / 1e9)


def _mib(size: float | None) -> str:
    return NONE if size is None else short(size / (1 << 20))


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"
