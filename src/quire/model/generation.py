"""How a model's makers want it sampled: generation_config.json, or a GGUF file's general.sampling.*

What a file says is a hint: a value that no request could give is left out, and a note says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quire.core.errors import RequestError
from quire.core.samplers import read_samplers
from quire.core.sampling import SamplingOptions, SamplingParams
from quire.loader.safetensors import SafetensorsFolder
from quire.model.loading import Model, generation_config

_GGUF = "general.sampling."
# Fields of SamplingParams by the name that files have for them.
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repeat_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "sequence": "samplers",
}
_CONFIG_NAMES = {
    **{
        name: name
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    },
    "max_new_tokens": "max_tokens",
}
_NEUTRAL = {"mirostat": 0}  # what they are where they change nothing
_MAX_TOP_K = 2**31 - 1
MODES = ("auto", "none")  # of the option generation_config


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields of SamplingParams for requests without them, and notes on what was left out."""

    options: SamplingOptions = field(default_factory=SamplingOptions)
    notes: tuple[str, ...] = ()


def read_defaults(model: Model) -> GenerationDefaults:
    """What the model's files say."""
    if isinstance(model.source, SafetensorsFolder):
        return _checked(generation_config(model.source), "generation_config.json: ", _CONFIG_NAMES)
    return _checked(model.metadata, _GGUF, _GGUF_NAMES)


def _checked(
    given: Mapping[str, object], where: str, names: Mapping[str, str]
) -> GenerationDefaults:
    options: dict[str, object] = {}
    notes = list(_not_applied(given))
    prefix = where if where == _GGUF else ""
    for name, option in names.items():
        value = given.get(prefix + name)
        if value is None:
            continue
        try:
            options[option] = _hint(option, value)
        except RequestError as error:
            notes.append(f"{where}{name} is left out: {error}")
    return GenerationDefaults(SamplingOptions(**options), tuple(notes))  # type: ignore[typeddict-item]


def _hint(option: str, value: object) -> int | float | tuple[str, ...]:
    """The value, where a request could give it; files are not trusted to hold such a one."""
    if option == "samplers" and isinstance(value, str):
        return read_samplers(value.split(";"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{option} must be a number, got {value!r:.100}")
    if option == "top_k":
        value = 0 if value < 0 else value  # llama.cpp: below 0 are all tokens
        if value > _MAX_TOP_K:
            raise RequestError(f"top_k must be at most {_MAX_TOP_K}, got {value!r:.100}")
    if option == "max_tokens" and value == 0:
        raise RequestError("max_tokens must be at least 1, got 0")
    SamplingParams.from_mapping({option: value})
    return value


def _not_applied(given: Mapping[str, object]) -> Iterator[str]:
    for name, neutral in _NEUTRAL.items():
        value = given.get(_GGUF + name)
        if isinstance(value, int | float) and value != neutral:
            yield f"{_GGUF}{name} is left out: quire does not sample so"
