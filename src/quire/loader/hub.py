"""Models of the Hugging Face hub by name: listed, fetched into its cache, checked, found again.

Names, file names, sizes and digests come from a server and are checked before they make a path.
A file is written beside its place, goes on where an earlier attempt ended, and gets its name once
its digest is right. The folders are those of huggingface_hub: other tools find the files too.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from quire.core.errors import ConfigError, ModelFileError
from quire.loader.defaults import FILE_SUFFIXES, SHORT_NAMES
from quire.loader.reading import read_capped

REVISION = "main"
PREFIX = "hf:"
_USUAL_ENDPOINT = "https://huggingface.co"
_PIECE_BYTES = 1 << 16
_ATTEMPTS = 5  # that bring nothing, one after the other, before a download is given up
_RETRY_S = 1.0
_TIMEOUT_S = 30.0
_PASSING = (408, 429, 500, 502, 503, 504)  # answers after which the same request may succeed

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's of a small file, sha256 of a large one
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
_QUANT_IN_FILE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:IQ\d_[A-Z]+|Q\d_K(?:_[A-Z]+)?|Q\d_[01](?:_\d_\d)?|TQ\d_0|I2_S|"
    r"MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32))(?=$|[-._/])",
    re.I,
)
_NOT_MODELS = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?=[-._/])", re.I)
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_FOLDER_FILES = re.compile(
    r"(?:model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|"
    r"generation_config\.json|hf_quant_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|"
    r"chat_template\.(?:jinja|json)|additional_chat_templates/tool_use\.jinja)"
)

Progress = Callable[[str], None]  # gets one line for each thing that is done
Fetched = Callable[[int], None]  # gets the bytes of a model that are there, now and then


class ModelName(NamedTuple):
    """A model as the user names it; at most one of `quant` and `file`."""

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str = REVISION  # a branch, a tag or a commit

    @property
    def source(self) -> str:
        return self.repo if self.revision == REVISION else f"{self.repo}@{self.revision}"

    def __str__(self) -> str:
        if self.file is not None:
            return f"{PREFIX}{self.source}/{self.file}"
        return self.source if self.quant is None else f"{self.source}:{self.quant}"


class HubFile(NamedTuple):
    path: str  # in the repository, with slashes
    size: int
    digest: str  # sha256, or git's sha1 of a file that is not in LFS


class Variant(NamedTuple):
    """One way to run a repository: a GGUF file, its parts in order, or a safetensors folder."""

    quant: str
    files: tuple[HubFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def is_folder(self) -> bool:
        return not self.files[0].path.endswith(".gguf")


@dataclass(frozen=True, slots=True)
class Repository:
    """What a repository held at one commit."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    revision: str = REVISION  # by which the commit was found


# ---- names


def parse_name(text: str) -> ModelName | None:
    """OWNER/REPO[@REVISION][:QUANT], hf:OWNER/REPO[@REVISION]/FILE, or a short name in the place of
    OWNER/REPO; None for anything else."""
    is_marked = text.startswith(PREFIX)
    if not is_marked and text.endswith(FILE_SUFFIXES):
        return None  # a path that leads nowhere
    rest = text.removeprefix(PREFIX)
    source, colon, quant = rest.partition(":")
    found = _parse_source(source)
    if found is not None and (not colon or _QUANT.fullmatch(quant)):
        return found._replace(quant=quant.upper() or None)
    parts = rest.split("/", 2)
    if is_marked and len(parts) == 3 and is_safe_path(parts[2]):
        found = _parse_source("/".join(parts[:2]))
        if found is not None:
            return found._replace(file=parts[2])
    if is_marked:
        raise ConfigError(
            f"{text!r} is no name: write hf:OWNER/REPO, @REVISION after it, then :QUANT or /FILE"
        )
    return None


def _parse_source(text: str) -> ModelName | None:
    """OWNER/REPO[@REVISION]."""
    repo, at, revision = text.partition("@")
    repo = SHORT_NAMES.get(repo, repo)
    if not _is_repo(repo) or (at and not _is_revision(revision)):
        return None
    return ModelName(repo, revision=revision or REVISION)


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text


def _is_repo(text: str) -> bool:
    return _REPO.fullmatch(text) is not None and "--" not in text and ".." not in text


def is_safe_path(path: str) -> bool:
    """Whether a file name of a repository stays inside the folder that it is put in."""
    words = path.split("/")
    return (
        len(path) <= 512
        and path.isprintable()
        and "\\" not in path
        and not any(word in ("", ".", "..") for word in words)
    )


