"""OpenAI's Python client: calls, the stream helper, its own messages fed back, and parse()."""

import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
QUESTION = {"role": "user", "content": "How is it in Paris?"}
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)


def ask(messages, **more):
    return client.chat.completions.create(model="tiny-text", messages=messages, tools=TOOLS, **more)


def with_result(message, fields):
    call = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    return [QUESTION, fields, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]


message = ask([QUESTION]).choices[0].message
answer = ask(with_result(message, message.model_dump()))
assert answer.choices[0].message.content == "It is sunny."

with client.chat.completions.stream(model="tiny-text", messages=[QUESTION], tools=TOOLS) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds
assert final.finish_reason == "tool_calls"
chunks = ask(with_result(final.message, final.message.to_dict()), stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Sunny."

parse = client.chat.completions.parse
parsed = parse(model="tiny-text", messages=[QUESTION], response_format=Person)
assert parsed.choices[0].message.parsed == Person(name="Bob", age=3)
parsed = parse(model="tiny-text", messages=[QUESTION], tools=[pydantic_function_tool(Person)])
[call] = parsed.choices[0].message.tool_calls
assert call.function.parsed_arguments == Person(name="Bob", age=3)
