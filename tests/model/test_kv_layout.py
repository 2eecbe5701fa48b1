"""KVLayout: which layers share a block table, and how little that wastes."""

from dataclasses import replace

import pytest
from tests.model.flat_spec import flat_spec

from quire.core.windows import Window, peak_blocks
from quire.model.kv_layout import KVLayout, grouped, one_group
from quire.model.spec import Attention, ModelSpec

BLOCK = 16


def spec_of(windows: list[int | None], context: int = 32_768) -> ModelSpec:
    """A model whose layers have these windows."""
    return flat_spec(
        family="llama",
        num_layers=len(windows),
        windows=windows,
        context_length=context,
        hidden_size=64,
        ffn_size=64,
        vocabulary_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )


def every(count: int, of: int, window: int) -> list[int | None]:
    """Each `of`-th layer sees all, as in gemma3."""
    return [None if layer % of == of - 1 else window for layer in range(count)]


def size_of(part: Attention) -> int:
    return part.num_kv_elements


def test_layers_that_all_see_everything_are_one_group_as_they_come() -> None:
    spec = spec_of([None] * 7)
    layout = grouped(spec, BLOCK)
    assert layout == one_group(spec)
    assert layout == KVLayout((None,), 7, (0,) * 7, tuple(range(7)))
    assert layout.token_size(spec, size_of) == spec.num_kv_elements


def test_layers_that_all_have_one_window_are_one_group() -> None:
    layout = grouped(spec_of([4096] * 4), BLOCK)
    assert (layout.windows, layout.num_slots) == ((Window(4096),), 4)


@pytest.mark.parametrize(
    ("windows", "num_slots", "num_full", "num_windowed"),
    [
        (every(26, 6, 512), 4, 1, 6),  # gemma3-1b
        (every(34, 6, 1024), 5, 1, 6),  # gemma3-4b
        (every(48, 6, 1024), 8, 1, 5),  # gemma3-12b
        (every(62, 6, 1024), 10, 1, 6),  # gemma3-27b
        ([128 if layer % 2 == 0 else None for layer in range(24)], 12, 1, 1),  # gpt-oss-20b
    ],
)
def test_the_groups_of_known_models(
    windows: list[int | None], num_slots: int, num_full: int, num_windowed: int
) -> None:
    spec = spec_of(windows)
    layout = grouped(spec, BLOCK)
    assert layout.num_slots == num_slots
    assert layout.windows.count(None) == num_full
    assert len(layout.windows) == num_full + num_windowed
    places = set(zip(layout.groups, layout.slots, strict=True))
    assert len(places) == len(windows), "two layers share a place"
    for layer, window in enumerate(windows):
        kept = layout.windows[layout.groups[layer]]
        assert kept == (None if window is None else Window(window))


def test_a_long_context_of_gemma3_takes_less_than_a_quarter() -> None:
    spec = spec_of(every(26, 6, 512))
    layout = grouped(spec, BLOCK)
    blocks = peak_blocks(layout.windows, BLOCK, 32_768, 256)
    windowed = blocks * layout.token_size(spec, size_of)
    assert windowed <= 32_768 // BLOCK * spec.num_kv_elements / 4


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert grouped(spec_of(every(6, 3, 512), context=512), BLOCK).windows == (None,)


def test_a_layer_that_reads_another_has_its_place() -> None:
    spec = spec_of([8, None, 8, None, 8, None])
    layers = list(spec.layers)
    for reader, owner in ((4, 2), (5, 3)):
        mixer = replace(layers[reader].attention, kv_layer=owner)
        layers[reader] = replace(layers[reader], mixer=mixer)
    layout = grouped(replace(spec, layers=tuple(layers)), BLOCK)
    assert layout.groups == (1, 0, 1, 0, 1, 0)
    assert layout.slots == (0, 0, 1, 1, 1, 1)
    assert layout.windows == (None, Window(8))


def test_a_layer_whose_reader_sees_more_keeps_all() -> None:
    spec = spec_of([8, 8, None])
    layers = list(spec.layers)
    layers[2] = replace(layers[2], mixer=replace(layers[2].attention, kv_layer=0))
    layout = grouped(replace(spec, layers=tuple(layers)), BLOCK)
    assert layout.windows[layout.groups[0]] is None
    assert layout.windows[layout.groups[1]] == Window(8)
    assert layout.groups[2] == layout.groups[0]


def test_a_slot_holds_the_largest_of_its_layers() -> None:
    spec = spec_of([8, None])
    wide = replace(spec.layers[1].attention, num_kv_heads=spec.num_heads)
    spec = replace(spec, layers=(spec.layers[0], replace(spec.layers[1], mixer=wide)))
    layout = grouped(spec, BLOCK)
    assert layout.num_slots == 1
    assert layout.slot_sizes(spec, size_of) == (wide.num_kv_elements,)
    assert one_group(spec).token_size(spec, size_of) == spec.num_kv_elements
