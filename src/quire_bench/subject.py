"""Subject: the model under measurement, loaded, with what receipts say of it.

What really runs is asked of the executor, not of the options.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from quire.cli.program import print_progress
from quire.core.errors import ConfigError
from quire.llm.assembly import Assembly, assemble
from quire.llm.devices import Options
from quire.llm.model_names import find_model
from quire.loader.defaults import DUMMY_PREFIX
from quire.loader.gguf_writer import Writable
from quire.loader.metadata import Metadata
from quire.model.dummy import DummyModel, read_name
from quire.model.isolated import examine
from quire.model.loading import load_model
from quire.model.quant_mixes import MIXES
from quire_bench.receipts import Executed, Model

_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model before it is loaded."""

    name: str
    sha256: str | None
    quant: str | None
    num_weights: int
    matrix_weights: int  # that every token is multiplied with
    packed_bytes: int
    formats: dict[str, int]  # how many tensors have each

    def as_data(self) -> Model:
        return {
            "name": self.name,
            "sha256": self.sha256,
            "quant": self.quant,
            "parameters": self.num_weights,
            "packed_bytes": self.packed_bytes,
            "formats": self.formats,
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model. Close it when done."""

    facts: ModelFacts
    assembly: Assembly
    device: str  # as asked for

    @property
    def executed(self) -> Executed:
        """The executor that runs, its kernels, and why it is not what was asked for."""
        executor = self.assembly.executor
        return {
            "device": self.assembly.options.device,
            "kernels": list(executor.kernels),
            "fallback": executor.fallback,
        }

    def close(self) -> None:
        self.assembly.executor.close()


def open_subject(model: str, quant: str | None, options: Options) -> Subject:
    """Load a model for measuring; `quant` chooses the mix of a model without a file."""
    name = with_quant(model, quant)
    facts = read_facts(name, trusted=options.trust_model_file)
    return Subject(facts, assemble(name, options), options.device)


def with_quant(model: str, quant: str | None) -> str:
    """The model's name with the mix asked for; a file has the one it has."""
    if model.startswith(DUMMY_PREFIX):
        asked = read_name(model)
        has_mix = model.count(":") > 1
        if quant is None:
            return asked.text
        if has_mix and asked.mix.name != quant.upper():
            raise ConfigError(f"--model is {model}, but --quant is {quant}: leave one out")
        seed = f":{asked.seed}" if asked.seed else ""
        return read_name(f"{DUMMY_PREFIX}{asked.shape}:{quant}{seed}").text
    if quant is not None:
        raise ConfigError(
            f"--quant {quant} chooses the mix of a dummy:SHAPE model; {model} is a file and has "
            "its own: leave it out"
        )
    return model


def read_facts(name: str, *, trusted: bool = False) -> ModelFacts:
    if name.startswith(DUMMY_PREFIX):
        dummy = DummyModel(name)
        return _facts(dummy.name, None, dummy.metadata, dummy.planned)
    path = find_model(name, lambda line: print_progress(f"quire: {line}"))
    examine(name, path, trusted=trusted).check()
    shown = path.name if os.path.exists(name) else name  # receipts hold no local paths
    with load_model(path) as model:
        return _facts(shown, _sha256(path), model.metadata, model.tensors.values())


def _facts(
    name: str, sha256: str | None, metadata: Metadata, tensors: Collection[Writable]
) -> ModelFacts:
    sizes = {tensor.name: _num_weights(tensor) for tensor in tensors}
    matrices = {tensor.name: sizes[tensor.name] for tensor in tensors if len(tensor.shape) > 1}
    looked_up = "token_embd.weight" if "output.weight" in matrices else ""  # else it is the head
    formats = Counter(tensor.format.name for tensor in tensors)
    return ModelFacts(
        name=name,
        sha256=sha256,
        quant=_quant(metadata, formats),
        num_weights=sum(sizes.values()),
        matrix_weights=sum(matrices.values()) - matrices.get(looked_up, 0),
        packed_bytes=sum(tensor.nbytes for tensor in tensors),
        formats=dict(sorted(formats.items())),
    )


def _num_weights(tensor: Writable) -> int:
    blocks = tensor.nbytes // tensor.format.block_bytes
    return blocks * tensor.format.block_size


def _quant(metadata: Metadata, formats: Counter[str]) -> str | None:
    """The mix, as the file says it; else the commonest format."""
    by_number = {mix.file_type: mix.name for mix in MIXES.values()}
    stated = metadata.get("general.file_type")
    if isinstance(stated, int) and stated in by_number:
        return by_number[stated]
    return formats.most_common(1)[0][0] if formats else None


def _sha256(path: Path) -> str:
    """Of a file; of a folder, of its weights and config in order of their names."""
    files = [path]
    if path.is_dir():
        files = sorted(part for part in path.iterdir() if part.suffix in (".safetensors", ".json"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            while piece := content.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()
