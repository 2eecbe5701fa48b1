"""Tool calls in syntaxes that are not JSON alone: XML-like parameters, Gemma's and Python's.

A reader gets the text between a call's markers and the types of the tools' parameters; it gives the
calls in it, or None (or ValueError, RecursionError) where that is no call. Values become JSON by
the type that the tool's schema gives them: texts stay texts, everything else is read as JSON where
it is JSON.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class ReadCall(NamedTuple):
    name: str
    arguments: str  # JSON text


# By the names of a tool and of its parameter: whether the value is text.
ParameterTypes = Mapping[str, Mapping[str, bool]]
ReadCalls = Callable[[str, ParameterTypes], list[ReadCall] | None]

# What a model writes may be anything and long: each pattern takes time in proportion to the text.
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
_NAMED_PARAMETER = re.compile(r"<param name=\"([^\"]+)\">(.*?)(?:</param>|$)", re.DOTALL)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_KIMI_CALL = re.compile(r"<\|open\|>call tool=\"([^\"]+)\"[^<]*<\|sep\|>")
_KIMI_ARGUMENT = re.compile(r"<\|open\|>argument key=\"([^\"]+)\" type=\"(\w+)\"<\|sep\|>")
MINIMAX_MARK = "]<]minimax[>["  # before every tag of MiniMax-M3's
_INVOKE = re.compile(
    r"<(?:｜DSML｜|atem:)?invoke name=\"([^\"]+)\">(.*?)(?:</(?:｜DSML｜|atem:)?invoke>|$)",
    re.DOTALL,
)
_INVOKED_PARAMETER = re.compile(
    r"<(?:｜DSML｜|atem:)?parameter name=\"([^\"]+)\"(?: string=\"(true|false)\")?>"
    r"(.*?)(?:</(?:｜DSML｜|atem:)?parameter>|$)",
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


def read_named_parameters(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """name"><param name="key">value</param>, after <function name=" """
    name, found, body = text.partition('">')
    if not found or not name:
        return None
    values = {}
    for key, value in _NAMED_PARAMETER.findall(body):
        whole = _CDATA.fullmatch(value)
        values[key] = _value(whole[1] if whole else value, name, key, types)
    return [_call(name, values)]


def read_kimi(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """<|open|>call tool="name" index="1"<|sep|> with <|open|>argument key="key" type="string"..."""
    calls = []
    for call, body in _closed(text, _KIMI_CALL, "<|close|>call<|sep|>"):
        values = {
            argument[1]: value if argument[2] == "string" else strict_json(value)
            for argument, value in _closed(body, _KIMI_ARGUMENT, "<|close|>argument<|sep|>")
        }
        calls.append(_call(call[1], values))
    return calls or None


def _closed(text: str, opened: re.Pattern[str], close: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each part that has a beginning and an end: its beginning, and what is between them."""
    for part in text.split(close)[:-1]:
        if (found := opened.search(part)) is not None:
            yield found, part[found.end() :]


def read_named_objects(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """[{"name": {"key": "value"}}, ...]"""
    items, calls = strict_json(text), []
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict) or len(item) != 1:
            return None
        name, values = next(iter(item.items()))
        if not isinstance(values, dict):
            return None
        calls.append(_call(name, values))
    return calls or None


