"""The device's sampler gives the reference sampler's tokens, row by row and in any company."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import tests.executors.cuda.interpreting  # noqa: F401
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executors.cuda.samplers_on_gpu import plan_of
from tests.executors.sampler_cases import make_case, without_chain

from quire.core.errors import RowFaultError
from quire.core.plan import (
    FollowingMasks,
    History,
    MaskRow,
    Sampling,
    SequencePlan,
    TokenLogprob,
    Want,
)
from quire.core.sampling import MAX_LOGPROBS, SamplingParams, draw_bits
from quire.executors.cuda import chain, sampling
from quire.executors.cuda.chain import SampleRow
from quire.executors.cuda.kernels import sampling as kernels
from quire.executors.cuda.kernels import scoring
from quire.executors.cuda.kernels.layers import FINITE, NOT_FINITE, NOTHING_ALLOWED, TOO_LARGE
from quire.executors.cuda.sampling import (
    Sampled,
    Sampler,
    SampleRequest,
    Scores,
    Tile,
    wants_argmax,
)
from quire.executors.elementary import exp as reference_exp
from quire.executors.sampler import sample, score

VOCABULARY = 50
MAX_ROWS = 6
PENDING = (7, 9, 11)  # tokens among the samples
TILE = Tile(16, 4, 8)  # several chunks, and lists that are too short

tokens = st.integers(0, VOCABULARY - 1)
some_tokens = st.lists(tokens, max_size=6).map(tuple)


@st.composite
def rows(draw: Any) -> SampleRow:
    params = SamplingParams(
        max_tokens=8,
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 7.0])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.7])),
        min_tokens=draw(st.integers(0, 3)),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, 2.5]), max_size=3)),
    )
    allowed = draw(st.none() | st.binary(min_size=1, max_size=9))
    history = None
    if params.needs_history:
        history = History(draw(some_tokens), draw(some_tokens))
    how = Sampling(params, draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3)), (1, 2))
    pending = draw(st.none() | st.integers(0, 2)) if history is not None else None
    return SampleRow(how, draw(st.integers(0, 5)), history, pending, allowed)


def _moved(row: SampleRow) -> SampleRow:
    """Pending tokens stand behind the samples of the rows."""
    assert row.pending is not None
    return row._replace(pending=MAX_ROWS + row.pending)


class Device:
    """A sampler and what it works on."""

    def __init__(self, width: int = VOCABULARY, tile: Tile | None = TILE) -> None:
        self.logits = torch.zeros((MAX_ROWS, width))
        self.samples = torch.zeros(MAX_ROWS + len(PENDING), dtype=torch.int32)
        self.sampled = torch.zeros((MAX_ROWS, 2), dtype=torch.int32)
        self.sampler = Sampler(self.logits, self.samples, self.sampled, tile)

    def sample(self, logits: Any, rows: list[SampleRow]) -> list[tuple[int, int]]:
        """Tokens and statuses."""
        self.samples[MAX_ROWS:] = torch.tensor(PENDING)
        self.logits[: len(rows)] = torch.as_tensor(logits)
        requests = [
            SampleRequest(at, at, row if row.pending is None else _moved(row))
            for at, row in enumerate(rows)
        ]
        assert not self.sampler.sample(requests, len(rows))
        found = [(int(token), int(status)) for token, status in self.sampled[: len(rows)]]
        assert self.samples[: len(rows)].tolist() == [token for token, _ in found]
        return found

    def scores(self, logits: Any, tokens: list[int], num_top: int) -> Scores:
        return self.sampler.score(torch.as_tensor(logits).contiguous(), tokens, num_top)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device()


def expected(logits: Any, row: SampleRow) -> int | None:
    history = row.history
    if history is not None and row.pending is not None:
        history = history._replace(completion=(*history.completion, PENDING[row.pending]))
    try:
        return sample(logits, row.sampling, row.completion_position, history, row.allowed).token
    except RowFaultError:
        return None


def check(device: Device, logits: Any, rows: list[SampleRow]) -> None:
    for at, (token, status) in enumerate(device.sample(logits, rows)):
        wanted = expected(logits[at], rows[at])
        if wanted is None:
            assert status in (NOTHING_ALLOWED, TOO_LARGE), rows[at]
        else:
            assert (status, token) == (FINITE, wanted), rows[at]


@settings(max_examples=10, deadline=None)
@given(asked=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_tokens_are_the_reference_samplers(asked: list[SampleRow], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(asked), VOCABULARY)).astype(np.float32)
    logits[:, ::7] = np.round(logits[:, ::7])  # so that some are equal
    check(Device(), logits, asked)


@pytest.mark.parametrize("tile", [TILE, Tile(64, 8, 64)], ids=["lists too short", "one chunk"])
@pytest.mark.parametrize("is_chained", [False, True])
def test_rows_with_random_samplers_are_the_reference_samplers(tile: Tile, is_chained: bool) -> None:
    """Every order has rows of its own in one call, beside plain ones."""
    device = Device(tile=tile)
    for start in range(0, 60, MAX_ROWS):
        numbers = range(start, start + MAX_ROWS)
        cases = [make_case(number, VOCABULARY, bans=False) for number in numbers]
        if not is_chained:
            cases = [without_chain(case) for case in cases]
        asked = [SampleRow(c.sampling, c.position, c.history, None, c.allowed) for c in cases]
        check(device, np.stack([case.logits for case in cases]), asked)


def test_kinds_of_rows() -> None:
    def kind(**params: Any) -> int:
        return sampling._kind(SamplingParams(**params))

    assert kind() == kind(min_p=0.1) == kernels.ALL
    assert kind(temperature=0.0, top_k=3) == kernels.GREEDY
    assert kind(top_k=3, top_p=0.5) == kernels.LISTED
    assert kind(top_p=0.9, min_p=0.1) == kernels.WEIGHED
    assert kind(typical_p=0.9) == kind(samplers="tk", top_k=3) == kernels.SKIP


@pytest.mark.parametrize("repeat_last_n", [None, -1, 1, 2, 9])
def test_a_pending_token_is_the_last_that_penalties_look_at(
    device: Device, repeat_last_n: int | None
) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=9.0, presence_penalty=1.0, repeat_last_n=repeat_last_n
    )
    for completion in [(), (3,), (7, 3)]:
        row = SampleRow(Sampling(params, 1, 0), 0, History((1, 2, 3), completion), 0)
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, [1, 2, 3, 7]] = [5.0, 6.0, 7.0, 8.0]
        check(device, logits, [row])


@pytest.mark.parametrize("repeat_last_n", [None, -1, 1, 3])
@pytest.mark.parametrize("has_pending", [False, True])
def test_counts_follow_a_history_step_by_step(repeat_last_n: int | None, has_pending: bool) -> None:
    """Several sequences, more of them than rows of counts, some of whose steps are left out."""
    device = Device()
    generator = np.random.default_rng(5)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repeat_last_n=repeat_last_n,
    )
    hows = [Sampling(params, seed, 0) for seed in range(MAX_ROWS + 3)]
    prompts = [tuple(generator.integers(0, 9, 6).tolist()) for _ in hows]
    tokens = [generator.integers(0, 9, 40).tolist() for _ in hows]
    known = [0] * len(hows)
    for _ in range(10):
        chosen = generator.permutation(len(hows))[:MAX_ROWS].tolist()
        rows = []
        for one in chosen:
            history = History(prompts[one], tuple(tokens[one][: known[one]]))
            rows.append(SampleRow(hows[one], 0, history, 1 if has_pending else None))
            known[one] += int(generator.choice([0, 1, 1, 1, 2]))
        logits = generator.normal(0, 1, (MAX_ROWS, VOCABULARY)).astype(np.float32)
        logits[:, :10] += 2.0
        check(device, logits, rows)


def test_counts_are_made_anew_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    how = Sampling(SamplingParams(temperature=0.0, frequency_penalty=2.0), 1, 0)
    logits = np.zeros((1, VOCABULARY), np.float32)
    logits[0, [4, 5]] = [3.0, 2.0]
    prompt = (1, 2)
    check(device, logits, [SampleRow(how, 0, History(prompt, ()))])
    with monkeypatch.context() as patch:
        patch.setattr(device.sampler, "_run", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            device.sample(logits, [SampleRow(how, 1, History(prompt, (4,)))])
    check(device, logits, [SampleRow(how, 1, History(prompt, (4,)))])


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_only_tokens_about_the_cut_of_top_p_are_listed(spread: float) -> None:
    """However flat a row is; and the token is the reference's."""
    width = 2000
    device = Device(width, Tile(512, 8, 256))
    logits = np.random.default_rng(6).normal(0, spread, (3, width)).astype(np.float32)
    rows = [
        SampleRow(Sampling(SamplingParams(top_p=top_p), seed, 0), 0)
        for seed, top_p in enumerate((0.95, 0.5, 0.999))
    ]
    check(device, logits, rows)
    assert max(device.sampler._work.num_listed[:3].tolist()) <= width // 10


