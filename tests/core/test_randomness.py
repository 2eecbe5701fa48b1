"""Philox against its published vectors, and draws that depend on all they are said to depend on."""

import pytest

from quire.core.randomness import draw_bits, new_seed, philox

Words4 = tuple[int, int, int, int]
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_vectors_of_random123(
    counter: Words4, key: tuple[int, int], expected: Words4
) -> None:
    assert philox(counter, key) == expected


def test_a_draw_is_the_low_words_of_philox_at_its_place() -> None:
    low, high, _, _ = philox((7, 1, 3, 0), (0x89ABCDEF, 0x01234567))
    assert draw_bits(0x0123456789ABCDEF, 3, (1 << 32) + 7) == (high << 32) | low


@pytest.mark.parametrize("part", ["seed", "index", "position"])
def test_a_draw_depends_on(part: str) -> None:
    place = {"seed": 5, "index": 1, "position": 9}
    drawn = {draw_bits(**{**place, part: value}) for value in range(100)}
    assert len(drawn) == 100


def test_both_halves_of_the_seed_count() -> None:
    assert draw_bits(1, 0, 0) != draw_bits(1 + (1 << 32), 0, 0) != draw_bits(1 << 32, 0, 0)


def test_the_same_place_gives_the_same_draw() -> None:
    assert draw_bits(5, 1, 9) == draw_bits(5, 1, 9)


def test_new_seeds_differ_and_fit_64_bits() -> None:
    seeds = {new_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
