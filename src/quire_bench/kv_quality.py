"""What keys and values in fewer bytes cost: log-probabilities along one text, for each type of the
KV cache, beside those of the device's own type."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.core.errors import ConfigError, ExecutorError
from quire.core.request import Ended
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.llm.assembly import Assembly
from quire.llm.devices import DEVICES
from quire.llm.forward import ForwardRows

Logits = npt.NDArray[np.float32]  # [tokens, vocabulary]
Text = tuple[int, ...]


class Divergence(NamedTuple):
    """Of a type's next-token probabilities from those of the device's own, over all positions."""

    each: npt.NDArray[np.float64]  # KL divergence, in nats
    same_top_token: float  # share of positions

    @property
    def mean(self) -> float:
        return float(self.each.mean())

    @property
    def percentile_99(self) -> float:
        return float(np.percentile(self.each, 99))


def compared_types(device: str, asked: str) -> list[str]:
    """The types to compare with the device's own: the one asked for, or all that differ."""
    if asked != "auto":
        return [asked]
    own = "f16" if device == "cpu" else "auto"
    return [name for name in DEVICES[device].cache_types if name not in ("auto", own)]


def written_texts(assembly: Assembly, count: int, length: int, seed: int) -> list[Text]:
    """What the model writes by itself, sampled at temperature 1 from a random first token."""
    if count < 1 or length < 2:
        raise ConfigError(f"there must be a text of 2 tokens or more, got {count} of {length}")
    rng = np.random.default_rng(seed)
    engine = assembly.new_engine()
    texts: dict[str, Text] = {}
    for place in range(count):
        first = int(rng.integers(assembly.spec.vocabulary_size))
        params = SamplingParams(
            max_tokens=length - 1, temperature=1.0, seed=seed + place, ignore_eos=True
        )
        texts[engine.add_request([first], params).id] = (first,)
    for event in engine.run():
        if isinstance(event, Ended):
            if event.output.error is not None:
                raise ExecutorError(f"a text could not be written: {event.output.error}")
            texts[event.output.request_id] += tuple(event.output.token_ids)
    return list(texts.values())


def logits_along(assembly: Assembly, texts: Sequence[Text]) -> list[Logits]:
    engine: Engine = assembly.new_engine()
    return ForwardRows(engine).run(texts, split=True)


def divergence(expected: Sequence[Logits], found: Sequence[Logits]) -> Divergence:
    each, same = [], []
    for wanted, got in zip(expected, found, strict=True):
        p, q = _log_softmax(wanted), _log_softmax(got)
        each.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
    return Divergence(np.concatenate(each), float(np.concatenate(same).mean()))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    made: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return made
