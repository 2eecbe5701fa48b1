"""GPU memory is measured: the cache shrinks until it fits, and figures tell what cannot fit."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.fixture_files import fixture_file  # noqa: E402

from quire.core.errors import ConfigError  # noqa: E402
from quire.executors.cuda import memory  # noqa: E402
from quire.executors.cuda.decoder import kv_block_bytes  # noqa: E402
from quire.model.loading import load_model  # noqa: E402
from quire.model.spec import ModelSpec  # noqa: E402


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        return model.spec


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let no more than so many blocks be allocated."""

    def limit(most: int) -> None:
        def allocate(spec: ModelSpec, num_blocks: int, device: str) -> int:
            if num_blocks > most:
                raise torch.OutOfMemoryError("no room")
            return num_blocks

        monkeypatch.setattr(memory, "KVBlocks", allocate)
        monkeypatch.setattr(memory, "free_bytes", lambda device: 3 << 30)

    return limit


def test_the_cache_takes_what_is_left(spec: ModelSpec, room_for: Any) -> None:
    room_for(1 << 30)
    found: Any = memory.allocate_blocks(spec, None, None, "cuda")
    assert found == (1 << 30) // kv_block_bytes(spec)  # 3 GiB, of which 2 are kept free
    found = memory.allocate_blocks(spec, None, 10 * kv_block_bytes(spec) + 1, "cuda")
    assert found == 10


def test_a_cache_that_does_not_fit_shrinks_and_goes_on(spec: ModelSpec, room_for: Any) -> None:
    room_for(75)
    found: Any = memory.allocate_blocks(spec, 100, None, "cuda")
    assert found == 72  # 100, 90, 81, 72


def test_no_room_for_a_single_block_is_said_with_the_figures(
    spec: ModelSpec, room_for: Any
) -> None:
    room_for(0)
    with pytest.raises(ConfigError, match=r"KV cache of 100 blocks of 16384 bytes .* 3\.0 GiB"):
        memory.allocate_blocks(spec, 100, None, "cuda")


def test_weights_that_cannot_fit_are_refused_before_they_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 << 30)
    memory.check_weights(6 << 30, "cuda")
    with pytest.raises(ConfigError, match=r"weights take 9\.0 GiB .* but 8\.0 GiB are free"):
        memory.check_weights(9 << 30, "cuda")


def test_running_out_while_loading_is_told_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 30)
    with (
        pytest.raises(ConfigError, match=r"weights take 4\.0 GiB"),
        memory.weights_memory("cuda", 4 << 30),
    ):
        raise torch.OutOfMemoryError("no room")
