"""`quire inspect`: what is in a model file, sound or broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.program import environment, quire
from tests.drawn_families import write_drawn
from tests.fixture_files import FIXTURES, fixture_file
from tests.llm.text_models import write_changed_model, write_text_model

from quire.model.features import LOWERED, Feature

TINY = fixture_file("tiny/Q4_K_M.gguf")


def test_a_sound_file_is_described(text_model: Path) -> None:
    run = quire("inspect", text_model)
    assert (run.code, run.err) == (0, "")
    for fact in (
        "tiny text model, llama, GGUF",
        "2 layers, hidden 256, feed-forward 512 (silu)",
        "4 heads and 2 KV heads of 64, rope base 10000",
        "context 512, vocabulary 512",
        "Q4_0",
        "512 tokens, a chat template",
        "ends with <|endoftext|> (0), <|im_end|> (2)",
        "keys and values 1.0 KiB a token (544 bytes as int8)",
        "cuda executor: keys and values 1.0 KiB a token (544 bytes as int8 or fp8)",
        "keys and values 2.0 KiB a token, ",
        "all sound",
    ):
        assert fact in run.out


def test_a_state_is_counted_on_every_device(tmp_path: Path) -> None:
    path = write_drawn("qwen35", tmp_path)
    memory = json.loads(quire("inspect", path, "--json").out)["memory"]
    # Three layers of four heads of [8, 8], values in whole vectors on the CPU, and three inputs of
    # 64 channels each.
    assert memory["cuda"]["state"] == 4 * 3 * (4 * 8 * 8 + 3 * 64)
    assert memory["cpu"]["state"] == 4 * 3 * (4 * 8 * 16 + 3 * 64)
    lines = quire("inspect", path).out.splitlines()
    stated = [line for line in lines if "a state of" in line]
    assert ["cpu" in line for line in stated] == [True, False]
    assert "as int8 or fp8), a state of 5.2 KiB a sequence" in stated[1]


def test_json_holds_the_figures() -> None:
    run = quire("inspect", TINY, "--json")
    assert run.code == 0
    found = json.loads(run.out)
    assert found["problems"] == []
    assert found["file"]["bytes"] == TINY.stat().st_size
    assert found["file"]["architecture"] == found["model"]["family"] == "llama"
    assert found["tokenizer"] == {"present": False}
    by_type = found["tensors"]["by_type"]
    assert sum(row["count"] for row in by_type.values()) == found["tensors"]["count"] == 21
    assert {"F32", "Q4_K", "Q6_K"} <= set(by_type)
    weights = found["tensors"]["weights"]
    assert found["memory"]["weights_in_reference_executor"] == 4 * weights
    assert found["memory"]["weights_in_file"] == sum(row["bytes"] for row in by_type.values())
    assert found["memory"]["kv_per_token"] == 2048
    assert found["memory"]["kv_per_context"] == 2048 * 512
    assert found["memory"]["cpu"]["kv_per_token"] == 1024
    assert found["memory"]["cpu"]["kv"] == 1024 * 512
    assert found["norms"]["count"] == 5


_RUN_A_WHOLE_CONTEXT = """
import sys
from quire import LLM, SamplingParams
with LLM(sys.argv[1], kv_memory=int(sys.argv[2]), max_batch_size=1) as llm:
    prompt = [1] * (llm.max_context - 1)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    assert output.error is None, output.error
lines = open("/proc/self/status").read().splitlines()
[peak] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
print(1024 * int(peak))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["tiny/Q4_K_M.gguf", "tiny/F32.gguf", "smollm2"])
def test_the_peak_foretold_is_the_peak_reached(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_default = name == "smollm2"
    path = request.getfixturevalue("smollm2_path") if is_default else fixture_file(name)
    if is_default:  # a shorter context is as good, and quicker
        path = with_context_length(path, tmp_path / "shorter.gguf", 512)
    foretold = json.loads(quire("inspect", path, "--json").out)["memory"]["cpu"]
    done = subprocess.run(
        [sys.executable, "-c", _RUN_A_WHOLE_CONTEXT, str(path), str(foretold["kv"])],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert foretold["peak"] == pytest.approx(int(done.stdout), rel=0.05)


def with_context_length(source: Path, target: Path, length: int) -> Path:
    """A copy of a GGUF file whose model was made for so many tokens."""
    content = bytearray(source.read_bytes())
    key = b"llama.context_length"
    place = content.index(key) + len(key) + 4  # after the type of the value, which is 32 bits wide
    content[place : place + 4] = length.to_bytes(4, "little")
    target.write_bytes(content)
    return target


def test_a_folder_is_described() -> None:
    found = json.loads(quire("inspect", FIXTURES / "families" / "qwen3", "--json").out)
    assert found["file"]["format"] == "safetensors"
    assert found["model"]["family"] == "qwen3"


def test_experts_and_devices_that_do_not_run_a_model_are_said(tmp_path: Path) -> None:
    path = write_drawn("mixtral", tmp_path)
    found = json.loads(quire("inspect", path, "--json").out)["model"]
    assert (found["num_experts"], found["num_used_experts"]) == (8, 2)
    assert found["lacking"].keys() == {
        n for n, known in LOWERED.items() if Feature.EXPERTS not in known
    }
    assert all("a mixture of experts in layer 0" in what for what in found["lacking"].values())
    text = quire("inspect", path).out
    assert "8 experts, 2 for each token" in text
    assert all(
        f"not on {name}: a mixture of experts in layer 0" in text for name in found["lacking"]
    )


def test_a_model_without_attention_and_feed_forwards_is_described(tmp_path: Path) -> None:
    path = write_drawn("mamba2", tmp_path)
    found = json.loads(quire("inspect", path, "--json").out)["model"]
    assert (found["num_heads"], found["ffn_size"], found["activation"]) == (0, 0, None)
    assert found["state_layers"] == {"Mamba 2": 4}
    text = quire("inspect", path).out
    assert "4 layers, hidden 48, no feed-forward" in text and "no attention\n" in text
    assert "4 of 4 layers keep a state: Mamba 2" in text


def test_the_set_of_longrope_is_shown(tmp_path: Path) -> None:
    path = write_drawn("phi3-long", tmp_path)
    assert "LongScaling (long factors, by the longest context)" in quire("inspect", path).out
    assert json.loads(quire("inspect", path, "--json").out)["model"]["rope_factors"] == "long"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_broken_file_is_what_is_wrong_and_exit_code_1(tmp_path: Path, as_json: bool) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:-5000])
    run = quire("inspect", broken, *(["--json"] if as_json else []))
    assert run.code == 1
    assert run.err.startswith("quire: broken.gguf: ")
    assert "it is truncated or broken" in run.err
    assert run.err.count("\n") == 1
    if as_json:
        [problem] = json.loads(run.out)["problems"]
        assert f"quire: {problem}\n" == run.err
    else:
        assert run.out == ""


