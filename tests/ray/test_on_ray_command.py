"""`quire ray serve --dry-run`, which needs Ray and no cluster."""

import json

import pytest

from quire.cli import main
from quire.cli.ray import application
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
        (["--min-replicas", "3", "--max-replicas", "2"], "replicas must be"),
        (["--host", "0.0.0.0"], "no API keys"),
    ):
        assert main(["ray", "serve", "model.gguf", *options, "--dry-run"]) == 1
        assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match="command"):
        application({"model": "model.gguf"})
