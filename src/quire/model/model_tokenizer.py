"""The tokenizer that came with a model, wherever its files keep it."""

from collections.abc import Mapping

from quire.loader.metadata import Metadata
from quire.loader.reading import parse_json_object
from quire.loader.safetensors import SafetensorsFolder
from quire.model.loading import Model
from quire.tokenizer import Tokenizer, check_vocabulary

_TOKENIZER = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 16 << 20  # some tokenizer configs list every special token
_CHAT_TEMPLATE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 1 << 20
_EOS = "eos_token_id"


def read_tokenizer(model: Model) -> Tokenizer | None:
    """The model's tokenizer, known to fit its vocabulary; None where it takes token ids alone."""
    source = model.source
    if isinstance(source, SafetensorsFolder):
        tokenizer = _folder_tokenizer(source)
    else:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.spec.vocabulary_size)
    return tokenizer


def _folder_tokenizer(folder: SafetensorsFolder) -> Tokenizer | None:
    content = folder.read_beside(_TOKENIZER, _MAX_TOKENIZER_BYTES)
    if content is None:
        return None
    template = folder.read_beside(_CHAT_TEMPLATE, _MAX_TEMPLATE_BYTES)
    return Tokenizer.from_json(
        content,
        _read_config(folder, "tokenizer_config.json") or {},
        _generation_config(folder),
        chat_template=None if template is None else template.decode(errors="replace"),
    )


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
    known = range(model.spec.vocabulary_size)
    return tuple(dict.fromkeys(token for token in named if token in known))


def _generation_config(folder: SafetensorsFolder) -> Mapping[str, object]:
    """generation_config.json; a folder without one says in config.json what ends a text."""
    config = _read_config(folder, "generation_config.json")
    if config is not None:
        return config
    return {_EOS: folder.config[_EOS]} if _EOS in folder.config else {}


def _named_ends(config: Mapping[str, object]) -> tuple[int, ...]:
    """One end token, or several, or none."""
    value = config.get(_EOS)
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    return Metadata("the generation config", {_EOS: listed}).integers(_EOS)


def _read_config(folder: SafetensorsFolder, name: str) -> Mapping[str, object] | None:
    content = folder.read_beside(name, _MAX_CONFIG_BYTES)
    return None if content is None else parse_json_object(content, name)
