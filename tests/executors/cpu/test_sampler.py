"""The native sampler gives the reference's results: tokens, scores and faults, bit for bit."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executors.sampler_cases import make_case

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, SequencePlan, TokenLogprob, Want
from quire.core.sampling import SamplingParams, draw_bits
from quire.executors import elementary, sampler
from quire.executors.cpu.native import SampleRequests, native


def row(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32)


def plan_of(
    sampling: Sampling, position: int, history: History | None, allowed: bytes | None
) -> SequencePlan:
    return SequencePlan(
        sequence_id=1,
        start=0,
        tokens=(1,),
        follows=None,
        block_table=(0,),
        want=Want.SAMPLE,
        sampling=sampling,
        completion_position=position,
        history=history,
        allowed=allowed,
    )


def native_choice(
    logits: Any,
    sampling: Sampling,
    position: int = 0,
    history: History | None = None,
    allowed: bytes | None = None,
) -> sampler.Choice | str:
    """What the native sampler chooses, or the message of its fault."""
    request = SampleRequests().request(plan_of(sampling, position, history, allowed))
    fault, token, score = native.sample_row(logits, request)
    if fault is not None:
        return fault
    assert token is not None
    return sampler.Choice(token, None if score is None else TokenLogprob(*score))


def reference_choice(*arguments: Any) -> sampler.Choice | str:
    try:
        return sampler.sample(*arguments)
    except RowFaultError as error:
        return str(error)


def assert_agrees(
    logits: Any,
    sampling: Sampling,
    position: int = 0,
    history: History | None = None,
    allowed: bytes | None = None,
) -> None:
    arguments = (logits, sampling, position, history, allowed)
    found, reference = native_choice(*arguments), reference_choice(*arguments)
    assert found == reference
    assert repr(found) == repr(reference)  # equality takes -0.0 for 0.0


# ---- rows and settings of all kinds

VOCABULARY = 300  # more than two blocks, and no whole number of them


def random_row(seed: int, kind: str) -> Any:
    generator = np.random.default_rng(seed)
    values = generator.normal(0.0, 4.0, VOCABULARY)
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values = np.full(VOCABULARY, generator.normal())
    elif kind == "bans":
        values[generator.random(VOCABULARY) < 0.7] = -np.inf
    elif kind == "wide":
        values *= 10.0 ** generator.integers(-30, 37, VOCABULARY)
    elif kind == "near":  # differences that integer weights do not show
        values = 1.0 + values * 1e-7
    elif kind == "peaked":
        values[generator.integers(VOCABULARY)] += 60.0
    elif kind == "zeros":
        values = np.where(generator.random(VOCABULARY) < 0.5, 0.0, -0.0)
    elif kind == "broken":
        values[generator.integers(VOCABULARY)] = generator.choice([np.nan, np.inf, -np.inf, 3e38])
    with np.errstate(over="ignore"):
        return row(values[: generator.integers(1, VOCABULARY + 1)])


KINDS = ["plain", "ties", "equal", "bans", "wide", "near", "peaked", "zeros", "broken"]
rows = st.builds(random_row, st.integers(0, 2**32), st.sampled_from(KINDS))

token_ids = st.integers(0, 40) | st.integers(0, VOCABULARY + 20)
histories = st.builds(
    History,
    st.lists(token_ids, max_size=8).map(tuple),
    st.lists(token_ids, max_size=8).map(tuple),
)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 0.7, 2.5, 100.0, 1e-3, 5e-324]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 50, 299, 10**30]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01, 1e-9, math.nextafter(1.0, 0.0)]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0, 1e-50]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -2.0]),
    logit_bias=st.dictionaries(token_ids, st.floats(-100.0, 100.0), max_size=4),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, 0, 1, 5, 20]),
)


@given(
    logits=rows,
    params=all_params,
    seed=st.integers(-(2**63), 2**64 - 1),
    index=st.integers(0, 2**33),
    position=st.integers(0, 5) | st.integers(0, 2**40),
    history=st.none() | histories,
    allowed=st.none() | st.binary(max_size=VOCABULARY // 8 + 2),
    end_token_ids=st.lists(token_ids, max_size=2).map(tuple),
)
@settings(max_examples=1200)
def test_tokens_scores_and_faults_are_the_references(
    logits: Any,
    params: SamplingParams,
    seed: int,
    index: int,
    position: int,
    history: History | None,
    allowed: bytes | None,
    end_token_ids: tuple[int, ...],
) -> None:
    sampling = Sampling(params, seed, index, end_token_ids)
    with np.errstate(all="ignore"):
        assert_agrees(logits, sampling, position, history, allowed)


@given(
    logits=rows,
    top_k=st.integers(0, 320),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.sampled_from([0.0, 1e-4]),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=400)
def test_cuts_leave_the_same_tokens(
    logits: Any, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for position in range(8):
        assert_agrees(logits, Sampling(params, seed, 0), position)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 129, 49152, 128256])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_whole_vocabularies(size: int, spread: float) -> None:
    logits = row(np.random.default_rng(size).normal(0.0, spread, size))
    for changes in (
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.8, "min_p": 0.001},
    ):
        params = replace(SamplingParams(logprobs=20), **changes)
        for seed in range(3):
            assert_agrees(logits, Sampling(params, seed, 0), 7)


@given(logits=rows, index=st.integers(0, VOCABULARY), num_top=st.integers(0, 30))
@settings(max_examples=200)
def test_scores_of_given_tokens_are_the_references(logits: Any, index: int, num_top: int) -> None:
    token = index % len(logits)
    if not np.isfinite(logits).all():
        with pytest.raises(ValueError, match="finite"):
            native.score_row(logits, token, num_top)
        return
    found = TokenLogprob(*native.score_row(logits, token, num_top))
    assert repr(found) == repr(sampler.score(logits, token, num_top))


@pytest.mark.parametrize("token", [-1, 3])
def test_a_score_beyond_the_logits_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="within the logits"):
        native.score_row(row([1.0, 2.0, 3.0]), token, 0)


# ---- its steps


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**32 - 1), position=st.integers(0))
def test_draws_are_the_references(seed: int, index: int, position: int) -> None:
    position %= 2**63
    assert native.draw_bits(seed, index, position) == draw_bits(seed, index, position)


@given(st.lists(st.floats(-800.0, 0.0) | st.just(-math.inf), min_size=1, max_size=40))
@settings(max_examples=200)
def test_exponentials_are_the_references(values: list[float]) -> None:
    assert [native.sampler_exp(value) for value in values] == elementary.exp(
        np.array(values)
    ).tolist()


@given(st.floats(1.0, 1e300))
@settings(max_examples=200)
def test_logarithms_are_the_references(value: float) -> None:
    assert native.sampler_log(value) == elementary.log(value)


@given(logits=rows)
def test_sums_of_exponentials_are_the_references(logits: Any) -> None:
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return
    best = float(logits.max())
    expected = elementary.lane_sum(elementary.exp(logits.astype(np.float64) - best))
    assert native.sum_of_exponentials(logits, best) == expected


@given(logits=rows)
def test_what_is_not_finite_is_found(logits: Any) -> None:
    assert native.is_finite(logits) == bool(np.isfinite(logits).all())


# ---- requests


def test_settings_are_made_once_for_a_sequence() -> None:
    requests = SampleRequests()
    sampling = Sampling(SamplingParams(), 1, 0)
    made = requests._settings_of(sampling)
    assert requests._settings_of(sampling) is made
    assert requests._settings_of(replace(sampling)) is not made


def test_only_so_many_settings_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executors.cpu.native._MAX_REMEMBERED", 2)
    requests = SampleRequests()
    for seed in range(5):
        sampling = Sampling(SamplingParams(temperature=0.0), seed, 0)
        request = requests.request(plan_of(sampling, 0, None, None))
        assert native.sample_row(row([1.0, 3.0, 2.0]), request) == (None, 1, None)
    assert len(requests._settings) == 2


def test_a_request_outlives_what_it_was_made_from() -> None:
    logits = row(np.zeros(VOCABULARY))
    params = SamplingParams(temperature=0.0, logit_bias={7: 1.0}, repetition_penalty=2.0)
    history, allowed = History((7,), (7,)), bytes([0xF0, 0xFF])
    plan = plan_of(Sampling(params, 1, 0), 0, history, allowed)
    request = SampleRequests().request(plan)
    del params, history, allowed, plan
    assert native.sample_row(logits, request) == (None, 7, None)


# ---- llama.cpp's samplers and orders


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
@pytest.mark.filterwarnings("error")
def test_ten_thousand_rows_with_random_samplers(part: int) -> None:
    for number in range(part * 2500, (part + 1) * 2500):
        case = make_case(number)
        found, reference = native_choice(*case), reference_choice(*case)
        assert repr(found) == repr(reference), (number, case.sampling.params)


@pytest.mark.parametrize("size", [129, 49152])
@pytest.mark.parametrize("letters", ["edskypmxt", "y", "x", "s", "pkt", "typ", "mtk"])
def test_chains_over_whole_vocabularies(size: int, letters: str) -> None:
    logits = row(np.random.default_rng(size).normal(0.0, 3.0, size))
    values: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8}
    values |= {"typical_p": 0.9, "xtc_probability": 0.5, "top_n_sigma": 2.0, "dynatemp_range": 0.3}
    values |= {"dry_multiplier": 0.8, "repetition_penalty": 1.1, "repeat_last_n": 64}
    params = SamplingParams(samplers=letters, **values)  # type: ignore[arg-type]
    history = History((1, 2, 3, 4) * 9, (1, 2, 3)) if params.needs_history else None
    for seed in range(5):
        assert_agrees(logits, Sampling(params, seed, 0), 7, history)


def test_a_chain_that_the_native_sampler_does_not_know_is_refused() -> None:
    options = {"typical_p": 0.5, "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.1}
    options |= {"dynatemp_range": 0.0, "dynatemp_exponent": 1.0}
    with pytest.raises(ValueError, match="no such samplers: kz"):
        native.ChainSettings(order="kz", **options)
    with pytest.raises(ValueError, match="not finite"):
        native.ChainSettings(order="k", **options | {"typical_p": math.nan})
