"""Without Ray there is nothing to test here: `make test-ray` has an environment with it."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_on_ray_*.py"]