class Replayed:
    """Stands for a graph of all rows."""

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def replay(self) -> None:
        self.launch(MAX_ROWS)


def test_a_graph_of_more_rows_than_the_step_leaves_the_others_alone() -> None:
    device = Device()
    sampler = device.sampler
    launches = (sampler._launch, sampler._launch_with_rounds, sampler._launch_scores)
    sampler._graphs[MAX_ROWS] = tuple(map(Replayed, launches))  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=1)
    hows = [Sampling(params, seed, 0) for seed in range(MAX_ROWS)]
    logits = np.random.default_rng(2).normal(0, 1, (MAX_ROWS, VOCABULARY)).astype(np.float32)
    logits[:, 7] = 4.0
    check(device, logits, [SampleRow(how, 0, History((1,), ())) for how in hows])
    check(device, logits, [SampleRow(how, 1, History((1,), (7,))) for how in hows])
    kept = device.samples[1:MAX_ROWS].clone()
    device.samples[1:MAX_ROWS] = -1
    check(device, logits[:1], [SampleRow(hows[0], 2, History((1,), (7, 7)))])
    assert device.samples[1:MAX_ROWS].tolist() == [-1] * (MAX_ROWS - 1)
    device.samples[1:MAX_ROWS] = kept
    check(device, logits, [SampleRow(how, 2, History((1,), (7, 7))) for how in hows])


