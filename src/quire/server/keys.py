"""API keys: read from a TOML file or the environment, found by the digest of what is presented.

[keys.alice]                     the name is for logs and metrics, and whose share is whose
key = "a long random string"     or sha256 = "...", its digest in hex
scopes = ["inference"]           of inference, stats and admin
expires = 2027-01-01             a date or time in UTC; never unless named
weight = 2.0                     of the machine, beside the others' (1.0 unless named)
requests_per_minute = 600        prompts; this and what follows is unlimited unless named
max_concurrent = 16
tokens_per_minute = 100_000      of prompts and completions
tokens_per_day = 2_000_000       from midnight to midnight, UTC
parse_control_tokens = true      its chat messages may write control tokens; else they are text

Access holds the keys in force, and the scope that each route needs.
"""

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.page import PAGE_FILES

KEY_VARIABLE = "QUIRE_API_KEY"
MAX_FILE_BYTES = 16 << 20  # some 100,000 keys
MIN_KEY_LENGTH = 16
_MAX_LOGGED_NAMES = 100


class KeyScope(StrEnum):
    """What a key may do; `ROUTES` has the scope that each route needs."""

    INFERENCE = "inference"
    STATS = "stats"  # totals, and the figures of all keys
    ADMIN = "admin"  # the keys themselves, and all that STATS shows


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key; of the secret itself only the digest is kept."""

    name: str
    digest: bytes
    weight: float = 1.0
    requests_per_minute: float | None = None
    max_concurrent: int | None = None
    scopes: frozenset[KeyScope] = frozenset({KeyScope.INFERENCE})
    expires: float | None = None  # seconds since the epoch
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    parse_control_tokens: bool = False  # in its chat messages

    def may(self, scope: KeyScope) -> bool:
        if scope is KeyScope.STATS and KeyScope.ADMIN in self.scopes:
            return True
        return scope in self.scopes

    def has_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


class KeyChanges:
    """The difference of two rings, by the keys' names."""

    def __init__(self, old: "KeyRing", new: "KeyRing") -> None:
        before = {key.name: key for key in old}
        after = {key.name: key for key in new}
        self.added = sorted(after.keys() - before.keys())
        self.removed = sorted(before.keys() - after.keys())
        both = before.keys() & after.keys()
        self.changed = sorted(name for name in both if before[name] != after[name])

    def summary(self) -> dict[str, object]:
        """For a log line: all counts, and the first names."""
        found: dict[str, object] = {}
        for what in ("added", "removed", "changed"):
            names: list[str] = getattr(self, what)
            found[f"num_{what}"] = len(names)
            found[what] = names[:_MAX_LOGGED_NAMES]
        return found


class KeyRing:
    """All keys. An empty ring lets everybody in (see ServerSettings)."""

    def __init__(
        self, keys: Iterable[ApiKey] = (), read_again: "Callable[[], KeyRing] | None" = None
    ) -> None:
        self._keys = tuple(keys)
        self._read_again = read_again
        self._by_digest: dict[bytes, ApiKey] = {}
        names: set[str] = set()
        for key in self._keys:
            if key.digest in self._by_digest:
                other = self._by_digest[key.digest].name
                raise ConfigError(f"keys {other!r} and {key.name!r} are the same")
            if key.name in names:
                raise ConfigError(
                    f"there are two keys with the name {key.name!r} (that of {KEY_VARIABLE} is "
                    "'default')"
                )
            self._by_digest[key.digest] = key
            names.add(key.name)

    def find(self, presented: str) -> ApiKey | None:
        """The key of a presented secret, in a time that does not depend on how similar they are.

        The lookup is by SHA-256: whoever does not know a key cannot choose its digest, so the time
        of the lookup reveals nothing. The final comparison takes constant time, and is made whether
        or not a key was found.
        """
        digest = digest_of(presented)
        key = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        return key if is_equal else None

    def read_again(self) -> "KeyRing":
        """The keys from their file as it is now; raises where it cannot be used."""
        return self if self._read_again is None else self._read_again()

    @property
    def can_be_read_again(self) -> bool:
        return self._read_again is not None

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


_NO_DIGEST = bytes(32)  # compared with where no key was found


