"""`quire bench scale`: the page says what it prints, and the parts of the simulation hold."""

import re
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.executors.fake import StepCost
from quire_bench.commands import scale as command
from quire_bench.commands.scale import MODEL, RATE, SIZES, Run, runs_of
from quire_bench.scale import (
    Deaths,
    Fit,
    Outcome,
    Traffic,
    fit_step_cost,
    receipts_of,
    simulate_cluster,
)
from quire_bench.shared_costs import SharedCosts, StoreRate, job_store_rate, router_seconds

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
COST = StepCost(1e-2, 2e-5, 0.0)
TRAFFIC = Traffic(40.0, seconds=2.0, num_prefixes=40, prefix_tokens=64, own_tokens=(8, 16),
                  new_tokens=(4, 8))  # fmt: skip


def fitted() -> Fit:
    receipts = receipts_of(ROOT / "receipts" / "h200", MODEL)
    return fit_step_cost(receipts, EngineConfig().max_step_tokens)


def run(*, by_prefix: bool = True, deaths: Deaths | None = None) -> Outcome:
    return simulate_cluster(
        COST,
        EngineConfig(max_batch_size=16),
        TRAFFIC,
        num_replicas=4,
        num_blocks=512,
        by_prefix=by_prefix,
        deaths=deaths,
    )


# ---- the page


def test_the_page_has_the_step_times_of_the_receipts() -> None:
    assert command.fit_text(fitted()).strip() in PAGE


def test_the_page_has_the_rows_of_ten_replicas_as_they_are_simulated() -> None:
    found = command.simulate_all(fitted(), RATE, runs_of([10]))
    for table in (command.cluster_table(found), command.deaths_table(found)):
        for line in table.strip().splitlines():
            assert line in PAGE


@pytest.mark.long
def test_the_page_has_the_tables_that_are_simulated() -> None:
    found = command.simulate_all(fitted(), RATE, runs_of(SIZES))
    assert command.cluster_table(found).strip() in PAGE
    assert command.deaths_table(found).strip() in PAGE


def test_the_page_has_all_that_is_measured_in_the_form_that_is_printed() -> None:
    """The figures are a machine's own; words, columns and sizes are the command's."""
    found = {Run(size, True): run() for size in SIZES}
    router = dict.fromkeys(SIZES, 1e-5)
    store, costs = StoreRate(1.0, 1.0), SharedCosts(1e-6, 1e-6, 1e-6, 1.0)
    for text in (
        command.router_table(router),
        command.store_text(store),
        command.costs_text(costs),
        command.shared_table(found, SIZES, router, store, costs),
    ):
        assert _form(text.strip()) in _form(PAGE)


def test_the_last_table_of_the_page_follows_from_the_others() -> None:
    costs = (
        r"takes (\d+) µs of the ingress, (\d+) µs .* (\d+) bytes to the client; .* (\d+) µs of it"
    )
    [ingress_us, proxy_us, frame, direct_us] = _numbers(costs)
    for size in SIZES:
        [tokens] = _numbers(rf"\| {size:,} \| prefix \| [\d,]+ \| ([\d,]+) \|")
        row = (
            rf"\| {size:,} \| ([\d,]+) \| [\d,]+ \| [\d.,]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| "
            r"([\d.,]+) G"
        )
        [again, ingress, proxy, direct, gigabits] = _numbers(row)
        assert again == tokens
        assert ingress == pytest.approx(tokens * ingress_us * 1e-6, rel=0.02, abs=1)
        assert proxy == pytest.approx(tokens * proxy_us * 1e-6, rel=0.02, abs=1)
        assert direct == pytest.approx(tokens * direct_us * 1e-6, rel=0.02, abs=1)
        assert gigabits == pytest.approx(tokens * frame * 8e-9, rel=0.02, abs=0.01)


def _form(text: str) -> str:
    return re.sub(r"[\d.,]*\d", "#", text)


def _numbers(pattern: str) -> list[float]:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return [float(group.replace(",", "")) for group in found.groups()]


# ---- its parts


def test_routing_by_prefix_finds_more_in_caches_than_routing_by_load() -> None:
    by_load, by_prefix = (run(by_prefix=by_prefix) for by_prefix in (False, True))
    assert by_load.num_replicas == 4 and by_load.tokens_per_second > 0
    assert by_prefix.hit_rate > 1.2 * by_load.hit_rate


def test_requests_of_a_replica_that_dies_go_on_elsewhere_and_all_are_finished() -> None:
    whole, hurt = run(), run(deaths=Deaths(2, 1.0, noticed_after_s=0.25))
    assert hurt.num_moved > 0 and hurt.num_recomputed > 64 * hurt.num_moved
    assert hurt.longest_pause_s >= 0.25
    assert hurt.num_unfinished_moves == 0
    assert hurt.num_requests == whole.num_requests
    assert hurt.tokens_per_second == pytest.approx(
        whole.tokens_per_second, rel=0.1
    )  # the others have room
    assert whole.num_moved == 0


def test_a_simulation_is_the_same_again() -> None:
    assert run(deaths=Deaths(1, 1.0)) == run(deaths=Deaths(1, 1.0))


def test_what_is_measured_here_is_measured(tmp_path: Path) -> None:
    assert router_seconds(100, 50) > 0
    rate = job_store_rate(tmp_path, 200)
    assert rate.one_by_one > 0 and rate.together > 0
