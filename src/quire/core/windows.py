"""Windows: which positions a layer sees, and how many blocks of the KV cache its sequences hold.

Layers that see the same positions form groups, and a group has a block table of its own. Blocks
that no later position of a windowed group sees go back to the pool.
"""

from bisect import bisect_right
from typing import NamedTuple


class Window(NamedTuple):
    """A position sees the last `size` positions, its own included; where it is chunked, those from
    the last multiple of `size` on."""

    size: int
    is_chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Positions before it are seen by neither this position nor any later one."""
        if self.is_chunked:
            return position // self.size * self.size
        return max(0, position - self.size + 1)

    def most_held(self, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence holds which is computed in such chunks.

        What the last computed position sees is kept: it begins at most ceil(size / block_size)
        blocks before the block in which the chunk begins.
        """
        return -(-self.size // block_size) + (chunk + block_size - 2) // block_size + 1


Windows = tuple[Window | None, ...]  # of each group; None: it sees all positions
NO_WINDOWS: Windows = (None,)


def peak_blocks(windows: Windows, block_size: int, num_tokens: int, chunk: int) -> int:
    """The most blocks that a sequence holds until so many tokens are computed, at most `chunk` of
    them at once: in one step, or in steps that are submitted and not collected."""
    whole = -(-num_tokens // block_size)
    return sum(
        whole if window is None else min(whole, window.most_held(block_size, chunk))
        for window in windows
    )


def longest_context(
    windows: Windows, block_size: int, num_blocks: int, limit: int, chunk: int
) -> int:
    """The most tokens, up to `limit`, that a sequence can come to in so many blocks."""
    return bisect_right(
        range(1, limit + 1),
        num_blocks,
        key=lambda num_tokens: peak_blocks(windows, block_size, num_tokens, chunk),
    )
