"""Tokens and log-probabilities are to the last bit what they were when their digests were kept."""

import pytest
from tests.bits.runs import DEFAULT_MODEL, MODELS, digests, kept


@pytest.mark.parametrize("model", MODELS["cpu"])
def test_the_bits_are_those_that_were_kept(model: str, request: pytest.FixtureRequest) -> None:
    if model == DEFAULT_MODEL:
        request.getfixturevalue("smollm2_path")  # which skips where it cannot be had
    assert digests("cpu", model) == kept("cpu")[model]