def test_more_edits_than_a_step_holds_are_made_all_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_EDITS", 3)
    params = SamplingParams(temperature=0.0, logit_bias={3: 5.0, 9: 4.0})
    rows = [SampleRow(Sampling(params, 1, 0), 0) for _ in range(3)]
    check(device, np.zeros((3, VOCABULARY), np.float32), rows)


@pytest.mark.parametrize(
    "row",
    [
        SampleRow(Sampling(SamplingParams(logit_bias={VOCABULARY: 1.0}), 1, 0), 0),
        SampleRow(Sampling(SamplingParams(min_tokens=1, max_tokens=2), 1, 0, (VOCABULARY,)), 0),
        *(
            SampleRow(
                Sampling(SamplingParams.from_mapping(params), 1, 0), 0, History((VOCABULARY,), ())
            )
            for params in (
                {"repetition_penalty": 2.0},
                {"dry_multiplier": 1.0},
                {"repetition_penalty": 2.0, "typical_p": 0.5},
            )
        ),
    ],
)
def test_tokens_beyond_the_vocabulary_are_a_fault_of_their_row(
    device: Device, row: SampleRow
) -> None:
    sound = SampleRow(Sampling(SamplingParams(temperature=0.0, logit_bias={5: 9.0}), 1, 0), 0)
    device.logits.zero_()
    faults = device.sampler.sample([SampleRequest(0, 0, row), SampleRequest(1, 1, sound)], 2)
    assert faults == {0: f"a token id is beyond the {VOCABULARY} logits"}
    assert device.sampled[1].tolist() == [5, FINITE]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_logits_that_are_not_numbers_are_said_to_be(device: Device, params: dict[str, Any]) -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 3] = float("nan")
    how = SampleRow(Sampling(SamplingParams(**params), 1, 0), 0)
    found = device.sample(logits, [how, how])
    assert [status for _, status in found] == [FINITE, NOT_FINITE]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_draws_are_the_same_function_of_seed_sequence_and_position(
    seed: int, index: int, position: int
) -> None:
    row = SampleRow(Sampling(SamplingParams(), seed, index), position)
    assert int(chain._bits([row, row])[1]) == draw_bits(seed, index, position)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62))
