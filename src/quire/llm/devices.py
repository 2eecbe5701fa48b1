"""Where a model runs: the options of a user, and the registry of devices that they choose from.

A device says in one class whether this process can use it, which options and models it takes, how
its memory is divided and how its executor is made. To add one, write its class and list it in
DEVICES. What a device needs (torch, the native module) is imported when it is first asked for.
"""

import ctypes
import functools
import gc
import importlib.util
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from quire.core.config import EngineConfig, check_i2s_packing
from quire.core.errors import ConfigError, UnsupportedModelError
from quire.executors.base import BLOCK_SIZE, Executor
from quire.executors.cpu import check_native_module, check_unit, has_native_module
from quire.executors.cpu.lowering import Threads, state_bytes, weight_bytes, workspace_bytes
from quire.executors.reference import KVPrecision, ReferenceExecutor, kv_token_bytes
from quire.llm.crossover import better_device, measured_for, remembered, small_batch
from quire.llm.machine import (
    DEFAULT_KV_BYTES,
    MemoryPlan,
    available_memory,
    format_bytes,
    parse_bytes,
    usable_cores,
)
from quire.llm.placement import (
    FFN_GPU,
    GPU_OVERHEAD,
    PIECE_TOKENS,
    Placement,
    PlacementSizes,
    place,
    place_feed_forwards,
)
from quire.llm.prompts import no_parameter
from quire.model.features import check_lowered
from quire.model.generation import MODES
from quire.model.kv_layout import grouped, kv_bytes_in_block, kv_bytes_per_token
from quire.model.loading import Model, memory_estimate

AUTO = "auto"
CACHE_TYPES = ("auto", "f16", "fp8", "int8")
UNIT_VARIABLE = "QUIRE_CPU_UNIT"  # of the environment: which kernels to run

# Options of vLLM, transformers and llama-cpp-python, and what there is here instead.
_OPTION_NAMES = {
    "model_path": "write model",
    "max_model_len": "write max_context",
    "n_ctx": "write max_context",
    "max_num_seqs": "write max_batch_size",
    "max_num_batched_tokens": "write max_step_tokens",
    "n_batch": "write max_step_tokens",
    "n_threads": "write threads",
    "n_gpu_layers": "write gpu_layers",
    "gpu_memory_utilization": 'write kv_memory, as a size such as "8GiB"',
    "type_k": 'write kv_cache_dtype, as "int8": keys and values have one type',
    "type_v": 'write kv_cache_dtype, as "int8": keys and values have one type',
    "tensor_parallel_size": "a model runs on one GPU",
    "enable_prefix_caching": "write prefix_reuse",
    "enable_chunked_prefill": "write chunking",
    "dtype": "weights stay as the file has them",
    "torch_dtype": "weights stay as the file has them",
    "quantization": "weights stay as the file has them",
    "tokenizer": "the model's file or folder has it",
    "trust_remote_code": "no code of a model is ever run",
    "enforce_eager": "leave it out",
    "seed": "give seed to SamplingParams or to a call",
}