def read_keys(path: str | Path | None, environment: Mapping[str, str]) -> KeyRing:
    """The keys of a file and of QUIRE_API_KEY, either of which may be missing.

    The key of the environment has the scope `stats` too: it cannot name scopes.
    """
    keys = [] if path is None else _read_file(Path(path))
    if KEY_VARIABLE in environment:
        digest = _checked_digest(environment[KEY_VARIABLE], KEY_VARIABLE)
        scopes = frozenset({KeyScope.INFERENCE, KeyScope.STATS})
        keys.append(ApiKey("default", digest, scopes=scopes))
    kept = {name: environment[name] for name in (KEY_VARIABLE,) if name in environment}
    return KeyRing(keys, None if path is None else lambda: read_keys(path, kept))


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
        if field not in _FIELDS and field not in _SECRETS:
            known = ", ".join((*_SECRETS, *_FIELDS))
            raise ConfigError(f"{where} has no {field!r}; there are {known}")
    given = {
        field: read(f"{where} {field}", table[field])
        for field, read in _FIELDS.items()
        if field in table
    }
    return ApiKey(name, _digest(where, table), **given)


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
    """The digest of a secret; errors do not repeat the secret."""
    if not isinstance(value, str) or len(value) < MIN_KEY_LENGTH:
        raise ConfigError(f"{where} must be a string of at least {MIN_KEY_LENGTH} characters")
    if not all("!" <= mark <= "~" for mark in value):
        raise ConfigError(f"{where} must hold printable ASCII characters without blanks")
    return digest_of(value)


def _number(low: float, high: float) -> Callable[[str, Any], float]:
    def read(where: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ConfigError(f"{where} must be from {low:g} to {high:g}, got {value!r:.100}")
        return float(value)

    return read


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ConfigError(f"{where} must be an integer from 1 to {MAX_COUNT:,}, got {value!r:.100}")
    return value


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r:.100}")
    return value


def _scopes(where: str, value: Any) -> frozenset[KeyScope]:
    known = [scope.value for scope in KeyScope]
    if not isinstance(value, list) or not value or not all(name in known for name in value):
        raise ConfigError(f"{where} must be a list of {', '.join(known)}, got {value!r:.100}")
    return frozenset(map(KeyScope, value))


