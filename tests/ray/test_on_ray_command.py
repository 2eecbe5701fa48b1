"""`quire ray serve`: without a cluster, and as a process on one of its own or on one that runs."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.llm.text_models import write_text_model
from tests.ray.clusters import PATIENCE_S, free_port, wait_until
from tests.ray.commands import Command, refusal, serving

from quire.cli import main, ray_cluster
from quire.cli.ray import application, cluster_config
from quire.cli.ray_options import parse
from quire.core.errors import ConfigError


def _config(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main(["ray", "serve", "model.gguf", *options, "--dry-run"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_dry_run_prints_a_configuration_that_serve_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ray.serve.schema import ServeDeploySchema  # what `serve deploy` checks a file with

    options = ("--gpus", "1", "--max-replicas", "4", "--also", "code=coder.gguf")
    found = ServeDeploySchema.model_validate(_config(capsys, *options))
    assert found.applications[0].import_path == "quire.cli.ray:application"
    args = found.applications[0].args
    assert args == {"command": "model.gguf --gpus 1 --max-replicas 4 --also code=coder.gguf"}
    assert application(args)._bound_deployment.name == "ingress"


def test_a_deployment_a_model_with_its_resources(capsys: pytest.CaptureFixture[str]) -> None:
    command = "model.gguf --gpus 1 --cpus 2 --max-replicas 4 --also code=coder.gguf"
    ingress = application({"command": command})._bound_deployment
    models = [bound._bound_deployment for bound in ingress.init_args[1:]]
    assert [model.name for model in models] == ["model-model.gguf", "model-code"]
    for model in models:
        assert model.ray_actor_options == {"num_cpus": 2.0, "num_gpus": 1.0}
        scaling = model._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
        assert scaling.policy.policy_kwargs["max_batch_size"] == 64
    assert ingress.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}


def test_the_application_holds_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret-of-the-test-0123456789")
    ingress = application({"command": "model.gguf --host 0.0.0.0"})._bound_deployment
    config = ingress.init_args[0]
    assert not config.settings.keys
    assert len(list(config.own_settings().keys)) == 1
    monkeypatch.delenv("QUIRE_API_KEY")
    with pytest.raises(ConfigError, match="no API keys"):
        config.own_settings()


def test_wrong_calls_are_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in (
        (["--also", "model.gguf"], "two models are called"),
        (["--ingress-replicas", "0"], "there must be an ingress"),
        (["--state", "state"], "must begin with /: got state"),
        (["--state", "/state", "--ingress-anywhere"], "leave it or --ingress-anywhere out"),
        (["--state", "/state", "--ingress-replicas", "2"], "leave it or --ingress-replicas out"),
        (["--min-replicas", "3", "--max-replicas", "2"], "replicas must be"),
        (["--host", "0.0.0.0"], "no API keys"),
    ):
        assert main(["ray", "serve", "model.gguf", *options, "--dry-run"]) == 1
        assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match="command"):
        application({"model": "model.gguf"})


def test_several_ingresses_refuse_what_each_would_count_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.a]\nkey = "sk-of-the-test-0123456789abcdef"\n')
    several = ("model.gguf", "--ingress-replicas", "2", "--api-keys", str(keys))
    config = cluster_config(parse(several))
    assert config.own_settings().max_stored_responses == 0
    with keys.open("a") as file:
        file.write("tokens_per_day = 1000\n")
    with pytest.raises(ConfigError, match="'a' has tokens_per_day"):
        config.own_settings()
    assert cluster_config(parse(several[:1])).own_settings().max_stored_responses > 0
    audited = cluster_config(parse([*several[:3], "--audit-log", str(tmp_path / "log")]))
    with pytest.raises(ConfigError, match="--audit-log"):
        audited.own_settings()


# ---- as a process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_what_cannot_work_is_said_in_a_line_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_text("junk")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, told in (
            (["no-such.gguf"], "is neither a file or folder nor a known model"),
            ([str(junk)], "is no model that quire reads"),
            ([str(model), "--address", "127.0.0.1:1"], "there is no Ray cluster at 127.0.0.1:1: "),
            ([str(model), "--port", port], f"cannot listen at 127.0.0.1:{port}"),
            ([str(model), "--direct-port", port], f"cannot listen at 127.0.0.1:{port}"),
            ([str(model), "--port", port, "--direct-port", port], "is Serve's"),
            ([str(model), "--direct-port", "65536"], "from 1 to 65535, got 65536"),
            ([str(model), "--direct-port", "0"], "from 1 to 65535, got 0"),
            ([str(model), "--replica-silence", "0"], "must be 4 s or more, got 0"),
            ([str(model), "--replica-silence", "nan"], "must be 4 s or more, got nan"),
        ):
            address = [] if "--address" in options else ["--address", "local"]
            assert main(["ray", "serve", *options, *address]) == 1
            assert told in capsys.readouterr().err


def test_too_many_replicas_for_the_machine_are_refused(model: Path) -> None:
    options = ("--replicas", "3", "--cpus", "1000", "--port", str(free_port()))
    told = refusal(str(model), *options, "--address", "local")
    assert "3 replicas of 1000 CPUs need 3000" in told


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Two models and two ingresses, which share a port of their own."""
    folder = tmp_path_factory.mktemp("command")
    options = ("--served-model-name", "first", "--also", f"second={model}", "--cpus", "0.5")
    own = ("--ingress-replicas", "2", "--direct-port", str(free_port()))
    with serving(folder, str(model), *options, *own) as found:
        yield found


