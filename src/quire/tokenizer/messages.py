"""Chat messages as requests bring them: checked, and turned into the plain data templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.errors import RequestError

_MAX_DEPTH = 64


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of plain data, their contents strings; RequestError says which one is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages must be a list of at least one message, got {messages!r:.100}"
        )
    return [_plain_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def plain_tools(tools: Any) -> list[Any] | None:
    """Descriptions of tools as plain data; none at all are None."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}")
    for n, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{n}] must be an object, got {type(tool).__name__}")
    return plain(tools, "tools") or None


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy in JSON's types alone: a template meets no object with a life of its own."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        kind = str if isinstance(value, str) else int if isinstance(value, int) else float
        return kind(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where} has the key {key!r}; keys must be strings")
        return {str(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    raise RequestError(f"{where} must be plain JSON data, got {type(value).__name__}")


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, got {role!r:.100}")
    copy: dict[str, Any] = plain(message, where)
    if message.get("tool_calls"):
        copy["tool_calls"] = _plain_calls(copy["tool_calls"], f"{where}.tool_calls")
        if copy.get("content") is None:
            copy["content"] = ""  # most templates would fail on null
    if copy.get("content") is None:
        raise RequestError(f"{where}.content is missing")
    copy["content"] = _joined_content(copy["content"], f"{where}.content")
    return copy


def _joined_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts, got {content!r:.100}")
    return "\n".join(_part_text(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object with a type, got {part!r:.100}")
    if part.get("type") != "text":
        raise RequestError(
            f"{where}.type {part.get('type')!r:.100} is not supported; supported: 'text'"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, got {text!r:.100}")
    return text


def _plain_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list, got {type(calls).__name__}")
    for n, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{n}].function must be an object with a name")
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed_arguments(
                function["arguments"], f"{where}[{n}].function.arguments"
            )
    return calls


def _parsed_arguments(arguments: str, where: str) -> Any:
    """OpenAI's API writes arguments as JSON in a string; templates expect the object in it."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}") from None
    return plain(parsed, where)
