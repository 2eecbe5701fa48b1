"""Models of the hub: names, downloads that are interrupted and checked, refusals, the cache."""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub_server import COMMIT, FakeHub, git_digest, serving_hub

from quire.core.errors import ConfigError, ModelFileError
from quire.loader import hub
from quire.loader.defaults import SHORT_NAMES
from quire.loader.hub import Hub, HubFile, ModelName, parse_name, quant_of, variants

REPO = "someone/some-model-GGUF"
CONTENT = bytes(range(256)) * 2000  # 512,000 bytes


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub of this machine, an empty cache, no token, and no waiting between attempts."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "OLLAMA_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(hub, "_RETRY_S", 0.0)
    with serving_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def fetch(name: str = REPO) -> Path:
    source = Hub()
    repository = source.repository(name)
    [variant] = variants(repository.files)
    return source.fetch(repository, variant, lambda _: None, lambda _: None)


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- names


def test_names_are_read() -> None:
    assert parse_name("a/b") == parse_name("hf:a/b") == ModelName("a/b")
    assert parse_name("a/b:q4_k_m") == ModelName("a/b", "Q4_K_M")
    assert parse_name("hf:a/b/c/d-Q4_0.gguf") == ModelName("a/b", file="c/d-Q4_0.gguf")
    assert parse_name("qwen3-8b:Q6_K") == ModelName("Qwen/Qwen3-8B-GGUF", "Q6_K")
    assert parse_name("a/b@v1.0") == ModelName("a/b", revision="v1.0")
    assert parse_name("a/b@v1:q8_0") == ModelName("a/b", "Q8_0", revision="v1")
    assert parse_name("hf:a/b@v1/c.gguf") == ModelName("a/b", file="c.gguf", revision="v1")
    assert parse_name("a/b@main") == ModelName("a/b")
    for name in ("a/b@v1:Q8_0", "hf:a/b@v1/c.gguf", "a/b:Q8_0"):
        assert str(parse_name(name)) == name
    for text in ("model.gguf", "folder/model.gguf", "./a/b", "/a/b", "a/b/c", "gpt5", "a/b:"):
        assert parse_name(text) is None, text
    for text in ("a/b@", "a/b@..", "a/b@v/1", "a/b@v 1", "@v1", "a@v1/b"):
        assert parse_name(text) is None, text


@pytest.mark.parametrize(
    "text",
    ["hf:a/../b.gguf", "hf:a/b/../../c.gguf", "hf:a/b//c", "hf:a/b/c\\d", "hf:../b", "hf:a/b/\n"],
)
def test_a_name_cannot_leave_the_cache(text: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        parse_name(text)
    assert parse_name(text.removeprefix("hf:")) is None


def test_every_short_name_is_a_name() -> None:
    assert len(SHORT_NAMES) >= 20
    for short, repo in SHORT_NAMES.items():
        assert parse_name(short) == ModelName(repo)


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00003.gguf", "UD-Q2_K_XL"),
        ("tinyllama-1.1b-chat-v1.0.Q5_0.gguf", "Q5_0"),
        ("ggml-model-i2_s.gguf", "I2_S"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Qwen3-8B-NVFP4.gguf", "NVFP4"),
        ("Bonsai-8B-Q1_0.gguf", "Q1_0"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("m-bf16.gguf", "BF16"),
        ("model.gguf", None),
    ],
)
def test_the_quant_is_in_the_file_name(path: str, quant: str | None) -> None:
    assert quant_of(path) == quant


def test_files_are_grouped_into_variants() -> None:
    names = [
        *("m-Q8_0.gguf", "m-Q4_0-00002-of-00002.gguf", "m-Q4_0-00001-of-00002.gguf"),
        *("m-Q5_0-00001-of-00002.gguf", "mmproj-m-f16.gguf", "m.imatrix.gguf"),
    ]
    found = variants(HubFile(name, len(name), "") for name in names)
    assert [[one.quant, *(file.path for file in one.files)] for one in found] == [
        ["Q8_0", "m-Q8_0.gguf"],
        ["Q4_0", "m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"],
    ]
    folder = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    assert variants(HubFile(name, 1, "") for name in folder) == []  # a shard is missing
    [whole] = variants(
        HubFile(name, 1, "") for name in [*folder, "model-00002-of-00002.safetensors", "x.bin"]
    )
    assert (whole.quant, whole.is_folder, len(whole.files)) == ("SAFETENSORS", True, 4)


# ---- downloads


def test_a_file_is_put_where_other_tools_look_for_it(fake: FakeHub, tmp_path: Path) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT, "README.md": b"about"})
    path = fetch()
    assert path.read_bytes() == CONTENT
    root = tmp_path / "hub" / "models--someone--some-model-GGUF"
    assert path == root / "snapshots" / COMMIT / "m-Q4_0.gguf"
    assert files_under(root) == [
        f"blobs/{hashlib.sha256(CONTENT).hexdigest()}",
        "refs/main",
        f"snapshots/{COMMIT}/m-Q4_0.gguf",
    ]
    huggingface_hub = pytest.importorskip("huggingface_hub")
    theirs = huggingface_hub.try_to_load_from_cache(
        REPO, "m-Q4_0.gguf", cache_dir=str(tmp_path / "hub")
    )
    assert theirs == str(path)


