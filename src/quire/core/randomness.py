"""Randomness without state: a draw is a pure function of (seed, sequence index, position).

The generator is Philox4x32-10 (Salmon et al., 2011): a keyed bijection of a counter. Nothing has to
be kept, saved or replayed for a draw to come out the same after batching, pre-emption or a crash.
"""

import secrets

_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def draw_bits(seed: int, index: int, position: int) -> int:
    """64 random bits for one sampled token: its request's seed, its sequence, its position."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (position & _MASK, (position >> 32) & _MASK, index & _MASK, 0)
    low, high, _, _ = philox(counter, key)
    return (high << 32) | low


def new_seed() -> int:
    """A seed for a request that brought none; drawn once and kept with the request."""
    return secrets.randbits(64)
