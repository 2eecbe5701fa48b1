"""ChatTemplate: chat messages to the prompt text that a model was trained on."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.core.errors import ModelFileError, QuireError, RequestError
from quire.tokenizer.messages import plain_values
from quire.tokenizer.template_process import PROCESSES, TemplateProcessError
from quire.tokenizer.template_worker import encoded

MAX_SOURCE_LENGTH = 256 * 1024  # characters; the largest in use have some seventeen thousand
COMPILE_SECONDS = 10.0  # of processor time
RENDER_SECONDS = 2.0  # the same, for any messages ...
RENDER_SECONDS_PER_BYTE = 2e-6  # ... and more for long ones
MAX_CHARACTERS = 1 << 20  # of the prompt, for any messages ...
MAX_CHARACTERS_PER_BYTE = 4  # ... and more for long ones

_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


class RenderedChat(NamedTuple):
    """A prompt, and which of its characters the template wrote; all others are the request's."""

    text: str
    own_spans: Sequence[tuple[int, int]]  # in order; two that touch were not written as one


class ChatTemplate:
    """A compiled chat template. Immutable, and safe to share between threads.

    It is compiled and rendered in another process (see `template_process`), until it is closed.
    """

    def __init__(
        self, source: str, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        if len(source) > MAX_SOURCE_LENGTH:
            raise ModelFileError(
                f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_LENGTH}"
            )
        self._compile()
        PROCESSES.open(self)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> RenderedChat:
        """The prompt for a conversation.

        A RequestError means that these messages are wrong, or that the template refuses them; a
        ModelFileError that the template does what templates may not, such as to loop for ever.
        """
        for name in variables:
            if name in _RESERVED:
                raise RequestError(f"{name} is set by the model and cannot be given")
        values = plain_values(messages, tools, {"documents": None} | variables)
        values["add_generation_prompt"] = bool(add_generation_prompt)
        return self._rendered(encoded(values))

    def close(self) -> None:
        """Let the processes go, if no other template wants them."""
        PROCESSES.close(self)

    def _compile(self) -> None:
        head = {"key": self._key, "source": self.source, "seconds": COMPILE_SECONDS}
        try:
            reply = PROCESSES.ask(head)
        except TemplateProcessError as error:
            raise ModelFileError(f"the chat template does not compile: {error}") from None
        if "error" in reply:
            raise ModelFileError(f"the chat template does not compile: {reply['reason']}")

    def _rendered(self, values: bytes) -> RenderedChat:
        head: dict[str, Any] = {
            "key": self._key,
            "tokens": self._tokens,
            "seconds": RENDER_SECONDS + RENDER_SECONDS_PER_BYTE * len(values),
            "max_characters": MAX_CHARACTERS + MAX_CHARACTERS_PER_BYTE * len(values),
        }
        try:
            reply = PROCESSES.ask(head, values)
            if reply.get("error") == "unknown":  # to this process, which has not compiled it
                head |= {"source": self.source, "seconds": head["seconds"] + COMPILE_SECONDS}
                reply = PROCESSES.ask(head, values)
        except TemplateProcessError as error:
            raise ModelFileError(f"the chat template was stopped: {error}") from None
        if "error" in reply:
            raise _as_error(reply["error"], reply["reason"])
        return RenderedChat(reply["text"], [(start, end) for start, end in reply["spans"]])


def _as_error(kind: str, reason: str) -> QuireError:
    if kind == "refused":
        return RequestError(f"the chat template refuses the messages: {reason}")
    if kind == "failed":
        return RequestError(f"the chat template fails on the messages: {reason}")
    return ModelFileError(f"the chat template was stopped: {reason}")
