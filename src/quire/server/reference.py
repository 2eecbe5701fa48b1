"""The reference of bodies: what each field is, does and looks like, for /docs and docs/api.md."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.server.fields import Standing, policy_of_text

Schema = Mapping[str, Any]  # a JSON schema, as pydantic writes it

_MAX_DEPTH = 4  # of objects in objects
_KINDS = {"string": "text", "boolean": "true or false", "null": "null"}
_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
# Where the schema has no example of its own.
_EXAMPLES: Mapping[str, Any] = {
    "model": "quire",
    "messages": [{"role": "user", "content": "Hello"}],
    "role": "user",
    "name": "weather",
    "content": "Hello",
    "prompt": "Once upon a time",
    "input": "Once upon a time",
    "user": "alice",
    "timeout": 30,
    "max_tokens": 100,
    "max_completion_tokens": 100,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "n": 2,
    "seed": 42,
    "stop": ["\n\n"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"50": -100},
    "stop_token_ids": [2],
    "logprobs": 5,
    "top_logprobs": 5,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
    "structured_outputs": {"choice": ["yes", "no"]},
    "choice": ["yes", "no"],
    "guided_choice": ["yes", "no"],
    "json": _SCHEMA,
    "schema": _SCHEMA,
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "regex": "[0-9]{4}",
    "guided_regex": "[0-9]{4}",
    "grammar": 'root ::= "yes" | "no"',
    "guided_grammar": 'root ::= "yes" | "no"',
    "chat_template_kwargs": {"enable_thinking": False},
    "tokens": [1, 2, 3],
}


class FieldRow(NamedTuple):
    """A field of a body, or of an object in it, such as messages[].role."""

    name: str
    kind: str
    standing: Standing
    text: str
    example: Any
    is_required: bool


def field_rows(
    schema: Schema, definitions: Mapping[str, Schema], prefix: str = "", depth: int = 0
) -> list[FieldRow]:
    """All fields: the obeyed ones in order, each before those of its objects; then the accepted
    and the refused ones."""
    rows: dict[str, FieldRow] = {}
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        standing, text, neutral = policy_of_text(field.get("description", ""), field.get("enum"))
        path = f"{prefix}{name}"
        kind = _listed([_shown(value) for value in (None, *neutral)])
        if standing is not Standing.REFUSED:
            kind = _kind(field, definitions)
        example = None if standing is Standing.REFUSED else _example(name, field, definitions)
        rows[path] = FieldRow(path, kind, standing, text, example, name in required)
        if depth < _MAX_DEPTH and standing is Standing.OBEYED:
            for inner, mark in _objects(field, definitions):
                for row in field_rows(inner, definitions, f"{path}{mark}.", depth + 1):
                    rows[row.name] = _merged(rows.get(row.name), row)
    order = list(Standing)
    return sorted(rows.values(), key=lambda row: order.index(row.standing))


def example_body(schema: Schema, definitions: Mapping[str, Schema]) -> dict[str, Any]:
    """The smallest body: what is required."""
    fields = schema.get("properties", {})
    required = schema.get("required", ())
    return {name: _example(name, fields[name], definitions) for name in required}


def _merged(one: FieldRow | None, other: FieldRow) -> FieldRow:
    """A field that several objects have which may stand in one place."""
    if one is None:
        return other
    kinds = dict.fromkeys((*one.kind.split(" or "), *other.kind.split(" or ")))
    texts = dict.fromkeys((*one.text.split("; "), *other.text.split("; ")))
    return one._replace(kind=" or ".join(kinds), text="; ".join(texts))


def _options(field: Schema, definitions: Mapping[str, Schema]) -> Iterator[Schema]:
    """The members of a union, without null; references followed."""
    if "$ref" in field:
        yield from _options(definitions[field["$ref"].rpartition("/")[2]], definitions)
    elif members := field.get("anyOf", field.get("oneOf")):
        for member in members:
            yield from _options(member, definitions)
    elif field.get("type") != "null":
        yield field


def _objects(field: Schema, definitions: Mapping[str, Schema]) -> Iterator[tuple[Schema, str]]:
    """The objects with fields that a field holds, and `[]` where they are in a list."""
    for option in _options(field, definitions):
        if option.get("type") == "array":
            for inner, mark in _objects(option.get("items", {}), definitions):
                yield inner, f"[]{mark}"
        elif "properties" in option:
            yield option, ""


def _kind(field: Schema, definitions: Mapping[str, Schema]) -> str:
    """A type in a few words."""
    kinds: dict[str, None] = {}
    for option in _options(field, definitions):
        if "const" in option:
            kinds[_shown(option["const"])] = None
        elif "enum" in option:
            kinds |= dict.fromkeys(_shown(value) for value in option["enum"] if value is not None)
        elif option.get("type") == "array":
            kinds[f"list of {_kind(option.get('items', {}), definitions)}"] = None
        else:
            name = str(option.get("type", "any value"))
            kinds[f"{_KINDS.get(name, name)}{_bounds(option)}"] = None
    return " or ".join(kinds)


def _bounds(option: Schema) -> str:
    low, high = option.get("minimum"), option.get("maximum")
    above, below = option.get("exclusiveMinimum"), option.get("exclusiveMaximum")
    words = [
        *([] if low is None or low < -(2**31) else [f"from {low:g}"]),
        *([] if above is None else [f"above {above:g}"]),
        *([] if high is None or high >= 2**31 - 1 else [f"to {high:g}"]),
        *([] if below is None else [f"below {below:g}"]),
    ]
    return f" {' '.join(words)}" if words else ""


def _listed(words: Sequence[str]) -> str:
    return " or ".join(words)


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _example(name: str, field: Schema, definitions: Mapping[str, Schema]) -> Any:
    if field.get("examples"):
        return field["examples"][0]
    options = list(_options(field, definitions))
    if name in _EXAMPLES and not (options and options[0].get("type") == "boolean"):
        return _EXAMPLES[name]
    return _made(options[0], definitions) if options else None


def _made(option: Schema, definitions: Mapping[str, Schema]) -> Any:
    """A value that a schema allows."""
    if "const" in option:
        return option["const"]
    if "enum" in option:
        return next(value for value in option["enum"] if value is not None)
    match option.get("type"):
        case "array":
            return [_example("", option.get("items", {}), definitions)]
        case "object":
            return example_body(option, definitions) or _first_field(option, definitions)
        case "boolean":
            return True
        case "integer":
            return max(1, option.get("minimum", 1))
        case "number":
            return option.get("maximum", 1) / 2
    return "text"


def _first_field(option: Schema, definitions: Mapping[str, Schema]) -> dict[str, Any]:
    rows = field_rows(option, definitions, depth=_MAX_DEPTH)
    return {row.name: row.example for row in rows[:1] if row.standing is not Standing.REFUSED}
