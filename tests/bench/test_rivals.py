"""Rivals: that the workers compute what they are told, and what becomes of those that do not."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.fake_packages import fake_packages, package_that_is_missing
from tests.bench.openai_like_server import Behaviour, serving

from quire.core.errors import ConfigError
from quire_bench import rival_worker
from quire_bench.http_client import parse_endpoint
from quire_bench.load import Target
from quire_bench.rivals import (
    PackageRival,
    RivalFailedError,
    RivalMissingError,
    ServerRival,
    Timing,
    WorkerSettings,
)

VOCABULARY = 512
PROMPTS = [[1, 2, 3, 4, 5], [400, 300, 7, 1, 1], [9, 9, 9, 9, 9]]


def sums(prompt: list[int], new_tokens: int) -> list[int]:
    """What the tests' engines write after a prompt."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def worker_script(tmp_path: Path) -> Callable[[str], WorkerSettings]:
    """An "interpreter" that runs the given code instead of the worker."""

    def make(code: str) -> WorkerSettings:
        path = tmp_path / "interpreter"
        ready = '{"ready": {"version": "1", "about": "x"}}'
        opening = f"import sys, time\nsys.stdin.readline()\nprint('{ready}', flush=True)\n"
        path.write_text(f"#!{sys.executable}\n{opening}sys.stdin.readline()\n{code}\n")
        path.chmod(0o755)
        return WorkerSettings(python=str(path), timeout_s=20.0)

    return make


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "transformers"])
@pytest.mark.parametrize("step_tokens", [2048, 4])
def test_a_worker_writes_after_every_prompt_what_the_model_says(
    name: str, step_tokens: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path, monkeypatch)
    monkeypatch.setattr(rival_worker, "_STEP_TOKENS", step_tokens)
    engine = rival_worker.ENGINES[name](str(model), threads=2, use_gpu=False)
    for num_prompts in (3, 1, 3):  # another context each
        times = engine.run(PROMPTS[:num_prompts], 4)
        assert times.tokens == [sums(prompt, 4) for prompt in PROMPTS[:num_prompts]]
        is_mixed = name == "openvino" and step_tokens == 4 and num_prompts == 3
        assert (times.prompts_read is None) == is_mixed
        if times.prompts_read is not None:
            assert times.started <= times.prompts_read <= times.ended


def test_openvino_does_not_run_beside_a_cuda_gpu(model: Path) -> None:
    with pytest.raises(RuntimeError, match="this kind of GPU"):
        rival_worker.ENGINES["openvino"](str(model), threads=2, use_gpu=True)


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "transformers"])
def test_a_worker_in_its_process_is_timed(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path, monkeypatch)
    rival = PackageRival(name, model, WorkerSettings(threads=2))
    try:
        timing = rival.measure(PROMPTS, 4)
    finally:
        rival.close()
    assert rival.facts["version"] == "9.9"
    assert "2 threads" in rival.facts["about"]
    assert (timing.num_prompt_tokens, timing.num_new_tokens) == (15, 12)
    assert timing.prompt_s is not None
    assert timing.completion_s is not None
    assert timing.seconds == pytest.approx(timing.prompt_s + timing.completion_s)


def test_llama_cpp_repacks_weights_unless_told_not_to(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path, monkeypatch)
    for repack, told in ((True, "2 threads; CPU"), (False, "2 threads; weights not repacked; CPU")):
        rival = PackageRival("llama.cpp", model, WorkerSettings(threads=2, repack=repack))
        rival.close()
        assert rival.facts["about"].startswith(told)
        assert rival.facts["about"].endswith(f"REPACKS = {repack}")


def test_rates_count_the_first_token_to_the_prompt() -> None:
    timing = Timing(2.0, 30, 12, prompt_s=0.5, completion_s=1.5, num_sequences=3)
    assert timing.rates == {
        "output_tokens_per_second": 6.0,
        "prompt_tokens_per_second": 60.0,
        "completion_tokens_per_second": 6.0,
    }
    assert Timing(2.0, 30, 3, 2.0, 0.0, 3).rates.keys() == {
        "output_tokens_per_second",
        "prompt_tokens_per_second",
    }


