"""instructor: by tools, strict tools, JSON and a schema."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


Mode = instructor.Mode
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA):
    openai = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    client = instructor.from_openai(openai, mode=mode)
    found = client.chat.completions.create(
        model="tiny-text",
        messages=[{"role": "user", "content": "Who?"}],
        response_model=Person,
        max_retries=0,
    )
    assert (found.name, found.age) == ("Bob", 3), mode
