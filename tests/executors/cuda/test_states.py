"""Layers that keep a state, of any sizes, beside the reference; their bits in any chunks; their
slots."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
import torch
from tests.drawn_families import write_drawn
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.cuda.half_reference import in_half
from tests.executors.reference.plans import row

from quire.core.config import EngineConfig
from quire.core.errors import UnsupportedModelError
from quire.core.plan import StepPlan, Want
from quire.core.request import Ended
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.executors import reference
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.cuda import executor as executors
from quire.executors.cuda.kernels.gates import Sums
from quire.executors.cuda.kernels.states import Chunks
from quire.executors.cuda.planes import to_natural_order
from quire.executors.cuda.states import (
    MAX_KEY_DIM,
    LayerState,
    StateRunner,
    States,
    StateWeights,
    check_states,
    num_projected,
    output_divisor,
)
from quire.llm import devices
from quire.llm.devices import CudaDevice, Options
from quire.model.states import StateKind, StateMixer

DELTA_NET = StateMixer(
    kind=StateKind.DELTA_NET,
    kernel=4,
    num_heads=4,
    num_groups=2,
    key_dim=128,
    value_dim=20,
    norm_epsilon=1e-6,
)
MAMBA = StateMixer(
    kind=StateKind.MAMBA,
    kernel=3,
    num_heads=6,
    num_groups=2,
    key_dim=24,
    value_dim=50,
    has_convolution_bias=True,
    norm_epsilon=1e-5,
)
CONVOLUTION = StateMixer(kind=StateKind.CONVOLUTION, kernel=5, value_dim=1100)
PARTS = {
    "gated DeltaNet, values in three programs": DELTA_NET,
    "its heads as GGUF files order them": replace(DELTA_NET, is_tiled=True, key_dim=16),
    "as large a key as there may be": replace(DELTA_NET, key_dim=MAX_KEY_DIM, value_dim=3),
    "a key of one number": replace(DELTA_NET, key_dim=1, kernel=2),
    "Mamba 2": MAMBA,
    "Mamba 2 without a norm": replace(MAMBA, has_norm=False),
    "Mamba 2 of one group": replace(MAMBA, num_groups=1, has_convolution_bias=False),
    "a short convolution": CONVOLUTION,
    "a short convolution with a bias": replace(CONVOLUTION, has_convolution_bias=True, kernel=2),
}
NUM_SLOTS = 5


def random(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


class Layer:
    """A layer of random weights and inputs, with two splits of what its GEMM leaves."""

    def __init__(self, part: StateMixer, num_tokens: int) -> None:
        self.part = part
        rng = np.random.default_rng(7)
        self.splits = random(rng, 2, num_tokens, num_projected(part))
        self.arrays = {name: random(rng, *shape) for name, shape in part.vectors().items()}
        if part.kind is not StateKind.CONVOLUTION:
            self.arrays["ssm_a.weight"] = -np.exp(self.arrays["ssm_a.weight"])
        self.states = random(rng, NUM_SLOTS, part.num_elements)

    def reference(self, tokens: Sequence[int], slot: int) -> tuple[Any, Any]:
        """Outputs of these tokens from the state in a slot (-1: none), and the state after them."""
        is_alone = self.part.kind is StateKind.CONVOLUTION
        layer: Any = reference._Convolution if is_alone else reference._Recurrence
        made = layer(self.part, 0, _Given(self.part, self.arrays))
        state = self.states[slot].copy() if slot >= 0 else np.zeros_like(self.states[0])
        rows = self.splits[0] + self.splits[1]
        return np.stack([made._step(rows[token], state) for token in tokens]), state


class _Given:
    """Weights of the reference's layer: its linears take their rows out of what is projected."""

    def __init__(self, part: StateMixer, arrays: dict[str, Any]) -> None:
        self._arrays = arrays
        self._rows = {}
        first = 0
        for name, (rows, _) in part.matrices(1).items():
            if name != "ssm_out":
                self._rows[name] = slice(first, first + rows)
                first += rows

    def linear(self, name: str) -> Any:
        if name == "ssm_out":
            return lambda x: x
        return lambda x: x[self._rows[name]]

    def array(self, name: str) -> Any:
        return self._arrays[name]

    def get(self, name: str) -> Any:
        return self._arrays.get(name)


