"""Nodes and replicas that go away under load: no request fails, and every text is the same."""

from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import NODE, application
from tests.ray.loads import NAME, NUM_CLIENTS, Asked, Load, texts_here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Asked, str]:
    return texts_here(model)


def test_nodes_die_under_load_and_no_request_fails(
    model: Path, expected: dict[Asked, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with application(model, "--served-model-name", NAME) as served:
        workers = list(served.cluster.worker_nodes)
        with Load(served, expected) as load:
            for node in workers:
                load.wait_for(NUM_CLIENTS)
                served.cluster.remove_node(node, allow_graceful=False)
                load.wait_for(NUM_CLIENTS)
                served.cluster.add_node(**NODE)
                load.wait_for(3 * NUM_CLIENTS)
        lost = served.metric("quire:worker_restarts_total")
    with capsys.disabled():
        print(f"\n{load.num_answers} answers, {lost:g} moved from a replica that died")
    assert load.wrong == []
    assert lost > 0, "no request was on a node that died"
