"""LangChain: tools, and every method of structured output."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


model = ChatOpenAI(model="tiny-text", base_url=sys.argv[1], api_key="none", max_retries=0)
answer = model.bind_tools([weather]).invoke("Paris?")
assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
    ("weather", {"city": "Paris"})
]
whole = None
for chunk in model.bind_tools([weather]).stream("Paris?"):
    whole = chunk if whole is None else whole + chunk
assert whole.tool_calls[0]["args"] == {"city": "Paris"}
for method in ("function_calling", "json_mode", "json_schema"):
    found = model.with_structured_output(Person, method=method).invoke("Who, as JSON?")
    assert found == Person(name="Bob", age=3), method
