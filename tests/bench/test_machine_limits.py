"""The limits: measured for real on small buffers, summarised, and found again as receipts."""

from pathlib import Path

import pytest
from tests.bench.sound_receipt import make_receipt

from quire.core.errors import ConfigError, ExecutorError
from quire_bench.machine_limits import RATES, LimitsPlan, measure_limits, summarise, usual_threads
from quire_bench.measure import Load, Run, StepTime
from quire_bench.receipts import Limits, Machine, ReceiptError, write
from quire_bench.utilisation import (
    Cost,
    achieved,
    arithmetic_share,
    find_limits,
    floor_share,
    limits_of,
    shares,
    utilisation_of,
)

RESULTS = {
    "memory_read_bytes_per_second": {"1": 5.0, "best": 10.0},
    "float32_operations_per_second": {"1": 100.0, "best": 200.0},
}
GPU_RESULTS = {"memory_read_bytes_per_second": 40.0, "float16_operations_per_second": 800.0}
MACHINE = make_receipt().machine
WITH_GPU: Machine = {**MACHINE, "gpu": "a GPU"}


def test_every_rate_is_measured_for_every_thread_count() -> None:
    plan = LimitsPlan((1, 2), 1 << 20, seconds=0.005, repeats=2, matrix_size=32)
    samples = measure_limits(plan)
    assert set(samples) == {f"{rate}.threads_{n}" for rate in RATES.values() for n in (1, 2)}
    assert all(len(values) == 2 and min(values) > 0 for values in samples.values())


def test_the_best_sample_is_the_limit() -> None:
    samples = {f"{rate}.threads_{n}": [1.0 * n, 3.0 * n] for rate in RATES.values() for n in (1, 4)}
    assert summarise(samples)["float32_operations_per_second"] == {
        "1": 3.0,
        "4": 12.0,
        "best": 12.0,
    }


def test_a_gpus_limits_are_its_own(tmp_path: Path) -> None:
    samples = {f"{rate}.threads_1": [1.0] for rate in RATES.values()}
    samples |= {
        "gpu.memory_read_bytes_per_second": [30.0, 40.0],
        "gpu.float16_operations_per_second": [700.0, 800.0],
    }
    write(make_receipt(kind="limits", results=summarise(samples), machine=WITH_GPU), tmp_path)
    limits = find_limits(None, tmp_path, WITH_GPU, "cuda")
    found = {"decode_bytes_per_second": 20.0, "decode_operations_per_second": 80.0}
    found |= {"prompt_operations_per_second": 400.0}
    assert shares(found, limits_of("cuda", limits) or {}) == {
        "decode_memory_share": 0.5,
        "decode_float16_share": 0.1,
        "prompt_float16_share": 0.5,
    }
    assert limits_of("cpu", limits) is limits
    without_gpu: Limits = {
        "receipt": "limits.json",
        "memory_read_bytes_per_second": 1.0,
        "float32_operations_per_second": 1.0,
    }
    assert limits_of("cuda", without_gpu) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"threads": (0,)}, "thread counts must be from 1"),
        ({"threads": ()}, "thread counts"),
        ({"buffer_bytes": 10}, "64 KiB"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"repeats": 0}, "repeats must be from 1"),
        ({"matrix_size": 0}, "matrix_size must be from 1"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(
    changes: dict[str, object], complaint: str
) -> None:
    usual = {"threads": (1,), "buffer_bytes": 1 << 20, "seconds": 0.1, "repeats": 1}
    with pytest.raises(ConfigError, match=complaint):
        LimitsPlan(**(usual | changes))  # type: ignore[arg-type]


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(ExecutorError, match="measuring the limits failed: status 1"):
        measure_limits(LimitsPlan((1,), 1 << 20, 0.01, 1))


def test_usual_threads_are_powers_of_two_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_bench.machine_limits.usable_threads", lambda: 6)
    assert usual_threads() == (1, 2, 4, 6)
    monkeypatch.setattr("quire_bench.machine_limits.usable_threads", lambda: 1)
    assert usual_threads() == (1,)


# ---- as receipts


def test_the_newest_limits_of_this_processor_are_found(tmp_path: Path) -> None:
    assert find_limits(None, tmp_path, MACHINE, "cpu") is None
    for created, best in (("2026-01-02T00:00:00Z", 7.0), ("2026-01-01T00:00:00Z", 1.0)):
        rates = RESULTS | {"memory_read_bytes_per_second": {"best": best}}
        write(make_receipt(kind="limits", created=created, results=rates), tmp_path)
    other = {**make_receipt().machine, "cpu": "another"}
    newest = make_receipt(
        kind="limits", created="2026-02-01T00:00:00Z", results=RESULTS, machine=other
    )
    write(newest, tmp_path)
    found = find_limits(None, tmp_path, MACHINE, "cpu")
    assert found is not None
    assert found["memory_read_bytes_per_second"] == 7.0
    assert found["float32_operations_per_second"] == 200.0
    assert found["receipt"].startswith("limits-")


def test_limits_given_are_taken_whatever_the_processor(tmp_path: Path) -> None:
    path = write(make_receipt(kind="limits", results=RESULTS), tmp_path)
    another: Machine = {**MACHINE, "cpu": "another", "cores": 64}
    found = find_limits(str(path), tmp_path, another, "cpu")
    assert found is not None and found["memory_read_bytes_per_second"] == 10.0
    with pytest.raises(ReceiptError, match="has no GPU's limits: run `quire bench limits` where"):
        find_limits(str(path), tmp_path, WITH_GPU, "cuda")


@pytest.mark.parametrize(
    ("limits_of_machine", "executor"),
    [
        ({**MACHINE, "cores": 64}, "cpu"),
        (MACHINE, "cuda"),  # measured without a GPU
        (WITH_GPU | {"gpu": "another"}, "cuda"),
    ],
)
def test_limits_of_another_machine_are_not_taken(
    tmp_path: Path, limits_of_machine: Machine, executor: str
) -> None:
    results = RESULTS | ({"gpu": GPU_RESULTS} if limits_of_machine["gpu"] else {})
    write(make_receipt(kind="limits", results=results, machine=limits_of_machine), tmp_path)
    own = WITH_GPU if executor == "cuda" else MACHINE
    assert find_limits(None, tmp_path, own, executor) is None


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("grid-cell", "of grid-cell, not of limits"), ("limits", "results.memory_read.*is missing")],
)
def test_a_receipt_without_limits_is_refused(tmp_path: Path, kind: str, complaint: str) -> None:
    path = write(make_receipt(kind=kind), tmp_path)
    with pytest.raises(ReceiptError, match=complaint):
        find_limits(str(path), tmp_path, MACHINE, "cpu")


