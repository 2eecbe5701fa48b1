"""`quire convert`: what it says, what it refuses, and that nothing is left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.program import environment, fails, quire
from tests.fixture_files import FIXTURES, fixture_file

from quire.model.conversion import EMBEDDINGS, FILE_TYPES
from quire.model.loading import load_model

PACKED = FIXTURES / "bitnet-published" / "a" / "hf-packed"
I2S = FIXTURES / "bitnet-published" / "c" / "i2s.gguf"


def test_a_conversion_says_what_it_did_and_why(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    run = quire("convert", PACKED, out, "--to", "TQ2_0")
    assert (run.code, run.err) == (0, "")
    for fact in (
        f"written      {out}, ",
        "14 of packed bytes; as TQ2_0, every code kept",
        "scales       as they were",
        "token_embd.weight F16",
        "architecture bitnet-b1.58: the model has squared ReLU",
        "448 tokens, pre-tokenizer llama-bpe, a chat template",
    ):
        assert fact in run.out
    run = quire("generate", "--model", out, "--prompt", "Hello", "--max-tokens", "2")
    assert run.code == 0


def test_json_holds_the_figures(tmp_path: Path) -> None:
    i2s, tq1 = tmp_path / "i2s.gguf", tmp_path / "tq1.gguf"
    assert quire("convert", PACKED, i2s, "--to", "I2_S", "--embedding", "Q6_K").code == 0
    run = quire("convert", i2s, tq1, "--to", "TQ1_0", "--json")
    assert (run.code, run.err) == (0, "")
    found = json.loads(run.out)
    assert found["bytes"] == tq1.stat().st_size
    assert (found["to"], found["matrices"]) == ("TQ1_0", {"I2_S": 14})
    assert found["architecture"] == "bitnet-b1.58"
    assert found["embeddings"] == {"token_embd.weight": "Q6_K"}
    assert found["tokenizer"] == {
        "num_tokens": 448,
        "pre_tokenizer": "llama-bpe",
        "has_chat_template": True,
    }
    assert found["scales"] == {
        "rounded": 0,
        "largest_relative_error": 0.0,
        "largest_in": None,
    }


def test_what_a_scale_lost_is_said(tmp_path: Path) -> None:
    """The scales of this file are float32s that no float16 is; its rows fill no block of 256."""
    run = quire("convert", I2S, tmp_path / "m.gguf", "--to", "I2_S", "--json")
    assert json.loads(run.out)["scales"]["rounded"] == 0
    assert "pre-tokenizer" in "".join(json.loads(run.out)["notes"])


def test_a_file_that_is_there_is_replaced_only_when_told(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    command = ("convert", PACKED, out, "--to", "I2_S")
    assert "is there already: --force replaces it" in fails(*command)
    assert out.read_text() == "mine"
    assert quire(*command, "--force").code == 0
    with load_model(out) as model:
        assert model.spec.num_layers == 2
    dangling = tmp_path / "link.gguf"
    dangling.symlink_to(tmp_path / "nowhere")
    assert "is there already" in fails("convert", PACKED, dangling, "--to", "I2_S")


def test_a_file_may_take_the_place_of_its_source(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert quire("convert", PACKED, path, "--to", "TQ2_0").code == 0
    content = path.read_bytes()
    assert quire("convert", path, path, "--to", "TQ1_0", "--force").code == 0
    assert path.stat().st_size < len(content)
    assert quire("convert", path, path, "--to", "TQ2_0", "--force").code == 0
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("source", "to", "complaint"),
    [
        (fixture_file("tiny/Q6_K.gguf"), "TQ2_0", "Q6_K.gguf is no BitNet model"),
        (FIXTURES / "families" / "qwen2", "I2_S", "qwen2 is no BitNet model"),
        (I2S, "TQ2_0", "do not fill TQ2_0's blocks of 256"),
        (fixture_file("tiny-bitnet/TQ1_0.gguf"), "I2_S", "row 1 has the scale"),
        (Path("dummy:tiny"), "I2_S", "made in memory and has no file to convert"),
        (Path("nowhere"), "I2_S", "neither a file or folder nor a known model"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing_behind(
    source: Path, to: str, complaint: str, tmp_path: Path
) -> None:
    assert complaint in fails("convert", source, tmp_path / "m.gguf", "--to", to)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    said = fails("convert", PACKED, tmp_path / "no" / "m.gguf", "--to", "I2_S")
    assert "cannot write" in said and "No such file or directory" in said
    assert "is a folder" in fails("convert", PACKED, tmp_path, "--to", "I2_S")


def test_a_wrong_call_names_the_types() -> None:
    run = quire("convert", PACKED, "m.gguf", "--to", "Q4_K")
    assert run.code == 2
    assert "TQ2_0" in run.err and "I2_S" in run.err
    run = quire("convert", PACKED, "m.gguf")
    assert run.code == 2 and "--to" in run.err


def test_the_choices_are_those_of_the_converter() -> None:
    """Which the options do not import: it takes long."""
    out = quire("convert", "--help").out
    assert f"--to {{{','.join(FILE_TYPES)}}}" in out
    assert f"--embedding {{{','.join(EMBEDDINGS)}}}" in out


def test_the_packing_of_what_has_no_i2_s_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    said = fails("convert", PACKED, out, "--to", "TQ2_0", "--i2s-packing", "arm")
    assert "has no tensor of type I2_S: leave it out" in said


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Neither with the number of tensors nor with the size of one: an embedding of 320 MiB in
    floats is converted, and three more layers of 18 MiB."""
    peaks = [peak_of(tmp_path, *sizes) for sizes in ((1, 1024), (4, 32_768))]
    assert peaks[1] - peaks[0] < 48 << 20


_WRITE = """
import sys
from dataclasses import replace
from quire.loader.gguf_writer import write_gguf
from quire.model import dummy
layers, vocabulary = map(int, sys.argv[2:])
shape = dummy.SHAPES["bitnet-2b"]
dummy.SHAPES["bitnet-2b"] = replace(shape, num_layers=layers, vocabulary_size=vocabulary)
model = dummy.DummyModel("dummy:bitnet-2b:TQ2_0")
write_gguf(sys.argv[1], model.fields, model.planned)
"""
_CONVERT = """
import resource, sys
from quire.cli.program import main
code = main(["convert", sys.argv[1], sys.argv[2], "--to", "TQ1_0", "--embedding", "F16", "--json"])
assert code == 0
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def peak_of(folder: Path, *sizes: int) -> int:
    path = folder / "m.gguf"
    run_python(_WRITE, path, *sizes)
    return int(run_python(_CONVERT, path, folder / f"{sizes[0]}.gguf"))


def run_python(code: str, *arguments: object) -> str:
    """What it writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        env=environment(),
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
