"""ChatTemplate: chat messages to the prompt text that a model was trained on. Messages are checked,
and turned into the plain data that templates read.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.core.errors import ModelFileError, QuireError, RequestError
from quire.tokenizer.template_forms import KNOWN_ROLES, Message, TemplateForms
from quire.tokenizer.template_process import PROCESSES, TemplateProcessError
from quire.tokenizer.template_worker import Question, encoded

MAX_SOURCE_LENGTH = 256 * 1024  # characters; the largest in use have some seventeen thousand
COMPILE_SECONDS = 10.0  # of processor time
RENDER_SECONDS = 2.0  # the same, for any messages ...
RENDER_SECONDS_PER_BYTE = 2e-6  # ... and more for long ones
MAX_CHARACTERS = 1 << 20  # of the prompt, for any messages ...
MAX_CHARACTERS_PER_BYTE = 4  # ... and more for long ones

# What the engine and jinja set; a request's variables have other names.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
    | {"unk_token", "pad_token"}
    | {"strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "self", "loop"}
)
MAX_VARIABLES = 64
_MAX_NAME_LENGTH = 64


class RenderedChat(NamedTuple):
    """A prompt, and which of its characters the template wrote; all others are the request's."""

    text: str
    own_spans: Sequence[tuple[int, int]]  # in order; two that touch are separate


class ChatTemplate:
    """A compiled chat template. Immutable, and safe to share between threads.

    It is compiled and rendered in another process (see `template_process`), until it is closed.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        unk_token: str | None = None,
        pad_token: str | None = None,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        others = {"unk_token": unk_token, "pad_token": pad_token}  # not defined where there is none
        self._tokens |= {name: text for name, text in others.items() if text is not None}
        self._key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        if len(source) > MAX_SOURCE_LENGTH:
            raise ModelFileError(
                f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_LENGTH}"
            )
        self._compile()
        self.forms = TemplateForms(self._probed, source)
        PROCESSES.open(self)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """The prompt for a conversation; `variables` are the template's own, such as
        enable_thinking. With `continue_final_message` it ends where the last message's content
        does, for the model to go on with it.

        A RequestError means that these messages are wrong, or that the template refuses them; a
        ModelFileError that the template exceeds its limits, such as by an endless loop.
        """
        values = plain_values(messages, tools, variables, self.forms)
        values["add_generation_prompt"] = bool(add_generation_prompt)
        if not continue_final_message:
            return self._rendered(encoded(values))
        _mark_end(values["messages"][-1], f"messages[{len(messages) - 1}].content")
        return _cut_at_mark(self._rendered(encoded(values)))

    def _probed(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        values = {"messages": messages, "tools": tools, "documents": None}
        try:
            return self._rendered(encoded(values | {"add_generation_prompt": True})).text
        except (RequestError, ModelFileError):
            return None

    def close(self) -> None:
        """End the processes, if no other template uses them."""
        PROCESSES.close(self)

    def _compile(self) -> None:
        head = Question(key=self._key, source=self.source, seconds=COMPILE_SECONDS)
        try:
            reply = PROCESSES.ask(head)
        except TemplateProcessError as error:
            raise ModelFileError(f"the chat template does not compile: {error}") from None
        if "error" in reply:
            raise ModelFileError(f"the chat template does not compile: {reply['reason']}")

    def _rendered(self, values: bytes) -> RenderedChat:
        head: Question = {
            "key": self._key,
            "tokens": self._tokens,
            "seconds": RENDER_SECONDS + RENDER_SECONDS_PER_BYTE * len(values),
            "max_characters": MAX_CHARACTERS + MAX_CHARACTERS_PER_BYTE * len(values),
        }
        try:
            reply = PROCESSES.ask(head, values)
            if reply.get("error") == "unknown":  # this process has not compiled it
                head |= {"source": self.source, "seconds": head["seconds"] + COMPILE_SECONDS}
                reply = PROCESSES.ask(head, values)
        except TemplateProcessError as error:
            raise ModelFileError(f"the chat template was stopped: {error}") from None
        if "error" in reply:
            raise _as_error(reply["error"], reply["reason"])
        return RenderedChat(reply["text"], [(start, end) for start, end in reply["spans"]])


_END_MARK = "\ue000end of the last message\ue001"


def _mark_end(message: dict[str, Any], where: str) -> None:
    """Put a mark after the text of a message, so that its place in the prompt can be found."""
    content = message["content"]
    if isinstance(content, str) and content:
        message["content"] = content + _END_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _END_MARK
    else:
        raise _wrong(where, " is empty: there is no text to continue")


def _cut_at_mark(chat: RenderedChat) -> RenderedChat:
    end = chat.text.rfind(_END_MARK)
    if end < 0:
        raise RequestError(
            "the chat template does not write the last message's text, so it cannot be continued",
            param="continue_final_message",
        )
    spans = [(start, min(stop, end)) for start, stop in chat.own_spans if start < end]
    return RenderedChat(chat.text[:end], spans)


def _as_error(kind: str, reason: str) -> QuireError:
    if kind == "refused":
        return RequestError(f"the chat template refuses the messages: {reason}", param="messages")
    if kind == "failed":
        return RequestError(f"the chat template fails on the messages: {reason}", param="messages")
    return ModelFileError(f"the chat template was stopped: {reason}")


# ---- messages


MAX_VALUES = 200_000  # of a request: messages, their fields, and all that is in them
_MAX_DEPTH = 64
_MAX_INTEGER_BITS = 4096
_MAX_NEW_ROLES = 8  # of one conversation; each is probed
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_SHOWN_KEY_LENGTH = 40  # characters of a key that an error repeats


def plain_values(messages: Any, tools: Any, variables: Any, forms: TemplateForms) -> dict[str, Any]:
    """What a template reads of a request; RequestError says what of it is wrong, and where."""
    copier = _Copier()
    values = {"documents": None} | _plain_variables(copier, variables)
    values["messages"] = _plain_messages(copier, messages, forms)
    values["tools"] = _plain_tools(copier, tools)
    return values


def _wrong(where: str, reason: str) -> RequestError:
    """`where` leads to the value, such as messages[0].content; its first name is the parameter."""
    return RequestError(f"{where}{reason}", param=re.split(r"[.\[]", where)[0])


class _InvalidValueError(Exception):
    """What is wrong with a value, and the path to it, the last step first."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[str] = []