def quant_of(path: str) -> str | None:
    """Q4_K_M of "model-Q4_K_M-00001-of-00002.gguf", in capitals; the last where there are some."""
    found = _QUANT_IN_FILE.findall(_PART.sub("", path).removesuffix(".gguf"))
    return found[-1].upper() if found else None


def variants(files: Iterable[HubFile]) -> list[Variant]:
    """The ways to run what these files hold, smallest first; no file of which a part is missing."""
    groups: dict[str, list[HubFile]] = {}
    folder = []
    for file in files:
        if file.path.endswith(".gguf") and not _NOT_MODELS.search(file.path):
            groups.setdefault(_PART.sub("", file.path), []).append(file)
        elif _FOLDER_FILES.fullmatch(file.path):
            folder.append(file)
    found = []
    for name, group in groups.items():
        parts = sorted(group)
        if _is_whole(parts):
            found.append(Variant(quant_of(name) or PurePosixPath(name).stem, tuple(parts)))
    if _is_model_folder({file.path for file in folder}):
        found.append(Variant("SAFETENSORS", tuple(sorted(folder, key=_weights_last))))
    return sorted(found, key=lambda variant: (variant.bytes, variant.files[0].path))


def _is_whole(parts: list[HubFile]) -> bool:
    found = [match.groups() for part in parts if (match := _PART.search(part.path))]
    if not found:
        return len(parts) == 1
    count = int(found[0][1])
    return [(int(number), int(of)) for number, of in found] == [
        (number, count) for number in range(1, count + 1)
    ]


def _is_model_folder(names: set[str]) -> bool:
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    is_sharded = "model.safetensors.index.json" in names and {len(shards)} == {
        int(match[2]) for match in shards
    }
    return "config.json" in names and ("model.safetensors" in names or is_sharded)


def _weights_last(file: HubFile) -> tuple[bool, str]:
    return file.path.endswith(".safetensors"), file.path


def choose_named(name: ModelName, files: Iterable[HubFile]) -> list[Variant]:
    """The variants that a name allows, smallest first."""
    found = variants(files)
    if name.file is not None:
        return [one for one in found if not one.is_folder and one.files[0].path == name.file]
    if name.quant is not None:
        return [one for one in found if name.quant in (one.quant, one.quant.removeprefix("UD-"))]
    return found


# ---- the cache


