"""Models by name: which file a name means, and `quire pull`, `quire models` and `quire rm`."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from quire.cli.program import print_json, print_progress, print_status, printable
from quire.core.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.inspection import CpuForecast, inspect_model
from quire.llm.machine import DEFAULT_KV_BYTES, available_memory, format_bytes
from quire.llm.progress import ProgressBar
from quire.loader import defaults, hub
from quire.loader.hub import Hub, HubFile, ModelName, Repository, Snapshot, Variant
from quire.quant.formats import FORMATS

# The first of these that a repository has is taken; a smaller one only where it does not fit.
_USUAL_QUANTS = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_L", "Q4_K_S", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "MXFP4"),
    *("Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "I2_S", "TQ2_0", "BF16", "F16", "FP16", "F32"),
)
_OTHER_SPELLINGS = {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4"}
_MIXES = {"IQ2_M": "IQ2_S", "IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S"}  # by their main type
_HEADER_BYTES = (8 << 20, 48 << 20)  # how much of a file is asked for its header, one by one
_QUARTER = 4

Notice = Callable[[str], None]


class Found(NamedTuple):
    """The files of a model, and why these."""

    path: Path
    bytes: int
    quant: str | None
    why: str


# ---- which file a name means


def find(args: argparse.Namespace) -> None:
    """Put the path of a model in the place of its name; called before a command runs."""
    name = args.model
    found = locate(name, print_status)
    args.model = str(found.path)
    if getattr(args, "served_model_name", []) is None:
        args.served_model_name = [name]


def locate(text: str, notice: Notice) -> Found:
    """A model on this machine, of whichever program; else one of the hub, which is fetched."""
    name = None if text.startswith("ollama:") else hub.parse_name(text)
    here = _here(text, name)
    if here is not None:
        notice(f"quire: {here.why}")
        return here
    if name is None:
        raise ModelFileError(_unknown(text))
    return fetch(name, notice)


def _unknown(text: str) -> str:
    known = ", ".join(sorted([*defaults.DEFAULT_MODELS, *defaults.SHORT_NAMES]))
    return (
        f"{text} is neither a file or folder nor a known model ({known}). OWNER/REPO[:QUANT] names "
        "one of the Hugging Face hub, and `quire models` lists what is on this machine"
    )


def _here(text: str, name: ModelName | None) -> Found | None:
    """What this machine has under a name. Of several quants the usual one is taken."""
    if name is not None:
        found = _cached(name) or _in_llama_cpp(name)
        if found is not None:
            return found
    other = hub.find_other(text)
    if other is None:
        return None
    return Found(other.path, other.bytes, None, f"{text} is {other.origin}'s, in {other.path}")


def _cached(name: ModelName) -> Found | None:
    for snapshot in hub.snapshots(name.repo):
        ranked = _ranked(hub.choose_named(name, snapshot.files), named=True)
        if ranked:
            path = snapshot.path(ranked[0])
            why = f"{name} is in the cache as {ranked[0].quant}"
            return Found(path, ranked[0].bytes, ranked[0].quant, why)
    return None


def _in_llama_cpp(name: ModelName) -> Found | None:
    paths = dict(hub.find_in_llama_cpp(name))
    ranked = _ranked(list(paths), named=True)
    if not ranked:
        return None
    path = paths[ranked[0]]
    return Found(path, ranked[0].bytes, ranked[0].quant, f"{name} is llama.cpp's, in {path}")


def fetch(name: ModelName, notice: Notice) -> Found:
    """Fetch a model of the hub into its cache; without a network, what the cache holds."""
    source = Hub()
    try:
        repository = source.repository(name.repo)
    except hub.UnreachableError as error:
        found = _cached(name)
        if found is None:
            raise ModelFileError(
                f"{error}; and nothing of {name} is on this machine (`quire models` lists what is)"
            ) from error
        notice(f"quire: {error}; {found.why}, which is taken as it is")
        return found
    variant, why = choose(source, repository, name)
    notice(f"quire: {why}")
    report = _Report(variant, notice)
    path = source.fetch(repository, variant, report.fetched, lambda line: notice(f"quire: {line}"))
    report.finish()
    return Found(path, variant.bytes, variant.quant, why)


class _Report:
    """Percentage and rate: a bar on a terminal, else a line a quarter."""

    def __init__(self, variant: Variant, notice: Notice) -> None:
        self._total = variant.bytes
        self._notice = notice
        self._bar = ProgressBar(variant.bytes, estimate=True)
        self._begin: tuple[float, int] | None = None  # when the first bytes came, and of how many
        self._quarter = 0

    def fetched(self, done: int) -> None:
        now = time.monotonic()
        if self._begin is None:
            self._begin = (now, done)
            self._quarter = done * _QUARTER // self._total
        text = self._text(done, now)
        self._bar.update(done, text)
        if not self._bar.is_shown and done * _QUARTER // self._total > self._quarter:
            self._quarter = done * _QUARTER // self._total
            self._notice(f"quire: {text}")

    def _text(self, done: int, now: float) -> str:
        assert self._begin is not None
        seconds = max(now - self._begin[0], 1e-3)
        rate = format_bytes((done - self._begin[1]) / seconds)
        return f"{done / self._total:.0%} of {format_bytes(self._total)}, {rate}/s"

    def finish(self) -> None:
        if self._begin is not None:
            self._bar.finish(self._total, self._text(self._total, time.monotonic()))


# ---- which quant suits the machine


class Need(NamedTuple):
    """Predicted bytes of memory of one variant, by the header of another of the same model."""

    forecast: CpuForecast | None  # None where no header could be read
    of: Variant

    def bytes(self, variant: Variant) -> int:
        if self.forecast is None:
            return variant.bytes + DEFAULT_KV_BYTES
        cache = min(self.forecast.kv, DEFAULT_KV_BYTES)
        rest = cache + self.forecast.workspace + (self.forecast.process or 0)
        return self.forecast.weights + variant.bytes - self.of.bytes + rest


def choose(source: Hub, repository: Repository, name: ModelName) -> tuple[Variant, str]:
    """The variant to fetch, and why."""
    found = hub.choose_named(name, repository.files)
    if not found:
        raise ModelFileError(_nothing(repository, name))
    if name.quant is not None or name.file is not None or len(found) == 1:
        why = "as named" if name.quant or name.file else "all that the repository has"
        return found[0], f"{name}: {found[0].quant}, {format_bytes(found[0].bytes)}, {why}"
    ranked = _ranked(found, named=False)
    if not ranked:
        raise UnsupportedModelError(
            f"{name} has no quant that quire runs: {_listed(found)}; a name with :QUANT takes one "
            "all the same"
        )
    need = _need(source, repository, ranked[0])
    available = available_memory()
    fitting = [one for one in ranked if available is None or need.bytes(one) <= available]
    if not fitting:
        assert available is not None
        raise ConfigError(
            f"no quant of {name} fits into the {format_bytes(available)} of memory that are "
            f"available: the smallest, {ranked[-1].quant}, would take "
            f"{format_bytes(need.bytes(ranked[-1]))}. Take a smaller model; a name with :QUANT is "
            f"fetched all the same ({_listed(found)})"
        )
    return fitting[0], _why(name, ranked, fitting[0], need, available)


def _why(
    name: ModelName, ranked: list[Variant], taken: Variant, need: Need, available: int | None
) -> str:
    room = "an unknown amount" if available is None else format_bytes(available)
    how = "by its header" if need.forecast is not None else "by its size"
    first = ranked[0]
    is_smaller = taken != first
    smaller = f"{first.quant} would take {format_bytes(need.bytes(first))}; " * is_smaller
    return (
        f"{name}: {smaller}{taken.quant} takes {format_bytes(need.bytes(taken))} of memory, "
        f"predicted {how}, of {room} available; other quants by {name.repo}:QUANT"
    )


def _nothing(repository: Repository, name: ModelName) -> str:
    found = hub.variants(repository.files)
    if not found:
        return f"{repository.name} holds no model that quire reads: no GGUF file, no safetensors"
    files = ", ".join(one.files[0].path for one in found)
    return f"{name} is not there: {repository.name} has " + (
        files if name.file is not None else _listed(found)
    )


def _listed(found: list[Variant]) -> str:
    return ", ".join(f"{one.quant} ({format_bytes(one.bytes)})" for one in found)


def _ranked(found: list[Variant], *, named: bool) -> list[Variant]:
    """The usual quant, then smaller ones, largest first. `named`: then the larger ones too."""
    able = [one for one in found if _runs(one.quant)] or (found if named else [])
    if not able:
        return []
    usual = min(able, key=_rank)
    smaller = [one for one in able if one is not usual and one.bytes <= usual.bytes]
    larger = [one for one in able if named and one.bytes > usual.bytes]
    return [usual, *reversed(smaller), *larger]


def _rank(variant: Variant) -> tuple[int, int]:
    known = variant.quant in _USUAL_QUANTS
    place = _USUAL_QUANTS.index(variant.quant) if known else len(_USUAL_QUANTS)
    return place, variant.bytes


def _runs(quant: str) -> bool:
    """Whether quire has the block format that a quant is named after; unknown names may do."""
    name = quant.removeprefix("UD-")
    name = _OTHER_SPELLINGS.get(name, _MIXES.get(name, name))
    known = {one.name for one in FORMATS}
    is_quant = hub.quant_of(f"{quant}.gguf") is not None
    return not is_quant or name in known or name.rpartition("_")[0] in known - {"F16", "F32"}


def _need(source: Hub, repository: Repository, variant: Variant) -> Need:
    """What a variant takes, by `quire inspect`'s prediction from its header alone."""
    if variant.is_folder:
        return Need(None, variant)
    for num_bytes in _HEADER_BYTES:
        with tempfile.TemporaryDirectory(prefix="quire-header-") as folder:
            first = Path(folder) / Path(variant.files[0].path).name
            for file in variant.files:
                start = source.fetch_start(repository, file, min(num_bytes, file.size))
                _write_sparse(first.with_name(Path(file.path).name), start, file)
            found = inspect_model(str(first), first, trusted=False)
        if found.memory is not None:
            return Need(found.memory.cpu, variant)
    if found.isolation is not None and isinstance(found.isolation.refusal, UnsupportedModelError):
        raise UnsupportedModelError(f"{repository.name}: {found.isolation.refusal}")
    return Need(None, variant)


