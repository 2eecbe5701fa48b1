"""What is in a model file: as much as can be read of it, and everything that is wrong with it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from quire.core.errors import QuireError
from quire.core.windows import peak_blocks
from quire.executors.base import BLOCK_SIZE
from quire.executors.cpu import has_native_module
from quire.executors.cpu.lowering import state_bytes, weight_bytes, workspace_bytes
from quire.executors.reference import kv_token_bytes
from quire.llm.devices import DEVICES, Options, choose_device, gpu_memory_of, placement_of
from quire.llm.machine import resident_memory
from quire.llm.prompts import PromptReader
from quire.loader.files import open_model_file
from quire.loader.gguf import GGUFFile
from quire.loader.metadata import Metadata
from quire.loader.safetensors import SafetensorsFolder
from quire.loader.tensor import Tensor
from quire.model.features import LOWERED, unsupported
from quire.model.generation import read_defaults
from quire.model.isolated import Verdict, examine
from quire.model.kv_layout import KVLayout, grouped, kv_bytes_in_block, kv_bytes_per_token
from quire.model.loading import Model, load_model, memory_estimate, norm_health, read_tokenizer
from quire.model.rope import LongScaling, RopeScaling
from quire.model.spec import (
    Experts,
    ModelSpec,
)
from quire.tokenizer import Tokenizer

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class FileFacts:
    path: str
    format: Literal["gguf", "safetensors"]
    bytes: int
    name: str | None  # as the file calls its model
    architecture: str | None


@dataclass(slots=True)
class TypeTotals:
    """The tensors of one type."""

    count: int = 0
    weights: int = 0  # of packed bytes: what the model makes of them; 0 where it cannot be read
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class TensorFacts:
    count: int
    weights: int
    by_type: dict[str, TypeTotals]  # the largest first
    i2s_packing: str | None  # that its I2_S tensors are taken to be in, which no file says
    i2s_packing_asked: bool  # whether the user said so


@dataclass(frozen=True, slots=True)
class ModelFacts:
    family: str
    context_length: int
    vocabulary_size: int
    num_layers: int
    hidden_size: int
    ffn_size: int  # the widest; 0: no layer has a feed-forward
    num_heads: int  # 0: no layer attends
    num_kv_heads: int
    head_dim: int
    activation: str | None
    rope_base: float | None  # None: no layer has rope
    rope_scaling: str | None
    sliding_windows: list[int]  # each size once
    tied_head: bool
    rope_factors: Literal["long", "short"] | None  # longrope's set; None: no longrope
    num_experts: int | None  # None: every layer is dense
    num_used_experts: int | None
    state_layers: dict[str, int]  # how many layers keep a state, by its kind
    lacking: dict[str, list[str]]  # by device that does not run the model: what it lacks


@dataclass(frozen=True, slots=True)
class NormFacts:
    """The weights of all norms; `low` and `high` are None where there are no norms."""

    count: int
    low: float | None
    high: float | None
    unsound: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What device="auto" takes here, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    present: bool  # a file without a tokenizer has none of what follows
    vocabulary_size: int = 0
    bos_token_id: int | None = None
    end_token_ids: list[int] = field(default_factory=list)
    end_tokens: list[str] = field(default_factory=list)
    chat_template: bool = False


class PlacementForecast(NamedTuple):
    """Bytes that a model on both devices takes, with a cache of `num_blocks` blocks."""

    gpu_layers: int | None  # None: the GPU has all feed-forwards
    num_layers: int
    num_blocks: int
    cpu_weights: int
    cpu_kv: int
    cpu: int  # with what steps work in
    gpu_weights: int
    gpu_kv: int
    gpu: int


class CpuForecast(NamedTuple):
    """Bytes that one request over the model's whole context takes on the CPU executor."""

    weights: int
    kv_per_token: int
    kv_per_token_int8: int
    kv: int
    workspace: int
    state: int  # of a sequence; 0: no layer keeps one
    process: int | None  # Python and what it has loaded; None where the system does not say
    peak: int


class CudaForecast(NamedTuple):
    """Bytes that requests take on the CUDA executor."""

    kv_per_token: int
    kv_per_token_8bit: int  # as int8 or fp8
    state: int  # of a sequence; 0: no layer keeps one


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """What the files say of sampling, for requests that say nothing; None: nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes."""

    weights_in_file: int
    weights_in_reference_executor: int
    kv_per_token: int  # in the reference executor
    kv_per_context: int
    kv_without_windows: int  # of a context of which nothing is given back
    cpu: CpuForecast | None  # None where the CPU executor does not run the model here
    cuda: CudaForecast | None  # None where the CUDA executor does not lower the model
    placement: PlacementForecast | None = None  # None where none was asked for, or all fits a GPU


@dataclass(slots=True)
class Inspection:
    """Facts by section. A section that could not be read is None, and a problem says why."""

    file: FileFacts | None = None
    tensors: TensorFacts | None = None
    model: ModelFacts | None = None
    norms: NormFacts | None = None
    tokenizer: TokenizerFacts | None = None
    sampling: SamplingFacts | None = None
    memory: MemoryFacts | None = None
    device: DeviceFacts | None = None
    isolation: Verdict | None = None  # of the process that read the file first
    problems: list[str] = field(default_factory=list)


