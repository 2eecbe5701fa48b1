"""Asking for a GPU where there is none says what is missing."""

import importlib.util

import pytest

from quire.core.errors import ConfigError
from quire.llm.assembly import Options, assemble
from quire.llm.cuda_assembly import USUAL_STEP_TOKENS


def test_what_is_missing_is_named() -> None:
    if importlib.util.find_spec("torch") is None:
        message = r"needs torch and triton: install quire\[cuda\]"
    else:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        message = "torch finds no NVIDIA GPU"
    with pytest.raises(ConfigError, match=message):
        assemble("dummy:tiny", Options(device="cuda"))


def test_steps_are_large_and_planned_ahead() -> None:
    config = Options(device="cuda", max_batch_size=8).engine_config()
    assert config.plan_ahead
    assert config.max_step_tokens == USUAL_STEP_TOKENS
    assert Options(device="cuda", max_batch_size=4096).engine_config().max_step_tokens == 4096
