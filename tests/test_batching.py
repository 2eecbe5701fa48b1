"""BatchProcessor: the engine over a function the user brings, in real time."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from quire import BatchProcessor, EngineConfig, SamplingParams
from quire.core.clock import VirtualClock
from quire.core.errors import (
    ConfigError,
    ExecutorError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestError,
    RowFaultError,
)
from quire.core.request import FinishReason, Status, WaitReason

T = TypeVar("T")
VOCABULARY = 50
PATIENCE_S = 120.0  # a guard against waiting for ever; nothing is measured
GREEDY = partial(SamplingParams, temperature=0.0)


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def next_token(tokens: Sequence[int]) -> int:
    """The model: a function of every token of the sequence and of its order."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) % VOCABULARY


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Model:
    """A forward function that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, tokens: Any, mask: Any) -> Any:
        self.calls.append((tokens.copy(), mask.copy()))
        logits = np.zeros((len(tokens), VOCABULARY), np.float32)
        for place, (row, real) in enumerate(zip(tokens, mask, strict=True)):
            logits[place, next_token(row[real].tolist())] = 9.0
        return logits

    @property
    def batch_sizes(self) -> list[int]:
        return [len(tokens) for tokens, _ in self.calls]


class AsyncModel(Model):
    """The same, but it lets others have a turn in between."""

    async def __call__(self, tokens: Any, mask: Any) -> Any:
        await asyncio.sleep(0)
        return super().__call__(tokens, mask)


@pytest.fixture(params=[Model, AsyncModel])
def model(request: pytest.FixtureRequest) -> Model:
    made: Model = request.param()
    return made


# ---- what comes back


def test_one_token_or_the_whole_loop(model: Model) -> None:
    async def main() -> None:
        async with BatchProcessor(model) as batcher:
            assert await batcher.process_request([1, 2, 3]) == next_token([1, 2, 3])
            found = await batcher.generate([1, 2, 3], GREEDY(max_tokens=12))
            assert found == expected([1, 2, 3], 12)

    run(main())


def test_results_go_to_their_requests(model: Model) -> None:
    async def main() -> None:
        prompts = [[i, *range(i % 5), 7] for i in range(40)]
        async with BatchProcessor(model, max_batch_size=8) as batcher:
            found = await asyncio.gather(
                *[batcher.generate(p, GREEDY(max_tokens=3 + p[0] % 4)) for p in prompts]
            )
        assert found == [expected(p, 3 + p[0] % 4) for p in prompts]
        assert max(model.batch_sizes) == 8

    run(main())


def test_requests_that_come_together_run_together(model: Model) -> None:
    async def main() -> None:
        async with BatchProcessor(model, max_batch_size=4) as batcher:
            prompts = [[1], [2, 3, 4, 5], [6, 7], [8]]
            found = await asyncio.gather(*[batcher.process_request(p) for p in prompts])
        assert found == [next_token(p) for p in prompts]
        assert model.batch_sizes == [4]

    run(main())


def test_the_function_sees_left_padding_and_a_mask_of_the_real_tokens() -> None:
    async def main() -> None:
        model = Model()
        async with BatchProcessor(model, pad_token=49) as batcher:
            prompts = [[1], [2, 3, 4, 5], [6, 7]]
            await asyncio.gather(*[batcher.process_request(p) for p in prompts])
            stats = batcher.snapshot().stats
        tokens, mask = model.calls[0]
        assert tokens.tolist() == [[49, 49, 49, 1], [2, 3, 4, 5], [49, 49, 6, 7]]
        assert mask.tolist() == [
            [False, False, False, True],
            [True] * 4,
            [False, False, True, True],
        ]
        assert (tokens.dtype, mask.dtype) == (np.int64, np.bool_)
        assert stats.padding_tokens == 5

    run(main())


def test_no_row_is_computed_for_what_has_ended() -> None:
    async def main() -> None:
        model = Model()
        stop = expected([1], 2)[1]
        async with BatchProcessor(model) as batcher:
            await asyncio.gather(
                batcher.generate([1], GREEDY(max_tokens=5, stop_token_ids=(stop,))),
                batcher.generate([2], GREEDY(max_tokens=5)),
            )
        assert model.batch_sizes == [2, 2, 1, 1, 1]

    run(main())


def test_sampling_is_per_request_and_repeatable() -> None:
    def flat(tokens: Any, _mask: Any) -> Any:
        return np.zeros((len(tokens), VOCABULARY))

    async def main() -> None:
        async with BatchProcessor(flat) as batcher:
            hot = SamplingParams(max_tokens=8, seed=5)
            first, again, other, cold = await asyncio.gather(
                batcher.generate([1], hot),
                batcher.generate([2], hot),
                batcher.generate([1], SamplingParams(max_tokens=8, seed=6)),
                batcher.generate([1], GREEDY(max_tokens=8)),
            )
            assert first == again, "the same seed, the same draws"
            assert first != other
            assert cold == [0] * 8
            assert await batcher.process_request([3], 0, hot) == first[0]

    run(main())


@pytest.mark.parametrize(
    "params",
    [
        GREEDY(max_tokens=16, ignore_eos=True),
        SamplingParams(16, seed=5, ignore_eos=True),
        SamplingParams(16, seed=5, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.3),
        SamplingParams(16, seed=1, min_tokens=8),
    ],
    ids=["greedy", "sampled", "penalties", "minimum"],
)
def test_a_request_goes_on_at_the_step_that_it_names(params: SamplingParams) -> None:
    def forward(tokens: Any, mask: Any) -> Any:
        """Likes every token a little, and the model's a little more."""
        return Model()(tokens, mask) / 9 + np.arange(VOCABULARY) / VOCABULARY

    async def main() -> None:
        prompt = [1, 2, 3]
        async with BatchProcessor(forward, 8, 0.0, end_token_ids=range(20)) as batcher:
            whole = await batcher.generate(prompt, params)
            assert len(whole) >= 8
            again = [
                await batcher.process_request([*prompt, *whole[:step]], step, params)
                for step in range(len(whole))
            ]
            together = await asyncio.gather(
                *[
                    batcher.process_request([*prompt, *whole[:step]], np.int64(step), params)
                    for step in range(len(whole))
                ]
            )
        assert again == whole == together

    run(main())


