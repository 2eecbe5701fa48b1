"""GPU memory is measured: the cache shrinks until it fits, and figures tell what cannot fit."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.drawn_families import write_drawn  # noqa: E402
from tests.executors.cuda.bfloat_models import load_in_bfloat  # noqa: E402
from tests.fixture_files import fixture_file  # noqa: E402

from quire.core.errors import ConfigError  # noqa: E402
from quire.executors.base import BLOCK_SIZE  # noqa: E402
from quire.executors.cuda import memory  # noqa: E402
from quire.executors.cuda.decoder import KVBlocks, kv_block_bytes  # noqa: E402
from quire.executors.cuda.weights import load_weights, packed_bytes  # noqa: E402
from quire.model.kv_layout import (  # noqa: E402
    KVLayout,
    grouped,
    kv_bytes_in_block,
    one_group,
)
from quire.model.loading import load_model  # noqa: E402
from quire.model.spec import Attention, ModelSpec  # noqa: E402


@pytest.mark.parametrize(
    "case",
    [
        *("mixtral", "qwen3moe", "phi3", "gpt2", "gemma4", "gemma4-experts", "deepseek2"),
        *("qwen35", "nemotron_h_moe", "falcon-h1", "mamba2"),
    ],
)
def test_what_weights_take_is_predicted_with_their_padding(case: str, tmp_path: Path) -> None:
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        found = load_weights(model.spec, model.tensors, "cpu").num_bytes
        predicted = packed_bytes(model.tensors)
        assert predicted > 1.5 * sum(tensor.nbytes for tensor in model.tensors.values())
    assert found == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("case", ["gemma4", "gemma4-experts", "gemma3"])
def test_a_block_takes_what_is_counted_whatever_heads_its_layers_have(
    case: str, kept: str, tmp_path: Path
) -> None:
    with load_in_bfloat(write_drawn(case, tmp_path)) as model:
        spec = model.spec
    for layout in (one_group(spec), grouped(spec, BLOCK_SIZE)):
        blocks = KVBlocks(spec, layout, 3, "cpu", getattr(torch, kept))
        assert blocks.num_bytes == 3 * kv_block_bytes(spec, layout, is_8bit=kept == "int8")
        for layer, part in spec.attentions.items():
            cache = blocks.layer(layout.slots[layer], part.head_dim)
            for array in cache.keys, cache.values:
                assert array.shape[0] == 3 and array.shape[2:] == (BLOCK_SIZE, part.head_dim)
                assert array.shape[1] >= part.num_kv_heads
            assert cache.scales is None or cache.scales.shape[:2] == cache.keys.shape[:2]


def test_a_block_of_latents_has_a_vector_a_position_and_no_values(tmp_path: Path) -> None:
    with load_in_bfloat(write_drawn("deepseek2", tmp_path)) as model:
        spec, latent = model.spec, model.spec.attention.latent
    assert latent is not None
    for layout in (one_group(spec), grouped(spec, BLOCK_SIZE)):
        blocks = KVBlocks(spec, layout, 3, "cpu", torch.bfloat16)
        per_token = 2 * layout.num_slots * (latent.kv_rank + latent.rope_dims)
        assert blocks.num_bytes == 3 * BLOCK_SIZE * per_token
        assert blocks.num_bytes == 3 * kv_block_bytes(spec, layout, is_8bit=False)
        assert per_token == kv_bytes_in_block(spec, layout, is_8bit=False)


def test_blocks_of_a_model_without_attention_hold_nothing_and_are_not_too_many_to_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 140 << 30)
    with load_in_bfloat(write_drawn("mamba2", tmp_path)) as model:
        spec = model.spec
    blocks = KVBlocks(spec, one_group(spec), 3, "cpu", torch.bfloat16)
    blocks.copy(0, 1)
    assert blocks.num_bytes == 0
    monkeypatch.setattr(memory, "KVBlocks", lambda spec, layout, num_blocks, *_: num_blocks)
    found: Any = memory.allocate_blocks(spec, one_group(spec), None, None, "cuda")
    assert found == 1 << 20


def test_blocks_of_gemma_4s_models_are_no_larger_than_counted_elsewhere() -> None:
    """Where layers have few heads of 512 and more of 256, in slots that both are in."""
    sliding = Attention(num_heads=32, num_kv_heads=16, head_dim=256, window=1024)
    full = Attention(num_heads=32, num_kv_heads=4, head_dim=512)
    with load_model("dummy:tiny") as model:
        spec = model.spec
    layers = [replace(spec.layers[0], mixer=x) for x in (*[sliding] * 5, full) * 10]
    spec = replace(spec, layers=tuple(layers), context_length=1 << 17)
    layout = grouped(spec, BLOCK_SIZE)
    wanted = BLOCK_SIZE * kv_bytes_in_block(spec, layout, is_8bit=False)
    assert kv_block_bytes(spec, layout, is_8bit=False) == wanted


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        return model.spec


def block_bytes(spec: ModelSpec) -> int:
    return BLOCK_SIZE * kv_bytes_in_block(spec, one_group(spec), is_8bit=False)


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let no more than so many blocks be allocated."""

    def limit(most: int) -> None:
        def allocate(spec: ModelSpec, layout: KVLayout, num_blocks: int, *rest: object) -> int:
            if num_blocks > most:
                raise torch.OutOfMemoryError("no room")
            return num_blocks

        monkeypatch.setattr(memory, "KVBlocks", allocate)
        monkeypatch.setattr(memory, "free_bytes", lambda device: 3 << 30)

    return limit


