"""Finds the batch size and step size that give most throughput within a latency target.

Every setting runs the same kind of load: twice as many requests as fit, as many at a time as fit,
so that prompts are read while others write, which is what makes tokens wait. A setting is within
the target if the 95th percentile of all its times between tokens is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire_bench.measure import Load, Spread, percentiles, run_load, spread
from quire_bench.subject import Subject
from quire_bench.throughput import check_load, warm_up

KIND = "tune"
BATCHES = (1, 2, 4, 8, 16, 32)
STEP_TOKENS = (16, 64, 256)
_REQUESTS_A_PLACE = 2


class Setting(NamedTuple):
    """One combination to try."""

    threads: int | None  # None: as many as the executor takes by itself
    max_batch_size: int
    max_step_tokens: int

    @property
    def name(self) -> str:
        threads = "" if self.threads is None else f"threads_{self.threads}_"
        return f"{threads}batch_{self.max_batch_size}_step_{self.max_step_tokens}"


class Trial(NamedTuple):
    """What a setting measured, by run, and over all of them."""

    setting: Setting
    rates: list[float]  # completion tokens a second
    run_p95_s: list[float]  # between tokens
    p95_s: float

    @property
    def rate(self) -> float:
        return self._rate_spread["median"]

    @property
    def _rate_spread(self) -> Spread:
        found = spread(self.rates)
        assert found is not None  # there is one run at least
        return found

    def as_data(self) -> dict[str, object]:
        return {
            **self.setting._asdict(),
            "output_tokens_per_second": self._rate_spread,
            "p95_inter_token_s": self.p95_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is to be tried, on what load, for what target."""

    slo_itl_ms: float
    batches: Sequence[int] = BATCHES
    step_tokens: Sequence[int] = STEP_TOKENS
    prompt_tokens: int = 128
    new_tokens: int = 32
    repeats: int = 3
    seed: int = 0

    def check(self, max_context: int) -> None:
        """Refuse what cannot be tried, before anything is run."""
        if not self.slo_itl_ms > 0:
            raise ConfigError(f"--slo-itl-ms must be above 0, got {self.slo_itl_ms}")
        for flag, values in (("batches", self.batches), ("step-tokens", self.step_tokens)):
            if not values or min(values) < 1:
                raise ConfigError(f"--{flag} must be sizes of at least 1, got {list(values)}")
        if self.new_tokens < 2:
            raise ConfigError("--new-tokens must be at least 2: the time between tokens is wanted")
        check_load(self.load(max(self.batches)), self.repeats, max_context)

    def load(self, batch: int) -> Load:
        return Load(_REQUESTS_A_PLACE * batch, self.prompt_tokens, self.new_tokens, batch)

    def settings(self, subject: Subject, threads: int | None) -> Iterator[Setting]:
        """Those that the executor offers; a step has room for every sequence at least."""
        most = subject.assembly.executor.capacity
        for batch in sorted(set(self.batches)):
            for step in sorted({max(batch, step) for step in self.step_tokens}):
                if batch <= most.max_batch_size and step <= most.max_step_tokens:
                    yield Setting(threads, batch, step)


def try_settings(
    subject: Subject,
    wanted: Tuning,
    threads: int | None,
    on_begin: Callable[[str], None] = lambda _: None,
) -> list[Trial]:
    """Measure each setting on a model loaded for so many threads."""
    wanted.check(subject.assembly.executor.capacity.max_context)
    trials = []
    for setting in wanted.settings(subject, threads):
        on_begin(f"batch {setting.max_batch_size}, {setting.max_step_tokens} tokens a step")
        trials.append(_try(subject, wanted, setting))
    return trials


def _try(subject: Subject, wanted: Tuning, setting: Setting) -> Trial:
    assembly = subject.assembly.with_batch_size(setting.max_batch_size)
    engine = {**assembly.options.engine, "max_step_tokens": setting.max_step_tokens}
    assembly = replace(assembly, options=replace(assembly.options, engine=engine))
    load = wanted.load(setting.max_batch_size)
    warm_up(replace(subject, assembly=assembly), load, wanted.seed)
    runs = [run_load(assembly, load, wanted.seed + 1 + n) for n in range(wanted.repeats)]
    return Trial(
        setting,
        rates=[run.output_rate for run in runs],
        run_p95_s=[_p95(run.inter_token_s) for run in runs],
        p95_s=_p95([value for run in runs for value in run.inter_token_s]),
    )


def _p95(values: Sequence[float]) -> float:
    found = percentiles(values)
    assert found is not None  # every request has two tokens at least
    return found["p95"]


def best(trials: Sequence[Trial], slo_itl_ms: float) -> Trial | None:
    """The most throughput of those within the target; None where none is."""
    within = [trial for trial in trials if 1000 * trial.p95_s <= slo_itl_ms]
    return max(within, key=lambda trial: trial.rate, default=None)


def nearest(trials: Sequence[Trial]) -> Trial:
    """The one with the shortest time between tokens."""
    return min(trials, key=lambda trial: trial.p95_s)


def samples(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """By setting and run, as a receipt holds them."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        found[f"{trial.setting.name}_output_tokens_per_second"] = trial.rates
        found[f"{trial.setting.name}_p95_inter_token_s"] = trial.run_p95_s
    return found


def table(trials: Sequence[Trial], chosen: Trial | None, slo_itl_ms: float) -> list[str]:
    """For people: every setting, which are within the target, and which is chosen."""
    lines = ["threads  batch  tokens/step  tokens/s  p95 between tokens"]
    for trial in trials:
        threads, batch, step = trial.setting
        note = "" if 1000 * trial.p95_s <= slo_itl_ms else "above the target"
        note = "chosen" if trial is chosen else note
        line = f"{threads or 'own':>7}  {batch:>5}  {step:>11}  {trial.rate:>8.1f}"
        lines.append(f"{line}  {1000 * trial.p95_s:>15.2f} ms  {note}".rstrip())
    return lines


def engine_table(setting: Setting) -> dict[str, int]:
    """The setting as EngineConfig has it."""
    return {
        "max_batch_size": setting.max_batch_size,
        "max_step_tokens": setting.max_step_tokens,
    }
