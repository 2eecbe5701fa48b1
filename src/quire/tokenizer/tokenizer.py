"""Tokenizer: text to token ids and back, over a vocabulary from a GGUF file or a tokenizer.json."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.core.errors import ModelFileError, RequestError
from quire.tokenizer.control_tokens import Span
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.fill_in import FillIn
from quire.tokenizer.gguf import spec_from_gguf
from quire.tokenizer.text_encoder import WINDOW, encode_text
from quire.tokenizer.tokenizer_json import read_file, read_template_beside, spec_from_json
from quire.tokenizer.vocabulary import TokenizerSpec


class Tokenizer:
    """Text to token ids and back. Immutable, and safe to share between threads."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._bytes: list[bytes | None] = [None] * len(spec.texts)
        # For detokenizers with and without control tokens.
        self._whole_texts: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})
        self.chat_template = spec.chat_template
        self.vocabulary_size = len(spec.texts)
        self.bos_token_id = spec.special.bos
        self.eos_token_id = spec.special.eos
        self.unknown_token_id = spec.special.unknown
        self.padding_token_id = spec.special.padding
        self.end_token_ids = spec.special.ends  # each of them ends a generation

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer | None":
        """The tokenizer that a GGUF file describes; None where it has none and takes token ids."""
        spec = spec_from_gguf(metadata)
        return None if spec is None else cls(spec)

    @classmethod
    def from_json(
        cls,
        content: bytes,
        tokenizer_config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        *,
        chat_template: str | None = None,
        name: str = "tokenizer.json",
    ) -> "Tokenizer":
        """The tokenizer that a tokenizer.json holds, and what the configs beside it add to that.

        A `chat_template` from a file of its own goes before the config's; errors speak of `name`.
        """
        configs = tokenizer_config or {}, generation_config or {}
        return cls(spec_from_json(content, name, *configs, chat_template))

    @classmethod
    def from_file(
        cls,
        tokenizer_json: str | Path,
        tokenizer_config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
    ) -> "Tokenizer":
        """The tokenizer of a file, with the chat_template.jinja that may lie beside it."""
        path = Path(tokenizer_json)
        template = read_template_beside(path)
        configs = tokenizer_config, generation_config
        return cls.from_json(read_file(path), *configs, chat_template=template, name=path.name)

    def with_chat_template(self, text: str | None) -> "Tokenizer":
        """The same tokenizer with another chat template, or with none."""
        return Tokenizer(replace(self._spec, chat_template=text))

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool | Sequence[Span] = True,
        limit: int | None = None,
    ) -> list[int]:
        """The tokens of a text.

        `add_special` puts before and after it what the model wants there; leave it off for the
        output of a chat template, which has put it there itself. `parse_special` says where control
        tokens are found in the text: everywhere, nowhere, or in these spans of it (see
        `control_tokens`); elsewhere they are the letters they are written in. A text of more than
        `limit` tokens is a RequestError, raised as soon as that is certain.
        """
        _check_text(text)
        encoder = self._spec.encoder
        if parse_special is not True:
            text, encoder = self._spec.control.marked(text, parse_special or ())
        prefix, suffix = (self._spec.prefix, self._spec.suffix) if add_special else ((), ())
        left = None if limit is None else limit - len(prefix) - len(suffix)
        return [*prefix, *encode_text(encoder, text, left, WINDOW), *suffix]

    @property
    def fill_in(self) -> FillIn | None:
        """How the model is asked for what stands between two texts; None: it cannot be."""
        return self._spec.fill_in

    def encode_fill_in(self, before: str, after: str, *, limit: int | None = None) -> list[int]:
        """The prompt whose completion stands between two texts, in which no control token is found;
        `limit` as in `encode`."""
        assert self.fill_in is not None
        start = self._spec.prefix
        parts = []
        left = None if limit is None else max(0, limit - len(start) - 3)
        for text in (before, after):
            part = self.encode(text, add_special=False, parse_special=False, limit=left)
            left = None if left is None else left - len(part)
            parts.append(part)
        return [*start, *self.fill_in.prompt(*parts)]

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """The text of tokens; bytes that form no character become U+FFFD.

        SentencePiece vocabularies put a space before a text, which is taken away again unless the
        tokens are the `continuation` of others, such as a completion.
        """
        detokenizer = self.detokenizer(skip_special=skip_special, continuation=continuation)
        return "".join([*map(detokenizer.add, ids), detokenizer.flush()])

    def detokenizer(
        self,
        *,
        skip_special: bool = True,
        spelled: Sequence[int] = (),
        continuation: bool = True,
    ) -> IncrementalDetokenizer:
        """A decoder for tokens that arrive one by one; see `decode`. `spelled`: control tokens that
        are part of the text all the same."""
        pieces = self._visible_bytes if skip_special else self.token_bytes
        if skip_special and spelled:
            hidden = self._spec.hidden.difference(spelled)
            pieces = partial(self._bytes_unless, hidden)
        kept = {} if skip_special and spelled else self._whole_texts[skip_special]
        strip_space = self._spec.strip_space and not continuation
        return IncrementalDetokenizer(pieces, strip_space=strip_space, whole_texts=kept)

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes; none for an id beyond the vocabulary (padding of the embedding)."""
        if token >= self.vocabulary_size:
            return b""
        if token < 0:
            raise RequestError(f"token ids are 0 or more, got {token}", param="token")
        cached = self._bytes[token]
        if cached is None:
            cached = self._bytes[token] = self._spec.piece_bytes(token)
        return cached

    def token_text(self, token: int) -> str:
        """A token's bytes as text, with U+FFFD for those that are no character by themselves."""
        return self.token_bytes(token).decode(errors="replace")

    def token_name(self, token: int) -> str:
        """A token's text in the vocabulary, such as <|im_end|>, as a template writes it."""
        return self._spec.texts[token]

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text in the vocabulary, such as <|im_end|>, if it exists."""
        return self._spec.ids.get(text)

    @property
    def hidden_token_ids(self) -> frozenset[int]:
        """Tokens that are not part of the text, such as control tokens."""
        return self._spec.hidden

    def _bytes_unless(self, hidden: frozenset[int], token: int) -> bytes:
        return b"" if token in hidden else self.token_bytes(token)

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if token in self._spec.hidden else self.token_bytes(token)


def check_vocabulary(tokenizer: Tokenizer, embedding_rows: int) -> None:
    """Refuse a tokenizer that makes tokens the model has no row for; extra rows are padding."""
    if tokenizer.vocabulary_size > embedding_rows:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocabulary_size} tokens but the model's embedding has "
            f"{embedding_rows} rows; tokenizer and weights are not of the same model"
        )


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {type(text).__name__}", param="text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds half a surrogate pair at character {error.start}, which is no text",
            param="text",
        ) from None
