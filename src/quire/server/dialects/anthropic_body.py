"""Bodies of Anthropic's Messages API, and the ChatRequest that each means."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints, Tag

from quire.core.sampling import MAX_STOP_STRINGS
from quire.llm.chats import ReasoningSettings
from quire.server.dialect import chat_request
from quire.server.dialects.unions import LIST, TEXT, ByField, text_or_list
from quire.server.errors import ApiError
from quire.server.fields import Refused, Strict, accepted, refused
from quire.server.schemas import MAX_MESSAGES, ChatRequest, CommonFields

MAX_BLOCKS = 4096
MAX_TOOLS = 1024
_MOST = 2**31 - 1
_CACHE = "prefixes are reused by what they hold, and the answer is the same with and without"
_NO_SERVER_TOOLS = "quire runs no tools itself"
_ALONE = "quire works with text alone"

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ChatMessages = list[dict[str, Any]]  # as ChatRequest takes them
_ALL_SETTINGS = ReasoningSettings()
_USUAL_EFFORT = "high"  # Anthropic's default: the same as no effort


# ---- blocks of content


class CacheControl(Strict):
    type: Literal["ephemeral"] = Field(description="Accepted: the only type there is")
    ttl: Literal["5m", "1h"] | None = accepted(_CACHE)


class TextBlock(Strict):
    type: Literal["text"] = Field(description="text that the model reads")
    text: str = Field(description="the text")
    cache_control: CacheControl | None = accepted(_CACHE)
    citations: Refused = refused("no template shows them to the model", [])


class ThinkingBlock(Strict):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"] = Field(description="what the model thought")
    thinking: str = Field(description="the text; the template decides whether it is shown again")
    signature: str | None = accepted("nothing is signed")


class ToolUseBlock(Strict):
    type: Literal["tool_use"] = Field(description="a call that the model made")
    id: Name = Field(description="names the call for its result")
    name: Name = Field(description="of the tool")
    input: dict[str, Any] = Field(description="the arguments")
    cache_control: CacheControl | None = accepted(_CACHE)
    caller: Refused = refused(_NO_SERVER_TOOLS, {"type": "direct"})
    toolset_name: Refused = refused(_NO_SERVER_TOOLS)


Blocks = Field(max_length=MAX_BLOCKS, fail_fast=True)
_one_of = partial(ByField, "type", "block", why=_ALONE)
OnlyText = Annotated[Annotated[TextBlock, Tag("block text")], _one_of(["text"])]
TextOrBlocks = Annotated[
    Annotated[str, TEXT] | Annotated[list[OnlyText], Blocks, LIST], text_or_list("blocks")
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"] = Field(description="what a call gave")
    tool_use_id: Name = Field(description="the call")
    content: TextOrBlocks | None = Field(default=None, description="text or text blocks")
    is_error: bool | None = Field(
        default=None, description='true: the model reads "Error: " before the text'
    )
    cache_control: CacheControl | None = accepted(_CACHE)
    toolset_name: Refused = refused(_NO_SERVER_TOOLS)


UserBlock = Annotated[
    Annotated[TextBlock, Tag("block text")] | Annotated[ToolResultBlock, Tag("block tool_result")],
    _one_of(["text", "tool_result"]),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("block text")]
    | Annotated[ThinkingBlock, Tag("block thinking")]
    | Annotated[ToolUseBlock, Tag("block tool_use")],
    _one_of(["text", "thinking", "tool_use"]),
]


class UserMessage(Strict):
    role: Literal["user"] = Field(description="who speaks")
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[UserBlock], Blocks, LIST], text_or_list("blocks")
    ] = Field(description="text, or blocks: text and tool_result")


class AssistantMessage(Strict):
    role: Literal["assistant"] = Field(description="the model")
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[AssistantBlock], Blocks, LIST], text_or_list("blocks")
    ] = Field(description="text, or blocks: text, thinking and tool_use")


class SystemMessage(Strict):
    role: Literal["system"] = Field(description="instructions in the middle of a conversation")
    content: TextOrBlocks = Field(description="text or text blocks")


MessageParam = Annotated[
    Annotated[UserMessage, Tag("message user")]
    | Annotated[AssistantMessage, Tag("message assistant")]
    | Annotated[SystemMessage, Tag("message system")],
    ByField(
        "role",
        "message",
        ["user", "assistant", "system"],
        "tool results are blocks",
    ),
]


# ---- tools


class Tool(Strict):
    type: Literal["custom"] | None = Field(default=None, description="custom, or left out")
    name: Name = Field(description="what the model calls it")
    description: str | None = Field(default=None, description="shown to the model")
    input_schema: dict[str, Any] = Field(description="a JSON schema of its arguments")
    strict: bool | None = Field(default=None, description="as in OpenAI's API")
    cache_control: CacheControl | None = accepted(_CACHE)
    eager_input_streaming: bool | None = accepted("arguments are always streamed as they come")
    allowed_callers: Refused = refused("the model alone calls tools", ["direct"])
    defer_loading: Refused = refused("the model sees all tools from the start", False)
    input_examples: Refused = refused("write them into the description", [])


AnyTool = Annotated[
    Annotated[Tool, Tag("tool custom")],
    ByField(
        "type",
        "tool",
        ["custom"],
        f"{_NO_SERVER_TOOLS}: give a tool of your own a name and an input_schema",
        default="custom",
    ),
]


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"] = Field(
        description="auto: the model decides; any: at least one; tool: this one; none"
    )
    name: Name | None = Field(default=None, description="of the tool, with the type tool alone")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true: one call")


# ---- the body


class Metadata(Strict):
    user_id: str | None = Field(default=None, max_length=256, description="written to the log")


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="disabled is what no thinking means: the answer has no thinking blocks, and "
        "the template is told not to think where it can be"
    )
    budget_tokens: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        description="tokens after which thinking is ended, where the model thinks",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: thinking blocks are empty; thoughts are not summarised"
    )


class JsonFormat(Strict):
    type: Literal["json_schema"] = Field(description="the answer follows a schema")
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")


class AllTurns(Strict):
    type: Literal["all"] = Field(description="no thoughts are removed")


class ClearThinking(Strict):
    """Which thoughts of earlier turns are removed; what asks for none is the conversation as it
    was sent."""

    type: Literal["clear_thinking_20251015"] = Field(description="removes earlier thoughts")
    keep: Annotated[
        Annotated[Literal["all"], TEXT] | Annotated[AllTurns, Tag("keep all")],
        ByField("type", "keep", ["all"], "leave older thoughts out of messages", or_text=True),
    ] = Field(description="all: messages are used as they were sent")


class ContextManagement(Strict):
    edits: (
        Annotated[
            list[
                Annotated[
                    Annotated[ClearThinking, Tag("edit clear_thinking_20251015")],
                    ByField(
                        "type",
                        "edit",
                        ["clear_thinking_20251015"],
                        "shorten the conversation yourself",
                    ),
                ]
            ],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="changes to the conversation")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="how much to think; where the template has no setting for it, others than high "
        "are refused, unless the model does not think",
    )
    format: JsonFormat | None = Field(default=None, description="a form that the answer must have")
    task_budget: Refused = refused("use max_tokens")


class ConversationFields(CommonFields):
    """What counting and answering share."""

    messages: list[MessageParam] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="the conversation; where the last is the assistant's, the answer continues it",
    )
    system: TextOrBlocks | None = Field(default=None, description="text or text blocks")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="what the model may call"
    )
    tool_choice: ToolChoice | None = Field(default=None, description="whether it must")
    thinking: Thinking | None = Field(default=None, description="left out: disabled")
    output_config: OutputConfig | None = Field(default=None, description="effort and form")
    output_format: JsonFormat | None = Field(
        default=None, description="an older name of output_config.format"
    )
    cache_control: CacheControl | None = accepted(_CACHE)
    speed: Literal["standard", "fast"] | None = accepted("there is one speed")
    user_profile_id: str | None = accepted("quire knows no profiles")
    workspace_id: str | None = accepted("quire knows no workspaces")
    mcp_servers: Refused = refused(_NO_SERVER_TOOLS, [])
    context_management: ContextManagement | None = Field(
        default=None, description="what is removed of a long conversation"
    )
    compaction: Refused = refused("shorten the conversation yourself")


class CountTokensRequest(ConversationFields):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields):
    """The body of /v1/messages."""

    max_tokens: int = Field(
        ge=1,
        le=_MOST,
        description="the most that the answer may have, of those that the context has room for",
    )
    stream: bool | None = Field(default=None, description="answer as server-sent events")
    stop_sequences: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=512)]],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="texts that end the answer before them")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the likeliest")
    top_k: int | None = Field(default=None, ge=-1, le=_MOST, description="0 or -1: all tokens")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling")
    metadata: Metadata | None = Field(default=None, description="user_id is written to the log")
    service_tier: Literal["auto", "standard_only"] | None = accepted("there is one tier")
    inference_geo: str | None = accepted("everything is computed on this machine")
    diagnostics: dict[str, Any] | None = accepted("cache_read_input_tokens says what was reused")
    container: Refused = refused(_NO_SERVER_TOOLS)
    thread: Refused = refused("messages are not stored: send the whole conversation")
    fallbacks: Refused = refused("there is one model", [])
    fallback_credit_token: Refused = refused("there is one model")
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**64 - 1, description="quire's: the same draws again"
    )


class KeptOfMessage(NamedTuple):
    """What the answer needs of the body."""

    shows_thinking: bool
    omits_thoughts: bool  # thinking blocks are there, and empty
    max_tokens: int = _MOST  # may be more than the context has room for
    names_edits: bool = False  # the answer says what was removed of the conversation


# ---- translation


def to_chat_fields(
    body: ConversationFields, settings: ReasoningSettings = _ALL_SETTINGS
) -> dict[str, Any]:
    """The fields of a ChatRequest that the prompt is made of, and those that shape the answer."""
    chat: dict[str, Any] = {
        "model": body.model,
        "user": body.user,
        "priority": body.priority,
        "timeout": body.timeout,
        "messages": list(_messages(body)),
        **_tool_fields(body),
        **_thinking_fields(body, settings),
    }
    if _is_begun(chat["messages"][-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    form = _format(body)
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in chat.items() if value is not None}


def to_chat(body: MessagesRequest, settings: ReasoningSettings) -> ChatRequest:
    chat = to_chat_fields(body, settings)
    own = {
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "seed": body.seed,
        "user": body.user if body.metadata is None else body.metadata.user_id or body.user,
    }
    chat |= {name: value for name, value in own.items() if value is not None}
    return chat_request(chat)


def kept_of(body: ConversationFields) -> KeptOfMessage:
    thinking = body.thinking
    is_on = thinking is not None and thinking.type != "disabled"
    return KeptOfMessage(
        shows_thinking=is_on,
        omits_thoughts=thinking is not None and thinking.display == "omitted",
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else _MOST,
        names_edits=body.context_management is not None,
    )


def _format(body: ConversationFields) -> JsonFormat | None:
    given = None if body.output_config is None else body.output_config.format
    if given is not None and body.output_format is not None:
        raise ApiError(
            400,
            "output_config.format and output_format both ask for a form of the answer: give one",
            param="output_format",
        )
    return given or body.output_format


def _content(content: str | Sequence[TextBlock] | None) -> str | list[dict[str, str]]:
    """As a chat's content; several blocks are parts, which the template's form joins."""
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) == 1:
        return content[0].text
    return [{"type": "text", "text": block.text} for block in content]


def _messages(body: ConversationFields) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _content(body.system)}
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif isinstance(message, UserMessage):
            yield from _of_user(message.content, f"messages[{number}].content")
        elif isinstance(message, AssistantMessage):
            yield _of_assistant(message.content)
        else:
            yield {"role": "system", "content": _content(message.content)}


def _is_begun(last: dict[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def _of_user(blocks: Sequence[UserBlock], where: str) -> Iterator[dict[str, Any]]:
    """Results of calls are messages of their own; the texts between them are the user's."""
    if not blocks:
        raise ApiError(400, f"{where} is empty: give text or a block", param=where)
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _content(texts)}
            texts = []
        content = _content(block.content)
        if not isinstance(content, str):
            content = "\n".join([part["text"] for part in content])
        shown = f"Error: {content}" if block.is_error else content
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}
    if texts:
        yield {"role": "user", "content": _content(texts)}


