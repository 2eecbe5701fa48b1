"""The documents tell the truth: their Python examples run, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = [
    pytest.param(match.group(1), id=f"{path.name}-{place}")
    for path in DOCUMENTS
    if path.parent.name != "guide"  # whose examples need a server: tests/server/test_guide.py
    for place, match in enumerate(re.finditer(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_each_python_example_runs(source: str, request: pytest.FixtureRequest) -> None:
    if "smollm2" in source:
        request.getfixturevalue("smollm2_path")
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.name))
def test_each_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
