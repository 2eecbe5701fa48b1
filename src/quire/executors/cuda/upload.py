"""Upload: a buffer on the device, sent with one copy from pinned memory that nobody waits for."""

import numpy as np
import numpy.typing as npt
import torch

from quire.executors.cuda.planes import Array

_HOST_BUFFERS = 4  # copies that may be under way at once


class Upload:
    """int32 words. Each copy is made of the next of a few host buffers."""

    def __init__(self, size: int, device: str) -> None:
        is_gpu = device != "cpu"
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu)
            for _ in range(_HOST_BUFFERS if is_gpu else 1)
        ]
        self._sent: list[Array | None] = [None] * len(self._hosts)
        self._next = 0

    def host(self) -> npt.NDArray[np.int32]:
        """Memory to fill and then to send; it stays as it is until `send`."""
        sent = self._sent[self._next]
        # Long done: three have been sent since. Asking keeps the GIL, waiting gives it away.
        if sent is not None and not sent.query():
            sent.synchronize()
        words: npt.NDArray[np.int32] = self._hosts[self._next].numpy()
        return words

    def send(self, count: int) -> None:
        """Copy the first words of host() on the current stream."""
        index = self._next
        self._next = (index + 1) % len(self._hosts)
        self.buffer[:count].copy_(self._hosts[index][:count], non_blocking=True)
        if self.buffer.is_cuda:
            event = self._sent[index] or torch.cuda.Event()
            event.record()
            self._sent[index] = event
