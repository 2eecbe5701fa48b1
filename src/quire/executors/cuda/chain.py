"""llama.cpp's samplers and orders on the device, in torch: what executors/sampler.py does to one
row, done to many at once. For rows with typical_p, top_n_sigma, XTC, a dynamic temperature or an
order of their own; sampling.py has the kernels for all others.

Weights are integers here too, so sums come out the same in any order, and the exponential is the
reference's own. Nothing is copied to the host: a row may follow a token that is not there yet.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.core.plan import History, Sampling
from quire.core.samplers import DEFAULT_ORDER
from quire.core.sampling import MAX_LOGPROBS, SamplingParams, xtc_acts
from quire.executors import elementary
from quire.executors.cuda.kernels.layers import FINITE, NOT_FINITE, NOTHING_ALLOWED, TOO_LARGE
from quire.executors.cuda.planes import Array
from quire.executors.dry import dry_penalties

_WEIGHT_ONE = float(2**32)
_LOW = 0xFFFFFFFF
_MAX_INT64 = 2**63 - 1
_ABOVE_SCORES = 2**40  # added to weights, it makes them greater than any score's key


class SampleRow(NamedTuple):
    """How one row of logits is sampled."""

    sampling: Sampling
    completion_position: int
    history: History | None = None
    pending: int | None = None  # index into the samples of a token that belongs to the history
    allowed: bytes | None = None


def most_demanding_row(vocabulary_size: int) -> SampleRow:
    """A row that uses every option: no row takes more memory."""
    params = SamplingParams(
        temperature=1.0,
        top_p=0.5,
        top_k=vocabulary_size,
        min_p=0.5,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={0: 1.0},
        logprobs=MAX_LOGPROBS,
        min_tokens=1,
        max_tokens=1,
        repeat_last_n=1,
        typical_p=0.5,
        top_n_sigma=1.0,
        xtc_probability=1.0,
        xtc_threshold=0.05,
        dry_multiplier=1.0,
        dry_base=2.0,
        dry_allowed_length=1,
        dry_penalty_last_n=-1,
        dry_sequence_breakers=(),
        dynatemp_range=0.5,
        dynatemp_exponent=2.0,
        samplers=(*DEFAULT_ORDER, "temperature"),
    )
    history = History((0, 0), (0, 0))
    allowed = b"\xff" * -(-vocabulary_size // 8)
    return SampleRow(Sampling(params, 0, 0, (0,)), 0, history, None, allowed)


def choose(logits: Array, rows: Sequence[SampleRow], samples: Array) -> tuple[Array, Array]:
    """Tokens and statuses of each row: logits [rows, vocabulary] float32."""
    finite = torch.isfinite(logits).all(dim=1)
    scores = logits.clone()
    _adjust(scores, rows)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    status = torch.zeros_like(tokens)
    by_order: dict[tuple[str, ...], list[int]] = {}
    for at, row in enumerate(rows):
        by_order.setdefault(row.sampling.params.order, []).append(at)
    for order, members in by_order.items():
        index = _on(np.array(members, np.int64), scores)
        chain = _Chain(scores[index], [rows[at] for at in members], samples)
        chain.run(order)
        tokens[index], status[index] = _draw(chain.weights(), _bits(chain.rows)), chain.status
    return tokens, torch.where(finite, status, NOT_FINITE)


def _status(best: Array) -> Array:
    """Of rows by their greatest scores; NaN is below nothing."""
    status = torch.where(best < float("inf"), FINITE, TOO_LARGE)
    return torch.where(best == float("-inf"), NOTHING_ALLOWED, status)


def to_device(values: npt.NDArray[np.generic], device: object) -> Array:
    """A copy that does not wait for the stream: from pinned memory, which torch uses again when the
    copy is done, so `values` need not be kept."""
    source = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        source = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
    return source.to(device, non_blocking=True)


def _on(values: npt.NDArray[np.generic], like: Array) -> Array:
    return to_device(values, like.device)


def _first_best(scores: Array, best: Array) -> Array:
    columns = torch.arange(scores.shape[1], device=scores.device)
    matches = torch.where(scores == best[:, None], columns, scores.shape[1])
    return matches.min(dim=1).values.clamp(max=scores.shape[1] - 1)  # NaN equals nothing


# ---- adjusting logits


def _adjust(scores: Array, rows: Sequence[SampleRow]) -> None:
    """Mask, bans and bias, which come before all samplers."""
    _mask(scores, rows)
    bans = [
        (index, token)
        for index, row in enumerate(rows)
        if row.completion_position < row.sampling.params.min_tokens
        for token in row.sampling.end_token_ids
    ]
    if bans:
        cells = _on(np.array(bans, np.int64), scores)
        scores[cells[:, 0], cells[:, 1]] = float("-inf")
    biases = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.sampling.params.logit_bias.items()
    ]
    if biases:
        cells = _on(np.array([entry[:2] for entry in biases], np.int64), scores)
        values = _on(np.array([entry[2] for entry in biases], np.float32), scores)
        scores[cells[:, 0], cells[:, 1]] += values


def _penalise(scores: Array, rows: Sequence[SampleRow], samples: Array) -> None:
    penalised = [
        at
        for at, row in enumerate(rows)
        if row.history is not None and "penalties" in row.sampling.params.order
    ]
    if penalised:
        index = _on(np.array(penalised, np.int64), scores)
        chosen = [rows[at] for at in penalised]
        scores[index] = _penalised(scores[index], chosen, samples)


def _apply_dry(scores: Array, rows: Sequence[SampleRow]) -> None:
    """The host finds the repetitions: such a row is planned when its last token is known."""
    found = [
        (at, token, penalty)
        for at, row in enumerate(rows)
        if row.history is not None and "dry" in row.sampling.params.order
        for token, penalty in _dry_penalties(row, row.history).items()
    ]
    if found:
        cells = _on(np.array([entry[:2] for entry in found], np.int64), scores)
        values = _on(np.array([entry[2] for entry in found], np.float32), scores)
        scores[cells[:, 0], cells[:, 1]] -= values


def _dry_penalties(row: SampleRow, history: History) -> dict[int, float]:
    assert row.pending is None, "a row with DRY was planned before its last token was known"
    params = row.sampling.params
    return dry_penalties(history.last(params.dry_penalty_last_n), params, row.sampling.breakers)


def _mask(scores: Array, rows: Sequence[SampleRow]) -> None:
    width = -(-scores.shape[1] // 8)
    masked = [index for index, row in enumerate(rows) if row.allowed is not None]
    if not masked:
        return
    packed = np.zeros((len(masked), width), np.uint8)
    for line, index in enumerate(masked):
        bits = np.frombuffer(rows[index].allowed or b"", np.uint8)[:width]
        packed[line, : len(bits)] = bits
    shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = (_on(packed, scores)[:, :, None] >> shifts & 1).flatten(1)[:, : scores.shape[1]]
    index = _on(np.array(masked, np.int64), scores)
    scores[index] = torch.where(allowed.bool(), scores[index], float("-inf"))


def _penalised(scores: Array, rows: Sequence[SampleRow], samples: Array) -> Array:
    """Repetition looks at prompt and completion, frequency and presence at the completion; with
    repeat_last_n all look at the last tokens of both."""
    parts = [_looked_at(row, row.history) for row in rows if row.history is not None]
    counts = _counts(scores, [counted for _, counted in parts], rows, samples)
    seen = _counts(scores, [others for others, _ in parts]) + counts > 0
    factor, frequency, presence = (
        _on(np.array([[getattr(row.sampling.params, name)] for row in rows], np.float32), scores)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(seen & (factor != 1.0), repeated, scores)
    once = scores - frequency * counts
    return torch.where(counts > 0, once - presence, scores)


def _looked_at(row: SampleRow, history: History) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens for repetition alone, and those for all penalties; a pending one is of these."""
    last = row.sampling.params.repeat_last_n
    if last is None:
        return history.prompt, history.completion
    if last > 0 and row.pending is not None:
        return (), history.last(last - 1)
    return (), history.last(last)


