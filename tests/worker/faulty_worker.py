"""A worker with a fault: DEED DETAIL DESCRIPTOR [LISTENER].

die, stop, raise: crash, hang or fail in a step with the token DETAIL; prepare: crash where a
constraint is compiled that says DETAIL; idle: crash once it is ready; slow: load for ever, if the
file DETAIL exists, and make it else.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quire.core.plan import StepPlan
from quire.core.sampling import SamplingParams
from quire.llm.assembly import Assembly, assemble_examined
from quire.llm.devices import Options
from quire.worker import process


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(10)


def fail_in_step(assembly: Assembly, deed: str, token: int) -> None:
    executor: Any = assembly.executor
    submit = executor.submit

    def submit_or_fail(plan: StepPlan) -> Any:
        if any(token in row.tokens for row in plan.sequences):
            if deed == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if deed == "raise":
                raise AssertionError("a bug of the engine")
            crash()
        return submit(plan)

    executor.submit = submit_or_fail


def fail_to_prepare(assembly: Assembly, text: str) -> None:
    grammars: Any = assembly.grammars
    prepare: Callable[[SamplingParams], Any] = grammars.prepare

    def prepare_or_fail(params: SamplingParams) -> Any:
        if text in repr(params.structured):
            crash()
        return prepare(params)

    grammars.prepare = prepare_or_fail


def load_for_ever(marker: Path) -> None:
    if marker.exists():
        time.sleep(10_000)
    marker.touch()


def main() -> None:
    deed, detail, *descriptors = sys.argv[1:]

    def assemble(path: Path, options: Options) -> Assembly:
        if deed == "slow":
            load_for_ever(Path(detail))
        assembly = assemble_examined(path, options)
        if deed == "prepare":
            fail_to_prepare(assembly, detail)
        elif deed == "idle":
            sys.stderr.write("these are my last words\n")
            threading.Timer(0.2, lambda: os._exit(3)).start()
        elif deed != "slow":
            fail_in_step(assembly, deed, int(detail))
        return assembly

    with patch.object(process, "assemble_examined", assemble):
        process.main(*map(int, descriptors))


if __name__ == "__main__":
    main()
