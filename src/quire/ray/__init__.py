"""quire on many machines, with Ray: a Serve application (`quire ray serve`), and `generate` over
Ray Data. Ray is an extra: pip install 'quire[ray]'."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.ray.datasets import generate

__all__ = ["generate"]


def __getattr__(name: str) -> Any:
    """`generate`, imported when it is asked for: the parts without Ray can be had without it."""
    if name != "generate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return resolve_name("quire.ray.datasets:generate")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        message = "quire.ray.generate needs ray: pip install 'quire[ray]'"
        raise ModuleNotFoundError(message, name="ray") from error
