"""The whole executor on a CPU, against the reference executor and against itself."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
import torch
from tests.executors.reference.plans import opened, row
from tests.fixture_files import fixture_file

from quire.core.errors import (
    ConfigError,
    ExecutorError,
    StepCancelledError,
    UnsupportedModelError,
)
from quire.core.plan import (
    BlockCopy,
    FollowingMasks,
    History,
    Sampling,
    SequencePlan,
    SequenceResult,
    StepPlan,
    Want,
)
from quire.core.sampling import SamplingParams
from quire.executors.cuda import CudaConfig, CudaExecutor
from quire.model.loading import load_model

PROMPT = (3, 1, 4, 1, 5)
TABLE = (2, 0)
CONFIG = CudaConfig(max_batch_size=4, max_step_tokens=32, num_blocks=8, device="cpu")


@pytest.fixture(scope="module")
def executor() -> Iterator[CudaExecutor]:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        found = CudaExecutor(model, CONFIG)
    found.warm_up()
    yield found
    found.close()


def run(
    executor: CudaExecutor,
    *rows: SequencePlan,
    step_id: int = 0,
    copies: Sequence[BlockCopy] = (),
) -> tuple[SequenceResult, ...]:
    ticket = executor.submit(StepPlan(step_id, rows, tuple(copies)))
    return executor.collect(ticket, timeout_s=60).sequences


def logits(executor: CudaExecutor, plan: SequencePlan) -> Any:
    [result] = run(executor, plan)
    assert result.fault is None
    return np.asarray(result.logits)


def sampled_with(**params: object) -> Sampling:
    return Sampling(SamplingParams.from_mapping({"temperature": 0.0, **params}), seed=5, index=0)


def test_its_logits_are_the_references(executor: CudaExecutor) -> None:
    found = logits(executor, row(PROMPT, TABLE))
    with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8) as reference:
        ticket = reference.submit(StepPlan(0, (row(PROMPT, TABLE),)))
        exact = np.asarray(reference.collect(ticket, 60).sequences[0].logits)
    assert ((found - exact) ** 2).sum() / (exact**2).sum() < 2e-4


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"])
def test_a_file_of_any_block_format_runs(name: str) -> None:
    path = fixture_file(f"tiny/{name}.gguf")
    config = CudaConfig(max_batch_size=1, max_step_tokens=8, num_blocks=8, device="cpu")
    with load_model(path) as model:
        found = CudaExecutor(model, config)
    found.warm_up()
    rows = logits(found, row(PROMPT, TABLE))
    found.close()
    with opened(path, num_blocks=8) as reference:
        ticket = reference.submit(StepPlan(0, (row(PROMPT, TABLE),)))
        exact = np.asarray(reference.collect(ticket, 60).sequences[0].logits)
    assert ((rows - exact) ** 2).sum() / (exact**2).sum() < 2e-4


def test_any_chunking_and_any_company_gives_the_same_bits(executor: CudaExecutor) -> None:
    whole = logits(executor, row(PROMPT, TABLE))
    run(executor, row(PROMPT[:2], (5, 6), want=Want.NOTHING))
    rest = row(PROMPT[2:], (5, 6), start=2, sequence_id=1)
    other = row((7, 7, 7), (3, 4), sequence_id=2)
    first, second = run(executor, other, rest)
    assert first.fault is None
    np.testing.assert_array_equal(second.logits, whole[2:])
    one_by_one = [
        logits(executor, row(PROMPT[at : at + 1], (5, 6), start=at)) for at in range(len(PROMPT))
    ]
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole)


def test_keys_and_values_computed_again_are_byte_equal(executor: CudaExecutor) -> None:
    run(executor, row(PROMPT, (1, 2), want=Want.NOTHING))
    run(executor, row(PROMPT[:3], (4, 6), want=Want.NOTHING))
    run(executor, row(PROMPT[3:], (4, 6), start=3, want=Want.NOTHING))
    blocks = executor._blocks
    for kept in (blocks.keys, blocks.values):
        assert kept[:, 1, :, :5].equal(kept[:, 4, :, :5])


def test_a_row_that_follows_a_step_takes_what_it_sampled(executor: CudaExecutor) -> None:
    first = StepPlan(1, (row(PROMPT, TABLE, want=Want.SAMPLE),))
    second = StepPlan(2, (row((), TABLE, start=5, want=Want.SAMPLE, follows=1),))
    tickets = [executor.submit(first), executor.submit(second)]  # before the first is collected
    [one], [two] = (executor.collect(ticket, 60).sequences for ticket in tickets)
    assert one.token is not None
    [expected] = run(executor, row((*PROMPT, one.token), TABLE, want=Want.SAMPLE), step_id=3)
    assert two.token == expected.token


@pytest.mark.parametrize(
    ("table", "start", "fault"),
    [
        (TABLE, 5, None),
        (TABLE, 32, "blocks do not hold"),
        (TABLE, -1, "are not within the context"),
        ((2, 8), 5, None),  # the block beyond the pool is not needed yet
        ((2, 8), 16, "leaves the 8 blocks"),
        ((8, 0), 5, "leaves the 8 blocks"),
    ],
)
def test_a_row_after_one_with_the_same_table_is_checked_as_far_as_it_differs(
    executor: CudaExecutor, table: tuple[int, ...], start: int, fault: str | None
) -> None:
    run(executor, row(PROMPT, TABLE, want=Want.SAMPLE), step_id=21)
    for step_id in (22, 23):  # the second after one that may have been found sound
        follows = row((), table, start=start, want=Want.SAMPLE, follows=21)
        [found] = run(executor, follows, step_id=step_id)
        assert (found.fault is None) == (fault is None), found.fault
        assert fault is None or fault in (found.fault or "")


def test_a_row_that_follows_a_step_is_submitted_before_its_mask_is_known(
    executor: CudaExecutor,
) -> None:
    """The mask depends on the token that is followed; the next step waits for it, no earlier."""
    table = (5,)
    masks = [FollowingMasks(), FollowingMasks()]
    first = StepPlan(1, (row(PROMPT, TABLE, want=Want.SAMPLE),))
    free = row(PROMPT, table, want=Want.SAMPLE, sequence_id=1)
    held = row((), TABLE, start=5, want=Want.SAMPLE, follows=1, allowed=masks[0])
    third = row((), TABLE, start=6, want=Want.SAMPLE, follows=2, allowed=masks[1])
    tickets = [executor.submit(first), executor.submit(StepPlan(2, (held, free)))]
    [one] = executor.collect(tickets[0], 60).sequences
    masks[0].give(0, bytes([0, 8]))
    masks[0].settle()
    tickets.append(executor.submit(StepPlan(3, (third,))))
    two, beside = executor.collect(tickets[1], 60).sequences
    masks[1].give(0, bytes([0, 16]))
    masks[1].settle()
    [three] = executor.collect(tickets[2], 60).sequences
    [alone] = run(executor, free, step_id=4)
    assert (two.token, three.token) == (11, 12)
    assert one.token is not None and beside.token == alone.token
    logits_after = logits(executor, row((*PROMPT, one.token, 11), TABLE))
    assert np.isfinite(logits_after).all()


def test_a_step_is_packed_before_the_masks_of_the_one_before_are_waited_for(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    pack = executor._runner.pack

    class Late:
        def result(self) -> bytes:
            done.append("mask")
            return bytes([0, 8])

        def row(self) -> None:
            return None

    def packed(*given: Any) -> Any:
        done.append("pack")
        return pack(*given)

    monkeypatch.setattr(executor._runner, "pack", packed)
    held = row(PROMPT, TABLE, want=Want.SAMPLE, allowed=Late())
    other = row(PROMPT, (5,), want=Want.SAMPLE, sequence_id=1)
    tickets = [executor.submit(StepPlan(1, (held,))), executor.submit(StepPlan(2, (other,)))]
    assert done == ["pack", "pack", "mask"]
    [found], [beside] = (executor.collect(ticket, 60).sequences for ticket in tickets)
    assert found.token == 11 and beside.fault is None


def test_a_step_whose_masks_are_given_up_ends(executor: CudaExecutor) -> None:
    masks = FollowingMasks()
    held = row(PROMPT, TABLE, want=Want.SAMPLE, allowed=masks)
    ticket = executor.submit(StepPlan(1, (held,)))
    masks.settle()
    [nothing] = executor.collect(ticket, 60).sequences
    assert nothing.fault == "the mask allows no token"


def test_penalties_see_the_sample_that_is_followed(executor: CudaExecutor) -> None:
    [first] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE), step_id=11)
    assert first.token is not None
    how = sampled_with(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    follower = row((), TABLE, start=5, want=Want.SAMPLE, follows=11, history=History(PROMPT, ()))
    told = row(
        (first.token,), TABLE, start=5, want=Want.SAMPLE, history=History(PROMPT, (first.token,))
    )
    found = [run(executor, plan._replace(sampling=how), step_id=12) for plan in (follower, told)]
    assert found[0][0].token == found[1][0].token


def test_each_want_is_answered_from_the_same_state(executor: CudaExecutor) -> None:
    every = logits(executor, row(PROMPT, TABLE))
    assert every.shape == (5, 512)
    [sampled] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE))
    assert sampled == (0, int(every[-1].argmax()), None, (), None, None, None)
    [nothing] = run(executor, row(PROMPT, TABLE, want=Want.NOTHING))
    assert nothing == (0, None, None, (), None, None, None)
    [pooled] = run(executor, row(PROMPT, TABLE, want=Want.POOLED))
    with opened(fixture_file("tiny/Q4_0.gguf"), num_blocks=8) as reference:
        head = reference._decoder._head.weight
    np.testing.assert_allclose(head @ pooled.pooled, every[-1], rtol=0.01, atol=0.02)


def test_prompt_scores_and_samples_come_with_their_likeliest(executor: CudaExecutor) -> None:
    every = logits(executor, row(PROMPT, TABLE)).astype(np.float64)
    logprobs = every - np.log(np.exp(every).sum(axis=1, keepdims=True))
    plan = row(
        PROMPT,
        TABLE,
        want=Want.SAMPLE,
        sampling=sampled_with(logprobs=2, prompt_logprobs=3),
        prompt_targets=PROMPT[1:],
    )
    [result] = run(executor, plan)
    assert [entry.token for entry in result.prompt_logprobs] == list(PROMPT[1:])
    for at, entry in enumerate(result.prompt_logprobs):
        assert entry.logprob == pytest.approx(logprobs[at, entry.token], abs=1e-9)
        assert entry.rank == 1 + int((logprobs[at] > logprobs[at, entry.token]).sum())
        assert [t for t, _ in entry.top] == list(np.argsort(-logprobs[at], kind="stable")[:3])
    assert result.logprob is not None and result.logprob.rank == 1
    assert len(result.logprob.top) == 2


def test_blocks_are_copied_before_rows(executor: CudaExecutor) -> None:
    run(executor, row(PROMPT, TABLE, want=Want.NOTHING))
    whole = logits(executor, row(PROMPT, TABLE))
    copied = row(PROMPT[-1:], (7,), start=4)
    [result] = run(executor, copied, copies=[BlockCopy(2, 7)])
    np.testing.assert_array_equal(result.logits, whole[-1:])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (row((1, 512), TABLE), "token 512 is outside the vocabulary of 512"),
        (row((1,), (8,)), "leaves the 8 blocks"),
        (row((1,), (), start=0), "0 blocks do not hold 1 positions"),
        (row((), TABLE), "not within the context"),
        (row((), TABLE, follows=99, want=Want.SAMPLE), "step 99 sampled no token"),
        (row((1,), TABLE, want=Want.SAMPLE)._replace(sampling=None), "no sampling parameters"),
    ],
)
def test_a_bad_row_fails_alone(executor: CudaExecutor, plan: SequencePlan, message: str) -> None:
    sound = row(PROMPT[:1], (5,), sequence_id=1)
    bad, good = run(executor, plan, sound)
    assert bad.fault is not None and message in bad.fault
    assert good.fault is None


def test_a_mask_that_allows_nothing_is_a_fault_of_its_row(executor: CudaExecutor) -> None:
    masked = row(PROMPT, TABLE, want=Want.SAMPLE, allowed=bytes(64))
    only = row(PROMPT, (5,), want=Want.SAMPLE, allowed=bytes([0, 8]), sequence_id=1)
    nothing, eleven = run(executor, masked, only)
    assert nothing.fault == "the mask allows no token"
    assert eleven.token == 11


def test_numbers_that_are_not_finite_fail_their_row(executor: CudaExecutor) -> None:
    norm = executor._weights.output_norm.weight
    assert norm is not None
    kept = norm.clone()
    try:
        norm.fill_(float("nan"))
        [result] = run(executor, row(PROMPT, TABLE, want=Want.SAMPLE), step_id=20)
        assert result.fault == "the logits are not finite"
        follower = row((), TABLE, start=5, want=Want.SAMPLE, follows=20)
        [after] = run(executor, follower, step_id=21)
        assert after.fault == "step 20 sampled no token for this sequence"
    finally:
        norm.copy_(kept)


def test_it_says_that_it_is_not_warm() -> None:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        cold = CudaExecutor(model, CONFIG)
    assert not cold.is_warm
    with pytest.raises(ExecutorError, match=r"not warm: call warm_up\(\)"):
        cold.submit(StepPlan(0, (row(PROMPT, TABLE),)))


def test_a_cancelled_step_says_so(executor: CudaExecutor) -> None:
    ticket = executor.submit(StepPlan(0, (row(PROMPT, TABLE),)))
    executor.cancel(ticket)
    with pytest.raises(StepCancelledError, match="step 0"):
        executor.collect(ticket)


def test_it_says_what_it_holds_and_runs(executor: CudaExecutor) -> None:
    capacity = executor.capacity
    assert (capacity.num_blocks, capacity.block_size, capacity.max_context) == (8, 16, 128)
    assert executor.memory_bytes["kv"] == 2 * 2 * 8 * 16 * 2 * 64 * 2
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        matrices = sum(t.nbytes for t in model.tensors.values() if len(t.shape) == 2)
    assert executor.memory_bytes["weights"] <= 1.05 * matrices
    assert "Q4_0 planes" in executor.kernels
    assert executor.fallback is None


def test_other_formats_are_refused_by_name() -> None:
    with (
        load_model(fixture_file("tiny/F32.gguf")) as model,
        pytest.raises(UnsupportedModelError, match="format F32"),
    ):
        CudaExecutor(model, CONFIG)


def test_other_kinds_of_model_are_refused_by_name() -> None:
    with (
        load_model(fixture_file("tiny-bitnet/F32.gguf")) as model,
        pytest.raises(UnsupportedModelError, match="norms before its output projections"),
    ):
        CudaExecutor(model, CONFIG)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_batch_size must be at least 1, got 0"):
        CudaConfig(max_batch_size=0)


def test_without_invariance_large_steps_are_summed_in_one_part(executor: CudaExecutor) -> None:
    decoder = executor._decoder
    linear = replace(executor._weights.layers[0].dense.down, num_splits=4)
    assert decoder._num_splits(linear, 4096) == 4
    free = replace(decoder._limits, invariant=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_limits", free)
        assert decoder._num_splits(linear, 4096) == 1
        assert decoder._num_splits(linear, 64) == 4


def test_splits_that_a_gemm_adds_are_read_as_one(executor: CudaExecutor, monkeypatch: Any) -> None:
    decoder = executor._decoder
    linear = replace(executor._weights.layers[0].dense.down, num_splits=4)
    added = []
    monkeypatch.setattr(decoder._gemm, "adds_splits", lambda _linear, _count: True)
    monkeypatch.setattr(decoder._gemm, "multiply_added", lambda *given: added.append(given))
    assert decoder._multiply(linear, decoder.gated, 2).num_splits == 1
    [(_, _, out, _)] = added
    assert out.shape == (decoder._limits.num_tokens, linear.num_rows)
    assert out.data_ptr() == decoder._sums.data_ptr()


def test_rows_sampled_in_groups_are_the_same(executor: CudaExecutor, monkeypatch: Any) -> None:
    def plans() -> list[SequencePlan]:
        return [
            SequencePlan(
                place,
                0,
                PROMPT[: place + 1],
                None,
                (place,),
                Want.SAMPLE,
                sampled_with(temperature=0.9, logprobs=place, top_p=0.9, typical_p=0.9),
                0,
            )
            for place in range(4)
        ]

    together = run(executor, *plans())
    for count in (1, 3):
        monkeypatch.setattr(executor._sampler, "_chained_at_once", count)
        assert run(executor, *plans()) == together
    monkeypatch.undo()
    for plan, expected in zip(plans(), together, strict=True):
        assert run(executor, plan) == (expected,)


def test_prompt_scores_and_pooled_states_do_not_depend_on_the_batch(
    executor: CudaExecutor,
) -> None:
    scored = SequencePlan(
        0, 0, PROMPT, None, (0,), Want.SAMPLE, sampled_with(prompt_logprobs=3, logprobs=2), 0
    )
    scored = scored._replace(prompt_targets=PROMPT[1:])
    pooled = row(PROMPT, (1,))._replace(sequence_id=1, want=Want.POOLED)
    other = row((7, 8, 9), (2,))._replace(sequence_id=2, want=Want.NOTHING)
    alone, vector = run(executor, scored)[0], run(executor, pooled)[0]
    company = run(executor, other, pooled, scored)
    assert company[2] == alone and len(alone.prompt_logprobs) == len(PROMPT) - 1
    assert np.asarray(company[1].pooled).tobytes() == np.asarray(vector.pooled).tobytes()


def test_a_copy_of_no_block_is_refused(executor: CudaExecutor) -> None:
    for copy in (BlockCopy(0, 8), BlockCopy(-1, 0)):
        with pytest.raises(ExecutorError, match="copies block"):
            run(executor, row(PROMPT, TABLE), copies=[copy])


def test_memory_for_sampling_is_taken_again_after_the_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        found = CudaExecutor(model, CONFIG)
    done: list[str] = []
    monkeypatch.setattr(found, "_is_gpu", True)
    monkeypatch.setattr(found._runner, "warm_up", lambda launch_others: done.append("graphs"))
    monkeypatch.setattr(found._sampler, "capture", lambda *given: done.append("sampler's graphs"))
    monkeypatch.setattr(found._sampler, "rehearse", lambda: done.append("rehearsal"))
    found.warm_up()
    assert done == ["graphs", "sampler's graphs", "rehearsal"]


def test_too_little_memory_for_sampling_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_too_much() -> None:
        raise torch.OutOfMemoryError("no room")

    with load_model(fixture_file("tiny/Q4_0.gguf")) as model:
        found = CudaExecutor(model, CONFIG)
    monkeypatch.setattr(found, "_is_gpu", True)
    monkeypatch.setattr(found._runner, "warm_up", lambda launch_others: None)
    monkeypatch.setattr(found._sampler, "capture", lambda *given: None)
    monkeypatch.setattr(found._sampler, "rehearse", take_too_much)
    monkeypatch.setattr("quire.executors.cuda.memory.free_bytes", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="lower max_batch_size"):
        found.warm_up()


# ---- rows that are checked and packed together


def decodes(step: int) -> tuple[SequencePlan, ...]:
    """Rows as a batch has them in its step, each after a token of the step before; a prompt joins,
    and a sequence gets its second block."""
    scored = sampled_with(temperature=1.0, logprobs=2)
    follows = 100 + step - 1 if step else None
    rows = [
        row(
            () if step else (7,),
            (1,),
            start=step,
            want=Want.SAMPLE,
            follows=follows,
            sequence_id=1,
        ),
        row(
            () if step else range(15),
            _TABLES[step > 1],
            start=14 + step if step else 0,
            want=Want.SAMPLE,
            follows=follows,
            sequence_id=2,
            sampling=scored,
            completion_position=step,
        ),
    ]
    if step == 2:
        rows.append(row(PROMPT, (6,), want=Want.SAMPLE, sequence_id=3))
        rows.append(row(PROMPT, (7,), want=Want.NOTHING, sequence_id=4))
    return tuple(rows)


_TABLES = ((3,), (3, 4))


def run_decodes(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any]]:
    """What is sent, and the results."""
    sent: list[Any] = []
    pack = executor._runner.pack

    def packed(*given: Any) -> Any:
        step = pack(*given)
        sent.append((step.shape, step.integers.tolist(), step.num_tokens, step.num_head_rows))
        return step

    executor._samples._next = 0
    with monkeypatch.context() as patched:
        patched.setattr(executor._runner, "pack", packed)
        results = [run(executor, *decodes(step), step_id=100 + step) for step in range(4)]
    return sent, results


def test_rows_checked_together_are_packed_as_rows_checked_one_by_one(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one: list[int] = []
    pack_each = executor._pack_each

    def noted(ticket: Any) -> Any:
        one_by_one.append(ticket.plan.step_id)
        return pack_each(ticket)

    monkeypatch.setattr(executor, "_pack_each", noted)
    together = run_decodes(executor, monkeypatch)
    assert not one_by_one
    monkeypatch.setattr(executor, "_sound_rows", lambda rows: None)
    assert run_decodes(executor, monkeypatch) == together
    assert one_by_one == [100, 101, 102, 103]
    assert all(results[1].logprob is not None for results in together[1])


@pytest.mark.parametrize(
    "unsound",
    [
        {"tokens": (512,)},
        {"tokens": (-1,)},
        {"start": -1},
        {"start": 16},
        {"start": 1 << 20},
        {"start": (1 << 63) - 1},
        {"start": 1 << 70},
        {"tokens": (1 << 70,)},
        {"tokens": ()},
        {"block_table": (8,)},
        {"block_table": (-1,)},
        {"block_table": ()},
        {"follows": 77},
        {"sampling": None},
        {"other_tables": ((1,),)},
    ],
)
def test_an_unsound_row_among_others_fails_alone(
    executor: CudaExecutor, unsound: dict[str, Any]
) -> None:
    sound = row((7,), (1,), want=Want.SAMPLE, sequence_id=1)
    faulty = row((7,), (2,), want=Want.SAMPLE, sequence_id=2)._replace(**unsound)
    [alone] = run(executor, sound)
    beside, found = run(executor, sound, faulty)
    assert beside == alone and alone.fault is None
    assert found.fault is not None and found.token is None
