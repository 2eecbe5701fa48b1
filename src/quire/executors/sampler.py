"""The reference sampler: one row of logits to one token, in numpy; what every executor is held to.

The order is vLLM's: mask and bans, bias, penalties, temperature, min-p, top-k, top-p. A draw walks
integer weights in order of token id, so that the sum, and with it the token, cannot depend on the
order in which someone adds. Log-probabilities are those of the model's own logits. Exponentials
and logarithms are our own, so that native/sampler.cpp gives the same bits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, TokenLogprob
from quire.core.sampling import SamplingParams, draw_bits
from quire.executors.base import LOGITS_INFINITE, LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED
from quire.executors.elementary import exp, lane_sum, log

Logits = NDArray[np.float32]  # [vocabulary]

_WEIGHT_ONE = float(2**32)  # the likeliest token's integer weight


class Choice(NamedTuple):
    token: int
    logprob: TokenLogprob | None


def sample(
    logits: Logits,
    sampling: Sampling,
    completion_position: int,
    history: History | None = None,
    allowed: bytes | None = None,
) -> Choice:
    """Choose the token at a completion position; RowFaultError where there is none to choose."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):  # -inf is a banned token
        raise RowFaultError(LOGITS_NOT_FINITE)
    try:
        scores = _adjusted(logits, sampling, completion_position, history, allowed)
    except IndexError as error:
        raise RowFaultError(f"a token id is beyond the {len(logits)} logits") from error
    best = scores.max()
    if best == -np.inf:
        raise RowFaultError(NO_TOKEN_ALLOWED)
    if not np.isfinite(best):  # a tiny repetition penalty divides by almost nothing
        raise RowFaultError(LOGITS_INFINITE)
    params = sampling.params
    if params.is_greedy:
        token = int(scores.argmax())
    else:
        bits = draw_bits(sampling.seed, sampling.index, completion_position)
        token = _draw(_weights(scores, params), bits)
    if params.logprobs is None:
        return Choice(token, None)
    return Choice(token, score(logits, token, params.logprobs))


def score(logits: Logits, token: int, num_top: int) -> TokenLogprob:
    """A token's log-probability under the logits, and those of the `num_top` likeliest."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - log(lane_sum(exp(shifted)))
    likeliest = np.argsort(-logprobs, kind="stable")[:num_top] if num_top else np.empty(0, np.int64)
    return TokenLogprob(
        token,
        float(logprobs[token]),
        1 + int((logprobs > logprobs[token]).sum()),
        tuple((int(other), float(logprobs[other])) for other in likeliest),
    )


def _adjusted(
    logits: Logits,
    sampling: Sampling,
    completion_position: int,
    history: History | None,
    allowed: bytes | None,
) -> Logits:
    """The logits after mask, bias and penalties: all logits processors before the temperature."""
    params = sampling.params
    scores = logits.astype(np.float32, copy=True)
    if allowed is not None:
        scores[~_mask(allowed, len(scores))] = -np.inf
    if completion_position < params.min_tokens:
        scores[list(sampling.end_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        scores[token] += np.float32(bias)
    if history is not None:
        _penalise(scores, params, history)
    return scores


def _mask(allowed: bytes, vocabulary_size: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
    mask: NDArray[np.bool_] = np.zeros(vocabulary_size, np.bool_)
    count = min(vocabulary_size, len(bits))
    mask[:count] = bits[:count] != 0
    return mask


def _penalise(scores: Logits, params: SamplingParams, history: History) -> None:
    """Repetition looks at prompt and completion, frequency and presence at the completion."""
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(history.prompt + history.completion, np.int64))
        penalty = np.float32(params.repetition_penalty)
        values = scores[seen]
        with np.errstate(all="ignore"):  # sample() finds what is not finite
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if history.completion:
        tokens, counts = np.unique(np.array(history.completion, np.int64), return_counts=True)
        scores[tokens] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        scores[tokens] -= np.float32(params.presence_penalty)


def _weights(scores: Logits, params: SamplingParams) -> NDArray[np.uint64]:
    """Integer weights of the tokens that may be drawn; 0 for the others."""
    below_best = scores.astype(np.float64) - float(scores.max())
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the best to minus infinity
        likelihood = exp(below_best / params.temperature)
    weights: NDArray[np.uint64] = np.floor(likelihood * _WEIGHT_ONE).astype(np.uint64)
    if params.min_p > 0.0:
        weights[likelihood < params.min_p] = 0
    if params.top_k or params.top_p < 1.0:
        _keep_likeliest(weights, params)
    return weights


def _keep_likeliest(weights: NDArray[np.uint64], params: SamplingParams) -> None:
    """Zero what top-k and top-p leave out; of equal weights the lower ids stay."""
    order = np.argsort(-weights.astype(np.float64), kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    if params.top_p < 1.0:
        sorted_weights = weights[order]
        before = np.cumsum(sorted_weights) - sorted_weights
        total = float(sorted_weights.sum())
        weights[order[before.astype(np.float64) >= params.top_p * total]] = 0


def _draw(weights: NDArray[np.uint64], bits: int) -> int:
    """The token whose interval of the cumulative weights holds a uniformly drawn point."""
    cumulative = np.cumsum(weights)
    point = (bits * int(cumulative[-1])) >> 64
    return int(np.searchsorted(cumulative, np.uint64(point), side="right"))
