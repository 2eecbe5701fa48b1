"""Bodies of OpenAI's Responses API, and the ChatRequest that each means.

A conversation is a list of items there: messages, reasoning, calls of functions and their outputs.
Items that belong to one turn of the model become one message of a chat.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, Tag

from quire.core.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS
from quire.server.client_fields import ResponsesClientFields
from quire.server.dialect import chat_request
from quire.server.dialects.unions import LIST, TEXT, ByField, text_or_list
from quire.server.errors import ApiError
from quire.server.fields import Refused, Strict, accepted, refused
from quire.server.schemas import ChatRequest, CommonFields, Effort

MAX_ITEMS = 8192
MAX_PARTS = 4096
MAX_TOOLS = 1024
_MOST = 2**31 - 1
_PREFIXES = "prefixes are reused by what they hold, and the answer is the same with and without"
_NO_HOSTED = "quire runs no tools itself: give functions and call them"
_GENERATED = "given by the server that made the item"
_NOT_ASYNC = "calls are answered in the next request"
_NOT_SHOWN = "no template shows it to the model"

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Item = dict[str, Any]  # an item as its JSON


# ---- items of the input


class InputText(Strict):
    type: Literal["input_text"] = Field(description="text that the model reads")
    text: str = Field(description="the text")
    prompt_cache_breakpoint: dict[str, Any] | None = accepted(_PREFIXES)


class OutputText(Strict):
    type: Literal["output_text"] = Field(description="text that the model wrote")
    text: str = Field(description="the text")
    annotations: list[Any] | None = accepted(_NOT_SHOWN)
    logprobs: list[Any] | None = accepted(_NOT_SHOWN)
    parsed: Any = accepted("OpenAI's client adds it; the text says the same")


class RefusalPart(Strict):
    type: Literal["refusal"] = Field(description="text in which a model refused")
    refusal: str = Field(description="the text, shown as the model's own")


Part = Annotated[
    Annotated[InputText, Tag("part input_text")]
    | Annotated[OutputText, Tag("part output_text")]
    | Annotated[RefusalPart, Tag("part refusal")],
    ByField(
        "type", "part", ["input_text", "output_text", "refusal"], "quire works with text alone"
    ),
]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Strict):
    type: Literal["message"] | None = Field(default=None, description="may be left out")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="who speaks")
    content: Annotated[
        Annotated[str, TEXT]
        | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), LIST],
        text_or_list("parts"),
    ] = Field(description="text, or parts: input_text, output_text and refusal")
    id: str | None = accepted(_GENERATED)
    status: Status | None = accepted(_GENERATED)
    phase: str | None = accepted(_NOT_SHOWN)


class FunctionCallItem(Strict):
    type: Literal["function_call"] = Field(description="a call that the model made")
    call_id: Name = Field(description="names the call for its output")
    name: Name = Field(description="of the function")
    arguments: str = Field(description="JSON text")
    id: str | None = accepted(_GENERATED)
    status: Status | None = accepted(_GENERATED)
    caller: Refused = refused(_NO_HOSTED, {"type": "direct"})
    namespace: Name | None = Field(default=None, description="of the function, where it has one")
    parsed_arguments: Any = accepted("OpenAI's client adds it; arguments say the same")
    is_async: Refused = Field(
        default=None,
        alias="async",
        description=f"Refused: {_NOT_ASYNC}",
        json_schema_extra={"enum": [None, False]},
    )
    async_: Refused = refused(f"{_NOT_ASYNC}; it is async, as OpenAI's client dumps it", False)


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"] = Field(description="what a call gave")
    call_id: Name = Field(description="the call")
    output: Annotated[
        Annotated[str, TEXT]
        | Annotated[
            list[
                Annotated[
                    Annotated[InputText, Tag("part input_text")],
                    ByField("type", "part", ["input_text"], "quire works with text alone"),
                ]
            ],
            Field(max_length=MAX_PARTS, fail_fast=True),
            LIST,
        ],
        text_or_list("parts"),
    ] = Field(description="text, or parts of input_text")
    id: str | None = accepted(_GENERATED)
    status: Status | None = accepted(_GENERATED)
    name: str | None = accepted("the call has the name")
    caller: Refused = refused(_NO_HOSTED, {"type": "direct"})
    namespace: str | None = accepted("the call has the namespace")


class ReasoningText(Strict):
    type: Literal["reasoning_text"] = Field(description="what the model thought")
    text: str = Field(description="the text")


class SummaryText(Strict):
    type: Literal["summary_text"] = Field(description="a summary of what a model thought")
    text: str = Field(description="the text; taken where there is no content")


class ReasoningItem(Strict):
    type: Literal["reasoning"] = Field(
        description="what the model thought before; the template decides whether it is shown"
    )
    content: list[ReasoningText] | None = Field(default=None, description="the thoughts")
    summary: list[SummaryText] | None = Field(default=None, description="of the thoughts")
    id: str | None = accepted(_GENERATED)
    status: Status | None = accepted(_GENERATED)
    encrypted_content: str | None = accepted("quire writes thoughts into content")


class ItemReference(Strict):
    type: Literal["item_reference"] = Field(description="an item of a stored response")
    id: Name = Field(description="of the item")


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
InputItem = Annotated[
    Annotated[MessageItem, Tag("item message")]
    | Annotated[FunctionCallItem, Tag("item function_call")]
    | Annotated[FunctionOutputItem, Tag("item function_call_output")]
    | Annotated[ReasoningItem, Tag("item reasoning")]
    | Annotated[ItemReference, Tag("item item_reference")],
    ByField("type", "item", ITEM_TYPES, _NO_HOSTED, default="message"),
]


# ---- tools and the form of the answer


class FunctionTool(Strict):
    type: Literal["function"] = Field(description=f"others are refused: {_NO_HOSTED}")
    name: Name = Field(description="what the model calls it")
    description: str | None = Field(default=None, description="shown to the model")
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = Field(default=None, description="as in a chat")
    allowed_callers: Refused = refused("the model alone calls functions", ["direct"])
    defer_loading: Refused = refused("the model sees all tools from the start", False)
    output_schema: Refused = refused("write it into the description")
    is_async: Refused = Field(
        default=None,
        alias="async",
        description=f"Refused: {_NOT_ASYNC}",
        json_schema_extra={"enum": [None, False]},
    )
    async_: Refused = refused(f"{_NOT_ASYNC}; it is async, as OpenAI's client dumps it", False)


class NamespaceTool(Strict):
    """Functions with a name in common, which their calls have beside their own."""

    type: Literal["namespace"] = Field(description="functions with a name in common")
    name: Name = Field(description="what the model writes before their names, with a point")
    description: str | None = Field(default=None, description="shown to the model with each")
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("tool function")],
            ByField("type", "tool", ["function"], _NO_HOSTED),
        ]
    ] = Field(max_length=MAX_TOOLS, fail_fast=True, description="functions")


ToolParam = Annotated[
    Annotated[FunctionTool, Tag("tool function")] | Annotated[NamespaceTool, Tag("tool namespace")],
    ByField("type", "tool", ["function", "namespace"], _NO_HOSTED),
]


class NamedFunction(Strict):
    type: Literal["function"] = Field(description="one function")
    name: Name = Field(description="which must be called")


class AllowedTools(Strict):
    type: Literal["allowed_tools"] = Field(description="some of the tools")
    mode: Literal["auto", "required"] = Field(description="whether one of them must be called")
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS, description="which")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], TEXT]
    | Annotated[NamedFunction, Tag("choice function")]
    | Annotated[AllowedTools, Tag("choice allowed_tools")],
    ByField("type", "choice", ["function", "allowed_tools"], _NO_HOSTED, or_text=True),
]


class TextForm(Strict):
    type: Literal["text"] = Field(description="any text")


class JsonObjectForm(Strict):
    type: Literal["json_object"] = Field(description="any JSON object")


class JsonSchemaForm(Strict):
    type: Literal["json_schema"] = Field(description="JSON that a schema allows")
    name: str | None = Field(default=None, max_length=256, description="of the schema")
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")
    description: str | None = accepted(_NOT_SHOWN)
    strict: bool | None = accepted("every schema is followed strictly")


class TextConfig(Strict):
    format: (
        Annotated[
            Annotated[TextForm, Tag("format text")]
            | Annotated[JsonObjectForm, Tag("format json_object")]
            | Annotated[JsonSchemaForm, Tag("format json_schema")],
            ByField(
                "type", "format", ["text", "json_object", "json_schema"], "not a form of quire"
            ),
        ]
        | None
    ) = Field(default=None, description="the form of the answer")
    verbosity: Refused = refused("say it in the instructions", "medium")


class Reasoning(Strict):
    effort: Effort | None = Field(
        default=None, description="how much to think, as reasoning_effort of a chat"
    )
    summary: Literal["auto", "concise", "detailed"] | None = accepted(
        "reasoning items have the thoughts themselves as content"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = accepted(
        "an older name of summary"
    )
    context: Refused = refused("the chat template decides which thoughts are shown", "auto")
    mode: Refused = refused("there is one mode", "standard")


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = accepted("it pads events and changes no text")


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


# ---- the body


class PromptFields(CommonFields):
    """What counting and answering share."""

    input: (
        Annotated[
            Annotated[str, TEXT]
            | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True), LIST],
            text_or_list("items"),
        ]
        | None
    ) = Field(default=None, description="text of the user, or items")
    instructions: str | None = Field(
        default=None, description="a system message before all others, for this answer alone"
    )
    previous_response_id: str | None = Field(
        default=None, max_length=256, description="a stored response that the input follows"
    )
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(default=None, description="whether it must")
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call at most")
    reasoning: Reasoning | None = Field(default=None, description="how much to think")
    text: TextConfig | None = Field(default=None, description="the form of the answer")
    truncation: Refused = refused("shorten the input yourself", "disabled")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="quire's: variables of the model's chat template"
    )
    conversation: Refused = refused("use previous_response_id")
    personality: Refused = refused("say it in the instructions")


class CountRequest(PromptFields):
    """The body of /v1/responses/input_tokens."""


class ResponsesRequest(PromptFields, ResponsesClientFields):
    """The body of /v1/responses."""

    max_output_tokens: int | None = Field(
        default=None, ge=1, le=_MOST, description="left out: until the model ends it"
    )
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the likeliest")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="likeliest tokens in logprobs"
    )
    stream: bool | None = Field(default=None, description="answer as server-sent events")
    stream_options: ResponseStreamOptions | None = Field(default=None, description="of a stream")
    store: bool | None = Field(
        default=None, description="true unless given: keep the response, for its key"
    )
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] | None = Field(
        default=None, description="message.output_text.logprobs is obeyed; quire has no others"
    )
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = Field(default=None, description="kept with the response")
    # quire's own, as in a chat
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**64 - 1, description="quire's: the same draws again"
    )
    top_k: int | None = Field(default=None, ge=-1, le=_MOST, description="quire's: 0 or -1: all")
    min_p: float | None = Field(default=None, ge=0, le=1, description="quire's: as in a chat")
    stop: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=512)]],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="quire's: texts that end the answer before them")

    background: bool | None = Field(
        default=None,
        description="true: answer at once, and make the response whether or not the client stays; "
        "it must be stored",
    )
    max_tool_calls: int | None = accepted("it counts calls of tools that quire does not run")
    prompt: Refused = refused("quire keeps no prompts: give instructions and input")
    client_metadata: dict[str, Any] | None = accepted("nobody is told of it")
    prompt_cache_key: str | None = accepted(_PREFIXES)
    prompt_cache_retention: str | None = accepted(_PREFIXES)
    prompt_cache_options: dict[str, Any] | None = accepted(_PREFIXES)
    safety_identifier: str | None = accepted("nobody is reported to")
    service_tier: str | None = accepted("there is one tier; priority is a field of its own")
    moderation: Refused = refused("quire does not moderate")
    context_management: Refused = refused("shorten the input yourself", [])
    access_programs: Refused = refused("quire has none")
    image: Refused = refused("quire works with text alone")

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


# ---- translation


def input_items(body: PromptFields) -> list[Item]:
    """The input as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return [
        {"type": "message", **item.model_dump(exclude_none=True, by_alias=True)}
        for item in body.input or ()
    ]


