"""Bodies of Ollama's API, and the request that each means."""

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints, ValidationError

from quire.core.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS
from quire.server.dialect import chat_request
from quire.server.errors import ApiError
from quire.server.fields import Refused, Strict, accepted, refused
from quire.server.schemas import MAX_MESSAGES, MAX_PROMPTS, ChatRequest, CompletionRequest
from quire.server.validation import validation_error

MAX_TOOLS = 1024
MAX_CALLS = 1024
_MOST = 2**31 - 1
_OPERATOR = "the server's operator sets it"
_NO_IMAGES = "quire works with text alone"
_WHOLE = "a conversation that does not fit is an error: shorten it"
_MIROSTAT = "its state is no function of the row: use min_p"

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
KeepAlive = str | int | float | None
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_LONGEST_KEEP_S = 1e9
_LONGEST_DURATION = 64  # characters: searching takes time by their square


def keep_seconds(given: str | float) -> float:
    """What keep_alive says, in seconds; infinity: for ever."""
    text = str(given).strip().lower()
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    try:
        seconds = float(text)
    except ValueError:
        if not text or len(text) > _LONGEST_DURATION or _DURATION.sub("", text):
            message = f'keep_alive must be seconds or a duration such as "5m", got {given!r:.100}'
            raise ApiError(400, message, param="keep_alive") from None
        seconds = sum(float(n) * _UNITS_S[unit] for n, unit in _DURATION.findall(text))
    return seconds if sign > 0 and seconds <= _LONGEST_KEEP_S else math.inf


class Options(Strict):
    """Names as in a Modelfile. What is left out is the model's own default, not Ollama's."""

    num_predict: int | None = Field(
        default=None,
        ge=-2,
        le=_MOST,
        description="tokens at most, of those that fit; -1 and -2: as many as fit",
    )
    num_ctx: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        description="the context that is needed; more than the server's is refused",
    )
    temperature: float | None = Field(default=None, ge=0, le=100, description="0: the likeliest")
    top_k: int | None = Field(default=None, ge=-1, le=_MOST, description="0 or -1: all tokens")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling")
    min_p: float | None = Field(default=None, ge=0, le=1, description="of the likeliest's share")
    typical_p: float | None = Field(
        default=None, gt=0, le=1, description="locally typical sampling; 1: off"
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**64 - 1, description="the same draws again"
    )
    stop: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=512)]],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="texts that end the answer before them")
    repeat_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="of tokens that were there before"
    )
    repeat_last_n: int | None = Field(
        default=None, ge=-1, le=_MOST, description="how far back penalties look; -1: all"
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="of tokens that the answer has"
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="of tokens, by how often the answer has them"
    )
    mirostat: Refused = refused(_MIROSTAT, 0)
    mirostat_tau: float | None = accepted("it matters with mirostat alone")
    mirostat_eta: float | None = accepted("it matters with mirostat alone")
    tfs_z: Refused = refused("use min_p or typical_p", 1)
    penalize_newline: bool | None = accepted("Ollama ignores it, too")
    num_keep: int | None = accepted("nothing of a prompt is cut")
    numa: bool | None = accepted(_OPERATOR)
    num_batch: int | None = accepted(_OPERATOR)
    num_gpu: int | None = accepted(_OPERATOR)
    main_gpu: int | None = accepted(_OPERATOR)
    low_vram: bool | None = accepted(_OPERATOR)
    f16_kv: bool | None = accepted(_OPERATOR)
    logits_all: bool | None = accepted(_OPERATOR)
    vocab_only: bool | None = accepted(_OPERATOR)
    use_mmap: bool | None = accepted(_OPERATOR)
    use_mlock: bool | None = accepted(_OPERATOR)
    embedding_only: bool | None = accepted(_OPERATOR)
    num_thread: int | None = accepted(_OPERATOR)


class OllamaFields(Strict):
    """Of every body."""

    model: str | None = Field(default=None, description="left out: the server's first")
    options: Options | None = Field(default=None, description="how the answer is sampled")
    keep_alive: KeepAlive = Field(
        default=None,
        description="how long the model stays loaded without use, where models are loaded on "
        'demand: seconds, "5m" or "1h30m"; 0: not at all, below 0: for ever',
    )


class AnswerFields(OllamaFields):
    """What /api/chat and /api/generate share."""

    stream: bool | None = Field(default=None, description="left out: as lines of JSON")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description='"json", or a JSON schema that the answer follows'
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None,
        description="false: the template is told not to think where it can be; a level: how much",
    )
    logprobs: bool | None = Field(default=None, description="of the answer's tokens")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="of so many of the likeliest tokens"
    )
    truncate: Refused = refused(_WHOLE, False)
    shift: Refused = refused("an answer ends where the context does", False)


class CalledFunction(Strict):
    name: Name = Field(description="of the tool")
    arguments: dict[str, Any] = Field(description="an object")
    index: int | None = accepted("calls are in order")


class Call(Strict):
    id: str | None = Field(default=None, max_length=256, description="names the call")
    type: Literal["function"] | None = Field(default=None, description="the only type there is")
    function: CalledFunction = Field(description="what was called")


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"] = Field(description="who speaks")
    content: str | None = Field(default=None, description="the text")
    thinking: str | None = Field(
        default=None, description="what the model thought; the template decides whether it is shown"
    )
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        default=None, description="calls that the model made"
    )
    tool_name: str | None = Field(
        default=None, max_length=256, description="the tool whose result this is"
    )
    tool_call_id: str | None = Field(
        default=None, max_length=256, description="the call whose result this is"
    )
    images: Refused = refused(_NO_IMAGES, [])