def _counts(
    scores: Array,
    histories: Sequence[tuple[int, ...]],
    rows: Sequence[SampleRow] = (),
    samples: Array | None = None,
) -> Array:
    """How often each token occurs in each history, with the pending tokens."""
    counts = torch.zeros_like(scores)
    lengths = [len(tokens) for tokens in histories]
    if sum(lengths):
        owners = np.repeat(np.arange(len(lengths)), lengths)
        tokens = np.fromiter((t for tokens in histories for t in tokens), np.int64, sum(lengths))
        cells, numbers = np.unique(np.stack([owners, tokens]), axis=1, return_counts=True)
        index = _on(cells, scores)
        counts[index[0], index[1]] = _on(numbers.astype(np.float32), scores)
    pending = [(at, row.pending) for at, row in enumerate(rows) if row.pending is not None]
    if pending and samples is not None:
        index = _on(np.array(pending, np.int64), scores)
        counts[index[:, 0], samples[index[:, 1]].long()] += 1.0
    return counts


# ---- drawing


def exp(values: Array) -> Array:
    """e to each value, float64, for values of at most 0: the steps of executors/elementary.py, each
    an operation of its own, so that none is fused with another."""
    bounded = values.clamp(min=elementary.LOWEST_EXPONENT)
    shifted = bounded * elementary.LOG2_E
    shifted += elementary.TO_INTEGER
    power = shifted - elementary.TO_INTEGER
    rest = bounded - power * elementary.LN2_HIGH
    rest -= power * elementary.LN2_LOW
    result = torch.full_like(rest, elementary.EXP_TAIL[-1])
    for coefficient in reversed(elementary.EXP_TAIL[:-1]):
        result *= rest
        result += coefficient
    result *= rest
    result *= rest
    result += rest
    result += 1.0
    scaled = (result.view(torch.int64) + (shifted.view(torch.int64) << 52)).view(torch.float64)
    return torch.where(values < elementary.LOWEST_EXPONENT, 0.0, scaled)


