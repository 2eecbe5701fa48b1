"""The application on a cluster of three nodes: one endpoint for two models."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import Application, application, wait_until
from tests.ray.loads import ASKED, NAME, Asked, texts_here

ENDED = ("completed", "incomplete")  # statuses of a response that was made
NUM_LONG = 8000  # tokens of a stream that nobody reads to its end


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_text_model(path, max_context=NUM_LONG + 100)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Application]:
    with application(
        model, "--served-model-name", NAME, "--also", f"other={model}", "--cpus", "0.5"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Asked, str]:
    return texts_here(model)


def test_both_models_are_listed_and_chosen_by_name(
    served: Application, expected: dict[Asked, str]
) -> None:
    client = served.client()
    assert [card.id for card in client.models.list()] == [NAME, "other"]
    for name in (NAME, "other"):
        assert ASKED[0].complete(client, name) == expected[ASKED[0]]
    with pytest.raises(Exception, match="there is no model 'third'"):
        ASKED[0].complete(client, "third")


def test_figures_are_those_of_all_replicas(served: Application) -> None:
    client = served.client()
    before = served.metric("quire:generation_tokens_total")

    def num_tokens(number: int) -> int:
        usage = client.completions.create(model=NAME, prompt=f"{number}", max_tokens=50).usage
        return usage.completion_tokens if usage is not None else 0

    with ThreadPoolExecutor(8) as pool:
        used = sum(pool.map(num_tokens, range(16)))
    assert served.metric("quire:generation_tokens_total") - before == used > 0


def test_a_wrong_request_is_answered_as_by_one_server(served: Application) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt="x " * NUM_LONG, max_tokens=1)


def test_a_request_of_many_prompts_is_answered(
    served: Application, expected: dict[Asked, str]
) -> None:
    """They wait for replicas at once, on behalf of one HTTP request."""
    asked = [one for one in ASKED if one.seed == 0] * 12
    made = served.client().completions.create(
        model=NAME, prompt=[one.prompt for one in asked], **asked[0].fields
    )
    assert [choice.text for choice in made.choices] == [expected[one] for one in asked]


def test_background_responses_outlive_their_requests(served: Application) -> None:
    client = served.client()

    def ask(number: int) -> str:
        asked: Any = {"model": NAME, "input": f"{number}", "max_output_tokens": 60}
        return str(client.responses.create(**asked, background=True).id)

    def have_ended() -> bool:
        return all(client.responses.retrieve(name).status in ENDED for name in names)

    names = [ask(number) for number in range(6)]
    wait_until(have_ended, "background responses")


def test_a_client_that_leaves_frees_its_place(served: Application) -> None:
    before = served.metric("quire:generation_tokens_total")
    stream = served.client().completions.create(
        model=NAME, prompt="long", max_tokens=NUM_LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: served.metric("quire:num_requests_running") == 0, "it runs on")
    assert served.metric("quire:generation_tokens_total") - before < NUM_LONG
