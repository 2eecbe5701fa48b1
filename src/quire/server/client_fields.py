"""Fields that clients of today send and quire does not obey: accepted, or refused by name.

They are those of OpenAI's API, vLLM's server and llama.cpp's. A schema that obeys one of them
defines it itself and its line here goes.
"""

from typing import Any, Literal

from quire.server.fields import Refused, Strict, accepted, refused

_NO_ADAPTERS = "quire has no adapters: serve a model into which they are merged"
_NO_SENSES = "quire works with text alone"
_PREFIXES = "prefixes are reused by what they hold, and the answer is the same with and without"
_ONE_PROCESS = "quire keeps the KV cache in one process"
_TIMEOUT = "give timeout in seconds, for the whole request"
_DRAFTS = "drafts change no token"
_IN_CHAT = "use /v1/chat/completions, which has it"
_OPTION = "the server's operator sets it"


class AnyClientFields(Strict):
    """Of every request to the model."""

    request_id: Refused = refused("send it as the header x-request-id")
    session_id: str | None = accepted("requests are routed to one engine")
    cache_salt: Refused = refused("prefixes are kept apart by API key: give each tenant a key")
    mm_processor_kwargs: Refused = refused(_NO_SENSES, {})


class SpeculationFields(Strict):
    """llama.cpp's settings of a draft model, which change no token."""

    n_max: int | None = accepted(_DRAFTS, alias="speculative.n_max")
    n_min: int | None = accepted(_DRAFTS, alias="speculative.n_min")
    p_min: float | None = accepted(_DRAFTS, alias="speculative.p_min")
    draft_type: str | None = accepted(_DRAFTS, alias="speculative.type")
    ngram_size_n: int | None = accepted(_DRAFTS, alias="speculative.ngram_size_n")
    ngram_size_m: int | None = accepted(_DRAFTS, alias="speculative.ngram_size_m")
    ngram_min_hits: int | None = accepted(_DRAFTS, alias="speculative.ngram_min_hits")


class GenerationClientFields(AnyClientFields, SpeculationFields):
    """Of chat and plain completions."""

    # OpenAI's
    metadata: dict[str, Any] | None = accepted("nothing is stored that it could label")
    store: bool | None = accepted("nothing is stored")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = accepted(
        "there is one tier; priority is a field of its own"
    )
    safety_identifier: str | None = accepted("nobody is reported to")
    prompt_cache_key: str | None = accepted(_PREFIXES)
    prompt_cache_retention: str | None = accepted(_PREFIXES)
    prompt_cache_options: dict[str, Any] | None = accepted(_PREFIXES)

    # vLLM's
    use_beam_search: Refused = refused("use n and choose yourself", False)
    length_penalty: Refused = refused("there is no beam search that it could steer", 1)
    logits_processors: Refused = refused("use structured_outputs or logit_bias", [])
    truncation_side: Refused = refused("shorten the prompt yourself")
    logprob_token_ids: Refused = refused("logprobs lists the likeliest tokens")
    media_io_kwargs: Refused = refused(_NO_SENSES, {})
    kv_transfer_params: Refused = refused(_ONE_PROCESS, {})
    ec_transfer_params: Refused = refused(_ONE_PROCESS, {})
    vllm_xargs: Refused = refused("quire has no plug-ins", {})
    repetition_detection: Refused = refused("use max_tokens, stop or repetition_penalty")
    routed_experts_prompt_start: Refused = refused("experts are not reported", 0)
    return_token_offsets: Refused = refused("return_token_ids has the tokens", False)
    return_prompt_text: Refused = refused("/tokenize and /detokenize show the prompt", False)
    stream_interval: int | None = accepted("an event has what is there when it is written", ge=1)
    guided_decoding_backend: str | None = accepted("there is one, llguidance")
    guided_whitespace_pattern: Refused = refused("write the form as a grammar")

    # llama.cpp's
    n_predict: Refused = refused("use max_tokens", -1)
    n_cmpl: Refused = refused("use n", 1)
    mirostat: Refused = refused("its state is no function of the row: use min_p", 0)
    mirostat_tau: float | None = accepted("it matters with mirostat alone")
    mirostat_eta: float | None = accepted("it matters with mirostat alone")
    adaptive_target: Refused = refused("its state is no function of the row: use min_p", -1)
    adaptive_decay: float | None = accepted("it matters with adaptive_target alone")
    n_keep: Refused = refused("a request that outgrows the context ends; nothing is cut", 0, -1)
    n_discard: Refused = refused("a request that outgrows the context ends; nothing is cut", 0)
    n_indent: Refused = refused("write the form as a grammar", 0)
    n_cache_reuse: int | None = accepted(_PREFIXES)
    cache_prompt: bool | None = accepted(_PREFIXES)
    id_slot: int | None = accepted("there are no slots to choose from")
    n_probs: Refused = refused("use logprobs", 0)
    post_sampling_probs: Refused = refused("logprobs are the model's own", False)
    min_keep: Refused = refused("top_k, top_p and min_p always leave one token", 0, 1)
    t_max_predict_ms: Refused = refused(_TIMEOUT, 0, -1)
    t_max_prompt_ms: Refused = refused(_TIMEOUT, 0, -1)
    return_tokens: Refused = refused("use return_token_ids", False)
    timings_per_token: Refused = refused("send the header x-quire-trace: 1", False)
    return_progress: Refused = refused("the page at / shows it", False)
    sse_ping_interval: float | None = accepted(_OPTION)
    response_fields: Refused = refused("answers come whole", [])
    lora: Refused = refused(_NO_ADAPTERS, [])
    backend_sampling: bool | None = accepted("where tokens are sampled changes none of them")
    verbose: Refused = refused("send the header x-quire-trace: 1", False)
    grammar_lazy: Refused = refused("a grammar holds from the first token", False)
    grammar_triggers: Refused = refused("a grammar holds from the first token", [])
    grammar_type: Refused = refused("the syntax is found from the grammar")
    preserved_tokens: Refused = refused("control tokens are left out of texts", [])
    penalize_nl: Refused = refused("a line's end is a token like others: use logit_bias", False)
    tfs_z: Refused = refused("use min_p or typical_p", 1)
    image_data: Refused = refused(_NO_SENSES, [])


