"""_native.pyi is the surface of the native module as it was built."""

import importlib
from pathlib import Path

import pytest

import quire

stubgen = pytest.importorskip("nanobind.stubgen")


def test_the_committed_stub_is_what_stubgen_makes_of_the_module() -> None:
    """`make native` writes it anew."""
    module = importlib.import_module("quire._native")
    generator = stubgen.StubGen(module)
    generator.put(module)
    committed = Path(quire.__file__).with_name("_native.pyi").read_text()
    assert generator.get() == committed


def test_the_stub_is_part_of_a_typed_package() -> None:
    assert Path(quire.__file__).with_name("py.typed").exists()
