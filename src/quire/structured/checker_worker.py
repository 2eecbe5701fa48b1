"""The process in which constraints are checked first: they come from clients, and compiling one may
take very long or overflow the stack, where nothing in the same process could stop it.

It compiles the constraint over a vocabulary of single bytes. What passes here within the limits
passes in the main process as well, which compiles with a larger stack. This module imports
llguidance, `core.lockdown`, `gbnf` and the standard library alone.
"""

import json
import os
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark

from quire.core.lockdown import lock_down
from quire.structured.gbnf import is_gbnf, lark_of

MEMORY_BYTES = 1 << 30  # of address space
STACK_BYTES = 8 << 20
HEADER = struct.Struct("<I")  # the length of the JSON that follows
_PLACE_S = 0.5  # of processor time, to look for the subschema at fault
_UNKNOWN_FORMAT = "Unknown format: "  # llguidance's error, before the format's name
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_END = 256  # the end token, after one token for each byte
# As llama.cpp has it: enough to indent, and bounded: a model may repeat it without end.
_WHITESPACE = r" |\n{1,2}[ \t]{0,20}"


class Question(TypedDict):
    kind: str  # of a Constraint
    value: str
    seconds: float  # of processor time


class Answer(TypedDict, total=False):
    grammar: str  # as llguidance takes it
    error: str