def test_what_is_there_is_not_fetched_again_but_checked(fake: FakeHub) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    path = fetch()
    assert len(fake.ranges()) == 1
    fetch()
    assert len(fake.ranges()) == 1
    path.resolve().write_bytes(CONTENT[::-1])
    assert fetch().read_bytes() == CONTENT
    assert len(fake.ranges()) == 2


def test_a_cut_connection_goes_on_where_it_ended(fake: FakeHub) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    fake.cut_after = 200_000
    assert fetch().read_bytes() == CONTENT
    first, *others = fake.ranges()
    assert first is None and len(others) >= 2
    starts = [int(str(one).removeprefix("bytes=").removesuffix("-")) for one in others]
    assert starts == sorted(starts) and 0 < starts[0] <= 200_000


def test_an_interrupted_download_is_resumed_by_the_next_command(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    source = Hub()
    repository = source.repository(REPO)
    [variant] = variants(repository.files)

    def interrupt(done: int) -> None:
        if done > 300_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.fetch(repository, variant, interrupt, lambda _: None)
    [partial] = (tmp_path / "hub").rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 300_000 < kept < len(CONTENT)
    assert hub.snapshots(REPO) == []  # nothing has its name before it is whole
    assert fetch().read_bytes() == CONTENT
    assert fake.ranges()[-1] == f"bytes={kept}-"
    assert not partial.exists()


def test_a_server_that_ignores_ranges_is_no_trouble(fake: FakeHub) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    source = Hub()
    repository = source.repository(REPO)
    [variant] = variants(repository.files)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.fetch(repository, variant, interrupt, lambda _: None)
    fake.ignores_ranges = True
    assert fetch().read_bytes() == CONTENT


def test_a_server_that_gives_no_more_is_given_up_and_what_came_is_kept(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    fake.cut_after = 0
    with pytest.raises(ModelFileError, match="the same command goes on from there"):
        fetch()
    assert len(list((tmp_path / "hub").rglob("*.incomplete"))) == 1


@pytest.mark.parametrize("size", [512_000, 500])  # in LFS, and in git
def test_a_wrong_digest_is_refused_and_the_file_removed(
    fake: FakeHub, tmp_path: Path, size: int
) -> None:
    content = CONTENT[:size]
    fake.add(REPO, {"m-Q4_0.gguf": content})
    fake.served["m-Q4_0.gguf"] = content[::-1]
    with pytest.raises(ModelFileError, match="damaged on its way or replaced") as caught:
        fetch()
    listed = hashlib.sha256(content).hexdigest() if size > 1000 else git_digest(content)
    assert listed in str(caught.value)
    assert files_under(tmp_path / "hub") == []
    fake.served.clear()
    assert fetch().read_bytes() == content


def test_a_longer_file_than_listed_is_refused(fake: FakeHub) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    fake.served["m-Q4_0.gguf"] = CONTENT + b"more"
    with pytest.raises(ModelFileError, match="longer than the hub lists"):
        fetch()


def test_all_parts_come_and_the_first_is_given(fake: FakeHub) -> None:
    names = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf"]
    fake.add(REPO, {names[1]: CONTENT[1:], names[0]: CONTENT})
    path = fetch()
    assert path.name == names[0]
    assert path.with_name(names[1]).read_bytes() == CONTENT[1:]


def test_a_safetensors_folder_comes_without_the_rest(fake: FakeHub) -> None:
    files = {
        "config.json": b"{}",
        "model.safetensors": CONTENT,
        "pytorch_model.bin": CONTENT[2:],
        "onnx/model.onnx": CONTENT[3:],
        "hf_quant_config.json": b"{}",
        "tokenizer.json": b"{ }",
    }
    fake.add(REPO, files)
    folder = fetch()
    kept = ["config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"]
    assert files_under(folder) == kept
    assert (folder / "model.safetensors").read_bytes() == CONTENT


# ---- refusals


@pytest.mark.parametrize("token", [None, "hf_other"])  # the hub answers 401 and 403
def test_a_gated_model_says_how_to_get_it(
    fake: FakeHub, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT}, is_gated=True)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelFileError) as caught:
        fetch()
    message = str(caught.value)
    assert f"accept its licence at {fake.url}/{REPO}" in message
    assert f"make a token at {fake.url}/settings/tokens, and set HF_TOKEN to it" in message
    assert ("no token was given" in message) == (token is None)


