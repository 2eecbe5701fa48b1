"""What every executor checks of a plan before it touches memory."""

from quire.core.errors import ExecutorError
from quire.core.plan import StepPlan


def check_copies(plan: StepPlan, num_blocks: int) -> None:
    """Raise an ExecutorError where a copy is from or to a block that there is not."""
    for copy in plan.copies:
        if not (0 <= copy.source < num_blocks and 0 <= copy.target < num_blocks):
            raise ExecutorError(
                f"step {plan.step_id} copies block {copy.source} to {copy.target}, but there "
                f"are {num_blocks} blocks"
            )
