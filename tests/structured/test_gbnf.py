"""llama.cpp's grammars: which texts they take, and what is said of those that are none."""

import itertools
import random
import re

import pytest
from llguidance import LLMatcher
from tests.structured.test_grammars import byte_level
from tests.structured.walks import grammars_of

from quire.core.errors import RequestError
from quire.core.sampling import Constraint, SamplingParams
from quire.structured.checker_worker import Checker, grammar_of
from quire.structured.gbnf import lark_of

CHECKER = Checker()


def takes(grammar: str, text: str) -> bool:
    """Whether a text is whole, by its bytes."""
    matcher = LLMatcher(CHECKER._tokenizer, grammar_of("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    assert matcher.consume_tokens(tokens)
    accepting: bool = matcher.is_accepting()
    return accepting


CASES: list[tuple[str, str, list[str], list[str]]] = [
    ("a rule may use any other", 'root ::= b "c"\nb ::= "a" | "b"', ["ac", "bc"], ["c"]),
    ("what repeats may end as the next begins", 'root ::= x "a"\nx ::= [ab]*', ["a", "aba"], ["b"]),
    ("spaces before a space", 'root ::= ws "x" ws " y"\nws ::= " "*', ["x y", " x   y"], ["xy"]),
    ("a text that begins another", 'root ::= ("ab" | "abc") "cd"', ["abcd", "abccd"], ["abc"]),
    ("recursion", 'root ::= "a" | "(" root ")"', ["a", "((a))"], ["(a", ")"]),
    ("recursion on the left", 'root ::= root "a" | "b"', ["baa"], ["a"]),
    ("recursion by another rule", 'root ::= "a" x?\nx ::= "-" root', ["a-a-a"], ["a-"]),
    ("loops", 'root ::= x "a"\nx ::= "" | [ab] x | "c" x', ["a", "abca"], ["b", "c"]),
    ("loops from the left", 'root ::= root "," x | x\nx ::= x x | "a"', ["a", "aa,a"], ["a,", ","]),
    ("loops of rules", 'root ::= "(" r ")"\nr ::= root r | "x" | r', ["(x)", "((x)(x)x)"], ["()"]),
    ("a rule that is itself", 'root ::= root | ("a" | "b") root | "c"', ["c", "abc"], ["a"]),
    ("itself in the middle", 'root ::= "a" root "b" | "c" root | ""', ["acb", "cacb"], ["ca"]),
    ("times", 'root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,1}', ["aab", "aabbccd"], ["ab", "aabcccd"]),
    ("times of times", 'root ::= ([0-9]+)? ("a"{2}){2} "b"?*', ["aaaa", "12aaaabb"], ["aa"]),
    ("nothing", 'root ::= "" | "a" |', ["", "a"], ["b"]),
    ("escapes", r'root ::= "\x41\u00e9\U0001F600\n\"\\"', ['Aé😀\n"\\'], ["A"]),
    ("escapes in sets", r"root ::= [\x30-\x32\u00e9\]\[\\^-]+", ["0é][\\^-2"], ["3", "x"]),
    ("sets of unicode", "root ::= [ぁ-ゟ]+ [^a-z]", ["ぁZ", "ぁ\n"], ["ぁz"]),
    (
        "signs that mean something to others",
        "root ::= [a-c&&~~/.*+(){}|$#\"']+",
        ["b&~/$#'"],
        ["d"],
    ),
    ("ranges of signs", "root ::= [+--] [!-~]", ["-a", ",!"], [".a"]),
    ("any character", "root ::= . .", ["\né", "ab"], ["a"]),
    ("all but nothing", "root ::= [^]", ["\n", "]"], [""]),
    ("comments", '# of it\nroot ::= "#" # more\n | "b#" #', ["#", "b#"], ["b"]),
    ("lines", 'root ::= "a"\r\n  | "b"\r\n  "c"\r\nx ::= "d"', ["a", "bc"], ["b", "d"]),
    (
        "names alike",
        'root ::= a-b a_b A-B\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"',
        ["123"],
        ["111"],
    ),
    ("a name of Lark", 'root ::= start import\nstart ::= "a"\nimport ::= "b"', ["ab"], ["a"]),
    ("no spaces", 'root::="a"b\nb::="::="', ["a::="], ["a"]),
    ("a rule twice", 'root ::= x\nx ::= "a"\nx ::= "b"', ["b"], ["a"]),
]


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_grammar_takes_its_texts(grammar: str, taken: list[str], refused: list[str]) -> None:
    assert [takes(grammar, text) for text in taken] == [True] * len(taken)
    assert [takes(grammar, text) for text in refused] == [False] * len(refused)


STRINGS = r"""
root ::= "[" (string ("," string)*)? "]"
string ::= "\"" rest
rest ::= "\"" | [^"\\\x00-\x1F] rest | "\\" escape rest
escape ::= ["\\/bfnrt] | "u" hex hex hex hex
hex ::= [0-9A-Fa-f]
"""


def test_what_recurs_at_the_end_alone_is_no_recursion() -> None:
    """Of a terminal, masks are found without parsing each token's characters."""
    lark = lark_of(STRINGS)
    assert "start: RULE_0\n" in lark and "rule_" not in lark
    assert takes(STRINGS, r'["a\"b","\u00e9",""]')
    assert not takes(STRINGS, r'["a\"]')


TEXTS = ["", *("".join(t) for n in range(1, 5) for t in itertools.product("abc", repeat=n))]
Pair = tuple[str, str]  # the same in GBNF and as a regular expression


def drawn(draw: random.Random, rules: list[Pair], depth: int = 3) -> Pair:
    kind = draw.choice("tsuutoqr") if depth else draw.choice("ts")
    if kind == "u" and rules:
        return draw.choice(rules)
    if kind == "s":
        return (draw.choice(["[ab]", "[^a]", "[b-c]"]),) * 2
    if kind in "oq":
        parts = [drawn(draw, rules, depth - 1) for _ in range(draw.randint(2, 3))]
        between = " | " if kind == "o" else " "
        texts = between.join(text for text, _ in parts)
        return f"({texts})", f"(?:{between.strip().join(own for _, own in parts)})"
    if kind == "r":
        text, own = drawn(draw, rules, depth - 1)
        times = draw.choice(["*", "+", "?", "{2}", "{1,2}"])
        return f"{text}{times}", f"(?:{own}){times}"
    text = draw.choice(["a", "b", "ab", "c", ""])
    return f'"{text}"', text


def drawn_rule(draw: random.Random, name: str, rules: list[Pair]) -> Pair:
    """Its alternatives, of which some may go on with it, or begin with it."""
    (once, own_once), (step, own_step) = (drawn(draw, rules) for _ in range(2))
    match draw.choice(["plain", "right", "left"]):
        case "right":
            return f"{step} {name} | {once}", f"(?:(?:{own_step})*(?:{own_once}))"
        case "left":
            return f"{once} | {name} {step}", f"(?:(?:{own_once})(?:{own_step})*)"
    return once, f"(?:{own_once})"


@pytest.mark.parametrize("seed", range(40))
def test_grammars_take_what_regular_expressions_of_the_same_meaning_do(seed: int) -> None:
    draw = random.Random(seed)
    rules: list[Pair] = []
    lines: list[str] = []
    for name in ("x", "y", "z", "root"):
        text, pattern = drawn_rule(draw, name, rules)
        lines.append(f"{name} ::= {text}")
        rules.append((name, pattern))
    grammar = "\n".join(lines)
    for text in draw.sample(TEXTS, 20):
        expected = re.fullmatch(rules[-1][1], text, re.DOTALL) is not None
        assert takes(grammar, text) is expected, (text, grammar)


def test_lark_may_have_texts_like_rules() -> None:
    assert takes('start: "a ::= " /[bc]/\n', "a ::= c")


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ('foo ::= "a"', "no rule 'root'"),
        ('root ::= "a" foo', "rule 'root' uses 'foo', which is not defined"),
        ('root ::= "a"\n  "b', """line 2, at '"b': this is no part"""),
        ("root ::= 'a'", """line 1, at "'a'": this is no part"""),
        ('root ::= "a" )', "line 1, at ')': the name of a rule is expected here"),
        ('root ::= ("a"', "')' is expected here"),
        ('root "a"\nx ::= "b"', """at '"a"': ::= is expected here"""),
        ("root ::= *", "at '*'"),
        ('root ::= "a"{3,1}', "at '{3,1}': this is no number of times"),
        ('root ::= "a"{,}', "no number of times"),
        ('root ::= "a"{1,2,3}', "no number of times"),
        (r'root ::= "\d"', "at '\\\\d\"': this is no character"),
        (r'root ::= "a\ud800"', "no character"),
        ("root ::= [z-a]", "'a' is before 'z'"),
        ("root ::= []", "nothing is in the set"),
        ("root ::= <think>", "at '<think>'"),
    ],
)
def test_an_error_says_what_is_wrong_and_where(grammar: str, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars_of(byte_level()).prepare(SamplingParams(structured=Constraint.grammar(grammar)))
    assert part in str(caught.value)