def _bits(rows: Sequence[SampleRow]) -> npt.NDArray[np.uint64]:
    """64 random bits a row: core/sampling.py's Philox, for many rows at once."""
    key = np.array([row.sampling.seed & (2**64 - 1) for row in rows], np.uint64)
    position = np.array([row.completion_position for row in rows], np.uint64)
    index = np.array([row.sampling.index for row in rows], np.uint64)
    low, thirty_two = np.uint64(_LOW), np.uint64(32)
    k0, k1 = key & low, key >> thirty_two
    c0, c1, c2, c3 = position & low, position >> thirty_two, index & low, np.zeros_like(key)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> thirty_two) ^ c1 ^ k0,
            product1 & low,
            (product0 >> thirty_two) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    bits: npt.NDArray[np.uint64] = (c1 << thirty_two) | c0
    return bits


def _draw(weights: Array, bits: npt.NDArray[np.uint64]) -> Array:
    """The token at a uniformly drawn point of the cumulative weights."""
    cumulative = torch.cumsum(weights, dim=1)
    point = _high_product(_on(bits.view(np.int64), weights), cumulative[:, -1])
    found = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)


def _high_product(bits: Array, total: Array) -> Array:
    """(bits * total) >> 64 for 64 random bits and a total below 2**63, by halves of 32 bits."""
    b1, b0 = bits >> 32 & _LOW, bits & _LOW
    t1, t0 = total >> 32, total & _LOW
    low, cross, other = b0 * t0, b0 * t1, b1 * t0
    middle = (low >> 32 & _LOW) + (cross & _LOW) + (other & _LOW)
    return b1 * t1 + (cross >> 32) + (other >> 32 & _LOW) + (middle >> 32)


# ---- llama.cpp's samplers and orders


