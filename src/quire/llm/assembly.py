"""From a model's name or path, and how it is to be run, to everything that runs it: tokenizer,
executor, engine.

Configurations are TOML files that say how a model is to be run:

[engine]                 fields of EngineConfig
max_batch_size = 16
max_step_tokens = 64

[run]                    where, and with what
device = "cpu"
threads = 4
kv_memory = "2GiB"
kv_cache_dtype = "int8"
"""

import json
import logging
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelFileError
from quire.core.progress import FILE, report
from quire.core.sampling import SamplingOptions
from quire.engine.engine import Engine
from quire.executors.base import Executor
from quire.llm.choice import load_chosen
from quire.llm.devices import Options, device_of, resolve_auto
from quire.llm.machine import DEFAULT_KV_BYTES, MemoryPlan, parse_bytes
from quire.llm.model_names import find_model
from quire.llm.reranking import Reranker, find_reranker
from quire.loader.defaults import DUMMY_PREFIX
from quire.loader.reading import read_capped
from quire.model.fingerprint import fingerprint_of
from quire.model.generation import read_defaults
from quire.model.isolated import examine
from quire.model.loading import (
    FileForm,
    Model,
    end_token_ids,
    form_of,
    load_model,
    read_tokenizer,
)
from quire.model.spec import MAX_SIZES, Experts, ModelSpec, tensor_shapes
from quire.structured import Grammars
from quire.tokenizer import Tokenizer
from quire.tokenizer.breakers import SequenceBreakers

_log = logging.getLogger(__name__)
MAX_TEMPLATE_BYTES = 1 << 20


class StepRead(NamedTuple):
    """Bytes that any step reads: every matrix once, and the keys and values of its context."""

    weights: int
    kv_per_position: int

    def seconds(self, context: int, bytes_per_second: float) -> float:
        """The least time of a step whose rows attend to `context` positions together."""
        return (self.weights + context * self.kv_per_position) / bytes_per_second


@dataclass(frozen=True, slots=True)
class ModelText:
    """What turns text into requests, and is known without an executor: a model's spec, tokenizer
    and defaults. `path`: the file, where it was found."""

    path: Path
    form: FileForm
    spec: ModelSpec
    tokenizer: Tokenizer | None
    end_token_ids: tuple[int, ...]
    defaults: SamplingOptions  # for requests that say nothing
    reranker: Reranker | None  # of a model that was trained as one
    fingerprint: str  # of all that answers depend on besides the device


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded model, ready for engines: one at a time, because they share the executor's cache.

    `options.device` names the device that runs it, also where "auto" was asked for.
    """

    form: FileForm
    spec: ModelSpec
    tokenizer: Tokenizer | None
    executor: Executor
    options: Options
    device_reason: str  # why that device
    memory: MemoryPlan
    end_token_ids: tuple[int, ...]
    defaults: SamplingOptions  # for requests that say nothing
    grammars: Grammars
    reranker: Reranker | None  # of a model that was trained as one
    breakers: SequenceBreakers | None  # None without a tokenizer
    fingerprint: str  # as ModelText's

    def with_batch_size(self, max_batch_size: int) -> "Assembly":
        """The same for batches of another size, which must have blocks and states enough."""
        options = replace(self.options, max_batch_size=max_batch_size)
        config, capacity = options.engine_config(), self.executor.capacity
        self.memory.check_batch(capacity.num_blocks, max_batch_size)
        fitting = config.batch_size(capacity)
        if capacity.num_states and fitting < max_batch_size:
            raise ConfigError(
                f"max_batch_size is {max_batch_size}, and the model was loaded with states for "
                f"{fitting} sequences: load it again with max_batch_size={max_batch_size}"
            )
        return replace(self, options=options)

    @property
    def step_read(self) -> StepRead | None:
        """None for experts, of which a step reads those that its tokens chose, and for a model on
        both devices."""
        spec, held = self.spec, self.executor.memory_bytes.get("weights")
        if held is None or any(isinstance(layer.feed_forward, Experts) for layer in spec.layers):
            return None
        if self.options.gpu_layers is not None or self.options.placement is not None:
            return None  # of two memories, each at its own rate
        sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
        total = sum(sizes.values())
        looked_up = 0 if spec.tied_head else sizes["token_embd.weight"]
        weights = held * (total - looked_up) // total
        # A windowed layer reads no more than its window: without the rows' own lengths, nothing of
        # the cache is counted, and the least stays the least.
        has_windows = any(window is not None for window in spec.windows)
        return StepRead(weights, 0 if has_windows else self.memory.kv_per_token)

    def new_engine(self, before_step: Callable[[], None] | None = None) -> Engine:
        """An engine with an empty cache; the weights are not touched."""
        config = self.options.engine_config()
        grammars = self.grammars
        return Engine(
            self.executor,
            config,
            end_token_ids=self.end_token_ids,
            make_detokenizer=None if self.tokenizer is None else self.tokenizer.detokenizer,
            make_grammar=grammars.for_completion,
            make_breakers=self.breakers,
            start_masks=grammars.start_masks,
            default_max_tokens=self.defaults.get("max_tokens"),
            before_step=before_step,
        )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What callers of an engine need to know of it."""

    device: str
    device_reason: str  # why that one
    max_context: int
    max_batch_size: int
    max_unread_tokens: int
    weight_bytes: int  # 0: not known
    step_read: StepRead | None
    kv_bytes: int  # of the KV cache
    gpu_layers: int | str | None
    max_queue_requests: int
    max_queue_tokens: int
    timeout_s: float | None  # of requests that say nothing

    @classmethod
    def of(cls, assembly: Assembly) -> "EngineFacts":
        options, config = assembly.options, assembly.options.engine_config()
        return cls(
            device=options.device,
            device_reason=assembly.device_reason,
            max_context=assembly.executor.capacity.max_context,
            max_batch_size=options.max_batch_size,
            max_unread_tokens=config.max_unread_tokens,
            weight_bytes=assembly.executor.memory_bytes.get("weights", 0),
            step_read=assembly.step_read,
            kv_bytes=assembly.executor.capacity.num_blocks * assembly.memory.block_bytes,
            gpu_layers=options.gpu_layers,
            max_queue_requests=config.max_queue_requests,
            max_queue_tokens=config.max_queue_tokens,
            timeout_s=config.timeout_s,
        )


