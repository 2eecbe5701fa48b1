"""Inspection and diagnosis as a library user calls them: typed results, without the program."""

from pathlib import Path

from tests.fixture_files import fixture_file

from quire.diagnosis import diagnose
from quire.inspection import inspect_model

TINY = fixture_file("tiny/Q4_K_M.gguf")


def test_a_sound_file_has_every_section() -> None:
    found = inspect_model(str(TINY), TINY, trusted=False)
    assert found.problems == []
    assert found.file is not None and found.file.bytes == TINY.stat().st_size
    assert found.model is not None and found.model.family == found.file.architecture == "llama"
    assert found.tensors is not None and found.tensors.count == 21
    sizes = [totals.bytes for totals in found.tensors.by_type.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert found.tokenizer is not None and not found.tokenizer.present
    assert found.norms is not None and found.norms.unsound == 0
    assert found.memory is not None and found.memory.weights_in_file == sum(sizes)
    assert found.isolation is not None and found.isolation.in_force


def test_what_cannot_be_read_is_none_and_a_problem_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:-5000])
    found = inspect_model(str(broken), broken, trusted=False)
    assert (found.file, found.model, found.isolation) == (None, None, None)
    [problem] = found.problems
    assert "it is truncated or broken" in problem


def test_a_diagnosis_names_the_executor_that_auto_takes() -> None:
    found = diagnose()
    assert found.executors.picked in found.executors.known
    assert found.cpu_kernels is not None and found.cpu_kernels.unit in found.cpu_kernels.units
    assert found.cpu.usable_cores > 0
