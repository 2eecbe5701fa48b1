"""Hostile chat templates: none gets out, none goes on for ever, all end in a typed error.

A template that is not stopped by its count of work would run for hours or fill the memory, so most
of these tests need no clock: it is enough that they end.
"""

import copy
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ModelFileError, QuireError, RequestError
from quire.tokenizer import ChatTemplate
from quire.tokenizer.template_filters import FILTERS, TESTS
from quire.tokenizer.template_methods import FUNCTIONS

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "''|attr('__class__')",
        "[''|string]|map(attribute='__class__')|list",
        "['']|map('attr', '__class__')|list",
        "['']|selectattr('__class__')|list",
        "['']|sort(attribute='__class__')",
        "['']|join(attribute='__class__')",
        "messages.__init__.__globals__",
        "messages[0].items.__self__",
        "messages[0]['items']['__self__']",
        "messages[0].items['function']",
        "messages[0].items.owner",
        "messages[0].items[0]",
        "raise_exception.__globals__",
        "raise_exception['function']",
        "namespace.__init__.__globals__['__builtins__']",
        "namespace(a=1)['_Namespace__attrs']",
        "namespace(a=1)._Namespace__attrs",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "joiner.__init__.__globals__",
        "lipsum.__globals__['os'].popen('id').read()",
        "self.__init__.__globals__",
        "self._TemplateReference__context",
        "self['_TemplateReference__context']",
        "loop.__init__",
        "'{0.__class__}'.format(1)",
        "'{0[__class__]}'.format(messages)",
        "'{a.__class__}'.format_map({'a': 1})",
        "('{0.__cl' ~ 'ass__}').format(messages)",
        "''.format.__self__",
        "['{0.__class__}']|map('format', 1)|list",
        "[1]|map('<counted>', -1000000)|list",
        "(1).__add__(2)",
        "(1).to_bytes(9, 'big')",
        "''.encode()",
        "range.__class__",
        "dict.fromkeys([1])",
        "dict([(1, 2)])",
        "messages.append(1)",
        "messages.clear()",
        "messages[0].update({'role': 'x'})",
        "messages[0].pop('role')",
        "messages[0].setdefault('x', 1)",
        "caller.__class__",
        "undefined_name.__class__",
        "varargs",
        "config",
        "request.application.__globals__",
        "get_flashed_messages.__globals__",
        "url_for.__globals__",
        "(messages|first).__class__.__mro__[1].__subclasses__()",
        "messages|random",
        "messages|pprint",
        "range(*[1, 2])",
        "dict(**messages[0])",
        "1 < 2 < 3",
    ],
)
def test_an_expression_that_reaches_for_python_gets_nothing(expression: str) -> None:
    try:
        text = render("{{ " + expression + " }}")
    except QuireError:
        return
    assert text in ("", "[]", "[Undefined]", "{0.__class__}")


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'secret' %}",
        "{% import 'secret' as s %}",
        "{% from 'secret' import s %}",
        "{% extends 'secret' %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% autoescape true %}{% endautoescape %}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% do messages.append(1) %}",
        "{% trans %}a{% endtrans %}",
        "{% debug %}",
        "{{ messages[0].__class__ }}",
        "{{ messages|center(100) }}",
        "{{ messages|wordwrap }}",
        "{% for a in b %}" * 17 + "{% endfor %}" * 17,
    ],
)
def test_what_is_outside_the_subset_is_refused_before_it_runs(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source)


NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(x=START, y=START) %}{% for i in range(100) %}STEP{% endfor %}END"


def growing(start: str, step: str, end: str = "") -> str:
    return GROWING.replace("START", start).replace("STEP", step).replace("END", end)


DOUBLE_LIST = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
DOUBLE_TUPLE = "{% set ns.x = (ns.x, ns.x) %}"


@pytest.mark.parametrize(
    "source",
    [
        *(
            NESTED.replace("BODY", body)
            for body in (
                "",
                "x",
                "{% if b %}{% endif %}" * 50,
                "{{ b }}",
                "{% set c = messages[0].nothing %}",
                "{% set c = 'x'.upper() %}",
                "{% set c = [3, 1]|sort %}",
                "{% set c = messages|tojson(indent=2) %}",
                "{% set c = strftime_now('%Y') %}",
                "{% set c = namespace(a=1) %}",
                "{% set c = '%d' % a %}",
                "{% set c %}x{% endset %}",
                "{% macro m() %}{% endmacro %}",
                "{% continue %}",
                "{% for c in [1] if false %}{% endfor %}",
                "{% set c, d = [1, 2] %}",
                "{{ loop.length }}",
            )
        ),
        "{% for a in range(100000) if false %}{% endfor %}" * 50,
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) * 2 }}{% endif %}x{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 30
        + "{% endcall %}" * 30,
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * ['a'] }}",
        growing("'a'", "{% set ns.x = ns.x + ns.x %}"),
        growing("'a'", "{% set ns.x = ns.x ~ ns.x %}"),
        growing("'a'", "{% set ns.x = [ns.x, ns.x]|join %}"),
        growing("'a'", "{% set ns.x = ''.join([ns.x, ns.x]) %}"),
        growing("'a'", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
        growing("'a'", "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}"),
        growing("'aa'", "{% set ns.x = ns.x|replace('a', ns.x) %}"),
        growing("'aa'", "{% set ns.x = ns.x.replace('a', ns.x) %}"),
        growing("'aa'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        growing("'a\nb'", "{% set ns.x = (ns.x ~ '\n')|indent(64) ~ ns.x %}"),
        growing("[1]", "{% set ns.x = ns.x + ns.x %}"),
        growing("[1]", "{% set ns.x = ns.x * 2 %}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x ~ '' }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x|string }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x|tojson }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x|upper }}"),
        growing("[1]", DOUBLE_LIST, "{{ '%s' % ns.x }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x == ns.y }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x in [ns.y] }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x is eq ns.y }}"),
        growing("[1]", DOUBLE_LIST, "{{ ns.x < ns.y }}"),
        growing("[1]", DOUBLE_LIST, "{{ [ns.x].index(ns.y) }}"),
        growing("[1]", DOUBLE_LIST, "{{ [ns.x, ns.y]|sort }}"),
        growing("[1]", DOUBLE_LIST, "{{ [ns.x, ns.y]|max }}"),
        growing("[1]", DOUBLE_LIST, "{{ raise_exception(ns.x) }}"),
        growing("(1, 2)", DOUBLE_TUPLE, "{{ [ns.x]|unique|list }}"),
        growing(
            "[]", "{% for j in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}", "{{ ns.x }}"
        ),
        "{% set x = 'a' * 100000 %}{% for i in range(1000) %}{% set c = x.strip(x) %}{% endfor %}",
        "{% set x = 'a' * 100000 %}{% for i in range(1000) %}{% set c = x|trim(x) %}{% endfor %}",
        "{% set x = 'a' * 100000 %}{% set y = x ~ 'b' ~ x %}"
        "{% for i in range(100000) %}{% set c = (x * 9).rfind(y) %}{% endfor %}",
    ],
    ids=lambda source: source[:30] + "…" + source[-40:],
)
def test_a_template_that_would_not_end_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.tokenizer.chat_template.BASE_UNITS", 200_000)  # to save time
    with pytest.raises(ModelFileError, match=r"was stopped: (it loops or grows|maximum recursion)"):
        render(source)


