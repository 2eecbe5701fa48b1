"""`quire generate`: text and token ids, one prompt and many, and every kind of bad input."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import COMMAND, environment, fails, quire, without_native_module
from tests.fixture_files import FIXTURES, fixture_file
from tests.llm.text_models import CHAT_TEMPLATE, write_text_model

from quire import LLM, AsyncLLM, SamplingParams
from quire.cli import generate, program

TINY = fixture_file("tiny/Q4_0.gguf")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLING = ["--max-tokens", "12"]


@pytest.fixture(scope="module")
def texts(text_model: Path) -> dict[str, str]:
    """What the model says to hi: asked, and gone on with."""
    with LLM(text_model, kv_memory="4MiB") as llm:
        [asked] = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        [raw] = llm.generate("hi", GREEDY)
    assert asked.text
    assert raw.text != asked.text
    return {"asked": asked.text, "raw": raw.text}


def test_a_prompt_is_a_question_unless_it_is_raw(text_model: Path, texts: dict[str, str]) -> None:
    options = ["--model", str(text_model), *SAMPLING]
    asked = quire("generate", *options, "--prompt", "hi")
    assert (asked.code, asked.out, asked.err) == (0, texts["asked"] + "\n", "")
    raw = quire("generate", *options, "--prompt", "hi", "--raw")
    assert (raw.code, raw.out, raw.err) == (0, texts["raw"] + "\n", "")


def test_a_prompt_may_come_from_a_file_or_a_pipe(
    text_model: Path, texts: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi\n")
    options = ["--model", str(text_model), *SAMPLING]
    assert quire("generate", *options, "--file", file).out == texts["asked"] + "\n"
    assert quire("generate", *options, stdin="hi\n").out == texts["asked"] + "\n"
    assert quire("generate", *options, "--file", "-", stdin="hi").out == texts["asked"] + "\n"


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    with LLM(TINY, kv_memory="4MiB") as llm:
        first, second = llm.generate([[1, 2, 3], [4]], GREEDY)
    options = ["--model", str(TINY), *SAMPLING]
    run = quire("generate", *options, "--prompt-tokens", "1,2,3")
    assert (run.code, run.out) == (0, ",".join(map(str, first.token_ids)) + "\n")
    run = quire("generate", *options, "--prompt-tokens", "1,2,3", "--prompt-tokens", "4")
    assert run.out.splitlines() == [
        "--- prompt 1",
        ",".join(map(str, first.token_ids)),
        "--- prompt 2",
        ",".join(map(str, second.token_ids)),
    ]


def test_json_holds_everything(text_model: Path, texts: dict[str, str]) -> None:
    run = quire(
        *("generate", "--model", str(text_model), *SAMPLING, "--prompt", "hi", "--prompt", "ho"),
        *("--n", "2", "--logprobs", "3", "--prompt-logprobs", "0", "--json"),
    )
    assert (run.code, run.err) == (0, "")
    result = json.loads(run.out)
    assert result["model"] == str(text_model)
    first, second = result["outputs"]
    assert first["prompt"].endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert first["error"] is None
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"]) - 1
    assert [one["text"] for one in first["completions"]] == [texts["asked"]] * 2
    scores = first["completions"][0]["logprobs"]
    assert len(scores) == len(first["completions"][0]["token_ids"])
    assert all(len(score["top"]) == 3 and score["rank"] == 1 for score in scores)
    assert first["completions"][0]["finish_reason"] == "length"
    assert second["metrics"]["total_s"] > 0


def test_one_of_many_fails_alone_and_the_exit_code_says_so(
    text_model: Path, texts: dict[str, str]
) -> None:
    options = ["generate", "--model", str(text_model), *SAMPLING]
    prompts = ["--prompt", "hi", "--prompt", "", "--prompt", "x" * 600]
    run = quire(*options, *prompts)
    assert run.code == 1
    assert run.out == f"--- prompt 1\n{texts['asked']}\n"
    refusals = run.err.splitlines()
    assert refusals[0] == "quire: prompt 2: the prompt is empty"
    assert refusals[1].startswith("quire: prompt 3: the prompt does not fit into the context")
    result = json.loads(quire(*options, *prompts, "--json").out)
    assert [output["error"] and output["error"]["type"] for output in result["outputs"]] == [
        None,
        "RequestError",
        "ContextLengthError",
    ]


def test_sampling_flags_reach_the_sampler(text_model: Path) -> None:
    def tokens(*flags: str) -> Any:
        run = quire(
            *("generate", "--model", str(text_model), "--prompt", "hi", "--raw", "--json", *flags)
        )
        [output] = json.loads(run.out)["outputs"]
        return output["completions"][0]

    sampled = ["--temperature", "1.5", "--seed", "4", "--max-tokens", "9"]
    free = tokens(*sampled)
    with LLM(text_model, kv_memory="4MiB") as llm:
        params = SamplingParams(max_tokens=9, temperature=1.5, seed=4)
        [expected] = llm.generate("hi", params)
    assert free["token_ids"] == expected.token_ids
    biased = tokens("--logit-bias", "300=100", "--stop-token-id", "300")
    assert (biased["token_ids"], biased["finish_reason"]) == ([], "stop")
    ended = tokens("--logit-bias", "2=100", "--include-stop-token")
    assert (ended["token_ids"], ended["text"]) == ([2], "")
    assert tokens("--logit-bias", "2=100", "--ignore-eos", "--max-tokens", "3")["token_ids"] == [
        *(2, 2, 2)
    ]
    text = free["text"]
    stopped = tokens(*sampled, "--stop", text[3:5], "--include-stop")
    assert stopped["text"] == text[: text.index(text[3:5]) + 2]


def test_what_the_context_leaves_is_used_where_nothing_is_said(text_model: Path) -> None:
    run = quire(
        *("generate", "--model", str(text_model), "--max-context", "40", "--raw", "--ignore-eos"),
        *("--prompt", "hello there", "--json"),
    )
    [output] = json.loads(run.out)["outputs"]
    num_tokens = len(output["prompt_token_ids"]) + len(output["completions"][0]["token_ids"])
    assert num_tokens == 40


def test_a_reader_that_goes_away_ends_the_engine_too(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine left behind still computes while Python ends, and its threads abort the program."""
    calls = []

    class Watched(AsyncLLM):
        async def close(self) -> None:
            await super().close()
            calls.append("close")

    def print_once(*_: object, **__: object) -> None:
        calls.append("print")
        if len(calls) > 1:
            raise BrokenPipeError

    monkeypatch.setattr("quire.AsyncLLM", Watched)
    monkeypatch.setattr(generate, "print", print_once, raising=False)
    monkeypatch.setattr(program, "_leave_quietly", lambda code: code)
    options = ("--kv-memory", "4MiB", "--ignore-eos")
    assert program.main(["generate", "--model", str(text_model), "--prompt", "hi", *options]) == 141
    assert calls == ["print", "print", "print", "close"]


