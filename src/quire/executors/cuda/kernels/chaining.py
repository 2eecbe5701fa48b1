"""How a Gluon kernel follows the one before it: programmatic dependent launch.

A kernel starts once every program of the one before it has said that later ones may, and waits for
the end of that one before it reads what it left. As every kernel does so, whatever came before is
over by then too.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_earlier_kernels():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_later_kernels_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
