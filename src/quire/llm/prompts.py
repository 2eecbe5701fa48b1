"""What users give to a call: prompts (text, token ids, conversations), with the tokens they mean,
and SamplingParams, or their fields by name.

A name that there is not is refused, with what to write instead where another library has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cached_property
from operator import index
from typing import Any, Literal, NamedTuple, cast

from quire.core.errors import ContextLengthError, RequestError
from quire.core.request import RequestOptions
from quire.core.sampling import SamplingOptions, SamplingParams
from quire.llm.chats import (
    ChatForms,
    ChatOptions,
    ChatTurn,
    Message,
    ReasoningSettings,
)
from quire.structured import PreparedGrammar
from quire.tokenizer import ChatTemplate, Tokenizer

# A mapping: {"prompt"}, {"prompt", "suffix"} (what stands between them is asked for) or
# {"prompt_token_ids"}.
Prompt = str | Sequence[int] | Mapping[str, object]
Conversation = str | Sequence[Message]  # a string is one message of the user


_NO_OPTIONS = ChatOptions()


class Prepared(NamedTuple):
    """A prompt as the engine takes it, and the text it came as or was made into."""

    tokens: Sequence[int]
    text: str | None = None
    grammar: PreparedGrammar | None = None  # kept for the engine, which looks for it in the cache
    turn: ChatTurn | None = None  # of a conversation: how the answer is read
    ends: tuple[int, ...] = ()  # tokens that end the completion beside the model's own

    def with_ends(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the call, by which its completion also ends with `ends`."""
        more = () if params.ignore_eos else {*self.ends}.difference(params.stop_token_ids)
        if not more:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(more)))

    def without_text(self) -> "Prepared":
        """For those who keep it long and need the tokens alone."""
        return self._replace(text=None)


