"""Answers as models write them: marks of a template, a text, and what it says."""

import json
from typing import Any, NamedTuple

from quire.chat import Answer, AnswerEvent, AnswerParser, form_of, parameter_types, parser_of

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
TYPES = parameter_types(TOOLS)
ARGUMENTS = {"city": 'Paris "X" }', "days": 3}
WRITTEN = json.dumps(ARGUMENTS)
CALL = ("weather", ARGUMENTS)
PLAIN = ("weather", {"city": "5", "days": 3})


class Sample(NamedTuple):
    template: str  # the marks by which its form is found
    text: str
    calls: tuple[tuple[str, Any], ...]
    content: str | None = None
    reasoning: str | None = None
    is_thinking: bool = False


_OBJECT = f'{{"name": "weather", "arguments": {WRITTEN}}}'
_LATE_NAME = f'{{"arguments": {WRITTEN}, "name": "weather"}}'
_IN_TEXT = json.dumps({"name": "weather", "arguments": WRITTEN})
_LLAMA = f'{{"name": "weather", "parameters": {WRITTEN}}}'
_R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + WRITTEN
_R1 += "\n```<｜tool▁call▁end｜>"
_V3 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>"
_KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{WRITTEN}"
_KIMI += "<|tool_call_end|>"
_XML = "<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
_XML += "</function>"
_GLM = "weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>"
_GLM += "<arg_value>3</arg_value>\n"
_INVOKE = '<invoke name="weather">\n<parameter name="city">5</parameter>\n'
_INVOKE += '<parameter name="days">3</parameter>\n</invoke>\n'
_DSML = _INVOKE.replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜")
_DSML = _DSML.replace('name="city"', 'name="city" string="true"')
_NAMED = '<function name="weather"><param name="city">5</param>'
_HUNYUAN = "<tool_call:x>weather<tool_sep:x>\n<arg_key:x>city</arg_key:x>\n<arg_value:x>5"
_HUNYUAN += "</arg_value:x>\n<arg_key:x>days</arg_key:x>\n<arg_value:x>3</arg_value:x>\n"
_HUNYUAN = f"{_HUNYUAN}</tool_call:x>\n".replace(":x>", ":opensource>")
_HUNYUAN_MARKS = "{% set HYTK = ':opensource' %} '<tool_calls{}>' '<think{}>' '</think{}>'"
_SOLAR = f"<|tool_call:begin|>a1<|tool_call:name|>weather<|tool_call:args|>{WRITTEN}"
_SOLAR += "<|tool_call:end|>"
_KIMI_ARGUMENT = '<|open|>argument key="%s" type="%s"<|sep|>%s<|close|>argument<|sep|>'
_KIMI_TAGS = '<|open|>call tool="weather" index="1"<|sep|>' + _KIMI_ARGUMENT % ("city", "string", 5)
_KIMI_TAGS += _KIMI_ARGUMENT % ("days", "number", 3) + "<|close|>call<|sep|>"
_KIMI_MARKS = "<|open|> <|close|> <|sep|>"
_MINIMAX = '<invoke name="weather"><city>5</city><days>3</days><more><item><a>b</a></item><item>'
_MINIMAX += "</item><item>2</item></more></invoke>\n"
_MINIMAX = f"\n{_MINIMAX}{_MINIMAX}".replace("<", "]<]minimax[>[<")
_MUSE_MARKS = "<atem:function_calls> <|message|>"
_MUSE = "<|start|>assistant to=weather<|message|><atem:function_calls>\n"
_MUSE += _INVOKE.replace("<", "<atem:").replace("<atem:/", "</atem:") + "</atem:function_calls>"
_HARMONY = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + WRITTEN
_ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
_HARMONY_MARKS = "<|channel|> <|message|> functions."

