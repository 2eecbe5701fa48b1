"""What receipts say of the machine: true of the one the tests run on."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.bench.sound_receipt import make_receipt

from quire_bench.machine_info import PeakMemory, machine, usable_threads, versions
from quire_bench.receipts import as_data, validate


def test_it_is_what_a_receipt_wants() -> None:
    validate(as_data(make_receipt(machine=machine(), versions=versions())))
    assert machine()["os"].startswith(platform.system())
    assert versions()["python"] == platform.python_version()
    assert versions()["numpy"] == np.__version__
    assert 1 <= usable_threads() <= machine()["cores"]


# in a process of its own: another test's garbage, gone in the meantime, would count against it
_WATCHING_THE_PEAK = """
import numpy as np
from quire_bench.machine_info import forget_peak_memory, peak_memory_bytes

size = 256 << 20
assert forget_peak_memory()
before = peak_memory_bytes()
held = np.ones(size, np.uint8)
del held
assert peak_memory_bytes() >= before + size // 2
assert forget_peak_memory()
assert peak_memory_bytes() < before + size // 2
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets the peak")
def test_the_peak_stays_until_it_is_forgotten() -> None:
    command = [sys.executable, "-c", _WATCHING_THE_PEAK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_on_a_gpu_its_own_peak_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    gpu = SimpleNamespace(
        forget_peak_memory=lambda: calls.append("forget"), peak_memory_bytes=lambda: 7
    )
    monkeypatch.setitem(sys.modules, "quire.executors.cuda", SimpleNamespace(device=gpu))
    assert "peak_gpu_bytes" not in PeakMemory("cpu").as_data()
    assert calls == []
    assert PeakMemory("cuda").as_data()["peak_gpu_bytes"] == 7
    assert calls == ["forget"]


@pytest.mark.parametrize(
    ("script", "name"),
    [("echo 'Some GPU'; echo 'Other GPU'", "Some GPU, Other GPU"), ("exit 9", None), ("", None)],
)
def test_gpus_are_asked_of_their_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine()["gpu"] == name
