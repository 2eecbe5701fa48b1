"""Tokenizers and end tokens of safetensors folders, from the files beside the weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tests.fixture_files import FIXTURES
from tests.llm.text_models import CHAT_TEMPLATE, SPECIALS

from quire import LLM, FinishReason, ModelFileError, SamplingParams
from quire.model.loading import load_model, read_tokenizer
from quire.tokenizer.detokenizer import BYTE_ALPHABET

FAMILY = FIXTURES / "families" / "llama"
NUM_ROWS = json.loads((FAMILY / "config.json").read_text())["vocab_size"]
LETTERS = sorted(BYTE_ALPHABET)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
QUESTION = [{"role": "user", "content": "!!"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a model's folder, without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FAMILY / name, tmp_path / name)
    return tmp_path


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    """A byte-level tokenizer.json: control tokens, then as many of the bytes as there is room."""
    letters = LETTERS[: num_tokens - len(SPECIALS)]
    ids = {text: token for token, text in enumerate([*SPECIALS, *letters])}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(list(SPECIALS))
    engine.save(str(folder / "tokenizer.json"))


def write_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values))


def ends_at(llm: LLM, token: int) -> bool:
    """Whether a completion ends when this token comes."""
    params = replace(GREEDY, logit_bias={token: 100.0}, include_stop_token=True)
    [output] = llm.generate([5, 6], params)
    assert output.token_ids[0] == token
    return output.finish_reason is FinishReason.STOP


def test_a_folder_brings_its_tokenizer_template_and_end_tokens(folder: Path) -> None:
    write_tokenizer(folder, NUM_ROWS)
    write_json(
        folder / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    write_json(folder / "generation_config.json", eos_token_id=[7, NUM_ROWS + 5])
    with LLM(folder, kv_memory="16MiB") as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(llm.tokenizer.encode("!")) == "!"
        assert llm.generate("!", GREEDY)[0].error is None
        assert llm.chat(QUESTION, GREEDY)[0].error is None
        assert ends_at(llm, 2)
        assert ends_at(llm, 7)
        assert not ends_at(llm, 8)
        # One that the model has no row for can never come, and is no trouble where it is banned.
        assert llm.generate([5], replace(GREEDY, min_tokens=3))[0].error is None


def test_a_template_is_found_wherever_a_folder_keeps_it(folder: Path) -> None:
    """The last one written counts; chat_template.json only where there is no other."""

    def found() -> str | None:
        with load_model(folder) as model:
            tokenizer = read_tokenizer(model)
            assert tokenizer is not None
            return tokenizer.chat_template

    write_tokenizer(folder, NUM_ROWS)
    assert found() is None
    write_json(folder / "chat_template.json", chat_template="of a processor")
    assert found() == "of a processor"
    write_json(folder / "tokenizer_config.json", chat_template="of the config")
    assert found() == "of the config"
    (folder / "chat_template.jinja").write_text("of a file")
    assert found() == "of a file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    assert found() == "{%+ if tools +%}for tools{%+ else +%}of a file{%+ endif %}"


def test_a_folder_without_a_tokenizer_ends_as_its_config_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", **(config | {"eos_token_id": 9}))
    with LLM(folder, kv_memory="16MiB") as llm:
        assert llm.tokenizer is None
        assert ends_at(llm, 9)
        assert not ends_at(llm, 10)
    write_json(folder / "generation_config.json", eos_token_id=[10])
    with LLM(folder, kv_memory="16MiB") as llm:
        assert ends_at(llm, 10)
        assert not ends_at(llm, 9)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    write_tokenizer(folder, NUM_ROWS)
    description = json.loads((folder / "tokenizer.json").read_text())
    description["model"]["vocab"]["too much"] = NUM_ROWS
    write_json(folder / "tokenizer.json", **description)
    with pytest.raises(ModelFileError, match=f"but the model's embedding has {NUM_ROWS} rows"):
        LLM(folder)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True])
def test_end_tokens_that_are_no_numbers_are_refused(folder: Path, value: object) -> None:
    write_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelFileError, match="eos_token_id must be an array of integers"):
        LLM(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_broken_config_beside_the_tokenizer_is_refused_by_name(folder: Path, name: str) -> None:
    write_tokenizer(folder, NUM_ROWS)
    (folder / name).write_text("{")
    with pytest.raises(ModelFileError, match=name):
        LLM(folder)