def _write_sparse(path: Path, start: bytes, file: HubFile) -> None:
    """A file of the right size with its start alone; the rest takes no room and is never read."""
    with path.open("xb") as target:
        target.write(start)
        target.truncate(file.size)


# ---- quire pull


def pull(args: argparse.Namespace) -> int:
    if args.name in defaults.DEFAULT_MODELS and not args.list:
        path = defaults.pull(args.name, lambda line: print_progress(f"quire: {line}"), recheck=True)
        found = Found(path, path.stat().st_size, None, "")
    else:
        name = hub.parse_name(args.name)
        if name is None:
            raise ModelFileError(_unknown(args.name))
        if args.list:
            return _list_quants(name, as_json=args.json)
        found = fetch(name, print_progress)
    if args.json:
        report = {"name": args.name, "path": str(found.path), "bytes": found.bytes}
        print_json(report | ({"quant": found.quant, "why": found.why} if found.quant else {}))
    else:
        print(found.path)
    return 0


def _list_quants(name: ModelName, *, as_json: bool) -> int:
    source = Hub()
    repository = source.repository(name.repo)
    found = hub.variants(repository.files)
    if not found:
        raise ModelFileError(_nothing(repository, name))
    ranked = _ranked(found, named=False)
    need = _need(source, repository, ranked[0]) if ranked else None
    available = available_memory()
    rows = [_quant_row(one, need, available) for one in found]
    if as_json:
        print_json([row._asdict() for row in rows])
        return 0
    for row in rows:
        size = format_bytes(row.bytes)
        print(printable(f"{row.quant:<12} {size:>10}   {row.text}"))
    return 0


