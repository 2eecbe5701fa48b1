"""LiteLLM: tools, streams, reasoning and objects over OpenAI's chats."""

import sys

import litellm
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
QUESTION = {"role": "user", "content": "How is it in Paris?"}


def ask(messages, provider="openai", base=sys.argv[1], **more):
    return litellm.completion(
        model=f"{provider}/tiny-text",
        api_base=base,
        api_key="none",
        num_retries=0,
        messages=messages,
        **more,
    )


def called(message):
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    return call


# hosted_vllm is how LiteLLM names servers such as this one.
for provider in ("openai", "hosted_vllm"):
    message = ask([QUESTION], provider, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": called(message).id, "content": "sunny"}
    answer = ask([QUESTION, message, result], provider, tools=TOOLS)
    assert answer.choices[0].message.content == "It is sunny."

options = {"include_usage": True}
chunks = list(ask([QUESTION], tools=TOOLS, stream=True, stream_options=options))
whole = litellm.stream_chunk_builder(chunks, messages=[QUESTION])
called(whole.choices[0].message)
assert whole.choices[0].finish_reason == "tool_calls"
assert whole.usage.completion_tokens > 0

message = ask([QUESTION], "hosted_vllm").choices[0].message
assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
answer = ask([QUESTION, message, QUESTION], "hosted_vllm")
assert answer.choices[0].message.content == "It is sunny."
answer = ask([QUESTION], response_format=Person)
assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Bob", age=3)
try:
    ask([QUESTION], max_tokens=-2)
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error)
else:
    raise AssertionError("not refused")