def test_ctrl_c_ends_it_with_130(text_model: Path) -> None:
    slow = ("--device", "reference", "--ignore-eos")  # so that it still runs
    with subprocess.Popen(
        [*COMMAND, "generate", "--model", str(text_model), "--prompt", "hi", *slow],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.read(1)
        program.send_signal(signal.SIGINT)
        assert program.stdout.read().endswith(b"\n")
        assert program.stderr.read() == b""
    assert program.returncode == 130


# ---- bad input


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Model files that are none, by what is wrong, with a word that must be in the error."""
    content = TINY.read_bytes()
    written = {
        "truncated header": content[:100],
        "truncated tensors": content[:-1000],
        "lying counts": content[:8] + b"\xff" * 8 + content[16:],
        "not a model": b"hello, world",
        "empty": b"",
        "pickle": b"PK\x03\x04rest",
    }
    found = {}
    for name, data in written.items():
        path = folder / f"{name.replace(' ', '-')}.gguf"
        path.write_bytes(data)
        found[name] = (path, path.name)
    (folder / "empty folder").mkdir()
    return found | {
        "missing": (folder / "missing.gguf", "neither a file or folder nor a known model (smollm2"),
        "empty folder": (folder / "empty folder", "holds no model"),
        "unknown architecture": (
            write_text_model(folder / "architecture.gguf", architecture="zamba2"),
            "zamba2",
        ),
        "unknown pre-tokenizer": (write_text_model(folder / "pre.gguf", pre="martian"), "martian"),
        "vocabulary too large": (
            write_text_model(folder / "large.gguf", num_tokens=520),
            "520 tokens but the model's embedding has 512 rows",
        ),
    }


BAD_FILES = (
    *("truncated header", "truncated tensors", "lying counts", "not a model", "empty", "pickle"),
    *("missing", "empty folder", "unknown architecture", "unknown pre-tokenizer"),
    "vocabulary too large",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    return bad_files(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_run_is_one_line_and_exit_code_1(
    files: dict[str, tuple[Path, str]], name: str
) -> None:
    path, message = files[name]
    assert message in fails("generate", "--model", path, "--prompt-tokens", "1")


def test_every_kind_of_bad_file_is_tried(files: dict[str, tuple[Path, str]]) -> None:
    assert set(files) == set(BAD_FILES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 600], "the prompt does not fit into the context: the text has at"),
        (["--prompt-tokens", "1,512"], "prompt token 1 is 512; the vocabulary has 0 to 511"),
        (["--prompt", "x", "--max-tokens", "600"], "the context holds 512"),
        (["--prompt", "x", "--max-tokens", "-1"], "max_tokens must be at least 0, got -1"),
        (["--prompt", "x", "--temperature", "nan"], "temperature must be from 0 to 100, got nan"),
        (["--prompt", "x", "--n", "1000"], "n must be from 1 to 128, got 1000"),
        (["--prompt", "x", "--stop", ""], "stop must hold non-empty strings"),
        (["--prompt", "x", "--device", "tpu"], "device must be one of auto, cpu, cuda, reference"),
        (["--prompt", "x", "--threads", "0"], "threads must be an integer from 1 to 1024, got 0"),
        (["--prompt", "x", "--kv-cache-dtype", "q4"], "kv_cache_dtype must be one of auto, f16"),
        (["--prompt", "x", "--kv-memory", "lots"], "bytes or text such as \"2GiB\", got 'lots'"),
        (["--prompt", "x", "--max-context", "9999"], "the model was made for 512 tokens"),
        (["--file", "missing.txt"], "cannot read missing.txt: No such file or directory"),
        (["--file", "."], "cannot read .: Is a directory"),
    ],
)
def test_a_request_that_cannot_run_is_one_line_and_exit_code_1(
    text_model: Path, flags: list[str], message: str
) -> None:
    assert message in fails("generate", "--model", text_model, *flags)


@pytest.mark.parametrize("flags", [["--prompt", "x", "--raw"], ["--prompt-tokens", "1,2"]])
def test_a_template_that_would_not_be_used_is_refused(text_model: Path, flags: list[str]) -> None:
    run = quire("generate", "--model", text_model, "--chat-template", "own.jinja", *flags)
    assert run.code == 2
    assert f"--chat-template does nothing with {flags[-1 if '--raw' in flags else 0]}" in run.err


def test_input_that_is_no_text_is_refused(text_model: Path) -> None:
    error = fails("generate", "--model", text_model, stdin=b"ab\xff\xfe")
    assert error == "quire: standard input is no UTF-8 text: byte 2 is wrong\n"


def test_text_for_a_model_without_a_tokenizer_is_refused() -> None:
    error = fails("generate", "--model", TINY, "--prompt", "hi")
    assert error == "quire: this model has no tokenizer: give the prompt as token ids\n"


def test_a_folder_runs_and_a_template_that_breaks_is_one_line(tmp_path: Path) -> None:
    folder = FIXTURES / "families" / "qwen2"
    assert quire("generate", "--model", folder, "--prompt-tokens", "1,2", *SAMPLING).code == 0
    broken = write_text_model(tmp_path / "broken.gguf", chat_template=CHAT_TEMPLATE + "{% if %}")
    error = fails("generate", "--model", broken, "--prompt", "hi")
    assert "the chat template does not compile: line 4" in error
    assert quire("generate", "--model", broken, "--prompt", "hi", "--raw", *SAMPLING).code == 0


def test_a_native_module_that_is_missing_says_how_to_build_it(
    text_model: Path, tmp_path: Path
) -> None:
    flags: list[str | Path] = [
        "generate",
        "--model",
        text_model,
        "--prompt",
        "x",
        "--max-tokens",
        "2",
    ]
    env = without_native_module(tmp_path)
    run = quire(*flags, "--device", "cpu", env=env)
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("quire: the native CPU module cannot be imported (")
    assert "run `make native` in a checkout; device='reference' runs without it" in run.err
    assert quire(*flags, env=env).code == 0  # "auto" takes the reference executor


def test_the_environment_chooses_the_kernels(text_model: Path) -> None:
    flags: list[str | Path] = [
        "generate",
        "--model",
        text_model,
        "--prompt",
        "x",
        "--max-tokens",
        "4",
    ]
    usual = quire(*flags)
    plain = quire(*flags, env={"QUIRE_CPU_UNIT": "portable"})
    assert (plain.code, plain.out, plain.err) == (0, usual.out, usual.err)
    unknown = quire(*flags, env={"QUIRE_CPU_UNIT": "abacus"})
    assert unknown.code == 1
    assert (
        "QUIRE_CPU_UNIT: no CPU kernels called 'abacus' run on this processor: there are port"
        in (unknown.err)
    )


def test_keys_and_values_may_be_kept_in_bytes(text_model: Path) -> None:
    flags: list[str | Path] = [
        "generate",
        "--model",
        text_model,
        "--prompt",
        "x",
        "--max-tokens",
        "4",
    ]
    assert quire(*flags, "--kv-cache-dtype", "int8", "--threads", "1").code == 0
