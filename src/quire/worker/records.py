"""Records of live requests: what another worker needs to go on with each, and who is to blame when
workers die.

A record has the prompt, the parameters with the seed, and every token that came. Because a
request's tokens are a function of these, its stream goes on with the token that comes next.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quire.core.errors import QuireError
from quire.core.request import (
    Completion,
    FinishReason,
    Piece,
    Request,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    Status,
)
from quire.core.sampling import SamplingParams, new_seed
from quire.engine.aio import Stream
from quire.worker import messages as wire

CRASHES_OF_A_CAUSE = 2  # without a token in between
_MAX_REPEATS = 3  # of a request that begins anew, for which tokens that came before count


@dataclass(slots=True, eq=False)
class Record:
    """A live request, with all that another worker needs to go on with it."""

    command: wire.Submit
    stream: Stream
    is_streamed: bool
    accepted: "asyncio.Future[Request]"
    completions: list[Completion]
    metrics: RequestMetrics
    is_sent: bool = False
    is_taken: bool = False  # by the worker there is now, as far as it said; and is in its batch
    is_started: bool = False
    is_paused: bool = False
    is_cancelled: bool = False
    num_crashes: int = 0  # while it was in the batch, since its last token
    # Tokens of each completion that its reader has and that are computed again: prompt scores
    # come at the end alone, so that such a request begins anew.
    num_repeated: list[int] = field(default_factory=list)
    num_probed: int = 0  # of these crashes, those while it was run apart
    num_anew: int = 0  # times that it began anew, since its last new token

    def take(self, piece: Piece) -> None:
        index = piece.completion_index
        if self.completions[index].finish_reason is not None:
            return  # computed again, and its reader has the end
        if self.num_repeated and self.num_repeated[index] > 0:
            self.num_repeated[index] -= len(piece.token_ids)
            if self.num_anew <= _MAX_REPEATS:
                self.num_crashes = 0
            return
        self.num_crashes = self.num_anew = self.num_probed = 0
        if self.metrics.first_token_at is None:
            self.metrics.started_at = self.metrics.first_token_at = time.perf_counter()
        completion = self.completions[index]
        completion.token_ids += piece.token_ids
        completion.text += piece.text
        completion.finish_reason = piece.finish_reason
        completion.stop_reason = piece.stop_reason
        completion.is_stop_token_left_out = piece.is_stop_token_left_out
        if completion.logprobs is not None:
            completion.logprobs += piece.logprobs
        if self.is_streamed:
            self.stream.receive(piece)

    def resubmission(self) -> wire.Submit:
        """The request for another worker, behind the tokens that are known."""
        params = self.command.params
        has_begun = any(c.token_ids or c.finish_reason for c in self.completions)
        if params.prompt_logprobs is not None:
            self.num_repeated = [len(completion.token_ids) for completion in self.completions]
            self.num_anew += 1
            has_begun = False
        if not has_begun:
            return replace_command(self.command, [])
        so_far = [replace(completion, logprobs=None) for completion in self.completions]
        if self.command.num_generated:
            command = replace_command(self.command, so_far)
            border = len(command.prompt) - command.num_generated
            given = list(command.prompt[border:])
            so_far[0].token_ids = given + so_far[0].token_ids
            return wire.Submit(
                **{
                    **{name: getattr(command, name) for name in command.__struct_fields__},
                    "prompt": command.prompt[:border],
                    "num_generated": 0,
                }
            )
        return replace_command(self.command, so_far)

    def output(self, ended: wire.WireEnded) -> RequestOutput:
        for completion, final in zip(self.completions, ended.completions, strict=False):
            completion.text = final.text
            completion.stop_reason = final.stop_reason
            completion.is_stop_token_left_out = final.is_stop_token_left_out
            reason = final.finish_reason
            completion.finish_reason = None if reason is None else FinishReason(reason)
        metrics = ended.metrics
        first_at = self.metrics.first_token_at
        if first_at is not None:  # a worker before this one may have had the first token
            metrics.first_token_at = min(metrics.first_token_at or first_at, first_at)
            metrics.started_at = min(metrics.started_at or first_at, first_at)
        metrics.num_cached_tokens = min(metrics.num_cached_tokens, len(self.command.prompt))
        completions = self.completions[: max(1, len(ended.completions))]
        given = self.command.num_generated
        prompt = self.command.prompt
        if given:
            completions[0].token_ids[:0] = prompt[len(prompt) - given :]
            prompt = prompt[: len(prompt) - given]
        return RequestOutput(
            request_id=ended.request_id,
            prompt_token_ids=prompt,
            completions=completions,
            metrics=metrics,
            status=ended.status,
            prompt_logprobs=ended.prompt_logprobs,
            pooled=ended.vector(),
            error=None if ended.error is None else ended.error.error(),
        )

    def failed(self, status: Status, reason: FinishReason, error: QuireError) -> RequestOutput:
        """Its end where no worker says it."""
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason = reason
        return self._ended(status, error)

    @property
    def is_finished(self) -> bool:
        """Whether each completion has its end, and nothing is missing but the report of that."""
        scores = self.command.params.prompt_logprobs
        return scores is None and all(c.finish_reason is not None for c in self.completions)

    def finished(self) -> RequestOutput:
        return self._ended(Status.FINISHED, None)

    def _ended(self, status: Status, error: QuireError | None) -> RequestOutput:
        self.metrics.finished_at = time.perf_counter()
        return RequestOutput(
            request_id=self.command.request_id,
            prompt_token_ids=self.command.prompt,
            completions=self.completions,
            metrics=self.metrics,
            status=status,
            error=error,
        )


def new_record(
    name: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    options: RequestOptions,
    handle: Stream,
    is_streamed: bool,
) -> Record:
    """Of a request that comes now; with a seed, so that it can go on in any engine."""
    if params.seed is None:
        params = replace(params, seed=new_seed())
    command = wire.Submit(
        name,
        prompt,
        params,
        options.get("key", ""),
        options.get("priority", 0),
        options.get("timeout_s"),
        options.get("pooling", False),
        options.get("num_generated", 0),
        time.perf_counter(),
    )
    metrics = RequestMetrics(command.arrived_at)
    seed = (params.seed or 0) % 2**64
    handle.accepted(
        Request(name, prompt, params, seed, command.key, command.priority, None, metrics)
    )
    scores = params.logprobs is not None
    completions = [Completion(n, logprobs=[] if scores else None) for n in range(params.n)]
    accepted: asyncio.Future[Request] = handle.loop.create_future()
    return Record(command, handle, is_streamed, accepted, completions, metrics)


def judge(
    suspects: Sequence[Record], probed: Record | None, *, are_all: bool = True
) -> tuple[Record | None, list[Record]]:
    """Count a crash against each; who caused it, and who else is to be run apart.

    `are_all`: no other process had suspects. `probed` was run apart. One crash then is no proof:
    whoever kills workers from outside would choose the request.
    """
    for record in suspects:
        record.num_crashes += 1
    twice = [record for record in suspects if record.num_crashes >= CRASHES_OF_A_CAUSE]
    cause = None
    if probed is not None and probed in twice:
        probed.num_probed += 1
        cause = probed if probed.num_probed >= CRASHES_OF_A_CAUSE else None
    if probed is None and are_all and len(suspects) == len(twice) == 1:  # it ran alone
        cause = twice[0]
    return cause, [record for record in twice if record is not cause]


def replace_command(command: wire.Submit, resumed: list[Completion]) -> wire.Submit:
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    return wire.Submit(**{**fields, "resumed": resumed})
