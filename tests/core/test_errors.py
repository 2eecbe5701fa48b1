"""The error tree: what a caller may catch, and what errors carry."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import quire
from quire.core import errors

TREE: dict[str, tuple[type[Exception], ...]] = {
    "ConfigError": (errors.QuireError, ValueError),
    "ModelFileError": (errors.QuireError,),
    "UnsupportedModelError": (errors.QuireError,),
    "RequestError": (errors.QuireError, ValueError),
    "RequestCancelledError": (errors.RequestError,),
    "DeadlineError": (errors.RequestError,),
    "ContextLengthError": (errors.RequestError,),
    "OverloadedError": (errors.QuireError,),
    "ExecutorError": (errors.QuireError,),
    "RowFaultError": (errors.ExecutorError,),
    "ExecutorMemoryError": (errors.ExecutorError,),
    "StepTimeoutError": (errors.ExecutorError,),
    "StepCancelledError": (errors.ExecutorError,),
    "WorkerCrashError": (errors.ExecutorError,),
}


@pytest.mark.parametrize("name", TREE)
def test_an_error_stands_where_the_tree_says(name: str) -> None:
    assert getattr(errors, name).__bases__ == TREE[name]


def test_the_tree_is_whole_and_drawn_in_the_module() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {*TREE, "QuireError"}
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in defined)


def test_an_overload_says_when_to_come_back() -> None:
    error = errors.OverloadedError("full", 2.5)
    assert str(error) == "full"
    assert error.retry_after_s == 2.5
    assert not isinstance(error, ValueError)


SOURCES = Path(errors.__file__).parent.parent
# A call that comes when it may not: none of its parameters is at fault.
WITHOUT_PARAMETER = {"llm/offline.py": 2, "llm/online.py": 1}


def test_every_request_error_names_its_parameter() -> None:
    packages = ("core", "tokenizer", "engine", "llm", "batching.py")
    paths = [path for name in packages for path in _modules(SOURCES / name)]
    nameless = Counter(
        path.relative_to(SOURCES).as_posix()
        for path in paths
        for call in _calls_of(path, "RequestError")
        if not any(keyword.arg == "param" for keyword in call.keywords)
    )
    assert nameless == WITHOUT_PARAMETER


# Private names, paths of modules, classes that users do not import.
INTERNAL = re.compile(r"(?<![\w-])_[a-z]\w*|\bquire\.[a-z]\w*|\b(?:[A-Z][a-z]+){2,}\b|\bself\b")


def test_no_message_to_users_names_internals() -> None:
    found = []
    for path in (path for name in ("core", "engine", "llm") for path in _modules(SOURCES / name)):
        for error in (*TREE, "QuireError"):
            for call in _calls_of(path, error):
                nodes = [node for argument in call.args for node in ast.walk(argument)]
                texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
                words = INTERNAL.findall(" ".join(map(str, texts)))
                found += [(path.name, word) for word in words if word not in quire.__all__]
    assert found == []


def _modules(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _calls_of(path: Path, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]


def test_a_request_error_carries_its_parameter() -> None:
    assert errors.RequestError("n is 0", param="n").param == "n"
    assert errors.DeadlineError("out of time").param is None
