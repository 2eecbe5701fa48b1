"""SamplingParams: how one request wants its tokens chosen and when it ends; and the random bits of
each choice, a pure function of (seed, sequence index, position).

The generator is Philox4x32-10 (Salmon et al., 2011): a keyed bijection of a counter. It has no
state to keep, save or replay: a draw is the same after batching, pre-emption or a crash.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from quire.core.errors import RequestError
from quire.core.samplers import DEFAULT_ORDER, read_samplers

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_COMPLETIONS = 128
MAX_BAD_WORDS = 256
MAX_SEQUENCE_BREAKERS = 32
MAX_BREAKER_BYTES = 40
SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_CONSTRAINT_LENGTH = 524_288  # characters
CONSTRAINT_KINDS = ("json_schema", "json_object", "regex", "grammar", "choice", "answer")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form that the completion must have. `value`: a JSON schema as JSON, a regular expression,
    a grammar (Lark or llama.cpp's GBNF), a JSON list of texts to choose from, or an answer with
    tool calls as `quire.chat` describes it."""

    kind: str
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise _wrong(f"constraint kind must be one of {CONSTRAINT_KINDS}, got {self.kind!r}")
        if not isinstance(self.value, str):
            raise _wrong(f"a constraint's value is a string, got {self.value!r:.100}")
        if len(self.value) > MAX_CONSTRAINT_LENGTH:
            length, limit = len(self.value), MAX_CONSTRAINT_LENGTH
            if self.kind == "answer":  # which is put together of what a call says
                message = f"schemas of tools and answer have {length} characters"
                raise RequestError(f"{message}; the limit is {limit}", param="tools")
            raise _wrong(f"structured ({self.kind}) has {length} characters; the limit is {limit}")

    @classmethod
    def json(cls, schema: object) -> "Constraint":
        """JSON that a schema allows: a dict, its text, a pydantic model or TypeAdapter."""
        for name in ("model_json_schema", "json_schema"):
            if callable(make := getattr(schema, name, None)):
                schema = make()
                break
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise _wrong(
                    f"structured is no JSON schema: {error}; for a pattern write "
                    "Constraint.regex(...), for a grammar Constraint.grammar(...)"
                ) from None
        if not isinstance(schema, Mapping):
            raise _wrong(f"a JSON schema is an object, got {schema!r:.100}")
        try:
            value = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls("json_schema", value)

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Text that a regular expression matches as a whole; no look-around, no backreferences."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Constraint":
        """One of these texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise _wrong(f"a choice is a list of non-empty strings, got {texts!r:.100}")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> "Constraint":
        """Text of a context-free grammar, in Lark's syntax or in llama.cpp's GBNF."""
        return cls("grammar", text)

    @classmethod
    def of(cls, given: object) -> "Constraint":
        """What SamplingParams(structured=...) takes: a Constraint, a JSON schema in any form of
        Constraint.json, or a list of texts to choose from."""
        if isinstance(given, Constraint):
            return given
        return cls.choice(given) if isinstance(given, list | tuple) else cls.json(given)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning at the begin of a completion. `structured` holds for what follows it, and after
    `budget` tokens of it the tokens of `close` are forced."""

    close: tuple[int, ...]  # tokens of the tag that ends it
    open: tuple[int, ...] = ()  # tokens of the tag that begins it
    is_open: bool = False  # the prompt has begun it
    is_forced: bool = False  # the completion begins with `open`; else the model may do so
    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.close:
            raise RequestError("thinking needs the tokens that end it", param="thinking")
        for token in (*self.close, *self.open):
            _integer("thinking", token, 0)
        if self.budget is not None:
            _integer("thinking budget", self.budget, 0, param="thinking_token_budget")


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="structured")


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams, in the forms that it takes, as keywords of a call."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    include_stop_token: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    structured: object
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str]
    skip_special_tokens: bool
    spelled_token_ids: Sequence[int]
    detokenize: bool
    thinking: Thinking | None
    repeat_last_n: int | None
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    dynatemp_range: float
    dynatemp_exponent: float
    samplers: str | Sequence[str] | None


