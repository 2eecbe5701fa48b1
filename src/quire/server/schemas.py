"""The bodies that clients may send, each field under the policy of fields.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticKnownError

from quire.core.errors import RequestError
from quire.core.sampling import (
    MAX_BAD_WORDS,
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    Constraint,
    SamplingOptions,
    SamplingParams,
)
from quire.llm.chats import MAX_TOOLS
from quire.server.client_fields import (
    ChatClientFields,
    CompletionClientFields,
    EmbeddingClientFields,
    GenerationClientFields,
)
from quire.server.fields import Refused, Strict, accepted, field_error, refused
from quire.server.sampler_fields import SamplerFields

MAX_PROMPTS = 256  # of one request
MAX_MESSAGES = 4096
MAX_BIASES = 1024
MAX_CHOICES = 4096
_MOST = 2**31 - 1
_SLICE = 16_384  # items that are checked in one call, during which nothing else runs

StopText = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_PREFIXES = "prefixes are reused by what they hold, and the answer is the same with and without"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Field(ge=0, le=_MOST)]
TokenText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]


def _in_slices(ids: Any, check: Callable[[Any], list[int]]) -> list[int]:
    """A long list in several calls, with the indices of errors as they are in the whole."""
    if not isinstance(ids, list) or len(ids) <= _SLICE:
        return check(ids)
    for start in range(0, len(ids), _SLICE):
        try:
            check(ids[start : start + _SLICE])
        except ValidationError as error:
            [first] = error.errors(include_url=False)
            index = start + int(first["loc"][0])
            details = InitErrorDetails(
                type=first["type"], loc=(index,), input=first["input"], ctx=first.get("ctx", {})
            )
            raise ValidationError.from_exception_data("body", [details]) from None
    return ids


def _or_no_limit(number: Any) -> Any:
    """llama.cpp's and LM Studio's clients say -1 for no limit."""
    return None if number == -1 else number


def _few_biases(biases: Any) -> Any:
    """Check the length first: each entry may be an error."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        context = {
            "field_type": "Dictionary",
            "max_length": MAX_BIASES,
            "actual_length": len(biases),
        }
        raise PydanticKnownError("too_long", context)
    return biases


def _kind_of_prompts(given: Any) -> str | None:
    """Which of the kinds below, by the first item, so that only one of them is checked."""
    if isinstance(given, str):
        return "one text"
    if not isinstance(given, list):
        return None
    first = given[0] if given else 0
    return (
        "list of texts"
        if isinstance(first, str)
        else ("list of token ids" if not isinstance(first, list) else "list of lists")
    )


# Tags are no identifiers, so that bodies.py can leave them out of the field's name.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_in_slices)]
_WhichPrompts = Discriminator(
    _kind_of_prompts,
    custom_error_type="prompts",
    custom_error_message="must be a text, a list of token ids, or a list of either",
)


class StreamOptions(Strict):
    include_usage: bool | None = Field(default=None, description="end with a chunk of counts")
    continuous_usage_stats: bool | None = Field(
        default=None, description="vLLM's: counts so far in every chunk, without end tokens"
    )
    include_obfuscation: bool | None = accepted("it pads events and changes no text")


class UsageOptions(Strict):
    include: bool | None = Field(default=None, description="as stream_options.include_usage")


class TextFormat(Strict):
    type: Literal["text"] = Field(description="any text")


class JsonObjectFormat(Strict):
    type: Literal["json_object"] = Field(description="any JSON object, or JSON of a schema")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="llama.cpp's: a JSON schema"
    )
    value: dict[str, Any] | None = Field(
        default=None, description="TGI's name of schema, which Hugging Face's client sends"
    )


class JsonSchema(Strict):
    """A schema as OpenAI's API wraps it."""

    name: str | None = accepted("a label, not shown to the model", max_length=256)
    description: str | None = accepted("not shown to the model")
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    strict: bool | None = accepted("every schema is followed strictly")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"] = Field(description="JSON that the schema allows")
    json_schema: JsonSchema | None = Field(default=None, description="the schema")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="llama.cpp's: the schema without a wrapper"
    )


def _kind_of_format(given: Any) -> str | None:
    kind = given.get("type") if isinstance(given, dict) else None
    return f"format {kind}" if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("format text")]
    | Annotated[JsonObjectFormat, Tag("format json_object")]
    | Annotated[JsonSchemaFormat, Tag("format json_schema")],
    Discriminator(
        _kind_of_format,
        custom_error_type="format",
        custom_error_message="must be an object whose type is text, json_object or json_schema",
    ),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
