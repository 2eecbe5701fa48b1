"""Tool calls in syntaxes that are not JSON: XML-like parameters, Gemma's and Python's.

A reader gets the text between a call's markers and the types of the tools' parameters; it gives the
calls in it, or None (or ValueError, RecursionError) where that is no call. Values become JSON by
the type that the tool's schema gives them: texts stay texts, everything else is read as JSON where
it is JSON.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class ReadCall(NamedTuple):
    name: str
    arguments: str  # JSON text


# By the names of a tool and of its parameter: whether the value is text.
ParameterTypes = Mapping[str, Mapping[str, bool]]
ReadCalls = Callable[[str, ParameterTypes], list[ReadCall] | None]

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>|$)\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_INVOKE = re.compile(
    r"<(?:｜DSML｜)?invoke name=\"([^\"]+)\">(.*?)(?:</(?:｜DSML｜)?invoke>|$)", re.DOTALL
)
_INVOKED_PARAMETER = re.compile(
    r"<(?:｜DSML｜)?parameter name=\"([^\"]+)\"(?: string=\"(true|false)\")?>"
    r"(.*?)(?:</(?:｜DSML｜)?parameter>|$)",
    re.DOTALL,
)


def read_parameters(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """<function=name><parameter=key>value</parameter></function>"""
    calls = []
    for name, body in _FUNCTION.findall(text):
        values = {
            key.strip(): _value(
                value.removeprefix("\n").removesuffix("\n"), name, key.strip(), types
            )
            for key, value in _PARAMETER.findall(body)
        }
        calls.append(_call(name, values))
    return calls or None


def read_invocations(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """<invoke name="name"><parameter name="key">value</parameter></invoke>"""
    calls = []
    for name, body in _INVOKE.findall(text):
        values = {}
        for key, is_text, value in _INVOKED_PARAMETER.findall(body):
            values[key] = value if is_text == "true" else _value(value, name, key, types)
        calls.append(_call(name, values))
    return calls or None


def read_arg_keys(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """name<arg_key>key</arg_key><arg_value>value</arg_value>"""
    name = text.partition("<arg_key>")[0].strip()
    if not name or re.search(r"[\s<>{}]", name):
        return None
    values = {}
    for part in text.split("<arg_key>")[1:]:
        key, _, rest = part.partition("</arg_key>")
        value = rest.partition("<arg_value>")[2].partition("</arg_value>")[0]
        values[key.strip()] = _value(value, name, key.strip(), types)
    return [_call(name, values)]


def read_gemma(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """call:name{key:<|"|>text<|"|>,other:1}"""
    found = re.fullmatch(r"\s*call:([^\s{]+)(\{.*\})\s*", text, re.DOTALL)
    if found is None:
        return None
    parts = found[2].split('<|"|>')
    if len(parts) % 2 == 0:
        return None  # a text without an end
    written = [
        json.dumps(part, ensure_ascii=False) if number % 2 else _quoted_keys(part)
        for number, part in enumerate(parts)
    ]
    values = strict_json("".join(written))
    return [_call(found[1], values)] if isinstance(values, dict) else None


def _quoted_keys(text: str) -> str:
    return re.sub(r"([{,]\s*)([^\s{},:\"\[\]]+)(\s*:)", r'\1"\2"\3', text)


def read_python(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """[name(key="text", other=1), ...], or one call without the list."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        nodes = parsed.elts if isinstance(parsed, ast.List | ast.Tuple) else [parsed]
        return [_python_call(node) for node in nodes] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def _python_call(node: ast.expr) -> ReadCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument has no name")
        values[keyword.arg] = _literal(keyword.value)
    return _call(ast.unparse(node.func), values)


def _literal(node: ast.expr) -> Any:
    """A Python literal, or JSON's true, false and null, as models mix them."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    value = ast.literal_eval(node)
    json.dumps(value)  # raises for bytes, sets and others that are no JSON
    return value


def _value(text: str, tool: str, key: str, types: ParameterTypes) -> Any:
    if types.get(tool, {}).get(key, False):
        return text
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return text


def _call(name: str, values: Mapping[str, Any]) -> ReadCall:
    return ReadCall(name, json.dumps(values, ensure_ascii=False, allow_nan=False))


def strict_json(text: str) -> Any:
    """JSON without Python's NaN and Infinity; ValueError or RecursionError where it is none."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """Of each tool's parameters, by name, whether a value is text alone."""
    found: dict[str, dict[str, bool]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        found[str(function.get("name"))] = {
            str(key): isinstance(value, Mapping) and value.get("type") == "string"
            for key, value in (properties if isinstance(properties, Mapping) else {}).items()
        }
    return found