class _Copier:
    """Copies in JSON's types alone, so that a template gets no object with methods of its own.

    Paths are written only for values that are wrong.
    """

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def plain(self, value: Any, where: str) -> Any:
        try:
            return self._copy(value, 0)
        except _InvalidValueError as error:
            raise _wrong(where, f"{''.join(reversed(error.steps))} {error.reason}") from None

    def _copy(self, value: Any, depth: int) -> Any:
        if type(value) is str or value is None or isinstance(value, bool):
            return value
        if depth > _MAX_DEPTH:
            raise _InvalidValueError(f"is nested more than {_MAX_DEPTH} deep")
        if isinstance(value, str | int | float):
            return _plain_scalar(value)
        if isinstance(value, Mapping):
            return self._copy_mapping(value, depth)
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return self._copy_sequence(value, depth)
        raise _InvalidValueError(f"must be plain JSON data, got {type(value).__name__}")

    def _copy_mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        self._count(len(value))
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise _InvalidValueError(f"has the key {key!r:.100}; keys must be strings")
            try:
                copy[str(key)] = self._copy(item, depth + 1)
            except _InvalidValueError as error:
                error.steps.append(f".{_shortened(key)}")
                raise
        return copy

    def _copy_sequence(self, value: Sequence[Any], depth: int) -> list[Any]:
        self._count(len(value))
        copy = []
        for item in value:
            try:
                copy.append(self._copy(item, depth + 1))
            except _InvalidValueError as error:
                error.steps.append(f"[{len(copy)}]")
                raise
        return copy

    def _count(self, num_values: int) -> None:
        self._left -= num_values
        if self._left < 0:
            raise _InvalidValueError(f"is too much: a request may hold {MAX_VALUES} values")


def _plain_scalar(value: str | int | float) -> str | int | float:
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise _InvalidValueError(f"is an integer of more than {_MAX_INTEGER_BITS} bits")
    kind = str if isinstance(value, str) else int if isinstance(value, int) else float
    return kind(value)


def _shortened(key: str) -> str:
    return key if len(key) <= _SHOWN_KEY_LENGTH else f"{key[:_SHOWN_KEY_LENGTH]}…"


def _plain_variables(copier: _Copier, variables: Any) -> dict[str, Any]:
    """A template's variables by name, as plain data."""
    where = "chat_template_kwargs"
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise _wrong(where, f" must be an object, got {type(variables).__name__}")
    if len(variables) > MAX_VARIABLES:
        raise _wrong(where, f" has {len(variables)} names; the limit is {MAX_VARIABLES}")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MAX_NAME_LENGTH:
            raise _wrong(where, f" has the name {name!r:.100}, which no template can read")
        if name in RESERVED:
            raise _wrong(where, f".{name} is set by the engine and cannot be given")
    copied: dict[str, Any] = copier.plain(variables, where)
    return copied


