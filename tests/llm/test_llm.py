"""LLM: many prompts, results in order, each failing alone; and what it does besides."""

import io
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixture_files import FIXTURES, fixture_file
from tests.llm.conftest import KV_MEMORY
from tests.llm.text_models import write_changed_model, write_text_model

from quire import (
    LLM,
    ConfigError,
    FinishReason,
    ModelFileError,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnsupportedModelError,
)
from quire.core.errors import RowFaultError
from quire.executors.fake import FakeExecutor
from quire.executors.worker import StepWorker
from quire.llm.prompts import Prompt

PATH = fixture_file("tiny/Q4_K_M.gguf")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
SAMPLED = replace(GREEDY, temperature=1.3, seed=7)
PENALISED = replace(SAMPLED, repetition_penalty=1.4, presence_penalty=0.5)
SHARED = list(range(40, 60))
REQUESTS = [([*SHARED, n], params) for n, params in enumerate((GREEDY, SAMPLED, PENALISED) * 3)]
REQUESTS += [([5, 6], replace(SAMPLED, n=3)), ([9] * 50, replace(GREEDY, prompt_logprobs=1))]


def content(output: RequestOutput) -> object:
    assert output.error is None
    completions = [
        (one.token_ids, one.logprobs, one.text, one.finish_reason) for one in output.completions
    ]
    return completions, output.prompt_logprobs


# ---- generating


def test_batched_outputs_equal_solo_outputs_bit_for_bit() -> None:
    prompts, params = zip(*REQUESTS, strict=True)
    with LLM(PATH, kv_memory=KV_MEMORY, max_step_tokens=64) as llm:
        together = llm.generate(prompts, params)
    with LLM(PATH, kv_memory=KV_MEMORY, prefix_reuse=False, max_batch_size=3) as llm:
        solo = [llm.generate(prompt, one)[0] for prompt, one in REQUESTS]
    assert [content(output) for output in together] == [content(output) for output in solo]
    assert any(output.metrics.num_cached_tokens for output in together)


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 1, 5, 3, 7]
    prompts = [[n + 1, n + 2] for n in range(5)]
    params = [replace(GREEDY, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)


def test_no_prompts_give_no_outputs(llm: LLM, text_llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], []) == []
    assert text_llm.chat([]) == []


def test_a_bad_prompt_fails_alone(text_llm: LLM) -> None:
    good = "Hello"
    bad: list[Any] = ["", [], [600], [1] * 512, [1] * 505, "x" * 9999, None, [1, "2"], "\ud800"]
    outputs = text_llm.generate([good, *bad, good], GREEDY, on_error="keep")
    assert len(outputs) == len(bad) + 2
    for output in outputs[1:-1]:
        assert isinstance(output.error, RequestError)
        assert str(output.error)
        assert output.finish_reason is FinishReason.ERROR
        assert output.token_ids == []
        assert output.text == ""
    [alone] = text_llm.generate(good, GREEDY)
    assert content(outputs[0]) == content(outputs[-1]) == content(alone)


def test_a_request_that_fails_while_it_runs_fails_alone(tmp_path: Path) -> None:
    path = write_changed_model(tmp_path / "poisoned.gguf", {"token_embd.weight": (7, float("nan"))})
    with LLM(path, kv_memory=KV_MEMORY) as llm:
        # Token 7 cannot be sampled, so that only prompts can bring it.
        params = replace(GREEDY, logit_bias={7: -100.0})
        first, poisoned, last = llm.generate([[1, 2], [1, 7, 2], [3]], params, on_error="keep")
        assert isinstance(poisoned.error, RowFaultError)
        assert content(first) == content(llm.generate([1, 2], params)[0])
        assert content(last) == content(llm.generate([3], params)[0])


def test_the_text_of_a_prompt_is_in_its_output(text_llm: LLM) -> None:
    prompts: list[Prompt] = ["Hello", [5, 6]]
    text, ids = text_llm.generate(prompts, GREEDY)
    assert (text.prompt, ids.prompt) == ("Hello", None)
    assert text_llm.tokenizer is not None
    assert list(text.prompt_token_ids) == text_llm.tokenizer.encode("Hello")


def test_the_text_is_that_of_the_tokens(text_llm: LLM) -> None:
    assert text_llm.tokenizer is not None
    [output] = text_llm.generate("Hello", replace(SAMPLED, max_tokens=60, ignore_eos=True))
    assert len(output.token_ids) == 60
    assert output.text == text_llm.tokenizer.decode(output.token_ids, continuation=True)


