"""pydantic-ai: a tool, an output type by a tool, one by a schema, and text."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
model = OpenAIChatModel("tiny-text", provider=provider)
agent = Agent(model, output_type=Person)
cities = []


@agent.tool_plain
def weather(city: str) -> str:
    """The weather."""
    cities.append(city)
    return "sunny"


assert agent.run_sync("Who?").output == Person(name="Bob", age=3)
assert cities == ["Paris"]
native = Agent(model, output_type=NativeOutput(Person))
assert native.run_sync("Who?").output == Person(name="Bob", age=3)
assert Agent(model).run_sync("Who?").output == "It is sunny."