@pytest.mark.parametrize(
    ("tokens", "step", "param", "words"),
    [
        ([1, 2], -1, "step", "step is -1, of 2 tokens"),
        ([1, 2], 2, "step", "step is 2, of 2 tokens"),
        ([1, 2], 10**30, "step", "from 0 to 1"),
        ([1, 2], 1.0, "step", "step must be an integer, got 1.0"),
        ([1, 2], True, "step", "step must be an integer, got True"),
        ([1, 2], None, "step", "step must be an integer, got None"),
        ([1, 2], GREEDY(), "step", r"step must be an integer, got SamplingParams\("),
        ([], 0, "tokens", "tokens is empty"),
        ("text", 0, "tokens", "tokens must be a list of token ids, got 'text'"),
        (7, 0, "tokens", "tokens must be a list of token ids, got 7"),
        ([1, 2.5], 0, "prompt", "prompt token 1 must be an integer, got 2.5"),
    ],
)
def test_a_step_or_tokens_without_sense_are_refused(
    tokens: Any, step: Any, param: str, words: str
) -> None:
    async def main() -> None:
        async with BatchProcessor(Model()) as batcher:
            with pytest.raises(RequestError, match=words) as caught:
                await batcher.process_request(tokens, step)
            assert caught.value.param == param
            with pytest.raises(RequestError, match="params must be SamplingParams"):
                await batcher.process_request([1], 0, {"seed": 3})  # type: ignore[arg-type]
            assert await batcher.process_request([1, 2]) == next_token([1, 2])

    run(main())


def test_size_and_timeout_come_by_position() -> None:
    async def main() -> None:
        model = Model()
        async with BatchProcessor(model, 2, 0.0) as batcher:
            await asyncio.gather(*[batcher.process_request([i]) for i in range(4)])
        assert model.batch_sizes == [2, 2]

    run(main())
    with pytest.raises(ConfigError, match="max_batch_size"):
        BatchProcessor(Model(), 0, 20)
    with pytest.raises(ConfigError, match="batch_timeout_ms"):
        BatchProcessor(Model(), 4, -1)


