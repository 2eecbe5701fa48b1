"""Tools and reasoning over HTTP: answers that a scripted model writes, seen by OpenAI's client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.chat.samples import TOOLS
from tests.llm.text_models import write_text_model
from tests.server.servers import RunningServer, ScriptedExecutor, fake_server

HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Use <tool_call></tool_call>.{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
    "[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif opens %}<think>{% endif %}"
)
HARMONY = (
    "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}"
    "{% for t in tools or [] %}functions.{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %} to=functions.{{ c.function | tojson }}<|call|>{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)
HARMONY_TOKENS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *("<|constrain|>", "<|call|>", "<|return|>"),
)
QUESTION: Any = [{"role": "user", "content": "How is it in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


class Scripted:
    """A server whose model writes what the test says."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server

    def says(self, text: str) -> None:
        llm = self.server.service.loaded
        assert llm is not None and llm.tokenizer is not None
        tokens = llm.tokenizer.encode(text, add_special=False, parse_special=True)
        self.server.executor.script = tokens

    def ask(self, **fields: Any) -> Any:
        body = {"model": "tiny-text", "messages": QUESTION, "tools": TOOLS, **fields}
        with self.server.client() as client:
            answer: Any = client.chat.completions.create(**body)
            return list(answer) if fields.get("stream") else answer

    def chunks(self, **fields: Any) -> list[Any]:
        found: list[Any] = self.ask(stream=True, **fields)
        return found

    def prompt(self, **fields: Any) -> str:
        """The prompt that a body makes."""
        self.says("")
        self.server.executor.keep_plans = True
        self.server.executor.plans.clear()
        self.ask(**fields)
        self.server.executor.keep_plans = False
        rows = [row for plan in self.server.executor.plans for row in plan.sequences]
        llm = self.server.service.loaded
        assert llm is not None and llm.tokenizer is not None
        tokens = [token for row in rows for token in row.tokens]
        return llm.tokenizer.decode(tokens, skip_special=False)


