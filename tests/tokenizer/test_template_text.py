"""Marks on the template's own text: they follow it, and no text of a request ever gets one.

In most tests the template's letters are capitals and the request's are small, so that what is
marked can be told from what should be.
"""

import itertools
import re
import string
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenizer import ChatTemplate
from quire.tokenizer.template_text import TemplateText, joined, marks_of

CAPITALS = st.text("AB%{}S \n<|>", max_size=8).map(TemplateText.whole)
SMALL = st.text("ab \n-", max_size=8)


def own_text(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    return [text[start:end] for start, end in spans]


def mixed() -> st.SearchStrategy[str]:
    return st.lists(st.one_of(CAPITALS, SMALL), max_size=5).map(joined)


def check(text: Any) -> None:
    """Whatever is marked is the template's, and marks are in order and inside of the text."""
    for item in text if isinstance(text, list | tuple) else [text]:
        spans = marks_of(item)
        assert not set("".join(own_text(item, spans))) & set("ab-"), (item, spans)
        assert all(0 <= start <= end <= len(item) for start, end in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(text=mixed(), other=mixed(), start=st.integers(-9, 9), stop=st.integers(-9, 9))
def test_every_operation_gives_the_text_it_gives_without_marks(
    text: str, other: str, start: int, stop: int
) -> None:
    plain, plain_other = "".join(text), "".join(other)
    count = abs(stop)
    for found, expected in (
        (text + other, plain + plain_other),
        (text + plain_other, plain + plain_other),
        (plain + other, plain + plain_other),
        (text * (count % 3), plain * (count % 3)),
        (text[start:stop], plain[start:stop]),
        (text[start:stop:2], plain[start:stop:2]),
        (text.strip(), plain.strip()),
        (text.lstrip("aA "), plain.lstrip("aA ")),
        (text.rstrip("\n"), plain.rstrip("\n")),
        (text.split(), plain.split()),
        (text.split(None, count), plain.split(None, count)),
        (text.split("a"), plain.split("a")),
        (text.split("A", count), plain.split("A", count)),
        (text.rsplit(None, count), plain.rsplit(None, count)),
        (text.rsplit("B", count), plain.rsplit("B", count)),
        (text.splitlines(), plain.splitlines()),
        (text.splitlines(True), plain.splitlines(True)),
        (text.partition("a"), plain.partition("a")),
        (text.rpartition("A"), plain.rpartition("A")),
        (text.removeprefix("A"), plain.removeprefix("A")),
        (text.removesuffix("a"), plain.removesuffix("a")),
        (text.replace("a", other), plain.replace("a", plain_other)),
        (text.replace("A", other, count), plain.replace("A", plain_other, count)),
        (text.replace("", other, count), plain.replace("", plain_other, count)),
        (text.join([other, "a", text]), plain.join([plain_other, "a", plain])),
        (str(text), plain),
        (text.lower(), plain.lower()),
        (text.center(count), plain.center(count)),
    ):
        assert found == expected
        check(found)


@given(text=mixed(), values=st.lists(mixed(), max_size=3))
def test_formatting_gives_the_same_text_or_the_same_error(text: str, values: list[str]) -> None:
    form = text.replace("S", TemplateText.whole("s"))
    plain = "".join(form)
    for given_values in (tuple(values), values, {"s": values}, "a"):
        try:
            expected = plain % given_values
        except (TypeError, ValueError, KeyError) as error:
            with pytest.raises(type(error)):
                _ = form % given_values
        else:
            found = form % given_values
            assert found == expected
            check(found)


def test_marks_meet_only_where_nothing_of_a_request_stood_between() -> None:
    one, two = TemplateText.whole("AB"), TemplateText.whole("CD")
    assert marks_of(one + two) == ((0, 4),)
    assert marks_of(joined([one, "", two])) == ((0, 2), (2, 4))
    assert marks_of(joined([one, TemplateText.whole(""), two])) == ((0, 4),)
    assert marks_of(one[:1] + one[1:]) == ((0, 2),)
    assert marks_of(TemplateText("AB")) == (), "made of any text, it is not the template's"


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("A{{ u }}B", ["A", "B"]),
        ("{{ 'A' + u + 'B' }}", ["A", "B"]),
        ("{{ 'A' ~ u ~ 'B' ~ 'C' }}", ["A", "BC"]),
        ("{{ 'A%sB' % u }}{{ '%dC' % 5 }}", ["A", "B5C"]),
        ("{{ 'A%sB'|format(u) }}{{ '100%%D' % () }}", ["A", "B100%D"]),
        ("{{ 'A%sB%iC' % (u, n) }}", ["A", "B", "C"]),
        ("{{ 'A{}B{}'.format(u, 'C') }}", ["A", "BC"]),
        ("{{ 'A{x}B{{'.format(x=u) }}", ["A", "B{"]),
        ("{{ ['A', u, 'B', 'C']|join }}", ["A", "BC"]),
        ("{{ ['A', u]|join('B') }}{{ 'C'.join([u, 'D']) }}", ["AB", "CD"]),
        ("{{ ('  A' ~ u ~ 'B  ')|trim }}", ["A", "B"]),
        ("{{ ('A,' ~ u ~ ',B').split(',') | join('C') }}", ["AC", "CB"]),
        ("{{ 'AxB'.replace('x', u) }}", ["A", "B"]),
        ("{{ u.replace('e', 'E') }}{{ 'X' }}", ["X"]),
        ("{{ ('A' ~ u ~ 'BCD')[:-1] }}", ["A", "BC"]),
        ("{{ 'AB' * 2 }}{{ u }}", ["ABAB"]),
        ("{% set x %}A{{ u }}B{% endset %}{{ x }}{{ x|trim }}", ["A", "BA", "B"]),
        ("{% macro m(x) %}A{{ x }}B{% endmacro %}{{ m(u) }}{{ m('C') }}", ["A", "BACB"]),
        ("{% macro m() %}A{{ caller() }}{% endmacro %}{% call m() %}B{{ u }}{% endcall %}", ["AB"]),
        ("{% filter trim %} A{{ u }} {% endfilter %}{{ 'B'|string }}", ["A", "B"]),
        ("{% block b %}A{% endblock %}{{ self.b() }}{{ u }}", ["AA"]),
        ("{% for x in ['A', u, 'B'] %}{{ x }}{% endfor %}", ["A", "B"]),
        ("{{ {'user': 'A'}[messages[0].role] }}{{ dict(k='B').k }}{{ u }}", ["AB"]),
        ("{% set ns = namespace(x='') %}{% set ns.x = ns.x ~ 'A' ~ u %}{{ ns.x }}", ["A"]),
        ("{% generation %}A{{ u }}{% endgeneration %}", ["A"]),
        ("{{ '<|' + messages[0].role + '|>' }}{{ u }}", ["<|user|>"]),
        ("{{ bos_token + u + eos_token }}", ["<BOS>", "<EOS>"]),
        ("{{ nothing|default('A') }}{{ u or 'B' }}{{ 'C' if u else u }}", ["A", "C"]),
        ("{{ [u, 'A']|first }}{{ [u, 'A']|last }}{{ ('A', u)[0] }}", ["AA"]),
        ("{{ u|tojson }}{{ [u]|tojson }}{{ u|upper }}{{ u|e }}{{ u|safe }}", []),
        ("{{ u.format() }}{{ u % () }}{{ u.join(['A']) }}", []),
        ("{{ u|replace('h', 'A') }}{{ u|indent }}{{ u|center(9) }}{{ u ~ n }}", []),
        ("{{ '{}'.format(u) }}{{ '%s' % u }}{{ '{0[0]}{0}'.format(u) }}", []),
        ("{{ u.strip().split('l')|join('-') }}", ["-", "-"]),
        ("{{ messages[0]|string }}{{ messages|tojson }}{{ messages[0].keys()|join }}", []),
        ("{{ tools|tojson }}{{ extra }}{{ extra|upper }}", []),
    ],
)
def test_what_is_written_in_the_template_is_its_own(source: str, own: list[str]) -> None:
    template = ChatTemplate("{% set u = messages[0].content %}" + source, "<BOS>", "<EOS>")
    messages = [{"role": "user", "content": "hello"}]
    text, spans = template.render(
        messages, tools=[{"k": "v"}], variables={"extra": "extra", "n": 7}
    )
    assert own_text(text, spans) == own
    assert not re.search("h|e|l|o", "".join(own_text(text, spans)).replace("user", ""))