_ASKED_FOR = "asked for"
_ANY_SIZE = 1 << 30  # the reference executor takes a step of any size
_REFERENCE_PRECISIONS: Mapping[str, KVPrecision] = {
    "auto": "float32",
    "f16": "float16",
    "fp8": "fp8",
    "int8": "int8",
}
_MAX_CPU_BATCH = 1 << 20
_FLOAT_BYTES = 4
# Of a model without attention a token keeps nothing. Its blocks are numbered all the same, for
# prefixes: it is counted as so much, far more than their tables take, which bounds their number.
_BARE_TOKEN_BYTES = 256
_SPARE_STATES = 8  # beyond those that a batch needs: for cached prefixes
# Buffers and graphs are made for so many at least: asking for more later costs nothing.
_MIN_CUDA_BATCH = 256
_CUDA_WORKSPACE = 2 << 30  # what is kept free, and what loading takes for a while
_CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a user wants a model run. `engine` holds further fields of EngineConfig by name."""

    device: str = AUTO
    max_batch_size: int = 64
    kv_memory: str | int | None = None
    threads: int | None = None
    batch_timeout_ms: float = 0.0
    max_context: int | None = None
    kv_cache_dtype: str = "auto"
    invariant: bool = True  # a request's tokens do not depend on the batch it runs in
    trust_model_file: bool = False  # it need not be read without privileges first
    chat_template: str | Path | bool = True  # the model's own, none, or that of a file
    i2s_packing: str | None = None  # of a file's I2_S tensors: that of x86 builds, or "arm"
    generation_config: str = "auto"  # sampling defaults from the model's files, or "none"
    gpu_layers: int | str | None = None  # the others are on the CPU; "auto": as many as fit
    gpu_memory: str | int | None = None  # of the GPU; None: all that is free
    placement: str | None = None  # "ffn-gpu": feed-forwards on the GPU, attention on the CPU
    # Sequences of a step in which others begin on the CPU, beside a GPU; choose_device sets it.
    cpu_batch: int | None = None
    engine: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {option.name for option in fields(EngineConfig)}
        for name in self.engine:
            if name not in known:
                own = [option.name for option in fields(self) if option.name != "engine"]
                raise ConfigError(no_parameter(name, known | {*own}, _OPTION_NAMES))
        context = self.max_context
        if context is not None and (isinstance(context, bool) or not isinstance(context, int)):
            raise ConfigError(f"max_context must be an integer, got {context!r}")
        if self.kv_cache_dtype not in CACHE_TYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(CACHE_TYPES)}, got "
                f"{self.kv_cache_dtype!r}"
            )
        check_i2s_packing(self.i2s_packing)
        if self.generation_config not in MODES:
            raise ConfigError(
                f"generation_config must be one of {', '.join(MODES)}, got "
                f"{self.generation_config!r:.100}"
            )
        for name in ("invariant", "trust_model_file"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.chat_template, bool | str | Path):
            raise ConfigError(
                "chat_template must be a file's path, or False for none, got "
                f"{self.chat_template!r}"
            )
        layers = self.gpu_layers
        is_count = isinstance(layers, int) and not isinstance(layers, bool) and layers > 0
        if layers is not None and layers != AUTO and not is_count:
            raise ConfigError(
                f"gpu_layers must be a number of layers from 1 on, or 'auto', got {layers!r:.100}: "
                "without any, write device='cpu'"
            )
        if self.placement not in (None, FFN_GPU):
            raise ConfigError(
                f"placement must be '{FFN_GPU}', got {self.placement!r:.100}: to put whole layers "
                "on the GPU, write gpu_layers"
            )
        if self.placement is not None and layers is not None:
            raise ConfigError(
                f"placement is '{self.placement}', which puts the feed-forward of every layer on "
                f"the GPU, and gpu_layers is {layers!r}, which puts whole layers there: give one"
            )
        if self.gpu_memory is not None:
            parse_bytes(self.gpu_memory, "gpu_memory")
        if context is not None and context < 2:
            raise ConfigError(f"max_context must hold a prompt and a token after it, got {context}")

    def engine_config(self) -> EngineConfig:
        """The engine's settings, with the device's defaults where none were given."""
        batch, defaults = self.max_batch_size, device_of(self).engine_defaults
        step_tokens = defaults.max_step_tokens
        given: dict[str, Any] = {
            "max_batch_size": batch,
            "max_step_tokens": max(step_tokens, batch) if isinstance(batch, int) else step_tokens,
            "batch_timeout_ms": self.batch_timeout_ms,
            **self.engine,
        }
        return replace(defaults, **given)


class Loaded(NamedTuple):
    """A model's executor, and how its memory was divided."""

    executor: Executor
    memory: MemoryPlan