class QuantRow(NamedTuple):
    """A quant as `quire pull --list` prints it."""

    quant: str
    bytes: int
    memory: int | None  # predicted; None for a quant that quire does not run
    fits: bool

    @property
    def text(self) -> str:
        if self.memory is None:
            return "quire does not run it"
        return f"{format_bytes(self.memory)} of memory" + ", more than is available" * (
            not self.fits
        )


def _quant_row(variant: Variant, need: Need | None, available: int | None) -> QuantRow:
    takes = need.bytes(variant) if need is not None and _runs(variant.quant) else None
    fits = takes is not None and (available is None or takes <= available)
    return QuantRow(variant.quant, variant.bytes, takes, fits)


# ---- quire models and quire rm


class Entry(NamedTuple):
    """A model on this machine."""

    name: str
    bytes: int
    origin: str
    path: Path
    cached: tuple[Snapshot, Variant] | None = None  # where it is in the hub's cache


def entries() -> Iterator[Entry]:
    """Every model on this machine that a name finds."""
    for name, model in defaults.DEFAULT_MODELS.items():
        path = defaults.cache_folder() / model.file_name
        if path.is_file():
            yield Entry(name, path.stat().st_size, "quire", path)
    for repo in hub.cached_repositories():
        for snapshot in hub.snapshots(repo):
            for one in hub.variants(snapshot.files):
                cached = (snapshot, one)
                yield Entry(f"{repo}:{one.quant}", one.bytes, "hub", snapshot.path(one), cached)
    for other in hub.other_models():
        yield Entry(other.name, other.bytes, other.origin, other.path)


