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


TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_that_a_page_of_the_guide_names_is_there() -> None:
    named = [
        found for page in ROOT.glob("docs/guide/*.md") for found in TEST.findall(page.read_text())
    ]
    assert len(named) > 25
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text() or not name, f"{path}::{name}"


def test_the_readme_links_every_page_of_the_guide() -> None:
    linked = set(re.findall(r"\]\(docs/guide/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {path.name for path in ROOT.glob("docs/guide/*.md")}


ARCHITECTURE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"`((?:\w+/)*\w+\.(?:py|h|cpp))`")
FUNCTION = re.compile(r"`(\w+)` in `((?:\w+/)+\w+\.py)`")


def test_every_file_that_the_architecture_names_is_there() -> None:
    """Paths are relative to src/quire, but for native/ and tests/; in the table of packages they
    are relative to the package of their row."""
    text = ARCHITECTURE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M)
    in_rows = {f"{package}/{name}" for package, cell in rows for name in FILE.findall(cell)}
    elsewhere = set(FILE.findall(re.sub(r"^\| `\w+` \| .* \|$", "", text, flags=re.M)))
    assert len(in_rows) > 10 and len(elsewhere) > 40
    for name in in_rows | elsewhere:
        assert (ROOT / "src" / "quire" / name).is_file() or (ROOT / name).is_file(), name


def test_the_functions_and_tables_that_it_names_are_there() -> None:
    found = FUNCTION.findall(ARCHITECTURE.read_text())
    assert found
    for name, path in found:
        assert re.search(rf"\b{name}\b", (ROOT / "src" / "quire" / path).read_text()), (name, path)
