"""Building a tokenizer from the tokenizer.json of a model folder, and the configs beside it."""

import base64
import json
import reprlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers

from quire.core.errors import ModelFileError, UnsupportedModelError
from quire.tokenizer.bpe import (
    GPT_2,
    KNOWN_PATTERNS,
    PRE_TOKENIZERS,
    WORDS,
    PreTokenizer,
    splits_at_spaces,
    word_splitter,
)
from quire.tokenizer.control_tokens import ControlTokens
from quire.tokenizer.detokenizer import (
    SPACE_MARK,
    PieceBytes,
    byte_level_bytes,
    byte_token_value,
    sentencepiece_bytes,
)
from quire.tokenizer.fill_in import find_fill_in
from quire.tokenizer.text_encoder import TextEncoder, library_errors
from quire.tokenizer.vocabulary import (
    CONTROL_NAMES,
    MAX_TOKEN_LENGTH,
    SpecialTokens,
    TokenizerSpec,
    end_token_ids,
)

_MAX_FILE_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20

_MAX_GROWTH = 256
_WITHOUT_PATTERNS = ("model", "added_tokens")  # the largest parts of a file

Config = Mapping[str, object]


def spec_from_json(
    content: bytes, name: str, config: Config, generation_config: Config, template: str | None
) -> TokenizerSpec:
    """The tokenizer of a folder; the configs say which tokens are special and end a generation."""
    description = parse(content, name)
    kind = _faster_kind(description)
    _refuse_unknown_patterns(description, name, kind.patterns if kind is not None else ())
    _check_growth(description.get("normalizer"), name)
    decoders = list(steps(description.get("decoder"), "decoders"))
    backend = _load_backend(content, name)
    if kind is not None:
        backend.pre_tokenizer = word_splitter(kind)
    ids = backend.get_vocab(with_added_tokens=True)
    texts = _texts_by_id(ids, name)
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    tokens = _special_tokens(config, generation_config, ids, special, name)
    prefix, suffix = _added_around(description, config, tokens, name)
    piece_bytes = _piece_bytes_of(decoders, name)
    encoder = _text_encoder(backend, texts, piece_bytes, kind, frozenset())
    controls = {
        token: entry.content
        for token, entry in added.items()
        if entry.special or entry.content in CONTROL_NAMES or token in (tokens.bos, tokens.eos)
    }
    literal = partial(_text_encoder, backend, texts, piece_bytes, kind, frozenset(controls))
    return TokenizerSpec(
        encoder=encoder,
        control=ControlTokens(encoder, controls, literal, tokens.unknown),
        texts=texts,
        ids=ids,
        piece_bytes=_bytes_by_id(texts, piece_bytes),
        hidden=frozenset(special.values()).union(tokens.ends),
        special=tokens,
        prefix=prefix,
        suffix=suffix,
        strip_space=any(map(_strips_space, decoders)),
        chat_template=_config_template(config) if template is None else template,
        fill_in=find_fill_in(ids),
    )


def read_file(path: Path, limit: int = _MAX_FILE_BYTES) -> bytes:
    """A file's content, which must not be larger than files of its kind are."""
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(f"cannot read {path.name}: {error.strerror}") from error
    if len(content) > limit:
        raise ModelFileError(f"{path.name} is larger than {limit} bytes, too large for its kind")
    return content


def parse(content: bytes, name: str) -> dict[str, Any]:
    try:
        description = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{name} does not hold sound JSON: {error}") from error
    if not isinstance(description, dict):
        raise ModelFileError(f"{name} must hold a JSON object")
    return description


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: the library may use another value than was checked."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a key twice")
    return fields


def steps(component: Any, plural: str) -> Iterator[dict[str, Any]]:
    """The steps of a component of tokenizer.json: itself, or those of a sequence."""
    if not isinstance(component, dict):
        return
    listed = component.get(plural)
    for step in listed if isinstance(listed, list) else [component]:
        if isinstance(step, dict):
            yield step


