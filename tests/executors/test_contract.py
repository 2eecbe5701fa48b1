"""What every executor that runs models answers: wants, samples that follow, scores, faults."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np
import pytest
from tests.executors.cpu import running
from tests.executors.reference import plans
from tests.executors.reference.plans import logits, row, run
from tests.fixture_files import fixture_file

from quire.core.plan import History, Sampling, SequencePlan, StepPlan, TokenLogprob, Want
from quire.core.sampling import SamplingParams
from quire.executors.base import Executor
from quire.model.loading import load_model

PATH = fixture_file("tiny/Q4_0.gguf")
OPENERS: dict[str, Callable[..., AbstractContextManager[Executor]]] = {
    "reference": plans.opened,
    "cpu": running.opened,
}
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TABLE = (2, 0)
FEW_STEPS = 32  # more than any executor remembers


@pytest.fixture(scope="module", params=sorted(OPENERS))
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with OPENERS[request.param](PATH, num_blocks=8) as found:
        yield found


def with_params(**params: object) -> Sampling:
    return Sampling(SamplingParams.from_mapping({"temperature": 0.0, **params}), seed=5, index=0)


def test_it_says_what_it_can_hold(executor: Executor) -> None:
    capacity = executor.capacity
    assert (capacity.num_blocks, capacity.block_size, capacity.vocabulary_size) == (8, 16, 512)
    assert capacity.max_context == 128  # what the blocks hold, less than the model's 512
    assert executor.is_warm
    assert set(executor.memory_bytes) >= {"weights", "kv"}


def test_each_want_is_answered_from_the_same_state(executor: Executor) -> None:
    every = logits(executor, row(PROMPT, TABLE))
    assert every.shape == (8, 512)
    [sampled] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE))
    assert sampled.token == int(every[-1].argmax())
    assert sampled.logits is None and sampled.logprob is None
    [pooled] = run(executor, row(PROMPT, TABLE, want=Want.POOLED))
    with load_model(PATH) as model:
        expected = model.tensors["output.weight"].to_float32() @ pooled.pooled
    assert np.linalg.norm(every[-1] - expected) <= 2e-2 * np.linalg.norm(expected)
    [nothing] = run(executor, row(PROMPT, TABLE, want=Want.NOTHING))
    assert nothing == (0, None, None, (), None, None, None)


def test_a_row_that_follows_a_step_takes_what_it_sampled(executor: Executor) -> None:
    first = StepPlan(1, (row(PROMPT, TABLE, want=Want.SAMPLE),))
    second = StepPlan(2, (row((), TABLE, start=8, want=Want.SAMPLE, follows=1),))
    tickets = [executor.submit(first), executor.submit(second)]  # before the first is collected
    [one], [two] = (executor.collect(ticket, 60).sequences for ticket in tickets)
    assert one.token is not None
    [expected] = run(executor, row((*PROMPT, one.token), TABLE, want=Want.SAMPLE), step_id=3)
    assert two.token == expected.token


def test_penalties_see_the_sample_that_is_followed(executor: Executor) -> None:
    [first] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE), step_id=1)
    assert first.token is not None
    sampling = with_params(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    rows = [
        row((), TABLE, start=8, want=Want.SAMPLE, follows=1, history=History(PROMPT, ())),
        row(
            (first.token,),
            TABLE,
            start=8,
            want=Want.SAMPLE,
            history=History(PROMPT, (first.token,)),
        ),
    ]
    [follower], [given] = (
        run(executor, plan._replace(sampling=sampling), step_id=2) for plan in rows
    )
    assert follower.token == given.token


def test_a_step_run_again_in_parts_keeps_the_samples_of_all_parts(
    executor: Executor,
) -> None:
    for sequence_id, block in ((0, 2), (1, 3)):
        plan = row(PROMPT, (block,), sequence_id=sequence_id, want=Want.SAMPLE)
        run(executor, plan, step_id=40)
    rows = [
        row((), (block,), start=8, sequence_id=i, want=Want.SAMPLE, follows=40)
        for i, block in ((0, 2), (1, 3))
    ]
    assert [result.fault for result in run(executor, *rows, step_id=41)] == [None, None]


def test_following_a_step_without_a_sample_faults_that_row_alone(
    executor: Executor,
) -> None:
    run(executor, row(PROMPT, TABLE, want=Want.NOTHING), step_id=7)
    orphan = row((), TABLE, start=8, follows=7, want=Want.SAMPLE)
    sound = row(PROMPT, (4,), sequence_id=1, want=Want.SAMPLE)
    lost, kept = run(executor, orphan, sound, step_id=8)
    assert lost.fault == "step 7 sampled no token for this sequence"
    assert kept.fault is None and kept.token is not None


def test_a_sample_without_sampling_parameters_faults_that_row_alone(executor: Executor) -> None:
    without = row(PROMPT, TABLE, want=Want.SAMPLE)._replace(sampling=None)
    sound = row(PROMPT, (4,), sequence_id=1, want=Want.SAMPLE)
    refused, kept = run(executor, without, sound)
    assert refused.fault == "a sample is wanted, but the row has no sampling parameters"
    assert kept.fault is None and kept.token is not None


def test_old_samples_are_forgotten(executor: Executor) -> None:
    for step_id in range(100, 100 + FEW_STEPS):
        run(executor, row(PROMPT[:1], TABLE, want=Want.SAMPLE), step_id=step_id)
    follower = row((), TABLE, start=1, want=Want.SAMPLE)
    newest = follower._replace(follows=99 + FEW_STEPS)
    assert run(executor, newest, step_id=200)[0].fault is None
    [lost] = run(executor, follower._replace(follows=100), step_id=201)
    assert lost.fault == "step 100 sampled no token for this sequence"


def test_a_grammar_mask_decides_among_the_allowed_tokens(executor: Executor) -> None:
    scores = logits(executor, row(PROMPT, TABLE))[-1]
    mask = bytearray(64)
    for token in (9, 300):
        mask[token >> 3] |= 1 << (token & 7)
    [masked] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE, allowed=bytes(mask)))
    assert masked.token == max((9, 300), key=lambda token: scores[token])
    nothing_allowed = row(PROMPT, TABLE, want=Want.SAMPLE, allowed=bytes(64))
    sound = row(PROMPT, (4,), sequence_id=1, want=Want.SAMPLE)
    stuck, free = run(executor, nothing_allowed, sound)
    assert stuck.fault == "the mask allows no token"
    assert free.token == int(scores.argmax())


def test_a_bias_of_a_token_too_high_faults_its_row_alone(executor: Executor) -> None:
    biased = row(PROMPT, TABLE, want=Want.SAMPLE, sampling=with_params(logit_bias={5000: 1.0}))
    sound = row(PROMPT, (4,), sequence_id=1, want=Want.SAMPLE)
    faulty, kept = run(executor, biased, sound)
    assert faulty.fault is not None and faulty.token is None
    assert kept.fault is None and kept.token is not None


def test_logprobs_are_those_of_the_logits(executor: Executor) -> None:
    scores = logits(executor, row(PROMPT, TABLE))[-1].astype(np.float64)
    expected = scores - np.log(np.exp(scores).sum())
    plan = row(PROMPT, TABLE, want=Want.SAMPLE, sampling=with_params(logprobs=3))
    [result] = run(executor, plan)
    assert result.logprob is not None
    assert result.logprob.rank == 1
    assert result.logprob.logprob == pytest.approx(expected.max())
    assert [token for token, _ in result.logprob.top] == np.argsort(-expected)[:3].tolist()


@pytest.mark.parametrize("cut", [None, 3])
def test_prompt_targets_are_scored_at_each_position(executor: Executor, cut: int | None) -> None:
    scores = logits(executor, row(PROMPT, TABLE)).astype(np.float64)
    expected = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    found: list[TokenLogprob] = []
    edges = [0, len(PROMPT)] if cut is None else [0, cut, len(PROMPT)]
    for start, end in pairwise(edges):
        plan = row(
            PROMPT[start:end],
            TABLE,
            start=start,
            want=Want.SAMPLE if end == len(PROMPT) else Want.NOTHING,
            sampling=with_params(prompt_logprobs=2),
            prompt_targets=PROMPT[start + 1 : end + 1],
        )
        [result] = run(executor, plan)
        found += result.prompt_logprobs
    assert [entry.token for entry in found] == list(PROMPT[1:])
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(expected[position, entry.token], abs=1e-9)
        assert [token for token, _ in entry.top] == np.argsort(-expected[position])[:2].tolist()


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (row(PROMPT, (0,), start=12), "1 blocks do not hold 20 positions"),
        (row(PROMPT, (0, 8), start=12), "block table"),
        (row(PROMPT, (0, -1), start=12), "block table"),
        (row(PROMPT, range(9), start=124), "not within the context of 128"),
        (row(PROMPT, TABLE, start=-1), "not within the context"),
        (row((), TABLE), "not within the context"),
        (row(PROMPT, TABLE, prompt_targets=(512,)), "token 512 is outside the vocabulary of 512"),
    ],
)
def test_a_row_out_of_bounds_faults_alone(
    executor: Executor, plan: SequencePlan, fault: str
) -> None:
    faulty, sound = run(executor, plan, row(PROMPT, (4,), sequence_id=1))
    assert faulty.fault is not None and fault in faulty.fault
    assert sound.fault is None


def test_sampling_is_drawn_from_seed_and_position(executor: Executor) -> None:
    params = SamplingParams(temperature=2.0)
    plans = [
        row(PROMPT, TABLE, want=Want.SAMPLE, sampling=Sampling(params, seed, 0), sequence_id=seed)
        for seed in range(8)
    ]
    tokens = [run(executor, plan)[0].token for plan in plans]
    assert len(set(tokens)) > 1
    together = [plan._replace(block_table=(i,)) for i, plan in enumerate(plans)]
    assert [result.token for result in run(executor, *together)] == tokens
