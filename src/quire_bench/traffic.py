"""Traffic: greedy, sampled, constrained and long loads of one loaded model, beside figures of
another engine.

A row is one load. What a row of the sampler, or its grammars, costs is its rate over that of the
greedy row of the same sizes, in the same process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypedDict

from quire.core.errors import ConfigError
from quire.core.sampling import Constraint, SamplingParams
from quire.llm.assembly import Assembly
from quire.structured import Grammars
from quire_bench.measure import GREEDY, Load, Run, run_load
from quire_bench.row_kinds import own_schema
from quire_bench.words import WordTokenizer

KIND = "traffic"
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=0, ignore_eos=True)
_PARAMS: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": replace(
        SAMPLED, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    ),
    "logprobs": replace(SAMPLED, logprobs=5),
}
_BATCHES: Mapping[str, Sequence[int]] = {
    "greedy": (1, 4, 16, 64, 256),
    "sampled": (1, 16, 64, 256),
    "penalties": (16, 64, 256),
    "logprobs": (16, 64, 256),
    "constrained": (16, 64),
}
PARTS = (*_BATCHES, "long")
LEAST_SHARES_OF_GREEDY = {"sampled": 0.95, "penalties": 0.95, "logprobs": 0.95, "constrained": 0.9}

RIVAL = "vLLM 0.24"
RIVAL_SOURCE = (
    "vLLM 0.24 (FlashAttention 3, torch.compile, CUDA graphs) with the same shape and loads on "
    "another H200 of the kind, in November 2026: greedy rows with AWQ 4-bit weights (Marlin) "
    "beside block formats and with bfloat16 ones beside BF16, the others with bfloat16 ones; it "
    "was not measured in one run with these rows, and no receipt has its figures"
)
_RIVAL_SHAPE = "dummy:llama-8b"
# Of greedy rows by batch size: tokens a second of the rival, and the goal that quire has.
_GREEDY_4BIT = {
    1: (254, 600),
    4: (999, 2200),
    16: (3746, 7500),
    64: (9560, 16_000),
    256: (19_308, 21_500),
}
_GREEDY_BF16 = {
    1: (203, 265),
    4: (803, 1000),
    16: (3040, 3900),
    64: (9657, 12_000),
    256: (18_803, 20_000),
}


class Row(NamedTuple):
    """A load. The rival's figure is tokens a second, of long rows seconds; the goal is how many
    times as good quire is to be."""

    part: str
    load: Load
    rival: float | None = None
    goal: float | None = None

    @property
    def name(self) -> str:
        count, prompt, new, _ = self.load
        return f"{self.part} {count} x ({prompt} + {new})"

    @property
    def params(self) -> SamplingParams | Sequence[SamplingParams]:
        """Of every request, or of each: constrained ones have a schema each."""
        if self.part != "constrained":
            return _PARAMS.get(self.part, GREEDY)
        count, _, new, _ = self.load
        schemas = [own_schema(number, new) for number in range(count)]
        return [replace(GREEDY, structured=Constraint("json_schema", text)) for text in schemas]


class Figures(TypedDict):
    """Of a row: medians of its runs."""

    seconds: float
    output_tokens_per_second: float
    first_token_s: float
    of_greedy: float | None  # tokens a second over those of the greedy row of the same sizes
    rival: float | None
    times_rival: float | None
    goal: float | None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Every row's figures, and the seconds of its runs."""

    figures: dict[str, Figures]
    seconds: dict[str, list[float]]


