"""Clients that take long to install, unchanged, against a running server.

They have an environment of their own, which `make test-clients-all` installs.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.llm.text_models import write_text_model
from tests.server.servers import NAME, model_server

from quire import LLM

PATIENCE_S = 900.0  # thousands of modules, read from a disk for the first time
PROGRAMS = Path(__file__).parents[2] / "build" / "clients-all" / "bin"
TASKS = Path(__file__).parent / "lm_eval_tasks"

pytestmark = pytest.mark.skipif(
    not (PROGRAMS.parent / ".ready").exists(), reason="not installed: run make test-clients-all"
)


def run(*command: str, cwd: Path, cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_lm_evaluation_harness_scores_as_llm_does(tmp_path: Path) -> None:
    """loglikelihood, loglikelihood_rolling and generate_until by `local-completions`; tokens come
    from the server's own tokenizer, which the harness finds by /tokenizer_info."""
    model = write_text_model(tmp_path / "text.gguf")
    questions = json.loads((TASKS / "facts.json").read_text())
    with model_server(model) as server:
        address = f"base_url={server.url}/v1/completions,model={NAME},max_length=512"
        run(
            *(str(PROGRAMS / "lm_eval"), "run", "--model", "local-completions"),
            *("--model_args", f"{address},num_concurrent=2", "--batch_size", "3"),
            *("--tasks", "facts_choice,facts_text,facts_perplexity"),
            *("--include_path", str(TASKS), "--log_samples", "--output_path", str(tmp_path)),
            cwd=TASKS,
            cache=tmp_path,
        )
    samples = {
        kind: [json.loads(line) for line in next(tmp_path.rglob(f"samples_{kind}_*")).open()]
        for kind in ("facts_choice", "facts_text", "facts_perplexity")
    }
    with LLM(model, device="reference", kv_memory="4MiB") as llm:
        for sample in samples["facts_choice"]:
            doc = sample["doc"]
            scores = llm.score([doc["question"]] * 3, doc["choices"])
            found = [float(each[0][0]) for each in sample["resps"]]
            assert found == [sum(score.logprobs) for score in scores]
        for sample in samples["facts_text"]:
            [output] = llm.generate(
                sample["doc"]["question"], temperature=0, max_tokens=8, stop=["\n", "<|im_end|>"]
            )
            assert sample["resps"] == [[output.text]]
    assert len(samples["facts_perplexity"]) == len(questions)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_counts_every_token_of_every_answer(route: str, tmp_path: Path) -> None:
    """guidellm asks for no temperature: the file's own makes every answer the same, of 8 tokens."""
    model = write_text_model(tmp_path / "text.gguf", sampling={"top_k": 1})
    questions = json.loads((TASKS / "facts.json").read_text())
    prompts = [{"prompt": each["question"]} for each in questions]
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps(prompts))
    report = tmp_path / "report.json"
    with model_server(model) as server:
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": server.url,
                "model": NAME,
                "request_format": route,
                "max_tokens": 8,
            },
            "profile": {"kind": "concurrent", "streams": [2]},
            "constraints": [{"kind": "max_requests", "count": len(prompts)}],
            "data": [{"kind": "json_file", "path": str(data)}],
            "outputs": [{"kind": "json", "path": str(report)}],
        }
        (tmp_path / "scenario.json").write_text(json.dumps({"spec": spec}))
        run(
            *(str(PROGRAMS / "guidellm"), "run", "--config", str(tmp_path / "scenario.json")),
            "--disable-console",
            cwd=tmp_path,
            cache=tmp_path,
        )
    [measured] = json.loads(report.read_text())["benchmarks"]
    answers = measured["requests"]
    assert answers["errored"] == answers["incomplete"] == []
    found = [answer["output_metrics"]["text_tokens"] for answer in answers["successful"]]
    assert found == [8] * len(prompts)
