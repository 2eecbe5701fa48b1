"""Where the model files of the tests are, and how those too big to commit are made again.

`tiny` is a two-layer Llama of random weights in 17 block formats, `tiny-bitnet` its BitNet sister.
The files of formats that the gguf package cannot quantise are committed as llama.cpp wrote them.
The others follow from a seed and from that package, byte for byte as llama.cpp wrote them: they
are made on first use, checked against the sha256 of the originals, and kept in pytest's cache.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

FIXTURES = Path(__file__).parent / "fixtures"
DERIVED = Path(__file__).parent.parent / ".pytest_cache" / "quire-fixtures"

TINY_FILES = tuple(
    f"tiny/{name}.gguf"
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M"),
        *("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"),
    )
)
TINY_BITNET_FILES = tuple(f"tiny-bitnet/{name}.gguf" for name in ("F32", "TQ1_0", "TQ2_0"))

Kind = gguf.GGMLQuantizationType
Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Recipe:
    """How a file that is not committed is made."""

    sha256: str  # of the file as llama.cpp wrote it
    architecture: str
    kind: Kind  # of the matrices; norms are always F32
    file_type: int
    head_from: str | None = None  # committed file that holds output.weight as this file has it


RECIPES = {
    "tiny/F32.gguf": Recipe(
        "91e4e56f095b43427271cb61235fd5467f8f3a96ad29ad8befa2c152494406e4", "llama", Kind.F32, 0
    ),
    "tiny/F16.gguf": Recipe(
        "5d001bcd7463dd82049d6e078f2f35e1c7e519bfc00e2214f8aef246de236775", "llama", Kind.F16, 1
    ),
    "tiny/BF16.gguf": Recipe(
        "f58571195950a2fcf584cbe9a4a91135b387f8674c5583ca94cbedeb2e19b7a4", "llama", Kind.BF16, 32
    ),
    "tiny/Q8_0.gguf": Recipe(
        "87598d99a3e8f99469d6e2c6d78e044629fd9ba3bf57cb614b8ecd928de4bcf1", "llama", Kind.Q8_0, 7
    ),
    "tiny/Q4_1.gguf": Recipe(
        "4612bafb18f5a56344e364248b74976a95e27dcd08d5772ef4eba512c49dfe47",
        *("llama", Kind.Q4_1, 3, "tiny/Q6_K.gguf"),
    ),
    "tiny/Q5_0.gguf": Recipe(
        "4a3bedfb2fe0dde4f822144c7101ca45bb01e07f9437c7f4fa6049168478775a",
        *("llama", Kind.Q5_0, 8, "tiny/Q6_K.gguf"),
    ),
    "tiny/Q5_1.gguf": Recipe(
        "4e3ad654ee4e3e644e9e29b2d7a0a6d55b4f73b0725fa78c7d3a67c78df4a043",
        *("llama", Kind.Q5_1, 9, "tiny/Q6_K.gguf"),
    ),
    "tiny-bitnet/F32.gguf": Recipe(
        "e55eef5c0ac6ce605ecd3be56a639d82015dfc99c6ca1e3143ac719c5d08e89c", "bitnet", Kind.F32, 0
    ),
}


def fixture_file(name: str) -> Path:
    """The path of a fixture such as "tiny/Q4_0.gguf" or "tiny/golden.npz", made if need be."""
    committed = FIXTURES / name
    if committed.exists():
        return committed
    derived = DERIVED / name
    if not derived.exists():
        _make(derived, RECIPES[name])
    return derived


def _make(target: Path, recipe: Recipe) -> None:
    """Write the file beside its place and move it there whole: test workers run side by side."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        _write(partial, recipe)
        found = hashlib.sha256(partial.read_bytes()).hexdigest()
        if found != recipe.sha256:
            raise AssertionError(
                f"{target.name} came out as {found}, not {recipe.sha256}: this numpy draws other "
                "numbers, or this gguf package quantises differently"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, recipe: Recipe) -> None:
    weights = _weights(recipe.architecture)
    names = list(weights) if recipe.kind == Kind.F32 else sorted(weights, key=_llama_cpp_order)
    writer = gguf.GGUFWriter(path, recipe.architecture)
    _add_metadata(writer, recipe)
    for name in names:
        if name == "output.weight" and recipe.head_from is not None:
            writer.add_tensor(name, _committed_head(recipe.head_from), raw_dtype=Kind.Q6_K)
        elif weights[name].ndim == 1:
            writer.add_tensor(name, weights[name])
        else:
            blocks = gguf.quants.quantize(weights[name], recipe.kind)
            writer.add_tensor(name, blocks, raw_dtype=recipe.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, recipe: Recipe) -> None:
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(256)
    writer.add_block_count(2)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    writer.add_tokenizer_model("none")
    if recipe.kind != Kind.F32:
        writer.add_quantization_version(2)
    writer.add_file_type(recipe.file_type)


def _weights(architecture: str) -> Weights:
    """The float weights every file of a folder was quantised from, in the order they were drawn."""
    generator = np.random.default_rng({"llama": 7, "bitnet": 21}[architecture])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (512, 256)}
    for layer in range(2):
        shapes |= _layer_shapes(f"blk.{layer}.", architecture)
    shapes["output_norm.weight"] = (256,)
    if architecture == "llama":
        shapes["output.weight"] = (512, 256)
    drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    return {name: _scaled(values).astype(np.float32) for name, values in drawn.items()}


def _layer_shapes(prefix: str, architecture: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (256,),
        "ffn_norm": (256,),
        "attn_q": (256, 256),
        "attn_k": (128, 256),
        "attn_v": (128, 256),
        "attn_output": (256, 256),
        "ffn_gate": (512, 256),
        "ffn_up": (512, 256),
        "ffn_down": (256, 512),
    }
    if architecture == "bitnet":
        shapes |= {"attn_sub_norm": (256,), "ffn_sub_norm": (512,)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if values.ndim == 1:
        return 1 + 0.2 * values
    return values * 1.4 / math.sqrt(values.shape[1])


def _llama_cpp_order(name: str) -> tuple[bool, str]:
    """The quantiser writes the tensors outside the layers first, and sorts by name."""
    return name.startswith("blk."), name


def _committed_head(name: str) -> npt.NDArray[np.uint8]:
    tensors = gguf.GGUFReader(FIXTURES / name).tensors
    [head] = [tensor for tensor in tensors if tensor.name == "output.weight"]
    return np.array(head.data)
