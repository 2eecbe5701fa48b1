"""A model cut in two: between two layers, or between attention and feed-forward in each of them.

Between layers the first part begins with the embedding and ends with hidden states; the other
begins with hidden states and ends with the head. A part has the groups of the whole model's KV
cache that its layers are in, and takes their block tables: a block's number means the same tokens
in both parts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from quire.core.errors import UnsupportedModelError
from quire.loader.tensor import Tensor
from quire.model.features import Feature
from quire.model.kv_layout import KVLayout
from quire.model.loading import Model
from quire.model.spec import Attention, Layer, ModelSpec

_HEAD = ("output.", "output_norm.")
_EMBEDDING = "token_embd.weight"
# Of a layer's tensors, those of its feed-forward.
_FEED_FORWARD = ("ffn_", "exp_probs_b.", "pre_ffw_norm", "post_ffw_norm", "layer_output_scale.")


def why_not_cut(spec: ModelSpec, first: int) -> str | None:
    """What the layers from `first` on need of those before beside hidden states; None: nothing."""
    if spec.layer_inputs is not None:
        return str(Feature.LAYER_INPUTS)
    for index, part in spec.attentions.items():
        if part.kv_layer is not None and part.kv_layer < first <= index:
            return f"{Feature.SHARED_KV}, layer {index} those of layer {part.kv_layer}"
    return None


def first_layers(model: Model, count: int) -> Model:
    """The embedding and the first `count` layers. Nobody asks for its logits: where it must have a
    head, that is the embedding, which takes no memory of its own."""
    spec = replace(model.spec, layers=model.spec.layers[:count], tied_head=True, head_bias=False)
    others = _others(model.tensors)
    for name in ("output.weight", "output.bias"):
        others.pop(name, None)
    return replace(model, spec=spec, tensors={**others, **_layers(model.tensors, 0, count)})


def last_layers(model: Model, first: int) -> Model:
    """The layers from `first` on, the last norm and the head."""
    lacking = why_not_cut(model.spec, first)
    if lacking is not None:
        raise UnsupportedModelError(
            f"the {model.spec.family} model has {lacking}, and cannot be divided between two "
            f"devices before layer {first}: leave out gpu_layers and placement"
        )
    layers = model.spec.layers
    tensors = _layers(model.tensors, first, len(layers))
    for name, tensor in _others(model.tensors).items():
        if name.startswith(_HEAD) or (name == _EMBEDDING and model.spec.tied_head):
            tensors[name] = tensor
    kept = tuple(_numbered_from(first, layer) for layer in layers[first:])
    spec = replace(model.spec, layers=kept, num_positions=0, embedding_norm=None)
    return replace(model, spec=spec, tensors=tensors)


def _numbered_from(first: int, layer: Layer) -> Layer:
    part = layer.mixer
    if not isinstance(part, Attention) or part.kv_layer is None:
        return layer
    return replace(layer, mixer=replace(part, kv_layer=part.kv_layer - first))


def without_feed_forwards(model: Model) -> Model:
    """The embedding and the attention of every layer."""
    whole = first_layers(model, model.spec.num_layers)
    kept = {name: x for name, x in whole.tensors.items() if not _is_feed_forward(name)}
    return replace(whole, tensors=kept)


def feed_forwards(model: Model) -> Model:
    """The feed-forward of every layer, the last norm and the head."""
    whole = last_layers(model, 0)
    kept = {
        name: tensor
        for name, tensor in whole.tensors.items()
        if _layer_of(name) is None or _is_feed_forward(name)
    }
    return replace(whole, tensors=kept)


def _is_feed_forward(name: str) -> bool:
    return _layer_of(name) is not None and name.split(".", 2)[2].startswith(_FEED_FORWARD)


def largest_of_layers(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of the largest tensor of a layer."""
    return max((x.nbytes for name, x in tensors.items() if _layer_of(name) is not None), default=0)


class PartLayout(NamedTuple):
    """Where a part's layers keep their keys and values; and which of the whole model's groups its
    own are."""

    layout: KVLayout
    groups: tuple[int, ...]


def layout_of(layout: KVLayout, first: int, last: int) -> PartLayout:
    """Of layers first..last: blocks have slots for these layers alone."""
    groups, slots = layout.groups[first:last], layout.slots[first:last]
    of_part, of_blocks = sorted(set(groups)), sorted(set(slots))
    own = KVLayout(
        windows=tuple(layout.windows[group] for group in of_part),
        num_slots=len(of_blocks),
        groups=tuple(of_part.index(group) for group in groups),
        slots=tuple(of_blocks.index(slot) for slot in slots),
    )
    return PartLayout(own, tuple(of_part))


def without_slots(layout: KVLayout) -> KVLayout:
    """For a part without attention: it takes the whole model's block tables, and keeps nothing."""
    return replace(layout, num_slots=0, slots=(0,) * len(layout.slots))


def _layers(tensors: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """The tensors of layers first..last, numbered from 0 on."""
    found = {}
    for name, tensor in tensors.items():
        layer = _layer_of(name)
        if layer is not None and first <= layer < last:
            rest = name.split(".", 2)[2]
            found[f"blk.{layer - first}.{rest}"] = tensor
    return found


def _others(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is no layer's."""
    return {name: tensor for name, tensor in tensors.items() if _layer_of(name) is None}


def _layer_of(name: str) -> int | None:
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "blk" and number.isdigit() else None