def scripted_server(folder: Path, template: str | None, *specials: str) -> Iterator[Scripted]:
    options = {} if template is None else {"chat_template": template}
    model = write_text_model(folder / "model.gguf", more_specials=specials, **options)  # type: ignore[arg-type]
    with fake_server(model, ScriptedExecutor(), {"prefix_reuse": False}) as server:
        yield Scripted(server)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from scripted_server(tmp_path_factory.mktemp("hermes"), HERMES)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    yield from scripted_server(tmp_path_factory.mktemp("harmony"), HARMONY, *HARMONY_TOKENS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A template that shows no tools."""
    yield from scripted_server(tmp_path_factory.mktemp("plain"), None)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]


WEATHER = ("weather", {"city": "Paris", "days": 3})


# ---- calls


def test_a_call_is_in_the_message_and_ends_it(hermes: Scripted) -> None:
    hermes.says(f"Let me look.\n{CALL}")
    choice = hermes.ask().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert calls_of(choice.message) == [WEATHER]
    assert choice.message.tool_calls[0].type == "function"


def test_an_answer_without_calls_is_as_ever(hermes: Scripted) -> None:
    hermes.says("It rains. ")
    choice = hermes.ask().choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It rains. "
    assert choice.message.tool_calls is None
    assert "tool_calls" not in hermes.server.chat(max_tokens=2).json["choices"][0]["message"]


def test_streams_have_the_call_in_openais_deltas(hermes: Scripted) -> None:
    hermes.says(f"So.\n{CALL}\n{CALL}")
    deltas = [chunk.choices[0].delta for chunk in hermes.chunks()]
    assert "".join(delta.content or "" for delta in deltas) == "So."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    firsts = [part for part in parts if part.id]
    assert [(part.index, part.type, part.function.name) for part in firsts] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index in (0, 1):
        own = [part.function.arguments for part in parts if part.index == index]
        assert json.loads("".join(own)) == WEATHER[1]


def ids_in(body: bytes) -> list[str]:
    """Of calls, in any dialect, in their order."""
    return list(dict.fromkeys(re.findall(r"call_[A-Za-z0-9]{24}", body.decode())))


FUNCTION = TOOLS[0]["function"]
DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS, "n": 2}),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}),
    (
        "/v1/messages",
        {
            "messages": QUESTION,
            "max_tokens": 200,
            "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
        },
    ),
    ("/api/chat", {"messages": QUESTION, "tools": TOOLS}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", DIALECTS)
def test_an_answer_that_is_computed_again_has_the_same_calls(
    hermes: Scripted,
    path: str,
    body: dict[str, Any],
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a crash, which comes before an answer is kept."""
    server = hermes.server
    monkeypatch.setattr(server.service.responses, "end_keyed", lambda *_: None)
    hermes.says(f"So.\n{CALL}\n{CALL}")
    asked = {"model": "tiny-text", **body, "stream": stream}

    def ids(key: str) -> list[str]:
        reply = server.post(path, asked, {"Idempotency-Key": key})
        assert reply.status == 200, reply.body
        assert "idempotent-replayed" not in reply.headers
        return ids_in(reply.body)

    key = f"{path} {stream}"
    first = ids(key)
    assert len(first) == 2 * body.get("n", 1)
    assert sorted(ids(key)) == sorted(first), "choices of a stream come in any order"
    assert not {*ids(f"{key} again")} & {*first}
    assert not {*ids_in(server.post(path, asked).body)} & {*first}


def test_the_stream_helper_builds_the_same_message(hermes: Scripted) -> None:
    hermes.says(f"So.\n{CALL}")
    with (
        hermes.server.client() as client,
        client.chat.completions.stream(model="tiny-text", messages=QUESTION, tools=TOOLS) as stream,
    ):
        final = stream.get_final_completion().choices[0]
    assert calls_of(final.message) == [WEATHER]
    assert (final.message.content, final.finish_reason) == ("So.", "tool_calls")


def test_the_conversation_goes_on_with_the_clients_own_message(hermes: Scripted) -> None:
    hermes.says(f"So.\n{CALL}")
    message = hermes.ask().choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    prompt = hermes.prompt(messages=[*QUESTION, message.model_dump(), result])
    assert '[assistant]So.<tool_call>{"arguments": {"city": "Paris", "days": 3}' in prompt
    assert "[tool]sunny[assistant]" in prompt


def test_several_choices_have_calls_of_their_own(hermes: Scripted) -> None:
    hermes.says(CALL)
    choices = hermes.ask(n=3, logprobs=True).choices
    assert [calls_of(choice.message) for choice in choices] == [[WEATHER]] * 3
    assert all(choice.message.content is None for choice in choices)
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3
    assert all(choice.logprobs.content for choice in choices)


def test_a_broken_call_is_content(hermes: Scripted) -> None:
    hermes.says("<tool_call>weather(Paris)</tool_call>")
    choice = hermes.ask().choices[0]
    assert choice.message.content == "<tool_call>weather(Paris)</tool_call>"
    assert choice.finish_reason == "stop"


def test_a_call_that_is_cut_says_so(hermes: Scripted) -> None:
    hermes.says(CALL)
    choice = hermes.ask(max_tokens=len(CALL) // 2).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"')
    chunks = [chunk.choices[0] for chunk in hermes.chunks(max_tokens=len(CALL) // 2)]
    assert chunks[-1].finish_reason == "length"
    assert not any(chunk.delta.content for chunk in chunks)  # what came stays a call


def test_a_stop_string_ends_the_text_before_the_call(hermes: Scripted) -> None:
    hermes.says(f"So. END {CALL}")
    choice = hermes.ask(stop="END").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("So. ", "stop")


# ---- the choice of tools


def test_a_tool_may_leave_out_its_type(hermes: Scripted) -> None:
    [tool] = SHORT
    assert hermes.prompt(tools=[{"function": tool["function"]}]) == hermes.prompt(tools=SHORT)


def test_no_tools_are_shown_where_none_may_be_called(hermes: Scripted) -> None:
    assert "weather" in hermes.prompt()
    assert "weather" not in hermes.prompt(tool_choice="none")
    hermes.says(CALL)
    assert hermes.ask(tool_choice="none").choices[0].message.content == CALL


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("name", ["hermes", "harmony", "plain"])
def test_a_required_call_is_made_whatever_the_model_would_write(
    name: str, choice: Any, request: pytest.FixtureRequest
) -> None:
    server: Scripted = request.getfixturevalue(name)
    server.says("I would rather not.")
    asked = server.ask(tool_choice=choice, tools=SHORT, max_tokens=3000, parallel_tool_calls=False)
    [call] = asked.choices[0].message.tool_calls
    assert asked.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "a"})


SHORT: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["a"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
]
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def test_allowed_tools_hide_the_others(hermes: Scripted) -> None:
    function = {"type": "function", "function": {"name": "weather"}}
    allowed = {"mode": "required", "tools": [function]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    prompt = hermes.prompt(tools=[*SHORT, OTHER], tool_choice=choice, max_tokens=200)
    assert "weather" in prompt and "other" not in prompt


def test_strict_arguments_follow_the_schema_and_text_is_free(hermes: Scripted) -> None:
    [tool] = SHORT
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    hermes.says("Any {text} <tool.")
    assert hermes.ask(tools=[strict]).choices[0].message.content == "Any {text} <tool."
    hermes.says('Look. <tool_call>\n{"name": "weather", "arguments": {"city": "b"}}\n</tool_call>')
    choice = hermes.ask(tools=[strict]).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "a"})]
    assert choice.message.content == "Look."