# ---- utilisation


ACHIEVED = {"decode_bytes_per_second": 5.0, "decode_operations_per_second": 160.0}
ACHIEVED |= {"prompt_operations_per_second": 100.0}


def test_a_receipt_without_utilisation_relates_to_the_newest_limits_of_its_machine() -> None:
    measured = make_receipt(kind="grid-cell", results={"achieved": ACHIEVED, "utilisation": None})
    assert utilisation_of(measured, [measured]) == {}
    older, newer = (
        make_receipt(
            kind="limits",
            created=f"2026-01-0{day}T00:00:00Z",
            results=RESULTS | {"memory_read_bytes_per_second": {"best": best}},
        )
        for day, best in ((1, 5.0), (2, 10.0))
    )
    elsewhere = make_receipt(
        kind="limits",
        created="2026-02-01T00:00:00Z",
        results=RESULTS,
        machine={**MACHINE, "cpu": "another"},
    )
    found = utilisation_of(measured, [newer, measured, older, elsewhere])
    assert found == {
        "decode_memory_share": 0.5,
        "decode_float32_share": 0.8,
        "prompt_float32_share": 0.5,
    }
    assert floor_share(found) == 0.8
    own = make_receipt(results={"achieved": ACHIEVED, "utilisation": {"decode_memory_share": 0.9}})
    assert utilisation_of(own, [newer]) == {"decode_memory_share": 0.9}


def test_arithmetic_is_that_which_the_products_compute_with() -> None:
    on_cpu = {"decode_float32_share": 0.9, "decode_integer_share": 0.2, "decode_memory_share": 0.1}
    assert arithmetic_share(on_cpu, "decode") == floor_share(on_cpu) == 0.2
    assert arithmetic_share({"prompt_float16_share": 0.7}, "prompt") == 0.7
    assert arithmetic_share({}, "prompt") is None
    assert floor_share({}) is None


def test_what_was_achieved_counts_what_must_be_read_and_computed() -> None:
    cost = Cost(
        weight_bytes=1000, kv_bytes=10, layer_weights=100, head_weights=20, attention_size=3
    )
    steps = [StepTime(2.0, 2, 8, 0), StepTime(1.0, 2, 0, 2), StepTime(1.0, 2, 0, 2)]
    found = achieved(cost, Run(Load(2, 4, 4), seconds=4.0, steps=steps))
    context = 4 + 4 / 2
    assert found == {
        "decode_bytes_per_second": (2 * 1000 + 4 * context * 10) / 2.0,
        "decode_operations_per_second": 4 * (2 * 120 + 4 * context * 3) / 2.0,
        "prompt_operations_per_second": (8 * (2 * 100 + 2 * 4 * 3) + 2 * 2 * 20) / 2.0,
    }
    limits = {"memory_read_bytes_per_second": 2240.0, "float32_operations_per_second": 624.0}
    assert shares(found, limits) == {
        "decode_memory_share": pytest.approx(0.5),
        "decode_float32_share": pytest.approx(1.0),
        "prompt_float32_share": pytest.approx((8 * 224 + 80) / 2 / 624),
    }
    with_integers = shares(found, {**limits, "integer_operations_per_second": 2496.0})
    assert with_integers["decode_integer_share"] == pytest.approx(0.25)
    assert with_integers["prompt_integer_share"] == pytest.approx((8 * 224 + 80) / 2 / 2496)


def test_nothing_achieved_has_no_share() -> None:
    cost = Cost(1000, 10, 100, 20, 3)
    found = achieved(cost, Run(Load(1, 4, 1), seconds=1.0, steps=[StepTime(1.0, 1, 4, 0)]))
    limits = {"memory_read_bytes_per_second": 1.0, "float32_operations_per_second": 1.0}
    assert shares(found, limits)["decode_memory_share"] is None
