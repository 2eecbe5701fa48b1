"""`quire ray` without Ray: help, wrong options, and what to install."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from quire.cli import main


def test_help_lists_the_clusters_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "serve", "--help"]) == 0
    assert "--max-replicas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tls-cert", "cert.pem"], "does not take --tls-cert"),
        (["--keep-alive", "3"], "Serve's proxy has the connections"),
        (["--no-worker"], "each replica is a process of its own"),
        (["--replicas", "2", "--max-replicas", "3"], "--replicas is for a fixed number"),
        (["--port", "0"], "needs a port"),
    ],
)
def test_what_would_not_be_obeyed_is_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", "serve", "model.gguf", *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="it would be started")
def test_the_guides_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "ray.md").read_text()
    commands = re.findall(r"^quire (ray serve .*)$", page, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        assert main(shlex.split(command)) == 1
        assert capsys.readouterr().err.startswith("quire: quire ray needs ray"), command


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "serve", "model.gguf", "--dry-run"]) == 1
    assert "quire ray needs ray: pip install 'quire[ray]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="pip install 'quire"):
        from quire.ray import generate  # noqa: F401
