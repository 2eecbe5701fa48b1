"""Each command for real on a tiny model: what it prints, and that its receipt holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.bench.models import TINY_KV
from tests.bench.sound_receipt import is_valid_to_jsonschema, make_receipt

from quire.cli import main
from quire.executors.cpu import has_native_module
from quire.llm.devices import ReferenceDevice
from quire.model.dummy import DummyModel
from quire.model.loading import load_model
from quire_bench.machine_info import machine
from quire_bench.receipts import Receipt, read, read_folder, section, write

Quire = Callable[..., Any]
REFERENCE = ("--device", "reference")  # what is expected below holds for any machine
SMALL = (
    *("--model", "dummy:tiny", "--kv-memory", TINY_KV, *REFERENCE),
    *("--repeats", "2", "--new-tokens", "3"),
)


@pytest.fixture
def receipts(tmp_path: Path) -> Path:
    return tmp_path / "receipts"


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str], receipts: Path) -> Quire:
    """Runs a benchmark that keeps its receipts in the test's folder; what it prints."""

    def run(*arguments: str, code: int = 0) -> Any:
        assert main(["bench", *arguments, "--receipts", str(receipts)]) == code
        out, error = capsys.readouterr()
        if code:
            return error
        return json.loads(out) if "--json" in arguments else out

    return run


@pytest.fixture
def limits(receipts: Path) -> None:
    """Limits of this machine, made up, so that no grid measures them first."""
    rates = ("memory_read_bytes", "float32_operations", "integer_operations")
    results = {f"{rate}_per_second": {"best": 1e12} for rate in rates}
    write(make_receipt(kind="limits", machine=machine(), results=results), receipts)


def only_receipt(folder: Path, kind: str) -> Receipt:
    [path] = read_folder(folder, kind)
    assert is_valid_to_jsonschema(json.loads(path.read_text()))
    return read(path)


# ---- make-model


def test_a_made_model_is_the_dummy_model_to_both_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.gguf"
    assert main(["bench", "make-model", "--model", "dummy:tiny:Q4_K_M:5", "--out", str(out)]) == 0
    assert "dummy:tiny:Q4_K_M:5, 21 tensors" in capsys.readouterr().out
    made, reader = load_model("dummy:tiny:Q4_K_M:5"), gguf.GGUFReader(out)
    with load_model(out) as read_back:
        assert read_back.spec == made.spec
        assert read_back.tensors.keys() == made.tensors.keys()
        for found in reader.tensors:
            tensor = made.tensors[found.name]
            assert np.array_equal(read_back.tensors[found.name].data, tensor.data)
            assert np.array_equal(found.data.view(np.uint8).reshape(-1), tensor.data)
            assert found.tensor_type == tensor.format.ggml_type


def test_its_metadata_are_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    out = tmp_path / "tiny.gguf"
    assert main(["bench", "make-model", "--model", "dummy:tiny", "--out", str(out), "--json"]) == 0
    fields = gguf.GGUFReader(out).fields
    unsigned = gguf.GGUFValueType.UINT32
    for key in ("vocab_size", "context_length", "embedding_length", "block_count"):
        assert fields[f"llama.{key}"].types == [unsigned]
    assert fields["llama.vocab_size"].contents() == 512
    assert fields["llama.rope.freq_base"].types == [gguf.GGUFValueType.FLOAT32]
    assert fields["tokenizer.ggml.model"].contents() == "none"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


def test_file_types_are_those_of_the_reference_package() -> None:
    for name in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_1", "TQ2_0", "BF16", "IQ4_XS", "Q3_K_L"):
        stated = DummyModel(f"dummy:tiny:{name}").fields["general.file_type"]
        assert stated == getattr(gguf.LlamaFileType, f"MOSTLY_{name}")


# ---- limits


