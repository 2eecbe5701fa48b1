"""A pytest plugin that puts the module built in $QUIRE_NATIVE_BUILD in the place of quire._native.

`make sanitize` tests its own builds with it; the one in src/quire stays as it is.
"""

import importlib.util
import os
import sys
from pathlib import Path

_NAME = "quire._native"


def _load() -> None:
    [file] = Path(os.environ["QUIRE_NATIVE_BUILD"]).glob("_native*.so")
    spec = importlib.util.spec_from_file_location(_NAME, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


_load()
