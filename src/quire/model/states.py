"""StateMixer: the half of a layer that keeps a state of its sequence instead of keys and values.

A token's inputs pass a short convolution over the last tokens, channel by channel; then, unless
that is all, each head updates a matrix [keys, values] with them and reads its output from it:

    gated DeltaNet   S = decay * S,  S += key (beta * (value - key S));  output = query S
    Mamba 2          S = decay * S,  S += key (step * value);   output = query S + d * value
    Mamba 1          the same of one head; a, step and d are of each value, and a of each key, too

    decay = exp(a * step),  step = softplus(alpha + dt)

Queries and keys are shared by groups of heads. Mamba calls them C and B, and `step` its time step.
Those of Mamba 1, and alpha, are made of the convolution's output.
The state after a token is a function of the state before it and of that token: computed a token at
a time, it has the same bits in any chunks.
"""

from dataclasses import dataclass
from enum import StrEnum

from quire.core.errors import ModelFileError

_MAX_KERNEL = 64
_MAX_HEADS = 1 << 14
_MAX_HEAD_SIZE = 1 << 14
_MAX_CHANNELS = 1 << 22
_MAX_STATE = 1 << 28  # numbers of one layer


class StateKind(StrEnum):
    """The text completes "the model has layers of ..."."""

    DELTA_NET = "gated DeltaNet"
    MAMBA = "Mamba 2"
    MAMBA_1 = "Mamba 1"
    CONVOLUTION = "short convolutions"  # alone: gate * convolution(gate * x)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer:
    kind: StateKind
    kernel: int  # tokens that the convolution sees
    # Of heads of values; `num_groups` heads of queries and keys are shared by them evenly. A
    # convolution alone has none, and `value_dim` channels.
    num_heads: int = 1
    num_groups: int = 1
    key_dim: int = 0
    value_dim: int
    # Head h uses group h % num_groups, as GGUF files of DeltaNets order heads; else each group is
    # used by heads that follow each other.
    is_tiled: bool = False
    has_convolution_bias: bool = False
    has_norm: bool = True  # of what heads leave, of DeltaNet and Mamba 2
    # Of Mamba 1: what alpha is made of has so many numbers, which may be normed, as are keys and
    # queries then; with weights or without.
    step_rank: int = 0
    has_step_norms: bool = False
    has_step_weights: bool = False
    norm_epsilon: float = 0.0  # of these norms

    def __post_init__(self) -> None:
        for name, limit in (
            ("kernel", _MAX_KERNEL),
            ("num_heads", _MAX_HEADS),
            ("num_groups", _MAX_HEADS),
            ("value_dim", _MAX_CHANNELS),
        ):
            _check(name, getattr(self, name), limit)
        if self.kernel < 2:
            raise ModelFileError("a state's convolution must see at least 2 tokens, got 1")
        if self.kind is not StateKind.CONVOLUTION:
            _check("key_dim", self.key_dim, _MAX_HEAD_SIZE)
            _check("value_dim", self.value_dim, _MAX_HEAD_SIZE)
        if self.kind is StateKind.MAMBA_1:
            _check("step_rank", self.step_rank, _MAX_HEAD_SIZE)
            _check("num_heads", self.num_heads, 1)
        if self.num_heads % self.num_groups:
            raise ModelFileError(
                f"a state's heads ({self.num_heads}) must be a multiple of its groups "
                f"({self.num_groups})"
            )
        _check("size", self.num_elements, _MAX_STATE)
        _check("channels", self.num_channels, _MAX_CHANNELS)
        if not 0.0 <= self.norm_epsilon <= 1.0:
            raise ModelFileError(f"norm_epsilon must be from 0 to 1, got {self.norm_epsilon}")

    @property
    def output_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def group_size(self) -> int:
        """Of all queries, or all keys."""
        return self.num_groups * self.key_dim

    @property
    def num_channels(self) -> int:
        """That the convolution sees."""
        if self.kind is StateKind.MAMBA_1:
            return self.output_size
        return 2 * self.group_size + self.output_size

    @property
    def num_convolved(self) -> int:
        """Numbers of the state that are inputs of earlier tokens."""
        return (self.kernel - 1) * self.num_channels

    @property
    def num_elements(self) -> int:
        """Numbers of a sequence's state."""
        return self.num_convolved + self.num_heads * self.key_dim * self.value_dim

    @property
    def channel_offsets(self) -> tuple[int, int, int]:
        """Where queries, keys and values begin among the channels."""
        if self.kind is StateKind.DELTA_NET:
            return 0, self.group_size, 2 * self.group_size
        return self.output_size + self.group_size, self.output_size, 0

    def group_of(self, head: int) -> int:
        if self.is_tiled:
            return head % self.num_groups
        return head // (self.num_heads // self.num_groups)

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes: the inputs of the convolution, gates, and the output's."""
        if self.kind is StateKind.CONVOLUTION:
            return {
                "ssm_in": (3 * self.value_dim, hidden),  # a gate before, a gate after, and x
                "ssm_out": (hidden, self.value_dim),
            }
        shapes = {
            "ssm_in": (self.num_channels, hidden),
            "ssm_gate": (self.output_size, hidden),
        }
        if self.kind is StateKind.MAMBA_1:
            shapes["ssm_x"] = (self.step_rank + 2 * self.key_dim, self.output_size)
            shapes["ssm_dt"] = (self.output_size, self.step_rank)
        else:
            shapes["ssm_alpha"] = (self.num_heads, hidden)
        if self.kind is StateKind.DELTA_NET:
            shapes["ssm_beta"] = (self.num_heads, hidden)
        return shapes | {"ssm_out": (hidden, self.output_size)}

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, whole names."""
        shapes: dict[str, tuple[int, ...]] = {
            "ssm_conv1d.weight": (self.num_channels, self.kernel)  # the last is of the token itself
        }
        if self.has_convolution_bias:
            shapes["ssm_conv1d.bias"] = (self.num_channels,)
        if self.kind is StateKind.CONVOLUTION:
            return shapes
        if self.kind is StateKind.MAMBA_1:
            return shapes | self._vectors_of_values()
        heads = (self.num_heads,)
        shapes |= {"ssm_a.weight": heads, "ssm_dt.bias": heads}
        is_delta_net = self.kind is StateKind.DELTA_NET
        if not is_delta_net:
            shapes["ssm_d.weight"] = heads
        if self.has_norm:  # DeltaNet's is of each head
            shapes["ssm_norm.weight"] = (self.value_dim if is_delta_net else self.output_size,)
        return shapes

    def _vectors_of_values(self) -> dict[str, tuple[int, ...]]:
        values, keys = (self.value_dim,), (self.key_dim,)
        shapes: dict[str, tuple[int, ...]] = {
            "ssm_a.weight": (*values, *keys),
            "ssm_dt.bias": values,
            "ssm_d.weight": values,
        }
        if self.has_step_weights:
            shapes |= {"ssm_b_norm.weight": keys, "ssm_c_norm.weight": keys}
            shapes["ssm_dt_norm.weight"] = (self.step_rank,)
        return shapes


def _check(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise ModelFileError(f"a state's {name} must be from 1 to {limit}, got {value}")
