"""What a model has beyond a llama is known by name, with the layer that has it; an executor that
does not lower it refuses the model when it is loaded."""

from dataclasses import replace

import pytest
from tests.extreme_models import random_model, small_spec
from tests.model.flat_spec import with_attention

from quire.core.errors import UnsupportedModelError
from quire.executors.cpu.lowering import Threads, lower
from quire.llm.devices import DEVICES, Options
from quire.model.features import LOWERED, Feature, check_lowered, features, unsupported
from quire.model.rope import Rope
from quire.model.spec import (
    Activation,
    Dense,
    Experts,
    Latent,
    Layer,
    LayerInputs,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    PositionScale,
    QKNorm,
    Router,
    Scoring,
)
from quire.model.states import StateKind, StateMixer

LLAMA = small_spec(num_layers=2)
NORM = Norm(epsilon=1e-5)
OTHER = Norm(epsilon=1e-6)
DELTA_NET = StateMixer(
    kind=StateKind.DELTA_NET,
    kernel=4,
    num_heads=4,
    num_groups=2,
    key_dim=8,
    value_dim=6,
    norm_epsilon=1e-5,
)
MAMBA = replace(DELTA_NET, kind=StateKind.MAMBA, kernel=3, has_convolution_bias=True)
FIRST_MAMBA = StateMixer(
    kind=StateKind.MAMBA_1,
    kernel=3,
    key_dim=8,
    value_dim=24,
    step_rank=5,
    has_convolution_bias=True,
    has_step_norms=True,
    has_step_weights=True,
    norm_epsilon=1e-5,
)
EXPERTS = Experts(count=4, num_used=2, size=8, activation=Activation.SILU, router=Router())


def second(**changes: object) -> ModelSpec:
    """With these changes in the second layer."""
    first, last = LLAMA.layers
    return replace(LLAMA, layers=(first, replace(last, **changes)))  # type: ignore[arg-type]


def feed(**changes: object) -> ModelSpec:
    """With these changes in every feed-forward."""
    made = replace(LLAMA.layers[0].feed, **changes)  # type: ignore[arg-type]
    return replace(LLAMA, layers=tuple(replace(x, feed_forward=made) for x in LLAMA.layers))


def routed(**changes: object) -> ModelSpec:
    """With experts in the second layer, with these changes."""
    return second(feed_forward=replace(EXPERTS, **changes))  # type: ignore[arg-type]


def attention(**changes: object) -> ModelSpec:
    return with_attention(LLAMA, **changes)