class PromptReader:
    """Turns prompts into tokens; each that cannot be is a RequestError that says why."""

    def __init__(self, tokenizer: Tokenizer | None, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context

    def read(
        self, prompt: Prompt, *, add_special: bool = True, last: int | None = None
    ) -> Prepared:
        """The tokens of a text, with those the model wants around it unless `add_special` is false;
        token ids as they are. `last`: of a longer prompt only so many tokens at its end."""
        if isinstance(prompt, Mapping):
            if prompt.get("suffix") not in (None, ""):
                return self._read_fill_in(prompt, last)
            prompt = _from_mapping(prompt)
        if not isinstance(prompt, str):
            if last is not None and isinstance(prompt, list | tuple):
                prompt = prompt[-last:]
            return Prepared(self._checked_ids(prompt))
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer: give the prompt as token ids", param="prompt"
            )
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        tokens = self._encode(self._tokenizer, prompt, "prompt", last, add_special=add_special)
        return Prepared(tokens, prompt) if last is None else _cut(tokens, prompt, last)

    def _read_fill_in(self, prompt: Mapping[str, object], last: int | None) -> Prepared:
        """The prompt that asks for what stands between two texts."""
        before, after = prompt.get("prompt"), prompt["suffix"]
        if not isinstance(before, str) or not isinstance(after, str) or len(prompt) > 2:
            message = "suffix goes with a prompt that is text: what stands between them is written"
            raise RequestError(message, param="suffix")
        if last is not None:
            message = "a prompt with a suffix is not cut: leave truncate_prompt_tokens out"
            raise RequestError(message, param="truncate_prompt_tokens")
        tokenizer = self._need_tokenizer()
        if tokenizer.fill_in is None:
            message = (
                "this model's vocabulary has no tokens for filling in (such as <|fim_prefix|>): "
                "leave suffix out, or take a code model that was trained for it"
            )
            raise RequestError(message, param="suffix")
        texts = {"prompt": before, "suffix": after}
        param = next((name for name in texts if _first_half(texts[name]) is not None), "prompt")
        with self._within_context(param, texts[param]):
            tokens = tokenizer.encode_fill_in(before, after, limit=self._max_context)
        return Prepared(tokens, before, ends=tokenizer.fill_in.ends)

    def _checked_ids(self, prompt: Any) -> list[int]:
        """Of a prompt that can never run, the length alone is looked at."""
        if isinstance(prompt, list | tuple) and len(prompt) > self._max_context:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the context holds {self._max_context}",
                param="prompt",
                max_context=self._max_context,
            )
        return _token_ids(prompt)

    def read_chat(
        self,
        messages: Conversation,
        options: ChatOptions = _NO_OPTIONS,
        *,
        parse_control_tokens: bool = False,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        last: int | None = None,
    ) -> Prepared:
        """The prompt that asks for the next message of a conversation, or, with
        `continue_final_message`, for the rest of its last one; without `add_generation_prompt`
        the conversation alone. `last`: as in `read`.

        `options` say which tools there are and how to reason; the answer is `turn`'s to parse, and
        its SamplingParams are `turn.params(...)`.

        Control tokens come from the template; in a message their names are letters, unless
        `parse_control_tokens` says that its author may write them.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt begins a new message and continue_final_message goes on "
                "with the last one: give one of them",
                param="continue_final_message",
            )
        forms = self._forms
        turn, tools = forms.open_turn(options)
        text, own_spans = forms.render(
            messages,
            tools,
            forms.variables(options),
            add_generation_prompt=(
                not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt
            ),
            continue_final_message=continue_final_message,
        )
        assert self._tokenizer is not None
        if _first_half(text) is not None:
            raise _half_pair(messages)
        spans = True if parse_control_tokens else own_spans
        tokens = self._encode(
            self._tokenizer, text, "messages", last, add_special=False, parse_special=spans
        )
        prepared = Prepared(tokens, text) if last is None else _cut(tokens, text, last)
        return prepared._replace(turn=forms.opened_by(turn, text))

    @property
    def reasoning_settings(self) -> ReasoningSettings:
        return self._forms.reasoning_settings

    @cached_property
    def _forms(self) -> ChatForms:
        template = self.template
        assert self._tokenizer is not None
        return ChatForms(template, self._tokenizer)

    def tokenize(self, prompt: Conversation, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, or of a conversation in the model's template; of any length.

        `add_special_tokens`: with those that the model wants around a text.
        """
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(
                f"tokenize takes a text or a list of messages, got {prompt!r:.100}", param="prompt"
            )
        if not isinstance(prompt, str):
            return list(self.read_chat(prompt).tokens)
        return self._need_tokenizer().encode(prompt, add_special=add_special_tokens)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        tokenizer = self._need_tokenizer()
        tokens = _token_ids(token_ids, "token_ids")
        for number, token in enumerate(tokens):
            if not 0 <= token < tokenizer.vocabulary_size:
                raise RequestError(
                    f"token_ids[{number}] is {token}; the vocabulary has 0 to "
                    f"{tokenizer.vocabulary_size - 1}",
                    param="token_ids",
                )
        return tokenizer.decode(tokens, skip_special=skip_special_tokens)

    def read_pair(self, prompt: Prompt, completion: Prompt) -> tuple[Prepared, int]:
        """A prompt with its completion, and how many tokens the prompt is of them.

        Texts are tokenised together: the completion's tokens are those past the prompt's number.
        """
        first = self.read(prompt)
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = self.read(prompt + completion)
        else:
            whole = Prepared([*first.tokens, *self._continuation(completion)])
        if len(whole.tokens) <= len(first.tokens):
            raise RequestError("the completion has no tokens of its own", param="completions")
        return whole, len(first.tokens)

    def _continuation(self, completion: Prompt) -> Sequence[int]:
        if isinstance(completion, str):
            return self.tokenize(completion, add_special_tokens=False)
        return self.read(completion).tokens

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: it takes token ids", param="prompt")
        return self._tokenizer

    @property
    def can_chat(self) -> bool:
        """Whether the model came with a chat template."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template; compiled when it is first wanted."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so it cannot chat: it completes token ids "
                "(LLM.generate, quire generate --prompt-tokens, /v1/completions)",
                param="messages",
            )
        if tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat: give one (--chat-template), "
                "or complete plain text (LLM.generate, quire generate --raw, /v1/completions)",
                param="messages",
            )
        tokens = {
            "bos_token": tokenizer.bos_token_id,
            "eos_token": tokenizer.eos_token_id,
            "unk_token": tokenizer.unknown_token_id,
            "pad_token": tokenizer.padding_token_id,
        }
        texts = {
            name: tokenizer.token_name(token) for name, token in tokens.items() if token is not None
        }
        return ChatTemplate(tokenizer.chat_template, **texts)

    def close(self) -> None:
        """Let go of the process that renders chats."""
        if "template" in self.__dict__:
            self.template.close()

    def _encode(
        self, tokenizer: Tokenizer, text: str, param: str, last: int | None, **options: Any
    ) -> list[int]:
        """`param`: what the text was given as; `last`: how many tokens are wanted of it."""
        limit = self._max_context if last is None else None
        with self._within_context(param, text):
            return tokenizer.encode(text, limit=limit, **options)

    @contextmanager
    def _within_context(self, param: str, text: str) -> Iterator[None]:
        """An error of encoding says which parameter it is of, and how long it may be."""
        try:
            yield
        except RequestError as error:
            if _first_half(text) is not None:
                raise RequestError(str(error), param=param) from None
            message = f"the prompt does not fit into the context: {error}"
            limit = self._max_context
            raise ContextLengthError(message, param=param, max_context=limit) from None


def _cut(tokens: list[int], text: str, last: int) -> Prepared:
    """The end of a prompt; what is cut has no text of its own."""
    return Prepared(tokens, text) if len(tokens) <= last else Prepared(tokens[-last:])


def listed_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, Mapping):
        return [prompts]
    items = _listed(prompts, "prompts")
    if isinstance(items, str) or (items and _is_token(items[0])):
        return [items]
    return list(items)


def listed_conversations(messages: Conversation | Iterable[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list of conversations."""
    items = _listed(messages, "messages")
    if isinstance(items, str) or (items and isinstance(items[0], Mapping)):
        return [items]
    return list(items)


