"""Fields: a family's part of a file's metadata, and refusals of what quire does not compute."""

import reprlib
from collections.abc import Collection, Mapping

import numpy as np

from quire.core.errors import UnsupportedModelError
from quire.loader.metadata import Metadata


class Fields:
    """Metadata under one prefix; a field that is null counts as absent."""

    def __init__(self, metadata: Metadata, where: str, prefix: str = "") -> None:
        self._metadata = metadata
        self._where = where  # the file, for refusals; other errors come from the metadata
        self._prefix = prefix

    def get(self, key: str) -> object:
        """The value as it stands in the file, or None."""
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        return self._metadata.integer(self._prefix + key, default, low=low, high=high)

    def optional_integer(self, key: str, *, high: int) -> int | None:
        return None if self.get(key) is None else self.integer(key, high=high)

    def number(self, key: str, default: float | None = None) -> float:
        return self._metadata.number(self._prefix + key, default)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        return self._metadata.boolean(self._prefix + key, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._metadata.text(self._prefix + key, default)

    def section(self, key: str) -> "Fields":
        """A nested object; an empty one where the key is absent."""
        where = f"{self._where}: {key}"
        if self.get(key) is None:
            return Fields(Metadata(where, {}), where)
        return Fields(self._metadata.section(self._prefix + key), where)

    def refuse(self, neutral: Mapping[str, Collection[object]]) -> None:
        """Raise where a field that we do not compute would change the results."""
        for key, values in neutral.items():
            value = self.get(key)
            if value is not None and (isinstance(value, np.ndarray) or value not in values):
                raise self.unsupported(key)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise at the first key under the prefix that is not known."""
        for name in self._metadata:
            key = name.removeprefix(self._prefix)
            if name.startswith(self._prefix) and key not in known:
                raise self.unsupported(key)

    def unsupported(self, key: str, supported: Collection[str] = ()) -> UnsupportedModelError:
        value = reprlib.repr(self.get(key))
        only = f"; supported: {', '.join(supported)}" if supported else ""
        return UnsupportedModelError(
            f"{self._where}: {self._prefix + key} = {value} is not supported{only}"
        )
