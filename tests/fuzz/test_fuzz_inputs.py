"""The fuzzers' inputs reach the readers. (What fuzzers find becomes a test beside its reader's.)"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fuzz.inputs import Feed, feed_gguf, feed_safetensors, gguf_seeds, safetensors_seeds

from quire.loader.gguf import GGUFFile


@pytest.mark.parametrize(
    ("feed", "seeds"), [(feed_gguf, gguf_seeds), (feed_safetensors, safetensors_seeds)]
)
def test_seeds_are_borne(tmp_path: Path, feed: Feed, seeds: Callable[[], list[bytes]]) -> None:
    for seed in seeds():
        feed(tmp_path, seed)


def test_the_first_gguf_seeds_open(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_seeds()[0])
    with GGUFFile(path) as file:
        assert len(file.tensors) == 4
        assert len(file.metadata) == 16
    feed_gguf(tmp_path, gguf_seeds()[1])
    assert len(GGUFFile(tmp_path / "m-00001-of-00002.gguf").parts) == 2
