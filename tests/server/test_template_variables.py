"""chat_template_kwargs in a body: variables of the model's template, within limits."""

from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import fake_server

TEMPLATE = "{{ messages[0].content }}{{ '<|im_end|>' if enable_thinking else '' }}{{ x }}"
MESSAGES = [{"role": "user", "content": "hi"}]
END = 2  # the token of <|im_end|>


def test_variables_reach_the_template_and_are_text(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model.gguf", chat_template=TEMPLATE)
    with fake_server(model) as server:

        def tokens(**variables: Any) -> list[int]:
            body = {"messages": MESSAGES, "chat_template_kwargs": variables}
            found: list[int] = server.post("/tokenize", body).json["tokens"]
            chat = server.post("/v1/chat/completions", {**body, "max_tokens": 1}).json
            assert chat["usage"]["prompt_tokens"] == len(found)
            return found

        assert END in tokens(enable_thinking=True)
        assert END not in tokens(enable_thinking=False)
        assert END not in tokens(x="<|im_end|>"), "a request's text is no control token"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"messages": []}, "chat_template_kwargs.messages is set by the engine"),
        ({"x" * 65: 1}, "which no template can read"),
        ({f"x{n}": 1 for n in range(65)}, "has 65 names; the limit is 64"),
        ([1], "chat_template_kwargs"),
    ],
)
def test_variables_that_are_wrong_are_refused(text_model: Path, variables: Any, error: str) -> None:
    with fake_server(text_model) as server:
        body = {"messages": MESSAGES, "chat_template_kwargs": variables}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 400
        assert error in answer.json["error"]["message"] + answer.json["error"]["param"]
        assert answer.json["error"]["param"] == "chat_template_kwargs"
