"""Loading a model onto the device that its options choose. Where "auto" has two that can run it and
their steps were never measured, both are measured once, and the times kept."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from quire.core.errors import QuireError
from quire.core.progress import MEASURING, report
from quire.llm.crossover import COUNTS, StepSeconds, blocks_needed, remember, step_seconds
from quire.llm.devices import CPU, DEVICES, Choice, Loaded, Options, choose_device, device_of
from quire.model.loading import Model

_log = logging.getLogger(__name__)
_REPEATS = 3
_MOST_SECONDS = 5.0  # after which no larger step is begun with


class Chosen(NamedTuple):
    options: Options  # with a device's name instead of "auto"
    loaded: Loaded
    reason: str  # why this device


def load_chosen(options: Options, model: Model, notify: Callable[[str], None]) -> Chosen:
    choice = choose_device(options, model, notify)
    chosen = _measured(options, model, choice, notify) if choice.may_measure else None
    chosen = chosen or _loaded(model, choice)
    _log.info("runs on the %s executor: %s", chosen.options.device, chosen.reason)
    return chosen


def _loaded(model: Model, choice: Choice) -> Chosen:
    loaded = device_of(choice.options).load(model, choice.options)
    return Chosen(choice.options, loaded, choice.reason)


def _measured(
    options: Options, model: Model, choice: Choice, notify: Callable[[str], None]
) -> Chosen:
    """The better device, once both were measured; the GPU, where that does not succeed or cannot
    be kept: the next start must come to the same device, or tokens would change with it."""
    notify("measures steps on the CPU and on the GPU, once for this model and machine")
    try:
        on_cpu = _steps_on_cpu(options, model)
    except (QuireError, MemoryError) as error:
        return _loaded(model, choice._replace(reason=f"the CPU could not be measured: {error}"))
    gpu = DEVICES["cuda"]
    loaded = gpu.load(model, choice.options)
    report(MEASURING, 0.5)
    try:
        on_gpu = step_seconds(loaded.executor, repeats=_REPEATS, most_seconds=_MOST_SECONDS)
        remember(model, gpu.hardware, {"cpu": on_cpu, "cuda": on_gpu})
    except (QuireError, OSError) as error:
        return Chosen(choice.options, loaded, f"what was measured could not be kept: {error}")
    again = choose_device(options, model, notify)
    if again.options == choice.options:
        return Chosen(again.options, loaded, again.reason)
    gpu.unload(loaded.executor)
    del loaded
    gc.collect()  # its memory is needed
    return _loaded(model, again)


def _steps_on_cpu(options: Options, model: Model) -> StepSeconds:
    plan = CPU.memory_plan(model, replace(options, device="cpu", invariant=True))
    num_blocks = blocks_needed(max(COUNTS), len(plan.windows))
    kv_memory = num_blocks * plan.block_bytes
    own = Options(device="cpu", kv_memory=kv_memory, kv_cache_dtype=options.kv_cache_dtype)
    executor = CPU.load(model, own).executor
    report(MEASURING, 0.0)
    try:
        return step_seconds(executor, repeats=_REPEATS, most_seconds=_MOST_SECONDS)
    finally:
        CPU.unload(executor)
