"""Falcon-H1's multipliers (muP): numbers of its config.json by which what linears take or make is
multiplied. GGUF files have them in the weights. From safetensors they are scales of the linears,
and of the taps of the convolution, before which one linear has three of them."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelFileError
from quire.loader.metadata import Fields, Metadata
from quire.loader.tensor import Tensor
from quire.model.spec import SCALES, ModelSpec, tensor_shapes
from quire.model.states import StateMixer
from quire.model.tensors import computed
from quire.quant.formats import format_named

_FILE = "config.json"
_SCALE = ".scale"
_TAPS = "ssm_conv1d.weight"


def multiplied(
    spec: ModelSpec, config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors with a scale of each linear."""
    fields, found = Fields(Metadata(_FILE, config), _FILE), dict(tensors)
    own = _of_linears(fields)
    for name, shape in tensor_shapes(spec).items():
        if name.endswith(_SCALE):
            linear = name.removesuffix(_SCALE).rpartition(".")[2]
            data = np.array([own.get(linear, 1.0)], "<f4")
            found[name] = Tensor(name, shape, format_named("F32", name), data.view(np.uint8))
    for layer, part in spec.states.items():
        name = f"blk.{layer}.{_TAPS}"
        if name in tensors:
            found[name] = _multiplied_rows(tensors[name], _of_channels(fields, part))
    return found


def _of_linears(fields: Fields) -> dict[str, float]:
    taken, key = _one(fields, "attention_in_multiplier"), _one(fields, "key_multiplier")
    state = _one(fields, "ssm_in_multiplier")
    gate, down = _several(fields, "mlp_multipliers", 2)
    of_state = _several(fields, "ssm_multipliers", 5)
    return {
        "attn_q": taken,
        "attn_k": taken * key,
        "attn_v": taken,
        "attn_output": _one(fields, "attention_out_multiplier"),
        "ssm_gate": state * of_state[0],
        "ssm_alpha": state * of_state[4],
        "ssm_out": _one(fields, "ssm_out_multiplier"),
        "ffn_gate": gate,
        "ffn_down": down,
    }


def _of_channels(fields: Fields, part: StateMixer) -> npt.NDArray[np.float32]:
    """Of what the convolution sees: values, keys and queries."""
    factors = _several(fields, "ssm_multipliers", 5)[1:4]
    sizes = (part.output_size, part.group_size, part.group_size)
    return np.repeat(np.array(factors, np.float32), sizes) * np.float32(
        _one(fields, "ssm_in_multiplier")
    )


def _multiplied_rows(tensor: Tensor, factors: npt.NDArray[np.float32]) -> Tensor:
    return computed(tensor.name, tensor, lambda rows: rows * factors[:, None])


def _one(fields: Fields, key: str) -> float:
    return _within(key, fields.number(key, 1.0) if fields.get(key) is not None else 1.0)


def _several(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    found = (1.0,) * count if fields.get(key) is None else fields.numbers(key)
    if len(found) != count:
        raise ModelFileError(f"{_FILE}: {key} must be {count} numbers, got {len(found)}")
    return tuple(_within(key, number) for number in found)


def _within(key: str, number: float) -> float:
    low, high = SCALES
    if not low <= number <= high:
        raise ModelFileError(f"{_FILE}: {key} must be from {low:g} to {high:g}, got {number}")
    return number
