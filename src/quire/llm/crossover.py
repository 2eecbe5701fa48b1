"""Crossover: how long steps take on each device, measured, and which device suits a load.

`quire bench crossover`, or the first start with device="auto" (llm/choice.py), measures a model and
keeps the times in quire's cache folder. "auto" takes the device that they say is better, for all
requests alike.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from quire.core.errors import QuireError
from quire.core.plan import NO_STATE, BlockCopy, Sampling, SequencePlan, StepPlan, Want
from quire.core.sampling import SamplingParams
from quire.core.version import own_version
from quire.executors.base import BLOCK_SIZE, Executor
from quire.llm.machine import usable_cores
from quire.loader.defaults import cache_folder
from quire.loader.reading import parse_json_object, read_capped
from quire.model.loading import Model

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # sequences in a step
ADVANTAGE = 1.2  # times that a CPU must be faster to be taken
_CONTEXT = 128  # positions that each sequence attends to
_MAX_FILE_BYTES = 1 << 20
_GREEDY = Sampling(SamplingParams(temperature=0.0), seed=0, index=0)

StepSeconds = Mapping[int, float]  # by sequences in a step


def step_seconds(
    executor: Executor,
    counts: Sequence[int] = COUNTS,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    most_seconds: float = math.inf,
) -> StepSeconds:
    """Medians of decodes of so many sequences, as far as the executor has blocks, states and batch,
    and as are begun within `most_seconds`."""
    capacity = executor.capacity
    context = min(_CONTEXT, capacity.max_context)
    each = -(-context // capacity.block_size) * len(capacity.windows)
    most = min(capacity.max_batch_size, capacity.max_step_tokens, capacity.num_blocks // each)
    if capacity.num_states:
        most = min(most, capacity.num_states // 2)
    found: dict[int, float] = {}
    begun = clock()
    for count in (count for count in counts if count <= most):
        if clock() - begun > most_seconds:
            break
        rows = tuple(_row(executor, index, context) for index in range(count))
        _fill(executor, rows)
        taken = []
        for _ in range(repeats + 1):
            started = clock()
            _run(executor, rows)
            taken.append(clock() - started)
        found[count] = median(taken[1:])
    return found


def blocks_needed(count: int, num_groups: int) -> int:
    """For steps of so many sequences."""
    return count * num_groups * -(-_CONTEXT // BLOCK_SIZE)


def _fill(executor: Executor, rows: Sequence[SequencePlan]) -> None:
    """Give each row a context to attend to: the first one's is computed, the others' are copies."""
    first = rows[0]
    prompt = first._replace(start=0, tokens=(1,) * first.start, want=Want.NOTHING)
    prompt = prompt._replace(states=(NO_STATE, *first.states[:1]) if first.states else ())
    _run(executor, (prompt,) if first.start else ())
    copies: list[BlockCopy] = []
    for row in rows[1:]:
        for source, target in zip(_tables(first), _tables(row), strict=True):
            copies += [BlockCopy(*pair) for pair in zip(source, target, strict=True)]
    _run(executor, (), copies)


def _tables(row: SequencePlan) -> tuple[tuple[int, ...], ...]:
    return (row.block_table, *row.other_tables)


def _row(executor: Executor, index: int, context: int) -> SequencePlan:
    """The last token of a sequence that has blocks of its own."""
    capacity = executor.capacity
    length, groups = -(-context // capacity.block_size), len(capacity.windows)
    first = index * length * groups
    tables = [tuple(range(first + g * length, first + (g + 1) * length)) for g in range(groups)]
    row = SequencePlan(index, context - 1, (1,), None, tables[0], Want.SAMPLE, _GREEDY)
    states: tuple[int, ...] = ()
    if capacity.num_states:  # those that others read are of no tokens: as fast to compute with
        states = (2 * index if row.start else NO_STATE, 2 * index + 1)
    return row._replace(other_tables=tuple(tables[1:]), states=states)


def _run(
    executor: Executor, rows: tuple[SequencePlan, ...], copies: Sequence[BlockCopy] = ()
) -> None:
    for result in executor.collect(executor.submit(StepPlan(0, rows, tuple(copies)))).sequences:
        if result.fault is not None:
            raise QuireError(f"a step that is measured failed: {result.fault}")


def better_device(times: Mapping[str, StepSeconds], num_sequences: int) -> str:
    """The device for steps of so many sequences: the GPU, unless the CPU is faster by far."""
    count = measured_for(times, num_sequences)
    return "cpu" if count is not None and _cpu_is_faster(times, count) else "cuda"


def measured_for(times: Mapping[str, StepSeconds], num_sequences: int) -> int | None:
    """The measured number of sequences that says most about so many; None: nothing does."""
    shared = _shared(times)
    return next((count for count in shared if count >= num_sequences), max(shared, default=None))


def small_batch(times: Mapping[str, StepSeconds]) -> int:
    """Up to how many sequences the CPU is faster by far; 0: never."""
    most = 0
    for count in _shared(times):
        if not _cpu_is_faster(times, count):
            break
        most = count
    return most


def _shared(times: Mapping[str, StepSeconds]) -> list[int]:
    return sorted(times["cpu"].keys() & times["cuda"].keys())


def _cpu_is_faster(times: Mapping[str, StepSeconds], count: int) -> bool:
    return ADVANTAGE * times["cpu"][count] <= times["cuda"][count]


# ---- the cache


def remember(model: Model, gpu: str, times: Mapping[str, StepSeconds]) -> Path:
    """Keep what was measured of a model on this machine."""
    path = _path(model, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {device: {str(n): s for n, s in steps.items()} for device, steps in times.items()}
    content = {"model": model.path.name, "machine": _machine(gpu), "seconds": named}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)
    return path


def remembered(model: Model, gpu: str) -> Mapping[str, StepSeconds] | None:
    """What was measured of this model on this machine; None where nothing is known."""
    try:
        content = parse_json_object(read_capped(_path(model, gpu), _MAX_FILE_BYTES), "crossover")
        seconds = content["seconds"]
        assert isinstance(seconds, dict)
        return {
            device: {int(count): float(taken) for count, taken in seconds[device].items()}
            for device in ("cpu", "cuda")
        }
    except (QuireError, OSError, AssertionError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _path(model: Model, gpu: str) -> Path:
    tensors = sorted((name, x.shape, x.format.name) for name, x in model.tensors.items())
    known = repr((own_version(), _machine(gpu), tensors))
    digest = hashlib.sha256(known.encode()).hexdigest()[:24]
    return cache_folder() / "crossover" / f"{digest}.json"


def _machine(gpu: str) -> str:
    return f"{platform.machine()} {_processor()}, {usable_cores():g} cores, {gpu}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
