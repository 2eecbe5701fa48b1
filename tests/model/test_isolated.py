"""Model files are read in a process without privileges first; what happens there stays there."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.fixture_files import FIXTURES, fixture_file

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.model import isolated
from quire.model.isolated import PendingVerdict, ProcessLimits, Verdict, begin, examine, probe

HOSTILE = "tests.model.hostile_readers"
SHORT = ProcessLimits(cpu_s=5, memory=1 << 30)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not on this system")


@pytest.fixture
def path() -> Path:
    return fixture_file("tiny/Q4_0.gguf")


def outcome(reader: str, path: Path, limits: ProcessLimits = SHORT) -> Verdict:
    return PendingVerdict(path, f"{HOSTILE}:{reader}", limits).result()


def has(measure: str) -> bool:
    return any(one.startswith(measure) for one in probe().in_force)


@pytest.mark.parametrize("name", ["tiny/Q4_0.gguf", "tiny-bitnet/TQ1_0.gguf"])
def test_a_sound_file_is_read_to_its_end(name: str) -> None:
    verdict = PendingVerdict(fixture_file(name)).result()
    assert verdict.refusal is None
    assert verdict.why_not is None
    assert "resource limits" in verdict.in_force
    verdict.check()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sound_folder_is_read_to_its_end(family: str) -> None:
    verdict = PendingVerdict(FIXTURES / "families" / family).result()
    assert (verdict.refusal, verdict.why_not) == (None, None)


def test_links_are_followed_as_in_a_cache_of_models(tmp_path: Path) -> None:
    for file in (FIXTURES / "families" / "llama").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert PendingVerdict(tmp_path).result().refusal is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "No such file"),
        ("text", "is no model that quire reads: it begins with b'Once'"),
        ("empty folder", "holds no model"),
        ("cut", "truncated"),
    ],
)
def test_a_file_that_is_refused_is_refused_in_the_same_words(
    tmp_path: Path, path: Path, kind: str, message: str
) -> None:
    model = tmp_path / "model.gguf"
    if kind == "text":
        model.write_text("Once upon a time")
    elif kind == "cut":
        model.write_bytes(path.read_bytes()[:9000])
    elif kind == "empty folder":
        model.mkdir()
    verdict = PendingVerdict(model).result()
    assert verdict.in_force
    with pytest.raises(ModelFileError, match=message):
        verdict.check()


def test_what_a_model_cannot_do_stays_what_it_is(path: Path) -> None:
    """And no control characters come through."""
    with pytest.raises(UnsupportedModelError, match=r"^cannot\?\[2Jrun it$"):
        outcome("refuse", path).check()


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("loop_for_ever", "it took more than 5 s of processor time"),
        ("take_all_memory", "it took more than 1024 MiB of memory"),
        ("crash", "it was ended by SIGSEGV"),
        ("abort", "it was ended by SIG"),
        ("fail", "IndexError: list index out of range"),
        ("talk_without_end", "it gave no answer that can be read"),
        ("lie", "it gave no answer that can be read"),
    ],
)
def test_a_reader_that_is_broken_costs_its_process_and_no_other(
    path: Path, reader: str, message: str
) -> None:
    with pytest.raises(ModelFileError, match=f"was not read: .*{message}.*--trust-model-file"):
        outcome(reader, path)


def test_a_reader_that_waits_for_ever_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_TIMES_SLOWER", 0.5)
    pending = PendingVerdict(path, f"{HOSTILE}:sleep_for_ever", SHORT)
    with pytest.raises(ModelFileError, match=r"it did not end within 2\.5 s"):
        pending.result()
    assert pending._process is not None
    assert pending._process.returncode is not None


def test_the_process_can_read_what_was_opened_and_do_nothing_else(
    tmp_path: Path, path: Path
) -> None:
    if not has("seccomp"):
        pytest.skip("this system lends no seccomp")
    copy = Path(shutil.copy(path, tmp_path / "own.gguf"))
    outcomes = json.loads(str(outcome("tell_what_is_possible", copy).refusal))
    assert outcomes.pop("read what is open") == "b'GGUF'"
    assert "done" not in outcomes.values(), outcomes
    assert len(outcomes) == 15
    assert copy.exists()


def test_without_seccomp_landlock_and_the_limits_hold(tmp_path: Path, path: Path) -> None:
    if not has("Landlock"):
        pytest.skip("this system has no Landlock")
    copy = Path(shutil.copy(path, tmp_path / "own.gguf"))
    entry = "tests.model.without_seccomp:tell_what_is_possible"
    verdict = PendingVerdict(copy, entry, SHORT).result()
    assert "seccomp" not in verdict.in_force
    outcomes = json.loads(str(verdict.refusal))
    assert outcomes.pop("read what is open") == "b'GGUF'"
    done = {name for name, result in outcomes.items() if result == "done"}
    assert done <= {"signal its parent"}  # which Landlock forbids from version 6 on


def test_the_limits_are_in_force(path: Path) -> None:
    lines = json.loads(str(outcome("tell_limits", path, ProcessLimits(30, 1 << 30)).refusal))
    found = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    assert found["Max cpu time"] == ["30", "35"]
    assert found["Max address space"] == [str(1 << 30)] * 2
    for name in ("file size", "core file size", "processes", "open files"):
        assert found[f"Max {name}"] == ["0", "0"]


def test_a_system_with_nothing_but_limits_reads_with_these(path: Path) -> None:
    verdict = PendingVerdict(path, "tests.model.weak_system:read").result()
    assert verdict.refusal is None
    assert "resource limits" in verdict.in_force
    assert not {"seccomp", "Landlock"} & {measure.split()[0] for measure in verdict.in_force}


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/python", ""])
def test_where_no_process_can_be_started_the_file_is_read_without(
    path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    verdict = PendingVerdict(path).result()
    assert verdict.in_force == ()
    assert verdict.why_not is not None
    assert verdict.text.startswith("none: ")
    verdict.check()


def test_nothing_of_our_environment_reaches_the_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    pending = PendingVerdict(path, f"{HOSTILE}:sleep_for_ever", SHORT)
    assert pending._process is not None
    variables = Path(f"/proc/{pending._process.pid}/environ").read_bytes()
    pending.close()
    assert b"secret" not in variables


def test_threads_may_have_files_read_at_the_same_time(path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        verdicts = list(pool.map(lambda _: PendingVerdict(path).result(), range(3)))
    assert all(verdict.refusal is None and verdict.in_force for verdict in verdicts)


def test_no_process_and_no_descriptor_is_left_over(path: Path) -> None:
    def left() -> tuple[int, list[str]]:
        own = str(os.getpid())
        stats = (entry / "stat" for entry in Path("/proc").iterdir() if entry.name.isdigit())
        texts = [stat.read_text() for stat in stats if stat.exists()]
        children = [text for text in texts if text.rpartition(")")[2].split()[1] == own]
        return len(os.listdir("/proc/self/fd")), children

    probe()
    before = left()
    for reader in ("crash", "refuse", "fail"):
        try:
            outcome(reader, path)
        except ModelFileError:
            continue
    assert left() == before


# ---- once for each file


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read without privileges from now on."""
    read: list[Path] = []
    original = PendingVerdict

    def pending(path: Path) -> PendingVerdict:
        read.append(path)
        return original(path)

    monkeypatch.setattr(isolated, "PendingVerdict", pending)
    return read


