"""Ollama's client: chats, streams, thinking, tools, objects, generate, and what there is."""

import sys

from ollama import Client, ResponseError
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """The weather.

    Args:
      city: Where.
    """
    return f"sunny in {city}"


client = Client(host=sys.argv[1].removesuffix("/v1"))
messages = [{"role": "user", "content": "How is it in Paris?"}]
for stream in (False, True):
    answer = client.chat("tiny-text", messages, tools=[weather], stream=stream)
    parts = list(answer) if stream else [answer]
    [call] = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert parts[-1].done and parts[-1].eval_count > 0
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    answer = client.chat("tiny-text", [*messages, said, result], tools=[weather])
    assert answer.message.content == "It is sunny."

message = client.chat("tiny-text", messages, think=True).message
assert (message.thinking, message.content) == ("Hm.", "Yes.")
found = client.chat("tiny-text", messages, format=Person.model_json_schema()).message.content
assert Person.model_validate_json(found) == Person(name="Bob", age=3)
options = {"num_predict": 40, "temperature": 0}
pieces = client.generate("tiny-text", "Paris?", stream=True, options=options)
assert "".join(piece.response for piece in pieces) == "It is sunny."
assert "tiny-text" in [model.model.removesuffix(":latest") for model in client.list().models]
assert client.show("tiny-text").template
assert client.ps().models
try:
    client.chat("another", messages)
except ResponseError as error:
    assert error.status_code == 404
else:
    raise AssertionError("not refused")