SchemaOrText = dict[str, Any] | str


class StructuredOutputs(Strict):
    """vLLM's form of a constraint: exactly one of these."""

    json_: SchemaOrText | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, description="a regular expression")
    choice: Choices | None = Field(default=None, description="texts, one of which is the answer")
    grammar: str | None = Field(default=None, description="in Lark's or llama.cpp's syntax")
    json_object: Literal[True] | None = Field(default=None, description="any JSON object")


class CommonFields(Strict):
    """Fields of every request to the model."""

    model: str | None = Field(default=None, description="may be left out: there is one")
    user: str | None = Field(default=None, max_length=256, description="written to the log")
    priority: int | None = Field(
        default=None, ge=-100, le=100, description="lower is more urgent, within a key"
    )
    timeout: float | None = Field(default=None, gt=0, le=86_400, description="seconds")


class Generation(CommonFields, SamplerFields, GenerationClientFields):
    """What chat and plain completions share."""

    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=_MOST)] | None, BeforeValidator(_or_no_limit)
    ] = Field(
        default=None,
        description="left out, or -1: until the model ends it or the context is full; "
        "0: no token, only the prompt's log-probabilities",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=100, description="0 takes the likeliest token"
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="keep the likeliest tokens that add up to this"
    )
    n: int | None = Field(
        default=None, ge=1, le=MAX_COMPLETIONS, description="how many answers, 1 if left out"
    )
    stream: bool | None = Field(default=None, description="answer by server-sent events")
    stream_options: StreamOptions | None = Field(default=None, description="needs stream: true")
    usage: UsageOptions | None = Field(
        default=None, description="OpenRouter's: whole answers have counts anyway"
    )
    stop: (
        StopText
        | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = Field(default=None, description="texts that end the answer and are not in it")
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="taken off tokens that the answer has"
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="taken off for each time the answer has a token"
    )
    logit_bias: (
        Annotated[
            dict[TokenText, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = Field(default=None, description="by token id")
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        le=2**64 - 1,
        description="the same seed gives the same tokens, in any batch",
    )

    top_k: int | None = Field(default=None, ge=-1, le=_MOST, description="0 or -1: all tokens")
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="as a share of the likeliest token's chance",
    )
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, description="above 1: prompt and answer's tokens get rarer"
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=_MOST, description="before that the answer does not end"
    )
    ignore_eos: bool | None = Field(default=None, description="go on past the end of text")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = Field(
        default=None, description="tokens that end the answer, beside the model's own"
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="keep the stop text in the answer"
    )
    include_stop_token: bool | None = Field(
        default=None, description="keep the token that ends a completion in token_ids and logprobs"
    )
    return_token_ids: bool | None = Field(default=None, description="beside the text")

    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="the log-probability of every prompt token after the first, and of so many "
        "of the likeliest in its place; not with stream",
    )
    allowed_token_ids: TokenIds | None = Field(
        default=None, description="no other tokens come, end tokens only if they are listed"
    )
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = (
        Field(
            default=None,
            description="the tokens of each text, with and without a space before it, never come "
            "one after another",
        )
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="false: control tokens are written in the text"
    )
    spaces_between_special_tokens: bool | None = Field(
        default=None,
        description="there are none; true is refused where skip_special_tokens is false",
    )
    detokenize: bool | None = Field(default=None, description="false: token ids and no text")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="log-probabilities name tokens as token_id:N"
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=_MOST,
        description="of a longer prompt only so many tokens at its end are used; -1: as many as "
        "the context leaves beside max_tokens",
    )

    response_format: ResponseFormat | None = Field(
        default=None, description="text, any JSON object, or JSON that a schema allows"
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="vLLM's: one of json, regex, choice, grammar, json_object"
    )
    guided_json: SchemaOrText | None = Field(
        default=None, description="vLLM's older name of structured_outputs.json"
    )
    guided_regex: str | None = Field(
        default=None, description="vLLM's older name of structured_outputs.regex"
    )
    guided_choice: Choices | None = Field(
        default=None, description="vLLM's older name of structured_outputs.choice"
    )
    guided_grammar: str | None = Field(
        default=None, description="vLLM's older name of structured_outputs.grammar"
    )
    grammar: str | None = Field(
        default=None, description="llama.cpp's, in its GBNF or in Lark; empty: any text"
    )
    json_schema: dict[str, Any] | None = Field(
        default=None, description="llama.cpp's: JSON that this schema allows"
    )

    regex: str | None = Field(default=None, description="SGLang's name of structured_outputs.regex")
    ebnf: str | None = Field(
        default=None, description="SGLang's name of structured_outputs.grammar"
    )

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        options, usage = self.stream_options, self.usage
        return bool((options and options.include_usage) or (usage and usage.include))

    @property
    def num_prompt_scores(self) -> int | None:
        """How many likeliest tokens come with each prompt token's log-probability; None: the prompt
        is not scored."""
        return self.prompt_logprobs

    @property
    def constraint_fields(self) -> list[str]:
        """The fields that ask for a form of the answer."""
        names = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if isinstance(self.response_format, TextFormat):
            names.remove("response_format")
        if self.grammar == "":  # as clients of llama.cpp's send it
            names.remove("grammar")
        return names

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have; a RequestError names the field it is in. Clients of
        several servers give the same form by several names."""
        found = {name: self._constraint_of(name) for name in self.constraint_fields}
        for name, other in found.items():
            first = next(iter(found))
            if other != found[first]:
                message = f"{first} and {name} both ask for a form of the answer: give one"
                raise RequestError(message, param=name)
        return next(iter(found.values()), None)

    def _constraint_of(self, name: str) -> Constraint:
        try:
            return _CONSTRAINTS[name](getattr(self, name))
        except RequestError as error:
            raise RequestError(str(error), param=name) from None

    def sampling(
        self, room: int, logprobs: int | None, defaults: SamplingOptions
    ) -> SamplingParams:
        """The engine's parameters, the model's defaults among them; `room`: tokens that the context
        leaves, for quotas to count where the client gives no max_tokens."""
        given: dict[str, Any] = {
            name: value for name in _SAMPLED if (value := getattr(self, name)) is not None
        }
        given |= self.sampler_options(self.repetition_penalty)
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        usual = max(defaults.get("max_tokens") or room, self.min_tokens or 0)
        given.setdefault("max_tokens", max(1, min(room, usual)))
        given["structured"] = self.constraint
        given["prompt_logprobs"] = self.num_prompt_scores
        return SamplingParams.from_mapping({**defaults, **given, "logprobs": logprobs})


_SAMPLED = (
    *("max_tokens", "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty"),
    *("seed", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "include_stop_token"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "detokenize"),
)


def _of_format(given: JsonObjectFormat | JsonSchemaFormat) -> Constraint:
    if isinstance(given, JsonSchemaFormat):
        return _of_schema(given)
    if given.schema_ is not None and given.value is not None:
        raise RequestError("response_format has a schema and a value: give one of them")
    schema = given.value if given.schema_ is None else given.schema_
    return Constraint.json_object() if schema is None else Constraint.json(schema)


def _of_schema(given: JsonSchemaFormat) -> Constraint:
    wrapped = None if given.json_schema is None else given.json_schema.schema_
    if (wrapped is None) == (given.schema_ is None):
        raise RequestError("response_format of the type json_schema needs one json_schema")
    return Constraint.json(given.schema_ if wrapped is None else wrapped)


def _of_structured(given: StructuredOutputs) -> Constraint:
    made: dict[str, Callable[[Any], Constraint]] = {
        "json_": Constraint.json,
        "regex": Constraint.regex,
        "choice": Constraint.choice,
        "grammar": Constraint.grammar,
        "json_object": lambda _: Constraint.json_object(),
    }
    names = [name for name in made if getattr(given, name) is not None]
    if len(names) != 1:
        raise RequestError(
            "structured_outputs takes exactly one of json, regex, choice, grammar and json_object"
        )
    return made[names[0]](getattr(given, names[0]))


_CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "response_format": _of_format,
    "structured_outputs": _of_structured,
    "guided_json": Constraint.json,
    "guided_regex": Constraint.regex,
    "guided_choice": Constraint.choice,
    "guided_grammar": Constraint.grammar,
    "grammar": Constraint.grammar,
    "json_schema": Constraint.json,
    "regex": Constraint.regex,
    "ebnf": Constraint.grammar,
}


class Message(Strict):
    """One message of a conversation; the model's template says which roles there are."""

    role: str = Field(min_length=1, max_length=64, description="system, user, assistant, tool")
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None, description='text, or parts of {"type": "text", "text": ...}'
    )
    name: str | None = Field(
        default=None,
        max_length=256,
        description="of who speaks; where the template has no place for it, it goes before the "
        "text, unless a role has one speaker: the assistant, the system, or user",
    )
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None, description="calls that the assistant made"
    )
    tool_call_id: str | None = Field(
        default=None, max_length=256, description="the call that a tool's message answers"
    )
    reasoning_content: str | None = Field(
        default=None, description="what the assistant thought; the template may leave it out"
    )
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")
    parsed: Any = accepted("OpenAI's clients add it; content and tool_calls say the same")
    provider_specific_fields: Any = accepted("LiteLLM adds it; the other fields say the same")
    cache_control: dict[str, Any] | None = accepted(_PREFIXES)
    reasoning_details: Refused = refused("give the thoughts as reasoning_content", [])
    audio: Refused = refused("quire works with text alone: give the transcript as content")
    function_call: Refused = refused("it is the old name of tool_calls")
    refusal: Refused = refused("no template shows it to the model: give it as content")
    annotations: Refused = refused("no template shows them to the model", [])


