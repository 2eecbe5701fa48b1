"""CudaExecutor: plans in, kernels on a stream, results when the device has them.

Submitting packs a plan into integers, sends them with one copy and replays two captured graphs, the
body's and the head's. Sampled tokens stay on the device, where the next step finds them, so a step
may be submitted before the one it follows is collected.
"""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from quire.core.clock import Clock
from quire.core.errors import (
    ConfigError,
    ExecutorError,
    ExecutorMemoryError,
    RowFaultError,
    StepCancelledError,
    StepTimeoutError,
)
from quire.core.plan import NO_STATE, SequencePlan, StepPlan, StepResult, Want
from quire.executors.base import BLOCK_SIZE, ExecutorBase, model_capacity
from quire.executors.cuda.decoder import Decoder, KVBlocks, KVType, Limits, decoder_for
from quire.executors.cuda.gemm import gemm_for
from quire.executors.cuda.graphs import Exchange, GraphRunner, PackedStep
from quire.executors.cuda.memory import (
    allocate_blocks,
    buffers_memory,
    check_weights,
    max_context,
    memory_set_aside,
    rows_sampled_at_once,
    weights_memory,
)
from quire.executors.cuda.planes import to_natural_order
from quire.executors.cuda.sampling import Sampler
from quire.executors.cuda.step_input import (
    BodyRows,
    GroupTables,
    Integers,
    PackedRow,
    PlanColumns,
    TableArrays,
    first_blocks,
)
from quire.executors.cuda.tickets import CudaTicket, SampleRing, StepRow, StepRows, results_of
from quire.executors.cuda.weights import check_model, load_weights, packed_bytes
from quire.model.features import Feature
from quire.model.kv_layout import KVLayout, one_group
from quire.model.loading import Model
from quire.model.parts import largest_of_layers
from quire.model.spec import ModelSpec
from quire.quant.formats import Floats

_MAX_SPLIT_TOKENS = 16
_POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """Sizes of an executor. `kv_bytes` None: what is left of the device's memory."""

    max_batch_size: int = 64
    max_step_tokens: int = 2048
    kv_bytes: int | None = None
    num_blocks: int | None = None  # exactly so many, whatever kv_bytes says
    invariant: bool = True  # a row's bits do not depend on its batch; without it, large steps gain
    device: str = "cuda"
    takes_hidden: bool = False  # of a model's last layers: submit is given hidden states
    # Of a model's feed-forwards: submit_hidden computes the last, run_feed_forward the others.
    only_feed_forwards: bool = False
    kv_type: KVType = "auto"
    num_states: int | None = None  # slots for states, of models that keep any; None: a few

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def check_fits(model: Model, device: str = "cuda") -> None:
    """Refuse a model that these kernels do not compute, or that has no room, before it is moved."""
    check_model(model.spec, model.tensors)
    if device != "cpu":
        largest = largest_of_layers(model.tensors)
        check_weights(packed_bytes(model.tensors), largest, device)


def check_cache(spec: ModelSpec, kv_type: KVType) -> None:
    """Refuse a type of the KV cache that these kernels do not keep a model's in."""
    has_latents = any(part.latent is not None for part in spec.attentions.values())
    if has_latents and kv_type != "auto":
        raise ConfigError(
            f"kv_cache_dtype is {kv_type!r}, but the {spec.family} model has {Feature.LATENT}, "
            "whose vectors the CUDA executor keeps in bfloat16: use 'auto', or device='cpu'"
        )


