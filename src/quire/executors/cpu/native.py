"""The native module: imported on first use, with an error that says what to do without it; and
the sample requests that are made for its sampler."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.core.plan import Sampling, SequencePlan, TokenLogprob, Want
from quire.executors.base import NO_SAMPLING

__all__ = [
    "SampleRequests",
    "check_native_module",
    "check_unit",
    "has_native_module",
    "native",
    "units",
]

_MAX_REMEMBERED = 4096  # sequences; far more than run at once
_BEYOND_ANY_VOCABULARY = 2**62  # what larger ids become, to fit in 64 bits


class _LazyModule:
    """quire._native. It finds the fields of a row by name: one that it does not know, or misses,
    is a TypeError here."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        setattr(self, name, value)
        return value

    @functools.cached_property
    def _module(self) -> Any:
        try:
            module = importlib.import_module("quire._native")
        except ImportError as error:
            raise ConfigError(
                f"the native CPU module cannot be imported ({error}): install quire with a C++ "
                "compiler at hand (`pip install .`), or run `make native` in a checkout; "
                "device='reference' runs without it, slowly"
            ) from error
        module.bind_plan_types(SequencePlan, Want, TokenLogprob)
        return module


if TYPE_CHECKING:
    import quire._native as native
else:
    native = _LazyModule()


def check_native_module() -> None:
    """Raise a ConfigError that says how to build the module where it cannot be imported."""
    units()


def has_native_module() -> bool:
    try:
        check_native_module()
    except ConfigError:
        return False
    return True


def units() -> list[str]:
    """The instruction sets whose kernels run on this processor, the best one last."""
    return native.units()


def check_unit(name: str) -> str:
    """The name of a unit that runs here, or a ConfigError that says which do."""
    if name not in units():
        raise ConfigError(
            f"no CPU kernels called {name!r} run on this processor: there are {', '.join(units())}"
        )
    return name


class SampleRequests:
    """Makes the native sampler's requests from plans. Keeps the settings of recent sequences."""

    def __init__(self) -> None:
        # By identity: a Sampling is one object for the whole life of its sequence. The reference
        # beside the settings keeps its id from being used again.
        self._settings: dict[int, tuple[Sampling, native.SampleSettings]] = {}

    def request(self, plan: SequencePlan) -> "native.SampleRequest":
        """What the native sampler needs to choose the plan's token."""
        assert plan.sampling is not None, NO_SAMPLING
        history = None
        if plan.history is not None:
            repeats = plan.sampling.params.repetition_penalty != 1.0
            history = (plan.history.prompt if repeats else (), plan.history.completion)
        allowed = plan.allowed if isinstance(plan.allowed, bytes) else None  # pending: see step()
        return native.SampleRequest(
            self._settings_of(plan.sampling), plan.completion_position, history, allowed
        )

    def _settings_of(self, sampling: Sampling) -> "native.SampleSettings":
        known = self._settings.get(id(sampling))
        if known is not None:
            return known[1]
        if len(self._settings) >= _MAX_REMEMBERED:
            del self._settings[next(iter(self._settings))]  # the first that came
        settings = _native_settings(sampling)
        self._settings[id(sampling)] = (sampling, settings)
        return settings


def _native_settings(sampling: Sampling) -> "native.SampleSettings":
    """What stays the same for all tokens of a sequence."""
    params = sampling.params
    return native.SampleSettings(
        temperature=params.temperature,
        top_k=min(params.top_k, _BEYOND_ANY_VOCABULARY),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=[
            (min(token, _BEYOND_ANY_VOCABULARY), bias) for token, bias in params.logit_bias.items()
        ],
        end_tokens=[min(token, _BEYOND_ANY_VOCABULARY) for token in sampling.end_token_ids],
        min_tokens=min(params.min_tokens, _BEYOND_ANY_VOCABULARY),
        seed=sampling.seed & (2**64 - 1),
        index=sampling.index & (2**32 - 1),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )
