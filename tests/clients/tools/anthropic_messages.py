"""Anthropic's client: tools and thoughts whole and streamed, its tool runner, objects, counting."""

import sys

import anthropic
from pydantic import BaseModel

client = anthropic.Anthropic(
    base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0
)
MODEL = "tiny-text"
QUESTION = [{"role": "user", "content": "The weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": CITY}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
ASKED = {"model": MODEL, "max_tokens": 300, "messages": QUESTION}

message = client.messages.create(**ASKED, tools=TOOLS, thinking=THINKING)
thought, call = message.content
assert thought.thinking == "Hm.", message
assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"}), message
assert message.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
history = [
    *QUESTION,
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": [result]},
]
answer = client.messages.create(**{**ASKED, "messages": history}, tools=TOOLS)
assert answer.content[0].text == "It is sunny.", answer

with client.messages.stream(**ASKED, tools=TOOLS, thinking=THINKING) as stream:
    kinds = {event.type for event in stream}
    last = stream.get_final_message()
assert {"thinking", "input_json", "message_stop"} <= kinds, kinds
assert [block.type for block in last.content] == ["thinking", "tool_use"], last
assert last.content[1].input == {"city": "Paris"}


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


final = client.beta.messages.tool_runner(**ASKED, tools=[weather]).until_done()
assert final.content[0].text == "It is sunny.", final


class Person(BaseModel):
    name: str
    age: int


parsed = client.messages.parse(**ASKED, output_format=Person)
assert parsed.parsed_output == Person(name="Bob", age=3), parsed
assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0
try:
    client.messages.create(**{**ASKED, "model": "another"})
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("there is no such model")
