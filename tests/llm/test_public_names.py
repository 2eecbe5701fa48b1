"""`import quire`: what it offers, and what it does not load until it is used."""

import subprocess
import sys

import pytest

import quire


def test_every_public_name_is_there() -> None:
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name
    assert set(quire.__all__) <= set(dir(quire))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Nonsense'"):
        _ = quire.Nonsense
    with pytest.raises(ImportError, match="Nonsense"):
        exec("from quire import Nonsense")


def test_importing_quire_loads_nothing_heavy() -> None:
    code = "import sys, quire; print([m for m in ('numpy', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_reading_a_model_file_first_loads_neither_jinja_nor_the_engine() -> None:
    """It stands between a user and every model: what it imports is waited for."""
    names = ("jinja2", "asyncio", "concurrent.futures", "quire.engine", "quire.llm")
    code = (
        "import sys, quire.model.isolated_reader; "
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