def assemble(model: str | Path, options: Options) -> Assembly:
    """Load a model by name or path; what is wrong with the options is said before that."""
    path = _examined(model, options)
    return assemble_examined(path, options)


def assemble_examined(path: Path, options: Options) -> Assembly:
    """Load a file that read_text() has looked at."""
    with load_model(path, i2s_packing=options.i2s_packing) as loaded:
        loaded = _with_context(loaded, options.max_context, path)
        text = _text_of(loaded, options)
        options, (executor, memory), reason = load_chosen(options, loaded, print_notice)
        return Assembly(
            form=text.form,
            spec=loaded.spec,
            tokenizer=text.tokenizer,
            executor=executor,
            options=options,
            device_reason=reason,
            memory=memory,
            end_token_ids=text.end_token_ids,
            defaults=text.defaults,
            grammars=Grammars(text.tokenizer, loaded.spec.vocabulary_size, text.end_token_ids),
            reranker=text.reranker,
            breakers=None if text.tokenizer is None else SequenceBreakers(text.tokenizer),
            fingerprint=text.fingerprint,
        )


def read_text(model: str | Path, options: Options) -> ModelText:
    """The same without the weights, for a process that does not compute."""
    path = _examined(model, options)
    with load_model(path, i2s_packing=options.i2s_packing) as loaded:
        return _text_of(_with_context(loaded, options.max_context, path), options)


class MemoryNeed(NamedTuple):
    """What a model will take of a device's memory, and what is left of that now."""

    path: Path
    device: str
    num_bytes: int
    available: int | None  # None: not known
    max_context: int  # tokens that its KV cache holds of one sequence
    weight_bytes: int
    family: str
    num_parameters: int
    form: FileForm

    @property
    def fits(self) -> bool:
        return self.available is None or self.num_bytes <= self.available


