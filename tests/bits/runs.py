"""The runs whose bits are held: models, requests, and what each request got, as digests.

    python -m tests.bits.runs cpu           print the digests
    python -m tests.bits.runs cpu --renew   and keep them as tests/bits/cpu.json

A change that means to change bits renews them and says why. `cuda` needs an NVIDIA H200: other
GPUs run other kernels.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.request import Ended, RequestOutput
from quire.core.sampling import SamplingParams
from quire.llm.assembly import assemble
from quire.llm.devices import Options

DEFAULT_MODEL = "smollm2"
FOLDER = Path(__file__).parent
MODELS = {
    "cpu": (
        *(f"dummy:tiny:{mix}" for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "TQ2_0")),
        "dummy:tiny-qwen35:Q4_K_M",  # whose layers keep states
        DEFAULT_MODEL,
    ),
    "cuda": (
        *(f"dummy:tiny:{mix}" for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "BF16")),
        "dummy:llama-1b:Q4_K_M",
    ),
}
SMALL = "tiny"  # in a model's name: its runs may be long

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=7)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised, two of them": replace(
        SAMPLED, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, n=2
    ),
    "scored": replace(GREEDY, max_tokens=2, prompt_logprobs=3),
}


def prompt(length: int, vocabulary_size: int) -> list[int]:
    rng = np.random.default_rng(length)
    return [int(token) for token in rng.integers(0, vocabulary_size, length)]


def requests(model: str) -> Iterator[tuple[str, int, SamplingParams]]:
    """A name, the prompt's length, and the parameters of each."""
    for length in (3, 40, 700) if SMALL in model else (21,):
        for name, params in PARAMS.items():
            yield f"{length} tokens, {name}", length, params


def digests(device: str, model: str) -> dict[str, str]:
    """Of every request of a model, all of them in one batch."""
    options = Options(device=device, max_batch_size=16, kv_memory="64MiB", max_context=1024)
    assembly = assemble(model, options)
    engine = assembly.new_engine()
    names = {}
    for name, length, params in requests(model):
        tokens = prompt(length, assembly.spec.vocabulary_size)
        names[engine.add_request(tokens, params).id] = name
    try:
        ended = [event.output for event in engine.run() if isinstance(event, Ended)]
        return dict(sorted((names[output.request_id], digest(output)) for output in ended))
    finally:
        assembly.executor.close()


def digest(output: RequestOutput) -> str:
    """Of tokens and log-probabilities, to the last bit."""
    assert output.error is None, output.error
    got: list[Any] = [[c.token_ids, _hex(c.logprobs or [])] for c in output.completions]
    got.append(_hex([score for score in output.prompt_logprobs or [] if score is not None]))
    return hashlib.sha256(json.dumps(got).encode()).hexdigest()[:16]


def _hex(scores: Sequence[Any]) -> list[Any]:
    return [
        [s.token, s.logprob.hex(), s.rank, [[token, value.hex()] for token, value in s.top]]
        for s in scores
    ]


def kept(device: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((FOLDER / f"{device}.json").read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    device = arguments[0]
    found = {model: digests(device, model) for model in MODELS[device]}
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if "--renew" in arguments:
        (FOLDER / f"{device}.json").write_text(text)
        return 0
    if not (FOLDER / f"{device}.json").exists():
        return 0
    is_same = found == kept(device)
    print(
        "the bits that are kept" if is_same else "OTHER BITS than those that are kept",
        file=sys.stderr,
    )
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
