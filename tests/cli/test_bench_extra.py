"""`quire bench` without the packages of its extra: it says what to install, and the rest runs."""

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # an import of it then fails as that of a missing package does
from quire.cli import main
sys.exit(main(sys.argv[2:]))
"""


def quire_without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", _WITHOUT, package, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("aiohttp", ("serve", "http://127.0.0.1:1")),
        ("jsonschema", ("regress", "one", "other")),
        ("matplotlib", ("report", "receipts", "--out", "/dev/null/page.html")),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    package: str, arguments: tuple[str, ...]
) -> None:
    run = quire_without(package, "bench", *arguments)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"quire: quire bench needs {package}: pip install 'quire[bench]'\n"


def test_other_commands_do_not_load_the_benchmarks() -> None:
    for arguments in (["--help"], ["generate", "--help"]):
        assert quire_without("quire_bench", *arguments).returncode == 0


def test_a_missing_part_of_quire_is_no_missing_extra() -> None:
    run = quire_without("quire_bench", "bench", "--help")
    assert run.returncode == 1
    assert "this should not have happened: ModuleNotFoundError" in run.stderr
