"""docs/api.md lists every endpoint and every field of every body: obeyed, accepted or refused.

After a route or a field changes, write it again:

    python -m tests.server.test_api_page
"""

from pathlib import Path
from typing import Any

import pytest

from quire.server.app import BODIES, create_routes
from quire.server.fields import Standing, Strict, policies
from quire.server.openapi import docs_page
from quire.server.reference import FieldRow, example_body, field_rows
from quire.server.service import Service
from quire.server.settings import ServerSettings

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"


def description() -> dict[str, Any]:
    def never(_: object) -> Any:
        raise AssertionError

    app: Any = create_routes(Service(ServerSettings(), never))
    found: dict[str, Any] = app.openapi()
    return found


def body_of(route: dict[str, Any]) -> str | None:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    return content.get("schema", {}).get("$ref", "").rpartition("/")[2] or None


def endpoints_table(paths: dict[str, Any]) -> str:
    lines = ["| endpoint | what it does |", "|---|---|"]
    for path, methods in paths.items():
        for method, route in methods.items():
            lines.append(f"| `{method.upper()} {path}` | {route.get('summary', '')} |")
    return "\n".join(lines) + "\n"


def line(row: FieldRow) -> str:
    required = ", required" if row.is_required and "." not in row.name else ""
    cells = (f"`{row.name}`", f"{row.standing}{required}", row.kind, row.text)
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def tables() -> str:
    found = description()
    schemas = found["components"]["schemas"]
    paths: dict[str, list[str]] = {}
    for path, methods in found["paths"].items():
        for route in methods.values():
            if (name := body_of(route)) is not None:
                paths.setdefault(name, []).append(path)
    parts = [endpoints_table(found["paths"])]
    for name, served in paths.items():
        parts.append(f"## {', '.join(f'`{path}`' for path in served)}\n")
        rows = map(line, field_rows(schemas[name], schemas))
        parts.append("\n".join(["| field | | takes | |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def written(page: str) -> str:
    """The page with today's tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def test_the_page_lists_every_endpoint_and_field() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.server.test_api_page"


@pytest.mark.parametrize("schema", BODIES)
def test_every_field_has_a_row_and_an_example_that_is_valid(schema: type[Strict]) -> None:
    found = schema.model_json_schema()
    definitions = found.get("$defs", {})
    rows = {row.name: row for row in field_rows(found, definitions)}
    smallest = example_body(found, definitions)
    for name, policy in policies(schema).items():
        row = rows[name]
        assert row.standing is policy.standing
        if row.standing is not Standing.REFUSED:
            assert row.example is not None, name
            schema.model_validate({**smallest, name: row.example})


def test_docs_explain_every_field_with_an_example() -> None:
    found = description()
    page = docs_page(found)
    for schema in BODIES:
        for name in policies(schema):
            assert f"<code>{name}</code>" in page
    assert "messages[].role" in page
    assert "<b>refused</b> unless null or false: use n and choose yourself" in page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