class _Bytes:
    """A vocabulary of single bytes."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def grammar_of(kind: str, value: str) -> str:
    """A constraint as llguidance takes it; ValueError where it cannot be one."""
    match kind:
        case "json_object":
            return _from_schema('{"type": "object"}')
        case "json_schema":
            return _from_schema(value)
        case "regex":
            # \d means 0 to 9, not every script's digits.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")
        case "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(value))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case "answer":
            return LLMatcher.grammar_from_lark(answer_lark(json.loads(value)))
    try:
        return LLMatcher.grammar_from_lark(lark_of(value) if is_gbnf(value) else value)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None


_TOKEN = re.compile(r"<\[[0-9]+\]>")  # in Lark: a token of the model by its id ...
_ANY_BYTE = "<[0]>"  # ... of which the checker's vocabulary has few


def answer_lark(value: Mapping[str, Any]) -> str:
    """The grammar of a chat answer: text of a given form, tool calls, or either. Literal texts are
    lists of strings and of token ids."""
    rules = []
    kinds = []
    free = value.get("free")
    if free is not None:
        return _free_lark(free["open"], value["calls"])
    text = value.get("text")
    if text is not None:
        kinds.append("text")
        rules.append(f"text: {_literals(text['prefix'])} {_form_lark(text['kind'], text['value'])}")
    calls = value.get("calls")
    if calls is not None:
        kinds.append("calls")
        rules.append(f"calls: {_literals(calls['begin'])} call {_more_calls(calls)}")
        rules += _call_rules(calls)
    return "\n".join([f"start: {' | '.join(kinds)}", *rules])


def _free_lark(opened: str | int, calls: Mapping[str, Any]) -> str:
    """Any text; from `opened` on, which every call or list of calls begins with, calls."""
    if isinstance(opened, int):  # no text has a control token
        start = [f"start: TEXT | TEXT? <[{opened}]> first", "TEXT: /(?s:.+)/"]
    else:
        quoted = re.escape(opened).replace("/", "\\/")
        start = ["start: TEXT | opening first", "TEXT: /(?s:.*)/"]
        start.append(f"opening[lazy]: /(?s:.*){quoted}/")
    begin = calls["begin"]
    if begin:
        first = [f"first: {_literals(begin[1:])} call {_more_calls(calls)}"]
    else:
        options = " | ".join(f"rest_{n}" for n in range(len(calls["choices"])))
        first = [f"first: ({options}) {_more_calls(calls)}"]
        for number, call in enumerate(calls["choices"]):
            first.append(f"rest_{number}: {_call_parts(call['prefix'][1:], call, calls)}")
    return "\n".join([*start, *first, *_call_rules(calls)])


def _more_calls(calls: Mapping[str, Any]) -> str:
    """What follows the first call."""
    more = f"({_literals(calls['between'])} call){{0,{calls['max'] - 1}}}"
    return f"{more if calls['max'] > 1 else ''} {_literals(calls['end'])}"


def _call_rules(calls: Mapping[str, Any]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{n}" for n in range(len(calls["choices"])))]
    for number, call in enumerate(calls["choices"]):
        rules.append(f"call_{number}: {_call_parts(call['prefix'], call, calls)}")
    return rules


def _call_parts(
    prefix: Sequence[str | int], call: Mapping[str, Any], calls: Mapping[str, Any]
) -> str:
    schema = _form_lark("json_schema", json.dumps(call["schema"]))
    return " ".join([_literals(prefix), schema, _literals(calls["suffix"])])


def _literals(parts: Sequence[str | int]) -> str:
    return " ".join(
        f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts if part != ""
    )


def _form_lark(kind: str, value: str) -> str:
    match kind:
        case "json_schema" | "json_object":
            schema = json.loads(value or '{"type": "object"}')
            if isinstance(schema, dict):
                schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
            return f"%json {json.dumps(schema)}"
        case "regex":
            return f"/{regex_to_lark(value, 'd')}/"
        case "choice":
            return "(" + " | ".join(json.dumps(text) for text in json.loads(value)) + ")"
    raise ValueError("a grammar cannot be combined with tools: leave out one of them")


def _from_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})


class Checker:
    def __init__(self) -> None:
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Bytes()), n_vocab=_END + 1, eos_token=_END, slices=[]
        )

    def answer(self, question: Question) -> Answer:
        try:
            grammar = grammar_of(question["kind"], question["value"])
        except ValueError as error:
            return {"error": str(error)}
        checked = _TOKEN.sub(_ANY_BYTE, grammar) if question["kind"] == "answer" else grammar
        error_text = self._error(checked)
        if error_text is None:
            return {"grammar": grammar}
        if question["kind"] == "answer":
            return self._answer_error(question, error_text)
        if question["kind"] != "json_schema":
            return {"error": error_text}
        schema = json.loads(question["value"])
        if error_text.startswith(_UNKNOWN_FORMAT):
            schema = _without_format(schema, error_text.removeprefix(_UNKNOWN_FORMAT))
            return self.answer({**question, "value": json.dumps(schema)})
        place = self._place(schema, error_text)
        return {"error": error_text if place is None else f"at {place}: {error_text}"}

    def _answer_error(self, question: Question, error_text: str) -> Answer:
        """The error with the tool whose schema has it by itself."""
        value = json.loads(question["value"])
        if error_text.startswith(_UNKNOWN_FORMAT):
            value = _without_format(value, error_text.removeprefix(_UNKNOWN_FORMAT))
            return self.answer({**question, "value": json.dumps(value)})
        for call in (value.get("calls") or {}).get("choices", ()):
            schema = json.dumps(call["schema"])
            own = self.answer({**question, "kind": "json_schema", "value": schema})
            if "error" in own:
                return {"error": f"tool {call['name']!r:.100}: {own['error']}"}
        return {"error": error_text}

    def _error(self, grammar: str) -> str | None:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
            if matcher.is_error():
                return f"nothing can match it, or too much: {matcher.stop_reason()}"
        return matcher.get_error().strip() or None

    def _place(self, root: Any, error: str) -> str | None:
        """The innermost subschema that has the same error by itself, as a JSON pointer."""
        named = {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
        found = None
        deadline = time.process_time() + _PLACE_S
        for path, schema in _subschemas(root, "#"):
            if found is not None and not path.startswith(found + "/"):
                continue
            if self._error(_from_schema(json.dumps({**named, **schema}))) == error:
                found = path
            if time.process_time() > deadline:
                break
        return found


def _without_format(schema: Any, name: str) -> Any:
    """The schema without a format that nobody knows, which says nothing (JSON Schema, 7.2.1)."""
    if isinstance(schema, list):
        return [_without_format(item, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _without_format(value, name)
        for key, value in schema.items()
        if key != "format" or value != name
    }


def _subschemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects within a schema, outer ones first, definitions last."""
    if isinstance(schema, dict):
        yield path, schema
        last = ("$defs", "definitions")
        for key in sorted(schema, key=lambda key: key in last):
            yield from _subschemas(schema[key], f"{path}/{key}")
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _subschemas(item, f"{path}/{index}")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    checker = Checker()
    lock_down(None, MEMORY_BYTES, dies_with_parent=False)
    source = sys.stdin.buffer
    while len(header := source.read(HEADER.size)) == HEADER.size:
        question: Question = json.loads(source.read(*HEADER.unpack(header)))
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        content = json.dumps(checker.answer(question)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_all(HEADER.pack(len(content)) + content)


def _write_all(content: bytes) -> None:
    """To standard input, which is a socket."""
    while content:
        content = content[os.write(0, content) :]
