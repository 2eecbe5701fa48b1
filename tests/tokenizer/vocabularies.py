"""Vocabularies for tests: SmolLM2's own, and small ones in the form of GGUF metadata."""

import itertools
import json
import lzma
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quire.tokenizer import Tokenizer
from quire.tokenizer.detokenizer import BYTE_ALPHABET

SMOLLM2 = Path(__file__).parent.parent / "fixtures" / "smollm2"

Metadata = dict[str, Any]
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def smollm2_metadata() -> Metadata:
    """The tokenizer fields of the GGUF file, kept by tests/oracles/make_smollm2_tokenizer.py."""
    content = lzma.decompress((SMOLLM2 / "tokenizer.json.xz").read_bytes())
    return dict(json.loads(content))


@cache
def smollm2() -> Tokenizer:
    return built(smollm2_metadata())


@cache
def smollm2_golden() -> Any:
    return json.loads((SMOLLM2 / "golden.json").read_text())


def built(metadata: Metadata) -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


def to_letters(text: str) -> str:
    """Text in the byte-level alphabet."""
    return "".join(LETTER_OF_BYTE[byte] for byte in text.encode())


def learnt_merges(texts: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair training: again and again the most frequent pair."""
    words = [list(text) for text in texts]
    merges: list[tuple[str, str]] = []
    made = set()
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        fresh = [(n, pair) for pair, n in pairs.items() if pair[0] + pair[1] not in made]
        if not fresh:
            break
        pair = max(fresh)[1]
        merges.append(pair)
        made.add(pair[0] + pair[1])
        words = [_merged(word, pair) for word in words]
    return merges


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] += symbol
        else:
            result.append(symbol)
    return result


def byte_level_metadata(merges: Sequence[tuple[str, str]], pre: str, **more: Any) -> Metadata:
    """A byte-level vocabulary: control tokens, the 256 bytes, and what the merges make."""
    texts = [*SPECIALS, *BYTE_ALPHABET, *(left + right for left, right in merges)]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": texts,
        "token_type": [3] * len(SPECIALS) + [1] * (len(texts) - len(SPECIALS)),
        "merges": [" ".join(pair) for pair in merges],
        "eos_token_id": 2,
        "bos_token_id": 1,
        **more,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def sentencepiece_metadata(
    scores: dict[str, float], *, with_bytes: bool = True, **more: Any
) -> Metadata:
    """A SentencePiece-style vocabulary: unknown, begin, end, the bytes, and the scored pieces."""
    values = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    texts = ["<unk>", "<s>", "</s>", *values, *scores]
    fields = {
        "model": "llama",
        "tokens": texts,
        "token_type": [2, 3, 3] + [6] * len(values) + [1] * len(scores),
        "scores": [0.0] * (3 + len(values)) + list(scores.values()),
        **more,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def sentencepiece_scores(letters: str, seed: int, num_merges: int) -> dict[str, float]:
    """Pieces learnt from random words, scored as SentencePiece scores them: by when they came."""
    generator = random.Random(seed)
    words = [
        "▁" + "".join(generator.choices(letters, k=generator.randint(1, 8))) for _ in range(200)
    ]
    pieces = ["▁", *letters, *(left + right for left, right in learnt_merges(words, num_merges))]
    return {piece: -float(place) for place, piece in enumerate(pieces)}
