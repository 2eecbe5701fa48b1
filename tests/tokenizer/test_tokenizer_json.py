"""Tokenizers of model folders: tokenizer.json as its own library reads it, and the configs."""

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.vocabularies import (
    Metadata,
    built,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_scores,
    smollm2,
    smollm2_golden,
    smollm2_metadata,
)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.core.errors import ModelFileError, QuireError, UnsupportedModelError
from quire.tokenizer import ChatTemplate, Tokenizer
from quire.tokenizer.bpe import merges_by_score

SCORES = sentencepiece_scores("abcdeé", seed=5, num_merges=120)
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}


def byte_level_folder(folder: Path, metadata: Metadata) -> Path:
    """What SmolLM2's own folder has: digits alone, then GPT-2's words."""
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({t: n for n, t in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return saved(backend, folder)


def sentencepiece_backend() -> Any:
    """What Llama 2's own folder has."""
    texts = sentencepiece_metadata(SCORES)["tokenizer.ggml.tokens"]
    model = models.BPE(
        {text: token for token, text in enumerate(texts)},
        merges_by_score(SCORES),
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    special = ["<unk>", "<s>", "</s>"]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return backend


def saved(backend: Any, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(sentencepiece_backend(), tmp_path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tests that run many times over."""
    return tmp_path_factory.mktemp("tokenizer")


def test_smollm2_from_its_tokenizer_json_passes_the_same_goldens(tmp_path: Path) -> None:
    path = byte_level_folder(tmp_path, smollm2_metadata())
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.from_file(path, config)
    for case in smollm2_golden()["texts"]:
        assert tokenizer.encode(case["text"]) == case["special"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["plain"]
        assert tokenizer.decode(case["special"], skip_special=False) == case["text"]
    assert tokenizer.eos_token_id == smollm2().eos_token_id
    assert tokenizer.vocabulary_size == smollm2().vocabulary_size
    assert tokenizer.end_token_ids == (0, 2)


@given(text=st.text(alphabet="abcdeé  \n😀<s>/", max_size=60))
@settings(max_examples=100)
def test_llama_2s_kind_of_folder_and_its_gguf_file_agree(scratch: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(saved(sentencepiece_backend(), scratch), CONFIG)
    from_gguf = built(sentencepiece_metadata(SCORES))
    for options in ({}, {"parse_special": False}, {"add_special": False}):
        tokens = tokenizer.encode(text, **options)
        assert tokens == from_gguf.encode(text, **options)
        assert tokenizer.decode(tokens) == from_gguf.decode(tokens)


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_pass_the_decoder(tmp_path: Path, special: bool) -> None:
    """Gemma adds runs of ▁, which are runs of spaces; merges make them, too."""
    backend = sentencepiece_backend()
    backend.add_tokens([AddedToken("▁▁", normalized=False, special=special)])
    path = saved(backend, tmp_path)
    tokenizer = Tokenizer.from_file(path, CONFIG)
    added = tokenizer.token_id("▁▁")
    assert added is not None
    a = tokenizer.token_id("a")
    assert a is not None
    expected = tokenizers.Tokenizer.from_file(str(path)).decode([a, added, a], False)
    assert tokenizer.decode([a, added, a], skip_special=False) == expected == "a  a"


def test_user_defined_runs_of_marks_in_a_gguf_file_are_spaces() -> None:
    metadata = sentencepiece_metadata(SCORES | {"▁▁": -500.0})
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = built(metadata)
    token = tokenizer.token_id("▁▁")
    assert token is not None
    assert tokenizer.token_bytes(token) == b"  "


def test_tokens_that_a_generation_config_names_end_a_generation(llama: Path) -> None:
    assert Tokenizer.from_file(llama, CONFIG).end_token_ids == (2,)
    assert Tokenizer.from_file(llama, CONFIG, {"eos_token_id": [2, 9]}).end_token_ids == (2, 9)
    assert Tokenizer.from_file(llama, CONFIG, {"eos_token_id": 7}).end_token_ids == (2, 7)
    assert Tokenizer.from_file(llama).end_token_ids == (2,)  # known by its text


@pytest.mark.parametrize(
    ("config", "prefix", "suffix"),
    [
        ({}, [1], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
    ],
)
def test_what_goes_around_a_text_is_as_the_file_has_it_unless_the_config_says(
    llama: Path, config: dict[str, bool], prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = Tokenizer.from_file(llama, {**CONFIG, **config})
    assert tokenizer.encode("") == prefix + suffix
    assert tokenizer.encode("a b") == [
        *prefix,
        *tokenizer.encode("a b", add_special=False),
        *suffix,
    ]


def test_the_chat_template_is_a_file_of_its_own_or_in_the_config(llama: Path) -> None:
    assert Tokenizer.from_file(llama).chat_template is None
    assert Tokenizer.from_file(llama, {"chat_template": "one"}).chat_template == "one"
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}]
    assert Tokenizer.from_file(llama, {"chat_template": named}).chat_template == "two"
    llama.with_name("chat_template.jinja").write_text("three")
    assert Tokenizer.from_file(llama, {"chat_template": "one"}).chat_template == "three"


def rendered(source: str | None, tools: list[dict[str, Any]] | None) -> str:
    assert source is not None
    template = ChatTemplate(source, "<s>")
    text = template.render([{"role": "user", "content": "hi"}], tools=tools).text
    template.close()
    return text


def test_a_template_for_tools_is_taken_for_requests_with_tools(llama: Path) -> None:
    """Where the two meet, each keeps its whitespace: as if it were alone."""
    usual = "\n  {%- for m in messages %}\n  {{ m.content }}\n{%- endfor %}\n  \n"
    for_tools = "\n{{ tools[0].function.name }} \n\n"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    named = [{"name": "default", "template": usual}, {"name": "tool_use", "template": for_tools}]
    in_config = Tokenizer.from_file(llama, {"chat_template": named}).chat_template
    assert in_config is not None and in_config != usual
    folder = llama.with_name("additional_chat_templates")
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(for_tools)
    assert Tokenizer.from_file(llama, {"chat_template": usual}).chat_template == usual
    llama.with_name("chat_template.jinja").write_text(usual)
    assert Tokenizer.from_file(llama).chat_template == in_config
    assert rendered(in_config, None) == rendered(usual, None)
    assert rendered(in_config, tools) == rendered(for_tools, tools) == "\nf \n"


def test_chance_padding_and_truncation_in_the_file_are_left_out(llama: Path) -> None:
    expected = Tokenizer.from_file(llama).encode("abcde " * 50)

    def change(description: dict[str, Any]) -> None:
        description["model"]["dropout"] = 0.5
        description["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        description["padding"] = {
            "strategy": {"Fixed": 99},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
        }

    assert Tokenizer.from_file(edited(llama, change)).encode("abcde " * 50) == expected


def test_tokens_that_take_whitespace_with_them_do_so_in_long_texts_too(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False, special=True)])
    tokenizer = Tokenizer.from_file(saved(backend, tmp_path))
    mask = tokenizer.token_id("<mask>")
    tokens = tokenizer.encode("a" + " " * 20_000 + "<mask>", add_special=False)
    assert tokens == [*tokenizer.encode("a", add_special=False), mask]


def test_the_config_may_name_only_tokens_that_are_there(llama: Path) -> None:
    with pytest.raises(ModelFileError, match="eos_token '<end>' is not a token"):
        Tokenizer.from_file(llama, {"eos_token": "<end>"})
    with pytest.raises(ModelFileError, match=r"generation_config.*'x'"):
        Tokenizer.from_file(llama, CONFIG, {"eos_token_id": ["x"]})
    assert Tokenizer.from_file(llama, {"pad_token": "<none>"}).padding_token_id is None


def test_a_pattern_that_is_not_known_is_refused_because_it_might_never_end(llama: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}

    with pytest.raises(UnsupportedModelError, match=r"\(a\+\)\+\$"):
        Tokenizer.from_file(edited(llama, change))


def test_the_patterns_of_known_models_are_accepted(tmp_path: Path) -> None:
    metadata = byte_level_metadata([], "qwen2")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ids = {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = tokenizers.Tokenizer(models.BPE(ids, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_file(saved(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301 12")) == "caf\u00e9 12"


def test_a_decoder_of_another_kind_is_refused_by_name(llama: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}

    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_file(edited(llama, change))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "does not hold sound JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", r"tokenizer\.json"),
        ("[" * 100_000, "does not hold sound JSON"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', r"tokenizer\.json"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error_that_names_it(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        Tokenizer.from_file(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot read tokenizer\.json: No such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


_EVIL = {"Regex": "(a+)+$"}
_EVIL_SPLIT = {"type": "Split", "pattern": _EVIL, "behavior": "Isolated", "invert": False}
_EVIL_REPLACE = {"type": "Replace", "pattern": _EVIL, "content": ""}


@pytest.mark.parametrize(
    ("key", "component"),
    [
        ("pre_tokenizer", _EVIL_SPLIT),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [_EVIL_SPLIT]}),
        (
            "pre_tokenizer",
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Sequence", "pretokenizers": [_EVIL_SPLIT]}],
            },
        ),
        ("pre_tokenizer", _EVIL_SPLIT | {"pretokenizers": []}),
        ("normalizer", _EVIL_REPLACE | {"normalizers": []}),
        ("decoder", {"type": "Sequence", "decoders": [_EVIL_REPLACE, {"type": "ByteLevel"}]}),
    ],
)
def test_a_pattern_is_refused_wherever_it_stands(
    llama: Path, key: str, component: dict[str, Any]
) -> None:
    path = edited(llama, lambda description: description.update({key: component}))
    with pytest.raises(UnsupportedModelError, match=r"a pattern that is not supported: '\(a\+\)"):
        Tokenizer.from_file(path)


def _replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def _precompiled(*texts: bytes) -> dict[str, Any]:
    content = struct.pack("<I", 4) + bytes(4) + b"".join(text + b"\0" for text in texts)
    charsmap = base64.b64encode(content).decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (_replace("x" * 257), 257),
        ({"type": "Prepend", "prepend": "x" * 300}, 300),
        ({"type": "Sequence", "normalizers": [_replace("x" * 20)] * 2}, 400),
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Sequence", "normalizers": [_replace("xx")]}] * 9,
            },
            512,
        ),
        (_precompiled(b"y" * 1000, b"z" * 30), 1000),
    ],
)
def test_a_normalizer_that_makes_long_texts_of_short_ones_is_refused(
    llama: Path, normalizer: dict[str, Any], growth: int
) -> None:
    path = edited(llama, lambda description: description.update(normalizer=normalizer))
    with pytest.raises(UnsupportedModelError, match=f"makes up to {growth} characters of one"):
        Tokenizer.from_file(path)


def test_a_precompiled_map_of_short_texts_is_borne(llama: Path) -> None:
    texts = [str(number).encode() for number in range(200)]
    change = {"normalizer": _precompiled(*texts)}
    path = edited(llama, lambda description: description.update(change))
    try:
        Tokenizer.from_file(path)
    except UnsupportedModelError as error:
        pytest.fail(str(error))
    except ModelFileError as error:
        assert "describes no tokenizer" in str(error)  # the library looks at the table


def test_a_token_without_end_is_refused(llama: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        vocabulary = description["model"]["vocab"]
        vocabulary["z" * 5000] = len(vocabulary)

    with pytest.raises(ModelFileError, match=r"a token of 5000 characters \('z+'...\); the limit"):
        Tokenizer.from_file(edited(llama, change))


@pytest.mark.parametrize(
    ("templates", "found"),
    [
        ([{"name": []}], None),
        ([{"name": {}, "template": "x"}, 5, None], None),
        ([{"name": "default", "template": "x"}], "x"),
        ([{"name": "default"}], None),
    ],
)
def test_templates_under_odd_names_are_passed_over(
    llama: Path, templates: list[Any], found: str | None
) -> None:
    assert Tokenizer.from_file(llama, {"chat_template": templates}).chat_template == found


def test_a_key_that_stands_twice_is_refused(llama: Path) -> None:
    """The library might take the one that was not looked at."""
    text = llama.read_text()
    llama.write_text(text.replace('"normalizer":', '"normalizer": null, "normalizer":', 1))
    with pytest.raises(ModelFileError, match="an object has a key twice"):
        Tokenizer.from_file(llama)


def test_an_id_far_beyond_the_others_is_refused_before_it_takes_memory(llama: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description["model"]["vocab"]["far"] = 4_000_000_000

    with pytest.raises(ModelFileError, match="id 4000000000"):
        Tokenizer.from_file(edited(llama, change))


def test_a_library_that_cannot_encode_is_a_typed_error(llama: Path) -> None:
    def change(description: dict[str, Any]) -> None:
        description["model"]["unk_token"] = "nowhere"
        description["model"]["byte_fallback"] = False

    tokenizer = Tokenizer.from_file(edited(llama, change))
    with pytest.raises(ModelFileError, match=r"cannot encode.*nowhere"):
        tokenizer.encode("😀")


@given(data=st.data())
@settings(max_examples=150)
def test_random_damage_gives_a_typed_error_or_a_tokenizer_that_works(
    scratch: Path, data: st.DataObject
) -> None:
    description = json.loads(sentencepiece_backend().to_str())
    places = list(_places(description))
    for _ in range(data.draw(st.integers(1, 3))):
        parent, key = data.draw(st.sampled_from(places))
        parent[key] = data.draw(
            st.one_of(
                st.none(), st.booleans(), st.integers(-2, 2**33), st.text(max_size=3), st.just([])
            )
        )
    path = scratch / "damaged.json"
    path.write_text(json.dumps(description))
    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.decode(tokenizer.encode("ab <s>😀"))
    except QuireError:
        pass


def _places(value: Any) -> Any:
    """Every place in a description that a value stands in, of long lists only the beginning."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items)[:12]:
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def test_a_unigram_vocabulary_with_a_normalizer_is_the_librarys() -> None:
    """As converters write SentencePiece's unigram models: runs of spaces become one."""
    letters = [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz12fi."]
    pieces = [("<unk>", 0.0), *dict(letters).items(), ("▁the", -2.0), ("ab", -3.0), ("▁a", -3.5)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.from_json(backend.to_str().encode(), {"unk_token": "<unk>"})
    for text in ("the   ab", " a  b ", "ﬁne ①.", "日 x", "", "a\nb", "x" + " " * 3000 + "y"):
        expected = backend.encode(text).ids
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == backend.decode(expected)
