"""Quantised checkpoints of Hugging Face, whose linears are several tensors each, read as blocks.

    quant_method        a linear X of [out, in]                           its weights
    fp8, fbgemm_fp8,    X.weight F8_E4M3, X.weight_scale_inv or           code * scale
    modelopt            X.weight_scale: one, [out, 1], or one a block
    awq                 X.qweight I32 [in, out / 8], eight rows a word    (code - zero) * scale
                        in the order of _AWQ_ORDER; X.scales [in /
                        group, out], X.qzeros [in / group, out / 8]
    gptq                X.qweight I32 [in / 8, out], eight columns a      the same; version 1 has
                        word, with 8 bits four; X.scales and X.qzeros     zeros less one
                        as above, in order; X.g_idx: each column's group
    compressed-tensors  X.weight F8_E4M3 or I8, X.weight_scale: as        code * scale
                        with fp8, or [out, in / group]
                        X.weight_packed I32 [out, in / 8], with 8 bits    (code - zero) * scale
                        in / 4, X.weight_scale, X.weight_shape; X.weight_
                        zero_point I32 [out / 8, in / group], or I8
                        X.weight_packed U8 [out, in / 2], X.weight_   code * scale / global
                        scale F8_E4M3 [out, in / 16], X.weight_
                        global_scale F32: one (NVFP4)
                        X.weight_packed U8 [out, in / 2], X.weight_   code * 2 ** (scale - 127)
                        scale U8 [out, in / 32] (MXFP4)
    modelopt, NVFP4     X.weight U8 [out, in / 2], X.weight_scale     code * scale * scale_2
                        F8_E4M3 [out, in / 16], X.weight_scale_2
                        F32: one

    blocks              no zero points    zero points    8 bits
    float16 scales      Q4_0              Q5_0           Q8_0
    other scales        U4_128            U4_128         I8_128
    floats              NVFP4_128, MXFP4                 E4M3_128

Blocks hold just these weights: a scale is repeated for each block that it is for, as it stands.
Which linears are quantised, their tensors say: what config.json lists as left out has floats.
Scales of activations, keys and values are left out: quire rounds activations as for any blocks.
"""

import math
from collections.abc import Callable, Mapping

from quire.core.errors import UnsupportedModelError
from quire.loader.metadata import Fields, Metadata
from quire.loader.tensor import Tensor
from quire.model import bitnet, mxfp4
from quire.model.quantised_linears import (
    PARTS,
    Block,
    Coding,
    Linear,
    nvfp4_with_factors,
    of_bytes,
    of_columns,
    of_e4m3,
    of_mxfp4,
    of_nvfp4,
    of_rows,
)

# Of activations, and of caches of keys and values.
_LEFT_OUT = frozenset(
    {"activation_scale", "kv_scale", "input_global_scale"}
    | {f"{of}_{what}" for of in ("input", "output", *"qkv") for what in ("scale", "zero_point")}
)

_LARGEST_GROUP = 1 << 20  # rows or columns that share a scale

_Join = Callable[[Linear], Tensor]


