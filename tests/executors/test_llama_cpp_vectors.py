"""llama.cpp's test vectors for its samplers: probabilities in, what is left of them out.

The numbers are those of its tests/test-sampling.cpp. Where a value of theirs is outside of what
quire takes (a top_p of 0, a min_p above 1, penalties above 2), the nearest that it takes stands.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from quire.core.plan import NO_BREAKERS, Breakers, History, Sampling
from quire.core.sampling import SamplingParams, xtc_acts
from quire.executors.sampler import weigh

TENTHS = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]
FIFTHS = [0.2] * 5


def left(
    probabilities: list[float],
    sampler: str,
    history: tuple[int, ...] = (),
    breakers: Breakers | None = None,
    position: int = 0,
    **values: Any,
) -> list[float]:
    """The probabilities after one sampler, 0 for those that it leaves out."""
    params = SamplingParams(samplers=(sampler,), **values)
    sampling = Sampling(params, 0, 0, (), breakers or NO_BREAKERS)
    logits = np.log(np.array(probabilities)).astype(np.float32)
    weights = weigh(logits, sampling, position, History((), history))
    found: list[float] = (weights / weights.sum()).tolist()
    return found


def close(expected: list[float]) -> Any:
    total = math.fsum(expected)  # theirs are not always normalised after a cut
    return pytest.approx([value / total for value in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("sampler", "values", "expected"),
    [
        ("temperature", {"temperature": 1.0}, TENTHS),
        ("temperature", {"temperature": 0.0}, [0, 0, 0, 1]),
        ("temperature", {"temperature": 0.0, "dynatemp_range": 0.0}, [0, 0, 0, 1]),
        ("top_k", {"top_k": 1}, [0, 0, 0, 1]),
        ("top_k", {"top_k": 3}, [0, 0.22222, 0.33333, 0.44444]),
        ("top_k", {"top_k": 4}, TENTHS),
        ("top_k", {"top_k": 0}, TENTHS),
        ("top_p", {"top_p": 1e-9}, [0, 0, 0, 1]),
        ("top_p", {"top_p": 0.7}, [0, 0, 0.428571, 0.571429]),
        ("top_p", {"top_p": 0.8}, [0, 0.22222, 0.33333, 0.44444]),
        ("top_p", {"top_p": 1.0}, TENTHS),
        ("min_p", {"min_p": 0.0}, TENTHS),
        ("min_p", {"min_p": 0.24}, TENTHS),
        ("min_p", {"min_p": 0.26}, [0, 0.2, 0.3, 0.4]),
        ("min_p", {"min_p": 0.49}, [0, 0.2, 0.3, 0.4]),
        ("min_p", {"min_p": 0.51}, [0, 0, 0.3, 0.4]),
        ("min_p", {"min_p": 0.74}, [0, 0, 0.3, 0.4]),
        ("min_p", {"min_p": 0.76}, [0, 0, 0, 0.4]),
        ("min_p", {"min_p": 1.0}, [0, 0, 0, 0.4]),
        ("top_n_sigma", {"top_n_sigma": 1.0}, [0, 0, 0.428571, 0.571429]),
        ("top_n_sigma", {"top_n_sigma": 0.0}, TENTHS),
        ("top_n_sigma", {"top_n_sigma": 3.0}, TENTHS),
    ],
)
def test_cuts_and_temperatures(sampler: str, values: dict[str, Any], expected: list[float]) -> None:
    assert left(TENTHS, sampler, **values) == close(expected)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.09, [0, 0, 0, 0.1]),
        (0.19, [0, 0, 0.2, 0.1]),
        (0.29, [0, 0.3, 0.2, 0.1]),
        (0.39, FALLING),
    ],
)
def test_xtc(threshold: float, expected: list[float]) -> None:
    values: dict[str, Any] = {"xtc_probability": 0.99, "xtc_threshold": threshold}
    params = SamplingParams(**values)
    acting = [position for position in range(400) if xtc_acts(params, 0, 0, position)]
    assert 380 < len(acting) < 400
    assert left(FALLING, "xtc", position=acting[0], **values) == close(expected)
    idle = next(position for position in range(400) if position not in acting)
    assert left(FALLING, "xtc", position=idle, **values) == close(FALLING)


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.97, 0.01, 0.01, 0.01], [0.97, 0, 0, 0]),
        ([0.4, 0.2, 0.2, 0.2], [0, 0.2, 0.2, 0.2]),
    ],
)
def test_typical(probabilities: list[float], expected: list[float]) -> None:
    assert left(probabilities, "typ_p", typical_p=0.5) == close(expected)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((0,), [0, 1, 1, 1, 1]), ((0, 1, 2), [0, 0, 0, 1, 1]), ((0, 1, 2, 0, 0), [0, 0, 0, 1, 1])],
)
def test_repetition(tokens: tuple[int, ...], expected: list[float]) -> None:
    found = left(FIFTHS, "penalties", tokens, repetition_penalty=50.0, repeat_last_n=len(tokens))
    assert found == close(expected)


@pytest.mark.parametrize("tokens", [(0,), (0, 1, 2), (0, 1, 2, 0, 0)])
def test_frequency_and_presence(tokens: tuple[int, ...]) -> None:
    found = left(
        FIFTHS,
        "penalties",
        tokens,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        repeat_last_n=len(tokens),
    )
    counts = [tokens.count(token) for token in range(5)]
    assert found == close([math.exp(-2.0 * count - 2.0 * (count > 0)) for count in counts])


@pytest.mark.parametrize(
    ("tokens", "breakers", "values", "expected"),
    [
        ((0, 1), (), (1.0, 2), [0.25] * 4),
        ((0, 1, 2, 0, 1), (), (1.0, 2), [0.296923, 0.296923, 0.109232, 0.296923]),
        ((0, 1, 3, 4, 0, 1), (3,), (1.0, 2), FIFTHS),
        ((0, 1, 2, 0, 1), (), (2.0, 2), [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        ((0, 1, 2, 3, 4, 0, 1), (), (1.0, 4), FIFTHS),
    ],
)
def test_dry(
    tokens: tuple[int, ...],
    breakers: tuple[int, ...],
    values: tuple[float, int],
    expected: list[float],
) -> None:
    multiplier, allowed_length = values
    found = left(
        [1 / len(expected)] * len(expected),
        "dry",
        tokens,
        Breakers(frozenset(breakers), {}),
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed_length,
        dry_penalty_last_n=max(4, len(tokens)),
    )
    assert found == close(expected)


# ---- several in a row: 10,000 tokens, each as likely as its id

COUNT = 10_000


def expected_ids(order: str, top_k: int, top_p: float, min_p: float) -> range:
    first = 1  # the candidates are all from here on; token 0 has no probability
    for letter in order:
        if letter == "k":
            first = max(first, COUNT - top_k)
        elif letter == "m":
            first = max(first, math.ceil(min_p * (COUNT - 1)))
        else:
            enough = top_p * sum(range(first, COUNT))
            sums = itertools.accumulate(range(COUNT - 1, first - 1, -1))
            taken = next(number for number, total in enumerate(sums, 1) if total >= enough)
            first = COUNT - taken
    return range(first, COUNT)


@pytest.mark.parametrize(
    ("order", "top_k", "top_p", "min_p"),
    [
        ("k", 10_000, 1.0, 1.0),
        ("k", 1, 1.0, 1.0),
        ("p", 10_000, 1.0, 1.0),
        ("p", 10_000, 1e-9, 1.0),
        ("m", 10_000, 1.0, 1.0),
        ("m", 10_000, 1.0, 1e-12),
        ("k", 100, 1.0, 1.0),
        ("p", 10_000, 0.0003, 1.0),
        ("p", 10_000, 0.8, 1.0),
        ("m", 10_000, 1.0, 9997.9 / 9999.0),
        ("m", 10_000, 1.0, 0.10005),
        *[(order, 100, 0.8, 0.10005) for order in ("kp", "km", "pk", "pm", "mk", "mp")],
        ("mp", 100, 0.8, 9997.9 / 9999.0),
        *[("".join(order), 100, 0.8, 0.10005) for order in itertools.permutations("kpm")],
    ],
)
def test_sampler_queues(order: str, top_k: int, top_p: float, min_p: float) -> None:
    values = {"samplers": order, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = SamplingParams.from_mapping(values)
    with np.errstate(divide="ignore"):
        logits = np.log(np.arange(COUNT)).astype(np.float32)
    weights = weigh(logits, Sampling(params, 0, 0), 0)
    assert np.flatnonzero(weights).tolist() == list(expected_ids(order, top_k, top_p, min_p))
