"""The process in which constraints are checked first: they come from clients, and compiling one may
take very long or overflow the stack, where nothing in the same process could stop it.

It compiles the constraint over a vocabulary of single bytes. What passes here within the limits
passes in the main process as well, which compiles with a larger stack. This module imports
llguidance, `core.lockdown`, its neighbours and the standard library alone.
"""

import json
import os
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark

from quire.core.lockdown import lock_down
from quire.structured.gbnf import is_gbnf, lark_of
from quire.structured.json_schemas import accepted, subschemas

MEMORY_BYTES = 1 << 30  # of address space
STACK_BYTES = 8 << 20
HEADER = struct.Struct("<I")  # the length of the JSON that follows
_PLACE_S = 0.5  # of processor time, to look for the subschema at fault
_WITH_SCHEMAS = ("json_schema", "answer")
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
    param: str  # what is wrong, where it is not the constraint itself


class ToolError(ValueError):
    """A tool's schema is wrong."""


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
            return LLMatcher.grammar_from_lark(f"start: {_regex_lark(value)}")
        case "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(value))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case "answer":
            return LLMatcher.grammar_from_lark(answer_lark(json.loads(value)))
    try:
        return LLMatcher.grammar_from_lark(lark_of(value) if is_gbnf(value) else value)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None


def _regex_lark(pattern: str) -> str:
    """\\d means 0 to 9, not every script's digits."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the pattern ends with a backslash that escapes nothing")
    return f"/{regex_to_lark(pattern, 'd')}/"


_TOKEN = re.compile(r"<\[\^?[0-9,-]+\]>")  # in Lark: tokens of the model by their ids ...
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
                given = schema.get("x-guidance")
                options = given if isinstance(given, dict) else {}
                options = {"whitespace_pattern": _WHITESPACE, **options}
                schema = {**schema, "x-guidance": options}
            return f"%json {json.dumps(schema)}"
        case "regex":
            return _regex_lark(value)
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
        kind, value = question["kind"], question["value"]
        try:
            grammar = grammar_of(kind, value)
            has_tokens = kind in ("grammar", "answer")
            error_text = self._error(_TOKEN.sub(_ANY_BYTE, grammar) if has_tokens else grammar)
            if error_text is None:
                return {"grammar": grammar}
            other = self._other(kind, json.loads(value)) if kind in _WITH_SCHEMAS else None
        except ToolError as error:
            return {"error": str(error), "param": "tools"}
        except ValueError as error:
            return {"error": str(error)}
        if other is None:
            return {"error": error_text}
        return self.answer({**question, "value": other})

    def _other(self, kind: str, value: Any) -> str | None:
        """A constraint that says the same, with schemas that are taken; None where nothing is to be
        changed. A ValueError says which schema is wrong, and where."""
        other = self._taken(value) if kind == "json_schema" else self._taken_answer(value)
        return None if other == value else json.dumps(other, ensure_ascii=False)

    def _taken(self, schema: Any) -> Any:
        while (error_text := self._error(_from_schema(json.dumps(schema)))) is not None:
            other = accepted(schema, error_text)
            if other == schema:
                place = self._place(schema, error_text)
                raise ValueError(error_text if place is None else f"at {place}: {error_text}")
            schema = other
        return schema

    def _taken_answer(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        found = dict(value)
        if calls := value.get("calls"):
            found["calls"] = {**calls, "choices": [self._taken_call(c) for c in calls["choices"]]}
        text = value.get("text")
        if text is not None and text["kind"] == "json_schema":
            schema = self._taken(json.loads(text["value"]))
            found["text"] = {**text, "value": json.dumps(schema, ensure_ascii=False)}
        return found

    def _taken_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return {**call, "schema": self._taken(call["schema"])}
        except ValueError as error:
            raise ToolError(f"tool {call['name']!r:.100}: {error}") from None

    def _error(self, grammar: str) -> str | None:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return f"nothing can match it, or too much: {matcher.stop_reason()}"
            first = next((byte for byte in range(_END) if mask[byte // 8] >> byte % 8 & 1), _END)
            if not matcher.consume_token(first):  # where much is repeated, a limit is met here
                reason, _, _ = matcher.get_error().partition("\n<")  # llguidance's notes
                return f"it is too large: {reason}"
        return matcher.get_error().strip() or None

    def _place(self, root: Any, error: str) -> str | None:
        """The innermost subschema that has the same error by itself, as a JSON pointer."""
        if not isinstance(root, dict):
            return None
        named = {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
        found = None
        deadline = time.process_time() + _PLACE_S
        for path, schema in subschemas(root):
            if found is not None and not path.startswith(found + "/"):
                continue
            if self._error(_from_schema(json.dumps({**named, **schema}))) == error:
                found = path
            if time.process_time() > deadline:
                break
        return found


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
