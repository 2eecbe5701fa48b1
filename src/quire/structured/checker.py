"""Checks constraints in other processes (`checker_worker`), which the kernel ends when they overrun
their limits: a constraint that loops, grows or crashes ends its process and its own request."""

import json

import llguidance

from quire.core.errors import OverloadedError, RequestError
from quire.core.sampling import Constraint
from quire.core.worker_process import OUT_OF_TIME, WAIT_S, WorkerProcess, WorkerProcesses
from quire.structured import checker_worker
from quire.structured.checker_worker import HEADER, Answer, Question

SECONDS = 2.0  # of processor time
MAX_PROCESSES = 4  # slow constraints of one client leave some to the others


class _CheckerProcess(WorkerProcess):
    def __init__(self) -> None:
        super().__init__(checker_worker, (llguidance,))

    def ask(self, question: Question) -> Answer:
        content = json.dumps(question).encode()
        try:
            self.send(HEADER.pack(len(content)) + content)
            (length,) = HEADER.unpack(self._receive_all(HEADER.size))
            answer: Answer = json.loads(self._receive_all(length))
            self.is_sound = True
        except TimeoutError:  # of the machine, not of the constraint: processor time is limited
            raise OverloadedError(
                f"the grammar was not checked within {WAIT_S:g} s: the machine is busy", 1.0
            ) from None
        except (OSError, ValueError):
            return {"error": self._how_it_ended()}
        return answer

    def _receive_all(self, num_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            some = self.receive(num_bytes - len(found))
            if not some:
                raise ConnectionError("the process has ended")
            found += some
        return bytes(found)

    def _how_it_ended(self) -> str:
        if self.exit_code() == OUT_OF_TIME:
            return f"compiling it takes more than {SECONDS:g} s of processor time"
        return "it is too large or nested too deeply to be compiled"


PROCESSES = WorkerProcesses(_CheckerProcess, MAX_PROCESSES, "check the grammar")


def checked_grammar(constraint: Constraint) -> str:
    """The constraint as llguidance takes it; a RequestError says why it cannot be one."""
    question = Question(kind=constraint.kind, value=constraint.value, seconds=SECONDS)
    with PROCESSES.one() as process:
        answer = process.ask(question)
    if "error" in answer:
        # An "answer" is put together here: no field has that name.
        kind = "" if constraint.kind == "answer" else f"{constraint.kind}: "
        message = f"{kind}{answer['error']}"
        raise RequestError(message[:2000], param=answer.get("param", "structured"))
    return answer["grammar"]
