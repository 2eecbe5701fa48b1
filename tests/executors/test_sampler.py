"""The sampler against a slow reading of the same rules, one token at a time in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, allows
from quire.core.sampling import SamplingParams, draw_bits
from quire.executors.sampler import _draw, sample, score, weigh

END_TOKENS = (0, 5)


def logits_of(values: Any) -> Any:
    return np.array(values, np.float32)


def sampling_of(params: SamplingParams, seed: int = 0, index: int = 0) -> Sampling:
    return Sampling(params, seed, index, END_TOKENS)


# ---- a slow reading of the rules


def adjusted_scores(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    history: History | None,
    allowed: bytes | None,
) -> list[float]:
    """Mask, ban, bias, penalties, in single precision as the sampler's."""
    scores = []
    for token, logit in enumerate(logits):
        value = np.float32(logit)
        is_banned = position < params.min_tokens and token in END_TOKENS
        if is_banned or (allowed is not None and not allows(allowed, token)):
            scores.append(-math.inf)
            continue
        if token in params.logit_bias:
            value = np.float32(value + np.float32(params.logit_bias[token]))
        if history is not None:
            value = penalised(value, token, params, history)
        scores.append(float(value))
    return scores


def penalised(value: Any, token: int, params: SamplingParams, history: History) -> Any:
    seen = token in history.prompt or token in history.completion
    if seen and params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        value = value / penalty if value > 0 else value * penalty
    count = history.completion.count(token)
    if count:
        value = value - np.float32(params.frequency_penalty) * np.float32(count)
        value = value - np.float32(params.presence_penalty)
    return np.float32(value)


def kept_weights(scores: Sequence[float], params: SamplingParams) -> list[int]:
    """Integer weights by token, 0 for those that min-p, top-k and top-p leave out."""
    best = max(scores)
    likelihood = [math.exp((score - best) / params.temperature) for score in scores]
    weights = [int(value * 2**32) for value in likelihood]
    weights = [w if v >= params.min_p else 0 for w, v in zip(weights, likelihood, strict=True)]
    order = sorted(
        range(len(weights)), key=lambda token: -weights[token]
    )  # stable: lower ids first
    if params.top_k:
        for token in order[params.top_k :]:
            weights[token] = 0
    total = sum(weights)
    before = 0
    kept = list(weights)
    for token in order:
        if params.top_p < 1.0 and before >= params.top_p * total:
            kept[token] = 0
        before += weights[token]
    return kept


def drawn(weights: Sequence[int], bits: int) -> int:
    point = bits * sum(weights) >> 64
    for token, weight in enumerate(weights):
        if point < weight:
            return token
        point -= weight
    raise AssertionError("the point is beyond the weights")


def chosen(
    logits: Sequence[float],
    sampling: Sampling,
    position: int,
    history: History | None = None,
    allowed: bytes | None = None,
) -> int | None:
    scores = adjusted_scores(logits, sampling.params, position, history, allowed)
    if max(scores) == -math.inf:
        return None
    if sampling.params.temperature == 0.0:
        return scores.index(max(scores))
    weights = kept_weights(scores, sampling.params)
    return drawn(weights, draw_bits(sampling.seed, sampling.index, position))


# Quarters of small numbers: ties are common, and single precision is exact.
values = st.integers(-40, 40).map(lambda number: number / 4)
rows = st.lists(values, min_size=8, max_size=24)
tokens_seen = st.lists(st.integers(0, 7), max_size=6).map(tuple)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
)


@given(
    logits=rows,
    params=all_params,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 5),
    seen=st.tuples(tokens_seen, tokens_seen),
    allowed=st.none() | st.binary(min_size=0, max_size=3),
)
@settings(max_examples=600)
def test_the_sampler_agrees_with_the_slow_reading(
    logits: list[float],
    params: SamplingParams,
    seed: int,
    position: int,
    seen: tuple[tuple[int, ...], tuple[int, ...]],
    allowed: bytes | None,
) -> None:
    history = History(*seen) if params.needs_history else None
    sampling = sampling_of(params, seed)
    expected = chosen(logits, sampling, position, history, allowed)
    if expected is None:
        with pytest.raises(RowFaultError, match="no token"):
            sample(logits_of(logits), sampling, position, history, allowed)
    else:
        assert sample(logits_of(logits), sampling, position, history, allowed).token == expected


