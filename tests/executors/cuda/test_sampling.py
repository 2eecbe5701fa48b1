"""The device's sampler gives the reference sampler's tokens, row by row and in any company."""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.executors.sampler_cases import make_case  # noqa: E402

from quire.core.errors import RowFaultError  # noqa: E402
from quire.core.plan import History, Sampling, SequencePlan, Want  # noqa: E402
from quire.core.sampling import SamplingParams, draw_bits  # noqa: E402
from quire.executors.cuda import sampling  # noqa: E402
from quire.executors.cuda.kernels.layers import (  # noqa: E402
    FINITE,
    NOT_FINITE,
    NOTHING_ALLOWED,
    TOO_LARGE,
)
from quire.executors.cuda.sampling import SampleRow  # noqa: E402
from quire.executors.elementary import exp as reference_exp  # noqa: E402
from quire.executors.sampler import sample, score  # noqa: E402

VOCABULARY = 50
SAMPLES = torch.tensor([7, 9, 11], dtype=torch.int32)

tokens = st.integers(0, VOCABULARY - 1)
some_tokens = st.lists(tokens, max_size=6).map(tuple)


@st.composite
def rows(draw: Any) -> SampleRow:
    params = SamplingParams(
        max_tokens=8,
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 7.0])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.7])),
        min_tokens=draw(st.integers(0, 3)),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, 2.5]), max_size=3)),
    )
    allowed = draw(st.none() | st.binary(min_size=1, max_size=9))
    history = None
    if params.needs_history:
        history = History(draw(some_tokens), draw(some_tokens))
    how = Sampling(params, draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3)), (1, 2))
    pending = draw(st.none() | st.integers(0, 2)) if history is not None else None
    return SampleRow(how, draw(st.integers(0, 5)), history, pending, allowed)


def expected(logits: Any, row: SampleRow) -> int | None:
    history = row.history
    if history is not None and row.pending is not None:
        history = history._replace(completion=(*history.completion, int(SAMPLES[row.pending])))
    try:
        return sample(logits, row.sampling, row.completion_position, history, row.allowed).token
    except RowFaultError:
        return None


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_tokens_are_the_reference_samplers(asked: list[SampleRow], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(asked), VOCABULARY)).astype(np.float32)
    logits[:, ::7] = np.round(logits[:, ::7])  # so that some are equal
    found, status = sampling.choose(torch.from_numpy(logits), asked, SAMPLES)
    for place, row in enumerate(asked):
        wanted = expected(logits[place], row)
        if wanted is None:
            assert status[place] in (NOTHING_ALLOWED, TOO_LARGE)
        else:
            assert status[place] == FINITE
            assert found[place] == wanted


def test_rows_with_random_samplers_are_the_reference_samplers() -> None:
    """Every order has rows of its own in one call, beside plain ones."""
    for start in range(0, 1000, 20):
        cases = [make_case(number, VOCABULARY, bans=False) for number in range(start, start + 20)]
        asked = [SampleRow(c.sampling, c.position, c.history, None, c.allowed) for c in cases]
        logits = np.stack([case.logits for case in cases])
        found, status = sampling.choose(torch.from_numpy(logits), asked, SAMPLES)
        for place, row in enumerate(asked):
            wanted = expected(logits[place], row)
            if wanted is None:
                assert status[place] in (NOTHING_ALLOWED, TOO_LARGE), row
            else:
                assert (status[place], found[place]) == (FINITE, wanted), row


@pytest.mark.parametrize("repeat_last_n", [None, -1, 1, 2, 9])
def test_a_pending_token_is_the_last_that_penalties_look_at(repeat_last_n: int | None) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=9.0, presence_penalty=1.0, repeat_last_n=repeat_last_n
    )
    how = Sampling(params, 1, 0)
    for completion in [(), (3,), (7, 3)]:
        row = SampleRow(how, 0, History((1, 2, 3), completion), 0)
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, [1, 2, 3, 7]] = [5.0, 6.0, 7.0, 8.0]
        found, _ = sampling.choose(torch.from_numpy(logits), [row], SAMPLES)
        assert found[0] == expected(logits[0], row)


def test_logits_that_are_not_numbers_are_said_to_be() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 3] = float("nan")
    how = SampleRow(Sampling(SamplingParams(), 1, 0), 0)
    _, status = sampling.choose(logits, [how, how], SAMPLES)
    assert status.tolist() == [FINITE, NOT_FINITE]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_draws_are_the_same_function_of_seed_sequence_and_position(
    seed: int, index: int, position: int
) -> None:
    row = SampleRow(Sampling(SamplingParams(), seed, index), position)
    assert int(sampling._bits([row, row])[1]) == draw_bits(seed, index, position)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62))