def cache_folder() -> Path:
    """The hub's own cache: $HF_HUB_CACHE, $HF_HOME/hub, or ~/.cache/huggingface/hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(variable):
            return Path(os.path.expanduser(chosen))
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(os.path.expanduser(home)) / "hub"


def _repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def cached_repositories() -> list[str]:
    """The names of repositories of which the cache holds anything."""
    names = []
    for folder in sorted(cache_folder().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        if _is_repo(name):
            names.append(name)
    return names


class Snapshot(NamedTuple):
    """What the cache holds of one commit of a repository."""

    repo: str
    folder: Path
    files: tuple[HubFile, ...]

    def path(self, variant: Variant) -> Path:
        """What to open."""
        return self.folder if variant.is_folder else self.folder / variant.files[0].path


def snapshots(repo: str, revision: str = REVISION) -> list[Snapshot]:
    """Those of a repository in the cache, the one of its main branch first; of another revision
    that one alone."""
    folder = _repo_folder(repo)
    try:
        head = (folder / "refs" / revision).read_text().strip()
    except OSError:
        head = "" if revision == REVISION else revision
    commits = sorted((folder / "snapshots").glob("*"), key=lambda path: (path.name != head, path))
    if revision != REVISION:
        commits = [path for path in commits if path.name == head]
    found = (_snapshot(repo, commit) for commit in commits)
    return [one for one in found if one.files]


def _snapshot(repo: str, folder: Path) -> Snapshot:
    files = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            relative = path.relative_to(folder).as_posix()
            if path.is_file() and is_safe_path(relative):  # a link to a blob that is there
                files.append(HubFile(relative, path.stat().st_size, ""))
    return Snapshot(repo, folder, tuple(sorted(files)))


def remove(snapshot: Snapshot, variant: Variant) -> int:
    """Remove a variant from the cache, and blobs that nothing else names; the bytes it freed."""
    root = _repo_folder(snapshot.repo)
    freed = 0
    for file in variant.files:
        link = snapshot.folder / file.path
        blob = link.resolve()
        link.unlink()
        if not link.is_symlink() and blob.parent == (root / "blobs").resolve():
            if not _is_named(blob, root):
                freed += blob.stat().st_size
                blob.unlink()
        else:
            freed += file.size
    if not any(one.files for one in snapshots(snapshot.repo)):
        shutil.rmtree(root)
    return freed


def _is_named(blob: Path, root: Path) -> bool:
    return any(path.resolve() == blob for path in (root / "snapshots").rglob("*"))


# ---- the hub


class Hub:
    """One endpoint, through huggingface_hub. Failures are ModelFileErrors that say what to do."""

    def __init__(self) -> None:
        try:
            # Only where something is fetched: it takes long to import.
            import huggingface_hub
            from huggingface_hub import errors, utils
        except ImportError as error:
            raise ConfigError(
                "models of the Hugging Face hub need huggingface_hub: pip install 'quire[hub]'"
            ) from error
        self.endpoint = (os.environ.get("HF_ENDPOINT") or _USUAL_ENDPOINT).rstrip("/")
        self._library: Any = huggingface_hub
        self._errors: Any = errors
        self._utils: Any = utils

    def repository(self, repo: str, revision: str = REVISION) -> Repository:
        """What a revision of a repository, usually its main branch, holds now."""
        with self._explained(repo):
            api = self._library.HfApi(endpoint=self.endpoint)
            found = api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        if not _COMMIT.fullmatch(str(found.sha)):
            raise ModelFileError(f"{self.endpoint} names no commit for {repo}: got {found.sha!r}")
        files = tuple(_hub_files(repo, found.siblings or ()))
        return Repository(repo, found.sha, files, revision)

    def fetch_start(self, repository: Repository, file: HubFile, num_bytes: int) -> bytes:
        """The first bytes of a file."""
        start = b""
        with self._explained(repository.name), self._stream(repository, file, 0, num_bytes) as body:
            for piece in body:
                start += piece
                if len(start) >= num_bytes:
                    break
        return start[:num_bytes]

    def fetch(
        self, repository: Repository, variant: Variant, fetched: Fetched, progress: Progress
    ) -> Path:
        """Have all files of a variant in the cache, checked, and return what to open."""
        root = _repo_folder(repository.name)
        folder = root / "snapshots" / repository.commit
        missing = [file for file in variant.files if not _is_there(root, file, progress)]
        with self._explained(repository.name):
            (root / "blobs").mkdir(parents=True, exist_ok=True)
            _check_space(root / "blobs", missing)
            done = variant.bytes - sum(file.size for file in missing)
            for file in missing:
                self._fetch_file(repository, file, partial(_add, fetched, done))
                progress(f"{file.path}: {_kind(file)} checked")
                done += file.size
            for file in variant.files:
                _link(root, folder / file.path, file)
            _write_reference(root, repository)
        return folder if variant.is_folder else folder / variant.files[0].path

    def _fetch_file(self, repository: Repository, file: HubFile, fetched: Fetched) -> None:
        blob = _blob(_repo_folder(repository.name), file)
        unfinished = _unfinished(blob)
        with unfinished.open("ab+") as target:
            _lock(target, file)
            self._fill(repository, file, target, fetched)
            target.flush()
            found = _digest(target, file)
            if found != file.digest:
                unfinished.unlink()
                raise ModelFileError(
                    f"{file.path} of {repository.name} came with {_kind(file)} {found}, but the "
                    f"hub lists {file.digest}: it was damaged on its way or replaced, and is "
                    "removed. Pull it again; if it happens again, do not use it"
                )
            unfinished.replace(blob)

    def _fill(
        self, repository: Repository, file: HubFile, target: BinaryIO, fetched: Fetched
    ) -> None:
        """Go on until the file has its size; give up after attempts that brought nothing."""
        attempts = 0
        while (here := target.seek(0, os.SEEK_END)) < file.size:
            try:
                self._append(repository, file, target, fetched)
                failure: Exception | None = None
            except self._errors.HTTPError as error:
                answer = getattr(error, "response", None)
                if answer is not None and answer.status_code not in _PASSING:
                    raise
                failure = error
            if target.seek(0, os.SEEK_END) > here:
                attempts = 0
                continue
            attempts += 1
            if attempts == _ATTEMPTS:
                raise ModelFileError(
                    f"{file.path} of {repository.name} ends after {here} of {file.size} bytes: "
                    f"{failure or 'the server closes the connection'}. What came is kept, and the "
                    "same command goes on from there"
                )
            time.sleep(_RETRY_S)
        if target.seek(0, os.SEEK_END) > file.size:
            target.truncate(0)
            raise ModelFileError(f"{file.path} of {repository.name} is longer than the hub lists")

    def _append(
        self, repository: Repository, file: HubFile, target: BinaryIO, fetched: Fetched
    ) -> None:
        here = target.seek(0, os.SEEK_END)
        with self._stream(repository, file, here, None) as body:
            for piece in body:
                target.write(piece)
                here += len(piece)
                fetched(here)
                if here > file.size:
                    return

    @contextmanager
    def _stream(
        self, repository: Repository, file: HubFile, start: int, stop: int | None
    ) -> Iterator[Iterator[bytes]]:
        """The bytes of a file from `start`. The hub sends a client on to its storage."""
        url = self._library.hf_hub_url(
            repository.name, file.path, revision=repository.commit, endpoint=self.endpoint
        )
        headers = dict(self._utils.build_hf_headers(library_name="quire"))
        headers["Accept-Encoding"] = "identity"  # sizes and ranges are those of the file
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        session = self._utils.get_session()
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
            self._utils.hf_raise_for_status(response)
            skip = start if response.status_code == 200 else 0  # the server sends it all
            yield _skipping(response.iter_bytes(_PIECE_BYTES), skip)

    @contextmanager
    def _explained(self, repo: str) -> Iterator[None]:
        """Errors of the library as errors of ours, with what to do."""
        errors = self._errors
        try:
            yield
        except errors.GatedRepoError as error:
            raise ModelFileError(self._gated(repo)) from error
        except errors.RevisionNotFoundError as error:
            raise ModelFileError(
                f"{repo} has no such branch, tag or commit: {self.endpoint}/{repo} lists them"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelFileError(
                f"{self.endpoint} has no model {repo}, or shows it to some alone: check the name; "
                f"for a private one set HF_TOKEN to a token of {self.endpoint}/settings/tokens"
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise ModelFileError(self._gated(repo)) from error
            raise ModelFileError(f"{self.endpoint} answers {status} for {repo}") from error
        except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:
            raise UnreachableError(f"cannot reach {self.endpoint}: {error}") from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ModelFileError(
                    f"the disk of {cache_folder()} is full; what came is kept. Make room, or set "
                    "HF_HUB_CACHE to a folder on another disk"
                ) from error
            raise ModelFileError(f"cannot write into {cache_folder()}: {error}") from error

    def _gated(self, repo: str) -> str:
        has_token = self._library.get_token() is not None
        token = "the token given may not read it" if has_token else "no token was given"
        return (
            f"{repo} is gated, and {token}: accept its licence at {self.endpoint}/{repo}, "
            f"make a token at {self.endpoint}/settings/tokens, and set HF_TOKEN to it"
        )


class UnreachableError(ModelFileError):
    """There is no network, or HF_HUB_OFFLINE is set."""


def _hub_files(repo: str, siblings: Iterable[Any]) -> Iterator[HubFile]:
    for sibling in siblings:
        lfs = sibling.lfs
        size = sibling.size if lfs is None else lfs.size
        digest = sibling.blob_id if lfs is None else lfs.sha256
        path = str(sibling.rfilename)
        if not path.endswith(".gguf") and not _FOLDER_FILES.fullmatch(path):
            continue
        if not is_safe_path(path):
            raise ModelFileError(f"{repo} lists a file with a name that no file has: {path!r}")
        if not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(str(digest)):
            raise ModelFileError(f"{repo} lists {path} with {size = } and {digest = }")
        yield HubFile(path, size, digest)


def _add(fetched: Fetched, before: int, here: int) -> None:
    fetched(before + here)


def _skipping(pieces: Iterable[bytes], skip: int) -> Iterator[bytes]:
    for piece in pieces:
        if skip < len(piece):
            yield piece[skip:]
        skip = max(0, skip - len(piece))


def _kind(file: HubFile) -> str:
    return "sha256" if len(file.digest) == 64 else "git digest"


def _digest(target: BinaryIO, file: HubFile) -> str:
    target.seek(0)
    if len(file.digest) == 64:
        whole = hashlib.sha256()
    else:
        whole = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)  # as git makes it
    while piece := target.read(_PIECE_BYTES):
        whole.update(piece)
    return whole.hexdigest()


def _blob(root: Path, file: HubFile) -> Path:
    return root / "blobs" / file.digest


def _unfinished(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.quire.incomplete")


def _is_there(root: Path, file: HubFile, progress: Progress) -> bool:
    """Whether the cache holds the file as it should be. One that changed is removed."""
    blob = _blob(root, file)
    if not blob.is_file():
        return False
    with blob.open("rb") as content:
        if _digest(content, file) == file.digest:
            return True
    progress(f"{file.path} is in the cache, but not as the hub lists it: it is fetched again")
    blob.unlink()
    return False


def _lock(target: BinaryIO, file: HubFile) -> None:
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelFileError(f"another process is fetching {file.path}: wait for it") from None


def _check_space(folder: Path, missing: Iterable[HubFile]) -> None:
    needed = 0
    for file in missing:
        unfinished = _unfinished(folder / file.digest)
        needed += file.size - (unfinished.stat().st_size if unfinished.exists() else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelFileError(
            f"{needed / 1e9:.1f} GB are to be fetched, but the disk of {folder} has "
            f"{free / 1e9:.1f} GB free: make room (`quire models`, `quire rm`), or set "
            "HF_HUB_CACHE to a folder on another disk"
        )


def _link(root: Path, place: Path, file: HubFile) -> None:
    """Give a blob its name in the snapshot, as huggingface_hub does."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # a link to nothing
    place.symlink_to(os.path.relpath(_blob(root, file), place.parent))


