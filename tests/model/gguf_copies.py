"""Writes a family fixture again as GGUF, by the gguf package, as converters do."""

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from quire.model.loading import Model
from quire.model.rope import LinearScaling, Llama3Scaling, YarnScaling

Floats = npt.NDArray[np.float32]


def write_gguf(model: Model, path: Path, architecture: str | None = None) -> Path:
    """A GGUF file with the same weights and the same mathematics, in F32."""
    spec = model.spec
    if architecture is None:
        architecture = "llama" if spec.family == "mistral" else spec.family
    writer = gguf.GGUFWriter(path, architecture)
    if architecture.endswith("vl"):  # pairs of dimensions for time, height and width
        writer.add_rope_dimension_sections([*[spec.rope.dims // 6] * 3, 0])
    writer.add_tokenizer_model("none")  # which llama.cpp wants said
    writer.add_vocab_size(spec.vocabulary_size)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_epsilon)
    writer.add_rope_freq_base(spec.rope.base)
    if spec.windows[0] is not None:
        writer.add_sliding_window(spec.windows[0])
    _add_scaling(writer, model)
    for name, tensor in model.tensors.items():
        weights = tensor.to_float32()
        if architecture == "llama" and ".attn_q." in name:
            weights = _interleaved(weights, spec.num_heads)
        if architecture == "llama" and ".attn_k." in name:
            weights = _interleaved(weights, spec.num_kv_heads)
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weights: Floats, num_heads: int) -> Floats:
    """Rows reordered so that the two of a pair, half a head apart, become neighbours."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _add_scaling(writer: gguf.GGUFWriter, model: Model) -> None:
    rope = model.spec.rope
    match rope.scaling:
        case LinearScaling(factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling(factor, original_context):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(original_context)
        case Llama3Scaling() as scaling:
            divisors = [
                _llama3_divisor(scaling, rope.base, i, rope.dims) for i in range(rope.dims // 2)
            ]
            writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
        case _:
            pass


def _llama3_divisor(scaling: Llama3Scaling, base: float, pair: int, dims: int) -> float:
    """What Llama 3's rule divides one frequency by, looking at its wavelength."""
    wavelength: float = 2 * math.pi * base ** (2 * pair / dims)
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return 1.0
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
