"""The measuring itself: what counts as what, on a clock of the test's own."""

from collections.abc import Iterator

import pytest
from tests.bench.models import TINY_KV

from quire.core.errors import ExecutorError
from quire.core.plan import Capacity, SequencePlan, StepPlan, StepResult, Want
from quire.llm.devices import Options
from quire_bench import measure
from quire_bench.measure import (
    Load,
    Run,
    StepRecorder,
    StepTime,
    percentiles,
    random_prompts,
    run_load,
    run_phases,
    spread,
)
from quire_bench.subject import Subject, open_subject


@pytest.fixture(scope="module")
def tiny() -> Iterator[Subject]:
    subject = open_subject(
        "dummy:tiny", None, Options(kv_memory=TINY_KV, device="reference", max_batch_size=4)
    )
    yield subject
    subject.close()


class Clock:
    """Stands for the time module."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class ScriptedExecutor:
    """Answers with nothing, and each step's end comes when the script says."""

    capacity = Capacity(1, 1, 1, 1, 1, 1)
    kernels = ()
    fallback = None
    is_warm = True

    def __init__(self, clock: Clock, ends: list[float]) -> None:
        self.memory_bytes: dict[str, int] = {}
        self._clock = clock
        self._ends = ends

    def submit(self, plan: StepPlan) -> int:
        return plan.step_id

    def collect(self, ticket: int, timeout_s: float | None = None) -> StepResult:
        self._clock.now = self._ends.pop(0)
        return StepResult(ticket, 0.0, 0.0, ())

    def warm_up(self) -> None: ...

    def cancel(self, ticket: int) -> None: ...

    def close(self) -> None: ...


def row(start: int, count: int) -> SequencePlan:
    return SequencePlan(0, start, tuple(range(count)), None, (0,), Want.NOTHING)


def test_a_steps_time_begins_where_the_one_before_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    recorder = StepRecorder(ScriptedExecutor(clock, [101.0, 103.0, 111.0]), prompt_length=8)
    first = recorder.submit(StepPlan(1, (row(0, 6), row(8, 1))))
    second = recorder.submit(StepPlan(2, (row(6, 2), row(9, 1))))  # planned ahead
    recorder.collect(first)
    recorder.collect(second)
    clock.now = 110.0  # nothing to do for a while
    recorder.collect(recorder.submit(StepPlan(3, (row(8, 1), row(10, 1)))))
    assert recorder.steps == [
        StepTime(1.0, 2, prompt_tokens=6, decode_tokens=1),
        StepTime(2.0, 2, prompt_tokens=2, decode_tokens=1),
        StepTime(1.0, 2, prompt_tokens=0, decode_tokens=2),
    ]


def test_rates_keep_prompts_and_completions_apart() -> None:
    steps = [StepTime(2.0, 2, 90, 1), StepTime(1.0, 1, 10, 0), StepTime(0.5, 2, 0, 2)]
    steps.append(StepTime(0.5, 1, 0, 1))
    run = Run(Load(2, 50, 3), seconds=5.0, steps=steps)
    assert run.prompt_rate == pytest.approx(100 / 3.0)
    assert run.completion_rate == pytest.approx(3 / 1.0)
    assert run.output_rate == pytest.approx(6 / 5.0)
    assert run.total_rate == pytest.approx(106 / 5.0)
    assert run.batch_histogram == {"1": 2, "2": 2}


def test_without_decode_steps_there_is_no_completion_rate() -> None:
    assert Run(Load(1, 4, 1), seconds=1.0, steps=[StepTime(1.0, 1, 4, 0)]).completion_rate is None


def test_a_run_computes_each_token_once_and_times_each(tiny: Subject) -> None:
    run = run_load(tiny.assembly, Load(3, 20, 5), seed=1)
    assert sum(step.prompt_tokens for step in run.steps) == 60
    assert sum(step.decode_tokens for step in run.steps) == 3 * 4  # the first comes of the prompt
    assert len(run.first_token_s) == 3
    assert len(run.inter_token_s) == 12
    assert all(0 < value < run.seconds for value in run.first_token_s + run.inter_token_s)
    assert sum(step.seconds for step in run.steps) <= run.seconds


@pytest.mark.parametrize("prompt_tokens", [1, 16, 32])
def test_in_phases_every_decode_step_has_the_whole_batch(tiny: Subject, prompt_tokens: int) -> None:
    run = run_phases(tiny.assembly, Load(4, prompt_tokens, 5), seed=2)
    assert sum(step.prompt_tokens for step in run.steps) == 4 * prompt_tokens
    assert [step.decode_tokens for step in run.decode_steps] == [4] * 4
    assert len(run.first_token_s) == 4
    assert len(run.inter_token_s) == 16
    assert sum(step.seconds for step in run.steps) < run.busy_s <= run.seconds


def test_a_plain_run_of_long_prompts_has_smaller_batches(tiny: Subject) -> None:
    """What the phases are for: here the first are at their end before the last begin."""
    run = run_load(tiny.assembly, Load(4, 64, 3), seed=2)
    assert not any(step.decode_tokens == 4 for step in run.decode_steps)


def test_concurrency_bounds_the_batch(tiny: Subject) -> None:
    assert set(run_load(tiny.assembly, Load(4, 3, 3, concurrency=1), 1).batch_histogram) == {"1"}
    together = run_load(tiny.assembly, Load(4, 3, 3, concurrency=2), 1)
    assert max(map(int, together.batch_histogram)) == 2


def test_a_request_that_fails_is_no_figure(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "random_prompts", lambda *_: [[1, 2], [1, 2]])
    executor = tiny.assembly.executor
    broken = executor.submit
    monkeypatch.setattr(
        executor,
        "submit",
        lambda plan: broken(
            plan._replace(sequences=tuple(one._replace(tokens=(10**6,)) for one in plan.sequences))
        ),
    )
    with pytest.raises(ExecutorError, match=r"a measured request failed: .*1000000"):
        run_load(tiny.assembly, Load(2, 2, 2), seed=1)


def test_prompts_repeat_by_seed_and_share_no_beginning() -> None:
    prompts = random_prompts(Load(8, 32, 1), 512, seed=4)
    assert prompts == random_prompts(Load(8, 32, 1), 512, seed=4)
    assert prompts != random_prompts(Load(8, 32, 1), 512, seed=5)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 8
    assert all(len(prompt) == 32 and max(prompt) < 512 for prompt in prompts)


def test_percentiles_and_spread_of_known_numbers() -> None:
    assert percentiles([float(n) for n in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([]) is None
    assert spread([4.0, 2.0, 3.0]) == {
        "low": 2.0,
        "median": 3.0,
        "high": 4.0,
        "relative": pytest.approx(2 / 3),
    }
    assert spread([]) is None
