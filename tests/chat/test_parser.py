"""Answers as models write them become content, reasoning and calls, however the text is split."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chat.samples import CALL, SAMPLES, TYPES, WRITTEN, Sample, parsed, parser_for

from quire.chat import (
    Answer,
    AnswerParser,
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallBegin,
    form_of,
    parser_of,
)
from quire.chat.forms import GENERIC, ChatForm, ReasoningForm


def said(answer: Answer) -> tuple[Any, ...]:
    calls = tuple((call.name, json.loads(call.arguments)) for call in answer.tool_calls)
    return calls, answer.content, answer.reasoning


def expected(sample: Sample) -> tuple[Any, ...]:
    content = sample.content
    if content is None and not sample.calls:
        content = ""
    return sample.calls, content, sample.reasoning


@pytest.mark.parametrize("name", SAMPLES)
def test_an_answer_says_what_the_model_wrote(name: str) -> None:
    sample = SAMPLES[name]
    assert said(parsed(sample, [sample.text])[0]) == expected(sample)
    assert said(parsed(sample, list(sample.text))[0]) == expected(sample)


@given(st.sampled_from(sorted(SAMPLES)), st.lists(st.integers(0, 400), max_size=12))
def test_where_the_text_is_split_makes_no_difference(name: str, cuts: list[int]) -> None:
    sample = SAMPLES[name]
    bounds = [0, *sorted(cuts), len(sample.text)]
    pieces = [sample.text[a:b] for a, b in itertools.pairwise(bounds)]
    assert said(parsed(sample, pieces)[0]) == expected(sample)


@pytest.mark.parametrize("name", [name for name in SAMPLES if "broken" not in name])
def test_events_add_up_to_the_answer(name: str) -> None:
    sample = SAMPLES[name]
    answer, events = parsed(sample, list(sample.text))
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert content == (answer.content or "")
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert thought == (answer.reasoning or "")
    begins = [event for event in events if isinstance(event, ToolCallBegin)]
    assert [(b.id, b.name) for b in begins] == [(c.id, c.name) for c in answer.tool_calls]
    assert [begin.index for begin in begins] == list(range(len(begins)))
    for begin, call in zip(begins, answer.tool_calls, strict=True):
        own = [e for e in events if isinstance(e, ArgumentsDelta) and e.index == begin.index]
        assert "".join(event.text for event in own) == call.arguments
        assert events.index(begin) < events.index(own[0])


@given(st.text(alphabet="<>/|tool_cal{}[]\"': name,argumets\n", max_size=80))
def test_any_text_is_an_answer_and_nothing_is_lost(text: str) -> None:
    for name in ("hermes", "llama", "mistral", "xml", "harmony, call"):
        sample = SAMPLES[name]._replace(text=text)
        whole, letters = parsed(sample, [text])[0], parsed(sample, list(text))[0]
        assert said(whole) == said(letters)
        if not whole.tool_calls and name != "harmony, call":
            assert whole.content == text


def test_content_is_withheld_no_longer_than_a_marker_may_begin() -> None:
    parser = parser_for(SAMPLES["hermes"])
    assert parser.feed("a <too") == [ContentDelta("a")]
    assert parser.feed("th") == [ContentDelta(" <tooth")]
    assert parser.feed("<tool_call") == []
    assert parser.end() == [ContentDelta("<tool_call")]


@pytest.mark.parametrize("begun", [f"[{' ' * 999}x", f"[{'x' * 999}"])
def test_what_is_too_long_to_begin_a_list_of_calls_is_content_however_it_comes(begun: str) -> None:
    """It is withheld up to a bound: more would be looked at again with each piece."""
    sample = SAMPLES["python, bare"]
    whole, pieces = parser_for(sample), parser_for(sample)
    [event] = whole.feed(begun)
    events = [event for letter in begun for event in pieces.feed(letter)]
    assert event == ContentDelta(begun)
    assert all(isinstance(event, ContentDelta) for event in events)
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == begun


def test_arguments_in_json_come_while_they_are_written() -> None:
    parser = parser_for(SAMPLES["hermes"])
    assert parser.feed('<tool_call>{"name": "weather"') == []
    [begin, first] = parser.feed(', "arguments": {"city": "P')
    assert isinstance(begin, ToolCallBegin)
    assert first == ArgumentsDelta(0, '{"city": "P')
    assert parser.feed("aris") == [ArgumentsDelta(0, "aris")]
    assert parser.feed('"}}') == [ArgumentsDelta(0, '"}')]
    assert parser.answer.tool_calls[0].arguments == '{"city": "Paris"}'


def test_a_call_cut_by_length_keeps_what_came() -> None:
    parser = parser_for(SAMPLES["hermes"])
    parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Pa')
    parser.end(is_cut=True)
    assert parser.answer.tool_calls[0].arguments == '{"city": "Pa'
    assert parser.answer.content is None


def test_without_tools_calls_are_content() -> None:
    parser = parser_for(SAMPLES["hermes"], with_tools=False)
    text = SAMPLES["hermes"].text
    parser.feed(text)
    parser.end()
    assert parser.answer == Answer(text)


def test_without_a_form_all_text_is_content() -> None:
    parser = AnswerParser()
    assert parser.feed(" <think> ") == [ContentDelta(" <think> ")]
    assert parser.end() == []
    assert parser.answer == Answer(" <think> ")


def test_ids_are_what_the_template_takes() -> None:
    mistral, _ = parsed(SAMPLES["mistral list"], [SAMPLES["mistral list"].text])
    assert all(len(call.id) == 9 and call.id.isalnum() for call in mistral.tool_calls)
    assert len({call.id for call in mistral.tool_calls}) == 2
    kimi, _ = parsed(SAMPLES["kimi"], [SAMPLES["kimi"].text])
    assert kimi.tool_calls[0].id == "functions.weather:0"


def test_reasoning_is_known_while_it_comes() -> None:
    parser = parser_of(form_of("<think></think>"), TYPES, is_thinking=True)
    assert parser.is_thinking
    parser.feed("a</think>")
    assert not parser.is_thinking


def test_numbers_that_are_no_json_are_no_arguments() -> None:
    sample = SAMPLES["hermes"]
    text = '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>'
    answer, _ = parsed(sample, [text])
    assert answer == Answer(text)


def test_the_forms_of_two_templates_differ() -> None:
    text = f"[TOOL_CALLS]weather[ARGS]{WRITTEN}"
    for template, calls in (("[TOOL_CALLS] [ARGS]", (CALL,)), ("<tool_call>", ())):
        parser = parser_of(form_of(template), TYPES)
        parser.feed(text)
        parser.end()
        assert said(parser.answer)[0] == calls


def test_a_parser_knows_when_no_reasoning_can_come_any_more() -> None:
    parser = AnswerParser()
    assert not parser.may_think, "without a form all text is content"
    thinking = ChatForm(GENERIC, ReasoningForm("<think>", "</think>"))
    parser = AnswerParser(thinking)
    for text, may_think in (("<th", True), ("ink>so", True), ("</think>", False), ("a", False)):
        parser.feed(text, num_tokens=1)
        assert parser.may_think is may_think
    assert parser.num_reasoning_tokens == 2
    parser = AnswerParser(thinking)
    parser.feed("No reasoning")
    assert not parser.may_think
    assert parser_for(SAMPLES["harmony, call"]).may_think, "each message may be reasoning"


_KIMI_OPEN = "<|open|>tools<|sep|>"


@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("xml", "<tool_call>", "\n"),
        ("xml", "<tool_call>", "<function="),
        ("xml", "<tool_call><function=weather>", "<parameter="),
        ("kimi's tags", _KIMI_OPEN, '<|open|>call tool="weather"<|sep|>'),
        (
            "kimi's tags",
            f'{_KIMI_OPEN}<|open|>call tool="weather"<|sep|>',
            '<|open|>argument key="city" type="string"<|sep|>',
        ),
    ],
)
def test_what_a_model_repeats_takes_no_quadratic_time(name: str, begin: str, repeated: str) -> None:
    """It would not end: a million characters squared are a million million."""
    text = begin + repeated * (1_000_000 // len(repeated)) + "<|close|>call<|sep|>"
    sample = SAMPLES[name]._replace(text=text, is_thinking=False)
    assert said(parsed(sample, [text])[0])[0] in ((), (("weather", {}),))


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("xml", '<tool_call><function=weather><parameter=days>"\\ud83d"', {"days": "\ud83d"}),
        ("python", "<|tool_call_start|>weather(city='\\ud83d')", {"city": "\ud83d"}),
        (
            "hermes",
            '<tool_call>{"arguments": {"city": "\\ud83d"}, "name": "weather"}',
            {"city": "\ud83d"},
        ),
        ("hermes", '<tool_call>{"name": "w\\ud83d", "arguments": {}}', None),
        ("hermes", '<tool_call>{"arguments": {}, "name": "w\\ud83d"}', None),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\ud83d\\"}"}',
            None,
        ),
    ],
)
def test_halves_of_surrogate_pairs_stay_escapes(
    name: str, text: str, arguments: dict[str, str] | None
) -> None:
    """No reply could hold them."""
    answer, _ = parsed(SAMPLES[name]._replace(text=text), [text])
    assert [json.loads(call.arguments) for call in answer.tool_calls] == (
        [] if arguments is None else [arguments]
    )
    assert "".join((answer.content or "", *map("".join, answer.tool_calls))).encode()