def rows_of(model: str, parts: Sequence[str] = PARTS, short: float = 1.0) -> list[Row]:
    """The rows of these parts; `short` times as many tokens, for a trial of the command."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"--rows has {', '.join(unknown)}: there are {', '.join(PARTS)}")
    rows = [
        *(_short_row(model, part, count) for part in _BATCHES for count in _BATCHES[part]),
        Row("sampled", Load(256, 129, 256), 17_243, 1.05),
        Row("long", Load(8, 8192, 64), 2.15, 1.0),
        Row("long", Load(1, 32_768, 64), 1.57, 1.0),
        Row("long", Load(2, 32_768, 1), 2.39, 0.95),
        Row("long", Load(64, 2048, 128), 4.14, 1.0),
    ]
    if not model.startswith(_RIVAL_SHAPE) or short != 1.0:
        rows = [row._replace(rival=None, goal=None) for row in rows]
    found = [_shortened(row, short) for row in rows if row.part in parts]
    return list({row.name: row for row in found}.values())


def _short_row(model: str, part: str, count: int) -> Row:
    if part != "greedy":
        return Row(part, Load(count, 128, 256))
    rival, goal = (_GREEDY_BF16 if model.endswith(":BF16") else _GREEDY_4BIT)[count]
    return Row(part, Load(count, 128, 256), rival, goal / rival)


def _shortened(row: Row, short: float) -> Row:
    count, prompt, new, _ = row.load
    return row._replace(load=Load(count, max(1, int(prompt * short)), max(1, int(new * short))))


def check_context(rows: Sequence[Row], max_context: int) -> None:
    """Say before measuring that a row does not fit."""
    for row in rows:
        if row.load.prompt_tokens + row.load.new_tokens > max_context:
            raise ConfigError(
                f"{row.name} does not fit the context of {max_context} tokens: give fewer --rows "
                f"(of {','.join(PARTS)}), or more --kv-memory"
            )


def measure_traffic(
    assembly: Assembly,
    rows: Sequence[Row],
    *,
    repeats: int,
    seed: int,
    on_row: Callable[[str], object] = str,
) -> Traffic:
    """Run every row `repeats` times, after a short run that does not count."""
    largest = max(row.load.num_requests for row in rows)
    run_load(assembly, Load(largest, 16, 8), seed, SAMPLED)
    runs: dict[Row, list[Run]] = {}
    for row in rows:
        on_row(row.name)
        params = row.params
        if not isinstance(params, SamplingParams):
            assembly = with_words(assembly)
        each = range(seed + 1, seed + 1 + repeats)
        runs[row] = [_run(assembly, row.load, own, params) for own in each]
    greedy = {row.load: _rate(runs[row]) for row in rows if row.part == "greedy"}
    return Traffic(
        {row.name: _figures(row, runs[row], greedy.get(row.load)) for row in rows},
        {row.name: [run.seconds for run in runs[row]] for row in rows},
    )


def with_words(assembly: Assembly) -> Assembly:
    """A model without a tokenizer gets words for its tokens."""
    size = assembly.spec.vocabulary_size
    if assembly.tokenizer is None and assembly.end_token_ids == ():
        words: Any = WordTokenizer(size)
        assembly = replace(assembly, grammars=Grammars(words, size, ()))
    return assembly


def _run(
    assembly: Assembly, load: Load, seed: int, params: SamplingParams | Sequence[SamplingParams]
) -> Run:
    """Grammars are there before the clock starts: a server makes them on other threads."""
    constrained = () if isinstance(params, SamplingParams) else params
    prepared = [assembly.grammars.prepare(own) for own in constrained]
    run = run_load(assembly, load, seed, params)
    del prepared
    return run


def _rate(runs: Sequence[Run]) -> float:
    return median(run.output_rate for run in runs)


def _figures(row: Row, runs: Sequence[Run], greedy: float | None) -> Figures:
    rate, seconds = _rate(runs), median(run.seconds for run in runs)
    is_share = greedy is not None and row.part not in ("greedy", "long")
    times = None
    if row.rival is not None:
        times = row.rival / seconds if row.part == "long" else rate / row.rival
    return {
        "seconds": seconds,
        "output_tokens_per_second": rate,
        "first_token_s": median(median(run.first_token_s) for run in runs),
        "of_greedy": rate / greedy if greedy is not None and is_share else None,
        "rival": row.rival,
        "times_rival": times,
        "goal": row.goal,
    }


def table(figures: Mapping[str, Figures]) -> list[str]:
    """A line a row; what misses its goal is marked."""
    heads = ("load", "s", "tokens/s", "of greedy", RIVAL, "times that", "goal")
    lines = [_line(heads)]
    has_goals = any(own["goal"] is not None for own in figures.values())
    for name, own in figures.items():
        share, times, goal = own["of_greedy"], own["times_rival"], own["goal"]
        least = LEAST_SHARES_OF_GREEDY.get(name.split()[0], 0.0)
        missed = (times is not None and goal is not None and times < goal) or (
            has_goals and share is not None and share < least
        )
        cells = (
            name,
            f"{own['seconds']:.2f}",
            f"{own['output_tokens_per_second']:,.0f}",
            "" if share is None else f"{share:.3f}",
            "" if own["rival"] is None else f"{own['rival']:,g}",
            "" if times is None else f"{times:.2f}",
            "" if goal is None else f"{goal:.2f}",
        )
        lines.append(_line(cells) + ("  missed" if missed else ""))
    return lines


def _line(cells: Sequence[str]) -> str:
    name, *others = cells
    return f"{name:<28}" + "".join(f"{cell:>11}" for cell in others)
