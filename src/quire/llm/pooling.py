"""Embeddings of a model that writes: its hidden state after the last token and the final norm,
scaled to length 1. Fit to compare texts roughly, and no match for a model trained to embed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.core.sampling import SamplingParams

Vectors = npt.NDArray[np.float32]  # [prompts, hidden], or one of them

NO_TOKENS = SamplingParams(max_tokens=1)  # the least there is; pooling samples nothing


def unit_vector(pooled: Any) -> Vectors:
    """A pooled state at length 1; one of zeros as it is."""
    state = np.asarray(pooled, np.float64)
    length = float(np.linalg.norm(state))
    return (state / length if length > 0 else state).astype(np.float32)
