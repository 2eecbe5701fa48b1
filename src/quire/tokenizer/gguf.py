"""Building a tokenizer from a GGUF file's metadata, and the metadata of a tokenizer.json."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.tokenizer.bpe import (
    PRE_TOKENIZERS,
    byte_level_backend,
    marked_backend,
    pre_tokenizer,
    sentencepiece_backend,
)
from quire.tokenizer.control_tokens import ControlTokens
from quire.tokenizer.detokenizer import (
    PieceBytes,
    byte_level_bytes,
    byte_token_value,
    sentencepiece_bytes,
)
from quire.tokenizer.fill_in import MIDDLE_END_NAMES, FillIn, find_fill_in
from quire.tokenizer.text_encoder import WINDOW, TextEncoder, encode_text, library_errors
from quire.tokenizer.tokenizer_json import (
    Config,
    parse,
    spec_from_json,
    splitting_patterns,
    steps,
    with_tool_template,
)
from quire.tokenizer.vocabulary import (
    CONTROL_NAMES,
    PREFIX,
    SpecialTokens,
    TokenizerSpec,
    TokenKind,
    Vocabulary,
    check_merges,
    end_token_ids,
    read_flag,
    read_merges,
    read_scores,
    read_text,
    read_token_id,
    read_vocabulary,
)

_NO_VOCABULARY = ("none", "no_vocab")
_MARKED = ("gemma4", "sarvam-moe")  # pre-tokenizers that mean text in SentencePiece's letters
# Marks of fill-in-the-middle: before the text before, the text after and the middle.
_FILL_IN_FIELDS = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)
_WITHOUT_TEXT = (TokenKind.UNUSED, TokenKind.UNDEFINED)


class _Family(NamedTuple):
    """What a kind of vocabulary (byte-level or SentencePiece) decides."""

    backend: Any  # tokenizers.Tokenizer without special tokens
    piece_bytes: PieceBytes
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    strip_space: bool
    in_windows: bool = True  # as in TextEncoder
    run_characters: str | None = None


def spec_from_gguf(metadata: Mapping[str, object]) -> TokenizerSpec | None:
    """The tokenizer that a GGUF file describes; None where it has no vocabulary."""
    model = read_text(metadata, f"{PREFIX}model", None)
    if model is None or model in _NO_VOCABULARY:
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _marked}
    if model not in builders:
        raise UnsupportedModelError(
            f"tokenizer {model!r} ({PREFIX}model) is not supported; supported: "
            f"{', '.join(builders)}, and {' or '.join(_NO_VOCABULARY)} for token ids alone"
        )
    if model == "gpt2" and read_text(metadata, f"{PREFIX}pre", None) in _MARKED:
        model = "gemma4"
    vocabulary = read_vocabulary(metadata)
    return _assemble(metadata, vocabulary, builders[model](metadata, vocabulary))


# Tokens of Llama 3's vocabulary. microsoft/BitNet's converter takes it and does not say how it is
# split: bitnet.cpp then splits as GPT-2 does, and differs from the tokenizer of the training.
_LLAMA_3 = {"<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"}


def _byte_level(metadata: Mapping[str, object], vocabulary: Vocabulary) -> _Family:
    named = read_text(metadata, f"{PREFIX}pre", None)
    kind = pre_tokenizer(named or ("llama-bpe" if vocabulary.ids.keys() >= _LLAMA_3 else "default"))
    merges = read_merges(metadata)
    try:
        with library_errors(f"{PREFIX}merges cannot be used"):
            backend = byte_level_backend(vocabulary.ids, merges, kind)
    except ModelFileError:
        check_merges(merges, vocabulary.ids)  # its error says more than the library's
        raise
    return _Family(
        backend,
        byte_level_bytes,
        bos=None,
        eos=None,
        unknown=_lenient_token_id(metadata, "unknown_token_id", len(vocabulary.texts)),
        add_bos=kind.add_bos,
        strip_space=False,
        in_windows=kind.in_windows,
        run_characters=kind.run_characters,
    )


def _marked(metadata: Mapping[str, object], vocabulary: Vocabulary) -> _Family:
    """Gemma 4's: SentencePiece's letters, merged by a list."""
    unknown = _lenient_token_id(metadata, "unknown_token_id", len(vocabulary.texts))
    merges = read_merges(metadata)
    try:
        with library_errors(f"{PREFIX}merges cannot be used"):
            backend = marked_backend(vocabulary, merges, unknown)
    except ModelFileError:
        check_merges(merges, vocabulary.ids)  # its error says more than the library's
        raise
    return _Family(
        backend,
        sentencepiece_bytes,
        bos=None,
        eos=None,
        unknown=unknown,
        add_bos=False,
        strip_space=False,
    )


def _sentencepiece(metadata: Mapping[str, object], vocabulary: Vocabulary) -> _Family:
    scores = read_scores(metadata, len(vocabulary.texts))
    add_space_prefix = read_flag(metadata, "add_space_prefix", True)
    in_range = range(len(vocabulary.texts))
    bos, eos, unknown = (token if token in in_range else None for token in (1, 2, 0))
    named = _lenient_token_id(metadata, "unknown_token_id", len(vocabulary.texts))
    unknown = unknown if named is None else named
    backend = sentencepiece_backend(vocabulary, scores, unknown, add_space_prefix)
    return _Family(
        backend,
        sentencepiece_bytes,
        bos=bos,
        eos=eos,
        unknown=unknown,
        add_bos=True,
        strip_space=add_space_prefix,
    )


def _assemble(
    metadata: Mapping[str, object], vocabulary: Vocabulary, family: _Family
) -> TokenizerSpec:
    special = _special_tokens(metadata, vocabulary, family)
    add_bos = read_flag(metadata, "add_bos_token", family.add_bos)
    add_eos = read_flag(metadata, "add_eos_token", False)
    control = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    user_defined = vocabulary.of_kind(TokenKind.USER_DEFINED)
    encoder = _text_encoder(family, vocabulary, control, user_defined)
    literal = partial(_text_encoder, family, vocabulary, [], user_defined)
    controls = {token: vocabulary.texts[token] for token in control}
    return TokenizerSpec(
        encoder=encoder,
        control=ControlTokens(encoder, controls, literal, family.unknown),
        texts=vocabulary.texts,
        ids=vocabulary.ids,
        piece_bytes=_piece_bytes(vocabulary, family.piece_bytes),
        hidden=frozenset(control).union(special.ends),
        special=special,
        prefix=(special.bos,) if add_bos and special.bos is not None else (),
        suffix=(special.eos,) if add_eos and special.eos is not None else (),
        strip_space=family.strip_space,
        fill_in=_fill_in(metadata, vocabulary),
        chat_template=with_tool_template(
            read_text(metadata, "tokenizer.chat_template", None),
            read_text(metadata, "tokenizer.chat_template.tool_use", None),
        ),
    )


def _special_tokens(
    metadata: Mapping[str, object], vocabulary: Vocabulary, family: _Family
) -> SpecialTokens:
    count = len(vocabulary.texts)
    bos, eos, turn, message = (
        read_token_id(metadata, f"{name}_token_id", count) for name in ("bos", "eos", "eot", "eom")
    )
    eos = family.eos if eos is None else eos
    ends = [eos, turn, message]
    for field, names in MIDDLE_END_NAMES.items():
        named = _lenient_token_id(metadata, field, count)
        ends += [named] if named is not None else [vocabulary.ids.get(name) for name in names]
    return SpecialTokens(
        bos=family.bos if bos is None else bos,
        eos=eos,
        unknown=family.unknown,
        padding=_lenient_token_id(metadata, "padding_token_id", count),
        ends=end_token_ids(ends, vocabulary.ids),
    )


def _fill_in(metadata: Mapping[str, object], vocabulary: Vocabulary) -> FillIn | None:
    """By the ids that the file names, in today's names or those of before, else by the texts."""
    count = len(vocabulary.texts)
    named = []
    for today, older in _FILL_IN_FIELDS:
        token = _lenient_token_id(metadata, today, count)
        named.append(_lenient_token_id(metadata, older, count) if token is None else token)
    return find_fill_in(vocabulary.ids, named)


