"""What the Hopper kernels share: TMA descriptors, rings of pipeline stages, dependent launch.

A ring is a number of stages in shared memory with two mbarriers each. The producer waits for
`empty`, starts TMA copies and has them arrive at `full`; the consumer waits for `full` and arrives
at `empty` once it has read the stage. Both walk the ring in order and flip their phase at its end.
The consumer starts with phase 0, the producer with phase 1: an empty ring blocks no producer.
"""

# ruff: noqa: N803

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "allocate_barriers",
    "allow_next_kernel",
    "descriptor",
    "next_stage",
    "wait_for_previous_kernel",
]


def descriptor(array: Any, box: list[int], swizzle: int) -> Any:
    """A TMA descriptor: `array` is copied in tiles of shape `box`, swizzled over so many bytes."""
    layout = gl.NVMMASharedLayout(swizzle, array.element_size() * 8, len(box))
    return TensorDescriptor.from_tensor(array, box, layout)


@gluon.jit
def allocate_barriers(NUM_STAGES: gl.constexpr):
    """One mbarrier a stage, not initialised."""
    return gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    stage += 1
    if stage == NUM_STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


# Programmatic dependent launch: a kernel starts once every program of the previous one has allowed
# it, and waits for the end of that one before it reads what that one wrote. As every kernel does
# so, all earlier kernels have ended by then too.


@gluon.jit
def wait_for_previous_kernel():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allow_next_kernel():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