class FunctionDescription(Strict):
    name: str = Field(
        min_length=1, max_length=128, description="letters, digits and _ . : / -", examples=["add"]
    )
    description: str | None = Field(default=None, description="shown to the model")
    parameters: dict[str, Any] | None = Field(
        default=None, description="a JSON schema of its arguments; left out: any object"
    )
    strict: bool | None = Field(
        default=None,
        description="hold the arguments to the schema, in forms of calls that are JSON",
    )


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"] = Field(
        default="function", description="may be left out: there are no other tools"
    )
    function: FunctionDescription = Field(description="its name and arguments")
    cache_control: dict[str, Any] | None = accepted(_PREFIXES)


class ReasoningChoice(Strict):
    """How much the model thinks, and whether that is shown."""

    effort: Effort | None = Field(default=None, description="as reasoning_effort")
    enabled: bool | None = Field(
        default=None, description="without an effort: true is medium, false is none"
    )
    max_tokens: int | None = Field(
        default=None, ge=0, le=_MOST, description="as thinking_token_budget"
    )
    exclude: bool | None = Field(default=None, description="true: as include_reasoning: false")

    @property
    def as_fields(self) -> dict[str, Any]:
        """Those of ChatRequest that say the same."""
        effort = {True: "medium", False: "none", None: None}[self.enabled]
        found = {
            "reasoning_effort": self.effort or effort,
            "thinking_token_budget": self.max_tokens,
            "include_reasoning": False if self.exclude else None,
        }
        return {name: value for name, value in found.items() if value is not None}


