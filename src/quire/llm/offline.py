"""LLM: a model for programs that wait for their answers; many prompts run together."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import numpy as np

from quire.core.errors import ExecutorError, OverloadedError, QuireError, RequestError
from quire.core.request import (
    Completion,
    Ended,
    FinishReason,
    Piece,
    RequestMetrics,
    RequestOutput,
    Status,
)
from quire.core.sampling import SamplingOptions, SamplingParams
from quire.engine.engine import Engine
from quire.engine.stats import Snapshot
from quire.llm.assembly import Assembly, assemble
from quire.llm.chats import ChatOptions, ChatOutput, TemplateVariables, ToolChoice, Tools
from quire.llm.devices import Options
from quire.llm.forward import (
    NO_TOKENS,
    SCORED,
    ForwardRows,
    Logits,
    TextScore,
    Vectors,
    paired,
    score_of,
    unit_vector,
)
from quire.llm.progress import ProgressBar
from quire.llm.prompts import (
    Conversation,
    OnError,
    Params,
    Prepared,
    Prompt,
    PromptReader,
    keeps_errors,
    listed_conversations,
    listed_prompts,
    one_params,
    params_for_each,
    params_of,
    text_of,
)
from quire.tokenizer import Tokenizer

Asked = TypeVar("Asked")  # a prompt or a conversation

_BATCHES_LIVE = 2  # what runs, and as much waiting: a million prompts cost no more memory


class LLM:
    """A model file, ready to generate. Close it, or use it in a `with`.

    `model`: the path of a GGUF file or a safetensors folder, or "smollm2", which is fetched once.
    `device`: "auto", "cpu", "cuda" or "reference". `kv_memory`: room for keys and values, in bytes
    or as text ("2GiB"); left out, what suits the machine. `max_context`: the longest prompt and
    completion together; left out, what the model and the cache hold. `invariant=False` lets a GPU
    sum in an order that depends on the batch. `trust_model_file=True` reads the file at once, and
    not first in a process without privileges. `chat_template`: the path of a template to use
    instead of the model's own, or False for none. `i2s_packing="arm"` reads I2_S tensors that an
    ARM build of bitnet.cpp wrote; a file does not say which did, and x86's packing is taken.
    `generation_config="none"`: take no sampling defaults from the model's files. `gpu_layers`: so
    many of the last layers on the GPU and the others on the CPU, or "auto" for as many as fit;
    `gpu_memory`: what may be taken of the GPU. `placement="ffn-gpu"`: the feed-forwards of all
    layers on the GPU, attention and the KV cache on the CPU. Any other field of
    EngineConfig may be given by name. `prompts` turns a prompt or a conversation into tokens.

    It takes one call at a time; for callers that come and go, see AsyncLLM.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        device: str = "auto",
        max_batch_size: int = 64,
        kv_memory: str | int | None = None,
        threads: int | None = None,
        batch_timeout_ms: float = 0.0,
        max_context: int | None = None,
        kv_cache_dtype: str = "auto",
        invariant: bool = True,
        trust_model_file: bool = False,
        chat_template: str | Path | bool = True,
        i2s_packing: str | None = None,
        generation_config: str = "auto",
        gpu_layers: int | str | None = None,
        gpu_memory: str | int | None = None,
        placement: str | None = None,
        **engine: Any,
    ) -> None:
        options = Options(
            device=device,
            max_batch_size=max_batch_size,
            kv_memory=kv_memory,
            threads=threads,
            batch_timeout_ms=batch_timeout_ms,
            max_context=max_context,
            kv_cache_dtype=kv_cache_dtype,
            invariant=invariant,
            trust_model_file=trust_model_file,
            chat_template=chat_template,
            i2s_packing=i2s_packing,
            generation_config=generation_config,
            gpu_layers=gpu_layers,
            gpu_memory=gpu_memory,
            placement=placement,
            engine=engine,
        )
        self._call = threading.Lock()  # locked while a call runs
        self._assembly: Assembly | None = assemble(model, options)
        self.prompts = PromptReader(self.tokenizer, self.max_context)
        self._renew_engine()

    # ---- generating

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **keywords: Unpack[SamplingOptions],
    ) -> list[RequestOutput]:
        """Complete one prompt or many, each text or token ids; the outputs in the same order.

        How: `params` (or `sampling_params`), one for all or one for each; or fields of
        SamplingParams by name, such as `max_tokens=32`. The first prompt that fails ends the call
        with its error; with `on_error="keep"` the error is in its output, and the others go on.
        `progress`: a bar on standard error; left out, where that is a terminal.
        """
        chosen = params_of(params, sampling_params, keywords, self.sampling_defaults)
        asked = listed_prompts(prompts)
        with self._alone("generate"):
            return self._run(asked, chosen, self.prompts.read, on_error, progress)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params = None,
        *,
        sampling_params: Params = None,
        parse_control_tokens: bool = False,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **keywords: Unpack[SamplingOptions],
    ) -> list[ChatOutput]:
        """Answer one conversation or many: lists of {"role": ..., "content": ...}, or a string for
        one message of the user. The rest as in `generate`.

        `tools` and `tool_choice` are as in OpenAI's API; `chat_template_kwargs`, variables such as
        enable_thinking, go to the model's template. An output's `answer` has the content, the
        reasoning and the tool calls; its `text` is what the model wrote, markers included.
        `thinking_token_budget` ends the reasoning after so many tokens.

        Messages are text: control tokens such as <|im_end|> come from the model's template alone,
        unless `parse_control_tokens` lets messages write them, too.
        """
        chosen = params_of(params, sampling_params, keywords, self.sampling_defaults)
        asked = listed_conversations(messages)
        each = [chosen] if isinstance(chosen, SamplingParams) else chosen
        is_structured = any(one.structured is not None for one in each)
        options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            reasoning_effort,
            thinking_token_budget,
            chat_template_kwargs,
            is_structured,
        )
        read = partial(
            self.prompts.read_chat, options=options, parse_control_tokens=parse_control_tokens
        )
        with self._alone("chat"):
            if asked:
                _ = self.prompts.template  # a model that cannot chat is no fault of a prompt
            outputs = self._run(asked, chosen, read, on_error, progress, name="messages")
        return [o if isinstance(o, ChatOutput) else ChatOutput.of(o, None) for o in outputs]

    def _run(
        self,
        asked: list[Asked],
        params: SamplingParams | Sequence[SamplingParams],
        prepare: Callable[[Asked], Prepared],
        on_error: OnError = "raise",
        progress: bool | None = None,
        *,
        name: str = "prompts",
        pooling: bool = False,
    ) -> list[RequestOutput]:
        kept = keeps_errors(on_error)
        each = params_for_each(params, len(asked))
        if not asked:
            return []
        run = _OfflineRun(
            self._engine, asked, each, prepare, name=name, keeps_errors=kept, pooling=pooling
        )
        try:
            outputs = run.run(ProgressBar(len(asked), show=progress))
        except BaseException:  # Ctrl-C, most likely: the engine's state is unknown
            self._renew_engine()
            raise
        if run.failure is not None:
            raise run.failure
        return outputs

    # ---- as it comes

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **keywords: Unpack[SamplingOptions],
    ) -> "TextStream":
        """The completion of one prompt, piece by piece: `for piece in llm.stream(...)`.

        Leaving the loop ends the request. Parameters as in `generate`.
        """
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        return TextStream(self._pieces(self.prompts.read(prompt), chosen))

    def chat_stream(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        parse_control_tokens: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        **keywords: Unpack[SamplingOptions],
    ) -> "TextStream":
        """The answer to one conversation, likewise; parameters as in `chat`."""
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        prepared = self.prompts.read_chat(
            messages,
            ChatOptions(tools, chat_template_kwargs=chat_template_kwargs),
            parse_control_tokens=parse_control_tokens,
        )
        return TextStream(self._pieces(prepared, chosen))

    def _pieces(
        self, prepared: Prepared, params: SamplingParams
    ) -> Generator[Piece, None, RequestOutput]:
        with self._alone("stream"):
            request = self._engine.add_request(
                prepared.tokens, prepared.with_ends(params), stream=True
            )
            try:
                while True:
                    for event in self._engine.step():
                        if isinstance(event, Ended):
                            event.output.prompt = prepared.text
                            return event.output
                        yield event
                    self._engine.sleep_until_due()
            except GeneratorExit:
                raise
            except BaseException:  # as in _run
                self._renew_engine()
                raise
            finally:
                if self._engine.cancel(request.id):
                    self._engine.settle()
                    self._engine.take_events()

    # ---- without generating

    def embed(self, prompts: Prompt | Iterable[Prompt]) -> Vectors:
        """A vector of length 1 for each prompt, as an array [prompts, hidden]: the hidden state
        after its last token. A rough measure from a model that was not trained to embed.
        """
        asked = listed_prompts(prompts)
        with self._alone("embed"):
            outputs = self._run(asked, NO_TOKENS, self.prompts.read, pooling=True)
        vectors = [unit_vector(output.pooled) for output in outputs]
        return np.array(vectors, np.float32).reshape(len(vectors), self._open.spec.hidden_size)

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        completions: Prompt | Iterable[Prompt] | None = None,
    ) -> list[TextScore]:
        """How likely the model finds each prompt after its first token; or, where completions are
        given, how likely each completion after its prompt (one prompt may serve all of them).
        """
        pairs = paired(prompts, completions)
        lengths: list[int] = []

        def read(pair: tuple[Prompt, Prompt | None]) -> Prepared:
            prompt, completion = pair
            if completion is None:
                lengths.append(1)
                return self.prompts.read(prompt)
            prepared, length = self.prompts.read_pair(prompt, completion)
            lengths.append(length)
            return prepared

        with self._alone("score"):
            outputs = self._run(pairs, SCORED, read)
        return [score_of(out, length) for out, length in zip(outputs, lengths, strict=True)]

    def tokenize(self, prompt: Conversation, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, or of a conversation in the model's template."""
        _ = self._open
        return self.prompts.tokenize(prompt, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        _ = self._open
        return self.prompts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    # ---- plain forward passes

    def forward_batch(
        self,
        rows: Sequence[Sequence[int] | None],
        start_positions: Sequence[int] | int | None = None,
        *,
        split: bool = False,
    ) -> list[Logits]:
        """The logits after every token of every row: one array [tokens, vocabulary] each.

        Row n goes on where the last call left row n if its start is that row's length; an earlier
        start drops what lies after it. `start_positions`: one for each row or one for all; left
        out, every row begins anew. A row of None is left as it is and gives no logits. More rows
        than `max_batch_size` are an error; with `split` they run in several passes.
        """
        with self._alone("forward_batch"):
            return self._rows.run(rows, start_positions, split=split)

    def clear(self, row: int | None = None) -> None:
        """Forget the keys and values of one row of forward_batch, or of all."""
        with self._alone("clear"):
            self._rows.clear(row)

    def set_batch_size(self, max_batch_size: int) -> None:
        """Run up to so many sequences together from now on.

        The weights stay; the cache begins empty, rows of forward_batch and counters included.
        """
        with self._alone("set_batch_size"):
            self._assembly = self._open.with_batch_size(max_batch_size)
            self._renew_engine()

    # ---- looking at it

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model that takes token ids alone."""
        return self._open.tokenizer

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """What the model's files say of sampling, for calls without SamplingParams of their own."""
        return self._open.defaults

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its completion together."""
        return self._open.executor.capacity.max_context

    @property
    def max_batch_size(self) -> int:
        return self._open.options.max_batch_size

    @property
    def stats(self) -> Snapshot:
        """What runs, what waits and why, memory in use, and the counters so far."""
        _ = self._open
        return self._engine.snapshot()

    # ---- the end

    def close(self) -> None:
        """Let go of the weights and the cache."""
        if self._assembly is None:
            return
        with self._alone("close"):
            self._engine.close()
            self.prompts.close()
            self._assembly = None
            del self._engine, self._rows

    def __enter__(self) -> Self:
        _ = self._open
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _open(self) -> Assembly:
        if self._assembly is None:
            raise RequestError("this LLM is closed")
        return self._assembly

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        _ = self._open
        if not self._call.acquire(blocking=False):
            raise RequestError(
                f"{name} is refused while another call or stream runs: give all prompts to one "
                "call, end the stream first, or use AsyncLLM"
            )
        try:
            yield
        finally:
            self._call.release()

    def _renew_engine(self) -> None:
        """An engine with an empty cache, over the same weights."""
        engine: Engine = self._open.new_engine()
        self._engine = engine
        self._rows = ForwardRows(engine)


class TextStream(Iterator[Piece]):
    """The pieces of one request as they come; `output` is the whole of it, once it has ended.

    A request that fails raises its error where the pieces end.
    """

    def __init__(self, pieces: Generator[Piece, None, RequestOutput]) -> None:
        self._pieces = pieces
        self.output: RequestOutput | None = None

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.output = end.value or self.output
        if self.output is not None and self.output.error is not None:
            raise self.output.error
        raise StopIteration

    def close(self) -> None:
        """End the request, if it has not ended."""
        self._pieces.close()


class _OfflineRun(Generic[Asked]):
    """One call of generate or chat: feeds the engine prompts as its queue drains. A prompt that
    cannot run fails alone where errors are kept, and else ends the call: see `failure`."""

    def __init__(
        self,
        engine: Engine,
        asked: Sequence[Asked],
        params: Sequence[SamplingParams],
        prepare: Callable[[Asked], Prepared],
        *,
        name: str,  # of what was asked, in errors
        keeps_errors: bool,
        pooling: bool,
    ) -> None:
        self.failure: QuireError | None = None
        self._name = name
        self._keeps_errors = keeps_errors
        self._pooling = pooling
        self._engine = engine
        self._asked = asked
        self._params = params
        self._prepare = prepare
        self._outputs: list[RequestOutput | None] = [None] * len(asked)
        self._num_done = 0
        self._started = time.monotonic()
        self._next = 0  # index of the prompt to be read next
        self._prepared: Prepared | None = None  # that prompt, once read: the queue may be full
        self._live: dict[str, tuple[int, Prepared]] = {}  # index and prompt, by request id

    def run(self, bar: ProgressBar) -> list[RequestOutput]:
        engine = self._engine
        tokens_before = engine.stats.completion_tokens
        while self.failure is None and (self._next < len(self._asked) or engine.has_work):
            self._feed()
            for event in engine.step():
                if isinstance(event, Ended):
                    self._finish(event.output)
            engine.sleep_until_due()
            bar.update(self._num_done, self._told(engine.stats.completion_tokens - tokens_before))
        if self.failure is not None:
            self._abandon()
        bar.finish(self._num_done, self._told(engine.stats.completion_tokens - tokens_before))
        return [output for output in self._outputs if output is not None]

    def _told(self, num_tokens: int) -> str:
        """How far it has come, for the bar."""
        rate = num_tokens / max(time.monotonic() - self._started, 1e-9)
        done = f"{self._num_done}/{len(self._asked)} requests"
        return f"{done}, {num_tokens} tokens, {rate:.1f} tokens/s"

    def _feed(self) -> None:
        """Queue prompts until enough are live."""
        most = _BATCHES_LIVE * self._engine.config.max_batch_size
        while self._next < len(self._asked) and len(self._live) < most and self.failure is None:
            try:
                self._queue(self._next)
            except OverloadedError:
                return  # again after a step
            except ExecutorError:
                raise
            except QuireError as error:
                self._refuse(self._next, error)
            self._prepared = None
            self._next += 1

    def _queue(self, index: int) -> None:
        if self._prepared is None:
            self._prepared = self._prepare(self._asked[index])
        turn, params = self._prepared.turn, self._prepared.with_ends(self._params[index])
        if turn is not None:
            params = turn.params(params)
        request = self._engine.add_request(self._prepared.tokens, params, pooling=self._pooling)
        self._live[request.id] = (index, self._prepared._replace(tokens=()))

    def _finish(self, output: RequestOutput) -> None:
        index, prepared = self._live.pop(output.request_id)
        output.prompt = prepared.text
        self._outputs[index] = (
            output if prepared.turn is None else ChatOutput.of(output, prepared.turn)
        )
        self._num_done += 1
        self._look_at(output.error, index)

    def _look_at(self, error: QuireError | None, index: int) -> None:
        """Where errors are not kept, the first ends the call; of many prompts it says which."""
        if error is None or self._keeps_errors or self.failure is not None:
            return
        self.failure = error
        if len(self._asked) > 1:
            self.failure = copy(error)
            self.failure.args = (f"{self._name}[{index}]: {error}",)
            self.failure.__cause__ = error

    def _abandon(self) -> None:
        """End the call's requests; the engine goes on."""
        for request_id in list(self._live):
            self._engine.cancel(request_id)
        self._engine.settle()
        self._engine.take_events()

    def _refuse(self, index: int, error: QuireError) -> None:
        """The output of a request that never reached the engine."""
        now = self._engine.clock.now()
        asked = self._asked[index]
        self._outputs[index] = RequestOutput(
            request_id=f"refused-{index}",
            prompt_token_ids=() if self._prepared is None else tuple(self._prepared.tokens),
            completions=[Completion(0, finish_reason=FinishReason.ERROR)],
            metrics=RequestMetrics(now, finished_at=now),
            status=Status.FAILED,
            error=error,
            prompt=text_of(asked),
        )
        self._num_done += 1
        self._look_at(error, index)
