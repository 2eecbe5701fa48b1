"""Fill-in-the-middle over HTTP: `suffix` of completions and of Ollama's /api/generate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import NAME, RunningServer, model_server

from quire import LLM, RequestError

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PROMPT, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module")
def code_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "code.gguf"
    return write_text_model(path, more_specials=MARKS)


@pytest.fixture(scope="module")
def coder(code_model: Path) -> Iterator[RunningServer]:
    with model_server(code_model) as server:
        yield server


def complete(server: RunningServer, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "suffix": SUFFIX, "max_tokens": 6, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json


def tokens_of(server: RunningServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens = server.post("/tokenize", body).json["tokens"]
    assert isinstance(tokens, list)
    return tokens


def filled_in(server: RunningServer, prompt: str, suffix: str) -> list[int]:
    """The prompt as Qwen2.5 Coder's page writes it."""
    return tokens_of(server, f"{MARKS[0]}{prompt}{MARKS[1]}{suffix}{MARKS[2]}")


def test_what_stands_between_is_asked_for_by_the_models_marks(coder: RunningServer) -> None:
    answer = complete(coder, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == filled_in(coder, PROMPT, SUFFIX)
    same = complete(coder, prompt=choice["prompt_token_ids"], suffix=None)
    assert choice["text"] == same["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])


def test_the_clients_own_library_streams_it(coder: RunningServer) -> None:
    whole = complete(coder)["choices"][0]["text"]
    with coder.client() as client:
        stream = client.completions.create(
            model=NAME, prompt=PROMPT, suffix=SUFFIX, max_tokens=6, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == whole


def test_one_of_both_texts_may_be_empty(coder: RunningServer) -> None:
    [choice] = complete(coder, prompt="", return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == filled_in(coder, "", SUFFIX)
    [choice] = complete(coder, suffix="", return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == tokens_of(coder, PROMPT)


def test_each_prompt_of_several_has_the_suffix(coder: RunningServer) -> None:
    found = complete(coder, prompt=[PROMPT, "x"], return_token_ids=True)["choices"]
    prompts = [choice["prompt_token_ids"] for choice in found]
    assert prompts == [filled_in(coder, prompt, SUFFIX) for prompt in (PROMPT, "x")]


def test_it_ends_where_the_model_writes_a_mark(coder: RunningServer) -> None:
    [pad] = tokens_of(coder, MARKS[3])
    wanted = {"logit_bias": {str(pad): 100}, "max_tokens": 4}
    [choice] = complete(coder, **wanted)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [choice] = complete(coder, **wanted, ignore_eos=True)["choices"]
    assert choice["finish_reason"] == "length"


def test_marks_in_the_texts_are_letters(coder: RunningServer) -> None:
    [choice] = complete(coder, prompt=f"x{MARKS[2]}", return_token_ids=True)["choices"]
    marks = tokens_of(coder, "".join(MARKS))
    assert sum(token in marks for token in choice["prompt_token_ids"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x" * 4000}, "prompt"),
        ({"suffix": "x\ud800"}, "suffix"),
        ({"prompt": "x\ud800"}, "prompt"),
    ],
)
def test_what_cannot_go_with_a_suffix_is_refused_by_name(
    coder: RunningServer, fields: dict[str, Any], param: str
) -> None:
    answer = coder.post("/v1/completions", {"prompt": PROMPT, "suffix": SUFFIX, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    is_too_long = len(str(fields)) > 4000
    assert (answer.error["code"] == "context_length_exceeded") is is_too_long


def test_llama_cpps_path_says_what_to_use(coder: RunningServer) -> None:
    answer = coder.post("/infill", {"input_prefix": PROMPT, "input_suffix": SUFFIX})
    assert answer.status == 404
    assert "/v1/completions with prompt and suffix" in answer.error["message"]


def test_a_model_without_marks_refuses_the_suffix(tiny: RunningServer) -> None:
    answer = tiny.post("/v1/completions", {"prompt": PROMPT, "suffix": SUFFIX})
    assert (answer.status, answer.error["param"]) == (400, "suffix")
    assert "<|fim_prefix|>" in answer.error["message"]


def test_ollamas_generate_fills_in_without_a_template(coder: RunningServer) -> None:
    body = {"prompt": PROMPT, "suffix": SUFFIX, "stream": False}
    body["options"] = {"num_predict": 6, "temperature": 0}
    answer = coder.post("/api/generate", body)
    assert answer.status == 200, answer.body
    assert answer.json["response"] == complete(coder)["choices"][0]["text"]
    assert answer.json["prompt_eval_count"] == len(filled_in(coder, PROMPT, SUFFIX))
    shown = coder.post("/api/show", {"model": NAME})
    assert "insert" in shown.json["capabilities"]


@pytest.mark.parametrize("fields", [{"system": "x"}, {"think": True}])
def test_ollamas_fields_of_conversations_have_no_place_in_it(
    coder: RunningServer, fields: dict[str, Any]
) -> None:
    answer = coder.post("/api/generate", {"prompt": PROMPT, "suffix": SUFFIX, **fields})
    assert answer.status == 400
    assert next(iter(fields)) in answer.json["error"] and "suffix" in answer.json["error"]


def test_the_library_takes_a_prompt_with_a_suffix(code_model: Path, coder: RunningServer) -> None:
    asked = {"prompt": PROMPT, "suffix": SUFFIX}
    with LLM(code_model, device="reference", kv_memory="4MiB") as llm:
        [output] = llm.generate([asked], max_tokens=6, temperature=0)
        streamed = "".join(p.text for p in llm.stream(asked, max_tokens=6, temperature=0))
        with pytest.raises(RequestError, match="suffix goes with a prompt that is text"):
            llm.generate([{"prompt_token_ids": [1], "suffix": "x"}], max_tokens=1)
        with pytest.raises(RequestError, match="suffix goes with"):
            llm.generate([{"prompt": "x", "suffix": 0}], max_tokens=1)
    assert output.text == streamed == complete(coder)["choices"][0]["text"]
    assert list(output.prompt_token_ids) == filled_in(coder, PROMPT, SUFFIX)