# ---- the rules, one by one

ROW = [0.0, 3.0, 1.0, 3.0, 2.0, -1.0]
ZERO = SamplingParams(temperature=0.0)


def greedy_token(params: SamplingParams = ZERO, position: int = 0, **more: Any) -> int:
    greedy = replace(params, temperature=0.0)
    return sample(logits_of(ROW), sampling_of(greedy), position, **more).token


def possible(params: SamplingParams, row: Sequence[float] = ROW) -> set[int]:
    """Every token that many draws give."""
    drawn_at = range(400)
    return {sample(logits_of(row), sampling_of(params), position).token for position in drawn_at}


def test_greedy_takes_the_first_of_equals() -> None:
    assert greedy_token() == 1


def test_a_bias_moves_a_token() -> None:
    assert greedy_token(SamplingParams(logit_bias={4: 1.5})) == 4
    assert greedy_token(SamplingParams(logit_bias={1: -100.0})) == 3


def test_a_mask_leaves_only_what_it_allows() -> None:
    assert greedy_token(allowed=bytes([0b110100])) == 4
    assert greedy_token(allowed=bytes([0b000001])) == 0


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest() -> None:
    logits = logits_of([0.0] * 8 + [9.0])
    assert sample(logits, sampling_of(ZERO), 0, allowed=b"\xff").token == 0


def test_end_tokens_are_forbidden_before_the_minimum() -> None:
    row = logits_of([9.0, 1.0, 0.0, 0.0, 0.0, 8.0])
    params = replace(ZERO, min_tokens=2)
    assert sample(row, sampling_of(params), 1).token == 1
    assert sample(row, sampling_of(params), 2).token == 0


def test_no_bias_brings_a_forbidden_token_back() -> None:
    params = SamplingParams(logit_bias={0: 100.0}, min_tokens=1)
    assert greedy_token(params) == 1
    assert greedy_token(SamplingParams(logit_bias={0: 100.0}), allowed=bytes([0b10])) == 1


def test_repetition_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    params = SamplingParams(repetition_penalty=4.0)
    assert greedy_token(params, history=History((1,), (3,))) == 4
    negative = logits_of([-1.0, -2.0, -3.0])
    penalised_one = sampling_of(replace(params, temperature=0.0))
    assert sample(negative, penalised_one, 0, History((0,), ())).token == 1


def test_frequency_counts_and_presence_does_not_and_both_spare_the_prompt() -> None:
    twice = History((), (1, 1))
    assert greedy_token(SamplingParams(frequency_penalty=0.6), history=twice) == 3
    row = logits_of([0.0, 3.0, 2.0])
    gentle = sampling_of(replace(ZERO, presence_penalty=0.6))
    assert sample(row, gentle, 0, twice).token == 1, "0.6 once"
    counting = sampling_of(replace(ZERO, frequency_penalty=0.6))
    assert sample(row, counting, 0, twice).token == 2, "0.6 twice"
    assert sample(row, counting, 0, History((1, 1, 1), ())).token == 1, "the prompt is spared"


def test_top_k_keeps_the_lower_ids_of_equals() -> None:
    assert possible(SamplingParams(top_k=1)) == {1}
    assert possible(SamplingParams(top_k=2)) == {1, 3}
    assert possible(SamplingParams(top_k=3)) == {1, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert possible(SamplingParams(top_p=0.4), row) == {0}
    assert possible(SamplingParams(top_p=0.6), row) == {0, 1}
    assert possible(SamplingParams(top_p=0.9), row) == {0, 1, 2}
    assert possible(SamplingParams(top_p=1e-9), row) == {0}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two that top-k leaves, the first has 4/7.
    assert possible(SamplingParams(top_k=2, top_p=0.55), row) == {0}
    assert possible(SamplingParams(top_k=2, top_p=0.6), row) == {0, 1}


def test_min_p_is_a_share_of_the_likeliest() -> None:
    row = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert possible(SamplingParams(min_p=0.5), row) == {0, 1}
    assert possible(SamplingParams(min_p=0.2), row) == {0, 1, 2}
    assert possible(SamplingParams(min_p=1.0), row) == {0}


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-38, 1e-30, 1e-6])
@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert possible(SamplingParams(temperature=temperature), [0.0, 1.0, 1.5, -80.0]) == {2}


# ---- chance