class _Chain:
    """Rows on their way through the samplers of one order: see executors/sampler.py.

    Every sum of real numbers has the reference's order, and no operation is fused with another.
    """

    def __init__(self, scores: Array, rows: Sequence[SampleRow], samples: Array) -> None:
        self.scores = scores  # [rows, vocabulary]; minus infinity: left out
        self.rows = rows
        self.samples = samples
        self.temperature = self._column(1.0 for _ in rows)
        self.best = self.temperature  # the greatest score of each row, once it is checked
        self.status = torch.full((len(rows),), FINITE, device=scores.device)

    def run(self, order: Sequence[str]) -> None:
        is_checked = False
        for name in order:
            adjusts = name in ("penalties", "dry")
            if not adjusts and not is_checked:
                self._check()
            getattr(self, "_" + name)()
            is_checked = not adjusts
        if not is_checked:
            self._check()

    def _check(self) -> None:
        """Find the best scores; the first fault of a row stays."""
        best = self.scores.max(dim=1).values
        self.status = torch.where(self.status == FINITE, _status(best), self.status)
        self.best = best.double()[:, None]

    def _column(self, values: Iterable[float]) -> Array:
        return _on(np.array([[value] for value in values], np.float64), self.scores)

    def _param(self, name: str) -> Array:
        return self._column(getattr(row.sampling.params, name) for row in self.rows)

    def _exponents(self) -> Array:
        return (self.scores.double() - self.best) / self.temperature

    def weights(self) -> Array:
        return torch.floor(exp(self._exponents()) * _WEIGHT_ONE).nan_to_num(0.0).to(torch.int64)

    def _keep(self, kept: Array) -> None:
        self.scores = torch.where(kept, self.scores, float("-inf"))

    # ---- changing scores

    def _fix_temperature(self) -> None:
        divided = (self.scores.double() / self.temperature).float()
        self.scores = torch.where(self.temperature == 1.0, self.scores, divided)
        self.temperature = torch.ones_like(self.temperature)

    def _penalties(self) -> None:
        self._fix_temperature()
        _penalise(self.scores, self.rows, self.samples)

    def _dry(self) -> None:
        self._fix_temperature()
        _apply_dry(self.scores, self.rows)

    def _temperature(self) -> None:
        self._fix_temperature()
        self._check()
        chosen = self._param("temperature")
        reach = self._param("dynatemp_range")
        dynamic, is_moved = self._dynamic_temperature(chosen, reach)
        chosen = torch.where(reach > 0.0, dynamic, chosen)
        columns = torch.arange(self.scores.shape[1], device=self.scores.device)
        is_first = columns == _first_best(self.scores, self.scores.max(dim=1).values)[:, None]
        self._keep(is_first | (chosen > 0.0) | ~is_moved)
        self.temperature = torch.where((chosen > 0.0) & is_moved, chosen, 1.0)

    def _dynamic_temperature(self, chosen: Array, reach: Array) -> tuple[Array, Array]:
        """The temperatures, and whether there is more than one token for them; a range of 0 always
        has its temperature."""
        count = (self.scores > float("-inf")).sum(dim=1, keepdim=True).double()
        low, high = (chosen - reach).clamp(min=0.0), chosen + reach
        total, mean = self._softmax_mean()
        several = torch.where(count < 2.0, 2.0, count)
        share = ((_log(total) - mean) / _log(several)).clamp(0.0, 1.0)
        power = _power(share, self._param("dynatemp_exponent"))
        return low + (high - low) * power, (count >= 2.0) | (reach == 0.0)

    # ---- choosing among them

    def _softmax_mean(self) -> tuple[Array, Array]:
        exponents = self._exponents()
        likelihood = exp(exponents)
        total = _halving_sum(likelihood)
        products = likelihood * torch.where(likelihood > 0.0, exponents, 0.0)
        return total, _halving_sum(products) / total

    def _top_n_sigma(self) -> None:
        is_left = self.scores > float("-inf")
        count = is_left.sum(dim=1, keepdim=True).double()
        below_best = self.best - self.scores.double()
        mean = _halving_sum(torch.where(is_left, below_best, 0.0)) / count
        deviations = torch.where(is_left, below_best - mean, 0.0)
        sigma = torch.sqrt(_halving_sum(deviations * deviations) / count)
        self._keep(below_best <= self._param("top_n_sigma") * sigma)

    def _min_p(self) -> None:
        self._keep(exp(self._exponents()) >= self._param("min_p"))

    def _order_keys(self, weights: Array) -> Array:
        bits = (self.scores + 0.0).view(torch.int32)  # 0.0 for -0.0
        by_score = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return torch.where(weights > 0, weights + _ABOVE_SCORES, by_score.long())

    def _keep_first(self, order: Array, kept: Array) -> None:
        """`kept`: of the tokens in the given order."""
        self._keep(torch.zeros_like(kept).scatter_(1, order, kept))

    def _top_k(self) -> None:
        keys = self._order_keys(self.weights())
        order = torch.sort(keys, dim=1, descending=True, stable=True).indices
        rank = torch.arange(order.shape[1], device=order.device)
        top_k = np.array([[min(row.sampling.params.top_k, _MAX_INT64)] for row in self.rows])
        self._keep_first(order, rank < _on(top_k.astype(np.int64), order))

    def _top_p(self) -> None:
        weights = self.weights()
        keys = self._order_keys(weights)
        order = torch.sort(keys, dim=1, descending=True, stable=True).indices
        before, total = _before(weights, order)
        self._keep_first(order, before < self._param("top_p") * total)

    def _typ_p(self) -> None:
        _, mean = self._softmax_mean()
        weights = self.weights()
        distance = torch.abs(self._exponents() - mean)
        order = torch.sort(distance, dim=1, stable=True).indices
        before, total = _before(weights, order)
        self._keep_first(order, before <= self._param("typical_p") * total)
        self._check()  # the best may be gone

    def _xtc(self) -> None:
        acts = self._column(
            xtc_acts(how.params, how.seed, how.index, row.completion_position)
            for row, how in ((row, row.sampling) for row in self.rows)
        )
        weights = self.weights()
        total = weights.sum(dim=1, keepdim=True).double()
        reach = weights.double() >= self._param("xtc_threshold") * total
        reach &= self.scores > float("-inf")
        keys = torch.where(reach, self._order_keys(weights), _MAX_INT64)
        columns = torch.arange(keys.shape[1], device=keys.device)
        is_least = keys == keys.min(dim=1, keepdim=True).values
        least = torch.where(is_least, columns, -1).max(dim=1, keepdim=True).values
        self._keep(~reach | (columns == least) | (acts == 0.0))
        self._check()


