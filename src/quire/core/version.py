"""The version of quire that runs."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """As installed; a source tree that is merely on the path has none."""
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"