@settings(max_examples=50, deadline=None)
def test_a_place_is_drawn_with_128_bits(bits: int, total: int) -> None:
    signed = np.array([bits], np.uint64).view(np.int64)
    found = sampling._high_product(torch.from_numpy(signed), torch.tensor([total]))
    assert int(found[0]) == (bits * total) >> 64


def test_scores_are_the_reference_samplers() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (4, VOCABULARY)).astype(np.float32)
    chosen = torch.tensor([0, 7, 9, 49])
    found = sampling.score(torch.from_numpy(logits), chosen, 3)
    for place in range(4):
        wanted = score(logits[place], int(chosen[place]), 3)
        assert float(found.logprobs[place]) == pytest.approx(wanted.logprob, abs=1e-12)
        assert int(found.ranks[place]) == wanted.rank
        assert found.top_tokens[place].tolist() == [token for token, _ in wanted.top]


@pytest.mark.parametrize("width", [50, 5000])
def test_scores_depend_on_their_row_alone(width: int) -> None:
    logits = torch.from_numpy(
        np.random.default_rng(3).normal(0, 4, (9, width)).astype(np.float32).round(2)
    )
    chosen = torch.arange(9) * 5
    together = sampling.score(logits, chosen, 3)
    for rows in ([0], [4], [8, 1], [7, 6, 5, 2]):
        found = sampling.score(logits[rows], chosen[rows], 3)
        for some, all_rows in zip(found, together, strict=True):
            assert torch.equal(some, all_rows[rows])


def test_a_vocabulary_smaller_than_the_scores_asked_for_gives_what_it_has() -> None:
    found = sampling.score(torch.zeros(2, 3), torch.tensor([0, 2]), 20)
    assert found.top_tokens.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert found.ranks.tolist() == [1, 1]


def test_scores_of_what_the_kernel_does_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match="no scores of"):
        sampling.score(torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 2]), 1)
    with pytest.raises(ValueError, match="no scores of"):
        sampling.score(torch.zeros(2, 3), torch.tensor([0]), 1)


def test_the_most_demanding_row_uses_every_option() -> None:
    row = sampling.most_demanding_row(VOCABULARY)
    usual = SamplingParams()
    of_the_text = {"seed", "n", "ignore_eos", "include_stop_str_in_output", "prompt_logprobs"}
    of_the_text |= {"include_stop_token"}
    of_the_text |= {"skip_special_tokens", "spelled_token_ids", "detokenize"}
    of_the_text |= {"allowed_token_ids", "bad_words", "thinking"}  # which are masks
    of_the_text |= {"stop", "stop_token_ids", "structured", "temperature"}  # or any but 0
    for field in dataclasses.fields(SamplingParams):
        if field.name not in of_the_text:
            assert getattr(row.sampling.params, field.name) != getattr(usual, field.name), field
    assert row.history is not None and row.allowed is not None and row.sampling.end_token_ids
    _, status = sampling.choose(torch.zeros(2, VOCABULARY), [row, row], SAMPLES)
    assert status.tolist() == [FINITE] * 2


def test_the_exponential_is_the_references_bit_for_bit() -> None:
    values = -np.abs(np.random.default_rng(2).normal(0, 50, 5000))
    values[:5] = [0.0, -708.0, -708.1, -1e300, -np.inf]
    found = sampling.exp(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(found, reference_exp(values))


def test_a_penalty_that_makes_logits_infinite_is_said_to() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1e-38)
    row = SampleRow(Sampling(params, 1, 0), 0, History((3,), ()))
    _, status = sampling.choose(torch.full((1, VOCABULARY), 5.0), [row], SAMPLES)
    assert status.tolist() == [TOO_LARGE]


def test_rows_that_ask_for_the_likeliest_alone_are_plain() -> None:
    def plan(params: SamplingParams, position: int = 0, allowed: bytes | None = None) -> Any:
        how = Sampling(params, 0, 0, (1,))
        return SequencePlan(0, 0, (1,), None, (0,), Want.SAMPLE, how, position, None, allowed)

    greedy = SamplingParams(temperature=0.0)
    assert sampling.wants_argmax(plan(greedy))
    assert not sampling.wants_argmax(plan(SamplingParams()))
    assert not sampling.wants_argmax(plan(greedy, allowed=b"\x01"))
    assert not sampling.wants_argmax(plan(SamplingParams(temperature=0.0, logprobs=0)))
    short = SamplingParams(temperature=0.0, min_tokens=2)
    assert not sampling.wants_argmax(plan(short, 1))
    assert sampling.wants_argmax(plan(short, 2))
