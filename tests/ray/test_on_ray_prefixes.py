"""Routing by prefix beside routing by load and by chance, on a cluster."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import application
from tests.ray.loads import NAME


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_prefixes_are_found_more_often_than_by_chance_or_load_alone(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {routing: _hit_rate(model, routing) for routing in ("random", "load", "prefix")}
    factors = {other: rates["prefix"] / max(rates[other], 1e-9) for other in ("random", "load")}
    with capsys.disabled():
        shown = ", ".join(f"{routing} {rate:.0%}" for routing, rate in rates.items())
        times = ", ".join(f"{factor:.2f} times {other}" for other, factor in factors.items())
        print(f"\nprompt tokens found in a prefix cache: {shown}; prefix is {times}")
    assert all(factor > 1.2 for factor in factors.values())


def _hit_rate(model: Path, routing: str) -> float:
    """Of conversations whose prompts begin alike, eight turns each."""
    options = ("--served-model-name", NAME, "--routing", routing, "--max-batch-size", "8")
    with application(model, *options, num_workers=4) as served:
        client = served.client()

        def converse(number: int) -> None:
            text = f"conversation {number}: " + 6 * f"{number} is the number. "
            for _ in range(6):
                made = client.completions.create(
                    model=NAME, prompt=text, max_tokens=8, temperature=0
                )
                text += made.choices[0].text + " go on. "

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(converse, range(32)))
        hits = served.metric("quire:prefix_cache_hits")
        return hits / served.metric("quire:prefix_cache_queries")