def test_stop_tokens_and_scores_are_as_anywhere() -> None:
    async def main() -> None:
        tokens = expected([1, 2], 6)
        async with BatchProcessor(Model(), end_token_ids=[tokens[3]]) as batcher:
            output = await batcher.complete([1, 2], GREEDY(max_tokens=6, logprobs=1))
            assert output.token_ids == tokens[: tokens.index(tokens[3])]
            assert output.finish_reason is FinishReason.STOP
            assert output.logprobs is not None
            assert [score.token for score in output.logprobs] == output.token_ids
            kept = GREEDY(max_tokens=6, include_stop_token=True)
            [last] = await batcher.generate([1, 2, *output.token_ids], kept)
            assert last == await batcher.process_request([1, 2, *output.token_ids]) == tokens[3]
            several = await batcher.complete([1, 2], SamplingParams(max_tokens=3, n=3, seed=1))
            assert len(several.completions) == 3

    run(main())


def test_an_async_function_runs_on_its_callers_event_loop() -> None:
    seen: set[int] = set()

    async def forward(tokens: Any, _mask: Any) -> Any:
        seen.add(id(asyncio.get_running_loop()))
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        async with BatchProcessor(forward) as batcher:
            await batcher.process_request([1])
        assert seen == {id(asyncio.get_running_loop())}

    run(main())


def test_a_plain_function_does_not_block_the_event_loop() -> None:
    gate = threading.Event()

    def forward(tokens: Any, _mask: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        async with BatchProcessor(forward) as batcher:
            task = asyncio.create_task(batcher.process_request([1]))
            await asyncio.sleep(0.01)  # the event loop is free while the function waits
            gate.set()
            assert await task == 0

    run(main())


# ---- what goes wrong


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda n: np.zeros((n, 2, 3)), ["(1, 2, 3)", "(1, V)"]),
        (lambda n: np.zeros((n + 1, 3)), ["(2, 3)", "(1, V)"]),
        (lambda n: np.zeros((n, 3), np.complex128), ["complex128", "real numbers"]),
        (lambda n: None, ["()", "(1, V)"]),
    ],
)
def test_a_wrong_answer_is_told_with_what_was_expected(
    returned: Callable[[int], Any], words: list[str]
) -> None:
    async def main() -> None:
        async with BatchProcessor(lambda tokens, _: returned(len(tokens))) as batcher:
            with pytest.raises(ExecutorError) as caught:
                await batcher.process_request([1])
            assert all(word in str(caught.value) for word in words), str(caught.value)

    run(main())


def test_with_a_vocabulary_size_width_and_tokens_are_checked() -> None:
    async def main() -> None:
        async with BatchProcessor(Model(), vocabulary_size=VOCABULARY + 1) as batcher:
            with pytest.raises(ExecutorError, match=r"\(1, 50\), expected \(1, 51\)"):
                await batcher.process_request([1])
            with pytest.raises(RequestError, match="token 0 is 51; the vocabulary has 0 to 50"):
                await batcher.process_request([51])

    run(main())


def test_a_failing_batch_is_bisected_and_only_the_culprit_fails(model: Model) -> None:
    poison = 13

    class Picky(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: Any, mask: Any) -> Any:
            if (tokens == poison).any():
                raise ValueError(f"token {poison} is bad luck")
            return super().__call__(tokens, mask)

    async def main() -> None:
        async with BatchProcessor(Picky(), max_batch_size=8) as batcher:
            prompts = [[i, 1] for i in (1, 2, 3, poison, 5, 6, 7, 8)]
            found = await asyncio.gather(
                *[batcher.process_request(p) for p in prompts], return_exceptions=True
            )
            for prompt, result in zip(prompts, found, strict=True):
                if poison in prompt:
                    assert type(result) is ExecutorError
                    assert "ValueError: token 13 is bad luck" in str(result)
                else:
                    assert result == next_token(prompt)
            assert batcher.snapshot().stats.faults_isolated == {"ExecutorError": 1}

    run(main())