def test_a_token_opens_a_gated_model_and_stays_with_the_hub(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT}, is_gated=True)
    monkeypatch.setenv("HF_TOKEN", fake.token)
    assert fetch().read_bytes() == CONTENT
    assert fake.ranges() and fake.tokens_at_storage == []  # another host than the hub's


def test_an_unknown_repository_is_told(fake: FakeHub) -> None:
    with pytest.raises(ModelFileError, match="has no model no/such, or shows it to some alone"):
        Hub().repository("no/such")


OTHER = "f" * 40


@pytest.mark.parametrize("revision", ["v2", OTHER])
def test_a_revision_is_fetched_and_found_again(
    fake: FakeHub, tmp_path: Path, revision: str
) -> None:
    fake.revisions["v2"] = OTHER
    fake.add(REPO, {"x-Q4_0.gguf": CONTENT})
    source = Hub()
    found = source.repository(REPO, revision)
    [variant] = variants(found.files)
    path = source.fetch(found, variant, lambda _: None, lambda _: None)
    assert path.parent.name == OTHER and path.read_bytes() == CONTENT
    assert not hub.snapshots(REPO, "v3")
    [snapshot] = hub.snapshots(REPO, revision)
    assert snapshot.path(variant) == path
    assert all(part in ("", OTHER) for _, path, _ in fake.requests for part in _commits(path))


def _commits(path: str) -> list[str]:
    return re.findall(r"/resolve/([^/]+)/", path)


def test_a_revision_that_is_not_there_is_told(fake: FakeHub) -> None:
    fake.add(REPO, {"x-Q4_0.gguf": CONTENT})
    with pytest.raises(ModelFileError, match="has no such branch, tag or commit"):
        Hub().repository(REPO, "v9")


def test_a_full_disk_is_told_before_anything_is_fetched(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    usage = shutil.disk_usage("/")._replace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelFileError, match=r"0\.0 GB free: make room .* set HF_HUB_CACHE"):
        fetch()
    assert fake.ranges() == []


def test_a_disk_that_fills_up_keeps_what_came(fake: FakeHub, tmp_path: Path) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    source = Hub()
    repository = source.repository(REPO)
    [variant] = variants(repository.files)

    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelFileError, match="is full; what came is kept"):
        source.fetch(repository, variant, fill, lambda _: None)
    assert len(list((tmp_path / "hub").rglob("*.incomplete"))) == 1


