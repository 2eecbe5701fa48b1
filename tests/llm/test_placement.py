"""Placement: which layers a GPU of so much memory gets, and what both sides are said to take."""

from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.executors.base import BLOCK_SIZE
from quire.llm import devices
from quire.llm.devices import DEVICES, PLACED, CudaDevice, Options, device_of, resolve_auto
from quire.llm.placement import GPU_OVERHEAD, Placement, PlacementSizes, place
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


def test_without_a_gpu_gpu_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CUDA_DRIVER", "no such library")
    with (
        load_model("dummy:tiny") as tiny,
        pytest.raises(ConfigError, match="gpu_layers is 1, but there is no NVIDIA driver"),
    ):
        resolve_auto(Options(gpu_layers=1), tiny, print)


@pytest.mark.parametrize("value", [0, -1, True, "all", 1.5])
def test_gpu_layers_that_are_no_number_of_layers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_layers must be a number of layers from 1 on"):
        Options(gpu_layers=value)


@pytest.mark.parametrize("given", [{"gpu_layers": 2}, {"gpu_memory": "1GiB"}])
def test_a_processor_refuses_options_of_a_gpu(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(ConfigError, match=f"{name} is .* the reference executor has no GPU"):
        device_of(Options(device="reference", **given))


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory must be bytes or text"):
        Options(gpu_memory="much")
