"""In which form a chat template takes what clients write in several, and what it leaves out: found
by rendering probes.

Clients write a tool call's arguments as JSON in a string, and null for the content of a message
that only calls tools; content may be a list of parts. Templates were written for one form each:
they fail on another, write None, or leave calls out. Some leave out names of speakers, or messages
of roles that they do not know, or refuse a system message that is not the first. Jinja cannot be
asked which names a template reads in which way, so each is rendered with marks in these places,
once for a template.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str | None]  # None where it fails

KNOWN_ROLES = ("system", "user", "assistant", "tool")
_MAX_KEPT = 64  # roles
_NAME, _KEY, _FIRST, _SECOND = "probedcall", "probedkey", "probedone", "probedtwo"
_ID = "probe0001"  # Mistral's templates want nine letters or digits
_USER = {"role": "user", "content": "x"}
_PARAMETERS = {
    "type": "object",
    "properties": {"p": {"type": "string", "description": "p"}},
    "required": ["p"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": _PARAMETERS},
}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "x"}
_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]


class TemplateForms:
    """What one template takes; each is found when it is first asked for."""

    def __init__(self, render: Render, source: str = "") -> None:
        self._render = render
        self._source = source
        self._parts: dict[str, bool] = {}
        self._roles: dict[str, bool] = {}
        self._names: dict[str, bool] = {}

    def role_of(self, role: str) -> str:
        """OpenAI renamed system to developer; few templates know it."""
        is_new = role == "developer" and "developer" not in self._source
        return "system" if is_new else role

    def writes_role(self, role: str) -> bool:
        """Whether messages of an unusual role reach the prompt, and as others than the user's and
        the assistant's do. Where a probe fails the template will say why of the message itself."""
        return _kept(self._roles, role, self._with_role)

    def writes_name(self, role: str) -> bool:
        """Whether the name of a message's author reaches the prompt."""
        return _kept(self._names, role, self._with_name)

    @cached_property
    def writes_late_system(self) -> bool:
        """Whether a system message that follows others reaches the prompt."""
        text = self._render([_USER, {"role": "system", "content": _FIRST}], [_TOOL])
        return text is not None and _FIRST in text

    def takes_parts(self, role: str) -> bool:
        """Whether a list of parts reaches the prompt as their texts."""
        return _kept(self._parts, role, self._with_parts)

    @cached_property
    def writes_tools(self) -> bool:
        """Whether tools reach the prompt."""
        tool = {**_TOOL, "function": {**_TOOL["function"], "name": _NAME}}  # type: ignore[dict-item]
        text = self._render([_USER], [tool])
        return text is not None and _NAME in text

    @cached_property
    def writes_calls(self) -> bool:
        """Whether calls and their results in a conversation reach the prompt."""
        arguments: object = {_KEY: "y"} if self.takes_objects else f'{{"{_KEY}": "y"}}'
        calling = _calling(None if self.takes_null else "", arguments)
        text = self._render([_USER, calling, _RESULT | {"content": _FIRST}], [_TOOL])
        return _has_call(text) and text is not None and _FIRST in text

    @property
    def takes_objects(self) -> bool:
        """Whether arguments are an object in tool calls, and not JSON in a string."""
        return self._call_form[0]

    @property
    def takes_null(self) -> bool:
        """Whether the content of a message with tool calls may be null rather than empty."""
        return self._call_form[1]

    @cached_property
    def _call_form(self) -> tuple[bool, bool]:
        """The first pair of forms in which a call reaches the prompt, and not as Python writes it.

        Where none does: objects, and no null.
        """
        for as_object, arguments in ((True, {_KEY: "y"}), (False, f'{{"{_KEY}": "y"}}')):
            null, empty = (self._with_call(content, arguments) for content in (None, ""))
            if _has_call(null) and not _writes_null(null, empty):
                return as_object, True
            if _has_call(empty):
                return as_object, False
        return True, False

    def _with_call(self, content: str | None, arguments: object) -> str | None:
        return self._render([_USER, _calling(content, arguments), _RESULT], [_TOOL])

    def _with_message(self, role: str, **fields: object) -> str | None:
        """A conversation with a message of the role where one may come."""
        message = (_RESULT if role == "tool" else {}) | {"role": role, **fields}
        arguments = {_KEY: "y"} if role == "tool" and self.takes_objects else "{}"
        before: dict[str, list[Message]] = {
            "user": [],
            "system": [],
            "developer": [],
            "assistant": [_USER],
            "tool": [_USER, _calling("", arguments)],
        }
        after = [_USER] if role in ("system", "developer", "assistant") else []
        return self._render([*before.get(role, [_USER]), message, *after], [_TOOL])

    def _with_parts(self, role: str) -> bool:
        text = self._with_message(role, content=_PARTS)
        if text is None or _FIRST not in text or _SECOND not in text:
            return False
        return not any(f"{mark}text{mark}:" in text for mark in "'\"")

    def _with_role(self, role: str) -> bool:
        text = self._with_message(role, content=_FIRST)
        if text is None:
            return True
        others = (
            self._render([_USER, {"role": other, "content": _FIRST}], [_TOOL])
            for other in ("user", "assistant")
        )
        return _FIRST in text and text not in others

    def _with_name(self, role: str) -> bool:
        text = self._with_message(role, content=_FIRST, name=_SECOND)
        return text is None or _SECOND in text


def _kept(found: dict[str, bool], role: str, probe: Callable[[str], bool]) -> bool:
    """What a probe found for a role, which it is asked once; clients may make up many roles."""
    if role not in found:
        while len(found) >= _MAX_KEPT:
            found.pop(next(iter(found)), None)
        found[role] = probe(role)
    return found[role]


def _has_call(text: str | None) -> bool:
    return text is not None and _NAME in text and _KEY in text and f"'{_KEY}'" not in text


def _writes_null(null: str | None, empty: str | None) -> bool:
    texts = (null or "", empty or "")
    return any(texts[0].count(word) > texts[1].count(word) for word in ("None", "null"))


def _calling(content: str | None, arguments: object) -> Message:
    function = {"name": _NAME, "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
