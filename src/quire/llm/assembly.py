"""From a model's name or path to everything that runs it: tokenizer, executor, engine."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelFileError
from quire.engine.engine import Engine
from quire.executors.cpu import has_native_module
from quire.executors.protocol import Executor
from quire.executors.reference import ReferenceExecutor
from quire.llm import cpu_assembly, cuda_assembly
from quire.llm.kv_memory import MemoryPlan
from quire.llm.machine import available_memory
from quire.loader.defaults import resolve
from quire.loader.reading import read_capped
from quire.model.isolated import examine
from quire.model.loading import Model, load_model, memory_estimate
from quire.model.model_tokenizer import end_token_ids, read_tokenizer
from quire.model.spec import ModelSpec
from quire.tokenizer import Tokenizer

DEVICES = ("auto", "cpu", "cuda", "reference")
EXECUTORS = {
    "reference": "numpy in float32, one row at a time: slow, and what others are held to",
    "cpu": "native kernels over weights in their blocks: AVX2, AVX-512 (VNNI or AMX), or plain C++",
    "cuda": "one NVIDIA GPU, weights in their blocks",
}

MAX_TEMPLATE_BYTES = 1 << 20
_ANY_SIZE = 1 << 30  # the reference executor takes a step of any size
# Tokens a step. The reference executor gains nothing by more, and who cancels waits for a step.
_USUAL_STEP_TOKENS = {
    "reference": 16,
    "cpu": cpu_assembly.USUAL_STEP_TOKENS,
    "cuda": cuda_assembly.USUAL_STEP_TOKENS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a user wants a model run. `engine` holds further fields of EngineConfig by name."""

    device: str = "auto"
    max_batch_size: int = 64
    kv_memory: str | int | None = None
    threads: int | None = None
    batch_timeout_ms: float = 0.0
    max_context: int | None = None
    kv_cache_dtype: str = "auto"
    invariant: bool = True  # a request's tokens do not depend on its company
    trust_model_file: bool = False  # it need not be read without privileges first
    chat_template: str | Path | bool = True  # the model's own, none, or that of a file
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {option.name for option in fields(EngineConfig)}
        for name in self.engine:
            if name not in known:
                own = [option.name for option in fields(self) if option.name != "engine"]
                raise ConfigError(
                    f"there is no option {name!r}; there are {', '.join(sorted(known | {*own}))}"
                )
        context = self.max_context
        if context is not None and (isinstance(context, bool) or not isinstance(context, int)):
            raise ConfigError(f"max_context must be an integer, got {context!r}")
        if self.kv_cache_dtype not in cpu_assembly.CACHE_TYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(cpu_assembly.CACHE_TYPES)}, got "
                f"{self.kv_cache_dtype!r}"
            )
        for name in ("invariant", "trust_model_file"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.chat_template, bool | str | Path):
            raise ConfigError(
                "chat_template must be a file's path, or False for none, got "
                f"{self.chat_template!r}"
            )
        if context is not None and context < 2:
            raise ConfigError(f"max_context must hold a prompt and a token after it, got {context}")

    @property
    def executor(self) -> str:
        """Which executor runs the model: the one asked for, never silently another."""
        if self.device not in DEVICES:
            raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        name = self.device
        if name == "auto" and not self.invariant:
            name = "cuda"  # the only one that has a choice
        elif name == "auto":
            name = "cpu" if has_native_module() else "reference"
        if not self.invariant and name != "cuda":
            raise ConfigError(
                f"invariant is False, but the {name} executor has one order of summation, whatever "
                "the batch: leave it out"
            )
        if name == "cpu":
            cpu_assembly.check_cpu_options(self.threads)
            return name
        if self.threads is not None:
            raise ConfigError(
                f"threads is {self.threads!r}, but the {name} executor does not compute on threads "
                "of its own: leave it out"
            )
        if self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, but the {name} executor has one way "
                "to keep keys and values: leave it out"
            )
        return name

    def engine_config(self) -> EngineConfig:
        """The engine's knobs, resolved."""
        batch, name = self.max_batch_size, self.executor
        usual: dict[str, Any] = {"max_step_tokens": _USUAL_STEP_TOKENS[name]}
        if isinstance(batch, int):
            usual["max_step_tokens"] = max(usual["max_step_tokens"], batch)
        if name != "cuda":
            usual["plan_ahead"] = False  # it would compute rows of sequences that have ended
        if name == "reference":
            usual["step_timeout_s"] = None  # a step takes as long as the model is large
        return EngineConfig(
            max_batch_size=batch,
            batch_timeout_ms=self.batch_timeout_ms,
            **(usual | dict(self.engine)),
        )


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model, ready for engines: one at a time, because they share the executor's cache."""

    spec: ModelSpec
    tokenizer: Tokenizer | None
    executor: Executor
    options: Options
    memory: MemoryPlan
    end_token_ids: tuple[int, ...]

    def with_batch_size(self, max_batch_size: int) -> "Assembly":
        """The same for batches of another size, which must have blocks enough."""
        options = replace(self.options, max_batch_size=max_batch_size)
        options.engine_config()
        self.memory.check_batch(self.executor.capacity.num_blocks, max_batch_size)
        return replace(self, options=options)

    def new_engine(self) -> Engine:
        """An engine with an empty cache; the weights are not touched."""
        config = self.options.engine_config()
        return Engine(
            self.executor,
            config,
            end_token_ids=self.end_token_ids,
            make_detokenizer=None if self.tokenizer is None else self.tokenizer.detokenizer,
        )