SPECS: dict[Feature, ModelSpec] = {
    Feature.LAYER_NORMS: second(mixer_norm=Norm(epsilon=1e-5, kind=NormKind.LAYER)),
    Feature.NORMS_AFTER_HALVES: second(mixer_output_norm=NORM),
    Feature.NO_NORMS_BEFORE_HALVES: second(feed_forward_norm=None),
    Feature.DIFFERENT_EPSILONS: second(mixer_norm=OTHER),
    Feature.PARALLEL_HALVES: second(is_parallel=True, feed_forward_norm=None),
    Feature.PARALLEL_NORMS: second(is_parallel=True),
    Feature.SINGLE_HALVES: second(feed_forward=None, feed_forward_norm=None),
    Feature.NO_ATTENTION: replace(
        LLAMA, layers=tuple(replace(layer, mixer=MAMBA) for layer in LLAMA.layers)
    ),
    Feature.STATE_BESIDE: second(state_beside=MAMBA),
    Feature.RESIDUAL_SCALE: second(residual_scale=0.5),
    Feature.EMBEDDING_SCALE: replace(LLAMA, embedding_scale=4.0),
    Feature.EMBEDDING_NORM: replace(LLAMA, embedding_norm=NORM),
    Feature.LEARNED_POSITIONS: replace(LLAMA, num_positions=LLAMA.context_length),
    Feature.HEAD_BIAS: replace(LLAMA, head_bias=True),
    Feature.LOGIT_SCALE: replace(LLAMA, logit_scale=0.5),
    Feature.LOGIT_SOFT_CAP: replace(LLAMA, logit_soft_cap=30.0),
    Feature.LINEAR_SCALES: replace(LLAMA, linear_scales=True),
    Feature.DIFFERENT_LAYERS: second(feed_forward=Dense(size=7, activation=Activation.SILU)),
    Feature.DIFFERENT_ROPES: second(
        mixer=replace(LLAMA.attention, rope=Rope(1e6, 8, interleaved=False))
    ),
    Feature.NO_ROPE: second(mixer=replace(LLAMA.attention, rope=None)),
    Feature.HEAD_NORMS: attention(qk_norm=QKNorm(norm=NORM)),
    Feature.OTHER_QK_NORMS: attention(qk_norm=QKNorm(norm=NORM, span=NormSpan.PROJECTION)),
    Feature.QK_NORMS_AFTER_ROPE: attention(qk_norm=QKNorm(norm=NORM, is_after_rope=True)),
    Feature.VALUE_NORMS: attention(value_norm=NORM),
    Feature.SUB_NORMS: attention(output_norm=NORM),
    Feature.OTHER_ATTENTION_SCALE: attention(scale=0.1),
    Feature.POSITION_SCALE: attention(position_scale=PositionScale(factor=0.1, length=8)),
    Feature.ATTENTION_SOFT_CAP: attention(soft_cap=50.0),
    Feature.ALIBI: attention(alibi=8.0),
    Feature.SINKS: attention(has_sinks=True),
    Feature.WINDOWS: attention(window=9),
    Feature.CHUNKS: attention(window=9, is_chunked=True),
    Feature.OTHER_VALUE_SIZE: attention(value_dim=4),
    Feature.LATENT: attention(latent=Latent(kv_rank=6, rope_dims=4, norm=NORM)),
    Feature.SHARED_KV: second(mixer=replace(LLAMA.attention, kv_layer=0)),
    Feature.OUTPUT_GATE: attention(has_output_gate=True),
    Feature.DELTA_NET: second(mixer=DELTA_NET),
    Feature.MAMBA: second(mixer=MAMBA),
    Feature.MAMBA_1: second(mixer=FIRST_MAMBA),
    Feature.CONVOLUTIONS: second(
        mixer=StateMixer(kind=StateKind.CONVOLUTION, kernel=3, value_dim=16)
    ),
    Feature.UNGATED: feed(is_gated=False),
    Feature.GELU: feed(activation=Activation.GELU),
    Feature.GELU_TANH: feed(activation=Activation.GELU_TANH),
    Feature.RELU2: feed(activation=Activation.RELU2),
    Feature.CLAMPED_SWIGLU: feed(activation=Activation.CLAMPED_SWIGLU),
    Feature.XIELU: feed(activation=Activation.XIELU, is_gated=False),
    Feature.EXPERTS: second(feed_forward=EXPERTS),
    Feature.EXPERT_BIASES: routed(has_bias=True),
    Feature.UNGATED_EXPERTS: routed(is_gated=False),
    Feature.LATENT_EXPERTS: routed(latent_size=4),
    Feature.SHARED_EXPERT: routed(shared=Dense(size=4, activation=Activation.SILU)),
    Feature.SIGMOID_ROUTER: routed(router=Router(scoring=Scoring.SIGMOID)),
    Feature.SPARSE_MIXER: routed(router=Router(scoring=Scoring.SPARSE_MIXER)),
    Feature.ROUTER_BIAS: routed(router=Router(has_bias=True)),
    Feature.ROUTER_CHOICE: routed(router=Router(has_choice_bias=True)),
    Feature.ROUTER_GROUPS: routed(router=Router(num_groups=2, num_used_groups=1)),
    Feature.WEIGHED_EXPERT_INPUT: routed(router=Router(weighs_input=True)),
    Feature.EXPERTS_BESIDE_DENSE: routed(
        beside=Dense(size=4, activation=Activation.SILU), beside_norm=NORM
    ),
    Feature.LAYER_INPUTS: replace(
        LLAMA, layer_inputs=LayerInputs(size=4, activation=Activation.SILU, norm=NORM)
    ),
    Feature.OUTPUT_SCALE: second(has_output_scale=True),
}
OF_SECOND_LAYER = {
    *(Feature.LAYER_NORMS, Feature.NORMS_AFTER_HALVES, Feature.NO_NORMS_BEFORE_HALVES),
    *(Feature.DIFFERENT_EPSILONS, Feature.PARALLEL_HALVES, Feature.PARALLEL_NORMS),
    *(Feature.RESIDUAL_SCALE, Feature.SINGLE_HALVES, Feature.STATE_BESIDE),
    *(Feature.DIFFERENT_LAYERS, Feature.DIFFERENT_ROPES, Feature.NO_ROPE, Feature.SHARED_KV),
    *(Feature.OUTPUT_SCALE, Feature.EXPERTS, Feature.EXPERT_BIASES, Feature.SHARED_EXPERT),
    *(Feature.SIGMOID_ROUTER, Feature.ROUTER_BIAS, Feature.ROUTER_CHOICE),
    *(Feature.ROUTER_GROUPS, Feature.SPARSE_MIXER, Feature.UNGATED_EXPERTS),
    Feature.LATENT_EXPERTS,
    *(Feature.WEIGHED_EXPERT_INPUT, Feature.EXPERTS_BESIDE_DENSE),
    *(Feature.DELTA_NET, Feature.MAMBA, Feature.MAMBA_1, Feature.CONVOLUTIONS),
}
OF_MODEL = {
    *(Feature.EMBEDDING_SCALE, Feature.LOGIT_SCALE, Feature.LOGIT_SOFT_CAP, Feature.LINEAR_SCALES),
    *(Feature.LAYER_INPUTS, Feature.HEAD_BIAS, Feature.LEARNED_POSITIONS),
    *(Feature.EMBEDDING_NORM, Feature.NO_ATTENTION),
}
WITHIN = {  # what each is a kind of, or has beside it
    Feature.PARALLEL_HALVES: Feature.NO_NORMS_BEFORE_HALVES,
    Feature.PARALLEL_NORMS: Feature.PARALLEL_HALVES,
    Feature.STATE_BESIDE: Feature.MAMBA,
    Feature.NO_ATTENTION: Feature.MAMBA,
    Feature.QK_NORMS_AFTER_ROPE: Feature.OTHER_QK_NORMS,
    Feature.XIELU: Feature.UNGATED,
}