class ChatRequest(Generation, ChatClientFields):
    messages: list[Message] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="the conversation so far; the answer is its next message",
    )
    max_completion_tokens: Annotated[
        Annotated[int, Field(ge=1, le=_MOST)] | None, BeforeValidator(_or_no_limit)
    ] = Field(default=None, description="another name of max_tokens")
    logprobs: bool | None = Field(default=None, description="of the answer's tokens")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="of as many of the likeliest tokens"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables of the model's chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="false: the prompt ends with the conversation, and does not begin an answer",
    )
    continue_final_message: bool | None = Field(
        default=None, description="the answer goes on with the last message's text"
    )
    documents: (
        Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(default=None, description="for chat templates that write documents")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="functions that the model may call"
    )
    tool_choice: Any = Field(
        default=None,
        description="auto (default), none, required, one function, or OpenAI's allowed_tools",
        examples=["auto"],
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: at most one call in an answer that must call"
    )
    reasoning_effort: Effort | None = Field(
        default=None, description="as far as the model's template has such a setting"
    )
    include_reasoning: bool | None = Field(
        default=None, description="false: leave reasoning_content out of the answer"
    )
    thinking_token_budget: int | None = Field(
        default=None, ge=0, le=_MOST, description="tokens of reasoning; then its end is forced"
    )
    reasoning: ReasoningChoice | None = Field(
        default=None, description="Ollama's and OpenRouter's form of the three fields before it"
    )

    function_call: Refused = refused("it is the old name: use tool_choice", "none", "auto")
    functions: Refused = refused("it is the old name: use tools", [])
    modalities: Refused = refused("quire works with text alone", ["text"])

    @model_validator(mode="after")
    def _read_reasoning(self) -> Self:
        """Give each part of `reasoning` to the field that means the same."""
        parts = {} if self.reasoning is None else self.reasoning.as_fields
        for name, value in parts.items():
            if getattr(self, name) not in (None, value):
                words = f"and {name} differ: give one of them"
                raise field_error("conflict", words, "reasoning")
            setattr(self, name, value)
        return self


