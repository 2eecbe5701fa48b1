"""quire.ray.generate: every row once, whatever dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.llm.text_models import write_text_model
from tests.ray.clusters import PATIENCE_S, cluster

from quire import LLM, ConfigError
from quire.ray import generate

NUM_PROMPTS = 10_000
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "trust_model_file": True,
    "kv_memory": "16MiB",
}
SAMPLING: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module", autouse=True)
def on_cluster() -> Iterator[None]:
    with cluster(2):
        yield


def _rows(count: int) -> ray.data.Dataset:
    rows = [{"id": number, "prompt": f"row {number}"} for number in range(count)]
    return ray.data.from_items(rows, override_num_blocks=40)


def _answers(dataset: ray.data.Dataset) -> dict[int, str]:
    """By id; a row that is there twice is an error."""
    rows = dataset.take_all()
    assert all(row["error"] is None and row["num_tokens"] == 8 for row in rows)
    found = {row["id"]: row["completion"] for row in rows}
    assert len(found) == len(rows)
    return found


class Killer:
    """Kills an actor once `folder` holds some parts; `killed` are the processes that it ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.killed: list[int] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(list(self._folder.glob("part-*"))) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in Path("/proc").iterdir():
            if process.name.isdecimal() and _is_actor(process):
                os.kill(int(process.name), signal.SIGKILL)
                self.killed.append(int(process.name))
                return


def _is_actor(process: Path) -> bool:
    try:
        return b"_Generator" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_every_row_once_with_an_actor_killed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    made = generate(
        _rows(NUM_PROMPTS), model=model, checkpoint=folder, engine=ENGINE, concurrency=2, **SAMPLING
    )
    with Killer(folder) as killer:
        answers = _answers(made)
    assert killer.killed, "no actor was killed"
    assert answers.keys() == set(range(NUM_PROMPTS))
    ids = [row["id"] for row in ray.data.read_parquet(str(folder)).take_all()]
    assert sorted(ids) == list(range(NUM_PROMPTS))
    with capsys.disabled():
        print(f"\n{len(answers)} rows, each once, with process {killer.killed[0]} killed")


def test_a_rerun_computes_what_is_missing_alone_and_the_same(model: Path, tmp_path: Path) -> None:
    folder, whole = tmp_path / "parts", tmp_path / "whole"
    first = generate(_rows(600), model=model, checkpoint=whole, engine=ENGINE, **SAMPLING)
    answers = _answers(first)
    generate(_rows(200), model=model, checkpoint=folder, engine=ENGINE, **SAMPLING).materialize()
    parts = {part: part.stat().st_mtime_ns for part in folder.glob("part-*")}
    assert parts
    again = generate(_rows(600), model=model, checkpoint=folder, engine=ENGINE, **SAMPLING)
    assert _answers(again) == answers
    assert {part: part.stat().st_mtime_ns for part in parts} == parts
    ids = [row["id"] for row in ray.data.read_parquet(str(folder)).take_all()]
    assert sorted(ids) == list(range(600))


def test_rows_are_those_of_an_engine_here_and_a_bad_row_fails_alone(model: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "prompt": f"row {n}"} for n in range(10)]
    rows[3]["prompt"] = "too long " * 1000
    fields: dict[str, Any] = {**SAMPLING, "seed": 5}
    made = generate(ray.data.from_items(rows), model=model, engine=ENGINE, **fields)
    found = {row["id"]: row for row in made.take_all()}
    assert found[3]["completion"] is None and "context" in found[3]["error"]
    with LLM(model, device="cpu", trust_model_file=True) as llm:
        for number in (0, 9):
            expected = llm.generate(f"row {number}", **fields)[0]
            assert found[number]["completion"] == expected.text


def test_another_jobs_folder_and_missing_columns_are_refused(model: Path, tmp_path: Path) -> None:
    generate(_rows(10), model=model, checkpoint=tmp_path, **SAMPLING)
    with pytest.raises(ConfigError, match="another model or other parameters"):
        generate(_rows(10), model=model, checkpoint=tmp_path, max_tokens=9)
    with pytest.raises(ConfigError, match="no column 'key'"):
        generate(_rows(10), model=model, id_column="key")
