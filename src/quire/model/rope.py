"""Rotary position embedding as data: base, pairing and scaling, and the frequencies they give."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError

_POSITIONS_AT_ONCE = 4096  # of a table that is made in double precision
MAX_BASE = 1e12
MAX_MAGNITUDE = 1e6  # of cosines and sines, which are kept in single precision
MAX_BETA = 1e6  # rotations within the original context; the paper has 32

Frequencies = npt.NDArray[np.float64]
Table = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by the factor."""

    factor: float

    def __post_init__(self) -> None:
        _at_least("rope scaling factor", self.factor, 1.0)

    def scale(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _at_least("rope scaling factor", self.factor, 1.0)
        _at_least("rope low_freq_factor", self.low_frequency_factor, 1e-6)
        _at_least("rope original context", self.original_context, 1)
        if not self.low_frequency_factor <= self.high_frequency_factor < math.inf:
            raise ModelFileError(
                f"rope high_freq_factor must be at least low_freq_factor "
                f"({self.low_frequency_factor}), got {self.high_frequency_factor}"
            )

    def scale(self, frequencies: Frequencies) -> Frequencies:
        rotations = self.original_context * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low == high:  # Llama 4's: none are between
            kept = (rotations >= low).astype(np.float64)
        else:
            kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return (1.0 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """As Peng et al. 2023: interpolated by dimension, and the rotated vectors scaled."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: the paper's 1 + ln(factor) / 10
    truncates: bool = True  # the ramp between the two begins and ends at whole dimensions

    def __post_init__(self) -> None:
        _at_least("rope scaling factor", self.factor, 1.0)
        _at_least("rope original context", self.original_context, 1)
        _at_least("rope beta_slow", self.beta_slow, 1e-6)
        _at_least("rope beta_fast", self.beta_fast, self.beta_slow, MAX_BETA)
        if self.attention_factor is not None:
            _at_least("rope attention_factor", self.attention_factor, 0.0, MAX_MAGNITUDE)

    def scale(self, frequencies: Frequencies, base: float) -> Frequencies:
        dims = 2 * len(frequencies)
        first = self._dimension(self.beta_fast, dims, base)
        last = self._dimension(self.beta_slow, dims, base)
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        low, high = max(first, 0), min(last, dims - 1)
        span = max(high - low, 0.001)
        stretched: Frequencies = np.clip((np.arange(len(frequencies)) - low) / span, 0.0, 1.0)
        return stretched * frequencies / self.factor + (1.0 - stretched) * frequencies

    def _dimension(self, rotations: float, dims: int, base: float) -> float:
        """The dimension that makes so many rotations within the original context."""
        waves = self.original_context / (rotations * 2 * math.pi)
        return dims * math.log(waves) / (2 * math.log(base))

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class DivisorScaling:
    """Each frequency is divided by its own number: GGUF's rope_freqs.weight."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for index, divisor in enumerate(self.divisors):
            if not 0 < divisor < math.inf:
                raise ModelFileError(
                    f"rope_freqs.weight[{index}] must be a number above 0, got {divisor}"
                )

    def scale(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / np.array(self.divisors, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LongScaling:
    """longrope: each frequency is divided by its own number, one of a set for contexts up to the
    original and one for longer ones.

    transformers chooses the set by a sequence's length, so that a key would depend on tokens after
    it. Here it follows from `context`, the longest that there can be, once for all.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float
    context: int = 0  # ModelSpec sets it

    def __post_init__(self) -> None:
        _at_least("rope original context", self.original_context, 1)
        _at_least("rope attention_factor", self.attention_factor, 0.0, MAX_MAGNITUDE)
        for name, factors in (("short_factor", self.short), ("long_factor", self.long)):
            for index, factor in enumerate(factors):
                if not 0 < factor < math.inf:
                    raise ModelFileError(
                        f"rope {name}[{index}] must be a number above 0, got {factor}"
                    )

    @property
    def is_long(self) -> bool:
        return self.context > self.original_context

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def scale(self, frequencies: Frequencies) -> Frequencies:
        factors = self.long if self.is_long else self.short
        return frequencies / np.array(factors, dtype=np.float64)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DivisorScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of queries and keys; only the first `dims` of a head are rotated.

    Pair i is dimensions (2i, 2i + 1) where `interleaved`, else (i, i + dims / 2).
    """

    base: float
    dims: int
    interleaved: bool
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not 1.0 < self.base <= MAX_BASE:
            raise ModelFileError(
                f"rope base must be above 1 and at most {MAX_BASE:g}, got {self.base}"
            )
        if self.dims < 2 or self.dims % 2:
            raise ModelFileError(f"rope dimensions must be even and at least 2, got {self.dims}")
        if isinstance(self.scaling, DivisorScaling) and len(self.scaling.divisors) * 2 != self.dims:
            raise ModelFileError(
                f"rope_freqs.weight has {len(self.scaling.divisors)} numbers, expected "
                f"{self.dims // 2}: half of the {self.dims} rope dimensions"
            )
        if isinstance(self.scaling, LongScaling):
            for factors in (self.scaling.short, self.scaling.long):
                if len(factors) * 2 != self.dims:
                    raise ModelFileError(
                        f"longrope has {len(factors)} factors, expected {self.dims // 2}: half of "
                        f"the {self.dims} rope dimensions"
                    )

    def within(self, context: int) -> "Rope":
        """The rope of a model that is run with contexts of at most so many positions."""
        if not isinstance(self.scaling, LongScaling):
            return self
        return replace(self, scaling=replace(self.scaling, context=context))

    def frequencies(self) -> Frequencies:
        """Radians by which a position rotates each pair: [dims / 2], float64."""
        unscaled: Frequencies = self.base ** (
            -np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        )
        match self.scaling:
            case None:
                return unscaled
            case YarnScaling() as yarn:
                return yarn.scale(unscaled, self.base)
            case scaling:
                return scaling.scale(unscaled)

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if isinstance(self.scaling, YarnScaling | LongScaling):
            return self.scaling.magnitude
        return 1.0

    def tables(self, num_positions: int) -> tuple[Table, Table]:
        """Cosines and sines of positions 0 to `num_positions`, [positions, dims / 2] each."""
        frequencies = self.frequencies()
        cosines = np.empty((num_positions, len(frequencies)), np.float32)
        sines = np.empty_like(cosines)
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            stop = min(start + _POSITIONS_AT_ONCE, num_positions)
            angles = np.arange(start, stop)[:, None] * frequencies
            cosines[start:stop] = np.cos(angles) * self.magnitude
            sines[start:stop] = np.sin(angles) * self.magnitude
        return cosines, sines


def _at_least(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high or value == math.inf:
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ModelFileError(f"{name} must be a number of at least {low:g}{most}, got {value}")
