"""DRY (don't repeat yourself): how much each token is lowered that would go on with a repetition.

The last tokens of the context are compared with what stands further back: a token that followed
the same tokens there is lowered by multiplier * base ** (length - allowed_length), if at least
`allowed_length` tokens are the same. No repetition reaches over a sequence breaker. Linear in the
number of tokens; native/sampler_chain.cpp holds the same steps.
"""

from collections.abc import Sequence

from quire.core.plan import Breakers
from quire.core.sampling import SamplingParams

_MAX_PENALTY = float.fromhex("0x1.fffffep+127")  # the greatest single-precision number


def dry_penalties(
    tokens: Sequence[int], params: SamplingParams, breakers: Breakers
) -> dict[int, float]:
    """What to subtract from the scores, by token. `tokens`: the last dry_penalty_last_n."""
    allowed = params.dry_allowed_length
    limit = _repeat_limit(tokens, breakers) if len(tokens) > allowed else -1
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    backwards = tokens[::-1]
    for place, length in enumerate(_repeat_lengths(backwards)):
        length = min(length, limit)
        if place > 0 and length >= allowed:
            follower = backwards[place - 1]
            longest[follower] = max(length, longest.get(follower, 0))
    return {
        token: min(params.dry_multiplier * _power(params.dry_base, length - allowed), _MAX_PENALTY)
        for token, length in longest.items()
        if token not in breakers.tokens
    }


def _repeat_limit(tokens: Sequence[int], breakers: Breakers) -> int:
    """How many tokens stand after the last sequence breaker."""
    for after in range(len(tokens)):
        start = len(tokens) - after
        token = tokens[start - 1]
        found = [0] if token in breakers.tokens else []
        own = breakers.tails.get(token, ())
        found += [len(tail) for tail in own if tuple(tokens[start : start + len(tail)]) == tail]
        if found:
            return after - max(found)
    return len(tokens)


def _repeat_lengths(tokens: Sequence[int]) -> list[int]:
    """At each place, how many tokens from there on equal the first ones: the Z-algorithm."""
    count = len(tokens)
    lengths = [0] * count
    left = right = 0  # tokens[left:right] equal the first ones
    for place in range(1, count):
        length = min(lengths[place - left], right - place) if place < right else 0
        if place + length >= right:
            while place + length < count and tokens[length] == tokens[place + length]:
                length += 1
            left, right = place, place + length
        lengths[place] = length
    return lengths


def _power(base: float, exponent: int) -> float:
    """By squaring, the lowest bit of the exponent first: the same products everywhere."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
