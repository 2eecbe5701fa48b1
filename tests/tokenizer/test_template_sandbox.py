"""Hostile chat templates: none gets out, none goes on for ever, all end in a typed error.

Each would run for hours or fill the memory, so that most of these tests need no clock: it is enough
that they end. After each of them the same program renders the next chat.
"""

import copy
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ModelFileError, OverloadedError, QuireError, RequestError
from quire.tokenizer import ChatTemplate
from quire.tokenizer import chat_template as limits
from quire.tokenizer.template_process import (
    PROCESSES,
    TemplateProcessError,
    TemplateProcesses,
    _TemplateProcess,
)
from quire.tokenizer.template_worker import MEMORY_BYTES, Question, TemplateEnvironment

MESSAGES = [{"role": "user", "content": "hello"}]
PLAIN = "{{ messages[0].content }}"


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(MESSAGES, variables=variables).text


@pytest.fixture(autouse=True)
def goes_on() -> Iterator[None]:
    yield
    assert render(PLAIN) == "hello"


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To save time: what would run for hours is stopped after a tenth of a second."""
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.1)
    monkeypatch.setattr(limits, "RENDER_SECONDS_PER_BYTE", 0.0)


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
        "(1).__add__(2)",
        "range.__class__",
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
        "messages[0]|attr('__class__')|attr('__mro__')",
        "(messages|attr('pop'))()",
        "'{0.__class__.__mro__}'|format(1)",
        "''.format_map.__self__.__class__",
        "namespace.__class__.__base__",
        "joiner.__init__['__globals__']",
        "cycler.__init__|attr('__globals__')",
        "dict.__subclasses__()",
        "strftime_now.__globals__",
        "tojson",
        "self._TemplateReference__context.environment",
        "messages[0].items().__reduce__()",
        "messages.__class__.__init__.__globals__",
        "('__cla' ~ 'ss__') in messages[0] or messages[0]['__cla' ~ 'ss__']",
        "[messages]|map('attr', '__class__')|map('attr', '__mro__')|list",
        "messages|sum(attribute='__class__')",
        "'x'._spans",
        "'x'['_spans']",
        "environment",
        "environment.texts",
        "context",
        "resolve('os')",
        "get_context()",
        "(1).__class__.__bases__[0].__subclasses__()[0]",
        "{}.__class__.__mro__[-1].__subclasses__()",
    ],
)
def test_an_expression_that_reaches_for_python_gets_nothing(expression: str) -> None:
    try:
        text = render("{{ " + expression + " }}")
    except QuireError:
        return
    assert text in ("", "[]", "['']", "[Undefined]", "{0.__class__}", "False")


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'secret' %}",
        "{% import 'secret' as s %}",
        "{% from 'secret' import s %}",
        "{% extends 'secret' %}",
        "{% include ['/etc/passwd', '../secret'] ignore missing %}",
    ],
)
def test_no_other_file_is_read(source: str) -> None:
    with pytest.raises(RequestError, match="no loader for this environment"):
        render(source)


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
        "{% for a in range(100000) if false %}{% endfor %}" * 2000,
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
@pytest.mark.usefixtures("little_time")
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"was stopped: (it loops or grows|maximum recursion)"):
        render(source)


@pytest.mark.parametrize("kept", ["x.split()", "x|list", "x.upper()", "x[1:]", "x ~ 1", "x|tojson"])
@pytest.mark.usefixtures("little_time")
def test_what_a_template_keeps_is_bounded_and_given_back(kept: str) -> None:
    """All it keeps is in the process that renders, which goes with it."""
    source = (
        "{% set x = '🙂 ' * 20000 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(99999) %}{% set ns.l = [ns.l, " + kept + "] %}{% endfor %}"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match="loops or grows"):
        render(source)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_BYTES / 4


@pytest.mark.parametrize(
    "expression",
    [
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "'%.1000000000f' % 1.5",
        "'%1000000000d'|format(1)",
        "'{:1000000000}'.format(1)",
        "'{!r:1000000000}'.format(1)",
        "'{:{}}'.format(1, 1000000000)",
        "'a'|indent(1000000000, true)",
        "'a'|center(1000000000)",
        "'a'.ljust(1000000000)",
        "'a'.zfill(1000000000)",
        "'\t'.expandtabs(1000000000)",
        "messages|tojson(indent=1000000000)",
        "messages|tojson(separators=(',' * 1000000000, ':'))",
        "[1]|batch(1000000000, 'x')|list",
        "[1]|slice(1000000000)|list",
        "('a' * 100000).replace('', 'b' * 100000)",
        "('a,' * 1000000).split(',') * 1000",
        "('a' * 99999)|list|map('center', 99999)|list",
        "(2 ** 100000000) ** 100",
        "10 ** 10 ** 8",
        "('9' * 100000000)|int",
        "lipsum(n=100000)",
        "range(99999)|map('string')|map('center', 99999)|join",
        "'a' * 1000000000",
        "1000000000 * ['a']",
        "raise_exception('a' * 1000000000)",
        "strftime_now('%999999999d' * 9999)",
    ],
)
@pytest.mark.usefixtures("little_time")
def test_an_operation_that_grows_inside_of_one_call_is_stopped(expression: str) -> None:
    try:
        text = render("{% set x = " + expression + " %}done")
    except QuireError as error:
        assert "was stopped: it loops or grows" in str(error) or "line 1: " in str(error)
    else:
        assert text == "done"  # it was possible within the limits


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 100_000,
        "{{ " + "not " * 100_000 + "x }}",
        "{{ x" + ".y" * 100_000 + " }}",
        "{{ x" + "|trim" * 50_000 + " }}",
        "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
        "{{ " + "-" * 200_000 + "1 }}",
        "{{ 'a' ~ " * 10_000,
        "{% if x %}" * 20_000 + "{% endif %}" * 20_000,
        "{% for a in b %}" * 15_000 + "{% endfor %}" * 15_000,
        "{% macro m() %}" * 8_000 + "{% endmacro %}" * 8_000,
        "{% set x %}" * 10_000 + "{% endset %}" * 10_000,
        "{#" * 100_000,
        "{{" * 100_000,
        "{% raw %}" * 20_000,
        "{{ " + "9" * 200_000 + " }}",
        "{{ '" + "\\N{LATIN SMALL LETTER A}" * 9_000 + "' }}",
        "{{ x if " * 20_000,
        "{{ 1 if 1 else " * 15_000 + "1" + " }}" * 15_000,
    ],
    ids=lambda source: source[:20] + f"…{len(source)}",
)
def test_a_template_made_to_break_the_compiler_does_not_break_us(source: str) -> None:
    try:
        render(source)
    except QuireError:
        return


@pytest.mark.usefixtures("little_time")
def test_a_request_made_to_keep_a_sound_template_busy_is_stopped() -> None:
    quadratic = "{% for m in messages %}{% for n in messages %}{{ m.content in n.content }}"
    template = ChatTemplate(quadratic + "{% endfor %}{% endfor %}")
    with pytest.raises(ModelFileError, match="was stopped: it loops or grows"):
        template.render(MESSAGES * 5_000)


def test_long_messages_have_time_in_proportion_to_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.0)
    monkeypatch.setattr(limits, "RENDER_SECONDS_PER_BYTE", 1e-5)
    content = "word " * 100_000
    source = "{% for i in range(20) %}{% set x = messages[0].content.strip() %}{% endfor %}done"
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": content}]).text == "done"


def test_the_text_may_be_as_long_as_messages_make_it_but_not_longer() -> None:
    content = "x" * (2 * limits.MAX_CHARACTERS)
    messages = [{"role": "user", "content": content}]
    assert len(ChatTemplate(PLAIN * 2).render(messages).text) == 2 * len(content)
    with pytest.raises(ModelFileError, match=r"grows without end; it may write \d+ characters"):
        ChatTemplate(PLAIN * 9).render(messages)


# ---- the process


def test_a_process_that_is_killed_fails_its_chat_alone() -> None:
    process = _TemplateProcess()
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    processes = TemplateProcesses(1)
    processes._idle.append(process)
    with pytest.raises(TemplateProcessError, match="its process ended with -9"):
        processes.ask({"key": "x", "seconds": 1})
    assert processes.ask({"key": "x", "seconds": 1})["error"] == "unknown"
    processes.end()


@pytest.mark.parametrize(
    "answer",
    [b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x03\0\0\0\0\0\0\0{x}", b"\x01\0\0\0\0\0\0\0" + b"5"],
)
def test_a_process_that_answers_nonsense_is_ended(answer: bytes) -> None:
    """As one might that a template has taken over."""
    process = _TemplateProcess()
    ours, theirs = socket.socketpair()
    process._socket.close()
    process._socket = ours
    theirs.sendall(answer)
    with pytest.raises(TemplateProcessError, match="its process answers nonsense"):
        process.ask({"seconds": 1}, b"")
    assert not process.is_sound
    process.close()
    theirs.close()


def test_threads_that_render_at_once_use_no_more_processes_than_are_allowed() -> None:
    processes = TemplateProcesses(2)
    question = Question(key="x", source=PLAIN, seconds=5, tokens={}, max_characters=100)
    values = b'{"messages": [{"role": "user", "content": "hi"}]}'
    texts: list[str] = []

    def ask() -> None:
        texts.extend(processes.ask(question, values)["text"] for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["hi"] * 40
    assert len(processes._idle) <= 2
    processes.end()
    assert processes._idle == []


def test_processes_end_with_the_last_template_that_is_closed() -> None:
    first, second = ChatTemplate(PLAIN), ChatTemplate(PLAIN)
    others = set(PROCESSES._users) - {first, second}
    for other in others:
        PROCESSES.close(other)
    first.close()
    assert PROCESSES._idle
    pids = [process._process.pid for process in PROCESSES._idle]
    second.close()
    assert PROCESSES._idle == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert first.render(MESSAGES).text == "hello", "and start again when they are wanted"


def test_a_process_that_cannot_be_started_is_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(OverloadedError, match="Too many open files"):
        TemplateProcesses(1).ask({})


def test_what_renders_has_no_files_no_secrets_and_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a secret that templates must not see")
    started: list[Any] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        started.append(options)
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    process = _TemplateProcess()
    assert "QUIRE_API_KEY" not in started[0]["env"]
    pid = process._process.pid
    assert process.ask({"key": "x", "seconds": 1}, b"")["error"] == "unknown"
    with open(f"/proc/{pid}/limits") as table:
        rows = {row[:25].strip(): row[25:].split()[:2] for row in table}
    assert rows["Max address space"] == [str(MEMORY_BYTES)] * 2
    for kind in ("Max open files", "Max processes", "Max file size", "Max core file size"):
        assert rows[kind] == ["0", "0"]
    with open(f"/proc/{pid}/status") as table:
        status = {name: value.strip() for name, _, value in (row.partition(":") for row in table)}
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == 0
    process.close()


def test_a_process_outlives_the_thread_that_started_it() -> None:
    processes = TemplateProcesses(1)
    thread = threading.Thread(target=processes.ask, args=({"key": "x", "seconds": 1},))
    thread.start()
    thread.join()
    assert processes.ask({"key": "x", "seconds": 1})["error"] == "unknown"
    processes.end()


def test_a_fork_leaves_its_parents_processes_alone() -> None:
    program = (
        "import os, sys\n"
        "from quire.tokenizer import ChatTemplate\n"
        "template = ChatTemplate('{{ messages[0].content }}')\n"
        "def text(n):\n"
        "    return template.render([{'role': 'user', 'content': str(n)}]).text\n"
        "child = os.fork()\n"
        "assert all(text(n) == str(n) for n in range(50)), child\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print('sound')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout == b"sound\n"


# ---- what templates are given


def test_messages_tools_and_variables_are_never_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "x": {"y": [1]}}]
    tools = [{"function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    source = "{% set messages = 1 %}{% set tools = 2 %}{% set x = 3 %}"
    ChatTemplate(source).render(messages, tools=tools, variables={"x": {"a": 1}})
    assert (messages, tools) == before


def test_an_object_with_a_life_of_its_own_never_reaches_the_template() -> None:
    class Trap(str):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("the template has the object itself")

    assert render("{{ x[0] }}", x=Trap("abc")) == "a"
    with pytest.raises(RequestError, match=r"x must be plain JSON data, got object"):
        render("{{ x }}", x=object())


ENVIRONMENT = TemplateEnvironment()
NAMES = [
    *ENVIRONMENT.filters,
    *ENVIRONMENT.tests,
    *ENVIRONMENT.globals,
    "upper",
    "items",
    "get",
    "split",
    "__class__",
    "loop",
]
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
@settings(max_examples=200)
def test_random_templates_give_text_or_a_typed_error(parts: list[str]) -> None:
    body = "".join("{% set x = " + part + " %}{{ x }}" for part in parts)
    source = "{% set ns = namespace(a=[1]) %}{% for m in messages %}" + body + "{% endfor %}"
    try:
        text = render(source)
    except QuireError:
        return
    assert isinstance(text, str)