def chi_square(counts: dict[int, int], expected: dict[int, float]) -> float:
    return sum((counts.get(t, 0) - e) ** 2 / e for t, e in expected.items())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("varies", ["seed", "index", "position"])
def test_draws_follow_the_softmax_over_seeds_completions_and_positions(
    temperature: float, varies: str
) -> None:
    row = [0.3, -1.0, 2.0, 1.1, 0.0, -0.4]
    num_draws = 4000
    counts: dict[int, int] = {}
    params = SamplingParams(temperature=temperature)
    for number in range(num_draws):
        draw = {"seed": 11, "index": 0, "position": 0} | {varies: number}
        sampling = sampling_of(params, draw["seed"], draw["index"])
        token = sample(logits_of(row), sampling, draw["position"]).token
        counts[token] = counts.get(token, 0) + 1
    weights = [math.exp(value / temperature) for value in row]
    expected = {t: num_draws * weight / sum(weights) for t, weight in enumerate(weights)}
    assert chi_square(counts, expected) < 20.5  # 5 degrees of freedom: one in a thousand is above


def test_a_draw_repeats_itself_exactly() -> None:
    row = logits_of(np.linspace(0.0, 3.0, 50))
    first = [sample(row, sampling_of(SamplingParams(), seed=4), p).token for p in range(50)]
    again = [sample(row, sampling_of(SamplingParams(), seed=4), p).token for p in range(50)]
    assert first == again
    assert len(set(first)) > 10


# ---- scores


def log_softmax(row: Sequence[float]) -> list[float]:
    best = max(row)
    total = math.fsum(math.exp(value - best) for value in row)
    return [value - best - math.log(total) for value in row]


@given(row=st.lists(st.integers(-3200, 3200), min_size=1, max_size=30), data=st.data())
@settings(max_examples=200)
def test_scores_are_the_log_softmax_of_the_models_own_logits(
    row: list[float], data: st.DataObject
) -> None:
    row = [value / 64 for value in row]
    token = data.draw(st.integers(0, len(row) - 1))
    num_top = data.draw(st.integers(0, 20))
    found = score(logits_of(row), token, num_top)
    expected = log_softmax(row)
    assert found.token == token
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    assert found.rank == 1 + sum(value > row[token] for value in row)
    order = sorted(range(len(row)), key=lambda t: -row[t])[:num_top]
    assert [t for t, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(
        [expected[t] for t in order], abs=1e-9
    )


def test_a_sample_is_scored_before_temperature_bias_and_mask() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={5: 50.0})
    choice = sample(logits_of(ROW), sampling_of(params), 0)
    assert choice.token == 5
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(log_softmax(ROW)[5], abs=1e-6)
    assert choice.logprob.rank == 6
    assert [token for token, _ in choice.logprob.top] == [1, 3]


def test_no_score_is_given_unasked() -> None:
    assert sample(logits_of(ROW), sampling_of(ZERO), 0).logprob is None


# ---- faults


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_a_fault_of_the_row(bad: float) -> None:
    with pytest.raises(RowFaultError, match="finite"):
        sample(logits_of([1.0, bad, 0.0]), sampling_of(ZERO), 0)


def test_minus_infinity_bans_a_token_but_not_all_of_them() -> None:
    banned = [-math.inf, 1.0, -math.inf]
    assert all(
        sample(logits_of(banned), sampling_of(SamplingParams(), s), 0).token == 1 for s in range(9)
    )
    with pytest.raises(RowFaultError, match="finite"):
        sample(logits_of([-math.inf] * 3), sampling_of(ZERO), 0)


def test_a_mask_that_allows_nothing_is_a_fault_of_the_row() -> None:
    with pytest.raises(RowFaultError, match="no token"):
        sample(logits_of(ROW), sampling_of(ZERO), 0, allowed=b"\x00")


@pytest.mark.parametrize(
    ("params", "history"),
    [
        (SamplingParams(logit_bias={6: 1.0}), None),
        (SamplingParams(repetition_penalty=2.0), History((6,), ())),
        (SamplingParams(frequency_penalty=1.0), History((), (6,))),
    ],
)
def test_a_token_beyond_the_logits_is_a_fault_of_the_row(
    params: SamplingParams, history: History | None
) -> None:
    with pytest.raises(RowFaultError, match="beyond the 6 logits"):
        sample(logits_of(ROW), sampling_of(params), 0, history)