def assemble(model: str | Path, options: Options) -> Assembly:
    """Load a model by name or path; what is wrong with the options is said before that."""
    assert options.executor in EXECUTORS
    options.engine_config()
    template = read_template(options.chat_template)
    path = resolve(model, tell_on_terminal)
    examine(model, path, trusted=options.trust_model_file).check()
    with load_model(path) as loaded:
        loaded = _with_context(loaded, options.max_context)
        tokenizer = _with_template(read_tokenizer(loaded), template, options.chat_template)
        options = _decided(options, loaded)
        if options.executor == "cuda":
            config = options.engine_config()
            sizes = config.max_batch_size, config.max_step_tokens
            executor, memory = cuda_assembly.cuda_executor(
                loaded, *sizes, options.kv_memory, invariant=options.invariant
            )
            memory.check_batch(executor.capacity.num_blocks, options.max_batch_size)
            ends = end_token_ids(loaded, tokenizer)
            return Assembly(loaded.spec, tokenizer, executor, options, memory, ends)
        memory = _memory_plan(loaded, options)
        num_blocks = memory.num_blocks(memory.pool_bytes(options.kv_memory), options.max_context)
        memory.check_batch(num_blocks, options.max_batch_size)
        return Assembly(
            spec=loaded.spec,
            tokenizer=tokenizer,
            executor=_executor(loaded, num_blocks, options),
            options=options,
            memory=memory,
            end_token_ids=end_token_ids(loaded, tokenizer),
        )


def read_template(chosen: str | Path | bool) -> str | None:
    """The text of a chat template that the user gives; None where it is not a file's."""
    if isinstance(chosen, bool):
        return None
    try:
        return read_capped(Path(chosen), MAX_TEMPLATE_BYTES).decode()
    except (ModelFileError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {error}") from error


def _with_template(
    tokenizer: Tokenizer | None, text: str | None, chosen: str | Path | bool
) -> Tokenizer | None:
    """The tokenizer with the template that was chosen in the place of its own."""
    if tokenizer is not None and chosen is not True:
        return tokenizer.with_chat_template(text)
    if text is not None:
        raise ConfigError(
            "chat_template names a file, but the model has no tokenizer: leave it out"
        )
    return tokenizer


def _decided(options: Options, model: Model) -> Options:
    """Where "auto" runs this model: on a GPU that can, else without, and says why if there may be
    one. What only the processor's executor understands keeps it there."""
    if options.device != "auto" or options.threads is not None or options.kv_cache_dtype != "auto":
        return options
    reason = cuda_assembly.why_not(model)
    if reason is None:
        return replace(options, device="cuda")
    if options.invariant and cuda_assembly.has_driver():
        tell_on_terminal(f"runs on the {options.executor} executor: {reason}")
    return options


def _memory_plan(model: Model, options: Options) -> MemoryPlan:
    if options.executor == "cpu":
        step_tokens = options.engine_config().max_step_tokens
        return cpu_assembly.cpu_memory(model, options.kv_cache_dtype, step_tokens, options.threads)
    estimate = memory_estimate(model, num_kv_tokens=0)
    return MemoryPlan(estimate.float32_weights, estimate.kv_per_token, available_memory())


def _executor(model: Model, num_blocks: int, options: Options) -> Executor:
    if options.executor == "cpu":
        return cpu_assembly.cpu_executor(model, num_blocks, options.threads, options.kv_cache_dtype)
    return _reference_executor(model, num_blocks)


def _with_context(model: Model, max_context: int | None) -> Model:
    """The same model held to a shorter context."""
    if max_context is None:
        return model
    longest = model.spec.context_length
    if max_context > longest:
        raise ConfigError(
            f"max_context is {max_context}, but the model was made for {longest} tokens"
        )
    return replace(model, spec=replace(model.spec, context_length=max_context))


def _reference_executor(model: Model, num_blocks: int) -> Executor:
    return ReferenceExecutor(
        model,
        num_blocks=num_blocks,
        max_batch_size=_ANY_SIZE,
        max_step_tokens=_ANY_SIZE,
    )


def tell_on_terminal(line: str) -> None:
    """Say what happens, to a person who watches."""
    if sys.stderr.isatty():
        print(f"quire: {line}", file=sys.stderr, flush=True)