class Device(ABC):
    """A kind of executor and the hardware it runs on. Devices have no state."""

    name: ClassVar[str]
    description: ClassVar[str]
    engine_defaults: ClassVar[EngineConfig]  # but max_batch_size, which Options has
    has_threads: ClassVar[bool] = False  # whether it takes `threads`
    cache_types: ClassVar[Sequence[str]] = CACHE_TYPES  # of `kv_cache_dtype`
    has_variant_sums: ClassVar[bool] = False  # whether it takes `invariant=False`

    @property
    def hardware(self) -> str:
        """What it runs on, beside the machine's processor."""
        return ""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """Why this process cannot use the device; None where it can."""

    def why_unsupported(self, _model: Model, /) -> str | None:
        """Why the device, which is available, cannot run a model; None where it can."""
        return None

    def available_memory(self) -> int | None:
        """Bytes that a model can still take there; None where unknown."""
        return available_memory()

    @abstractmethod
    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        """What a model takes, before anything of it is loaded."""

    @abstractmethod
    def load(self, model: Model, options: Options) -> Loaded:
        """Make the executor, or raise a ConfigError with figures where memory does not suffice."""

    def unload(self, executor: Executor) -> None:
        """Give back what it holds."""
        executor.close()

    def check_options(self, options: Options) -> None:
        """Refuse what the device does not take, before anything is loaded."""
        if self.name != "cuda":
            for name in ("gpu_layers", "gpu_memory", "placement"):
                value = getattr(options, name)
                if value is not None and options.device != AUTO:
                    raise ConfigError(
                        f"{name} is {value!r}, but the {self.name} executor has no GPU: leave it "
                        "out, or write device='cuda'"
                    )
        if not options.invariant and not self.has_variant_sums:
            raise ConfigError(
                f"invariant is False, but the {self.name} executor has one order of summation, "
                "whatever the batch: leave it out"
            )
        if options.threads is not None and not self.has_threads:
            raise ConfigError(
                f"threads is {options.threads!r}, but the {self.name} executor does not compute on "
                "threads of its own: leave it out"
            )
        if options.kv_cache_dtype not in self.cache_types:
            raise ConfigError(
                f"kv_cache_dtype is {options.kv_cache_dtype!r}, but the {self.name} executor keeps "
                f"keys and values as {', '.join(self.cache_types)}: choose one of these"
            )


def _with_states(plan: MemoryPlan, options: Options) -> MemoryPlan:
    """With slots for states: what a full batch needs and some that cached prefixes keep, or as many
    as there is memory for. Then the batch is smaller (EngineConfig.batch_size)."""
    each = options.engine_config().states_per_sequence
    wanted = options.max_batch_size * each + _SPARE_STATES
    return plan.with_states(wanted, fewest=each, kv_memory=options.kv_memory)


def _warn_of_states(executor: Executor, options: Options) -> None:
    fitting = options.engine_config().batch_size(executor.capacity)
    if executor.capacity.num_states and fitting < options.max_batch_size:
        _warn_once(
            f"there is memory for the states of a batch of {fitting}, not of max_batch_size "
            f"({options.max_batch_size}): batches are of {fitting} at most"
        )


class _HostDevice(Device):
    """A device in the machine's own memory: the KV cache is sized before weights are loaded."""

    def load(self, model: Model, options: Options) -> Loaded:
        check_lowered(model.spec, self.name)
        memory = self.memory_plan(model, options)
        num_blocks = memory.num_blocks(memory.pool_bytes(options.kv_memory), options.max_context)
        memory.check_batch(num_blocks, options.max_batch_size)
        executor = self.make_executor(model, num_blocks, options, memory.num_states)
        _warn_of_states(executor, options)
        return Loaded(executor, memory)

    @abstractmethod
    def make_executor(
        self, model: Model, num_blocks: int, options: Options, num_states: int | None = None, /
    ) -> Executor:
        """`num_states`: slots for states; None: a few."""


# ---- reference


