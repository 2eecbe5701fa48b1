"""What a call gives beside its prompts: SamplingParams, or their fields by name.

A name that there is not is refused, with what to write instead where another library has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Literal, cast

from quire.core.errors import RequestError
from quire.core.request import RequestOptions
from quire.core.sampling import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None  # one for all, or one for each
OnError = Literal["raise", "keep"]

_FIELDS = tuple(field.name for field in fields(SamplingParams))
_NO_ADAPTERS = "quire has no adapters"
_ON_LLM = "give chat_template to LLM(...)"
_SAMPLE = "give temperature=0 for the likeliest tokens, above 0 to sample"
# Of generate() and its kin in vLLM, transformers and llama-cpp-python, and of OpenAI's API.
_CALL_NAMES = {
    "use_tqdm": "write progress=True or progress=False",
    "lora_request": _NO_ADAPTERS,
    "prompt_token_ids": "give token ids in the place of the prompt's text",
    "guided_decoding": "constraints are not in this version",
    "structured_outputs": "constraints are not in this version",
    "tools": "quire does not call tools yet",
    "chat_template": _ON_LLM,
    "chat_template_kwargs": _ON_LLM,
    "add_generation_prompt": "it is always added",
    "continue_final_message": "put the begun answer into a prompt for generate()",
    "best_of": "write n, and choose yourself",
    "use_beam_search": "there is no beam search; write n, and choose yourself",
    "num_beams": "there is no beam search; write n, and choose yourself",
    "num_return_sequences": "write n",
    "max_new_tokens": "write max_tokens",
    "max_length": "write max_tokens, which counts new tokens alone",
    "max_completion_tokens": "write max_tokens",
    "n_predict": "write max_tokens",
    "do_sample": _SAMPLE,
    "repeat_penalty": "write repetition_penalty",
    "eos_token_id": "write stop_token_ids",
    "stop_strings": "write stop",
    "top_logprobs": "write logprobs, which counts the likeliest tokens",
    "echo": "outputs have prompt and prompt_token_ids",
    "skip_special_tokens": "text never has special tokens; detokenize() can write them",
    "stream": "write llm.stream(...)",
}


def params_of(
    params: Params, sampling_params: Params, keywords: Mapping[str, object]
) -> SamplingParams | Sequence[SamplingParams]:
    """The parameters of a call, which come in one of three ways."""
    for name in keywords:
        if name not in _FIELDS:
            raise RequestError(no_parameter(name, _FIELDS, _CALL_NAMES), param=name)
    if params is not None and sampling_params is not None:
        raise RequestError(
            "params and sampling_params are two names of one parameter: give one of them",
            param="sampling_params",
        )
    given = sampling_params if params is None else params
    if given is None:
        return SamplingParams.from_mapping(keywords)
    if keywords:
        name = next(iter(keywords))
        kind = "params" if params is not None else "sampling_params"
        raise RequestError(
            f"{kind} and {name} were both given: put {name} into the SamplingParams, or leave "
            f"{kind} out",
            param=name,
        )
    return given


def one_params(
    params: SamplingParams | None,
    sampling_params: SamplingParams | None,
    keywords: Mapping[str, object],
) -> SamplingParams:
    """The parameters of a call with one prompt."""
    given = params_of(params, sampling_params, keywords)
    if not isinstance(given, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {given!r:.100}", param="params")
    return given


def split_keywords(given: Mapping[str, object]) -> tuple[RequestOptions, dict[str, object]]:
    """Options of the request, and the rest: fields of SamplingParams."""
    own = {name: value for name, value in given.items() if name in RequestOptions.__annotations__}
    rest = {name: value for name, value in given.items() if name not in own}
    return cast(RequestOptions, own), rest


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """One for all, or one for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(
            f"params must be SamplingParams or a list of them, got {params!r:.100}", param="params"
        )
    for number, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"params[{number}] must be SamplingParams, got {one!r:.100}", param="params"
            )
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts but {len(params)} params: give one for each", param="params"
        )
    return list(params)


def keeps_errors(on_error: str) -> bool:
    """Whether outputs carry errors and the call does not raise them."""
    if on_error not in ("raise", "keep"):
        raise RequestError(
            f'on_error must be "raise" or "keep", got {on_error!r:.100}', param="on_error"
        )
    return on_error == "keep"


def no_parameter(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """What to say of a name that there is not: what to write instead, where that can be told."""
    if name in elsewhere:
        return f"there is no {name!r} here: {elsewhere[name]}"
    known = sorted(known)
    close = get_close_matches(name, known, 1)
    if close:
        return f"there is no {name!r} here: did you mean {close[0]!r}?"
    return f"there is no {name!r} here; there are {', '.join(known)}"
