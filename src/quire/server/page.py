"""The page at /: static files of the package, without data; its script is a client of the API.

Nothing on it comes from another host and nothing in it is inline, which the content security policy
holds browsers to. Text of a model becomes text nodes: `require-trusted-types-for` makes browsers
refuse the ways in which text becomes HTML.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# By path. All of them are the same for everybody and need no key.
PAGE_FILES: Mapping[str, str] = {
    "/": "index.html",
    **{
        f"/static/{name}": name
        for name in ("page.css", "app.js", "api.js", "engine.js", "markdown.js", "icon.svg")
    },
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """GET and HEAD of every file of the page, read once."""
    return [Route(path, _serving(name), methods=["GET"]) for path, name in PAGE_FILES.items()]


def _serving(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = _FOLDER / name
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in [part.strip().removeprefix("W/") for part in known.split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_KINDS[path.suffix])

    return serve
