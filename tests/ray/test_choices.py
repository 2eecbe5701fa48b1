"""What needs no cluster: which replica gets a request, and how many there are."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.ray.prefixes import PrefixTable, Replicas, choose, prefix_hashes
from quire.ray.scaling import ScalingPolicy


def test_prompts_share_the_hashes_of_their_common_beginning() -> None:
    one, other = list(range(200)), [*range(100), *range(500, 600)]
    assert len(prefix_hashes("", one)) == 8  # 16, 24, 32, 48, 64, 96, 128, 192
    common = set(prefix_hashes("", one)) & set(prefix_hashes("", other))
    assert len(common) == 6  # up to 96
    assert prefix_hashes("", one[:15]) == []
    assert not set(prefix_hashes("a", one)) & set(prefix_hashes("b", one))


def chosen(
    prefix: Sequence[int], loads: dict[str, int], table: PrefixTable, max_lead: int = 3
) -> list[str]:
    return choose(prefix, Replicas(list(loads)), loads.__getitem__, table, max_lead)


def test_the_replica_with_the_longest_prefix_is_chosen_until_it_has_too_many_requests() -> None:
    table = PrefixTable()
    short, long = prefix_hashes("", range(20)), prefix_hashes("", range(100))
    table.add(short, "a")
    table.add(long, "b")
    assert chosen(long, {"a": 0, "b": 3, "c": 0}, table)[0] == "b"
    assert chosen(long, {"a": 1, "b": 4, "c": 0}, table)[0] == "c"
    assert chosen(short, {"a": 2, "b": 1, "c": 0}, table)[0] == "b"  # both have it
    assert sorted(chosen(long, {"a": 0, "b": 3, "c": 0}, table)) == ["a", "b", "c"]


def test_prefixes_of_a_replica_that_died_are_looked_for_elsewhere() -> None:
    table = PrefixTable()
    table.add(prefix_hashes("", range(100)), "b")
    table.add(prefix_hashes("", range(20)), "a")
    assert chosen(prefix_hashes("", range(100)), {"a": 1, "c": 0}, table)[0] == "a"


def test_of_many_replicas_few_are_looked_at_and_a_holder_is_found_all_the_same() -> None:
    names = [f"replica {number}" for number in range(1000)]
    looked_at: set[str] = set()

    def load_of(name: str) -> int:
        looked_at.add(name)
        return 2

    table, prefix = PrefixTable(), prefix_hashes("", range(100))
    for name in names[:50]:
        table.add(prefix, name)
    ranked = choose(prefix, Replicas(names), load_of, table, 3)
    assert ranked[0] in names[34:50]  # of those that got it last
    assert len(looked_at) <= 32
    spread = {choose((), Replicas(names), lambda _: 0, table, 3)[0] for _ in range(200)}
    assert len(spread) > 100


def test_the_oldest_prefixes_are_forgotten() -> None:
    table = PrefixTable(max_prefixes=2)
    for start in range(3):
        table.add([start], f"replica {start}")
    alive = {"replica 0", "replica 1", "replica 2"}
    assert [table.holders([start], alive) for start in range(3)] == [
        [],
        ["replica 1"],
        ["replica 2"],
    ]


def _context(**figures: Any) -> Any:
    own = {"total_num_requests": 0.0, "total_queued_requests": 0.0, "policy_state": {}}
    return SimpleNamespace(**{**own, "aggregated_metrics": None, **figures})


@pytest.mark.parametrize(
    ("figures", "replicas"),
    [
        ({"running": {"a": 10.0, "b": 6.0}, "waiting": {"a": 0.0}, "kv_usage": {"a": 0.1}}, 2),
        ({"running": {"a": 10.0, "b": 6.0}, "waiting": {"a": 9.0}, "kv_usage": {"a": 0.1}}, 4),
        ({"running": {"a": 1.0, "b": 1.0}, "waiting": {}, "kv_usage": {"a": 0.9, "b": 0.9}}, 3),
        ({"running": {"a": 0.0}, "waiting": {"a": 0.0}, "kv_usage": {"a": 0.0}}, 0),
    ],
)
def test_replicas_follow_slots_or_the_kv_cache_whichever_needs_more(
    figures: dict[str, dict[str, float]], replicas: int
) -> None:
    policy = ScalingPolicy(max_batch_size=10, target_load=0.8, target_kv_usage=0.8)
    assert policy(_context(aggregated_metrics=figures))[0] == replicas


def test_requests_that_wait_for_a_replica_count() -> None:
    policy = ScalingPolicy(max_batch_size=10, target_load=0.8)
    figures = {"running": {"a": 8.0}, "waiting": {}, "kv_usage": {}}
    assert policy(_context(aggregated_metrics=figures, total_queued_requests=9.0))[0] == 3
    assert policy(_context(total_num_requests=17.0))[0] == 3