class ReferenceDevice(_HostDevice):
    name = "reference"
    description = "numpy in float32, one row at a time: slow, and what others are held to"
    engine_defaults = EngineConfig(
        max_batch_size=1,
        max_step_tokens=16,  # it gains nothing by more, and who cancels waits for a step
        plan_ahead=False,  # it would compute rows of sequences that have ended
        step_timeout_s=None,  # a step takes as long as the model is large
    )

    def why_unavailable(self) -> str | None:
        return None

    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        estimate = memory_estimate(model, num_kv_tokens=0)
        layout = grouped(model.spec, BLOCK_SIZE)
        plan = MemoryPlan(
            estimate.float32_weights,
            estimate.kv_per_token,
            available_memory(),
            windows=layout.windows,
            group_bytes=kv_token_bytes(model.spec, layout) or _BARE_TOKEN_BYTES,
            chunk=options.engine_config().smallest_chunk,
            state_bytes=_FLOAT_BYTES * model.spec.num_state_elements,
        )
        return _with_states(plan, options)

    def make_executor(
        self, model: Model, num_blocks: int, options: Options, num_states: int | None = None, /
    ) -> Executor:
        return ReferenceExecutor(
            model,
            num_blocks=num_blocks,
            max_batch_size=_ANY_SIZE,
            max_step_tokens=_ANY_SIZE,
            kv_precision=_REFERENCE_PRECISIONS[options.kv_cache_dtype],
            layout=grouped(model.spec, BLOCK_SIZE),
            num_states=num_states,
        )


# ---- cpu


class CpuDevice(_HostDevice):
    name = "cpu"
    description = (
        "native kernels over weights in their blocks: AVX2, AVX-512 (VNNI or AMX), or plain C++"
    )
    engine_defaults = EngineConfig(
        max_batch_size=1,
        max_step_tokens=256,  # beyond it GEMMs gain little, and others' tokens come later
        plan_ahead=False,  # it would compute rows of sequences that have ended
    )
    has_threads = True
    cache_types = ("auto", "f16", "int8")

    def why_unavailable(self) -> str | None:
        return None if has_native_module() else "its native module is not built"

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        check_native_module()
        num_threads(options.threads)
        chosen_unit()

    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        """Weights as the kernels keep them, to the byte, and what steps work in."""
        spec, config = model.spec, options.engine_config()
        is_int8 = options.kv_cache_dtype == "int8"
        layout = grouped(spec, BLOCK_SIZE)
        plan = MemoryPlan(
            weight_bytes(model.tensors),
            kv_bytes_per_token(spec, is_int8),
            available_memory(),
            windows=layout.windows,
            group_bytes=kv_bytes_in_block(spec, layout, is_int8) or _BARE_TOKEN_BYTES,
            chunk=config.smallest_chunk,
            state_bytes=state_bytes(spec),
        )
        # Positions that the default cache holds; rope tables are copied as they grow.
        num_blocks = DEFAULT_KV_BYTES // plan.block_bytes
        positions = 2 * plan.longest_context(num_blocks, spec.context_length)
        threads = num_threads(options.threads)
        workspace = workspace_bytes(spec, model.tensors, config.max_step_tokens, positions, threads)
        return _with_states(replace(plan, workspace=workspace), options)

    def make_executor(
        self, model: Model, num_blocks: int, options: Options, num_states: int | None = None, /
    ) -> Executor:
        from quire.executors.cpu.executor import CpuExecutor

        count = num_threads(options.threads)
        executor = CpuExecutor(
            model,
            num_blocks=num_blocks,
            threads=Threads(count, may_spin=count <= usable_cores()),
            kv_int8=options.kv_cache_dtype == "int8",
            unit=chosen_unit(),
            max_batch_size=_MAX_CPU_BATCH,
            max_step_tokens=_MAX_CPU_BATCH,
            layout=grouped(model.spec, BLOCK_SIZE),
            num_states=num_states,
        )
        if executor.fallback is not None:
            _warn_once(executor.fallback)
        return executor


def num_threads(asked: int | None) -> int:
    """As many as asked for, or as this process may keep busy."""
    if asked is None:
        return max(1, math.floor(usable_cores()))
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= 1024:
        raise ConfigError(f"threads must be an integer from 1 to 1024, got {asked!r}")
    return asked


def chosen_unit() -> str:
    """The kernels that the environment asks for; "" for the best that run here."""
    name = os.environ.get(UNIT_VARIABLE, "")
    try:
        return check_unit(name) if name else ""
    except ConfigError as error:
        raise ConfigError(f"{UNIT_VARIABLE}: {error}") from error


