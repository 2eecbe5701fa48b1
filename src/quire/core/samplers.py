"""The samplers' names, which are llama.cpp's, and the orders in which they may be applied."""

from collections.abc import Sequence

from quire.core.errors import RequestError

# What every request gets: of these the ones that its fields switch on.
DEFAULT_ORDER = (
    *("penalties", "dry", "temperature", "top_n_sigma"),
    *("min_p", "top_k", "typ_p", "top_p", "xtc"),
)
MAX_SAMPLERS = 32

_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
LETTER_OF = {name: letter for letter, name in _LETTERS.items()}
_STATE = "what it does depends on tokens drawn before, not on the row alone"
_REFUSED = {
    "adaptive_p": _STATE,
    "mirostat": _STATE,
    "infill": "quire has no infill sampler",
}
_REFUSED_LETTERS = {"a": "adaptive_p", "i": "infill"}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}


def read_samplers(given: object) -> tuple[str, ...]:
    """The names in an order of samplers: a list of names, or llama.cpp's letters as one string."""
    if isinstance(given, str):
        separated = given.split(";") if ";" in given else None
        found = [_of_letter(letter) for letter in given] if separated is None else separated
    elif isinstance(given, Sequence) and all(isinstance(name, str) for name in given):
        found = list(given)
    else:
        raise _wrong(
            f"samplers must be a list of names, or a string of letters, got {given!r:.100}"
        )
    if len(found) > MAX_SAMPLERS:
        raise _wrong(f"samplers takes at most {MAX_SAMPLERS} names, got {len(found)}")
    return tuple(_of_name(name) for name in found)


def _of_letter(letter: str) -> str:
    name = _LETTERS.get(letter) or _REFUSED_LETTERS.get(letter)
    if name is None:
        raise _wrong(
            f"samplers has the letter {letter!r}; a string is of the letters "
            f"{', '.join(f'{key} ({name})' for key, name in _LETTERS.items())}; names go into a "
            "list"
        )
    return name


def _of_name(given: str) -> str:
    name = given.strip().lower().replace("-", "_")
    name = _ALIASES.get(name) or _WITHOUT_DASHES.get(name.replace("_", ""), name)
    if name in _REFUSED:
        raise _wrong(f"samplers names {given!r:.100}, which quire does not have: {_REFUSED[name]}")
    if name not in LETTER_OF:
        raise _wrong(f"samplers names {given!r:.100}; there are {', '.join(DEFAULT_ORDER)}")
    return name


_WITHOUT_DASHES = {name.replace("_", ""): name for name in (*DEFAULT_ORDER, *_REFUSED)}


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="samplers")