def test_a_stop_string_ends_the_text_before_it(text_llm: LLM) -> None:
    params = replace(SAMPLED, max_tokens=60, ignore_eos=True)
    [free] = text_llm.generate("Hello", params)
    stop = free.text[10:13]
    [output] = text_llm.generate("Hello", replace(params, stop=(stop,)))
    assert output.text == free.text[: free.text.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == stop


def test_an_end_token_ends_the_text(text_llm: LLM) -> None:
    params = replace(GREEDY, logit_bias={2: 100.0})
    [output] = text_llm.generate("Hello", params)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], FinishReason.STOP)
    assert output.logprobs == []
    [completion] = output.completions
    assert (completion.stop_reason, completion.num_tokens) == (2, 1)
    [included] = text_llm.generate("Hello", replace(params, include_stop_token=True))
    assert (included.text, included.token_ids, included.completions[0].num_tokens) == ("", [2], 1)
    assert included.logprobs is not None
    assert [score.token for score in included.logprobs] == [2]
    [ignored] = text_llm.generate("Hello", replace(params, ignore_eos=True))
    assert ignored.token_ids == [2] * 8


def test_prompts_far_beyond_the_queue_are_fed_as_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_batch_size": 4, "max_queue_requests": 3}
    prompts = [[n % 500 + 1, n % 7 + 1] for n in range(600)]
    params = replace(GREEDY, max_tokens=1, logprobs=None)
    live: list[int] = []
    with LLM(PATH, kv_memory=KV_MEMORY, **options) as llm:
        real_update = "quire.llm.offline.ProgressBar.update"
        monkeypatch.setattr(real_update, lambda *_: live.append(_live(llm)))
        outputs = llm.generate(prompts, params)
        expected = {tuple(p): llm.generate(p, params)[0].token_ids for p in prompts[:30]}
    assert all(output.error is None for output in outputs)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert all(out.token_ids == expected[out.prompt_token_ids] for out in outputs[:30])
    assert max(live) <= 8


def _live(llm: LLM) -> int:
    stats = llm.stats
    return stats.num_running + stats.num_waiting


def test_a_queue_bounded_by_tokens_is_fed_as_it_drains() -> None:
    with LLM(PATH, kv_memory=KV_MEMORY, max_batch_size=2, max_queue_tokens=30) as llm:
        outputs = llm.generate([[n] * 20 for n in range(10)], GREEDY)
    assert all(output.error is None for output in outputs)


# ---- chatting


def test_a_conversation_is_answered_as_its_rendered_prompt(text_llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [answer] = text_llm.chat(messages, GREEDY)
    prepared = text_llm.prompts.read_chat(messages)
    assert answer.prompt == prepared.text
    assert content(answer) == content(text_llm.generate(prepared.tokens, GREEDY)[0])


def test_a_bad_conversation_fails_alone(text_llm: LLM) -> None:
    good = [{"role": "user", "content": "hi"}]
    bad: list[Any] = [[{"role": "user"}], [{"content": "x"}], [5], [], None]
    outputs = text_llm.chat([good, *bad, good], GREEDY, on_error="keep")
    assert all(isinstance(output.error, RequestError) for output in outputs[1:-1])
    assert content(outputs[0]) == content(outputs[-1]) == content(text_llm.chat(good, GREEDY)[0])


def test_a_model_that_cannot_chat_says_so(llm: LLM, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="no tokenizer, so it cannot chat: it completes"):
        llm.chat(question)
    plain = write_text_model(tmp_path / "plain.gguf", chat_template=None)
    with LLM(plain, kv_memory=KV_MEMORY) as model:
        with pytest.raises(RequestError, match=r"no chat template, .* give one"):
            model.chat(question)
        assert model.generate("hi", GREEDY)[0].error is None


def test_a_template_that_does_not_compile_stops_chats_alone(tmp_path: Path) -> None:
    broken = write_text_model(tmp_path / "broken.gguf", chat_template="{% for %}")
    with LLM(broken, kv_memory=KV_MEMORY) as model:
        with pytest.raises(ModelFileError, match="chat template does not compile"):
            model.chat([{"role": "user", "content": "hi"}])
        assert model.generate("hi", GREEDY)[0].error is None


# ---- progress


def test_progress_is_shown_on_a_terminal_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, progress, is_shown in (
        (io.StringIO(), None, False),
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), True, True),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate([[1], [2], [600]], GREEDY, progress=progress, on_error="keep")
        shown = stream.getvalue()
        assert bool(shown) is is_shown
        if is_shown:
            assert "3/3 requests, 16 tokens" in shown
            assert shown.endswith("tokens/s\n")


# ---- one call at a time, and the end


