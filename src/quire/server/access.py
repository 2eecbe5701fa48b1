"""Access: who is let in and for what. The keys in force, and the scope that each route wants."""

import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyChanges, KeyRing, KeyScope


class RequiredScope(Enum):
    """What a route needs where keys are set."""

    NO_KEY = None  # for health checks
    ANY_KEY = "any"
    INFERENCE = KeyScope.INFERENCE
    STATS = KeyScope.STATS
    ADMIN = KeyScope.ADMIN


# Every route of the application; `check_routes` refuses one that is not here.
ROUTES: Mapping[str, RequiredScope] = {
    "/health": RequiredScope.NO_KEY,
    "/ready": RequiredScope.NO_KEY,
    "/docs": RequiredScope.ANY_KEY,
    "/openapi.json": RequiredScope.ANY_KEY,
    "/v1/models": RequiredScope.ANY_KEY,
    "/v1/models/{name:path}": RequiredScope.ANY_KEY,
    "/v1/stats": RequiredScope.ANY_KEY,  # its own figures; those of all with the scope stats
    "/v1/chat/completions": RequiredScope.INFERENCE,
    "/v1/completions": RequiredScope.INFERENCE,
    "/v1/embeddings": RequiredScope.INFERENCE,
    "/tokenize": RequiredScope.INFERENCE,
    "/detokenize": RequiredScope.INFERENCE,
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
                "a valid API key is needed: send Authorization: Bearer KEY", "invalid_api_key"
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
