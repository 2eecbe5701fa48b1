"""Byte-pair encoding in the forms that model files use, built on the `tokenizers` library.

Byte-level, as GPT-2 began it: bytes as letters, merged in a learnt order. SentencePiece: of all
neighbours that form a token, the best-scored merge first; or, as Gemma 4's files have it, text in
SentencePiece's letters, merged in a learnt order. The library merges pairs in the order of
a list, so the scores become such a list. Of equal scores SentencePiece merges the leftmost pair,
the library the pair that comes first in the list; as trained scores are all different, that matters
only where a token can be put together in two ways from the same few letters, as "aaa" from "a" and
"aa".

Before byte-level merging, text is split into words by a pre-tokenizer. Their names and meaning are
those of `tokenizer.ggml.pre` in GGUF files. Patterns are the ones of the models' own tokenizers, of
which llama.cpp's are an approximation for some letters outside ASCII. Each is applied to the words
that the one before it made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.tokenizer.detokenizer import SPACE_MARK
from quire.tokenizer.vocabulary import PREFIX, TokenKind, Vocabulary

# ---- pre-tokenizers


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
NEWLINES = r"[\r\n]"  # each a word
SPACES_IN_A_LINE = (
    "\t\x0b\x0c\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007"
    "\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str = "", without: str = "") -> str:
    """Splits where upper case begins anew: camel|Case. `without`: a script whose letters are none
    of them."""
    other = rf"&&[^\p{{{without}}}]]" if without else "]"
    upper, lower = (letters.removesuffix("]") + other for letters in (_UPPER, _LOWER))
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
    )


def _words_like_llama(digits: str, letter: str = r"\p{L}", also_letter: str = "") -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}"
        rf"| ?[^\s\p{{L}}{also_letter}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = _words_like_llama(r"\p{N}{1,3}")
QWEN_2 = _words_like_llama(r"\p{N}")
QWEN_35 = _words_like_llama(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}")
TEKKEN = _cased_words() + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
GPT_4O = (
    _cased_words(f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
DEEPSEEK_3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}"
)
# Letters of the scripts that have case, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_OR_NUMBER = rf"\p{{N}}|[{_CJK[1:-2]}&&[^\p{{N}}]]+"  # as one after the other
_CJK_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATION = r"\p{P}\$\+<=>\^~\|"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
KIMI_K2 = rf"\p{{Han}}+|{_cased_words(f'{_CONTRACTIONS}?', without='Han')}" + (
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
YOUTU = _cased_words(f"{_CONTRACTIONS}?") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Runs of spaces in powers of two.
_CASCADE = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
JAIS_2 = LLAMA_3.replace(r"\s+(?!\S)|\s+", rf"{_CASCADE}|\s{{1}}")
# After a space that is no newline, no newline follows in its run: the pattern tried that there.
_JAIS_2_FAST = JAIS_2.replace(r"\s*[\r\n]+", r"(?<![^\S\r\n])\s*[\r\n]+")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one kind of byte-level vocabulary treats text before it merges.

    `patterns` are those of the models' tokenizer.json. Where one of them takes quadratic time on
    some text, or many of them make many passes over each word, `fast` ones make the same words.
    """

    patterns: tuple[str, ...]
    fast: tuple[str, ...] = ()
    ignore_merges: bool = False  # a word that is a token as a whole is never built by merging
    add_bos: bool = False  # unless the file says
    letter_patterns: tuple[str, ...] = ()  # applied after them, to bytes written as letters
    in_windows: bool = True  # false: a word may depend on text at any distance after it
    run_characters: str | None = None  # whitespace whose splitting depends on how long it is

    @property
    def splits(self) -> tuple[str, ...]:
        """The patterns that are applied."""
        return self.fast or self.patterns


