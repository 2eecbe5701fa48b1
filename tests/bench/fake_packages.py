"""Puts fake engines where the workers of rivals find them, or hides real ones."""

import shutil
import sys
from pathlib import Path

import pytest

_FAKES = Path(__file__).with_name("fake_rivals")
_DISTRIBUTIONS = {
    "llama_cpp": "llama_cpp_python",
    "openvino_genai": "openvino_genai",
    "transformers": "transformers",
}
_VERSION = "9.9"


def fake_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama_cpp, openvino_genai, torch and transformers, for this process and those it starts."""
    site = folder / "site"
    shutil.copytree(_FAKES, site)
    for distribution in _DISTRIBUTIONS.values():
        info = site / f"{distribution}-{_VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {_VERSION}\n")
    _prefer(site, monkeypatch)


def package_that_is_missing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were not installed, whether it is or not."""
    site = folder / "hidden"
    site.mkdir(exist_ok=True)
    (site / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    _prefer(site, monkeypatch)


def _prefer(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    for name in ("llama_cpp", "openvino", "openvino_genai", "torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
