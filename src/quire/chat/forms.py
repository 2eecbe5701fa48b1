"""How models write tool calls and reasoning: data for the parser, found from the text of a chat
template, never from a model's name.

A call is written in one of three ways: as a JSON object that holds its name and arguments, as a
name followed by its arguments in JSON, or in a syntax of its own, which is read as a whole
(call_syntax.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from quire.chat.call_syntax import (
    MINIMAX_MARK,
    ReadCalls,
    read_arg_keys,
    read_function_gemma,
    read_gemma,
    read_invocations,
    read_kimi,
    read_minimax_tags,
    read_named_objects,
    read_named_parameters,
    read_parameters,
    read_python,
    read_suffixed_arg_keys,
)

_PYTHON_MARKERS = ("<|tool_call_start|>", "<|tool_call_end|>")
_JSON_CALL = '{"name": "%s", "arguments": '
_NAME = r"(?P<name>[^\s<>\[\]{}\"]{1,256})"


@dataclass(frozen=True)
class CallForm:
    """One way of writing tool calls.

    `prefix` (with %s for the name), `suffix`, `begin`, `between` and `end` say how calls are
    written, for grammars; the others, how they are found in text.
    """

    name: str
    call_open: str = ""  # begins each call; "": a call begins with its JSON
    section_opens: tuple[str, ...] = ()  # begin a list of calls
    closes: tuple[str, ...] = ()  # end calls and lists of them
    separators: str = ""  # characters between calls, beside white space
    header: re.Pattern[str] | None = None  # between call_open and the { of arguments: the name
    read: ReadCalls | None = None  # reads what is between call_open and closes[0]
    # An answer that begins with a JSON object, or with a list of them or of calls in Python, may be
    # calls.
    bare_json: bool = False
    extra_markers: tuple[str, ...] = ()
    max_calls: int = 16  # of one answer that a grammar holds
    id_length: int = 0  # of a call's id, where the template checks it
    begin: str = ""
    prefix: str = ""
    suffix: str = ""
    between: str = ""
    end: str = ""
    result_role: str = "tool"  # of messages with results, where the template takes any role

    @property
    def opens(self) -> tuple[str, ...]:
        """What begins calls in an answer."""
        return tuple(mark for mark in (*self.section_opens, self.call_open) if mark)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be control tokens of the model."""
        return (*self.opens, *self.closes, *self.extra_markers)

    @property
    def opening(self) -> str:
        """The marker that every call or list of calls is written with; "": there is none."""
        first = next(iter(self.opens), "")
        return first if first and (self.begin or self.prefix).startswith(first) else ""

    @property
    def can_be_constrained(self) -> bool:
        return bool(self.prefix)

    @property
    def is_tagged_list(self) -> bool:
        """Whether calls are JSON between `begin` and `end`, which alone have markers."""
        within = self.prefix + self.suffix + self.between
        return bool(self.begin and self.prefix) and not any(m in within for m in self.markers)

    @property
    def is_python_list(self) -> bool:
        """Whether calls are a list in Python between markers: [name(key=value)]."""
        return self.read is read_python and self.call_open == _PYTHON_MARKERS[0]


@dataclass(frozen=True)
class ReasoningForm:
    """The tags around what a model thinks before it answers."""

    open: str
    close: str


