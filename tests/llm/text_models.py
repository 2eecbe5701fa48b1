"""Models that take text: the tiny Llama of the fixtures, given a vocabulary and a template."""

import itertools
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tests.fixture_files import fixture_file

from quire.tokenizer.detokenizer import BYTE_ALPHABET

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
NUM_ROWS = 512  # of the tiny model's embedding


def write_text_model(
    path: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    pre: str = "gpt-2",
    architecture: str = "llama",
    num_tokens: int = NUM_ROWS,
    sampling: Mapping[str, float | str] | None = None,
    tensors_a_part: int = 0,
    name: str = "tiny text model",
    words: Sequence[str] = (),
    more_specials: tuple[str, ...] = (),
    max_context: int = 512,
) -> Path:
    """A GGUF file that takes text: control tokens, the 256 bytes, pairs of letters, and these
    words. With `tensors_a_part` it is written in parts, beside `path`."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    specials = (*SPECIALS, *more_specials)
    _add_sizes(writer, name, max_context)
    begun = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    pairs = itertools.product(string.ascii_letters, repeat=2)
    merges = [*begun, *(pair for pair in pairs if pair not in begun)]
    merges = merges[: num_tokens - len(specials) - len(BYTE_ALPHABET)]
    texts = [*specials, *BYTE_ALPHABET, *("".join(pair) for pair in merges)]
    kinds = [gguf.TokenType.CONTROL] * len(specials)
    kinds += [gguf.TokenType.NORMAL] * (len(texts) - len(specials))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(END)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, value in (sampling or {}).items():
        if isinstance(value, int):
            writer.add_int32(f"general.sampling.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"general.sampling.{name}", value)
        else:
            writer.add_float32(f"general.sampling.{name}", value)
    _add_tensors(writer, "tiny/Q4_0.gguf", {})
    return _written(writer, path)


def write_changed_model(path: Path, changes: dict[str, tuple[Any, float]]) -> Path:
    """The tiny model in F32 with some weights set: by tensor, where and to what."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer)
    writer.add_tokenizer_model("none")
    _add_tensors(writer, "tiny/F32.gguf", changes)
    return _written(writer, path)


def _add_sizes(
    writer: gguf.GGUFWriter, name: str = "tiny text model", max_context: int = 512
) -> None:
    writer.add_name(name)
    writer.add_context_length(max_context)
    writer.add_embedding_length(256)
    writer.add_block_count(2)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)


def _add_tensors(
    writer: gguf.GGUFWriter, source: str, changes: dict[str, tuple[Any, float]]
) -> None:
    for tensor in gguf.GGUFReader(fixture_file(source)).tensors:
        data = np.array(tensor.data)
        if tensor.name in changes:
            index, value = changes[tensor.name]
            data[index] = value
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
