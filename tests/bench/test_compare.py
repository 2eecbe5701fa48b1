"""`quire bench compare`: rounds in turn, ratios round by round, and the command for real."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.bench.fake_packages import fake_packages, package_that_is_missing
from tests.bench.models import TINY_KV
from tests.bench.openai_like_server import Behaviour, serving
from tests.bench.sound_receipt import is_valid_to_jsonschema

from quire.cli import main
from quire.core.errors import ConfigError
from quire.llm.devices import Options
from quire.model.loading import load_model
from quire_bench import compare as compare_module
from quire_bench.compare import QUIRE, Comparison, Findings, compare, model_file, table
from quire_bench.measure import Load, random_prompts
from quire_bench.receipts import Receipt, RivalFacts, read_folder, section
from quire_bench.rivals import RivalFailedError, Timing
from quire_bench.subject import Subject, open_subject

OUTPUT = "output_tokens_per_second"
SMALL = ["--model", "dummy:tiny", "--kv-memory", TINY_KV, "--prompt-tokens", "6"]
SMALL += ["--device", "reference", "--new-tokens", "3", "--repeats", "2", "--batch", "1,3"]


@pytest.fixture
def subject() -> Iterator[Subject]:
    opened = open_subject(
        "dummy:tiny", None, Options(max_batch_size=4, kv_memory=TINY_KV, device="reference")
    )
    yield opened
    opened.close()


class Scripted:
    """A rival that takes a second for a batch, and notes what it was asked."""

    facts: RivalFacts = {"version": "1", "about": "scripted"}  # noqa: RUF012

    def __init__(self, name: str, calls: list[Any], fails_at: int | None = None) -> None:
        self.name = name
        self.prompts: list[Sequence[Sequence[int]]] = []
        self._calls = calls
        self._fails_at = fails_at

    def measure(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        if len(self.prompts) == self._fails_at:
            raise RivalFailedError(f"{self.name} fell over")
        self.prompts.append(prompts)
        self._calls.append((self.name, len(prompts)))
        return Timing(1.0, sum(map(len, prompts)), new_tokens * len(prompts))

    def close(self) -> None: ...


WANTED = Comparison(batches=(1, 2), prompt_tokens=4, new_tokens=2, repeats=3, seed=7)


def test_engines_take_turns_after_a_run_that_is_not_counted(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def measured(assembly: Any, load: Load, seed: int) -> dict[str, float]:
        calls.append((QUIRE, load.num_requests))
        return {OUTPUT: 4.0}

    monkeypatch.setattr(compare_module, "_measure_quire", measured)
    findings = compare(subject, [Scripted("a", calls), Scripted("b", calls)], WANTED)
    expected = []
    for batch in (1, 2):
        expected += [("a", batch), ("b", batch)]
        expected += [(QUIRE, batch), ("a", batch), ("b", batch)] * 3
    assert calls == expected
    assert [len(rounds) for rounds in findings.rounds.values()] == [3, 3]


def test_rivals_get_the_prompts_that_quire_reads(subject: Subject) -> None:
    rival = Scripted("a", [])
    findings = compare(subject, [rival], WANTED)
    vocabulary = subject.assembly.spec.vocabulary_size
    assert rival.prompts[1:4] == [random_prompts(WANTED.load(1), vocabulary, s) for s in (8, 9, 10)]
    for found in findings.rounds[2]:
        assert found["a"] == {OUTPUT: 4.0}
        assert found[QUIRE].keys() == set(compare_module.METRICS)


def test_a_rival_that_fails_is_left_out_with_its_reason(subject: Subject) -> None:
    findings = compare(subject, [Scripted("a", [], fails_at=2), Scripted("b", [])], WANTED)
    assert findings.failures == {"a": "a fell over"}
    for rounds in findings.rounds.values():
        assert [found.keys() for found in rounds] == [{QUIRE, "b"}] * 3


def test_ratios_are_those_of_each_round() -> None:
    rounds: Any = [
        {QUIRE: {OUTPUT: quire}, "a": {OUTPUT: rival}}
        for quire, rival in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0))
    ]
    figures = Findings({4: rounds}).figures()
    assert figures.samples == {
        f"batch_4_quire_{OUTPUT}": [10.0, 30.0, 8.0],
        f"batch_4_a_{OUTPUT}": [5.0, 10.0, 8.0],
        f"batch_4_a_{OUTPUT}_ratio": [2.0, 3.0, 1.0],
    }
    assert figures.results[f"quire_by_a_batch_4_{OUTPUT}"] == 2.0
    last = ["4", "a", "output", "8.0", "2.00", "(1.00", "to", "3.00)"]
    told = section(figures.results, "batch_4", "a", OUTPUT)
    assert told["quire_by_rival"] == {"low": 1.0, "median": 2.0, "high": 3.0, "relative": 1.0}
    assert table(figures.results)[-1].split() == last


def test_a_dummy_model_is_a_file_for_as_long_as_rivals_need_it() -> None:
    with model_file("dummy:tiny:Q8_0") as path, load_model(path) as written:
        assert written.spec == load_model("dummy:tiny:Q8_0").spec
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batches": (1, 0)}, "--batch must be sizes of at least 1"),
        ({"batches": ()}, "--batch must be sizes of at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"prompt_tokens": 2047}, "more than the 2048 tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], told: str) -> None:
    usual: dict[str, Any] = {"batches": (1,), "prompt_tokens": 4, "new_tokens": 2, "repeats": 1}
    with pytest.raises(ConfigError, match=told):
        Comparison(**(usual | change)).check(2048)


# ---- the command


def bench(folder: Path, *more: str) -> int:
    return main(["bench", "compare", *SMALL, "--receipts", str(folder / "receipts"), *more])


def only_receipt(folder: Path) -> Receipt:
    [(path, receipt)] = read_folder(folder / "receipts", "compare").items()
    assert is_valid_to_jsonschema(json.loads(path.read_text()))
    return receipt


def test_packages_are_compared_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_packages(tmp_path, monkeypatch)
    assert bench(tmp_path, "--strict", "--quant", "Q8_0", "--rival-threads", "3") == 0
    printed, _ = capsys.readouterr()
    assert printed.startswith("dummy:tiny:Q8_0; quire on reference\n")
    assert len(printed.splitlines()) == 2 + 2 * 4 * 3  # batches, engines, rates
    receipt = only_receipt(tmp_path)
    assert receipt.versions["llama.cpp"] == receipt.versions["transformers"] == "9.9"
    assert receipt.executed["rivals"]["transformers"]["about"].endswith("3 threads")
    assert "3 threads; CPU : FAKE = 1" in receipt.executed["rivals"]["llama.cpp"]["about"]
    assert receipt.settings["batches"] == [1, 3]
    for rival in ("llama.cpp", "openvino", "transformers"):
        for metric in compare_module.METRICS:
            quire, rates, ratios = (
                receipt.samples[f"batch_3_{name}"]
                for name in (f"quire_{metric}", f"{rival}_{metric}", f"{rival}_{metric}_ratio")
            )
            assert ratios == [mine / other for mine, other in zip(quire, rates, strict=True)]
            cell: Any = receipt.results["batch_3"]
            assert cell[rival][metric]["quire_by_rival"]["median"] == median(ratios)


@pytest.mark.parametrize("strict", [False, True])
def test_missing_rivals_are_named_and_the_others_go_on(
    strict: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package_that_is_missing("llama_cpp", tmp_path, monkeypatch)
    with serving(Behaviour()) as server:
        rivals = ["--rivals", f"llama.cpp,{server.url}", "--json"]
        assert bench(tmp_path, *rivals, *["--strict"] * strict) == int(strict)
    printed, complaints = capsys.readouterr()
    assert "not what was asked for: llama.cpp was not measured" in complaints
    assert "pip install llama-cpp-python" in complaints
    receipt = only_receipt(tmp_path)
    assert json.loads(printed)["results"] == receipt.results
    assert list(receipt.executed["rivals"]) == [server.url]
    cell: Any = receipt.results["batch_1"]
    assert list(cell) == [QUIRE, server.url]
    assert list(cell[server.url]) == [OUTPUT]


def test_a_receipt_does_not_tell_where_an_interpreter_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path, monkeypatch)
    own = tmp_path / "python"
    own.symlink_to(sys.executable)
    more = ["--rivals", "llama.cpp", "--python-for", f"llama.cpp={own}", "--strict"]
    assert bench(tmp_path, *more) == 0
    assert str(own) not in json.dumps(dict(only_receipt(tmp_path).executed))
    assert "--python-for" not in only_receipt(tmp_path).command


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--rivals", "vllm"], "--rivals has 'vllm': there are llama.cpp, openvino, transformers"),
        (["--python-for", "llama.cpp"], "--python-for is 'llama.cpp': expected NAME=PATH"),
        (["--python-for", "x=y"], "--python-for is 'x=y': expected NAME=PATH"),
        (
            ["--rivals", "transformers", "--python-for", "llama.cpp=python3"],
            "--python-for llama.cpp has no effect",
        ),
        (["--rivals", "transformers", "--no-repack"], "--no-repack has no effect"),
        (["--rivals", "http://127.0.0.1:1", "--rival-threads", "2"], "--rival-threads has no"),
        (["--rival-threads", "0"], "--rival-threads must be at least 1, got 0"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--rivals", "http://a:b"], "URL 'http://a:b'"),
        (["--batch", "0"], "--batch must be sizes of at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, *more) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "receipts").exists()