@settings(max_examples=50, deadline=None)
def test_a_place_is_drawn_with_128_bits(bits: int, total: int) -> None:
    signed = np.array([bits], np.uint64).view(np.int64)
    found = chain._high_product(torch.from_numpy(signed), torch.tensor([total]))
    assert int(found[0]) == (bits * total) >> 64


@pytest.mark.parametrize("tile", [TILE, Tile(64, 8, 64)], ids=["lists too short", "one chunk"])
def test_scores_are_the_reference_samplers(tile: Tile) -> None:
    device = Device(tile=tile)
    for start in range(0, 18, MAX_ROWS):
        numbers = range(start, start + MAX_ROWS)
        logits = np.stack([make_case(n, VOCABULARY, bans=False).logits for n in numbers])
        chosen = [n % VOCABULARY for n in numbers]
        found = device.scores(logits, chosen, 9)
        for place in range(MAX_ROWS):
            wanted = score(logits[place], chosen[place], 9)
            logprob, rank, top = found.of(place, 9)
            assert logprob == pytest.approx(wanted.logprob, rel=1e-12, abs=1e-12)
            assert rank == wanted.rank
            assert [token for token, _ in top] == [token for token, _ in wanted.top]
            values = [value for _, value in top]
            assert values == pytest.approx([v for _, v in wanted.top], rel=1e-12, abs=1e-12)


def test_samples_have_scores_of_the_logits_as_they_were(device: Device) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (3, VOCABULARY)).astype(np.float32)
    asked = [
        SampleRow(Sampling(SamplingParams(logprobs=number, **params), 1, 0), 0)
        for number, params in (
            (2, {"logit_bias": {4: 50.0}}),
            (0, {"temperature": 0.0}),
            (5, {"typical_p": 0.5}),
        )
    ]
    found = device.sample(logits, asked)
    scores = device.sampler.scores_on_host(3)
    for place, (token, _) in enumerate(found):
        num_top = asked[place].sampling.params.logprobs or 0
        wanted = score(logits[place], token, num_top)
        logprob, rank, top = scores.of(place, num_top)
        assert logprob == pytest.approx(wanted.logprob, abs=1e-12)
        assert rank == wanted.rank
        assert [token for token, _ in top] == [token for token, _ in wanted.top]


@pytest.mark.parametrize("width", [50, 5000])
def test_scores_depend_on_their_row_alone(width: int) -> None:
    device = Device(width, None)
    logits = torch.from_numpy(
        np.random.default_rng(3).normal(0, 4, (6, width)).astype(np.float32).round(2)
    )
    chosen = [5 * place for place in range(6)]
    together = device.scores(logits, chosen, 3)
    for places in ([0], [4], [5, 1], [3, 2, 5]):
        found = device.scores(logits[places], [chosen[place] for place in places], 3)
        for at, place in enumerate(places):
            assert found.of(at, 3) == together.of(place, 3)


def test_a_vocabulary_smaller_than_the_scores_asked_for_gives_what_it_has() -> None:
    found = Device(3).scores(torch.zeros(2, 3), [0, 2], 20)
    for row in range(2):
        _, rank, top = found.of(row, 20)
        assert rank == 1 and [token for token, _ in top] == [0, 1, 2]


