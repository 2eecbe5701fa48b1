"""A worker that crashes in a step with a certain token, or hangs in it: DEED TOKEN DESCRIPTOR."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quire.core.plan import StepPlan
from quire.llm.assembly import Assembly, assemble_examined
from quire.llm.devices import Options
from quire.worker import process


def main() -> None:
    deed, token, descriptor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def assemble(path: Path, options: Options) -> Assembly:
        assembly = assemble_examined(path, options)
        executor: Any = assembly.executor
        submit = executor.submit

        def submit_or_fail(plan: StepPlan) -> Any:
            if any(token in row.tokens for row in plan.sequences):
                if deed == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if deed == "raise":
                    raise AssertionError("a bug of the engine")
                os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(10)
            return submit(plan)

        executor.submit = submit_or_fail
        return assembly

    with patch.object(process, "assemble_examined", assemble):
        process.main(descriptor)


if __name__ == "__main__":
    main()