_SCRIPTS_WITHOUT_SPACES = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_LLAMA_3 = PreTokenizer((LLAMA_3,), ignore_merges=True, add_bos=True)
_LLAMA_3_MERGED = PreTokenizer((LLAMA_3,))
_SMOLLM = PreTokenizer((r"\p{N}", GPT_2))
_GPT_2 = PreTokenizer((GPT_2,))
_QWEN_2 = PreTokenizer((QWEN_2,))
_GPT_4O = PreTokenizer((GPT_4O,))
_BLOOM = PreTokenizer((BLOOM,))
_BAILING = PreTokenizer((BAILING,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((f"[{_PUNCTUATION}]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA_3,
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA_3_MERGED),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _SMOLLM,
    ),
    "mellum2": _SMOLLM,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4"),
        _GPT_2,
    ),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT_2),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"),
        _QWEN_2,
    ),
    **dict.fromkeys(("kormo", "f2llmv2"), _QWEN_2),
    "qwen35": PreTokenizer((QWEN_35,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT_4O),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words_like_llama(r"\p{N}+")), ignore_merges=True),
    "deepseek-llm": PreTokenizer(
        (
            NEWLINES,
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?[{_SIGNS}]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        ),
        # Signs hold some of the letters, and a wide space: which of them begin a word and which end
        # one is as if the patterns were applied one after the other.
        fast=(
            rf"{NEWLINES}|\s?[{_CASED_LETTERS}&&[{_SIGNS}]]+"
            rf"|[\s&&[^\u3000]]?[{_CASED_LETTERS}&&[^{_SIGNS}]]+"
            rf"|\u3000(?=[{_CASED_LETTERS}&&[^{_SIGNS}]])"
            rf"|\s?(?:[{_SIGNS}&&[^{_CASED_LETTERS}\u3000]]|\u3000(?![{_CASED_LETTERS}]))+",
            r"(?<!\s)\s+$",
            _CJK_OR_NUMBER,
        ),
        run_characters=SPACES_IN_A_LINE,
    ),
    "deepseek-coder": PreTokenizer(
        (NEWLINES, r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
        fast=(rf"{NEWLINES}|\s?\p{{L}}+|\s?\p{{P}}+", _CJK_OR_NUMBER),
        run_characters=SPACES_IN_A_LINE,
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        PreTokenizer((r"\p{N}{1,3}", _CJK_AND_KANA, DEEPSEEK_3)),
    ),
    "falcon": PreTokenizer(
        (f"[{_PUNCTUATION}`]+", GPT_2), letter_patterns=(r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "kimi-k2": PreTokenizer((KIMI_K2,)),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_CJK_AND_KANA}",
            YOUTU,
        ),
        ignore_merges=True,
    ),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "chameleon": PreTokenizer(
        (
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            rf"[{_PUNCTUATION}`]",
            GPT_2,
        ),
        add_bos=True,
        run_characters="",
    ),
    "superbpe": PreTokenizer(  # digits in threes from the right
        (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
        fast=(
            r"\p{N}+",
            r"(?<=\A|\D|\A\d|\D\d|\A\d\d|\D\d\d)(?=(?:\d{3})++(?!\d))",
            r"\d{3}(?=\d)",
        ),
        in_windows=False,
    ),
    "afmoe": PreTokenizer(  # Trinity's: digits in threes from the right
        (
            r"\p{N}+",
            r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)",
            r"\p{N}{3}",
            _SCRIPTS_WITHOUT_SPACES,
            DEEPSEEK_3,
        ),
        in_windows=False,
    ),
    # Numbers that end at a word's end in threes from the right, others from the left.
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        PreTokenizer(
            (r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O),
            fast=(
                r"(?<!\d)\d++\b",
                rf"\A\d++\z|{GPT_4O}",
                r"\A\d{1,2}(?=(?:\d{3})+\z)",
                r"\d{3}",
            ),
            in_windows=False,
        ),
    ),
    "jais-2": PreTokenizer((JAIS_2,), fast=(_JAIS_2_FAST,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN_2)),
}

_SLOW = {r"\s+$", r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", JAIS_2}
# Patterns that any tokenizer.json may have.
_SPACE_RUNS = " {2,}"  # which converted SentencePiece models make one space of
_BLOOM_IN_JSON = r" ?[^(\s|[.,!?…。，、।۔،])]+"
KNOWN_PATTERNS = {_BLOOM_IN_JSON, _SPACE_RUNS}.union(
    pattern
    for kind in PRE_TOKENIZERS.values()
    for pattern in (*kind.patterns, *kind.letter_patterns)
    if pattern not in _SLOW
)


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that a file names; one of a kind that is not in the table is refused."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


# ---- merging


def byte_level_backend(
    ids: Mapping[str, int], merges: Sequence[tuple[str, str]], kind: PreTokenizer
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens.

    Some vocabularies lack bytes that their training never saw. Such a byte has no token, yet its
    neighbours must not merge across it, so it gets a placeholder: the id after the last.
    """
    placeholder = "\0"  # in no token: the byte alphabet is printable
    while placeholder in ids:
        placeholder += "\0"
    model = models.BPE(
        {**ids, placeholder: len(ids)},
        list(merges),
        ignore_merges=kind.ignore_merges,
        unk_token=placeholder,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = word_splitter(kind)
    return backend


def word_splitter(kind: PreTokenizer) -> Any:
    """Splits text into words, and writes their bytes as letters."""
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(
        [*_splits(kind.splits), to_letters, *_splits(kind.letter_patterns)]
    )


def _splits(patterns: Iterable[str]) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


_MAX_MERGED_LENGTH = 1024  # characters: the work to find a token's merges grows with its square
_NEVER_MERGED = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.BYTE)
WORDS = f"{SPACE_MARK}+[^{SPACE_MARK}]*|[^{SPACE_MARK}]+"


def sentencepiece_backend(
    vocabulary: Vocabulary, scores: Sequence[float], unknown: int | None, add_space_prefix: bool
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens."""
    mergeable = {
        text: scores[token]
        for token, text in enumerate(vocabulary.texts)
        if vocabulary.kinds[token] not in _NEVER_MERGED
    }
    model = models.BPE(
        dict(vocabulary.ids),
        merges_by_score(mergeable),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    to_marks = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, to_marks])
    if splits_at_spaces(mergeable):
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return backend


def marked_backend(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], unknown: int | None
) -> Any:
    """A tokenizer of the `tokenizers` library, without special tokens, that merges text in
    SentencePiece's letters by a list. Nothing is split but where no token reaches across."""
    model = models.BPE(
        dict(vocabulary.ids),
        list(merges),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    made = [left + right for left, right in merges]
    patterns = [WORDS] if splits_at_spaces(made) else []
    if not any("\n" in text and text.strip("\n") for text in made):
        patterns.append(r"\n+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(patterns))
    return backend


def merges_by_score(mergeable: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored tokens first."""
    merges: list[tuple[str, str]] = []
    for text in sorted(mergeable, key=lambda text: -mergeable[text]):
        if len(text) > _MAX_MERGED_LENGTH:
            raise ModelFileError(
                f"{PREFIX}tokens holds a token of {len(text)} characters that text can be merged "
                f"to; the limit is {_MAX_MERGED_LENGTH}"
            )
        pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        merges += [pair for pair in pairs if pair[0] in mergeable and pair[1] in mergeable]
    return merges


def splits_at_spaces(texts: Iterable[str]) -> bool:
    """Whether no token reaches from one word into the next, so that words can be merged alone."""
    return not any(SPACE_MARK in text.lstrip(SPACE_MARK) for text in texts)