class Runner:
    """The kernels over a layer; its slots are written."""

    def __init__(self, layer: Layer, max_tokens: int) -> None:
        self._layer, part = layer, layer.part
        self._runner = StateRunner([part], max_tokens, 4, {"PDL": False}, "cpu")
        found = {name: torch.from_numpy(array) for name, array in layer.arrays.items()}
        self._weights = StateWeights(
            found["ssm_conv1d.weight"].T.contiguous(),
            found.get("ssm_conv1d.bias"),
            found.get("ssm_a.weight"),
            found.get("ssm_dt.bias"),
            found.get("ssm_d.weight"),
            found.get("ssm_norm.weight"),
        )
        self._slots = self._filled(States({0: part}, NUM_SLOTS, "cpu").layers[0])

    def _filled(self, slots: LayerState) -> LayerState:
        part = self._layer.part
        states = torch.from_numpy(self._layer.states)
        slots.kept[:] = states[:, : part.num_convolved].view(slots.kept.shape)
        matrices = states[:, part.num_convolved :]
        shape = (NUM_SLOTS, part.num_heads, part.key_dim, part.value_dim)
        slots.matrices[:] = matrices.reshape(shape).transpose(2, 3)
        return slots

    def state(self, slot: int) -> Any:
        kept, matrix = self._slots.kept[slot], self._slots.matrices[slot]
        return torch.cat([kept.flatten(), matrix.transpose(1, 2).flatten()]).numpy()

    def run(self, *chunks: tuple[Sequence[int], int, int], padding: int = 0) -> Any:
        """Of each chunk (tokens, the slot it reads, the slot it writes) the outputs, one after the
        other."""
        tokens = [token for chunk, _, _ in chunks for token in chunk]
        fields = np.zeros((5, len(tokens) + padding), np.int32)
        fields[0] = -1
        first = 0
        for index, (chunk, source, target) in enumerate(chunks):
            fields[0, first : first + len(chunk)] = index
            fields[1:, index] = (first, len(chunk), source, target)
            first += len(chunk)
        given = self._layer.splits[:, tokens + [0] * padding]
        sums = torch.from_numpy(np.ascontiguousarray(given))
        out = self._runner.run(
            self._layer.part,
            self._weights,
            self._slots,
            Sums(sums, sums.stride(0), sums.stride(1)),
            2,
            Chunks(*torch.from_numpy(fields)),
        )
        size = self._layer.part.output_size
        natural = to_natural_order(out[: len(tokens)].float())[:, :size]
        return natural.numpy() * output_divisor(self._layer.part)


def assert_close(found: Any, exact: Any) -> None:
    scale = np.abs(exact).max()
    assert np.abs(found - exact).max() < 1e-3 * scale  # outputs are halves
    assert np.abs(found - in_half(exact)).mean() < 2e-4 * scale


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_step_of_chunks_is_the_references(part: StateMixer) -> None:
    layer = Layer(part, 9)
    runner = Runner(layer, 16)
    chunks = [((0, 1, 2, 3, 4, 5), -1, 3), ((6,), 2, 0), ((7, 8), 4, 1)]
    found = runner.run(*chunks, padding=3)
    exact = [layer.reference(tokens, source) for tokens, source, _ in chunks]
    assert_close(found, np.concatenate([outputs for outputs, _ in exact]))
    for (_, source, target), (_, state) in zip(chunks, exact, strict=True):
        np.testing.assert_allclose(runner.state(target), state, rtol=2e-4, atol=2e-5)
        if source >= 0:  # what it read stays
            assert np.array_equal(runner.state(source), layer.states[source])


@pytest.mark.parametrize("part", [DELTA_NET, MAMBA, CONVOLUTION], ids=lambda part: part.kind)
def test_chunks_and_others_change_no_bit(part: StateMixer) -> None:
    layer = Layer(part, 9)
    whole, other = Runner(layer, 16), Runner(layer, 8)
    expected = whole.run((range(7), -1, 0))
    found = [
        other.run(((0, 1, 2), -1, 1), ((7, 8), 3, 4))[:3],
        other.run(((8,), -1, 3), ((3,), 1, 0))[1:],
        other.run(((4, 5, 6), 0, 2), padding=2),
    ]
    assert np.array_equal(np.concatenate(found), expected)
    assert np.array_equal(other.state(2), whole.state(0))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (replace(DELTA_NET, key_dim=MAX_KEY_DIM + 1), "layer 3 has key_dim of 1025"),
        (replace(DELTA_NET, num_heads=1 << 13, value_dim=1), "heads of 8192"),
        (replace(MAMBA, num_groups=1, num_heads=700), "are normed together of 35000"),
    ],
)
def test_sizes_without_a_kernel_are_refused(part: StateMixer, what: str) -> None:
    spec: Any = SimpleNamespace(states={3: part})
    with pytest.raises(UnsupportedModelError, match=what):
        check_states(spec)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> CudaExecutor:
    with load_in_bfloat(write_drawn("lfm2", tmp_path_factory.mktemp("lfm2"))) as model:
        sizes = CudaConfig(max_batch_size=4, max_step_tokens=16, num_blocks=8, device="cpu")
        found = CudaExecutor(model, replace(sizes, num_states=12))
    found.warm_up()
    return found


