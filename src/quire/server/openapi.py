"""How the API describes itself: errors, bodies and streams for /openapi.json, and the page under
/docs, plain HTML without a script or another host."""

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from quire.engine.step_log import MAX_STEPS
from quire.server.errors import OPENAI_ERRORS, ErrorShape
from quire.server.fields import Standing, Strict
from quire.server.reference import example_body, field_rows

Responses = dict[int | str, dict[str, Any]]  # as FastAPI takes them

_ANY_ROUTE = {
    401: "no valid key, or one that has expired",
    403: "Host or Origin not allowed, or the key has not the scope",
}
_ANY_POST = {
    408: "the body or the answer did not come in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full or the key's limit reached; see Retry-After",
    503: "loading, shutting down, overloaded, or the executor does not answer",
}
_DESCRIPTIONS = {
    **_ANY_ROUTE,
    **_ANY_POST,
    400: "a field is wrong or not supported; `param` names it",
    404: "no such model",
    409: "not in this state: a file of keys that cannot be used, a file in use, an ended batch",
    500: "this request failed alone",
    529: "the queue is full; see Retry-After",
}
MAX_STEP_ID = 2**53  # what a number of JSON holds everywhere
_SCHEMAS = "#/components/schemas/"

STREAM_CONTENT: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "an event: a chunk in OpenAI's shape, or [DONE]",
            "properties": {"data": {"type": "string"}},
        }
    }
}

LINES_CONTENT: dict[str, Any] = {
    "application/x-ndjson": {
        "schema": {"type": "object", "description": "a line: a part of the answer, or its end"}
    }
}

MODEL_PARAMETER: dict[str, Any] = {
    "name": "model",
    "in": "query",
    "description": "of which model, where there are several",
    "schema": {"type": "string"},
}
STATS_PARAMETERS: tuple[dict[str, Any], ...] = (
    *(
        {
            "name": name,
            "in": "query",
            "description": meaning,
            "schema": {"type": "integer", "minimum": 0, "maximum": most},
        }
        for name, meaning, most in (
            ("steps", "give so many of the engine's latest steps, too", MAX_STEPS),
            ("after", "... of those after the step with this id", MAX_STEP_ID),
        )
    ),
    MODEL_PARAMETER,
)


def error_responses(*statuses: int, shape: ErrorShape = OPENAI_ERRORS) -> Responses:
    """The errors of a route: those of every route, and these."""
    return {
        status: {"model": shape.reply, "description": _DESCRIPTIONS[status]}
        for status in (*_ANY_ROUTE, *statuses)
    }


def post_error_responses(*statuses: int, shape: ErrorShape = OPENAI_ERRORS) -> Responses:
    """The errors of a route with a body: those of every such route, and these."""
    return error_responses(*sorted({*_ANY_POST, *statuses, shape.overloaded}), shape=shape)


def request_body(schema: type[Strict]) -> dict[str, Any]:
    """A body in the description; the route reads it, so that FastAPI does not on the event loop."""
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def describe_bodies(app: FastAPI, schemas: Iterable[type[Strict]]) -> None:
    """Add what `request_body` refers to."""
    describe_rest = app.openapi
    bodies = [(schema, "validation") for schema in schemas]

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, found = models_json_schema(bodies, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
            describe_rest()["components"]["schemas"].update(found["$defs"])
        return describe_rest()

    app.openapi = describe  # type: ignore[method-assign]


# ---- the page


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}h2{border-top:1px solid #ccc;padding-top:1rem}"
    "code{background:#f2f2f2;padding:0 .2em}table{border-collapse:collapse;width:100%}"
    "td,th{border:1px solid #ddd;padding:.2rem .5rem;text-align:left;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}code{background:#222}"
    "td,th{border-color:#333}h2{border-color:#444}}"
    "td{overflow-wrap:anywhere}tr.accepted,tr.refused{opacity:.75}"
)


def docs_page(description: Mapping[str, Any]) -> str:
    """Every route with what it takes and what it answers."""
    info = description["info"]
    schemas = description.get("components", {}).get("schemas", {})
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('description', ''))} The same as "
        "<a href=openapi.json>openapi.json</a>, for programs.</p>",
    ]
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            parts += _route(f"{method.upper()} {path}", route, schemas)
    return "\n".join(parts)


def _route(title: str, route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(title)}</code></h2><p>{escape(route.get('summary', ''))}</p>"
    yield f"<p>{escape(route.get('description', ''))}</p>"
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    reference = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if reference:
        yield from _body(schemas[reference], schemas)
    statuses = ", ".join(f"<code>{escape(status)}</code>" for status in route["responses"])
    yield f"<p>Answers: {statuses}</p>"


def _body(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Every field with its meaning and an example."""
    example = json.dumps(example_body(schema, schemas))
    yield f"<p>For example <code>{escape(example)}</code></p>"
    yield "<table><tr><th>field<th>type<th>meaning<th>example"
    for row in field_rows(schema, schemas):
        mark = " (required)" if row.is_required else ""
        name = f"<tr class={row.standing}><td><code>{escape(row.name)}</code>{mark}"
        if row.standing is Standing.REFUSED:
            meaning = f"<b>refused</b> unless {escape(row.kind)}: {escape(row.text)}"
            yield f"{name}<td><td>{meaning}<td>"
            continue
        effect = "<b>accepted</b>, without effect: " if row.standing is Standing.ACCEPTED else ""
        shown = escape(json.dumps(row.example))
        yield (
            f"{name}<td>{escape(row.kind)}<td>{effect}{escape(row.text)}<td><code>{shown}</code>"
        )
    yield "</table>"
