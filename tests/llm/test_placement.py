"""Placement: which layers a GPU of so much memory gets, and what both sides are said to take."""

from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import ConfigError, UnsupportedModelError
from quire.executors.base import BLOCK_SIZE
from quire.llm import devices
from quire.llm.devices import (
    DEVICES,
    FEED_FORWARD,
    PLACED,
    CudaDevice,
    Options,
    device_of,
    resolve_auto,
)
from quire.llm.placement import (
    GPU_OVERHEAD,
    Placement,
    PlacementSizes,
    place,
    place_feed_forwards,
)
from quire.model.loading import Model, load_model

MODEL = "dummy:tiny-gemma3"  # layers in groups
MEBIBYTE = 1 << 20
LITTLE = GPU_OVERHEAD + 44 * MEBIBYTE  # which holds some of the layers


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(MODEL)


def placed(model: Model, gpu_memory: int, gpu_layers: int | None = None, **sizes: Any) -> Placement:
    given = {"max_batch_size": 2, "chunk": 64, "kv_bytes": MEBIBYTE, "threads": 1, **sizes}
    given.setdefault("max_context", None)
    found = place(model, PlacementSizes(**given), gpu_layers, gpu_memory, None)
    assert found is not None
    return found


def test_more_memory_holds_more_layers(model: Model) -> None:
    """Every layer fits at some size, and both sides together always hold the whole cache."""
    counts = []
    for extra in range(4 * MEBIBYTE, 40 * MEBIBYTE, MEBIBYTE // 2):
        try:
            found = placed(model, GPU_OVERHEAD + 32 * MEBIBYTE + extra)
        except (ConfigError, AssertionError):  # nothing fits, or everything
            continue
        assert found.gpu_layers is not None
        counts.append(found.gpu_layers)
        assert found.gpu_bytes <= GPU_OVERHEAD + 32 * MEBIBYTE + extra
        assert found.num_blocks * found.whole.block_bytes <= MEBIBYTE
    assert counts == sorted(counts)
    assert len(set(counts)) > 2


def test_a_layer_more_is_a_layer_of_weights_and_keys_more(model: Model) -> None:
    few, more = (placed(model, 1 << 40, count) for count in (1, 2))
    assert more.gpu.weights > few.gpu.weights
    assert more.cpu.weights < few.cpu.weights
    assert few.whole.kv_per_token == more.whole.kv_per_token
    assert few.whole.windows == more.whole.windows != (None,)
    assert few.gpu.block_bytes % BLOCK_SIZE == 0


def test_keys_and_values_in_bytes_are_counted_on_both_sides(model: Model) -> None:
    halves, in_bytes = (placed(model, 1 << 40, 3, is_8bit=x) for x in (False, True))
    for side in ("cpu", "gpu"):
        assert getattr(in_bytes, side).block_bytes < 0.6 * getattr(halves, side).block_bytes
    assert in_bytes.num_blocks > 1.6 * halves.num_blocks


def test_what_cannot_fit_is_said_with_figures(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"1 layer, the head .* of which 1\.0 MiB may be used"):
        placed(model, MEBIBYTE)
    with pytest.raises(ConfigError, match=r"5 layers, the head .* lower gpu_layers"):
        placed(model, MEBIBYTE, 5)
    with pytest.raises(ConfigError, match="max_context is 100000"):
        placed(model, 1 << 40, 5, max_context=100000)


def test_layers_stay_with_those_whose_keys_and_values_they_read(model: Model) -> None:
    *layers, last = model.spec.layers
    shared = replace(last, mixer=replace(last.attention, kv_layer=1))
    reader = replace(model, spec=replace(model.spec, layers=(*layers, shared)))
    count = len(layers)  # all but the first
    assert placed(reader, 1 << 40, count).gpu_layers == count
    with pytest.raises(UnsupportedModelError, match=f"layer {count} those of layer 1, and cannot"):
        placed(reader, 1 << 40, count - 1)
    assert placed(model, LITTLE).gpu_layers != count
    with pytest.raises(ConfigError, match=f"{count} layers, the head"):
        placed(reader, LITTLE)


def test_every_layer_on_the_gpu_needs_no_placement(model: Model) -> None:
    sizes = PlacementSizes(max_batch_size=2, chunk=64, kv_bytes=None, max_context=None, threads=1)
    assert place(model, sizes, 99, 1 << 40, None) is None
    assert place(model, sizes, None, 1 << 40, None) is None


class Gpu(CudaDevice):
    def why_unavailable(self) -> str | None:
        return None

    def available_memory(self) -> int | None:
        return 1 << 36


def test_gpu_layers_are_counted_before_loading(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Gpu())
    said: list[str] = []
    options = Options(gpu_layers=3, max_batch_size=2)
    assert device_of(options) is PLACED
    found = resolve_auto(options, model, said.append)
    assert (found.device, found.gpu_layers) == ("cuda", 3)
    assert said[0].startswith(f"the last 3 of {model.spec.num_layers} layers are on the GPU (")
    whole = resolve_auto(Options(gpu_layers="auto", max_batch_size=2), model, said.append)
    assert (whole.device, whole.gpu_layers) == ("cuda", None)
    assert device_of(whole) is not PLACED
    few = resolve_auto(
        Options(gpu_layers="auto", max_batch_size=2, kv_memory="1MiB", gpu_memory=LITTLE),
        model,
        said.append,
    )
    assert isinstance(few.gpu_layers, int) and few.gpu_layers < model.spec.num_layers


def fed(model: Model, gpu_memory: int = 1 << 40, **sizes: Any) -> Placement:
    given = {"max_batch_size": 2, "chunk": 64, "kv_bytes": MEBIBYTE, "threads": 1, **sizes}
    given.setdefault("max_context", None)
    return place_feed_forwards(model, PlacementSizes(**given), gpu_memory, None)


def test_feed_forwards_on_the_gpu_leave_attention_and_the_cache_to_the_cpu(model: Model) -> None:
    found, layers = fed(model), placed(model, 1 << 40, 1)
    assert found.gpu_layers is None
    assert found.gpu.block_bytes == 0
    assert found.cpu.kv_per_token == layers.whole.kv_per_token
    assert found.num_blocks * found.cpu.block_bytes <= MEBIBYTE
    total = sum(tensor.nbytes for tensor in model.tensors.values())
    feed = sum(x.nbytes for name, x in model.tensors.items() if ".ffn_" in name)
    assert feed < found.gpu.weights < total
    with pytest.raises(ConfigError, match=r"the feed-forwards, the head .* use gpu_layers instead"):
        fed(model, GPU_OVERHEAD + 4 * MEBIBYTE)
    with pytest.raises(ConfigError, match="max_context is 100000"):
        fed(model, max_context=100000)


def test_layers_that_keep_a_state_stay_on_one_device() -> None:
    with load_model("dummy:tiny-qwen35") as model:
        with pytest.raises(UnsupportedModelError, match="layers of gated DeltaNet, which run"):
            placed(model, LITTLE, 1)
        with pytest.raises(UnsupportedModelError, match="layers of gated DeltaNet, which run"):
            fed(model)


def test_halves_side_by_side_cannot_be_taken_apart(model: Model) -> None:
    layers = tuple(replace(layer, is_parallel=True) for layer in model.spec.layers)
    parallel = replace(model, spec=replace(model.spec, layers=layers))
    with pytest.raises(UnsupportedModelError, match="attention and feed-forward side by side"):
        fed(parallel)


def test_ffn_gpu_is_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.setitem(DEVICES, "cuda", Gpu())
    said: list[str] = []
    options = Options(placement="ffn-gpu", max_batch_size=2)
    assert device_of(options) is FEED_FORWARD
    found = resolve_auto(options, model, said.append)
    assert (found.device, found.placement, found.gpu_layers) == ("cuda", "ffn-gpu", None)
    assert said[0].startswith("feed-forwards and the head are on the GPU (")
    assert device_of(found) is FEED_FORWARD
    assert device_of(replace(options, kv_cache_dtype="f16")) is FEED_FORWARD
    with pytest.raises(ConfigError, match="keeps keys and values as auto, f16, int8"):
        device_of(replace(options, kv_cache_dtype="fp8"))


def test_a_placement_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement must be 'ffn-gpu', got 'attention-gpu'"):
        Options(placement="attention-gpu")
    with pytest.raises(ConfigError, match="gpu_layers is 3, which puts whole layers there"):
        Options(placement="ffn-gpu", gpu_layers=3)


def test_without_a_gpu_gpu_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "no such library")
    with (
        load_model("dummy:tiny") as tiny,
        pytest.raises(ConfigError, match="gpu_layers is 1, but there is no NVIDIA driver"),
    ):
        resolve_auto(Options(gpu_layers=1), tiny, print)
    with (
        load_model("dummy:tiny") as tiny,
        pytest.raises(ConfigError, match="placement is 'ffn-gpu', but there is no NVIDIA driver"),
    ):
        resolve_auto(Options(placement="ffn-gpu"), tiny, print)


@pytest.mark.parametrize("value", [0, -1, True, "all", 1.5])
def test_gpu_layers_that_are_no_number_of_layers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_layers must be a number of layers from 1 on"):
        Options(gpu_layers=value)


@pytest.mark.parametrize(
    "given", [{"gpu_layers": 2}, {"gpu_memory": "1GiB"}, {"placement": "ffn-gpu"}]
)
def test_a_processor_refuses_options_of_a_gpu(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(ConfigError, match=f"{name} is .* the reference executor has no GPU"):
        device_of(Options(device="reference", **given))


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory must be bytes or text"):
        Options(gpu_memory="much")
