"""CudaExecutor: plans in, kernels on a stream, results when the device has them.

Submitting packs a plan into integers, sends them with one copy and replays two captured graphs, the
body's and the head's. Sampled tokens stay on the device, where the next step finds them, so a step
may be submitted before the one it follows is collected.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
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
from quire.core.plan import SequencePlan, StepPlan, StepResult, Want
from quire.core.windows import NO_WINDOWS
from quire.executors.base import BLOCK_SIZE, NO_SAMPLING, ExecutorBase, model_capacity
from quire.executors.cuda.chain import SampleRow
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
from quire.executors.cuda.sampling import Sampler, SampleRequest, wants_argmax
from quire.executors.cuda.step_input import PackedRow
from quire.executors.cuda.tickets import CudaTicket, SampleRing, StepRow, ToSample, results_of
from quire.executors.cuda.weights import check_model, load_weights, packed_bytes
from quire.model.kv_layout import KVLayout, one_group
from quire.model.loading import Model
from quire.model.parts import largest_of_layers
from quire.quant.formats import Floats

_MAX_SPLIT_TOKENS = 16
_POLL_S = 2e-5
_new_tuple = tuple.__new__  # skips the Python call that a named tuple's constructor is


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
        self._sound_tables: dict[int, tuple[int, ...]] = {}  # by sequence
        self._unsampled: CudaTicket | None = None  # the last step, where masks are pending
        self._ended_at = float("-inf")  # of the step that was collected last
        super().__init__(
            model_capacity(
                spec,
                self._blocks.num_blocks,
                config.max_batch_size,
                config.max_step_tokens,
                windows=layout.windows,
            ),
            kernels=self._kernel_names(gemm.name),
            fallback=gemm.fallback if self._is_gpu else None,
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
        in_use = {"weights": self._weights.num_bytes, "kv": self._blocks.num_bytes}
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
        ticket = CudaTicket(plan, [], submitted_at=self._clock.now())
        runner = self._runner
        packed = self._pack(ticket)
        step = self._pack_step(ticket, packed) if packed else None
        self._sample_step()  # of the step before; packing this one has left its masks some time
        with runner.stream():
            ticket.begun = runner.record()
            for copy in plan.copies:
                self._blocks.copy(copy.source, copy.target)
            if step is not None:
                self._run(ticket, step, hidden)
            if ticket.to_sample is None:
                ticket.done = runner.record()
        return ticket

    def _pack(self, ticket: CudaTicket) -> list[PackedRow]:
        """Which tokens of the step are each sound row's; the others get their fault."""
        packed: list[PackedRow] = []
        rows, slot_of = ticket.rows, self._samples.slot_of
        first = 0
        for plan in ticket.plan.sequences:
            row = StepRow(plan)
            rows.append(row)
            try:
                source = None if plan.follows is None else slot_of(plan)
                end = plan.start + len(plan.tokens) + (plan.follows is not None)
                self._check(plan, end)
            except RowFaultError as error:
                row.fault = str(error)
                continue
            last = first + end - plan.start - 1
            row.packed = _new_tuple(PackedRow, (plan, first, last, source))
            packed.append(row.packed)
            first = last + 1
        if first > self.capacity.max_step_tokens:
            raise ExecutorError(
                f"the step has {first} tokens; this executor takes {self.capacity.max_step_tokens}"
            )
        return packed

    def _check(self, plan: SequencePlan, end: int) -> None:
        """_check_row(), without looking again through the table of a row of one pending token that
        was found sound in an earlier step: it is the same tuple until the sequence gets a block."""
        table = plan.block_table
        if (
            self._sound_tables.get(plan.sequence_id) is table
            and not (plan.tokens or plan.prompt_targets or plan.other_tables)
            and plan.sampling is not None
            and 0 <= plan.start < end <= self.capacity.max_context
            and end <= len(table) * BLOCK_SIZE
        ):
            return
        self._check_row(plan, end)
        is_sound = min(table) >= 0 and max(table) < self.capacity.num_blocks
        if is_sound and self.capacity.windows == NO_WINDOWS:
            if len(self._sound_tables) >= 4 * self.capacity.max_batch_size:
                self._sound_tables.clear()
            self._sound_tables[plan.sequence_id] = table

    def _pack_step(self, ticket: CudaTicket, packed: list[PackedRow]) -> PackedStep:
        sampled = [row for row in ticket.rows if row.packed and row.plan.want is Want.SAMPLE]
        slots = self._samples.take(ticket.plan.step_id, sampled)
        last = [row.packed.last for row in sampled if row.packed]
        for index, row in enumerate(sampled):
            row.head_row = index
        num_tokens = packed[-1].last + 1
        ticket.to_sample = ToSample(sampled, slots, num_tokens)
        return self._runner.pack(packed, num_tokens, last, slots)

    def _run(self, ticket: CudaTicket, step: PackedStep, hidden: Sequence[Floats]) -> None:
        assert ticket.to_sample is not None
        given = None
        if self._config.takes_hidden:
            rows = zip(ticket.rows, hidden, strict=True)
            given = np.concatenate([states for row, states in rows if row.packed is not None])
        self._runner.run(step, given)
        ticket.num_padding = step.num_padding
        if all(row.plan.has_mask for row in ticket.to_sample.rows):
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
            ticket.error = error

    def _sample_rows(self, ticket: CudaTicket) -> None:
        """Sample, and copy to the host what the step is asked for."""
        assert ticket.to_sample is not None
        sampled, slots, num_tokens = ticket.to_sample
        ticket.to_sample = None
        is_scored = self._sample(sampled, slots)
        ticket.is_plain = not is_scored and len(sampled) == len(ticket.rows)
        for row in ticket.rows:
            plan = row.plan
            if row.packed is not None and (plan.want >= Want.LOGITS or plan.prompt_targets):
                self._more_wants(row)
        ticket.sampled, ticket.finite = self._runner.fetch(len(sampled), num_tokens)

    def _sample(self, rows: list[StepRow], slots: list[int]) -> bool:
        """Overwrite the likeliest tokens of rows that want another; whether a result holds more
        than tokens: scores, or a fault of the sampler's."""
        requests = []
        for index, row in enumerate(rows):
            plan = row.plan
            assert plan.sampling is not None and row.packed is not None, NO_SAMPLING
            if not wants_argmax(plan):
                sample_row = SampleRow(
                    plan.sampling,
                    plan.completion_position,
                    plan.history,
                    row.packed.source,
                    plan.mask(),
                )
                requests.append(SampleRequest(index, slots[index], sample_row))
        is_scored = any(row.plan.prompt_targets for row in rows)
        if not requests:
            return is_scored
        faults = self._sampler.sample(requests, len(rows))
        for index, fault in faults.items():
            rows[index].fault = fault
        scored = [
            rows[request.head_row]
            for request in requests
            if request.row.sampling.params.logprobs is not None
        ]
        if scored:
            scores = self._sampler.scores_on_host(len(rows))
            for row in scored:
                row.scores = scores
        return is_scored or bool(scored) or bool(faults)

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


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise ExecutorMemoryError(f"a step found no memory on the GPU: {error}") from error
