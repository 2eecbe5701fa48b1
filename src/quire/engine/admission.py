"""Admission: checks a request against the model, the KV cache and the queue before it is queued."""

import itertools
import operator
from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ContextLengthError, OverloadedError, QuireError, RequestError
from quire.core.plan import NO_BREAKERS, Breakers, Capacity, Sampling, TokenLogprob, Want
from quire.core.request import BACKGROUND, Completion, Request, RequestMetrics, Status
from quire.core.sampling import SamplingParams, new_seed
from quire.core.windows import longest_context
from quire.engine.fairness import WaitingQueues, share_of
from quire.engine.sequence import (
    Grammar,
    LiveRequest,
    MakeBreakers,
    MakeDetokenizer,
    MakeGrammar,
    Sequence,
    Transcript,
)
from quire.engine.stats import CompletionRate
from quire.kvcache import KVCache

_MIN_RETRY_AFTER_S = 0.01


class Admission:
    """Turns what a caller gives into a live request, or raises an error that says why not:
    RequestError if it can never run, OverloadedError if it cannot be queued now."""

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        cache: KVCache,
        end_token_ids: Iterable[int],
        make_detokenizer: MakeDetokenizer | None,
        make_grammar: MakeGrammar | None,
        make_breakers: MakeBreakers | None = None,
        default_max_tokens: int | None = None,
    ) -> None:
        self._default_max_tokens = default_max_tokens
        self._config = config
        self._capacity = capacity
        self._cache = cache
        self._end_token_ids = tuple(end_token_ids)
        self._make_detokenizer = make_detokenizer
        self._make_grammar = make_grammar
        self._make_breakers = make_breakers
        self.completion_rate = CompletionRate()
        self._num_reserved_blocks = 0
        self._request_ids = itertools.count(1)
        self._sequence_ids = itertools.count(1)

    def build_request(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        now: float,
        *,
        request_id: str | None,
        key: str,
        priority: int,
        timeout_s: float | None,
        num_generated: int = 0,
        resumed: SequenceOf[Completion] = (),
        taken_ids: Container[str] = (),
    ) -> Request:
        request_id = request_id or self._new_id(taken_ids)
        tokens, generated = _split(self._checked_prompt(prompt), num_generated, params)
        if generated:
            resumed = [Completion(0, list(generated))]
        _check_resumed(resumed, params)
        num_resumed = max((len(completion.token_ids) for completion in resumed), default=0)
        self._check_capacity(tokens, params, num_resumed)
        self._check_params(params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}", param="priority")
        for name, value in (("request_id", request_id), ("key", key)):
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string, got {value!r}", param=name)
        if timeout_s is None and priority < BACKGROUND:  # which waits as long as others come
            timeout_s = self._config.timeout_s
        if timeout_s is not None and (not isinstance(timeout_s, int | float) or not timeout_s > 0):
            raise RequestError(f"timeout_s must be above 0, got {timeout_s!r}", param="timeout_s")
        seed = new_seed() if params.seed is None else params.seed % 2**64
        deadline = None if timeout_s is None else now + timeout_s
        metrics = RequestMetrics(now)
        request = Request(
            request_id, tokens, params, seed, key, priority, deadline, metrics, tuple(resumed)
        )
        if request.id in taken_ids:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        request.move_to(Status.WAITING, now)
        return request

    def reserve_blocks(self, count: int) -> None:
        """So many blocks are kept by others: requests must fit into the rest."""
        self._num_reserved_blocks = count

    def check_queue(
        self, request: Request, waiting: WaitingQueues, num_parked: int, now: float
    ) -> None:
        """Raise OverloadedError, with the time to retry after, if the queue cannot take it."""
        config = self._config
        queued = waiting.load(background=request.is_background)
        num_waiting = queued.num_sequences + num_parked
        if num_waiting >= config.max_queue_requests:
            raise OverloadedError(
                f"{num_waiting} requests wait; the queue holds {config.max_queue_requests}",
                self._retry_after_s(1 + num_waiting - config.max_queue_requests, now),
            )
        excess = queued.num_tokens + request.num_tokens_asked - config.max_queue_tokens
        if queued.num_sequences and excess > 0:
            raise OverloadedError(
                f"{queued.num_tokens} tokens wait and this request asks for "
                f"{request.num_tokens_asked}; the queue holds {config.max_queue_tokens}",
                self._retry_after_s(excess * queued.num_sequences / queued.num_tokens, now),
            )

    def _retry_after_s(self, num_requests: float, now: float) -> float:
        """When so many requests should have left the queue, at the latest rate of completions."""
        interval_s = self.completion_rate.interval_s(now)
        return max(_MIN_RETRY_AFTER_S, interval_s * max(1.0, num_requests))

    def _new_id(self, taken: Container[str]) -> str:
        return next(name for n in self._request_ids if (name := f"request-{n}") not in taken)

    def _checked_prompt(self, prompt: Iterable[int]) -> tuple[int, ...]:
        if isinstance(prompt, str | bytes):
            raise RequestError(
                "the engine takes token ids, got text; use LLM for text", param="prompt"
            )
        if not isinstance(prompt, Iterable):
            raise RequestError(
                f"the prompt must be a list of token ids, got {prompt!r}", param="prompt"
            )
        tokens = tuple(prompt)
        if not tokens:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if set(map(type, tokens)) != {int}:  # one call for all: this thread runs the steps
            tokens = tuple(_integer(token, index) for index, token in enumerate(tokens))
        vocabulary = self._capacity.vocabulary_size
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            index = next(n for n, token in enumerate(tokens) if not 0 <= token < vocabulary)
            raise RequestError(
                f"prompt token {index} is {tokens[index]}; the vocabulary has 0 to "
                f"{vocabulary - 1}",
                param="prompt",
            )
        return tokens

    def _check_capacity(
        self, tokens: tuple[int, ...], params: SamplingParams, num_generated: int
    ) -> None:
        capacity = self._capacity
        if len(tokens) >= capacity.max_context and params.max_tokens != 0:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; the context holds {capacity.max_context} "
                "with at least one for the completion",
                param="prompt",
                max_context=capacity.max_context,
            )
        name, asked = "max_tokens", params.max_tokens
        if asked is None:
            name, asked = "min_tokens", max(params.min_tokens, num_generated + 1)
        total = len(tokens) + asked
        if total > capacity.max_context:
            raise ContextLengthError(
                f"prompt ({len(tokens)}) and {name} ({asked}) come to {total} tokens; the context "
                f"holds {capacity.max_context}",
                param=name,
                max_context=capacity.max_context,
            )
        self._check_blocks(total)
        if not self._config.chunking and total > capacity.max_step_tokens:
            raise RequestError(
                f"without chunking a step must hold all {total} tokens; it holds "
                f"{capacity.max_step_tokens}",
                param=name,
            )
        batch = self._config.batch_size(capacity)
        if params.n > batch:
            raise RequestError(f"n is {params.n}; a batch holds {batch} sequences", param="n")

    @property
    def _max_length(self) -> int:
        """Tokens that the cache has room for, of a request that does not say how many it wants."""
        capacity = self._capacity
        length = longest_context(
            capacity.windows,
            capacity.block_size,
            num_blocks=capacity.num_blocks - self._num_reserved_blocks,
            limit=capacity.max_context,
            chunk=self._config.smallest_chunk,
        )
        return length if self._config.chunking else min(length, capacity.max_step_tokens)

    def _check_blocks(self, num_tokens: int) -> None:
        needed = self._cache.peak_blocks(num_tokens, self._config.smallest_chunk)
        num_blocks = self._capacity.num_blocks
        left = num_blocks - self._num_reserved_blocks
        if needed <= left:
            return
        if needed <= num_blocks:
            raise RequestError(
                f"{num_tokens} tokens need {needed} blocks of the KV cache, and forward_batch's "
                f"rows leave {left} of {num_blocks}: call clear() first",
                param="max_tokens",
            )
        raise RequestError(
            f"{num_tokens} tokens need {needed} blocks of the KV cache, which has {num_blocks}; "
            "ask for fewer tokens or give it more memory",
            param="max_tokens",
        )

    def _check_params(self, params: SamplingParams) -> None:
        vocabulary = self._capacity.vocabulary_size
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocabulary:
                    raise RequestError(
                        f"{name} names token {token}; the vocabulary has 0 to {vocabulary - 1}",
                        param=name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocabulary:
                raise RequestError(
                    f"{name} is {count}; the vocabulary has {vocabulary} tokens", param=name
                )
        if params.stop and self._make_detokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        if params.needs_mask and self._make_grammar is None:
            name = "structured" if params.structured is not None else "bad_words"
            name = "allowed_token_ids" if params.allowed_token_ids is not None else name
            raise RequestError(f"this engine was made without masks for {name}", param=name)

    def open(self, request: Request, *, wants_pieces: bool, pooling: bool) -> LiveRequest:
        """The live side of a checked request, with its first sequence."""
        has_scores = request.params.prompt_logprobs is not None
        live = LiveRequest(request, wants_pieces, prompt_logprobs=[] if has_scores else None)
        if len(request.resumed) > 1:  # forked before: each goes on for itself
            for index in range(request.params.n):
                live.add_sequence(self._new_sequence(live, index))
            return live
        sequence = self._new_sequence(live, 0, pooling=pooling)
        sequence.reserve_slots(request.params.n)
        live.add_sequence(sequence)
        return live

    def fork(self, first: Sequence) -> list[Sequence]:
        """The siblings of a sequence whose prompt is computed: they share its blocks.

        Each computes the last prompt token again, for logits of its own to sample from.
        """
        siblings = []
        start = first.prompt_length - 1
        for index in range(1, first.request.params.n):
            sibling = self._new_sequence(first.live, index)
            if first.is_running:
                sibling.start_from(self._cache.fork(first.block_table, start), start)
            first.live.add_sequence(sibling)
            siblings.append(sibling)
        first.forked()
        return siblings

    def _new_sequence(self, live: LiveRequest, index: int, *, pooling: bool = False) -> Sequence:
        request = live.request
        params = request.params
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self._end_token_ids)
        # Prompt scores and pooling need every prompt position computed: no prefix reuse.
        is_whole = pooling or params.prompt_logprobs is not None
        so_far = request.resumed[index] if request.resumed else Completion(index)
        is_done = so_far.finish_reason is not None
        given = so_far.token_ids
        grammar = None if is_done else self._grammar(params, given, stop_ids)
        number = next(self._sequence_ids)
        max_length = self._usual_length(request)
        if live.sequences:
            max_length = live.sequences[0].max_length  # of the prompt that it was forked from
        elif params.max_tokens is not None:  # one that only computes its prompt never comes to it
            max_length = len(request.prompt) + max(1, params.max_tokens)
        transcript = self._transcript(params)
        text = so_far.text
        if transcript is not None and not is_done:
            text = transcript.add_all(given, params.min_tokens)
        logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        has_others = is_whole or params.max_tokens == 0
        has_short_extras = grammar is not None or params.needs_history
        return Sequence(
            id=number,
            live=live,
            sampling=Sampling(
                params, request.seed, index, tuple(sorted(stop_ids)), self._breakers(params)
            ),
            completion=replace(so_far, token_ids=list(given), text=text, logprobs=logprobs),
            tokens=[*request.prompt, *given],
            is_done=is_done,
            block_table=self._cache.new_table(None if is_whole else request.key),
            rank=(self._urgency(request), number),
            key=share_of(
                request.key if self._config.fairness else "", background=request.is_background
            ),
            transcript=transcript,
            grammar=grammar,
            goal=_goal(params, pooling=pooling),
            # Rows without extras are planned as decode steps, which sample.
            has_row_extras=has_others or has_short_extras,
            has_short_extras=has_short_extras and not has_others,
            needs_history=params.needs_history,
            is_plain=transcript is None or transcript.plain_text is not None,
            needs_last_token="dry" in params.order,
            stop_token_ids=frozenset(stop_ids),
            prompt_length=len(request.prompt),
            max_length=max_length,
        )

    def _usual_length(self, request: Request) -> int:
        """Tokens that a request comes to at most which does not say how many it wants."""
        if self._default_max_tokens is None:
            return self._max_length
        num_resumed = max((len(completion.token_ids) for completion in request.resumed), default=0)
        least = max(request.params.min_tokens, num_resumed + 1)
        return min(self._max_length, len(request.prompt) + max(self._default_max_tokens, least))

    def _urgency(self, request: Request) -> float:
        """Arrival time, moved by priority: waiting `aging_s` is worth one level."""
        return request.metrics.arrived_at + request.priority * self._config.aging_s

    def _breakers(self, params: SamplingParams) -> Breakers:
        texts = params.dry_sequence_breakers
        if "dry" not in params.order or not texts:
            return NO_BREAKERS
        if self._make_breakers is None:
            raise RequestError(
                "dry_sequence_breakers needs a tokenizer, and this model has none; give an empty "
                "list",
                param="dry_sequence_breakers",
            )
        return self._make_breakers(texts)

    def _transcript(self, params: SamplingParams) -> Transcript | None:
        if self._make_detokenizer is None or not params.detokenize:
            return None
        detokenizer = self._make_detokenizer(
            skip_special=params.skip_special_tokens, spelled=params.spelled_token_ids
        )
        include_stop = params.include_stop_str_in_output
        return Transcript(detokenizer, params.stop, include_stop=include_stop)

    def _grammar(
        self, params: SamplingParams, given: Iterable[int], stop_ids: Container[int]
    ) -> Grammar | None:
        if not params.needs_mask or self._make_grammar is None:
            return None
        try:
            grammar = self._make_grammar(params)
            for token in given:
                if token not in stop_ids:  # as in Sequence.completes_grammar
                    grammar.accept(token)
            return grammar
        except QuireError:
            raise
        except Exception as error:
            kind = "" if params.structured is None else f" ({params.structured.kind})"
            message = f"structured{kind} cannot be followed: {error}"
            raise RequestError(message, param="structured") from error


