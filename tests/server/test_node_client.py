"""The official npm client against a real server; `make node-client` installs it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.servers import NAME, PATIENCE_S, RunningServer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "node"
SCRIPT = Path(__file__).with_name("client.mjs")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_npm_client_passes_its_suite(tiny: RunningServer) -> None:
    assert (FOLDER / "node_modules" / "openai").exists(), "run `make node-client` first"
    before = tiny.engine.stats.requests_ended.get("cancelled", 0)
    run = subprocess.run(
        ["node", SCRIPT, FOLDER, f"{tiny.url}/v1", NAME],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [
        *("chat", "streaming", "completions", "embeddings", "models", "errors", "cancellation")
    ]
    tiny.wait_until_idle()
    assert tiny.engine.stats.requests_ended["cancelled"] == before + 1