def test_only_the_usual_roles_are_taken_for_the_templates() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }};{% endfor %}"
    )
    roles = ["system", "user", "assistant", "tool", "im_end", "User", "user|><|im_end", "системa"]
    text, spans = template.render([{"role": role, "content": ""} for role in roles])
    own = "".join(f"{part}\0" for part in own_text(text, spans))
    assert re.findall(r"<\|\w+\|>", own) == ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


PIECES = [
    *(
        "A",
        "{{ u }}",
        "{{ 'A' ~ u }}",
        "{{ (u ~ 'B')|trim }}",
        "{{ ('A' ~ u).split('h')|join('C') }}",
    ),
    *("{{ '%sA' % u }}", "{{ 'A{}'.format(u) }}", "{{ x }}", "{% set x = x ~ u ~ 'A' %}{{ x }}"),
    *("{{ x.replace('A', u) }}", "{{ x[1:-1] }}", "{{ [x, u, 'D']|join('E') }}", "{{ x * 2 }}"),
    *("{{ x.partition('A')|join(u) }}", "{{ x|replace(u, 'A') }}", "{{ x|tojson }}", "{{ m(u) }}"),
    *("{% set x %}{{ x }}{{ u }}B{% endset %}", "{{ x|indent(2, true) }}", "{{ x.upper() }}"),
    *("{{ x.splitlines()|join('A') }}", "{{ u.join([x, 'A']) }}", "{{ x.rsplit(u + 'a')|join }}"),
    *("{{ m(x)|trim }}", "{{ x.removeprefix('A') ~ x.strip(u) }}", "{{ x|list|join }}"),
]
LOSING = ("upper", "tojson", "indent", "list", "join(u)", "u.join", "replace(u")


@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    content=st.text(string.ascii_lowercase + "\n ", max_size=6),
)
def test_chains_of_operations_never_mark_text_of_a_request(pieces: list[str], content: str) -> None:
    head = "{% set u = messages[0].content %}{% set x = 'A' ~ u %}"
    macro = "{% macro m(a) %}A{{ a }}B{{ a ~ 'C' }}{% endmacro %}"
    text, spans = ChatTemplate(head + macro + "".join(pieces)).render(
        [{"role": "user", "content": content}]
    )
    own = "".join(own_text(text, spans))
    assert not set(own) & set(string.ascii_lowercase)
    if not any(word in piece for word in LOSING for piece in pieces):
        assert re.sub("[^A-E]", "", own) == re.sub("[^A-E]", "", text), "all of it is marked"