def predict_memory(model: str | Path, options: Options) -> MemoryNeed:
    """As it is known before anything is loaded; a KV cache without a size takes the usual one."""
    path = _examined(model, options)
    with load_model(path, i2s_packing=options.i2s_packing) as loaded:
        loaded = _with_context(loaded, options.max_context, path)
        options = resolve_auto(options, loaded, lambda _: None)
        device = device_of(options)
        plan = device.memory_plan(loaded, options)
        asked = options.kv_memory
        kv_bytes = DEFAULT_KV_BYTES if asked is None else parse_bytes(asked)
        return MemoryNeed(
            path,
            device.name,
            plan.taken + kv_bytes,
            plan.available,
            plan.longest_context(kv_bytes // plan.block_bytes, loaded.spec.context_length),
            plan.weights,
            loaded.spec.family,
            sum(math.prod(shape) for shape in tensor_shapes(loaded.spec).values()),
            form_of(loaded),
        )


def _examined(model: str | Path, options: Options) -> Path:
    """Where a model is, once the options and the file were found to be sound."""
    report(FILE, 0.0)
    if not isinstance(model, str | Path) or model == "":
        raise ConfigError(f"model must be a name or a path, got {model!r:.100}")
    options.engine_config()
    read_template(options.chat_template)
    path = find_model(model, print_notice, options.device)
    examine(model, path, trusted=options.trust_model_file).check()
    return path


def _text_of(model: Model, options: Options) -> ModelText:
    template = read_template(options.chat_template)
    tokenizer = _with_template(read_tokenizer(model), template, options.chat_template)
    defaults = _defaults(model, options)
    settings = (
        *(template or bool(options.chat_template), sorted(defaults.items()), options.invariant),
        *(options.kv_cache_dtype, options.i2s_packing, options.placement),
    )
    return ModelText(
        path=model.path,
        form=form_of(model),
        spec=model.spec,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(model, tokenizer),
        defaults=defaults,
        reranker=find_reranker(_names(model), tokenizer),
        fingerprint=fingerprint_of(model.path, *settings),
    )


def _names(model: Model) -> list[str]:
    """What a model calls itself, and what its file or folder is called."""
    given = [model.metadata.get(name) for name in ("general.name", "general.basename")]
    return [model.path.name, *(name for name in given if isinstance(name, str))]


def _defaults(model: Model, options: Options) -> SamplingOptions:
    if options.generation_config == "none":
        return SamplingOptions()
    found = read_defaults(model)
    for note in found.notes:
        _log.warning("%s", note)
    return found.options


def read_template(chosen: str | Path | bool) -> str | None:
    """The text of a chat template that the user gives; None where it is not a file's."""
    if isinstance(chosen, bool):
        return None
    try:
        return read_capped(Path(chosen), MAX_TEMPLATE_BYTES).decode()
    except ModelFileError as error:
        raise ConfigError(f"chat_template: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"chat_template: {chosen} is no UTF-8 text: byte {error.start} is wrong"
        ) from None


def _with_template(
    tokenizer: Tokenizer | None, text: str | None, chosen: str | Path | bool
) -> Tokenizer | None:
    """The tokenizer with the template that was chosen instead of its own."""
    if tokenizer is not None and chosen is not True:
        return tokenizer.with_chat_template(text)
    if text is not None:
        raise ConfigError(
            "chat_template names a file, but the model has no tokenizer: leave it out"
        )
    return tokenizer


def _with_context(model: Model, max_context: int | None, path: Path) -> Model:
    """The same model with a shorter context; a dummy, which knows no positions, with any."""
    if max_context is None:
        return model
    is_dummy = str(path).startswith(DUMMY_PREFIX)
    longest = MAX_SIZES["context_length"] if is_dummy else model.spec.context_length
    if max_context > longest:
        raise ConfigError(
            f"max_context is {max_context}, but the model was made for {longest} tokens"
        )
    return replace(model, spec=replace(model.spec, context_length=max_context))


def print_notice(line: str) -> None:
    """Print a line on standard error where that is a terminal."""
    if sys.stderr.isatty():
        print(f"quire: {line}", file=sys.stderr, flush=True)


# ---- configurations


MAX_CONFIGURATION_BYTES = 1 << 20
# What a value may be; how large, EngineConfig and Options say themselves.
_Kind = type | tuple[type, ...]
_SWITCHES: dict[str, _Kind] = dict.fromkeys(
    ("chunking", "prefix_reuse", "fairness", "plan_ahead"), bool
)
_NUMBERS: dict[str, _Kind] = {option.name: (int, float) for option in fields(EngineConfig)}
_KINDS: dict[str, dict[str, _Kind]] = {
    "engine": {**_NUMBERS, **_SWITCHES, "key_weights": dict},
    "run": {
        "device": str,
        "threads": int,
        "kv_memory": (str, int),
        "kv_cache_dtype": str,
        "max_context": int,
        "invariant": bool,
        "trust_model_file": bool,
        "chat_template": str,
        "i2s_packing": str,
        "generation_config": str,
        "gpu_layers": (int, str),
        "gpu_memory": (str, int),
        "placement": str,
    },
}
_OWN = ("max_batch_size", "batch_timeout_ms")  # of the engine's fields, those of Options as well


def read_configuration(path: str | Path) -> Options:
    """The options that a file holds; a ConfigError names what is wrong in it."""
    data = _parse(Path(path))
    try:
        for table, values in data.items():
            _check(table, values)
        engine = dict(data.get("engine", {}))
        own = {name: engine.pop(name) for name in _OWN if name in engine}
        options = Options(**own, **data.get("run", {}), engine=engine)
        options.engine_config()
        return options
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIGURATION_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > MAX_CONFIGURATION_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_CONFIGURATION_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def _check(table: str, values: object) -> None:
    if table not in _KINDS or not isinstance(values, dict):
        raise ConfigError(f"{table!r} is unknown; there are the tables [engine] and [run]")
    kinds = _KINDS[table]
    for name, value in values.items():
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise ConfigError(f"[{table}] has no {name!r}; there are {known}")
        is_bool = isinstance(value, bool)  # which Python counts among the integers
        if is_bool != (kinds[name] is bool) or not isinstance(value, kinds[name]):
            raise ConfigError(f"[{table}] {name} is {value!r}, which is of the wrong type")


def configuration_text(
    tables: Mapping[str, Mapping[str, int | float | str]], notes: Sequence[str] = ()
) -> str:
    """A configuration as TOML, with notes at its head."""
    lines = [f"# {' '.join(note.split())}" for note in notes]
    for table, values in tables.items():
        _check(table, dict(values))
        # JSON's numbers and strings are TOML's too.
        settings = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()
        ]
        lines += ["", f"[{table}]", *settings]
    return "\n".join(lines).lstrip("\n") + "\n"
