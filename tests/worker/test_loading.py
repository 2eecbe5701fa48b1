"""Whoever waits for a worker's model hears how far it is."""

import sys
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model

from quire.core.errors import ExecutorError
from quire.core.progress import PhaseTimes, reporting
from quire.llm.devices import Options
from quire.worker.launch import COMMAND, WorkerProcess


def test_a_worker_reports_how_far_loading_is(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    phases = PhaseTimes()

    def listen(phase: str, done: float) -> None:
        heard.append((phase, done))
        phases(phase, done)

    worker = WorkerProcess(COMMAND)
    with reporting(listen):
        path = write_text_model(tmp_path / "text.gguf")
        worker.load(path, Options(device="reference", kv_memory="8MiB"))
    phases.finish()
    worker.end()
    assert heard[0] == ("loading weights", 0.0)
    assert [done for _, done in heard] == sorted(done for _, done in heard)
    assert list(phases.seconds) == ["loading weights"]


_ENDS_UNREAD = """
import select, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
select.select([channel], [], [])
sys.exit(3)
"""


def test_a_worker_that_ends_before_it_reads_what_to_load_is_reported_by_its_end(
    tmp_path: Path,
) -> None:
    """Unread bytes make the end of its channel a reset."""
    worker = WorkerProcess((sys.executable, "-c", _ENDS_UNREAD))
    with pytest.raises(ExecutorError, match="ended while it loaded the model: exit code 3"):
        worker.load(tmp_path / "text.gguf", Options(device="reference"))