def test_limits_are_measured_and_kept(quire: Quire, receipts: Path) -> None:
    small = ("--buffer", "1MiB", "--seconds", "0.005", "--repeats", "2", "--matrix-size", "32")
    data = quire("limits", "--threads", "1,2", *small, "--json")
    kept = only_receipt(receipts, "limits")
    assert data["results"] == kept.results
    rates: Any = kept.results["memory_read_bytes_per_second"]
    assert rates["best"] == max(rates["1"], rates["2"]) > 0
    if "gpu" not in kept.results:
        assert str(kept.settings["gpu"]).startswith("not measured: ")
    assert kept.settings["integer_kernel"] in kept.executed["kernels"]
    assert kept.command[:3] == ["quire", "bench", "limits"]
    assert "--threads 1,2" in " ".join(kept.command)


def test_limits_for_people(quire: Quire) -> None:
    small = ("--buffer", "1MiB", "--seconds", "0.005", "--repeats", "1", "--matrix-size", "32")
    lines = quire("limits", "--threads", "1", *small).splitlines()
    assert lines[0].split() == ["threads", "1"]
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "memory read",
        "memory copy",
        "float32",
        "integer",
    ]
    assert lines[5].startswith("integer kernel: native")


# ---- throughput


def test_throughput_is_measured_and_kept(quire: Quire, receipts: Path) -> None:
    load = ("--quant", "Q8_0", "--requests", "3", "--prompt-tokens", "20", "--seed", "5")
    data = quire("throughput", *SMALL, *load, "--strict", "--json")
    kept = only_receipt(receipts, "throughput")
    assert data["samples"] == kept.samples
    assert (kept.model["name"], kept.model["quant"]) == ("dummy:tiny:Q8_0", "Q8_0")
    assert kept.asked["device"] == "reference"
    assert kept.executed["device"] == "reference"
    assert kept.executed["kernels"]
    assert kept.seed == 5
    lengths = {name: len(values) for name, values in kept.samples.items()}
    assert lengths["completion_tokens_per_second"] == lengths["prompt_tokens_per_second"] == 2
    assert lengths["time_to_first_token_s"] == 2 * 3
    assert lengths["inter_token_s"] == 2 * 3 * 2
    results: Any = kept.results
    assert results["memory"]["weights_bytes"] == 4 * (kept.model["parameters"] or 0)
    assert results["memory"]["kv_bytes"] == 16 << 20
    assert results["memory"]["peak_rss_bytes"] > results["memory"]["kv_bytes"]
    assert max(map(int, results["batch_histogram"])) == 3
    assert results["utilisation"] is None
    assert 0 < results["executor_busy_share"] <= 1
    spread = results["spread"]["run_s"]
    assert spread["low"] <= results["run_s"] <= spread["high"]


