"""KVLayout: which layers share a block table, and where a layer's keys and values are in a block.

Layers that see the same positions form groups. A block holds some tokens of one group: a slot for
each of its layers. All groups have the same number of slots, so that they take their blocks from
one pool, and a group that has fewer layers leaves slots unused.

    gemma3-1b: 4 full layers, 22 with a window; 4 slots
        group 0 (full)      5  11  17  23
        group 1 (window)    0   1   2   3
        ...
        group 6 (window)   24  25   -   -
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.windows import Window, Windows, peak_blocks
from quire.model.spec import Attention, ModelSpec

# Fewer and larger groups are less to keep track of. They may take so much more memory than the
# smallest layout does: for a whole context, and for contexts within every window.
_LONG_TOLERANCE = 1.05
_SHORT_TOLERANCE = 1.15
_MOST_PARTS = 16  # into which the layers of one kind are divided
_USUAL_CHUNK = 256  # tokens of a step
_SCALE_BYTES = 4  # of keys or values of one byte, for each token and kv head


@dataclass(frozen=True, slots=True)
class KVLayout:
    windows: Windows  # of each group
    num_slots: int
    # Of each layer; one that keeps nothing has its kv_layer's, one with a state the first.
    groups: tuple[int, ...]
    slots: tuple[int, ...]  # likewise

    def slot_sizes(self, spec: ModelSpec, size_of: Callable[[Attention], int]) -> tuple[int, ...]:
        """What each slot must hold of a token: the most that any of its layers leaves."""
        if not self.num_slots:  # of layers without attention, or without their own
            return ()
        sizes = [0] * self.num_slots
        for layer, part in spec.attentions.items():
            slot = self.slots[layer]
            sizes[slot] = max(sizes[slot], size_of(part))
        return tuple(sizes)

    def token_size(self, spec: ModelSpec, size_of: Callable[[Attention], int]) -> int:
        """What a block holds of a token: all slots."""
        return sum(self.slot_sizes(spec, size_of))


def kv_bytes_per_token(spec: ModelSpec, is_8bit: bool) -> int:
    """Keys and values of all layers, in two bytes a number or in one with scales."""
    return kv_bytes_in_block(spec, one_group(spec), is_8bit)


def kv_bytes_in_block(spec: ModelSpec, layout: KVLayout, is_8bit: bool) -> int:
    """What a block takes for each of its tokens: the layers of one group."""
    elements = layout.token_size(spec, lambda part: part.num_kv_elements)
    if not is_8bit:
        return 2 * elements
    # Layers of one slot share its scales where they have as many.
    kinds = {(layout.slots[n], _num_kv_scales(part)) for n, part in spec.attentions.items()}
    return elements + _SCALE_BYTES * sum(count for _, count in kinds)


def _num_kv_scales(part: Attention) -> int:
    """Of one token's keys and values; those of latent attention are one vector."""
    if part.kv_layer is not None:
        return 0
    return 2 * part.num_kv_heads if part.latent is None else 1


def one_group(spec: ModelSpec) -> KVLayout:
    """One block table for all layers, whatever they see."""
    return _layout(spec, [(None, sorted({*_owners(spec).values()}))])


def grouped(spec: ModelSpec, block_size: int) -> KVLayout:
    """The layout with the fewest groups among those that take little memory."""
    kinds = _kinds(spec)
    if kinds.keys() <= {None}:
        return one_group(spec)
    counts = {len(layers) for layers in kinds.values()}
    sizes = {-(-count // parts) for count in counts for parts in range(1, _MOST_PARTS + 1)}
    layouts = [_layout(spec, _split(kinds, size)) for size in sorted(sizes, reverse=True)]
    costs = [_costs(spec, layout, block_size) for layout in layouts]
    least_long, least_short = (min(column) for column in zip(*costs, strict=True))
    for layout, (long, short) in zip(layouts, costs, strict=True):
        if long <= _LONG_TOLERANCE * least_long and short <= _SHORT_TOLERANCE * least_short:
            return layout
    return layouts[costs.index(min(costs))]


_Kinds = dict[Window | None, list[int]]  # layers by what is kept of them
_Groups = list[tuple[Window | None, list[int]]]


def _kinds(spec: ModelSpec) -> _Kinds:
    """A layer keeps what it sees, and all where another that reads it sees otherwise."""
    seen: dict[int, set[Window | None]] = {}
    parts = spec.attentions
    for index, owner in _owners(spec).items():
        part = parts[index]
        window = None if part.window is None else Window(part.window, part.is_chunked)
        seen.setdefault(owner, set()).add(window)
    kinds: _Kinds = {}
    for owner, windows in sorted(seen.items()):
        kinds.setdefault(windows.pop() if len(windows) == 1 else None, []).append(owner)
    return kinds


def _owners(spec: ModelSpec) -> dict[int, int]:
    """Of each layer that attends: itself, or the one whose keys and values it reads."""
    parts = spec.attentions.items()
    return {n: n if part.kv_layer is None else part.kv_layer for n, part in parts}


def _split(kinds: _Kinds, size: int) -> _Groups:
    """Groups of at most `size` layers, those that see all first."""
    return [
        (window, kinds[window][start : start + size])
        for window in sorted(kinds, key=lambda window: window is not None)
        for start in range(0, len(kinds[window]), size)
    ]


def _layout(spec: ModelSpec, groups: _Groups) -> KVLayout:
    places = {
        layer: (group, slot)
        for group, (_, layers) in enumerate(groups)
        for slot, layer in enumerate(layers)
    }
    owners = _owners(spec)
    kept = [places[owners[n]] if n in owners else (0, 0) for n in range(spec.num_layers)]
    return KVLayout(
        windows=tuple(window for window, _ in groups),
        num_slots=max(len(layers) for _, layers in groups),
        groups=tuple(group for group, _ in kept),
        slots=tuple(slot for _, slot in kept),
    )


def _costs(spec: ModelSpec, layout: KVLayout, block_size: int) -> tuple[int, int]:
    """Numbers kept for a whole context, and for a single block of tokens."""
    size = layout.token_size(spec, lambda part: part.num_kv_elements)
    blocks = peak_blocks(layout.windows, block_size, spec.context_length, _USUAL_CHUNK)
    return size * blocks, size * len(layout.windows)