@functools.cache
def _warn_once(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)


# ---- cuda


class CudaDevice(Device):
    name = "cuda"
    description = "one NVIDIA GPU, weights in their blocks"
    engine_defaults = EngineConfig(max_batch_size=1, max_step_tokens=2048)
    cache_types: ClassVar[Sequence[str]] = ("auto", "fp8", "int8")
    has_variant_sums = True

    def why_unavailable(self) -> str | None:
        """torch, which takes seconds to import, is asked last."""
        if not has_nvidia_driver():
            return "there is no NVIDIA driver"
        for package in ("torch", "triton"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        from quire.executors.cuda import require_gpu

        try:
            require_gpu()
        except ConfigError:
            return "torch finds no NVIDIA GPU"
        return None

    @property
    def hardware(self) -> str:
        """The GPU's name; it must be there."""
        from quire.executors.cuda.device import device_name

        return device_name()

    def available_memory(self) -> int | None:
        """Of the GPU, which must be there."""
        from quire.executors.cuda import free_bytes

        return free_bytes("cuda")

    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        """As far as it can be known before loading."""
        is_8bit = options.kv_cache_dtype != "auto"
        layout = grouped(model.spec, BLOCK_SIZE)
        plan = MemoryPlan(
            memory_estimate(model, num_kv_tokens=0).weights,
            kv_bytes_per_token(model.spec, is_8bit),
            self.available_memory(),
            _CUDA_WORKSPACE,
            windows=layout.windows,
            group_bytes=kv_bytes_in_block(model.spec, layout, is_8bit) or _BARE_TOKEN_BYTES,
            chunk=options.engine_config().smallest_chunk,
            state_bytes=_FLOAT_BYTES * model.spec.num_state_elements,
        )
        return _with_states(plan, options)

    def why_unsupported(self, model: Model, /) -> str | None:
        from quire.executors.cuda import check_fits

        try:
            check_fits(model)
        except (ConfigError, UnsupportedModelError) as error:
            return str(error)
        return None

    def load(self, model: Model, options: Options) -> Loaded:
        """The executor, warm; memory is as it came to be, not as it was planned."""
        executor = self._make_executor(model, options)
        in_use = executor.memory_bytes
        memory = replace(
            self.memory_plan(model, options),
            weights=in_use["weights"],
            available=sum(in_use.values()),
            workspace=0,
            num_states=executor.capacity.num_states,
        )
        memory.check_batch(executor.capacity.num_blocks, options.max_batch_size)
        _warn_of_states(executor, options)
        return Loaded(executor, memory)

    def unload(self, executor: Executor) -> None:
        super().unload(executor)
        gc.unfreeze()  # of _warm_up

    def _make_executor(
        self, model: Model, options: Options, num_blocks: int | None = None
    ) -> Executor:
        _require_cuda()
        from quire.executors.cuda import CudaConfig, CudaExecutor, KVType

        _limit_gpu_memory(options)
        config = options.engine_config()
        batch = max(config.max_batch_size, _MIN_CUDA_BATCH)
        sizes = CudaConfig(
            max_batch_size=batch,
            max_step_tokens=max(config.max_step_tokens, batch),
            kv_bytes=None if options.kv_memory is None else parse_bytes(options.kv_memory),
            num_blocks=num_blocks,
            invariant=options.invariant,
            kv_type=cast(KVType, options.kv_cache_dtype),  # check_options saw to it
            num_states=self.memory_plan(model, options).num_states,
        )
        executor = CudaExecutor(model, sizes, layout=grouped(model.spec, BLOCK_SIZE))
        _warm_up(executor)
        if executor.fallback is not None:
            _warn_once(executor.fallback)
        return executor


def _warm_up(executor: Executor) -> None:
    executor.warm_up()
    # torch and Triton leave about a million objects that stay. Walking them takes the garbage
    # collector a tenth of a second, within some step, with the GPU idle: it may skip them.
    gc.collect()
    gc.freeze()


def _require_cuda() -> None:
    """Raise a ConfigError for the first thing that is missing: packages are of no use without a
    driver."""
    if not has_nvidia_driver():
        raise ConfigError(
            "device is 'cuda', but there is no NVIDIA driver on this machine: use device='cpu', or "
            "look at `quire doctor`"
        )
    try:
        from quire.executors.cuda import require_gpu
    except ImportError as error:
        raise ConfigError(
            f"device 'cuda' needs torch and triton ({error}): pip install 'quire[cuda]'"
        ) from error
    require_gpu()


def _limit_gpu_memory(options: Options) -> None:
    if options.gpu_memory is not None:
        from quire.executors.cuda import limit_memory

        allowed = parse_bytes(options.gpu_memory, "gpu_memory")
        limit_memory(max(1, allowed - GPU_OVERHEAD), "cuda")


class PlacedDevice(CudaDevice):
    """A GPU with a model's last layers; the CPU has the first ones."""

    engine_defaults = EngineConfig(
        max_batch_size=1,
        max_step_tokens=1024,  # pieces of which the CPU computes one while the GPU has another
        plan_ahead=False,  # the CPU needs the tokens that the GPU sampled
    )
    has_threads = True
    cache_types: ClassVar[Sequence[str]] = ("auto", "int8")  # what both sides have

    def check_options(self, options: Options) -> None:
        super().check_options(options)
        CPU.check_options(Options(threads=options.threads))

    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        return self._placement(model, options).whole

    def _placement(self, model: Model, options: Options) -> Placement:
        count = options.gpu_layers
        assert isinstance(count, int)
        found = placement_of(model, options, gpu_memory_of(options))
        if found is None:
            raise ConfigError(f"gpu_layers is {count}, which is every layer: leave it out")
        return found

    def why_unsupported(self, model: Model, /) -> str | None:
        """What fits is not known before a placement."""
        del model
        return None

    def load(self, model: Model, options: Options) -> Loaded:
        _require_cuda()
        from quire.executors.placed import load_feed_forward, load_placed

        check_lowered(model.spec, "cpu")
        check_lowered(model.spec, "cuda")
        found = self._placement(model, options)
        found.whole.check_batch(found.num_blocks, options.max_batch_size)
        _limit_gpu_memory(options)
        count, layers = num_threads(options.threads), found.gpu_layers
        load = load_feed_forward if layers is None else partial(load_placed, gpu_layers=layers)
        executor: Executor = load(
            model,
            num_blocks=found.num_blocks,
            threads=Threads(count, may_spin=count <= usable_cores()),
            unit=chosen_unit(),
            kv_int8=options.kv_cache_dtype == "int8",
            max_batch_size=options.max_batch_size,
            piece_tokens=max(PIECE_TOKENS, options.max_batch_size),
            invariant=options.invariant,
        )
        _warm_up(executor)
        if executor.fallback is not None:
            _warn_once(executor.fallback)
        return Loaded(executor, found.whole)


class FeedForwardDevice(PlacedDevice):
    """A GPU with the feed-forwards of all layers and the head; the CPU has attention and its
    cache."""

    cache_types = CpuDevice.cache_types

    def _placement(self, model: Model, options: Options) -> Placement:
        found = placement_of(model, options, gpu_memory_of(options))
        assert found is not None
        return found


class EitherDevice(CudaDevice):
    """A GPU, and the CPU for sequences that begin in small batches."""

    engine_defaults = EngineConfig(
        max_batch_size=1,
        max_step_tokens=512,  # of which the CPU may have all
        prefix_reuse=False,  # blocks are on one side alone
    )

    def memory_plan(self, model: Model, options: Options, /) -> MemoryPlan:
        return CPU.memory_plan(model, _on_cpu(options))

    def load(self, model: Model, options: Options) -> Loaded:
        """Both have blocks of the same numbers: as many as suit the CPU."""
        from quire.executors.either import EitherExecutor

        assert options.cpu_batch is not None
        memory = self.memory_plan(model, options)
        num_blocks = memory.num_blocks(memory.pool_bytes(options.kv_memory), options.max_context)
        memory.check_batch(num_blocks, options.max_batch_size)
        on_gpu = self._make_executor(model, options, num_blocks)
        on_cpu = CPU.make_executor(model, on_gpu.capacity.num_blocks, _on_cpu(options))
        return Loaded(EitherExecutor(on_cpu, on_gpu, options.cpu_batch), memory)


def _on_cpu(options: Options) -> Options:
    """The same for the CPU alone."""
    return replace(options, device="cpu", invariant=True, gpu_memory=None, cpu_batch=None)


def gpu_memory_of(options: Options) -> int:
    """What a model may take of the GPU."""
    gpu = DEVICES["cuda"]
    free = None if gpu.why_unavailable() else gpu.available_memory()
    asked = options.gpu_memory
    allowed = None if asked is None else parse_bytes(asked, "gpu_memory")
    known = [size for size in (free, allowed) if size is not None]
    if not known:
        raise ConfigError(
            "there is no GPU here whose memory could be asked for: give gpu_memory (--gpu-memory)"
        )
    return min(known)


def placement_of(model: Model, options: Options, gpu_memory: int) -> Placement | None:
    """Where a model's layers go; None where all of them are on the GPU."""
    sizes = PlacementSizes(
        max_batch_size=options.max_batch_size,
        chunk=options.engine_config().smallest_chunk,
        kv_bytes=None if options.kv_memory is None else parse_bytes(options.kv_memory),
        max_context=options.max_context,
        threads=num_threads(options.threads),
        is_8bit=options.kv_cache_dtype == "int8",
    )
    if options.placement == FFN_GPU:
        return place_feed_forwards(model, sizes, gpu_memory, available_memory())
    count = options.gpu_layers if isinstance(options.gpu_layers, int) else None
    return place(model, sizes, count, gpu_memory, available_memory())


def has_nvidia_driver() -> bool:
    """Whether there may be a GPU at all."""
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True


# ---- the registry

CPU = CpuDevice()
DEVICES: dict[str, Device] = {
    device.name: device for device in (CPU, CudaDevice(), ReferenceDevice())
}
PLACED = PlacedDevice()  # "cuda" where gpu_layers are given
FEED_FORWARD = FeedForwardDevice()  # "cuda" where placement is "ffn-gpu"
EITHER = EitherDevice()  # "cuda" where small batches begin on the CPU


def device_of(options: Options) -> Device:
    """The device that options name, never silently another; its options are checked.

    "auto" is a processor here: resolve_auto chooses a GPU once the model is known.
    """
    names = (AUTO, *DEVICES)
    if options.device not in names:
        raise ConfigError(f"device must be one of {', '.join(names)}, got {options.device!r}")
    name = options.device
    placed = None if options.gpu_layers is None else PLACED
    if options.placement is not None:
        placed = FEED_FORWARD
    if placed is not None and name in (AUTO, "cuda"):
        placed.check_options(options)
        return placed
    if options.cpu_batch is not None and name == "cuda":
        return EITHER
    is_for_gpu = options.kv_cache_dtype not in DEVICES["cpu"].cache_types
    if name == AUTO and (is_for_gpu or not options.invariant):
        name = "cuda"  # the only one that has a choice
    elif name == AUTO:
        name = "reference" if DEVICES["cpu"].why_unavailable() else "cpu"
    DEVICES[name].check_options(options)
    return DEVICES[name]


class Choice(NamedTuple):
    """Where a model is to run, and why."""

    options: Options  # with a device's name instead of "auto"
    reason: str
    may_measure: bool = False  # both devices can run it, and how fast they are is not known


def resolve_auto(options: Options, model: Model, notify: Callable[[str], None]) -> Options:
    return choose_device(options, model, notify).options


def choose_device(options: Options, model: Model, notify: Callable[[str], None]) -> Choice:
    """The device asked for. For "auto" a GPU that can run the model, unless the CPU was measured to
    be faster; else a processor, and `notify` gets the reason if there may be a GPU. Options that
    only a processor takes keep the model there."""
    device = device_of(options)
    if isinstance(device, PlacedDevice):
        return Choice(_placed(options, model, notify), _ASKED_FOR)
    if options.device != AUTO:
        return Choice(options, _ASKED_FOR)
    gpu, chosen = DEVICES["cuda"], replace(options, device=device.name)
    if options.threads is not None or options.kv_cache_dtype not in gpu.cache_types:
        return Choice(chosen, "threads or kv_cache_dtype are those of a processor")
    reason = gpu.why_unavailable() or gpu.why_unsupported(model)
    if reason is None:
        return _better(options, model, notify)
    if options.kv_cache_dtype not in DEVICES["cpu"].cache_types:
        raise ConfigError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r}, which the cpu executor does not "
            f"have, and the cuda executor cannot run here: {reason}; int8 takes as few bytes"
        )
    if device is not gpu and has_nvidia_driver():
        notify(f"runs on the {device.name} executor: {reason}")
    return Choice(chosen, reason)


