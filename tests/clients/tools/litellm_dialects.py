"""litellm over Anthropic's Messages and OpenAI's Responses: tools, and streams."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": CITY}
MESSAGES = {
    "model": "anthropic/tiny-text",
    "api_base": sys.argv[1].removesuffix("/v1"),
    "api_key": "none",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "The weather in Paris?"}],
}
RESPONSES = {
    "model": "openai/tiny-text",
    "api_base": sys.argv[1],
    "api_key": "none",
    "input": "The weather in Paris?",
}

answer = litellm.completion(**MESSAGES, tools=[{"type": "function", "function": FUNCTION}])
[call] = answer.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Paris"}, answer
pieces = [
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**MESSAGES, stream=True)
]
assert "".join(pieces) == "It is sunny.", pieces
response = litellm.responses(**RESPONSES, tools=[{"type": "function", **FUNCTION}])
assert [item.type for item in response.output] == ["function_call"], response
events = list(litellm.responses(**RESPONSES, stream=True))
text = [event.delta for event in events if event.type == "response.output_text.delta"]
assert "".join(text) == "It is sunny.", text