def test_the_cache_takes_what_is_left(spec: ModelSpec, room_for: Any) -> None:
    room_for(1 << 30)
    found: Any = memory.allocate_blocks(spec, one_group(spec), None, None, "cuda")
    assert found == (2 << 30) // block_bytes(spec)  # 3 GiB, of which one is kept free
    found = memory.allocate_blocks(spec, one_group(spec), None, 10 * block_bytes(spec) + 1, "cuda")
    assert found == 10


def test_a_cache_that_does_not_fit_shrinks_and_goes_on(spec: ModelSpec, room_for: Any) -> None:
    room_for(75)
    found: Any = memory.allocate_blocks(spec, one_group(spec), 100, None, "cuda")
    assert found == 72  # 100, 90, 81, 72


def test_no_room_for_a_single_block_is_said_with_the_figures(
    spec: ModelSpec, room_for: Any
) -> None:
    room_for(0)
    with pytest.raises(ConfigError, match=r"KV cache of 100 blocks of 16384 bytes .* 3\.0 GiB"):
        memory.allocate_blocks(spec, one_group(spec), 100, None, "cuda")


def test_weights_that_cannot_fit_are_refused_before_they_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 << 30)
    memory.check_weights(6 << 30, 1 << 30, "cuda")
    with pytest.raises(ConfigError, match=r"weights take 9\.0 GiB .* but 8\.0 GiB are free"):
        memory.check_weights(9 << 30, 1 << 30, "cuda")
    memory.check_weights(int(7.5 * 2**30), 32 << 20, "cuda")  # small matrices take little room
    with pytest.raises(ConfigError, match=r"and 0\.8 GiB more while they are loaded"):
        memory.check_weights(int(7.5 * 2**30), 100 << 20, "cuda")


def test_running_out_while_loading_is_told_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 30)
    with (
        pytest.raises(ConfigError, match=r"weights take 4\.0 GiB"),
        memory.weights_memory("cuda", 4 << 30),
    ):
        raise torch.OutOfMemoryError("no room")


class FakeDevice:
    """torch.cuda's counters of a GPU with so much memory, and torch.empty on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.allocated, self.peak = total, 0, 0
        self.held: list[int] = []
        counters = {
            "mem_get_info": lambda device: (total - self.allocated, total),
            "get_per_process_memory_fraction": lambda: 1.0,
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "stream": lambda stream: nullcontext(),
        }
        for name, fake in counters.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "empty", self._empty)

    def _empty(self, size: int, **kind: Any) -> "Held":
        self.take(size)
        self.held.append(size)
        return Held(self, size)

    def take(self, size: int) -> None:
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError("no room")
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class Held:
    def __init__(self, device: FakeDevice, size: int) -> None:
        self._device, self._size = device, size

    def __del__(self) -> None:
        self._device.allocated -= self._size


def test_what_sampling_took_once_is_held_while_the_cache_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch, 100 << 20)

    def sample() -> None:
        device.take(8 << 20)
        device.allocated -= 8 << 20

    with memory.memory_set_aside(sample, "cuda", None):
        assert memory.free_bytes("cuda") == 90 << 20  # 8 MiB and a quarter are held
    assert memory.free_bytes("cuda") == 100 << 20


def test_sampling_that_never_fits_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch, 4 << 20)
    with (
        pytest.raises(ConfigError, match=r"buffers of a step do not fit .* lower max_batch_size"),
        memory.memory_set_aside(lambda: device.take(8 << 20), "cuda", None),
    ):
        raise AssertionError("the cache must not be cut")


def test_rows_are_sampled_in_groups_that_fit_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, 128 << 30)
    assert memory.rows_sampled_at_once(1000, 256, "cuda") == 256
    many = memory.rows_sampled_at_once(128_256, 256, "cuda")
    assert 1 < many < 256 and many * 128_256 * 96 <= 1 << 30
    FakeDevice(monkeypatch, 1 << 30)
    assert memory.rows_sampled_at_once(1 << 24, 256, "cuda") == 1


def test_no_table_is_made_for_contexts_that_the_cache_cannot_hold(spec: ModelSpec) -> None:
    endless = replace(spec, context_length=1 << 30)
    assert memory.max_context(endless, one_group(endless), 10, None, "cpu") == 160
    assert memory.max_context(endless, one_group(endless), None, 5 * block_bytes(spec), "cpu") == 80
    assert memory.max_context(spec, one_group(spec), 1 << 20, None, "cpu") == spec.context_length


def test_more_blocks_than_slots_can_be_counted_are_not_taken(
    spec: ModelSpec, room_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(1 << 40)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 50)
    found: Any = memory.allocate_blocks(spec, one_group(spec), None, None, "cuda")
    assert found * 16 < 1 << 31
    with pytest.raises(ConfigError, match="num_blocks is 200000000; the limit is"):
        memory.allocate_blocks(spec, one_group(spec), 200_000_000, None, "cuda")
