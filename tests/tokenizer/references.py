"""Plain versions of what the tokenizer does, written to be read: the oracles of its tests."""

import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode's White_Space, which is what \s means to tokenizers (Python's \s has more).
WHITESPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
WHITESPACE += "\u2028\u2029\u202f\u205f\u3000"


def merge_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's merging: again and again the best-scored pair, of equal ones the leftmost."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        place = min(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


def merge_by_rank(word: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Byte-pair merging: again and again the pair listed first, of equal ones the leftmost."""
    symbols = list(word)
    while True:
        pairs = [
            (ranks[pair], place)
            for place, pair in enumerate(itertools.pairwise(symbols))
            if pair in ranks
        ]
        if not pairs:
            return symbols
        place = min(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


def split_words(text: str, patterns: Sequence[str], characters: str) -> list[str]:
    """Words of a text made of the given characters, by Python's regexes and Unicode tables."""
    words = [text]
    for pattern in patterns:
        compiled = re.compile(_without_properties(pattern, characters))
        words = [part for word in words for part in _split(compiled, word)]
    return words


def _split(pattern: re.Pattern[str], word: str) -> list[str]:
    parts = []
    position = 0
    for match in pattern.finditer(word):
        parts += [word[position : match.start()], match.group()]
        position = match.end()
    return [part for part in [*parts, word[position:]] if part]


def _without_properties(pattern: str, characters: str) -> str:
    """The pattern with \\p{L} and \\s spelt out, for texts of these characters alone."""

    def members(match: re.Match[str]) -> str:
        chosen = [c for c in characters if unicodedata.category(c).startswith(match[1])]
        return "".join(map(re.escape, chosen)) or "\\0"

    spelt = re.sub(r"\\p\{(\w+)\}", members, _in_classes(pattern))
    spaces = "".join(map(re.escape, WHITESPACE))
    return spelt.replace(r"[\S]", f"[^{spaces}]").replace(r"\s", spaces)


def _in_classes(pattern: str) -> str:
    """The pattern with every class such as \\p{L} and \\s inside of brackets."""
    result, inside = [], False
    for part in re.findall(r"\\p\{\w+\}|\\.|\[|\]|.", pattern, re.DOTALL):
        if part in ("[", "]"):
            inside = part == "["
        is_class = part.startswith(r"\p") or part in (r"\s", r"\S")
        result.append(f"[{part}]" if is_class and not inside else part)
    return "".join(result)


class _AssistantTracker(Extension):
    """{% generation %} as transformers parses it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)

    def _support(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def transformers_renders(source: str, **values: Any) -> str:
    """A chat template by jinja alone, set up as transformers does it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_AssistantTracker, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source).render(**values)
