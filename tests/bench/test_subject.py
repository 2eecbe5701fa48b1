"""What receipts say of a model, with and without a file."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.bench.models import TINY_KV
from tests.fixture_files import fixture_file

from quire.core.errors import ConfigError
from quire.llm.devices import Options
from quire_bench.subject import open_subject, read_facts, with_quant


def test_a_dummy_model_has_no_hash_and_known_sizes() -> None:
    facts = read_facts("dummy:llama-1b:Q4_K_M")
    assert (facts.name, facts.sha256, facts.quant) == ("dummy:llama-1b:Q4_K_M", None, "Q4_K_M")
    assert facts.num_weights - facts.matrix_weights == 49_152 * 2048 + 33 * 2048  # rows, norms
    assert facts.formats == {"F32": 33, "Q4_K": 97, "Q6_K": 17}


def test_a_tied_embedding_is_multiplied_with() -> None:
    facts = read_facts("dummy:bitnet-2b")
    norms = 30 * (2 * 2560 + 2560 + 6912) + 2560
    assert facts.num_weights - facts.matrix_weights == norms


def test_a_file_is_known_by_its_hash_and_its_last_name(tmp_path: Path) -> None:
    path = fixture_file("tiny/Q4_K_M.gguf")
    facts = read_facts(str(path))
    assert facts.name == "Q4_K_M.gguf"
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.packed_bytes < path.stat().st_size
    copy = shutil.copy(path, tmp_path / "other.gguf")
    assert read_facts(str(copy)).sha256 == facts.sha256


@pytest.mark.parametrize(
    ("model", "quant", "name"),
    [
        ("dummy:tiny", None, "dummy:tiny:Q4_K_M"),
        ("dummy:tiny", "q8_0", "dummy:tiny:Q8_0"),
        ("dummy:tiny:Q8_0:3", "Q8_0", "dummy:tiny:Q8_0:3"),
        ("model.gguf", None, "model.gguf"),
    ],
)
def test_a_mix_joins_the_name(model: str, quant: str | None, name: str) -> None:
    assert with_quant(model, quant) == name


@pytest.mark.parametrize(
    ("model", "quant", "complaint"),
    [
        ("model.gguf", "Q8_0", "model.gguf is a file and has its own"),
        ("dummy:tiny:Q4_K_M", "Q8_0", "--quant is Q8_0: leave one out"),
        ("dummy:tiny", "Q99", "no mix 'Q99'"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(model: str, quant: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        with_quant(model, quant)


def test_what_ran_is_asked_of_the_executor() -> None:
    subject = open_subject(
        "dummy:tiny", None, Options(kv_memory=TINY_KV, device="reference", max_batch_size=1)
    )
    try:
        assert subject.executed["device"] == "reference"
        assert subject.executed["fallback"] is None
        executor: Any = subject.assembly.executor
        executor.kernels, executor.fallback = ["fast"], "it was slow"
        expected = {"device": "reference", "kernels": ["fast"], "fallback": "it was slow"}
        assert subject.executed == expected
    finally:
        subject.close()