def test_an_answer_has_its_form_or_calls_tools(hermes: Scripted) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    hermes.says('<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>')
    choice = hermes.ask(tools=SHORT, response_format=form).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "a"})]
    hermes.says('{"a": 2}')
    choice = hermes.ask(tools=SHORT, response_format=form).choices[0]
    assert json.loads(choice.message.content) == {"a": 1}
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice", "there are no tools"),
        ({"tool_choice": "maybe"}, "tool_choice", "must be"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "not in tools",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "no name"}}]},
            "tools",
            "letters, digits",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "400 - tool 'f': at #",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
                ],
                "response_format": {"type": "json_object"},
            },
            "tools",
            "400 - tool 'f': at #",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_said(
    hermes: Scripted, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.ask(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_tools_reach_a_model_whose_template_has_none(plain: Scripted) -> None:
    prompt = plain.prompt()
    assert prompt.startswith("<|im_start|>system\nYou can call tools.")
    assert '{"name": "weather"' in prompt
    plain.says(CALL)
    message = plain.ask().choices[0].message
    assert calls_of(message) == [WEATHER]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    prompt = plain.prompt(messages=[*QUESTION, message.model_dump(), result])
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"' in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>" in prompt


# ---- reasoning


def test_reasoning_is_apart_from_content(hermes: Scripted) -> None:
    hermes.says("<think>\nHm, hm.\n</think>\n\nYes.")
    asked = hermes.ask(tools=None)
    message = asked.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm, hm.")
    assert message.reasoning == "Hm, hm."
    counted = asked.usage.completion_tokens_details.reasoning_tokens
    assert 0 < counted < asked.usage.completion_tokens
    deltas = hermes.chunks(tools=None, stream_options={"include_usage": True})
    thought = [getattr(d.choices[0].delta, "reasoning_content", None) for d in deltas if d.choices]
    assert "".join(filter(None, thought)) == "Hm, hm."
    assert deltas[-1].usage.completion_tokens_details.reasoning_tokens == counted


def test_reasoning_that_the_prompt_opens_has_no_tag(hermes: Scripted) -> None:
    hermes.says("Hm.</think>Yes.")
    opened = {"extra_body": {"chat_template_kwargs": {"opens": True}}}
    message = hermes.ask(tools=None, **opened).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")


def test_reasoning_can_be_left_out(hermes: Scripted) -> None:
    hermes.says("<think>Hm.</think>Yes.")
    without = {"extra_body": {"include_reasoning": False}}
    message = hermes.ask(**without).choices[0].message
    assert message.content == "Yes."
    assert not hasattr(message, "reasoning_content")
    for chunk in hermes.chunks(**without):
        assert not hasattr(chunk.choices[0].delta, "reasoning_content")


def test_reasoning_in_a_history_reaches_the_template(hermes: Scripted) -> None:
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "Yes.", name: "Hm."}
        prompt = hermes.prompt(messages=[*QUESTION, turn, *QUESTION])
        assert "[assistant]Yes.<think>Hm.</think>" in prompt


def test_what_clients_add_to_an_answer_is_taken_back_and_changes_nothing(hermes: Scripted) -> None:
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    expected = hermes.prompt(messages=[*QUESTION, turn, *QUESTION])
    added = {"provider_specific_fields": {"reasoning": "Hm.", "refusal": None}, "parsed": None}
    assert hermes.prompt(messages=[*QUESTION, {**turn, **added}, *QUESTION]) == expected


def test_harmonys_thinking_is_given_beside_calls_without_content(harmony: Scripted) -> None:
    function = {"name": "weather", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    for content, is_shown in ((None, True), ("So.", False)):
        turn = {"role": "assistant", "content": content, "tool_calls": [call], "reasoning": "Hm."}
        prompt = harmony.prompt(messages=[*QUESTION, turn, result])
        assert ("<|channel|>analysis<|message|>Hm." in prompt) is is_shown


def test_effort_is_what_the_template_makes_of_it(hermes: Scripted, harmony: Scripted) -> None:
    assert hermes.prompt(reasoning_effort="none").endswith("[assistant]<think></think>")
    assert hermes.prompt(reasoning_effort="high").endswith("[assistant]")
    assert harmony.prompt(reasoning_effort="high").startswith("Reasoning: high")
    assert harmony.prompt(reasoning_effort="minimal").startswith("Reasoning: low")
    assert harmony.prompt(reasoning_effort="max").startswith("Reasoning: high")


@pytest.mark.parametrize(
    ("reasoning", "end"),
    [
        ({"effort": "none"}, "[assistant]<think></think>"),
        ({"enabled": False}, "[assistant]<think></think>"),
        ({"effort": "high"}, "[assistant]"),
        ({"enabled": True}, "[assistant]"),
    ],
)
def test_reasoning_says_what_other_fields_say(
    hermes: Scripted, reasoning: dict[str, Any], end: str
) -> None:
    """As Ollama's chat completions and OpenRouter's clients have it."""
    assert hermes.prompt(extra_body={"reasoning": reasoning}).endswith(end)


def test_thoughts_are_cut_and_left_out_by_reasoning(hermes: Scripted) -> None:
    hermes.says("<think>One two three four five six</think>Yes.")
    [whole, cut, left_out] = [
        hermes.ask(extra_body={"reasoning": reasoning}).choices[0].message
        for reasoning in ({}, {"max_tokens": 4}, {"exclude": True})
    ]
    assert len(cut.reasoning_content) < len(whole.reasoning_content)
    assert not hasattr(left_out, "reasoning_content") and left_out.content == "Yes."


def test_reasoning_must_agree_with_the_fields_that_say_the_same(hermes: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning and reasoning_effort differ"):
        hermes.ask(reasoning_effort="low", extra_body={"reasoning": {"effort": "high"}})


def test_effort_is_refused_where_the_template_has_no_setting(plain: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="has no such setting") as caught:
        plain.ask(reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    plain.says("Yes.")
    assert plain.ask(reasoning_effort="none").choices[0].message.content == "Yes."


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("opens", [False, True])
def test_a_budget_ends_the_reasoning(hermes: Scripted, budget: int, opens: bool) -> None:
    thought = "abcdefghijklmnop" * 4
    hermes.says(thought if opens else f"<think>{thought}")
    extra = {"thinking_token_budget": budget, "chat_template_kwargs": {"opens": opens}}
    asked = hermes.ask(tools=None, max_tokens=60, extra_body=extra)
    message = asked.choices[0].message
    assert thought.startswith(getattr(message, "reasoning_content", None) or "")
    assert (getattr(message, "reasoning_content", None) is None) is (budget == 0)
    assert message.content  # the script goes on, as content


def test_a_budget_needs_reasoning(plain: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing to limit") as caught:
        plain.ask(extra_body={"thinking_token_budget": 3})
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("opens", [False, True])
def test_a_form_holds_for_what_follows_the_reasoning(hermes: Scripted, opens: bool) -> None:
    hermes.says("Hm.</think>" if opens else "no reasoning")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    extra = {"chat_template_kwargs": {"opens": opens}}
    message = hermes.ask(tools=None, response_format=form, extra_body=extra).choices[0].message
    assert json.loads(message.content) == {"a": 1}
    assert getattr(message, "reasoning_content", None) == ("Hm." if opens else None)


# ---- harmony


def test_harmony_is_split_by_its_channels(harmony: Scripted) -> None:
    head = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    harmony.says(f"{head}<|channel|>final<|message|>Yes.")
    message = harmony.ask().choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    harmony.says(
        f"{head}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}'
    )
    choice = harmony.ask().choices[0]
    assert calls_of(choice.message) == [WEATHER]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in harmony.chunks())
    assert text == ""


def test_a_form_holds_in_harmonys_final_channel(harmony: Scripted) -> None:
    harmony.says("<|channel|>analysis<|message|>Hm.<|end|>")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    message = harmony.ask(tools=None, response_format=form).choices[0].message
    assert (json.loads(message.content), message.reasoning_content) == ({"a": 1}, "Hm.")