def _lenient_token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    """An optional token id; None where it is missing or out of range."""
    try:
        return read_token_id(metadata, name, count)
    except ModelFileError:
        return None


def _text_encoder(
    family: _Family, vocabulary: Vocabulary, control: list[int], user_defined: list[int]
) -> TextEncoder:
    """A tokenizer that shares the family's merges and finds these tokens in text first."""
    backend = family.backend
    own = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        own.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        own.pre_tokenizer = backend.pre_tokenizer
    texts = [vocabulary.texts[token] for token in control]
    own.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    more = [vocabulary.texts[token] for token in user_defined]
    own.add_tokens([AddedToken(text, normalized=False, special=False) for text in more])
    return TextEncoder(
        own,
        longest_special=max(map(len, texts + more), default=0),
        longest_token=max(map(len, vocabulary.texts)),
        placeholder=len(vocabulary.texts),
        in_windows=family.in_windows,
        run_characters=family.run_characters,
    )


def _piece_bytes(vocabulary: Vocabulary, of_normal: PieceBytes) -> Callable[[int], bytes]:
    values = _byte_values(vocabulary)
    is_spaced = of_normal is sentencepiece_bytes  # Gemma's user-defined ▁▁ is two spaces

    def piece_bytes(token: int) -> bytes:
        kind = vocabulary.kinds[token]
        if kind is TokenKind.NORMAL or (is_spaced and kind is TokenKind.USER_DEFINED):
            return of_normal(vocabulary.texts[token])
        if kind is TokenKind.BYTE:
            return values[token]
        if kind in _WITHOUT_TEXT:
            return b""
        return vocabulary.texts[token].encode()

    return piece_bytes


