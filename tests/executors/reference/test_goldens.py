"""The reference executor against logits that others computed: llama.cpp's weights, transformers."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.reference.plans import logits, opened, row
from tests.fixture_files import FIXTURES, TINY_BITNET_FILES, TINY_FILES, fixture_file
from tests.model.gguf_copies import write_gguf

from quire.model.loading import load_model

FAMILIES = sorted(folder.name for folder in (FIXTURES / "families").iterdir())
SCATTERED_BLOCKS = (9, 2, 14)


def relative_error(found: npt.NDArray[np.float32], golden: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - golden) / np.linalg.norm(golden))


@pytest.mark.parametrize("name", [*TINY_FILES, *TINY_BITNET_FILES])
def test_every_block_format_gives_the_exact_logits(name: str) -> None:
    golden = np.load(fixture_file(f"{Path(name).parent}/golden.npz"))
    with opened(fixture_file(name)) as executor:
        found = logits(executor, row(golden["tokens"].tolist(), SCATTERED_BLOCKS))
    # BitNet's ternary matrices take activations of one byte, which the golden logits leave out.
    is_rounded = name in ("tiny-bitnet/TQ1_0.gguf", "tiny-bitnet/TQ2_0.gguf")
    error = relative_error(found, golden[f"{Path(name).stem}.exact"])
    assert error <= (0.05 if is_rounded else 1e-5)
    assert (error > 1e-3) == is_rounded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_transformers(family: str) -> None:
    folder = FIXTURES / "families" / family
    golden = np.load(folder / "golden.npz")
    with opened(folder) as executor:
        found = logits(executor, row(golden["tokens"].tolist(), SCATTERED_BLOCKS))
    assert relative_error(found, golden["logits"]) <= 1e-5


# GGUF cannot say what qwen2's windows on later layers and bitnet's squared ReLU say.
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"qwen2", "bitnet"}))
def test_a_family_written_as_gguf_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    folder = FIXTURES / "families" / family
    golden = np.load(folder / "golden.npz")
    with load_model(folder) as model:
        path = write_gguf(model, tmp_path / "copy.gguf")
    with opened(path) as executor:
        found = logits(executor, row(golden["tokens"].tolist(), SCATTERED_BLOCKS))
    assert relative_error(found, golden["logits"]) <= 1e-5
