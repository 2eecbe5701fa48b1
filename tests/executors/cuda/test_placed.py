"""A model's first layers on the CPU, the rest on the GPU's kernels, which Triton interprets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.drawn_families import write_drawn
from tests.executors.cuda.bfloat_models import load_in_bfloat
from tests.executors.reference.plans import logits, row, run
from tests.executors.test_contract import (  # noqa: F401
    test_a_bias_of_a_token_too_high_faults_its_row_alone,
    test_a_grammar_mask_decides_among_the_allowed_tokens,
    test_a_row_out_of_bounds_faults_alone,
    test_a_row_that_follows_a_step_takes_what_it_sampled,
    test_a_sample_without_sampling_parameters_faults_that_row_alone,
    test_a_step_run_again_in_parts_keeps_the_samples_of_all_parts,
    test_following_a_step_without_a_sample_faults_that_row_alone,
    test_it_says_what_it_can_hold,
    test_logprobs_are_those_of_the_logits,
    test_penalties_see_the_sample_that_is_followed,
    test_prompt_targets_are_scored_at_each_position,
    test_sampling_is_drawn_from_seed_and_position,
    with_params,
)
from tests.fixture_files import fixture_file

from quire.core.errors import ConfigError, StepCancelledError, UnsupportedModelError
from quire.core.plan import BlockCopy, SequencePlan, StepPlan, Want
from quire.executors.base import BLOCK_SIZE, Executor
from quire.executors.cpu.executor import CpuExecutor, LayerOutput
from quire.executors.cpu.lowering import Threads
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.executors.placed import PlacedExecutor, load_placed
from quire.executors.worker import CancelFlag
from quire.model.kv_layout import grouped
from quire.model.loading import Model, load_model
from quire.model.parts import last_layers, why_not_cut

TINY = fixture_file("tiny/Q4_0.gguf")
BITNET = fixture_file("tiny-bitnet/TQ2_0.gguf")
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TABLE = (2, 0)


def opened_model(path: Path | str) -> Model:
    """A file or a dummy; of a folder, as of a drawn family, its matrices in bfloat16."""
    is_folder = isinstance(path, Path) and path.is_dir()
    return load_in_bfloat(Path(path)) if is_folder else load_model(path)


@contextmanager
def opened_placed(
    path: Path | str,
    num_blocks: int = 16,
    *,
    cpu_layers: int = 1,
    kv_int8: bool = False,
    piece_tokens: int = 32,
) -> Iterator[PlacedExecutor]:
    with opened_model(path) as model:
        executor = load_placed(
            model,
            gpu_layers=model.spec.num_layers - cpu_layers,
            num_blocks=num_blocks,
            threads=Threads(1, may_spin=False),
            max_batch_size=4,
            piece_tokens=piece_tokens,
            kv_int8=kv_int8,
            device="cpu",
        )
        executor.warm_up()
        yield executor
        executor.close()


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """Of the contract's tests as well."""
    with opened_placed(TINY, num_blocks=8) as found:
        yield found


def rows_of(executor: Executor, tokens: tuple[int, ...], **fields: Any) -> SequencePlan:
    """A row with a block of its own in every group."""
    tables = [(group,) for group in range(len(executor.capacity.windows))]
    return row(tokens, tables[0], other_tables=tuple(tables[1:]), **fields)


def error(found: Any, exact: Any) -> float:
    return float(((found - exact) ** 2).sum() / (exact**2).sum())


@contextmanager
def opened_on_gpu(path: Path | str) -> Iterator[CudaExecutor]:
    with opened_model(path) as model:
        config = CudaConfig(max_batch_size=4, max_step_tokens=32, num_blocks=16, device="cpu")
        executor = CudaExecutor(model, config, layout=grouped(model.spec, BLOCK_SIZE))
        executor.warm_up()
        yield executor
        executor.close()


@contextmanager
def opened_on_cpu(path: Path | str) -> Iterator[CpuExecutor]:
    with opened_model(path) as model:
        layout = grouped(model.spec, BLOCK_SIZE)
        threads = Threads(1, may_spin=False)
        executor = CpuExecutor(model, num_blocks=16, threads=threads, layout=layout)
        yield executor
        executor.close()


@pytest.mark.parametrize("path", [TINY, "dummy:tiny-gemma3", "dummy:tiny-moe:Q4_K_M", BITNET])
def test_its_logits_lie_between_those_of_both_devices(path: Path | str) -> None:
    """No farther from either than these are from each other, or than any two orders of sums."""
    check_between_both(path, opened_placed)


