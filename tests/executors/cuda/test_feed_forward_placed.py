"""Attention on the CPU, feed-forwards on the GPU's kernels, which Triton interprets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
from tests.drawn_families import write_drawn
from tests.executors.cuda.test_placed import (
    BITNET,
    PROMPT,
    TABLE,
    TINY,
    check_between_both,
    opened_model,
)
from tests.executors.reference.plans import logits, row, run
from tests.executors.test_contract import (  # noqa: F401
    test_a_grammar_mask_decides_among_the_allowed_tokens,
    test_a_row_out_of_bounds_faults_alone,
    test_a_row_that_follows_a_step_takes_what_it_sampled,
    test_following_a_step_without_a_sample_faults_that_row_alone,
    test_it_says_what_it_can_hold,
    test_prompt_targets_are_scored_at_each_position,
    test_sampling_is_drawn_from_seed_and_position,
)

from quire.core.errors import StepCancelledError
from quire.core.plan import BlockCopy, StepPlan, Want
from quire.executors.base import Executor
from quire.executors.cpu.lowering import Threads
from quire.executors.placed import FeedForwardExecutor, load_feed_forward
from quire.model.loading import load_model
from quire.model.parts import feed_forwards, without_feed_forwards


@contextmanager
def opened(
    path: Path | str, num_blocks: int = 16, *, kv_int8: bool = False, piece_tokens: int = 32
) -> Iterator[FeedForwardExecutor]:
    with opened_model(path) as model:
        executor = load_feed_forward(
            model,
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
    with opened(TINY, num_blocks=8) as found:
        yield found


@pytest.mark.parametrize("path", [TINY, "dummy:tiny-gemma3", "dummy:tiny-moe:Q4_K_M", BITNET])
def test_its_logits_lie_between_those_of_both_devices(path: Path | str) -> None:
    """No farther from either than these are from each other, or than any two orders of sums."""
    check_between_both(path, opened)


@pytest.mark.parametrize("case", ["gpt2", "apertus", "bloom", "gemma4-experts", "minicpm3"])
def test_what_stands_before_all_layers_is_the_cpus(case: str, tmp_path: Path) -> None:
    """Learned positions, a norm after the embedding. xielu's numbers are the GPU's, as are experts
    beside a dense feed-forward and the scale of what leaves a layer; latent attention is not."""
    check_between_both(write_drawn(case, tmp_path), opened)


def test_a_step_cut_into_pieces_gives_the_same_bits(executor: FeedForwardExecutor) -> None:
    prompt = tuple(5 + 3 * n % 40 for n in range(75))
    table, other = (0, 1, 2, 3, 4), (5, 6)
    whole = logits(executor, row(prompt, table))  # in three pieces of 32 at most
    one_by_one = []
    for start in range(0, 75, 25):
        chunk = row(prompt[start : start + 25], table, start=start)
        one_by_one.append(logits(executor, chunk))
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)
    beside = row(prompt[:20], other, sequence_id=1)
    first, second = run(executor, beside, row(prompt, table))
    np.testing.assert_array_equal(first.logits, whole[:20])
    np.testing.assert_array_equal(second.logits, whole)


def test_the_cpu_attends_with_one_piece_while_the_gpu_has_another(
    executor: FeedForwardExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any two pieces each is submitted before the other is waited for; more than four pieces
    go in groups."""
    seen: list[tuple[str, int]] = []
    prompt = tuple(5 + 3 * n % 40 for n in range(75))
    expected = logits(executor, row(prompt, (0, 1, 2, 3, 4)))
    with opened(TINY, piece_tokens=12) as placed:
        on_gpu = placed._last.executor
        feed, wait = on_gpu.run_feed_forward, type(placed._exchanges[0]).wait
        index = {id(exchange): at for at, exchange in enumerate(placed._exchanges)}

        def seen_feed(layer: int, exchange: Any, count: int) -> None:
            seen.append(("feed", index[id(exchange)]))
            feed(layer, exchange, count)

        def seen_wait(exchange: Any) -> None:
            seen.append(("wait", index[id(exchange)]))
            wait(exchange)

        monkeypatch.setattr(on_gpu, "run_feed_forward", seen_feed)
        monkeypatch.setattr(type(placed._exchanges[0]), "wait", seen_wait)
        found = logits(placed, row(prompt, (0, 1, 2, 3, 4)))
    np.testing.assert_array_equal(found, expected)
    assert max(at for _, at in seen) == 3
    first = seen[: 2 * 4]
    assert first == [(what, at) for at in range(4) for what in ("wait", "feed")]


def test_a_block_is_copied_once(executor: FeedForwardExecutor) -> None:
    run(executor, row(PROMPT, (1,), want=Want.NOTHING))
    expected = logits(executor, row((7,), (1,), start=8))
    [copied] = run(executor, row((7,), (3,), start=8), copies=[BlockCopy(1, 3)])
    np.testing.assert_array_equal(copied.logits, expected)
    assert run(executor, copies=[BlockCopy(3, 5)]) == ()
    np.testing.assert_array_equal(logits(executor, row((7,), (5,), start=8)), expected)


def test_a_cancelled_step_ends_between_layers(
    executor: FeedForwardExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_layer = executor._first.executor.run_layer
    layers = []

    def cancelled_at_second(rows: Any, layer: int, hidden: Any, flag: Any) -> None:
        layers.append(layer)
        if layer == 1:
            flag.set()
        run_layer(rows, layer, hidden, flag)

    with monkeypatch.context() as patched:
        patched.setattr(executor._first.executor, "run_layer", cancelled_at_second)
        with pytest.raises(StepCancelledError):
            executor.collect(executor.submit(StepPlan(1, (row(PROMPT, TABLE),))), 60)
    assert layers == [0, 1]
    assert logits(executor, row(PROMPT, TABLE)).shape == (8, 512)


def test_each_side_holds_its_half_of_the_weights_and_the_cpu_the_cache() -> None:
    with opened(TINY) as halves, opened(TINY, kv_int8=True) as in_bytes:
        memory = halves.memory_bytes
        assert memory["gpu_kv"] == 0 < memory["kv"]
        assert in_bytes.memory_bytes["kv"] < 0.6 * memory["kv"]
    with load_model(TINY) as model:
        parts = (without_feed_forwards(model), feed_forwards(model))
        names = [set(part.tensors) for part in parts]
        assert names[0] | names[1] == set(model.tensors)
        assert not {name for name in names[0] & names[1] if name.startswith("blk.")}
