"""Compares chat templates as quire renders them with jinja2 as transformers sets it up.

    git clone --depth 1 https://github.com/ggml-org/llama.cpp
    python -m tests.oracles.compare_templates llama.cpp/models/templates

Conversations: plain, with a system prompt, with tools, with calls whose content is null and whose
arguments are an object or text, and with content in parts. Where quire gives a template another
form of a message than the client's, the prompt must be that of one of the forms, and hold what the
client wrote. Prints what differs; the exit status says whether anything does.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tokenizer.references import transformers_renders

from quire.core.errors import QuireError
from quire.tokenizer import ChatTemplate

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief, please."}
USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
AGAIN = {"role": "user", "content": "And 3 + 3?"}
ARGUMENTS = {"city": "Paris", "days": 3}
PARTS = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "the city"}},
            "required": ["city"],
        },
    },
}
PLAIN: dict[str, tuple[Messages, list[Any] | None]] = {
    "plain": ([USER], None),
    "turns": ([USER, ANSWER, AGAIN], None),
    "system": ([SYSTEM, USER, ANSWER, AGAIN], None),
    "tools": ([USER], [TOOL]),
    "system and tools": ([SYSTEM, USER], [TOOL]),
}


def main(folder: Path) -> int:
    count = differences = 0
    for path in sorted(folder.glob("*.jinja")):
        for name, problem in compared(path.read_text()):
            count += 1
            if problem:
                differences += 1
                print(f"{path.stem}: {name}: {problem}", flush=True)
    print(f"{count} prompts, {differences} differ")
    return 1 if differences or not count else 0


def compared(source: str) -> Iterator[tuple[str, str | None]]:
    """Conversations, and what is wrong with each prompt."""
    template = ChatTemplate(source, "<bos>", "<eos>")
    for name, (messages, tools) in PLAIN.items():
        yield name, difference(template, messages, tools, [expected(source, messages, tools)])
    for given in ("object", "text"):
        forms = [
            expected(source, calling(content, arguments), [TOOL])
            for content, arguments in itertools.product((None, ""), (ARGUMENTS, as_text()))
        ]
        arguments = ARGUMENTS if given == "object" else as_text()
        messages = calling(None, arguments)
        yield f"calls, {given}", difference(template, messages, [TOOL], forms, ("weather", "Paris"))
    wanted = tuple(part["text"] for part in PARTS)
    for role, tools in (("user", None), ("system", None), ("tool", [TOOL])):
        forms = [
            expected(source, in_parts(role, content, content_of_call, arguments), tools)
            for content in (PARTS, joined())
            for content_of_call in (None, "")
            for arguments in (ARGUMENTS, as_text())
        ]
        messages = in_parts(role, PARTS, None, as_text())
        yield f"parts of {role}", difference(template, messages, tools, forms, wanted)
    template.close()


def in_parts(role: str, content: Any, content_of_call: str | None, arguments: object) -> Messages:
    if role == "tool":
        *before, result = calling(content_of_call, arguments)
        return [*before, {**result, "content": content}]
    return (
        [{**SYSTEM, "content": content}, USER]
        if role == "system"
        else [{**USER, "content": content}]
    )


def as_text() -> str:
    return json.dumps(ARGUMENTS)


def joined() -> str:
    return "\n".join(part["text"] for part in PARTS)


def calling(content: str | None, arguments: object) -> Messages:
    call = {
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    asked = {"role": "assistant", "content": content, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "sunny"}
    return [USER, asked, result]


def expected(source: str, messages: Messages, tools: list[Any] | None) -> str | None:
    try:
        return transformers_renders(
            source,
            messages=json.loads(json.dumps(messages)),
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            bos_token="<bos>",
            eos_token="<eos>",
        )
    except Exception:  # whatever a template does with a form that is not its own
        return None


def difference(
    template: ChatTemplate,
    messages: Messages,
    tools: list[Any] | None,
    forms: list[str | None],
    wanted: tuple[str, ...] = (),
) -> str | None:
    """What is wrong; `wanted` must be in the prompt where any form has it there."""
    try:
        found = template.render(messages, tools=tools).text
    except QuireError as error:
        return str(error) if any(form is not None for form in forms) else None
    if found not in forms:
        return f"no form gives this: {found[:200]!r}"
    if any(form is not None and all(text in form for text in wanted) for form in forms):
        lost = [text for text in wanted if text not in found]
        if lost:
            return f"without {lost}"
    if "None" in found and any(form is not None and "None" not in form for form in forms):
        return "writes None"
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
