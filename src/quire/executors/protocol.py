"""The contract between the engine and whatever computes its steps."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.core.plan import Capacity, StepPlan, StepResult

Ticket = Any  # an executor's own handle on a submitted step


class Executor(Protocol):
    """Computes plans in two phases, so that the engine can plan a step while one runs.

    Steps take effect in the order they were submitted, block copies before rows. Submitting any
    part of a plan again gives the same results: a row writes only positions from its `start` on,
    and always the same bytes. A row's result depends on that row alone.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def kernels(self) -> Sequence[str]:
        """Names of the kernels that run, for receipts; empty where there are none to name."""

    @property
    def fallback(self) -> str | None:
        """Why slower kernels than usual run; None where the usual ones do."""

    @property
    def is_warm(self) -> bool: ...

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Memory in use, by kind: weights, kv, workspace."""

    def warm_up(self) -> None:
        """Compile, capture and touch what the first step would otherwise wait for."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step; `SequencePlan.follows` may name a step not collected yet."""

    def collect(self, ticket: Ticket, timeout_s: float | None = None) -> StepResult:
        """Wait for a step. A fault of one sequence is in its row of the result; what raises
        (ExecutorError) concerns the whole step. StepTimeoutError: not done yet, may be asked again.
        """

    def cancel(self, ticket: Ticket) -> None:
        """Raise the step's cancel flag, from any thread; collect then raises StepCancelledError."""

    def close(self) -> None: ...
