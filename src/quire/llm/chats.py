"""ChatTurn: what a call says of the answer to a conversation (tools, reasoning), as template
variables, masks and a parser of the answer.

Tools are shown by the model's template. Where that cannot, a system message describes them, and
calls and results of the conversation become text in the same form. Where it shows tools alone, as
Granite 3's does, these are written in the form that it asks the model for.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from quire.chat import Answer, AnswerParser, ChatForm, form_of, parameter_types, parser_of
from quire.chat.constraints import answer_constraint, control_tokens, thinking_of
from quire.chat.forms import GENERIC, CallForm
from quire.core.errors import RequestError
from quire.core.request import FinishReason, RequestOutput
from quire.core.sampling import SamplingParams
from quire.tokenizer import ChatTemplate, Tokenizer
from quire.tokenizer.chat_template import RenderedChat
from quire.tokenizer.template_text import TemplateText, joined, marks_of

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]  # descriptions of functions, as in OpenAI's API
TemplateVariables = Mapping[str, object]  # of a chat template, such as enable_thinking
ToolChoice = str | Mapping[str, object]  # "auto", "none", "required", or OpenAI's objects
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TOOLS = 512
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning off
_INTRODUCTION = """\
You can call tools. These are the tools, one JSON object a line:
<tools>
{tools}
</tools>
To call tools, answer with one or more of these, and with nothing else:
<tool_call>
{{"name": "<the tool's name>", "arguments": <its arguments, a JSON object>}}
</tool_call>
You are given each result between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class ChatOptions:
    """What a call may say of the answer, beside sampling."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: TemplateVariables | None = None
    is_structured: bool = False  # SamplingParams ask for a form of the answer

    def __post_init__(self) -> None:
        if not isinstance(self.parallel_tool_calls, bool):
            given = self.parallel_tool_calls
            raise RequestError(
                f"parallel_tool_calls must be true or false, got {given!r:.100}",
                param="parallel_tool_calls",
            )
        budget = self.thinking_token_budget
        if budget is not None and (type(budget) is not int or budget < 0):
            raise RequestError(
                f"thinking_token_budget must be an integer of at least 0, got {budget!r:.100}",
                param="thinking_token_budget",
            )


@dataclass(frozen=True)
class ChatTurn:
    """An answer to come: how its completion is parsed, and what masks it."""

    form: ChatForm
    tokenizer: Tokenizer
    tools: list[dict[str, Any]] = field(default_factory=list)  # that may be called
    is_call_required: bool = False
    is_parallel: bool = True
    is_thinking: bool = False  # the prompt has opened the reasoning
    budget: int | None = None

    def new_parser(self) -> AnswerParser:
        """For one completion."""
        types = parameter_types(self.tools) if self.tools else None
        return parser_of(self.form, types, is_thinking=self.is_thinking)

    def answer_of(self, text: str, finish_reason: FinishReason | None) -> Answer:
        """What a whole completion says."""
        parser = self.new_parser()
        parser.feed(text)
        parser.end(is_cut=finish_reason is FinishReason.LENGTH)
        return parser.answer

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the call, with what the answer's form needs."""
        changes: dict[str, Any] = {}
        spelled = control_tokens(self.form, self.tokenizer).values()
        if spelled:
            changes["spelled_token_ids"] = tuple(sorted({*params.spelled_token_ids, *spelled}))
        text = params.structured
        is_free = text is None and not self.is_call_required
        masks_calls = self._has_strict if is_free else self._can_mask
        if masks_calls or (text is not None and self.form.is_harmony):
            changes["structured"] = answer_constraint(
                self.form,
                self.tokenizer,
                self.tools if masks_calls else [],
                None if self.is_call_required else text,
                is_parallel=self.is_parallel,
                is_free=is_free,
            )
        if "structured" in changes or text is not None or self.budget is not None:
            changes["thinking"] = thinking_of(
                self.form, self.tokenizer, is_open=self.is_thinking, budget=self.budget
            )
        return replace(params, **changes) if changes else params

    @property
    def _can_mask(self) -> bool:
        return bool(self.tools) and self.form.calls.can_be_constrained

    @property
    def _has_strict(self) -> bool:
        """Whether a schema is to be kept in answers that may be anything else."""
        calls = self.form.calls
        return (
            calls.can_be_constrained
            and bool(calls.opening)
            and any(tool["function"].get("strict") for tool in self.tools)
        )