def _plain_messages(copier: _Copier, messages: Any, forms: TemplateForms) -> list[dict[str, Any]]:
    """Messages of plain data, in the forms that the template takes."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _wrong("messages", f" must be a list of at least one message, got {messages!r:.100}")
    found = [
        _plain_message(copier, message, f"messages[{n}]", forms)
        for n, message in enumerate(messages)
    ]
    _check_roles(found, forms)
    _write_names(found, forms)
    return _with_late_systems(found, forms)


def _check_roles(messages: Sequence[Mapping[str, Any]], forms: TemplateForms) -> None:
    """No message is left out of the prompt unnoticed."""
    if len({message["role"] for message in messages}.difference(KNOWN_ROLES)) > _MAX_NEW_ROLES:
        raise _wrong("messages", f" has more than {_MAX_NEW_ROLES} roles beside the usual ones")
    for n, message in enumerate(messages):
        role = message["role"]
        if role not in KNOWN_ROLES and not forms.writes_role(role):
            raise RequestError(
                f"messages[{n}].role is {role!r}, which the model's chat template leaves out or "
                "does not tell from others: use system, user or assistant",
                param=f"messages[{n}].role",
            )


def _write_names(messages: Sequence[dict[str, Any]], forms: TemplateForms) -> None:
    """Put names before the text where the template has no place for them. Those that tell nobody
    apart are left out: the name of the only system or assistant, and "user" for the user.

    A tool's name is that of the call which tool_call_id names.
    """
    speakers: dict[str, set[object]] = {}
    for message in messages:
        speakers.setdefault(message["role"], set()).add(message.get("name"))
    for message in messages:
        role, name = message["role"], message.get("name")
        if name is None or role == "tool" or forms.writes_name(role):
            continue
        if len(speakers[role]) > 1 or (role == "user" and name != role):
            _write_name(message, name)


def _write_name(message: dict[str, Any], name: str) -> None:
    content = message["content"]
    if isinstance(content, str) and content:
        message["content"] = f"{name}: {content}"
    elif isinstance(content, list) and content:
        content[0] = {**content[0], "text": f"{name}: {content[0]['text']}"}


def _with_late_systems(
    messages: list[dict[str, Any]], forms: TemplateForms
) -> list[dict[str, Any]]:
    """Where the template has no place for system messages that follow others, they are the user's:
    text of the user's message beside them, as some templates want roles to alternate."""
    num_first = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    late = {n for n in range(num_first, len(messages)) if messages[n]["role"] == "system"}
    if not late or forms.writes_late_system:
        return messages
    found: list[dict[str, Any]] = []
    for n, message in enumerate(messages):
        is_late = n in late
        if is_late:
            content = _plain_content(message["content"], "user", f"messages[{n}].content", forms)
            message = {"role": "user", "content": content}
        is_beside = is_late or n - 1 in late
        if is_beside and found and found[-1]["role"] == message["role"] == "user":
            before = found.pop()
            message = {**before, "content": _both(before["content"], message["content"])}
        found.append(message)
    return found


def _both(first: str | list[Any], second: str | list[Any]) -> str | list[Any]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in (first, second)]
    return [*parts[0], *parts[1]]


def _plain_tools(copier: _Copier, tools: Any) -> list[Any] | None:
    """Descriptions of tools as plain data; none at all are None."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise _wrong("tools", f" must be a list, got {type(tools).__name__}")
    for n, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _wrong("tools", f"[{n}] must be an object, got {type(tool).__name__}")
    return copier.plain(tools, "tools") or None


def _plain_message(
    copier: _Copier, message: Any, where: str, forms: TemplateForms
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, f" must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(where, f".role must be a non-empty string, got {role!r:.100}")
    copy: dict[str, Any] = copier.plain(message, where)
    copy["role"] = role = forms.role_of(role)
    calls = copy.get("tool_calls")
    if calls:
        copy["tool_calls"] = _plain_calls(copier, calls, f"{where}.tool_calls", forms)
    if copy.get("content") is not None:
        copy["content"] = _plain_content(copy["content"], role, f"{where}.content", forms)
    elif calls:
        copy["content"] = None if forms.takes_null else ""
    else:
        raise _wrong(where, ".content is missing")
    return _with_reasoning(copy)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """With the reasoning by each name that templates read, whichever the client has for it.

    gpt-oss's template refuses `thinking` beside text and calls."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name)), None)
    if reasoning is None:
        return message
    names = set(_REASONING_NAMES)
    if message["content"] and message.get("tool_calls"):
        names.discard("thinking")
    return {**dict.fromkeys(names, reasoning), **message}


def _plain_content(content: Any, role: str, where: str, forms: TemplateForms) -> Any:
    joined = _joined_content(content, where)
    return content if isinstance(content, list) and forms.takes_parts(role) else joined


def _joined_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, f" must be a string or a list of parts, got {content!r:.100}")
    return "\n".join(_part_text(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(where, f" must be an object with a type, got {part!r:.100}")
    if part.get("type") != "text":
        raise _wrong(where, f".type {part.get('type')!r:.100} is not supported; supported: 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(where, f".text must be a string, got {text!r:.100}")
    return text


def _plain_calls(copier: _Copier, calls: Any, where: str, forms: TemplateForms) -> list[Any]:
    if not isinstance(calls, list):
        raise _wrong(where, f" must be a list, got {type(calls).__name__}")
    for n, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(where, f"[{n}].function must be an object with a name")
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = function["arguments"] = "{}"  # as clients put streams of none together
        path = f"{where}[{n}].function.arguments"
        if isinstance(arguments, str) and forms.takes_objects:
            function["arguments"] = copier.plain(_parsed(arguments, path), path)
        elif isinstance(arguments, dict) and not forms.takes_objects:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return calls


def _parsed(arguments: str, where: str) -> Any:
    """OpenAI's API writes arguments as JSON in a string; most templates expect the object in it."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise _wrong(where, f" is not JSON: {error}") from None
