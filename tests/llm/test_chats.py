"""Tools and reasoning in LLM and AsyncLLM: what a conversation's output says, and what masks it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.chat.samples import TOOLS
from tests.llm.text_models import write_text_model

from quire.chat import form_of
from quire.chat.constraints import answer_constraint, control_tokens, thinking_of
from quire.core.errors import RequestError
from quire.core.sampling import Constraint, SamplingParams, Thinking
from quire.llm import LLM, AsyncLLM
from quire.llm.chats import ChatOptions, ChatOutput, read_tool_choice, read_tools
from quire.llm.prompts import PromptReader
from quire.structured.thinking import ThinkingMasks
from quire.tokenizer import Tokenizer

TEMPLATE = (
    "{{ (tools or []) | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "<think></think><|tool_call|><|/tool_call|>"
)
MARKS = ("<|tool_call|>", "<|/tool_call|>", "<think>")
ONE: Any = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "model.gguf"
    return write_text_model(path, chat_template=TEMPLATE, more_specials=MARKS)


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(model, device="reference", kv_memory="4MiB") as made:
        yield made


_GRANITE = (
    "{% if tools %}Respond with <|tool_call|>. {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
_CALL = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'


_LFM2 = (
    "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)


def test_calls_that_lfm2s_template_leaves_out_are_written_in_python(tmp_path: Path) -> None:
    arguments = '{"a": "x\\"y", "b": [1.5, null, {"c": true}]}'
    functions = [{"name": "f", "arguments": arguments}, {"name": "g", "arguments": "none"}]
    calls = [{"id": f"{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "five"},
    ]
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    path = write_text_model(tmp_path / "m.gguf", chat_template=_LFM2, more_specials=marks)
    with LLM(path, device="reference", kv_memory="4MiB") as llm:
        prompt = llm.prompts.read_chat(messages, ChatOptions(ONE))
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.token_id(mark) for mark in marks]
    written = '[f(a="x\\"y", b=[1.5, None, {"c": True}]), g(none)]'
    assert prompt.text is not None
    assert f"[assistant]{marks[0]}{written}{marks[1]}\n[tool]five\n" in prompt.text
    assert [token for token in prompt.tokens if token in ids] == ids


@pytest.mark.parametrize(
    ("template", "written", "result"),
    [
        (TEMPLATE, f"assistant:So.<|tool_call|>{_CALL}<|/tool_call|>\n", "tool:five\n"),
        (_GRANITE, f"[assistant]So.<|tool_call|>{_CALL}\n", "[tool_response]five\n"),
    ],
)
def test_calls_that_a_template_leaves_out_are_written_as_it_asks_for_them(
    tmp_path: Path, template: str, written: str, result: str
) -> None:
    """Their markers are control tokens, as in the answers that the model gave; a user's are not."""
    functions = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": {}}]
    calls = [{"id": f"{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
    messages: Any = [
        {"role": "user", "content": "<|tool_call|>"},
        {"role": "assistant", "content": "So.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "five"},
    ]
    path = write_text_model(tmp_path / "m.gguf", chat_template=template, more_specials=MARKS)
    with LLM(path, device="reference", kv_memory="4MiB") as llm:
        prompt = llm.prompts.read_chat(messages, ChatOptions(ONE))
        plain = llm.prompts.read_chat(messages[:1], ChatOptions(ONE))
        assert llm.tokenizer is not None
        mark = llm.tokenizer.token_id("<|tool_call|>")
    assert mark is not None
    assert prompt.text is not None and written + result in prompt.text
    assert [*prompt.tokens].count(mark) == [*plain.tokens].count(mark) + 1


def test_a_required_call_is_in_the_output(llm: LLM) -> None:
    options: Any = {"tools": ONE, "tool_choice": "required", "parallel_tool_calls": False}
    [output] = llm.chat("hi", max_tokens=300, temperature=0.0, **options)
    assert isinstance(output, ChatOutput)
    [call] = output.answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert output.answer.content is None
    assert "<|tool_call|>" in output.text  # control tokens that the parser needs


def test_a_call_is_the_same_alone_and_in_company(llm: LLM) -> None:
    options: Any = {"tools": ONE, "tool_choice": "required", "max_tokens": 200, "seed": 3}
    alone = llm.chat("hi", **options)[0].token_ids
    together = llm.chat(["hi", "ho", "hello you"], **options)
    assert together[0].token_ids == alone


def test_an_async_chat_has_the_same_answer(model: Path, llm: LLM) -> None:
    options: Any = {"tools": ONE, "tool_choice": "required", "max_tokens": 300, "seed": 1}
    options["thinking_token_budget"] = 2

    async def ask() -> ChatOutput:
        async with AsyncLLM(model, device="reference", kv_memory="4MiB") as other:
            return await other.chat("hi", **options)

    output = asyncio.run(ask())
    assert output.token_ids == llm.chat("hi", **options)[0].token_ids
    assert output.answer.tool_calls[0].name == "f"


def test_plain_answers_have_their_text_as_content(llm: LLM) -> None:
    [output] = llm.chat("hi", max_tokens=4, temperature=0.0)
    assert output.answer.tool_calls == ()
    assert output.answer.content == output.text or output.answer.reasoning


def test_an_output_of_a_refused_conversation_has_an_answer(llm: LLM) -> None:
    [output] = llm.chat([[{"role": "user"}]], max_tokens=1, on_error="keep")
    assert output.error is not None
    assert output.answer.content == ""


def test_the_thinking_has_a_budget(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)
    options = ChatOptions(thinking_token_budget=4)
    prepared = llm.prompts.read_chat("hi", options)
    assert prepared.turn is not None
    thinking = prepared.turn.params(params).thinking
    assert thinking is not None and thinking.budget == 4


# ---- masks


def tokenizer_of(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


class Letters:
    """A grammar that allows one token and counts what it accepted."""

    def __init__(self, token: int) -> None:
        self.mask = (1 << token).to_bytes(2, "little")
        self.accepted: list[int] = []
        self.is_ready = self.is_complete = True
        self.is_slow = False
        self.failure = None

    def allowed(self) -> bytes:
        return self.mask

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def masks(thinking: Thinking, grammar: Letters | None, control: tuple[int, ...] = ()) -> Any:
    """Of a vocabulary of sixteen letters."""
    return ThinkingMasks(thinking, grammar, lambda token: bytes([97 + token]), 16, control)


def bits(mask: bytes) -> set[int]:
    value = int.from_bytes(mask, "little")
    return {token for token in range(16) if value >> token & 1}


def test_a_grammar_holds_after_the_closing_tag() -> None:
    grammar = Letters(7)
    made = masks(Thinking((1, 2), (3,), is_open=True), grammar, control=(2, 15))
    assert bits(made.allowed()) == set(range(16)) - {15}  # all text, and the tag's own tokens
    assert not made.is_complete
    for token in (5, 1, 2):
        made.accept(token)
    assert bits(made.allowed()) == {7}
    assert made.is_complete and grammar.accepted == []
    made.accept(7)
    assert grammar.accepted == [7]


def test_a_model_may_begin_to_think_before_it_answers() -> None:
    grammar = Letters(7)
    made = masks(Thinking((1,), (3,)), grammar)
    assert bits(made.allowed()) == {3, 7}
    made.accept(3)
    assert len(bits(made.allowed())) == 16
    made.accept(1)
    assert bits(made.allowed()) == {7}
    other = masks(Thinking((1,), (3,)), grammar)
    other.accept(7)
    assert bits(other.allowed()) == {7}


def test_a_spent_budget_forces_the_closing_tag() -> None:
    made = masks(Thinking((1, 2), (3,), is_open=True, budget=2), None)
    assert made.allowed() is None
    made.accept(5)
    assert made.allowed() is None
    made.accept(5)
    assert bits(made.allowed()) == {1}
    made.accept(1)
    assert bits(made.allowed()) == {2}
    made.accept(2)
    assert made.allowed() is None  # the answer is free


def test_a_budget_counts_from_the_opening_tag() -> None:
    made = masks(Thinking((1,), (3, 4), budget=1), None)
    for token in (3, 4):
        assert made.allowed() is None
        made.accept(token)
    made.accept(9)
    assert bits(made.allowed()) == {1}
    answer = masks(Thinking((1,), (3, 4), budget=1), None)
    for token in (3, 5, 9, 9):
        answer.accept(token)
    assert answer.allowed() is None  # it never began to think


def test_a_forced_begin_comes_first() -> None:
    made = masks(Thinking((1,), (3, 4), is_forced=True), Letters(7))
    for token in (3, 4):
        assert bits(made.allowed()) == {token}
        made.accept(token)
    assert len(bits(made.allowed())) == 16


@pytest.mark.parametrize("fields", [{"close": ()}, {"close": (1,), "budget": -1}, {"close": (-1,)}])
def test_thinking_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Thinking(**fields)


# ---- constraints and options


def test_markers_that_are_control_tokens_are_written_by_id(llm: LLM) -> None:
    form, tokenizer = form_of(TEMPLATE), tokenizer_of(llm)
    ids = control_tokens(form, tokenizer)
    assert set(ids) == set(MARKS)
    made = answer_constraint(form, tokenizer, read_tools(ONE), None, is_parallel=True)
    value = json.loads(made.value)
    assert value["calls"]["begin"] == [ids["<|tool_call|>"], "["]
    assert value["calls"]["end"] == ["]", ids["<|/tool_call|>"]]
    thinking = thinking_of(form, tokenizer, is_open=False, budget=None)
    assert thinking is not None and thinking.open == (ids["<think>"],)


def test_control_tokens_are_spelled_only_where_they_are_asked_for(llm: LLM) -> None:
    tokenizer = tokenizer_of(llm)
    token = tokenizer.token_id("<|tool_call|>")
    assert token is not None
    text = [tokenizer.detokenizer(spelled=spelled).add(token) for spelled in ((), (token,))]
    assert text == ["", "<|tool_call|>"]
    with pytest.raises(RequestError, match="spelled_token_ids"):
        SamplingParams(spelled_token_ids=(-1,))


def test_a_grammar_and_tools_cannot_be_combined(llm: LLM) -> None:
    grammar = Constraint.grammar('start: "a"')
    with pytest.raises(RequestError, match="cannot be combined with tools"):
        llm.chat("hi", max_tokens=4, tools=TOOLS, structured=grammar)


@pytest.mark.parametrize(
    "tools",
    ["f", ["f"], [{"type": "custom"}], [{"function": {}}], [{"function": {"name": "a b"}}]],
)
def test_tools_are_checked(tools: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "choice", ["maybe", {}, {"type": "function"}, {"type": "allowed_tools"}, 3, []]
)
def test_tool_choices_are_checked(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_tool_choice(choice)
    assert caught.value.param == "tool_choice"


def test_a_template_without_a_system_message_gets_tools_in_the_users(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    )
    path = write_text_model(tmp_path / "model.gguf", chat_template=template)
    with LLM(path, device="reference", kv_memory="4MiB") as llm:
        reader: PromptReader = llm.prompts
        reader._max_context = 10_000
        text = reader.read_chat("hi", ChatOptions(ONE)).text
    assert text is not None and text.startswith("user:hi\n\nYou can call tools.")


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({"description": "d", "parameters": {"properties": {"a": {}}}}, "f(a): d"),
        ({"parameters": {"type": "object"}}, "f(): "),
        ({"description": None, "parameters": None}, "f(): "),
        ({}, "f(): "),
    ],
)
def test_tools_may_leave_out_what_a_template_needs(
    tmp_path: Path, function: Any, shown: str
) -> None:
    """gpt-oss's fails without a description, Seed-OSS's without properties."""
    template = (
        "{% for t in tools or [] %}{% set f = t.function %}"
        "{{ f.name + '(' + f.parameters.properties.keys() | join(',') + '): ' + f.description }}"
        "{% endfor %}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    path = write_text_model(tmp_path / "model.gguf", chat_template=template)
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    with LLM(path, device="reference", kv_memory="4MiB") as llm:
        assert llm.prompts.read_chat("hi", ChatOptions(tools)).text == f"{shown}[hi]"


def test_a_template_that_fails_on_a_message_says_so_though_there_are_tools(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content + m.more }}{% endfor %}"
    path = write_text_model(tmp_path / "model.gguf", chat_template=template)
    message = {"role": "user", "content": "hi"}
    with (
        LLM(path, device="reference", kv_memory="4MiB") as llm,
        pytest.raises(RequestError, match="fails on the messages"),
    ):
        llm.prompts.read_chat([message], ChatOptions(ONE))


def test_calls_without_arguments_are_shown_as_text_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    path = write_text_model(tmp_path / "model.gguf", chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    with LLM(path, device="reference", kv_memory="4MiB") as llm:
        text = llm.prompts.read_chat(messages).text
    assert text is not None and '{"name": "f", "arguments": {}}' in text


def test_markers_of_several_control_tokens_are_looked_for_by_each() -> None:
    form = form_of("<|open|> <|close|> <|sep|>")
    assert {"<|open|>", "<|close|>", "<|sep|>"} < set(form.markers)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a", "x": {1}}}]}, "tools"),
        ({"tools": ONE, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"thinking_token_budget": "x"}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
    ],
)
def test_options_of_a_wrong_type_are_refused_by_name(llm: LLM, options: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat("hi", max_tokens=1, **options)
    assert caught.value.param == param
