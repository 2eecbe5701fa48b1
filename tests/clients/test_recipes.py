"""The guide's recipes for LangChain, LlamaIndex and llm run as they stand, with the real packages.

They have an environment of their own, which `make test-clients` installs.
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.server.guide import GUIDE, Script, run_page

PATIENCE_S = 600.0  # thousands of modules, read from a disk for the first time
PROGRAMS = Path(__file__).parents[2] / "build" / "clients" / "bin"


@pytest.mark.skipif(
    not (PROGRAMS.parent / ".ready").exists(), reason="not installed: run make test-clients"
)
def test_every_recipe_runs(tmp_path: Path) -> None:
    write_text_model(tmp_path / "model.gguf")
    environment = {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "PYTHONPATH": "",  # the packages' own environment, and nothing of ours
        "LLM_USER_PATH": str(tmp_path / "llm"),
    }
    with ExitStack() as stack:
        python = str(PROGRAMS / "python")
        script = Script(tmp_path, stack, python=python, env=environment, patience_s=PATIENCE_S)
        run_page(GUIDE / "clients.md", script)
    assert shutil.which("llm", path=environment["PATH"]) == str(PROGRAMS / "llm")
