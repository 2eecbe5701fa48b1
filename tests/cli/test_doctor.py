"""`quire doctor`: the machine, the versions, and which executor would run."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
from tests.cli.program import quire, without_native_module


def test_json_holds_what_python_knows_too(tmp_path: Path) -> None:
    run = quire("doctor", "--json", env={"QUIRE_CACHE": str(tmp_path)})
    assert (run.code, run.err) == (0, "")
    facts = json.loads(run.out)
    assert facts["cpu"]["architecture"] == platform.machine()
    assert facts["cpu"]["cores"] == os.cpu_count()
    assert 0 < facts["cpu"]["usable_cores"] <= facts["cpu"]["cores"]
    assert facts["versions"]["python"] == platform.python_version()
    assert {"quire", "numpy", "tokenizers", "jinja2"} <= set(facts["versions"])
    assert facts["executors"]["picked"] == "cpu"
    assert set(facts["executors"]["known"]) == {"cpu", "cuda", "reference"}
    assert facts["cache"] == {"folder": str(tmp_path), "models": {"smollm2": False}}
    assert facts["cpu_kernels"]["unit"] == facts["cpu_kernels"]["units"][-1]
    assert facts["cpu_kernels"]["units"][0] == "portable"
    assert facts["cpu_kernels"]["threads"] == max(1, int(facts["cpu"]["usable_cores"]))
    assert facts["advice"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_linux_memory_and_features_are_known() -> None:
    facts = json.loads(quire("doctor", "--json").out)
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["cpu"]["features"]


def test_text_shows_the_same(tmp_path: Path) -> None:
    run = quire("doctor", env={"QUIRE_CACHE": str(tmp_path)})
    assert run.code == 0
    for fact in (
        "cpu        native kernels over weights in their blocks",
        "plain C++  <- device=auto takes this one",
        "cpu kernels: ",
        "smollm2: not there; quire pull fetches it",
        f"python {platform.python_version()}",
    ):
        assert fact in run.out


def test_the_kernels_shown_are_those_the_environment_chooses() -> None:
    run = quire("doctor", env={"QUIRE_CPU_UNIT": "portable"})
    assert "cpu kernels: portable on " in run.out
    run = quire("doctor", env={"QUIRE_CPU_UNIT": "abacus"})
    assert run.code == 0
    assert "cpu kernels: none on " in run.out
    assert "advice     QUIRE_CPU_UNIT names kernels that do not run here: there are port" in run.out


def test_a_native_module_that_is_not_built_is_advised_about(tmp_path: Path) -> None:
    run = quire("doctor", env=without_native_module(tmp_path))
    assert run.code == 0
    assert "plain C++ (its native module is not built)\n" in run.out
    assert "reference  numpy in float32" in run.out and "<- device=auto takes this one" in run.out
    assert "advice     the CPU executor's native module is not built: " in run.out


def fake_gpu_tool(folder: Path, script: str) -> dict[str, str]:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpus_are_those_their_tool_lists(tmp_path: Path) -> None:
    env = fake_gpu_tool(tmp_path, "echo 'NVIDIA H200, 143771 MiB, 570.1, 9.0'")
    [gpu] = json.loads(quire("doctor", "--json", env=env).out)["gpus"]
    assert gpu == {
        "name": "NVIDIA H200",
        "memory_total": "143771 MiB",
        "driver_version": "570.1",
        "compute_cap": "9.0",
    }
    assert "GPU        NVIDIA H200, 143771 MiB, 570.1, 9.0" in quire("doctor", env=env).out


def test_a_gpu_tool_that_fails_is_said(tmp_path: Path) -> None:
    run = quire("doctor", env=fake_gpu_tool(tmp_path, "exit 9"))
    assert run.code == 0
    assert "GPU        nvidia-smi fails: " in run.out


def test_a_cache_folder_that_cannot_be_written_is_advised_about(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = quire("doctor", env={"QUIRE_CACHE": str(tmp_path / "file" / "cache")})
    assert run.code == 0
    assert "advice     the cache folder cannot be written: set QUIRE_CACHE" in run.out


def test_it_says_how_model_files_are_read() -> None:
    isolation = json.loads(quire("doctor", "--json").out)["isolation"]
    assert "resource limits" in isolation["in_force"]
    assert f"isolation  of reading model files: {', '.join(isolation['in_force'])}\n" in (
        quire("doctor").out
    )