def test_slots_are_as_many_as_asked_for_and_their_memory_is_counted(
    executor: CudaExecutor,
) -> None:
    assert executor.capacity.num_states == 12
    state = 4 * executor._spec.num_state_elements
    assert executor.memory_bytes["kv"] == executor._blocks.num_bytes + 12 * state


def test_a_device_has_as_many_slots_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpu(**sizes: Any) -> CudaConfig:
        return CudaConfig(**{**sizes, "num_blocks": 64, "device": "cpu"})

    options = Options(device="cuda", max_batch_size=4, kv_memory="1MiB")
    each = options.engine_config().states_per_sequence
    gpu = CudaDevice()
    monkeypatch.setattr(gpu, "available_memory", lambda: None, raising=False)
    monkeypatch.setattr(devices, "_require_cuda", lambda: None)
    monkeypatch.setattr("quire.executors.cuda.CudaConfig", on_cpu)
    with load_in_bfloat(write_drawn("lfm2", tmp_path)) as model:
        plan = gpu.memory_plan(model, options)
        room = plan.weights + plan.workspace + (1 << 20) + (2 * each + 1) * plan.state_bytes
        monkeypatch.setattr(gpu, "available_memory", lambda: room)
        loaded = gpu.load(model, options)
    assert loaded.executor.capacity.num_states == loaded.memory.num_states == 2 * each + 1
    assert "memory for the states of a batch of 2, not of max_batch" in capsys.readouterr().err
    gpu.unload(loaded.executor)


UNSOUND = [
    *((0, slots) for slots in ((), (-1,), (0, 1), (-1, 12), (-1, -1))),
    *((1, slots) for slots in ((-1, 1), (2, 2), (12, 1), (-2, 1))),
]


def test_rows_without_sound_slots_fail_alone(executor: CudaExecutor) -> None:
    sound = row((5,), (3,), want=Want.SAMPLE, states=(-1, 4))
    bad = [
        row((6,), (4,), start=start, sequence_id=index, want=Want.SAMPLE, states=slots)
        for index, (start, slots) in enumerate(UNSOUND, 1)
    ]
    alone = executor.collect(executor.submit(StepPlan(0, (sound,)))).sequences
    found = executor.collect(executor.submit(StepPlan(1, (sound, *bad)))).sequences
    assert found[0] == alone[0]
    assert all("state" in (result.fault or "") for result in found[1:])
    starts = np.array([start for start, _ in UNSOUND])
    for at, (_, slots) in enumerate(UNSOUND):
        assert executors._sound_states((slots,), starts[at : at + 1], 12) is None


def test_engines_get_the_same_tokens_however_they_share_steps(executor: CudaExecutor) -> None:
    """Prefixes with their states, forks, chunks, and steps planned ahead."""
    prompt = list(range(1, 18))
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    asked = {
        "a prompt": (prompt, greedy),
        "its prefix again": ([*prompt[:16], 50], greedy),
        "two of one": ([7, 8, 9], SamplingParams(max_tokens=3, n=2, seed=3)),
    }
    alone: dict[str, list[tuple[int, ...]]] = {}
    for name, each in asked.items():
        alone |= tokens_of(executor, {name: each}, ALONE)
    for config in (replace(ALONE, plan_ahead=True, prefix_reuse=True), IN_PARTS):
        assert tokens_of(executor, asked, config) == alone


ALONE = EngineConfig(max_batch_size=3, max_step_tokens=16, plan_ahead=False, prefix_reuse=False)
IN_PARTS = replace(ALONE, max_step_tokens=5)


def tokens_of(
    executor: CudaExecutor,
    asked: dict[str, tuple[list[int], SamplingParams]],
    config: EngineConfig,
) -> dict[str, list[tuple[int, ...]]]:
    engine = Engine(executor, config)
    names = {engine.add_request(*each).id: name for name, each in asked.items()}
    found = {}
    for event in engine.run():
        if isinstance(event, Ended):
            assert event.output.error is None, event.output.error
            completions = event.output.completions
            found[names[event.output.request_id]] = [tuple(x.token_ids) for x in completions]
    return found