def _listed(given: Any, name: str) -> Any:
    """Text as it is, anything else as a list."""
    if isinstance(given, str):
        return given
    if hasattr(given, "tolist"):  # an array
        given = given.tolist()
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {type(given).__name__}", param=name)
    return list(given)


def text_of(prompt: Any) -> str | None:
    """The text that a prompt comes as, if it does."""
    given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return given if isinstance(given, str) else None


def length_of(prompt: Any) -> int:
    """The characters that are to be encoded of a prompt."""
    given = prompt.values() if isinstance(prompt, Mapping) else (prompt,)
    return sum(len(value) for value in given if isinstance(value, str))


def _from_mapping(prompt: Mapping[str, object]) -> Any:
    """The prompt in a mapping, such as vLLM's TextPrompt or TokensPrompt."""
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids", "suffix"):
            raise RequestError(
                f'a prompt has no {name!r}: give {{"prompt": text}}, perhaps with a "suffix", or '
                '{"prompt_token_ids": [...]}, without anything else',
                param="prompt",
            )
    if "prompt_token_ids" in prompt:  # the text, if it is there too, is what they were made of
        return _token_ids(prompt["prompt_token_ids"], "prompt_token_ids")
    return prompt.get("prompt", "")


def _token_ids(prompt: Any, name: str = "prompt") -> list[int]:
    """Plain integers; the engine checks that the model has such tokens."""
    if isinstance(prompt, str | bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        what = "a prompt is text or" if name == "prompt" else f"{name} must be"
        raise RequestError(f"{what} a list of token ids, got {prompt!r:.100}", param=name)
    if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
        return list(prompt)
    tokens = []
    for number, token in enumerate(prompt):
        if not _is_token(token):
            which = f"prompt token {number}" if name == "prompt" else f"{name}[{number}]"
            several = "; this call takes one prompt" if isinstance(token, str | list) else ""
            raise RequestError(
                f"{which} must be an integer, got {token!r:.100}{several}", param=name
            )
        tokens.append(index(token))
    return tokens


def _is_token(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _half_pair(messages: Conversation) -> RequestError:
    """For a conversation that holds half of a surrogate pair: where, in its own characters."""
    waiting: list[tuple[str, Any]] = [("messages", messages)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}", inner) for key, inner in [*value.items()][::-1]]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{i}]", value[i]) for i in reversed(range(len(value)))]
        elif isinstance(value, str) and (start := _first_half(value)) is not None:
            return RequestError(
                f"{name} holds half a surrogate pair at character {start}, which is no text",
                param="messages",
            )
    return RequestError("the conversation holds half a surrogate pair", param="messages")


