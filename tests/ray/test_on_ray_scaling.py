"""Replicas come with the load and go without it, and are redeployed under it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import Application, application, wait_until
from tests.ray.loads import NAME, NUM_CLIENTS, Asked, Load, texts_here

from quire import LLM

NUM_LONG = 20_000  # tokens
LONG: dict[str, Any] = {"max_tokens": NUM_LONG, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Asked, str]:
    return texts_here(model)


def test_replicas_follow_the_load_up_and_down_and_no_request_fails(
    model: Path, expected: dict[Asked, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scaled = ("--min-replicas", "1", "--max-replicas", "3", "--cpus", "0.3")
    delays = ("--upscale-delay", "1", "--downscale-delay", "6", "--max-batch-size", "2")
    drain = ("--drain-timeout", "0.2")  # longer requests go on in other replicas
    with application(
        model, "--served-model-name", NAME, *scaled, *delays, *drain, num_workers=1
    ) as served:
        seen = [served.num_replicas(NAME)]
        with Load(served, expected) as load:  # 12 clients, and 2 slots a replica
            wait_until(lambda: served.num_replicas(NAME) == 3, "it was not scaled up to 3")
            load.wait_for(NUM_CLIENTS)
            seen.append(served.num_replicas(NAME))
            load.set_num_active(1)  # goes on while replicas leave
            wait_until(lambda: served.num_replicas(NAME) == 1, "it was not scaled down to 1")
            load.wait_for(3)
        seen.append(served.num_replicas(NAME))
        moved = served.metric("quire:worker_restarts_total")
    with capsys.disabled():
        answers = f"{load.num_answers} answers, {len(load.wrong)} wrong"
        print(f"\nreplicas: {seen}; {moved:g} requests moved; {answers}")
    assert load.wrong == []
    assert seen == [1, 3, 1]


def test_streams_of_replicas_that_are_taken_away_go_on_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight streams make three replicas of one; three more run on the new replicas. When the eight
    are gone, one replica suffices: two are taken away, whose streams outlast the drain timeout."""
    model = write_text_model(tmp_path / "tiny.gguf", max_context=NUM_LONG + 100)
    scaled = ("--min-replicas", "1", "--max-replicas", "3", "--cpus", "0.3", "--routing", "load")
    delays = ("--upscale-delay", "1", "--downscale-delay", "2", "--drain-timeout", "0.2")
    engine = ("--max-batch-size", "4", "--kv-memory", "128MiB")
    given = ("--served-model-name", NAME, *scaled, *delays, *engine)
    prompts = [f"long stream {number}" for number in range(3)]
    with application(model, *given, num_workers=1) as served, ThreadPoolExecutor() as pool:
        fillers = [_long_stream(served, f"filler {number}") for number in range(8)]
        wait_until(lambda: served.num_replicas(NAME) == 3, "it was not scaled up to 3")
        reading = [pool.submit(_text, _long_stream(served, prompt)) for prompt in prompts]
        for filler in fillers:
            filler.close()
        wait_until(lambda: served.num_replicas(NAME) == 1, "it was not scaled down to 1")
        assert not any(one.done() for one in reading), "the streams were too short"
        texts = [one.result() for one in reading]
        moved = served.metric("quire:worker_restarts_total")
    with capsys.disabled():
        print(f"\n{moved:g} streams moved from replicas that were taken away")
    assert moved > 0, "no stream was on a replica that was taken away"
    with LLM(model, device="cpu", trust_model_file=True, kv_memory="128MiB") as llm:
        outputs = llm.generate(prompts, **LONG, ignore_eos=True)
    assert texts == [output.text for output in outputs]


def _long_stream(served: Application, prompt: str) -> Any:
    return served.client().completions.create(
        model=NAME, prompt=prompt, stream=True, **LONG, extra_body={"ignore_eos": True}
    )


def _text(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_a_new_version_is_deployed_under_load_and_no_request_fails(
    model: Path, expected: dict[Asked, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        application(model, "--served-model-name", NAME, "--cpus", "0.3") as served,
        Load(served, expected) as load,
    ):
        load.wait_for(NUM_CLIENTS)
        served.deploy("--max-batch-size", "32")
        load.wait_for(3 * NUM_CLIENTS)
    with capsys.disabled():
        print(f"\n{load.num_answers} answers around a new version, {len(load.wrong)} wrong")
    assert load.wrong == []
