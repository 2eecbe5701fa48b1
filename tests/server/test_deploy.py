"""The files under deploy/ fit the server: their commands parse, their times agree."""

import json
import re
import shlex
from configparser import ConfigParser
from pathlib import Path

from tests.cli.program import quire

DEPLOY = Path(__file__).parents[2] / "deploy"
OPTIONS = set(re.findall(r"^  (--[a-z-]+)", quire("serve", "--help").out, re.M))


def unit() -> ConfigParser:
    parser = ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "quire.service")
    return parser


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split()[0], line) for line in lines if line and not line.startswith("#")]


def test_the_unit_starts_the_server_with_options_there_are() -> None:
    program, command, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("quire", "serve")
    assert {word for word in words if word.startswith("--")} <= OPTIONS


def test_the_unit_waits_longer_than_the_drain() -> None:
    service = unit()["Service"]
    found = re.search(r"--drain-timeout (\d+)", service["ExecStart"])
    assert found
    assert int(service["TimeoutStopSec"]) > int(found.group(1)) + 5, "errors take their time too"
    assert service["Restart"] == "on-failure"
    assert service["KillSignal"] == "SIGTERM"


def test_the_unit_reloads_the_keys_that_it_started_with() -> None:
    service = unit()["Service"]
    copy = service["ExecStartPre"]
    reload, separator, kill = service["ExecReload"].partition(" ; ")
    assert (reload, separator) == (copy, " ; ")
    assert kill == "/bin/kill -HUP $MAINPID"
    target = shlex.split(copy)[-1]
    assert f"--api-keys {target}" in service["ExecStart"]
    assert target.startswith(f"/run/{service['RuntimeDirectory']}/")
    assert service["RuntimeDirectoryMode"] == "0700", "nobody else reads the keys"
    assert f"--audit-log /var/log/{service['LogsDirectory']}/" in service["ExecStart"]


def test_the_container_runs_the_server_without_privileges() -> None:
    steps = instructions()
    [entry] = [json.loads(line.partition(" ")[2]) for name, line in steps if name == "ENTRYPOINT"]
    assert entry[:2] == ["quire", "serve"]
    assert {word for word in entry if word.startswith("--")} <= OPTIONS
    names = [name for name, _ in steps]
    assert "USER" in names
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "ADD" not in names, "nothing is fetched from addresses"
    assert ("STOPSIGNAL", "STOPSIGNAL SIGTERM") in steps


def test_the_container_says_when_it_is_ready() -> None:
    [check] = [line for name, line in instructions() if name == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python"
    compile(command[2], "healthcheck", "exec")
    assert "/ready" in command[2]
