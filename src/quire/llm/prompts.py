"""What users give as prompts, and the tokens it means: text, token ids, conversations."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

from quire.core.errors import RequestError
from quire.core.sampling import SamplingParams
from quire.tokenizer import ChatTemplate, Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, object]
Conversation = Sequence[Message]


class Prepared(NamedTuple):
    """A prompt as the engine takes it, and the text it came as or was made into."""

    tokens: Sequence[int]
    text: str | None = None

    def without_text(self) -> "Prepared":
        """For those who keep it long and need the tokens alone."""
        return Prepared(self.tokens)


class PromptReader:
    """Turns prompts into tokens; each that cannot be is a RequestError that says why."""

    def __init__(self, tokenizer: Tokenizer | None, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context

    def read(self, prompt: Prompt) -> Prepared:
        """The tokens of a text, with those the model wants around it; token ids as they are."""
        if not isinstance(prompt, str):
            return Prepared(self._checked_ids(prompt))
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer: give the prompt as token ids", param="prompt"
            )
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        tokens = self._encode(self._tokenizer, prompt, "prompt", add_special=True)
        return Prepared(tokens, prompt)

    def _checked_ids(self, prompt: Any) -> list[int]:
        """Of a prompt that can never run, the length alone is looked at."""
        if isinstance(prompt, list | tuple) and len(prompt) >= self._max_context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {self._max_context} "
                "with at least one for the completion",
                param="prompt",
            )
        return _token_ids(prompt)

    def read_chat(self, messages: Conversation, *, parse_control_tokens: bool = False) -> Prepared:
        """The prompt that asks for the next message of a conversation.

        Control tokens come from the template; in a message their names are letters, unless
        `parse_control_tokens` says that its author may write them.
        """
        text, own_spans = self.template.render(messages)
        assert self._tokenizer is not None
        spans = True if parse_control_tokens else own_spans
        tokens = self._encode(
            self._tokenizer, text, "messages", add_special=False, parse_special=spans
        )
        return Prepared(tokens, text)

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
                "this model has no tokenizer, so it cannot chat; use generate", param="messages"
            )
        if tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat; use generate",
                param="messages",
            )
        marks = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        texts = (None if token is None else tokenizer.token_text(token) for token in marks)
        return ChatTemplate(tokenizer.chat_template, *texts)

    def close(self) -> None:
        """Let go of the process that renders chats."""
        if "template" in self.__dict__:
            self.template.close()

    def _encode(self, tokenizer: Tokenizer, text: str, param: str, **options: Any) -> list[int]:
        """`param`: what the text was given as."""
        try:
            return tokenizer.encode(text, limit=self._max_context, **options)
        except RequestError as error:
            message = str(error)
            if _is_unicode(text):
                message = f"the prompt does not fit into the context: {error}"
            raise RequestError(message, param=param) from None


def listed_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    items = _listed(prompts, "prompts")
    if isinstance(items, str) or (items and _is_token(items[0])):
        return [items]
    return list(items)


def listed_conversations(messages: Conversation | Iterable[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list of conversations."""
    items = _listed(messages, "messages")
    if items and isinstance(items[0], Mapping):
        return [items]
    return list(items)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One for all, or one for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
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


def _listed(given: Any, name: str) -> Any:
    """Text as it is, anything else as a list."""
    if isinstance(given, str):
        return given
    if hasattr(given, "tolist"):  # an array
        given = given.tolist()
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, got {type(given).__name__}", param=name)
    return list(given)


def _token_ids(prompt: Any) -> list[int]:
    """Plain integers; the engine checks that the model has such tokens."""
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"a prompt is text or a list of token ids, got {prompt!r:.100}", param="prompt"
        )
    if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
        return list(prompt)
    tokens = []
    for number, token in enumerate(prompt):
        if not _is_token(token):
            raise RequestError(
                f"prompt token {number} must be an integer, got {token!r:.100}", param="prompt"
            )
        tokens.append(index(token))
    return tokens


def _is_token(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