def direct_client(command: Command) -> openai.OpenAI:
    """Of the ingresses' own port, as the command says it."""
    [url] = re.findall(r" and (http://\S+/v1)", command.log.read_text())
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def test_ingresses_answer_at_their_own_port_as_through_the_proxy(command: Command) -> None:
    asked: Any = {"model": "first", "prompt": "Hello", "max_tokens": 60, "seed": 3}
    through_proxy = command.client().completions.create(**asked)
    texts = []
    for _ in range(8):  # connections, which the system gives to either ingress
        with direct_client(command) as direct:
            chunks = list(direct.completions.create(**asked, stream=True))
            texts.append("".join(chunk.choices[0].text for chunk in chunks if chunk.choices))
    assert texts == [through_proxy.choices[0].text] * 8


def _say(client: openai.OpenAI, **fields: Any) -> Any:
    asked: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **fields}
    return client.chat.completions.create(**asked)


def test_each_model_is_listed_and_answers_by_its_name(command: Command) -> None:
    client = command.client()
    assert [card.id for card in client.models.list()] == ["first", "second"]
    assert client.models.retrieve("second").id == "second"
    assert [_say(client, model=name).model for name in ("first", "second")] == ["first", "second"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'third'"):
        _say(client, model="third")
    with pytest.raises(openai.NotFoundError, match="there is no model 'third'"):
        client.models.retrieve("third")


def test_a_request_without_a_model_gets_the_first(command: Command) -> None:
    answer = command.client().post(
        "/completions", body={"prompt": "x", "max_tokens": 2}, cast_to=object
    )
    assert isinstance(answer, dict) and answer["model"] == "first"


def test_several_ingresses_store_no_response_and_say_so(command: Command) -> None:
    client = command.client()
    for _ in range(6):  # whichever ingress it is
        made: Any = client.responses.create(model="second", input="Hello", max_output_tokens=16)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="never stored"):
            client.responses.create(model="first", input="and", previous_response_id=made.id)


def test_figures_are_those_of_all_ingresses(command: Command) -> None:
    client = command.client()
    before = rejected(command)
    for _ in range(8):
        with pytest.raises(openai.NotFoundError):
            _say(client, model="third")
    assert [rejected(command) - before for _ in range(6)] == [8] * 6


def rejected(command: Command) -> float:
    with urllib.request.urlopen(f"{command.url}/metrics", timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    name = "quire:requests_rejected_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_signal_drains_running_streams_finish_and_the_program_ends(command: Command) -> None:
    clients = [command.client(), direct_client(command)]
    texts: list[str] = []

    def read(number: int) -> None:
        stream = clients[number % 2].completions.create(
            model="first", prompt=f"{number}", max_tokens=400, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        has_begun.release()
        texts.append(stream_end(stream))

    has_begun = threading.Semaphore(0)
    readers = [threading.Thread(target=read, args=[number]) for number in range(8)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert has_begun.acquire(timeout=PATIENCE_S)
    assert command.end(signal.SIGINT) == 0
    for reader in readers:
        reader.join()
    assert texts == ["length"] * 8
    assert "quire drains" in command.log.read_text()


def stream_end(stream: Any) -> str:
    """Its finish reason."""
    [reason] = {chunk.choices[0].finish_reason for chunk in stream if chunk.choices} - {None}
    return str(reason)


def test_a_cluster_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address stays behind in Ray's folder: a new cluster is started instead."""
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda _: f"127.0.0.1:{free_port()}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray_cluster._join(None)
    with pytest.raises(ConfigError, match="no Ray cluster at auto: Connection refused"):
        ray_cluster._join("auto")


def test_without_a_folder_jobs_are_refused_and_on_a_running_cluster_the_port_is_serves_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it wants a token that Ray has made
    ray = Path(sys.executable).with_name("ray")
    address = f"127.0.0.1:{free_port()}"
    start = ("start", "--head", "--num-cpus=1", "--include-dashboard=false")
    node = (*start, f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1")
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen([ray, *node, "--block"], **quiet)
    try:
        wait_until(lambda: _listens(address), "ray start")
        with serving(tmp_path, str(model), "--cpus", "0.2", address=address) as command:
            with pytest.raises(openai.APIStatusError, match="start the server with --state"):
                command.client().files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
            told = refusal(
                str(model), "--name", "other", "--address", address, "--port", str(free_port())
            )
            assert "Serve listens at 127.0.0.1:" in told
            assert command.end() == 0
        assert head.poll() is None, "the cluster was not this command's to end"
    finally:
        head.terminate()
        head.wait(PATIENCE_S)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True
