"""The tokenizer that came with a model, wherever its files keep it."""

from collections.abc import Mapping
from pathlib import Path

from quire.loader.json_files import read_json_object
from quire.loader.metadata import Metadata
from quire.loader.safetensors import SafetensorsFolder
from quire.model.loading import Model
from quire.tokenizer import Tokenizer, check_vocabulary

_MAX_CONFIG_BYTES = 16 << 20  # some tokenizer configs list every special token
_EOS = "eos_token_id"


def read_tokenizer(model: Model) -> Tokenizer | None:
    """The model's tokenizer, known to fit its vocabulary; None where it takes token ids alone."""
    source = model.source
    if not isinstance(source, SafetensorsFolder):
        tokenizer = Tokenizer.from_gguf(source.metadata)
    elif source.tokenizer_path is None:
        tokenizer = None
    else:
        tokenizer = Tokenizer.from_file(
            source.tokenizer_path,
            _read_config(source.tokenizer_config_path),
            _generation_config(source),
        )
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocabulary_size)
    return tokenizer


def end_token_ids(model: Model, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a generation, of a model with or without a tokenizer."""
    if tokenizer is not None:
        named = tokenizer.end_token_ids
    elif isinstance(model.source, SafetensorsFolder):
        named = _named_ends(_generation_config(model.source))
    elif "tokenizer.ggml.eos_token_id" in model.metadata:
        named = (model.metadata.integer("tokenizer.ggml.eos_token_id"),)
    else:
        named = ()
    return tuple(token for token in named if 0 <= token < model.spec.vocabulary_size)


def _generation_config(folder: SafetensorsFolder) -> Mapping[str, object]:
    """generation_config.json; a folder without one says in config.json what ends a text."""
    if folder.generation_config_path is not None:
        return _read_config(folder.generation_config_path)
    return {_EOS: folder.config[_EOS]} if _EOS in folder.config else {}


def _named_ends(config: Mapping[str, object]) -> tuple[int, ...]:
    """One end token, or several, or none."""
    value = config.get(_EOS)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    return Metadata("the generation config", {_EOS: listed}).integers(_EOS)


def _read_config(path: Path | None) -> Mapping[str, object]:
    return {} if path is None else read_json_object(path, _MAX_CONFIG_BYTES)
