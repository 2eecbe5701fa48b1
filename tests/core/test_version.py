"""The version that runs, installed or not."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from quire.core.version import own_version


def test_it_is_the_installed_one() -> None:
    assert own_version() == version("quire")


def test_a_source_tree_on_the_path_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("quire.core.version.version", missing)
    assert own_version() == "unknown"
