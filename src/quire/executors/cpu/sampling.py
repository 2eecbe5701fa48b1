"""Sample requests for the native sampler, made from plans; a sequence's settings are made once."""

from typing import Any

from quire.core.plan import Sampling, SequencePlan
from quire.executors.cpu.native import native_module

_MOST_REMEMBERED = 4096  # sequences; far more than run at once
_BEYOND_ANY_VOCABULARY = 2**62  # what larger ids become, to fit in 64 bits


class SampleRequests:
    """Turns plans into requests. Remembers the settings of the sequences it saw last."""

    def __init__(self) -> None:
        # By identity: a Sampling is one object for the whole life of its sequence, and held here so
        # that no other object can take its place.
        self._settings: dict[int, tuple[Sampling, Any]] = {}
        self._native = native_module()

    def request(self, plan: SequencePlan) -> Any:
        """What the native sampler needs to choose the plan's token."""
        assert plan.sampling is not None, "a sample was wanted without saying how"
        history = None
        if plan.history is not None:
            repeats = plan.sampling.params.repetition_penalty != 1.0
            history = (plan.history.prompt if repeats else (), plan.history.completion)
        return self._native.SampleRequest(
            self._settings_of(plan.sampling), plan.completion_position, history, plan.allowed
        )

    def _settings_of(self, sampling: Sampling) -> Any:
        known = self._settings.get(id(sampling))
        if known is not None:
            return known[1]
        if len(self._settings) >= _MOST_REMEMBERED:
            del self._settings[next(iter(self._settings))]  # the first that came
        settings = native_settings(sampling)
        self._settings[id(sampling)] = (sampling, settings)
        return settings


def native_settings(sampling: Sampling) -> Any:
    """What stays the same for all tokens of a sequence."""
    params = sampling.params
    return native_module().SampleSettings(
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