@dataclass(frozen=True)
class ChatForm:
    """What a template says of its model's answers."""

    calls: CallForm
    reasoning: ReasoningForm | None = None
    is_harmony: bool = False
    wrappers: tuple[str, ...] = ()  # around content, of which they are no part

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Those that are made of several control tokens, and each of these."""
        if self.is_harmony:
            return HARMONY_MARKERS
        tags = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        whole = (*self.calls.markers, *tags, *self.wrappers)
        parts = (part for mark in whole for part in re.findall(r"<\|\w+\|>", mark) if part != mark)
        return (*whole, *dict.fromkeys(parts))


def _tagged(name: str, opened: str, closed: str, **more: str) -> CallForm:
    """A JSON list between two markers."""
    return CallForm(
        name,
        section_opens=(opened,),
        closes=(closed,) if closed else (),
        separators="[],",
        begin=f"{opened}[",
        prefix=more.get("prefix", _JSON_CALL),
        suffix="}",
        between=", ",
        end=f"]{closed}",
    )


_GRANITE = replace(_tagged("granite", "<|tool_call|>", ""), result_role="tool_response")
HERMES = CallForm(
    "hermes",
    call_open="<tool_call>",
    closes=("</tool_call>",),
    prefix=f"<tool_call>\n{_JSON_CALL}",
    suffix="}\n</tool_call>",
    between="\n",
)
GENERIC = CallForm(**{**vars(HERMES), "name": "generic", "bare_json": True})
_LLAMA = CallForm(
    "llama",
    section_opens=("<|python_tag|>",),
    separators=";,",
    bare_json=True,
    prefix='{"name": "%s", "parameters": ',
    suffix="}",
    between="; ",
)
_MISTRAL_LIST = CallForm(
    "mistral-list",
    section_opens=("[TOOL_CALLS]",),
    separators="[],",
    id_length=9,
    begin="[TOOL_CALLS][",
    prefix=_JSON_CALL,
    suffix="}",
    between=", ",
    end="]",
)
_MISTRAL = CallForm(
    "mistral",
    call_open="[TOOL_CALLS]",
    header=re.compile(_NAME + r"(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*(?=\{)"),
    extra_markers=("[ARGS]", "[CALL_ID]"),
    id_length=9,
    prefix="[TOOL_CALLS]%s[ARGS]",
)
_DEEPSEEK = CallForm(
    "deepseek",
    call_open="<｜tool▁call▁begin｜>",
    section_opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    header=re.compile(_NAME + r"<｜tool▁sep｜>\s*(?=\{)"),
    extra_markers=("<｜tool▁sep｜>",),
    begin="<｜tool▁calls▁begin｜>",
    prefix="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
    suffix="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_R1 = CallForm(
    **{
        **vars(_DEEPSEEK),
        "name": "deepseek-r1",
        "header": re.compile(r"\w*<｜tool▁sep｜>" + _NAME + r"\s*```(?:json)?\s*(?=\{)"),
        "separators": "`",
        "prefix": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        "suffix": "\n```<｜tool▁call▁end｜>",
        "between": "\n",
    }
)
_KIMI = CallForm(
    "kimi",
    call_open="<|tool_call_begin|>",
    section_opens=("<|tool_calls_section_begin|>",),
    closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>:]{1,256}):\d+)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    extra_markers=("<|tool_call_argument_begin|>",),
)
_FUNCTION_TAG = CallForm(
    "function-tag",
    call_open="<function=",
    closes=("</function>",),
    header=re.compile(_NAME + r">\s*(?=\{)"),
    prefix="<function=%s>",
    suffix="</function>",
)
_COMMAND = _tagged(
    "command",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    prefix='{"tool_call_id": "0", "tool_name": "%s", "parameters": ',
)
_NAMED_OBJECTS = CallForm(
    "named-objects",
    call_open="<|tools_prefix|>",
    closes=("<|tools_suffix|>",),
    read=read_named_objects,
    begin="<|tools_prefix|>[",
    prefix='{"%s": ',
    suffix="}",
    between=", ",
    end="]<|tools_suffix|>",
)
_INTERNLM = CallForm(
    "internlm",
    call_open="<|action_start|>",
    closes=("<|action_end|>", "<|plugin|>"),
    prefix=f"<|action_start|><|plugin|>\n{_JSON_CALL}",
    suffix="}<|action_end|>",
)
_SOLAR = CallForm(
    "solar",
    call_open="<|tool_call:begin|>",
    section_opens=("<|tool_calls|>",),
    closes=("<|tool_call:end|>", "<|calls|>"),
    header=re.compile(
        r"(?P<id>[\w-]+)<\|tool_call:name\|>" + _NAME + r"<\|tool_call:args\|>\s*(?=\{)"
    ),
    extra_markers=("<|tool_call:name|>", "<|tool_call:args|>"),
)
_GIGACHAT = CallForm("gigachat", call_open="<|message_sep|>\n\nfunction call<|role_sep|>\n")
_FUNCTION_CALL = CallForm(
    "function_call",
    call_open="<function_call>",
    closes=("</function_call>",),
    prefix=f"<function_call> {_JSON_CALL}",
    suffix="}",
    between="\n",
)
_ACTION = CallForm(
    "action", section_opens=("Action:\n```json", "Action: ```json"), separators="[],`"
)
HARMONY = CallForm(
    "harmony",
    prefix="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
    begin="<|start|>assistant",  # grammars hold for what follows the reasoning
    max_calls=1,
)
MUSE = CallForm(
    "muse",
    read=read_invocations,
    extra_markers=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
)
HARMONY_ANSWER = "<|start|>assistant<|channel|>final<|message|>"
HARMONY_MARKERS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return")
)


def _read(name: str, opened: str, closed: str, read: ReadCalls, *extra: str) -> CallForm:
    return CallForm(name, call_open=opened, closes=(closed,), read=read, extra_markers=extra)


_KIMI_TAGS = CallForm(
    "kimi-tags",
    call_open="<|open|>tools<|sep|>",
    closes=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
    read=read_kimi,
)
_KIMI_WRAPPERS = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
)
_MINIMAX_TAGS = _read(
    "minimax-tags",
    f"{MINIMAX_MARK}<tool_call>",
    f"{MINIMAX_MARK}</tool_call>",
    read_minimax_tags,
    MINIMAX_MARK,
)
_XML = _read("xml", "<tool_call>", "</tool_call>", read_parameters)
_PYTHON = _read("python", *_PYTHON_MARKERS, read_python)
_FUNCTOOLS = replace(_tagged("functools", "functools", ""), bare_json=True)
_Test = Callable[[str], bool]


def _has(*marks: str) -> _Test:
    return lambda text: all(mark in text for mark in marks)


# The first whose marks the template has.
_CALL_FORMS: tuple[tuple[_Test, CallForm], ...] = (
    (_has("<|channel|>", "<|message|>", "functions."), HARMONY),
    (_has("<atem:", "<|message|>"), MUSE),
    (
        _has("<|tool_call>", "<tool_call|>"),
        _read("gemma", "<|tool_call>", "<tool_call|>", read_gemma, '<|"|>'),
    ),
    (
        _has("<seed:tool_call>"),
        _read("seed", "<seed:tool_call>", "</seed:tool_call>", read_parameters),
    ),
    (
        _has("<minimax:tool_call>"),
        _read("minimax", "<minimax:tool_call>", "</minimax:tool_call>", read_invocations),
    ),
    (
        _has("｜DSML｜", "function_calls"),
        _read("dsml", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", read_invocations),
    ),
    (
        _has("｜DSML｜"),
        _read("dsml-calls", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", read_invocations),
    ),
    (_has("<|open|>", "<|close|>", "<|sep|>"), _KIMI_TAGS),
    (_has(MINIMAX_MARK, "<tool_call>"), _MINIMAX_TAGS),
    (
        _has("<start_function_call>"),
        _read(
            "function-gemma",
            "<start_function_call>",
            "<end_function_call>",
            read_function_gemma,
            "<escape>",
        ),
    ),
    (_has("<|tools_prefix|>"), _NAMED_OBJECTS),
    (_has("<|tool_call:begin|>"), _SOLAR),
    (_has("<|action_start|>", "<|plugin|>"), _INTERNLM),
    (
        _has("<tool_calls:opensource>"),
        _read(
            "hunyuan",
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
            read_suffixed_arg_keys,
        ),
    ),
    (_has("<function=", "<parameter=", "<tool_call>"), _XML),
    (_has("<arg_key>", "<tool_call>"), _read("glm", "<tool_call>", "</tool_call>", read_arg_keys)),
    (_has("<｜tool▁calls▁begin｜>", "```json"), _DEEPSEEK_R1),
    (_has("<｜tool▁calls▁begin｜>"), _DEEPSEEK),
    (_has("<|tool_calls_section_begin|>"), _KIMI),
    (_has("[TOOL_CALLS]", "[ARGS]"), _MISTRAL),
    (_has("[TOOL_CALLS]"), _MISTRAL_LIST),
    (_has("<|START_ACTION|>"), _COMMAND),
    (_has("<TOOLCALL>"), _tagged("nemotron", "<TOOLCALL>", "</TOOLCALL>")),
    (_has("<tool_calls>"), _tagged("tool-calls", "<tool_calls>", "</tool_calls>")),
    (_has("<|tool_call|>", "<|/tool_call|>"), _tagged("phi", "<|tool_call|>", "<|/tool_call|>")),
    (_has("<|tool_call|>"), _GRANITE),
    (_has("<|tool_list_start|>"), _PYTHON),
    (_has("<|tool_call_start|>"), _PYTHON),
    (_has("<|function_call|>"), _tagged("function-call", "<|function_call|>", "")),
    (_has("Action:", "```json", "tool_name"), _ACTION),
    (_has("List of tools: ["), _PYTHON),  # LFM2.5's, which shows tools and no calls
    (
        _has("<function_calls>"),
        _read("python", "<function_calls>", "</function_calls>", read_python),
    ),
    (_has("<tool_call>"), HERMES),
    (
        _has('<function name="', "<param name="),
        _read("named-parameters", '<function name="', "</function>", read_named_parameters),
    ),
    (_has("<function_call>"), _FUNCTION_CALL),
    (_has("<|role_sep|>", "<|message_sep|>", "function call"), _GIGACHAT),
    (_has("<function=", "</function>"), _FUNCTION_TAG),
    (_has("functools["), _FUNCTOOLS),
    (_has("<|python_tag|>"), _LLAMA),
    (_has('"parameters": dictionary'), _LLAMA),
    (_has("```tool_code"), _read("tool-code", "```tool_code", "```", read_python)),
)
_REASONING_FORMS = (
    ReasoningForm("<think>", "</think>"),
    ReasoningForm("[THINK]", "[/THINK]"),
    ReasoningForm("<seed:think>", "</seed:think>"),
    ReasoningForm("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningForm("<|channel>thought", "<channel|>"),
    ReasoningForm("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningForm("<thinking>", "</thinking>"),
    ReasoningForm("<mm:think>", "</mm:think>"),
    ReasoningForm("<think:opensource>", "</think:opensource>"),
    ReasoningForm("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_KIMI_REASONING = ReasoningForm("<|open|>think<|sep|>", "<|close|>think<|sep|>")
_SOLAR_REASONING = ReasoningForm("<|think|>", "<|end|><|begin|>assistant")  # a message of its own
_SUFFIX = re.compile(r"set HYTK = '(:\w+)'")  # of Hunyuan's tags, which are written by format()


def form_of(template: str | None) -> ChatForm:
    """The form of answers that a chat template is for; generic where nothing tells."""
    text = template or ""
    suffix = _SUFFIX.search(text)
    if suffix is not None:
        text = text.replace("{}", suffix[1])
    calls = next((form for test, form in _CALL_FORMS if test(text)), GENERIC)
    if calls is HARMONY:
        return ChatForm(calls, is_harmony=True)
    if calls is _KIMI_TAGS:
        return ChatForm(calls, _KIMI_REASONING, wrappers=_KIMI_WRAPPERS)
    if calls is _SOLAR:
        return ChatForm(calls, _SOLAR_REASONING)
    reasoning = next(
        (form for form in _REASONING_FORMS if form.open in text and form.close in text), None
    )
    if reasoning is None and "</think>" in text:
        reasoning = _REASONING_FORMS[0]
    return ChatForm(calls, reasoning)
