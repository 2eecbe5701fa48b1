"""The GGUF files that are compared with llama.cpp: one of each family, of the same weights that
transformers' goldens have. tests/oracles/compare_with_llama_cpp.py stores llama.cpp's logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.drawn_families import DRAWN, drawn_config, in_its_context, write_drawn
from tests.executors.reference.plans import logits, row
from tests.fixture_files import FIXTURES
from tests.model.gguf_copies import write_gguf
from tests.model.gguf_families import ARCHITECTURES, Floats, write_family

from quire.executors.reference import ReferenceExecutor
from quire.loader.gguf_writer import write_gguf as write_planned
from quire.model.dummy import DummyModel
from quire.model.loading import load_model
from quire.model.spec import Experts, Layer

BOUND = 2e-3  # of the normalised mean squared error
STORED = sorted(folder.name for folder in (FIXTURES / "families").iterdir())
DUMMIES = {"gpt-oss-mxfp4": "dummy:tiny-gpt-oss"}  # drawn models are too narrow for blocks
# llama.cpp takes layer norms of phimoe for RMS norms, and its router for a softmax.
UNLIKE = {"phimoe"}
CASES = [*STORED, *(case for case in ARCHITECTURES if case not in UNLIKE), *DUMMIES]
# What llama.cpp reads off the number of layers: windows, norms of queries and keys, no q_lora_rank,
# rope.
NUM_LAYERS = {"exaone4": 64, "command-r": 64, "deepseek2-lite": 27, "baichuan": 32}
# What the file says and llama.cpp computes otherwise: it reads no window of these,
WITHOUT_WINDOWS = {"mistral", "phi3"}
# and scores groups of experts by their best two, where DeepSeek V2 was trained with the best one.
BEST_TWO = {"deepseek2-lite"}


def fixture(case: str) -> Path:
    if case in DUMMIES:
        return FIXTURES / "llama-cpp" / case
    return FIXTURES / "families" / case if case in STORED else DRAWN / case


def tokens_of(case: str) -> list[int]:
    tokens: list[int] = np.load(fixture(case) / "golden.npz")["tokens"].tolist()
    return tokens


def write_case(case: str, folder: Path) -> Path:
    path = folder / f"{case}.gguf"
    if case in DUMMIES:
        dummy = DummyModel(DUMMIES[case])
        write_planned(path, dummy.fields, dummy.planned)
        return path
    if case in STORED:
        with load_model(fixture(case)) as model:
            return write_gguf(model, path)
    num_layers = NUM_LAYERS.get(case)
    with load_model(write_drawn(case, folder / case, num_layers)) as model:
        return write_family(case, drawn_config(case, num_layers), model, path)


def computed(case: str, path: Path, *, as_llama_cpp: bool) -> Floats:
    """The reference executor's logits of a file, or of what llama.cpp makes of it."""
    with load_model(path) as model:
        found = in_its_context(case, model)
        if as_llama_cpp:
            layers = tuple(_as_llama_cpp(case, layer) for layer in found.spec.layers)
            found = replace(found, spec=replace(found.spec, layers=layers))
        executor = ReferenceExecutor(found, num_blocks=4)
        result = logits(executor, row(tokens_of(case), range(4)))
        executor.close()
    return result


def _as_llama_cpp(case: str, layer: Layer) -> Layer:
    if case in WITHOUT_WINDOWS:
        return replace(layer, mixer=replace(layer.attention, window=None))
    feed = layer.feed_forward
    if case in BEST_TWO and isinstance(feed, Experts):
        router = replace(feed.router, num_group_best=2)
        return replace(layer, feed_forward=replace(feed, router=router))
    return layer


def nmse(found: Floats, expected: Floats) -> float:
    """The mean squared error over the mean square."""
    wanted = expected.astype(np.float64)
    return float(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