def test_calls_are_refused_while_another_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([1]),
        lambda: llm.forward_batch([[1]]),
        lambda: llm.clear(),
        lambda: llm.set_batch_size(2),
        lambda: llm.close(),
    ]
    refusals: list[str] = []

    def interfere(*_: object) -> None:
        for call in calls:
            with pytest.raises(RequestError) as caught:
                call()
            refusals.append(str(caught.value))

    def update(*_: object) -> None:
        interfere()
        thread = threading.Thread(target=interfere)
        thread.start()
        thread.join()

    monkeypatch.setattr("quire.llm.offline.ProgressBar.update", update)
    [output] = llm.generate([1, 2], replace(GREEDY, max_tokens=1))
    assert output.error is None
    assert len(refusals) == 2 * len(calls)
    assert all("refused while another call or stream runs" in refusal for refusal in refusals)


def test_a_batch_size_can_be_set_between_calls() -> None:
    with LLM(PATH, kv_memory=KV_MEMORY, max_batch_size=2) as llm:
        before = llm.generate([[n] for n in range(8)], SAMPLED)
        weights = llm.stats.memory_bytes["weights"]
        assert llm.stats.stats.batch_size.sum / llm.stats.stats.num_steps <= 2
        llm.forward_batch([[1, 2, 3]])
        llm.set_batch_size(8)
        assert llm.max_batch_size == 8
        assert llm.stats.stats.num_steps == 0
        assert llm.stats.kv_usage == 0.0
        after = llm.generate([[n] for n in range(8)], SAMPLED)
        assert llm.stats.stats.batch_size.mean > 4
        assert llm.stats.memory_bytes["weights"] == weights
    assert [content(output) for output in after] == [content(output) for output in before]


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", None, True, 129])
def test_a_batch_size_that_cannot_be_leaves_everything_as_it_was(llm: LLM, size: Any) -> None:
    llm.forward_batch([[1, 2]])
    with pytest.raises(ConfigError, match="max_batch_size"):
        llm.set_batch_size(size)
    assert llm.max_batch_size == 64
    llm.forward_batch([[3]], [2])
    llm.clear()


def test_a_batch_larger_than_there_are_states_for_is_refused(llm: LLM) -> None:
    executor = FakeExecutor(num_states=12)
    assembly = replace(llm._open, executor=executor)
    ahead = assembly.options.engine_config().plan_ahead
    most = 12 // (3 + ahead)
    assert assembly.with_batch_size(most).options.max_batch_size == most
    with pytest.raises(ConfigError, match=rf"loaded with states for {most} sequences: load it ag"):
        assembly.with_batch_size(most + 1)


def test_an_interrupted_call_leaves_a_sound_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(PATH, kv_memory=KV_MEMORY) as llm:
        before = llm.generate([p for p, _ in REQUESTS], SAMPLED)
        calls = iter(range(100))
        real = StepWorker.collect

        def collect(self: StepWorker, *args: Any) -> Any:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return real(self, *args)

        monkeypatch.setattr(StepWorker, "collect", collect)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([p for p, _ in REQUESTS], SAMPLED)
        stats = llm.stats
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        after = llm.generate([p for p, _ in REQUESTS], SAMPLED)
    assert [content(output) for output in after] == [content(output) for output in before]


def test_a_closed_model_says_so() -> None:
    llm = LLM(PATH, kv_memory=KV_MEMORY)
    llm.close()
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([1]),
        lambda: llm.generate([]),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.forward_batch([[1]]),
        lambda: llm.clear(),
        lambda: llm.set_batch_size(2),
        lambda: llm.stats,
        lambda: llm.tokenizer,
        lambda: llm.__enter__(),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="this LLM is closed"):
            call()