def show(args: argparse.Namespace) -> int:
    found = list(entries())
    if args.json:
        keys = ("name", "bytes", "origin", "path")
        print_json([{key: _plain(getattr(entry, key)) for key in keys} for entry in found])
        return 0
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        size = format_bytes(entry.bytes)
        print(printable(f"{entry.name:<{width}}  {size:>10}  {entry.origin:<9}  {entry.path}"))
    if not found:
        print("no models yet: `quire pull` fetches one")
    return 0


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def remove(args: argparse.Namespace) -> int:
    name = hub.parse_name(args.name)
    found = [entry for entry in entries() if _is_meant(entry, args.name, name)]
    if not found:
        raise ModelFileError(f"no model here is named {args.name}: `quire models` lists them")
    own = [entry for entry in found if entry.origin in ("quire", "hub")]
    if not own:
        raise ModelFileError(_of_others(found[0]))
    freed = 0
    for entry in own:
        try:
            freed += _remove(entry)
        except OSError as error:
            raise ModelFileError(f"cannot remove {entry.path}: {error.strerror}") from error
    names = [entry.name for entry in own]
    if args.json:
        print_json({"removed": names, "bytes": freed})
    else:
        print(printable(f"removed {', '.join(names)}: {format_bytes(freed)}"))
    return 0


def _is_meant(entry: Entry, text: str, name: ModelName | None) -> bool:
    if entry.cached is None or name is None:
        return text.removeprefix("ollama:") in (entry.name, entry.name.removesuffix(":latest"))
    snapshot, variant = entry.cached
    return snapshot.repo == name.repo and variant in hub.choose_named(name, snapshot.files)


def _of_others(entry: Entry) -> str:
    how = f"`ollama rm {entry.name}`" if entry.origin == "ollama" else f"delete {entry.path}"
    return f"{entry.name} is {entry.origin}'s, and quire removes its own alone: {how}"


def _remove(entry: Entry) -> int:
    if entry.cached is not None:
        return hub.remove(*entry.cached)
    entry.path.unlink()
    return entry.bytes