def check_between_both(path: Path | str, opened: Callable[[Path | str], Any]) -> None:
    found = []
    for opener in (opened_on_cpu, opened_on_gpu, opened):
        with opener(path) as executor:
            found.append(logits(executor, rows_of(executor, PROMPT)))
    on_cpu, on_gpu, placed = found
    bound = max(error(on_cpu, on_gpu), 1e-4)
    assert 0 < error(placed, on_gpu) <= bound
    assert 0 < error(placed, on_cpu) <= bound


@pytest.mark.parametrize("case", ["gpt2", "phi2", "bloom"])
def test_what_stands_before_all_layers_or_behind_them_is_one_sides_own(
    case: str, tmp_path: Path
) -> None:
    """Learned positions, a norm after the embedding, a head with a bias; ALiBi on both sides."""
    check_between_both(write_drawn(case, tmp_path), opened_placed)


@pytest.mark.parametrize(
    ("case", "cpu_layers"), [("gemma4-experts", 1), ("gemma4-experts", 2), ("minicpm3", 1)]
)
def test_layers_of_other_heads_and_latent_attention_may_be_on_either_side(
    case: str, cpu_layers: int, tmp_path: Path
) -> None:
    path = write_drawn(case, tmp_path)
    check_between_both(path, partial(opened_placed, cpu_layers=cpu_layers))


def test_models_whose_layers_need_more_than_hidden_states_are_not_cut(tmp_path: Path) -> None:
    with load_in_bfloat(write_drawn("gemma4", tmp_path)) as model:
        with pytest.raises(
            UnsupportedModelError, match="has embeddings for each layer, and cannot"
        ):
            last_layers(model, 2)
        spec = replace(model.spec, layer_inputs=None)
        model = replace(model, spec=spec)
        with pytest.raises(UnsupportedModelError, match="layer 3 those of layer 1, and cannot be"):
            last_layers(model, 2)
        # Layers 3 and 4 read what layer 1 keeps, layer 5 what layer 2 does.
        assert why_not_cut(spec, 1) is None
        parts = [layer.attention.kv_layer for layer in last_layers(model, 1).spec.layers]
    assert parts == [None, None, 0, 0, 1]


@pytest.mark.parametrize("cpu_layers", [1, 3])
def test_any_layer_may_be_the_first_on_the_gpu(cpu_layers: int) -> None:
    path = "dummy:tiny-gemma3"  # full layers and windowed ones, in groups of their own
    with opened_on_gpu(path) as executor:
        expected = logits(executor, rows_of(executor, PROMPT))
    with opened_placed(path, cpu_layers=cpu_layers) as placed:
        assert error(logits(placed, rows_of(placed, PROMPT)), expected) < 2e-2


def test_a_step_cut_into_pieces_gives_the_same_bits(executor: PlacedExecutor) -> None:
    prompt = tuple(5 + 3 * n % 40 for n in range(75))  # of which a piece takes 32 at most
    table, other = (0, 1, 2, 3, 4), (5, 6)
    whole = logits(executor, row(prompt, table))
    one_by_one = []
    for start in range(0, 75, 25):
        chunk = row(prompt[start : start + 25], table, start=start)
        one_by_one.append(logits(executor, chunk))
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)
    beside = row(prompt[:20], other, sequence_id=1)
    first, second = run(executor, beside, row(prompt, table))
    np.testing.assert_array_equal(first.logits, whole[:20])
    np.testing.assert_array_equal(second.logits, whole)


