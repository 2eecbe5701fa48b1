"""`quire inspect` and `quire doctor`: what a model file holds, what it would take and what is wrong
with it; what this machine offers, and what quire would make of it.

Their options are in `quire.cli.options`.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from quire.cli.program import print_error, print_json, printable
from quire.core.errors import ConfigError
from quire.diagnosis import CpuKernels, Diagnosis, Executors, Processor, diagnose
from quire.inspection import (
    CpuForecast,
    CudaForecast,
    DeviceFacts,
    FileFacts,
    Inspection,
    MemoryFacts,
    ModelFacts,
    NormFacts,
    PlacementForecast,
    SamplingFacts,
    TensorFacts,
    TokenizerFacts,
    inspect_model,
)
from quire.llm.assembly import print_notice
from quire.llm.devices import Options
from quire.llm.machine import format_bytes
from quire.loader.defaults import DUMMY_PREFIX, resolve
from quire.model.isolated import Verdict

Section = TypeVar("Section")


def inspect(args: argparse.Namespace) -> int:
    if args.model.startswith(DUMMY_PREFIX):
        raise ConfigError(
            f"{args.model} is made in memory and has no file to look into; "
            "`quire bench make-model` writes it as one"
        )
    path = resolve(args.model, print_notice)
    found = inspect_model(
        args.model,
        path,
        trusted=args.trust_model_file,
        i2s_packing=args.i2s_packing,
        placed=_placed(args),
    )
    if args.json:
        print_json(_as_json(found))
    else:
        _print(found)
    for problem in found.problems:
        print_error(problem)
    return 1 if found.problems else 0


def _placed(args: argparse.Namespace) -> Options | None:
    """How the model would be put on both devices; None where that is not asked for."""
    layers, memory, how = args.gpu_layers, args.gpu_memory, args.placement
    if how is None and layers is None:
        return None if memory is None else Options(gpu_layers="auto", gpu_memory=memory)
    return Options(gpu_layers=layers, gpu_memory=memory, placement=how)


def _as_json(found: Inspection) -> dict[str, Any]:
    """The sections that could be read, and the problems."""
    sections = {name: facts for name, facts in asdict(found).items() if facts is not None}
    if found.tokenizer is not None and not found.tokenizer.present:
        sections["tokenizer"] = {"present": False}
    for name in ("cpu", "cuda", "placement"):
        if found.memory is not None and getattr(found.memory, name) is not None:
            sections["memory"][name] = getattr(found.memory, name)._asdict()
    if found.isolation is not None:
        verdict = found.isolation
        sections["isolation"] = {"in_force": verdict.in_force, "why_not": verdict.why_not}
    return sections


def _print(found: Inspection) -> None:
    _print_section("file", found.file, _file_lines)
    _print_section("model", found.model, _model_lines)
    _print_section("tensors", found.tensors, _tensor_lines)
    _print_section("tokenizer", found.tokenizer, _tokenizer_lines)
    _print_section("sampling", found.sampling, _sampling_lines)
    _print_section("memory", found.memory, _memory_lines)
    _print_section("device", found.device, _device_lines)
    _print_section("norms", found.norms, _norm_lines)
    _print_section("isolation", found.isolation, _isolation_lines)


def _print_section(name: str, facts: Section | None, lines: Callable[[Section], list[str]]) -> None:
    if facts is not None:
        for number, line in enumerate(lines(facts)):
            print(f"{name if number == 0 else '':<10} {printable(line)}")


def _file_lines(facts: FileFacts) -> list[str]:
    name = f"{facts.name}, " if facts.name else ""
    architecture = facts.architecture or "unknown architecture"
    kind = {"gguf": "GGUF", "safetensors": "safetensors"}[facts.format]
    return [facts.path, f"{name}{architecture}, {kind}, {format_bytes(facts.bytes)}"]


def _model_lines(facts: ModelFacts) -> list[str]:
    scaling = "" if facts.rope_scaling is None else f", {facts.rope_scaling}"
    if facts.rope_factors is not None:
        scaling += f" ({facts.rope_factors} factors, by the longest context)"
    rope = "no rope" if facts.rope_base is None else f"rope base {facts.rope_base:g}{scaling}"
    feed = f"feed-forward {facts.ffn_size} ({facts.activation})"
    heads = f"{facts.num_heads} heads and {facts.num_kv_heads} KV heads of {facts.head_dim}, {rope}"
    lines = [
        f"{facts.num_layers} layers, hidden {facts.hidden_size}, "
        + (feed if facts.ffn_size else "no feed-forward"),
        heads if facts.num_heads else "no attention",
        f"context {facts.context_length}, vocabulary {facts.vocabulary_size}"
        + (", head tied to the embedding" if facts.tied_head else ""),
    ]
    if facts.sliding_windows:
        lines.append(f"sliding windows of {', '.join(map(str, facts.sliding_windows))} tokens")
    if facts.num_experts is not None:
        lines.append(f"{facts.num_experts} experts, {facts.num_used_experts} for each token")
    for kind, count in facts.state_layers.items():
        lines.append(f"{count} of {facts.num_layers} layers keep a state: {kind}")
    lines += [f"not on {name}: {', '.join(what)}" for name, what in facts.lacking.items()]
    return lines


def _tensor_lines(facts: TensorFacts) -> list[str]:
    rows = [
        f"{name:<7} {totals.count:>5}  {totals.weights:>15,}  {format_bytes(totals.bytes):>11}"
        for name, totals in facts.by_type.items()
    ]
    return [f"{facts.count} tensors, {facts.weights:,} weights", *rows, *_packing_lines(facts)]


def _packing_lines(facts: TensorFacts) -> list[str]:
    if facts.i2s_packing is None:
        return []
    other = "x86" if facts.i2s_packing == "arm" else "arm"
    why = "as asked" if facts.i2s_packing_asked else "as most files are"
    return [
        f"I2_S is taken to be in the packing of {facts.i2s_packing} builds, {why}: nothing in a "
        f"file says. If the model writes nonsense, try --i2s-packing {other}"
    ]


def _sampling_lines(facts: SamplingFacts) -> list[str]:
    given = [f"{name} {value:g}" for name, value in asdict(facts).items() if value is not None]
    return [f"defaults: {', '.join(given)}"] if given else []


def _tokenizer_lines(facts: TokenizerFacts) -> list[str]:
    if not facts.present:
        return ["none: the model takes and gives token ids"]
    pairs = zip(facts.end_tokens, facts.end_token_ids, strict=True)
    ends = ", ".join(f"{text} ({token})" for text, token in pairs)
    template = "a chat template" if facts.chat_template else "no chat template"
    return [f"{facts.vocabulary_size} tokens, {template}", f"ends with {ends or 'nothing'}"]


def _memory_lines(facts: MemoryFacts) -> list[str]:
    total = facts.weights_in_reference_executor + facts.kv_per_context
    return [
        f"weights {format_bytes(facts.weights_in_file)} as they lie in the file",
        *([] if facts.cpu is None else _cpu_lines(facts.cpu)),
        *([] if facts.cuda is None else _cuda_lines(facts.cuda)),
        f"reference executor: weights {format_bytes(facts.weights_in_reference_executor)} in "
        f"float32, keys and values {format_bytes(facts.kv_per_token)} a token, "
        f"{format_bytes(total)} for one whole context",
        *_window_lines(facts),
        *([] if facts.placement is None else _placement_lines(facts.placement)),
    ]


def _placement_lines(facts: PlacementForecast) -> list[str]:
    of_layers = f"of {facts.num_layers} layers"
    on_gpu, on_cpu = "the feed-forwards", "the attention"
    if facts.gpu_layers is not None:
        on_gpu = f"the last {facts.gpu_layers}"
        on_cpu = f"the first {facts.num_layers - facts.gpu_layers}"
    sides = (
        (f"on the GPU: {on_gpu}", facts.gpu, facts.gpu_weights, facts.gpu_kv),
        (f"on the CPU: {on_cpu}", facts.cpu, facts.cpu_weights, facts.cpu_kv),
    )
    return [
        f"{what} {of_layers}, {format_bytes(total)} (weights {format_bytes(weights)}, keys and "
        f"values {format_bytes(kv)})"
        for what, total, weights, kv in sides
    ]


def _window_lines(facts: MemoryFacts) -> list[str]:
    if facts.kv_per_context >= facts.kv_without_windows:
        return []
    share = facts.kv_per_context / facts.kv_without_windows
    return [f"windows: {share:.0%} of a whole context's keys and values are kept at once"]


def _cpu_lines(forecast: CpuForecast) -> list[str]:
    return [
        f"cpu executor: weights {format_bytes(forecast.weights)} packed, keys and values "
        f"{format_bytes(forecast.kv_per_token)} a token "
        f"({format_bytes(forecast.kv_per_token_int8)} as int8){_state(forecast.state)}",
        f"              {format_bytes(forecast.peak)} at most in memory with one whole context",
    ]


def _cuda_lines(forecast: CudaForecast) -> list[str]:
    return [
        f"cuda executor: keys and values {format_bytes(forecast.kv_per_token)} a token "
        f"({format_bytes(forecast.kv_per_token_8bit)} as int8 or fp8){_state(forecast.state)}"
    ]


def _state(num_bytes: int) -> str:
    return f", a state of {format_bytes(num_bytes)} a sequence" if num_bytes else ""


def _device_lines(facts: DeviceFacts) -> list[str]:
    return [f"auto takes {facts.name}: {facts.reason}"]


def _norm_lines(facts: NormFacts) -> list[str]:
    if facts.unsound:
        return [f"{facts.unsound} of {facts.count} look broken"]
    return [f"{facts.count}, all sound: weights from {facts.low:.3g} to {facts.high:.3g}"]


def _isolation_lines(verdict: Verdict) -> list[str]:
    if verdict.in_force:
        return [f"read without privileges first: {', '.join(verdict.in_force)}"]
    return [f"not read without privileges first: {verdict.why_not}"]


# ---- quire doctor


def doctor(args: argparse.Namespace) -> int:
    found = diagnose()
    if args.json:
        print_json(_diagnosis_as_json(found))
    else:
        _print_diagnosis(found)
    return 0


def _diagnosis_as_json(found: Diagnosis) -> dict[str, Any]:
    verdict = found.isolation
    isolation = {"in_force": verdict.in_force, "why_not": verdict.why_not}
    return {**asdict(found), "isolation": isolation, "advice": found.advice}


def _print_diagnosis(found: Diagnosis) -> None:
    _print_processor(found.cpu)
    print(f"memory     {_size(found.memory.total)}, {_size(found.memory.available)} available")
    for gpu in found.gpus or [{"name": "none found"}]:
        print(f"GPU        {', '.join(gpu.values())}")
    _print_executors(found.executors)
    if found.cpu_kernels is not None:
        print(f"           {_kernel_line(found.cpu_kernels)}")
    print(f"cache      {found.cache.folder}")
    for name, is_there in found.cache.models.items():
        print(f"           {name}: {'there' if is_there else 'not there; quire pull fetches it'}")
    print(f"isolation  of reading model files: {found.isolation.text}")
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    print(f"versions   {versions}")
    print(f"system     {found.system}")
    for line in found.advice:
        print(f"advice     {line}")


def _print_processor(cpu: Processor) -> None:
    quota = "" if cpu.quota is None else f", held to {cpu.quota:g} by a cgroup"
    print(f"processor  {cpu.name or 'unknown'} ({cpu.architecture})")
    print(f"           {cpu.cores} cores, {cpu.usable_cores:g} usable here{quota}")
    print(f"           {' '.join(cpu.features) or 'no vector features known'}")


def _print_executors(executors: Executors) -> None:
    for name, state in executors.known.items():
        mark = "  <- device=auto takes this one" if name == executors.picked else ""
        print(f"{'executors' if name == 'cpu' else '':<10} {name:<10} {state}{mark}")


def _kernel_line(kernels: CpuKernels) -> str:
    threads = "1 thread" if kernels.threads == 1 else f"{kernels.threads} threads"
    others = [unit for unit in kernels.units if unit != kernels.unit]
    also = f"; also here: {', '.join(others)}" if others else ""
    return f"cpu kernels: {kernels.unit or 'none'} on {threads}{also}"


def _size(amount: int | None) -> str:
    return "unknown" if amount is None else format_bytes(amount)