def test_scores_of_any_number_of_rows_are_computed_by_the_kernels_that_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton compiles for the alignment of pointers and for strides of 1."""
    found = Device()
    kinds = set()

    def launch(count: int, logits: Any, scored: Any) -> None:
        pointers = (scored.tokens, scored.num_top)
        kinds.add((*(p.data_ptr() % 16 for p in pointers), scored.token_stride))

    monkeypatch.setattr(found.sampler, "_launch_scores", launch)
    for count in range(1, MAX_ROWS + 1):
        found.sampler.score(found.logits[:count], [1] * count, 3)
    assert kinds == {(0, 0, 1)}


def test_scores_of_what_the_kernel_does_not_read_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="no scores of"):
        device.sampler.score(torch.zeros(2, VOCABULARY, dtype=torch.float64), [0, 2], 1)
    with pytest.raises(ValueError, match="no scores of"):
        device.sampler.score(torch.zeros(2, VOCABULARY), [0], 1)


def test_the_most_demanding_row_uses_every_option() -> None:
    row = chain.most_demanding_row(VOCABULARY)
    usual = SamplingParams()
    of_the_text = {"seed", "n", "ignore_eos", "include_stop_str_in_output", "prompt_logprobs"}
    of_the_text |= {"include_stop_token"}
    of_the_text |= {"skip_special_tokens", "spelled_token_ids", "detokenize"}
    of_the_text |= {"allowed_token_ids", "bad_words", "thinking"}  # which are masks
    of_the_text |= {"stop", "stop_token_ids", "structured", "temperature"}  # or any but 0
    for field in dataclasses.fields(SamplingParams):
        if field.name not in of_the_text:
            assert getattr(row.sampling.params, field.name) != getattr(usual, field.name), field
    assert row.history is not None and row.allowed is not None and row.sampling.end_token_ids
    found = Device().sample(torch.zeros(2, VOCABULARY), [row, row])
    assert [status for _, status in found] == [FINITE] * 2


def test_the_exponential_is_the_references_bit_for_bit() -> None:
    values = -np.abs(np.random.default_rng(2).normal(0, 50, 5000))
    values[:5] = [0.0, -708.0, -708.1, -1e300, -np.inf]
    found = chain.exp(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(found, reference_exp(values))


def test_a_penalty_that_makes_logits_infinite_is_said_to() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1e-38)
    row = SampleRow(Sampling(params, 1, 0), 0, History((3,), ()))
    [(_, status)] = Device().sample(torch.full((1, VOCABULARY), 5.0), [row])
    assert status == TOO_LARGE


def test_rows_that_ask_for_the_likeliest_alone_are_plain() -> None:
    def plan(params: SamplingParams, position: int = 0, allowed: bytes | None = None) -> Any:
        how = Sampling(params, 0, 0, (1,))
        return SequencePlan(0, 0, (1,), None, (0,), Want.SAMPLE, how, position, None, allowed)

    greedy = SamplingParams(temperature=0.0)
    assert sampling.wants_argmax(plan(greedy))
    assert not sampling.wants_argmax(plan(SamplingParams()))
    assert not sampling.wants_argmax(plan(greedy, allowed=b"\x01"))
    assert not sampling.wants_argmax(plan(SamplingParams(temperature=0.0, logprobs=0)))
    short = SamplingParams(temperature=0.0, min_tokens=2)
    assert not sampling.wants_argmax(plan(short, 1))
    assert sampling.wants_argmax(plan(short, 2))


# ---- rows of a plan, packed together


class Sent:
    """What a sampler sends for steps; nothing is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampler = Device().sampler
        self.steps: list[tuple[object, ...]] = []
        monkeypatch.setattr(self.sampler, "_launch_step", self._note)

    def _note(self, step: Any) -> None:
        sampler = self.sampler
        count = step.num_rows * kernels.WORDS
        self.steps.append(
            (
                sampler._step.buffer[:count].tolist(),
                sampler._rows.edit_tokens[: 2 * step.num_edits].tolist(),
                sampler._masks.buffer[: len(step.masks) * sampler._mask_words].tolist(),
                [request.head_row for request in step.chained],
                step.kinds,
                step.faults,
            )
        )