class CudaExecutor(ExecutorBase):
    """Runs a model's block weights on one NVIDIA GPU (or, in tests, with Triton's interpreter)."""

    def __init__(
        self,
        model: Model,
        config: CudaConfig | None = None,
        clock: Clock | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        """Allocates in this order: weights, buffers of a step, the sampler's share, KV cache."""
        self._config = config = config or CudaConfig()
        spec = self._spec = model.spec
        layout = self._layout = layout or one_group(spec)
        self._device = config.device
        self._is_gpu = config.device != "cpu"
        check_fits(model, self._device)
        check_cache(spec, config.kv_type)
        with weights_memory(self._device, packed_bytes(model.tensors)):
            self._weights = load_weights(spec, model.tensors, self._device)
        gemm = gemm_for(self._device)
        self._samples = SampleRing(config.max_batch_size, self._device)
        limits = self._limits()
        with buffers_memory(self._device):
            self._decoder: Decoder = decoder_for(self._weights)(
                spec,
                self._weights,
                gemm,
                limits,
                self._samples.tokens,
                self._device,
                layout,
                config.kv_type,
            )
            self._sampler = Sampler(
                self._decoder.logits, self._samples.tokens, self._decoder.sampled
            )
        self._sampler.limit_chained(
            rows_sampled_at_once(spec.vocabulary_size, config.max_batch_size, self._device)
        )
        # torch keeps freed memory for the stream that had it, so one stream does all.
        stream = torch.cuda.Stream(self._device) if self._is_gpu else None
        with memory_set_aside(self._sampler.rehearse, self._device, stream):
            self._blocks: KVBlocks = allocate_blocks(
                spec,
                layout,
                config.num_blocks,
                config.kv_bytes,
                self._device,
                self._decoder.kv_dtype,
            )
        self._runner = GraphRunner(
            self._decoder, self._blocks, limits, layout.windows, self._device, stream
        )
        self._tables = [
            TableArrays(self._blocks.num_blocks, 4 * config.max_batch_size) for _ in layout.windows
        ]
        self._unsampled: CudaTicket | None = None  # the last step, where masks are pending
        self._ended_at = float("-inf")  # of the step that was collected last
        super().__init__(
            model_capacity(
                spec,
                self._blocks.num_blocks,
                config.max_batch_size,
                config.max_step_tokens,
                windows=layout.windows,
                num_states=limits.num_states,
            ),
            kernels=self._kernel_names(gemm.name),
            fallback=(gemm.fallback or self._decoder.fallback) if self._is_gpu else None,
            is_warm=False,
            clock=clock,
        )

    def _limits(self) -> Limits:
        config = self._config
        return Limits(
            num_tokens=config.max_step_tokens,
            num_rows=config.max_batch_size,
            max_split_tokens=(
                0 if config.only_feed_forwards else min(_MAX_SPLIT_TOKENS, config.max_step_tokens)
            ),
            max_context=max_context(
                self._spec,
                self._layout,
                config.num_blocks,
                config.kv_bytes,
                self._device,
                is_8bit=config.kv_type != "auto",
            ),
            num_states=self._spec.num_state_slots(config.num_states),
            invariant=config.invariant,
            takes_hidden=config.takes_hidden,
            only_feed_forwards=config.only_feed_forwards,
        )

    def _kernel_names(self, gemm: str) -> list[str]:
        name = gemm if self._config.invariant else f"{gemm}, not batch-invariant"
        planes = [f"{name} planes" for name in self._weights.formats]
        kept = "float8_e4m3" if self._config.kv_type == "fp8" else str(self._decoder.kv_dtype)
        return [name, *planes, f"{kept.removeprefix('torch.')} KV cache"]

    # ---- the contract

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        kept = self._blocks.num_bytes + self._decoder.states.num_bytes
        in_use = {"weights": self._weights.num_bytes, "kv": kept}
        if self._is_gpu:
            reserved = int(torch.cuda.memory_reserved(self._device))
            in_use["workspace"] = max(0, reserved - sum(in_use.values()))
        return in_use

    def warm_up(self) -> None:
        """Compile every kernel and capture every graph."""
        if not self.is_warm:
            self._runner.warm_up(self._sampler.launch_all)
            if self._is_gpu:
                with self._runner.stream(), buffers_memory(self._device):
                    self._sampler.capture(self._runner.row_sizes, self._runner.captured)
                    self._sampler.rehearse()  # each capture gave torch's free memory to the driver
                self.fallback = self.fallback or self._decoder.fallback  # of what did not compile
            super().warm_up()

    def submit(self, plan: StepPlan) -> CudaTicket:
        return self.submit_hidden(plan, ())

    def submit_hidden(self, plan: StepPlan, hidden: Sequence[Floats]) -> CudaTicket:
        """`hidden`, where the executor takes it: of each row [new tokens, hidden]."""
        self._check_open()
        if not self.is_warm:
            raise ExecutorError(
                "the CUDA executor is not warm: call warm_up() before the first step, or every "
                "size of batch would wait for its kernels"
            )
        with _memory_errors():
            return self._submit(plan, hidden)

    def exchange(self) -> Exchange:
        """Memory through which run_feed_forward takes and gives hidden states."""
        return self._runner.exchange()

    def run_feed_forward(self, layer: int, exchange: Exchange, count: int) -> None:
        """Begin one layer's feed-forward, not the last's, of the first `count` states."""
        self._check_open()
        with _memory_errors():
            self._runner.run_feed_forward(layer, exchange, count)

    def collect(self, ticket: CudaTicket, timeout_s: float | None = None) -> StepResult:
        if ticket is self._unsampled:
            self._sample_step()
        if ticket.error is not None:
            raise ticket.error
        self._wait(ticket, timeout_s)
        ended_at = self._clock.now()
        if ticket.is_cancelled:
            raise StepCancelledError(f"step {ticket.plan.step_id} was cancelled")
        results = results_of(ticket, self._samples)
        elapsed = ended_at - max(ticket.submitted_at, self._ended_at)
        if ticket.begun is not None:
            elapsed = ticket.begun.elapsed_time(ticket.done) / 1000
        self._ended_at = ended_at
        started = ended_at - elapsed
        return StepResult(ticket.plan.step_id, started, elapsed, results, ticket.num_padding)

    def cancel(self, ticket: CudaTicket) -> None:
        """A replayed graph cannot be stopped: the step ends, and its results are dropped."""
        ticket.is_cancelled = True

    def close(self) -> None:
        if not self._is_closed:
            super().close()
            self._runner.close()
            self._sampler.close()

    def _wait(self, ticket: CudaTicket, timeout_s: float | None) -> None:
        done = ticket.done
        if done is None:
            return
        if timeout_s is None:
            done.synchronize()
            return
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise StepTimeoutError(f"step {ticket.plan.step_id} took over {timeout_s} s")
            time.sleep(_POLL_S)

    # ---- submitting

    def _submit(self, plan: StepPlan, hidden: Sequence[Floats]) -> CudaTicket:
        self._check_copies(plan)
        ticket = CudaTicket(plan, submitted_at=self._clock.now())
        runner = self._runner
        step = self._pack(ticket)
        self._sample_step()  # of the step before; packing this one has left its masks some time
        with runner.stream():
            ticket.begun = runner.record()
            for copy in plan.copies:
                self._blocks.copy(copy.source, copy.target)
            if step is not None:
                self._run(ticket, step, hidden)
            if ticket.is_sampled:
                ticket.done = runner.record()
        return ticket

    def _pack(self, ticket: CudaTicket) -> PackedStep | None:
        """The sound rows, packed; None: there is none."""
        plans: Sequence[SequencePlan] = ticket.plan.sequences
        columns = PlanColumns.of(plans) if plans else None
        body = None if columns is None else self._sound_rows(columns)
        if body is None:
            packed = self._pack_each(ticket)
            plans, columns = tuple([row.plan for row in packed]), None
            body = BodyRows.of(packed, self.capacity.windows) if packed else None
        if body is None:
            return None
        if body.num_tokens > self.capacity.max_step_tokens:
            raise ExecutorError(
                f"the step has {body.num_tokens} tokens; this executor takes "
                f"{self.capacity.max_step_tokens}"
            )
        columns = columns or PlanColumns.of(plans)
        sampled, ids, wants = None, columns.sequence_id, columns.want
        has_more = any(columns.prompt_targets)
        if wants.count(Want.SAMPLE) < len(wants):
            sampled = [index for index, want in enumerate(wants) if want is Want.SAMPLE]
            ids = tuple([ids[index] for index in sampled])
            has_more = has_more or max(wants) >= Want.LOGITS
        slots = self._samples.take(ticket.plan.step_id, ids)
        ticket.computed = StepRows(plans, body, sampled, slots, has_more, columns)
        self._number_head_rows(ticket)
        return self._runner.pack(body, ticket.computed.lasts, slots)

    def _sound_rows(self, rows: PlanColumns) -> BodyRows | None:
        """All rows at once, where each is sound; None: some may not be. What _check_row() checks,
        without a Python call for a row. A block table is checked when it changes, not in every
        step."""
        capacity = self.capacity
        num_others = len(capacity.windows) - 1
        if any(rows.prompt_targets) or set(map(len, rows.other_tables)) != {num_others}:
            return None
        wanted = zip(rows.want, rows.sampling, strict=True)
        if not all(rows.sampling) and (Want.SAMPLE, None) in wanted:
            return None
        sources = self._samples.sources_of(rows.follows, rows.sequence_id)
        if sources is None:
            return None
        try:
            starts = np.array(rows.start, np.int64)
            tokens = np.fromiter(chain.from_iterable(rows.tokens), np.int64)
        except OverflowError:
            return None
        counts = np.fromiter(map(len, rows.tokens), np.int64, len(starts))
        follows = np.array(sources, np.int32)
        counts += follows >= 0
        is_sound = (
            0 <= starts.min() <= starts.max() < capacity.max_context
            and counts.min() > 0
            and (starts + counts).max() <= capacity.max_context
            and (not len(tokens) or 0 <= tokens.min() <= tokens.max() < capacity.vocabulary_size)
        )
        if not is_sound:
            return None
        states = None
        if capacity.num_states:
            states = _sound_states(rows.states, starts, capacity.num_states)
            if states is None:
                return None
        spans = starts.astype(np.int32), counts.astype(np.int32)
        body = BodyRows(*spans, rows.tokens, follows, [], states)
        tables = self._sound_tables(rows, body)
        return None if tables is None else body._replace(tables=tables)

    def _sound_tables(self, rows: PlanColumns, body: BodyRows) -> list[GroupTables] | None:
        """The rows' block tables of each group; None: some may not be sound."""
        found = []
        ends = body.starts + body.counts
        columns = [rows.block_table, *zip(*rows.other_tables, strict=True)]
        for known, window, tables in zip(self._tables, self.capacity.windows, columns, strict=True):
            firsts = first_blocks(window, body.starts)
            seen = known.of(rows.sequence_id, tables, firsts)
            if seen is None:
                return None
            if (ends > BLOCK_SIZE * (firsts + seen.lengths)).any():
                return None
            found.append(seen)
        return found

    def _pack_each(self, ticket: CudaTicket) -> list[PackedRow]:
        """Which tokens of the step are each sound row's; the others get their fault."""
        packed: list[PackedRow] = []
        ticket.rows = []
        first = 0
        for plan in ticket.plan.sequences:
            row = StepRow(plan)
            ticket.rows.append(row)
            try:
                source = None if plan.follows is None else self._samples.slot_of(plan)
                self._check_row(plan, plan.end)
            except RowFaultError as error:
                row.fault = str(error)
                continue
            row.packed = PackedRow(plan, first, first + plan.num_new_tokens - 1, source)
            packed.append(row.packed)
            first = row.packed.last + 1
        return packed

    def _number_head_rows(self, ticket: CudaTicket) -> None:
        rows = [row for row in ticket.rows or () if row.packed and row.plan.want is Want.SAMPLE]
        for index, row in enumerate(rows):
            row.head_row = index

    def _run(self, ticket: CudaTicket, step: PackedStep, hidden: Sequence[Floats]) -> None:
        assert ticket.computed is not None
        given = None
        if self._config.takes_hidden:
            states = hidden
            if ticket.rows is not None:
                rows = zip(ticket.rows, hidden, strict=True)
                states = [each for row, each in rows if row.packed is not None]
            given = np.concatenate(states)
        self._runner.run(step, given)
        ticket.num_padding = step.num_padding
        plans = ticket.computed.sampled_plans
        ticket.is_sampled = all(plan.has_mask for plan in plans if plan.allowed is not None)
        if ticket.is_sampled:
            self._sample_rows(ticket)
        else:
            self._unsampled = ticket

    def _sample_step(self) -> None:
        """Sample the step that was submitted without: the masks of its grammars were pending. Its
        layers are computed meanwhile, and the next step's begin after it."""
        ticket, self._unsampled = self._unsampled, None
        if ticket is None:
            return
        try:
            with _memory_errors(), self._runner.stream():
                self._sample_rows(ticket)
                ticket.done = self._runner.record()
        except Exception as error:  # of that step, not of the one that is about to be submitted
            # Without the frames that it came through: they refer to the ticket, and with it would
            # keep arrays of the device until the garbage collector comes by.
            ticket.error = error.with_traceback(None)

    def _sample_rows(self, ticket: CudaTicket) -> None:
        """Sample, and copy to the host what the step is asked for."""
        rows = ticket.computed
        assert rows is not None
        plans = rows.sampled_plans
        columns = rows.columns if rows.sampled is None else None
        found = self._sampler.sample_plans(plans, rows.sampled_sources, rows.slots, columns)
        if found.faults:
            sampled = [row for row in ticket.one_by_one() if row.head_row is not None]
            for index, fault in found.faults.items():
                sampled[index].fault = fault
        if found.is_scored:
            ticket.scores = self._sampler.scores_on_host(len(plans))
        has_more = rows.has_more
        are_all = rows.sampled is None and len(plans) == len(ticket.plan.sequences)
        ticket.is_plain = are_all and not found.faults and not has_more
        if has_more:
            for row in ticket.one_by_one():
                plan = row.plan
                if row.packed is not None and (plan.want >= Want.LOGITS or plan.prompt_targets):
                    self._more_wants(row)
        num_tokens = rows.body.num_tokens
        ticket.sampled, ticket.finite = self._runner.fetch(len(plans), num_tokens)

    def _more_wants(self, row: StepRow) -> None:
        """Logits of every position, scores of the prompt, the pooled state."""
        plan, packed = row.plan, row.packed
        assert packed is not None
        if plan.want is Want.POOLED:
            state = to_natural_order(self._decoder.normed[packed.last].float())
            row.pooled = state[: self._spec.hidden_size]
        if plan.want is Want.LOGITS or plan.prompt_targets:
            self._every_position(row, packed)

    def _every_position(self, row: StepRow, packed: PackedRow) -> None:
        plan = row.plan
        targets = plan.prompt_targets
        num_top = plan.num_target_logprobs
        step = self.capacity.max_batch_size
        for start in range(0, plan.num_new_tokens, step):
            count = min(step, plan.num_new_tokens - start)
            logits = self._runner.logits_of(packed.first + start, count)
            if plan.want is Want.LOGITS:
                row.logits += (logits.to("cpu", copy=True),)  # the device cannot hold all
            if aimed := targets[start : start + count]:
                row.prompt_scores += (self._sampler.score(logits[: len(aimed)], aimed, num_top),)


def _sound_states(
    slots: Sequence[tuple[int, ...]], starts: npt.NDArray[np.int64], num_states: int
) -> Integers | None:
    """The slots that rows read and write; None: some may not be sound."""
    if set(map(len, slots)) != {2}:
        return None
    found = np.array(slots, np.int64)
    sources, targets = found.T
    reads = np.where(starts == 0, sources == NO_STATE, (sources >= 0) & (sources < num_states))
    writes = (targets >= 0) & (targets < num_states) & (targets != sources)
    return found.astype(np.int32) if (reads & writes).all() else None


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # which have arrays
        torch.cuda.empty_cache()
        raise ExecutorMemoryError(f"a step found no memory on the GPU: {error}") from error
