"""Pre-tokenizers against the `tokenizers` library, set up as the models' tokenizer.json are."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokenizer.test_byte_level import CHARACTERS, merges, tokenizer_of
from tests.tokenizer.vocabularies import SPECIALS
from tokenizers import Regex, pre_tokenizers

from quire.core.errors import UnsupportedModelError
from quire.tokenizer import Tokenizer
from quire.tokenizer.bpe import PRE_TOKENIZERS
from quire.tokenizer.detokenizer import BYTE_ALPHABET

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{CONTRACTIONS}?|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_K2 = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return kind | {"use_regex": use_regex}


def digits(*, individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


LETTERS = byte_level(use_regex=False)
OFFICIAL: dict[str, list[dict[str, Any]]] = {
    "glm4": [split(LLAMA_3), LETTERS],
    "chatglm-bpe": [split(LLAMA_3), LETTERS],
    "mellum2": [digits(individual=True), byte_level(use_regex=True)],
    "talkie": [split(GPT_4O.replace("DIGITS", "{1,3}")), LETTERS],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(use_regex=True),
        digits(individual=False),
        split("[0-9][0-9][0-9]"),
    ],
    "superbpe": [split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), LETTERS],
    "bloom": [split(BLOOM), LETTERS],
    "poro-chat": [split(BLOOM), LETTERS],
    "gpt3-finnish": [split(BLOOM), LETTERS],
    "viking": [split(BLOOM), digits(individual=True), LETTERS],
    "kimi-k2": [split(KIMI_K2), LETTERS],
    "youtu": [
        split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"),
        split(GPT_4O.replace("DIGITS", "")),
        LETTERS,
    ],
    "exaone-moe": [
        split(
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ],
    "bailingmoe": [
        split(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        LETTERS,
    ],
    "chameleon": [
        split("<sentinel:[0-9]+>"),
        split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        split(r"([\t\n]|    |  )"),
        digits(individual=True),
        {"type": "Punctuation", "behavior": "Isolated"},
        byte_level(use_regex=True),
    ],
    "deepseek-llm": [
        split("[\r\n]"),
        split(r"\s?[A-Za-zÀ-ÖØ-öø-ƺͰ-ͳА-я]+"),  # the letters of these texts alone
        split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(r"\s+$"),
        split("[一-龥ࠀ-一가-퟿]+"),
        digits(individual=True),
        LETTERS,
    ],
}
OFFICIAL["bailingmoe2"] = OFFICIAL["bailingmoe"]
OFFICIAL["tiny_aya"] = [
    split(r"\d{1,3}(?=(?:\d{3})*\b)"),
    split(GPT_4O.replace("DIGITS", "{1,3}")),
    LETTERS,
]
OFFICIAL["afmoe"] = [
    split(r"\p{N}+"),
    split(r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)"),
    split(r"\p{N}{3}"),
    split(
        "[一-鿿㐀-䶿豈-\ufaff\u3040-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
    ),
    split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    LETTERS,
]
OFFICIAL["laguna"] = [split(r"[^\n]+|[\n]+"), split(LLAMA_3.replace("{1,3}", "")), LETTERS]
OFFICIAL["jais-2"] = [
    split(
        LLAMA_3.removesuffix(r"|\s+(?!\S)|\s+")
        + r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
        r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ),
    LETTERS,
]

TEXTS = [
    CHARACTERS,
    "It's 12345 o'clock,\r\n\n  they'LL say: «NO» 1234567 12 1 123456 … x=1,234,567.89",
    "你好，世界！今天是2024年。안녕하세요 세계 ㄅㄆㄇ こんにちは、カタカナ 漢字かな交じり文",
    "नमस्ते दुनिया। यह १२३४ है สวัสดีชาวโลก ๑๒๓ مرحبا، بالعالم۔ ١٢٣٤٥ שלום",
    "Привет, мир! Це 12½ та ¼ ²³ Ⅷ②",
    "👩‍👩‍👧 🙂🙂 e\u0301a\u0308 naïve cafe\u0301 \u200bzero\u200dwidth\ufeff",
    "def f(x):\n        return {'a': x**2, \"b\": [1, 2]}  # camelCase HTTPServer snake_case\n\n\n",
    "a  b   c    d     e      f\t\tg \t h\u00a0\u00a0i \u3000 j   \n   \n k   ",
    "\n\n\n   \n\r\n\r\n x\n\n\n",
    "<sentinel:12> IMGIMGABCZ fooIMGIMGDZbar <image> ((a|b)) .,.,!? ...\n//\n/path/to//x\n",
    "a b c d e f g hello big world 'S 'RE 'LL ſ's",
]


def library(steps: list[dict[str, Any]], *, ignore_merges: bool) -> Any:
    """The library's tokenizer over the same vocabulary as `tokenizer_of`."""
    texts = [*SPECIALS, *BYTE_ALPHABET, *(left + right for left, right in merges())]
    model = {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(texts)},
        "merges": [list(pair) for pair in merges()],
        "ignore_merges": ignore_merges,
    }
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    return tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": pre_tokenizer})
    )


