"""The error tree: what a caller may catch."""

import pytest

from quire.core import errors

TREE: dict[str, tuple[type[Exception], ...]] = {
    "ConfigError": (errors.QuireError, ValueError),
    "ModelFileError": (errors.QuireError,),
    "UnsupportedModelError": (errors.QuireError,),
    "RequestError": (errors.QuireError, ValueError),
    "RequestCancelledError": (errors.RequestError,),
    "DeadlineError": (errors.RequestError,),
    "OverloadedError": (errors.QuireError,),
    "ExecutorError": (errors.QuireError,),
    "RowFaultError": (errors.ExecutorError,),
    "ExecutorMemoryError": (errors.ExecutorError,),
    "StepTimeoutError": (errors.ExecutorError,),
    "StepCancelledError": (errors.ExecutorError,),
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