def read_minimax_tags(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """<invoke name="name"><key>value</key><list><item>1</item></list></invoke>, a mark before each
    tag."""
    calls = []
    stack: list[tuple[str, list[tuple[str, Any]], str]] = []  # tag, children, text
    for part in text.split(MINIMAX_MARK)[1:]:
        found = re.match(r"<(/?)([^<>]+)>(.*)", part, re.DOTALL)
        if found is None:
            return None
        if not found[1]:
            stack.append((found[2], [], found[3]))
            continue
        tag, children, letters = stack.pop() if stack else ("", [], "")
        if tag.partition(" ")[0] != found[2]:
            return None
        if tag.startswith('invoke name="'):
            calls.append(_call(tag[len('invoke name="') : -1], dict(children)))
        elif stack:
            invoked = stack[0][0][len('invoke name="') : -1] if len(stack) == 1 else ""
            stack[-1][1].append((tag, _tag_value(children, letters, invoked, tag, types)))
    return calls or None


def _tag_value(
    children: list[tuple[str, Any]], letters: str, tool: str, key: str, types: ParameterTypes
) -> Any:
    if not children:
        return _value(letters, tool, key, types) if letters or tool else None
    if all(tag == "item" for tag, _ in children):
        return [value for _, value in children]
    return dict(children)


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


def read_suffixed_arg_keys(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """<tool_call:x>name<tool_sep:x><arg_key:x>..., Hunyuan's tags with a suffix each; several."""
    plain = re.sub(r"<(/?(?:tool_call|tool_sep|arg_key|arg_value)):\w+>", r"<\1>", text)
    calls: list[ReadCall] = []
    for part in plain.split("<tool_call>")[1:]:
        read = read_arg_keys(part.partition("</tool_call>")[0].replace("<tool_sep>", ""), types)
        if read is None:
            return None
        calls += read
    return calls or None


def read_gemma(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """call:name{key:<|"|>text<|"|>,other:1}"""
    found = _gemma_call(text, '<|"|>')
    return None if found is None else [_call(*found)]


def read_function_gemma(text: str, types: ParameterTypes) -> list[ReadCall] | None:
    """call:name{key:<escape>value<escape>}: values of any type are between the marks."""
    found = _gemma_call(text, "<escape>")
    if found is None:
        return None
    name, values = found
    for key, value in values.items():
        values[key] = _value(value, name, key, types) if isinstance(value, str) else value
    return [_call(name, values)]


def _gemma_call(text: str, quote: str) -> tuple[str, dict[str, Any]] | None:
    found = re.fullmatch(r"\s*call:([^\s{]+)(\{.*\})\s*", text, re.DOTALL)
    if found is None:
        return None
    parts = found[2].split(quote)
    if len(parts) % 2 == 0:
        return None  # a text without an end
    written = [
        json.dumps(part, ensure_ascii=False) if number % 2 else _quoted_keys(part)
        for number, part in enumerate(parts)
    ]
    values = strict_json("".join(written))
    return (found[1], values) if isinstance(values, dict) else None


def _quoted_keys(text: str) -> str:
    text = re.sub(r"([{,]\s*)([^\s{},:\"\[\]]+)(\s*:)", r'\1"\2"\3', text)
    return re.sub(r"(?<=[:,\[])(None|True|False)\b", lambda word: _WORDS[word[0]], text)


_WORDS = {"None": "null", "True": "true", "False": "false"}  # as Python writes JSON's


def read_python(text: str, _: ParameterTypes) -> list[ReadCall] | None:
    """[name(key="text", other=1), ...], or calls without the list, one a line."""
    whole = text.strip()
    for written in (whole, whole.replace("\n", "\\n")):  # line ends in texts may not be escaped
        try:
            return _python_calls(written)
        except SyntaxError:
            continue
        except (ValueError, RecursionError, MemoryError, TypeError):
            return None
    return None


def _python_calls(text: str) -> list[ReadCall] | None:
    nodes: list[ast.expr] = []
    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.Expr):
            return None
        found = statement.value
        nodes += found.elts if isinstance(found, ast.List | ast.Tuple) else [found]
    return [_python_call(node) for node in nodes] or None


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
        return _python_value(text)


def _python_value(text: str) -> Any:
    """Some templates write what is no text as Python does; what is neither is text."""
    if text.strip()[:1] not in ("{", "[") and text.strip() not in _WORDS:
        return text
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return text


def _call(name: str, values: Mapping[str, Any]) -> ReadCall:
    return ReadCall(name, json_text(values))


def json_text(value: Any) -> str:
    """Without NaN and Infinity (ValueError). Halves of surrogate pairs, which a model may write as
    escapes and no reply can hold, stay escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def is_text(text: str) -> bool:
    """Whether it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
