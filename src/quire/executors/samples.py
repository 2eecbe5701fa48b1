"""StepSamples: what the last steps sampled, for rows that follow them."""

from collections import OrderedDict
from collections.abc import Iterable

from quire.core.errors import RowFaultError
from quire.core.plan import SequencePlan, SequenceResult

_STEPS_REMEMBERED = 8  # whose samples later steps may follow


class StepSamples:
    def __init__(self) -> None:
        self._samples: OrderedDict[int, dict[int, int]] = OrderedDict()  # by step, by sequence

    def resolved(self, plan: SequencePlan) -> SequencePlan:
        """The row with the sample it follows; RowFaultError where there was none."""
        if plan.follows is None:
            return plan
        sampled = self._samples.get(plan.follows, {}).get(plan.sequence_id)
        if sampled is None:
            raise RowFaultError(f"step {plan.follows} sampled no token for this sequence")
        return plan.resolved(sampled)

    def remember(self, step_id: int, results: Iterable[SequenceResult]) -> None:
        """Keep what was sampled; a part of a step that is run again adds to what it gave before."""
        samples = self._samples.setdefault(step_id, {})
        samples.update((r.sequence_id, r.token) for r in results if r.token is not None)
        while len(self._samples) > _STEPS_REMEMBERED:
            self._samples.popitem(last=False)