def test_a_row_of_nan_fails_alone() -> None:
    def forward(tokens: Any, _mask: Any) -> Any:
        logits = np.zeros((len(tokens), 5))
        logits[tokens[:, -1] == 4] = np.nan
        return logits

    async def main() -> None:
        async with BatchProcessor(forward) as batcher:
            sound, faulted = await asyncio.gather(
                batcher.process_request([1]), batcher.process_request([4]), return_exceptions=True
            )
        assert sound == 0
        assert isinstance(faulted, RowFaultError)

    run(main())


def test_bad_requests_are_refused_and_the_others_go_on() -> None:
    async def main() -> None:
        model = Model()
        async with BatchProcessor(model, max_context=16) as batcher:
            found = await asyncio.gather(
                batcher.process_request([]),
                batcher.process_request([-1]),
                batcher.process_request([1] * 16),
                batcher.generate([1], GREEDY(max_tokens=16)),
                batcher.generate([1], SamplingParams(max_tokens=2, n=9)),
                batcher.generate([1], SamplingParams(max_tokens=2, stop=("x",))),
                batcher.process_request([1, 2]),
                return_exceptions=True,
            )
        assert all(isinstance(result, RequestError) for result in found[:-1])
        assert found[-1] == next_token([1, 2])

    run(main())