# ---- opening


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, reference, got 'tpu'"),
        (
            {"device": "reference", "threads": 2},
            "threads is 2, but the reference executor does not compute on threads of its own",
        ),
        ({"threads": 0}, "threads must be an integer from 1 to 1024, got 0"),
        ({"threads": True}, "threads must be an integer from 1 to 1024, got True"),
        (
            {"device": "cpu", "kv_cache_dtype": "fp8"},
            "kv_cache_dtype is 'fp8', but the cpu executor keeps keys and values as auto, f16, "
            "int8: choose one of these",
        ),
        (
            {"kv_cache_dtype": "q4_0"},
            "kv_cache_dtype must be one of auto, f16, fp8, int8, got 'q4_0'",
        ),
        ({"max_context": 513}, "max_context is 513, but the model was made for 512 tokens"),
        ({"max_context": 1}, "max_context must hold a prompt and a token after it, got 1"),
        ({"max_context": "8"}, "max_context must be an integer, got '8'"),
        ({"kv_memory": "lots"}, "kv_memory must be bytes or text"),
        ({"kv_memory": "512KiB"}, r"holds 32 blocks .* fewer than max_batch_size \(64\)"),
        ({"kv_memory": "999TiB"}, r"this machine has .* available"),
        (
            {"kv_memory": "256KiB", "max_batch_size": 2, "max_context": 257},
            "holds 256: give kv_memory at least 272.0 KiB",
        ),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, got 0"),
        ({"max_batch_size": "4"}, "max_batch_size must be an integer of at least 1, got '4'"),
        ({"batch_timeout_ms": -1}, "batch_timeout_ms must be a number above 0"),
        ({"max_step_tokens": 8}, r"max_step_tokens \(8\) must be at least max_batch_size"),
        ({"max_batch": 8}, "there is no 'max_batch' here: did you mean 'max_batch_size'"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(PATH, **options)


def test_options_are_checked_before_anything_is_fetched(tmp_path: Path) -> None:
    for options in ({"device": "tpu"}, {"threads": 0}, {"kv_cache_dtype": "f8"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            LLM(tmp_path / "missing.gguf", **options)


@pytest.mark.parametrize(
    ("available", "message"),
    [
        (
            800 << 10,
            r"weights and what steps work in take 3\.9 MiB .*, .* has 800\.0 KiB available",
        ),
        (4_225_024, r"holds 4 blocks .* at least 1.0 MiB .* lower max_batch_size to 4"),
    ],
)
def test_too_little_memory_is_said_with_figures_before_loading(
    monkeypatch: pytest.MonkeyPatch, available: int, message: str
) -> None:
    monkeypatch.setattr("quire.llm.devices.available_memory", lambda: available)
    monkeypatch.setattr("quire.llm.devices.CpuDevice.make_executor", pytest.fail)
    with pytest.raises(ConfigError, match=message):
        LLM(PATH, threads=1)


def test_a_shorter_context_is_kept_to() -> None:
    with LLM(PATH, kv_memory=KV_MEMORY, max_context=40) as llm:
        assert llm.max_context == 40
        fits, too_long = llm.generate([[1] * 32, [1] * 33], GREEDY, on_error="keep")
        assert fits.error is None
        assert "the context holds 40" in str(too_long.error)


def test_a_small_cache_shortens_the_context() -> None:
    for cache_type, context in (("f16", 64), ("int8", 112)):
        with LLM(PATH, kv_memory="64KiB", kv_cache_dtype=cache_type, max_batch_size=2) as llm:
            assert llm.max_context == context


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_safetensors_folder_runs(family: str) -> None:
    with LLM(FIXTURES / "families" / family, kv_memory="16MiB") as llm:
        assert llm.generate([1, 2, 3], GREEDY)[0].error is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"architecture": "zamba2"}, UnsupportedModelError, "zamba2"),
        ({"pre": "from-mars"}, UnsupportedModelError, "from-mars"),
    ],
)
def test_a_model_of_an_unknown_kind_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write_text_model(tmp_path / "unknown.gguf", **options)
    with pytest.raises(error, match=message):
        LLM(path)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "large.gguf", num_tokens=513)
    with pytest.raises(ModelFileError, match="513 tokens but the model's embedding has 512 rows"):
        LLM(path)


def test_a_tokenizer_smaller_than_the_vocabulary_is_fine(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "small.gguf", num_tokens=400)
    with LLM(path, kv_memory=KV_MEMORY) as llm:
        [output] = llm.generate("hello", replace(SAMPLED, max_tokens=40))
        assert output.error is None


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].function.name }}{{ x }}{{ messages[0].content }}"
    model = write_text_model(tmp_path / "model.gguf", chat_template=template)
    given: dict[str, Any] = {
        "tools": [{"function": {"name": "f"}}],
        "chat_template_kwargs": {"x": "X"},
    }
    with LLM(model, device="reference", kv_memory=KV_MEMORY) as llm:
        assert llm.chat("hi", max_tokens=1, **given)[0].prompt == "fXhi"
        stream = llm.chat_stream("hi", max_tokens=1, **given)
        list(stream)
        assert stream.output is not None and stream.output.prompt == "fXhi"
        with pytest.raises(RequestError, match="give tools to chat"):
            llm.generate("hi", tools=[])  # type: ignore[call-arg]


def test_a_dummy_takes_a_context_longer_than_its_shapes() -> None:
    with LLM("dummy:tiny", device="reference", max_context=20_000, max_batch_size=1) as llm:
        assert llm.max_context == 20_000
