"""The native module: imported on first use, with an error that says what to do without it; and
the sample requests that are made for its sampler."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.core.plan import Sampling, SequencePlan, TokenLogprob, Want
from quire.core.samplers import LETTER_OF
from quire.core.sampling import SamplingParams
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
            seen = plan.history.needed_by(plan.sampling.params)
            history = (seen.prompt, seen.completion)
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
    has_penalties = "penalties" in params.order
    return native.SampleSettings(
        temperature=params.temperature,
        top_k=min(params.top_k, _BEYOND_ANY_VOCABULARY),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if has_penalties else 1.0,
        frequency_penalty=params.frequency_penalty if has_penalties else 0.0,
        presence_penalty=params.presence_penalty if has_penalties else 0.0,
        logit_bias=[
            (min(token, _BEYOND_ANY_VOCABULARY), bias) for token, bias in params.logit_bias.items()
        ],
        end_tokens=[min(token, _BEYOND_ANY_VOCABULARY) for token in sampling.end_token_ids],
        min_tokens=min(params.min_tokens, _BEYOND_ANY_VOCABULARY),
        seed=sampling.seed & (2**64 - 1),
        index=sampling.index & (2**32 - 1),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        repeat_last_n=_bounded(params.repeat_last_n) if has_penalties else None,
        dry=_dry_settings(sampling) if "dry" in params.order else None,
        chain=None if params.is_plain else _chain_settings(params),
    )


def _bounded(number: int | None) -> int | None:
    return None if number is None else min(number, _BEYOND_ANY_VOCABULARY)


def _dry_settings(sampling: Sampling) -> "native.DrySettings":
    params, breakers = sampling.params, sampling.breakers
    return native.DrySettings(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=min(params.dry_allowed_length, _BEYOND_ANY_VOCABULARY),
        last_n=min(params.dry_penalty_last_n, _BEYOND_ANY_VOCABULARY),
        breaker_tokens=list(breakers.tokens),
        breaker_sequences=[
            [head, *tail] for head, tails in breakers.tails.items() for tail in tails
        ],
    )


def _chain_settings(params: SamplingParams) -> "native.ChainSettings":
    return native.ChainSettings(
        order="".join(LETTER_OF[name] for name in params.order),
        typical_p=params.typical_p,
        top_n_sigma=params.top_n_sigma,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        dynatemp_range=params.dynatemp_range,
        dynatemp_exponent=params.dynatemp_exponent,
    )
