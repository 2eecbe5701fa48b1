"""What is in a model file: as much as can be read of it, and everything that is wrong with it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import QuireError
from quire.executors.cpu import has_native_module
from quire.llm.cpu_assembly import cpu_forecast
from quire.llm.prompts import PromptReader
from quire.loader.files import open_model_file
from quire.loader.gguf import GGUFFile
from quire.loader.metadata import Metadata
from quire.loader.tensor import Tensor
from quire.model.isolated import examine
from quire.model.loading import Model, load_model, memory_estimate, norm_health
from quire.model.model_tokenizer import read_tokenizer
from quire.model.spec import ModelSpec
from quire.tokenizer import Tokenizer

Facts = dict[str, Any]  # in JSON's types


@dataclass(slots=True)
class Inspection:
    """Facts by section; a section that could not be read is not there, and a problem says why."""

    sections: dict[str, Facts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after what is wrong with one part of a file."""
        try:
            yield
        except QuireError as error:
            self.problems.append(str(error))


def inspect_model(model: str, path: Path, *, trusted: bool) -> Inspection:
    """Look at a GGUF file or a safetensors folder without unpacking it.

    What cannot be read without privileges is not read at all. What is refused there is read here
    too, by the same code, to tell as much of it as there is.
    """
    found = Inspection()
    with found.noting():
        verdict = examine(model, path, trusted=trusted)
        _inspect_file(found, path)
        if found.sections:
            isolation = {"in_force": list(verdict.in_force), "why_not": verdict.why_not}
            found.sections["isolation"] = isolation
    return found


def _inspect_file(found: Inspection, path: Path) -> None:
    with found.noting(), open_model_file(path) as source:
        is_gguf = isinstance(source, GGUFFile)
        metadata = source.metadata if isinstance(source, GGUFFile) else source.config
        found.sections["file"] = {
            "path": str(path),
            "format": "gguf" if is_gguf else "safetensors",
            "bytes": source.file_bytes,
            "name": _text(metadata, "general.name" if is_gguf else "_name_or_path"),
            "architecture": _text(metadata, "general.architecture" if is_gguf else "model_type"),
        }
        found.sections["tensors"] = _tensor_facts(source.tensors.values())
        with found.noting(), load_model(path) as model:
            _inspect_loaded(found, model)


def _inspect_loaded(found: Inspection, model: Model) -> None:
    found.sections["model"] = _model_facts(model.spec)
    norms = norm_health(model)
    found.sections["norms"] = {
        "count": len(norms),
        "low": min((norm.low for norm in norms), default=None),
        "high": max((norm.high for norm in norms), default=None),
        "unsound": sum(norm.problem is not None for norm in norms),
    }
    found.problems += [f"{norm.name}: {norm.problem}" for norm in norms if norm.problem]
    with found.noting():
        tokenizer = read_tokenizer(model)
        found.sections["tokenizer"] = _tokenizer_facts(tokenizer)
        prompts = PromptReader(tokenizer, model.spec.context_length)
        if prompts.can_chat:
            _ = prompts.template  # whether it compiles
    found.sections["memory"] = _memory_facts(model)  # with all that a run has loaded too


def _text(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _tensor_facts(tensors: Iterable[Tensor]) -> Facts:
    by_type: dict[str, Facts] = {}
    for tensor in tensors:
        row = by_type.setdefault(tensor.format.name, {"count": 0, "weights": 0, "bytes": 0})
        row["count"] += 1
        row["weights"] += tensor.num_weights
        row["bytes"] += tensor.nbytes
    totals = {name: sum(row[name] for row in by_type.values()) for name in ("count", "weights")}
    largest_first = sorted(by_type.items(), key=lambda item: -item[1]["bytes"])
    return totals | {"by_type": dict(largest_first)}


def _model_facts(spec: ModelSpec) -> Facts:
    windows = sorted({window for window in spec.windows if window is not None})
    return {
        "family": spec.family,
        "context_length": spec.context_length,
        "vocabulary_size": spec.vocabulary_size,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_size": spec.ffn_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "activation": spec.activation.value,
        "rope_base": spec.rope.base,
        "rope_scaling": None if spec.rope.scaling is None else type(spec.rope.scaling).__name__,
        "sliding_windows": windows,
        "tied_head": spec.tied_head,
    }


def _memory_facts(model: Model) -> Facts:
    context = model.spec.context_length
    estimate = memory_estimate(model, num_kv_tokens=context)
    return {
        "weights_in_file": estimate.weights,
        "weights_in_reference_executor": estimate.float32_weights,
        "kv_per_token": estimate.kv_per_token,
        "kv_per_context": estimate.kv,
        "cpu": cpu_forecast(model)._asdict() if has_native_module() else None,
    }


def _tokenizer_facts(tokenizer: Tokenizer | None) -> Facts:
    if tokenizer is None:
        return {"present": False}
    return {
        "present": True,
        "vocabulary_size": tokenizer.vocabulary_size,
        "bos_token_id": tokenizer.bos_token_id,
        "end_token_ids": list(tokenizer.end_token_ids),
        "end_tokens": [tokenizer.token_text(token) for token in tokenizer.end_token_ids],
        "chat_template": tokenizer.chat_template is not None,
    }