def test_a_package_that_is_missing_says_how_to_get_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_that_is_missing("llama_cpp", tmp_path, monkeypatch)
    with pytest.raises(RivalMissingError, match="pip install llama-cpp-python"):
        PackageRival("llama.cpp", model, WorkerSettings())


def test_an_error_of_the_engine_is_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path, monkeypatch)
    with pytest.raises(RivalFailedError, match="could not load the model"):
        PackageRival("llama.cpp", tmp_path / "nowhere.gguf", WorkerSettings())
    rival = PackageRival("llama.cpp", model, WorkerSettings())
    try:
        with pytest.raises(RivalFailedError, match=r"made no context of 1 × 5120 tokens"):
            rival.measure([[1] * 5000], 2)
    finally:
        rival.close()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit('out of luck')", "ended unasked; it said …out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "ended unasked by SIGKILL; it said nothing"),
        ("import os; os.kill(os.getpid(), 4)", r"by SIGILL: .*\(try --no-repack\)"),
        ("print('hello', flush=True)", r"answered 'hello\\n', not JSON"),
        ("print('[1]', flush=True)", r"answered '\[1\]\\n': no tokens"),
        ('print(\'{"tokens": [[1]], "seconds": 1}\', flush=True)', r"gave \[1\] tokens, not 2"),
    ],
)
def test_a_worker_that_breaks_is_a_failed_rival(
    code: str, told: str, model: Path, worker_script: Callable[[str], WorkerSettings]
) -> None:
    rival = PackageRival("llama.cpp", model, worker_script(code))
    try:
        with pytest.raises(RivalFailedError, match=told):
            rival.measure([[1, 2]], 2)
    finally:
        rival.close()


def test_a_worker_that_hangs_is_ended(
    model: Path, worker_script: Callable[[str], WorkerSettings]
) -> None:
    settings = replace(worker_script("time.sleep(3600)"), timeout_s=60.0)
    rival = PackageRival("llama.cpp", model, settings)
    rival._settings = replace(settings, timeout_s=2.0)  # from when its interpreter has started
    try:
        with pytest.raises(RivalFailedError, match=r"did not answer within 2 s \(--timeout\)"):
            rival.measure([[1, 2]], 2)
        with pytest.raises(RivalFailedError, match="ended unasked"):
            rival.measure([[1, 2]], 2)
    finally:
        rival.close()


def test_an_interpreter_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"--python-for llama\.cpp: nowhere/python does not run"):
        PackageRival("llama.cpp", model, WorkerSettings(python="nowhere/python"))


def target(url: str) -> Target:
    return Target(parse_endpoint(url), ignore_eos=True, timeout_s=20.0)


def test_a_server_gets_all_requests_of_a_batch_at_once() -> None:
    behaviour = Behaviour()
    with serving(behaviour) as server:
        rival = ServerRival(server.url, target(server.url))
        behaviour.bodies.clear()
        behaviour.together = 4
        timing = rival.measure([[0] * 7] * 4, 3)
    assert behaviour.most_present == 4
    assert [len(body["prompt"].split()) for body in behaviour.bodies] == [7] * 4
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in behaviour.bodies)
    assert timing.num_new_tokens == 12
    assert timing.rates == {"output_tokens_per_second": 12 / timing.seconds}


def test_a_server_that_is_not_there_is_missing() -> None:
    with serving(Behaviour()) as server:
        url = server.url
    with pytest.raises(RivalMissingError, match="was not measured: no server answers"):
        ServerRival(url, target(url))


def test_a_server_that_ends_early_or_fails_is_a_failed_rival() -> None:
    with serving(Behaviour(max_pieces=2)) as server:
        rival = ServerRival(server.url, target(server.url))
        with pytest.raises(RivalFailedError, match="gave 2 tokens, not 3: does it heed ignore_eos"):
            rival.measure([[0] * 7], 3)
    with serving(Behaviour(statuses={2: 500})) as server:
        rival = ServerRival(server.url, target(server.url))
        with pytest.raises(RivalFailedError, match="http 500"):
            rival.measure([[0] * 7] * 3, 3)
