"""Inspection and diagnosis as a library user calls them: typed results, without the program."""

from pathlib import Path

from tests.fixture_files import fixture_file
from tests.model.bitnet_forms import published
from tests.model.quantised_files import awq, is_linear, quantised, write_checkpoint

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


def test_packed_bytes_are_counted_as_the_weights_that_they_hold() -> None:
    """As in the file that bitnet.cpp makes of the same model; scales are no weights either."""
    counted = {}
    for form in ("hf-packed", "i2s.gguf"):
        path = published("c", form)
        facts = inspect_model(str(path), path, trusted=True).tensors
        assert facts is not None
        counted[form] = facts.weights, facts.by_type["I2_S"].weights
    assert counted["hf-packed"] == counted["i2s.gguf"] == (1_286_272, 1_130_496)


def test_of_a_quantised_checkpoint_weights_are_counted_in_the_blocks_that_run(
    tmp_path: Path,
) -> None:
    tensors, floats = quantised("ministral3", awq())
    method = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    path = write_checkpoint(tmp_path, "ministral3", tensors, method)
    found = inspect_model(str(path), path, trusted=False)
    assert found.problems == [] and found.tensors is not None and found.memory is not None
    assert found.tensors.weights == sum(weight.size for weight in floats.values())
    linears = sum(weight.size for name, weight in floats.items() if is_linear(name))
    assert found.tensors.by_type["Q5_0"].bytes == linears // 32 * 22
    assert found.memory.weights_in_file == (path / "model.safetensors").stat().st_size


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