def splitting_patterns(description: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The patterns by which a file splits text before it writes bytes as letters; None: it splits
    in another way too."""
    found: list[str] = []
    for step in steps(description.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
                found.append(escaped(pattern))
            case {"type": "Digits", "individual_digits": True}:
                found.append(r"\p{N}")
            case {"type": "ByteLevel"}:
                found += [GPT_2] if step.get("use_regex", True) else []
            case _:
                return None
    return tuple(found)


def _faster_kind(description: Mapping[str, Any]) -> PreTokenizer | None:
    """The pre-tokenizer that makes the same words as the file's patterns, in less time."""
    patterns = splitting_patterns(description)
    last = list(steps(description.get("pre_tokenizer"), "pretokenizers"))[-1:]
    is_plain = last and last[0].get("type") == "ByteLevel" and not last[0].get("add_prefix_space")
    kinds = (kind for kind in PRE_TOKENIZERS.values() if kind.fast and kind.patterns == patterns)
    return next(kinds, None) if is_plain else None


def _refuse_unknown_patterns(
    description: Mapping[str, Any], name: str, also: Container[str]
) -> None:
    """A pattern from a file could keep the library busy for hours, on a short text or when it is
    compiled; so an unknown one is refused anywhere."""
    left = [value for key, value in description.items() if key not in _WITHOUT_PATTERNS]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
            regex = value.get("Regex")
            if regex is None or escaped(regex) in KNOWN_PATTERNS:
                continue
            if escaped(regex) not in also:
                raise UnsupportedModelError(
                    f"{name} splits text by a pattern that is not supported: {str(regex)[:200]!r}"
                )


def escaped(regex: Any) -> str:
    return str(regex).replace("\r", r"\r").replace("\n", r"\n")


def _check_growth(normalizer: Any, name: str) -> None:
    """Refuse a normalizer that makes long texts of short ones: each character of a request might
    become megabytes. Those in use turn one character into one, or a few."""
    growth, left = 1, [normalizer]
    while left:
        step = left.pop()
        if isinstance(step, list):
            left.extend(step)
        elif isinstance(step, dict):
            left.extend(step.values())
            growth *= max(1, _longest_made(step))
    if growth > _MAX_GROWTH:
        raise UnsupportedModelError(
            f"{name} has a normalizer that makes up to {growth} characters of one; the limit is "
            f"{_MAX_GROWTH}"
        )


def _longest_made(step: Mapping[str, Any]) -> int:
    """The longest text that a step of a normalizer makes of a character, or puts before it.

    A precompiled map is a table, which begins with its length, and after it the texts that it
    makes of characters, each ended by a zero byte; as base64.
    """
    made = (step.get("content"), step.get("prepend"))
    longest = max((len(text) for text in made if isinstance(text, str)), default=0)
    charsmap = step.get("precompiled_charsmap")
    if not isinstance(charsmap, str):
        return longest
    try:
        content = base64.b64decode(charsmap)
    except ValueError:
        return longest  # the library refuses it
    table = int.from_bytes(content[:4], "little")
    return max(longest, *map(len, content[4 + table :].split(b"\0")))


def _load_backend(content: bytes, name: str) -> Any:
    with library_errors(f"{name} describes no tokenizer"):
        backend = tokenizers.Tokenizer.from_buffer(content)
    backend.no_padding()
    backend.no_truncation()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None  # for training: it makes tokens random
    return backend


def _texts_by_id(ids: Mapping[str, int], name: str) -> list[str]:
    if not ids:
        raise ModelFileError(f"{name} has no tokens")
    size = max(ids.values()) + 1
    if size > 4 * len(ids) + 4096:
        raise ModelFileError(f"{name} gives the id {size - 1} but has only {len(ids)} tokens")
    longest = max(ids, key=len)
    if len(longest) > MAX_TOKEN_LENGTH:
        raise ModelFileError(
            f"{name} has a token of {len(longest)} characters ({longest[:20]!r}...); the limit is "
            f"{MAX_TOKEN_LENGTH}"
        )
    texts = [""] * size
    for text, token in ids.items():
        texts[token] = text
    return texts


def _special_tokens(
    config: Config,
    generation_config: Config,
    ids: Mapping[str, int],
    special: Mapping[str, int],
    name: str,
) -> SpecialTokens:
    named = {key: _content(config.get(f"{key}_token")) for key in ("bos", "eos", "unk", "pad")}
    for key in ("bos", "eos"):
        if named[key] is not None and named[key] not in ids:
            raise ModelFileError(f"{key}_token {named[key]!r} is not a token of {name}")
    found = {key: ids.get(text) for key, text in named.items() if text is not None}
    ends = [found.get("eos"), *_generation_ends(generation_config)]
    return SpecialTokens(
        bos=found.get("bos"),
        eos=found.get("eos"),
        unknown=found.get("unk"),
        padding=found.get("pad"),
        ends=end_token_ids(ends, special),
    )


def _content(token: Any) -> str | None:
    """A token of a config: its text, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _generation_ends(generation_config: Config) -> Sequence[int]:
    value = generation_config.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ends: list[int] = []
    for end in listed:
        if isinstance(end, bool) or not isinstance(end, int) or end < 0:
            raise ModelFileError(
                f"eos_token_id of generation_config must be token ids, got {end!r}"
            )
        ends.append(end)
    return ends


def _added_around(
    description: Mapping[str, Any], config: Config, tokens: SpecialTokens, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a text: as tokenizer.json has it, unless the config says."""
    around: tuple[list[int], list[int]] = ([], [])
    for step in steps(description.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing":
            around = _template_around(step, name)
        elif step.get("type") != "ByteLevel":
            raise UnsupportedModelError(
                f"{name} adds tokens by {step.get('type')!r}, which is not supported; "
                "supported: TemplateProcessing"
            )
    prefix = _overridden(around[0], config.get("add_bos_token"), tokens.bos)
    suffix = _overridden(around[1], config.get("add_eos_token"), tokens.eos)
    return tuple(prefix), tuple(suffix)


def _template_around(template: Mapping[str, Any], name: str) -> tuple[list[int], list[int]]:
    """The ids around the text in a template such as <s> $A."""
    around: tuple[list[int], list[int]] = ([], [])
    side = 0
    try:
        for part in template["single"]:
            if "Sequence" in part:
                side = 1
            else:
                around[side].extend(template["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{name} has a broken post_processor: {error!r}") from None
    if not all(type(token) is int and token >= 0 for token in (*around[0], *around[1])):
        raise ModelFileError(f"{name} has a post_processor whose ids are no token ids: {around}")
    return around


def _overridden(around: list[int], wanted: Any, token: int | None) -> list[int]:
    if not isinstance(wanted, bool) or token is None or (token in around) == wanted:
        return around
    return [token] if wanted else [other for other in around if other != token]


def _text_encoder(
    backend: Any,
    texts: Sequence[str],
    piece_bytes: PieceBytes,
    kind: PreTokenizer | None,
    literal: Container[int],
) -> TextEncoder:
    """A tokenizer that shares the vocabulary of `backend`, without its post-processing.

    Tokens that are `literal` are read as the text they are written in.
    """
    own = tokenizers.Tokenizer(backend.model)
    entries = sorted(backend.get_added_tokens_decoder().items())
    added = [_added(entry, special=token in literal) for token, entry in entries]
    own.add_tokens(added)
    own.encode_special_tokens = True
    if backend.normalizer is not None:
        own.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        own.pre_tokenizer = backend.pre_tokenizer
    elif piece_bytes is sentencepiece_bytes and splits_at_spaces(texts):
        own.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return TextEncoder(
        own,
        longest_special=max((len(token.content) for token in added), default=0),
        longest_token=max(map(len, texts)) if backend.normalizer is None else None,
        in_windows=(kind is None or kind.in_windows)
        and not any(token.lstrip or token.single_word for token in added),
        run_characters=None if kind is None else kind.run_characters,
    )


def _added(entry: AddedToken, *, special: bool) -> AddedToken:
    return AddedToken(
        entry.content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        special=special,
    )


def _piece_bytes_of(decoders: Sequence[Mapping[str, Any]], name: str) -> PieceBytes:
    kinds = [decoder.get("type") for decoder in decoders]
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if "Metaspace" in kinds or any(map(_turns_marks_to_spaces, decoders)):
        return sentencepiece_bytes
    raise UnsupportedModelError(
        f"{name} decodes by {', '.join(map(str, kinds)) or 'nothing'}, which is not supported; "
        "supported: ByteLevel, Metaspace, and Replace of ▁ by a space"
    )


def _turns_marks_to_spaces(decoder: Mapping[str, Any]) -> bool:
    return decoder.get("type") == "Replace" and decoder.get("pattern") == {"String": SPACE_MARK}


def _strips_space(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return bool(decoder.get("type") == "Strip" and decoder.get("start") == 1)


def _bytes_by_id(texts: Sequence[str], piece_bytes: PieceBytes) -> Callable[[int], bytes]:
    """Added tokens pass the decoder as all others do: Gemma adds ▁▁, which is two spaces."""

    def bytes_of(token: int) -> bytes:
        text = texts[token]
        if piece_bytes is sentencepiece_bytes:
            value = byte_token_value(text)
            if value is not None:
                return bytes([value])
        return piece_bytes(text)

    return bytes_of


def read_template_beside(path: Path) -> str | None:
    """The chat template that lies beside a tokenizer.json in files of its own."""

    def read(name: str) -> bytes | None:
        file = path.parent / name
        return read_file(file, MAX_TEMPLATE_BYTES) if file.is_file() else None

    return template_of_files(read)


def template_of_files(read: Callable[[str], bytes | None]) -> str | None:
    """The chat template of a folder that keeps it in files of its own; `read` gives a file's
    content, or None where it is not there."""
    usual = read("chat_template.jinja")
    if usual is None:
        return None
    for_tools = read("additional_chat_templates/tool_use.jinja")
    texts = [None if text is None else text.decode(errors="replace") for text in (usual, for_tools)]
    return with_tool_template(*texts)


def template_of_processor(content: bytes) -> str | None:
    """The template of chat_template.json, where models that see kept one for a while."""
    return _config_template(parse(content, "chat_template.json"))


def _config_template(config: Config) -> str | None:
    template = config.get("chat_template")
    if not isinstance(template, list):
        return _template_text(template)
    named = {  # several, by name
        entry.get("name"): _template_text(entry.get("template"))
        for entry in template
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    }
    return with_tool_template(named.get("default"), named.get("tool_use"))


def _template_text(template: object) -> str | None:
    if template is not None and not isinstance(template, str):
        raise ModelFileError(
            f"chat_template of the tokenizer's config is no text: {reprlib.repr(template)}"
        )
    return template


def with_tool_template(usual: str | None, for_tools: str | None) -> str | None:
    """One template of two: the second, which models call tool_use, is for requests with tools.

    The tags between them leave all whitespace as it is; jinja leaves a template's last newline out.
    """
    if usual is None or for_tools is None:
        return usual
    first, second = (text.removesuffix("\n") for text in (for_tools, usual))
    return f"{{%+ if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"
