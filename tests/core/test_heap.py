"""settle_heap(): what was loaded is not looked through again, and a step's objects rarely."""

import gc

from quire.core.heap import COLLECT_AFTER, settle_heap


def test_the_objects_of_a_step_set_off_no_collection() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    counted: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        counted.append(info["generation"])

    try:
        settle_heap()
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold() == (COLLECT_AFTER, *before[1:])
        gc.callbacks.append(count)
        kept = [[number] for number in range(2_000)]
        gc.callbacks.remove(count)
        assert len(kept) == 2_000 and not counted
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
