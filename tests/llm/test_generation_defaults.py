"""Sampling defaults from the model's files: taken where a call says nothing, never trusted."""

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.fixture_files import FIXTURES
from tests.llm.conftest import KV_MEMORY
from tests.llm.text_models import write_text_model

from quire import LLM, AsyncLLM, ConfigError, SamplingParams
from quire.cli.options import length_limit
from quire.cli.program import main
from quire.model.generation import _CONFIG_NAMES, _checked, read_defaults
from quire.model.loading import end_token_ids, load_model
from quire.server.schemas import CompletionRequest

OPTIONS: dict[str, Any] = {"device": "reference", "kv_memory": KV_MEMORY}
CALL: dict[str, Any] = {"seed": 1, "max_tokens": 8}


@pytest.fixture
def hinted(tmp_path: Path) -> Path:
    """Its file wants the likeliest token alone."""
    return write_text_model(tmp_path / "hinted.gguf", sampling={"top_k": 1, "temp": 0.5})


def test_a_calls_keywords_go_before_the_files_defaults(hinted: Path) -> None:
    with LLM(hinted, **OPTIONS) as llm:
        assert llm.sampling_defaults == {"top_k": 1, "temperature": 0.5}
        likeliest = llm.generate("hi", temperature=0, max_tokens=8)[0].text
        assert llm.generate("hi", **CALL)[0].text == likeliest
        assert llm.chat("hi", **CALL)[0].text == llm.chat("hi", temperature=0, max_tokens=8)[0].text
        stream = llm.stream("hi", **CALL)
        assert "".join(piece.text for piece in stream) == likeliest
        wild = {**CALL, "top_k": 0, "temperature": 5.0}
        assert llm.generate("hi", **wild)[0].text != likeliest
        own = SamplingParams(seed=1, max_tokens=8, temperature=5.0)
        assert llm.generate("hi", own)[0].text != likeliest, "SamplingParams are taken whole"


def test_the_files_defaults_can_be_turned_off(hinted: Path) -> None:
    with LLM(hinted, **OPTIONS, generation_config="none") as llm:
        assert llm.sampling_defaults == {}
    with pytest.raises(ConfigError, match="generation_config must be one of auto, none, got 'x'"):
        LLM(hinted, **OPTIONS, generation_config="x")


def test_async_calls_take_them_too(hinted: Path) -> None:
    async def texts() -> tuple[str, str]:
        async with AsyncLLM(hinted, **OPTIONS) as llm:
            likeliest = await llm.generate("hi", temperature=0, max_tokens=8)
            return (await llm.generate("hi", **CALL)).text, likeliest.text

    said, likeliest = asyncio.run(texts())
    assert said == likeliest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 10**400),
        ("top_k", 1.5),
        ("top_p", float("nan")),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
    ],
)
def test_what_no_request_could_give_is_left_out_with_a_note(field: str, value: Any) -> None:
    found = _checked({field: value, "top_p": value if field == "top_p" else 0.9}, "", _CONFIG_NAMES)
    assert found.options == ({} if field == "top_p" else {"top_p": 0.9})
    assert len(found.notes) == 1 and f"{field} is left out: " in found.notes[0]


def test_a_hint_out_of_bounds_is_a_warning_when_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_text_model(tmp_path / "odd.gguf", sampling={"temp": -3.0, "mirostat": 2})
    with caplog.at_level(logging.WARNING), LLM(path, **OPTIONS) as llm:
        assert llm.sampling_defaults == {}
    assert "general.sampling.temp is left out: temperature must be" in caplog.text
    assert "general.sampling.mirostat is left out" in caplog.text


def test_a_server_takes_them() -> None:
    body = CompletionRequest(prompt="hi", temperature=0.25)
    params = body.sampling(9, None, {"top_k": 1, "temperature": 0.5})
    assert (params.top_k, params.temperature, params.max_tokens) == (1, 0.25, 9)


