"""smolagents: an agent that calls tools, and one that writes code."""

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return f"sunny in {city}"


model = OpenAIModel(model_id="tiny-text", api_base=sys.argv[1], api_key="none")
calling = ToolCallingAgent(tools=[weather], model=model, verbosity_level=0)
assert calling.run("Paris?") == "sunny"
assert calling.memory.steps[1].tool_calls[0].arguments == {"city": "Paris"}
coding = CodeAgent(tools=[weather], model=model, verbosity_level=0)
assert coding.run("Paris?") == "sunny in Paris"