class OllamaChatRequest(AnswerFields):
    """The body of /api/chat."""

    messages: (
        Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(default=None, description="the conversation; none: whether the model is loaded")
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        Field(default=None, description="what the model may call")
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="as in OpenAI's API, which some of Ollama's clients send"
    )


class GenerateRequest(AnswerFields):
    """The body of /api/generate."""

    prompt: str | None = Field(
        default=None, description="one message of the user; none: whether the model is loaded"
    )
    system: str | None = Field(default=None, description="a message before it")
    raw: bool | None = Field(
        default=None, description="true: the prompt is continued as it is, without a template"
    )
    suffix: str | None = Field(
        default=None,
        description="what follows the answer: it is filled in between prompt and suffix, without a "
        "template",
    )
    template: Refused = refused("a template is code: give it to the server (--chat-template)", "")
    context: Refused = refused("send the conversation to /api/chat", [])
    images: Refused = refused(_NO_IMAGES, [])
    width: Refused = refused(_NO_IMAGES, 0)
    height: Refused = refused(_NO_IMAGES, 0)
    steps: Refused = refused(_NO_IMAGES, 0)


class EmbedRequest(OllamaFields):
    """The body of /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)] = Field(
        description="a text, or texts"
    )
    truncate: bool | None = Field(
        default=None, description="false: a text that does not fit is an error; else it is cut"
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=_MOST, description="only so many numbers, at length 1 again"
    )


class EmbeddingsRequest(OllamaFields):
    """The body of /api/embeddings, the older one."""

    prompt: str = Field(min_length=1, description="a text")


class ShowRequest(Strict):
    """The body of /api/show."""

    model: str | None = Field(default=None, description="left out: the server's first")
    name: str | None = Field(default=None, description="the older name of model")
    verbose: bool | None = accepted("tensors and vocabularies are not listed")
    system: Refused = refused("models are not changed here", "")
    template: Refused = refused("models are not changed here", "")
    options: Refused = refused("models are not changed here", {})


# ---- translation


_SAME_NAMES = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    *("repeat_last_n", "presence_penalty", "frequency_penalty"),
)
FIELD_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in _SAME_NAMES},
}


def model_name(given: str | None) -> str | None:
    """Ollama's clients write the tag of a model that has none."""
    return None if given is None else given.removesuffix(":latest")


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    fields = _answer_fields(body)
    fields["messages"] = list(_messages(body.messages or []))
    last = fields["messages"][-1]
    if last["role"] == "assistant" and last.get("content") and "tool_calls" not in last:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = body.tools
    if body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice
    return chat_request(fields)


def chat_of_prompt(body: GenerateRequest) -> ChatRequest:
    messages = [{"role": "user", "content": body.prompt}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return chat_request({**_answer_fields(body), "messages": messages})


def completion_of(body: GenerateRequest) -> CompletionRequest:
    """Of a raw prompt, or of one with a suffix."""
    for name in ("system", "think"):
        if getattr(body, name):
            what = "a suffix asks for" if body.suffix else "raw continues"
            message = f"{what} text without a template: {name} has no place in it"
            raise ApiError(400, message, param=name)
    fields = _answer_fields(body)
    fields.pop("reasoning_effort", None)
    fields.pop("top_logprobs", None)
    fields.pop("logprobs", None)
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    try:
        prompts = {"prompt": body.prompt or "", "suffix": body.suffix}
        return CompletionRequest.model_validate({**fields, **prompts})
    except ValidationError as error:
        raise validation_error(error) from None


def _answer_fields(body: AnswerFields) -> dict[str, Any]:
    options = body.options or Options()
    num_predict = options.num_predict
    fields: dict[str, Any] = {
        "model": model_name(body.model),
        "stream": body.stream is not False,
        "max_tokens": None if num_predict is None or num_predict < 0 else num_predict,
        "repetition_penalty": options.repeat_penalty,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "response_format": _format(body),
    }
    fields |= {name: getattr(options, name) for name in _SAME_NAMES}
    fields["stop"] = options.stop or None
    if body.think is not None and body.think is not True:
        fields["reasoning_effort"] = body.think or "none"
    return {name: value for name, value in fields.items() if value is not None}


def _format(body: AnswerFields) -> dict[str, Any] | None:
    if not body.format:
        return None
    if body.format == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.format}}


def _messages(messages: list[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """As a chat's; calls without ids get some, and results those of the calls that they answer."""
    unanswered: list[_Call] = []
    count = 0
    for number, message in enumerate(messages):
        found: dict[str, Any] = {"role": message.role}
        if message.content is not None:
            found["content"] = message.content
        if message.thinking:
            found["reasoning_content"] = message.thinking
        if message.tool_calls:
            found["tool_calls"] = []
            for call in message.tool_calls:
                count += 1
                name, call_id = call.function.name, call.id or f"call_{count:05}"
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                entry = {"id": call_id, "type": "function", "function": function}
                found["tool_calls"].append(entry)
                unanswered.append(_Call(call_id, name, bool(call.id)))
        if message.role == "tool":
            found["tool_call_id"] = _answered(message, unanswered, f"messages[{number}]")
        yield found


class _Call(NamedTuple):
    """A call without its result."""

    id: str
    name: str
    has_own_id: bool  # the client gave it


def _answered(message: OllamaMessage, unanswered: list[_Call], where: str) -> str:
    """The id of the call that a result belongs to: by its id, by the tool, or the first. A call
    without an id is that of any: LiteLLM leaves out the calls' ids and sends the results'."""
    own = message.tool_call_id
    by_id = [call for call in unanswered if call.id == own]
    for call in by_id or [call for call in unanswered if own is None or not call.has_own_id]:
        if message.tool_name in (None, "", call.name):
            unanswered.remove(call)
            return call.id
    raise ApiError(
        400,
        f"{where} is the result of a tool, and no message before it has a call that it answers",
        param=where,
    )