def random_rows(rng: random.Random) -> list[SampleRow]:
    """Of few sequences, which come again in later steps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 3},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 4, "min_p": 0.1},
        {"logprobs": 3},
        {"temperature": 0.0, "logprobs": 0},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 2.0}},
        {"logit_bias": {VOCABULARY: 2.0}},  # a fault
        {"typical_p": 0.5},
        {"min_tokens": 2},
    ]
    return [
        SampleRow(
            Sampling(SamplingParams(max_tokens=9, **params), rng.getrandbits(63), index, (1, 2)),
            0,
        )
        for index, params in enumerate(rng.choices(kinds, k=4 * MAX_ROWS))
    ]


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_a_plan_are_sent_as_rows_one_by_one_are(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    together, each = Sent(monkeypatch), Sent(monkeypatch)
    sequences = random_rows(rng)
    for step in range(12):
        rows = []
        for row in rng.sample(sequences, MAX_ROWS):
            allowed = rng.choice([None, None, b"\x05", b"\xff" * 9, b""])
            needs = row.sampling.params.needs_history
            history = History((1, 2), tuple(range(step))) if needs else None
            rows.append(row._replace(completion_position=step, history=history, allowed=allowed))
        plans = [plan_of(row, number) for number, row in enumerate(rows)]
        slots = [MAX_ROWS - 1 - number for number in range(MAX_ROWS)]
        found = together.sampler.sample_plans(plans, [-1] * MAX_ROWS, slots)
        requests = [
            SampleRequest(number, slots[number], row)
            for number, (row, plan) in enumerate(zip(rows, plans, strict=True))
            if not wants_argmax(plan)
        ]
        if requests:
            faults = each.sampler.sample(requests, MAX_ROWS)
            assert found.faults == faults
        assert len(together.steps) == len(each.steps)
        assert together.steps[-1:] == each.steps[-1:]
    assert len(each.steps) > 6


class Computed:
    """A mask that was computed with others."""

    def __init__(self, bits: Any, row: int) -> None:
        self._place = MaskRow(bits, row)

    def result(self) -> bytes:
        return bytes(self._place.bits[self._place.row].tobytes())

    def row(self) -> MaskRow:
        return self._place


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 4, 5), (3, 1, 0, 5), (0, 1, None, 3)])
@pytest.mark.parametrize("more_words", [-1, 0, 2])
def test_masks_of_one_array_are_sent_as_masks_one_by_one_are(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int | None, ...], more_words: int
) -> None:
    together, each = Sent(monkeypatch), Sent(monkeypatch)
    width = -(-VOCABULARY // 32) + more_words
    bits = np.random.default_rng(7).integers(-(2**31), 2**31, (6, width), np.int32)
    hows = [Sampling(SamplingParams(temperature=0.0), 1, index) for index in range(len(order))]
    alone = np.ones((1, width), np.int32)  # in an array of its own
    masks = [Computed(alone, 0) if row is None else Computed(bits, row) for row in order]
    for position in range(2):
        followed = FollowingMasks()
        plans = []
        for number, (how, mask) in enumerate(zip(hows, masks, strict=True)):
            followed.give(number, mask)
            plan = plan_of(SampleRow(how, position), number)
            plans.append(plan._replace(allowed=followed if position else mask))
        followed.settle()
        as_bytes = [plan._replace(allowed=plan.mask()) for plan in plans]
        slots = list(range(len(plans)))
        for sent, rows in ((together, plans), (each, as_bytes)):
            assert not sent.sampler.sample_plans(rows, [-1] * len(rows), slots).faults
    assert together.steps == each.steps and len(each.steps) == 2


def test_rows_whose_sequences_change_places_are_sent_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, fresh = Sent(monkeypatch), Sent(monkeypatch)
    values: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 3}, {"logprobs": 2}, {}]
    hows = [Sampling(SamplingParams(**each), 5, at) for at, each in enumerate(values)]
    for order in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1, 2, 0), (3, 1), (3, 1, 2, 0), (0,), (0, 1)):
        plans = [plan_of(SampleRow(hows[at], 4), row) for row, at in enumerate(order)]
        fresh.sampler._usual = None
        for sent in (kept, fresh):
            sent.sampler.sample_plans(plans, [-1] * len(plans), list(range(len(plans))))
    assert kept.steps == fresh.steps and len(kept.steps) == 6


@pytest.mark.parametrize("more", [{}, {"min_tokens": 2}])
def test_a_step_of_argmaxes_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    sent = Sent(monkeypatch)
    how = Sampling(SamplingParams(temperature=0.0, max_tokens=9, **more), 1, 0, (1, 2))
    plans = [plan_of(SampleRow(how, 4), number) for number in range(3)]
    for _ in range(2):  # the second time it is known
        assert sent.sampler.sample_plans(plans, [-1] * 3, [0, 1, 2]) == Sampled({}, False)
    assert not sent.steps


class Eager:
    """In a graph's place: launches what it was captured of."""

    def __init__(self, launch: Any, num_rows: int) -> None:
        self._launch, self._num_rows = launch, num_rows

    def replay(self) -> None:
        self._launch(self._num_rows)


