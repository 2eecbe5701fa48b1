"""Paths that there are not: what to say of those that other servers have."""

from collections.abc import Mapping
from difflib import get_close_matches

from quire.server.errors import ApiError
from quire.server.keys import ROUTES

_MAX_COMPARED = 100  # characters
_NO_FILES = "quire keeps files of requests alone (/v1/files): give texts in the request"
_NO_SENSES = "quire works with text alone"
_NO_AGENTS = "quire answers requests, it runs no agents: use /v1/chat/completions or /v1/responses"
_OTHER_MODELS = (
    "a server's models are chosen when it starts: `quire pull`, `quire models` and `quire rm` are "
    "for their files, `quire serve NAME ...` and `--models FOLDER` serve them"
)
_NO_ADAPTERS = "quire serves models with their adapters merged"
# By how the path begins; what is longer comes first.
_ELSEWHERE: Mapping[str, str] = {
    "/v1/audio": _NO_SENSES,
    "/v1/images": _NO_SENSES,
    "/v1/videos": _NO_SENSES,
    "/v1/realtime": _NO_SENSES,
    "/v1/uploads": _NO_FILES,
    "/v1/vector_stores": _NO_FILES,
    "/v1/containers": _NO_FILES,
    "/v1/messages/batches": "use /v1/files and /v1/batches, as OpenAI's client does",
    "/v1/fine_tuning": "quire does not train",
    "/v1/evals": "quire does not evaluate: clients such as lm-eval do",
    "/v1/moderations": "quire does not moderate",
    "/v1/assistants": _NO_AGENTS,
    "/v1/threads": _NO_AGENTS,
    "/v1/conversations": _NO_AGENTS,
    "/v1/load_lora_adapter": _NO_ADAPTERS,
    "/v1/unload_lora_adapter": _NO_ADAPTERS,
    "/lora-adapters": _NO_ADAPTERS,
    "/api/pull": _OTHER_MODELS,
    "/api/create": _OTHER_MODELS,
    "/api/push": _OTHER_MODELS,
    "/api/delete": _OTHER_MODELS,
    "/api/copy": _OTHER_MODELS,
    "/api/blobs": _OTHER_MODELS,
    "/completion": "use /v1/completions",
    "/generate": "use /v1/completions",
    "/embedding": "use /v1/embeddings",
    "/infill": "use /v1/completions with prompt and suffix",
    "/apply-template": "/tokenize shows the tokens of a conversation",
    "/slots": "use /v1/stats",
    "/pooling": "use /v1/embeddings",
    "/classify": "quire has no classifiers",
}


def check_path(path: str) -> None:
    """A 404 for a path that no route has."""
    variable = (route.partition("{")[0] for route in ROUTES if "{" in route)
    if path not in ROUTES and not any(path.startswith(prefix) for prefix in variable):
        raise no_path(path)


def no_path(path: str) -> ApiError:
    """The 404 of a path, with what to use instead."""
    starts = sorted((start for start in _ELSEWHERE if path.startswith(start)), key=len)
    hint = _ELSEWHERE[starts[-1]] if starts else _nearest(path)
    return ApiError(404, f"there is nothing at {path:.100}: {hint}", code="unknown_path")


def _nearest(path: str) -> str:
    """Compared without the version, which most have in common."""
    fixed = {route.removeprefix("/v1"): route for route in ROUTES if "{" not in route}
    close = get_close_matches(path[:_MAX_COMPARED].removeprefix("/v1"), fixed, 1, cutoff=0.7)
    return f"did you mean {fixed[close[0]]}?" if close else "see /docs"