def _goal(params: SamplingParams, *, pooling: bool) -> Want:
    if pooling:
        return Want.POOLED
    return Want.NOTHING if params.max_tokens == 0 else Want.SAMPLE


def _split(
    tokens: tuple[int, ...], num_generated: int, params: SamplingParams
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt, and the tokens at its end that are the completion so far."""
    if type(num_generated) is not int or not 0 <= num_generated < len(tokens):
        raise RequestError(
            f"num_generated must be an integer from 0 to {len(tokens) - 1}, of {len(tokens)} "
            f"tokens at least one being the prompt's; got {num_generated!r}",
            param="num_generated",
        )
    if num_generated and (params.n > 1 or params.prompt_logprobs is not None):
        raise RequestError(
            "num_generated continues one completion: it takes n=1 and no prompt_logprobs",
            param="num_generated",
        )
    if params.max_tokens is not None and num_generated > max(0, params.max_tokens - 1):
        raise RequestError(
            f"max_tokens is {params.max_tokens} and {num_generated} tokens are generated: none is "
            "left to generate",
            param="max_tokens",
        )
    border = len(tokens) - num_generated
    return tokens[:border], tokens[border:]


def _check_resumed(resumed: SequenceOf[Completion], params: SamplingParams) -> None:
    """One completion, or all of them; prompt scores would be those of the prompt's rest alone."""
    if not resumed:
        return
    if len(resumed) != params.n or params.prompt_logprobs is not None:
        raise RequestError(
            f"resumed has {len(resumed)} completions; it takes all {params.n} that are asked for, "
            "and no prompt_logprobs",
            param="resumed",
        )
    if all(completion.finish_reason is not None for completion in resumed):
        raise RequestError("resumed has no completion that goes on", param="resumed")


def _integer(token: Any, index: int) -> int:
    """A token id as an int; other types of integers (numpy's) are converted."""
    if isinstance(token, bool):
        raise _not_an_integer(token, index)
    try:
        return operator.index(token)
    except TypeError as error:
        raise _not_an_integer(token, index) from error


def _not_an_integer(token: Any, index: int) -> RequestError:
    return RequestError(f"prompt token {index} must be an integer, got {token!r}", param="prompt")