def test_the_command_of_a_receipt_runs_and_measures_the_same(
    quire: Quire, receipts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quire("throughput", *SMALL, "--requests", "2", "--prompt-tokens", "4")
    first = only_receipt(receipts, "throughput")
    assert main(list(first.command[1:])) == 0
    [again] = [r for r in read_folder(receipts).values() if r.created != first.created]
    assert (again.command, again.settings, again.model) == (
        first.command,
        first.settings,
        first.model,
    )


def test_utilisation_relates_to_the_limits_of_this_machine(quire: Quire, receipts: Path) -> None:
    small = ("--buffer", "1MiB", "--seconds", "0.005", "--repeats", "1", "--matrix-size", "32")
    quire("limits", "--threads", "1", *small)
    printed = quire("throughput", *SMALL, "--requests", "1", "--prompt-tokens", "4")
    kept = only_receipt(receipts, "throughput")
    [limits_path] = read_folder(receipts, "limits")
    assert kept.limits is not None and kept.limits["receipt"] == limits_path.name
    results: Any = kept.results
    best = kept.limits["memory_read_bytes_per_second"]
    achieved = results["achieved"]["decode_bytes_per_second"]
    assert results["utilisation"]["decode_memory_share"] == pytest.approx(achieved / best)
    assert "decode memory share" in printed


def test_a_file_is_measured_by_its_hash(quire: Quire, tmp_path: Path, receipts: Path) -> None:
    out = tmp_path / "made.gguf"
    assert main(["bench", "make-model", "--model", "dummy:tiny:Q6_K", "--out", str(out)]) == 0
    load = ("--repeats", "1", "--new-tokens", "1", "--requests", "1", "--prompt-tokens", "2")
    printed = quire("throughput", "--model", str(out), "--kv-memory", TINY_KV, *load)
    kept = only_receipt(receipts, "throughput")
    assert kept.model["name"] == "made.gguf"
    assert len(kept.model["sha256"] or "") == 64
    assert kept.model["quant"] == "Q6_K"
    assert kept.results["completion_tokens_per_second"] is None  # one token comes of the prompt
    assert "completion   nothing to measure" in printed


def test_a_run_on_another_path_is_told_and_fails_strict(
    quire: Quire, receipts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ReferenceDevice.make_executor

    def falls_back(*args: Any) -> Any:
        executor: Any = usual(*args)
        executor.fallback = "no kernel for Q8_0"
        return executor

    monkeypatch.setattr(ReferenceDevice, "make_executor", falls_back)
    load = ("--requests", "1", "--prompt-tokens", "2")
    error = quire("throughput", *SMALL, *load, "--strict", code=1)
    assert "not what was asked for: no kernel for Q8_0" in error
    assert only_receipt(receipts, "throughput").executed["fallback"] == "no kernel for Q8_0"
    quire("throughput", *SMALL, *load)  # without --strict it is told, and that is all


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--requests", "0"), "--requests must be at least 1, got 0"),
        (("--prompt-tokens", "0"), "--prompt-tokens must be at least 1"),
        (("--repeats", "-1"), "--repeats must be at least 1"),
        (("--prompt-tokens", "9999"), "the 2048 tokens of context"),
        (("--device", "cuda"), "device is 'cuda'"),
        (("--quant", "Q4_X"), "there is no mix 'Q4_X'"),
        (("--limits", "absent.json"), "cannot read absent.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    quire: Quire, receipts: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    usual = ("--requests", "1", "--prompt-tokens", "2")
    error = quire("throughput", *SMALL, *usual, *arguments, code=1)
    assert complaint in error and error.count("\n") == 1
    assert not receipts.exists()


@pytest.mark.skipif(not has_native_module(), reason="the native module is not built")
def test_the_cpu_executor_is_measured_by_default_and_names_its_kernels(
    quire: Quire, receipts: Path
) -> None:
    words = ("--model", "dummy:tiny:Q8_0", "--kv-memory", TINY_KV, "--repeats", "2")
    quire("throughput", *words, "--requests", "2", "--prompt-tokens", "4", "--new-tokens", "3")
    kept = only_receipt(receipts, "throughput")
    assert (kept.asked["device"], kept.executed["device"]) == ("auto", "cpu")
    assert all(name.startswith("cpu/") for name in kept.executed["kernels"])
    results: Any = kept.results
    assert 0 < results["memory"]["weights_bytes"] < 2 * kept.model["packed_bytes"]


# ---- latency


def test_latency_is_measured_alone_and_together(quire: Quire, receipts: Path) -> None:
    load = ("--requests", "3", "--prompt-tokens", "4", "--concurrency", "2")
    data = quire("latency", *SMALL, *load, "--json")
    kept = only_receipt(receipts, "latency")
    assert data["results"] == kept.results
    for name, concurrency in (("alone", 1), ("together", 2)):
        found: Any = kept.results[name]
        assert found["concurrency"] == concurrency
        assert len(kept.samples[f"{name}_time_to_first_token_s"]) == 2 * 3
        assert len(kept.samples[f"{name}_inter_token_s"]) == 2 * 3 * 2
        for ranks in (found["time_to_first_token_s"], found["inter_token_s"]):
            assert 0 < ranks["p50"] <= ranks["p95"] <= ranks["p99"]


def test_latency_for_people(quire: Quire) -> None:
    load = ("--requests", "2", "--prompt-tokens", "4", "--concurrency", "2")
    lines = quire("latency", *SMALL, *load).splitlines()
    assert len(lines) == 6
    assert lines[4].startswith("  first token, together (2 at a time)")
    assert "--concurrency must be at least 1" in quire(
        "latency", *SMALL, "--concurrency", "0", code=1
    )


# ---- grid

SMALL_GRID = ("--quants", "Q4_K_M,Q8_0", "--batches", "1,2", "--prompts", "1,20")


def test_a_grid_is_measured_and_goes_on_where_it_stopped(
    quire: Quire, receipts: Path, limits: None
) -> None:
    first = quire("grid", *SMALL, *SMALL_GRID, "--json")
    assert (first["measured"], first["resumed"]) == (8, 0)
    kept = read_folder(receipts, "grid-cell")
    assert len(kept) == 8
    assert all(is_valid_to_jsonschema(json.loads(path.read_text())) for path in kept)
    one, *_, last = kept
    for path in (one, last):
        path.unlink()
    again = quire("grid", *SMALL, *SMALL_GRID, "--json")
    assert (again["measured"], again["resumed"]) == (2, 6)
    assert len(read_folder(receipts, "grid-cell")) == 8
    cells = [(cell["quant"], cell["prompt_tokens"], cell["batch"]) for cell in again["cells"]]
    assert cells == [(q, p, b) for q in ("Q4_K_M", "Q8_0") for p in (1, 20) for b in (1, 2)]
    assert all(cell["scaling"] == 1.0 for cell in again["cells"] if cell["batch"] == 1)
    assert all(cell["scaling"] > 0 for cell in again["cells"])


def test_a_grid_runs_each_cell_at_its_batch_size(
    quire: Quire, receipts: Path, limits: None
) -> None:
    quire("grid", *SMALL, "--quants", "Q8_0", "--batches", "1,4", "--prompts", "4")
    for receipt in read_folder(receipts, "grid-cell").values():
        results: Any = receipt.results
        assert max(map(int, results["batch_histogram"])) == receipt.settings["batch"]


def test_an_interrupted_grid_keeps_what_it_has(
    quire: Quire, receipts: Path, limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire_bench import throughput

    real, calls = throughput.measure_throughput, iter(range(100))

    def interrupted(*args: Any, **more: Any) -> throughput.Figures:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    grid = ("grid", *SMALL, "--quants", "Q8_0", "--batches", "1,2", "--prompts", "1,4")
    monkeypatch.setattr("quire_bench.commands.grid.measure_throughput", interrupted)
    quire(*grid, code=130)
    assert len(read_folder(receipts, "grid-cell")) == 2
    resumed = quire(*grid, "--json")
    assert (resumed["measured"], resumed["resumed"]) == (2, 2)


def test_a_grid_that_is_done_prints_its_table_at_once(
    quire: Quire, limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("grid", *SMALL, "--quants", "Q8_0", "--batches", "1,2", "--prompts", "4")
    printed = quire(*grid)
    assert "dummy:tiny:Q8_0: completion tokens/s" in printed
    monkeypatch.setattr("quire_bench.subject.assemble", lambda *_: pytest.fail("loaded a model"))
    assert quire(*grid) == printed
    with pytest.raises(pytest.fail.Exception):
        quire(*grid, "--again")


def test_a_cell_that_the_cache_does_not_hold_is_refused(quire: Quire, limits: None) -> None:
    error = quire(
        *("grid", "--model", "dummy:tiny", "--kv-memory", "1MiB", "--quants", "Q8_0", *REFERENCE),
        *("--batches", "4", "--prompts", "512"),
        code=1,
    )
    assert "batch 4 of 512 prompt tokens needs 136 blocks of the KV cache, which holds 32" in error


def test_a_grid_measures_the_limits_that_it_does_not_find(quire: Quire, receipts: Path) -> None:
    cells = ("--quants", "Q8_0", "--batches", "1,2", "--prompts", "4")
    done = quire("grid", *SMALL, *cells, "--json")
    measured = only_receipt(receipts, "limits")
    memory: Any = measured.results["memory_read_bytes_per_second"]
    for cell in done["cells"]:
        share = cell["achieved"]["decode_bytes_per_second"] / memory["best"]
        assert cell["utilisation"]["decode_memory_share"] == pytest.approx(share)
    quire("grid", *SMALL, *cells, "--again")
    assert len(read_folder(receipts, "limits")) == 1, "the ones that are there are taken"


@pytest.mark.skipif(not has_native_module(), reason="the native module is not built")
def test_the_peak_of_a_cell_is_that_of_its_own_model(
    quire: Quire, limits: None, receipts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several mixes none is loaded by the process that loads another: what the allocator keeps
    of the larger would count against the smaller."""
    monkeypatch.setattr("quire_bench.commands.grid.open_subject", lambda *_: pytest.fail("here"))
    options = ("--model", "dummy:smollm2-135m", "--device", "cpu", "--kv-memory", "64MiB")
    size = ("--batches", "1", "--prompts", "1", "--new-tokens", "2", "--repeats", "1")
    quire("grid", *options, *size, "--quants", "F16,Q4_K_M")
    weights, peaks = (
        {
            str(receipt.model["quant"]): section(receipt.results, "memory")[f"{part}_bytes"]
            for receipt in read_folder(receipts, "grid-cell").values()
        }
        for part in ("weights", "peak_rss")
    )
    assert weights["F16"] > weights["Q4_K_M"] + (100 << 20)  # type: ignore[operator]
    assert peaks["F16"] > peaks["Q4_K_M"] + (50 << 20)  # type: ignore[operator]


def test_a_mix_that_cannot_be_measured_ends_the_grid(
    quire: Quire, limits: None, receipts: Path
) -> None:
    cells = ("--quants", "Q4_K_M,Q8_0", "--batches", "4", "--prompts", "512", *REFERENCE)
    error = quire("grid", "--model", "dummy:tiny", "--kv-memory", "1MiB", *cells, code=1)
    assert "measuring dummy:tiny:Q4_K_M ended with status 1" in error
    assert read_folder(receipts, "grid-cell") == {}


# ---- kv


def test_types_of_the_cache_are_compared_by_divergence_and_bytes(
    quire: Quire, receipts: Path
) -> None:
    few = ("--model", "dummy:tiny", "--kv-memory", TINY_KV, *REFERENCE)
    data = quire("kv", *few, "--texts", "2", "--tokens", "12", "--json")
    kept = only_receipt(receipts, "kv")
    assert data["results"] == kept.results
    assert kept.settings["types"] == ["f16", "fp8", "int8"]
    f16, int8, fp8 = (data["results"][f"{kind}_mean_kl"] for kind in ("f16", "int8", "fp8"))
    assert 0 <= f16 < int8 < fp8 < 0.1
    assert len(kept.samples["fp8_kl"]) == 2 * 12
    lines = quire("kv", *few, "--texts", "1", "--tokens", "4", "--kv-cache-dtype", "fp8")
    assert [line.split()[0] for line in lines.splitlines()[1:]] == ["type", "fp8"]
    assert "there must be a text of 2 tokens" in quire("kv", *few, "--tokens", "1", code=1)


@pytest.mark.skipif(not has_native_module(), reason="the native module is not built")
def test_a_cache_in_bytes_on_the_cpu_holds_nearly_twice_as_much(quire: Quire) -> None:
    few = ("--model", "dummy:tiny", "--kv-memory", TINY_KV, "--device", "cpu")
    found = quire("kv", *few, "--texts", "1", "--tokens", "8", "--json")["results"]
    assert found["own_kv_bytes_per_token"] / found["int8_kv_bytes_per_token"] > 1.88
    assert 0 < found["int8_mean_kl"] < 0.05


# ---- start


def test_start_says_how_long_each_phase_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "start", "--model", "dummy:tiny", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["phases"]) == ["reading the file", "loading weights"]
    assert 0 < sum(found["phases"].values()) <= found["total"]
    assert main(["bench", "start", "--model", "dummy:tiny", "--device", "cpu"]) == 0
    assert "loading weights" in capsys.readouterr().out
