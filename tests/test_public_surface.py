"""The public names say what they are, and the engine beneath them needs no arrays."""

import subprocess
import sys

import pytest

import quire


def test_no_name_is_listed_twice() -> None:
    assert len(set(quire.__all__)) == len(quire.__all__)


@pytest.mark.parametrize("name", quire.__all__)
def test_each_public_name_is_documented_and_ours(name: str) -> None:
    value = getattr(quire, name)
    assert value.__doc__
    assert value.__module__.startswith("quire.")


def test_the_engine_is_imported_without_arrays_or_tensors() -> None:
    program = (
        "import sys, quire.engine.aio, quire.executors.fake;"
        "print([name for name in ('numpy', 'torch', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