SAMPLES = {
    "hermes": Sample(
        "<tool_call>", f"Look:\n<tool_call>\n{_OBJECT}\n</tool_call>", (CALL,), "Look:"
    ),
    "hermes, two": Sample(
        "<tool_call>",
        f"<tool_call>\n{_OBJECT}\n</tool_call>\n<tool_call>{_LATE_NAME}</tool_call>\nDone.",
        (CALL, CALL),
        "Done.",
    ),
    "hermes, arguments in a string": Sample(
        "<tool_call>", f"<tool_call>{_IN_TEXT}</tool_call>", (CALL,)
    ),
    "hermes, no arguments": Sample(
        "<tool_call>", '<tool_call>{"name": "weather"}</tool_call>', (("weather", {}),)
    ),
    "hermes, unknown name": Sample(
        "<tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        (("other", {}),),
    ),
    "hermes, no end marker": Sample("<tool_call>", f"<tool_call>{_OBJECT}", (CALL,)),
    "hermes, broken": Sample(
        "<tool_call>",
        '<tool_call>{"name": "weather", "arguments": {city}}</tool_call> So.',
        (),
        '<tool_call>{"name": "weather", "arguments": {city}}</tool_call> So.',
    ),
    "hermes, no JSON": Sample(
        "<tool_call>", "<tool_call>weather</tool_call>", (), "<tool_call>weather</tool_call>"
    ),
    "almost a marker": Sample("<tool_call>", "a <tool_cal b <", (), "a <tool_cal b <"),
    "thinking": Sample(
        "<think> </think> <tool_call>",
        f"<think>\nHm <tool_call>.\n</think>\n\n<tool_call>\n{_OBJECT}\n</tool_call>",
        (CALL,),
        None,
        "Hm <tool_call>.",
    ),
    "thinking that the prompt opened": Sample(
        "<think> </think>", "Hm.\n</think>\n\nYes.\n", (), "Yes.\n", "Hm.", is_thinking=True
    ),
    "thinking without an end": Sample(
        "<think> </think>", "<think>Hm. </thin", (), "", "Hm. </thin"
    ),
    "tags in content": Sample("<think> </think>", "Yes <think>.", (), "Yes <think>."),
    "mistral thinking": Sample("[THINK] [/THINK]", "[THINK]a[/THINK]b", (), "b", "a"),
    "generic, JSON alone": Sample("", f"{_OBJECT}", (CALL,)),
    "generic, other JSON": Sample("", '{"name": "Bob", "age": 3}', (), '{"name": "Bob", "age": 3}'),
    "generic, unknown name": Sample(
        "", '{"name": "Bob", "arguments": {}}', (), '{"name": "Bob", "arguments": {}}'
    ),
    "llama": Sample("<|python_tag|>", _LLAMA, (CALL,)),
    "llama, tagged": Sample("<|python_tag|>", f"<|python_tag|>{_LLAMA}; {_LLAMA}", (CALL, CALL)),
    "mistral list": Sample("[TOOL_CALLS]", f"[TOOL_CALLS][{_OBJECT}, {_OBJECT}]", (CALL, CALL)),
    "mistral": Sample(
        "[TOOL_CALLS] [ARGS]",
        f"Ok.[TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{WRITTEN}",
        (CALL, CALL),
        "Ok.",
    ),
    "deepseek r1": Sample(
        "<｜tool▁calls▁begin｜> ```json",
        f"<｜tool▁calls▁begin｜>{_R1}\n{_R1}<｜tool▁calls▁end｜>",
        (CALL, CALL),
    ),
    "deepseek": Sample(
        "<｜tool▁calls▁begin｜>",
        f"So: <｜tool▁calls▁begin｜>{_V3}{_V3}<｜tool▁calls▁end｜>",
        (CALL, CALL),
        "So:",
    ),
    "kimi": Sample(
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>",
        (CALL,),
    ),
    "command": Sample(
        "<|START_ACTION|>",
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{WRITTEN}}}\n]<|END_ACTION|>",
        (CALL,),
    ),
    "phi": Sample(
        "<|tool_call|> <|/tool_call|>", f"<|tool_call|>[{_OBJECT}]<|/tool_call|>", (CALL,)
    ),
    "granite": Sample("<|tool_call|>", f"<|tool_call|>[{_OBJECT}]", (CALL,)),
    "nemotron": Sample("<TOOLCALL>", f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>", (CALL,)),
    "tool_calls": Sample(
        "<tool_calls>", f"<tool_calls>\n{_OBJECT}\n{_OBJECT}\n</tool_calls>", (CALL, CALL)
    ),
    "function call": Sample("<|function_call|>", f"<|function_call|>{_OBJECT}", (CALL,)),
    "action": Sample(
        "Action: ```json tool_name",
        'Action:\n```json\n[\n{"tool_name": "weather", "parameters": ' + WRITTEN + "}\n]\n```",
        (CALL,),
    ),
    "function tag": Sample(
        "<function= </function>", f"<function=weather>{WRITTEN}</function>", (CALL,)
    ),
    "functools": Sample("functools[", f" functools[{_OBJECT}]", (CALL,)),
    "xml": Sample(
        "<function= <parameter= <tool_call>",
        f"I look.\n\n<tool_call>\n{_XML}\n</tool_call>\n<tool_call>\n{_XML}\n</tool_call>",
        (PLAIN, PLAIN),
        "I look.",
    ),
    "seed": Sample("<seed:tool_call>", f"<seed:tool_call>\n{_XML}\n</seed:tool_call>", (PLAIN,)),
    "glm": Sample("<tool_call> <arg_key>", f"<tool_call>{_GLM}</tool_call>", (PLAIN,)),
    "minimax": Sample(
        "<minimax:tool_call>",
        f"<minimax:tool_call>\n{_INVOKE}{_INVOKE}</minimax:tool_call>",
        (PLAIN, PLAIN),
    ),
    "dsml": Sample(
        "｜DSML｜ function_calls",
        f"<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>",
        (PLAIN,),
    ),
    "gemma": Sample(
        "<|tool_call> <tool_call|>",
        '<|tool_call>call:weather{city:<|"|>Paris "X" }<|"|>,days:3}<tool_call|>',
        (CALL,),
    ),
    "python": Sample(
        "<|tool_call_start|>",
        '<|tool_call_start|>[weather(city="5", days=3), weather(city="5", days=3)]'
        "<|tool_call_end|>",
        (PLAIN, PLAIN),
    ),
    "tool code": Sample("```tool_code", '```tool_code\nweather(city="5", days=3)\n```', (PLAIN,)),
    "python, bare": Sample(
        "", '\n[weather(city="5", days=3), weather(city="5", days=3)]', (PLAIN, PLAIN)
    ),
    "python, bare, of no tool": Sample(
        "", "[other(city=5)] is a call.", (), "[other(city=5)] is a call."
    ),
    "python, bare, broken": Sample("", "[weather(city=] So.", (), "[weather(city=] So."),
    "python, bare, cut": Sample("", "[weather", (), "[weather"),
    "python, a line each": Sample(
        "<function_calls>",
        "<function_calls>\nweather(city='5', days=3)\nweather(city='5', days=3)\n</function_calls>",
        (PLAIN, PLAIN),
    ),
    "python, a line end in a text": Sample(
        "List of tools: [",
        "<|tool_call_start|>[weather(city='a\nb', more=None, x={'y': true})]<|tool_call_end|>",
        (("weather", {"city": "a\nb", "more": None, "x": {"y": True}}),),
    ),
    "a list of objects": Sample("", f"[{_OBJECT}, {_OBJECT}]", (CALL, CALL)),
    "a list far from its bracket": Sample(
        "", f"[{' ' * 201}{_OBJECT}]", (), f"[{' ' * 201}{_OBJECT}]"
    ),
    "a list of other objects": Sample("", '[{"age": 3}]', (), '[{"age": 3}]'),
    "a list of numbers": Sample("", "[1, 2]", (), "[1, 2]"),
    "a list after a call": Sample("", f"<tool_call>{_OBJECT}</tool_call>[1, 2]", (CALL,), "[1, 2]"),
    "functools, bare": Sample("functools[", f"{_OBJECT},{_OBJECT}", (CALL, CALL)),
    "gemma, words of Python": Sample(
        "<|tool_call> <tool_call|>",
        '<|tool_call>call:weather{city:<|"|>None<|"|>,more:[None,True]}<tool_call|>',
        (("weather", {"city": "None", "more": [None, True]}),),
    ),
    "function gemma": Sample(
        "<start_function_call>",
        "<start_function_call>call:weather{city:<escape>5<escape>,days:<escape>3<escape>}"
        "<end_function_call>",
        (PLAIN,),
    ),
    "named objects": Sample(
        "<|tools_prefix|>",
        f'Look:<|tools_prefix|>[{{"weather": {WRITTEN}}}, {{"weather": {WRITTEN}}}]'
        "<|tools_suffix|>",
        (CALL, CALL),
        "Look:",
    ),
    "named objects, broken": Sample(
        "<|tools_prefix|>",
        "<|tools_prefix|>[{}]<|tools_suffix|>",
        (),
        "<|tools_prefix|>[{}]<|tools_suffix|>",
    ),
    "named objects, no list": Sample(
        "<|tools_prefix|>",
        "<|tools_prefix|>5<|tools_suffix|>",
        (),
        "<|tools_prefix|>5<|tools_suffix|>",
    ),
    "named parameters": Sample(
        '<function name="x"><param name="y">',
        f'Look:\n{_NAMED}<param name="days">3</param></function>\n{_NAMED}'
        "<param name=\"more\"><![CDATA[{'a': True}]]></param></function>",
        (PLAIN, ("weather", {"city": "5", "more": {"a": True}})),
        "Look:",
    ),
    "internlm": Sample(
        "<|action_start|> <|plugin|>",
        f"So.<|action_start|><|plugin|>\n{_OBJECT}<|action_end|>",
        (CALL,),
        "So.",
    ),
    "solar": Sample(
        "<|tool_call:begin|>",
        f"<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>{_SOLAR}{_SOLAR}<|calls|>",
        (CALL, CALL),
        None,
        "Hm.",
    ),
    "gigachat": Sample(
        "<|role_sep|> <|message_sep|> function call",
        f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}",
        (CALL,),
        "So.",
    ),
    "function_call": Sample(
        "<function_call>", f"<function_call> {_OBJECT}\n<function_call> {_OBJECT}", (CALL, CALL)
    ),
    "hunyuan": Sample(
        _HUNYUAN_MARKS,
        "<think:opensource>Hm.</think:opensource>So.<tool_calls:opensource>\n"
        f"{_HUNYUAN}{_HUNYUAN}</tool_calls:opensource>",
        (PLAIN, PLAIN),
        "So.",
        "Hm.",
    ),
    "kimi's tags": Sample(
        _KIMI_MARKS,
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|>"
        f"<|open|>tools<|sep|>{_KIMI_TAGS}{_KIMI_TAGS}<|close|>tools<|sep|><|close|>message<|sep|>",
        (PLAIN, PLAIN),
        "So.",
        "Hm.",
        is_thinking=True,
    ),
    "minimax's tags": Sample(
        "]<]minimax[>[ <tool_call> <mm:think> </mm:think>",
        f"</mm:think>So.]<]minimax[>[<tool_call>{_MINIMAX}]<]minimax[>[</tool_call>",
        (("weather", {**PLAIN[1], "more": [{"a": "b"}, None, 2]}),) * 2,
        "So.",
    ),
    "apriel's reasoning": Sample(
        "Here are my reasoning steps: [BEGIN FINAL RESPONSE]",
        "Hm.\n[BEGIN FINAL RESPONSE]\nYes.",
        (),
        "Yes.",
        "Hm.",
        is_thinking=True,
    ),
    "the end of reasoning alone": Sample("<think> </think>", "</think>Yes.", (), "Yes."),
    "values as Python writes them": Sample(
        "<seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>[1]</parameter>\n"
        "<parameter=more>{'a': [True, None]}</parameter>\n<parameter=other>[x]</parameter>\n"
        "</function>\n</seed:tool_call>",
        (("weather", {"city": "[1]", "more": {"a": [True, None]}, "other": "[x]"}),),
    ),
    "muse, calls": Sample(
        _MUSE_MARKS,
        f" to=self<|message|>Hm.<|eom|>{_MUSE}<|eom|>{_MUSE}",
        (PLAIN, PLAIN),
        None,
        "Hm.",
    ),
    "muse, content": Sample(_MUSE_MARKS, " to=user<|message|>Yes.", (), "Yes."),
    "muse, broken": Sample(_MUSE_MARKS, " to=weather<|message|>Yes <.", (), "Yes <."),
    "muse, a number that JSON has not": Sample(
        _MUSE_MARKS,
        f" to=weather<|message|>{_INVOKE.replace('3', '1e999')}",
        (),
        _INVOKE.replace("3", "1e999"),
    ),
    "muse, a header without a recipient": Sample(
        _MUSE_MARKS, " to<|message|>Yes.", (), " to<|message|>Yes."
    ),
    "harmony, content": Sample(
        _HARMONY_MARKS,
        f"{_ANALYSIS}<|channel|>final<|message|>It <|rains.",
        (),
        "It <|rains.",
        "Let me see.",
    ),
    "harmony, call": Sample(
        _HARMONY_MARKS, f"{_ANALYSIS}{_HARMONY}<|call|>", (CALL,), None, "Let me see."
    ),
    "harmony, recipient first": Sample(
        _HARMONY_MARKS,
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{WRITTEN}",
        (CALL,),
    ),
    "harmony, preamble": Sample(
        _HARMONY_MARKS,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + _HARMONY,
        (CALL,),
        "I look.",
    ),
    "harmony, broken": Sample(
        _HARMONY_MARKS, "<|channel|>commentary to=functions.weather<|message|>{no", (), "{no"
    ),
}


def parser_for(sample: Sample, *, with_tools: bool = True) -> AnswerParser:
    types = TYPES if with_tools else None
    return parser_of(form_of(sample.template), types, is_thinking=sample.is_thinking)


def parsed(sample: Sample, pieces: list[str]) -> tuple[Answer, list[AnswerEvent]]:
    parser = parser_for(sample)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.end()
    return parser.answer, events
