"""Whoever waits for a worker's model hears how far it is."""

from pathlib import Path

from tests.llm.text_models import write_text_model

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