@dataclass(slots=True)
class ChatOutput(RequestOutput):
    """What a conversation got: also each completion's parsed answer."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """Content, reasoning and tool calls of completion 0."""
        return self.answers[0]

    @classmethod
    def of(cls, output: RequestOutput, turn: ChatTurn | None) -> "ChatOutput":
        """`turn`: None for a request that never ran."""
        given = {each.name: getattr(output, each.name) for each in fields(output)}
        answers = [
            Answer(c.text) if turn is None else turn.answer_of(c.text, c.finish_reason)
            for c in output.completions
        ]
        return cls(**given, answers=answers)


class ReasoningSettings(NamedTuple):
    """What a template lets a call say of reasoning."""

    has_effort: bool = True  # a variable that reasoning_effort sets
    has_reasoning: bool = True  # tags or channels of reasoning, which a budget can end


class ChatForms:
    """One template's forms, and how calls are put to it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._form = form_of(template.source)

    @property
    def reasoning_settings(self) -> ReasoningSettings:
        has_reasoning = self._form.reasoning is not None or self._form.is_harmony
        return ReasoningSettings(bool(self._effort_variables("high")), has_reasoning)

    def open_turn(self, options: ChatOptions) -> tuple[ChatTurn, list[dict[str, Any]] | None]:
        """The turn, but for what the prompt will say, and the tools to show."""
        choice = read_tool_choice(options.tool_choice)
        tools = read_tools(options.tools)
        if choice.mode == "none":
            tools = []
        if not tools and choice.mode == "required":
            raise RequestError(
                "tool_choice asks for a call, but there are no tools", param="tool_choice"
            )
        callable_tools = choice.chosen_of(tools)
        shown = callable_tools if choice.hides_others else tools
        form = self._form
        if tools and not self._shows_tools:
            form = replace(form, calls=GENERIC)
        is_required = choice.mode == "required"
        is_masked = is_required or (options.is_structured and bool(tools))
        if is_masked and not form.calls.can_be_constrained:
            form = replace(form, calls=GENERIC)
        budget = options.thinking_token_budget
        if budget is not None and not self.reasoning_settings.has_reasoning:
            raise RequestError(
                "this model's template has no tags for reasoning, so there is nothing to limit",
                param="thinking_token_budget",
            )
        turn = ChatTurn(
            form,
            self._tokenizer,
            callable_tools,
            is_required,
            options.parallel_tool_calls and not choice.is_named,
            budget=budget,
        )
        return turn, shown or None

    @property
    def _shows_tools(self) -> bool:
        return self._template.forms.writes_tools

    def opened_by(self, turn: ChatTurn, prompt: str) -> ChatTurn:
        """The turn after its prompt is known: templates may open the reasoning themselves."""
        tag = turn.form.reasoning
        is_open = tag is not None and prompt.rstrip().endswith(tag.open)
        return replace(turn, is_thinking=is_open)

    def variables(self, options: ChatOptions) -> TemplateVariables | None:
        """The template's variables, those for the effort of reasoning among them."""
        given = options.chat_template_kwargs
        effort = options.reasoning_effort
        if effort is None:
            return given
        if effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort is one of {', '.join(EFFORTS)}, got {effort!r:.100}",
                param="reasoning_effort",
            )
        own = self._effort_variables(effort)
        if not own and effort != "none":
            raise RequestError(
                "reasoning_effort is not supported: this model's template has no such setting; "
                "leave it out",
                param="reasoning_effort",
            )
        return {**own, **given} if isinstance(given, Mapping) else own

    def _effort_variables(self, effort: str) -> dict[str, object]:
        source = self._template.source
        found: dict[str, object] = {
            name: effort != "none" for name in _SWITCHES if _mentions(source, name)
        }
        if _mentions(source, "reasoning_effort"):
            levels = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
            found["reasoning_effort"] = levels.get(effort, effort)
        return found

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        variables: TemplateVariables | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """The prompt; tools, calls and results are written as the template can."""
        marks = _OwnMarks()
        messages, shown = self._as_shown(messages, tools, marks)
        render = partial(
            self._template.render,
            tools=shown,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if not tools or shown:
            try:
                return marks.restored(render(messages))
            except RequestError:
                whole = _completed(shown or [])
                if whole == (shown or []):
                    raise
                return marks.restored(render(messages, tools=whole))
        try:
            return render(_introduced(messages, tools, "system"))
        except RequestError:  # some templates have no system message
            return render(_introduced(messages, tools, "user"))

    def _as_shown(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, marks: "_OwnMarks"
    ) -> tuple[Sequence[Message], list[dict[str, Any]] | None]:
        """Messages in forms that the template writes, and tools if it does."""
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
            return messages, tools  # the template's own check says what is wrong
        has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
        is_introduced = bool(tools) and not self._shows_tools
        if has_calls and (is_introduced or not self._template.forms.writes_calls):
            calls = GENERIC if is_introduced or not self._shows_tools else self._form.calls
            role = calls.result_role
            is_own = calls.is_tagged_list or calls.is_python_list
            if is_own and self._template.forms.writes_role(role):
                messages = [_as_own(m, n, calls, marks) for n, m in enumerate(messages)]
            else:
                messages = [_as_text(message, n) for n, message in enumerate(messages)]
        return messages, tools if tools and self._shows_tools else None


def _mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", source) is not None


# ---- tools and the choice among them


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in OpenAI's form; a RequestError says which is wrong."""
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}", param="tools"
        )
    found = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise RequestError(f"tools[{number}]: there are two tools {name!r:.100}", param="tools")
    return found


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}, got '
            f"{tool!r:.100}",
            param="tools",
        )
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits or _ . : / -, got "
            f"{name!r:.100}",
            param="tools",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, got {parameters!r:.100}",
            param="tools",
        )
    try:
        json.dumps(tool, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}", param="tools") from None
    return {**tool, "type": "function", "function": dict(function)}