def _better(options: Options, model: Model, notify: Callable[[str], None]) -> Choice:
    """The GPU, unless the CPU was measured to be better for such batches. Where tokens may depend
    on the batch, both, if the CPU is better for small ones."""
    gpu = DEVICES["cuda"]
    on_gpu = replace(options, device=gpu.name)
    if options.gpu_memory is not None:
        return Choice(on_gpu, "gpu_memory is that of a GPU")
    reason = CPU.why_unavailable() or _why_not_on_cpu(options, model)
    if reason is not None:
        return Choice(on_gpu, f"the CPU cannot run the model: {reason}")
    times = remembered(model, gpu.hardware)
    count = None if times is None else measured_for(times, options.max_batch_size)
    if times is None or count is None:
        return Choice(on_gpu, "a GPU that can run the model; steps were not measured", True)
    reason = (
        f"a step of {count} took {1000 * times['cuda'][count]:.1f} ms on the GPU and "
        f"{1000 * times['cpu'][count]:.1f} ms on the CPU"
    )
    if not options.invariant:
        on_one = options.engine.get("prefix_reuse") or model.spec.states
        most = 0 if on_one else small_batch(times)
        if not most:
            return Choice(on_gpu, reason)
        return Choice(
            replace(on_gpu, cpu_batch=most),
            f"{reason}; sequences that begin in steps of up to {most} run on the CPU",
        )
    if better_device(times, options.max_batch_size) == gpu.name:
        return Choice(on_gpu, reason)
    notify(f"runs on the cpu executor: {reason}; device='cuda' takes the GPU")
    return Choice(replace(options, device="cpu"), reason)


