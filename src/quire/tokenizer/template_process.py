"""The processes that render chat templates (`template_worker`).

A template may loop for ever or fill the memory inside of one call of C, where nothing in the same
process can stop it: see `core.worker_process`.
"""

import weakref
from typing import Any

import jinja2
import markupsafe

from quire.core.worker_process import OUT_OF_TIME, WAIT_S, WorkerProcess, WorkerProcesses
from quire.tokenizer import template_worker
from quire.tokenizer.template_worker import (
    ENDLESS,
    HEADER,
    Answer,
    Question,
    decoded,
    encoded,
    read_frame,
)

MAX_PROCESSES = 4
_MAX_REPLY_BYTES = 256 << 20


class TemplateProcessError(Exception):
    """The process ended, or had to be ended, before it answered."""


class _TemplateProcess(WorkerProcess):
    def __init__(self) -> None:
        super().__init__(template_worker, (jinja2, markupsafe))

    def ask(self, head: Question, values: bytes) -> Answer:
        content = encoded(head)
        try:
            self.send(HEADER.pack(len(content), len(values)) + content + values)
            answer, _ = read_frame(self.receive, _MAX_REPLY_BYTES)
            reply: Answer = decoded(answer)
            self.is_sound = not reply["last"]
        except TimeoutError:
            raise TemplateProcessError(f"it did not end within {WAIT_S:g} s") from None
        except OSError:
            raise TemplateProcessError(self._how_it_ended(head["seconds"])) from None
        except (ValueError, LookupError, TypeError) as error:
            raise TemplateProcessError(f"its process answers nonsense: {error}") from None
        return reply

    def _how_it_ended(self, seconds: float) -> str:
        code = self.exit_code()
        if code == OUT_OF_TIME:
            return f"{ENDLESS}; it may take {seconds:.3g} s of processor time"
        return f"{ENDLESS}, or breaks the interpreter: its process ended with {code}"


class TemplateProcesses(WorkerProcesses[_TemplateProcess]):
    """Those of this program, kept while somebody uses templates."""

    def __init__(self, max_processes: int) -> None:
        super().__init__(_TemplateProcess, max_processes, "render the chat")
        self._users = weakref.WeakSet[Any]()

    def ask(self, head: Question, values: bytes = b"") -> Answer:
        """The answer of whichever process is free; TemplateProcessError where it gives none."""
        with self.one() as process:
            return process.ask(head, values)

    def open(self, user: Any) -> None:
        """Keep processes until this user, among others, closes."""
        self._users.add(user)

    def close(self, user: Any) -> None:
        """End the processes that are idle, if nobody else uses them."""
        self._users.discard(user)
        if not self._users:
            self.end()


PROCESSES = TemplateProcesses(MAX_PROCESSES)