@dataclass(frozen=True)
class ReadToolChoice:
    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None  # the tools to choose among; None: all
    hides_others: bool = False

    @property
    def is_named(self) -> bool:
        return self.names is not None and not self.hides_others

    def chosen_of(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.names is None:
            return tools
        by_name = {tool["function"]["name"]: tool for tool in tools}
        for name in self.names:
            if name not in by_name:
                raise RequestError(
                    f"tool_choice names {name!r:.100}, which is not in tools", param="tool_choice"
                )
        return [by_name[name] for name in self.names]


def read_tool_choice(choice: Any) -> ReadToolChoice:
    """OpenAI's forms: a mode, one function, or a mode and the functions that are allowed."""
    if choice is None:
        return ReadToolChoice()
    if choice in ("auto", "none", "required"):
        return ReadToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return ReadToolChoice("required", (_chosen_name(choice),))
    allowed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    if isinstance(allowed, Mapping) and allowed.get("mode") in ("auto", "required"):
        tools = allowed.get("tools")
        if isinstance(tools, Sequence) and not isinstance(tools, str) and tools:
            names = tuple(_chosen_name(tool) for tool in tools)
            return ReadToolChoice(allowed["mode"], names, hides_others=True)
    raise RequestError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "function": '
        f'{{"name": ...}}}} or OpenAI\'s allowed_tools, got {choice!r:.100}',
        param="tool_choice",
    )


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice must name a function, got {choice!r:.100}", param="tool_choice"
        )
    return name