def test_of_a_file_that_is_half_understood_the_rest_is_shown(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "odd.gguf", architecture="zamba2")
    run = quire("inspect", path)
    assert run.code == 1
    assert "tiny text model, zamba2, GGUF" in run.out
    assert "Q4_0" in run.out
    assert "zamba2" in run.err


def test_every_problem_of_a_file_is_told(tmp_path: Path) -> None:
    path = write_changed_model(
        tmp_path / "norms.gguf",
        {
            "blk.0.attn_norm.weight": (slice(None), 0.0),
            "blk.1.ffn_norm.weight": (3, float("inf")),
        },
    )
    run = quire("inspect", path)
    assert run.code == 1
    assert run.err.splitlines() == [
        "quire: blk.0.attn_norm.weight: every weight is zero",
        "quire: blk.1.ffn_norm.weight: 1 of 256 weights are not finite",
    ]
    assert "2 of 5 look broken" in run.out


@pytest.mark.parametrize(
    ("pre", "template", "problem"),
    [("martian", None, "martian"), ("gpt-2", "{% for %}", "chat template does not compile")],
)
def test_a_tokenizer_that_cannot_be_used_is_a_problem(
    tmp_path: Path, pre: str, template: str | None, problem: str
) -> None:
    path = write_text_model(tmp_path / "odd.gguf", pre=pre, chat_template=template)
    run = quire("inspect", path)
    assert run.code == 1
    assert problem in run.err
    assert "context 512" in run.out


def test_names_from_a_file_cannot_play_tricks_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "tricky.gguf"
    content = write_text_model(tmp_path / "plain.gguf").read_bytes()
    path.write_bytes(content.replace(b"tiny text model", b"tiny\x1b[2J\x07 model"))
    run = quire("inspect", path)
    assert run.code == 0
    assert "\x1b" not in run.out
    assert "tiny\\x1b[2J\\x07 model" in run.out


def test_a_missing_file_is_one_line() -> None:
    run = quire("inspect", "missing.gguf")
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("quire: missing.gguf is neither a file")


def test_a_model_without_a_file_says_how_to_make_one() -> None:
    run = quire("inspect", "dummy:tiny")
    assert (run.code, run.out) == (1, "")
    assert "make-model" in run.err


def test_it_says_which_device_auto_takes_and_why(text_model: Path) -> None:
    facts = json.loads(quire("inspect", text_model, "--json").out)["device"]
    assert facts["name"] in ("cpu", "cuda", "reference") and facts["reason"]
    printed = quire("inspect", text_model).out
    assert f"device     auto takes {facts['name']}: {facts['reason']}" in printed


def test_it_says_what_was_taken_from_the_process_that_read_the_file_first(text_model: Path) -> None:
    facts = json.loads(quire("inspect", text_model, "--json").out)
    assert "resource limits" in facts["isolation"]["in_force"]
    assert facts["isolation"]["why_not"] is None
    run = quire("inspect", text_model, "--json", "--trust-model-file")
    trusted = json.loads(run.out)["isolation"]
    assert trusted == {"in_force": [], "why_not": "the file is trusted"}


I2S = FIXTURES / "bitnet-published" / "c" / "i2s.gguf"


def test_the_packing_of_i2_s_is_said_to_be_assumed() -> None:
    run = quire("inspect", I2S)
    assert run.code == 0
    assert "packing of x86 builds, as most files are: nothing in a file says" in run.out
    assert "--i2s-packing arm" in run.out
    found = json.loads(quire("inspect", I2S, "--i2s-packing", "arm", "--json").out)["tensors"]
    assert (found["i2s_packing"], found["i2s_packing_asked"]) == ("arm", True)
    assert "packing" not in quire("inspect", TINY).out


def test_a_packing_of_what_has_no_i2_s_is_a_problem() -> None:
    run = quire("inspect", TINY, "--i2s-packing", "arm")
    assert run.code == 1
    assert "has no tensor of type I2_S: leave it out" in run.err


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "x", "--model"),
        ("chat", "--model"),
        ("serve", "--port", "0"),
        ("bench", "throughput", "--model"),
    ],
    ids=lambda command: command[0],
)
def test_commands_that_load_a_model_take_the_packing(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    run = quire(*command, TINY, "--i2s-packing", "arm", cwd=tmp_path)
    assert run.code == 1
    assert "has no tensor of type I2_S: leave it out" in run.err
