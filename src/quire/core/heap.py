"""What the garbage collector looks at in a process that runs an engine or a server."""

import gc

# Objects made and not freed, beyond which the youngest are looked through. A step of 256 sequences
# makes about 2,000, all of which are freed a step later: looking through them finds nothing.
COLLECT_AFTER = 20_000


def settle_heap() -> None:
    """Keep what was loaded out of later collections, and collect rarely: a full collection would
    stop every stream while it looks through a million objects of modules and of the model."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
