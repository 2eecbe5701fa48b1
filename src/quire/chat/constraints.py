"""Constraints of answers that must call tools, or may call them and have a form otherwise; and the
reasoning before an answer, which constraints leave free."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.chat.forms import HARMONY_ANSWER, CallForm, ChatForm
from quire.core.sampling import Constraint, Thinking
from quire.tokenizer import Tokenizer

_ANY_OBJECT = {"type": "object"}


def answer_constraint(
    form: ChatForm,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    text: Constraint | None,
    *,
    is_parallel: bool,
    is_free: bool = False,
) -> Constraint:
    """Calls of these tools, or `text` where that is given, or any text where the answer `is_free`:
    then the tools that are strict have their schemas. The form of calls must be one that can be
    constrained, with a marker that opens calls for answers that are free."""
    value: dict[str, Any] = {}
    if is_free:
        opened = form.calls.opening
        value["free"] = {"open": control_tokens(form, tokenizer).get(opened, opened)}
    if text is not None:
        prefix = HARMONY_ANSWER if form.is_harmony else ""
        literal = _parts(prefix, form, tokenizer)
        value["text"] = {"prefix": literal, "kind": text.kind, "value": text.value}
    if tools:
        max_calls = form.calls.max_calls if is_parallel else 1
        value["calls"] = _calls(form, tokenizer, tools, max_calls, is_free=is_free)
    return Constraint("answer", json.dumps(value, ensure_ascii=False))


def _calls(
    form: ChatForm,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    max_calls: int,
    *,
    is_free: bool,
) -> dict[str, Any]:
    calls: CallForm = form.calls
    assert calls.can_be_constrained
    choices = []
    for tool in tools:
        name = tool["function"]["name"]
        schema = tool["function"].get("parameters") or _ANY_OBJECT
        if is_free and not tool["function"].get("strict"):
            schema = _ANY_OBJECT
        prefix = _parts(calls.prefix.replace("%s", name), form, tokenizer)
        choices.append({"name": name, "prefix": prefix, "schema": schema})
    literals = {
        part: _parts(getattr(calls, part), form, tokenizer)
        for part in ("begin", "between", "suffix", "end")
    }
    return {**literals, "choices": choices, "max": max_calls}


def _parts(text: str, form: ChatForm, tokenizer: Tokenizer) -> list[str | int]:
    """A literal text, with the ids of control tokens in it, which no other token writes. A marker
    that opens calls is a part of its own."""
    tokens = control_tokens(form, tokenizer)
    marks = {*tokens, *form.calls.opens}
    if not marks:
        return [text] if text else []
    pattern = "|".join(re.escape(name) for name in sorted(marks, key=len, reverse=True))
    found = re.split(f"({pattern})", text)
    return [tokens.get(part, part) for part in found if part]


def control_tokens(form: ChatForm, tokenizer: Tokenizer) -> dict[str, int]:
    """The form's markers that are control tokens, which text leaves out unless it is told to."""
    found = {name: tokenizer.token_id(name) for name in form.markers}
    hidden = tokenizer.hidden_token_ids
    return {name: token for name, token in found.items() if token is not None and token in hidden}


def thinking_of(
    form: ChatForm, tokenizer: Tokenizer, *, is_open: bool, budget: int | None
) -> Thinking | None:
    """The reasoning of an answer; None for models that do not mark it."""

    def tokens_of(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special=False, parse_special=True))

    if form.is_harmony:
        opened = tokens_of("<|channel|>analysis<|message|>")
        return Thinking(tokens_of("<|end|>"), opened, is_forced=True, budget=budget)
    if form.reasoning is None:
        return None
    opened, closed = tokens_of(form.reasoning.open), tokens_of(form.reasoning.close)
    return Thinking(closed, opened, is_open=is_open, budget=budget)