def _byte_values(vocabulary: Vocabulary) -> dict[int, bytes]:
    values = {}
    for token in vocabulary.of_kind(TokenKind.BYTE):
        value = byte_token_value(vocabulary.texts[token])
        if value is None:
            raise ModelFileError(
                f"{PREFIX}tokens[{token}] is {vocabulary.texts[token]!r}, which the file calls a "
                "byte token; byte tokens are written <0x00> to <0xFF>"
            )
        values[token] = bytes([value])
    return values


# ---- the metadata of a tokenizer.json


GGUFField = str | int | bool | Sequence[str] | npt.NDArray[np.int32]
_PROBES = (
    "Hello world, it's 12345 o'clock; WE'LL see.\n\n  Two  spaces\t(and a tab)...\r\n",
    "naïve cafe\u0301 Straße, Привет мир, 你好，世界 1 234 567,89 ٣٤٥ 👩‍👩‍👧 \u200bend   ",
    "def f(x):\n        return {'a': x**2, \"b\": [1, 2]}  # camelCase snake_case\n",
)
_MAX_PROBED_TOKENS = 8192


def fields_of_json(
    content: bytes,
    config: Config,
    generation_config: Config,
    template: str | None,
    num_rows: int,
    name: str = "tokenizer.json",
) -> dict[str, GGUFField]:
    """What a GGUF file says of a byte-level tokenizer.json, for an embedding of so many rows.

    A GGUF file names how text is split into words and does not describe it. The name is taken whose
    tokens are those of the tokenizer.json, which is tried on texts and on tokens of the vocabulary.
    """
    description = parse(content, name)
    wanted = spec_from_json(content, name, config, generation_config, template)
    named = _pre_tokenizers(description, name)
    fields = _vocabulary_fields(description, wanted, num_rows) | _special_fields(wanted)
    if wanted.chat_template is not None:
        fields["tokenizer.chat_template"] = wanted.chat_template
    probes = list(_probes(wanted))
    for pre in named:
        written = {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": pre, **fields}
        made = spec_from_gguf(written)
        assert made is not None
        if _is_same(made, wanted, probes):
            return written
    raise _unwritable(name, f"it differs from {', '.join(named) or 'every known pre-tokenizer'}")


def _unwritable(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be written as GGUF metadata, which takes a byte-level BPE vocabulary with "
        f"a pre-tokenizer that llama.cpp knows by name: {why}. Leave the tokenizer out "
        "(--no-tokenizer), and the file takes token ids alone"
    )


def _pre_tokenizers(description: Mapping[str, Any], name: str) -> list[str]:
    """The names of those that split text by the same patterns, the likeliest first."""
    model = description.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise _unwritable(name, f"its model is {model and model.get('type')!r}")
    if not any(
        step.get("type") == "ByteLevel" for step in steps(description["decoder"], "decoders")
    ):
        raise _unwritable(name, "its vocabulary is not in bytes")
    patterns = splitting_patterns(description)
    if patterns is None:
        raise _unwritable(name, "it splits text by more than patterns")
    known = [pre for pre, kind in PRE_TOKENIZERS.items() if kind.patterns == patterns]
    ignores = bool(model.get("ignore_merges"))
    return sorted(known, key=lambda pre: PRE_TOKENIZERS[pre].ignore_merges != ignores)


def _vocabulary_fields(
    description: Mapping[str, Any], wanted: TokenizerSpec, num_rows: int
) -> dict[str, GGUFField]:
    """Rows of the embedding without a token are padding: llama.cpp wants a token for each."""
    texts = [text or f"[PAD{token}]" for token, text in enumerate(wanted.texts)]
    texts += [f"[PAD{token}]" for token in range(len(texts), num_rows)]
    kinds = np.full(len(texts), TokenKind.NORMAL, np.int32)
    holes = [token for token, text in enumerate(wanted.texts) if not text]
    kinds[[*holes, *range(len(wanted.texts), len(texts))]] = TokenKind.UNUSED
    for added in description.get("added_tokens", []):
        is_control = added["special"] or added["content"] in CONTROL_NAMES
        kinds[added["id"]] = TokenKind.CONTROL if is_control else TokenKind.USER_DEFINED
    merges = description["model"]["merges"]
    return {
        f"{PREFIX}tokens": texts,
        f"{PREFIX}token_type": kinds,
        f"{PREFIX}merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
    }


def _special_fields(wanted: TokenizerSpec) -> dict[str, GGUFField]:
    special = wanted.special
    known = end_token_ids([special.eos], wanted.ids)
    more = [end for end in special.ends if end not in known]
    ids = {
        "bos_token_id": special.bos,
        "eos_token_id": more.pop(0) if special.eos is None and more else special.eos,
        "eot_token_id": more.pop(0) if more else None,
        "eom_token_id": more.pop(0) if more else None,
        "unknown_token_id": special.unknown,
        "padding_token_id": special.padding,
    }
    fields: dict[str, GGUFField] = {f"{PREFIX}{n}": i for n, i in ids.items() if i is not None}
    fields[f"{PREFIX}add_bos_token"] = bool(wanted.prefix)
    fields[f"{PREFIX}add_eos_token"] = bool(wanted.suffix)
    return fields


def _probes(wanted: TokenizerSpec) -> Iterator[str]:
    yield from _PROBES
    for token in range(0, len(wanted.texts), -(-len(wanted.texts) // _MAX_PROBED_TOKENS)):
        text = wanted.piece_bytes(token).decode(errors="ignore")
        if text:
            yield text


def _is_same(made: TokenizerSpec, wanted: TokenizerSpec, probes: Sequence[str]) -> bool:
    special = (made.prefix, made.suffix, made.special.bos, made.special.ends)
    if special != (wanted.prefix, wanted.suffix, wanted.special.bos, wanted.special.ends):
        return False
    return all(
        encode_text(made.encoder, text, None, WINDOW)
        == encode_text(wanted.encoder, text, None, WINDOW)
        for text in probes
    )
