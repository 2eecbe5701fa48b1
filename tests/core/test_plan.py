"""Plans and results: what a row means, and that both survive the wire."""

from typing import Any

import msgspec
import pytest

from quire.core.plan import (
    BlockCopy,
    History,
    Sampling,
    SequencePlan,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprob,
    Want,
    allows,
)
from quire.core.sampling import Constraint, SamplingParams

PARAMS = SamplingParams(
    max_tokens=5,
    temperature=0.3,
    frequency_penalty=0.5,
    logit_bias={7: -1.5},
    stop=("end",),
    stop_token_ids=(4,),
    structured=Constraint("regex", "a+"),
)
FULL_ROW = SequencePlan(
    sequence_id=3,
    start=16,
    tokens=(5, 6),
    follows=11,
    block_table=(9, 2),
    want=Want.SAMPLE,
    sampling=Sampling(PARAMS, seed=2**64 - 1, index=1, end_token_ids=(0, 4)),
    completion_position=2,
    history=History((1, 2), (3,)),
    allowed=b"\x00\xff\x10",
    prompt_targets=(8, 9),
)
BARE_ROW = SequencePlan(4, 0, (1,), None, (3,), Want.NOTHING)
PLAN = StepPlan(12, (FULL_ROW, BARE_ROW), (BlockCopy(1, 2), BlockCopy(1, 7)))
RESULT = StepResult(
    step_id=12,
    started_at=1.5,
    elapsed_s=0.25,
    sequences=(
        SequenceResult(
            3,
            token=8,
            logprob=TokenLogprob(8, -0.5, 1, ((8, -0.5), (2, -1.25))),
            prompt_logprobs=(TokenLogprob(8, -2.0, 4),),
        ),
        SequenceResult(4),
        SequenceResult(5, fault="the logits are not finite"),
    ),
    padding_tokens=3,
)


@pytest.mark.parametrize("value", [PLAN, RESULT, StepPlan(1, ())])
def test_plans_and_results_survive_msgpack(value: Any) -> None:
    wire = msgspec.msgpack.encode(value)
    back = msgspec.msgpack.Decoder(type(value)).decode(wire)
    assert back == value
    assert type(back) is type(value)


def test_the_parts_of_a_decoded_plan_have_their_types() -> None:
    back = msgspec.msgpack.Decoder(StepPlan).decode(msgspec.msgpack.encode(PLAN))
    row = back.sequences[0]
    assert isinstance(row, SequencePlan)
    assert row.want is Want.SAMPLE
    assert isinstance(row.history, History)
    assert isinstance(row.allowed, bytes)
    assert isinstance(row.sampling, Sampling)
    assert row.sampling.params == PARAMS
    assert isinstance(back.copies[0], BlockCopy)


def test_a_row_counts_the_sample_it_waits_for() -> None:
    assert FULL_ROW.num_new_tokens == 3
    assert FULL_ROW.end == 19
    assert BARE_ROW.num_new_tokens == BARE_ROW.end == 1


def test_a_row_is_resolved_by_the_sample_it_follows() -> None:
    row = FULL_ROW.resolved(99)
    assert row.tokens == (5, 6, 99)
    assert row.follows is None
    assert row.history == History((1, 2), (3, 99))
    assert row.end == FULL_ROW.end
    assert FULL_ROW._replace(history=None).resolved(99).history is None


def test_a_mask_allows_the_tokens_whose_bits_are_set_and_none_beyond_it() -> None:
    mask = bytes([0b00000101, 0b10000000])
    assert [token for token in range(40) if allows(mask, token)] == [0, 2, 15]