@pytest.mark.parametrize(
    "name", ["../../m-Q4_0.gguf", "/m-Q4_0.gguf", "a/../../m.gguf", "a\\m.gguf"]
)
def test_a_hub_cannot_name_files_outside_the_cache(
    fake: FakeHub, tmp_path: Path, name: str
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    fake.listed["m-Q4_0.gguf"] = name
    with pytest.raises(ModelFileError, match="a name that no file has"):
        fetch()
    assert files_under(tmp_path) == []


def test_no_network_is_an_error_of_its_own(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(hub.UnreachableError, match=r"cannot reach http://127\.0\.0\.1:9"):
        Hub().repository(REPO)


# ---- the cache, and other programs' caches


def test_removing_one_quant_keeps_the_other_and_the_last_takes_the_folder(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT, "m-Q8_0.gguf": CONTENT + CONTENT})
    source = Hub()
    repository = source.repository(REPO)
    for variant in variants(repository.files):
        source.fetch(repository, variant, lambda _: None, lambda _: None)
    root = tmp_path / "hub" / "models--someone--some-model-GGUF"
    [snapshot] = hub.snapshots(REPO)
    small, large = variants(snapshot.files)
    assert hub.remove(snapshot, large) == 2 * len(CONTENT)
    assert [path.stat().st_size for path in (root / "blobs").iterdir()] == [len(CONTENT)]
    assert hub.remove(snapshot, small) == len(CONTENT)
    assert not root.exists()


def test_a_blob_that_another_commit_names_stays(fake: FakeHub, tmp_path: Path) -> None:
    fake.add(REPO, {"m-Q4_0.gguf": CONTENT})
    path = fetch()
    other = path.parent.parent / ("f" * 40) / path.name
    other.parent.mkdir()
    other.symlink_to(path.readlink())
    snapshot = hub.snapshots(REPO)[0]
    assert snapshot.folder == path.parent  # the main branch's is first
    assert hub.remove(snapshot, variants(snapshot.files)[0]) == 0
    assert other.read_bytes() == CONTENT


def write_ollama_model(root: Path, name: str, content: bytes, digest: str | None = None) -> Path:
    found = digest or "sha256:" + hashlib.sha256(content).hexdigest()
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": found},
    ]
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = root / "blobs" / found.replace(":", "-")
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    return blob


def test_ollamas_models_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "none"))
    blob = write_ollama_model(tmp_path, "registry.ollama.ai/library/llama3.2/latest", CONTENT)
    other = write_ollama_model(tmp_path, "hf.co/bartowski/X-GGUF/Q4_K_M", CONTENT[1:])
    assert [(one.name, one.path, one.origin) for one in hub.other_models()] == [
        ("hf.co/bartowski/X-GGUF:Q4_K_M", other, "ollama"),
        ("llama3.2:latest", blob, "ollama"),
    ]
    for name in ("llama3.2", "llama3.2:latest", "ollama:llama3.2"):
        assert hub.find_other(name) is not None
    assert hub.find_other("llama3.2:1b") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": [3]}', '{"layers": []}', "[" * 9999])
def test_manifests_that_make_no_sense_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    write_ollama_model(tmp_path, "registry.ollama.ai/library/a/b", CONTENT)
    (tmp_path / "manifests/registry.ollama.ai/library/a/b").write_text(text)
    assert [one for one in hub.other_models() if one.origin == "ollama"] == []


def test_a_manifest_cannot_point_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    (tmp_path / "ollama" / "blobs").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(CONTENT)
    for number, digest in enumerate(
        ["sha256:../../secret", "sha256:/etc/passwd", "md5:" + "0" * 64]
    ):
        manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/a" / str(number)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
        manifest.write_text(json.dumps({"layers": [layer]}))
    assert [one for one in hub.other_models() if one.origin == "ollama"] == []


def test_llama_cpps_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    for name in ("a_b-GGUF_b-Q4_0.gguf", "c_d_e-Q8_0.gguf", "a_b-GGUF_mmproj-b-f16.gguf"):
        (tmp_path / name).write_bytes(CONTENT)
    (tmp_path / "manifest=a=b-GGUF=latest.json").write_text("{}")
    assert [(one.name, one.path.name) for one in hub.other_models()] == [
        ("a/b-GGUF:Q4_0", "a_b-GGUF_b-Q4_0.gguf"),
        ("llama.cpp:c_d_e-Q8_0.gguf", "c_d_e-Q8_0.gguf"),
    ]
    [(variant, path)] = hub.find_in_llama_cpp(ModelName("a/b-GGUF"))
    assert (variant.quant, path) == ("Q4_0", tmp_path / "a_b-GGUF_b-Q4_0.gguf")
    assert hub.find_in_llama_cpp(ModelName("a/b-GGUF", "Q8_0")) == []