def test_a_llama_has_none_of_them() -> None:
    assert list(features(LLAMA)) == []
    assert SPECS.keys() == set(Feature)


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_each_is_found_where_it_is(feature: Feature) -> None:
    found = dict(reversed(list(features(SPECS[feature]))))  # the first layer of each stays
    layer = 1 if feature in OF_SECOND_LAYER else 0
    assert found[feature] == ("" if feature in OF_MODEL else f" in layer {layer}")
    others = {Feature.DIFFERENT_LAYERS, Feature.EXPERTS, WITHIN.get(feature)}
    assert found.keys() <= {feature} | others


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_a_device_refuses_by_name_what_it_does_not_lower(feature: Feature, device: str) -> None:
    spec = SPECS[feature]
    assert unsupported(spec, "reference") == []
    lacking = [str(found) for found, _ in features(spec) if found not in LOWERED[device]]
    if not lacking:
        check_lowered(spec, device)
        return
    with pytest.raises(UnsupportedModelError) as caught:
        check_lowered(spec, device)
    message = str(caught.value)
    assert all(what in message for what in lacking)
    assert f"the {device} executor does not run yet" in message
    assert "device='reference'" in message and f"device={device!r}" not in message


def without(monkeypatch: pytest.MonkeyPatch, feature: Feature, device: str = "cpu") -> None:
    """As if a device did not lower it."""
    monkeypatch.setitem(LOWERED, device, LOWERED[device] - {feature})


def test_the_refusal_says_layer_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, Feature.NO_ROPE)
    without(monkeypatch, Feature.LOGIT_SOFT_CAP, "cuda")
    spec = replace(SPECS[Feature.NO_ROPE], logit_soft_cap=30.0)
    with pytest.raises(
        UnsupportedModelError,
        match=r"^the llama model has layers without rope in layer 1, which the cpu executor does "
        r"not run yet: use device='reference'$",
    ):
        check_lowered(spec, "cpu")
    capped = replace(LLAMA, logit_soft_cap=30.0)
    with pytest.raises(UnsupportedModelError, match=r"use device='cpu' or device='reference'$"):
        check_lowered(capped, "cuda")


def test_loading_for_the_cpu_refuses_before_memory_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, Feature.EXPERTS)
    model = random_model(SPECS[Feature.EXPERTS])
    with pytest.raises(UnsupportedModelError, match="a mixture of experts in layer 1"):
        DEVICES["cpu"].load(model, Options(device="cpu"))
    with pytest.raises(UnsupportedModelError, match="a mixture of experts in layer 1"):
        lower(model.spec, model.tensors, Threads(1, may_spin=False))


def test_layers_that_are_alike_share_one_description() -> None:
    many = replace(LLAMA, layers=tuple(replace(LLAMA.layers[0]) for _ in range(9)))
    assert len({id(layer) for layer in many.layers}) == 1
    assert isinstance(many.layers[0], Layer)