@pytest.mark.parametrize("pre", OFFICIAL)
def test_a_pre_tokenizer_splits_as_the_models_own(pre: str) -> None:
    wanted = library(OFFICIAL[pre], ignore_merges=pre == "youtu")
    tokenizer = tokenizer_of(pre)
    for text in TEXTS:
        expected = wanted.encode(text).ids
        if not (pre == "deepseek-llm" and text == CHARACTERS):
            assert tokenizer.encode(text, add_special=False) == expected, text


FASTER = {name: kind for name, kind in PRE_TOKENIZERS.items() if kind.fast}
# Where the patterns of these kinds meet: spaces of all kinds, digits that are none, letters that
# are signs too.
CRITICAL = "  \u3000\u2003\t\n\r\x85\u1680!'，。_aZéΩＡ中あ가Ḁ\u0301s123456१२²½"


@pytest.mark.parametrize("pre", FASTER)
@given(text=st.text(alphabet=CRITICAL, max_size=40) | st.text(alphabet="1234 a½१", max_size=40))
@settings(max_examples=400)
def test_faster_patterns_make_the_same_words(pre: str, text: str) -> None:
    kind = FASTER[pre]
    assert words(kind.fast, text) == words(kind.patterns, text)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 100, 513, 700, 1537])
@pytest.mark.parametrize("around", ["a{}b", "{}", "a{}\nb", "\n{}1", "!\n\n{}\t\n{}x"])
def test_long_runs_of_spaces_are_cut_in_powers_of_two(length: int, around: str) -> None:
    kind = PRE_TOKENIZERS["jais-2"]
    text = around.format(" " * length, "\t" * length)
    assert words(kind.fast, text) == words(kind.patterns, text)


@cache
def splitter(patterns: tuple[str, ...]) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    )


def words(patterns: tuple[str, ...], text: str) -> list[tuple[str, tuple[int, int]]]:
    found: list[tuple[str, tuple[int, int]]] = splitter(patterns).pre_tokenize_str(text)
    return found


def num_passes(patterns: tuple[str, ...], text: str) -> int:
    """How many words are looked at, in all passes together."""
    return sum(len(words(patterns[:count], text)) for count in range(len(patterns)))


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder"])
def test_every_newline_is_looked_at_by_few_patterns(pre: str) -> None:
    """Each is a word: what a pattern costs, it costs for each of a megabyte of them."""
    kind, text = PRE_TOKENIZERS[pre], "\n" * 1000
    assert num_passes(kind.patterns, text) > 4 * len(text)
    assert num_passes(kind.splits, text) <= 2 * len(text) + 1


def described(pre: str, steps: list[dict[str, Any]], folder: Path) -> Path:
    wanted = json.loads(library(steps, ignore_merges=False).to_str())
    wanted["decoder"] = byte_level(use_regex=True)
    path = folder / f"{pre}.json"
    path.write_text(json.dumps(wanted))
    return path


@pytest.mark.parametrize("pre", ["deepseek-llm", "superbpe", "tiny_aya", "jais-2", "laguna"])
def test_a_tokenizer_json_with_the_patterns_of_a_known_model_is_read(
    pre: str, tmp_path: Path
) -> None:
    steps = list(OFFICIAL[pre])
    if pre == "deepseek-llm":
        steps[1] = split(PRE_TOKENIZERS[pre].patterns[1])  # with the letters of all scripts
    tokenizer = Tokenizer.from_file(described(pre, steps, tmp_path))
    wanted = library(steps, ignore_merges=False)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == wanted.encode(text).ids, text
    assert tokenizer._spec.encoder.in_windows == PRE_TOKENIZERS[pre].in_windows


@pytest.mark.parametrize("pattern", [r"\s+$", r"(?=(\d{3})+(?!\d))"])
def test_a_pattern_that_is_slow_alone_is_refused_elsewhere(pattern: str, tmp_path: Path) -> None:
    path = described("slow", [split(pattern), LETTERS], tmp_path)
    with pytest.raises(UnsupportedModelError, match="a pattern that is not supported"):
        Tokenizer.from_file(path)
