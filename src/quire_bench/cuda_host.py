"""The CUDA executor without a GPU and without kernels: what its steps cost the processor.

Plans are checked, packed, sent and collected by the executor's own code; what would be replayed on
the device is left out, and tokens come from a script.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.core.plan import SequencePlan
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda.graphs import PackedStep, sizes_up_to
from quire.executors.cuda.kernels import layers
from quire.executors.cuda.tickets import CudaTicket
from quire.model.loading import Model
from quire.quant.formats import Floats


class _Replayed:
    """A captured graph that launches nothing."""

    def replay(self) -> None:
        pass


def _launch_nothing(_size: object) -> None:
    pass


class ScriptedCudaExecutor(CudaExecutor):
    """Every sequence gets the script's tokens, one after the other. `device_s`: what the processor
    spent on the device's part: the tokens, and copies that a GPU would make."""

    def __init__(self, model: Model, config: CudaConfig, script: Sequence[int]) -> None:
        one_layer = replace(model.spec, layers=model.spec.layers[:1])
        super().__init__(replace(model, spec=one_layer), config)
        self._script = tuple(script)
        self.device_s = 0.0
        sizes = sizes_up_to(config.max_batch_size)
        nothing = _Replayed()
        self._sampler._graphs = dict.fromkeys(sizes, (nothing, nothing, nothing))
        runner: Any = self._runner
        runner._run_body = runner._run_head = _launch_nothing
        for upload in (self._sampler._step, self._sampler._masks):
            self._count_as_device(upload, "send")
        self._decoder.finite[:] = 1
        self._decoder.sampled[:, 1] = layers.FINITE

    def _count_as_device(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: object) -> object:
            started = time.thread_time()
            try:
                return call(*args)
            finally:
                self.device_s += time.thread_time() - started

        setattr(owner, name, counted)

    def _run(self, ticket: CudaTicket, step: PackedStep, hidden: Sequence[Floats]) -> None:
        started = time.thread_time()
        assert ticket.computed is not None
        tokens = [self._token(plan) for plan in ticket.computed.sampled_plans]
        self._decoder.sampled.numpy()[: len(tokens), 0] = np.array(tokens, np.int32)
        self.device_s += time.thread_time() - started
        super()._run(ticket, step, hidden)

    def _token(self, plan: SequencePlan) -> int:
        return self._script[plan.completion_position % len(self._script)]