class CompletionRequest(Generation, CompletionClientFields):
    prompt: Annotated[
        Annotated[str, Tag("one text")]
        | Annotated[TokenIds, Tag("list of token ids")]
        | Annotated[
            list[str],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("list of texts"),
        ]
        | Annotated[
            list[TokenIds],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("list of lists"),
        ],
        _WhichPrompts,
    ] = Field(description="text or token ids, one prompt or many")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="of the answer's tokens, and as many of the likeliest",
    )
    echo: bool | None = Field(
        default=None,
        description="the prompt comes before the completion, with log-probabilities if these are "
        "asked for (then also that of the token that ends it); both together not with stream",
    )
    add_special_tokens: bool | None = Field(
        default=None, description="false: without the tokens that the model wants around a text"
    )
    best_of: int | None = Field(
        default=None, ge=1, description="only the value of n: use n and choose yourself"
    )
    suffix: str | None = Field(
        default=None,
        description="what follows the completion: it is filled in between prompt and suffix, by a "
        "code model whose vocabulary has tokens for that (Qwen2.5 Coder, Code Llama, StarCoder, "
        "DeepSeek Coder, CodeGemma, Codestral, ...)",
    )

    @property
    def num_prompt_scores(self) -> int | None:
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    def sampling(
        self, room: int, logprobs: int | None, defaults: SamplingOptions
    ) -> SamplingParams:
        """Whoever reads a prompt's scores counts on one for each generated token (the harnesses
        leave the last out), so the token that ends a completion is listed too."""
        params = super().sampling(room, logprobs, defaults)
        is_listed = self.echo and logprobs is not None and self.include_stop_token is None
        return replace(params, include_stop_token=True) if is_listed else params

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class EmbeddingRequest(CommonFields, EmbeddingClientFields):
    input: Annotated[
        Annotated[str, StringConstraints(min_length=1), Tag("one text")]
        | Annotated[TokenIds, Tag("list of token ids")]
        | Annotated[
            list[Annotated[str, StringConstraints(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("list of texts"),
        ]
        | Annotated[
            list[TokenIds],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("list of lists"),
        ],
        _WhichPrompts,
    ] = Field(description="texts or token ids, one or many")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="numbers, or little-endian float32 in base64"
    )
    pooling: Literal["last"] | None = Field(
        default=None, description="the state after the last token; there is no other"
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=_MOST,
        description="only the first so many numbers, at length 1 again: fit for models that were "
        "trained for it (Matryoshka)",
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each input by itself."""
        found = self.input
        if isinstance(found, str):
            return [found]
        if isinstance(found[0], int):
            return [found]
        return list(found)


class TokenizeRequest(Strict):
    model: str | None = Field(default=None, description="may be left out: there is one")
    prompt: str | None = Field(default=None, description="a text, or else messages")
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = Field(default=None, description="a conversation, in the model's chat template")
    add_special_tokens: bool | None = Field(
        default=None,
        description="false: without what the model wants before and after a text; true is refused "
        "with messages: the template writes it",
    )
    add_generation_prompt: bool | None = Field(default=None, description="as in a chat")
    continue_final_message: bool | None = Field(default=None, description="as in a chat")
    return_token_strs: bool | None = Field(
        default=None, description="also the tokens' texts, as token_strs"
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=256, fail_fast=True)] | None = Field(
        default=None, description="as in a chat, for the template"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="as in a chat")
    chat_template: Refused = refused("the server's operator chooses it (--chat-template)")
    mm_processor_kwargs: Refused = refused("quire works with text alone", {})
    media_io_kwargs: Refused = refused("quire works with text alone", {})


class DetokenizeRequest(Strict):
    model: str | None = Field(default=None, description="may be left out: there is one")
    tokens: Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_in_slices)] = Field(
        description="token ids"
    )