def _of_assistant(blocks: Sequence[AssistantBlock]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    message: dict[str, Any] = {"role": "assistant"}
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if texts or not calls:
        message["content"] = _content(texts)
    if calls:
        message["tool_calls"] = calls
    if "".join(thoughts):
        message["reasoning_content"] = "\n\n".join(thoughts)
    return message


def _tool_fields(body: ConversationFields) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not body.tools:
        raise ApiError(400, f"tool_choice is {choice.type}, and there are no tools", param="tools")
    if not body.tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in body.tools]}
    if choice is None:
        return fields
    if (choice.type == "tool") != (choice.name is not None):
        words = "needs" if choice.name is None else "has no use for"
        raise ApiError(
            400, f"tool_choice of the type {choice.type} {words} a name", param="tool_choice.name"
        )
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    named = {"type": "function", "function": {"name": choice.name}}
    fields["tool_choice"] = kinds.get(choice.type, named)
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _thinking_fields(body: ConversationFields, settings: ReasoningSettings) -> dict[str, Any]:
    thinking = body.thinking
    effort = None if body.output_config is None else body.output_config.effort
    if thinking is None or thinking.type == "disabled":
        if effort not in (None, _USUAL_EFFORT):
            raise ApiError(
                400,
                'output_config.effort needs thinking: give {"type": "adaptive"}',
                param="output_config.effort",
            )
        return {"reasoning_effort": "none"}
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        words = "needs" if thinking.budget_tokens is None else "has no use for"
        raise ApiError(
            400,
            f"thinking of the type {thinking.type} {words} budget_tokens",
            param="thinking.budget_tokens",
        )
    return {
        "reasoning_effort": _effort(effort, settings),
        "thinking_token_budget": thinking.budget_tokens if settings.has_reasoning else None,
    }


def _effort(effort: str | None, settings: ReasoningSettings) -> str | None:
    """None where it asks for nothing: the usual effort of a model that has one alone, and any
    effort of a model that does not think."""
    if not settings.has_effort and (effort == _USUAL_EFFORT or not settings.has_reasoning):
        return None
    return effort