def test_few_pieces_are_under_way_at_once(
    executor: PlacedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU executor has marks in its stream for 32 steps that are not collected."""
    prompt = tuple(5 + 3 * n % 40 for n in range(75))
    expected = logits(executor, row(prompt, (0, 1, 2, 3, 4)))
    under_way, most = 0, 0
    with opened_placed(TINY, piece_tokens=2) as placed:
        on_gpu = placed._last.executor
        submit, collect = on_gpu.submit_hidden, on_gpu.collect

        def counted_submit(*given: Any) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            return submit(*given)

        def counted_collect(*given: Any) -> Any:
            nonlocal under_way
            under_way -= 1
            return collect(*given)

        monkeypatch.setattr(on_gpu, "submit_hidden", counted_submit)
        monkeypatch.setattr(on_gpu, "collect", counted_collect)
        found = logits(placed, row(prompt, (0, 1, 2, 3, 4)))
    np.testing.assert_array_equal(found, expected)
    assert 2 <= most <= 16


def test_scores_and_samples_of_a_row_in_pieces_are_joined(executor: PlacedExecutor) -> None:
    prompt = tuple(5 + 3 * n % 40 for n in range(75))
    table = (0, 1, 2, 3, 4)
    sampling = with_params(prompt_logprobs=1, logprobs=2)
    scored = row(prompt, table, want=Want.SAMPLE, sampling=sampling, prompt_targets=prompt[1:])
    [result] = run(executor, scored)
    assert [entry.token for entry in result.prompt_logprobs] == list(prompt[1:])
    every = logits(executor, row(prompt, table)).astype(np.float64)
    expected = every - np.log(np.exp(every).sum(axis=1, keepdims=True))
    found = [entry.logprob for entry in result.prompt_logprobs]
    assert found == pytest.approx(expected[np.arange(74), prompt[1:]].tolist(), abs=1e-9)
    assert result.token == int(every[-1].argmax()) and result.logprob is not None


def test_a_block_is_copied_in_both_parts(executor: PlacedExecutor) -> None:
    run(executor, row(PROMPT, (1,), want=Want.NOTHING))
    expected = logits(executor, row((7,), (1,), start=8))
    [copied] = run(executor, row((7,), (3,), start=8), copies=[BlockCopy(1, 3)])
    np.testing.assert_array_equal(copied.logits, expected)
    assert run(executor, copies=[BlockCopy(3, 5)]) == ()
    np.testing.assert_array_equal(logits(executor, row((7,), (5,), start=8)), expected)


def test_a_cancelled_step_ends_between_pieces(executor: PlacedExecutor) -> None:
    held = threading.Event()
    on_cpu = executor._first.executor
    run_layers = on_cpu.run_layers

    def once(plan: StepPlan, flag: CancelFlag) -> list[LayerOutput]:
        held.wait(60)
        return run_layers(plan, flag)

    on_cpu.run_layers = once  # type: ignore[method-assign]
    try:
        ticket = executor.submit(StepPlan(1, (row(PROMPT, TABLE),)))
        executor.cancel(ticket)
        held.set()
        with pytest.raises(StepCancelledError):
            executor.collect(ticket, 60)
    finally:
        on_cpu.run_layers = run_layers  # type: ignore[method-assign]
    assert logits(executor, row(PROMPT, TABLE)).shape == (8, 512)


def test_it_says_what_each_side_holds(executor: PlacedExecutor) -> None:
    memory = executor.memory_bytes
    with load_model(TINY) as model:
        whole = CpuExecutor(model, num_blocks=8, threads=Threads(1, may_spin=False))
        assert 0 < memory["weights"] < whole.memory_bytes["weights"]
        whole.close()
    assert memory["gpu_weights"] > 0
    # Blocks of both parts together hold what a block of the whole model holds.
    assert memory["kv"] + memory["gpu_kv"] == whole.memory_bytes["kv"]


def test_parts_of_different_blocks_are_refused() -> None:
    with (
        opened_placed(TINY) as one,
        opened_placed(TINY, num_blocks=4) as other,
        pytest.raises(ConfigError, match="need the blocks of the whole"),
    ):
        PlacedExecutor(one.capacity, one._first, other._last)


@pytest.mark.parametrize("path", [fixture_file("tiny/Q4_K_M.gguf"), "dummy:tiny-gemma3"])
def test_kernels_of_every_layer_are_warm_by_one_layer_of_each_kind(path: Path | str) -> None:
    """Formats of a mix differ from layer to layer, and so do windows and ropes."""

    def kinds(layers: Any) -> set[object]:
        found: set[object] = set()
        for layer in layers:
            parts = [part for linear in layer.weights.linears for part in linear.segments]
            formats = tuple(part.planes.format for part in parts)
            found.add((layer.attention.options.window, layer.attention.rope_shape, formats))
        return found

    with opened_on_gpu(path) as executor:
        decoder = executor._decoder
        assert kinds(decoder.layer_kinds) == kinds(decoder._layers)
        assert len(decoder.layer_kinds) == len(kinds(decoder._layers)) > 1


def test_both_sides_keep_keys_and_values_in_bytes() -> None:
    with opened_placed(TINY) as halves, opened_placed(TINY, kv_int8=True) as in_bytes:
        for kind in ("kv", "gpu_kv"):
            assert in_bytes.memory_bytes[kind] < 0.6 * halves.memory_bytes[kind]
        exact, found = (logits(x, rows_of(x, PROMPT)) for x in (halves, in_bytes))
        assert 0 < error(found, exact) < 1e-3