@pytest.mark.parametrize(("logit", "penalty"), [(3e38, 0.5), (-math.inf, 1e-50)])
def test_penalties_that_leave_no_finite_best_are_a_fault_of_the_row(
    logit: float, penalty: float
) -> None:
    params = replace(ZERO, repetition_penalty=penalty)
    with pytest.raises(RowFaultError, match="penalties make the logits infinite"):
        sample(logits_of([1.0, logit]), sampling_of(params), 0, History((1,), ()))


def test_an_end_token_beyond_the_logits_is_a_fault_of_the_row() -> None:
    with pytest.raises(RowFaultError, match="beyond the 3 logits"):
        sample(logits_of([1.0, 2.0, 3.0]), sampling_of(replace(ZERO, min_tokens=1)), 0)


def test_the_logits_are_left_as_they_were() -> None:
    logits = logits_of(ROW)
    params = SamplingParams(logit_bias={1: -5.0}, repetition_penalty=2.0, min_tokens=3)
    sample(logits, sampling_of(params), 0, History((1,), (2,)), b"\x3f")
    assert logits.tolist() == ROW


# ---- integer weights


ONE = 2**32
PLAIN = sampling_of(SamplingParams())
# Likelihoods of 1, 1/2, 1/2, 1/4 and 1/16 of the best, and a banned token.
HALVES = np.log(np.array([0.5, 1.0, 0.5, 0.25, 0.0625, 1.0]))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
        ({"min_p": 0.26}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),  # of equals the lower id
        ({"top_k": 1}, [1]),
        ({"top_p": 0.4}, [1]),  # the best alone has 1/2.3125
        ({"top_p": 0.44}, [0, 1]),
        ({"top_p": 0.87}, [0, 1, 2, 3]),
        ({"top_p": 0.86}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.76}, [0, 1, 2]),  # top-p of what top-k leaves
        ({"top_k": 3, "top_p": 0.74}, [0, 1]),
        ({"min_p": 0.26, "top_p": 0.74}, [0, 1]),
    ],
)
def test_tokens_that_are_cut_weigh_nothing(values: dict[str, Any], kept: list[int]) -> None:
    scores = HALVES.astype(np.float32)
    scores[5] = -np.inf
    weights = weigh(scores, sampling_of(SamplingParams(**values)), 0).tolist()
    expected = [ONE // 2, ONE, ONE // 2, ONE // 4, ONE // 16, 0]
    for token, weight in enumerate(weights):
        if token in kept:
            assert weight == pytest.approx(expected[token], rel=1e-6)
        else:
            assert weight == 0
    assert weights[1] in (0, ONE)


def test_temperature_divides_before_the_exponential() -> None:
    warm = sampling_of(SamplingParams(temperature=2.0))
    weights = weigh(HALVES[:5].astype(np.float32), warm, 0)
    expected = [ONE * 0.5**0.5, ONE, ONE * 0.5**0.5, ONE / 2, ONE / 4]
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("bits", "token"),
    [(0, 1), (2**61 - 1, 1), (2**61, 3), (2**64 - 1, 3), (2**63, 3)],
)
def test_a_draw_is_a_point_of_the_cumulative_weights(bits: int, token: int) -> None:
    assert _draw(np.array([0, 1, 0, 7, 0], np.uint64), bits) == token


@pytest.mark.parametrize(
    ("logit", "penalised"), [(0.5, 0.25), (2.0, 1.0), (-0.5, -1.0), (0.0, 0.0)]
)
def test_the_repetition_penalty_divides_what_is_positive(logit: float, penalised: float) -> None:
    sampling = sampling_of(SamplingParams(repetition_penalty=2.0))
    weights = weigh(logits_of([logit, 3.0]), sampling, 0, History((0,), ()))
    assert weights.tolist() == weigh(logits_of([penalised, 3.0]), PLAIN, 0).tolist()


def test_frequency_counts_and_presence_does_not() -> None:
    sampling = sampling_of(SamplingParams(frequency_penalty=0.25, presence_penalty=0.5))
    weights = weigh(logits_of([1.0, 1.0, 1.0]), sampling, 0, History((2,), (0, 1, 1)))
    assert weights.tolist() == weigh(logits_of([0.25, 0.0, 1.0]), PLAIN, 0).tolist()