def _first_half(text: str) -> int | None:
    """Where a text has half a surrogate pair; None: nowhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


# ---- parameters


Params = SamplingParams | Sequence[SamplingParams] | None  # one for all, or one for each
OnError = Literal["raise", "keep"]

_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.init)
_NO_ADAPTERS = "quire has no adapters"
_ON_LLM = "give chat_template to LLM(...)"
_STRUCTURED = "write structured=..., a JSON schema, a pydantic model or a Constraint"
_SAMPLE = "give temperature=0 for the likeliest tokens, above 0 to sample"
# Of generate() and its kin in vLLM, transformers and llama-cpp-python, and of OpenAI's API.
_CALL_NAMES = {
    "use_tqdm": "write progress=True or progress=False",
    "lora_request": _NO_ADAPTERS,
    "prompt_token_ids": "give token ids in the place of the prompt's text",
    "guided_decoding": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "response_format": _STRUCTURED,
    "grammar": "write structured=Constraint.grammar(...)",
    "json_schema": _STRUCTURED,
    "tools": "give tools to chat()",
    "chat_template": _ON_LLM,
    "chat_template_kwargs": "give it to chat()",
    "add_generation_prompt": "it is always added",
    "continue_final_message": "put the begun answer into a prompt for generate()",
    "best_of": "write n, and choose yourself",
    "use_beam_search": "there is no beam search; write n, and choose yourself",
    "num_beams": "there is no beam search; write n, and choose yourself",
    "num_return_sequences": "write n",
    "max_new_tokens": "write max_tokens",
    "max_length": "write max_tokens, which counts new tokens alone",
    "max_completion_tokens": "write max_tokens",
    "n_predict": "write max_tokens",
    "do_sample": _SAMPLE,
    "repeat_penalty": "write repetition_penalty",
    "eos_token_id": "write stop_token_ids",
    "stop_strings": "write stop",
    "top_logprobs": "write logprobs, which counts the likeliest tokens",
    "echo": "outputs have prompt and prompt_token_ids",
    "stream": "write llm.stream(...)",
}


def params_of(
    params: Params,
    sampling_params: Params,
    keywords: Mapping[str, object],
    defaults: SamplingOptions,
) -> SamplingParams | Sequence[SamplingParams]:
    """The parameters of a call, which come in one of three ways.

    The model's defaults are for fields that keywords leave out; SamplingParams are taken whole.
    """
    for name in keywords:
        if name not in _FIELDS:
            raise RequestError(no_parameter(name, _FIELDS, _CALL_NAMES), param=name)
    if params is not None and sampling_params is not None:
        raise RequestError(
            "params and sampling_params are two names of one parameter: give one of them",
            param="sampling_params",
        )
    given = sampling_params if params is None else params
    if given is None:
        # The engine has the model's max_tokens: what the context leaves may be less.
        return SamplingParams.from_mapping({**defaults, "max_tokens": None, **keywords})
    if keywords:
        name = next(iter(keywords))
        kind = "params" if params is not None else "sampling_params"
        raise RequestError(
            f"{kind} and {name} were both given: put {name} into the SamplingParams, or leave "
            f"{kind} out",
            param=name,
        )
    return given


def one_params(
    params: SamplingParams | None,
    sampling_params: SamplingParams | None,
    keywords: Mapping[str, object],
    defaults: SamplingOptions,
) -> SamplingParams:
    """The parameters of a call with one prompt."""
    given = params_of(params, sampling_params, keywords, defaults)
    if not isinstance(given, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {given!r:.100}", param="params")
    return given


def split_keywords(given: Mapping[str, object]) -> tuple[RequestOptions, dict[str, object]]:
    """Options of the request, and the rest: fields of SamplingParams."""
    own = {name: value for name, value in given.items() if name in RequestOptions.__annotations__}
    rest = {name: value for name, value in given.items() if name not in own}
    return cast(RequestOptions, own), rest


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """One for all, or one for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(
            f"params must be SamplingParams or a list of them, got {params!r:.100}", param="params"
        )
    for number, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"params[{number}] must be SamplingParams, got {one!r:.100}", param="params"
            )
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts but {len(params)} params: give one for each", param="params"
        )
    return list(params)


def keeps_errors(on_error: str) -> bool:
    """Whether outputs carry errors and the call does not raise them."""
    if on_error not in ("raise", "keep"):
        raise RequestError(
            f'on_error must be "raise" or "keep", got {on_error!r:.100}', param="on_error"
        )
    return on_error == "keep"


def no_parameter(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """What to say of a name that there is not: what to write instead, where that can be told."""
    if name in elsewhere:
        return f"there is no {name!r} here: {elsewhere[name]}"
    known = sorted(known)
    close = get_close_matches(name, known, 1)
    if close:
        return f"there is no {name!r} here: did you mean {close[0]!r}?"
    return f"there is no {name!r} here; there are {', '.join(known)}"