def _write_reference(root: Path, repository: Repository) -> None:
    if repository.revision == repository.commit:
        return  # its snapshot has that name
    reference = root / "refs" / repository.revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(repository.commit)


# ---- what other programs have fetched, which is read where it lies and never written

_OLLAMA_LAYER = "application/vnd.ollama.image.model"
_OLLAMA_HOST = "registry.ollama.ai"
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # where its packages keep models
_MAX_MANIFEST_BYTES = 1 << 20


class OtherModel(NamedTuple):
    name: str
    path: Path
    bytes: int
    origin: str  # the program


def other_models() -> list[OtherModel]:
    """The models of Ollama and llama.cpp on this machine."""
    return [*_ollama_models(), *_llama_cpp_models()]


def find_other(name: str) -> OtherModel | None:
    """The one of that name: NAME[:TAG] as Ollama has it, else as `quire models` lists it."""
    wanted = name.removeprefix("ollama:")
    for model in other_models():
        if model.origin == "ollama" and model.name in (wanted, f"{wanted}:latest"):
            return model
        if model.origin == "llama.cpp" and model.name == name:
            return model
    return None


def _ollama_models() -> Iterator[OtherModel]:
    chosen = os.environ.get("OLLAMA_MODELS")
    own = Path(os.path.expanduser("~/.ollama/models"))
    for root in [Path(chosen)] if chosen else [own, _OLLAMA_SERVICE]:
        for manifest in sorted((root / "manifests").glob("*/*/*/*")):
            host, owner, model, tag = manifest.relative_to(root / "manifests").parts
            blob = _ollama_blob(root, manifest)
            if blob is not None:
                words = [host] * (host != _OLLAMA_HOST) + [owner] * (owner != "library")
                name = "/".join([*words, f"{model}:{tag}"])
                yield OtherModel(name, blob, blob.stat().st_size, "ollama")


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    """The GGUF file that a manifest names; None for one without, or that cannot be read."""
    try:
        content = json.loads(read_capped(manifest, _MAX_MANIFEST_BYTES))
        layers = [layer for layer in content["layers"] if layer["mediaType"] == _OLLAMA_LAYER]
        kind, _, digest = str(layers[0]["digest"]).partition(":")
    except (ModelFileError, ValueError, RecursionError, LookupError, TypeError):
        return None
    if kind != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    blob = root / "blobs" / f"sha256-{digest}"
    return blob if blob.is_file() else None


