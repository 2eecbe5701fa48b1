"""API keys: read from a TOML file or the environment, compared in constant time.

[keys.alice]                     the name is for logs and metrics, and whose share is whose
key = "a long random string"     or sha256 = "...", its digest in hex
weight = 2.0                     of the machine, beside the others' (1.0 unless named)
requests_per_minute = 600        both unlimited unless named
max_concurrent = 16
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError

KEY_VARIABLE = "QUIRE_API_KEY"
MAX_FILE_BYTES = 1 << 20
MIN_KEY_LENGTH = 16
_FIELDS = ("key", "sha256", "weight", "requests_per_minute", "max_concurrent")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Somebody who may use the server; only the digest of what they send is kept."""

    name: str
    digest: bytes
    weight: float = 1.0
    requests_per_minute: float | None = None
    max_concurrent: int | None = None


class KeyRing:
    """All the keys. One that is empty lets everybody in (see ServerSettings)."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        by_digest: dict[bytes, str] = {}
        for key in self._keys:
            if key.digest in by_digest:
                raise ConfigError(f"keys {by_digest[key.digest]!r} and {key.name!r} are the same")
            by_digest[key.digest] = key.name

    def find(self, presented: str) -> ApiKey | None:
        """Whose key this is; takes as long whatever is presented."""
        digest = digest_of(presented)
        found = None
        for key in self._keys:  # all of them: stopping early would tell how far it got
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    @property
    def weights(self) -> Mapping[str, float]:
        """For the engine's fairness."""
        return {key.name: key.weight for key in self._keys}

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: str | Path | None, environment: Mapping[str, str]) -> KeyRing:
    """The keys of a file and of QUIRE_API_KEY, either of which may be missing."""
    keys = [] if path is None else _read_file(Path(path))
    if KEY_VARIABLE in environment:
        value = environment[KEY_VARIABLE]
        keys.append(ApiKey("default", _checked_digest(value, KEY_VARIABLE)))
    return KeyRing(keys)


def _read_file(path: Path) -> list[ApiKey]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        data = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    for table in data:
        if table != "keys":
            raise ConfigError(f"{path}: {table!r} is unknown; there are tables [keys.NAME]")
    tables = data.get("keys", {})
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"{path} has no keys: write [keys.NAME] and key = ... under it")
    return [_key(f"{path}: [keys.{name}]", name, table) for name, table in tables.items()]


def _key(where: str, name: str, table: Any) -> ApiKey:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ConfigError(f"{where}: a name is up to 64 letters, digits, '_', '-' or '.'")
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table")
    for field in table:
        if field not in _FIELDS:
            raise ConfigError(f"{where} has no {field!r}; there are {', '.join(_FIELDS)}")
    return ApiKey(
        name,
        _digest(where, table),
        float(_number(where, table, "weight", 0.01, 100.0) or 1.0),
        _number(where, table, "requests_per_minute", 0.01, 1e9),
        _count(where, table, "max_concurrent"),
    )


def _digest(where: str, table: Mapping[str, Any]) -> bytes:
    if ("key" in table) == ("sha256" in table):
        raise ConfigError(f"{where} needs either key or sha256")
    if "key" in table:
        return _checked_digest(table["key"], f"{where} key")
    value = table["sha256"]
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ConfigError(f"{where} sha256 must be 64 hexadecimal digits")
    return bytes.fromhex(value)


def _checked_digest(value: Any, where: str) -> bytes:
    """The digest of a key; what is wrong is said without repeating the key."""
    if not isinstance(value, str) or len(value) < MIN_KEY_LENGTH:
        raise ConfigError(f"{where} must be a string of at least {MIN_KEY_LENGTH} characters")
    if not all("!" <= mark <= "~" for mark in value):
        raise ConfigError(f"{where} must hold printable ASCII characters without blanks")
    return digest_of(value)


def _number(
    where: str, table: Mapping[str, Any], name: str, low: float, high: float
) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{where} {name} must be from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _count(where: str, table: Mapping[str, Any], name: str) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} {name} must be an integer of at least 1, got {value!r}")
    return value
