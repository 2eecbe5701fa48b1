"""ChatTemplate: chat messages to the prompt text that a model was trained on."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.exceptions import TemplateError as JinjaError

from quire.core.errors import ModelFileError, RequestError
from quire.tokenizer.messages import plain, plain_messages, plain_tools
from quire.tokenizer.template_environment import Metered, TemplateEnvironment, check_syntax
from quire.tokenizer.template_filters import MeteredContext
from quire.tokenizer.template_meter import Meter, WorkLimitError
from quire.tokenizer.template_methods import TemplateError

MAX_SOURCE_LENGTH = 64 * 1024  # characters; the largest in use have some seventeen thousand
BASE_UNITS = 2_000_000  # of work, for any messages ...
UNITS_PER_CHARACTER = 4  # ... and more for long ones

_ENVIRONMENT = TemplateEnvironment()
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


class ChatTemplate:
    """A compiled chat template. Immutable, and safe to share between threads."""

    def __init__(
        self, source: str, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        A RequestError means that these messages are wrong, or that the template refuses them; a
        ModelFileError that the template does what templates may not, such as to loop for ever.
        """
        for name in variables:
            if name in _RESERVED:
                raise RequestError(f"{name} is set by the model and cannot be given")
        values = {name: plain(value, name) for name, value in variables.items()}
        values |= self._tokens
        values["messages"] = plain_messages(messages)
        values["tools"] = plain_tools(tools)
        values["add_generation_prompt"] = bool(add_generation_prompt)
        return _render(self._template, values)


def _compile(source: str) -> Template:
    if len(source) > MAX_SOURCE_LENGTH:
        raise ModelFileError(
            f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_LENGTH}"
        )
    try:
        tree = _ENVIRONMENT.parse(source)
        check_syntax(tree)
        tree = Metered().visit(tree)
        tree.set_environment(_ENVIRONMENT)
        tree.set_lineno(1)
        return _ENVIRONMENT.from_string(tree)
    except SecurityError as error:
        raise ModelFileError(f"the chat template is refused: {error}") from None
    except TemplateSyntaxError as error:
        raise ModelFileError(
            f"the chat template does not compile: line {error.lineno}: {error.message}"
        ) from None
    except (JinjaError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ModelFileError(f"the chat template does not compile: {_reason(error)}") from None


def _render(template: Template, values: dict[str, Any]) -> str:
    context = template.new_context(values)
    assert isinstance(context, MeteredContext)
    context.meter = Meter(BASE_UNITS + UNITS_PER_CHARACTER * _num_characters(values))
    try:
        return "".join(template.root_render_func(context))
    except TemplateError as refusal:
        raise RequestError(f"the chat template refuses the messages: {refusal}") from None
    except WorkLimitError:
        raise ModelFileError(
            "the chat template was stopped: it loops or grows without end; it may do "
            f"{BASE_UNITS} units of work and {UNITS_PER_CHARACTER} for a character of the request"
        ) from None
    except (SecurityError, RecursionError, MemoryError) as error:
        raise ModelFileError(f"the chat template was stopped: {_reason(error)}") from None
    except (
        JinjaError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        place = _line(template, error.__traceback__)
        raise RequestError(
            f"the chat template fails on the messages: {place}{type(error).__name__}: {error}"
        ) from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _num_characters(value: Any) -> int:
    """How large a request's data are: characters of text, and one for each value."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        total += 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return total


def _line(template: Template, traceback: TracebackType | None) -> str:
    """Where in the template an error arose, such as "line 3: "."""
    code = template.root_render_func.__code__
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == code.co_filename:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return "" if line is None else f"line {line}: "
