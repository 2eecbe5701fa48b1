"""The reference sampler: one row of logits to one token, in numpy; what every executor is held to.

Mask, bans and bias come first, then the samplers in the order of SamplingParams.order: vLLM's with
llama.cpp's others in between, or the one that the request gives. A draw walks integer weights in
order of token id, so that the sum, and with it the token, cannot depend on the order in which
someone adds. Log-probabilities are those of the model's own logits. Exponentials, logarithms and
sums of real numbers are our own, so that native/sampler.cpp and executors/cuda/sampling.py give the
same bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import RowFaultError
from quire.core.plan import History, Sampling, TokenLogprob
from quire.core.sampling import draw_bits, xtc_acts
from quire.executors.base import LOGITS_INFINITE, LOGITS_NOT_FINITE, NO_TOKEN_ALLOWED
from quire.executors.dry import dry_penalties
from quire.executors.elementary import exp, halving_sum, lane_sum, log, power

Logits = NDArray[np.float32]  # [vocabulary]

_WEIGHT_ONE = float(2**32)  # the likeliest token's integer weight
_ABOVE_SCORES = 2**40  # added to weights, it makes them greater than any score's key


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
    bits = draw_bits(sampling.seed, sampling.index, completion_position)
    token = _draw(weigh(logits, sampling, completion_position, history, allowed), bits)
    num_top = sampling.params.logprobs
    return Choice(token, None if num_top is None else score(logits, token, num_top))


def weigh(
    logits: Logits,
    sampling: Sampling,
    completion_position: int,
    history: History | None = None,
    allowed: bytes | None = None,
) -> NDArray[np.uint64]:
    """The integer weights that a token is drawn by; 0 for what the samplers leave out."""
    if history is not None:
        history = history.needed_by(sampling.params)
    _check_tokens(len(logits), sampling, completion_position, history)
    scores = _adjusted(logits, sampling, completion_position, allowed)
    row = _Row(scores, sampling, completion_position, history)
    _apply_samplers(row)
    return row.weights()


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


def _check_tokens(
    count: int, sampling: Sampling, completion_position: int, history: History | None
) -> None:
    named = list(sampling.params.logit_bias)
    if completion_position < sampling.params.min_tokens:
        named += sampling.end_token_ids
    if history is not None:
        named += history.prompt + history.completion
    if any(not 0 <= token < count for token in named):
        raise RowFaultError(f"a token id is beyond the {count} logits")


def _adjusted(
    logits: Logits, sampling: Sampling, completion_position: int, allowed: bytes | None
) -> Logits:
    """The logits after mask, bans and bias, which come before all samplers."""
    params = sampling.params
    scores = logits.astype(np.float32, copy=True)
    if allowed is not None:
        scores[~_mask(allowed, len(scores))] = -np.inf
    if completion_position < params.min_tokens:
        scores[list(sampling.end_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        scores[token] += np.float32(bias)
    return scores


def _mask(allowed: bytes, vocabulary_size: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
    mask: NDArray[np.bool_] = np.zeros(vocabulary_size, np.bool_)
    count = min(vocabulary_size, len(bits))
    mask[:count] = bits[:count] != 0
    return mask


class _Row:
    """One row on its way through the samplers.

    What a sampler leaves out scores minus infinity. A temperature is kept beside the scores until
    they are weighed: a likelihood is exp((score - best) / temperature), a weight is its integer.
    """

    def __init__(self, scores: Logits, sampling: Sampling, position: int, history: History | None):
        self.scores = scores
        self.sampling = sampling
        self.params = sampling.params
        self.position = position
        self.history = history
        self.temperature = 1.0

    def check(self) -> None:
        """Raise RowFaultError unless there is a finite best score."""
        best = self.scores.max()
        if best == -np.inf:
            raise RowFaultError(NO_TOKEN_ALLOWED)
        if not np.isfinite(best):  # a tiny repetition penalty divides by almost nothing
            raise RowFaultError(LOGITS_INFINITE)

    def exponents(self) -> NDArray[np.float64]:
        below_best = self.scores.astype(np.float64) - float(self.scores.max())
        with np.errstate(over="ignore"):  # a tiny temperature: all but the best to minus infinity
            return below_best / self.temperature

    def weights(self) -> NDArray[np.uint64]:
        """Integer weights of the tokens that may be drawn; 0 for the others."""
        likelihood = exp(self.exponents())
        weights: NDArray[np.uint64] = np.floor(likelihood * _WEIGHT_ONE).astype(np.uint64)
        return weights

    def keep(self, kept: NDArray[np.bool_]) -> None:
        self.scores[~kept] = -np.inf

    def keep_best(self) -> None:
        self.keep(np.arange(len(self.scores)) == self.scores.argmax())

    def fix_temperature(self) -> None:
        """Divide the scores themselves, for what comes after a temperature and changes them."""
        if self.temperature != 1.0:
            with np.errstate(over="ignore"):
                divided = self.scores.astype(np.float64) / self.temperature
                self.scores = divided.astype(np.float32)
            self.temperature = 1.0


def _order_keys(weights: NDArray[np.uint64], scores: Logits) -> NDArray[np.int64]:
    """Integers that order tokens as their weights do, and those of no weight as their scores do."""
    bits = (scores + np.float32(0.0)).view(np.int32)  # 0.0 for -0.0
    by_score = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    return np.where(weights > 0, weights.astype(np.int64) + _ABOVE_SCORES, by_score)


def _likeliest_first(weights: NDArray[np.uint64], scores: Logits) -> NDArray[np.intp]:
    """Of equals the lower ids first."""
    return np.argsort(-_order_keys(weights, scores), kind="stable")


# ---- the samplers


def _penalise(row: _Row) -> None:
    """Repetition looks at prompt and completion, frequency and presence at the completion; with
    repeat_last_n all look at the last tokens of both."""
    row.fix_temperature()
    params, scores, history = row.params, row.scores, row.history
    if history is None:
        return
    repeated, counted = history.prompt + history.completion, history.completion
    if params.repeat_last_n is not None:
        repeated = counted = history.last(params.repeat_last_n)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(repeated, np.int64))
        penalty = np.float32(params.repetition_penalty)
        values = scores[seen]
        with np.errstate(all="ignore"):  # check() finds what is not finite
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counted:
        tokens, counts = np.unique(np.array(counted, np.int64), return_counts=True)
        scores[tokens] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        scores[tokens] -= np.float32(params.presence_penalty)


def _dry(row: _Row) -> None:
    row.fix_temperature()
    if row.history is None:
        return
    tokens = row.history.last(row.params.dry_penalty_last_n)
    penalties = dry_penalties(tokens, row.params, row.sampling.breakers)
    for token, penalty in penalties.items():
        row.scores[token] -= np.float32(penalty)


def _temperature(row: _Row) -> None:
    row.fix_temperature()
    row.check()
    params = row.params
    temperature = params.temperature
    if params.dynatemp_range > 0.0:
        dynamic = _dynamic_temperature(row)
        if dynamic is None:
            return
        temperature = dynamic
    if temperature <= 0.0:
        row.keep_best()
    else:
        row.temperature = temperature


def _dynamic_temperature(row: _Row) -> float | None:
    """From temperature - range to temperature + range, by the entropy of the softmax over that of
    as many equal tokens, to a power. None where one token is left."""
    params = row.params
    count = int((row.scores > -np.inf).sum())
    if count < 2:
        return None
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    total, mean = _softmax_mean(row)
    share = min(1.0, max(0.0, (log(total) - mean) / log(float(count))))
    return low + (high - low) * power(share, params.dynatemp_exponent)


def _softmax_mean(row: _Row) -> tuple[float, float]:
    """The sum of the likelihoods, and the mean of the exponents weighted by them. The entropy is
    the logarithm of the sum minus this mean."""
    exponents = row.exponents()
    likelihood = exp(exponents)
    total = halving_sum(likelihood)
    products = likelihood * np.where(likelihood > 0.0, exponents, 0.0)
    return total, halving_sum(products) / total


def _top_n_sigma(row: _Row) -> None:
    """Keep scores within so many standard deviations of the best; the temperature scales both."""
    below_best = float(row.scores.max()) - row.scores.astype(np.float64)
    is_left = row.scores > -np.inf
    count = float(is_left.sum())
    mean = halving_sum(np.where(is_left, below_best, 0.0)) / count
    deviations = np.where(is_left, below_best - mean, 0.0)
    sigma = np.sqrt(halving_sum(deviations * deviations) / count)
    row.keep(below_best <= row.params.top_n_sigma * sigma)


def _min_p(row: _Row) -> None:
    row.keep(exp(row.exponents()) >= row.params.min_p)


def _top_k(row: _Row) -> None:
    order = _likeliest_first(row.weights(), row.scores)
    row.scores[order[row.params.top_k :]] = -np.inf


def _top_p(row: _Row) -> None:
    """Keep the fewest of the likeliest that have this share of the weight."""
    weights = row.weights()
    order = _likeliest_first(weights, row.scores)
    ordered = weights[order]
    before = (np.cumsum(ordered) - ordered).astype(np.float64)
    row.scores[order[before >= row.params.top_p * float(ordered.sum())]] = -np.inf


def _typical_p(row: _Row) -> None:
    """The same of those whose surprisal is nearest to the entropy, in which the logarithm of the
    sum cancels: the exponents nearest to their mean."""
    _, mean = _softmax_mean(row)
    weights = row.weights()
    order = np.argsort(np.abs(row.exponents() - mean), kind="stable")
    ordered = weights[order]
    before = (np.cumsum(ordered) - ordered).astype(np.float64)
    row.scores[order[before > row.params.typical_p * float(ordered.sum())]] = -np.inf


def _xtc(row: _Row) -> None:
    """Leave out all but the least likely of the tokens that reach the threshold, by chance."""
    sampling = row.sampling
    if not xtc_acts(row.params, sampling.seed, sampling.index, row.position):
        return
    weights = row.weights()
    reach = weights.astype(np.float64) >= row.params.xtc_threshold * float(weights.sum())
    reach &= row.scores > -np.inf
    keys = np.where(reach, _order_keys(weights, row.scores), np.iinfo(np.int64).max)
    least = len(keys) - 1 - int(keys[::-1].argmin())  # the highest id of equals
    reach[least] = False
    row.keep(~reach)


_SAMPLERS: dict[str, Callable[[_Row], None]] = {
    "penalties": _penalise,
    "dry": _dry,
    "temperature": _temperature,
    "top_n_sigma": _top_n_sigma,
    "min_p": _min_p,
    "top_k": _top_k,
    "typ_p": _typical_p,
    "top_p": _top_p,
    "xtc": _xtc,
}
_ADJUSTING = ("penalties", "dry")  # these change scores, the others choose among them


def _apply_samplers(row: _Row) -> None:
    """Scores must be finite where tokens are chosen among, not between two penalties."""
    is_checked = False
    for name in row.params.order:
        if name not in _ADJUSTING and not is_checked:
            row.check()
        is_checked = name not in _ADJUSTING
        _SAMPLERS[name](row)
    if not is_checked:
        row.check()


# ---- the draw


def _draw(weights: NDArray[np.uint64], bits: int) -> int:
    """The token whose interval of the cumulative weights holds a uniformly drawn point."""
    cumulative = np.cumsum(weights)
    point = (bits * int(cumulative[-1])) >> 64
    return int(np.searchsorted(cumulative, np.uint64(point), side="right"))
