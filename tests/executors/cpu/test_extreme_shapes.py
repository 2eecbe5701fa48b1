"""Shapes that only a hostile or an odd file has: they run as the reference does, or are refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.executors.reference.plans import logits, row, run
from tests.extreme_models import random_model, small_spec, write_folder

from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.executors.cpu.executor import CpuExecutor
from quire.executors.cpu.lowering import Threads
from quire.executors.cpu.native import native
from quire.executors.reference import ReferenceExecutor
from quire.executors.sampler import score
from quire.llm import devices
from quire.llm.devices import CpuDevice, Options
from quire.model.loading import Model
from quire.model.rope import Rope
from quire.model.spec import MAX_SIZES, Activation, ModelSpec
from quire.model.states import StateKind, StateMixer

UNITS: list[str] = native.units()
TOKENS = tuple((7 * n) % 20 for n in range(40))
HALVES_COST = 1e-5  # of keys and values: relative squared error, on any shape below


def nmse(found: npt.NDArray[np.float32], exact: npt.NDArray[np.float32]) -> float:
    return float(np.square(found - exact).sum() / np.square(exact).sum())


def tokens_of(model: Model) -> tuple[int, ...]:
    return tuple(token % model.spec.vocabulary_size for token in TOKENS)


def reference_logits(model: Model) -> npt.NDArray[np.float32]:
    executor = ReferenceExecutor(model, num_blocks=4)
    try:
        return logits(executor, row(tokens_of(model), (2, 0, 3)))
    finally:
        executor.close()


def cpu_logits(model: Model, unit: str, threads: int, chunk: int) -> npt.NDArray[np.float32]:
    """In chunks of so many tokens."""
    tokens = tokens_of(model)
    count = Threads(threads, may_spin=False)
    executor = CpuExecutor(model, num_blocks=4, threads=count, unit=unit)
    try:
        return np.concatenate(
            [
                logits(executor, row(tokens[start : start + chunk], (2, 0, 3), start=start))
                for start in range(0, len(TOKENS), chunk)
            ]
        )
    finally:
        executor.close()


SHAPES: dict[str, dict[str, Any]] = {
    "128 heads of a kv head": {"num_heads": 128},
    "136 heads of a kv head": {"num_heads": 136, "head_dim": 16},
    "256 heads of a kv head": {"num_heads": 256, "head_dim": 16},
    "257 heads of each of 2": {"num_heads": 514, "num_kv_heads": 2, "head_dim": 6},
    "4096 heads of a kv head": {"num_heads": 4096, "head_dim": 2},
    "16384 kv heads": {"num_heads": 16384, "num_kv_heads": 16384, "head_dim": 2},
    "a head of 16384": {"num_heads": 1, "head_dim": 16384},
    "128 heads of 2048": {"num_heads": 128, "head_dim": 2048, "hidden_size": 3},
    "heads of 17": {"head_dim": 17, "rope": Rope(1e4, 16, interleaved=True)},
    "heads of 3": {"head_dim": 3, "rope": Rope(1e4, 2, interleaved=True)},
    "hidden 1, feed-forward 1": {"hidden_size": 1, "ffn_size": 1, "head_dim": 2},
    "hidden 33, feed-forward 31": {"hidden_size": 33, "ffn_size": 31},
    "one token": {"vocabulary_size": 1},
    "300 layers": {"num_layers": 300, "hidden_size": 4, "ffn_size": 3, "head_dim": 2},
    "windows of 1": {"num_layers": 2, "windows": (1, None)},
    "windows of 17": {"num_layers": 2, "windows": (17, 1)},
    "caps": {"attention_soft_cap": 1e-6, "logit_soft_cap": 1e9},
    "wide caps": {"attention_soft_cap": 1e9, "logit_soft_cap": 1e-6},
    "everything": {
        "num_heads": 130,
        "qkv_bias": True,
        "output_bias": True,
        "ffn_bias": True,
        "qk_norm": True,
        "sub_norms": True,
        "linear_scales": True,
        "activation": Activation.RELU2,
        "tied_head": True,
        "windows": (9,),
    },
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_every_unit_computes_the_reference_s_logits_with_the_same_bits(
    changes: dict[str, Any],
) -> None:
    model = random_model(small_spec(**changes))
    exact = reference_logits(model)
    ways = [(unit, 1 + index % 2, 40 - 13 * (index % 3)) for index, unit in enumerate(UNITS)]
    found = [cpu_logits(model, *way) for way in ways]
    assert nmse(found[0], exact) <= HALVES_COST
    assert all(other.tobytes() == found[0].tobytes() for other in found)


def with_state(hidden_size: int = 16, **sizes: Any) -> ModelSpec:
    """Attention, then what keeps a state."""
    spec = small_spec(hidden_size=hidden_size)
    mixer = StateMixer(**{"kernel": 4, "norm_epsilon": 1e-5, **sizes})
    return replace(spec, layers=(spec.layers[0], replace(spec.layers[0], mixer=mixer)))


DELTA_NET, MAMBA = {"kind": StateKind.DELTA_NET}, {"kind": StateKind.MAMBA}
CONVOLUTION = {"kind": StateKind.CONVOLUTION}
STATES: dict[str, dict[str, Any]] = {
    "a matrix of one number": {**DELTA_NET, "key_dim": 1, "value_dim": 1, "kernel": 2},
    "a kernel of 64": {**MAMBA, "key_dim": 3, "value_dim": 5, "kernel": 64},
    "values of 17": {**DELTA_NET, "num_heads": 3, "key_dim": 33, "value_dim": 17},
    "values of 65": {**MAMBA, "num_heads": 2, "num_groups": 2, "key_dim": 17, "value_dim": 65},
    "a key of 16384": {**MAMBA, "key_dim": 16384, "value_dim": 1},
    "a value of 16384": {**DELTA_NET, "key_dim": 1, "value_dim": 16384},
    "1024 heads of a group": {**DELTA_NET, "num_heads": 1024, "key_dim": 2, "value_dim": 2},
    "1024 groups": {**MAMBA, "num_heads": 1024, "num_groups": 1024, "key_dim": 1, "value_dim": 1},
    "heads that take turns": {
        **DELTA_NET,
        "num_heads": 6,
        "num_groups": 3,
        "key_dim": 4,
        "value_dim": 7,
        "is_tiled": True,
    },
    "a convolution of 1": {**CONVOLUTION, "value_dim": 1, "kernel": 2},
    "a convolution of 513": {**CONVOLUTION, "value_dim": 513, "has_convolution_bias": True},
    "a convolution over 64 tokens": {**CONVOLUTION, "value_dim": 33, "kernel": 64},
}


@pytest.mark.parametrize("sizes", STATES.values(), ids=STATES.keys())
def test_every_unit_computes_states_as_the_reference_does(sizes: dict[str, Any]) -> None:
    model = random_model(with_state(**sizes))
    exact = reference_logits(model)
    ways = [(unit, 1 + index % 2, 40 - 13 * (index % 3)) for index, unit in enumerate(UNITS)]
    found = [cpu_logits(model, *way) for way in ways]
    assert nmse(found[0], exact) <= HALVES_COST
    assert all(other.tobytes() == found[0].tobytes() for other in found)


@pytest.mark.parametrize(
    ("heads", "size"), [(136, 16), (256, 16), (128, 16384)], ids=["136", "256", "128 of 16384"]
)
def test_a_file_with_large_groups_of_heads_is_generated_from(
    tmp_path: Path, heads: int, size: int
) -> None:
    """Whoever lets the file choose how much of the stack is used ends the process here."""
    folder = write_folder(
        tmp_path / "model", num_attention_heads=heads, head_dim=size, hidden_size=16
    )
    program = (
        "from quire import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=5, temperature=0.0)\n"
        "for device in ('cpu', 'reference'):\n"
        f"    llm = LLM({str(folder)!r}, device=device, kv_memory='64MiB', max_batch_size=2)\n"
        "    outputs = llm.generate([[1, 2, 3, 4], [5, 6, 7]], params)\n"
        "    print([output.completions[0].token_ids for output in outputs])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on_cpu, on_reference = done.stdout.splitlines()
    assert on_cpu == on_reference


# ---- what is refused, before memory is taken


def test_more_query_heads_than_kernels_count_are_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match=r"num_heads \(16384\) times head_dim \(16384\) must"):
        small_spec(num_heads=16384, num_kv_heads=16384, head_dim=16384)


SOUND: dict[str, Any] = {
    "hidden_size": 16,
    "vocabulary_size": 20,
    "layer_input_size": 8,
    "unit": "",
    "num_threads": 1,
    "may_spin": False,
}
SOUND_LAYER: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "value_dim": 8,
    "rope": 0,
    "window": 5,
    "is_chunked": False,
    "scale": 1.0,
    "soft_cap": 0.0,
    "sinks": -1,
    "kv_layer": -1,
    "has_key_values": False,
    "has_values_in_keys": False,
}
EDGES = (0, -1, -(2**31), 2**31 - 1)
SIZES = ("hidden_size", "vocabulary_size")
LAYER_SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_dim")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in SIZES for value in EDGES),
        *({name: MAX_SIZES[name] + 1} for name in SIZES),
        {"logit_soft_cap": -1.0},
        {"embedding_scale": float("inf")},
        {"layer_input_size": -1},
        {"layer_input_size": 2**40},
        {"num_threads": 0},
        {"num_threads": -1},
        {"unit": "mmx"},
    ],
    ids=str,
)
def test_the_native_constructor_checks_the_shape_once_more(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|unit|at least"):
        native.make_decoder(**{**SOUND, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in LAYER_SIZES for value in EDGES),
        *({name: MAX_SIZES.get(name, 1 << 14) + 1} for name in LAYER_SIZES),
        {"num_heads": 16384, "num_kv_heads": 16384, "head_dim": 16384},
        {"num_heads": 16384, "num_kv_heads": 16384, "value_dim": 16384},
        {"num_heads": 5},
        {"head_dim": 6},  # the rope turns eight
        {"rope": 1},
        {"rope": -2},
        {"window": -1},
        {"window": 2**31 - 1},
        {"scale": float("nan")},
        {"scale": -1.0},
        {"soft_cap": float("inf")},
        {"sinks": 1},
        {"sinks": 0},  # a vector of three
        {"kv_layer": 1},
        {"kv_layer": 2**31 - 1},
        {"kv_layer": 0, "num_kv_heads": 4},
        {"kv_layer": 0, "head_dim": 16},
        {"kv_layer": 0, "value_dim": 4},
        {"has_key_values": True, "value_dim": 4},
        {"has_values_in_keys": True, "num_kv_heads": 1},  # no number of a key is rotated
        {"has_values_in_keys": True, "num_kv_heads": 1, "value_dim": 4},  # fewer than the rope's
        {"has_values_in_keys": True, "value_dim": 4, "rope": -1},
    ],
    ids=str,
)
def test_a_native_layer_is_checked_once_more(changes: dict[str, Any]) -> None:
    decoder = native.make_decoder(**SOUND)
    decoder.add_rope(8, False)
    decoder.add_vector(np.ones(3, np.float32))
    decoder.add_layer(**SOUND_LAYER)
    with pytest.raises(ValueError, match="must"):
        decoder.add_layer(**{**SOUND_LAYER, **changes})


def test_a_layer_reads_no_keys_of_one_that_has_none() -> None:
    decoder = native.make_decoder(**SOUND)
    decoder.add_rope(8, False)
    for owner in (-1, 0):
        decoder.add_layer(**{**SOUND_LAYER, "kv_layer": owner})
    with pytest.raises(ValueError, match="must have its own"):
        decoder.add_layer(**{**SOUND_LAYER, "kv_layer": 1})


SOUND_STATE: dict[str, Any] = {
    "kind": StateKind.DELTA_NET,
    "kernel": 3,
    "num_heads": 4,
    "num_groups": 2,
    "key_dim": 2,
    "value_dim": 4,
    "is_tiled": False,
    "taps": 0,
    "a": 1,
    "dt": 1,
}
STATE_SIZES = ("kernel", "num_heads", "num_groups", "key_dim", "value_dim")
STATE_VECTORS = ("taps", "bias", "a", "dt", "d")


def with_vectors() -> Any:
    """A decoder with what SOUND_STATE is made of."""
    decoder = native.make_decoder(**SOUND)
    for size, value in ((72, 1.0), (4, -1.0), (4, 1e-9), (4, np.nan), (4, np.inf), (3, -1.0)):
        decoder.add_vector(np.full(size, value, np.float32))
    return decoder


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in STATE_SIZES for value in (*EDGES, 1 << 24)),
        *({name: value} for name in STATE_VECTORS for value in (5, 6, 2**31 - 1)),
        *({name: -1} for name in ("taps", "a", "dt")),
        *({"a": vector} for vector in (2, 3, 4)),  # it may not grow
        {"taps": 1},
        {"kernel": 1},
        {"kernel": 65},
        {"num_groups": 3},
        {"num_heads": 16384, "key_dim": 16384, "value_dim": 16384},
        {"kind": StateKind.CONVOLUTION},  # which has no heads
        {"kind": StateKind.CONVOLUTION, "num_heads": 1, "num_groups": 1, "value_dim": 24},
        {"kind": "attention"},
    ],
    ids=str,
)
def test_a_native_state_is_checked_once_more(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|divide|kind|word|got"):
        with_vectors().add_state(**{**SOUND_STATE, **changes})


def test_a_sound_native_state_is_taken() -> None:
    decoder = with_vectors()
    assert decoder.add_state(**SOUND_STATE) == 0
    # Two tokens of 24 channels; of each head a matrix of 2 x 4, in whole vectors.
    assert decoder.state_bytes == 4 * (2 * 24 + 4 * 2 * 16)
    for count in (0, -1, 2**62):
        with pytest.raises(ValueError, match=r"must"):
            decoder.allocate_states(count)
    decoder.allocate_states(2)
    with pytest.raises(ValueError, match="must be added before"):
        decoder.add_state(**SOUND_STATE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("convolve", {}),
        ("convolve", {"state": 2}),
        ("convolve", {"state": 0}),  # it is made of more than was projected
        ("recur", {"state": 1}),  # a convolution alone
        ("recur", {"state": 2**31 - 1}),
        ("gate_output", {"has_sigmoid": True}),  # there is no gate
    ],
    ids=str,
)
def test_stages_of_states_that_do_not_fit_what_was_given_are_refused(
    kind: str, options: dict[str, Any]
) -> None:
    decoder = with_vectors()
    decoder.add_state(**SOUND_STATE)
    alone = {"kind": StateKind.CONVOLUTION, "num_heads": 1, "num_groups": 1, "key_dim": 0}
    decoder.add_state(**{**SOUND_STATE, **alone, "value_dim": 24})
    projection = [decoder.add_matrix("F32", np.zeros(72 * 16 * 4, np.uint8), 72, 16)]
    decoder.add_stage("norm_and_quantise", matrices=projection)
    decoder.add_stage("project", matrices=projection)
    decoder.add_stage("convolve", state=1)
    with pytest.raises(ValueError, match=r"must|no heads"):
        decoder.add_stage(kind, **options)
    with pytest.raises(ValueError, match="carried on once"):
        decoder.add_stage("convolve", state=1)
    gate = [decoder.add_matrix("F32", np.zeros(24 * 16 * 4, np.uint8), 24, 16)]
    decoder.add_stage("norm_and_quantise", matrices=gate)
    decoder.add_stage("project", output="gated", matrices=gate)
    for norm_size in (0, -1, 5, 48):
        with pytest.raises(ValueError, match=r"must"):
            decoder.add_stage("gate_output", norm=native.Norm(1e-5, 1), norm_size=norm_size)


@pytest.mark.parametrize("dims", [*EDGES, 7, 16386])
def test_a_native_rope_is_checked_once_more(dims: int) -> None:
    with pytest.raises(ValueError, match="rope_dims must"):
        native.make_decoder(**SOUND).add_rope(dims, False)


def test_integers_that_no_native_size_holds_are_refused() -> None:
    for name in SIZES:
        with pytest.raises((TypeError, ValueError)):
            native.make_decoder(**{**SOUND, name: 2**70})
    for name in LAYER_SIZES:
        with pytest.raises((TypeError, ValueError)):
            native.make_decoder(**SOUND).add_layer(**{**SOUND_LAYER, name: 2**70})


def filled() -> tuple[Any, dict[str, int]]:
    """A decoder with some matrices [rows, columns] and vectors, by name."""
    decoder = native.make_decoder(**SOUND)
    decoder.add_rope(8, False)
    for _ in range(2):
        decoder.add_layer(**SOUND_LAYER)
    shapes = {"q": (32, 16), "k": (16, 16), "o": (16, 32), "up": (24, 16), "down": (16, 24)}
    shapes |= {"embedding": (20, 16)}
    indices = {}
    for name, (rows, columns) in shapes.items():
        zeros = np.zeros(rows * columns * 4, np.uint8)
        indices[name] = decoder.add_matrix("F32", zeros, rows, columns)
    for name, size in (("norm", 16), ("head norm", 8), ("wide norm", 32)):
        indices[name] = decoder.add_vector(np.ones(size, np.float32))
    return decoder, indices


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("norm_and_quantise", {"matrices": []}),
        ("norm_and_quantise", {"matrices": [6]}),
        ("norm_and_quantise", {"matrices": [-1]}),
        ("norm_and_quantise", {"matrices": ["o"]}),
        ("norm_and_quantise", {"matrices": ["q"], "norm": "head norm"}),
        ("norm_and_quantise", {"matrices": ["q"], "norm": 3}),
        ("norm_and_quantise", {"matrices": ["q"], "norm": "broken norm"}),
        ("norm_and_quantise", {"matrices": ["down"], "input": "gated"}),
        ("norm_and_quantise", {"matrices": ["q"], "input": "attention_output"}),
        ("norm_and_quantise", {"matrices": ["o"], "input": "attention_output", "norm": "norm"}),
        ("project", {"matrices": []}),
        ("project", {"matrices": ["o", "k", "k"]}),
        ("project", {"matrices": ["q"], "output": "hidden"}),
        ("project", {"matrices": ["q"], "output": "attention_output"}),
        ("project", {"matrices": ["q", "k"], "is_by_head": True, "output_stride": 32}),
        ("project", {"matrices": ["q", "q"], "is_by_head": True, "output_stride": 31}),
        ("project", {"matrices": ["q", "q"], "is_by_head": True, "output_stride": -1}),
        ("project", {"matrices": ["q", "q"], "is_by_head": True, "output_stride": 2**62}),
        ("project", {"matrices": ["q", "q"], "is_by_head": True, "output_stride": 2**40}),
        ("norm_and_quantise", {"matrices": ["q"] * 3, "is_by_head": True}),
        ("norm_and_quantise", {"matrices": ["q", "q"], "is_by_head": True}),
        ("norm_and_quantise", {"matrices": ["q"], "input": "latent"}),
        ("project_and_add", {"matrices": ["o"]}),  # to rows that are not the hidden state's
        ("project_and_add", {"matrices": ["o"], "output": "branch"}),  # not begun
        ("add_branch", {}),
        ("add_layer_embedding", {"matrices": []}),
        ("add_layer_embedding", {"matrices": ["embedding"]}),
        ("gate_and_up", {"matrices": ["up"], "layer_input": 0}),
        ("gate_and_up", {"matrices": ["up"], "gate": "clamped_swiglu"}),
        ("latent_rope_and_store", {"layer": 0}),
        ("latent_rope_and_store", {"layer": 2}),
        ("rope_and_store", {"value_norm": "norm"}),
        ("rope_and_store", {"query_norm": "head norm", "norm_span": "projection"}),
        ("rope_and_store", {"query_norm": "head norm", "norm_span": "each head"}),
        ("rope_and_store", {"norm_span": "row"}),
        ("rope_and_store", {"position_scale": (0.1, -1, 0)}),
        ("rope_and_store", {"position_scale": (0.1, 5, -1)}),
        ("rope_and_store", {"position_scale": (0.1, 5, 2**62)}),
        ("project_and_add", {"matrices": []}),
        ("project_and_add", {"matrices": ["q"]}),
        ("project_and_add", {"matrices": ["o", "o"]}),
        ("gate_and_up", {"matrices": ["up"] * 3}),
        ("gate_and_up", {"matrices": ["up", "q"]}),
        ("gate_and_up", {"matrices": ["up", "up"], "quantised": "groups"}),
        ("gate_and_up", {"matrices": ["up", "up"], "quantised": "blocks"}),
        ("gate_and_up", {"matrices": ["up", "up"], "quantised": "per_token"}),
        ("gate_and_up", {"matrices": ["up", "up"], "gate": "relu"}),
        ("rope_and_store", {"layer": 2}),
        ("rope_and_store", {"layer": -1}),
        ("rope_and_store", {"query_norm": "norm"}),
        ("rope_and_store", {"key_norm": "wide norm"}),
        ("attend", {"layer": 2}),
        ("attend", {"layer": -1}),
        ("attend", {"layer": 1}),
        ("swap", {}),
        ("norm_and_quantise", {"input": "elsewhere"}),
    ],
    ids=str,
)
def test_stages_that_do_not_fit_what_was_given_are_refused(
    kind: str, options: dict[str, Any]
) -> None:
    decoder, indices = filled()
    decoder.add_stage("project", matrices=[indices[name] for name in "qkk"])
    decoder.add_stage("attend", layer=1)
    options = {name: lowered(indices, name, value) for name, value in options.items()}
    with pytest.raises(ValueError, match=r"must|matri|layer|gate|word|cannot"):
        decoder.add_stage(kind, **options)


def lowered(indices: dict[str, int], name: str, value: Any) -> Any:
    """The option with names of matrices and vectors replaced."""
    if name.endswith("norm"):
        epsilon = 2.0 if value == "broken norm" else 1e-5
        known = {**indices, "broken norm": indices["norm"]}
        return native.Norm(weight=known.get(value, value), epsilon=epsilon)
    return [indices.get(item, item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("names", ["q", "qk", "qkkk"])
def test_projections_of_another_size_than_a_layer_s_are_refused(names: str) -> None:
    decoder, indices = filled()
    decoder.add_stage("project", matrices=[indices[name] for name in names])
    with pytest.raises(ValueError, match="queries, keys and values must be"):
        decoder.add_stage("rope_and_store", layer=0)


def test_a_layer_without_queries_is_not_attended() -> None:
    decoder, indices = filled()
    decoder.add_stage("project", matrices=[indices["k"]])
    with pytest.raises(ValueError, match="the queries of a layer must be"):
        decoder.add_stage("attend", layer=0)


def test_what_else_a_decoder_is_made_of_is_checked() -> None:
    decoder, indices = filled()
    zeros, eight = np.zeros(16 * 16 * 4, np.uint8), np.ones(8, np.float32)
    norm, head_norm = (
        native.Norm(weight=indices[name], epsilon=1e-5) for name in ("norm", "head norm")
    )
    refused: list[Callable[[], object]] = [
        lambda: decoder.add_matrix("F32", zeros, 16, 16, bias=indices["head norm"]),
        lambda: decoder.add_matrix("F32", zeros, 16, 16, bias=3),
        lambda: decoder.add_matrix("F32", zeros, 16, 17),
        lambda: decoder.add_matrix("F32", zeros, 2**40, 2**40),
        lambda: decoder.add_matrix("Q4_0", zeros, -16, 16),
        lambda: decoder.add_vector(np.ones(0, np.float32)),
        lambda: decoder.set_embedding_and_head(indices["q"], norm, indices["embedding"]),
        lambda: decoder.set_embedding_and_head(indices["embedding"], norm, 6),
        lambda: decoder.set_embedding_and_head(
            indices["embedding"], head_norm, indices["embedding"]
        ),
        lambda: decoder.allocate_cache(0, False, 0),
        lambda: decoder.allocate_cache(-1, False, 0),
        lambda: decoder.allocate_cache(2**62, True, 0),
        lambda: decoder.allocate_cache(4, False, -1),
        lambda: decoder.set_rope(0, eight, np.ones(4, np.float32), 2),
        lambda: decoder.set_rope(0, eight, eight, 3),
        lambda: decoder.set_rope(0, eight, eight, 2**62),
        lambda: decoder.set_rope(1, eight, eight, 2),
        lambda: decoder.set_rope(-1, eight, eight, 2),
        lambda: decoder.cache_block(0, 0),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"must|size|rows|as many"):
            call()
    with pytest.raises(IndexError):
        decoder.activation_format(99)


def test_a_step_of_a_decoder_that_is_not_complete_is_refused() -> None:
    decoder, indices = filled()
    plan = row((1, 2), (0,))
    with pytest.raises(ValueError, match="no head yet"):
        decoder.step((plan,), [None], [0], (), 256, 0)
    norm = native.Norm(weight=indices["norm"], epsilon=1e-5)
    decoder.set_embedding_and_head(indices["embedding"], norm, indices["embedding"])
    with pytest.raises(ValueError, match="no cache yet"):
        decoder.step((plan,), [None], [0], (), 256, 0)
    with pytest.raises(ValueError, match="num_blocks must be from 0 to 0, got 2"):
        decoder.step((plan,), [None], [0], (), 256, 2)
    decoder.allocate_cache(2, False, 0)
    [[fault, *_]] = decoder.step((plan,), [None], [0], (), 256, 2)
    assert fault == "positions 0 to 2 are beyond the rope tables of 0"
    tables = np.ones(8, np.float32)
    decoder.set_rope(0, tables, tables, 2)
    [[fault, *_]] = decoder.step((plan,), [None], [0], (), 256, 2)
    assert fault is None
    with pytest.raises(ValueError, match=r"block 2 .* there are 2 blocks"):
        decoder.step((plan,), [None], [0], ((2, 0),), 256, 2)


def test_what_the_kernels_cannot_hold_is_an_unsupported_model() -> None:
    model = random_model(small_spec())
    broken = replace(model, tensors={**model.tensors})
    name = "blk.0.attn_q.weight"
    broken.tensors[name] = replace(model.tensors[name], shape=(16, 15))  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="the CPU kernels cannot hold this model"):
        CpuExecutor(broken, num_blocks=1, threads=Threads(1, may_spin=False))


def test_a_row_may_be_asked_for_its_logits_and_for_a_score_at_once() -> None:
    """Twice as many products of the head as the step has rows: its room must hold them."""
    model = random_model(small_spec(hidden_size=4096))
    rows = [row((index,), (index,), prompt_targets=(1,)) for index in range(3)]
    executor = CpuExecutor(model, num_blocks=4, threads=Threads(1, may_spin=False))
    try:
        alone = [run(executor, plan._replace(prompt_targets=()))[0].logits for plan in rows]
        results = run(executor, *rows)
    finally:
        executor.close()
    for exact, result in zip(alone, results, strict=True):
        assert result.logits.tobytes() == exact.tobytes()
        assert result.prompt_logprobs == (score(exact[0], 1, 0),)


def test_rope_tables_are_the_same_however_many_positions_are_made_at_once() -> None:
    spec = small_spec(context_length=1 << 20)
    cosines, sines = spec.rope.tables(9000)
    angles = np.arange(9000)[:, None] * spec.rope.frequencies()
    assert cosines.tobytes() == np.cos(angles).astype(np.float32).tobytes()
    assert sines.tobytes() == np.sin(angles).astype(np.float32).tobytes()


def test_what_wide_layers_work_in_is_counted_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small file may ask for rows of millions of numbers in every step."""
    wide = random_model(small_spec(hidden_size=1, num_heads=16384, head_dim=256, num_kv_heads=1))
    assert sum(tensor.nbytes for tensor in wide.tensors.values()) < 64 << 20
    monkeypatch.setattr(devices, "available_memory", lambda: 4 << 30)
    plan = CpuDevice().memory_plan(wide, Options(threads=2))
    with pytest.raises(ConfigError, match=r"weights and what steps work in take \d.* GiB"):
        plan.pool_bytes(None)