_LISTS = ("stop", "stop_token_ids", "bad_words", "spelled_token_ids")
SWITCHES = (
    *("ignore_eos", "include_stop_str_in_output", "include_stop_token"),
    *("skip_special_tokens", "detokenize"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings follow OpenAI and vLLM; every field is obeyed."""

    # None: until the model ends it or the context is full; 0: only the prompt is computed
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    include_stop_token: bool = False  # keep the token that ends a completion in its token_ids
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Constraint | None = None  # in any form that Constraint.of takes
    allowed_token_ids: tuple[int, ...] | None = None  # None: all; end tokens only if listed
    bad_words: tuple[str, ...] = ()  # texts whose tokens never come one after another
    skip_special_tokens: bool = True  # leave control tokens out of the text
    spelled_token_ids: tuple[int, ...] = ()  # control tokens that are in the text all the same
    detokenize: bool = True  # False: token ids and no text
    thinking: Thinking | None = None  # where masks treat reasoning apart
    # llama.cpp's samplers: docs/guide/sampling.md has their formulas.
    repeat_last_n: int | None = None  # how many tokens penalties look at; -1: all, 0: no penalties
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0 or below: all tokens
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # -1: all tokens, 0: no DRY
    dry_sequence_breakers: tuple[str, ...] = SEQUENCE_BREAKERS
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    samplers: tuple[str, ...] | None = None  # in any form that read_samplers takes; None: our order
    # The samplers that change something, in the order in which they are applied.
    order: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # Whether penalties, dry, temperature, min_p, top_k, top_p in this order are all there is.
    is_plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._normalise()
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("top_k", self.top_k, 0)
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError(f"max_tokens is 0, so n must be 1, got {self.n}", param="n")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise RequestError(f"{name} must be true or false, got {value!r}", param=name)
        self._check_stops()
        self._check_filters()
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token", token, 0, param="logit_bias")
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")
        self._check_samplers()
        self._set_order()

    def _normalise(self) -> None:
        """Accept the forms users write: one stop string, lists, -1 for every token."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.bad_words, str):
            object.__setattr__(self, "bad_words", (self.bad_words,))
        if isinstance(self.allowed_token_ids, list):
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if isinstance(self.dry_sequence_breakers, str):
            object.__setattr__(self, "dry_sequence_breakers", (self.dry_sequence_breakers,))
        for name in (*_LISTS, "dry_sequence_breakers"):
            value = getattr(self, name)
            if value is None:
                value = ()
            if not isinstance(value, list | tuple):
                raise RequestError(f"{name} must be a list, got {value!r}", param=name)
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
                param="logit_bias",
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.structured is not None:
            object.__setattr__(self, "structured", Constraint.of(self.structured))
        if self.samplers is not None:
            object.__setattr__(self, "samplers", read_samplers(self.samplers))

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}", param="stop")
        for name in ("stop_token_ids", "spelled_token_ids"):
            for token in getattr(self, name):
                _integer(name, token, 0)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize: true", param="detokenize")

    def _check_filters(self) -> None:
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, tuple) or not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids must be a list of at least one token id, got "
                    f"{self.allowed_token_ids!r:.100}",
                    param="allowed_token_ids",
                )
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words takes at most {MAX_BAD_WORDS} texts, got {len(self.bad_words)}",
                param="bad_words",
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise RequestError(
                    f"bad_words must hold texts that are not blank, got {word!r:.100}",
                    param="bad_words",
                )

    def _check_samplers(self) -> None:
        if self.repeat_last_n is not None:
            _integer("repeat_last_n", self.repeat_last_n, -1)
        _number("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _number("top_n_sigma", self.top_n_sigma, -1.0, 1000.0)
        _number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _number("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _number("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        _number("dry_base", self.dry_base, 1.0, 100.0)
        _integer("dry_allowed_length", self.dry_allowed_length, 0)
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1)
        _number("dynatemp_range", self.dynatemp_range, 0.0, 100.0)
        _number("dynatemp_exponent", self.dynatemp_exponent, 0.0, 100.0)
        name, breakers = "dry_sequence_breakers", self.dry_sequence_breakers
        if len(breakers) > MAX_SEQUENCE_BREAKERS:
            limit = f"{name} takes at most {MAX_SEQUENCE_BREAKERS} texts, got {len(breakers)}"
            raise RequestError(limit, param=name)
        for text in breakers:
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must hold non-empty texts, got {text!r}", param=name)
            if len(text.encode(errors="replace")) > MAX_BREAKER_BYTES:
                limit = f"{name}: {text!r} has more than {MAX_BREAKER_BYTES} bytes of UTF-8"
                raise RequestError(limit, param=name)

    def _set_order(self) -> None:
        """Leave out the samplers that change nothing."""
        changes = {
            "penalties": self.repeat_last_n != 0
            and (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            != (1.0, 0.0, 0.0),
            "dry": self.dry_multiplier != 0.0 and self.dry_penalty_last_n != 0,
            "temperature": self.temperature != 1.0 or self.dynatemp_range > 0.0,
            "top_n_sigma": self.top_n_sigma > 0.0,
            "min_p": self.min_p > 0.0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1.0,
            "top_p": self.top_p < 1.0,
            "xtc": self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
        }
        given = DEFAULT_ORDER if self.samplers is None else self.samplers
        order = tuple(name for name in given if changes[name])
        is_plain = self.samplers is None and self.dynatemp_range == 0.0
        is_plain = is_plain and not {"top_n_sigma", "typ_p", "xtc"}.intersection(order)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "is_plain", is_plain)

    @property
    def is_greedy(self) -> bool:
        is_zero = self.temperature == 0.0 and self.dynatemp_range == 0.0
        return is_zero and (self.samplers is None or "temperature" in self.samplers)

    @property
    def needs_mask(self) -> bool:
        """Whether some tokens are masked in each of its rows."""
        return (
            self.structured is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or (self.thinking is not None and self.thinking.budget is not None)
        )

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token looks at the tokens before it (the penalties and DRY do)."""
        return "penalties" in self.order or "dry" in self.order

    @property
    def history_length(self) -> int | None:
        """How many of the last tokens before it choosing a token looks at; None: at all."""
        lengths = [self.repeat_last_n if self.repeat_last_n is not None else -1]
        lengths = lengths if "penalties" in self.order else []
        if "dry" in self.order:
            lengths.append(self.dry_penalty_last_n)
        return None if -1 in lengths else max(lengths, default=0)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "SamplingParams":
        """Build from untyped input such as JSON; an unknown field is an error that names it."""
        known = [f.name for f in fields(cls) if f.init]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise RequestError(
                f"unknown sampling field {unknown[0]!r}; known: {', '.join(known)}",
                param=str(unknown[0]),
            )
        return cls(**values)  # type: ignore[arg-type]  # the constructor checks each


def _integer(
    name: str, value: Any, low: int, high: int | None = None, *, param: str | None = None
) -> None:
    """`name` is what the message calls it, `param` the parameter where that is another."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=param or name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {limit}, got {value}", param=param or name)


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    param: str | None = None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", param=param or name)
    is_above = value > low if open_low else value >= low
    if not (is_above and value <= high):  # so that NaN, which compares false, is refused
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be {bounds}, got {value}", param=param or name)


# ---- random bits


_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


TOKEN_DRAW = 0  # what a draw is for: the counter's last word
XTC_DRAW = 1


def draw_bits(seed: int, index: int, position: int, purpose: int = TOKEN_DRAW) -> int:
    """64 random bits for one sampled token: its request's seed, its sequence, its position."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (position & _MASK, (position >> 32) & _MASK, index & _MASK, purpose)
    low, high, _, _ = philox(counter, key)
    return (high << 32) | low


def xtc_acts(params: SamplingParams, seed: int, index: int, position: int) -> bool:
    """Whether XTC's own draw says that it acts on the token at a position."""
    chance = (draw_bits(seed, index, position, XTC_DRAW) >> 11) * 2.0**-53
    return chance < params.xtc_probability


def new_seed() -> int:
    """A seed for a request that brought none; drawn once and kept with the request."""
    return secrets.randbits(64)