@pytest.mark.parametrize("kept", ["x.split()", "x|list", "x.upper()", "x[1:]", "x ~ 1", "x|tojson"])
def test_what_a_template_keeps_before_it_is_stopped_is_bounded(kept: str) -> None:
    source = (
        "{% set x = '🙂 ' * 20000 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(99999) %}{% set ns.l = [ns.l, " + kept + "] %}{% endfor %}"
    )
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="loops or grows"):
            render(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


@pytest.mark.parametrize(
    "expression",
    [
        "range(1000000000)",
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "'%.1000000000f' % 1.5",
        "'%1000000000d'|format(1)",
        "'{:1000000000}'.format(1)",
        "'{!r:1000000000}'.format(1)",
        "'a'|indent(1000000000)",
        "messages|tojson(indent=1000000000)",
        "messages|tojson(separators=(',' * 1000, ':'))",
        "5|round(-1000000000)",
        "5|round(1000000000, 'ceil')",
        "2 ** 1000000000",
        "(2 ** 4000) * (2 ** 4000)",
        "'%1000000000d' is even",
        "'%1000000000d' is divisibleby 2",
        "{(1, 2): 3}",
        "{}[(1, 2)]",
        "{}.get((1, 2))",
        "[[1], [2]]|sum",
        "'a' - 1",
        "messages[0] + messages[0]",
        "namespace(a=1)",
        "[namespace(a=1)]",
        "[range]|tojson",
        "namespace(a=1) ~ ''",
    ],
)
def test_an_operation_that_could_grow_without_bound_is_an_error(expression: str) -> None:
    with pytest.raises(RequestError, match=r"line 1: \w+Error"):
        render("{{ " + expression + " }}")


def test_messages_tools_and_variables_are_never_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "x": {"y": [1]}}]
    tools = [{"function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    source = "{% set messages = 1 %}{% set tools = 2 %}{% set x = 3 %}"
    ChatTemplate(source).render(messages, tools=tools, x={"a": 1})
    assert (messages, tools) == before


def test_an_object_with_a_life_of_its_own_never_reaches_the_template() -> None:
    class Trap(str):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("the template has the object itself")

    assert render("{{ x[0] }}", x=Trap("abc")) == "a"
    with pytest.raises(RequestError, match=r"x must be plain JSON data, got object"):
        render("{{ x }}", x=object())


NAMES = [*FILTERS, *TESTS, *FUNCTIONS, "upper", "items", "get", "split", "__class__", "loop"]
ATOMS = ["messages", "x", "ns", "loop", "'a'", "3", "[1, 'b']", "{'k': [2]}", "none", "range"]

OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "if"]


def expressions() -> st.SearchStrategy[str]:
    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        name = st.sampled_from(NAMES)
        operator = st.sampled_from(OPERATORS)
        return st.one_of(
            st.tuples(inner, operator, inner).map(" ".join),
            st.builds("{}|{}".format, inner, name),
            st.builds("{}|{}({})".format, inner, name, inner),
            st.builds("({}).{}".format, inner, name),
            st.builds("({}).{}({})".format, inner, name, inner),
            st.builds("({})[{}]".format, inner, inner),
            st.builds("({})[{}:]".format, inner, inner),
            st.builds("({}) is {}".format, inner, name),
            st.builds("[{}, {}]".format, inner, inner),
            st.builds("{}({})".format, name, inner),
        )

    return st.recursive(st.sampled_from(ATOMS), extend, max_leaves=6)


@given(parts=st.lists(expressions(), min_size=1, max_size=3))
@settings(max_examples=400)
def test_random_templates_give_text_or_a_typed_error(parts: list[str]) -> None:
    body = "".join("{% set x = " + part + " %}{{ x }}" for part in parts)
    source = "{% set ns = namespace(a=[1]) %}{% for m in messages %}" + body + "{% endfor %}"
    try:
        text = render(source)
    except QuireError:
        return
    assert isinstance(text, str)
    assert " at 0x" not in text  # no object of Python's was printed