def test_inspect_and_the_programs_take_them(
    hinted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(hinted)]) == 0
    assert "sampling   defaults: temperature 0.5, top_k 1" in capsys.readouterr().out
    model = ["--model", str(hinted), "--device", "reference", "--max-tokens", "8", "--prompt", "hi"]
    texts = []
    for more in (["--seed", "1"], ["--temperature", "0"], ["--temperature", "5", "--top-k", "0"]):
        assert main(["generate", *more, *model]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main(["generate", "--generation-config", "none", *model]) == 0
    assert capsys.readouterr().out == texts[1], "without hints, generate takes the likeliest token"


@pytest.fixture
def brief(tmp_path: Path) -> Path:
    """Its folder says how long completions are that nobody limits."""
    folder = tmp_path / "brief"
    shutil.copytree(FIXTURES / "families" / "llama", folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    return folder


def test_a_completion_ends_at_the_files_max_new_tokens_or_where_the_context_does(
    brief: Path,
) -> None:
    def lengths(llm: LLM, prompt: int, **options: Any) -> list[int]:
        outputs = llm.generate([1] * prompt, ignore_eos=True, **options)
        return [len(completion.token_ids) for completion in outputs[0].completions]

    with LLM(brief, **OPTIONS, max_context=32) as llm:
        assert llm.sampling_defaults == {"max_tokens": 5}
        assert lengths(llm, 3) == [5] and lengths(llm, 3, n=2) == [5, 5]
        assert lengths(llm, 30) == [2], "no error: nobody asked for five"
        assert lengths(llm, 3, max_tokens=7) == [7] and lengths(llm, 3, min_tokens=6) == [6]
    with LLM(brief, **OPTIONS, max_context=32, generation_config="none") as llm:
        assert lengths(llm, 3) == [29]


def test_a_server_and_the_programs_take_it_too(
    brief: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for min_tokens, room, expected in ((None, 9, 5), (None, 3, 3), (6, 9, 6)):
        body = CompletionRequest(prompt="hi", min_tokens=min_tokens)
        assert body.sampling(room, None, {"max_tokens": 5}).max_tokens == expected
    body = CompletionRequest(prompt="hi", max_tokens=8)
    assert body.sampling(9, None, {"max_tokens": 5}).max_tokens == 8
    assert main(["inspect", str(brief)]) == 0
    assert "defaults: max_tokens 5" in capsys.readouterr().out
    tokens = ["generate", "--model", str(brief), "--device", "reference", "--prompt-tokens", "1,2"]
    assert main([*tokens, "--ignore-eos"]) == 0
    assert len(capsys.readouterr().out.split(",")) == 5
    limit = length_limit(SamplingParams(), {"max_tokens": 5})
    assert limit == "5 tokens (the model's default), or the end of the context"


def test_a_folders_generation_config_gives_defaults_and_end_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(FIXTURES / "families" / "llama", folder)
    config = {"eos_token_id": [5, 7], "top_k": 20, "top_p": 0.8, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with load_model(folder) as model:
        assert read_defaults(model).options == {"top_k": 20, "top_p": 0.8}
        assert end_token_ids(model, None) == (5, 7)


def test_llama_cpps_samplers_and_their_order_are_taken_from_a_file(tmp_path: Path) -> None:
    hints = {"xtc_probability": 0.5, "xtc_threshold": 0.25, "penalty_last_n": 32}
    path = write_text_model(tmp_path / "xtc.gguf", sampling={**hints, "sequence": "top_k;temp"})
    with load_model(path) as model:
        found = read_defaults(model)
    assert found.options == {
        "xtc_probability": 0.5,
        "xtc_threshold": 0.25,
        "repeat_last_n": 32,
        "samplers": ("top_k", "temperature"),
    }
    path = write_text_model(tmp_path / "odd.gguf", sampling={"sequence": "top_k;mirostat"})
    with load_model(path) as model:
        found = read_defaults(model)
    assert found.options == {}
    assert "general.sampling.sequence is left out: samplers names 'mirostat'" in found.notes[0]
