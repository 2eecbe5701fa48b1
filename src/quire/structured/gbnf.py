"""llama.cpp's grammars (GBNF) in Lark's syntax, as llguidance takes it.

llguidance's lexer takes the longest match: a terminal of any number of spaces leaves none to a
literal that begins with one. So a grammar without recursion becomes one terminal, within which
every way to match counts; of another one the rules without recursion become terminals. A rule that
uses itself at its end or begin alone has none: it is written as a loop.

A rule ends where the next one begins, so that alternatives may stand in lines of their own, as in
xgrammar's EBNF. Of two rules with one name the last one holds, as in llama.cpp.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<define>::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<times>[*+?]|\{[0-9, \t]*\})
    |(?P<mark>[|().])""",
    re.DOTALL | re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<escaped>.)|(?P<plain>.)",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"\\[]^-/'}
_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_ANY = "/(?s:.)/"


class _Use(str):
    """The name of a rule among pieces of Lark."""


Pieces = list[str]
Rules = Mapping[str, Pieces]


def is_gbnf(text: str) -> bool:
    """Whether it has a rule of GBNF: Lark has none like it."""
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """A ValueError says what is wrong, and where."""
    rules = {name: _as_loop(name, pieces) for name, pieces in _Parser(text).rules().items()}
    if "root" not in rules:
        raise ValueError("there is no rule 'root'")
    uses = {name: [piece for piece in rules[name] if isinstance(piece, _Use)] for name in rules}
    for name, used in uses.items():
        for missing in set(used).difference(rules):
            raise ValueError(f"rule {name!r:.100} uses {missing!r:.100}, which is not defined")
    terminals = _without_recursion(uses)
    names = {
        name: f"{'RULE' if name in terminals else 'rule'}_{number}"
        for number, name in enumerate(rules)
    }
    lines = [f"start: {names['root']}"]
    for name, pieces in rules.items():
        written = [names[piece] if isinstance(piece, _Use) else piece for piece in pieces]
        lines.append(f"{names[name]}: {' '.join(written)}")
    return "\n".join(lines)


def _as_loop(name: str, pieces: Pieces) -> Pieces:
    """A rule that uses itself at the end of alternatives, or at their begin, without recursion: of
    single characters, as in a string's rest, it would make a mask cost a parse of each token."""
    alternatives: list[Pieces] = [[]]
    depth = 0
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(piece)
    own = [each for each in alternatives if name in each]
    once = _any_of([each for each in alternatives if name not in each])
    for end in (-1, 0):
        if own and once and all(each.count(name) == 1 and each[end] == name for each in own):
            steps = _any_of([each[:-1] if end else each[1:] for each in own if len(each) > 1])
            loop = [*steps, "*"] if steps else []
            return loop + once if end else once + loop
    return pieces


def _any_of(alternatives: Sequence[Pieces]) -> Pieces:
    """Nothing where there are none."""
    found: Pieces = []
    for each in alternatives:
        found += ["|" if found else "(", *each]
    return [*found, ")"] if found else []


def _without_recursion(uses: Mapping[str, Sequence[str]]) -> set[str]:
    """The rules that come to none which uses itself, in whatever way."""
    users = defaultdict(list)
    num_open = {name: len(used) for name, used in uses.items()}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    ready = [name for name, count in num_open.items() if not count]
    found = set(ready)
    while ready:
        for user in users[ready.pop()]:
            num_open[user] -= 1
            if not num_open[user]:
                ready.append(user)
                found.add(user)
    return found


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, text: str) -> None:
        self._source = text
        self._tokens = [*self._split(), _Token("end", "", len(text))]
        self._next = 0

    def _split(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._source):
            match = _TOKEN.match(self._source, at)
            if match is None:
                raise self._wrong(at, "this is no part of a grammar")
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match[0], at)
            at = match.end()

    def _wrong(self, at: int, message: str) -> ValueError:
        line = self._source.count("\n", 0, at) + 1
        found = self._source[at : at + 30].partition("\n")[0]
        return ValueError(f"line {line}, at {found!r}: {message}")

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, kind: str, expected: str) -> str:
        token = self._token
        if kind not in (token.kind, token.text):
            raise self._wrong(token.at, f"{expected} is expected here")
        self._next += 1
        return token.text

    def rules(self) -> Rules:
        found = {}
        while self._token.kind != "end":
            name = self._take("name", "the name of a rule")
            self._take("define", "::=")
            found[name] = self._alternatives()
        return found

    def _alternatives(self) -> Pieces:
        found = self._sequence()
        while self._token.text == "|":
            self._next += 1
            found += ["|", *self._sequence()]
        return found

    def _sequence(self) -> Pieces:
        found: Pieces = []
        while (element := self._element()) is not None:
            times: Pieces = []
            while self._token.kind == "times":  # Lark takes no two in a row
                times += [")", self._times()]
            found += ["("] * (len(times) // 2) + element + times
        return found or ['""']

    def _element(self) -> Pieces | None:
        """None: something else comes."""
        kind, text, at = self._token
        is_rule = kind == "name" and self._tokens[self._next + 1].kind == "define"
        if is_rule or (kind not in ("name", "text", "set") and text not in ("(", ".")):
            return None
        self._next += 1
        match kind:
            case "name":
                return [_Use(text)]
            case "text":
                whole = "".join([char for char, _ in self._characters(text[1:-1], at + 1)])
                return [json.dumps(whole, ensure_ascii=False)]
            case "set":
                return [self._set(text[1:-1], at + 1)]
        if text == ".":
            return [_ANY]
        inner = self._alternatives()
        self._take(")", "')'")
        return ["(", *inner, ")"]

    def _times(self) -> str:
        _, text, at = self._token
        self._next += 1
        if not text.startswith("{"):
            return text
        first, comma, last = [part.strip() for part in text[1:-1].partition(",")]
        most = last if comma else first
        is_wrong = not re.fullmatch("[0-9]*,[0-9]*", f"{first},{most}") or not (first or most)
        if is_wrong or int(most or first) < int(first or 0):
            raise self._wrong(at, "this is no number of times")
        return f"{{{first or 0},{most}}}"

    def _characters(self, text: str, at: int) -> list[tuple[str, bool]]:
        """Each with whether it was escaped."""
        found = []
        for match in _CHARACTER.finditer(text):
            code = match["x"] or match["u"] or match["U"]
            char = match["plain"] or _ESCAPED.get(match["escaped"])
            if code is not None and not _is_surrogate(int(code, 16)):
                char = chr(int(code, 16))
            if char is None:
                raise self._wrong(at + match.start(), "this is no character")
            found.append((char, match["plain"] is None))
        return found

    def _set(self, text: str, at: int) -> str:
        """In Rust's syntax, in which letters and digits alone are never special."""
        inverted = text.startswith("^")
        rest = self._characters(text[inverted:], at + inverted)[::-1]
        ranges = []
        while rest:
            first = last = rest.pop()[0]
            if len(rest) > 1 and rest[-1] == ("-", False):
                last = rest[-2][0]
                del rest[-2:]
            if last < first:
                raise self._wrong(at, f"{last!r} is before {first!r}")
            ranges.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
        if not ranges and not inverted:
            raise self._wrong(at, "nothing is in the set")
        return f"/[{'^' * inverted}{''.join(ranges)}]/" if ranges else _ANY


def _is_surrogate(code: int) -> bool:
    return 0xD800 <= code < 0xE000 or code > 0x10FFFF
