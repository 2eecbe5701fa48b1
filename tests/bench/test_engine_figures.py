"""The engine's promises about fairness and pacing, held in virtual time on each machine simulated.

`quire bench engine` prints the same figures over a wider search for the best static setting.
"""

from dataclasses import replace

import pytest

from quire_bench.engine import MACHINES, Machine, fairness, pacing

machines = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: str(machine.name))


@machines
def test_a_flooding_key_hardly_delays_the_others(machine: Machine) -> None:
    result = fairness(machine)
    assert result.ratio <= 1.5
    assert result.jain_index >= 0.95


def test_without_fairness_it_delays_them_a_lot() -> None:
    """The measure itself: what fairness prevents shows when it is off."""
    assert fairness(MACHINES[0], is_fair=False).ratio > 5


@machines
@pytest.mark.parametrize("load", [0.2, 0.6, 1.0])
def test_pacing_keeps_the_target_at_the_throughput_of_the_best_static_setting(
    machine: Machine, load: float
) -> None:
    near_best = replace(  # the neighbourhood of the best of the wide search, to save time
        machine,
        static_batches=machine.static_batches[2:3],
        static_tokens=machine.static_tokens[1:3],
    )
    (row,) = pacing(near_best, (load,)).loads
    assert row.p95_itl_ms <= 1.1 * machine.slo_itl_ms
    assert row.static_p95_itl_ms <= 1.1 * machine.slo_itl_ms
    assert row.tokens_per_second >= 0.9 * row.static_tokens_per_second