def prompt_fields(body: PromptFields, items: Sequence[Item]) -> dict[str, Any]:
    """The fields of a ChatRequest that the prompt is made of; `items`: earlier ones, and these."""
    messages = chat_messages(body.instructions, items)
    if not messages:
        raise ApiError(
            400, "input is missing: give text or items", param="input", code="missing_field"
        )
    given: dict[str, Any] = {
        "model": body.model,
        "user": body.user,
        "priority": body.priority,
        "timeout": body.timeout,
        "messages": messages,
        "chat_template_kwargs": body.chat_template_kwargs,
        **_tool_fields(body),
        **_format_fields(body),
    }
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    return {name: value for name, value in given.items() if value is not None}


def to_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    if body.top_logprobs is not None and not body.wants_logprobs:
        raise ApiError(
            400,
            'top_logprobs needs include: ["message.output_text.logprobs"]',
            param="top_logprobs",
        )
    given = {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "seed": body.seed,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "stop": body.stop or None,
    }
    chat = prompt_fields(body, items)
    chat |= {name: value for name, value in given.items() if value is not None}
    return chat_request(chat)


def chat_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A chat of items. Instructions and the system messages that come first are one message: most
    templates take one."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                _add_message(messages, item)
            case "reasoning":
                if thoughts := _thoughts(item):
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = thoughts
            case "function_call":
                _turn(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                content = _text(item["output"])
                call_id = item["call_id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    return [_finished(message) for message in messages]


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    role, content = item["role"], _text(item["content"])
    if role == "assistant":
        _turn(messages, "content", "tool_calls")["content"] = content
        return
    is_first = len(messages) == 1 and messages[0]["role"] in ("system", "developer")
    if role in ("system", "developer") and is_first:
        messages[0]["content"] += f"\n\n{content}"
        return
    messages.append({"role": role, "content": content})


def _turn(messages: list[dict[str, Any]], *follows_in_another: str) -> dict[str, Any]:
    """The model's message that an item belongs to: the last one, or another where that has one of
    these fields already. In a message thoughts come first, then text, then calls."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(name in last for name in follows_in_another):
        messages.append({"role": "assistant"})
    return messages[-1]


def _finished(message: dict[str, Any]) -> dict[str, Any]:
    """A turn of thoughts alone has no text."""
    if message["role"] == "assistant" and "tool_calls" not in message:
        message.setdefault("content", "")
    return message


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.get("text", part.get("refusal", "")) for part in content])


def _thoughts(item: Mapping[str, Any]) -> str:
    return _text(item.get("content") or item.get("summary") or [])


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name = called_name(item.get("namespace"), item["name"])
    function = {"name": name, "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _tool_fields(body: PromptFields) -> dict[str, Any]:
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice wants a call, and there are no tools", param="tools")
        return {}
    fields: dict[str, Any] = {
        "tools": [found for tool in body.tools for found in _tools(tool)],
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    match body.tool_choice:
        case NamedFunction(name=name):
            fields["tool_choice"] = _named(name)
        case AllowedTools(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_named(tool.name) for tool in tools]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        case choice:
            fields["tool_choice"] = choice
    return fields


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called_name(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


def _tools(tool: FunctionTool | NamespaceTool) -> list[dict[str, Any]]:
    """As a chat's: functions of a namespace have its name and description with their own."""
    if isinstance(tool, FunctionTool):
        return [_tool(tool)]
    found = [_tool(each) for each in tool.tools]
    for function in [each["function"] for each in found]:
        function["name"] = called_name(tool.name, function["name"])
        texts = (tool.description, function.get("description"))
        function["description"] = "\n\n".join([text for text in texts if text])
    return found


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"})
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _format_fields(body: PromptFields) -> dict[str, Any]:
    match None if body.text is None else body.text.format:
        case JsonObjectForm():
            return {"response_format": {"type": "json_object"}}
        case JsonSchemaForm(name=name, schema_=schema):
            form = {"name": name or "answer", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {}