def inspect_model(
    model: str,
    path: Path,
    *,
    trusted: bool,
    i2s_packing: str | None = None,
    placed: Options | None = None,
) -> Inspection:
    """Look at a GGUF file or a safetensors folder without unpacking it. `placed`: with gpu_layers,
    for what the model would take on both devices.

    What cannot be read without privileges is not read at all. What is refused there is read here
    too, by the same code, to tell as much of it as there is.
    """
    found = Inspection()
    with _noting(found.problems):
        verdict = examine(model, path, trusted=trusted)
        _inspect_file(found, path, i2s_packing, placed)
        if found.file is not None:
            found.isolation = verdict
    return found


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Go on after what is wrong with one part of a file."""
    try:
        yield
    except QuireError as error:
        problems.append(str(error))


def _inspect_file(
    found: Inspection, path: Path, i2s_packing: str | None, placed: Options | None
) -> None:
    with _noting(found.problems), open_model_file(path) as source:
        found.file = _file_facts(source, path)
        found.tensors = _tensor_facts(source.tensors.values(), i2s_packing)
        with _noting(found.problems), load_model(path, i2s_packing=i2s_packing) as model:
            if _has_raw(source):  # executors take blocks that are made of these
                facts = _tensor_facts(model.tensors.values(), i2s_packing)
                found.tensors = replace(facts, i2s_packing=None)
            _inspect_loaded(found, model)
            with _noting(found.problems):
                found.device = _device_facts(model)
            if placed is not None and found.memory is not None:
                forecast = _placement_forecast(model, placed)
                found.memory = replace(found.memory, placement=forecast)


def _inspect_loaded(found: Inspection, model: Model) -> None:
    found.model = _model_facts(model.spec)
    norms = norm_health(model)
    found.norms = NormFacts(
        count=len(norms),
        low=min((norm.low for norm in norms), default=None),
        high=max((norm.high for norm in norms), default=None),
        unsound=sum(norm.problem is not None for norm in norms),
    )
    found.problems += [f"{norm.name}: {norm.problem}" for norm in norms if norm.problem]
    with _noting(found.problems):
        tokenizer = read_tokenizer(model)
        found.tokenizer = _tokenizer_facts(tokenizer)
        prompts = PromptReader(tokenizer, model.spec.context_length)
        if prompts.can_chat:
            _ = prompts.template  # whether it compiles
    with _noting(found.problems):
        defaults = read_defaults(model)
        said = defaults.options
        found.sampling = SamplingFacts(
            said.get("temperature"),
            said.get("top_k"),
            said.get("top_p"),
            said.get("min_p"),
            said.get("repetition_penalty"),
            said.get("max_tokens"),
        )
        found.problems += defaults.notes
    found.memory = _memory_facts(model)  # last: this process has then loaded what a run loads


def _file_facts(source: GGUFFile | SafetensorsFolder, path: Path) -> FileFacts:
    if isinstance(source, GGUFFile):
        metadata, name, architecture = source.metadata, "general.name", "general.architecture"
    else:
        metadata, name, architecture = source.config, "_name_or_path", "model_type"
    return FileFacts(
        path=str(path),
        format="gguf" if isinstance(source, GGUFFile) else "safetensors",
        bytes=source.file_bytes,
        name=_text(metadata, name),
        architecture=_text(metadata, architecture),
    )


def _text(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _has_raw(source: object) -> bool:
    """Whether a folder has weights that are no weights before they are joined with others."""
    if not isinstance(source, SafetensorsFolder):
        return False
    return any(tensor.format.is_raw for tensor in source.tensors.values())


def _tensor_facts(tensors: Iterable[Tensor], i2s_packing: str | None) -> TensorFacts:
    by_type: dict[str, TypeTotals] = {}
    for tensor in tensors:
        totals = by_type.setdefault(tensor.format.name, TypeTotals())
        totals.count += 1
        totals.weights += tensor.num_weights
        totals.bytes += tensor.nbytes
    return TensorFacts(
        count=sum(totals.count for totals in by_type.values()),
        weights=sum(totals.weights for totals in by_type.values()),
        by_type=dict(sorted(by_type.items(), key=lambda item: -item[1].bytes)),
        i2s_packing=(i2s_packing or "x86") if "I2_S" in by_type else None,
        i2s_packing_asked=i2s_packing is not None,
    )


def _model_facts(spec: ModelSpec) -> ModelFacts:
    rope = spec.ropes[0] if spec.ropes else None
    scaling = None if rope is None else rope.scaling
    feeds = spec.feed_forwards
    experts = next((feed for feed in feeds if isinstance(feed, Experts)), None)
    heads = next(iter(spec.attentions.values()), None)
    return ModelFacts(
        family=spec.family,
        context_length=spec.context_length,
        vocabulary_size=spec.vocabulary_size,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        num_heads=0 if heads is None else heads.num_heads,
        num_kv_heads=0 if heads is None else heads.num_kv_heads,
        head_dim=0 if heads is None else heads.head_dim,
        activation=feeds[0].activation.value if feeds else None,
        rope_base=None if rope is None else rope.base,
        rope_scaling=None if scaling is None else type(scaling).__name__,
        sliding_windows=sorted({window for window in spec.windows if window is not None}),
        tied_head=spec.tied_head,
        rope_factors=_rope_factors(scaling),
        num_experts=None if experts is None else experts.count,
        num_used_experts=None if experts is None else experts.num_used,
        state_layers=dict(Counter(part.kind.value for part in spec.states.values())),
        lacking={name: found for name in LOWERED if (found := unsupported(spec, name))},
    )


def _rope_factors(scaling: RopeScaling | None) -> Literal["long", "short"] | None:
    if not isinstance(scaling, LongScaling):
        return None
    return "long" if scaling.is_long else "short"


def _tokenizer_facts(tokenizer: Tokenizer | None) -> TokenizerFacts:
    if tokenizer is None:
        return TokenizerFacts(present=False)
    return TokenizerFacts(
        present=True,
        vocabulary_size=tokenizer.vocabulary_size,
        bos_token_id=tokenizer.bos_token_id,
        end_token_ids=list(tokenizer.end_token_ids),
        end_tokens=[tokenizer.token_text(token) for token in tokenizer.end_token_ids],
        chat_template=tokenizer.chat_template is not None,
    )


def _memory_facts(model: Model) -> MemoryFacts:
    estimate = memory_estimate(model, num_kv_tokens=model.spec.context_length)
    layout = grouped(model.spec, BLOCK_SIZE)
    is_as_in_file = not _has_raw(model.source)
    return MemoryFacts(
        weights_in_file=estimate.weights if is_as_in_file else model.file_bytes,
        weights_in_reference_executor=estimate.float32_weights,
        kv_per_token=estimate.kv_per_token,
        kv_per_context=_kv_per_context(model.spec, layout, kv_token_bytes(model.spec, layout)),
        kv_without_windows=estimate.kv,
        cpu=_cpu_forecast(model) if _runs_on_cpu(model.spec) else None,
        cuda=None if unsupported(model.spec, "cuda") else _cuda_forecast(model.spec),
    )


def _device_facts(model: Model) -> DeviceFacts:
    choice = choose_device(Options(), model, lambda _: None)
    return DeviceFacts(choice.options.device, choice.reason)


def _placement_forecast(model: Model, options: Options) -> PlacementForecast | None:
    found = placement_of(model, options, gpu_memory_of(options))
    if found is None:
        return None
    return PlacementForecast(
        gpu_layers=found.gpu_layers,
        num_layers=model.spec.num_layers,
        num_blocks=found.num_blocks,
        cpu_weights=found.cpu.weights,
        cpu_kv=found.num_blocks * found.cpu.block_bytes,
        cpu=found.cpu_bytes,
        gpu_weights=found.gpu.weights,
        gpu_kv=found.num_blocks * found.gpu.block_bytes,
        gpu=found.gpu_bytes,
    )


def _kv_per_context(spec: ModelSpec, layout: KVLayout, token_bytes: int) -> int:
    """Keys and values of one sequence over the whole context, blocks out of windows given back.

    Each step computes as many tokens as on the CPU: so many blocks are held beside the windows.
    """
    chunk = DEVICES["cpu"].engine_defaults.max_step_tokens
    num_blocks = peak_blocks(layout.windows, BLOCK_SIZE, spec.context_length, chunk)
    return num_blocks * BLOCK_SIZE * token_bytes


def _runs_on_cpu(spec: ModelSpec) -> bool:
    return has_native_module() and not unsupported(spec, "cpu")


def _cuda_forecast(spec: ModelSpec) -> CudaForecast:
    halves, in_bytes = (kv_bytes_per_token(spec, is_8bit) for is_8bit in (False, True))
    return CudaForecast(halves, in_bytes, _FLOAT_BYTES * spec.num_state_elements)


def _cpu_forecast(model: Model) -> CpuForecast:
    """Asked of a process that has loaded as much as one that runs the model."""
    spec = model.spec
    weights = weight_bytes(model.tensors)
    halves, in_bytes = (kv_bytes_per_token(spec, is_8bit) for is_8bit in (False, True))
    layout = grouped(spec, BLOCK_SIZE)
    kv = _kv_per_context(spec, layout, kv_bytes_in_block(spec, layout, is_8bit=False))
    context = -(-spec.context_length // BLOCK_SIZE) * BLOCK_SIZE
    num_rows = min(context, DEVICES["cpu"].engine_defaults.max_step_tokens)
    workspace = workspace_bytes(spec, model.tensors, num_rows, context)
    process = resident_memory()
    # While a tensor is packed its bytes of the file are in memory too.
    as_read = max(tensor.nbytes for tensor in model.tensors.values())
    state = state_bytes(spec)
    # A step reads one state and writes another.
    peak = (process or 0) + weights + max(as_read, kv + workspace + 2 * state)
    return CpuForecast(weights, halves, in_bytes, kv, workspace, state, process, peak)
