"""Everything that layers may have, on the CPU: as the reference computes it, and with the same bits
in every unit, on any number of threads, in any chunks and any batch."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.drawn_families import CASES, DRAWN, in_its_context, write_drawn
from tests.executors.cpu.blocks import UNITS, nmse
from tests.executors.reference.plans import logits, row, run
from tests.extreme_models import random_model, small_spec
from tests.model.flat_spec import with_attention
from tests.model.test_features import DELTA_NET, EXPERTS, FIRST_MAMBA, MAMBA, NORM, SPECS

from quire.core.plan import Want
from quire.executors.cpu import lowering
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads, state_bytes, weight_bytes, workspace_bytes
from quire.executors.reference import ReferenceExecutor
from quire.model.features import LOWERED, Feature, unsupported
from quire.model.kv_layout import kv_bytes_per_token
from quire.model.loading import Model, load_model
from quire.model.rope import Rope
from quire.model.spec import (
    Activation,
    Dense,
    Latent,
    LayerInputs,
    ModelSpec,
    Norm,
    NormKind,
    NormSpan,
    PositionScale,
    QKNorm,
)
from quire.model.states import StateKind

Floats = npt.NDArray[np.float32]

TABLE = (2, 0, 3)
TOKENS = tuple((7 * n) % 20 for n in range(40))
HALVES_COST = 1e-5  # of keys and values: relative squared error
BYTES_COST = 2e-2  # of activations, keys and values: the same, on any shape below
LAYER_NORM = Norm(epsilon=1e-5, kind=NormKind.LAYER, has_bias=True)


def cpu_logits(model: Model, unit: str, threads: int, chunk: int, kv_int8: bool) -> Floats:
    """In chunks of so many tokens."""
    count = Threads(threads, may_spin=False)
    executor = CpuExecutor(model, num_blocks=4, threads=count, unit=unit, kv_int8=kv_int8)
    try:
        return np.concatenate(
            [
                logits(executor, row(TOKENS[start : start + chunk], TABLE, start=start))
                for start in range(0, len(TOKENS), chunk)
            ]
        )
    finally:
        executor.close()


def reference_logits(model: Model) -> Floats:
    executor = ReferenceExecutor(model, num_blocks=4)
    try:
        return logits(executor, row(TOKENS, TABLE))
    finally:
        executor.close()


def assert_as_reference(model: Model, bound: float, kv_int8: bool = False) -> None:
    ways = [(unit, 1 + index % 2, 40 - 13 * (index % 3)) for index, unit in enumerate(UNITS)]
    found = [cpu_logits(model, *way, kv_int8) for way in ways]
    assert nmse(found[0], reference_logits(model)) <= bound
    assert all(other.tobytes() == found[0].tobytes() for other in found)


def changed(spec: ModelSpec, **changes: object) -> ModelSpec:
    """With these changes in every layer."""
    layers = [replace(layer, **changes) for layer in spec.layers]  # type: ignore[arg-type]
    return replace(spec, layers=tuple(layers))


LLAMA = small_spec(num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=32, ffn_size=64)
LATENT = Latent(kv_rank=32, rope_dims=4, norm=NORM)


def latent(**changes: object) -> ModelSpec:
    rope = Rope(1e4, 4, interleaved=True)
    own = replace(LATENT, **changes)  # type: ignore[arg-type]
    return with_attention(
        LLAMA, head_dim=36, value_dim=32, num_kv_heads=4, rope=rope, latent=own, scale=0.3
    )


def shared_keys(**changes: object) -> ModelSpec:
    """The last two layers read the keys and values of the second."""
    first = LLAMA.layers[0]
    mixer = replace(first.attention, **changes)  # type: ignore[arg-type]
    own = replace(first, mixer=mixer)
    reader = replace(own, mixer=replace(mixer, kv_layer=1))
    return replace(LLAMA, layers=(own, own, reader, reader))


def heads(size: int) -> ModelSpec:
    return with_attention(LLAMA, head_dim=size, value_dim=size, rope=Rope(1e4, size, False))


def layer_inputs(**changes: object) -> ModelSpec:
    inputs = LayerInputs(size=32, activation=Activation.GELU_TANH, norm=NORM)
    return replace(changed(LLAMA, **changes), layer_inputs=inputs)


def halves(*kinds: str) -> ModelSpec:
    """Layers of one half each."""
    whole = LLAMA.layers[0]
    fed = replace(whole, mixer=None, mixer_norm=None)
    relu = Dense(size=96, activation=Activation.RELU2, is_gated=False)
    own = replace(EXPERTS, count=6, size=64, activation=Activation.RELU2, is_gated=False)
    of = {
        "attention": replace(whole, feed_forward=None, feed_forward_norm=None),
        "dense": replace(fed, feed_forward=relu),
        "experts": replace(fed, feed_forward=replace(own, shared=relu)),
        "experts alone": replace(fed, feed_forward=own),
        "latent": replace(fed, feed_forward=replace(own, latent_size=96, shared=relu)),
    }
    of["state"] = replace(of["attention"], mixer=MAMBA)
    return replace(LLAMA, layers=tuple(of[kind] for kind in kinds))


def with_state(**changes: object) -> ModelSpec:
    """Attention, then what keeps a state, then attention."""
    first = LLAMA.layers[0]
    state = replace(first, mixer=replace(DELTA_NET, **changes))  # type: ignore[arg-type]
    return replace(LLAMA, layers=(first, state, first))


EACH_HEAD = QKNorm(norm=LAYER_NORM, span=NormSpan.EACH_HEAD)
BIASED = Dense(size=64, activation=Activation.GELU, is_gated=False, has_bias=True)
WITH = {
    **{
        feature.name: SPECS[feature]
        for feature in Feature
        if feature in LOWERED["cpu"] and feature in SPECS
    },
    "LATENT": latent(),
    "latent queries": latent(query_rank=32),
    "latent, scaled by position": with_attention(
        latent(query_rank=64), position_scale=PositionScale(factor=0.3, length=5, offset=3)
    ),
    "layer norms with biases": changed(LLAMA, mixer_norm=LAYER_NORM, feed_forward_norm=LAYER_NORM),
    "a last layer norm": replace(LLAMA, output_norm=LAYER_NORM),
    "norms after alone": changed(
        LLAMA,
        mixer_norm=None,
        feed_forward_norm=None,
        mixer_output_norm=NORM,
        feed_forward_output_norm=LAYER_NORM,
        residual_scale=0.3,
    ),
    "parallel and scaled": changed(
        LLAMA, is_parallel=True, feed_forward_norm=None, residual_scale=0.7
    ),
    "parallel with norms after": changed(
        LLAMA,
        is_parallel=True,
        feed_forward_norm=None,
        mixer_output_norm=NORM,
        feed_forward_output_norm=NORM,
        residual_scale=0.7,
    ),
    "biases everywhere": changed(
        with_attention(LLAMA, qkv_bias=True, output_bias=True), feed_forward=BIASED
    ),
    "weights of each head": with_attention(LLAMA, qk_norm=EACH_HEAD),
    "a norm after rope": with_attention(LLAMA, qk_norm=QKNorm(norm=NORM, is_after_rope=True)),
    "a norm of the projection, without weights": with_attention(
        LLAMA,
        qk_norm=QKNorm(norm=Norm(epsilon=1e-5, has_weight=False), span=NormSpan.PROJECTION),
    ),
    "values that are keys": with_attention(LLAMA, has_key_values=True, value_norm=NORM),
    "shared keys": shared_keys(qk_norm=QKNorm(norm=NORM), value_norm=NORM),
    "shared keys and a window": shared_keys(window=7, has_key_values=True),
    "sinks, window, cap": with_attention(LLAMA, has_sinks=True, window=9, soft_cap=4.0),
    "chunks of 16": with_attention(LLAMA, window=16, is_chunked=True),
    "states alone at the end": replace(
        LLAMA,
        layers=(LLAMA.layers[0], *(replace(LLAMA.layers[0], mixer=x) for x in (DELTA_NET, MAMBA))),
    ),
    "halves that end with experts": halves(
        *("state", "dense", "attention", "experts alone", "state", "experts")
    ),
    "states alone": halves("state", "state"),
    "halves that end with a state": halves("dense", "attention", "dense", "experts", "state"),
    "latents wider than hidden states": halves("attention", "latent", "state", "latent"),
    "latent experts alone": changed(
        LLAMA,
        feed_forward=replace(EXPERTS, size=64, latent_size=32),
        residual_scale=0.7,
        feed_forward_output_norm=NORM,
    ),
    "a DeltaNet beside attention in every layer": changed(
        LLAMA, state_beside=DELTA_NET, residual_scale=0.7, mixer_output_norm=NORM
    ),
    "a first Mamba of many values": replace(
        LLAMA,
        layers=(
            LLAMA.layers[0],
            replace(LLAMA.layers[0], mixer=replace(FIRST_MAMBA, value_dim=1100, key_dim=16)),
        ),
    ),
    "a first Mamba without norms": with_state(
        kind=StateKind.MAMBA_1,
        num_heads=1,
        num_groups=1,
        value_dim=64,
        step_rank=32,
        has_norm=False,
    ),
    "a Mamba without a norm": with_state(kind=StateKind.MAMBA, has_norm=False),
    "a DeltaNet of many heads a group": with_state(num_heads=6, num_groups=2, value_dim=80),
    "a DeltaNet whose heads take turns": with_state(num_heads=6, num_groups=3, is_tiled=True),
    "a DeltaNet of heads of 128": with_state(key_dim=128, value_dim=128, kernel=2),
    "a Mamba of one group": with_state(kind=StateKind.MAMBA, num_groups=1, key_dim=16),
    "layers' inputs and scales": layer_inputs(has_output_scale=True, mixer_output_norm=NORM),
    **{f"heads of {size}": heads(size) for size in (80, 96, 112, 120, 256, 512)},
}


def runs_on_cpu(name: str) -> bool:
    return not unsupported(WITH[name], "cpu")


NAMES = [name for name in WITH if runs_on_cpu(name)]


def test_every_feature_that_the_cpu_lowers_is_run() -> None:
    assert {feature.name for feature in LOWERED["cpu"]} <= WITH.keys()
    assert {Feature.LATENT.name, Feature.LAYER_INPUTS.name, Feature.SHARED_KV.name} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_layers_give_the_reference_s_logits_with_the_same_bits(name: str) -> None:
    assert_as_reference(random_model(WITH[name]), HALVES_COST)


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_bytes_are_near_the_reference_with_the_same_bits(name: str) -> None:
    """Weights, activations, keys and values of one byte."""
    model = random_model(WITH[name], usual_format="Q8_0")
    assert_as_reference(model, BYTES_COST, kv_int8=True)


def test_layers_with_super_blocks_by_head() -> None:
    """Heads whose matrices take activations in blocks of 256."""
    spec = with_attention(latent(kv_rank=256), value_dim=32)
    model = random_model(spec, formats={"attn_v_b": "Q4_K"})
    assert model.tensors["blk.0.attn_v_b.weight"].format.name == "Q4_K"
    assert_as_reference(model, BYTES_COST)


def test_a_latent_vector_s_projection_has_a_residual_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = with_attention(latent(kv_rank=128, query_rank=128), num_heads=8, num_kv_heads=8)
    model = random_model(replace(spec, hidden_size=256), usual_format="Q8_0")
    exact, errors = reference_logits(model), []
    for projections in (lowering.RESIDUAL_PASS, ()):
        monkeypatch.setattr(lowering, "RESIDUAL_PASS", projections)
        errors.append(nmse(cpu_logits(model, "", 1, 40, kv_int8=False), exact))
    assert errors[0] < 0.95 * errors[1]


# ---- the families


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def drawn(case: str, folder: Path) -> Iterator[Model]:
    """The family's model; skips the test where the CPU does not run it."""
    target = folder / case
    with load_model(target if target.exists() else write_drawn(case, target)) as model:
        model = in_its_context(case, model)
        lacking = unsupported(model.spec, "cpu")
        if lacking:
            pytest.skip(f"not on the CPU: {lacking}")
        yield model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_batches_chunks_and_pre_emption_change_no_bit_of_a_family(
    case: str, is_int8: bool, folder: Path
) -> None:
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:40]
    generator = np.random.default_rng(3)
    with drawn(case, folder) as model:
        count = Threads(2, may_spin=False)
        executor = CpuExecutor(model, num_blocks=32, threads=count, kv_int8=is_int8)
        alone = logits(executor, row(tokens, range(3)))
        found, start, table = [], 0, (31, 8, 20)
        # Each step: a chunk of it, and two others before and after, whose rows are dropped before
        # the last layer attends.
        while start < len(tokens):
            stop = min(len(tokens), start + int(generator.integers(1, 12)))
            others = [generator.permutation(tokens)[: 7 * n].tolist() for n in (1, 3)]
            results = run(
                executor,
                row(others[0], (9, 4), sequence_id=1, want=Want.NOTHING),
                row(tokens[start:stop], table, start=start, sequence_id=2),
                row(others[1], (12, 5, 30), sequence_id=3, want=Want.NOTHING),
            )
            found.append((start, results[1].logits))
            start = stop
            if start > 20 and table[0] == 31:  # it gives its blocks back and begins anew in others
                start, table = 0, (7, 31, 1)
        executor.close()
    for start, values in found:
        assert values.tobytes() == alone[start : start + len(values)].tobytes()
    assert table[0] == 7 and sum(len(values) for _, values in found) > len(tokens)


@pytest.mark.parametrize("case", CASES)
def test_memory_of_a_family_is_the_estimate(case: str, folder: Path) -> None:
    tokens = np.load(DRAWN / case / "golden.npz")["tokens"].tolist()[:40]
    with drawn(case, folder) as model:
        for is_int8 in (False, True):
            count = Threads(1, may_spin=False)
            executor = CpuExecutor(model, num_blocks=5, threads=count, kv_int8=is_int8)
            run(executor, row(tokens, TABLE, want=Want.NOTHING))
            held, positions = executor.memory_bytes, executor._num_positions
            num_states = executor.capacity.num_states
            executor.close()
            assert held["weights"] == weight_bytes(model.tensors)
            keys_and_values = 5 * 16 * kv_bytes_per_token(model.spec, is_int8)
            assert held["kv"] == keys_and_values + num_states * state_bytes(model.spec)
        # The decoder makes room for 64 rows whose logits may be wanted.
        expected = workspace_bytes(model.spec, model.tensors, 64, positions)
        assert held["workspace"] == pytest.approx(expected, rel=0.2)