def test_prompt_scores_are_refused_because_the_function_does_not_give_them() -> None:
    async def main() -> None:
        async with BatchProcessor(Model()) as batcher:
            with pytest.raises(RequestError, match="prompt_logprobs"):
                await batcher.generate([1, 2], SamplingParams(prompt_logprobs=0))

    run(main())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": 3}, "forward must be a function"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, got 0"),
        ({"max_batch_size": "8"}, "max_batch_size"),
        ({"max_context": 1}, "max_context must be an integer of at least 2, got 1"),
        ({"vocabulary_size": 0}, "vocabulary_size must be an integer of at least 1, got 0"),
        ({"pad_token": "<pad>"}, "pad_token must be an integer of at least 0, got '<pad>'"),
        ({"batch_timeout_ms": -1}, "batch_timeout_ms"),
        ({"step_timeout_s": 0}, "step_timeout_s"),
        ({"slo_itl_ms": 0}, "slo_itl_ms must be a number above 0, got 0"),
        ({"max_queue_requests": 0}, "max_queue_requests"),
        ({"max_queue_tokens": 0}, "max_queue_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchProcessor(**{"forward": Model(), **options})


def test_a_function_that_hangs_fails_its_requests_and_refuses_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def forward(tokens: Any, _mask: Any) -> Any:
        gate.wait(PATIENCE_S)
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        batcher = BatchProcessor(forward, step_timeout_s=0.05)
        found = await asyncio.gather(
            *[batcher.process_request([i]) for i in range(3)], return_exceptions=True
        )
        assert all(isinstance(error, ExecutorError) for error in found)
        assert all("did not answer" in str(error) for error in found)
        assert batcher.snapshot().health == "stuck"
        with pytest.raises(ExecutorError, match="restart"):
            await batcher.process_request([1])
        gate.set()
        await batcher.close()

    monkeypatch.setattr("quire.batching.EngineConfig", partial(EngineConfig, step_grace_s=0.05))
    run(main())


def test_a_deadline_is_kept_and_an_impatient_caller_frees_its_place() -> None:
    async def main() -> None:
        model = Model()
        async with BatchProcessor(model, max_batch_size=2) as batcher:
            with pytest.raises(QuireError, match="ran out of time"):
                await batcher.generate([1], GREEDY(max_tokens=4000), timeout_s=0.05)
            impatient = asyncio.create_task(batcher.generate([1], GREEDY(max_tokens=4000)))
            while not batcher.snapshot().num_running:
                await asyncio.sleep(0)
            impatient.cancel()
            with pytest.raises(asyncio.CancelledError):
                await impatient
            assert await batcher.process_request([1, 2]) == next_token([1, 2])
            ended = batcher.snapshot().stats.requests_ended
        assert (ended["expired"], ended["cancelled"]) == (1, 1)

    run(main())


# ---- what can be seen when batches fail


class OneRowAtATime(Model):
    def __call__(self, tokens: Any, mask: Any) -> Any:
        if len(tokens) > 1:
            raise ValueError(f"{len(tokens)} rows are too many")
        return super().__call__(tokens, mask)


def test_a_function_that_fails_every_batch_is_seen_to(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with BatchProcessor(OneRowAtATime(), 8, 20) as batcher:
            outputs = await asyncio.gather(
                *[batcher.complete([i, 1], GREEDY(max_tokens=3)) for i in range(8)]
            )
            snapshot = batcher.snapshot()
        assert [output.token_ids for output in outputs] == [expected([i, 1], 3) for i in range(8)]
        stats, report = snapshot.stats, snapshot.health_report
        assert (stats.num_steps, stats.completion_tokens, stats.prompt_tokens) == (24, 24, 16)
        assert (stats.batch_size.total, stats.batch_size.sum) == (24, 24)
        assert stats.batch_size.counts[0] == 24, "all of one row"
        assert stats.step_tokens.sum == 16 + 16
        assert stats.steps_failed == {"ValueError": 3}
        assert stats.faults_isolated == {"ExecutorError": 3}
        assert (stats.num_step_splits, stats.num_steps_retried) == (3 * 7, 3 * 14)
        assert snapshot.health == report.state == "degraded"
        assert report.cause == "ValueError: 8 rows are too many"
        assert report.since is not None
        assert (report.batch_limit, report.max_batch_size) == (1, 8)
        for output in outputs:
            metrics = output.metrics
            assert metrics.first_step == metrics.failed_steps[0]
            assert len(metrics.failed_steps) == 3 * 3, "eight, four and two rows at a time"
            assert report.last_failed_step in metrics.failed_steps
            assert metrics.last_step not in (None, *metrics.failed_steps)
        assert len({output.metrics.last_step for output in outputs}) == 8

    run(main())
    first, count = [record for record in caplog.records if record.name == "quire.engine"]
    assert "8 requests failed" in first.getMessage()
    assert "ValueError: 8 rows are too many" in first.getMessage()
    assert first.exc_info is not None, "in full, with its traceback"
    assert "step_failed 2 more times" in count.getMessage()
    assert count.exc_info is None


def test_one_request_that_fails_alone_does_not_degrade_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward(tokens: Any, mask: Any) -> Any:
        if (tokens == 13).any():
            raise ValueError("token 13 is bad luck")
        return Model()(tokens, mask)

    async def main() -> None:
        async with BatchProcessor(forward, 4, 20) as batcher:
            for _ in range(4):
                outputs = await asyncio.gather(
                    *[batcher.complete([i], GREEDY(max_tokens=1)) for i in (1, 2, 3, 13)]
                )
                assert batcher.snapshot().health == "ok"
                assert batcher.snapshot().health_report.cause is None
            stats = batcher.snapshot().stats
        assert [output.error is None for output in outputs] == [True, True, True, False]
        assert stats.faults_isolated == {"ExecutorError": 4}
        assert stats.steps_failed == {"ValueError": 4}
        failed = outputs[3].metrics.failed_steps
        assert outputs[0].metrics.failed_steps == failed[:1], "the whole batch"
        assert outputs[2].metrics.failed_steps == failed[:2], "then half of it"
        assert outputs[3].metrics.last_step == failed[2]

    run(main())
    lines = [record for record in caplog.records if record.name == "quire.engine"]
    assert [line.__dict__["event"] for line in lines] == ["step_failed", "request_failed"] * 2
    assert [line.exc_info is not None for line in lines] == [True, False, False, False]


# ---- limits and targets


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"max_queue_requests": 2}, "2 requests wait; the queue holds 2"),
        ({"max_queue_tokens": 8}, "6 tokens wait and this request asks for 3; the queue holds 8"),
    ],
)
def test_beyond_the_bounds_of_the_queue_requests_are_refused(
    bounds: dict[str, Any], words: str
) -> None:
    gate = threading.Event()

    def forward(tokens: Any, _mask: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        async with BatchProcessor(forward, 1, 0.0, **bounds) as batcher:
            tasks = [asyncio.create_task(batcher.process_request([1, 2]))]
            while not batcher.snapshot().num_running:
                await asyncio.sleep(0)
            tasks += [asyncio.create_task(batcher.process_request([1, 2])) for _ in range(2)]
            refused = asyncio.create_task(batcher.process_request([1, 2]))
            await asyncio.sleep(0)
            gate.set()
            with pytest.raises(OverloadedError, match=words) as caught:
                await refused
            assert caught.value.retry_after_s > 0
            assert await asyncio.gather(*tasks) == [0, 0, 0]

    run(main())


@pytest.mark.parametrize(("slo_itl_ms", "largest"), [(None, 16), (21.0, 4)])
def test_batches_stay_within_the_target_between_tokens(
    slo_itl_ms: float | None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    sizes: list[int] = []

    def forward(tokens: Any, _mask: Any) -> Any:
        """Five milliseconds a row, on a clock that nothing else moves."""
        sizes.append(len(tokens))
        clock.sleep(0.005 * len(tokens))
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        async with BatchProcessor(forward, 16, 0.0, slo_itl_ms=slo_itl_ms) as batcher:
            for num_requests in (1, 2, 3, 16, 16):
                await asyncio.gather(
                    *[batcher.generate([1], GREEDY(max_tokens=8)) for _ in range(num_requests)]
                )
        assert max(sizes[-20:]) == largest

    for module in ("quire.engine.engine", "quire.executors.base"):
        monkeypatch.setattr(f"{module}.RealClock", lambda: clock)
    run(main())


# ---- the batching delay


def test_a_caller_that_sends_one_request_after_another_waits_for_nobody() -> None:
    async def main() -> None:
        async with BatchProcessor(Model(), 8, 1000.0) as batcher:
            outputs = [await batcher.complete([1, i], GREEDY(max_tokens=1)) for i in range(30)]
        delays = [WaitReason.BATCHING_DELAY in output.metrics.waited_for for output in outputs]
        assert sum(delays) <= 3, "delays that bring nobody are learned from"

    run(main())


# ---- the end


def test_closing_ends_what_is_left_and_refuses_the_rest() -> None:
    gate = threading.Event()

    def forward(tokens: Any, _mask: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return np.zeros((len(tokens), 3))

    async def main() -> None:
        batcher = BatchProcessor(forward)
        task = asyncio.create_task(batcher.generate([1], GREEDY(max_tokens=50)))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        gate.set()
        await closing
        with pytest.raises(RequestCancelledError):
            await task
        with pytest.raises(ExecutorError, match="closed"):
            await batcher.process_request([1])

    run(main())


def test_closing_one_that_was_never_used_returns() -> None:
    run(BatchProcessor(Model()).close())


def test_one_batcher_serves_one_event_loop_after_another() -> None:
    model = AsyncModel()
    batcher = BatchProcessor(model)
    for first in range(3):
        assert run(batcher.process_request([first])) == next_token([first])
    run(batcher.close())


def test_the_output_tells_what_happened() -> None:
    async def main() -> None:
        async with BatchProcessor(Model()) as batcher:
            output = await batcher.complete([1, 2], GREEDY(max_tokens=3))
        assert output.status is Status.FINISHED
        assert output.metrics.num_steps == 3
        assert output.metrics.first_token_at is not None
        assert output.prompt_token_ids == (1, 2)

    run(main())


def test_an_error_that_cannot_be_printed_fails_its_request_alone() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    model = Model()

    def forward(tokens: Any, mask: Any) -> Any:
        if (tokens == 9).any():
            raise UnprintableError
        return model(tokens, mask)

    async def main() -> None:
        async with BatchProcessor(forward, 4, 20.0) as batcher:
            tasks = [batcher.process_request([1, last]) for last in (2, 9, 3)]
            sound, failed, other = await asyncio.gather(*tasks, return_exceptions=True)
            assert [sound, other] == [next_token([1, 2]), next_token([1, 3])]
            assert isinstance(failed, ExecutorError)
            assert "UnprintableError: an error whose text cannot be made" in str(failed)
            assert await batcher.process_request([1, 2]) == next_token([1, 2])

    run(main())