def test_a_graph_of_more_rows_than_the_step_samples_those_of_the_step_alone() -> None:
    device = Device()
    sampler = device.sampler
    launches = (sampler._launch, sampler._launch_with_rounds, sampler._launch_scores)
    sampler._graphs[MAX_ROWS] = tuple(Eager(each, MAX_ROWS) for each in launches)  # type: ignore[assignment]
    rng = np.random.default_rng(5)
    device.logits[:] = torch.as_tensor(rng.normal(0, 3, (MAX_ROWS, VOCABULARY)))
    values: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"top_p": 0.5, "logprobs": 2},
        {"typical_p": 0.5, "logprobs": 1},
        {"top_k": 4},
    ]
    hows = [Sampling(SamplingParams(**each), 9 + at, 0) for at, each in enumerate(values)]
    for count in (MAX_ROWS, 3):  # the second step finds what the first one sent
        rows = [
            SampleRow(how, 1, None, None, b"\xff" * 9 if at == 1 else None)
            for at, how in enumerate((hows * MAX_ROWS)[:count])
        ]
        device.samples[:] = -7
        device.sampled[:] = -7
        plans = [plan_of(row, at) for at, row in enumerate(rows)]
        found = sampler.sample_plans(plans, [-1] * count, list(range(count)))
        assert not found.faults and found.is_scored
        for at, row in enumerate(rows):
            wanted = expected(device.logits[at].numpy(), row)
            assert device.sampled[at].tolist() == [wanted, FINITE]
        assert device.samples[count:].tolist() == [-7] * (len(device.samples) - count)
        assert (device.sampled[count:] == -7).all()


def test_scores_of_all_rows_are_those_of_each() -> None:
    rng = np.random.default_rng(3)
    results = rng.normal(size=(5, scoring.RESULTS))
    results[:, 1 : 2 + MAX_LOGPROBS] = rng.integers(1, 1000, (5, 1 + MAX_LOGPROBS))
    for width in (3, 1000):
        for wanted in ([5, None, 0, MAX_LOGPROBS, 1], [2] * 5, [0] * 5, [None, 0, 0, None, 0]):
            scores = Scores(results, width, wanted)
            each = [
                None if n is None else TokenLogprob(7 + row, *scores.of(row, n))
                for row, n in enumerate(wanted)
            ]
            assert scores.of_all(range(7, 12)) == each