def _before(weights: Array, order: Array) -> tuple[Array, Array]:
    """In the given order, the weight before each token; and that of all."""
    ordered = torch.gather(weights, 1, order)
    total = ordered.sum(dim=1, keepdim=True).double()
    return (torch.cumsum(ordered, dim=1) - ordered).double(), total


def _halving_sum(values: Array) -> Array:
    """executors/elementary.py's, of each row."""
    while values.shape[1] > 1:
        count = values.shape[1]
        half = 1 << (count - 1).bit_length() - 1
        low = values[:, :half].clone()
        low[:, : count - half] += values[:, half:]
        values = low
    return values


def _log(values: Array) -> Array:
    """executors/elementary.py's, for numbers of at least 1."""
    bits = values.contiguous().view(torch.int64)
    power = ((bits >> 52) - 1022).double()
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).view(torch.float64)
    is_low = mantissa < elementary.ROOT_OF_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    power = torch.where(is_low, power - 1.0, power)
    fraction = mantissa - 1.0
    ratio = fraction / (2.0 + fraction)
    square = ratio * ratio
    series = torch.full_like(square, elementary.LOG_TERMS[-1])
    for term in reversed(elementary.LOG_TERMS[:-1]):
        series = series * square
        series = series + term
    near = fraction - ratio * (fraction - series * square)
    return power * elementary.LN2_HIGH + (power * elementary.LN2_LOW + near)


def _power(base: Array, exponent: Array) -> Array:
    """executors/elementary.py's."""
    is_tiny = base < elementary.LEAST_BASE
    inverse = torch.ones_like(base) / torch.where(is_tiny, 1.0, base)
    result = exp(-exponent * _log(inverse))
    result = torch.where(is_tiny, (exponent == 0.0).double(), result)
    return torch.where(exponent == 1.0, base, result)