def linears_joined(
    config: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors, with those of each quantised linear as its weight."""
    whole = Fields(Metadata("config.json", config), "config.json")
    if whole.get(bitnet.KEY) is None:
        return dict(tensors)
    fields = whole.section(bitnet.KEY)
    method = fields.text("quant_method")
    if method in (bitnet.METHOD, mxfp4.METHOD):
        return dict(tensors)
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{fields.unsupported('quant_method', [*_METHODS, bitnet.METHOD, mxfp4.METHOD])}. Take "
            "the model as it was before, a GGUF file of it, or one that is quantised so"
        )
    join = _METHODS[method](fields)
    found: dict[str, Tensor] = {}
    linears: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            linears.setdefault(stem, {})[part] = tensor
        elif part not in _LEFT_OUT:
            found[name] = tensor
    for stem, parts in linears.items():
        weight = parts.get("weight")
        if len(parts) > 1 or weight is None or weight.format.is_raw:
            weight = join(Linear(stem, parts))
        found[f"{stem}.weight"] = weight
    return found


def factors_joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a GGUF file, with the scales that whole matrices in NVFP4 have besides. Scales of
    activations beside these are left out."""
    found = dict(tensors)
    for name, weight in tensors.items():
        stem = name.removesuffix(".weight")
        if weight.format.name != "NVFP4":
            continue
        found.pop(f"{stem}.input_scale", None)
        # Where a router has a scale, its experts' down projections always have: it stays apart.
        block, _, part = stem.rpartition(".")
        if part == "ffn_down_exps" and f"{block}.ffn_gate_inp.scale" in tensors:
            continue
        factors = found.pop(f"{stem}.scale", None)
        if factors is not None:
            found[name] = nvfp4_with_factors(weight, factors)
    return found


# ---- what config.json says


def _of_fp8(fields: Fields) -> _Join:
    fields.refuse_unknown(
        {"quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert"}
        | {"ignored_layers", "scale_fmt", "dequantize", "modules_to_convert", "expert_dtype"}
        | {"kv_cache_scheme", "activation_scale_ub"}
    )
    fields.refuse({"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)})
    block = _block_size(fields, "weight_block_size")
    return lambda linear: of_e4m3(linear, block)


_MODELOPT_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def _of_modelopt(fields: Fields) -> _Join:
    """Which of these algorithms a linear has, its tensors say."""
    if fields.text("quant_algo") not in _MODELOPT_ALGORITHMS:
        raise fields.unsupported("quant_algo", _MODELOPT_ALGORITHMS)
    layers = fields.section("quantized_layers")
    for name in _mapping(fields, "quantized_layers"):
        layers.section(name).refuse({"quant_algo": _MODELOPT_ALGORITHMS})
    return lambda linear: (
        of_nvfp4(linear) if "weight_scale_2" in linear.parts else of_e4m3(linear, None)
    )


def _block_size(fields: Fields, key: str) -> Block | None:
    if fields.get(key) is None:
        return None
    size = fields.integers(key)
    if len(size) != 2 or min(size) < 1 or max(size) > _LARGEST_GROUP:
        raise fields.unsupported(key, [f"two sizes from 1 to {_LARGEST_GROUP}"])
    return size[0], size[1]


def _of_gptq(fields: Fields) -> _Join:
    versions = ("gptq", "gptq_v2")
    fields.refuse({"checkpoint_format": versions, "format": versions, "pack_dtype": ("int32",)})
    fields.refuse({"adapter": (), "rotation": ()})
    if any(not str(rule).startswith("-:") for rule in _mapping(fields, "dynamic")):
        raise fields.unsupported("dynamic", ["rules that leave modules out"])
    bits = fields.integer("bits", high=32)
    has_zeros = not fields.boolean("sym", True)
    if bits not in (4, 8):
        raise fields.unsupported("bits", ["4", "8"])
    if bits == 8 and has_zeros:
        raise fields.unsupported("sym", ["true with 8 bits"])
    version = fields.get("checkpoint_format") or fields.get("format")
    coding = Coding(
        bits,
        _group_size(fields, "group_size"),
        has_zeros,
        least_zero=0 if version == "gptq_v2" else 1,
        is_ordered=not fields.boolean("desc_act", False),
    )
    return lambda linear: of_columns(linear, coding)


def _of_awq(fields: Fields) -> _Join:
    fields.refuse({"version": ("gemm", "GEMM"), "zero_point": (True,)})
    bits, group = (
        next((name for name in names if fields.get(name) is not None), names[0])
        for names in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    if fields.integer(bits, high=32) != 4:
        raise fields.unsupported(bits, ["4"])
    coding = Coding(4, _group_size(fields, group), has_zeros=True, is_awq=True)
    return lambda linear: of_columns(linear, coding)


_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized"),
    *("pack-quantized", "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def _of_compressed(fields: Fields) -> _Join:
    fields.refuse_unknown(
        {"config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme"}
        | {"quant_method", "quantization_status", "sparsity_config", "transform_config", "version"}
        | {"run_compressed", "dequantize"}
    )
    fields.refuse({"format": _FORMATS})
    fields.section("sparsity_config").refuse({"format": ("dense",)})
    fields.section("transform_config").refuse({"config_groups": ({},)})
    groups = fields.section("config_groups")
    blocks = {_check_group(groups.section(name)) for name in _mapping(fields, "config_groups")}
    if len(blocks - {None}) > 1:
        raise fields.unsupported("config_groups", ["one block_structure"])
    block = next(iter(blocks - {None}), None)
    return lambda linear: _of_compressed_linear(linear, block)


def _check_group(group: Fields) -> Block | None:
    """The blocks of a group of linears, if it has any; the rest its tensors say."""
    group.refuse({"format": _FORMATS})
    weights = group.section("weights")
    weights.refuse({"type": ("int", "float"), "strategy": _STRATEGIES})
    if str(weights.get("num_bits") or 8) not in ("4", "8"):
        raise weights.unsupported("num_bits", ["4", "8"])
    return _block_size(weights, "block_structure")


def _of_compressed_linear(linear: Linear, block: Block | None) -> Tensor:
    packed = linear.parts.get("weight_packed")
    if packed is not None and packed.format.name == "U8":
        return of_nvfp4(linear) if "weight_global_scale" in linear.parts else of_mxfp4(linear)
    if packed is not None:
        return of_rows(linear)
    if linear.part("weight").format.name == "I8":
        return of_bytes(linear)
    scales = linear.part("weight_scale").shape
    in_blocks = math.prod(scales) > 1 and scales[:1] != linear.part("weight").shape[:1]
    return of_e4m3(linear, block if in_blocks else None)


def _group_size(fields: Fields, key: str) -> int | None:
    return None if fields.get(key) == -1 else fields.integer(key, high=_LARGEST_GROUP)


def _mapping(fields: Fields, key: str) -> Mapping[str, object]:
    value = fields.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise fields.unsupported(key, ["an object"])
    return value or {}


# By quant_method.
_METHODS: Mapping[str, Callable[[Fields], _Join]] = {
    "fp8": _of_fp8,
    "fbgemm_fp8": _of_fp8,
    "modelopt": _of_modelopt,
    "awq": _of_awq,
    "gptq": _of_gptq,
    "compressed-tensors": _of_compressed,
}
