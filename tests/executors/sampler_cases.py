"""Random rows with random samplers, for what must agree with the reference sampler.

A case is a function of its number. Values are chosen to meet the borders: ties, scores that weigh
nothing, penalties that overflow, masks that allow nothing, samplers twice in an order.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from quire.core.plan import Breakers, History, Sampling
from quire.core.samplers import DEFAULT_ORDER
from quire.core.sampling import SamplingParams

MAX_VOCABULARY = 300
KINDS = ["plain", "ties", "equal", "bans", "wide", "near", "peaked", "zeros", "flat"]


class Case(NamedTuple):
    logits: Any
    sampling: Sampling
    position: int
    history: History | None
    allowed: bytes | None


def make_case(number: int, vocabulary: int | None = None, *, bans: bool = True) -> Case:
    """`vocabulary`: of all cases, for executors with rows of one length; without `bans` no logit is
    minus infinity, which the model's own never are on a device."""
    generator = np.random.default_rng([number, 17])
    size = int(generator.integers(1, MAX_VOCABULARY + 1)) if vocabulary is None else vocabulary
    logits = _logits(generator, size, bans)
    params = _params(generator, size)
    breakers = Breakers(
        frozenset(_some(generator, 8, 2)),
        {head: (_some(generator, 8, 3),) for head in _some(generator, 8, 3)},
    )
    sampling = Sampling(
        params, int(generator.integers(2**63)), int(generator.integers(4)), (0,), breakers
    )
    history = None
    if params.needs_history:
        # Few tokens, so that they repeat themselves.
        few = min(size, int(generator.choice([2, 4, 300])))
        history = History(_some(generator, few, 30), _some(generator, few, 30))
    allowed = generator.bytes(-(-size // 8)) if generator.random() < 0.2 else None
    return Case(logits, sampling, int(generator.integers(6)), history, allowed)


def without_chain(case: Case) -> Case:
    """The same case with none of the samplers that CUDA's kernels leave to torch."""
    params = replace(
        case.sampling.params,
        typical_p=1.0,
        top_n_sigma=0.0,
        xtc_probability=0.0,
        dynatemp_range=0.0,
        samplers=None,
    )
    history = (case.history or History((1, 0, 1), (0, 0))) if params.needs_history else None
    return case._replace(sampling=replace(case.sampling, params=params), history=history)


def _some(generator: Any, below: int, most: int) -> tuple[int, ...]:
    return tuple(generator.integers(0, below, generator.integers(0, most + 1)).tolist())


def _logits(generator: Any, size: int, bans: bool) -> Any:
    kind = generator.choice(KINDS)
    values = generator.normal(0.0, 4.0, size)
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values = np.full(size, generator.normal())
    elif kind == "bans" and bans:
        values[generator.random(size) < 0.7] = -np.inf
        values[generator.integers(size)] = 1.0
    elif kind == "wide":
        values *= 10.0 ** generator.integers(-30, 37, size)
    elif kind == "near":  # differences that integer weights do not show
        values = 1.0 + values * 1e-7
    elif kind == "peaked":
        values[generator.integers(size)] += 60.0
    elif kind == "zeros":
        values = np.where(generator.random(size) < 0.5, 0.0, -0.0)
    elif kind == "flat":
        values *= 0.01
    return values.astype(np.float32)


def _params(generator: Any, size: int) -> SamplingParams:
    def one_of(*values: Any) -> Any:
        return values[generator.integers(len(values))]

    samplers = None
    if generator.random() < 0.5:
        count = int(generator.integers(0, 10))
        samplers = tuple(generator.choice(DEFAULT_ORDER, count).tolist())
        if generator.random() < 0.5:
            samplers = tuple(generator.permutation(DEFAULT_ORDER).tolist())
    return SamplingParams(
        temperature=one_of(0.0, 1.0, 0.7, 2.5, 100.0, 1e-3, 5e-324),
        top_k=one_of(0, 0, 1, 2, 3, 7, 50, size),
        top_p=one_of(1.0, 1.0, 0.95, 0.5, 0.01, 1e-9),
        min_p=one_of(0.0, 0.0, 1e-12, 0.05, 1.0),
        repetition_penalty=one_of(1.0, 1.0, 1.3, 0.5, 100.0, 1e-38),
        presence_penalty=one_of(0.0, 0.5, -2.0),
        frequency_penalty=one_of(0.0, 0.1, -2.0),
        logit_bias={0: one_of(-100.0, 2.5)} if generator.random() < 0.2 else {},
        min_tokens=one_of(0, 0, 3),
        repeat_last_n=one_of(None, None, -1, 0, 1, 5, 40),
        typical_p=one_of(1.0, 1.0, 0.95, 0.5, 0.1, 1e-9),
        top_n_sigma=one_of(0.0, -1.0, 0.5, 1.0, 3.0),
        xtc_probability=one_of(0.0, 0.5, 1.0),
        xtc_threshold=one_of(0.1, 0.0, 0.01, 0.5, 1e-9),
        dry_multiplier=one_of(0.0, 0.8, 1.0, 100.0),
        dry_base=one_of(1.0, 1.1, 1.75, 100.0),
        dry_allowed_length=one_of(0, 1, 2, 3),
        dry_penalty_last_n=one_of(-1, 64, 5, 0),
        dynatemp_range=one_of(0.0, 0.0, 0.5, 2.0),
        dynatemp_exponent=one_of(1.0, 0.0, 0.5, 3.0),
        samplers=samplers,
        logprobs=one_of(None, None, 3),
    )
