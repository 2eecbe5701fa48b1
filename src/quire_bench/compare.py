"""quire beside other engines: interleaved rounds of the same load, and the ratios of each round.

A machine's speed drifts, so neighbours in time are compared: in every round each engine runs the
same batch, one after the other, and a round gives one ratio, quire by rival (above 1: quire is
faster). The median of the ratios and their range are reported, not the ratio of two medians.

Rates: `output` is completion tokens by the time of the whole batch, prompts and all. `prompt` and
`completion` are those of each phase, all prompts first and then all sequences together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NotRequired, TypedDict

from quire.cli.program import print_progress
from quire.core.errors import ConfigError
from quire.llm.assembly import Assembly
from quire.llm.model_names import find_model
from quire.loader.defaults import DUMMY_PREFIX
from quire.loader.gguf_writer import write_gguf
from quire.model.dummy import DummyModel
from quire_bench.measure import Load, Spread, random_prompts, run_load, run_phases, spread
from quire_bench.receipts import Facts, number, section
from quire_bench.rivals import Rival, RivalFailedError
from quire_bench.subject import Subject
from quire_bench.throughput import Figures, check_load, warm_up

KIND = "compare"
QUIRE = "quire"
METRICS = ("output_tokens_per_second", "prompt_tokens_per_second", "completion_tokens_per_second")

Rates = Mapping[str, float]
Round = dict[str, Rates]  # by engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is to be compared."""

    batches: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    seed: int = 0

    def check(self, max_context: int) -> None:
        """Refuse what cannot be measured, before anything is run."""
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"--batch must be sizes of at least 1, got {list(self.batches)}")
        check_load(self.load(max(self.batches)), self.repeats, max_context)

    def load(self, batch: int) -> Load:
        return Load(batch, self.prompt_tokens, self.new_tokens)


class ComparedRate(TypedDict):
    """An engine's rate in one cell, and where it is a rival's, quire's by it."""

    rate: Spread
    quire_by_rival: NotRequired[Spread | None]


@dataclass(slots=True)
class Findings:
    """The rounds by batch size, and why a rival dropped out."""

    rounds: dict[int, list[Round]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def figures(self) -> Figures:
        """Samples and results as a receipt holds them."""
        samples: dict[str, list[float]] = {}
        results: dict[str, object] = {}
        for batch, rounds in self.rounds.items():
            cell: dict[str, dict[str, ComparedRate]] = {}
            for name in dict.fromkeys(name for found in rounds for name in found):
                for metric in METRICS:
                    rates = [found[name][metric] for found in rounds if metric in found[name]]
                    rate = spread(rates)
                    if rate is None:
                        continue
                    samples[f"batch_{batch}_{name}_{metric}"] = rates
                    compared: ComparedRate = {"rate": rate}
                    cell.setdefault(name, {})[metric] = compared
                    if name != QUIRE:
                        ratios = _ratios(rounds, name, metric)
                        samples[f"batch_{batch}_{name}_{metric}_ratio"] = ratios
                        ratio = compared["quire_by_rival"] = spread(ratios)
                        if ratio is not None:  # also by itself, for tables of any receipts
                            results[f"quire_by_{name}_batch_{batch}_{metric}"] = ratio["median"]
            results[f"batch_{batch}"] = cell
        return Figures(samples, results)


def _ratios(rounds: Sequence[Round], rival: str, metric: str) -> list[float]:
    return [
        found[QUIRE][metric] / found[rival][metric]
        for found in rounds
        if metric in found[rival] and metric in found[QUIRE]
    ]


def compare(
    subject: Subject,
    rivals: Sequence[Rival],
    wanted: Comparison,
    on_begin: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Measure in turn; a rival that fails is left out from there on, with its reason."""
    wanted.check(subject.assembly.executor.capacity.max_context)
    findings = Findings()
    for batch in wanted.batches:
        assembly = subject.assembly.with_batch_size(batch)
        load = wanted.load(batch)
        warm_up(replace(subject, assembly=assembly), load, wanted.seed)
        _round(assembly, rivals, load, wanted.seed, findings, with_quire=False)  # warms them
        findings.rounds[batch] = []
        for repeat in range(wanted.repeats):
            on_begin(f"batch {batch}, round {repeat + 1} of {wanted.repeats}")
            seed = wanted.seed + 1 + repeat
            findings.rounds[batch].append(_round(assembly, rivals, load, seed, findings))
    for found in (found for rounds in findings.rounds.values() for found in rounds):
        for name in findings.failures:
            found.pop(name, None)  # what broke later is not trusted before
    return findings


def _round(
    assembly: Assembly,
    rivals: Sequence[Rival],
    load: Load,
    seed: int,
    findings: Findings,
    with_quire: bool = True,
) -> Round:
    """The same prompts through each engine, one after the other."""
    found: Round = {QUIRE: _measure_quire(assembly, load, seed)} if with_quire else {}
    prompts = random_prompts(load, assembly.spec.vocabulary_size, seed)
    for rival in rivals:
        if rival.name in findings.failures:
            continue
        try:
            found[rival.name] = rival.measure(prompts, load.new_tokens).rates
        except RivalFailedError as error:
            findings.failures[rival.name] = str(error)
    return found


def _measure_quire(assembly: Assembly, load: Load, seed: int) -> Rates:
    """As it really runs, for the whole; in phases, for the rates of each."""
    whole, phases = run_load(assembly, load, seed), run_phases(assembly, load, seed)
    rates = {"output_tokens_per_second": whole.output_rate}
    if phases.prompt_rate is not None:
        rates["prompt_tokens_per_second"] = phases.prompt_rate
    if phases.completion_rate is not None:
        rates["completion_tokens_per_second"] = phases.completion_rate
    return rates


@contextmanager
def model_file(name: str) -> Iterator[Path]:
    """The model's file; of a dummy model one that is written, and removed at the end."""
    if not name.startswith(DUMMY_PREFIX):
        yield find_model(name, lambda line: print_progress(f"quire: {line}"))
        return
    dummy = DummyModel(name)
    with TemporaryDirectory(prefix="quire-compare-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, dummy.fields, dummy.planned)
        yield path


def table(results: Facts) -> list[str]:
    """For people: each engine's rates, and how quire compares."""
    lines = [
        f"{'batch':>5}  {'engine':<24}{'rate':<12}{'tokens/s':>10}  quire / rival (least to most)"
    ]
    for one in measured(results):
        kind = one.metric.removesuffix("_tokens_per_second")
        line = (
            f"{one.batch:>5}  {one.engine:<24}{kind:<12}{number(one.rate, 'median') or 0.0:>10.1f}"
        )
        if one.ratio:
            median, low, high = (number(one.ratio, n) or 0.0 for n in ("median", "low", "high"))
            line += f"  {median:.2f} ({low:.2f} to {high:.2f})"
        lines.append(line)
    return lines


class Measured(NamedTuple):
    """One engine's rate in one cell, and the ratio of quire's rate to it where it is another's."""

    batch: int
    engine: str
    metric: str
    rate: Facts
    ratio: Facts  # empty: none


def measured(results: Facts) -> list[Measured]:
    """Everything that the results of a receipt of this kind compare."""
    found = []
    for name in results:
        for engine, rates in section(results, name).items() if name.startswith("batch_") else ():
            for metric, compared in section(rates).items():
                batch = int(name.removeprefix("batch_"))
                rate, ratio = section(compared, "rate"), section(compared, "quire_by_rival")
                found.append(Measured(batch, engine, metric, rate, ratio))
    return found
