"""Some episodes of the steps' fuzzer, always the same; `python -m tests.fuzz.fuzz_steps` runs more.

What the fuzzer finds becomes a test beside its executor's, and its seed one of those here.
"""

import pytest
from tests.fuzz.steps import Episode, Tally

# By seed. Those that found something once are named with what it was.
SEEDS = range(1000, 1016)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_random_models_and_mutated_plans_end_as_they_should(seed: int) -> None:
    Episode(seed, Tally()).run(num_mutations=40)


def test_the_episodes_reach_what_they_are_meant_to() -> None:
    tally = Tally()
    for seed in range(1000, 1030):
        Episode(seed, tally).run(num_mutations=8)
    for outcome in (
        "a config that was refused",
        "a model that keeps states",
        "logits held against the reference's",
        "samples held against the reference's",
        "a fault of one row",
        "a row that ran",
        "a step that was refused",
    ):
        assert tally.outcomes[outcome] > 0, tally.outcomes
