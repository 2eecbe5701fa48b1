"""The processes that check constraints."""

import pytest
from tests.structured.test_grammars import byte_level
from tests.structured.walks import grammars_of

from quire.core.errors import OverloadedError
from quire.core.sampling import Constraint, SamplingParams
from quire.core.worker_process import WorkerProcess
from quire.structured import checker


def test_a_busy_machine_is_an_overload_and_not_remembered_as_the_constraints_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object) -> bytes:
        raise TimeoutError

    made = grammars_of(byte_level())
    params = SamplingParams(structured=Constraint.regex("busy+"))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "receive", late)
        with pytest.raises(OverloadedError, match="the machine is busy"):
            made.prepare(params)
    assert made.prepare(params) is not None


def test_a_constraint_that_is_being_checked_leaves_processes_to_others() -> None:
    constraint = Constraint.regex("a+")
    with checker.PROCESSES.one() as slow:
        assert "a+" in checker.checked_grammar(constraint)
    with checker.PROCESSES.one() as kept:
        assert kept.is_sound
    assert slow.is_sound