class ChatClientFields(Strict):
    """Of chat alone."""

    # OpenAI's
    audio: Refused = refused(_NO_SENSES)
    moderation: Refused = refused("quire does not moderate")
    prediction: dict[str, Any] | None = accepted("a guess makes an answer no other")
    verbosity: Refused = refused("say it in the messages", "medium")
    web_search_options: Refused = refused("quire fetches nothing: search, and give the result")

    # vLLM's
    echo: Refused = refused("the last message is in your request: put its text first", False)
    add_special_tokens: Refused = refused("the chat template writes them", False)
    chat_template: Refused = refused("the server's operator chooses it (--chat-template)")
    return_assistant_tokens_mask: Refused = refused("quire does not train", False)

    # llama.cpp's
    generation_prompt: Refused = refused("the model's template writes it")
    parse_tool_calls: Refused = refused("calls are parsed where tools are given", True)
    reasoning_format: Refused = refused("thinking is in reasoning_content", "auto", "deepseek")
    reasoning_budget_tokens: Refused = refused("use thinking_token_budget", -1)
    thinking_budget_tokens: Refused = refused("use thinking_token_budget", -1)
    reasoning_control: Refused = refused("end the request instead", False)
    reasoning_budget_message: Refused = refused("a budget ends the thinking without a message", "")


class CompletionClientFields(Strict):
    """Of plain completions alone."""

    thinking_token_budget: Refused = refused("use /v1/chat/completions")
    prompt_embeds: Refused = refused("give the prompt as text or token ids")
    input_extra: Refused = refused("put what other files say into prompt", [])
    input_prefix: Refused = refused("use prompt")
    input_suffix: Refused = refused("use suffix")


class EmbeddingClientFields(AnyClientFields):
    """Of embeddings."""

    add_special_tokens: Refused = refused("a text gets what the model wants around it", True)
    truncate_prompt_tokens: Refused = refused("shorten the input yourself")
    truncation_side: Refused = refused("shorten the input yourself")
    embed_dtype: Refused = refused("vectors are float32", "float32")
    endianness: Refused = refused("base64 is little-endian", "little", "native")
    use_activation: Refused = refused("vectors have length 1", True)
    normalize: Refused = refused("vectors have length 1", True)
    embd_normalize: Refused = refused("vectors have length 1", 2)
    messages: Refused = refused("give input")


class ResponsesClientFields(AnyClientFields):
    """Of responses: what vLLM's server takes beyond OpenAI's."""

    logit_bias: Refused = refused(_IN_CHAT, {})
    presence_penalty: Refused = refused(_IN_CHAT, 0)
    frequency_penalty: Refused = refused(_IN_CHAT, 0)
    repetition_penalty: Refused = refused(_IN_CHAT, 1)
    ignore_eos: Refused = refused(_IN_CHAT, False)
    skip_special_tokens: Refused = refused(_IN_CHAT, True)
    include_stop_str_in_output: Refused = refused(_IN_CHAT, False)
    structured_outputs: Refused = refused("use text.format, or /v1/chat/completions")
    include_reasoning: Refused = refused("reasoning items can be left unread", True)
    enable_response_messages: Refused = refused("prompts are not shown", False)
    previous_input_messages: Refused = refused("use previous_response_id, or give all as input")
    media_io_kwargs: Refused = refused(_NO_SENSES, {})
    kv_transfer_params: Refused = refused(_ONE_PROCESS, {})
    ec_transfer_params: Refused = refused(_ONE_PROCESS, {})
    vllm_xargs: Refused = refused("quire has no plug-ins", {})
