"""The fuzzers' inputs reach the readers, and what earlier runs kept is borne.

What a fuzzer finds becomes a test beside its reader's, and its input a file of the corpus.
"""

import random
from pathlib import Path

import pytest
from tests.fuzz.inputs import CORPUS, TARGETS, gguf_model_seeds, gguf_seeds
from tests.fuzz.mutated import fuzz, mutated_bytes, mutated_json
from tests.loader.hostile import memory_at_most

from quire.loader.gguf import GGUFFile
from quire.model.loading import load_model

KEPT = [
    pytest.param(path.parent.name, path, id=f"{path.parent.name}/{path.name}")
    for path in sorted(CORPUS.glob("*/*"))
    if path.parent.name in TARGETS
]
_SLACK = 1 << 20  # what readers allocate on any input, however small
_GROWTH = 40  # JSON grows in memory


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_to_their_end(name: str) -> None:
    assert all(TARGETS[name].feed(seed) for seed in TARGETS[name].seeds())


@pytest.mark.parametrize(("name", "path"), KEPT)
def test_what_was_kept_is_read_or_refused_in_memory_that_it_accounts_for(
    name: str, path: Path
) -> None:
    content = path.read_bytes()
    with memory_at_most(_GROWTH * len(content) + _SLACK):
        TARGETS[name].feed(content)


@pytest.mark.parametrize("name", TARGETS)
def test_random_mutations_are_read_or_refused(name: str) -> None:
    """A small part of what `make fuzz` runs; it must see both outcomes."""
    lines: list[str] = []
    assert 0 < fuzz(name, 1500, 7, lines.append) < 1500
    assert "1500 runs" in lines[0]


def test_a_find_is_kept_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def feed(content: bytes) -> bool:
        raise IndexError("no such thing")

    monkeypatch.setitem(TARGETS, "config", TARGETS["config"]._replace(feed=feed))
    monkeypatch.setattr("tests.fuzz.mutated.HOME", tmp_path)
    with pytest.raises(SystemExit, match="77"):
        fuzz("config", 5, 1, print)
    assert "config: IndexError: no such thing; kept in" in capsys.readouterr().out
    [found] = (tmp_path / "config" / "finds").iterdir()
    assert found.read_bytes()


def test_one_seed_mutates_alike() -> None:
    one, other = TARGETS["config"].seeds()[:2]
    for mutate in (mutated_bytes, mutated_json):
        made = [[mutate(one, other, random.Random(seed)) for seed in range(9)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 5


def test_a_seed_is_a_file_of_ollamas_converters(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_model_seeds()[-1])
    with load_model(path) as model:
        assert "mistral3.rope.scaling.yarn_beta_fast" in model.metadata, "it was renamed"
        assert b"v.patch_conv.weight" in path.read_bytes()
        assert not any(name.startswith("v.") for name in model.tensors)


def test_the_first_gguf_seeds_open(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_seeds()[0])
    with GGUFFile(path) as file:
        assert len(file.tensors) == 4
        assert len(file.metadata) == 16
