"""Compiles kernels for GPUs on a machine without one: Triton brings its own assembler."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_MEMORY = 232_448  # bytes a block can have on an H200
# The same by compute capability, as two digits.
SHARED_MEMORY_OF = {80: 166_912, 89: 101_376, 90: SHARED_MEMORY, 100: SHARED_MEMORY, 120: 101_376}
WITHOUT_OPT_IN = 49_152  # bytes that need no function attribute, which Triton sets for its own


_DRIVERS_SHARED_MEMORY = 1024  # bytes of each block, not of those it can have


class _Driver:
    """Stands for a GPU of the kind compiled for; nothing can be launched on it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        del device
        return divmod(self._capability, 10)


def pretend(capability: int = 90) -> None:
    """Compile for a GPU of that compute capability from now on."""
    driver.set_active(_Driver(capability))


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    stack: int  # bytes: registers that did not fit
    shared: int
    declared: int = 0  # of these by assembler code, without Triton's knowledge

    @property
    def can_launch(self) -> bool:
        """Triton sets the attribute for more shared memory by what it allocates itself."""
        is_small = self.shared <= WITHOUT_OPT_IN
        return is_small or not self.declared or self.shared - self.declared > WITHOUT_OPT_IN


def is_serialised(launch: Any, folder: Path) -> bool:
    """Whether each wgmma waits for the one before it, as ptxas says where it finds no registers."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    file = folder / "kernel.ptx"
    file.write_text(launch.asm["ptx"])
    command = [str(tools / "ptxas"), "-v", "--gpu-name=sm_90a", str(file), "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return "wgmma.mma_async instructions are serialized" in report


def compiled(launch: Any, folder: Path) -> tuple[Usage, str]:
    """What `launch(kernel[grid])` would run: its usage and its instructions."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    file = folder / "kernel.cubin"
    file.write_bytes(launch.asm["cubin"])
    dump = [str(tools / "cuobjdump"), "--dump-resource-usage", str(file)]
    report = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    assert found is not None, report
    # What assembler code declares comes on top of what Triton allocates; some is the driver's.
    declared = max(0, int(found[3]) - _DRIVERS_SHARED_MEMORY)
    usage = Usage(int(found[1]), int(found[2]), launch.metadata.shared + declared, declared)
    listing = [str(tools / "nvdisasm"), str(file)]
    return usage, subprocess.run(listing, capture_output=True, text=True, check=True).stdout
