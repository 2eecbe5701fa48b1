"""OpenAI's Agents SDK over both of its APIs: tools, handoffs, objects, streams."""

import asyncio
import sys

from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


async def ask(model: Model) -> None:
    agent = Agent(name="a", instructions="Help.", model=model, tools=[weather])
    assert (await Runner.run(agent, "Paris?")).final_output == "It is sunny."
    streamed = Runner.run_streamed(agent, "Paris?")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == "It is sunny."
    first = Agent(name="first", model=model, handoffs=[agent])
    handed = await Runner.run(first, "Paris?")
    assert (handed.last_agent.name, handed.final_output) == ("a", "It is sunny.")
    who = await Runner.run(Agent(name="who", model=model, output_type=Person), "Who?")
    assert who.final_output == Person(name="Bob", age=3)


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await ask(kind(model="tiny-text", openai_client=client))


asyncio.run(main())
