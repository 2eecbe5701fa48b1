"""Administration: the keys in force, and reading them again, for keys with the scope `admin`."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI

from quire.core.errors import ConfigError
from quire.server.errors import ApiError
from quire.server.keys import ApiKey
from quire.server.replies import ErrorReply, KeyCard, KeyList, ReloadReply
from quire.server.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorReply, "description": "no valid key, or one that has expired"},
    403: {"model": ErrorReply, "description": "the key has not the scope"},
}


def add_administration(app: FastAPI, service: Service) -> None:
    @app.get("/admin/keys", summary="The keys in force, without secrets", responses=_ERRORS)
    async def keys() -> KeyList:
        return KeyList(data=[_card(key) for key in service.access.ring])

    posted: dict[int | str, dict[str, Any]] = {
        408: {"model": ErrorReply, "description": "the body did not come in time"},
        409: {"model": ErrorReply, "description": "the file cannot be used; the old keys stay"},
        413: {"model": ErrorReply, "description": "the body is too large"},
        415: {"model": ErrorReply, "description": "the content type is not application/json"},
        429: {"model": ErrorReply, "description": "the key's limit is reached; see Retry-After"},
        503: {"model": ErrorReply, "description": "too much is coming in at once"},
    }

    @app.post(
        "/admin/reload",
        summary="Read the file of keys again, as SIGHUP does",
        responses={**_ERRORS, **posted},
    )
    async def reload() -> ReloadReply:
        if not service.access.ring.can_be_read_again:
            raise ApiError(409, "the keys come from no file (--api-keys)", code="no_key_file")
        try:
            changes = await service.reload_keys()
        except ConfigError as error:
            raise ApiError(409, str(error), code="keys_unusable") from error
        return ReloadReply(added=changes.added, removed=changes.removed, changed=changes.changed)


def _card(key: ApiKey) -> KeyCard:
    expires = None if key.expires is None else datetime.fromtimestamp(key.expires, UTC).isoformat()
    return KeyCard(
        name=key.name,
        scopes=sorted(scope.value for scope in key.scopes),
        expires=expires,
        weight=key.weight,
        requests_per_minute=key.requests_per_minute,
        max_concurrent=key.max_concurrent,
        tokens_per_minute=key.tokens_per_minute,
        tokens_per_day=key.tokens_per_day,
    )