def _completed(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools with what they may leave out, as empty: some templates fail where it is not there, such
    as gpt-oss's without a description."""
    whole = []
    for tool in tools:
        function = {name: value for name, value in tool["function"].items() if value is not None}
        parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
        function = {"description": "", **function, "parameters": parameters}
        whole.append({**tool, "function": function})
    return whole


# ---- for templates without tools


def _introduced(
    messages: Sequence[Message], tools: list[dict[str, Any]], role: str
) -> list[Message]:
    """The messages with a description of the tools in the first of this role."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _INTRODUCTION.format(tools="\n".join(lines))
    first = messages[0] if messages else {}
    if first.get("role") in (role, "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _as_text(message: Message, number: int) -> Message:
    """A message of calls or of a result, in the words of the introduction."""
    if message.get("role") == "tool":
        content = f"<tool_response>\n{_plain(message.get('content'), number)}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = _calls_of(message, number)
    if not calls:
        return message
    texts = [_plain(message.get("content"), number)] if message.get("content") else []
    texts += [
        f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return {"role": message["role"], "content": "\n".join(texts)}


def _as_own(message: Message, number: int, form: CallForm, marks: "_OwnMarks") -> Message:
    """The same for a template that shows tools and says how they are called, but writes neither
    calls nor results: as the model writes its calls."""
    if message.get("role") == "tool":
        return {"role": form.result_role, "content": _plain(message.get("content"), number)}
    calls = _calls_of(message, number)
    if not calls:
        return message
    content = _plain(message.get("content"), number) if message.get("content") else ""
    begin, end = form.begin, form.end
    if form.is_python_list:
        begin, end = form.call_open, form.closes[0]
        written = f"[{', '.join(_in_python(name[1:-1], text) for name, text in calls)}]"
    else:
        written = form.between.join(
            f"{form.prefix.replace('%s', name[1:-1])}{arguments}{form.suffix}"
            for name, arguments in calls
        )
    text = f"{content}{marks.put(begin)}{written}{marks.put(end)}"
    return {"role": message["role"], "content": text}


def _in_python(name: str, arguments: str) -> str:
    """A call as LFM2 writes it; arguments that are no JSON object as they stand."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return f"{name}({arguments})"
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given.items())})"


def _literal(value: object) -> str:
    """In Python, strings in the quotes of JSON."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            items = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
    return repr(value)


class _OwnMarks:
    """Markers that a template should have written. In messages each is a word that no request can
    guess; in the prompt it is the template's own text, so that its control tokens are these."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._texts: list[str] = []

    def put(self, text: str) -> str:
        """The word for a marker."""
        self._texts.append(text)
        return f"m{self._nonce}n{len(self._texts) - 1}m"

    def restored(self, chat: RenderedChat) -> RenderedChat:
        """The prompt with the markers in the place of their words."""
        if not self._texts:
            return chat
        parts = re.split(f"m{self._nonce}n([0-9]+)m", chat.text)
        text, start = TemplateText(chat.text, chat.own_spans), 0
        pieces: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:
                pieces.append(TemplateText.whole(self._texts[int(part)]))
                start += len(self._nonce) + len(part) + 3
            else:
                pieces.append(text[start : start + len(part)])
                start += len(part)
        whole = joined(pieces)
        return RenderedChat(str(whole), marks_of(whole))


def _calls_of(message: Message, number: int) -> list[tuple[str, str]]:
    """Name and arguments of each call of a message, as JSON."""
    calls = message.get("tool_calls")
    found: list[tuple[str, str]] = []
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"messages[{number}].tool_calls: each has a function with a name",
                param="messages",
            )
        arguments = function.get("arguments")
        is_text = isinstance(arguments, str) and arguments.strip()
        text = arguments if is_text else json.dumps(arguments or {})
        found.append((json.dumps(function["name"], ensure_ascii=False), str(text)))
    return found


def _plain(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if not parts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{number}].content must be text", param="messages")
    return "\n".join(str(text) for text in texts)