def test_a_file_is_read_again_only_when_it_has_changed(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(path, tmp_path / "model.gguf"))
    read = counted(monkeypatch)
    first = examine(model, model, trusted=False)
    assert examine(str(model), model, trusted=False) == first
    assert read == [model]
    os.utime(model, ns=(10**18, 10**18))
    examine(model, model, trusted=False)
    assert read == [model, model]


def test_what_was_begun_early_is_not_begun_again(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(path, tmp_path / "model.gguf"))
    read = counted(monkeypatch)
    for name in (str(model), str(model), "smollm2", "dummy:tiny", str(tmp_path / "none")):
        begin(name)
    assert read == [model]
    assert examine(str(model), model, trusted=False).in_force
    begin(str(model))
    assert read == [model]
    assert not isolated._begun


def test_a_file_that_was_refused_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("text")
    read = counted(monkeypatch)
    for _ in range(2):
        assert examine(model, model, trusted=False).refusal is not None
    assert len(read) == 2


@pytest.mark.parametrize(
    ("model", "trusted", "reason"),
    [
        ("x.gguf", True, "the file is trusted"),
        ("smollm2", False, "a known model"),
        ("dummy:tiny", False, "the model has no file"),
    ],
)
def test_what_need_not_be_read_is_not(
    model: str, trusted: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch)
    verdict = examine(model, Path(model), trusted=trusted)
    assert str(verdict.why_not).startswith(reason)
    assert not read


def test_a_program_that_is_ended_takes_the_process_with_it(path: Path) -> None:
    """As `kill -9` does: nobody is left to end a reader that runs for ever."""
    code = (
        "import sys, time; from pathlib import Path; from quire.model.isolated import *; "
        f"p = PendingVerdict(Path(sys.argv[1]), '{HOSTILE}:sleep_for_ever'); "
        "print(p._process.pid, p._process.stdout.readline(), flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline().split()[0])
        program.kill()
        program.wait()
    for _ in range(1000):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        os.sched_yield()
        subprocess.run(["sleep", "0.01"], check=True)
    pytest.fail("the process lives on")
