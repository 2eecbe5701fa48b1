"""Windows: what a position sees, and how many blocks that takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.windows import NO_WINDOWS, Window, longest_context, peak_blocks

windows = st.builds(Window, st.integers(1, 40), st.booleans())


@pytest.mark.parametrize(
    ("window", "firsts"),
    [
        (Window(1), [0, 1, 2, 3, 4, 5, 6]),
        (Window(3), [0, 0, 0, 1, 2, 3, 4]),
        (Window(3, is_chunked=True), [0, 0, 0, 3, 3, 3, 6]),
    ],
)
def test_the_first_position_that_each_position_sees(window: Window, firsts: list[int]) -> None:
    assert [window.first_seen(position) for position in range(7)] == firsts


def held_at_most(window: Window, block_size: int, num_tokens: int, chunk: int) -> int:
    """Counted: what is held when each chunk runs, blocks given back whenever one got full."""
    most = first = num_full = start = 0
    while start < num_tokens:
        end = min(start + chunk, num_tokens)
        most = max(most, -(-end // block_size) - first)
        if end // block_size > num_full:
            num_full = end // block_size
            first = max(first, window.first_seen(end - 1) // block_size)
        start = end
    return most


@given(windows, st.integers(1, 8), st.integers(1, 200), st.integers(1, 30))
def test_no_sequence_holds_more_than_was_said(
    window: Window, block_size: int, num_tokens: int, chunk: int
) -> None:
    said = peak_blocks((window,), block_size, num_tokens, chunk)
    assert held_at_most(window, block_size, num_tokens, chunk) <= said


@pytest.mark.parametrize("window", [Window(32), Window(33), Window(40, is_chunked=True)])
@pytest.mark.parametrize("chunk", [1, 5, 16, 30])
def test_what_is_said_is_at_most_a_block_too_many(window: Window, chunk: int) -> None:
    said = peak_blocks((window,), 8, 1000, chunk)
    assert said - held_at_most(window, 8, 1000, chunk) <= 1


@given(st.lists(windows | st.none(), min_size=1, max_size=4), st.integers(1, 300))
def test_the_longest_context_is_the_last_that_fits(
    kinds: list[Window | None], num_blocks: int
) -> None:
    groups, limit = tuple(kinds), 500
    longest = longest_context(groups, 4, num_blocks, limit, chunk=3)
    assert longest == 0 or peak_blocks(groups, 4, longest, 3) <= num_blocks
    assert longest == limit or peak_blocks(groups, 4, longest + 1, 3) > num_blocks


def test_without_windows_all_blocks_hold_the_context() -> None:
    assert longest_context(NO_WINDOWS, 16, 10, limit=1000, chunk=256) == 160
    assert longest_context(NO_WINDOWS, 16, 10, limit=100, chunk=256) == 100
