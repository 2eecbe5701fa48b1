"""Compiles kernels for an H200 on a machine without one: Triton brings its own assembler."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CAPABILITY = (9, 0)
SHARED_MEMORY = 232_448  # bytes a block can have there


class _Driver:
    """Stands for a GPU of the kind compiled for; nothing can be launched on it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        del device
        return CAPABILITY


def pretend() -> None:
    driver.set_active(_Driver())


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    stack: int  # bytes: registers that did not fit
    shared: int


def compiled(launch: Any, folder: Path) -> tuple[Usage, str]:
    """What `launch(kernel[grid])` would run: its usage and its instructions."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    file = folder / "kernel.cubin"
    file.write_bytes(launch.asm["cubin"])
    dump = [str(tools / "cuobjdump"), "--dump-resource-usage", str(file)]
    report = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    usage = Usage(int(found[1]), int(found[2]), launch.metadata.shared)
    listing = [str(tools / "nvdisasm"), str(file)]
    return usage, subprocess.run(listing, capture_output=True, text=True, check=True).stdout
