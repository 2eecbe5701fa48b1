"""AsyncLLM: a model for event loops; requests come and go, and share every step. OnlineModel is
what it has in common with a model whose engine is in another process."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from quire.core.config import check_key_weights
from quire.core.errors import ExecutorError, RequestError
from quire.core.request import CallOptions, Piece, RequestOptions, RequestOutput
from quire.core.sampling import SamplingOptions, SamplingParams
from quire.engine.aio import AsyncEngine, OnlineEngine, Stream
from quire.engine.engine import Engine
from quire.engine.stats import Snapshot
from quire.engine.step_log import StepRecord
from quire.llm.assembly import Assembly, EngineFacts, ModelText, StepRead, assemble
from quire.llm.chats import ChatOptions, ChatOutput, TemplateVariables, ToolChoice, Tools
from quire.llm.devices import Options
from quire.llm.forward import (
    NO_TOKENS,
    SCORED,
    ForwardRows,
    Logits,
    TextScore,
    Vectors,
    score_of,
    unit_vector,
)
from quire.llm.prompts import (
    Conversation,
    OnError,
    Prepared,
    Prompt,
    PromptReader,
    keeps_errors,
    length_of,
    one_params,
    split_keywords,
)
from quire.llm.reranking import Reranker
from quire.model.loading import FileForm
from quire.model.spec import tensor_shapes
from quire.structured import PreparedGrammar
from quire.tokenizer import Tokenizer

_LONG_TEXT = 16_384  # characters; tokenising more would block the event loop


class OnlineModel:
    """A model that answers requests of event loops, over whatever runs them.

    `prompts` turns a prompt or a conversation into tokens. Calls take `params` (or
    `sampling_params`), or fields of SamplingParams by name, such as `max_tokens=32`. Further
    options of every request: `key` says whose it is (fairness, prefix reuse), `priority` (lower is
    more urgent), `timeout_s` and `request_id`.
    """

    _engine: OnlineEngine
    _facts: EngineFacts
    _text: ModelText | Assembly
    prompts: PromptReader
    _is_closed = False

    async def open(self) -> None:
        """On the event loop that requests come from, before the first of them."""

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[Piece]:
        """The completion as it comes; leaving the loop ends the request.

        Raises the request's error: at once where it cannot run, else where it ended with one.
        """
        request, keywords = split_keywords(options)
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        prepared = await self._with_grammar(await self._read(prompt), chosen)
        params = prepared.with_ends(chosen)
        handle = await self._engine.submit(prepared.tokens, params, **request)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    async def chat_stream(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        parse_control_tokens: bool = False,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncIterator[Piece]:
        """The answer to a conversation as it comes; see `stream` and `read_chat`."""
        request, keywords = split_keywords(options)
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        prepared = await self.read_chat(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            parse_control_tokens=parse_control_tokens,
        )
        prepared = await self._with_grammar(prepared, chosen)
        handle = await self._engine.submit(prepared.tokens, chosen, **request)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        on_error: OnError = "raise",
        **options: Unpack[CallOptions],
    ) -> RequestOutput:
        """Complete one prompt; for many, gather many calls.

        A request that fails raises; with `on_error="keep"` an error while it runs is in the output.
        """
        request, keywords = split_keywords(options)
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        return await self._complete(await self._read(prompt), chosen, on_error, request)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        parse_control_tokens: bool = False,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        on_error: OnError = "raise",
        **options: Unpack[CallOptions],
    ) -> ChatOutput:
        """Answer one conversation, or a string as one message; see `generate` and LLM.chat."""
        self._check_open()
        request, keywords = split_keywords(options)
        chosen = one_params(params, sampling_params, keywords, self.sampling_defaults)
        chat = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            reasoning_effort,
            thinking_token_budget,
            chat_template_kwargs,
            chosen.structured is not None,
        )
        prepared = await asyncio.to_thread(  # a template may take its time
            self.prompts.read_chat, messages, chat, parse_control_tokens=parse_control_tokens
        )
        assert prepared.turn is not None
        params = prepared.turn.params(chosen)
        output = await self._complete(prepared, params, on_error, request)
        return ChatOutput.of(output, prepared.turn)

    async def embed(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Vectors:
        """The prompt's vector of length 1, as in LLM.embed; an array [hidden]."""
        options["pooling"] = True
        output = await self._complete(await self._read(prompt), NO_TOKENS, "raise", options)
        return unit_vector(output.pooled)

    async def score(
        self, prompt: Prompt, completion: Prompt | None = None, **options: Unpack[RequestOptions]
    ) -> TextScore:
        """How likely the model finds a prompt, or a completion after it, as in LLM.score."""
        self._check_open()
        start = 1
        if completion is None:
            prepared = await self._read(prompt)
        else:
            read = self.prompts.read_pair
            prepared, start = await asyncio.to_thread(read, prompt, completion)
        return score_of(await self._complete(prepared, SCORED, "raise", options), start)

    async def tokenize(self, prompt: Conversation, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, or of a conversation in the model's template."""
        self._check_open()
        return await asyncio.to_thread(
            self.prompts.tokenize, prompt, add_special_tokens=add_special_tokens
        )

    async def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = False
    ) -> str:
        """The text of tokens."""
        self._check_open()
        return self.prompts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def submit(
        self,
        prompt: Prompt | Prepared,
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Queue a request and give its stream, to be read, awaited or cancelled by the caller.

        A prompt that `prompts` has read already is not read again.

        Beside the options of every request: `stream=False` where only the end is of interest, and
        `pooling=True` for the hidden state after the prompt instead of tokens.
        """
        prepared = await self._read(prompt)
        if params is not None:
            prepared = await self._with_grammar(prepared, params)
        return await self._engine.submit(prepared.tokens, params, stream=stream, **options)

    def prepare_grammar(self, params: SamplingParams) -> PreparedGrammar | None:
        """What `structured` asks for, compiled; for a Prepared that is submitted later. Takes long
        for some: not for the event loop."""
        raise NotImplementedError

    async def _with_grammar(self, prepared: Prepared, params: SamplingParams) -> Prepared:
        """With what the engine needs of a constraint, made off the event loop."""
        raise NotImplementedError

    async def read(self, prompt: Prompt) -> Prepared:
        """The tokens of a prompt, without blocking the event loop."""
        return await self._read(prompt)

    async def read_chat(
        self,
        messages: Conversation,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        parse_control_tokens: bool = False,
    ) -> Prepared:
        """The tokens of a conversation, likewise.

        With `parse_control_tokens` messages may write control tokens such as <|im_end|>; without
        it only the template does, and in messages they are text. `tools` and
        `chat_template_kwargs` go to the template, as in LLM.chat.
        """
        self._check_open()
        return await asyncio.to_thread(  # a template may take its time
            self.prompts.read_chat,
            messages,
            ChatOptions(tools, chat_template_kwargs=chat_template_kwargs),
            parse_control_tokens=parse_control_tokens,
        )

    def set_key_weights(self, weights: Mapping[str, float]) -> None:
        """What keys weigh from now on, by name (as EngineConfig.key_weights, over it)."""
        given = dict(weights) if isinstance(weights, Mapping) else weights
        check_key_weights(given)  # here: on the engine's thread an error would end the engine
        self._engine.set_key_weights(given)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model that takes token ids alone."""
        return self._text.tokenizer

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """What the model's files say of sampling, for calls without SamplingParams of their own."""
        return self._text.defaults

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its completion together."""
        return self._facts.max_context

    @property
    def reranker(self) -> Reranker | None:
        """What makes prompts of queries and documents, for a model that was trained to judge
        them."""
        return self._text.reranker

    @property
    def family(self) -> str:
        return self._text.spec.family

    @property
    def form(self) -> FileForm:
        """What its file is."""
        return self._text.form

    @property
    def fingerprint(self) -> str:
        """Another one where the weights, the template or what else makes its answers differs."""
        return self._text.fingerprint

    @property
    def device(self) -> str:
        """The device that runs it, also where "auto" was asked for."""
        return self._facts.device

    @property
    def device_reason(self) -> str:
        """Why that device runs it."""
        return self._facts.device_reason

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in tensor_shapes(self._text.spec).values())

    @property
    def embedding_size(self) -> int:
        """Numbers of a vector that embed() makes."""
        return self._text.spec.hidden_size

    @property
    def max_batch_size(self) -> int:
        return self._facts.max_batch_size

    async def snapshot(self) -> Snapshot:
        """What runs, what waits and why, memory in use, and the counters so far."""
        return await self._engine.snapshot()

    async def latest_steps(self, count: int, after: int | None = None) -> Sequence[StepRecord]:
        """Steps that ran lately and their rows; kept while somebody asks now and then."""
        return await self._engine.latest_steps(count, after)

    def fail(self, failure: ExecutorError) -> None:
        """End every request with this error; nothing more is taken."""
        raise NotImplementedError

    @property
    def num_restarts(self) -> int:
        """Workers that died and were replaced; 0 where the engine is in this process."""
        return 0

    @property
    def is_recovering(self) -> bool:
        """Whether its worker died and the next one is being started; requests wait for it."""
        return False

    @property
    def failure(self) -> ExecutorError | None:
        """Why no request can be answered any more, where that is known."""
        return None

    @property
    def weight_bytes(self) -> int:
        """That the weights take in the executor's memory; 0 where that is not known."""
        return self._facts.weight_bytes

    @property
    def step_read(self) -> StepRead | None:
        """What a step reads at least; None where that depends on more than its rows' lengths."""
        return self._facts.step_read

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing new and wait for what runs; what is left after the timeout is ended."""
        await self._engine.drain(timeout_s)

    async def close(self) -> None:
        """End every request; nothing more is taken."""
        self._is_closed = True
        await self._engine.close()
        self.prompts.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _read(self, prompt: Prompt | Prepared) -> Prepared:
        self._check_open()
        if isinstance(prompt, Prepared):
            return prompt
        if length_of(prompt) > _LONG_TEXT:
            return await asyncio.to_thread(self.prompts.read, prompt)
        return self.prompts.read(prompt)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError(f"this {type(self).__name__} is closed")

    async def _complete(
        self,
        prepared: Prepared,
        params: SamplingParams,
        on_error: OnError,
        options: RequestOptions,
    ) -> RequestOutput:
        kept = keeps_errors(on_error)
        prepared = await self._with_grammar(prepared, params)
        params = prepared.with_ends(params)
        handle = await self._engine.submit(prepared.tokens, params, stream=False, **options)
        output = await handle.output()
        output.prompt = prepared.text
        if output.error is not None and not kept:
            raise output.error
        return output


class AsyncLLM(OnlineModel):
    """A model file, ready to serve. Made like LLM; close it, or use it in an `async with`.

    `prompts` turns a prompt or a conversation into tokens. Calls take `params` (or
    `sampling_params`), or fields of SamplingParams by name, such as `max_tokens=32`. Further
    options of every request: `key` says whose it is (fairness, prefix reuse), `priority` (lower is
    more urgent), `timeout_s` and `request_id`.
    """

    _engine: AsyncEngine
    _text: Assembly

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
        self._wire(assemble(model, options), None)

    @classmethod
    def of(cls, assembly: Assembly, on_stuck: Callable[[], None] | None = None) -> Self:
        """Over a model that is loaded; `on_stuck` is called if its executor stops answering."""
        made = cls.__new__(cls)
        made._wire(assembly, on_stuck)
        return made

    def _wire(self, assembly: Assembly, on_stuck: Callable[[], None] | None) -> None:
        self._text = assembly
        self._facts = EngineFacts.of(assembly)
        engine = assembly.new_engine()
        self._engine = AsyncEngine(engine, on_stuck)
        self._rows = ForwardRows(engine)
        self.prompts = PromptReader(self.tokenizer, self.max_context)

    def prepare_grammar(self, params: SamplingParams) -> PreparedGrammar | None:
        """What `structured` asks for, compiled; for a Prepared that is submitted later. Takes long
        for some: not for the event loop."""
        return self._text.grammars.prepare(params)

    async def _with_grammar(self, prepared: Prepared, params: SamplingParams) -> Prepared:
        breakers = self._text.breakers
        if "dry" in params.order and breakers is not None:
            # The engine's thread asks again and finds them remembered.
            await asyncio.to_thread(breakers, params.dry_sequence_breakers)
        if not params.needs_mask or prepared.grammar is not None:
            return prepared
        return prepared._replace(grammar=await asyncio.to_thread(self.prepare_grammar, params))

    async def forward_batch(
        self,
        rows: Sequence[Sequence[int] | None],
        start_positions: Sequence[int] | int | None = None,
        *,
        split: bool = False,
    ) -> list[Logits]:
        """As LLM.forward_batch, between two steps of the requests that run, which wait for it.

        Rows and requests share the KV cache: blocks that requests hold or may need are refused.
        """
        self._check_open()
        return await self._engine.call(lambda: self._rows.run(rows, start_positions, split=split))

    async def clear(self, row: int | None = None) -> None:
        """Forget the keys and values of one row of forward_batch, or of all."""
        self._check_open()
        await self._engine.call(lambda: self._rows.clear(row))

    async def set_batch_size(self, max_batch_size: int) -> None:
        """Run up to so many sequences together, once the requests that run have ended.

        Requests that come meanwhile wait. The weights stay; the cache begins empty, rows of
        forward_batch and counters included.
        """
        self._check_open()
        changed = self._text.with_batch_size(max_batch_size)

        def renewed() -> Engine:
            engine = changed.new_engine()
            self._text, self._facts = changed, EngineFacts.of(changed)
            self._rows = ForwardRows(engine)
            return engine

        await self._engine.replace_engine(renewed)

    @property
    def stats(self) -> Snapshot:
        """What runs, what waits and why, memory in use, and the counters so far."""
        return self._engine.engine.snapshot()