def _moment(where: str, value: Any) -> float:
    """Seconds since the epoch. A date means its first instant; without a zone it is UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ConfigError(
            f"{where} must be a date such as 2027-01-01 or a time such as 2027-01-01T08:00:00Z, "
            f"without quotes, got {value!r:.100}"
        )
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


MAX_COUNT = 10**15
_SECRETS = ("key", "sha256")
# The fields of a table that are fields of an ApiKey, and how each is read and checked.
_FIELDS: Mapping[str, Callable[[str, Any], Any]] = {
    "scopes": _scopes,
    "expires": _moment,
    "weight": _number(0.01, 100.0),
    "requests_per_minute": _number(0.01, 1e9),
    "max_concurrent": _count,
    "tokens_per_minute": _count,
    "tokens_per_day": _count,
    "parse_control_tokens": _flag,
}


# ---- access


class RequiredScope(Enum):
    """What a route needs where keys are set."""

    NO_KEY = None  # for health checks, and the page, which has no data
    ANY_KEY = "any"
    INFERENCE = KeyScope.INFERENCE
    STATS = KeyScope.STATS
    ADMIN = KeyScope.ADMIN


# Every route of the application; `check_routes` refuses one that is not here.
ROUTES: Mapping[str, RequiredScope] = {
    "/health": RequiredScope.NO_KEY,
    "/ready": RequiredScope.NO_KEY,
    **dict.fromkeys(PAGE_FILES, RequiredScope.NO_KEY),
    "/ping": RequiredScope.NO_KEY,
    "/version": RequiredScope.ANY_KEY,
    "/docs": RequiredScope.ANY_KEY,
    "/openapi.json": RequiredScope.ANY_KEY,
    "/v1/models": RequiredScope.ANY_KEY,
    "/v1/models/{name:path}": RequiredScope.ANY_KEY,
    "/v1/stats": RequiredScope.ANY_KEY,  # its own figures; those of all with the scope stats
    "/v1/chat/completions": RequiredScope.INFERENCE,
    "/v1/responses": RequiredScope.INFERENCE,
    "/v1/responses/input_tokens": RequiredScope.INFERENCE,
    "/v1/responses/{response_id}": RequiredScope.ANY_KEY,  # a key sees what it stored
    "/v1/responses/{response_id}/input_items": RequiredScope.ANY_KEY,
    "/v1/responses/{response_id}/cancel": RequiredScope.ANY_KEY,
    "/v1/files": RequiredScope.INFERENCE,
    "/v1/files/{file_id}": RequiredScope.ANY_KEY,  # a key sees its own
    "/v1/files/{file_id}/content": RequiredScope.ANY_KEY,
    "/v1/batches": RequiredScope.INFERENCE,
    "/v1/batches/{batch_id}": RequiredScope.ANY_KEY,
    "/v1/batches/{batch_id}/cancel": RequiredScope.ANY_KEY,
    "/v1/messages": RequiredScope.INFERENCE,
    "/v1/messages/count_tokens": RequiredScope.INFERENCE,
    "/v1/completions": RequiredScope.INFERENCE,
    "/v1/embeddings": RequiredScope.INFERENCE,
    "/tokenize": RequiredScope.INFERENCE,
    "/detokenize": RequiredScope.INFERENCE,
    "/tokenizer_info": RequiredScope.INFERENCE,
    "/rerank": RequiredScope.INFERENCE,
    "/v1/rerank": RequiredScope.INFERENCE,
    "/v2/rerank": RequiredScope.INFERENCE,
    "/score": RequiredScope.INFERENCE,
    "/v1/score": RequiredScope.INFERENCE,
    "/props": RequiredScope.INFERENCE,
    "/api/chat": RequiredScope.INFERENCE,
    "/api/generate": RequiredScope.INFERENCE,
    "/api/embed": RequiredScope.INFERENCE,
    "/api/embeddings": RequiredScope.INFERENCE,
    "/api/show": RequiredScope.INFERENCE,
    "/api/tags": RequiredScope.ANY_KEY,
    "/api/ps": RequiredScope.ANY_KEY,
    "/api/version": RequiredScope.ANY_KEY,
    "/metrics": RequiredScope.STATS,
    "/admin/keys": RequiredScope.ADMIN,
    "/admin/reload": RequiredScope.ADMIN,
}


def check_routes(paths: Iterable[str]) -> None:
    """Every route is in the table; `required_scope` cannot look up a path with a variable part."""
    for path in paths:
        assert path in ROUTES, f"{path} is not in the table of routes: say what scope it wants"
        assert "{" not in path or ROUTES[path] is RequiredScope.ANY_KEY, (
            f"{path} is not found by its path"
        )


class Access:
    """The keys in force. Without keys, everything is allowed to everybody."""

    def __init__(self, ring: KeyRing, now: Callable[[], float] = time.time) -> None:
        self.ring = ring
        self._now = now

    def key_of(self, authorization: str) -> ApiKey | None:
        """The key in an Authorization header; a 401 where it is none of ours."""
        if not self.ring:
            return None
        scheme, _, presented = authorization.partition(" ")
        key = self.ring.find(presented.strip())
        if scheme.lower() != "bearer" or key is None:
            raise _unauthenticated(
                "a valid API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY",
                "invalid_api_key",
            )
        return key

    def check(self, key: ApiKey | None, path: str) -> None:
        """Refuse a key that has expired, or that is not for this path."""
        if key is None:
            return
        if key.has_expired(self._now()):
            raise _unauthenticated(f"the API key {key.name!r} has expired", "expired_api_key")
        need = required_scope(path).value
        if isinstance(need, KeyScope) and not key.may(need):
            raise ApiError(
                403,
                f"key {key.name!r} may not use {path}: that needs the scope {need.value!r}",
                code="insufficient_scope",
            )

    def replace(self, ring: KeyRing) -> KeyChanges:
        """Put other keys in force. Running requests finish; new ones need the new keys."""
        assert ring, "a server with keys would let everybody in"
        changes = KeyChanges(self.ring, ring)
        self.ring = ring
        return changes


def required_scope(path: str) -> RequiredScope:
    return ROUTES.get(path, RequiredScope.ANY_KEY)  # an unknown path is a 401 before it is a 404


def may_read_totals(key: ApiKey | None) -> bool:
    return key is None or key.may(KeyScope.STATS)


def _unauthenticated(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers=(("www-authenticate", "Bearer"),))