def llama_cpp_folder() -> Path:
    if chosen := os.environ.get("LLAMA_CACHE"):
        return Path(chosen)
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "llama.cpp"


def _llama_cpp_models() -> Iterator[OtherModel]:
    """Files named OWNER_REPO_FILE.gguf; a manifest says which of the names is which."""
    root = llama_cpp_folder()
    manifests = [path.name.split("=") for path in root.glob("manifest=*=*=*.json")]
    repos = {f"{words[1]}_{words[2]}_": f"{words[1]}/{words[2]}" for words in manifests}
    files = [HubFile(path.name, path.stat().st_size, "") for path in root.glob("*.gguf")]
    for variant in variants(files):
        file = variant.files[0].path
        repo = next((repo for start, repo in repos.items() if file.startswith(start)), None)
        is_known = repo is not None and quant_of(file) is not None
        name = f"{repo}:{variant.quant}" if is_known else f"llama.cpp:{file}"
        yield OtherModel(name, root / file, variant.bytes, "llama.cpp")


def find_in_llama_cpp(name: ModelName) -> list[tuple[Variant, Path]]:
    """The variants of a repository that llama.cpp has fetched, smallest first."""
    root, start = llama_cpp_folder(), name.repo.replace("/", "_") + "_"
    files = [
        HubFile(path.name.removeprefix(start), path.stat().st_size, "")
        for path in root.glob("*.gguf")
        if path.name.startswith(start)
    ]
    found = choose_named(name, files)
    return [(variant, root / (start + variant.files[0].path)) for variant in found]
