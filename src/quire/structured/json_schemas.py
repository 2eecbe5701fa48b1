"""JSON schemas: the schemas within one, and others that say the same in words of llguidance's."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ABOUT = ("title", "description", "$comment", "default", "examples", "deprecated")
_UNKNOWN_FORMAT = re.compile("Unknown format: (.*)")
_DIALECT = re.compile(r"https?://json-schema\.org/((?:draft[-/][\w-]+/)?schema)#?")
_MOST_REFERENCES = 8
Change = Callable[[dict[str, Any]], Any]


def accepted(schema: Any, error: str) -> Any:
    """What says the same and may be taken, where llguidance said `error` of the schema; the schema
    itself where nothing is known that helps."""
    if found := _UNKNOWN_FORMAT.search(error):
        return _changed(schema, partial(_without_format, name=found[1]))
    if "Unimplemented keys" in error:
        return _changed(schema, partial(_in_known_words, schema))
    if "is not present in a registry" in error and isinstance(schema, dict):
        return _in_known_dialect(schema)
    return schema


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects within a schema, outer ones first, definitions last."""
    if isinstance(schema, dict):
        yield path, schema
        last = ("$defs", "definitions")
        for key in sorted(schema, key=lambda key: key in last):
            yield from subschemas(schema[key], f"{path}/{key}")
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from subschemas(item, f"{path}/{index}")


def _changed(schema: Any, change: Change) -> Any:
    """With each schema in it changed, inner ones first."""
    if isinstance(schema, list):
        return [_changed(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    own = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            own[key] = {name: _changed(item, change) for name, item in value.items()}
        else:
            own[key] = value if key in _VALUES else _changed(value, change)
    return change(own)


def _without_format(schema: dict[str, Any], name: str) -> Any:
    """A format that nobody knows says nothing (JSON Schema, 7.2.1)."""
    return {key: value for key, value in schema.items() if key != "format" or value != name}


def _in_known_words(root: Any, schema: dict[str, Any]) -> Any:
    """`not` of all is false; no `uniqueItems` is as without; names have the pattern of names."""
    if schema.get("not") is True or schema.get("not") == {}:
        return False
    own = dict(schema)
    if own.get("uniqueItems") is False:
        del own["uniqueItems"]
    if "propertyNames" in own:
        return _named_otherwise(own, _said(root, own["propertyNames"]))
    return own


def _said(root: Any, names: Any) -> Any:
    """What a schema says of a string, after references to others."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(names, dict):
            break
        names = {key: value for key, value in names.items() if key not in _ABOUT}
        reference = names.get("$ref")
        if len(names) > 1 or not isinstance(reference, str) or not reference.startswith("#/"):
            break
        names = root
        for part in reference[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            names = names.get(part) if isinstance(names, dict) else None
    if isinstance(names, dict) and names.get("type") == "string":
        del names["type"]
    return names


def _named_otherwise(schema: dict[str, Any], names: Any) -> Any:
    """Without `propertyNames`, where that can be said by which properties there are."""
    own = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True or names == {}:
        return own
    if not isinstance(names, dict) or not own.keys().isdisjoint(_BY_NAME[:2]):
        return schema
    value = own.get("additionalProperties", True)
    own["additionalProperties"] = False
    match names:
        case {"enum": [*texts]} if len(names) == 1:
            return {**own, "properties": {t: value for t in texts if isinstance(t, str)}}
        case {"const": str(text)} if len(names) == 1:
            return {**own, "properties": {text: value}}
        case {"pattern": str(pattern)} if len(names) == 1:
            return {**own, "patternProperties": {pattern: value}}
        case _ if names.keys() <= {"minLength", "maxLength"}:
            pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            return {**own, "patternProperties": {pattern: value}}
    return schema


def _in_known_dialect(schema: dict[str, Any]) -> dict[str, Any]:
    """A dialect of json-schema.org by the address that it has; without a version it is today's."""
    found = _DIALECT.fullmatch(str(schema.get("$schema")))
    if not found:
        return schema
    own = {key: value for key, value in schema.items() if key != "$schema"}
    if found[1] == "schema":
        return own
    scheme = "https" if found[1].startswith("draft/") else "http"
    return {"$schema": f"{scheme}://json-schema.org/{found[1]}", **own}
