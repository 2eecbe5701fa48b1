"""Settings shared by all tests: random tests repeat themselves exactly unless told otherwise."""

import os

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("random", deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS", "repeatable"))
