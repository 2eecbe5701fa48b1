"""`quire bench scale`: the page says what it prints, and the parts of the simulation hold."""

from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.executors.fake import StepCost
from quire_bench.commands.scale import MODEL, cluster_table, fit_text, shared_table, simulated
from quire_bench.scale import (
    Fit,
    SharedCosts,
    Traffic,
    fit_step_cost,
    receipts_of,
    simulate_cluster,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()


def fitted() -> Fit:
    receipts = receipts_of(ROOT / "receipts" / "h200", MODEL)
    return fit_step_cost(receipts, EngineConfig().max_step_tokens)


def test_the_page_has_the_step_times_of_the_receipts() -> None:
    assert fit_text(fitted()).strip() in PAGE


@pytest.mark.long
def test_the_page_has_the_tables_that_are_simulated() -> None:
    runs = ((1, False), (10, False), (10, True))
    found = {(count, prefix): simulated(fitted(), 50.0, count, prefix) for count, prefix in runs}
    assert cluster_table(found).strip() in PAGE
    costs = SharedCosts(319e-6, 150e-6, 121)
    assert shared_table(found[10, True], costs).strip() in PAGE


def test_routing_by_prefix_finds_more_in_caches_than_routing_by_load() -> None:
    traffic = Traffic(10.0, seconds=2.0, num_prefixes=40, prefix_tokens=64, own_tokens=(8, 16),
                      new_tokens=(4, 8))  # fmt: skip
    rates = []
    for by_prefix in (False, True):
        found = simulate_cluster(
            StepCost(2e-3, 2e-5, 0.0), EngineConfig(max_batch_size=16), traffic,
            num_replicas=4, num_blocks=512, by_prefix=by_prefix,
        )  # fmt: skip
        assert found.num_replicas == 4 and found.tokens_per_second > 0
        rates.append(found.hit_rate)
    assert rates[1] > 1.2 * rates[0]