def _why_not_on_cpu(options: Options, model: Model) -> str | None:
    try:
        check_lowered(model.spec, "cpu")
        if options.kv_cache_dtype not in CPU.cache_types:
            return f"it has no {options.kv_cache_dtype} KV cache"
        CPU.memory_plan(model, _on_cpu(options)).pool_bytes(options.kv_memory)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return None


def _placed(options: Options, model: Model, notify: Callable[[str], None]) -> Options:
    """The options with the number of layers that the GPU gets; without it where it gets all."""
    reason = DEVICES["cuda"].why_unavailable()
    if reason is not None:
        name = "gpu_layers" if options.placement is None else "placement"
        raise ConfigError(f"{name} is {getattr(options, name)!r}, but {reason}: use device='cpu'")
    found = placement_of(model, options, gpu_memory_of(options))
    total = model.spec.num_layers
    if found is None:
        notify(f"all {total} layers are on the GPU")
        return replace(options, device="cuda", gpu_layers=None)
    on_gpu, on_cpu = f"the last {found.gpu_layers} of {total} layers are", "the others"
    if found.gpu_layers is None:
        on_gpu, on_cpu = "feed-forwards and the head are", "attention and the KV cache"
    notify(
        f"{on_gpu} on the GPU ({format_bytes(found.gpu_bytes)}), {on_cpu} on the CPU "
        f"({format_bytes(found.cpu_bytes)})"
    )
    return replace(options, device="cuda", gpu_layers=found.gpu_layers)
